"""A rough estimate, before a sweep begins, of how long it will take."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ...analysis import counts
from ...analysis.accelerators import known as accelerators
from ...analysis.accelerators.known import Accelerator
from ...analysis.model.runtime_model import model_time_ms
from ...results.schema import Case
from ...results.select import grouped
from ..environment import Environment
from ..plan import PlannedCase
from ..worker.sustained import LIMIT_S
from .compile_ahead import uncompiled, unit_of
from .run import refuse, rivals

WORKER_S = {"cpu": 3.0, "cuda": 5.0}
"""Seconds of a worker's start and first call, which import torch: measured on two CPU cores and on an H200."""

CASE_S = 0.2
"""Seconds of a case besides its long calls, measured on both: inputs, check, memory pass, short samples."""

CALLS = {"cpu": 15, "cuda": 25}
"""Calls of a case that takes long: check, warm-up, memory and samples, counted in quick sweeps of two CPU cores and in
the committed runs of the H200."""

STEP_CALLS = 5
"""Calls of a training step."""

SLOWDOWN = {"cpu": 2.0, "cuda": 3.0}
"""Measured over modelled time, summed over the same rows."""

VECTOR_BYTES = 24
"""Bytes that the portable code of a CPU moves for a FLOP outside matrix products: two operands and a result, each of
them a tensor in memory, read or written twice."""

STEP_S = 1e-3
"""Seconds of a step of the float64 recurrence, with which a problem's first case with gradients is checked on a CPU. On
a GPU, where it is too slow, it is seldom used."""

COMPILE_S = {"lrbench": 5.0, "others": 13.0, "autotuned": 5.0}
"""What one process takes to compile a case ahead, measured beside an H200: of ours, of other packages, and of those
that autotune, where one process compiles all cases of a kind."""

TUNE_S = 15.0
"""What an autotuner takes to choose for a problem and chunk size: 15 to 30 s for Mamba-2."""

LONG_TUNE_S = {"fla.chunk_gla": 120.0, "fla.chunk_simple_gla": 45.0, "fla.chunk_retention": 45.0}
"""The same, of implementations that take longer, measured on an H200. Simple GLA and Retention have the same kernels:
each counts half of what both take together."""

COMPILE_ANY_S = 15.0
"""The least that compiling takes: a backward pass compiles its kernels one after the other."""


PAIR_S = 3.5
"""What a case takes that is timed in turn with others at the end of a sweep: 28 took 100 s on an H200."""


def pairs_s(planned: Sequence[PlannedCase]) -> float:
    """Return the seconds that it takes to time the fastest of each package in turn."""
    return PAIR_S * sum(map(len, rivals(planned)))


def cases_s(planned: Sequence[PlannedCase], environment: Environment) -> list[float]:
    """Return the seconds that each of the cases will take one after the other; what is refused takes none."""
    kind = environment.device_kind
    device = accelerators.get_accelerator(environment.device_accelerator) if environment.device_accelerator else None
    seen: set[Hashable] = set()
    seconds = []
    for item in planned:
        case = item.case
        if refuse(item, environment) is not None:
            seconds.append(0.0)
            continue
        took = CASE_S + LIMIT_S * item.sustained
        worker, problem = (item.case.provider, item.triton), item.problem
        if worker not in seen:
            took += WORKER_S[kind]
        if kind == "cpu" and case.gradients and problem not in seen:
            took += STEP_S * (case.seq_len or 0)
        tuned = item.triton, replace(case, batch=None, seq_len=None, mode="")
        if kind == "cuda" and item.autotunes and tuned not in seen:
            took += LONG_TUNE_S.get(case.impl, TUNE_S)
        seen |= {worker, problem, tuned}
        calls = STEP_CALLS if case.mode == "train" else CALLS[kind]
        seconds.append(took + calls * SLOWDOWN[kind] * _call_s(case, device))
    return seconds


def _call_s(case: Case, device: Accelerator | None) -> float:
    """Return the seconds of a call at full rate, as far as they are known.

    Of a training step they are those of its operation and of the matrix products of its blocks, of about 12 width^2
    weights each: 6 FLOPs a weight and token, and 2 to compute them again.
    """
    if case.mode == "train":
        width = case.channels or (case.num_heads or 0) * (case.head_dim_v or 0)
        rate = device.peak_flops(case.dtype) if device is not None else None
        products = 96 * width**2 * (case.batch or 0) * (case.seq_len or 0) / rate if rate else 0.0
        return (case.layers or 0) * (_call_s(case.of_operation, device) + products)
    count = counts.count_case(case.op, case.impl, case.mode, case.dtype, case.state_dtype, case.sizes)
    if device is None or count is None or (rate := device.peak_flops(case.dtype)) is None:
        return 0.0
    if device.key != "cpu":
        return model_time_ms(count, device, case.dtype) / 1e3
    moved = count.bytes + VECTOR_BYTES * (count.flops - count.tensor_flops)
    return count.tensor_flops / rate + moved / device.bandwidth_bytes_s


def compile_s(planned: Sequence[PlannedCase], environment: Environment, jobs: int) -> float:
    """Return the seconds that ``jobs`` processes take to compile what cases that run need and was not compiled yet."""
    if environment.device_kind == "cpu":
        return 0.0
    units = grouped(uncompiled(planned, environment), unit_of).values()
    kinds = ([(item.autotunes, item.case.provider == "lrbench") for item in unit] for unit in units)
    seconds = [sum(COMPILE_S["autotuned" if a else "lrbench" if ours else "others"] for a, ours in u) for u in kinds]
    return max(COMPILE_ANY_S, *seconds, sum(seconds) / max(1, jobs)) if seconds else 0.0
