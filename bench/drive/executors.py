"""Which worker runs which case: one queue of cases, and the workers of this machine's devices that take from it."""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...analysis.accelerators.known import visible_gpus
from ...results.lock import hold
from ...results.select import grouped
from ..environment import Environment, gpu_uuids
from ..plan import PlannedCase
from ..worker.protocol import Reply, RunLimits
from ..worker.sustained import LIMIT_S, NOT_SUSTAINED
from .workers import ReplaceableWorker, Started, WorkerStoppedError, probe_environment

Group = tuple[PlannedCase, ...]
"""What a worker is given at once: one case, or several that it times in turn."""

Outcomes = Generator[tuple[Group, list[Reply]], None, None]

Key = tuple[Hashable, Hashable]
"""Groups with the same first part may share a process; those with the same key are a unit of a :class:`Queue`."""

LOST = ("oom", "timeout", "crash")
"""Statuses that a case may owe to those with which it is timed in turn."""

IN_TURN = "in turn"
"""The process of all cases that are timed in turn, as others' is named by their package."""


def queue_key(group: Group) -> Key:
    """Return whose process a group needs, and what the groups that one worker should run have in common.

    Each package gets a process of its own, so that none disturbs another; cases that are timed in turn share one. One
    worker should run all cases of an autotuner, whose choices stay in the process; else those that are checked against
    one reference.
    """
    tuned = tuple(item.case.impl for item in group if item.autotunes)
    return group[0].case.provider if len(group) == 1 else IN_TURN, tuned or group[0].problem


class Queue:
    """The groups of cases that are left. Several workers take from it, each a unit at a time.

    A worker takes its next unit from the package for which it has a process; then from one that nobody has begun, in
    the order given; then from any. Where no unit is left, it helps with the one of which most is left, but not with one
    that autotunes.

    Args:
        key: group -> its process and its unit.
    """

    def __init__(self, groups: Iterable[Group], key: Callable[[Group], Key] = queue_key) -> None:
        self._key = key
        self._left = {each: deque(found) for each, found in grouped(groups, key).items()}
        self._begun: set[Key] = set()
        self._processes_begun: set[Hashable] = set()
        self._lock = threading.Lock()
        self.folders = tuple(dict.fromkeys(group[0].folder for groups in self._left.values() for group in groups))

    def take(self, before: Group | None = None) -> Group | None:
        """Return the next group for a worker whose last one was ``before``; None when nothing is left for it."""
        with self._lock:
            key = None if before is None else self._key(before)
            if key not in self._left:
                key = self._choose(key and key[0])
            if key is None:
                return None
            self._begun.add(key)
            self._processes_begun.add(key[0])
            group = self._left[key].popleft()
            if not self._left[key]:
                del self._left[key]
            return group

    def _choose(self, process: Hashable) -> Key | None:
        if free := [key for key in self._left if key not in self._begun]:
            return min(free, key=lambda key: (key[0] != process, key[0] in self._processes_begun))
        shared = [key for key, left in self._left.items() if not any(item.autotunes for item in left[0])]
        return max(shared, key=lambda key: len(self._left[key]), default=None)

    def put_back(self, group: Group) -> None:
        """Let another worker run a group whose worker is lost."""
        with self._lock:
            key = self._key(group)
            self._left = {key: deque([group, *self._left.pop(key, ())]), **self._left}
            self._begun.discard(key)
            self._processes_begun.discard(key[0])

    def share_a_process(self, one: Group, other: Group) -> bool:
        """Return whether two groups may run in the same process."""
        return self._key(one)[0] == self._key(other)[0]

    def others_wait(self) -> bool:
        """Return whether there are groups for a process that no worker has yet."""
        with self._lock:
            return any(process not in self._processes_begun for process, _ in self._left)


def alone(planned: Iterable[PlannedCase]) -> list[Group]:
    """Return cases as groups of one: each is timed by itself."""
    return [(item,) for item in planned]


def as_taken(groups: Iterable[Group]) -> Iterator[PlannedCase]:
    """Yield cases in the order in which one worker takes them."""
    queued, group = Queue(groups), None
    while group := queued.take(group):
        yield from group


