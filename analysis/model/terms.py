"""Models of a time, as what multiplies their constants: by the formulation, and by walks.

A kernel is slower than the roofline for reasons that stay much the same over sizes: it reaches a share of the matrix
rate and a share of the bandwidth, a state waits for the one before it, and launching takes a while. By the formulation

    t = launches t_launch + n t_step + x_FLOPs tau_FLOPs + x_bytes tau_bytes

with n steps one after the other: chunks of a sequence, tokens of a recurrence. fused_chunk's and whole_state's programs
wait partly for memory and partly for products, and run in waves, so that 264 programs and 265 take different times. So
x_walk tau_walk + x_states tau_states replaces n t_step, where tau_walk and tau_states are the times of the walks and of
the passes over the chunks that the choice of a chunk length expects on an H200. All constants are >= 0, and 1 / x are
efficiencies. :mod:`.fit` fits them to measured rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.baselines import get_implementation, get_operation
from ...kernels.scalar_decay.choice import backward_chunk, sizes_of_case, time_us
from ...kernels.scalar_decay.plan import kept_chunk
from ..accelerators.known import Accelerator
from ..counts import FORMULATIONS, chunk_of, count_case, formulation_of, scalar_decay
from .runtime_model import launch_count, runtime_model


class Query(NamedTuple):
    """What a model is asked about: the arguments of :func:`.counts.count_case`."""

    op: str
    impl: str
    mode: str
    dtype: str
    state_dtype: str | None
    sizes: Mapping[str, int]


Kind = tuple[object, ...]
"""What implementations share that follow a model with the same constants, each with a factor of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of a time: the sum of its constants times the terms of a case.

    Attributes:
        name: formulation or walks.
        latencies: constants in ms, that of a launch first.
        factors: full rate over the rate reached.
        min_rows: fewer measured rows than this of an implementation are fitted together with others of its kind.
        kind: what implementations have in common, None where the model does not have op, impl, mode, dtype.
        terms: what multiplies each constant for a case on an accelerator, None where that is not known.
    """

    name: str
    latencies: tuple[str, ...]
    factors: tuple[str, ...]
    min_rows: int
    kind: Callable[[str, str, str, str], Kind | None]
    terms: Callable[[Query, Accelerator], tuple[float, ...] | None]

    @property
    def constants(self) -> tuple[str, ...]:
        """What is fitted, in the order of the terms."""
        return (*self.latencies, *self.factors)


@functools.cache
def _formulation_kind(op: str, impl: str, mode: str, dtype: str) -> Kind | None:
    """Return formulation and sizes; None of an implementation that is not declared or not counted."""
    try:
        get_implementation(op, impl)
    except ValueError:
        return None
    if op not in FORMULATIONS:
        return None
    return (formulation_of(op, impl, mode, dtype), get_operation(op).cache, *get_operation(op).sizes)


def _walks_kind(op: str, impl: str, mode: str, dtype: str) -> Kind | None:
    """Return the kind of an implementation that walks; mLSTMexp's kernels, which are stabilised, are another kind."""
    found = _formulation_kind(op, impl, mode, dtype)
    return (impl, op == "mlstm_exp") if found is not None and found[0] in scalar_decay.WALKS else None


def _formulation_terms(case: Query, accelerator: Accelerator) -> tuple[float, ...] | None:
    count = count_case(*case, launches=False)
    if count is None:
        return None
    model, steps = runtime_model(count, accelerator, case.dtype), sequential_steps(case)
    # Without chunks the only step cannot be told from a launch.
    steps = steps if steps != 1 or "chunk_size" in case.sizes else 0.0
    return launch_count(count), steps, model.flops_ms, model.bytes_ms


def sequential_steps(case: Query) -> float:
    """Return how many steps of a problem wait for one another: its chunks, or tokens where there is no chunk length.

    Attention, an MLP and the quadratic form have one.
    """
    op, impl, mode, dtype, _, sizes = case
    formulation = formulation_of(op, impl, mode, dtype)
    if op in ("attention", "gated_mlp", "projections") or mode == "step" or formulation == "parallel":
        return 1
    return -(-sizes["seq_len"] // (chunk_of(op, impl, formulation, sizes.get("chunk_size")) or 1))


def _walks_terms(case: Query, accelerator: Accelerator) -> tuple[float, ...] | None:
    found = _formulation_terms(case, accelerator)
    if found is None or "chunk_size" not in case.sizes:
        return None
    launches, _, *rates_ms = found
    scheme = formulation_of(case.op, case.impl, case.mode, case.dtype)
    sizes, chunk = sizes_of_case(case.sizes, normalised=case.op == "mlstm_exp"), case.sizes["chunk_size"]
    config = sizes.config(scheme, chunk)
    passes = [time_us(sizes, config, chunk)] if case.mode != "bw" else []
    if case.mode != "fw":
        kept = kept_chunk(sizes, config, chunk)
        passes.append(time_us(sizes, config, min(chunk, backward_chunk(sizes, scheme, kept)), kept=kept))
    return launches, *(1e-3 * sum(each) for each in zip(*passes, strict=True)), *rates_ms


FORMULATION = Model(
    name="formulation",
    latencies=("launch_ms", "step_ms"),
    factors=("flops_factor", "bytes_factor"),
    min_rows=8,
    kind=_formulation_kind,
    terms=_formulation_terms,
)
"""The model of every implementation that is counted."""

WALKS = Model(
    name="walks",
    latencies=("launch_ms",),
    factors=("walk_factor", "states_factor", "flops_factor", "bytes_factor"),
    min_rows=8,
    kind=_walks_kind,
    terms=_walks_terms,
)
"""The model of programs that take a chunk's tiles in order."""

MODELS = (WALKS, FORMULATION)
"""In the order in which they are taken."""
