"""One function per command of the benchmark; each prints and returns the exit code."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from ..analysis.accelerators import known as accelerators
from ..analysis.accelerators.roofs import check_output, write_roofs
from ..kernels import baselines
from ..results import store
from . import calibrate as calibration
from . import display, inventory, ncu, plan
from .compile_ahead import default_jobs
from .environment import Environment, probe_environment
from .estimate import describe_s, estimate_s
from .plan import PlannedCase, Request
from .profiling import (
    ProfileRow,
    build_row,
    kernel_rows,
    prepare_session,
    profile,
    remarks,
    session_folder,
    summary_rows,
    write_profile,
)
from .run import Outcome, Settings, separate, sweep
from .verify import verification_plan, verification_request, verify
from .workers import get_executor

WRONG = ("crash", "error", "incorrect")
INTERRUPTED = 130


def sweep_command(
    request: Request,
    *,
    accelerator: str | None,
    output: Path,
    timeout_s: float,
    budget_s: float | None,
    time_limit_s: float | None,
    resume: bool,
    jobs: int | None,
    executor: str,
    devices: int,
    strict: bool,
    calibrate: bool | None,
    output_format: str,
) -> int:
    """Run a sweep, print the path of its file and its tables, with the rows that were already there.

    Args:
        calibrate: whether the device's roofs are measured first and stored beside the rows; None: on a local GPU.

    Returns:
        0 when every planned case has a row; 1 when cases are left, or with ``strict`` when one crashed, failed or was
        wrong; 130 after an interrupt.

    Raises:
        ValueError: bad axes or names, or a folder that cannot be written.
    """
    display.check_format(output_format)
    if accelerator is not None:
        accelerator = accelerators.get_accelerator(accelerator).key
    # What is asked for is checked before the machine is looked at, which takes seconds: a mistake answers at once.
    plan.plan(request, device_kind="cuda")
    get_executor(executor, devices=devices)
    check_folder(output)
    wanted = executor == "local" if calibrate is None else calibrate
    measured = calibration.calibrate(short=True, gpu_only=calibrate is None) if wanted else None
    environment = probe_environment() if measured is None else measured.environment
    planned = plan.plan(request, device_kind=environment.device_kind)
    if not planned:
        raise ValueError(nothing_planned(request, environment))
    preset = plan.preset_for(request, environment.device_kind)
    for line in introduction(request, preset.name, environment, accelerator, planned):
        display.note(line)
    if measured is not None and measured.failure:
        display.note(f"not calibrated: {measured.failure}")
    settings = Settings(
        output=output,
        accelerator=accelerator,
        timeout_s=timeout_s,
        budget_s=preset.budget_s if budget_s is None else budget_s,
        resume=resume,
        executor=executor,
        devices=devices,
        jobs=default_jobs(environment.device_kind) if jobs is None else jobs,
        time_limit_s=time_limit_s,
        roofs=() if measured is None else tuple(measured.rows),
    )
    outcome = sweep(planned, environment, settings, display.SweepProgress())
    for line in conclusion(outcome):
        display.note(line)
    records = outcome.resumed + outcome.records
    with display.reader_may_leave():
        if output_format == "table":
            display.print_summary(records)
        else:
            display.show(display.records_as_rows(records), output_format)
    return exit_code(outcome, strict=strict)


def check_folder(output: Path) -> None:
    """Make the folder that ``--output`` names; ValueError where it cannot be made or written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()
    except OSError as error:
        raise ValueError(f"--output must be a folder that can be written, got {output}: {error.strerror}") from error


def introduction(
    request: Request, preset: str, environment: Environment, accelerator: str | None, planned: Sequence[PlannedCase]
) -> list[str]:
    """Return the first lines of a sweep: where, for how long, about which accelerator, and what it leaves out."""
    where = f"measuring on {environment.device_name}"
    time = describe_s(estimate_s(planned, environment))
    lines = [f"{where} ({environment.device_kind}), preset {preset}: {len(planned)} cases, {time}"]
    if accelerator is not None and environment.device_kind == "cpu" and accelerator != "cpu":
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
    elsewhere = plan.not_planned(request, environment.device_kind)
    if elsewhere:
        lines.append(f"not measured here, they need another device: {', '.join(elsewhere)}")
    return lines + plan.remarks(request, planned)


def nothing_planned(request: Request, environment: Environment) -> str:
    """Return why a request has no case on this device."""
    elsewhere = "cpu" if environment.device_kind == "cuda" else "cuda"
    names = dict.fromkeys(item.case.impl for item in plan.plan(request, device_kind=elsewhere))
    if names:
        return f"no case is left on {environment.device_name}: {', '.join(names)} run on {elsewhere}"
    return f"no case is left: nothing of kernel {request.kernel} has these modes and dtypes"


def conclusion(outcome: Outcome) -> list[str]:
    """Return the last lines of a sweep: where the rows are, and what is left."""
    lines = store.recovered_notes(outcome.recovered)
    if outcome.resumed:
        lines.append(f"{len(outcome.resumed)} cases were already there")
    if outcome.remaining:
        why = "interrupted" if outcome.interrupted else "out of time"
        lines.append(f"{why}: {outcome.remaining} cases are left; the same command with --resume runs them")
    lines.append(f"results: {outcome.path}" if outcome.path else "no row was written")
    return lines


def exit_code(outcome: Outcome, *, strict: bool) -> int:
    """Return the exit code of a sweep, see :func:`sweep_command`."""
    if outcome.interrupted:
        return INTERRUPTED
    wrong = strict and any(record.status in WRONG for record in outcome.records)
    return 1 if outcome.remaining or wrong else 0


