"""The tests: a mirror of the package's folders."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The package's folder, which is the repository's."""
