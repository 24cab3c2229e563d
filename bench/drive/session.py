"""What the measuring commands do around a measurement.

Names and axes are checked before the machine is looked at, which takes seconds, so that a mistake answers at once; then
cases are planned for the device that is here, what is left out is said, and rows are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import shlex
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import kernels
from ...analysis.accelerators import known as accelerators
from ...analysis.accelerators.roofs import FILE_NAME, check_output, write_roofs
from ...kernels import baselines
from ...kernels.common.spec import Implementation
from ...results import store
from ...results.arguments import check_file, not_written
from ...results.lock import LOCK_FILE, HeldError, hold
from ...results.schema import CASE_COLUMNS, Record
from ...results.select import grouped, load_rows, marked
from .. import note, plan
from ..environment import Environment, finished_cases, without_gpu
from ..plan import Identity, PlannedCase
from ..request import Request, SweepOptions
from ..worker.noise import commonest
from ..worker.protocol import RunLimits
from . import calibrate as calibration
from . import ncu, profiling, run
from .compile_ahead import default_jobs
from .derived import Run
from .estimate import cases_s, compile_s, pairs_s
from .executors import LocalExecutor, hold_gpus
from .profiling import ProfileRow
from .progress import SweepProgress, describe_s
from .run import Outcome, get_executor, sweep
from .workers import probe_environment

Row = dict[str, Any]
WRONG = ("crash", "error", "incorrect")
PAIR_BUDGET_S = 0.25
"""Seconds that a case is timed for, beyond the fewest rounds, when it is timed in turn with others."""


def check_folder(output: Path) -> None:
    """Make the folder that ``--output`` names; ValueError where it cannot be made or written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()
    except OSError as error:
        raise ValueError(f"--output must be a folder that can be written, got {output}: {error.strerror}") from error


@contextlib.contextmanager
def hold_folder_and_gpus(output: Path, devices: int, *, wait: bool) -> Iterator[None]:
    """Keep other lrbench processes from sweeping into a folder, and from timing on the first GPUs, meanwhile.

    Args:
        wait: whether to wait until another that does has ended.

    Raises:
        HeldError: another one does; the message names it.
    """
    tell = (lambda message: note(f"waiting: {message}")) if wait else None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(output / LOCK_FILE, f"the folder {output}", tell))
            stack.enter_context(hold_gpus(devices, tell))
        except HeldError as error:
            raise HeldError(f"{error}; --wait waits until it ends") from None
        yield


