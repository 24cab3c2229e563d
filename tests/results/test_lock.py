"""Locks go with the process that holds them, and what a killed process leaves behind stops nobody."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lrbench.results import lock
from lrbench.tests.command_line import start_python

HOLD_A_LOCK = """
import sys, time
from pathlib import Path
from lrbench.results import lock
with lock.hold(Path(sys.argv[1]), "it"):
    print(flush=True)
    time.sleep(60)
"""
MAKE_FOLDER = """
import time
from lrbench.results import lock
print(lock.temporary_folder(), flush=True)
time.sleep(60)
"""


@contextmanager
def another_process(code: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run code in a process of its own until the end; yield it with the first line that it prints."""
    process = start_python(code, *arguments, TMPDIR=tempfile.gettempdir())
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def before_locking(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen between the opening of the next file that is locked and its locking."""
    flock = fcntl.flock

    def lock_late(*arguments: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        act()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", lock_late)


def test_the_holder_is_named_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with another_process(HOLD_A_LOCK, path) as (process, _):
        with pytest.raises(lock.HeldError, match=f"the folder x is in use by another lrbench: process {process.pid} "):
            lock.hold(path, "the folder x").__enter__()
        process.kill()
        process.wait()
        assert path.exists()
        with lock.hold(path, "the folder x"):
            pass
    assert not path.exists()


def test_who_waits_is_told_once_and_gets_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "POLL_S", 0.01)
    told: list[str] = []
    path = tmp_path / "lock"
    with another_process(HOLD_A_LOCK, path) as (process, _):
        threading.Timer(0.3, process.kill).start()
        with lock.hold(path, "it", told.append):
            assert len(told) == 1


def test_a_lock_given_up_between_opening_and_locking_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was opened is gone by then: a lock on it would keep nobody out."""
    path = tmp_path / "lock"
    first = lock.hold(path, "it")
    first.__enter__()
    before_locking(monkeypatch, lambda: first.__exit__(None, None, None))
    with lock.hold(path, "it"), pytest.raises(lock.HeldError):
        lock.hold(path, "it").__enter__()


def test_temporary_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock.temporary_folder.cache_clear()
    not_ours = tmp_path / "lrbench-profile-x"
    not_ours.mkdir()
    with another_process(MAKE_FOLDER) as (dead, left), another_process(MAKE_FOLDER) as (_, alive):
        (Path(left) / "worker").mkdir()
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert Path(left).exists()
        own = lock.temporary_folder()
        assert set(tmp_path.iterdir()) == {not_ours, Path(alive), own}
    lock.temporary_folder.cache_clear()
