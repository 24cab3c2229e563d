"""Predicted times: an interval from the runtime model's bounds, or from a model fitted to measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...results.schema import SIZE_COLUMNS
from ...results.select import load_rows
from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_roofs
from ..counts import Count, count_case
from .efficiency import FormulationFit, fit_efficiency, sequential_steps
from .fit import ROW_COLUMNS, Case, Row
from .launch_model import LaunchFit, fit_launches
from .runtime_model import RuntimeModel, floor_ms, runtime_model
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
    "measured_at", "reason",
)  # fmt: skip
"""Columns of a measured row that answers show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A time with the interval it lies in.

    Attributes:
        low_ms, high_ms: without a fit the model's bounds (roofline, and no overlap), between which an ideal kernel
            lies; with one, where 90 % of left-out rows lay relative to their prediction, wider on another accelerator
            than the one that was measured, and never below what the accelerator allows.
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


def stored_rows(results: Sequence[Path], mode: str, dtype: str) -> list[dict[str, Any]]:
    """Return the measured rows of a mode and dtype in result files or folders: what fits and answers read of them."""
    return rows_by_status(results, mode, dtype).get("ok", [])


def rows_by_status(results: Sequence[Path], mode: str, dtype: str) -> dict[str, list[dict[str, Any]]]:
    """Return status -> the rows of a mode and dtype.

    Reads few columns and no pandas, so that the command line answers at once.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    columns = tuple(dict.fromkeys((*ROW_COLUMNS, *MEASURED_COLUMNS, "status")))
    for row in load_rows(results, columns, {"mode": mode, "dtype": dtype}) if results else ():
        found.setdefault(row["status"], []).append(row)
    return found


def fit_to(
    rows: Sequence[Row], op: str, impl: str, mode: str, dtype: str, *, device: str, roofs: str = "spec"
) -> tuple[AnyFit | None, int]:
    """Return a fit to measured rows, of the launches where these are known, and how many rows there are.

    Args:
        rows: of every implementation, as :func:`stored_rows` returns them; none gives no fit.
        device: key of the accelerator whose rows are preferred.
        roofs: of the rates that the fit refers to, as the accelerator has them.

    Returns:
        The fit, None where there are too few rows, and the number of the operation's rows.
    """
    same = [row for row in rows if row["impl"] == impl]
    fit: AnyFit | None = fit_launches(same, op, impl, mode, dtype, device=device, roofs=roofs)
    fit = fit or fit_efficiency(rows, op, impl, mode, dtype, device=device, roofs=roofs)
    return fit, sum(row["op"] == op for row in same)


def predict_case(
    case: Case, accelerator: Accelerator, fit: AnyFit | None, measured_ms: float | None = None
) -> Prediction:
    """Return the predicted time of a case (op, impl, mode, dtype, state_dtype, sizes) by a fit or the model's bounds.

    Args:
        measured_ms: as :func:`predict`.

    Raises:
        ValueError: the operation is not counted in that mode.
    """
    op, impl, mode, dtype, _, sizes = case
    count = count_case(*case)
    if count is None:
        raise ValueError(f"mode must be one that is counted for {op} {impl}, got {mode!r}")
    serial = launches_of(*case) if isinstance(fit, LaunchFit) else sequential_steps(op, impl, mode, dtype, sizes)
    return predict(count, accelerator, dtype, fit, serial, measured_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a case takes: as measured where it was, else as fitted, else between the model's bounds.

    Attributes:
        case: what is asked about.
        predicted: what the model says.
        measured: the newest row of the very case on the accelerator, or None.
    """

    case: Case
    predicted: Prediction
    measured: Row | None

    @property
    def basis(self) -> str:
        """Where the time comes from: measured, fitted or bound."""
        return "measured" if self.measured else "fitted" if self.predicted.time_ms is not None else "bound"

    @property
    def chunk_size(self) -> int | None:
        """The chunk length, None where there is none."""
        return self.case[-1].get("chunk_size")

    @property
    def time_ms(self) -> float | None:
        """The time, None where only bounds are known."""
        return self.measured["time_ms"] if self.measured else self.predicted.time_ms

    @property
    def interval_ms(self) -> tuple[float, float]:
        """Where the time lies: 95 % of the median as measured, 90 % of a prediction, or the bounds."""
        if self.measured:
            return self.measured["time_ci_low_ms"], self.measured["time_ci_high_ms"]
        return self.predicted.low_ms, self.predicted.high_ms

    @property
    def memory_bytes(self) -> float:
        """Peak memory, as measured or as modelled."""
        measured = self.measured["peak_memory_bytes"] if self.measured else None
        return self.modelled_memory_bytes if measured is None else float(measured)

    @property
    def modelled_memory_bytes(self) -> float:
        """Return the bytes alive at the peak of a pass: its inputs and outputs once, and every chunk's state.

        A backward pass holds the gradients of the states as well. What the states take falls with the chunk length
        (TFLA paper, figure 6).
        """
        op, impl, mode, dtype, state_dtype, sizes = self.case
        last = count_case(op, impl, "bw" if mode == "fwbw" else mode, dtype, state_dtype, sizes)
        assert last is not None, "a case of another mode would not have been predicted"
        states = last.byte_parts.get("recurrent store", 0.0)
        return last.compulsory_bytes + (2 * states if last.mode == "bw" else states)

    def order(self) -> tuple[bool, float]:
        """Return by what implementations are ranked: the most that they are likely to take; bounds are behind.

        So one of which little is known is not preferred to one that was measured.
        """
        return self.basis == "bound", self.interval_ms[1]


