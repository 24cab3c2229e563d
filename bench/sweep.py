"""The sweep: plans cases, gives each a typed row whatever happens to it, and leaves one parquet file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from ..analysis.accelerators.roofs import RoofRow, write_roofs
from ..kernels import baselines
from ..kernels.baselines.spec import Baseline
from ..kernels.spec import Implementation, resolve
from ..results import store
from ..results.schema import Record
from .derived import Run, build_record
from .environment import Environment, version_of
from .executors import Executor, Limits, Reply, get_executor
from .executors.local import LocalExecutor
from .plan import PlannedCase

DEFAULT_TIMEOUT_S = 120.0
MAX_COMPILE_JOBS = 8
MAX_COMPILE_ELEMENTS = 2**26
"""Of a case's widest tensor, up to which a longer case than the shortest is called only to compile: many processes
share the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a sweep runs.

    Attributes:
        output: folder of the parquet file.
        accelerator: key that the analysis is about (``--gpu``), or None.
        timeout_s: time limit of a case.
        budget_s: seconds of timing per case after which sampling stops.
        resume: leave out cases that :func:`.store.finished_cases` counts as finished in ``output``.
        executor: local or ray.
        devices: GPUs to spread the implementations over, at most as many as this machine has (1 on a CPU).
        jobs: processes that compile ahead, on a GPU; 0 compiles as cases come.
        time_limit_s: no case starts after this many seconds; the rest is left for ``--resume``.
        roofs: rates measured on the device before the sweep, to be stored beside its rows.
    """

    output: Path
    accelerator: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    budget_s: float = 0.4
    resume: bool = False
    executor: str = "local"
    devices: int = 1
    jobs: int = 0
    time_limit_s: float | None = None
    roofs: tuple[RoofRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a sweep did.

    Attributes:
        path: the parquet file; None when no row was written.
        records: the rows of this run.
        resumed: rows of the cases left out because the output folder has them.
        remaining: cases without a row, because the sweep was interrupted or out of time.
        recovered: files made from the journals of earlier runs that died, see :func:`.store.recover`.
    """

    path: Path | None
    records: list[Record]
    resumed: list[Record]
    remaining: int
    interrupted: bool
    recovered: list[Path]


class Progress(Protocol):
    """What a sweep tells whoever watches."""

    def begin(self, total: int, what: str) -> None:
        """A pass over ``total`` cases begins."""

    def started(self, item: PlannedCase) -> None:
        """A case runs now."""

    def finished(self, item: PlannedCase, status: str) -> None:
        """A case has its outcome."""

    def end(self) -> None:
        """The pass is over."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C: what is measured is kept."""


def sweep(planned: Sequence[PlannedCase], environment: Environment, settings: Settings, progress: Progress) -> Outcome:
    """Run the cases and write their rows.

    Raises:
        ValueError: an unknown accelerator or executor, or more devices than there are.
        OSError: the output cannot be written; rows measured so far stay in the journal.
    """
    run_id = uuid.uuid4().hex
    run = Run.start(run_id, environment, settings.accelerator)
    here = max(1, environment.device_count)
    if settings.executor == "local" and not 1 <= settings.devices <= here:
        raise ValueError(f"devices must be from 1 to {here} on {environment.device_name}, got {settings.devices}")
    executor = get_executor(settings.executor, devices=settings.devices)
    settings.output.mkdir(parents=True, exist_ok=True)
    recovered = store.recover(settings.output)
    done: dict[str, Record] = {}
    if settings.resume:
        done = store.finished_cases(
            settings.output,
            device_name=environment.device_name,
            git_commit=environment.git_commit,
            git_dirty=environment.git_dirty,
        )
    todo = [item for item in planned if item.case.case_id not in done]
    interrupted = False
    with _interrupted_once(), store.RunWriter(settings.output, file_name(planned, run_id)) as writer:
        if settings.roofs and todo:
            of_run = (dataclasses.replace(row, run_id=run_id) for row in settings.roofs)
            write_roofs(of_run, writer.path.with_suffix(".roofs.parquet"))
        try:
            with contextlib.closing(_outcomes(todo, environment, settings, executor, progress)) as outcomes:
                for item, reply in outcomes:
                    writer.append(build_record(run, item, reply))
                    progress.finished(item, reply["status"])
        except KeyboardInterrupt:
            interrupted = True
        finally:
            progress.end()
    return Outcome(
        path=writer.path if writer.records else None,
        records=writer.records,
        resumed=[done[item.case.case_id] for item in planned if item.case.case_id in done],
        remaining=len(todo) - len(writer.records),
        interrupted=interrupted,
        recovered=recovered,
    )


