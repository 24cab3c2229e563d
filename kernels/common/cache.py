"""The folder for what later runs reuse: compiled programs, this CPU's calibration."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "LRBENCH_CACHE"


def cache_folder() -> Path:
    """Return the folder, which need not exist: $LRBENCH_CACHE, else $XDG_CACHE_HOME/lrbench or ~/.cache/lrbench."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lrbench"
