"""``python -m lrbench.bench.bars``."""

from __future__ import annotations

from .command import app

app()
