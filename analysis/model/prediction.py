"""Predicted times: an interval from the runtime model's bounds, or from a model fitted to measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...results.select import load_rows
from ..accelerators.known import Accelerator
from ..counts import Count, count_case
from .efficiency import FormulationFit, fit_efficiency, sequential_steps
from .fit import ROW_COLUMNS, Case
from .launch_model import LaunchFit, fit_launches
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

AnyFit = FormulationFit | LaunchFit

MEASURED_COLUMNS = (
    "chunk_size", "time_ms", "time_ci_low_ms", "time_ci_high_ms", "peak_memory_bytes", "git_commit", "run_id",
    "measured_at",
)  # fmt: skip
"""Columns of a measured row that answers show."""


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
    fit: AnyFit | None
    interval: str


def stored_fit(
    results: Sequence[Path], op: str, impl: str, mode: str, dtype: str, *, device: str, roofs: str = "spec"
) -> tuple[AnyFit | None, int]:
    """Return a fit to measured rows, of the launches where these are known, and how many rows there are.

    Args:
        results: files or folders to fit to; none gives no fit.
        device: key of the accelerator whose rows are preferred.
        roofs: of the rates that the fit refers to, as the accelerator has them.

    Returns:
        The fit, None where there are too few rows, and the number of the operation's rows.
    """
    if not results:
        return None, 0
    rows = load_rows(results, ROW_COLUMNS, {"impl": impl, "mode": mode, "dtype": dtype, "status": "ok"})
    fit = fit_launches(rows, op, impl, mode, dtype, device=device, roofs=roofs)
    own = [row for row in rows if row["op"] == op]
    return fit or fit_efficiency(own, op, impl, mode, dtype, device=device, roofs=roofs), len(own)


def predict_case(case: Case, accelerator: Accelerator, fit: AnyFit | None) -> Prediction:
    """Return the predicted time of a case (op, impl, mode, dtype, state_dtype, sizes) by a fit or the model's bounds.

    Raises:
        ValueError: the operation is not counted in that mode.
    """
    op, impl, mode, dtype, _, sizes = case
    count = count_case(*case)
    if count is None:
        raise ValueError(f"mode must be one that is counted for {op} {impl}, got {mode!r}")
    serial = launches_of(*case) if isinstance(fit, LaunchFit) else sequential_steps(op, impl, mode, dtype, sizes)
    return predict(count, accelerator, dtype, fit, serial)


def measured_rows(results: Sequence[Path], case: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    """Return the measured rows of an accelerator that match ``case`` in each of its columns, the newest last.

    Suspect rows are left out. Reads few columns and no pandas, so that the command line answers at once.
    """
    if not results:
        return []
    wanted = {**case, "device_accelerator": device, "status": "ok", "suspect": None}
    return sorted(load_rows(results, MEASURED_COLUMNS, wanted), key=lambda row: row["measured_at"] or "")


def predict(
    count: Count, accelerator: Accelerator, dtype: str, fit: AnyFit | None = None, serial: Any = 1
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
