"""Predicted times: the runtime model's bounds, and where there are measurements a model fitted to them.

A kernel is slower than the roofline for reasons that stay much the same over sizes: it reaches a share of the matrix
rate and a share of the bandwidth, a state waits for the one before it, and starting takes a while. For one
implementation and mode

    t = t_0 + n t_step + x_FLOPs tau_FLOPs + x_bytes tau_bytes,     t_0, t_step, x_FLOPs, x_bytes >= 0

with n steps one after the other (chunks of a sequence, tokens of a recurrence) is fitted to the measured rows in
relative error; 1 / x are the efficiencies. How well it predicts is told by rows it has not seen: each row is predicted
by a fit to all rows of other problem sizes. Where rows are few, all implementations of a kind are fitted together, each
with a factor of its own (:func:`_pooled`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...kernels.baselines import get_implementation, get_operation
from ...kernels.scalar_decay.choice import shape_of
from ...results.schema import SIZE_COLUMNS
from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_roofs
from ..counts import FORMULATIONS, Count, chunk_of, count_case, formulation_of
from .fit import (
    Fit,
    Row,
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
    student,
)
from .runtime_model import runtime_model

if TYPE_CHECKING:
    import numpy as np

MIN_ROWS, MIN_PROBLEMS = 8, 5
"""Fewer measured rows than this, or rows of fewer problems, are fitted together with those of others of the kind."""

USELESS = 100.0
"""High over low end of an interval that says nothing: there is no fit then."""

BETWEEN, LEAST_BETWEEN = 0.25, 0.01
"""Variance of the logarithms of how many times as slow implementations of a kind are: of two, and at least."""

TINY_MS = 1e-9
"""In place of a predicted time of 0, where rows have only terms that others do not."""


_STATELESS = ("attention", "gated_mlp")
"""Operations without a state that is handed on along the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulationFit(Fit):
    """The formulation's runtime model, fitted.

    Attributes:
        launch_ms, step_ms: t_0 and t_step.
        flops_factor, bytes_factor: x_FLOPs and x_bytes; 0 where other terms explain everything.
        others: how many implementations of its kind were fitted as well, because its own rows are few.
    """

    launch_ms: float
    step_ms: float
    flops_factor: float
    bytes_factor: float
    others: int = 0

    def in_figures(self) -> dict[str, Any]:
        """Return what a table says of the fit."""
        return {
            "model": "formulation",
            "fitted_on": self.accelerator,
            "fitted_rows": self.rows,
            "fitted_others": self.others,
            "launch_ms": self.launch_ms,
            "step_ms": self.step_ms,
            "flops_efficiency": 1 / self.flops_factor if self.flops_factor else None,
            "bytes_efficiency": 1 / self.bytes_factor if self.bytes_factor else None,
            "median_error": self.median_error,
            "worst_error": self.worst_error,
        }

    def time_ms(self, steps: float, accelerator: Accelerator, count: Count) -> float:
        """Return the fitted time of a problem on an accelerator, its latencies as on the one that was measured.

        Args:
            steps: :func:`sequential_steps` of the problem.
        """
        model = runtime_model(count, accelerator, self.dtype)
        return self._latency_ms(steps) + self.flops_factor * model.flops_ms + self.bytes_factor * model.bytes_ms

    def carried_ms(self, steps: float, accelerator: Accelerator, count: Count) -> tuple[float, float, str]:
        """Return between which times the fitted one lies on an accelerator, in ms, and why, in words.

        On the device that was measured it is one time. Elsewhere everything but latency may speed up as little as the
        rate that gains least (matrix, vector, bandwidth) or as much as the one that gains most.
        """
        if self.accelerator == accelerator.key:
            time_ms = self.time_ms(steps, accelerator, count)
            return time_ms, time_ms, ""
        measured = with_roofs(get_accelerator(self.accelerator), self.roofs)
        here, there = (runtime_model(count, each, self.dtype) for each in (accelerator, measured))
        gains = (
            there.flops_ms / here.flops_ms,
            accelerator.vector_flops / measured.vector_flops,
            accelerator.bandwidth_bytes_s / measured.bandwidth_bytes_s,
        )
        latency_ms = self._latency_ms(steps)
        at_rates_ms = self.time_ms(steps, measured, count) - latency_ms
        words = (
            f", carried to {accelerator.key}: its rates are {min(gains):.2f} to {max(gains):.2f} times as high, "
            "and which of them counts is not known there"
        )
        return latency_ms + at_rates_ms / max(gains), latency_ms + at_rates_ms / min(gains), words

    def basis(self) -> str:
        """Return what the interval of a prediction rests on, in words."""
        if not self.others:
            return Fit.basis(self)
        rows = f"{self.rows} row{'' if self.rows == 1 else 's'} of its own" if self.rows else "no row of its own"
        return f"90 %, from {rows} and those of {self.others} like it on {self.accelerator}"

    def _latency_ms(self, steps: float) -> float:
        """Return the part of the time that no rate of the device shortens: starting, and waiting for states."""
        return self.launch_ms + steps * self.step_ms


