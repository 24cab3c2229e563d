"""Worker processes on this machine: start one, ask it with a deadline, say how it died, and replace it.

Parent and worker talk over a socket pair that only the two of them hold (:mod:`multiprocessing.connection` over an
inherited descriptor): messages are JSON, nothing is unpickled, and nothing that a package prints gets between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from ...analysis.accelerators import known as accelerators
from ...results.lock import temporary_folder
from ..environment import ROOT, Environment, worker_settings
from ..plan import PlannedCase
from ..worker.protocol import SERVE, STACK_FILE, STACK_SIGNAL, Reply, RunLimits, encode_request, not_measured

START_TIMEOUT_S = 300.0
POLL_S = 0.2
MAX_WAIT_S = 3600.0
"""The longest single wait for a reply; poll does not take infinity."""

STACK_WAIT_S = 1.0

STARTING, ELSEWHERE = "starting workers, imports", "failed cases, messages"
"""What the seconds of a case went into that its worker does not count."""

Started = Callable[[PlannedCase], None]
"""Called when a case starts, so that the progress display can name it."""


class WorkerLostError(Exception):
    """The worker is gone without an answer: it died (status crash), or was late and was killed (status timeout)."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class WorkerStoppedError(Exception):
    """The sweep is ending; the worker was killed over a case that has no outcome."""


