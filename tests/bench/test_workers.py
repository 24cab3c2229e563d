"""Worker processes: what they are sent and say, how one that does not answer is ended, and several at once."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import pytest

from lrbench.bench import workers
from lrbench.bench.run import get_executor
from lrbench.bench.workers import Limits, LocalExecutor, ReplaceableWorker, decode_request, encode_request
from lrbench.tests.bench import faults


def test_a_request_is_decoded_as_it_was() -> None:
    item = faults.planned("right")
    other = dataclasses.replace(item.case, batch=64)
    limits = Limits(timeout_s=float("inf"), rounds=3, shared="here")
    for items in ([item], [dataclasses.replace(item, config_of=other, options={"scale": 2.0}), item]):
        assert decode_request(json.loads(json.dumps(encode_request(items, limits)))) == (items, limits)


def test_a_worker_that_does_not_answer_says_where_it_was() -> None:
    """The function that waits, and the one of this package that called it."""
    worker = workers.WorkerProcess()
    request = encode_request([faults.planned("waits_in_another_module")], Limits(timeout_s=10.0))
    with pytest.raises(workers.WorkerTimeoutError) as caught:
        worker.ask(request, 10.0)
    assert "no result within 10 s; it was in wait (" in str(caught.value)
    assert "called by waits_in_another_module (bench/faults.py:" in str(caught.value)


def test_a_worker_that_writes_no_stack_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = workers.WorkerProcess()
    folder = Path(worker._folder.name)
    monkeypatch.setattr(workers, "STACK_FILE", "another")
    with pytest.raises(workers.WorkerTimeoutError, match=r"^no result within 0\.001 s$"):
        worker.ask(encode_request([faults.planned("hangs")], Limits(timeout_s=1.0)), 0.001)
    assert not folder.exists()


def test_cases_in_turn_share_a_process_and_its_end() -> None:
    """A request of several cases has an outcome for each; what kills the process ends all of them."""
    limits = Limits(timeout_s=120.0, rounds=4)
    with ReplaceableWorker() as session:
        replies = session.run([faults.planned("right"), faults.planned("raises"), faults.planned("wrong")], limits)
        assert [reply["status"] for reply in replies] == ["ok", "error", "incorrect"]
        assert len(replies[0]["columns"]["time_samples_ms"]) == len(replies[0]["page_faults"]) == 4
        replies = session.run([faults.planned("right"), faults.planned("killed")], limits)
        assert [(reply["status"], "SIGKILL" in reply["reason"]) for reply in replies] == [("crash", True)] * 2
        (reply,) = session.run([faults.planned("right")], limits)
        assert reply["status"] == "ok"
        called = session.call("tests.bench.faults:describe", text="x" * 2**20)
        assert called == {"device": "cpu", "length": 2**20}
        with pytest.raises(RuntimeError, match="missing failed: AttributeError"):
            session.call("tests.bench.faults:missing")


def test_several_workers_at_once() -> None:
    groups = [[faults.planned("right", seq_len=32 + n)] for n in range(3)]
    executor = LocalExecutor(workers_per_device=2)
    outcomes = list(executor.run(groups, Limits(timeout_s=120.0), lambda _: None))
    assert sorted(item.case.seq_len or 0 for item, _ in outcomes) == [32, 33, 34]
    assert {reply["status"] for _, reply in outcomes} == {"ok"}


def test_closing_several_workers_stops_them() -> None:
    groups = [[faults.planned("right")], [faults.planned("hangs")]]
    outcomes = LocalExecutor(workers_per_device=2).run(groups, Limits(timeout_s=600.0), lambda _: None)
    item, _ = next(outcomes)
    assert item.case.impl == "right"
    begin = time.monotonic()
    outcomes.close()
    assert time.monotonic() - begin < 20


def test_ray_missing_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"the ray executor needs ray: pip install 'lrbench\[cluster\]'"):
        get_executor("ray")


def test_ray_runs_groups_and_survives_a_killed_worker() -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'lrbench[cluster]'")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        groups = [[faults.planned("right")], [faults.planned("killed"), faults.planned("raises")]]
        outcomes = get_executor("ray").run(groups, Limits(timeout_s=120.0), lambda _: None)
        statuses = {item.case.impl: reply["status"] for item, reply in outcomes}
    finally:
        ray.shutdown()
    assert statuses == {"right": "ok", "killed": "crash", "raises": "error"}
