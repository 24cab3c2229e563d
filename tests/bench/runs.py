"""Running cases in tests: a processor and an H200, whatever machine this is, progress that is kept, and cases that take
no time. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lrbench.bench.drive import run as runner
from lrbench.bench.drive.executors import LocalExecutor, Outcomes, Queue, alone
from lrbench.bench.drive.run import Outcome
from lrbench.bench.environment import finished_cases
from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker.protocol import Reply, RunLimits, not_measured
from lrbench.results.schema import Environment

PROCESSOR = Environment(
    device_kind="cpu", device_name="a processor, 1 thread", device_accelerator=None, capability=None, device_count=0,
    memory_bytes=2**34, torch_version="2.13.0", triton_version="3.6.0", cuda_version=None, driver_version=None,
    python_version="3.11", lrbench_version="0.1.0", git_commit="c" * 40, git_dirty=False,
)  # fmt: skip
H200 = dataclasses.replace(
    PROCESSOR, device_kind="cuda", device_name="NVIDIA H200", device_accelerator="h200_sxm", capability="9.0",
    device_count=1, memory_bytes=141 * 10**9, cuda_version="13.0", driver_version="580",
)  # fmt: skip


class Silent:
    """Progress that is kept and not shown."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self, total: int, what: str) -> None:
        self.told.append(f"{total} {what}")

    def compiling(self, count: int, left: int) -> None:
        self.told.append(f"compiling {count}")

    def started(self, item: PlannedCase) -> None:
        self.told.append("started")

    def finished(self, item: PlannedCase, status: str) -> None:
        self.told.append(status)

    def end(self) -> None:
        self.told.append("end")


class Instant(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    """An executor for what becomes of rows: its cases take no time, and all but those of ``raises`` are ok."""

    devices = 1

    def __exit__(self, *_: object) -> None: ...

    def run(self, queued: Queue, limits: RunLimits, started: Callable[[PlannedCase], None]) -> Outcomes:
        group = queued.take()
        while group is not None:
            for item in group:
                started(item)
            done = {"status": "ok", "reason": None, "columns": {"time_ms": 1.0}}
            yield group, [not_measured("error", "it raised") if i.case.impl == "raises" else done for i in group]
            group = queued.take(group)


def run_alone(executor: Any, planned: Sequence[PlannedCase]) -> Iterator[tuple[PlannedCase, Reply]]:
    """Yield cases, each timed alone, with their outcomes."""
    for (item,), (reply,) in executor.run(Queue(alone(planned)), RunLimits(timeout_s=120.0)):
        yield item, reply


def run(
    folder: Path,
    planned: Sequence[PlannedCase],
    progress: Silent | None = None,
    resume: bool = False,
    executor: Any = None,
    timeout_s: float = 120.0,
    rounds: int | None = None,
    environment: Environment = PROCESSOR,
    **more: object,
) -> Outcome:
    """Sweep cases into a folder, on a processor unless an environment says otherwise."""
    more["done"] = finished_cases(folder, environment) if resume else {}
    limits, by = RunLimits(timeout_s=timeout_s, rounds=rounds), executor or LocalExecutor()
    return runner.sweep(planned, environment, limits, progress or Silent(), executor=by, output=folder, **more)
