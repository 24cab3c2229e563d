"""Cases on a real Ray cluster of this machine's CPU: lost workers and nodes lose no case, dead addresses are named."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lrbench.bench.drive import ray
from lrbench.bench.drive.ray import RayExecutor
from lrbench.bench.drive.run import get_executor
from lrbench.tests.bench import faults
from lrbench.tests.bench.runs import PROCESSOR, run, run_alone


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each, and a head that runs nothing and notices within seconds that a node is lost."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'lrbench[cluster]'")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": {"health_check_period_ms": 500}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_sweep_on_a_cluster_has_the_nodes_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the driver takes itself for, nothing is in the rows; a fault is a row, and the next case is clean."""
    wrong = dataclasses.replace(PROCESSOR, device_name="another processor", torch_version="0")
    planned = [faults.planned(name) for name in ("right", "killed", "raises")]
    started: list[Any] = []
    with get_executor("ray", devices=2) as executor:
        start = executor._start_node  # type: ignore[attr-defined]
        monkeypatch.setattr(executor, "_start_node", lambda: started.append(start()) or started[-1])
        here = executor.environment()
        outcome = run(tmp_path, planned, executor=executor, environment=wrong)
    statuses = {record.impl: record.status for record in outcome.records}
    assert statuses == {"right": "ok", "killed": "crash", "raises": "error"}
    assert len(started) == 2, "the node that was asked runs cases"
    assert {(r.device_name, r.torch_version) for r in outcome.records} == {(here.device_name, here.torch_version)}
    assert here.device_name != wrong.device_name


def test_a_lost_node_loses_no_case(cluster: Any) -> None:
    """One of two nodes is killed while both are busy: its case runs on the other."""
    cases = [faults.planned("slow", seq_len=32 + n) for n in range(6)]
    outcomes = run_alone(RayExecutor(devices=2), cases)
    done = [next(outcomes)]
    node = cluster.add_node(num_cpus=1)
    lost = next(each for each in cluster.list_all_nodes() if each not in (cluster.head_node, node))
    cluster.remove_node(lost, allow_graceful=False)
    done += outcomes
    assert sorted(item.case.seq_len or 0 for item, _ in done) == [*range(32, 38)]
    assert {reply["status"] for _, reply in done} == {"ok"}


@pytest.mark.usefixtures("cluster")
def test_a_case_that_loses_its_worker_again_and_again_gets_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "MAX_LOSSES", 2)
    cases = [faults.planned("kills_its_node"), faults.planned("right")]
    outcomes = {item.case.impl: reply for item, reply in run_alone(RayExecutor(), cases)}
    assert (outcomes["kills_its_node"]["status"], outcomes["right"]["status"]) == ("crash", "ok")


def test_a_cluster_without_nodes_ends_the_sweep(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases that never ran have no row."""
    monkeypatch.setattr(ray, "POLL_S", 0.5)
    monkeypatch.setattr(ray, "LOST_S", 2.0)
    outcomes = run_alone(RayExecutor(), [faults.planned("slow", seq_len=32 + n) for n in range(9)])
    done = [next(outcomes)]
    for node in [each for each in cluster.list_all_nodes() if each != cluster.head_node]:
        cluster.remove_node(node, allow_graceful=False)
    done += outcomes
    cluster.add_node(num_cpus=1)
    assert {reply["status"] for _, reply in done} == {"ok"} and len(done) < 9
    assert "no node of the cluster is left" in capsys.readouterr().err


def test_the_address_of_a_cluster_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    executor = RayExecutor()
    monkeypatch.setattr(executor._ray, "is_initialized", lambda: False)
    with pytest.raises(
        ValueError, match=r"RAY_ADDRESS must be a cluster that answers, got 127\.0\.0\.1:9, which does not"
    ):
        executor.environment()


def test_a_cluster_is_started_where_the_last_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray keeps the last cluster's address on disk, and would try for minutes to reach it."""
    executor = RayExecutor()
    asked: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(executor._ray, "is_initialized", lambda: False)
    monkeypatch.setattr(executor._ray, "init", lambda address, **_: asked.append(address))
    executor._connect()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
    executor._connect()
    ended: list[bool] = []
    monkeypatch.setattr(executor._ray, "shutdown", lambda: ended.append(True))
    with executor:
        pass
    assert (asked, ended) == (["local", "local"], [True])
    assert "the one at 127.0.0.1:9, named in" in capsys.readouterr().err


def test_ray_missing_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"the ray executor needs ray: pip install 'lrbench\[cluster\]'"):
        get_executor("ray")
