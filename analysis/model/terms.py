"""Models of a time, as what multiplies their constants: by the formulation, by walks, by an implementation's launches.

A kernel is slower than the roofline for reasons that stay much the same over sizes: it reaches a share of the matrix
rate and a share of the bandwidth, a state waits for the one before it, and launching takes a while. By the formulation

    t = launches t_launch + n t_step + x_FLOPs tau_FLOPs + x_bytes tau_bytes

with n steps one after the other: chunks of a sequence, tokens of a recurrence. whole_state's programs wait partly for
memory and partly for products, so x_walk tau_walk replaces n t_step, where tau_walk is the time that the choice of a
chunk length expects on an H200. Where the launches are known (:mod:`.schedule`), their programs run in waves, as many
at once as the multiprocessors hold, so that 4,096 programs and 4,100 take different times. Launches run one after the
other, and of one launch

    t = t_launch + waves (t_start + steps t_step) + x_FLOPs FLOPs_SM / alpha_SM + (x_bytes B_states + x_merge B_merge)
        / beta

with FLOPs_SM what the busiest multiprocessor multiplies and alpha_SM its share of the matrix rate; B_states are the
states between chunks that are stored and loaded, B_merge those moved to merge them, beta is the bandwidth. Inputs and
outputs are loaded and stored while the steps run, so they have no term. Steps and starts differ with the kind of
launch. All constants are >= 0, and 1 / x are efficiencies. :mod:`.fit` fits them to measured rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.baselines import get_implementation, get_operation
from ...kernels.scalar_decay.choice import backward_chunk, shape_of
from ..accelerators.known import Accelerator
from ..counts import FORMULATIONS, chunk_of, count_case, formulation_of
from .runtime_model import launch_count, runtime_model
from .schedule import RESIDENT, Launch, launches_of


class Case(NamedTuple):
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
        name: formulation, walks or launches.
        latencies: constants in ms, that of a launch first.
        factors: full rate over the rate reached.
        min_rows: fewer measured rows than this of an implementation are fitted together with others of its kind.
        left_out: columns of which every value is left out in turn to tell the errors; none: problems are.
        kind: what implementations have in common, None where the model does not have op, impl, mode, dtype.
        terms: what multiplies each constant for a case on an accelerator, None where that is not known.
    """

    name: str
    latencies: tuple[str, ...]
    factors: tuple[str, ...]
    min_rows: int
    left_out: tuple[str, ...] = ()
    kind: Callable[[str, str, str, str], Kind | None]
    terms: Callable[[Case, Accelerator], tuple[float, ...] | None]

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


def _kind_of(formulation: str) -> Callable[[str, str, str, str], Kind | None]:
    """Return the function ``kind`` of a model of one formulation: mLSTMexp's kernels, which are stabilised, are a kind
    of their own."""

    def kind(op: str, impl: str, mode: str, dtype: str) -> Kind | None:
        found = _formulation_kind(op, impl, mode, dtype)
        return (impl, op == "mlstm_exp") if found is not None and found[0] == formulation else None

    return kind


def _formulation_terms(case: Case, accelerator: Accelerator) -> tuple[float, ...] | None:
    count = count_case(*case, launches=False)
    if count is None:
        return None
    model, steps = runtime_model(count, accelerator, case.dtype), sequential_steps(case)
    # Without chunks the only step cannot be told from a launch.
    steps = steps if steps != 1 or "chunk_size" in case.sizes else 0.0
    return launch_count(count), steps, model.flops_ms, model.bytes_ms


