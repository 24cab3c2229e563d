"""The Ray executor, where ray is installed, and what it says where it is not."""

from __future__ import annotations

import sys

import pytest

from lrbench.bench.executors import Limits, get_executor
from lrbench.tests.bench import faults


def test_ray_missing_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"the ray executor needs ray: pip install 'lrbench\[cluster\]'"):
        get_executor("ray")


def test_ray_runs_groups_and_survives_a_killed_worker() -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'lrbench[cluster]'")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        groups = [[faults.planned("right")], [faults.planned("killed"), faults.planned("raises")]]
        outcomes = get_executor("ray").run(groups, Limits(timeout_s=120.0, budget_s=0.0), lambda _: None)
        statuses = {item.case.impl: reply["status"] for item, reply in outcomes}
    finally:
        ray.shutdown()
    assert statuses == {"right": "ok", "killed": "crash", "raises": "error"}
