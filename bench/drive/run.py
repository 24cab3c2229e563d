"""Running cases: :func:`measure` is the one loop that all commands share, and :func:`sweep` writes what comes of it.

Whatever happens to a case becomes its typed row. A worker checks cases, measures and times them
(:meth:`.worker.Worker.run`): each alone, where every package has a process of its own, or in turn, in one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from operator import attrgetter
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ...analysis.accelerators.roofs import RoofRow, write_roofs
from ...analysis.reproduce.entries import DEFAULT
from ...kernels import baselines
from ...kernels.baselines.spec import Baseline
from ...kernels.common.spec import Implementation
from ...results import store
from ...results.arguments import one_of
from ...results.lock import temporary_folder
from ...results.schema import CASE_COLUMNS, Case, Record
from ...results.select import Row, case_key, grouped
from ..environment import Environment, version_of
from ..plan import Identity, PlannedCase
from ..worker.protocol import Reply, RunLimits, not_measured
from .compile_ahead import Compiler
from .derived import Run, build_record
from .executors import LocalExecutor, Outcomes, Queue, alone
from .progress import SweepProgress

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


class Measured(NamedTuple):
    """What came of a case: its row, and the worker's reply, most of which the row holds."""

    item: PlannedCase
    record: Record
    reply: Reply


def measure(
    planned: Sequence[PlannedCase],
    run: Run,
    limits: RunLimits,
    *,
    executor: Executor,
    group_by: Callable[[PlannedCase], Hashable] | None = None,
    progress: SweepProgress | None = None,
    jobs: int = 0,
    time_limit_s: float = math.inf,
    seconds: defaultdict[str, float] | None = None,
) -> Generator[Measured, None, None]:
    """Measure cases and yield what came of each, those that cannot run here first.

    Args:
        executor: runs them; closing the iterator stops those that are busy.
        group_by: cases of the same value are timed in turn, in one process; None times each alone, each package in a
            process of its own.
        progress: is told what runs.
        jobs: processes that compile ahead, on this machine's GPUs; 0 compiles as cases come.
        time_limit_s: no case starts after this many seconds.
        seconds: what it took to compile is added to :data:`COMPILING`.
    """
    begin, seconds = time.monotonic(), defaultdict(float) if seconds is None else seconds
    environment = run.environment
    runnable, refused = separate(planned, environment)
    on_gpu = environment.device_kind == "cuda"
    runnable = quickest_first(runnable) if on_gpu else runnable
    groups = alone(runnable) if group_by is None else [*map(tuple, grouped(runnable, group_by).values())]
    with contextlib.ExitStack() as stack:
        compiler = None
        if on_gpu and jobs > 1 and progress is not None:
            how = executor.devices, limits.timeout_s, progress.compiling
            compiler = stack.enter_context(Compiler(groups, environment, jobs, *how))

        def start(item: PlannedCase) -> None:
            if compiler is not None:
                seconds[COMPILING] += compiler.compile_for(item)
            if progress is not None:
                progress.started(item)

        if progress is not None:
            progress.begin(len(planned), "measuring" if group_by is None else "measuring in turn")
            stack.callback(progress.end)
        if compiler is not None and executor.devices > 1:
            # One device may be timing while another begins a case, so nothing is left to compile then.
            seconds[COMPILING] += compiler.compile_all() * executor.devices
        shared = tempfile.TemporaryDirectory(dir=temporary_folder(), prefix="references-")
        kind, settle = environment.device_kind, group_by is not None and not on_gpu
        limits = dataclasses.replace(limits, shared=stack.enter_context(shared), device_kind=kind, settle=settle)
        outcomes = stack.enter_context(contextlib.closing(executor.run(Queue(groups), limits, start)))
        for item, reply, pair_id in itertools.chain(
            ((*each, None) for each in refused), _until(begin + time_limit_s, run.run_id[:8], outcomes)
        ):
            yield Measured(item, build_record(run, item, reply, pair_id), reply)
            if progress is not None:
                progress.finished(item, reply["status"])


