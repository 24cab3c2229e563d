"""Predicted times: the runtime model's bounds, and where there are measurements a model fitted to them.

A kernel is slower than the roofline for reasons that stay much the same over sizes: it reaches a share of the matrix
rate and a share of the bandwidth, a state waits for the one before it, and starting takes a while. For one
implementation and mode

    t = t_0 + n t_step + x_FLOPs tau_FLOPs + x_bytes tau_bytes,     t_0, t_step, x_FLOPs, x_bytes >= 0

with n steps one after the other (chunks of a sequence, tokens of a recurrence) is fitted to the measured rows in
relative error; 1 / x are the efficiencies. How well it predicts is told by rows it has not seen: each row is predicted
by a fit to all rows of other problem sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...results.schema import SIZE_COLUMNS
from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_roofs
from ..counts import Count, chunk_of, count_case, formulation_of
from .fit import Fit, Row, case_of, errors_of, is_set, left_out_ratios, of_device, percentile, relative_fit
from .runtime_model import runtime_model

MIN_ROWS = 8
"""Fewer measured rows than this are not fitted."""

_STATELESS = ("attention", "gated_mlp")
"""Operations without a state that is handed on along the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulationFit(Fit):
    """The formulation's runtime model, fitted.

    Attributes:
        launch_ms, step_ms: t_0 and t_step.
        flops_factor, bytes_factor: x_FLOPs and x_bytes; 0 where other terms explain everything.
    """

    launch_ms: float
    step_ms: float
    flops_factor: float
    bytes_factor: float

    def in_figures(self) -> dict[str, Any]:
        """Return what a table says of the fit."""
        return {
            "model": "formulation",
            "fitted_on": self.accelerator,
            "fitted_rows": self.rows,
            "launch_ms": self.launch_ms,
            "step_ms": self.step_ms,
            "flops_efficiency": 1 / self.flops_factor if self.flops_factor else None,
            "bytes_efficiency": 1 / self.bytes_factor if self.bytes_factor else None,
            "median_error": self.median_error,
            "worst_error": self.worst_error,
        }

    def time_ms(self, steps: int, accelerator: Accelerator, count: Count) -> float:
        """Return the fitted time of a problem on an accelerator, its latencies as on the one that was measured.

        Args:
            steps: :func:`sequential_steps` of the problem.
        """
        model = runtime_model(count, accelerator, self.dtype)
        return self._latency_ms(steps) + self.flops_factor * model.flops_ms + self.bytes_factor * model.bytes_ms

    def interval_ms(self, steps: int, accelerator: Accelerator, count: Count) -> tuple[float, float, str]:
        """Return where the time of a problem lies: least and most in ms, and what that means in words.

        On the device that was measured that is where 90 % of left-out rows lay relative to their prediction. Elsewhere
        everything but latency may speed up as little as the rate that gains least (matrix, vector, bandwidth) or as
        much as the one that gains most.
        """
        words = f"90 % of rows left out of the fit on {self.accelerator}"
        low_ms = high_ms = self.time_ms(steps, accelerator, count)
        if self.accelerator != accelerator.key:
            measured = with_roofs(get_accelerator(self.accelerator), self.roofs)
            here, there = (runtime_model(count, each, self.dtype) for each in (accelerator, measured))
            gains = (
                there.flops_ms / here.flops_ms,
                accelerator.vector_flops / measured.vector_flops,
                accelerator.bandwidth_bytes_s / measured.bandwidth_bytes_s,
            )
            latency_ms = self._latency_ms(steps)
            at_rates_ms = self.time_ms(steps, measured, count) - latency_ms
            low_ms, high_ms = (latency_ms + at_rates_ms / gain for gain in (max(gains), min(gains)))
            words += (
                f", carried to {accelerator.key}: its rates are {min(gains):.2f} to {max(gains):.2f} times as high, "
                "and which of them counts is not known there"
            )
        return low_ms * self.low_ratio, high_ms * self.high_ratio, words

    def _latency_ms(self, steps: int) -> float:
        """Return the part of the time that no rate of the device shortens: starting, and waiting for states."""
        return self.launch_ms + steps * self.step_ms


def sequential_steps(op: str, impl: str, mode: str, dtype: str, sizes: Mapping[str, int]) -> int:
    """Return how many steps of a problem wait for one another: its chunks, or tokens where there is no chunk length.

    Attention, an MLP and the quadratic form have one.
    """
    formulation = formulation_of(op, impl, mode, dtype)
    if op in _STATELESS or mode == "step" or formulation == "parallel":
        return 1
    return -(-sizes["seq_len"] // (chunk_of(op, impl, formulation, sizes.get("chunk_size")) or 1))


def fit_efficiency(
    rows: Iterable[Row], op: str, impl: str, mode: str, dtype: str, *, device: str | None = None, roofs: str = "spec"
) -> FormulationFit | None:
    """Fit one operation's measured rows; None where there are fewer than :data:`MIN_ROWS` on one device.

    Suspect rows are left out.

    Args:
        rows: measured rows of this implementation, mode and dtype, with :data:`.fit.ROW_COLUMNS`.
        device: key of the device whose rows are preferred; without rows of it the device with most is taken.
        roofs: spec, measured or a path, see :func:`.roofs.with_roofs`.
    """
    import numpy as np

    known = [
        row for row in rows if row["op"] == op and is_set(row["device_accelerator"]) and not is_set(row["suspect"])
    ]
    taken = of_device(known, device, MIN_ROWS)
    if not taken:
        return None
    key = str(taken[0]["device_accelerator"])
    accelerator = with_roofs(get_accelerator(key), roofs)
    features, times, problems = [], [], []
    for row in taken:
        case = case_of(row, impl, mode, dtype)
        count = count_case(*case)
        if count is None:
            continue
        model = runtime_model(count, accelerator, dtype)
        features.append((1.0, sequential_steps(op, impl, mode, dtype, case[-1]), model.flops_ms, model.bytes_ms))
        times.append(float(row["time_ms"]))
        problems.append(tuple(str(row[name]) for name in SIZE_COLUMNS if name != "chunk_size"))
    if len(times) < MIN_ROWS:
        return None
    matrix, measured = np.array(features), np.array(times)
    launch_ms, step_ms, flops_factor, bytes_factor = map(float, relative_fit(matrix, measured))
    ratios = left_out_ratios(matrix, measured, problems)
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
        rows=len(times),
        median_error=median_error,
        worst_error=worst_error,
        low_ratio=percentile(ratios, 5),
        high_ratio=percentile(ratios, 95),
    )
