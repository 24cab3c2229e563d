"""What the tests of commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

Lrbench = Callable[..., tuple[int, str, str]]
"""The fixture ``lrbench``: arguments -> exit code, standard output, standard error."""

CALL = (sys.executable, "-c", "from lrbench.cli import main; main()")
"""The command line in a process of its own, for what only a process shows."""

ENVIRON = {**os.environ, "PYTHONSAFEPATH": "1", "NO_COLOR": "1", "COLUMNS": "200"}


def script(path: Path, text: str) -> Path:
    """Write a program of the shell's, unless the text says whose it is, and return it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def one_line(err: str) -> str:
    """Return what was wrong; it must be one line beside what is said of --gpu and --roofs."""
    (line,) = [each for each in err.splitlines() if not each.startswith(("--gpu", "--roofs"))]
    assert line.startswith("lrbench: ")
    return line