def run_sweep(requests: Sequence[Request], how: SweepOptions) -> Outcome:
    """Sweep requests as one, and say on standard error what is measured, what is left out and where the rows are.

    What ``how`` leaves open: without ``calibrate`` roofs are measured on a local GPU; without ``pairs`` what is fastest
    is timed in turn (:func:`.run.fastest_of_each`) on a GPU, unless the load is sustained, Tritons are compared or this
    is a part of a sweep, which has not all rivals; ``budget_s`` is the presets' longest.

    Raises:
        ValueError: bad axes or names, a folder that cannot be written, or another lrbench that is at work there.
    """
    began = time.monotonic()
    _check_names(requests, how.gpu)
    if how.tritons and (how.executor != "local" or how.devices > 1):
        raise ValueError("--triton compares versions on one GPU: leave --executor and --devices out")
    if how.tritons and how.pairs:
        raise ValueError("--pairs compares packages, --triton versions of it: leave one of them out")
    runs_cases = get_executor(how.executor, devices=how.devices)
    check_folder(how.output)
    with hold_folder_and_gpus(how.output, how.devices if how.executor == "local" else 0, wait=how.wait), runs_cases:
        local = runs_cases if isinstance(runs_cases, LocalExecutor) else None
        sustained = any(request.sustained for request in requests)
        # On a cluster each row says what its node lacks.
        if local and sustained and (lacking := local.call("bench.worker.sustained:why_not_here")["reason"]):
            raise ValueError(f"--sustained needs {lacking}")
        if how.calibrate or (how.calibrate is None and local):
            asked = local.worker_to_ask() if local else None
            measured = calibration.calibrate(short=True, gpu_only=how.calibrate is None, session=asked)
        else:
            measured = calibration.Calibration(environment=runs_cases.environment(), rows=[], failure=None)
        environment = measured.environment
        environment_s = time.monotonic() - began
        accelerator, planned, expected_s, done = _begin(requests, environment, how)
        budget_s = how.budget_s
        if budget_s is None:
            budget_s = max(plan.preset_for(request, environment.device_kind).budget_s for request in requests)
        if measured.failure:
            note(f"not calibrated: {measured.failure}")
        note(*store.recovered_notes(how.output))
        outcome = sweep(
            planned,
            environment,
            RunLimits(timeout_s=how.timeout_s, budget_s=budget_s, note_kernels=how.profile_harness),
            SweepProgress(expected_s),
            executor=runs_cases,
            output=how.output,
            accelerator=accelerator,
            jobs=default_jobs(environment.device_kind, how) if local else 0,
            time_limit_s=how.time_limit_s,
            roofs=measured.rows,
            done=done,
        )
        note(*conclusion(outcome))
        ends = _ends_with_pairs(how, requests, environment)
        rivals = run.fastest_of_each(planned, outcome.resumed + outcome.records) if ends else []
        if rivals and not outcome.remaining:
            note(f"timing the fastest of each package at each problem in turn: {len(rivals)} cases")
            left = dataclasses.replace(how, time_limit_s=began + how.time_limit_s - time.monotonic())
            executor = get_executor(how.executor, devices=how.devices)
            again = _time_in_turn(rivals, environment, executor, left, run.problem, accelerator)
            newer = {record.case_id: record for record in again.records if record.status == "ok"}
            for each in (outcome.records, outcome.resumed):
                each[:] = [newer.get(record.case_id, record) for record in each]
            outcome = dataclasses.replace(outcome, remaining=again.remaining, interrupted=again.interrupted)
    if how.profile_harness:
        note(*where_time_went(outcome, began, environment_s, how.devices))
    return outcome


def where_time_went(outcome: Outcome, began: float, environment_s: float, devices: int) -> list[str]:
    """Return what a sweep's time went into, of the devices together, and what it compiled.

    Args:
        began: when the sweep did, as :func:`time.monotonic` tells it.
        environment_s: what it took to find out what the machine is, and to calibrate it.
    """
    whole = devices * (time.monotonic() - began)
    parts = {"the machine: first worker, calibration": environment_s * devices, **outcome.seconds}
    parts["other"] = whole - sum(parts.values())
    lines = [f"{whole / devices:.1f} s" + (f" on each of {devices} devices" if devices > 1 else "") + ", went into"]
    for what, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        lines.append(f"{seconds:8.1f} s {seconds / whole:6.1%}  {what}")
    if outcome.first_row_at is not None:
        lines.append(f"first row after {outcome.first_row_at - began:.1f} s")
    if outcome.kernels:
        cubins = len(set(outcome.kernels.values()))
        lines.append(
            f"{len(outcome.records)} cases asked for {outcome.asked} Triton kernels: "
            f"{len(outcome.kernels)} different ones, {cubins} different cubins"
        )
    return lines


def planned_rows(requests: Sequence[Request], how: SweepOptions) -> list[Row]:
    """Return a row for each case that a sweep would run, and say how long it would take; see :func:`run_sweep`."""
    # Rows are told apart by the number of threads, too.
    environment = None if how.resume else without_gpu()
    if environment is None:
        _check_names(requests, how.gpu)
        environment = probe_environment()
    _, planned, expected_s, _ = _begin(requests, environment, how)
    rows = []
    for item in planned:
        if (seconds := expected_s.get(item.identity)) is not None:
            refused = run.refuse(item, environment)
            row = {name: getattr(item.case, name) for name in CASE_COLUMNS}
            row |= {"triton": item.triton.version} if item.triton else {}
            rows.append(row | {"seconds": round(seconds, 2), "not run": "" if refused is None else refused["reason"]})
    return rows