class WorkerProcess:
    """A fresh Python process running :mod:`.serve`, in a session of its own so that its children die with it.

    Args:
        environ: variables added to the worker's environment (which GPU it sees, ...).
        folder: what comes first on its path, to import a Triton from; None: the installed one is imported.

    Creating one does not wait until it is up; the first request does. After :meth:`kill`, or an error of :meth:`ask`,
    the process has ended and its files are removed.

    Attributes:
        waited_s: seconds for which its first request waited until it was up.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, folder: str | None = None) -> None:
        self.waited_s: float | None = None
        self._connection, theirs = Pipe()
        self._folder = tempfile.TemporaryDirectory(dir=temporary_folder(), prefix="worker-")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed with the worker
        with theirs:
            # The working directory must not be the repository: before Python 3.11 it would be on sys.path.
            self._process = subprocess.Popen(
                (sys.executable, "-m", SERVE, "socket", str(theirs.fileno()), str(os.getpid())),
                env={**os.environ, **worker_settings(environ, folder)},
                cwd=self._folder.name,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ask(
        self, request: Mapping[str, Any], timeout_s: float, *, stop: threading.Event | None = None
    ) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            WorkerLostError: the process ended or did not come up, or sent no reply within ``timeout_s``.
            WorkerStoppedError: ``stop`` was set meanwhile.
        """
        if self.waited_s is None:
            began = time.monotonic()
            self._receive(START_TIMEOUT_S, stop)
            self.waited_s = time.monotonic() - began
        try:
            self._connection.send_bytes(json.dumps(request).encode())
        except OSError:
            raise WorkerLostError("crash", self._describe_end()) from None
        return self._receive(timeout_s, stop)

    def _receive(self, timeout_s: float, stop: threading.Event | None) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        longest = MAX_WAIT_S if stop is None else POLL_S
        while not (stop is not None and stop.is_set()):
            left = deadline - time.monotonic()
            if left <= 0:
                where = self._describe_stack()
                self.kill()
                raise WorkerLostError("timeout", f"no result within {timeout_s:g} s{where}")
            try:
                if self._connection.poll(min(left, longest)):
                    return json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                raise WorkerLostError("crash", self._describe_end()) from None
        self.kill()
        raise WorkerStoppedError

    def _describe_stack(self) -> str:
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
        # The worker writes line by line: the stack is complete when the file stops growing.
        while (not text or text != last) and time.monotonic() < deadline:
            time.sleep(0.05)
            last, text = text, stack.read_text(errors="replace")
        frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', text)
        if not frames:
            return ""
        package = str(ROOT)
        own = next((frame for frame in frames if frame[0].startswith(package)), frames[0])
        shown = (
            f"{function} ({'/'.join(Path(path).parts[-2:])}:{line})"
            for path, line, function in dict.fromkeys((frames[0], own))
        )
        return f"; it was in {', called by '.join(shown)}"

    def _describe_end(self) -> str:
        """Return how the process ended, and clean up after it."""
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
            return "the worker closed its pipe without ending and was killed"
        last = self._last_error()
        output = f"; its output: {last}" if last else ""
        self.kill()
        if code < 0:
            hint = " (as the system's out-of-memory killer does)" if -code == signal.SIGKILL else ""
            return f"the process was ended by {signal.Signals(-code).name}{hint}{output}"
        return f"the process ended with exit code {code}{output}"

    def _last_error(self) -> str:
        """Return the last line of output that names an error, else the last line."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - 16384))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if "error" in line.lower() or "assert" in line.lower()]
        return " ".join(((named or lines or [""])[-1]).split())[:300]

    def close(self) -> None:
        """End the worker: it stops when its requests end, and is killed if it does not."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self.kill()

    def kill(self) -> None:
        """Kill the worker and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._log.close()
        self._folder.cleanup()


class ReplaceableWorker(contextlib.AbstractContextManager["ReplaceableWorker"]):
    """A worker process that starts when it is first asked and is replaced after a crash, a hang or a lost device.

    The cases that it was asked for then are not tried again. Use as a context manager: an exception inside kills the
    worker, and whatever it is busy with. Starting one takes seconds to import torch: :meth:`start` does so beforehand.
    Each Triton has a process of its own, which stays while the others are asked. They take turns.

    Args:
        environ: as of :class:`WorkerProcess`.
        stop: ends a request that is under way, with WorkerStoppedError.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, stop: threading.Event | None = None) -> None:
        self._environ, self._stop = environ, stop
        self._workers: dict[str | None, WorkerProcess] = {}
        self._spares: dict[str | None, WorkerProcess] = {}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            _end(self._workers, WorkerProcess.kill)
        self.close()
        _end(self._spares, WorkerProcess.kill)

    def start(self, folder: str | None = None) -> None:
        """Start the worker of a folder's Triton, unless there is one, and do not wait for it."""
        if folder not in self._workers:
            spare = self._spares.pop(folder, None)
            self._workers[folder] = spare or WorkerProcess(self._environ, folder)

    def start_spare(self, folder: str | None = None) -> None:
        """Start the worker, unless there is one, and the one that will replace it."""
        self.start(folder)
        if folder not in self._spares:
            self._spares[folder] = WorkerProcess(self._environ, folder)

    def close(self) -> None:
        """End the workers; the next request starts another."""
        _end(self._workers, WorkerProcess.close)

    def run(self, items: Sequence[PlannedCase], limits: RunLimits) -> list[Reply]:
        """Return the cases' outcomes, in order; if the process does not survive, all of them have that outcome."""
        began = time.monotonic()
        request = encode_request(items, limits)
        outcomes, waited_s = self._ask(request, limits.timeout_s * len(items), len(items), items[0].folder)
        seconds = outcomes[0].setdefault("seconds", {})
        seconds[STARTING] = waited_s
        seconds[ELSEWHERE] = time.monotonic() - began - sum(seconds.values())
        return outcomes

    def call(self, function: str, **arguments: Any) -> dict[str, Any]:
        """Return what ``function`` returns, "module:function" relative to the package, called with the worker.

        Args:
            arguments: what else it takes; as what it returns, JSON must hold it.

        Raises:
            RuntimeError: it raised an exception, or the process died.
        """
        outcome = self.outcome(function, MAX_WAIT_S, **arguments)
        if outcome["status"] != "ok":
            raise RuntimeError(f"{function.partition(':')[2]} failed: {outcome['reason']}")
        return outcome["columns"]

    def outcome(self, function: str, timeout_s: float, **arguments: Any) -> Reply:
        """Return what :meth:`call` returns as the columns of an outcome, or how the function or the process ended."""
        (outcome,), _ = self._ask({"function": function, "arguments": arguments}, timeout_s, 1)
        return outcome

    def _ask(
        self, request: Mapping[str, Any], timeout_s: float, number: int, folder: str | None = None
    ) -> tuple[list[Reply], float]:
        """Return a request's ``number`` of outcomes, and the seconds that it waited until the worker was up."""
        self.start(folder)
        worker = self._workers.pop(folder)
        up = worker.waited_s is not None
        try:
            reply = worker.ask(request, timeout_s, stop=self._stop)
        except WorkerLostError as error:
            outcomes = [not_measured(error.status, str(error)) for _ in range(number)]
        except WorkerStoppedError:
            raise
        except BaseException:
            worker.kill()
            raise
        else:
            outcomes = reply["outcomes"]
            if reply["usable"]:
                self._workers[folder] = worker
            else:
                worker.kill()
        return outcomes, 0.0 if up else worker.waited_s or 0.0


def _end(workers: dict[str | None, WorkerProcess], how: Callable[[WorkerProcess], None]) -> None:
    while workers:
        how(workers.popitem()[1])


def ask_machine(function: str, session: ReplaceableWorker | None = None, **arguments: Any) -> dict[str, Any]:
    """Return what a function finds out in a worker, so that this process neither imports torch nor holds a GPU.

    Args:
        session: asks this worker, which goes on; None asks one that ends.

    Raises:
        RuntimeError: torch cannot be imported or the driver fails; the message carries the end of the output.
        ValueError: the user's accelerator file is bad.
    """
    accelerators.known_accelerators()
    try:
        with nullcontext(session) if session is not None else ReplaceableWorker() as asked:
            return asked.call(function, **arguments)
    except RuntimeError as error:
        raise RuntimeError(f"cannot find out what this machine is: {error}") from None


def probe_environment(session: ReplaceableWorker | None = None) -> Environment:
    """Return the environment that worker processes see; arguments and exceptions as those of :func:`ask_machine`."""
    return Environment(**ask_machine("bench.environment:environment_here", session))