def file_name(planned: Sequence[PlannedCase], run_id: str, prefix: str = store.SWEEP_PREFIX) -> str:
    """Return the name of a run's file: sweep-<kernel>-<UTC date and time>-<first 8 digits of the run id>."""
    kernel = planned[0].case.kernel if planned else "none"
    return f"{prefix}{kernel}-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{run_id[:8]}"


def _outcomes(
    todo: Sequence[PlannedCase],
    environment: Environment,
    settings: Settings,
    executor: Executor,
    progress: Progress,
) -> Generator[tuple[PlannedCase, Reply], None, None]:
    begin = time.monotonic()
    runnable = []
    versions = baselines.installed_versions()
    refused: list[tuple[PlannedCase, Reply]] = []
    for item in todo:
        refusal = refuse(item, environment, versions)
        if refusal is None:
            runnable.append(item)
        else:
            refused.append((item, refusal))
    if settings.jobs > 1 and environment.device_kind == "cuda" and runnable:
        _compile_ahead(runnable, environment.capability, settings, progress)
    progress.begin(len(todo), "measuring")
    yield from refused
    with tempfile.TemporaryDirectory(prefix="lrbench-") as shared:
        limits = Limits(
            timeout_s=settings.timeout_s,
            budget_s=settings.budget_s,
            shared=shared,
            device_kind=environment.device_kind,
        )
        groups = group_by_implementation(runnable)
        with contextlib.closing(executor.run(groups, limits, progress.started)) as outcomes:
            for outcome in outcomes:
                yield outcome
                if settings.time_limit_s is not None and time.monotonic() - begin > settings.time_limit_s:
                    return


def group_by_implementation(planned: Sequence[PlannedCase]) -> list[list[PlannedCase]]:
    """Return the cases in groups, one per implementation name, in the order given: each gets a process of its own."""
    groups: dict[tuple[str, str], list[PlannedCase]] = {}
    for item in planned:
        groups.setdefault((item.case.provider, item.case.impl), []).append(item)
    return list(groups.values())


def refuse(item: PlannedCase, environment: Environment, versions: Mapping[str, str]) -> Reply | None:
    """Return the outcome of a case that need not be tried here, with the reason, or None."""
    target, case = item.target, item.case
    reason: str | None
    if environment.device_kind not in target.devices:
        devices = " or ".join(target.devices)
        return _refusal("unsupported", f"{target.name} runs on {devices}, this device is {environment.device_kind}")
    if isinstance(target, Baseline):
        if reason := baselines.availability(target):
            return _refusal("unavailable", reason)
        reason = baselines.known_bad_here(target, case, versions, environment.capability)
        reason = reason or baselines.unsupported(target, case)
    else:
        for distribution in target.requires:
            if version_of(distribution) is None:
                return _refusal("unavailable", f"{distribution} is not installed: pip install {distribution}")
        reason = target.why_unsupported(case.mode, case.dtype, case.state_dtype, case.sizes)
    return _refusal("unsupported", reason) if reason else None


def _refusal(status: str, reason: str) -> Reply:
    return {"status": status, "reason": reason, "columns": {}}