def _check_names(requests: Sequence[Request], gpu: str | None) -> None:
    """Raise ValueError on bad axes or names, before the machine is looked at."""
    for request in requests:
        plan.plan(request, device_kind="cuda")
    if gpu is not None:
        accelerators.get_accelerator(gpu)


def _begin(
    requests: Sequence[Request], environment: Environment, how: SweepOptions
) -> tuple[str | None, list[PlannedCase], dict[Identity, float], dict[Identity, Record]]:
    """Say what will run, where its rows go, and what is left out.

    Returns:
        the accelerator that the sweep is about, its cases, identity -> expected seconds of those that are left, and
        identity -> row of the others.
    """
    gpu = how.gpu
    if gpu is None:
        gpu = environment.device_accelerator if environment.device_kind == "cuda" else accelerators.USUAL
    accelerator = gpu and accelerators.get_accelerator(gpu).key
    planned = _planned(requests, environment)
    # Tritons take turns at each case, so that clocks and heat are the same for all.
    left = planned = [dataclasses.replace(item, triton=each) for item in planned for each in how.tritons or (None,)]
    finished: dict[Identity, Record] = {}
    if how.resume:
        # The rows of a run that died are still in its journal.
        note(*store.recovered_notes(how.output))
        finished = finished_cases(how.output, environment, failed=not how.retry, tritons=bool(how.tritons))
        loads = {item.identity for item in planned if item.sustained}
        finished = {key: row for key, row in finished.items() if key not in loads or row.sustained_ms is not None}
        busy = {key for key, row in zip(finished, marked(finished.values()), strict=True) if row.noise and how.retry}
        finished = {key: row for key, row in finished.items() if key not in busy}
        # What was measured on a busy machine comes last.
        planned.sort(key=lambda item: item.identity in busy)
        if not how.retry and (files := store.files_in(how.output)):
            stored = {row["case_id"] for row in load_rows(files, ["case_id"])}
            untried = stored - {case_id for case_id, _ in finished}
            planned = [i for i in planned if i.case.case_id not in untried or not run.refuse(i, environment)]
            # What has no row at all comes before what has one of older code.
            planned.sort(key=lambda item: item.case.case_id in stored)
        left = [item for item in planned if item.identity not in finished]
        there = len(planned) - len(left)
        done = f"{there} of {len(planned)} cases were already there, measured by this code on this device"
        if busy:
            done += f"; {len(busy)} {'is' if len(busy) == 1 else 'are'} there from a busy machine: measured again"
        note(done if left else f"{done}: nothing is left to measure")
        if not left:
            return accelerator, planned, {}, finished
    times = cases_s(left, environment)
    expected_s = dict(zip((item.identity for item in left), times, strict=True))
    tried = [item for item, seconds in zip(left, times, strict=True) if seconds]
    in_turn_s = pairs_s(tried) if _ends_with_pairs(how, requests, environment) else 0.0
    compiling_s = compile_s(tried, environment, default_jobs(environment.device_kind, how))
    seconds = sum(times) / how.devices + compiling_s + in_turn_s
    note(*introduction(requests, environment, accelerator, left, seconds))
    if in_turn_s:
        note(f"of these {describe_s(in_turn_s)} at the end, to time the fastest of each package in turn (--no-pairs)")
    if how.output.is_dir() and (beside := len(list(how.output.rglob("*.parquet")))):
        number = f"{beside} that {'is' if beside == 1 else 'are'}"
        note(f"rows go to a file of their own in {how.output}, beside {number} there")
    return accelerator, planned, expected_s, finished


def _ends_with_pairs(how: SweepOptions, requests: Sequence[Request], environment: Environment) -> bool:
    """Whether a sweep ends with the fastest of each package in turn, see :func:`run_sweep`."""
    alone = not any(request.sustained or request.shard != (1, 1) for request in requests)
    return how.pairs if how.pairs is not None else environment.device_kind == "cuda" and alone and not how.tritons


