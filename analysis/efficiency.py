"""Predicted times: the runtime model's bounds, and where there are measurements a model fitted to them.

A kernel is slower than the roofline for reasons that stay much the same over sizes: it reaches a share of the matrix
rate and a share of the bandwidth, and starting it takes a while. For one implementation and mode

    t = t_0 + x_FLOPs tau_FLOPs + x_bytes tau_bytes,    t_0, x_FLOPs, x_bytes >= 0

is fitted to the measured rows in relative error (1 / x are the efficiencies). How well it predicts is told by rows it
has not seen: each row is predicted by a fit to all rows of other problem sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .accelerators import Accelerator, get_accelerator
from .counts import Count, count_case
from .runtime_model import RuntimeModel, runtime_model
from .statistics import percentile

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

MIN_ROWS = 8
"""Fewer measured rows than this are not fitted."""

SIZES = ("batch", "seq_len", "num_heads", "head_dim_qk", "head_dim_v", "chunk_size", "channels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted runtime model of one implementation and mode.

    Attributes:
        op, impl, mode, dtype: what was fitted.
        accelerator: key of the device that was measured.
        launch_ms: t_0.
        flops_factor, bytes_factor: x_FLOPs and x_bytes; 0 where the other term explains everything.
        rows: number of rows fitted.
        median_error, worst_error: absolute relative errors (0.1 is 10 %) on rows left out of the fit.
        low_ratio, high_ratio: 5th and 95th percentile of measured over predicted time on rows left out of the fit.
    """

    op: str
    impl: str
    mode: str
    dtype: str
    accelerator: str
    launch_ms: float
    flops_factor: float
    bytes_factor: float
    rows: int
    median_error: float
    worst_error: float
    low_ratio: float
    high_ratio: float

    def time_ms(self, model: RuntimeModel) -> float:
        """Return the fitted time for a problem's modelled times, on the measured device or carried to another."""
        return self.launch_ms + self.flops_factor * model.flops_ms + self.bytes_factor * model.bytes_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A time with the interval it lies in.

    Attributes:
        low_ms, high_ms: without a fit the model's bounds (roofline, and no overlap), between which an ideal kernel
            lies; with one, where 90 % of left-out rows lay relative to their prediction.
        time_ms: the fitted time, None without a fit.
        model: the runtime model's times.
        fit: the fit, or None.
    """

    low_ms: float
    high_ms: float
    time_ms: float | None
    model: RuntimeModel
    fit: Fit | None


def predict(count: Count, accelerator: Accelerator, dtype: str, fit: Fit | None = None) -> Prediction:
    """Return the predicted time of ``count`` on ``accelerator``.

    A fit from another accelerator is carried over: the same efficiencies on other rates.
    """
    model = runtime_model(count, accelerator, dtype)
    if fit is None:
        return Prediction(low_ms=model.lower_ms, high_ms=model.upper_ms, time_ms=None, model=model, fit=None)
    time_ms = fit.time_ms(model)
    return Prediction(
        low_ms=time_ms * fit.low_ratio, high_ms=time_ms * fit.high_ratio, time_ms=time_ms, model=model, fit=fit
    )


def fit_efficiency(frame: pd.DataFrame, op: str, impl: str, mode: str, dtype: str) -> Fit | None:
    """Fit one implementation's measured rows; None where there are fewer than :data:`MIN_ROWS` on one device.

    Args:
        frame: results; rows of several devices are told apart, and the device with most rows is taken.
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
    ]
    if rows.empty:
        return None
    key = str(rows["device_accelerator"].value_counts().index[0])
    rows = rows[rows["device_accelerator"] == key]
    accelerator = get_accelerator(key)
    features, times, problems = [], [], []
    for row in rows.to_dict("records"):
        count = _count(row)
        if count is None:
            continue
        model = runtime_model(count, accelerator, dtype)
        features.append((1.0, model.flops_ms, model.bytes_ms))
        times.append(float(row["time_ms"]))
        problems.append(tuple(str(row[name]) for name in SIZES if name != "chunk_size"))
    if len(times) < MIN_ROWS:
        return None
    matrix, measured = np.array(features), np.array(times)
    factors = _non_negative_fit(matrix, measured)
    ratios = _left_out_ratios(matrix, measured, problems)
    errors = [abs(1 / ratio - 1) for ratio in ratios]
    return Fit(
        op=op,
        impl=impl,
        mode=mode,
        dtype=dtype,
        accelerator=key,
        launch_ms=float(factors[0]),
        flops_factor=float(factors[1]),
        bytes_factor=float(factors[2]),
        rows=len(times),
        median_error=percentile(errors, 50),
        worst_error=max(errors),
        low_ratio=percentile(ratios, 5),
        high_ratio=percentile(ratios, 95),
    )


def _count(row: dict[str, Any]) -> Count | None:
    sizes = {name: int(row[name]) for name in SIZES if row.get(name) is not None and row[name] == row[name]}
    state_dtype = row["state_dtype"] if isinstance(row["state_dtype"], str) else None
    return count_case(row["op"], row["impl"], row["mode"], row["dtype"], state_dtype, sizes)


def _non_negative_fit(matrix: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return x >= 0 of least sum of ((matrix x - t) / t)^2: the best of all choices of columns that may be nonzero.

    With three columns there are seven choices, each an ordinary least-squares problem; the optimum is the feasible one
    of least error.
    """
    import numpy as np

    scaled, ones = matrix / times[:, None], np.ones(len(times))
    best, least = np.zeros(matrix.shape[1]), np.inf
    columns = range(matrix.shape[1])
    for chosen in itertools.chain.from_iterable(itertools.combinations(columns, n) for n in range(1, 4)):
        solution = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)[0]
        error = float(np.sum((scaled[:, chosen] @ solution - ones) ** 2))
        if (solution >= 0).all() and error < least:
            best, least = np.zeros(matrix.shape[1]), error
            best[list(chosen)] = solution
    return best


def _left_out_ratios(matrix: np.ndarray, times: np.ndarray, problems: Sequence[tuple[Any, ...]]) -> list[float]:
    """Return measured over predicted time of every row, predicted by a fit without any row of its problem size.

    Where all rows are of one size, single rows are left out.
    """
    import numpy as np

    names: list[Any] = list(problems) if len(set(problems)) > 1 else list(range(len(times)))
    ratios: list[float] = []
    for name in dict.fromkeys(names):
        held = np.array([each == name for each in names])
        predicted = matrix[held] @ _non_negative_fit(matrix[~held], times[~held])
        ratios += [float(ratio) for ratio in times[held] / predicted]
    return ratios