def best_of(answers: Sequence[Answer]) -> Answer:
    """Return the chunk length to take: the fastest measured one, else the one of least time by the model."""
    measured = [each for each in answers if each.measured]
    return min(measured or answers, key=lambda each: each.interval_ms[1] if each.time_ms is None else each.time_ms)


def answer(case: Case, accelerator: Accelerator, fit: AnyFit | None, rows: Sequence[Row]) -> Answer:
    """Return what a case takes on an accelerator.

    Args:
        rows: of the case's mode and dtype, as :func:`stored_rows` returns them.

    Raises:
        ValueError: the operation is not counted in that mode.
    """
    op, impl, *_, state_dtype, sizes = case
    # The tokens of an MLP are stored as the length of one sequence.
    tokens = {"batch": 1, "seq_len": sizes["batch"] * sizes["seq_len"]} if "d_model" in sizes else {}
    wanted: dict[str, Any] = {"op": op, "impl": impl, "state_dtype": state_dtype, "suspect": None}
    wanted |= {**dict.fromkeys(SIZE_COLUMNS), **sizes, **tokens}
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    # By device, the newest last.
    newest = {row["device_accelerator"]: row for row in sorted(found, key=lambda row: row["measured_at"] or "")}
    fitted_on = None if fit is None or fit.accelerator == accelerator.key else newest.get(fit.accelerator)
    predicted = predict_case(case, accelerator, fit, fitted_on["time_ms"] if fitted_on else None)
    return Answer(case=case, predicted=predicted, measured=newest.get(accelerator.key))


def predict(
    count: Count,
    accelerator: Accelerator,
    dtype: str,
    fit: AnyFit | None = None,
    serial: Any = 1,
    measured_ms: float | None = None,
) -> Prediction:
    """Return the predicted time of ``count`` on ``accelerator``.

    Args:
        fit: to measurements of this accelerator or of another that they are carried over from.
        serial: what the fit asks for beside the count: :func:`sequential_steps` of the problem, or its launches.
        measured_ms: of this very case on the accelerator that was fitted, if it is another one: this time is then
            carried over, not the fitted one, and may be as far off as the fit is in the median.
    """
    model = runtime_model(count, accelerator, dtype)
    if fit is None:
        interval = "full overlap to no overlap at full rate, which is what an ideal kernel takes"
        return Prediction(
            low_ms=model.lower_ms, high_ms=model.upper_ms, time_ms=None, model=model, fit=None, interval=interval
        )
    time_ms = fit.time_ms(serial, accelerator, count)
    low_ms, high_ms, carried = fit.carried_ms(serial, accelerator, count)
    factors, basis = (1.0, fit.low_ratio, fit.high_ratio), fit.basis()
    if measured_ms is not None:
        there = with_roofs(get_accelerator(fit.accelerator), fit.roofs)
        off, error = measured_ms / fit.time_ms(serial, there, count), fit.median_error
        factors, basis = (off, off / (1 + error), off * (1 + error)), f"{measured_ms:.4g} ms on {fit.accelerator}"
    least = floor_ms(count, accelerator, dtype)
    time_ms, low_ms, high_ms = (
        max(each * factor, least) for each, factor in zip((time_ms, low_ms, high_ms), factors, strict=True)
    )
    return Prediction(low_ms=low_ms, high_ms=high_ms, time_ms=time_ms, model=model, fit=fit, interval=basis + carried)