def _planned(requests: Sequence[Request], environment: Environment) -> list[PlannedCase]:
    """Return the cases for this device; ValueError says why there are none, of the first request."""
    each = (plan.plan(request, device_kind=environment.device_kind) for request in requests)
    if planned := plan.in_run_order(itertools.chain.from_iterable(each)):
        return planned
    request = requests[0]
    if request.shard != (1, 1):
        raise ValueError("no case is left: --shard has more parts than the sweep has cases")
    elsewhere = "cpu" if environment.device_kind == "cuda" else "cuda"
    if names := dict.fromkeys(item.case.impl for item in plan.plan(request, device_kind=elsewhere)):
        raise ValueError(f"no case is left on {environment.device_name}: {', '.join(names)} run on {elsewhere}")
    raise ValueError(f"no case is left: nothing of kernel {request.kernel} has these modes and dtypes")


def introduction(
    requests: Sequence[Request],
    environment: Environment,
    accelerator: str | None,
    planned: Sequence[PlannedCase],
    seconds: float,
) -> list[str]:
    """Return the first lines of a sweep: where, for how long, about which accelerator, and what it leaves out."""
    kind = environment.device_kind
    presets = ", ".join(dict.fromkeys(plan.preset_for(request, kind).name for request in requests))
    where = f"measuring on {environment.device_name} ({kind})"
    lines = [f"{where}, preset {presets}: {len(planned)} cases, {describe_s(seconds)}"]
    if tritons := dict.fromkeys(item.triton.version for item in planned if item.triton):
        lines.append(f"each problem in turn with Triton {', '.join(tritons)}")
    if accelerator is not None and kind == "cpu" and accelerator != "cpu":
        part = accelerators.get_accelerator(accelerator)
        lines.append(
            f"no GPU here: rows are CPU measurements of the portable implementations, "
            f"and model_time_ms is what the runtime model says for the {part.name} ({part.part})"
        )
    elif accelerator is not None and accelerator != environment.device_accelerator:
        device = environment.device_accelerator or "a device without a known specification"
        lines.append(
            f"--gpu {accelerator} ({accelerators.get_accelerator(accelerator).part}) is not this device: "
            f"rows record {device}, model_time_ms is for {accelerator}"
        )
    elsewhere = dict.fromkeys(name for request in requests for name in plan.not_planned(request, kind))
    if elsewhere:
        lines.append(f"not measured here, they need another device: {', '.join(elsewhere)}")
    # Remarks hold one request against all planned cases: with several requests they would be wrong.
    return lines + (plan.remarks(requests[0], planned) if len(requests) == 1 else [])


def conclusion(outcome: Outcome) -> list[str]:
    """Return the last lines of a sweep: where the rows are, and what is left."""
    lines = []
    if outcome.remaining:
        why = "interrupted: " if outcome.interrupted else ""
        there = len(outcome.resumed) + len(outcome.records)
        left = f"{there} cases have rows, {outcome.remaining} are left; the same command with --resume runs them"
        lines.append(f"{why}{left}")
    rows = outcome.resumed + outcome.records
    if rows and not outcome.remaining and not _any_timed(outcome):
        ((status, reason), count) = Counter((row.status, row.reason) for row in rows).most_common(1)[0]
        why = " ".join(f"{status}: {reason}".split())
        lines.append(f"no case could be timed; the commonest reason ({count} of {len(rows)} cases): {why}")
    if noisy := [row.noise for row in marked(outcome.records) if row.noise]:
        lines.append(
            f"warning: {len(noisy)} of {len(outcome.records)} cases were measured on a busy machine, mostly "
            f"{commonest(noisy)}. A check calls them unclear; the same command with --resume measures them again"
        )
    if outcome.path or not outcome.resumed:
        lines.append(f"results: {outcome.path}" if outcome.path else "no row was written")
    return lines


