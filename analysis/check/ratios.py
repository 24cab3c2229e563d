"""Bootstrap intervals of ratios of medians, for hundreds of pairs of samples at once.

The statistic is that of :func:`.statistics.bootstrap_ratio_interval`. The ranks that the median of a resample falls on
depend on the number of samples alone, so they are drawn once for each number and looked up in the sorted samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .statistics import Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

RESAMPLES = 2000
MIN_SAMPLES = 6
"""With fewer, no order statistics enclose a median with 95 % confidence, and resampling would feign certainty."""


@functools.lru_cache(maxsize=1024)
def _median_ranks(n: int, side: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the two middle ranks of :data:`RESAMPLES` resamples of n sorted samples; the sides draw apart."""
    import numpy as np

    draws = np.sort(np.random.default_rng((side, n)).integers(0, n, size=(RESAMPLES, n)), axis=1)
    return draws[:, (n - 1) // 2].copy(), draws[:, n // 2].copy()


def resampled_medians(samples: Sequence[float], side: int = 0) -> NDArray[Any]:
    """Return the medians of :data:`RESAMPLES` bootstrap resamples.

    Args:
        samples: at least one finite number.
        side: 0 or 1; the two sides of a ratio are drawn independently.
    """
    import numpy as np

    ordered = np.sort(np.asarray(samples, dtype=float))
    low, high = _median_ranks(len(ordered), side)
    return (ordered[low] + ordered[high]) / 2


def resampled_ratios(numerator: Sequence[float], denominator: Sequence[float]) -> NDArray[Any]:
    """Return median(numerator) / median(denominator) over :data:`RESAMPLES` bootstrap resamples of each."""
    return resampled_medians(numerator) / resampled_medians(denominator, side=1)


def interval_of(estimates: NDArray[Any], confidence: float) -> Interval:
    """Return the percentile interval of bootstrap estimates."""
    import numpy as np

    tail = (1 - confidence) / 2
    low, high = np.quantile(estimates, (tail, 1 - tail))
    return Interval(low=float(low), high=float(high), confidence=confidence)


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float], *, confidence: float) -> Interval:
    """Return the bootstrap interval of median(numerator) / median(denominator).

    With fewer than :data:`MIN_SAMPLES` samples on a side nothing is known: the interval is (0, inf).
    """
    if min(len(numerator), len(denominator)) < MIN_SAMPLES:
        return Interval(low=0.0, high=math.inf, confidence=confidence)
    return interval_of(resampled_ratios(numerator, denominator), confidence)


def geometric_mean_interval(ratios: Sequence[NDArray[Any]], *, confidence: float, seed: int = 0) -> Interval:
    """Return the interval of the geometric mean of ratios, each given by its bootstrap estimates.

    Cases are independent, but those with equally many samples share their draws: each is shuffled before it is added.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for estimates in ratios:
        total += generator.permutation(np.log(estimates))
    return interval_of(np.exp(total / len(ratios)), confidence)