def sequential_steps(case: Case) -> float:
    """Return how many steps of a problem wait for one another: its chunks, or tokens where there is no chunk length.

    Attention, an MLP and the quadratic form have one.
    """
    op, impl, mode, dtype, _, sizes = case
    formulation = formulation_of(op, impl, mode, dtype)
    if op in ("attention", "gated_mlp", "projections") or mode == "step" or formulation == "parallel":
        return 1
    return -(-sizes["seq_len"] // (chunk_of(op, impl, formulation, sizes.get("chunk_size")) or 1))


def _walks_terms(case: Case, accelerator: Accelerator) -> tuple[float, ...] | None:
    found = _formulation_terms(case, accelerator)
    if found is None or "chunk_size" not in case.sizes:
        return None
    launches, _, *rates_ms = found
    shape, chunk = shape_of(case.sizes, normalised=case.op == "mlstm_exp"), case.sizes["chunk_size"]
    walks_us = shape.forward_us("whole_state", chunk) if case.mode != "bw" else 0.0
    if case.mode != "fw":
        kept = shape.kept_chunk("whole_state", chunk)
        walks_us += shape.backward_us("whole_state", min(chunk, backward_chunk(shape, "whole_state", kept)), kept=kept)
    return launches, 1e-3 * walks_us, *rates_ms


_STEPS: Mapping[str, str] = {
    "gates": "gate_step_ms",
    "gate gradients": "gate_step_ms",
    "walk": "step_ms",
    "normaliser": "normaliser_step_ms",
    "states": "states_step_ms",
    "merge": "merge_step_ms",
}


def _launches_terms(case: Case, accelerator: Accelerator) -> tuple[float, ...] | None:
    launches = launches_of(*case)
    return None if launches is None else terms_of_launches(launches, accelerator, case.dtype)


def terms_of_launches(launches: Sequence[Launch], accelerator: Accelerator, dtype: str) -> tuple[float, ...]:
    """Return what multiplies each constant: numbers of launches, starts and steps, and ms at full rate."""
    rate = accelerator.matrix_rate(dtype)
    sum_of = dict.fromkeys(LAUNCHES.constants, 0.0)
    for launch in launches:
        waves, busiest = _waves(launch.programs, accelerator.sms, RESIDENT[launch.kind])
        sum_of["launch_ms"] += 1
        if launch.kind in _STEPS:
            sum_of[_STEPS[launch.kind]] += waves * launch.steps
        if launch.kind in ("walk", "normaliser"):
            sum_of["walk_start_ms"] += waves
        sum_of["flops_factor"] += 1e3 * busiest * launch.flops / launch.programs * accelerator.sms / rate
        sum_of["bytes_factor"] += 1e3 * launch.state_bytes / accelerator.bandwidth_bytes_s
        sum_of["merge_factor"] += 1e3 * launch.merge_bytes / accelerator.bandwidth_bytes_s
    return tuple(sum_of.values())


def _waves(programs: int, sms: int, resident: int) -> tuple[int, int]:
    """Return how many waves a grid takes, and how many programs the busiest multiprocessor runs."""
    full, rest = divmod(programs, sms * resident)
    return full + bool(rest), full * resident + -(-rest // sms)


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
    factors=("walk_factor", "flops_factor", "bytes_factor"),
    min_rows=8,
    kind=_kind_of("whole_state"),
    terms=_walks_terms,
)
"""The model of programs that hold whole states."""

LAUNCHES = Model(
    name="launches",
    latencies=(
        "launch_ms", "gate_step_ms", "walk_start_ms", "step_ms", "normaliser_step_ms", "states_step_ms",
        "merge_step_ms",
    ),
    factors=("flops_factor", "bytes_factor", "merge_factor"),
    min_rows=100,
    left_out=("seq_len", "head_dim_v", "chunk_size"),
    kind=_kind_of("walk"),
    terms=_launches_terms,
)  # fmt: skip
"""The model of an implementation whose launches are known: a launch, a wave of gate programs, the start of a wave that
walks, a tile of a walk, of the walk for denominators and of a states pass, a merged chunk; the rates of matrix
products, of states between chunks, of merging them. Ten rows for each constant are the least."""

MODELS = (LAUNCHES, WALKS, FORMULATION)
"""In the order in which they are taken."""