def _any_timed(outcome: Outcome) -> bool:
    return any(record.status == "ok" for record in outcome.resumed + outcome.records)


def exit_code(outcome: Outcome, *, strict: bool) -> int:
    """Return a sweep's exit code.

    0 when every planned case has a row; 1 when cases are left or none could be timed, or with ``strict`` when one
    crashed, failed or was wrong; 130 after an interrupt.
    """
    if outcome.interrupted:
        return 130
    wrong = strict and any(record.status in WRONG for record in outcome.records)
    return 1 if outcome.remaining or wrong or not _any_timed(outcome) else 0


def run_verify(kernel: str, ops: tuple[str, ...] | None, *, timeout_s: float) -> list[dict[str, object]]:
    """Check every implementation that runs here against its reference and return a row for each case.

    On a CPU with TRITON_INTERPRET=1 these are the Triton kernels, in its interpreter on small sizes.

    Raises:
        ValueError: an unknown name, or nothing runs here.
    """
    request = Request(kernel=kernel, preset="verify", ops=ops)
    plan.plan(request, device_kind="cuda")
    environment = probe_environment()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and environment.device_kind == "cpu"
    if interpreted:
        request = dataclasses.replace(request, preset="interpret")
        planned = cases_to_verify(interpretable(plan.plan(request, device_kind="cuda")))
    else:
        planned = cases_to_verify(_planned([request], environment))
    how = "in Triton's interpreter" if interpreted else f"({environment.device_kind})"
    note(f"checking on {environment.device_name} {how}: {len(planned)} cases")
    elsewhere = plan.not_planned(request, environment.device_kind)
    if elsewhere and not interpreted:
        note(f"not checked here, they need another device: {', '.join(elsewhere)}")
    limits = RunLimits(timeout_s=timeout_s, action="verify", device_kind=environment.device_kind)
    shown = ("op", "impl", "mode", "dtype", "state_dtype", "status", "rel_error", "checked", "reason")
    with LocalExecutor() as executor:
        measured = run.measure(planned, Run.start(environment), limits, executor=executor)
        return [{name: getattr(record, name) for name in shown} for _, record, _ in measured]


def interpretable(planned: Sequence[PlannedCase]) -> list[PlannedCase]:
    """Return the cases of our Triton kernels as ones for a CPU, where Triton's interpreter runs them.

    Kernels for one compute capability are written in Gluon, which has no interpreter.
    """
    return [
        dataclasses.replace(item, target=dataclasses.replace(ours, devices=("cpu",)))
        for item in planned
        if isinstance(ours := item.target, Implementation) and "triton" in ours.requires and not ours.architectures
    ]


def cases_to_verify(planned: Sequence[PlannedCase]) -> list[PlannedCase]:
    """Leave out the forward passes of what has gradients: they are checked together with these."""
    return [item for item in planned if item.case.mode != "fw" or "fwbw" not in item.target.modes]


def run_calibrate(output: Path, show: Callable[[list[Row]], None], *, remember: bool) -> None:
    """Measure this device's roofs, add them to a file, and show them beside the specification.

    Args:
        remember: whether a CPU's become those of this machine, if it was idle.

    Raises:
        ValueError: ``output`` holds something else, or cannot be written; what was measured is shown all the same. Or
            another lrbench uses the GPU.
        RuntimeError: the device could not be measured.
    """
    path = output if output.suffix == ".parquet" else output / store.OTHER / FILE_NAME
    check_file(path, "--output")
    check_output(path)
    with hold_gpus():
        done = calibration.calibrate(short=False)
    if done.failure:
        raise RuntimeError(f"cannot calibrate {done.environment.device_name}: {done.failure}")
    accelerator = done.environment.device_accelerator or "not specified: lrbench gpus"
    note(f"calibrated {done.environment.device_name} ({accelerator})")
    try:
        write_roofs(done.rows, path)
        note(f"calibration: {path}")
        if done.noise:
            note(f"warning: measured on a busy machine: {done.noise}")
        if done.environment.device_kind == "cpu":
            if remember and not done.noise:
                calibration.remember_cpu(done.rows)
            else:
                why = "again when the machine is idle" if remember else "without --output"
                note(f"the roofs of this machine stay as they were: calibrate {why} to renew them")
    except OSError as error:
        raise not_written(path, "--output", error) from error
    finally:
        show(calibration.summary_rows(done.rows))


