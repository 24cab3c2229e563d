"""Worker processes: what they are sent and say, how one that does not answer is ended, and several at once."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import pytest

from lrbench.analysis.accelerators.known import visible_gpus
from lrbench.bench.drive import executors, workers
from lrbench.bench.drive.executors import LocalExecutor, Queue, alone
from lrbench.bench.drive.workers import ELSEWHERE, STARTING, ReplaceableWorker
from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker.protocol import RunLimits, decode_request, encode_request
from lrbench.kernels.baselines import get_baseline
from lrbench.results.lock import HeldError
from lrbench.tests.bench import faults
from lrbench.tests.bench.runs import run_alone
from lrbench.tests.command_line import slowness


def test_a_request_is_decoded_as_it_was() -> None:
    item = faults.planned("right")
    other = dataclasses.replace(item.case, batch=64)
    limits = RunLimits(timeout_s=float("inf"), rounds=3, shared="here")
    for items in ([item], [dataclasses.replace(item, config_of=other, options={"scale": 2.0}), item]):
        assert decode_request(json.loads(json.dumps(encode_request(items, limits)))) == (items, limits)


def test_a_worker_that_does_not_answer_says_where_it_was() -> None:
    """The function that waits, and the one of this package that called it."""
    worker = workers.WorkerProcess()
    worker.ask(encode_request([faults.planned("right")], RunLimits(timeout_s=120.0)), 120.0)
    with pytest.raises(workers.WorkerLostError) as caught:
        worker.ask(encode_request([faults.planned("waits_in_another_module")], RunLimits(timeout_s=3.0)), 3.0)
    assert "no result within 3 s; it was in wait (" in str(caught.value)
    assert "called by waits_in_another_module (bench/faults.py:" in str(caught.value)


def test_a_worker_that_writes_no_stack_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = workers.WorkerProcess()
    folder = Path(worker._folder.name)
    monkeypatch.setattr(workers, "STACK_FILE", "another")
    with pytest.raises(workers.WorkerLostError, match=r"^no result within 0\.001 s$"):
        worker.ask(encode_request([faults.planned("hangs")], RunLimits(timeout_s=1.0)), 0.001)
    assert not folder.exists()


def test_cases_in_turn_share_a_process_and_its_end() -> None:
    """A request of several cases has an outcome for each; what kills the process ends all of them. No case here
    needs torch's compiler, which takes longer to import than all the rest, so none has imported it."""
    limits = RunLimits(timeout_s=120.0, rounds=4)
    with ReplaceableWorker() as session:
        replies = session.run([faults.planned("right"), faults.planned("raises"), faults.planned("wrong")], limits)
        assert [reply["status"] for reply in replies] == ["ok", "error", "incorrect"]
        assert len(replies[0]["columns"]["time_samples_ms"]) == len(replies[0]["page_faults"]) == 4
        replies = session.run([faults.planned("right"), faults.planned("killed")], limits)
        assert [(reply["status"], "SIGKILL" in reply["reason"]) for reply in replies] == [("crash", True)] * 2
        (reply,) = session.run([faults.planned("right")], limits)
        assert reply["status"] == "ok"
        called = session.call("tests.bench.faults:describe", text="x" * 2**20)
        assert called == {"device": "cpu", "length": 2**20, "compiler": False}
        with pytest.raises(RuntimeError, match="missing failed: AttributeError"):
            session.call("tests.bench.faults:missing")


def test_several_workers_at_once() -> None:
    """The cases of one implementation too are spread; workers stay for the next cases; closing stops those at work."""
    cases = [faults.planned("slow", seq_len=32 + n) for n in range(8)]
    with LocalExecutor(workers_per_device=2) as executor:
        for session in executor._sessions:
            session.start()
        pids = [session._workers[None]._process.pid for session in executor._sessions]
        outcomes = list(run_alone(executor, cases))
        (again,) = run_alone(executor, [faults.planned("right")])
        assert [session._workers[None]._process.pid for session in executor._sessions] == pids
        stopped = run_alone(executor, [faults.planned("right"), faults.planned("hangs")])
        item, _ = next(stopped)
        assert item.case.impl == "right"
        begin = time.monotonic()
        stopped.close()
        assert time.monotonic() - begin < 20
    assert not any(session._workers for session in executor._sessions)
    assert again[1]["status"] == "ok"
    assert sorted(item.case.seq_len or 0 for item, _ in outcomes) == [*range(32, 40)]
    assert {reply["status"] for _, reply in outcomes} == {"ok"}


