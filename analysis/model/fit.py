"""What fits of runtime models share: the rows they take, non-negative least squares, errors on rows left out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...results.schema import SIZE_COLUMNS

if TYPE_CHECKING:
    import numpy as np

Case = tuple[str, str, str, str, str | None, Mapping[str, int]]
"""op, impl, mode, dtype, state_dtype and sizes."""

Row = Mapping[str, Any]

ROW_COLUMNS = (
    "op", "state_dtype", "suspect", "device_accelerator", "device_name", "case_id", "measured_at", "time_ms",
    *SIZE_COLUMNS,
)  # fmt: skip
"""Columns of measured rows that a fit reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A runtime model fitted to measured rows of one implementation and mode.

    Attributes:
        op, impl, mode, dtype: what was fitted.
        accelerator: key of the device that was measured.
        roofs: which roofs the rates were taken with: spec, measured or a path.
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
    rows: int
    median_error: float
    worst_error: float
    low_ratio: float
    high_ratio: float


def case_of(row: Row, impl: str, mode: str, dtype: str) -> Case:
    """Return the case of a row of an implementation, mode and dtype; NaN of a frame is a size that does not apply."""
    sizes = {name: int(row[name]) for name in SIZE_COLUMNS if is_set(row.get(name))}
    state_dtype = row["state_dtype"] if isinstance(row["state_dtype"], str) else None
    return row["op"], impl, mode, dtype, state_dtype, sizes


def is_set(value: Any) -> bool:
    """Whether a value of a row is there: neither None nor, in rows of a frame, not a number."""
    return value is not None and value == value


def of_device(rows: Sequence[Row], device: str | None, least: int) -> list[Row]:
    """Return the rows of the preferred device where there are ``least``, else of the one with most."""
    by_device: dict[str, list[Row]] = {}
    for row in rows:
        by_device.setdefault(row["device_accelerator"], []).append(row)
    preferred = by_device.get(device or "", [])
    return preferred if len(preferred) >= least else max(by_device.values(), key=len, default=[])


def errors_of(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the median and worst absolute relative error of predictions, given measured over predicted times."""
    errors = [abs(1 / ratio - 1) for ratio in ratios]
    return percentile(errors, 50), max(errors)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between order statistics."""
    import numpy as np

    return float(np.percentile(values, percent))


def relative_fit(matrix: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return x >= 0 of least sum of ((matrix x - t) / t)^2, by Lawson and Hanson's active sets.

    Args:
        matrix: one row an observation, one column a term, all >= 0.
        times: the observations, > 0.
    """
    import numpy as np

    scaled = matrix / times[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1
    scaled, ones = scaled / norms, np.ones(len(times))
    columns = scaled.shape[1]
    free, x = np.zeros(columns, dtype=bool), np.zeros(columns)
    for _ in range(10 * columns):
        gradient = np.where(free, -np.inf, scaled.T @ (ones - scaled @ x))
        if gradient.max() <= 1e-9:
            break
        free[gradient.argmax()] = True
        while True:
            solution = np.zeros(columns)
            solution[free] = np.linalg.lstsq(scaled[:, free], ones, rcond=None)[0]
            negative = free & (solution <= 0)
            if not negative.any():
                break
            step = (x[negative] / np.maximum(x[negative] - solution[negative], 1e-300)).min()
            x += step * (solution - x)
            free &= x > 1e-12
        x = solution
    return x / norms


def left_out_ratios(matrix: np.ndarray, times: np.ndarray, groups: Sequence[Hashable]) -> list[float]:
    """Return measured over predicted time of every row, predicted by a fit without any row of its group.

    Where all rows are of one group, single rows are left out. Rows of the group None are never left out.
    """
    import numpy as np

    names = list(groups) if len(set(groups)) > 1 else list(range(len(times)))
    ratios: list[float] = []
    for name in dict.fromkeys(each for each in names if each is not None):
        held = np.array([each == name for each in names])
        predicted = matrix[held] @ relative_fit(matrix[~held], times[~held])
        ratios += [float(ratio) for ratio in times[held] / predicted]
    return ratios
