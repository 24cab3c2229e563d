"""The estimate of a sweep's time: of the order of what committed sweeps took, refused cases aside."""

from __future__ import annotations

import dataclasses

import pytest

from lrbench.bench.estimate import SECONDS_PER_CASE, describe_s, estimate_s
from lrbench.bench.plan import Request, plan
from lrbench.tests.bench import faults
from lrbench.tests.bench.environments import H200, PROCESSOR


def test_the_full_preset_takes_hours() -> None:
    assert 3600 < estimate_s(plan(Request(preset="full"), device_kind="cuda"), H200) < 8 * 3600


def test_large_problems_take_longer_and_refused_ones_nothing() -> None:
    large = plan(Request(impls=("torch",), modes=("fwbw",), tokens=2**20), device_kind="cuda")
    assert estimate_s(large, H200) > 2 * SECONDS_PER_CASE * len(large)
    item = faults.planned("right")
    refused = dataclasses.replace(item, target=dataclasses.replace(item.target, devices=("cuda",)))
    assert estimate_s([refused] * 3, PROCESSOR) == 0
    assert estimate_s([item] * 3, PROCESSOR) == pytest.approx(3 * SECONDS_PER_CASE)
    assert estimate_s([item] * 3000, PROCESSOR) == pytest.approx(3000 * SECONDS_PER_CASE)
    assert estimate_s([], PROCESSOR) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1 s"), (119, "119 s"), (300, "5 min"), (3 * 3600, "3 h"), (8 * 86400, "8 days")],
)
def test_durations(seconds: float, text: str) -> None:
    assert describe_s(seconds) == f"about {text}"
