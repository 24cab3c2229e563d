"""Running cases: a sweep, implementations side by side, and cases of a run again.

Whatever happens to a case becomes its typed row. In a sweep every package has a process of its own; side by side, cases
share one process and are timed in turn. Either way a worker checks, measures and times them
(:meth:`.worker.Worker.run`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..analysis.accelerators.roofs import RoofRow, write_roofs
from ..kernels import baselines
from ..kernels.baselines.spec import Baseline
from ..results import store
from ..results.arguments import one_of
from ..results.lock import temporary_folder
from ..results.schema import CASE_COLUMNS, Case, Record
from ..results.select import Row, case_key, grouped
from .compile_ahead import Compiler
from .derived import Run, build_record
from .display import SweepProgress
from .environment import Environment, version_of
from .executors import LocalExecutor, Queue, autotunes
from .plan import Identity, PlannedCase
from .workers import ReplaceableWorker, Reply, RunLimits, Started, not_measured

if TYPE_CHECKING:
    from .ray import RayExecutor

    Executor: TypeAlias = LocalExecutor | RayExecutor

installed_versions = functools.cache(baselines.installed_versions)
COMPILING, WRITING = "waiting for compilation", "writing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a sweep did.

    Attributes:
        path: the parquet file; None when no row was written.
        records: the rows of this run.
        resumed: rows of the cases left out because the output folder has them.
        remaining: cases without a row, because the sweep was interrupted or out of time.
        seconds: where the time went, summed over the devices.
        first_row_at: when the first row with status ok was written, by :func:`time.monotonic`; None without one.
        asked: pairs of a case and a Triton kernel that it launches.
        kernels: these kernels' hashes, each with that of its cubin.
    """

    path: Path | None
    records: list[Record]
    resumed: list[Record]
    remaining: int
    interrupted: bool
    seconds: Mapping[str, float] = field(default_factory=dict)
    first_row_at: float | None = None
    asked: int = 0
    kernels: Mapping[str, str] = field(default_factory=dict)


def get_executor(name: str, *, devices: int = 1) -> Executor:
    """Return the executor called ``name`` over ``devices`` GPUs; ValueError lists the known ones."""
    one_of("executor", name, ("local", "ray"))
    if name == "local":
        return LocalExecutor(devices=devices)
    from .ray import RayExecutor

    return RayExecutor(devices=devices)


def sweep(
    planned: Sequence[PlannedCase],
    environment: Environment,
    limits: RunLimits,
    progress: SweepProgress,
    *,
    executor: Executor,
    output: Path,
    accelerator: str | None = None,
    jobs: int = 0,
    time_limit_s: float | None = None,
    roofs: Sequence[RoofRow] = (),
    done: Mapping[Identity, Record] = MappingProxyType({}),
) -> Outcome:
    """Run the cases and write their rows.

    Args:
        executor: runs them; its processes end with the sweep, also where that is interrupted.
        accelerator: key that the analysis is about (``--gpu``), or None.
        jobs: processes that compile ahead, on this machine's GPUs; 0 compiles as cases come.
        time_limit_s: no case starts after this many seconds; the rest is left for ``--resume``.
        roofs: rates measured on the device before the sweep, to be stored beside its rows.
        done: rows of cases to leave out, by their identity.

    Raises:
        ValueError: an unknown accelerator, or more devices than this machine has.
        OSError: the output cannot be written; rows measured so far stay in the journal.
    """
    run = Run.start(environment, accelerator)
    here = max(1, environment.device_count)
    if isinstance(executor, LocalExecutor) and not 1 <= executor.devices <= here:
        raise ValueError(f"devices must be from 1 to {here} on {environment.device_name}, got {executor.devices}")
    todo = [item for item in planned if item.identity not in done]
    interrupted, first_row_at = False, None
    seconds: defaultdict[str, float] = defaultdict(float)
    asked, kernels = 0, dict[str, str]()
    name = file_name(f"{store.SWEEP_PREFIX}{planned[0].case.kernel if planned else 'none'}", run.run_id)
    if any(item.triton for item in planned):
        name += store.TRITON_SUFFIX
    with _interrupted_once() as finishing, store.RunWriter(output, name, len(todo)) as writer:
        if roofs and todo:
            of_run = (dataclasses.replace(row, run_id=run.run_id) for row in roofs)
            write_roofs(of_run, writer.path.with_suffix(".roofs.parquet"))
        measured = _outcomes(todo, environment, limits, executor, progress, seconds, jobs, time_limit_s)
        try:
            with executor, contextlib.closing(measured) as outcomes:
                for item, reply in outcomes:
                    began = time.monotonic()
                    writer.append(build_record(run, item, reply))
                    progress.finished(item, reply["status"])
                    now = time.monotonic()
                    first_row_at = first_row_at or (now if reply["status"] == "ok" else None)
                    for what, took in {**reply.get("seconds", {}), WRITING: now - began}.items():
                        seconds[what] += took
                    asked += len(found := reply.get("kernels", {}))
                    kernels |= found
            finishing()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            progress.end()
    return Outcome(
        path=writer.path if writer.records else None,
        records=writer.records,
        resumed=[done[item.identity] for item in planned if item.identity in done],
        remaining=len(todo) - len(writer.records),
        interrupted=interrupted,
        seconds=seconds,
        first_row_at=first_row_at,
        asked=asked,
        kernels=kernels,
    )


