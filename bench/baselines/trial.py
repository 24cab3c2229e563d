"""Run every baseline once: right at a small size, and how long at a large one.

    python -m lrbench.bench.baselines.trial --json trial.json

A first look at an environment, before a sweep spends hours in it: which packages import, compile, agree with their
reference and in what time they run. Every stage of every baseline has a process and a time limit of its own, so a
compiler abort or a hang costs one row. The timings are rough (median of ten, no flush of the L2 cache); the sweep
measures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ...kernels.spec import Operation, resolve
from ..case import Case
from . import BASELINES, availability, get_baseline, get_operation, installed_versions, known_bad_here, plan_sizes
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

STAGES = ("check", "time")
CHECK_SIZES = {"batch": 1, "seq_len": 1024, "num_heads": 4, "head_dim_qk": 128, "head_dim_v": 256}
TIME_SIZES = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}
TOLERANCE = {"fp64": 1e-10, "fp32": 2e-3, "fp16": 1e-2, "bf16": 3e-2}
"""Largest relative error that passes: a screen for wrong code, not an accuracy test."""

DTYPE_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
WARMUP_CALLS, TIMED_CALLS = 3, 10


def make_case(baseline: Baseline, family: Mapping[str, int], *, mode: str, dtype: str | None = None) -> Case:
    """Return the case at which ``baseline`` runs beside a family of these sizes, with its recommended settings."""
    sizes: dict[str, Any] = plan_sizes(baseline, family)[0]
    return Case(
        kernel=baseline.kernels[0],
        op=baseline.op,
        impl=baseline.name,
        provider=baseline.provider,
        mode=mode,
        dtype=dtype or baseline.dtypes[0],
        **sizes,
    )


def make_inputs(operation: Operation, case: Case, device: str, *, seed: int = 0) -> dict[str, Tensor]:
    """Draw one sequence of the case and repeat it over the batch: large inputs are drawn on the CPU, which is slow."""
    import torch

    dtype = getattr(torch, DTYPE_NAMES[case.dtype])
    drawn = resolve(operation.inputs)({**case.sizes, "batch": 1}, dtype=dtype, device=device, seed=seed)
    batch = case.batch or 1
    return {
        name: tensor.repeat(batch, *[1] * (tensor.dim() - 1)) if tensor.dim() > 2 else tensor
        for name, tensor in drawn.items()
    }


def relative_errors(operation: Operation, runnable: Runnable, inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Compare output and gradients with the operation's reference in float64 on the same inputs.

    Returns:
        For "out" and every leaf, ||x - reference|| / ||reference||.
    """
    import torch

    precise = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    expected = resolve(operation.parallel or operation.recurrent)(*precise.values())
    out = runnable.forward()
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator).to(out)
    got = {"out": runnable.to_canonical("out", out)}
    weights = runnable.to_canonical("out", grad_out).double()
    want = {"out": expected}
    names = list(runnable.leaves)
    grads = torch.autograd.grad(out, list(runnable.leaves.values()), grad_out)
    got |= {name: runnable.to_canonical(name, grad) for name, grad in zip(names, grads, strict=True)}
    want |= dict(zip(names, torch.autograd.grad(expected, [precise[name] for name in names], weights), strict=True))
    return {name: ((got[name] - want[name]).norm() / want[name].norm()).item() for name in want}


def time_ms(runnable: Runnable, *, backward: bool) -> float:
    """Return the median time of a call in milliseconds, on the device the leaves are on."""
    import torch

    leaves = list(runnable.leaves.values())
    grad_out = torch.randn_like(runnable.forward())

    def call() -> None:
        if backward:
            torch.autograd.grad(runnable.forward(), leaves, grad_out)
        else:
            with torch.no_grad():
                runnable.forward()

    for _ in range(WARMUP_CALLS):
        call()
    times = []
    for _ in range(TIMED_CALLS):
        if leaves[0].is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def run_stage(baseline: Baseline, stage: str, device: str) -> dict[str, Any]:
    """Run one stage in this process; exceptions become a row with their text."""
    import torch

    gradients = "fwbw" in baseline.modes
    case = make_case(baseline, CHECK_SIZES if stage == "check" else TIME_SIZES, mode="fwbw" if gradients else "fw")
    row: dict[str, Any] = {"sizes": case.sizes, "dtype": case.dtype}
    began = time.perf_counter()
    try:
        operation = get_operation(baseline.op)
        inputs = make_inputs(operation, case, device)
        runnable = resolve(baseline.build)(case, inputs)
        if stage == "check":
            errors = relative_errors(operation, runnable, inputs)
            if not gradients:
                errors = {"out": errors["out"]}
            worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
            row |= {"rel_errors": errors, "rel_error": errors[worst], "worst": worst}
            row["status"] = "ok" if errors[worst] <= TOLERANCE[case.dtype] else "incorrect"
            row["reason"] = None if row["status"] == "ok" else f"{worst} is off by {errors[worst]:.1e}"
        else:
            inputs.clear()
            row["fw_ms"] = time_ms(runnable, backward=False)
            if gradients:
                row["fwbw_ms"] = time_ms(runnable, backward=True)
            row |= {"status": "ok", "reason": None}
            if device == "cuda":
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    # Whatever an outside package raises is this row's result.
    except Exception as error:  # noqa: BLE001
        oom = isinstance(error, torch.OutOfMemoryError)
        row |= {"status": "oom" if oom else "error", "reason": f"{type(error).__name__}: {str(error)[:300]}"}
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def spawn_stage(baseline: Baseline, stage: str, device: str, timeout_s: float) -> dict[str, Any]:
    """Run one stage in a process group of its own, killed when the time limit passes."""
    command = [sys.executable, "-m", __spec__.name, "--worker", stage, "--only", baseline.name, "--device", device]
    row: dict[str, Any] = {"op": baseline.op, "name": baseline.name, "stage": stage}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return row | {"status": "timeout", "reason": f"not finished after {timeout_s:.0f} s"}
    lines = out.strip().splitlines()
    if process.returncode == 0 and lines:
        return row | json.loads(lines[-1])
    last = next((line for line in reversed(err.strip().splitlines()) if line.strip()), "no output")
    return row | {"status": "crash", "reason": f"exit status {process.returncode}: {last[:300]}"}