def default_jobs(device_kind: str) -> int:
    """Return how many processes compile ahead: half of the cores, at most eight; none on a CPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_COMPILE_JOBS, cores // 2) if device_kind == "cuda" else 0


def compile_cases(planned: Sequence[PlannedCase], capability: str | None = None) -> list[PlannedCase]:
    """Return the cases worth compiling ahead.

    Our kernels take batch and sequence length at run time, but launches differ between one tile of time and many, and
    between few sequences and many: the shortest and the longest case stand for all of them. Those that are only longer
    come last, when most of what they share with the shortest is compiled; where all of these are too large, one is cut
    short. Where an implementation says which launches it chooses (``default_config``), there is a case for each choice
    that these two leave out: the shortest, which takes the launches of a larger one where that is too large. Outside
    packages may compile per shape. What needs no compiler is left out.

    Args:
        capability: compute capability such as "9.0" for which launches are chosen; None does not ask for choices.
    """
    chosen: dict[tuple[Any, ...], PlannedCase] = {}
    longest: dict[tuple[Any, ...], PlannedCase] = {}
    too_long: dict[tuple[Any, ...], PlannedCase] = {}
    by_config: dict[tuple[Any, ...], dict[Any, PlannedCase]] = {}
    for item in sorted(planned, key=lambda item: item.case.seq_len or 0):
        case, target = item.case, item.target
        if isinstance(target, Implementation):
            if "triton" not in target.requires:
                continue
            sizes = tuple((n, v) for n, v in case.sizes.items() if n not in ("batch", "seq_len"))
        elif case.provider == "torch":
            continue
        else:
            sizes = tuple(case.sizes.items())
        # A forward-backward pass compiles the forward kernels too.
        mode = "fwbw" if case.mode == "bw" else case.mode
        key = (case.op, case.impl, case.dtype, case.state_dtype, mode, sizes)
        shortest = chosen.setdefault(key, item)
        by_config.setdefault(key, {}).setdefault(_choice(item, capability), item)
        longer = (case.seq_len or 0) > (longest.get(key, shortest).case.seq_len or 0)
        if longer and _may_be_called(item, shortest):
            longest[key] = item
        elif longer and key not in longest and (cut := _cut(item, longer_than=shortest.case.seq_len or 0)):
            too_long.setdefault(key, cut)
    further = {**too_long, **longest}
    others = []
    for key, shortest in chosen.items():
        chosen_there = {_choice(item, capability) for item in (shortest, further.get(key, shortest))}
        for config, item in by_config[key].items():
            if config not in chosen_there:
                others.append(item if _may_be_called(item, shortest) else replace(shortest, config_of=item.case))
    return [*chosen.values(), *further.values(), *others]


def _choice(item: PlannedCase, capability: str | None) -> Any:
    """Return the launches that an implementation chooses for a case, None where it does not say."""
    target, case = item.target, item.case
    if capability is None or not isinstance(target, Implementation):
        return None
    if target.default_config is None or case.mode == "step":
        return None
    major, minor = capability.split(".")
    return resolve(target.default_config)(case.sizes, case.dtype, (int(major), int(minor)), case.mode != "fw")


def _may_be_called(item: PlannedCase, shortest: PlannedCase) -> bool:
    """Return whether a case is small enough to be called only to compile, or no larger than the shortest."""
    return _elements(item) <= max(MAX_COMPILE_ELEMENTS, _elements(shortest))


def _cut(item: PlannedCase, *, longer_than: int) -> PlannedCase | None:
    """Return a case with as many of its steps as may be called only to compile, None if these are too few."""
    seq_len = (item.case.seq_len or 0) * MAX_COMPILE_ELEMENTS // _elements(item)
    return replace(item, case=replace(item.case, seq_len=seq_len)) if seq_len > longer_than else None


def _elements(item: PlannedCase) -> int:
    """Return how many elements the widest tensor of a case's tokens has."""
    sizes = item.case.sizes
    heads = sizes.get("num_heads", 1) * max(sizes.get("head_dim_v", 1), sizes.get("head_dim_qk", 1))
    width = max(heads, sizes.get("channels", 1), sizes.get("d_ff", 1))
    return sizes.get("batch", 1) * sizes.get("seq_len", 1) * width


def compile_batches(cases: Sequence[PlannedCase], jobs: int) -> list[list[PlannedCase]]:
    """Return what each compiling process takes, at most ``jobs`` of ours and one for each outside implementation.

    An outside package's autotuners compile the same configurations for many cases, and side by side within a process.
    """
    ours = [item for item in cases if isinstance(item.target, Implementation)]
    batches = [ours[n::jobs] for n in range(jobs)]
    batches += group_by_implementation([item for item in cases if isinstance(item.target, Baseline)])
    return [batch for batch in batches if batch]


def _compile_ahead(
    planned: Sequence[PlannedCase], capability: str | None, settings: Settings, progress: Progress
) -> None:
    """Call cases once in several processes, so that the timed pass finds the compilers' caches on disk filled.

    Outcomes are dropped: what fails here fails again, and gets its row, when it is measured. Autotuners choose in the
    timed pass (:func:`.autotuning.untimed`), because processes that share the GPU would make them choose badly.
    """
    cases = compile_cases(planned, capability)
    if not cases:
        return
    progress.begin(len(cases), "compiling")
    executor = LocalExecutor(workers_per_device=settings.jobs)
    limits = Limits(timeout_s=settings.timeout_s, budget_s=0.0, action="compile", device_kind="cuda")
    with contextlib.closing(executor.run(compile_batches(cases, settings.jobs), limits, progress.started)) as outcomes:
        for item, _ in outcomes:
            # Whether it compiled shows when it is measured; a failure is counted once, there.
            progress.finished(item, "ok")
    progress.end()


@contextlib.contextmanager
def _interrupted_once() -> Iterator[None]:
    """Raise on the first SIGINT or SIGTERM in the block, where signals can be handled (the main thread).

    Those that follow are ignored until the block ends: an impatient second Ctrl-C must not keep rows from their file.
    """
    previous: dict[int, Callable[..., Any] | int | None] = {}

    def handler(number: int, _: FrameType | None) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    with contextlib.suppress(ValueError):
        for each in (signal.SIGINT, signal.SIGTERM):
            previous[each] = signal.signal(each, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