def sequential_steps(op: str, impl: str, mode: str, dtype: str, sizes: Mapping[str, int]) -> float:
    """Return how many steps of a problem wait for one another: its chunks, or tokens where there is no chunk length.

    Attention, an MLP and the quadratic form have one. Of programs that hold whole states it is the time that their
    walks take one after the other, in microseconds, by which a call chooses its chunk length.
    """
    formulation = formulation_of(op, impl, mode, dtype)
    if formulation == "whole_state" and "chunk_size" in sizes:
        shape, chunk = shape_of(sizes, normalised=op == "mlstm_exp"), sizes["chunk_size"]
        forward_us = shape.forward_us(formulation, chunk) if mode != "bw" else 0.0
        return forward_us + (shape.backward_us(formulation, chunk) if mode != "fw" else 0.0)
    if op in _STATELESS or mode == "step" or formulation == "parallel":
        return 1
    return -(-sizes["seq_len"] // (chunk_of(op, impl, formulation, sizes.get("chunk_size")) or 1))


@dataclass(frozen=True, slots=True)
class _Sample:
    """What was measured of one implementation: the four terms of each row, its time and its problem."""

    terms: np.ndarray
    times: np.ndarray
    problems: list[Any]

    @property
    def suffices(self) -> bool:
        """Whether a fit of its own tells how well it predicts."""
        return len(self.times) >= MIN_ROWS and len(set(self.problems)) >= MIN_PROBLEMS


def fit_efficiency(
    rows: Iterable[Row], op: str, impl: str, mode: str, dtype: str, *, device: str | None = None, roofs: str = "spec"
) -> FormulationFit | None:
    """Fit an implementation's measured rows, where they are few together with those of others of its kind.

    Of several rows of one case the newest counts; suspect ones are left out. None where there are too few rows, or
    where these say too little: an interval beyond :data:`USELESS` times the prediction.

    Args:
        rows: measured rows of this mode and dtype, with :data:`.fit.ROW_COLUMNS`.
        device: key of the device whose rows are preferred; without enough of them the device with most is taken.
        roofs: spec, measured or a path, see :func:`.roofs.with_roofs`.
    """
    kind = _kind(op, impl, mode, dtype)
    alike = [row for row in newest_cases(rows) if _kind(row["op"], row["impl"], mode, dtype) == kind]
    taken = of_device([row for row in alike if (row["op"], row["impl"]) == (op, impl)], device, MIN_ROWS)
    taken = taken or of_device(alike, device, 1)
    if not taken:
        return None
    key = str(taken[0]["device_accelerator"])
    by_name: dict[tuple[str, str], list[Row]] = {}
    for row in alike:
        if row["device_accelerator"] == key:
            by_name.setdefault((row["op"], row["impl"]), []).append(row)
    own = _sample(by_name.pop((op, impl), []), mode, dtype, key, roofs)
    others = [_sample(each, mode, dtype, key, roofs) for each in by_name.values()]
    if own.suffices or (not others and len(own.times) >= MIN_PROBLEMS):
        constants = relative_fit(own.terms, own.times)
        ratios = left_out_ratios(own.terms, own.times, own.problems)
        low_ratio, high_ratio = likely_ratios(ratios, len(set(own.problems)))
        others = []
    elif others:
        constants, half, ratios = _pooled(own, others)
        low_ratio, high_ratio = math.exp(-half), math.exp(half)
    else:
        return None
    if high_ratio > USELESS * low_ratio:
        return None
    launch_ms, step_ms, flops_factor, bytes_factor = map(float, constants)
    median_error, worst_error = errors_of(ratios)
    return FormulationFit(
        op=op,
        impl=impl,
        mode=mode,
        dtype=dtype,
        accelerator=key,
        roofs=roofs,
        launch_ms=launch_ms,
        step_ms=step_ms,
        flops_factor=flops_factor,
        bytes_factor=bytes_factor,
        rows=len(own.times),
        others=len(others),
        median_error=median_error,
        worst_error=worst_error,
        low_ratio=low_ratio,
        high_ratio=high_ratio,
    )


@functools.cache
def _kind(op: str, impl: str, mode: str, dtype: str) -> tuple[str, ...] | None:
    """Return what implementations have in common whose rows are pooled: formulation and sizes; None of unknown ones."""
    try:
        get_implementation(op, impl)
    except ValueError:
        return None
    return (formulation_of(op, impl, mode, dtype), *get_operation(op).sizes) if op in FORMULATIONS else None


def _sample(rows: Sequence[Row], mode: str, dtype: str, key: str, roofs: str) -> _Sample:
    """Return the terms and times of an implementation's rows on an accelerator."""
    import numpy as np

    cases = [case_of(row, row["impl"], mode, dtype) for row in rows]
    terms = [formulation_terms(*hashable(case), key, roofs) for case in cases]
    counted = [(found, row) for found, row in zip(terms, rows, strict=True) if found is not None]
    problems = [tuple(str(row[name]) for name in SIZE_COLUMNS if name != "chunk_size") for _, row in counted]
    times = np.array([float(row["time_ms"]) for _, row in counted])
    return _Sample(np.array([found for found, _ in counted]).reshape(-1, 4), times, problems)


@functools.cache
def formulation_terms(
    op: str, impl: str, mode: str, dtype: str, state_dtype: str | None, sizes: Sizes, key: str, roofs: str
) -> tuple[float, ...] | None:
    """Return what multiplies t_0, t_step, x_FLOPs and x_bytes for a case on an accelerator; None if not counted."""
    count = count_case(op, impl, mode, dtype, state_dtype, dict(sizes))
    if count is None:
        return None
    model = runtime_model(count, accelerator_of(key, roofs), dtype)
    return 1.0, sequential_steps(op, impl, mode, dtype, dict(sizes)), model.flops_ms, model.bytes_ms


def _pooled(own: _Sample, others: Sequence[_Sample]) -> tuple[np.ndarray, float, list[float]]:
    """Return the constants of an implementation with few rows, the half width of its interval, and by how much rows
    are off from what the others say of them, beyond the factor of their implementation.

    Implementations of a kind follow one model, each as many times as slow as it is itself. How these factors differ,
    and how well the model of all others fits each, says what is to be expected of this one; its own rows count
    against that as their number tells (James and Stein). Widths are in logarithms.
    """
    import numpy as np

    everyone = [*others, *([own] if len(own.times) else [])]
    residuals = []
    for left_out in everyone:
        constants = _common([each for each in everyone if each is not left_out] or everyone)
        residuals.append(np.log(left_out.times / np.maximum(left_out.terms @ constants, TINY_MS)))
    freedom = sum(len(each) - 1 for each in residuals)
    within = sum(float(((each - each.mean()) ** 2).sum()) for each in residuals) / max(1, freedom)
    means = [float(each.mean()) for each in residuals[: len(others)]]
    between = max(float(np.var(means, ddof=1)), LEAST_BETWEEN) if len(means) > 1 else BETWEEN
    constants, shift, variance = _common(everyone), 0.0, within + between
    if len(own.times):
        share = between / (between + within / len(own.times))
        shift = share * float(np.log(own.times / np.maximum(own.terms @ constants, TINY_MS)).mean())
        variance = within + between * (1 - share)
    half = student(len(others) - 1 + len(own.times)) * math.sqrt(variance)
    apart = [each - each.mean() for each in residuals if len(each) > 1] or residuals
    return constants * math.exp(shift), half, [float(ratio) for each in apart for ratio in np.exp(each)]


def _common(samples: Sequence[_Sample]) -> np.ndarray:
    """Return the constants that fit several implementations, each of which counts alike and has a factor of its own."""
    import numpy as np

    terms = np.vstack([each.terms for each in samples])
    weights = np.concatenate([np.full(len(each.times), len(each.times) ** -0.5) for each in samples])
    factors = np.zeros(len(samples))
    for _ in range(3):
        times = np.concatenate([each.times / math.exp(f) for each, f in zip(samples, factors, strict=True)])
        constants = relative_fit(terms, times, weights)
        apart = [np.log(each.times / np.maximum(each.terms @ constants, TINY_MS)).mean() for each in samples]
        factors = np.array(apart) - np.mean(apart)
    return np.asarray(constants * math.exp(np.mean(apart)))
