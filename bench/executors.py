"""Which worker runs which case: one queue of cases, and the workers of this machine's devices that take from it."""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

from ..kernels.baselines.spec import Baseline
from ..results.lock import hold
from .environment import Environment, gpu_uuids
from .plan import PlannedCase
from .workers import Limits, ReplaceableWorker, Reply, Started, WorkerStoppedError, ask_machine

Outcomes = Generator[tuple[PlannedCase, Reply], None, None]


def provider_of(item: PlannedCase) -> Hashable:
    """Return what is different for cases that get processes of their own: whose code it is.

    A process imports a package once, and what it does there disturbs no other's.
    """
    return item.case.provider


def autotunes(item: PlannedCase) -> bool:
    """Return whether a case's process makes choices that others of its package rely on."""
    return isinstance(item.target, Baseline) and item.target.autotunes


def problem_of(item: PlannedCase) -> Hashable:
    """Return what is different for cases that are checked against different references."""
    case = item.case
    sizes = tuple((name, size) for name, size in case.sizes.items() if name != "chunk_size")
    return case.op, case.impl, case.dtype, sizes


class Queue:
    """Cases that are left, taken by several workers.

    A worker goes on with the problem whose reference it has, then with the package for which it has a process; then it
    takes a package that nobody has begun, in the order given; then it helps with the one of which most is left. Where a
    package autotunes, all of its cases stay with the worker that began them: what it chose is in that process.

    Args:
        process_of: cases for which it returns the same may share a process.
        unit_of: of these, those for which it returns the same are best run by one worker.
    """

    def __init__(
        self,
        planned: Sequence[PlannedCase],
        process_of: Callable[[PlannedCase], Hashable] = provider_of,
        unit_of: Callable[[PlannedCase], Hashable] = problem_of,
    ) -> None:
        self._process_of, self._unit_of = process_of, unit_of
        self._left: dict[Hashable, dict[Hashable, deque[PlannedCase]]] = {}
        self._begun: set[Hashable] = set()
        self._units_begun: set[tuple[Hashable, Hashable]] = set()
        self._pinned = {process_of(item) for item in planned if autotunes(item)}
        self._lock = threading.Lock()
        for item in planned:
            self._left.setdefault(process_of(item), {}).setdefault(unit_of(item), deque()).append(item)

    def take(self, before: PlannedCase | None = None) -> PlannedCase | None:
        """Return the next case for a worker whose last one was ``before``; None when nothing is left for it."""
        with self._lock:
            process = None if before is None else self._process_of(before)
            if process not in self._left:
                process = self._choose()
            if process is None:
                return None
            self._begun.add(process)
            units = self._left[process]
            unit = None if before is None else self._unit_of(before)
            if unit not in units:
                unit = next((each for each in units if (process, each) not in self._units_begun), None)
            if unit is None:
                unit = max(units, key=lambda each: len(units[each]))
            self._units_begun.add((process, unit))
            item = units[unit].popleft()
            if not units[unit]:
                del units[unit]
            if not units:
                del self._left[process]
            return item

    def _choose(self) -> Hashable | None:
        for process in self._left:
            if process not in self._begun:
                return process
        shared = [process for process in self._left if process not in self._pinned]
        return max(shared, key=lambda process: sum(map(len, self._left[process].values())), default=None)

    def put_back(self, item: PlannedCase) -> None:
        """Let another worker run a case whose worker is lost."""
        with self._lock:
            process, unit = self._process_of(item), self._unit_of(item)
            units = self._left.get(process, {})
            self._left[process] = {unit: deque([item, *units.pop(unit, ())]), **units}
            self._begun.discard(process)
            self._units_begun.discard((process, unit))

    def others_wait(self) -> bool:
        """Return whether there are cases for a process that no worker has yet."""
        with self._lock:
            return not self._begun.issuperset(self._left)

    def may_share(self, item: PlannedCase, before: PlannedCase) -> bool:
        """Return whether a case may run in the process that ran another."""
        return self._process_of(item) == self._process_of(before)