def run_live(request: Request, *, ignore: Sequence[str], rounds: int, output: Path | None) -> list[list[Row]]:
    """Measure two implementations in turn and return the rows of each.

    Raises:
        ValueError: bad axes or names, or no case of one matches one of the other.
    """
    names = request.impls or ()
    if len(set(names)) < 2:
        raise ValueError(f"--live compares two implementations, got {names[0]} twice")
    plan.plan(request, device_kind="cuda")
    if output is not None:
        check_folder(output)
    environment = probe_environment()
    planned = plan.plan(request, device_kind=environment.device_kind)
    note(f"measuring on {environment.device_name} ({environment.device_kind}): {len(planned)} cases in turn")
    if not _matched(planned, ignore):
        why = _why_unmatched(planned, ignore, environment)
        raise ValueError(f"no case of {names[0]} matches one of {names[1]}: {why}")
    limits = RunLimits(timeout_s=math.inf, rounds=rounds)
    how: dict[str, Any] = {"group_by": run.problem_beside(ignore), "prefix": store.LIVE_PREFIX, "output": output}
    with hold_gpus():
        outcome = sweep(planned, environment, limits, SweepProgress(), executor=LocalExecutor(), **how)
    if outcome.path is not None:
        note(f"results: {outcome.path}")
    if outcome.interrupted:
        raise KeyboardInterrupt
    return [[dataclasses.asdict(record) for record in outcome.records if record.impl == name] for name in names]


def _matched(planned: Sequence[PlannedCase], ignore: Sequence[str]) -> bool:
    groups = grouped(planned, run.problem_beside(ignore)).values()
    return any(len({item.case.impl for item in group}) > 1 for group in groups)


def _why_unmatched(planned: Sequence[PlannedCase], ignore: Sequence[str], environment: Environment) -> str:
    """Say what keeps two implementations' cases apart: the device that one needs, or columns that differ."""
    here = environment.device_kind
    for item in planned:
        if here not in item.target.devices:
            return f"{item.case.impl} runs on {' or '.join(item.target.devices)}, this device is {here}"
    for column in CASE_COLUMNS:
        if _matched(planned, (*ignore, column)):
            return f"they differ in {column}; --ignore {column} leaves it out"
    return "--ignore COLUMN leaves a column out"


def run_in_turn(groups: Sequence[Sequence[Mapping[str, Any]]], how: SweepOptions) -> Outcome | None:
    """Time the cases of rows again, those of a group in turn, and write their new rows; None where that cannot be.

    Of ``how`` the folder and the time limits count.
    """
    environment = probe_environment()
    rows = [row for group in groups for row in group]
    if {row["device_accelerator"] for row in rows} != {environment.device_accelerator}:
        of = rows[0]["device_accelerator"]
        note(f"not timed in turn: the rows are of {of}, this machine is {environment.device_name}")
        return None
    check_folder(how.output)
    number = {row["case_id"]: n for n, group in enumerate(groups) for row in group}
    with hold_folder_and_gpus(how.output, 1, wait=False):
        note(f"timing {len(rows)} cases in turn, in {len(groups)} groups, on {environment.device_name}")
        planned = [run.planned_again(row) for row in rows]
        return _time_in_turn(planned, environment, LocalExecutor(), how, lambda item: number[item.case.case_id])


