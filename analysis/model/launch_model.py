"""Times of an implementation from its launches: what the chunkwise formulation's model cannot see.

A launch runs its programs in waves, as many at once as the multiprocessors hold, so its time is that of the waves, not
of the work alone: 4,096 programs and 4,100 take different times. Launches run one after the other, and of one launch

    t = t_launch + waves (t_start + steps t_step) + x_matrix FLOPs_SM / alpha_SM + (x_states B_states + x_merge B_merge)
        / beta

with FLOPs_SM what the busiest multiprocessor multiplies and alpha_SM its share of the matrix rate; B_states are the
states between chunks that are stored and loaded, B_merge those moved to merge them, beta is the bandwidth. Inputs and
outputs are loaded and stored while the steps run, so they have no term. Steps and
starts differ with the kind of launch. The constants are fitted per operation, implementation and mode, in relative
error, and 1 / x are efficiencies. Every sequence length, head dim and chunk length is left out in turn, and the rows
left out tell how well the constants predict.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_roofs
from ..counts import Count
from .efficiency import formulation_terms
from .fit import (
    Fit,
    Sizes,
    accelerator_of,
    case_of,
    errors_of,
    hashable,
    left_out_ratios,
    likely_ratios,
    newest_cases,
    of_device,
    relative_fit,
)
from .schedule import RESIDENT, Launch, launches_known, launches_of

LATENCIES = (
    "launch_ms", "gate_step_ms", "walk_start_ms", "walk_step_ms", "normaliser_step_ms", "states_step_ms",
    "merge_step_ms",
)  # fmt: skip
"""Times in ms: of a launch, a wave of gate programs, the start of a wave that walks, a tile of a walk, of the walk for
denominators and of a states pass, and a merged chunk."""

FACTORS = ("matrix_factor", "states_factor", "merge_factor")
"""Full rate over the rate reached: of matrix products, of states between chunks, of merging them."""

CONSTANTS = (*LATENCIES, *FACTORS)
"""What is fitted."""

_STEPS: Mapping[str, str] = MappingProxyType(
    {
        "gates": "gate_step_ms",
        "gate gradients": "gate_step_ms",
        "walk": "walk_step_ms",
        "normaliser": "normaliser_step_ms",
        "states": "states_step_ms",
        "merge": "merge_step_ms",
    }
)
_STARTS = ("walk", "normaliser")

MIN_ROWS = 30
"""Fewer measured rows than this, three for each constant, are not fitted."""

LEFT_OUT = ("seq_len", "head_dim_v", "chunk_size")
"""Columns of which every value is left out of the fit in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFit(Fit):
    """The launches' constants, fitted.

    Attributes:
        ops: operations whose rows were taken: ``op``, or where it has too few rows all that run the same kernels.
        constants: name of :data:`CONSTANTS` -> value.
        errors: what was left out in turn -> (median, worst) absolute relative error on it; all together give
            ``median_error`` and ``worst_error``.
        formulation_median_error, formulation_worst_error: the same of the formulation's model with fitted efficiencies.
    """

    ops: tuple[str, ...]
    constants: Mapping[str, float]
    errors: Mapping[str, tuple[float, float]]
    formulation_median_error: float
    formulation_worst_error: float

    def time_ms(self, launches: Sequence[Launch], accelerator: Accelerator, count: Count) -> float:
        """Return the fitted time of a problem on an accelerator, its latencies as on the one that was measured."""
        return sum(self._parts(launches, accelerator))

    def carried_ms(
        self, launches: Sequence[Launch], accelerator: Accelerator, count: Count
    ) -> tuple[float, float, str]:
        """Return between which times the fitted one lies on an accelerator, in ms, and why, in words.

        On the device that was measured it is one time. Elsewhere a step may take as long as there, or as much less or
        more as the rates of one multiprocessor (matrix, vector, bandwidth) are higher or lower.
        """
        serial, rates = self._parts(launches, accelerator)
        if self.accelerator == accelerator.key:
            return serial + rates, serial + rates, ""
        gains = self._gains(accelerator)
        words = (
            f", carried to {accelerator.key} with its multiprocessors and the tiles of sm_90: one of them is "
            f"{min(gains):.2f} to {max(gains):.2f} times as fast, and how much of that a step gains is not known there"
        )
        return serial / max(1.0, *gains) + rates, serial / min(1.0, *gains) + rates, words

    def in_figures(self) -> dict[str, Any]:
        """Return what a table says of the fit; ``step_ms`` is a tile of a walk."""
        factors = [self.constants[name] for name in FACTORS]
        matrix, states, merge = (1 / factor if factor else None for factor in factors)
        return {
            "model": "launches",
            "fitted_on": self.accelerator,
            "fitted_ops": " ".join(self.ops),
            "fitted_rows": self.rows,
            **{name: self.constants[name] for name in LATENCIES if name != "walk_step_ms"},
            "step_ms": self.constants["walk_step_ms"],
            "flops_efficiency": matrix,
            "bytes_efficiency": states,
            "merge_efficiency": merge,
            "median_error": self.median_error,
            "worst_error": self.worst_error,
            "formulation_median_error": self.formulation_median_error,
            "formulation_worst_error": self.formulation_worst_error,
        }

    def _parts(self, launches: Sequence[Launch], accelerator: Accelerator) -> tuple[float, float]:
        found = terms(launches, accelerator, self.dtype)
        times = [self.constants[name] * value for name, value in zip(CONSTANTS, found, strict=True)]
        return sum(times[: len(LATENCIES)]), sum(times[len(LATENCIES) :])

    def _gains(self, accelerator: Accelerator) -> list[float]:
        measured = with_roofs(get_accelerator(self.accelerator), self.roofs)
        rates = [
            (each.peak_flops(self.dtype) or 0.0, each.vector_flops, each.bandwidth_bytes_s)
            for each in (accelerator, measured)
        ]
        return [here / there * measured.sms / accelerator.sms for here, there in zip(*rates, strict=True)]