def _until(deadline: float, name: str, outcomes: Outcomes) -> Iterator[tuple[PlannedCase, Reply, str | None]]:
    """Yield every case with its outcome and, if it was timed in turn with others, the id of these.

    The group that is measured at the deadline is the last.
    """
    for n, (group, replies) in enumerate(outcomes):
        for item, reply in zip(group, replies, strict=True):
            yield item, reply, f"{name}-{n}" if reply.get("in_turn") else None
        if time.monotonic() > deadline:
            return


def sweep(
    planned: Sequence[PlannedCase],
    environment: Environment,
    limits: RunLimits,
    progress: SweepProgress,
    *,
    executor: Executor,
    output: Path | None,
    prefix: str = store.SWEEP_PREFIX,
    only_ok: bool = False,
    accelerator: str | None = None,
    roofs: Sequence[RoofRow] = (),
    done: Mapping[Identity, Record] = MappingProxyType({}),
    **how: Any,
) -> Outcome:
    """Measure cases and write their rows.

    Args:
        executor: its processes end with the sweep, also where that is interrupted.
        output: folder of the file; None writes none.
        prefix: what the file's name begins with.
        only_ok: write rows of status ok alone: of cases that have rows already, which no failure must replace.
        accelerator: key that the analysis is about (``--gpu``), or None.
        roofs: rates measured on the device before the sweep, to be stored beside its rows.
        done: rows of cases to leave out, by their identity.
        how: group_by, jobs and time_limit_s of :func:`measure`; what is left is for ``--resume``.

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
    records: list[Record] = []
    seconds: defaultdict[str, float] = defaultdict(float)
    asked, kernels = 0, dict[str, str]()
    name, folder = file_name(f"{prefix}{planned[0].case.kernel if planned else 'none'}", run.run_id), output
    if any(item.triton for item in planned):
        name += store.TRITON_SUFFIX
        folder = output and output / store.OTHER
    with _interrupted_once() as finishing, contextlib.ExitStack() as stack:
        writer = folder and stack.enter_context(store.RunWriter(folder, name, None if only_ok else len(todo)))
        if output and roofs and todo:
            of_run = (dataclasses.replace(row, run_id=run.run_id) for row in roofs)
            write_roofs(of_run, output / store.OTHER / f"{name}.roofs.parquet")
        measured = measure(todo, run, limits, executor=executor, progress=progress, seconds=seconds, **how)
        try:
            with executor, contextlib.closing(measured):
                for _, record, reply in measured:
                    began = time.monotonic()
                    if writer and (record.status == "ok" or not only_ok):
                        writer.append(record)
                    records.append(record)
                    now = time.monotonic()
                    first_row_at = first_row_at or (now if record.status == "ok" else None)
                    for what, took in {**reply.get("seconds", {}), WRITING: now - began}.items():
                        seconds[what] += took
                    asked += len(found := reply.get("kernels", {}))
                    kernels |= found
            finishing()
        except KeyboardInterrupt:
            interrupted = True
    return Outcome(
        path=writer.path if writer and writer.records else None,
        records=records,
        resumed=[done[item.identity] for item in planned if item.identity in done],
        remaining=len(todo) - len(records),
        interrupted=interrupted,
        seconds=seconds,
        first_row_at=first_row_at,
        asked=asked,
        kernels=kernels,
    )


def file_name(what: str, run_id: str) -> str:
    """Return the name of a run's file: what it is of, such as sweep-tfla, UTC date and time, 8 digits of the run id."""
    return f"{what}-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{run_id[:8]}"