def file_name(what: str, run_id: str) -> str:
    """Return the name of a run's file: what it is of, such as sweep-tfla, UTC date and time, 8 digits of the run id."""
    return f"{what}-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{run_id[:8]}"


def quickest_first(planned: Sequence[PlannedCase]) -> list[PlannedCase]:
    """Return cases in the order in which a GPU soonest has rows.

    A forward pass in one chunk has the fewest kernels to compile. Packages that autotune come last: choosing takes them
    minutes, in which all others can be measured.
    """
    choosing = {item.case.provider for item in planned if autotunes(item)}

    def late(item: PlannedCase) -> tuple[bool, bool]:
        return item.case.provider in choosing, autotunes(item)

    def chunks(item: PlannedCase) -> float:
        return (item.case.seq_len or 1) / (item.case.chunk_size or 1)

    soonest = min(map(late, planned), default=None)
    forward = [item for item in planned if item.case.mode == "fw" and late(item) == soonest]
    first = min(forward, key=chunks, default=None)
    # Its turns with other Tritons follow it.
    return sorted(planned, key=lambda item: (late(item), first is None or item.case != first.case))


def _outcomes(
    todo: Sequence[PlannedCase],
    environment: Environment,
    limits: RunLimits,
    executor: Executor,
    progress: SweepProgress,
    seconds: defaultdict[str, float],
    jobs: int,
    time_limit_s: float | None,
) -> Generator[tuple[PlannedCase, Reply], None, None]:
    begin = time.monotonic()
    runnable, refused = separate(todo, environment)
    with contextlib.ExitStack() as stack:
        compiler = None
        if environment.device_kind == "cuda":
            runnable = quickest_first(runnable)
            if jobs > 1:
                told = progress.compiling
                compiler = Compiler(runnable, environment, jobs, executor.devices, limits.timeout_s, told)
                stack.enter_context(compiler)

        def start(item: PlannedCase) -> None:
            if compiler is not None:
                seconds[COMPILING] += compiler.compile_for(item)
            progress.started(item)

        progress.begin(len(todo), "measuring")
        if compiler is not None and executor.devices > 1:
            # One device may be timing while another begins a case, so nothing is left to compile then.
            seconds[COMPILING] += compiler.compile_all() * executor.devices
        yield from refused
        shared = tempfile.TemporaryDirectory(dir=temporary_folder(), prefix="references-")
        limits = dataclasses.replace(limits, shared=stack.enter_context(shared), device_kind=environment.device_kind)
        for outcome in stack.enter_context(contextlib.closing(executor.run(Queue(runnable), limits, start))):
            yield outcome
            if time_limit_s is not None and time.monotonic() - begin > time_limit_s:
                return


def separate(
    planned: Sequence[PlannedCase], environment: Environment
) -> tuple[list[PlannedCase], list[tuple[PlannedCase, Reply]]]:
    """Return the cases to try here, and those that cannot run here, each with its outcome."""
    outcomes = [(item, refuse(item, environment)) for item in planned]
    refused = [(item, reply) for item, reply in outcomes if reply is not None]
    return [item for item, reply in outcomes if reply is None], refused


def refuse(item: PlannedCase, environment: Environment) -> Reply | None:
    """Return the outcome of a case that cannot run here, with the reason, or None."""
    target, case = item.target, item.case.of_operation
    environment = item.within(environment)
    reason: str | None
    if environment.device_kind not in target.devices:
        devices = " or ".join(target.devices)
        return not_measured("unsupported", f"{target.name} runs on {devices}, this device is {environment.device_kind}")
    if isinstance(target, Baseline):
        if reason := baselines.availability(target):
            return not_measured("unavailable", reason)
        versions = installed_versions()
        if item.triton is not None:
            versions = {**versions, "triton": item.triton.version}
        reason = baselines.known_bad_here(target, case, versions, environment.capability)
    else:
        installed = {name: version_of(name) for name in target.requires} | {"triton": environment.triton_version}
        reason = target.why_not_with(installed)
        if reason and None in map(installed.get, target.requires):
            return not_measured("unavailable", reason)
        reason = target.why_not_on(environment.capability) or reason
    reason = reason or target.why_unsupported(case.mode, case.dtype, case.state_dtype, case.sizes)
    return not_measured("unsupported", reason) if reason else None