def terms(launches: Sequence[Launch], accelerator: Accelerator, dtype: str) -> list[float]:
    """Return what multiplies each of :data:`CONSTANTS`: numbers of launches, starts and steps, and ms at full rate.

    Raises:
        ValueError: the accelerator's matrix rate for ``dtype`` is not known.
    """
    rate = accelerator.matrix_rate(dtype)
    sum_of = dict.fromkeys(CONSTANTS, 0.0)
    for launch in launches:
        waves, busiest = _waves(launch.programs, accelerator.sms, RESIDENT[launch.kind])
        sum_of["launch_ms"] += 1
        if launch.kind in _STEPS:
            sum_of[_STEPS[launch.kind]] += waves * launch.steps
        if launch.kind in _STARTS:
            sum_of["walk_start_ms"] += waves
        sum_of["matrix_factor"] += 1e3 * busiest * launch.flops / launch.programs * accelerator.sms / rate
        sum_of["states_factor"] += 1e3 * launch.state_bytes / accelerator.bandwidth_bytes_s
        sum_of["merge_factor"] += 1e3 * launch.merge_bytes / accelerator.bandwidth_bytes_s
    return list(sum_of.values())


def _waves(programs: int, sms: int, resident: int) -> tuple[int, int]:
    """Return how many waves a grid takes, and how many programs the busiest multiprocessor runs."""
    full, rest = divmod(programs, sms * resident)
    return full + bool(rest), full * resident + -(-rest // sms)


def fit_launches(
    rows: Iterable[Mapping[str, Any]],
    op: str,
    impl: str,
    mode: str,
    dtype: str,
    *,
    device: str | None = None,
    roofs: str = "spec",
) -> LaunchFit | None:
    """Fit the launches' constants to measured rows; None where fewer than :data:`MIN_ROWS` are of one device.

    Of several rows of one case the newest counts; suspect ones are left out. An operation with too few rows takes those
    of every operation that runs the same kernels: mLSTMexp, which is stabilised, or the others. Left-out rows are then
    those of one operation at a time that has too few for a fit of its own.

    Args:
        rows: measured rows of this implementation, mode and dtype, with :data:`ROW_COLUMNS`.
        device: key of the device whose rows are preferred; without enough of them the device with most is taken.
        roofs: spec, measured or a path, see :func:`.roofs.with_roofs`.
    """
    import numpy as np

    known = [
        row
        for row in newest_cases(rows)
        if (row["op"] == "mlstm_exp") == (op == "mlstm_exp")
        and launches_known(row["op"], impl, mode, dtype, case_of(row, impl, mode, dtype)[-1])
    ]
    own = [row for row in known if row["op"] == op]
    taken = next(
        (
            each
            for each in (of_device(own, device, MIN_ROWS), of_device(known, device, MIN_ROWS))
            if len(each) >= MIN_ROWS
        ),
        None,
    )
    if taken is None:
        return None
    key = str(taken[0]["device_accelerator"])
    every = [(row, _features(*hashable(case_of(row, impl, mode, dtype)), key, roofs)) for row in taken]
    taken = [row for row, found in every if found is not None]
    features, formulation = (np.array([found[n] for _, found in every if found is not None]) for n in (0, 1))
    measured = np.array([float(row["time_ms"]) for row in taken])
    ops = tuple(dict.fromkeys(str(row["op"]) for row in taken))
    groups = {name: [row[name] for row in taken] for name in LEFT_OUT} if ops == (op,) else {"op": _of_op(taken)}
    ratios = {name: left_out_ratios(features, measured, each) for name, each in groups.items()}
    left_out = [ratio for each in ratios.values() for ratio in each]
    errors = {name: errors_of(each) for name, each in ratios.items()}
    median_error, worst_error = errors_of(left_out)
    low_ratio, high_ratio = likely_ratios(left_out, sum(len({*each} - {None}) for each in groups.values()))
    formulation_errors = errors_of(
        [r for each in groups.values() for r in left_out_ratios(formulation, measured, each)]
    )
    return LaunchFit(
        op=op,
        impl=impl,
        mode=mode,
        dtype=dtype,
        ops=ops,
        accelerator=key,
        roofs=roofs,
        constants=MappingProxyType(dict(zip(CONSTANTS, map(float, relative_fit(features, measured)), strict=True))),
        rows=len(taken),
        errors=MappingProxyType(errors),
        median_error=median_error,
        worst_error=worst_error,
        formulation_median_error=formulation_errors[0],
        formulation_worst_error=formulation_errors[1],
        low_ratio=low_ratio,
        high_ratio=high_ratio,
    )


@functools.cache
def _features(
    op: str, impl: str, mode: str, dtype: str, state_dtype: str | None, sizes: Sizes, key: str, roofs: str
) -> tuple[list[float], tuple[float, ...]] | None:
    """Return what multiplies the launches' constants, and the formulation's, for a case on an accelerator.

    None where its launches are not known.
    """
    launches = launches_of(op, impl, mode, dtype, state_dtype, dict(sizes))
    paper = formulation_terms(op, impl, mode, dtype, state_dtype, sizes, key, roofs)
    if launches is None or paper is None:
        return None
    return terms(launches, accelerator_of(key, roofs), dtype), paper


def _of_op(rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return each row's operation, None where it has enough rows for a fit of its own: these are never left out."""
    ops = [str(row["op"]) for row in rows]
    return [op if ops.count(op) < MIN_ROWS else None for op in ops]
