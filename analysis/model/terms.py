"""What a case should take by its physics, part by part, and how that is carried from one accelerator to another.

A kernel launches, waits for steps that follow one another, multiplies, and moves bytes. By its formulation a case takes

    t = launches t_launch + steps t_step + sqrt((tau_FLOPs / e_FLOPs)^2 + (tau_bytes / e_bytes)^2)

with steps one after the other: chunks of a sequence, tokens of a recurrence. fused_chunk's and whole_state's programs
wait partly for memory and partly for products, and run in waves, so that 264 programs and 265 take different times: of
these it is the time that the choice of a chunk length expects (kernels/scalar_decay/choice.py). How far a kernel is off
this, and which part is to blame, :mod:`.fit` learns from measured rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...kernels.baselines import get_implementation, get_operation
from ...kernels.scalar_decay.choice import backward_chunk, sizes_of_case, time_us
from ...kernels.scalar_decay.plan import kept_chunk
from ..accelerators.known import Accelerator, get_accelerator
from ..counts import FORMULATIONS, chunk_of, count_case, formulation_of, scalar_decay
from .runtime_model import LAUNCH_MS, flop_rate, launches_ms, launches_of, runtime_model

STEP_MS = 1e-4
"""Time of a step beside its work: the order of it."""

STEP_BY_STEP = "naive"
"""The implementation that walks a sequence token by token where others of the formulation scan it."""

FLOPS_REACHED, BYTES_REACHED = 0.5, 0.8
"""Shares of the accelerator's rates that kernels reach, roughly."""

MOVED = 0.8
"""Share of the time of a kernel's bytes (those that its launches move, where they are counted) that changes with the
bandwidth, whether or not memory limits the kernel: from an H200 to an H100 times then miss by 4 % in the median."""

MOST_MEMORY = 0.9
"""Largest share of a time that is taken for that of its bytes: where it would be more, they hit the cache."""


class Query(NamedTuple):
    """What a model is asked about: the arguments of :func:`.counts.count_case`."""

    op: str
    impl: str
    mode: str
    dtype: str
    state_dtype: str | None
    sizes: Mapping[str, int]


Kind = tuple[object, ...]
"""What implementations share that are off for the same reasons."""


@functools.cache
def kind_of(op: str, impl: str, mode: str, dtype: str) -> Kind | None:
    """Return formulation and sizes; None of an implementation that is not declared or not counted."""
    try:
        get_implementation(op, impl)
    except ValueError:
        return None
    if op not in FORMULATIONS:
        return None
    return (formulation_of(op, impl, mode, dtype), get_operation(op).cache, *get_operation(op).sizes)


def walks(case: Query) -> bool:
    """Whether programs walk the chunks of a case tile by tile."""
    scheme = formulation_of(case.op, case.impl, case.mode, case.dtype)
    return scheme in scalar_decay.WALKS and "chunk_size" in case.sizes


def sequential_steps(case: Query) -> float:
    """Return how many steps of a problem wait for one another: its chunks, or tokens where there is no chunk length.

    Attention, an MLP, the quadratic form and scans have one.
    """
    op, impl, mode, dtype, _, sizes = case
    formulation = formulation_of(op, impl, mode, dtype)
    if "channels" in sizes and formulation == "fused" and impl != STEP_BY_STEP:
        return 1
    if op in ("attention", "gated_mlp", "projections") or mode == "step" or formulation in ("parallel", "scan"):
        return 1
    return -(-sizes["seq_len"] // (chunk_of(op, impl, formulation, sizes.get("chunk_size")) or 1))


@functools.cache
def _walked_ms(case: Any) -> tuple[float, float]:
    """Return the times on an H200 of the walks of a case and of the passes over its chunks, its sizes in a tuple."""
    scheme, given = formulation_of(case.op, case.impl, case.mode, case.dtype), dict(case.sizes)
    sizes, chunk = sizes_of_case(given, normalised=case.op == "mlstm_exp"), given["chunk_size"]
    config = sizes.config(scheme, chunk)
    passes = [time_us(sizes, config, chunk)] if case.mode != "bw" else []
    if case.mode != "fw":
        kept = kept_chunk(sizes, config, chunk)
        passes.append(time_us(sizes, config, min(chunk, backward_chunk(sizes, scheme, kept)), kept=kept))
    walked, states = (1e-3 * sum(each) for each in zip(*passes, strict=True))
    # mLSTMexp's stabiliser takes two launches of its own.
    return walked + 2 * LAUNCH_MS * (sizes.normalised and case.mode != "bw"), states


def expected(case: Query, accelerator: Accelerator) -> tuple[float, ...]:
    """Return the times in ms of launches, walks and states, or of launches, steps, products and memory, which add up to
    what a counted case should take; ValueError if the accelerator has no rate for its dtype."""
    scheme = formulation_of(case.op, case.impl, case.mode, case.dtype)
    launches = launches_of(scheme, case.mode, accelerator)
    if walks(case):
        usual = get_accelerator("h200_sxm")
        walked, states = _walked_ms(case._replace(sizes=tuple(case.sizes.items())))  # type: ignore[arg-type]
        time_ms = launches_of(scheme, case.mode, usual) + walked + states
        share = (carried_ms(time_ms, case, usual, accelerator) - launches) / (walked + states)
        return launches, share * walked, share * states
    count = count_case(*case, launches=False)
    assert count is not None, "only counted cases are asked about"
    model, steps = runtime_model(count, accelerator, case.dtype), sequential_steps(case)
    products, memory = model.flops_ms / FLOPS_REACHED, model.bytes_ms / BYTES_REACHED
    both = math.hypot(products, memory)
    return launches, STEP_MS * steps * (steps > 1), products**2 / both, memory**2 / both


def carried_ms(time_ms: float, case: Query, here: Accelerator, there: Accelerator) -> float:
    """Return how long a case takes on another accelerator by what it takes on one: launches take as long, the bytes
    change with the bandwidth, the rest with the rate of its FLOPs."""
    if here.key == there.key:
        return time_ms
    count = count_case(*case)
    assert count is not None, "only counted cases are asked about"
    launches = min(launches_ms(count, here), MOST_MEMORY * time_ms)
    bytes_ms = 1e3 * max(count.bytes, sum(count.executed_byte_parts.values())) / here.bandwidth_bytes_s
    memory = min(MOVED * bytes_ms, MOST_MEMORY * (time_ms - launches))
    rest = (time_ms - launches - memory) * flop_rate(count, here, case.dtype) / flop_rate(count, there, case.dtype)
    return launches + memory * here.bandwidth_bytes_s / there.bandwidth_bytes_s + rest


def gains(case: Query, here: Accelerator, there: Accelerator) -> list[float]:
    """Return how many times as high the rates of one accelerator are as another's: FLOPs, vector FLOPs, bandwidth."""
    count = count_case(*case, launches=False)
    assert count is not None, "only counted cases are asked about"
    rates = [(flop_rate(count, each, case.dtype), each.vector_flops, each.bandwidth_bytes_s) for each in (there, here)]
    return [high / low for high, low in zip(*rates, strict=True)]
