"""Order statistics against closed forms, exact binomial sums and simulation; the bootstrap against the plain one."""

import math

import numpy as np
import pytest

from lrbench.analysis.check import statistics
from lrbench.analysis.check.statistics import median, median_ranks, percentile, ratio_interval, relative_half_width

from ..rows import samples


@pytest.mark.parametrize("n", [1, 2, 5, 6, 10, 20, 37, 100])
def test_ranks_are_the_narrowest_that_cover(n: int) -> None:
    def covers(low: int) -> float:
        return 1 - 2 * sum(math.comb(n, j) for j in range(low + 1)) / 2**n

    low, high = median_ranks(n)
    assert high == n - 1 - low
    if n >= 6:
        assert covers(low) >= 0.95 > covers(low + 1)
    else:
        assert low == 0


def test_relative_half_width() -> None:
    assert relative_half_width([1.0, 1.0, 1.0]) == math.inf
    assert relative_half_width([5.0] * 10) == 0
    assert relative_half_width([9.0, 11.0] * 10) == pytest.approx(0.1)


@pytest.mark.parametrize(("count", "other"), [(6, 9), (10, 13), (11, 14), (20, 20), (45, 48)])
def test_ratio_interval_is_the_plain_bootstrap(count: int, other: int) -> None:
    """The draws are others, and medians of few samples take few values: the ends may be a step apart."""
    new, old = samples(2.1, count=count, seed=1), samples(2.0, count=other, seed=2)
    generator = np.random.default_rng(0)
    medians = [np.median(generator.choice(side, (2000, len(side))), axis=1) for side in (new, old)]
    low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
    found = ratio_interval(new, old)
    assert found == ratio_interval(new, old)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.2 * (high - low))


def test_too_few_samples_say_nothing() -> None:
    interval = ratio_interval([1.0] * 5, [1.0] * 50)
    assert (interval.low, interval.high) == (0.0, math.inf)


def test_geometric_mean_of_many_is_narrower_than_of_one() -> None:
    """Independent cases average out: the interval of 25 is a fifth of that of one, not as wide."""
    each = [statistics.resampled_ratios(samples(2, seed=n), samples(2, seed=100 + n)) for n in range(25)]
    single, together = (statistics.geometric_mean_interval(some) for some in (each[:1], each))
    assert (together.high - together.low) < 0.4 * (single.high - single.low)
    assert together.low < math.exp(np.mean([np.log(x).mean() for x in each])) < together.high


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: median([]), "samples must hold at least one number, got none"),
        (lambda: median([1.0, math.nan]), "samples must be finite, got nan"),
        (lambda: percentile([1.0], 101), r"must be in the range \[0, 100\]"),
        (lambda: ratio_interval([math.inf] * 9, [1.0] * 9), "samples must be finite, got inf"),
    ],
)
def test_bad_input(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
