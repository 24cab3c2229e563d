"""Locks between processes: on a folder that a sweep writes into, on a GPU that is timed, on temporary folders.

A lock is a file that its holder has locked (flock) and in which it says who it is. The lock ends with the process,
however that ends; a file that is left behind locks nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import IO

LOCK_FILE = ".lrbench.lock"
POLL_S = 0.5
TEMPORARY = "lrbench-"
"""What the names of temporary folders begin with."""


class HeldError(ValueError):
    """Another process holds the lock; the message names it."""


@contextlib.contextmanager
def hold(path: Path, what: str, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock that is the file ``path``.

    Args:
        what: what is locked, for the message, such as "the folder results/local".
        wait: called once with a message that says who holds the lock, which is then waited for; None: raise instead.

    Raises:
        HeldError: another process holds the lock.
    """
    if (file := _lock(path)) is None:
        message = f"{what} is in use by another lrbench: {_holder(path)}"
        if wait is None:
            raise HeldError(message)
        wait(message)
        while (file := _lock(path)) is None:
            time.sleep(POLL_S)
    with file:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _lock(path: Path) -> IO[str] | None:
    """Return the lock's file, locked, with the holder in it; None where another process has it locked."""
    try:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115, held open for the lock
    except PermissionError:
        # Another user's, in a folder where only its owner may write to a file: it can be locked all the same.
        file = open(path, encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    # The holder before may have removed it between the opening and the lock.
    if os.fstat(file.fileno()).st_nlink == 0:
        file.close()
        return _lock(path)
    if file.writable():
        since = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S}"
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        file.truncate(0)
        file.write(json.dumps(holder))
        file.flush()
    return file


def _holder(path: Path) -> str:
    """Return who holds a lock."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']} UTC"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not said which"


@cache
def temporary_folder() -> Path:
    """Return this process's folder for temporary files, removed when it exits.

    A process that is killed leaves its folder behind; the next one to ask removes it.
    """
    top = Path(tempfile.gettempdir())
    for left in top.glob(f"{TEMPORARY}*/{LOCK_FILE}"):
        with contextlib.suppress(OSError):
            if left.stat().st_uid == os.getuid() and (file := _lock(left)):
                _remove(left.parent, os.getpid(), file)
    # Renamed only when it is locked: another process would take an unlocked one for one left behind.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{TEMPORARY}", dir=top))
    held = _lock(unlocked / LOCK_FILE)
    folder = unlocked.rename(top / unlocked.name[1:])
    atexit.register(_remove, folder, os.getpid(), held)
    return folder


def _remove(folder: Path, owner: int, held: IO[str] | None) -> None:
    """Remove a temporary folder and give up its lock, unless this is a fork of the owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            held.close()
