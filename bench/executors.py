"""Which worker runs which case: one queue of cases, and the workers of this machine's devices that take from it."""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..kernels.baselines.spec import Baseline
from ..results.lock import hold
from .environment import Environment, gpu_uuids
from .plan import PlannedCase
from .workers import Limits, ReplaceableWorker, Reply, Started, WorkerStoppedError, probe_environment

Outcomes = Generator[tuple[PlannedCase, Reply], None, None]


def implementation_of(item: PlannedCase) -> Hashable:
    """Return what is different for cases that get processes of their own."""
    return item.case.provider, item.case.impl


class Queue:
    """Cases that are left, taken by several workers.

    A worker goes on with the implementation for which it has a process; then it takes one that nobody has begun, in the
    order given; then it helps with the one of which most is left. The cases of an outside package stay with the worker
    that began them: what its autotuners chose is in that process.

    Args:
        process_of: cases for which it returns the same may share a process.
    """

    def __init__(
        self, planned: Sequence[PlannedCase], process_of: Callable[[PlannedCase], Hashable] = implementation_of
    ) -> None:
        self._process_of = process_of
        self._left: dict[Hashable, deque[PlannedCase]] = {}
        self._begun: set[Hashable] = set()
        self._lock = threading.Lock()
        for item in planned:
            self._left.setdefault(process_of(item), deque()).append(item)

    def take(self, before: PlannedCase | None = None) -> PlannedCase | None:
        """Return the next case for a worker whose last one was ``before``; None when nothing is left for it."""
        with self._lock:
            process = None if before is None else self._process_of(before)
            if process not in self._left:
                process = self._choose()
            if process is None:
                return None
            self._begun.add(process)
            left = self._left[process]
            item = left.popleft()
            if not left:
                del self._left[process]
            return item

    def _choose(self) -> Hashable | None:
        for process in self._left:
            if process not in self._begun:
                return process
        shared = [process for process, left in self._left.items() if not isinstance(left[0].target, Baseline)]
        return max(shared, key=lambda process: len(self._left[process]), default=None)

    def put_back(self, item: PlannedCase) -> None:
        """Let another worker run a case whose worker is lost."""
        with self._lock:
            process = self._process_of(item)
            self._left.setdefault(process, deque()).appendleft(item)
            self._begun.discard(process)

    def may_share(self, item: PlannedCase, before: PlannedCase) -> bool:
        """Return whether a case may run in the process that ran another."""
        return self._process_of(item) == self._process_of(before)


class Executor(Protocol):
    """Runs cases in worker processes and yields outcomes as they come."""

    def environment(self) -> Environment:
        """Return where cases are run, as a worker sees it; raises as :func:`.workers.ask_machine`."""
        ...

    def run(self, cases: Queue, limits: Limits, started: Started) -> Outcomes:
        """Yield every case with its outcome; closing the iterator stops the workers."""
        ...


def run_cases(
    cases: Queue,
    limits: Limits,
    started: Started,
    *,
    environ: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> Outcomes:
    """Run cases one after the other until none is left; closing the iterator kills the worker."""
    item = cases.take()
    with contextlib.suppress(WorkerStoppedError):
        while item is not None:
            with ReplaceableWorker(environ, stop) as session:
                before = item
                while item is not None and cases.may_share(item, before):
                    if stop is not None and stop.is_set():
                        return
                    started(item)
                    (reply,) = session.run([item], limits)
                    yield item, reply
                    before, item = item, cases.take(item)


class LocalExecutor:
    """Runs cases on this machine's devices: one worker at a time per device, so that nothing disturbs what is timed.

    Args:
        devices: how many GPUs take cases.
        workers_per_device: more than one only for work that is not timed.
    """

    def __init__(self, *, devices: int = 1, workers_per_device: int = 1) -> None:
        self.devices = devices
        self.workers_per_device = workers_per_device

    def environment(self) -> Environment:
        """See :class:`Executor`."""
        return probe_environment()

    def run(self, cases: Queue, limits: Limits, started: Started) -> Outcomes:
        """See :class:`Executor`."""
        if self.devices * self.workers_per_device == 1:
            yield from run_cases(cases, limits, started)
            return
        done: queue.SimpleQueue[tuple[PlannedCase, Reply] | BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()

        def serve(environ: Mapping[str, str]) -> None:
            try:
                for outcome in run_cases(cases, limits, started, environ=environ, stop=stop):
                    done.put(outcome)
            except BaseException as error:  # noqa: BLE001, handed to the caller's thread
                done.put(error)
            finally:
                done.put(None)

        environs: Sequence[dict[str, str]] = [{}]
        if self.devices > 1:
            environs = [{"CUDA_VISIBLE_DEVICES": name} for name in visible_gpus(self.devices)]
        threads = [
            threading.Thread(target=serve, args=(environ,), daemon=True)
            for environ in environs
            for _ in range(self.workers_per_device)
        ]
        for thread in threads:
            thread.start()
        try:
            running = len(threads)
            while running:
                outcome = done.get()
                if outcome is None:
                    running -= 1
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    yield outcome
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def visible_gpus(count: int) -> list[str]:
    """Return the names of the first GPUs that workers may see, as CUDA_VISIBLE_DEVICES takes them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(count)] if visible is None else [name.strip() for name in visible.split(",")]
    return [name for name in names if name][:count]


@contextlib.contextmanager
def hold_gpus(count: int = 1, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Keep other lrbench processes of this machine from timing on the first GPUs meanwhile.

    Args:
        wait: see :func:`.lock.hold`.

    Raises:
        HeldError: one is in use.
    """
    with contextlib.ExitStack() as stack:
        for name, uuid in gpu_uuids(visible_gpus(count)).items():
            path = Path(tempfile.gettempdir()) / f"lrbench-{uuid}.lock"
            stack.enter_context(hold(path, f"GPU {name}", wait))
        yield
