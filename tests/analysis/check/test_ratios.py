"""The fast bootstrap is the plain one, and covers what it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lrbench.analysis.check import ratios
from lrbench.analysis.check.statistics import bootstrap_ratio_interval

from ..measured import samples


@pytest.mark.parametrize("count", [6, 10, 11, 45])
def test_is_the_plain_bootstrap(count: int) -> None:
    """The draws are others, and medians of few samples take few values: the ends may be a step apart."""
    new, old = samples(2.1, count=count, seed=1), samples(2.0, count=count + 3, seed=2)
    fast = ratios.ratio_interval(new, old, confidence=0.95)
    plain = bootstrap_ratio_interval(new, old)
    width = plain.high - plain.low
    assert fast.low == pytest.approx(plain.low, abs=0.2 * width)
    assert fast.high == pytest.approx(plain.high, abs=0.2 * width)


def test_resampled_medians_are_medians_of_resamples() -> None:
    """With the draws done by hand, the looked-up ranks give numpy's medians."""
    values = np.array([5.0, 1.0, 4.0, 9.0, 2.0, 7.0])
    draws = np.random.default_rng((0, 6)).integers(0, 6, size=(ratios.RESAMPLES, 6))
    np.testing.assert_array_equal(ratios.resampled_medians(values), np.median(np.sort(values)[draws], axis=1))


def test_covers_the_true_ratio() -> None:
    """A 95 % interval of 20 samples a side covers the true ratio nearly as often as it says."""
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        interval = ratios.ratio_interval(
            1.05 * (1 + 0.01 * generator.standard_normal(20)), 1 + 0.01 * generator.standard_normal(20), confidence=0.95
        )
        covered += interval.low <= 1.05 <= interval.high
    assert 0.91 <= covered / 400 <= 0.99


def test_too_few_samples_say_nothing() -> None:
    interval = ratios.ratio_interval([1.0] * 5, [1.0] * 50, confidence=0.95)
    assert (interval.low, interval.high) == (0.0, math.inf)


def test_geometric_mean_of_many_is_narrower_than_of_one() -> None:
    """Independent cases average out: the interval of 25 is a fifth of that of one, not as wide."""
    each = [ratios.resampled_ratios(samples(2, seed=n), samples(2, seed=100 + n)) for n in range(25)]
    single = ratios.interval_of(each[0], 0.95)
    together = ratios.geometric_mean_interval(each, confidence=0.95)
    assert (together.high - together.low) < 0.4 * (single.high - single.low)
    assert together.low < math.exp(np.mean([np.log(x).mean() for x in each])) < together.high