def reason_not_to_run(baseline: Baseline, stage: str, device: str, *, include_known_bad: bool) -> dict[str, Any] | None:
    """Return the row of a baseline that is missing, of another device or known to fail here; None: run it."""
    row = {"op": baseline.op, "name": baseline.name, "stage": stage}
    if device not in baseline.devices:
        return row | {"status": "unsupported", "reason": f"runs on {', '.join(baseline.devices)}, not on {device}"}
    if missing := availability(baseline):
        return row | {"status": "unavailable", "reason": missing}
    case = make_case(
        baseline,
        CHECK_SIZES if stage == "check" else TIME_SIZES,
        mode="fwbw" if "fwbw" in baseline.modes else "fw",
    )
    bad = known_bad_here(baseline, case, installed_versions(), _capability(device))
    if bad and not include_known_bad:
        return row | {"status": "unsupported", "reason": bad}
    return None


def _capability(device: str) -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability() if device == "cuda" else None


def format_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as a table: name, stage, status, times, error, reason."""
    lines = [f"{'baseline':32} {'stage':6} {'status':12} {'fw ms':>8} {'fwbw ms':>8} {'GiB':>5} {'error':>8}  reason"]
    for row in rows:
        fw, fwbw, peak = (row.get(name) for name in ("fw_ms", "fwbw_ms", "peak_gib"))
        error = row.get("rel_error")
        lines.append(
            f"{row['name']:32} {row['stage']:6} {row['status']:12} {_number(fw, '8.2f')} {_number(fwbw, '8.2f')} "
            f"{_number(peak, '5.1f')} {_number(error, '8.1e')}  {row.get('reason') or ''}"
        )
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else "".rjust(int(form.split(".")[0]))


def main(argv: list[str] | None = None) -> int:
    """Run the trial; exit status 0 when everything that could run here did so and was right."""
    parser = argparse.ArgumentParser(prog="python -m lrbench.bench.baselines.trial", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="also write the rows and the versions here")
    parser.add_argument("--only", nargs="*", help="names of baselines; all by default")
    parser.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one stage of one baseline")
    parser.add_argument("--jobs", type=int, default=4, help="checks at a time; timings always run alone")
    parser.add_argument("--include-known-bad", action="store_true", help="run what is declared known to fail here")
    parser.add_argument("--worker", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)

    names = [baseline.name for baseline in BASELINES]
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"--only must be among {', '.join(names)}, got {', '.join(sorted(unknown))}")
    chosen = [baseline for baseline in BASELINES if not options.only or baseline.name in options.only]
    if options.worker:
        print(json.dumps(run_stage(get_baseline(chosen[0].op, chosen[0].name), options.worker, options.device)))
        return 0

    rows: list[dict[str, Any]] = []

    def report(baseline: Baseline, stage: str) -> dict[str, Any]:
        row = reason_not_to_run(baseline, stage, options.device, include_known_bad=options.include_known_bad)
        return row or spawn_stage(baseline, stage, options.device, options.timeout)

    for stage in options.stages:
        with ThreadPoolExecutor(options.jobs if stage == "check" else 1) as pool:
            for row in pool.map(lambda baseline, stage=stage: report(baseline, stage), chosen):
                rows.append(row)
                print(format_table([row]).splitlines()[1], flush=True)
                if options.json:
                    with open(options.json, "w") as file:
                        json.dump({"versions": installed_versions(), "rows": rows}, file, indent=1)
    print(format_table(rows))
    return int(any(row["status"] not in ("ok", "unsupported", "unavailable") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