def run_cases(
    queued: Queue, limits: RunLimits, started: Started, session: ReplaceableWorker, stop: threading.Event | None = None
) -> Outcomes:
    """Run groups one after the other until none is left, each process of the queue in a worker of its own.

    Where Tritons are compared, a process of the queue has a worker for each of them.
    """
    before: Group | None = None
    with contextlib.suppress(WorkerStoppedError):
        while (stop is None or not stop.is_set()) and (group := queued.take(before)) is not None:
            for item in group:
                started(item)
            if before is not None and not queued.share_a_process(before, group):
                session.close()
                before = None
            if before is None and limits.device_kind == "cuda" and limits.action == "run" and queued.others_wait():
                # While this one's first case is checked, the next imports torch, on another core.
                for folder in queued.folders:
                    session.start_spare(folder)
            yield group, run_group(session, group, limits)
            before = group


def run_group(session: ReplaceableWorker, group: Group, limits: RunLimits) -> list[Reply]:
    """Return the outcomes of a group's cases; one that had no room beside the others, or died with them, runs alone.

    Load follows in a request of its own: whatever becomes of it, a case that was timed has its time.
    """
    replies = session.run(group, limits)
    if len(group) > 1:
        for n, (item, reply) in enumerate(zip(group, replies, strict=True)):
            if reply["status"] in LOST:
                (replies[n],) = session.run([item], limits)
    for item, reply in zip(group, replies, strict=True):
        if item.sustained and reply["status"] == "ok":
            _sustain(session, item, reply, limits)
    return replies


def _sustain(session: ReplaceableWorker, item: PlannedCase, reply: Reply, limits: RunLimits) -> None:
    """Add the columns of a case under load to its outcome, or why there are none."""
    (found,) = session.run([item], replace(limits, action="sustain", timeout_s=limits.timeout_s + LIMIT_S))
    reply["columns"] |= found["columns"]
    if found["status"] != "ok":
        reply["reason"] = f"{NOT_SUSTAINED}, {found['status']}: {found['reason']}"
    reply["seconds"] = {**reply.get("seconds", {}), "sustained load": sum(found["seconds"].values())}


class LocalExecutor(contextlib.AbstractContextManager["LocalExecutor"]):
    """Runs cases on this machine's devices: one worker at a time per device, so that nothing disturbs what is timed.

    Workers stay until it is closed: it is a context manager.

    Args:
        devices: how many GPUs take cases.
        workers_per_device: more than one only for work that is not timed.
        environ: variables added to the workers' environment.
    """

    def __init__(
        self, *, devices: int = 1, workers_per_device: int = 1, environ: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.devices = devices
        self._stop = threading.Event()
        environs = [environ]
        if devices > 1:
            environs = [{**environ, "CUDA_VISIBLE_DEVICES": name} for name in visible_gpus(devices)]
        self._sessions = [ReplaceableWorker(each, self._stop) for each in environs for _ in range(workers_per_device)]
        # A worker dies with the thread that started it, so threads stay, too.
        self._threads = ThreadPoolExecutor(max(1, len(self._sessions)))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for session in self._sessions:
            # Each takes a second to end; the threads may be gone already.
            with contextlib.suppress(RuntimeError):
                self._threads.submit(session.__exit__, kind, *rest)
        self._threads.shutdown()

    def worker_to_ask(self) -> ReplaceableWorker | None:
        """Return the worker to ask what this machine is; None for one of its own.

        The worker of one device is asked itself. Of several, each sees only its own device: they start while another
        process is asked.
        """
        if self.devices == 1:
            return self._sessions[0]
        for session in self._sessions:
            session.start()
        return None

    def environment(self) -> Environment:
        """Return where cases are run, as a worker sees it; raises as :func:`.workers.ask_machine`."""
        return probe_environment(self.worker_to_ask())

    def call(self, function: str, **arguments: Any) -> dict[str, Any]:
        """Return what a function returns in the first worker, see :meth:`.ReplaceableWorker.call`."""
        return self._sessions[0].call(function, **arguments)

    def run(self, queued: Queue, limits: RunLimits, started: Started = lambda _: None) -> Outcomes:
        """Yield every group with its cases' outcomes; closing the iterator stops workers that are busy."""
        if len(self._sessions) == 1:
            yield from run_cases(queued, limits, started, self._sessions[0])
            return
        done: queue.SimpleQueue[tuple[Group, list[Reply]] | BaseException | None] = queue.SimpleQueue()

        def serve(session: ReplaceableWorker) -> None:
            try:
                for outcome in run_cases(queued, limits, started, session, self._stop):
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
