"""``lrbench profile``: cases under Nsight Compute, hardware counters beside the counted FLOPs and bytes.

All cases run in one worker process under one ncu, because starting both takes longer than counting. The worker builds
a case's inputs, calls it twice, and then once more between cudaProfilerStart and cudaProfilerStop. ncu does not tell
these ranges apart, so each begins with a kernel of a name that nothing else has (:meth:`.worker.Worker.profile`). The
worker reads its requests from one file and writes its replies into another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...analysis import counts
from ...analysis.counts.hardware_counters import compare
from ...results.schema import ProfileRow
from ..environment import worker_settings
from ..plan import PlannedCase
from ..worker.protocol import SERVE, RunLimits, encode_request, not_measured
from . import ncu
from .derived import Run, planned_columns
from .ncu import KernelCounts

MARKER = "spin_kernel"
"""The kernel of torch.cuda._sleep, with which every case's range begins."""

COUNTED = ("tensor_flops", "bytes", "compulsory_bytes", "executed_tensor_flops", "executed_bytes", "causal_factor")
"""Columns that a count fills."""

REPLIES, LOG = "replies.jsonl", "ncu.csv"
"""Files that the worker and ncu write."""


def prepare(
    planned: Sequence[PlannedCase], folder: Path, program: str, metrics: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Write the requests into ``folder`` and return the command that profiles them with the ncu ``program``, and the
    variables that it needs, whatever this process or a shell has."""
    requests = folder / "requests.jsonl"
    limits = RunLimits(timeout_s=0.0, action="profile")
    lines = [json.dumps(encode_request([item], limits)) for item in planned]
    requests.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    worker = (sys.executable, "-m", SERVE, "files", str(requests), str(folder / REPLIES))
    # LC_ALL: ncu writes numbers as the locale does.
    return ncu.command(program, metrics, folder / LOG, worker), worker_settings({"LC_ALL": "C"})


def run_prepared(
    folder: Path, command: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> tuple[list[dict[str, Any]], list[KernelCounts]]:
    """Run ncu and return the worker's replies, one per case that it came to, and the kernels, markers included.

    Raises:
        RuntimeError: ncu failed, or was not done in time; the message carries what it said.
    """
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environ = {**os.environ, **environ}
    process = subprocess.Popen(command, env=environ, cwd=folder, text=True, start_new_session=True, **streams)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise RuntimeError(f"ncu was not done within {timeout_s:g} s; --timeout gives it more") from None
        raise
    log, text = (
        path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for path in (folder / LOG, folder / REPLIES)
    )
    replies = [reply for line in text.splitlines() for reply in json.loads(line).get("outcomes", ())]
    told = ncu.error_in(f"{log}\n{output}")
    if not any(reply["status"] == "ok" for reply in replies):
        if replies:
            return replies, []
        lines = output.strip().splitlines()
        raise RuntimeError(f"ncu failed: {told or (lines[-1] if lines else f'exit code {process.returncode}')}")
    try:
        return replies, ncu.parse_raw_csv(log)
    except ValueError as error:
        raise RuntimeError(f"ncu failed: {told or error}") from error


def split_cases(kernels: Sequence[KernelCounts], number: int, *, died: bool = False) -> list[list[KernelCounts]]:
    """Return the kernels of each of ``number`` cases: what follows a marker up to the next.

    Args:
        died: whether the worker died over a further case, of which there may be a part.

    Raises:
        RuntimeError: the cases cannot be told apart: other numbers of markers, or kernels before the first.
    """
    cases: list[list[KernelCounts]] = []
    for kernel in kernels:
        if MARKER in kernel.name:
            cases.append([])
        elif cases:
            cases[-1].append(kernel)
        else:
            raise RuntimeError(f"kernel {kernel.name} must follow a marker, and ncu reports it before the first one")
    if not number <= len(cases) <= number + died:
        raise RuntimeError(f"ncu must report {number} cases, and reports {len(cases)}")
    return cases[:number]


def profile(planned: Sequence[PlannedCase], run: Run, program: str, timeout_s: float) -> list[ProfileRow]:
    """Run the ncu ``program`` over cases and return a row for each, in order; RuntimeError where it fails."""
    with tempfile.TemporaryDirectory(prefix="lrbench-profile-") as folder:
        command, environ = prepare(planned, Path(folder), program, ncu.available_metrics(program))
        version = ncu.ncu_version(program)
        replies, kernels = run_prepared(Path(folder), command, environ, timeout_s)
    died = len(replies) < len(planned)
    done = [n for n, reply in enumerate(replies) if reply["status"] == "ok"]
    measured = dict(zip(done, split_cases(kernels, len(done), died=died), strict=True))
    replies += [not_measured("crash", "the process died over it or before")] * (len(planned) - len(replies))
    tried = enumerate(zip(planned, replies, strict=True))
    return [build_row(run, item, reply, measured.get(n), version) for n, (item, reply) in tried]


def build_row(
    run: Run, item: PlannedCase, reply: Mapping[str, Any], kernels: Sequence[KernelCounts] | None, version: str | None
) -> ProfileRow:
    """Return the row of a case: what was counted, and where ``kernels`` are given what was measured and the ratios."""
    case = item.case
    columns = {**planned_columns(run, item, reply), "ncu_version": version}
    count = counts.count_case(case.op, case.impl, case.mode, case.dtype, case.state_dtype, case.sizes)
    if count is not None:
        columns |= {name: getattr(count, name) for name in COUNTED}
    if kernels is not None:
        cache = None if run.device is None else run.device.l2_bytes
        columns |= {**ncu.add_up(kernels), "last_cache_bytes": cache}
        if count is not None:
            columns["tensor_flops_ratio"], columns["bytes_ratio"], why = compare(count, columns)
            columns["explanation"] = "; ".join(why) or None
    return ProfileRow(**columns)