def write_other(rows: Sequence[Any], what: str, folder: Path, kind: str) -> Path:
    """Write rows of another row set as _other/<what>-<UTC date and time>-<run id>.<kind>.parquet; return the path."""
    path = folder / store.OTHER / f"{file_name(what, rows[0].run_id)}.{kind}.parquet"
    store.write_parquet(map(dataclasses.asdict, rows), path, type(rows[0]))
    return path


def quickest_first(planned: Sequence[PlannedCase]) -> list[PlannedCase]:
    """Return cases in the order in which a GPU soonest has rows.

    A forward pass in one chunk has the fewest kernels to compile. Packages that autotune come last: choosing takes them
    minutes, in which all others can be measured.
    """
    choosing = {item.case.provider for item in planned if item.autotunes}

    def late(item: PlannedCase) -> tuple[bool, bool]:
        return item.case.provider in choosing, item.autotunes

    def chunks(item: PlannedCase) -> float:
        return (item.case.seq_len or 1) / (item.case.chunk_size or 1)

    soonest = min(map(late, planned), default=None)
    forward = [item for item in planned if item.case.mode == "fw" and late(item) == soonest]
    first = min(forward, key=chunks, default=None)
    # Its turns with other Tritons follow it.
    return sorted(planned, key=lambda item: (late(item), first is None or item.case != first.case))


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


def problem(item: PlannedCase) -> Hashable:
    """Return what all cases of a problem have in common, whatever computes it: mode, dtype, tokens and model width."""
    case = item.case
    width = case.channels or case.d_model or (case.num_heads or 0) * (case.head_dim_v or 0)
    length = case.batch, case.seq_len, case.documents, case.context
    return case.mode, case.dtype, *length, case.layers, width, case.d_ff


def fastest_of_each(planned: Sequence[PlannedCase], records: Sequence[Record]) -> list[PlannedCase]:
    """Return the cases by which packages are compared, of each problem that several packages computed.

    They are the fastest of each package and operation, at the same head dims and dtype of the states. A problem is left
    out if of each of these a case was timed in turn with the others already.
    """
    timed = {record.case_id: record for record in records if record.status == "ok" and record.suspect is None}
    found = []
    for by in rivals(item for item in planned if item.case.case_id in timed):
        in_turn = [{timed[item.case.case_id].pair_id for item in each} - {None} for each in by]
        if not set.intersection(*in_turn):
            found += [min(each, key=lambda item: timed[item.case.case_id].time_ms or math.inf) for each in by]
    return found


def rivals(planned: Iterable[PlannedCase]) -> list[list[list[PlannedCase]]]:
    """Return the cases of each problem that several packages compute, those of a package and operation together."""
    rival = attrgetter(*(f"case.{name}" for name in ("provider", "op", "state_dtype", "head_dim_qk", "head_dim_v")))
    groups = grouped(planned, problem).values()
    return [[*grouped(of, rival).values()] for of in groups if len({item.case.provider for item in of}) > 1]


def problem_beside(ignore: Sequence[str] = ()) -> Callable[[PlannedCase], Hashable]:
    """Return what the cases have in common that differ only in the implementation and in the columns ignored."""
    columns = [name for name in CASE_COLUMNS if name not in ("impl", *ignore)]
    return lambda item: case_key(dataclasses.asdict(item.case), columns)


def target_of(op: str, impl: str) -> Implementation | Baseline:
    """Return what a case's implementation runs, :data:`DEFAULT` what a call without one does; ValueError for others."""
    if impl != DEFAULT:
        return baselines.get_implementation(op, impl.partition("+")[0])
    operation = baselines.get_operation(op)
    packed = any(each.documents for each in operation.implementations)
    return Implementation(name=DEFAULT, call=operation.call, chunked=False, requires=("triton",), documents=packed)


def planned_again(row: Row) -> PlannedCase:
    """Return the case of a row; ValueError where its implementation is not declared any more."""
    case = Case(**{each.name: row[each.name] for each in dataclasses.fields(Case)})
    return PlannedCase(case=case, target=target_of(case.op, case.impl))


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
