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

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...results.schema import SIZE_COLUMNS
from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_roofs
from ..check.statistics import percentile
from ..counts import Count, chunk_of, count_case, formulation_of
from .least_squares import left_out_ratios, relative_fit
from .runtime_model import RuntimeModel, runtime_model

if TYPE_CHECKING:
    import pandas as pd

    from .launch_model import LaunchFit

MIN_ROWS = 8
"""Fewer measured rows than this are not fitted."""

_STATELESS = ("attention", "gated_mlp")
"""Operations without a state that is handed on along the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted runtime model of one implementation and mode.

    Attributes:
        op, impl, mode, dtype: what was fitted.
        accelerator: key of the device that was measured.
        roofs: which roofs tau_FLOPs and tau_bytes were taken with: spec, measured or a path.
        launch_ms, step_ms: t_0 and t_step.
        flops_factor, bytes_factor: x_FLOPs and x_bytes; 0 where other terms explain everything.
        rows: number of rows fitted.
        median_error, worst_error: absolute relative errors (0.1 is 10 %) on rows left out of the fit.
        low_ratio, high_ratio: 5th and 95th percentile of measured over predicted time on rows left out of the fit.
    """

    op: str
    impl: str
    mode: str
    dtype: str
    accelerator: str
    roofs: str
    launch_ms: float
    step_ms: float
    flops_factor: float
    bytes_factor: float
    rows: int
    median_error: float
    worst_error: float
    low_ratio: float
    high_ratio: float

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

    def latency_ms(self, steps: int) -> float:
        """Return the part of the time that no rate of the device shortens: starting, and waiting for states."""
        return self.launch_ms + steps * self.step_ms

    def time_ms(self, model: RuntimeModel, steps: int) -> float:
        """Return the fitted time for a problem's modelled times, on the measured device or carried to another."""
        return self.latency_ms(steps) + self.flops_factor * model.flops_ms + self.bytes_factor * model.bytes_ms


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
    fit: Fit | LaunchFit | None
    interval: str


def predict(
    count: Count, accelerator: Accelerator, dtype: str, *, steps: int = 1, fit: Fit | None = None
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


def sequential_steps(op: str, impl: str, mode: str, dtype: str, sizes: Mapping[str, int]) -> int:
    """Return how many steps of a problem wait for one another: its chunks, or tokens where there is no chunk length.

    Attention, an MLP and the quadratic form have one.
    """
    formulation = formulation_of(op, impl, mode, dtype)
    if op in _STATELESS or mode == "step" or formulation == "parallel":
        return 1
    return -(-sizes["seq_len"] // (chunk_of(op, impl, formulation, sizes.get("chunk_size")) or 1))


FIT_COLUMNS = (
    "status", "suspect", "op", "impl", "mode", "dtype", "state_dtype", "device_accelerator", "time_ms", *SIZE_COLUMNS,
)  # fmt: skip
"""Columns of the results that a fit reads."""


def fit_efficiency(
    frame: pd.DataFrame, op: str, impl: str, mode: str, dtype: str, *, device: str | None = None, roofs: str = "spec"
) -> Fit | None:
    """Fit one implementation's measured rows; None where there are fewer than :data:`MIN_ROWS` on one device.

    Suspect rows are left out.

    Args:
        frame: results; rows of several devices are told apart.
        device: key of the device whose rows are preferred; without rows of it the device with most is taken.
        roofs: spec, measured or a path, see :func:`.roofs.with_roofs`.
    """
    import numpy as np

    rows = frame[
        (frame["status"] == "ok")
        & (frame["op"] == op)
        & (frame["impl"] == impl)
        & (frame["mode"] == mode)
        & (frame["dtype"] == dtype)
        & frame["time_ms"].notna()
        & frame["device_accelerator"].notna()
        & frame["suspect"].isna()
    ]
    numbers = rows["device_accelerator"].value_counts()
    if numbers.empty:
        return None
    key = device if device is not None and numbers.get(device, 0) >= MIN_ROWS else str(numbers.index[0])
    rows = rows[rows["device_accelerator"] == key]
    accelerator = with_roofs(get_accelerator(key), roofs)
    features, times, problems = [], [], []
    for row in rows.to_dict("records"):
        sizes = {name: int(row[name]) for name in SIZE_COLUMNS if row.get(name) is not None and row[name] == row[name]}
        state_dtype = row["state_dtype"] if isinstance(row["state_dtype"], str) else None
        count = count_case(op, impl, mode, dtype, state_dtype, sizes)
        if count is None:
            continue
        model = runtime_model(count, accelerator, dtype)
        steps = sequential_steps(op, impl, mode, dtype, sizes)
        features.append((1.0, steps, model.flops_ms, model.bytes_ms))
        times.append(float(row["time_ms"]))
        problems.append(tuple(str(row[name]) for name in SIZE_COLUMNS if name != "chunk_size"))
    if len(times) < MIN_ROWS:
        return None
    matrix, measured = np.array(features), np.array(times)
    factors = relative_fit(matrix, measured)
    ratios = left_out_ratios(matrix, measured, problems)
    errors = [abs(1 / ratio - 1) for ratio in ratios]
    return Fit(
        op=op,
        impl=impl,
        mode=mode,
        dtype=dtype,
        accelerator=key,
        roofs=roofs,
        launch_ms=float(factors[0]),
        step_ms=float(factors[1]),
        flops_factor=float(factors[2]),
        bytes_factor=float(factors[3]),
        rows=len(times),
        median_error=percentile(errors, 50),
        worst_error=max(errors),
        low_ratio=percentile(ratios, 5),
        high_ratio=percentile(ratios, 95),
    )
