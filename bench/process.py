"""The parent's side of a worker process: start it, ask it with a deadline, and say how it died."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .environment import worker_environ

START_TIMEOUT_S = 300.0
POLL_S = 0.2
MAX_WAIT_S = 3600.0
"""The longest single wait for a reply: select takes no infinite one as a number."""

STACK_FILE = "stack"
"""Where a worker writes, in its own folder, which Python functions it is in when it gets STACK_SIGNAL."""

STACK_SIGNAL = signal.SIGUSR1
STACK_WAIT_S = 1.0


class WorkerDiedError(Exception):
    """The worker ended without an answer; the message says how."""


class WorkerTimeoutError(Exception):
    """The worker gave no answer in time and was killed."""


class WorkerStoppedError(Exception):
    """The sweep is ending; the worker was killed over a case that has no outcome."""


class WorkerProcess:
    """A fresh Python process running :mod:`.worker`, in a session of its own so that its children die with it.

    Args:
        environ: variables added to the worker's environment (which GPU it sees, ...).

    Raises:
        WorkerDiedError, WorkerTimeoutError: it did not come up.

    A worker that raised one of these, or was killed, is gone; nothing needs to be cleaned up after it.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        request_read, self._request_write = os.pipe()
        self._reply_read, reply_write = os.pipe()
        self._buffer = b""
        self._folder = tempfile.TemporaryDirectory(prefix="lrbench-worker-")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed with the worker
        try:
            # The working directory must not be the repository: before Python 3.11 it would be on sys.path.
            self._process = subprocess.Popen(
                (sys.executable, "-m", f"{__package__}.worker", str(request_read), str(reply_write)),
                env=worker_environ(dict(environ or {})),
                cwd=self._folder.name,
                pass_fds=(request_read, reply_write),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(request_read)
            os.close(reply_write)
        self._read(START_TIMEOUT_S)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def ask(
        self, request: Mapping[str, Any], timeout_s: float, *, stop: threading.Event | None = None
    ) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            WorkerDiedError: the process ended.
            WorkerTimeoutError: no reply within ``timeout_s``.
            WorkerStoppedError: ``stop`` was set meanwhile.
        """
        try:
            os.write(self._request_write, json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerDiedError(self._bury()) from None
        return self._read(timeout_s, stop)

    def _read(self, timeout_s: float, stop: threading.Event | None = None) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if stop is not None and stop.is_set():
                self.kill()
                raise WorkerStoppedError
            left = deadline - time.monotonic()
            if left <= 0:
                where = self._whereabouts()
                self.kill()
                raise WorkerTimeoutError(f"no result within {timeout_s:g} s{where}")
            if not select.select([self._reply_read], [], [], min(left, MAX_WAIT_S if stop is None else POLL_S))[0]:
                continue
            chunk = os.read(self._reply_read, 1 << 20)
            if not chunk:
                raise WorkerDiedError(self._bury())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _whereabouts(self) -> str:
        """Return in which function the worker is and which of this package's called it, or "" if it does not say.

        It answers by a signal handler in C, also where it waits for a GPU.
        """
        stack = Path(self._folder.name) / STACK_FILE
        if not stack.exists():
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, STACK_SIGNAL)
        deadline = time.monotonic() + STACK_WAIT_S
        text = last = ""
        # It is written line by line, and whole when no more comes.
        while (not text or text != last) and time.monotonic() < deadline:
            time.sleep(0.05)
            last, text = text, stack.read_text(errors="replace")
        frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', text)
        if not frames:
            return ""
        told = [_told(frames[0])]
        package = str(Path(__file__).parent.parent)
        own = next((frame for frame in frames if frame[0].startswith(package)), frames[0])
        if own != frames[0]:
            told.append(_told(own))
        return f"; it was in {', called by '.join(told)}"

    def _bury(self) -> str:
        """Return how the process ended, and clean up after it."""
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
            return "the worker closed its pipe without ending and was killed"
        last = self._telling_output()
        said = f"; its output: {last}" if last else ""
        self.kill()
        if code < 0:
            hint = " (as the system's out-of-memory killer does)" if -code == signal.SIGKILL else ""
            return f"the process was ended by {signal.Signals(-code).name}{hint}{said}"
        return f"the process ended with exit code {code}{said}"

    def _telling_output(self) -> str:
        """The last line of output that names an error, or the last line."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - 16384))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if "error" in line.lower() or "assert" in line.lower()]
        return " ".join(((named or lines or [""])[-1]).split())[:300]

    def close(self) -> None:
        """End the worker: it stops when its requests end, and is killed if it does not."""
        if self._request_write >= 0:
            os.close(self._request_write)
            self._request_write = -1
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        self.kill()

    def kill(self) -> None:
        """Kill the worker and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for descriptor in (self._request_write, self._reply_read):
            if descriptor >= 0:
                os.close(descriptor)
        self._request_write = self._reply_read = -1
        self._log.close()
        self._folder.cleanup()


def _told(frame: tuple[str, str, str]) -> str:
    """Return a function and its place, of a frame as faulthandler writes it."""
    path, line, function = frame
    return f"{function} ({'/'.join(Path(path).parts[-2:])}:{line})"
