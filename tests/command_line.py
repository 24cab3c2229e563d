"""What the tests of commands share."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from lrbench.results.toml_tables import read_toml
from lrbench.tests import ROOT

Lrbench = Callable[..., tuple[int, str, str]]
"""The fixture ``lrbench``: a command as it is typed, further arguments -> exit code, standard output and error."""

CALL = (sys.executable, "-c", "from lrbench.cli import main; main()")
"""The command line in a process of its own, for what only a process shows."""

ENVIRON = {**os.environ, "PYTHONSAFEPATH": "1", "NO_COLOR": "1", "COLUMNS": "200"}


def reader_leaves(*command: str) -> tuple[int, str]:
    """Run a command in a process whose standard output nobody reads; return its exit code and standard error."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        return process.wait(timeout=240), errors


def run_python(code: str, *arguments: object, **options: Any) -> str:
    """Run code that must succeed in a process of its own; return what it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    how = {"capture_output": True, "text": True, "env": ENVIRON, "timeout": 240, **options}
    finished = subprocess.run(command, **how)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def start_python(code: str, *arguments: object, **environ: str) -> subprocess.Popen[str]:
    """Start code in a process of its own, whose standard output the test reads."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environ = {**os.environ, "PYTHONSAFEPATH": "1", **environ}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)


class Run:
    """Runs commands that must succeed."""

    def __init__(self, lrbench: Lrbench) -> None:
        self._lrbench = lrbench
        self.err = ""

    def __call__(self, *arguments: object) -> str:
        """Return what a command prints; the other stream is in ``err``."""
        code, out, self.err = self._lrbench(*arguments)
        assert code == 0, self.err + out
        return out

    def json(self, *arguments: object) -> Any:
        """Return what a command prints as JSON."""
        return json.loads(self(*arguments, "--format", "json"))


def script(path: Path, text: str) -> Path:
    """Write an executable file and return it: the shell runs it unless the text's first line names another program."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def without_styles(text: str) -> str:
    """Return what a terminal shows, without colours and weights."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def refused(lrbench: Lrbench, *arguments: object) -> str:
    """Run a command that must exit with 2 and print nothing; return the one line that says what is wrong.

    Beside it may stand what is said of --roofs.
    """
    code, out, err = lrbench(*arguments)
    assert (code, out) == (2, ""), err
    (line,) = [each for each in err.splitlines() if not each.startswith("--roofs")]
    assert line.startswith("lrbench: ")
    return line


def refused_commands(kind: str) -> tuple[tuple[str, str], ...]:
    """Return the commands of tests/data/refused.toml that are refused, and what is said of each."""
    pairs = tuple[tuple[str, ...], ...]
    return read_toml(ROOT / "tests/data/refused.toml", {"input": pairs, "usage": pairs}, "commands")[kind]


def full_speed_seconds(work: Callable[[], object]) -> float:
    """Return the processor time that work takes, here and in its processes, on a core that nobody slows down.

    Others that share a core's units, its caches and the memory make it slower: loops whose times are known say by how
    much.
    """
    slow, start = slowness(), os.times()
    work()
    end = os.times()
    return (sum(end[:4]) - sum(start[:4])) / min(slow, slowness())


def slowness() -> float:
    """Return how many times as long as at full speed two loops take, the slower one of them, 1 at least."""
    start, total = time.process_time(), 0
    for n in range(2_000_000):
        total += n * n % 7
    numbers_s = time.process_time() - start
    # Objects in an order that no cache foresees, as in a command's answer.
    start = time.process_time()
    rows = [{"n": n, "name": str(n)} for n in range(100_000)]
    random.Random(0).shuffle(rows)
    rows.sort(key=itemgetter("name"))
    total += sum(map(itemgetter("n"), rows))
    objects_s = time.process_time() - start
    return max(1.0, numbers_s / 0.13, objects_s / 0.095)
