"""Non-negative least squares in relative error, and how well a fit predicts what was left out of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


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