def _time_in_turn(
    planned: Sequence[PlannedCase],
    environment: Environment,
    executor: run.Executor,
    how: SweepOptions,
    group_by: Callable[[PlannedCase], Hashable],
    accelerator: str | None = None,
) -> Outcome:
    """Time cases in turn, those of a group beside each other, and write their rows."""
    outcome = sweep(
        planned,
        environment,
        RunLimits(timeout_s=how.timeout_s, budget_s=PAIR_BUDGET_S),
        SweepProgress(),
        executor=executor,
        output=how.output,
        prefix=store.PAIRS_PREFIX,
        only_ok=True,
        accelerator=accelerator,
        group_by=group_by,
        time_limit_s=how.time_limit_s,
        jobs=default_jobs(environment.device_kind, how) if isinstance(executor, LocalExecutor) else 0,
    )
    note(*conclusion(outcome))
    return outcome


def measure_again(rows: Sequence[Mapping[str, Any]], *, timeout_s: float, budget_s: float) -> Mapping[str, Row]:
    """Measure cases again and return their new rows by case id; where that cannot be, say why."""
    environment = probe_environment()
    if reason := run.why_not_again(rows, environment):
        note(f"not measured again: {reason}")
        return {}
    planned = [dataclasses.replace(run.planned_again(r), sustained=r.get("sustained_ms") is not None) for r in rows]
    limits = RunLimits(timeout_s=timeout_s, budget_s=budget_s)
    try:
        with hold_gpus(), LocalExecutor() as executor:
            note(f"measuring {len(rows)} cases again on {environment.device_name}")
            measured = run.measure(planned, Run.start(environment), limits, executor=executor)
            return {record.case_id: dataclasses.asdict(record) for _, record, _ in measured}
    except HeldError as error:
        note(f"not measured again: {error}")
        return {}


def plan_profile(request: Request) -> list[PlannedCase]:
    """Return the cases to profile: of the family's first operation and its first implementation, unless named.

    Raises:
        ValueError: bad axes or names, or no case.
    """
    ops = request.ops or kernels.FAMILIES[request.kernel][:1]
    first = tuple(implementation.name for implementation in baselines.get_operation(ops[0]).implementations[:1])
    request = dataclasses.replace(request, ops=ops, impls=request.impls or first or None)
    planned = plan.plan(request, device_kind="cuda")
    if not planned:
        raise ValueError(f"no case is left: nothing of kernel {request.kernel} has these modes and dtypes")
    return planned


def profile_command(planned: Sequence[PlannedCase], ncu_path: str | None) -> str:
    """Return the ncu command that would profile the cases, as a shell takes it."""
    program = ncu_path or ncu.find_ncu()
    metrics = ncu.available_metrics(program) if program else ncu.METRICS
    folder = Path(tempfile.mkdtemp(prefix="lrbench-profile-"))
    command, environ = profiling.prepare(planned, folder, program or "ncu", metrics)
    return shlex.join(["env", *(f"{name}={value}" for name, value in environ.items()), *command])


def run_profile(
    planned: Sequence[PlannedCase], *, output: Path, ncu_path: str | None, timeout_s: float
) -> tuple[list[ProfileRow], Path]:
    """Count cases with Nsight Compute; return their rows and the file they are in.

    Raises:
        ValueError: no ncu, or no GPU.
        RuntimeError: ncu failed.
    """
    program = ncu_path or ncu.find_ncu()
    if program is None or shutil.which(program) is None:
        raise ValueError(f"ncu (Nsight Compute) must be on PATH or named with --ncu, got {program or 'none'}")
    environment = probe_environment()
    if environment.device_kind != "cuda":
        raise ValueError(f"profile needs a GPU, got {environment.device_name}")
    check_folder(output)
    if not any(output.iterdir()):
        # The file's writer makes it again; if ncu fails, no empty folder is left.
        output.rmdir()
    note(f"profiling on {environment.device_name}: {len(planned)} cases")
    tried, refused = run.separate(planned, environment)
    started = Run.start(environment)
    rows = profiling.profile(tried, started, program, timeout_s) if tried else []
    rows += [profiling.build_row(started, item, reply, None, None) for item, reply in refused]
    return rows, run.write_other(rows, rows[0].kernel, output, "profile")