def named(item: PlannedCase, name: str, *, autotunes: bool = False) -> PlannedCase:
    """Return a case of a package of this name."""
    target = dataclasses.replace(get_baseline("mlstm_sig", "mlstm_kernels.xl_chunk_siging"), autotunes=autotunes)
    return PlannedCase(case=dataclasses.replace(item.case, provider=name), target=target)


def test_on_a_gpu_the_next_process_starts_before_the_first_case_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """So none but the first is waited for."""
    started: list[object] = []

    class Process:
        waited_s = 0.0

        def __init__(self, environ: object, folder: object) -> None:
            started.append(self)

        def ask(self, *_: object, stop: object) -> dict[str, object]:
            asked.append((started.index(self), len(started)))
            return {"outcomes": [{"status": "ok"}], "usable": True}

        def close(self) -> None: ...

        kill = close

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(workers, "WorkerProcess", Process)
    item = faults.planned("right")
    cases = Queue(alone([item, named(item, "b"), named(item, "c"), named(item, "d")]))
    with ReplaceableWorker() as session:
        list(executors.run_cases(cases, RunLimits(timeout_s=1.0, device_kind="cuda"), lambda _: None, session))
    assert asked == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_a_queue_keeps_processes_together_and_lets_workers_help() -> None:
    items = [faults.planned("right", seq_len=32 + n) for n in range(9)]
    ours, other = alone(items[:4]), alone(named(x, "b") for x in items[4:6])
    theirs = alone(named(x, "c", autotunes=True) for x in items[6:9])
    cases = Queue([*ours, *other, *theirs])
    first, second, third = cases.take(), cases.take(), cases.take()
    assert (first, second, third) == (ours[0], other[0], theirs[0])
    # Each goes on with its own; who has none left helps where most is left, but not with what autotunes.
    assert cases.take(second) == other[1]
    assert cases.take(other[1]) == ours[1]
    assert cases.take(third) == theirs[1]
    # What a lost worker had comes first, and anybody may take it.
    cases.put_back(theirs[1])
    assert cases.take(other[1]) == theirs[1]
    assert [cases.take(first), cases.take(ours[2]), cases.take(ours[3])] == [ours[2], ours[3], None]
    assert [cases.take(third), cases.take(third)] == [theirs[2], None]


def test_gpus_are_named_as_the_user_does_and_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(executors, "gpu_uuids", lambda names: {name: f"GPU-{name}" for name in names})
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_gpus(5) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(2) == ["0", "1"]
    with executors.hold_gpus(2):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 1")
        assert visible_gpus(5) == ["2", "1"]
        with executors.hold_gpus(1):
            pass
        with pytest.raises(HeldError, match=f"GPU 1 is in use by another lrbench: process {os.getpid()} "):
            executors.hold_gpus(2).__enter__()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        with executors.hold_gpus(1):
            pass
    assert list(tmp_path.iterdir()) == []


def test_two_devices_share_an_implementation_by_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker sees one device; the cases that share a reference are one worker's."""
    notes = tmp_path / "notes"
    monkeypatch.setenv("LRBENCH_TEST_NOTES", str(notes))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 3")
    cases = [faults.planned("leaves_a_note", seq_len=n, chunk_size=c) for n in range(32, 40) for c in (16, 32)]
    with LocalExecutor(devices=2) as executor:
        outcomes = list(run_alone(executor, cases))
    assert {reply["status"] for _, reply in outcomes} == {"ok"}
    assert sorted(map(str, (item for item, _ in outcomes))) == sorted(map(str, cases))
    seen = {tuple(line.split()) for line in notes.read_text().splitlines()}
    assert len({(device, process) for device, process, _ in seen}) == len({device for device, *_ in seen}) == 2
    assert {device for device, *_ in seen} == {"5", "3"}
    lengths = [length for *_, length in seen]
    # Nobody but the one that has its reference takes a problem's second case, the last one's perhaps.
    assert len(lengths) <= len(set(lengths)) + 1
    assert min(sum(device == each for device, *_ in seen) for each in ("5", "3")) >= 2


@pytest.mark.speed
def test_a_case_costs_little_beside_its_own_work() -> None:
    """From one outcome to the next, what the worker does not count as its own takes less than 5 ms at full speed."""
    slow = slowness()
    cases = [faults.planned("right", seq_len=32 + n) for n in range(30)]
    seconds: list[float] = []
    with LocalExecutor() as executor:
        last = time.perf_counter()
        for _, reply in run_alone(executor, cases):
            now = time.perf_counter()
            own = sum(took for what, took in reply["seconds"].items() if what not in (STARTING, ELSEWHERE))
            seconds.append(now - last - own)
            last = now
    assert statistics.median(seconds) / min(slow, slowness()) < 5e-3