class Executor(Protocol):
    """Runs cases in worker processes and yields outcomes as they come; a context manager that ends these."""

    def __enter__(self) -> Executor: ...

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None: ...

    def environment(self) -> Environment:
        """Return where cases are run, as a worker sees it; raises as :func:`.workers.ask_machine`."""
        ...

    def run(self, cases: Queue, limits: Limits, started: Started) -> Outcomes:
        """Yield every case with its outcome; closing the iterator stops workers that are busy."""
        ...


def run_cases(
    cases: Queue, limits: Limits, started: Started, session: ReplaceableWorker, stop: threading.Event | None = None
) -> Outcomes:
    """Run cases one after the other until none is left, each process of the queue in a worker of its own."""
    before: PlannedCase | None = None
    session.start()
    with contextlib.suppress(WorkerStoppedError):
        while (stop is None or not stop.is_set()) and (item := cases.take(before)) is not None:
            started(item)
            if before is not None and not cases.may_share(item, before):
                session.close()
                before = None
            if before is None and limits.device_kind == "cuda" and limits.action == "run" and cases.others_wait():
                # While this one's first case is checked, the next imports torch, on another core.
                session.start_spare()
            (reply,) = session.run([item], limits)
            yield item, reply
            before = item


class LocalExecutor:
    """Runs cases on this machine's devices: one worker at a time per device, so that nothing disturbs what is timed.

    Workers stay until it is closed: it is a context manager.

    Args:
        devices: how many GPUs take cases.
        workers_per_device: more than one only for work that is not timed.
    """

    def __init__(self, *, devices: int = 1, workers_per_device: int = 1) -> None:
        self.devices = devices
        self._stop = threading.Event()
        environs: Sequence[dict[str, str]] = [{}]
        if devices > 1:
            environs = [{"CUDA_VISIBLE_DEVICES": name} for name in visible_gpus(devices)]
        self._sessions = [ReplaceableWorker(each, self._stop) for each in environs for _ in range(workers_per_device)]
        # A worker dies with the thread that started it, so threads stay, too.
        self._threads = ThreadPoolExecutor(len(self._sessions))

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for session in self._sessions:
            # Each takes a second to end; the threads may be gone already.
            with contextlib.suppress(RuntimeError):
                self._threads.submit(session.__exit__, kind, *rest)
        self._threads.shutdown()

    def start(self) -> None:
        """Start all workers and do not wait for them."""
        for session in self._sessions:
            session.start()

    def ask(self, function: str, **arguments: Any) -> dict[str, Any]:
        """Return what a function finds out, see :func:`.workers.ask_machine`; of one device, its worker does."""
        return ask_machine(function, self._sessions[0] if self.devices == 1 else None, **arguments)

    def environment(self) -> Environment:
        """See :class:`Executor`."""
        return Environment(**self.ask("bench.environment:environment_here"))

    def run(self, cases: Queue, limits: Limits, started: Started) -> Outcomes:
        """See :class:`Executor`."""
        if len(self._sessions) == 1:
            yield from run_cases(cases, limits, started, self._sessions[0])
            return
        done: queue.SimpleQueue[tuple[PlannedCase, Reply] | BaseException | None] = queue.SimpleQueue()

        def serve(session: ReplaceableWorker) -> None:
            try:
                for outcome in run_cases(cases, limits, started, session, self._stop):
                    done.put(outcome)
            except BaseException as error:  # noqa: BLE001, handed to the caller's thread
                done.put(error)
            finally:
                done.put(None)

        self._stop.clear()
        serving = [self._threads.submit(serve, session) for session in self._sessions]
        try:
            running = len(serving)
            while running:
                outcome = done.get()
                if outcome is None:
                    running -= 1
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    yield outcome
        finally:
            self._stop.set()
            wait(serving)


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
