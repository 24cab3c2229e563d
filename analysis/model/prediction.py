"""Predicted times: an interval from the runtime model's bounds, or from a model fitted to measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...results.select import load_rows
from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_roofs
from ..counts import Count
from .efficiency import FormulationFit, fit_efficiency, sequential_steps
from .fit import ROW_COLUMNS, Case
from .launch_model import LaunchFit, stored_launch_fit
from .runtime_model import RuntimeModel, runtime_model
from .schedule import Launch, launches_of

NO_FIT: Mapping[str, Any] = MappingProxyType(
    {"model": "formulation"}
    | dict.fromkeys(
        ("fitted_on", "fitted_rows", "launch_ms", "step_ms", "flops_efficiency", "bytes_efficiency", "median_error",
         "worst_error")
    )
)  # fmt: skip
"""What a table says where there is no fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A time with the interval it lies in.

    Attributes:
        low_ms, high_ms: without a fit the model's bounds (roofline, and no overlap), between which an ideal kernel
            lies; with one, where 90 % of left-out rows lay relative to their prediction. A fit from another accelerator
            widens that: everything but latency may speed up as little as the rate that gains least (matrix, vector,
            bandwidth) or as much as the one that gains most.
        time_ms: the fitted time, None without a fit.
        model: the runtime model's times.
        fit: the fit, or None.
        interval: what the interval means, in words.
    """

    low_ms: float
    high_ms: float
    time_ms: float | None
    model: RuntimeModel
    fit: FormulationFit | LaunchFit | None
    interval: str


def predict(
    count: Count, accelerator: Accelerator, dtype: str, *, steps: int = 1, fit: FormulationFit | None = None
) -> Prediction:
    """Return the predicted time of ``count`` on ``accelerator``.

    Args:
        steps: :func:`sequential_steps` of the problem; only a fit asks for them.
        fit: efficiencies, of this accelerator or of another that they are carried over from.
    """
    model = runtime_model(count, accelerator, dtype)
    if fit is None:
        return Prediction(
            low_ms=model.lower_ms,
            high_ms=model.upper_ms,
            time_ms=None,
            model=model,
            fit=None,
            interval="full overlap to no overlap at full rate, which is what an ideal kernel takes",
        )
    time_ms = low_ms = high_ms = fit.time_ms(model, steps)
    interval = f"90 % of rows left out of the fit on {fit.accelerator}"
    if fit.accelerator != accelerator.key:
        measured = with_roofs(get_accelerator(fit.accelerator), fit.roofs)
        there = runtime_model(count, measured, dtype)
        latency_ms = fit.latency_ms(steps)
        gains = (
            there.flops_ms / model.flops_ms,
            accelerator.vector_flops / measured.vector_flops,
            accelerator.bandwidth_bytes_s / measured.bandwidth_bytes_s,
        )
        at_rates_ms = fit.time_ms(there, steps) - latency_ms
        low_ms, high_ms = (latency_ms + at_rates_ms / gain for gain in (max(gains), min(gains)))
        interval += (
            f", carried to {accelerator.key}: its rates are {min(gains):.2f} to {max(gains):.2f} times as high, and "
            "which of them counts is not known there"
        )
    return Prediction(
        low_ms=low_ms * fit.low_ratio,
        high_ms=high_ms * fit.high_ratio,
        time_ms=time_ms,
        model=model,
        fit=fit,
        interval=interval,
    )


def predict_case(
    case: Case, count: Count, accelerator: Accelerator, results: Sequence[Path], *, roofs: str = "spec"
) -> Prediction:
    """Return the predicted time of a case: by its launches where they are known and were measured, else by its count.

    Args:
        case: op, impl, mode, dtype, state_dtype and sizes.
        count: of the case.
        results: files or folders to fit to; none gives the runtime model's bounds.
        roofs: of the rates that a fit refers to, as ``accelerator`` has them.
    """
    op, impl, mode, dtype, _, sizes = case
    launches = launches_of(*case)
    if launches is not None:
        fit = stored_launch_fit(results, op, impl, mode, dtype, device=accelerator.key, roofs=roofs)
        if fit is not None:
            return predict_launches(fit, launches, count, accelerator)
    formulation = None
    if results:
        rows = load_rows(results, ROW_COLUMNS, {"impl": impl, "mode": mode, "dtype": dtype, "status": "ok"})
        formulation = fit_efficiency(rows, op, impl, mode, dtype, device=accelerator.key, roofs=roofs)
    return predict(count, accelerator, dtype, steps=sequential_steps(op, impl, mode, dtype, sizes), fit=formulation)


def predict_launches(fit: LaunchFit, launches: Sequence[Launch], count: Count, accelerator: Accelerator) -> Prediction:
    """Return the predicted time of a problem on ``accelerator`` and the interval it lies in."""
    low_ms, high_ms, interval = fit.interval_ms(launches, accelerator, count)
    return Prediction(
        low_ms=low_ms,
        high_ms=high_ms,
        time_ms=fit.time_ms(launches, accelerator, count),
        model=runtime_model(count, accelerator, fit.dtype),
        fit=fit,
        interval=interval,
    )