@contextlib.contextmanager
def _interrupted_once() -> Iterator[Callable[[], None]]:
    """Raise on the first SIGINT, SIGTERM or SIGHUP in the block, where signals can be handled (the main thread).

    Later ones are ignored until the block ends, so that a second Ctrl-C cannot keep rows from being written. The block
    is given a function that ignores all from then on.
    """
    previous: dict[int, Callable[..., Any] | int | None] = {}

    def ignore_further() -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)

    def handler(_number: int, _frame: FrameType | None) -> None:
        ignore_further()
        raise KeyboardInterrupt

    with contextlib.suppress(ValueError):
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP so that the program goes on.
            if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN:
                previous[each] = signal.signal(each, handler)
    try:
        yield ignore_further
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def side_by_side(
    planned: Sequence[PlannedCase],
    run: Run,
    *,
    ignore: Sequence[str] = (),
    rounds: int,
    started: Started = lambda _: None,
) -> Iterator[Record]:
    """Yield a row per case: cases that differ in the implementation alone are checked, then timed in turn.

    Args:
        ignore: further columns in which cases may differ that are timed together.
        rounds: samples of each.
        started: called with every case of a group that begins.
    """
    limits = RunLimits(timeout_s=math.inf, rounds=rounds, device_kind=run.environment.device_kind)
    with ReplaceableWorker() as session:
        for group in groups(planned, ignore):
            for item, reply in run_in_turn(session, group, run.environment, limits, started):
                yield build_record(run, item, reply)


def run_in_turn(
    session: ReplaceableWorker,
    group: Sequence[PlannedCase],
    environment: Environment,
    limits: RunLimits,
    started: Started,
) -> Iterator[tuple[PlannedCase, Reply]]:
    """Yield every case of a group with its outcome: those that can run here are timed in turn."""
    runnable, refused = separate(group, environment)
    yield from refused
    for item in runnable:
        started(item)
    if runnable:
        yield from zip(runnable, session.run(runnable, limits), strict=True)


def run_alone(
    planned: Sequence[PlannedCase], environment: Environment, limits: RunLimits
) -> Iterator[tuple[PlannedCase, Reply]]:
    """Yield every case with its outcome: those that can run here run, each package in a process of its own."""
    runnable, refused = separate(planned, environment)
    yield from refused
    with LocalExecutor() as executor:
        yield from executor.run(Queue(runnable), limits, lambda _: None)


def groups(planned: Sequence[PlannedCase], ignore: Sequence[str] = ()) -> list[list[PlannedCase]]:
    """Return the cases in groups that differ only in the implementation and in the columns ignored."""
    columns = [name for name in CASE_COLUMNS if name not in ("impl", *ignore)]
    return list(grouped(planned, lambda item: case_key(dataclasses.asdict(item.case), columns)).values())


def why_not_again(rows: Sequence[Row], environment: Environment) -> str | None:
    """Return why rows of a run cannot be measured again here, or None."""
    here = environment.device_accelerator or environment.device_name
    wanted = {row["device_accelerator"] or row["device_name"] for row in rows}
    if wanted != {here}:
        return f"the run is of {', '.join(sorted(map(str, wanted)))}, this machine is {here}"
    commits = {row["git_commit"] for row in rows} - {None}
    current = environment.git_commit
    if current is not None and not all(current.startswith(each) or each.startswith(current) for each in commits):
        return f"the run is of commit {', '.join(sorted(commits))}, this checkout is {current}"
    return None


def measure_again(
    rows: Sequence[Row], environment: Environment, *, timeout_s: float, budget_s: float
) -> Mapping[str, dict[str, Any]]:
    """Measure the cases of rows again and return the new rows by case id.

    Raises:
        ValueError: an implementation is not declared any more.
    """
    run = Run.start(environment)
    limits = RunLimits(timeout_s=timeout_s, budget_s=budget_s, device_kind=environment.device_kind)
    cases = [Case(**{each.name: row[each.name] for each in dataclasses.fields(Case)}) for row in rows]
    planned = [PlannedCase(case=case, target=baselines.get_implementation(case.op, case.impl)) for case in cases]
    outcomes = run_alone(planned, environment, limits)
    return {item.case.case_id: dataclasses.asdict(build_record(run, item, reply)) for item, reply in outcomes}
