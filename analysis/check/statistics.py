"""Statistics of timing samples that assume no distribution: medians, their intervals, and intervals of ratios.

A median's interval is that of order statistics. A ratio of medians has the percentile bootstrap's (Efron and Tibshirani
1993, section 13.3), for hundreds of pairs at once: the ranks on which the median of a resample falls depend only on the
number of samples, so they are drawn once for each number and looked up in the sorted samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

RESAMPLES = 2000
MIN_SAMPLES = 6
"""With fewer, no order statistics enclose a median with 95 % confidence, and resampling would feign certainty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A confidence interval.

    Attributes:
        low, high: its ends, in the samples' unit.
        confidence: probability that it covers the true value; for order statistics the exact one, at least what was
            asked for unless there are too few samples.
    """

    low: float
    high: float
    confidence: float


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile (0 to 100), interpolated linearly between order statistics.

    Raises:
        ValueError: no samples, a sample that is not finite, or a percentage outside [0, 100].
    """
    import numpy as np

    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be in [0, 100], got {percent}")
    return float(np.percentile(_ordered(samples), percent))


def median(samples: Sequence[float]) -> float:
    """Return the median; ValueError without samples."""
    return percentile(samples, 50)


@functools.lru_cache(maxsize=4096)
def median_ranks(n: int, confidence: float = 0.95) -> tuple[int, int, float]:
    """Return 0-based ranks (low, high) of the order statistics that enclose the median, and their exact confidence.

    The number of n samples below the median is Binomial(n, 1/2), so the interval between the r-th smallest and the r-th
    largest covers it with probability 1 - 2 P(X < r); the narrowest such interval with at least ``confidence`` is taken
    (Conover, Practical Nonparametric Statistics, section 3.2). With fewer than 6 samples no interval reaches 0.95: the
    whole range is returned with the confidence it has.

    Raises:
        ValueError: n < 1 or a confidence outside (0, 1).
    """
    if n < 1:
        raise ValueError(f"n must be >= 1, got {n}")
    _check_confidence(confidence)
    tail, low, reached = 0.0, 0, 0.0
    for r in range(1, n // 2 + 1):
        # log-gamma keeps the binomial probabilities finite for any n.
        tail += math.exp(math.lgamma(n + 1) - math.lgamma(r) - math.lgamma(n - r + 2) - n * math.log(2))
        if 1 - 2 * tail < confidence and r > 1:
            break
        low, reached = r - 1, 1 - 2 * tail
    return low, n - 1 - low, max(reached, 0.0)


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the distribution-free confidence interval of the median (see :func:`median_ranks`)."""
    ordered = _ordered(samples)
    low, high, reached = median_ranks(len(ordered), confidence)
    return Interval(low=ordered[low], high=ordered[high], confidence=reached)


def relative_half_width(samples: Sequence[float], confidence: float = 0.95) -> float:
    """Return half the median's confidence interval over the median, a measure for a sampling loop to stop at.

    Infinite while there are too few samples to reach ``confidence``.
    """
    interval = median_interval(samples, confidence)
    middle = median(samples)
    if interval.confidence < confidence or middle == 0:
        return math.inf
    return (interval.high - interval.low) / 2 / abs(middle)


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Return the bootstrap interval of median(numerator) / median(denominator), the sides resampled independently.

    With fewer than :data:`MIN_SAMPLES` samples on a side nothing is known: the interval is (0, inf).

    Raises:
        ValueError: a sample that is not finite, or a confidence outside (0, 1).
    """
    _check_confidence(confidence)
    if min(len(numerator), len(denominator)) < MIN_SAMPLES:
        return Interval(low=0.0, high=math.inf, confidence=confidence)
    return interval_of(resampled_ratios(numerator, denominator), confidence)


def resampled_ratios(numerator: Sequence[float], denominator: Sequence[float]) -> NDArray[Any]:
    """Return median(numerator) / median(denominator) over :data:`RESAMPLES` bootstrap resamples of each."""
    return resampled_medians(numerator) / resampled_medians(denominator, side=1)


def resampled_medians(samples: Sequence[float], side: int = 0) -> NDArray[Any]:
    """Return the medians of :data:`RESAMPLES` bootstrap resamples; the two sides of a ratio (0, 1) draw apart."""
    import numpy as np

    ordered = np.array(_ordered(samples))
    low, high = _resampled_ranks(len(ordered), side)
    return (ordered[low] + ordered[high]) / 2


@functools.lru_cache(maxsize=1024)
def _resampled_ranks(n: int, side: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the two middle ranks of :data:`RESAMPLES` resamples of n sorted samples."""
    import numpy as np

    draws = np.sort(np.random.default_rng((side, n)).integers(0, n, size=(RESAMPLES, n)), axis=1)
    return draws[:, (n - 1) // 2].copy(), draws[:, n // 2].copy()


def interval_of(estimates: NDArray[Any], confidence: float) -> Interval:
    """Return the percentile interval of bootstrap estimates."""
    import numpy as np

    tail = (1 - confidence) / 2
    low, high = np.quantile(estimates, (tail, 1 - tail))
    return Interval(low=float(low), high=float(high), confidence=confidence)


def geometric_mean_interval(ratios: Sequence[NDArray[Any]], *, confidence: float, seed: int = 0) -> Interval:
    """Return the interval of the geometric mean of ratios, each given by its bootstrap estimates.

    Cases are independent, but those with equally many samples share their draws: each is shuffled before it is added.
    """
    import numpy as np

    if len(ratios) == 1:
        return interval_of(ratios[0], confidence)
    generator = np.random.default_rng(seed)
    logs = sum(generator.permutation(np.log(estimates)) for estimates in ratios)
    return interval_of(np.exp(logs / len(ratios)), confidence)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")


def _ordered(samples: Sequence[float]) -> list[float]:
    ordered = sorted(map(float, samples))
    if not ordered:
        raise ValueError("samples must hold at least one number, got none")
    if not all(map(math.isfinite, ordered)):
        raise ValueError(f"samples must be finite, got {next(s for s in ordered if not math.isfinite(s))}")
    return ordered
