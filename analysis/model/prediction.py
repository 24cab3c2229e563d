"""Predicted times: an interval from the runtime model's bounds, or from a model fitted to measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...results.select import load_rows
from ..accelerators.known import Accelerator
from ..counts import Count
from .efficiency import FormulationFit, fit_efficiency, sequential_steps
from .fit import ROW_COLUMNS, Case
from .launch_model import LaunchFit, stored_launch_fit
from .runtime_model import RuntimeModel, runtime_model
from .schedule import launches_of

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
            lies; with one, where 90 % of left-out rows lay relative to their prediction, wider on another accelerator
            than the one that was measured.
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
        by_launches = stored_launch_fit(results, op, impl, mode, dtype, device=accelerator.key, roofs=roofs)
        if by_launches is not None:
            return predict(count, accelerator, dtype, by_launches, launches)
    fit = None
    if results:
        rows = load_rows(results, ROW_COLUMNS, {"impl": impl, "mode": mode, "dtype": dtype, "status": "ok"})
        fit = fit_efficiency(rows, op, impl, mode, dtype, device=accelerator.key, roofs=roofs)
    return predict(count, accelerator, dtype, fit, sequential_steps(op, impl, mode, dtype, sizes))


def predict(
    count: Count, accelerator: Accelerator, dtype: str, fit: FormulationFit | LaunchFit | None = None, serial: Any = 1
) -> Prediction:
    """Return the predicted time of ``count`` on ``accelerator``.

    Args:
        fit: to measurements of this accelerator or of another that they are carried over from.
        serial: what the fit asks for beside the count: :func:`sequential_steps` of the problem, or its launches.
    """
    model = runtime_model(count, accelerator, dtype)
    time_ms, low_ms, high_ms = None, model.lower_ms, model.upper_ms
    interval = "full overlap to no overlap at full rate, which is what an ideal kernel takes"
    if fit is not None:
        time_ms = fit.time_ms(serial, accelerator, count)
        low_ms, high_ms, interval = fit.interval_ms(serial, accelerator, count)
    return Prediction(low_ms=low_ms, high_ms=high_ms, time_ms=time_ms, model=model, fit=fit, interval=interval)
