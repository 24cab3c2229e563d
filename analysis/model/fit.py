"""What fits of runtime models share: the rows they take, non-negative least squares, errors on rows left out."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...results.schema import SIZE_COLUMNS
from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_roofs

if TYPE_CHECKING:
    import numpy as np

Case = tuple[str, str, str, str, str | None, Mapping[str, int]]
"""op, impl, mode, dtype, state_dtype and sizes."""

Row = Mapping[str, Any]

Sizes = tuple[tuple[str, int], ...]
"""Sizes of a case as something to remember results by."""

ROW_COLUMNS = (
    "op", "impl", "state_dtype", "suspect", "device_accelerator", "device_name", "case_id", "measured_at", "time_ms",
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
        rows: number of the implementation's own rows that were fitted.
        median_error, worst_error: absolute relative errors (0.1 is 10 %) on rows left out of the fit.
        low_ratio, high_ratio: between which the measured over the predicted time lies with 90 % chance, as
            :func:`likely_ratios` takes it from rows left out of the fit.
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

    def basis(self) -> str:
        """Return what the interval of a prediction rests on, in words."""
        return f"90 % of rows left out of the fit on {self.accelerator}"


def case_of(row: Row, impl: str, mode: str, dtype: str) -> Case:
    """Return the case of a row of an implementation, mode and dtype; NaN of a frame is a size that does not apply."""
    sizes = {name: int(row[name]) for name in SIZE_COLUMNS if is_set(row.get(name))}
    state_dtype = row["state_dtype"] if isinstance(row["state_dtype"], str) else None
    return row["op"], impl, mode, dtype, state_dtype, sizes


@functools.cache
def accelerator_of(key: str, roofs: str) -> Accelerator:
    """Return an accelerator with its roofs, which are read once."""
    return with_roofs(get_accelerator(key), roofs)


def hashable(case: Case) -> tuple[str, str, str, str, str | None, Sizes]:
    """Return a case with its sizes as :data:`Sizes`."""
    return (*case[:5], tuple(case[5].items()))


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


def newest_cases(rows: Iterable[Row]) -> list[Row]:
    """Return the newest row of every case on every known accelerator, without suspect ones."""
    known = (row for row in rows if is_set(row["device_accelerator"]) and not is_set(row["suspect"]))
    ordered = sorted(known, key=lambda row: row["measured_at"])
    return list({(row["case_id"], row["device_name"]): row for row in ordered}.values())


def likely_ratios(ratios: Sequence[float], problems: int) -> tuple[float, float]:
    """Return between which the next ratio of measured to predicted time lies with 90 % chance.

    Of n ratios that is between those of rank 0.05 (n + 1) from either end. Fewer than 19 have no such rank: then it
    is the widest of them all and of Student's interval of their logarithms.

    Args:
        ratios: on rows left out of the fit.
        problems: how many of them are independent: rows of one problem err alike.
    """
    ordered, n = sorted(ratios), len(ratios)
    rank = int(0.05 * (n + 1))
    if rank:
        return ordered[rank - 1], ordered[n - rank]
    logs = [math.log(ratio) for ratio in ordered]
    mean = sum(logs) / n
    variance = sum((value - mean) ** 2 for value in logs) / max(1, n - 1)
    half = student(problems - 1) * math.sqrt(variance * (1 + 1 / problems))
    return min(ordered[0], math.exp(mean - half)), max(ordered[-1], math.exp(mean + half))


def student(freedom: int) -> float:
    """Return the 95th percentile of Student's t, by its expansion in 1 / freedom; of 2 degrees where there are fewer.

    Off by 1 % at 2 degrees. Source: Abramowitz and Stegun, 26.7.5.
    """
    z, d = 1.6449, max(2, freedom)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / d**n for n, term in enumerate(terms))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between order statistics."""
    import numpy as np

    return float(np.percentile(values, percent))


def relative_fit(matrix: np.ndarray, times: np.ndarray, weights: np.ndarray | float = 1.0) -> np.ndarray:
    """Return x >= 0 of least sum of (w (matrix x - t) / t)^2, by Lawson and Hanson's active sets.

    Args:
        matrix: one row an observation, one column a term, all >= 0.
        times: the observations, > 0.
        weights: of each observation.
    """
    import numpy as np

    ones = np.ones(len(times)) * weights
    scaled = matrix * (ones / times)[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1
    scaled = scaled / norms
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
