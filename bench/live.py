"""Two implementations measured side by side in one process, and cases of a run measured again.

Every round times each side once, in turn forwards and backwards, so that clocks, temperature and what else the machine
does fall on both alike: what a comparison of two runs can only allow for, this one cancels.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..kernels import baselines
from ..results.schema import CASE_COLUMNS, Case, Record
from ..results.select import Row
from . import clock, memory
from .derived import Run, build_record
from .environment import DeviceState, Environment
from .executors import Limits, Reply
from .executors.local import LocalExecutor
from .plan import PlannedCase
from .sweep import group_by_implementation, refuse

if TYPE_CHECKING:
    from .worker import Worker

WARMUP_ROUNDS = 3


@dataclass(slots=True, kw_only=True)
class Contender:
    """A prepared case: its call, what was found out before timing, and its samples."""

    item: PlannedCase
    call: Callable[[Any], Any]
    prepare: Callable[[], Any]
    columns: dict[str, Any]
    status: str = "ok"
    reason: str | None = None
    samples_ms: list[float] = field(default_factory=list)
    state: DeviceState = field(default_factory=DeviceState)


def side_by_side(
    planned: Sequence[PlannedCase],
    environment: Environment,
    *,
    ignore: Sequence[str] = (),
    rounds: int,
    started: Callable[[PlannedCase], None] = lambda _: None,
) -> Iterator[Record]:
    """Yield a row per case: cases that differ in the implementation alone are checked, then timed in turn.

    Args:
        planned: cases of two implementations.
        environment: this process's.
        ignore: further columns in which cases may differ that are timed together.
        rounds: samples of each.
        started: called with every case that is prepared.
    """
    from .worker import Worker

    run = Run.start(uuid.uuid4().hex, environment, None)
    worker, versions = Worker(environment.device_kind), baselines.installed_versions()
    for group in groups(planned, ignore):
        yield from measure_group(worker, run, group, versions, rounds=rounds, started=started)
        worker.release(everything=False)


def measure_group(
    worker: Worker,
    run: Run,
    group: Sequence[PlannedCase],
    versions: Mapping[str, str],
    *,
    rounds: int,
    started: Callable[[PlannedCase], None] = lambda _: None,
    time_incorrect_peers: bool = False,
) -> Iterator[Record]:
    """Yield a row per case of a group that is timed in turn, whatever its cases are.

    Args:
        worker: runs them, in this process.
        run: what the rows share.
        versions: as :func:`.baselines.installed_versions` finds them.
        rounds: samples of each.
        started: called with every case that is prepared.
        time_incorrect_peers: time outside packages also where their numbers are off: the row is still ``incorrect``,
            and says by how much.
    """
    contenders = []
    for item in group:
        reply = refuse(item, run.environment, versions)
        if reply is None:
            started(item)
            contender = _prepare(worker, item, time_incorrect_peers and item.case.provider != "lrbench")
            if isinstance(contender, Contender):
                contenders.append(contender)
                continue
            reply = contender
        yield build_record(run, item, reply)
    for contender, reply in _time(worker.clock, contenders, rounds):
        yield build_record(run, contender.item, reply)


def groups(planned: Sequence[PlannedCase], ignore: Sequence[str] = ()) -> list[list[PlannedCase]]:
    """Return the cases in groups that differ in the implementation, and in what is ignored, alone."""
    columns = [name for name in CASE_COLUMNS if name not in ("impl", *ignore)]
    found: dict[tuple[Any, ...], list[PlannedCase]] = {}
    for item in planned:
        values = {name: getattr(item.case, name) for name in columns}
        if "state_dtype" in values:
            # An outside package without a choice of state dtype leaves it null; its states are float32.
            values["state_dtype"] = values["state_dtype"] or "fp32"
        found.setdefault(tuple(values.values()), []).append(item)
    return list(found.values())


def _prepare(worker: Worker, item: PlannedCase, time_incorrect: bool) -> Contender | Reply:
    """Check a case and make it ready to be timed, or return its outcome."""
    from .worker import CaseFailure, classify

    status, reason = "ok", None
    try:
        try:
            columns = worker.verify(item.case, item.target)
        except CaseFailure as failure:
            if not time_incorrect or failure.status != "incorrect":
                raise
            columns, status, reason = {}, failure.status, failure.reason
        ready = worker.make_ready(item.case, item.target)
        columns["compile_s"] = ready.compile_s
        columns |= dataclasses.asdict(memory.measure_memory(ready.call, prepare=ready.prepare, inputs=ready.inputs))
    except Exception as error:  # noqa: BLE001, whatever an implementation raises becomes a row
        status, reason = classify(error)
        return {"status": status, "reason": reason, "columns": {}}
    return Contender(item=item, call=ready.call, prepare=ready.prepare, columns=columns, status=status, reason=reason)


def _time(timer: clock.Clock, contenders: Sequence[Contender], rounds: int) -> Iterator[tuple[Contender, Reply]]:
    """Sample the contenders in turn and yield their outcomes; one that fails drops out."""
    from .worker import classify

    racing = list(contenders)
    for index in range(-WARMUP_ROUNDS, rounds):
        for contender in list(racing if index % 2 else reversed(racing)):
            try:
                samples, state = timer.sample(contender.call, contender.prepare, 1)
            except Exception as error:  # noqa: BLE001, see above
                racing.remove(contender)
                status, reason = classify(error)
                yield contender, {"status": status, "reason": reason, "columns": {}}
                continue
            if index >= 0:
                contender.samples_ms += samples
                # Throttling in any round marks the case.
                contender.state = dataclasses.replace(state, throttled=state.throttled or contender.state.throttled)
    for contender in racing:
        timing = clock.Timing(samples_ms=contender.samples_ms, state=contender.state)
        columns = contender.columns | timing.columns()
        yield contender, {"status": contender.status, "reason": contender.reason, "columns": columns}


def planned_case(row: Row) -> PlannedCase:
    """Return the case of a row with the code it runs; ValueError where nothing of that name is declared any more."""
    names = [each.name for each in dataclasses.fields(Case)]
    case = Case(**{name: row[name] for name in names})
    if case.provider == "lrbench":
        target: Any = baselines.get_operation(case.op).implementation(case.impl)
    else:
        target = baselines.get_baseline(case.op, case.impl)
    return PlannedCase(case=case, target=target)


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
    run = Run.start(uuid.uuid4().hex, environment, None)
    versions = baselines.installed_versions()
    planned = [planned_case(row) for row in rows]
    refused = [(item, reply) for item in planned if (reply := refuse(item, environment, versions)) is not None]
    names = {id(item) for item, _ in refused}
    runnable = [item for item in planned if id(item) not in names]
    limits = Limits(timeout_s=timeout_s, budget_s=budget_s, device_kind=environment.device_kind)
    measured = LocalExecutor().run(group_by_implementation(runnable), limits, lambda _: None)
    return {
        item.case.case_id: dataclasses.asdict(build_record(run, item, reply)) for item, reply in (*refused, *measured)
    }
