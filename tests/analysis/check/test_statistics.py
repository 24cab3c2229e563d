"""Order statistics against closed forms, exact binomial sums and simulation."""

import math
import random
import statistics as stdlib

import numpy as np
import pytest

from lrbench.analysis.check.statistics import (
    bootstrap_ratio_interval,
    median,
    median_interval,
    median_ranks,
    percentile,
    relative_half_width,
)


def test_percentiles_agree_with_numpy() -> None:
    generator = random.Random(1)
    for n in (1, 2, 3, 10, 37):
        samples = [generator.lognormvariate(0, 1) for _ in range(n)]
        for percent in (0, 20, 50, 80, 97.5, 100):
            assert percentile(samples, percent) == pytest.approx(np.percentile(samples, percent))
        assert median(samples) == pytest.approx(stdlib.median(samples))


@pytest.mark.parametrize("n", [1, 2, 5, 6, 10, 20, 37, 100])
def test_ranks_are_the_narrowest_that_cover(n: int) -> None:
    def covers(low: int) -> float:
        return 1 - 2 * sum(math.comb(n, j) for j in range(low + 1)) / 2**n

    low, high, reached = median_ranks(n, 0.95)
    assert high == n - 1 - low
    assert reached == pytest.approx(max(covers(low), 0), abs=1e-12)
    if n >= 6:
        assert reached >= 0.95
        assert covers(low + 1) < 0.95
    else:
        assert low == 0


def test_known_ranks() -> None:
    # Conover's table: n = 10 takes the 2nd smallest and largest, n = 20 the 6th.
    assert median_ranks(10)[:2] == (1, 8)
    assert median_ranks(20)[:2] == (5, 14)
    assert median_ranks(100_000)[2] == pytest.approx(0.95, abs=1e-3)


def test_interval_covers_the_median_of_a_skewed_distribution() -> None:
    generator = random.Random(0)
    hits = 0
    for _ in range(2000):
        interval = median_interval([generator.expovariate(1) for _ in range(15)])
        hits += interval.low <= math.log(2) <= interval.high
    assert hits / 2000 >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 2000)


def test_relative_half_width() -> None:
    assert relative_half_width([1.0, 1.0, 1.0]) == math.inf
    assert relative_half_width([5.0] * 10) == 0
    assert relative_half_width([9.0, 11.0] * 10) == pytest.approx(0.1)


def test_bootstrap_agrees_with_order_statistics_and_is_reproducible() -> None:
    generator = random.Random(3)
    samples = [10 + generator.gauss(0, 1) for _ in range(200)]
    interval, exact = bootstrap_ratio_interval(samples, [1.0]), median_interval(samples)
    assert interval == bootstrap_ratio_interval(samples, [1.0])
    assert interval.low == pytest.approx(exact.low, abs=0.1)
    assert interval.high == pytest.approx(exact.high, abs=0.1)


def test_bootstrap_ratio_tells_twice_as_fast_from_noise() -> None:
    generator = random.Random(5)
    slow = [2 * generator.uniform(0.9, 1.1) for _ in range(40)]
    fast = [generator.uniform(0.9, 1.1) for _ in range(40)]
    interval = bootstrap_ratio_interval(slow, fast)
    assert interval.low < 2 < interval.high
    assert interval.low > 1.8
    same = bootstrap_ratio_interval(fast, fast[::-1])
    assert same.low < 1 < same.high


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: median([]), "samples must hold at least one number, got none"),
        (lambda: median([1.0, math.nan]), "samples must be finite, got nan"),
        (lambda: percentile([1.0], 101), r"percent must be in \[0, 100\], got 101"),
        (lambda: median_ranks(0), "n must be >= 1, got 0"),
        (lambda: median_interval([1.0], 1.0), r"confidence must be in \(0, 1\), got 1.0"),
        (lambda: bootstrap_ratio_interval([1.0], [1.0], confidence=0), r"confidence must be in \(0, 1\), got 0"),
    ],
)
def test_bad_input(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