def verify_command(kernel: str, ops: tuple[str, ...] | None, *, timeout_s: float, output_format: str) -> int:
    """Check every implementation against its reference and print the errors; 1 when one is wrong or fails.

    Raises:
        ValueError: an unknown name, or nothing runs here.
    """
    display.check_format(output_format)
    request = verification_request(kernel, ops)
    verification_plan(request, "cuda")
    environment = probe_environment()
    planned = verification_plan(request, environment.device_kind)
    if not planned:
        raise ValueError(nothing_planned(request, environment))
    display.note(f"checking on {environment.device_name} ({environment.device_kind}): {len(planned)} cases")
    elsewhere = plan.not_planned(request, environment.device_kind)
    if elsewhere:
        display.note(f"not checked here, they need another device: {', '.join(elsewhere)}")
    rows = list(verify(planned, environment, timeout_s=timeout_s))
    display.show(rows, output_format)
    return int(any(row["status"] in (*WRONG, "oom", "timeout") for row in rows))


def gpus_command(*, output_format: str) -> None:
    """Print the accelerators that ``--gpu`` takes, and where their figures are from."""
    display.check_format(output_format)
    rows = inventory.gpu_rows()
    if output_format != "table":
        display.show(rows, output_format)
        return
    texts = ("source", "measured", "defined_in")
    display.show([{name: v for name, v in row.items() if name not in texts} for row in rows], "table")
    print()
    display.show([{name: row[name] for name in ("key", *texts)} for row in rows], "table", title="where from")


def calibrate_command(*, output: Path, output_format: str) -> None:
    """Measure this device's roofs, print them beside the specification and add them to a file.

    Raises:
        ValueError: a bad format, or ``output`` holds something else.
        RuntimeError: the device could not be measured.
    """
    display.check_format(output_format)
    path = calibration.output_file(output)
    check_output(path)
    done = calibration.calibrate(short=False)
    if done.failure:
        raise RuntimeError(f"cannot calibrate {done.environment.device_name}: {done.failure}")
    accelerator = done.environment.device_accelerator or "not specified: lrbench gpus"
    display.note(f"calibrated {done.environment.device_name} ({accelerator})")
    write_roofs(done.rows, path)
    if done.environment.device_kind == "cpu":
        calibration.remember_cpu(done.rows)
    display.show(calibration.summary_rows(done.rows), output_format)
    display.note(f"calibration: {path}")


def profile_command(
    request: Request, *, output: Path, ncu_path: str | None, timeout_s: float, dry_run: bool, output_format: str
) -> int:
    """Count cases with Nsight Compute, print counters beside counts, and write them to a file.

    Returns:
        0 when every case was profiled, else 1.

    Raises:
        ValueError: bad axes or names, no ncu, or no GPU.
        RuntimeError: ncu failed.
    """
    display.check_format(output_format)
    ops = request.ops or (inventory.resolve_operation(request.kernel, None),)
    first = tuple(implementation.name for implementation in baselines.get_operation(ops[0]).implementations[:1])
    request = dataclasses.replace(request, ops=ops, impls=request.impls or first or None)
    planned = plan.plan(request, device_kind="cuda")
    if not planned:
        raise ValueError(f"no case is left: nothing of kernel {request.kernel} has these modes and dtypes")
    program = ncu_path or ncu.find_ncu()
    if dry_run:
        metrics = ncu.available_metrics(program) if program else ncu.METRICS
        print(prepare_session(planned, session_folder(), program or "ncu", metrics).as_shell())
        return 0
    if program is None or shutil.which(program) is None:
        raise ValueError(f"ncu (Nsight Compute) must be on PATH or named with --ncu, got {program or 'none'}")
    environment = probe_environment()
    if environment.device_kind != "cuda":
        raise ValueError(f"profile needs a GPU, got {environment.device_name}")
    display.note(f"profiling on {environment.device_name}: {len(planned)} cases")
    tried, refused = separate(planned, environment)
    run_id = uuid.uuid4().hex
    rows = [build_row(run_id, item, environment, reply, None, None) for item, reply in refused]
    if tried:
        with tempfile.TemporaryDirectory(prefix="lrbench-profile-") as folder:
            session = prepare_session(tried, Path(folder), program, ncu.available_metrics(program))
            version = ncu.ncu_version(program)
            done = profile(tried, environment, session, run_id=run_id, timeout_s=timeout_s, version=version)
        rows = done + rows
    path = write_profile(rows, output)
    _show_profile(rows, output_format)
    display.note(f"profile: {path}")
    return int(any(row.status != "ok" for row in rows))


def _show_profile(rows: Sequence[ProfileRow], output_format: str) -> None:
    if output_format == "table":
        display.show(summary_rows(rows), "table")
        print()
        display.show(kernel_rows(rows), "table", title="kernels")
        for line in remarks(rows):
            print(line)
    elif output_format == "json":
        display.show([dataclasses.asdict(row) for row in rows], "json")
    else:
        display.show(summary_rows(rows), "csv")


def doctor_command(*, output_format: str) -> None:
    """Print the environment, the outside packages and the known failures."""
    display.check_format(output_format)
    environment = probe_environment()
    sections = {
        "environment": inventory.environment_rows(environment),
        "packages": inventory.package_rows(),
        "known failures": inventory.known_bad_rows(environment),
    }
    if output_format == "table":
        for title, rows in sections.items():
            display.show(rows, "table", title=title)
            print()
        return
    display.show([{"section": title, **row} for title, rows in sections.items() for row in rows], output_format)
