"""Order statistics of timing samples: no assumption about their distribution. Pure Python but for the bootstrap."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass


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
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be in [0, 100], got {percent}")
    return _interpolated(_ordered(samples), percent)


def _interpolated(ordered: Sequence[float], percent: float) -> float:
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


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
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
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


def bootstrap_ratio_interval(
    numerator: Sequence[float],
    denominator: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return the percentile bootstrap interval of median(numerator) / median(denominator), samples drawn independently.

    It says how sure a speed-up is: disjoint from 1 means that one side is faster.

    Source: Efron and Tibshirani (1993), section 13.3.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    medians = []
    for samples in (numerator, denominator):
        values = np.asarray(_ordered(samples))
        draws = generator.integers(0, len(values), size=(resamples, len(values)))
        medians.append(np.median(values[draws], axis=1))
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    ordered = _ordered((medians[0] / medians[1]).tolist())
    tail = 50 * (1 - confidence)
    low, high = (_interpolated(ordered, percent) for percent in (tail, 100 - tail))
    return Interval(low=low, high=high, confidence=confidence)


def _ordered(samples: Sequence[float]) -> list[float]:
    ordered = sorted(map(float, samples))
    if not ordered:
        raise ValueError("samples must hold at least one number, got none")
    if not all(map(math.isfinite, ordered)):
        raise ValueError(f"samples must be finite, got {next(s for s in ordered if not math.isfinite(s))}")
    return ordered
