"""Statistics of timing samples that assume no distribution: medians, their intervals, and intervals of ratios.

A median's interval is that of order statistics. A ratio of medians has the percentile bootstrap's (Efron and Tibshirani
1993, section 13.3), for hundreds of pairs at once: the ranks on which the median of a resample falls depend only on the
number of samples, so they are drawn once for each number and looked up in the sorted samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

RESAMPLES = 2000
MIN_SAMPLES = 6
"""With fewer, no order statistics enclose a median with 95 % confidence, and resampling would feign certainty."""

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A confidence interval: its ends, in the samples' unit or of their ratio."""

    low: float
    high: float


UNKNOWN = Interval(low=0.0, high=math.inf)
"""The interval of a ratio of which nothing is known."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile (0 to 100), interpolated linearly between order statistics.

    Raises:
        ValueError: no samples, a sample that is not finite, or a percentage outside [0, 100].
    """
    import numpy as np

    return float(np.percentile(_finite(samples), percent))


def median(samples: Sequence[float]) -> float:
    """Return the median; ValueError without samples."""
    return percentile(samples, 50)


@functools.lru_cache(maxsize=4096)
def median_ranks(n: int) -> tuple[int, int]:
    """Return 0-based ranks (low, high) of the order statistics that enclose the median of n samples.

    The number of n samples below the median is Binomial(n, 1/2), so the interval between the r-th smallest and the r-th
    largest covers it with probability 1 - 2 P(X < r); the narrowest such interval with at least :data:`CONFIDENCE` is
    taken (Conover, Practical Nonparametric Statistics, section 3.2). With fewer than :data:`MIN_SAMPLES` samples none
    has as much, and the whole range is returned.
    """
    tail, low = 0.0, 0
    for r in range(1, n // 2 + 1):
        # log-gamma keeps the binomial probabilities finite for any n.
        tail += math.exp(math.lgamma(n + 1) - math.lgamma(r) - math.lgamma(n - r + 2) - n * math.log(2))
        if 1 - 2 * tail < CONFIDENCE:
            break
        low = r - 1
    return low, n - 1 - low


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the distribution-free confidence interval of the median (see :func:`median_ranks`)."""
    ordered = sorted(_finite(samples))
    low, high = median_ranks(len(ordered))
    return Interval(low=ordered[low], high=ordered[high])


def relative_half_width(samples: Sequence[float]) -> float:
    """Return half the median's confidence interval over the median, a measure for a sampling loop to stop at.

    Infinite with fewer than :data:`MIN_SAMPLES` samples.
    """
    interval, middle = median_interval(samples), median(samples)
    if len(samples) < MIN_SAMPLES or middle == 0:
        return math.inf
    return (interval.high - interval.low) / 2 / abs(middle)


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], *, confidence: float = CONFIDENCE
) -> Interval:
    """Return the bootstrap interval of median(numerator) / median(denominator), the sides resampled independently.

    With fewer than :data:`MIN_SAMPLES` samples on a side nothing is known; ValueError for one that is not finite.
    """
    if min(len(numerator), len(denominator)) < MIN_SAMPLES:
        return UNKNOWN
    return interval_of(resampled_ratios(numerator, denominator), confidence)


def resampled_ratios(numerator: Sequence[float], denominator: Sequence[float]) -> NDArray[Any]:
    """Return median(numerator) / median(denominator) over :data:`RESAMPLES` bootstrap resamples of each."""
    return resampled_medians(numerator) / resampled_medians(denominator, side=1)


def resampled_in_turn(*sides: Sequence[float]) -> list[NDArray[Any]]:
    """Return the medians of each side over :data:`RESAMPLES` bootstrap resamples of the rounds that they share.

    Args:
        sides: of each as many samples, the n-th ones of the same round.
    """
    import numpy as np

    samples = np.array([_finite(side) for side in sides])
    rounds = samples.shape[1]
    draws = np.random.default_rng(rounds).integers(0, rounds, size=(RESAMPLES, rounds))
    return [np.median(side[draws], axis=1) for side in samples]


def resampled_medians(samples: Sequence[float], side: int = 0) -> NDArray[Any]:
    """Return the medians of :data:`RESAMPLES` bootstrap resamples; the two sides of a ratio (0, 1) draw apart."""
    import numpy as np

    ordered = np.sort(_finite(samples))
    low, high = _resampled_ranks(len(ordered), side)
    return (ordered[low] + ordered[high]) / 2


@functools.lru_cache(maxsize=1024)
def _resampled_ranks(n: int, side: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the two middle ranks of :data:`RESAMPLES` resamples of n sorted samples."""
    import numpy as np

    draws = np.sort(np.random.default_rng((side, n)).integers(0, n, size=(RESAMPLES, n)), axis=1)
    return draws[:, (n - 1) // 2].copy(), draws[:, n // 2].copy()


def interval_of(estimates: NDArray[Any], confidence: float = CONFIDENCE) -> Interval:
    """Return the percentile interval of bootstrap estimates."""
    import numpy as np

    tail = (1 - confidence) / 2
    low, high = np.quantile(estimates, (tail, 1 - tail))
    return Interval(low=float(low), high=float(high))


def geometric_mean_interval(ratios: Sequence[NDArray[Any]]) -> Interval:
    """Return the interval of the geometric mean of ratios, each given by its bootstrap estimates.

    Cases are independent, but those with equally many samples share their draws: each is shuffled before it is added.
    """
    import numpy as np

    if len(ratios) == 1:
        return interval_of(ratios[0])
    generator = np.random.default_rng(0)
    logs = sum(generator.permutation(np.log(estimates)) for estimates in ratios)
    return interval_of(np.exp(logs / len(ratios)))


def _finite(samples: Sequence[float]) -> list[float]:
    found = list(map(float, samples))
    if not found:
        raise ValueError("samples must hold at least one number, got none")
    if not all(map(math.isfinite, found)):
        raise ValueError(f"samples must be finite, got {next(s for s in found if not math.isfinite(s))}")
    return found
