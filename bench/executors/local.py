"""Worker processes on this machine: one at a time per device, so that nothing disturbs what is timed."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator, Mapping, Sequence

from ..plan import PlannedCase
from ..process import WorkerDiedError, WorkerProcess, WorkerStoppedError, WorkerTimeoutError
from ..protocol import encode_request
from . import Limits, Reply, Started


class LocalExecutor:
    """Runs groups on this machine's devices.

    Args:
        devices: how many GPUs to spread the groups over; each runs one worker at a time.
        workers_per_device: more than one only for work that is not timed.
    """

    def __init__(self, *, devices: int = 1, workers_per_device: int = 1) -> None:
        self.devices = devices
        self.workers_per_device = workers_per_device

    def run(
        self, groups: Sequence[Sequence[PlannedCase]], limits: Limits, started: Started
    ) -> Generator[tuple[PlannedCase, Reply], None, None]:
        """See :class:`.Executor`."""
        if self.devices * self.workers_per_device == 1:
            for group in groups:
                yield from run_group(group, limits, started)
            return
        yield from self._run_threads(groups, limits, started)

    def _run_threads(
        self, groups: Sequence[Sequence[PlannedCase]], limits: Limits, started: Started
    ) -> Generator[tuple[PlannedCase, Reply], None, None]:
        todo: queue.SimpleQueue[Sequence[PlannedCase]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[PlannedCase, Reply] | BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()
        for group in groups:
            todo.put(group)

        def serve(environ: Mapping[str, str]) -> None:
            try:
                while not stop.is_set():
                    group = todo.get_nowait()
                    for outcome in run_group(group, limits, started, environ=environ, stop=stop):
                        done.put(outcome)
            except queue.Empty:
                pass
            except BaseException as error:  # noqa: BLE001, handed to the caller's thread
                done.put(error)
            finally:
                done.put(None)

        threads = [
            threading.Thread(target=serve, args=(environ,), daemon=True)
            for environ in self._environs()
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

    def _environs(self) -> list[dict[str, str]]:
        if self.devices == 1:
            return [{}]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(n) for n in range(self.devices)]
        return [{"CUDA_VISIBLE_DEVICES": name} for name in names[: self.devices]]


def run_group(
    group: Sequence[PlannedCase],
    limits: Limits,
    started: Started,
    *,
    environ: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> Generator[tuple[PlannedCase, Reply], None, None]:
    """Run cases in one worker process, which is replaced after a crash, a hang or a lost device.

    Closing the iterator kills the worker.
    """
    worker: WorkerProcess | None = None
    try:
        for item in group:
            if stop is not None and stop.is_set():
                return
            started(item)
            try:
                if worker is None:
                    worker = WorkerProcess(environ)
                request = encode_request(
                    item,
                    action=limits.action,
                    budget_s=limits.budget_s,
                    shared=limits.shared,
                    device_kind=limits.device_kind,
                )
                reply = worker.ask(request, limits.timeout_s, stop=stop)
                if not reply.pop("usable"):
                    worker.kill()
                    worker = None
            except WorkerStoppedError:
                return
            except (WorkerDiedError, WorkerTimeoutError) as error:
                worker = None
                status = "timeout" if isinstance(error, WorkerTimeoutError) else "crash"
                reply = {"status": status, "reason": str(error), "columns": {}}
            yield item, reply
        if worker is not None:
            worker.close()
            worker = None
    finally:
        if worker is not None:
            worker.kill()
