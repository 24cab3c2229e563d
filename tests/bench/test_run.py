"""Running cases: whatever happens to one becomes its row, and the rows survive whatever happens to the sweep.

Sides of a comparison are checked, measured and compared; cases of a run are measured again.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from lrbench.analysis.accelerators.roofs import RoofRow
from lrbench.bench.drive import run as runner
from lrbench.bench.drive import session
from lrbench.bench.drive.executors import LocalExecutor, alone, as_taken
from lrbench.bench.drive.run import Outcome
from lrbench.bench.plan import PlannedCase, Request, plan
from lrbench.kernels import get_operation
from lrbench.kernels.common.spec import Implementation
from lrbench.results import store
from lrbench.results.schema import Record
from lrbench.results.select import grouped
from lrbench.tests.analysis.rows import calibration
from lrbench.tests.bench import faults
from lrbench.tests.bench.runs import H200, PROCESSOR, Instant, Silent, run
from lrbench.tests.command_line import start_python


@pytest.fixture(autouse=True, scope="module")
def without_gpu() -> Iterator[None]:
    """These sweeps are about a CPU: on a machine with a GPU their workers do not see it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


FAULTS = (
    "right", "raises", "right", "killed", "noisy", "hangs", "right", "exhausts_memory", "slow", "wrong", "aborts",
    "unwritten", "exits", "imports_missing", "right", "wrong_gradient",
)  # fmt: skip


def faulty_case(n: int, fault: str) -> PlannedCase:
    """The n-th case: one implementation name for all, so that all run in one worker, replaced when it is lost."""
    return faults.planned(fault, impl="faulty", seq_len=32 + n, mode="fwbw" if fault == "wrong_gradient" else "fw")


Faulty = tuple[Outcome, Silent, float, float]
"""A sweep, what it told, and when it began and ended."""


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    """One sweep in which every kind of misbehaviour follows another."""
    progress = Silent()
    planned = [faulty_case(n, fault) for n, fault in enumerate(FAULTS)]
    began = time.monotonic()
    outcome = run(tmp_path_factory.mktemp("faulty"), planned, progress, timeout_s=6.0)
    return outcome, progress, began, time.monotonic()


def rows_of(outcome: Outcome, fault: str) -> list[Record]:
    return [record for record, name in zip(outcome.records, FAULTS, strict=True) if name == fault]


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("raises", "error", "RuntimeError: this shape is not tuned"),
        ("killed", "crash", "the process was ended by SIGKILL (as the system's out-of-memory killer does)"),
        ("aborts", "crash", "the process was ended by SIGABRT; its output: LLVM ERROR: operation destroyed but still"),
        ("exits", "crash", "the process ended with exit code 3"),
        ("hangs", "timeout", "no result within 6 s; it was in hangs (bench/faults.py:"),
        ("exhausts_memory", "oom", "allocate memory: you tried to allocate 1125899906842624 bytes"),
        ("wrong", "incorrect", "output has relative error 1.00e-03, above"),
        ("unwritten", "incorrect", "output contains non-finite values"),
        ("wrong_gradient", "incorrect", "gradient of v has relative error"),
        ("imports_missing", "unavailable", "No module named 'lrbench_has_no_such_module'"),
    ],
)
def test_a_fault_becomes_a_typed_row(faulty_run: Faulty, name: str, status: str, reason: str) -> None:
    (record,) = rows_of(faulty_run[0], name)
    assert record.status == status, record.reason
    assert reason in str(record.reason)
    assert (record.time_ms, record.time_samples_ms) == (None, None)


@pytest.mark.parametrize("name", ["right", "noisy", "slow"])
def test_the_cases_after_a_fault_are_measured(faulty_run: Faulty, name: str) -> None:
    for record in rows_of(faulty_run[0], name):
        assert (record.status, record.reason, record.checked) == ("ok", None, "same shape")
        assert len(record.time_samples_ms or ()) >= 10
        assert record.time_ms and record.flops and record.rel_error
        # This host computes itself; nothing is enqueued.
        assert record.host_ms is None
        assert record.rel_error < 1e-5
        assert record.tflops == pytest.approx(record.flops / record.time_ms / 1e9)


def test_every_case_has_its_row_and_the_file_holds_them(faulty_run: Faulty) -> None:
    outcome, progress, *_ = faulty_run
    assert outcome.remaining == 0
    told = [word for record in outcome.records for word in ("started", record.status)]
    assert progress.told == ["16 measuring", *told, "end"]
    assert outcome.path is not None
    assert store.read_results(outcome.path).to_pylist() == [dataclasses.asdict(r) for r in outcome.records]
    assert {record.run_id for record in outcome.records} == {outcome.records[0].run_id}
    assert outcome.path.name.startswith("sweep-tfla-")
    assert outcome.path.stem.endswith(outcome.records[0].run_id[:8])


def test_where_the_time_went(faulty_run: Faulty) -> None:
    """All of it is told: what cases took, a worker's start, the wait for one that hangs; and what was compiled."""
    outcome, _, began, ended = faulty_run
    assert 0.5 * (ended - began) < sum(outcome.seconds.values()) <= ended - began
    assert outcome.seconds["failed cases, messages"] > 6.0
    assert outcome.seconds["warm-up, timed kernels"] > 10 * 0.05
    compiled = dataclasses.replace(outcome, asked=5, kernels={"a": "x", "b": "x", "c": "y"})
    lines = session.where_time_went(compiled, began, 1.5, 2)
    assert lines[-1] == "16 cases asked for 5 Triton kernels: 3 different ones, 2 different cubins"
    shown = sum(float(line.split()[2].rstrip("%")) for line in lines[1:-2])
    assert shown == pytest.approx(100, abs=1)
    assert "     3.0 s" in next(line for line in lines if line.endswith("the machine: first worker, calibration"))


def test_roofs_lie_beside_the_rows_of_their_sweep(tmp_path: Path) -> None:
    copy, *_ = calibration()
    outcome = run(tmp_path, [faults.planned("right")], executor=Instant(), roofs=(copy,))
    assert outcome.path is not None
    (stored,) = store.read_file(
        outcome.path.parent / store.OTHER / f"{outcome.path.stem}.roofs.parquet", RoofRow
    ).to_pylist()
    assert stored == dataclasses.asdict(dataclasses.replace(copy, run_id=outcome.records[0].run_id))
    assert len(store.read_results(tmp_path)) == 1
    files = set(tmp_path.iterdir())
    run(tmp_path, [faults.planned("right")], executor=Instant(), roofs=(copy,), resume=True)
    assert set(tmp_path.iterdir()) == files


def test_resume_runs_what_is_not_ok(tmp_path: Path) -> None:
    planned = [faults.planned("right"), faults.planned("raises")]
    first = run(tmp_path, planned, executor=Instant())
    assert [record.status for record in first.records] == ["ok", "error"]
    again = run(tmp_path, planned, executor=Instant(), resume=True)
    assert [record.impl for record in again.resumed] == ["right"]
    assert [record.impl for record in again.records] == ["raises"]


ENGINE, TRITON = "kernels.scalar_decay.declare:why_not_engine", PROCESSOR.triton_version
REFUSALS: tuple[tuple[dict[str, Any], dict[str, Any], str, str], ...] = (
    ({}, {"devices": ("cuda",)}, "unsupported", "right runs on cuda, this device is cpu"),
    ({"mode": "step"}, {}, "unsupported", "mode must be one of fw, fwbw, bw for right, got step"),
    ({"dtype": "bf16"}, {}, "unsupported", "dtype must be one of fp32 for right, got bf16"),
    ({}, {"architectures": ("9.0",)}, "unsupported", "right is written for compute capability 9.0, got None"),
    (
        {},
        {"triton_versions": "==2.0.*"},
        "unsupported",
        f"right is written for triton ==2.0.*, got {TRITON}: pip install 'triton==2.0.*'",
    ),
    ({"state_dtype": "bf16"}, {}, "unsupported", "state_dtype must be one of fp32 for right, got bf16"),
    ({}, {"requires": ("no-such",)}, "unavailable", "right needs no-such, which is not installed: pip install no-such"),
    ({"chunk_size": 48}, {"why_not": ENGINE}, "unsupported", "chunk_size must be a power of two >= 16, got 48"),
    (
        {"mode": "step", "state_dtype": "bf16", "chunk_size": None},
        {"modes": ("step",), "state_dtypes": ("fp32", "bf16")},
        "unsupported",
        "state_dtype must be fp32 in mode step, got bf16",
    ),
)
"""What is changed of a case and of its declaration, and the row that it gets."""


def test_refusals_need_no_worker(tmp_path: Path) -> None:
    item, progress = faults.planned("right"), Silent()
    refused = [
        PlannedCase(case=dataclasses.replace(item.case, **case), target=dataclasses.replace(item.target, **target))
        for case, target, _, _ in REFUSALS
    ]
    outcome = run(tmp_path, refused, progress, executor=Instant())
    assert "started" not in progress.told
    assert [(record.status, record.reason) for record in outcome.records] == [row[2:] for row in REFUSALS]


SWEEP_SLOWLY = """
import sys
from pathlib import Path
from lrbench.tests.bench import faults
from lrbench.tests.bench.runs import Silent, run

class Telling(Silent):
    def started(self, item):
        print("started", flush=True)

outcome = run(Path(sys.argv[1]), [faults.planned(sys.argv[2], seq_len=32 + n) for n in range(60)], Telling())
print("interrupted", outcome.interrupted, outcome.remaining + len(outcome.records), outcome.path, flush=True)
"""


def wait_for_cases(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline() == "started\n"


def test_a_second_interrupt_keeps_no_row_from_its_file(tmp_path: Path) -> None:
    class Impatient(Silent):
        def finished(self, item: PlannedCase, status: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        def end(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    planned = [faults.planned("right", seq_len=32 + n) for n in range(2)]
    outcome = run(tmp_path, planned, Impatient(), executor=Instant())
    assert (outcome.interrupted, len(outcome.records), outcome.remaining) == (True, 1, 1)
    assert list(tmp_path.iterdir()) == [outcome.path]


def test_an_interrupt_of_the_final_write_keeps_no_row_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store.write_parquet

    def interrupted(*arguments: Any, **keywords: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(*arguments, **keywords)

    monkeypatch.setattr(store, "write_parquet", interrupted)
    outcome = run(tmp_path, [faults.planned("right")], executor=Instant())
    assert (outcome.interrupted, len(outcome.records)) == (False, 1)
    assert list(tmp_path.iterdir()) == [outcome.path]


@pytest.mark.parametrize(
    ("number", "nohup"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGHUP, True)],
)
def test_a_signal_interrupts_once_and_under_nohup_not_at_all(number: signal.Signals, nohup: bool) -> None:
    # The tests themselves may run under nohup.
    before = signal.signal(number, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        with runner._interrupted_once():
            with nullcontext() if nohup else pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


def test_a_worker_that_is_still_importing_torch_dies_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from lrbench.bench.drive.workers import WorkerProcess; "
        "worker = WorkerProcess(); time.sleep(60)"
    )
    process = start_python(code, tmp_path)
    (child,) = wait_for_workers(process)
    process.kill()
    process.wait()
    wait_for_end([child])


def test_an_interrupt_ends_a_hanging_worker(tmp_path: Path) -> None:
    process = start_python(SWEEP_SLOWLY, tmp_path, "hangs")
    wait_for_cases(process, 1)
    workers = wait_for_workers(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert output.split() == ["interrupted", "True", "60", "None"]
    wait_for_end(workers)
    assert list(tmp_path.iterdir()) == []


def test_killing_the_sweep_loses_no_row_and_leaves_no_worker(tmp_path: Path) -> None:
    process = start_python(SWEEP_SLOWLY, tmp_path, "slow")
    wait_for_cases(process, 4)
    workers = wait_for_workers(process)
    process.kill()
    process.wait()
    wait_for_end(workers)
    (recovered,) = store.recover(tmp_path)
    assert store.read_results(recovered).num_rows >= 3
    outcome = run(tmp_path, [faults.planned("slow", seq_len=32)], resume=True, executor=Instant())
    assert (len(outcome.resumed), outcome.records) == (1, [])


def wait_for_workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    sweep, deadline = psutil.Process(process.pid), time.monotonic() + 30
    while not (workers := sweep.children(recursive=True)):
        assert time.monotonic() < deadline, "the sweep started no worker"
        time.sleep(0.05)
    return workers


def wait_for_end(workers: Sequence[psutil.Process]) -> None:
    deadline = time.monotonic() + 10
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in workers):
        assert time.monotonic() < deadline, "a worker outlives its sweep"
        time.sleep(0.05)


@pytest.mark.parametrize(("device_count", "devices", "most"), [(0, 2, 1), (1, 2, 1), (4, 5, 4), (4, 0, 4)])
def test_more_devices_than_there_are_is_refused(tmp_path: Path, device_count: int, devices: int, most: int) -> None:
    environment = dataclasses.replace(PROCESSOR, device_count=device_count)
    executor = LocalExecutor(devices=devices)
    with pytest.raises(ValueError, match=f"devices must be from 1 to {most} on a processor, 1 thread, got {devices}"):
        run(tmp_path / "out", [faults.planned("right")], executor=executor, environment=environment)
    assert not (tmp_path / "out").exists()


def test_a_sweep_about_a_gpu_keeps_no_row_of_a_worker_without_one(tmp_path: Path) -> None:
    (record,) = run(tmp_path, [faults.planned("right")], environment=H200).records
    assert (record.status, record.time_ms) == ("error", None)
    assert record.reason == "the worker runs on cpu, the sweep is about cuda"


PLANNED = plan(
    Request(
        ops=("mlstm_sig",), impls=("torch",), modes=("fw", "fwbw"), dtypes=("fp32",), seq_lens=(64,), head_dims=(32,),
        chunk_sizes=(16,), num_heads=1, batches=(1,),
    ),
    device_kind="cpu",
)  # fmt: skip


def renamed(item: PlannedCase, name: str, call: str | None = None) -> PlannedCase:
    """Return a case of the same code, or of other code, under another name."""
    assert isinstance(item.target, Implementation)
    same = f"{get_operation(item.case.op).call}:{item.target.name}"
    target = dataclasses.replace(item.target, name=name, call=call or item.target.call or same)
    return PlannedCase(case=dataclasses.replace(item.case, impl=name), target=target)


def test_a_pair_has_an_id_and_what_dies_in_turn_runs_again_alone(tmp_path: Path) -> None:
    """Those that died with it too; one that fails leaves the others a pair, and a case with no other has no id."""
    for names, statuses, pairs in (
        (("right", "raises", "slow"), ["ok", "error", "ok"], [True, False, True]),
        (("right", "killed"), ["ok", "crash"], [False, False]),
        (("right",), ["ok"], [False]),
    ):
        planned = [faults.planned(name) for name in names]
        records = run(tmp_path / str(len(names)), planned, group_by=lambda _: None).records
        assert [record.status for record in records] == statuses
        assert [record.pair_id is not None for record in records] == pairs
        assert len({record.pair_id for record in records} - {None}) == any(pairs)


def test_a_failure_of_what_has_a_row_replaces_none(tmp_path: Path) -> None:
    planned = [faults.planned("right"), faults.planned("raises")]
    outcome = run(tmp_path, planned, executor=Instant(), only_ok=True)
    assert [record.status for record in outcome.records] == ["ok", "error"]
    assert outcome.path and [row["impl"] for row in store.read_results(outcome.path).to_pylist()] == ["right"]
    assert run(tmp_path, planned[1:], executor=Instant(), only_ok=True).path is None


def test_the_fastest_of_each_package_are_the_rivals_until_they_were_timed_in_turn(tmp_path: Path) -> None:
    """One a package, also where it has several implementations; a problem of one package has no rivals."""
    named = ("lrbench", "slow", 3.0), ("lrbench", "right", 2.0), ("fla", "theirs", 5.0), ("fla", "noisy", None)

    def timed(seq_len: int, provider: str, name: str, time_ms: float | None) -> tuple[PlannedCase, Record]:
        item = faults.planned("right", impl=name, seq_len=seq_len)
        item = dataclasses.replace(item, case=dataclasses.replace(item.case, provider=provider))
        row = {**dataclasses.asdict(item.case), "run_id": "a", "case_id": item.case.case_id, "measured_at": "now"}
        return item, Record(**row, status="ok" if time_ms else "oom", time_ms=time_ms)

    planned, records = zip(
        *(timed(32, *each) for each in named), *(timed(64, *each) for each in named[:2]), strict=True
    )
    rivals = runner.fastest_of_each(planned, records)
    assert [(item.case.seq_len, item.case.impl) for item in rivals] == [(32, "right"), (32, "theirs")]
    for ids, left in ((("p", "p"), 0), (("p", "q"), 2), (("p", None), 2)):
        again = [dataclasses.replace(row, pair_id=ids[n - 1]) if n in (1, 2) else row for n, row in enumerate(records)]
        assert len(runner.fastest_of_each(planned, again)) == left


def test_groups_differ_in_the_implementation_alone() -> None:
    other = renamed(PLANNED[0], "twin")
    without = PlannedCase(case=dataclasses.replace(other.case, state_dtype=None, chunk_size=32), target=other.target)
    for item, ignored, sizes in ((other, (), [2, 1]), (without, (), [1, 1, 1]), (without, ("chunk_size",), [2, 1])):
        groups = grouped([*PLANNED, item], runner.problem_beside(ignored)).values()
        assert [len(group) for group in groups] == sizes


def test_measures_again_only_where_it_is_the_same_device_and_code() -> None:
    here = dataclasses.replace(PROCESSOR, device_accelerator="cpu", git_commit="a" * 40)
    row = {"device_accelerator": "cpu", "device_name": "x", "git_commit": "aaaaaaa"}
    assert runner.why_not_again([row], here) is None
    assert runner.why_not_again([{**row, "git_commit": None}], here) is None
    assert runner.why_not_again([{**row, "device_accelerator": "h200_sxm"}], here) == (
        "the run is of h200_sxm, this machine is cpu"
    )
    assert "the run is of commit bbb, this checkout is aaa" in str(
        runner.why_not_again([{**row, "git_commit": "bbb"}], here)
    )


def test_measures_again_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {field.name: getattr(PLANNED[0].case, field.name) for field in dataclasses.fields(PLANNED[0].case)}
    monkeypatch.setattr(session, "probe_environment", lambda: PROCESSOR)
    monkeypatch.setattr(runner, "why_not_again", lambda rows, environment: None)
    again = session.measure_again([row], timeout_s=120, budget_s=0.0)
    assert list(again) == [PLANNED[0].case.case_id]
    measured = again[PLANNED[0].case.case_id]
    assert (measured["status"], measured["mode"]) == ("ok", PLANNED[0].case.mode)
    assert len(measured["time_samples_ms"]) >= 10


def test_packages_that_autotune_come_last_and_a_forward_pass_in_one_chunk_first() -> None:
    """In the order in which one worker takes the cases; none is lost."""
    asked = Request(kernel="tfla", modes=("fwbw", "fw"), seq_lens=(1024, 2048))
    planned = plan(asked, device_kind="cuda")
    # The worst order: what autotunes first, and forward passes after those with gradients.
    planned.sort(key=lambda item: (item.autotunes, item.case.mode), reverse=True)
    choosing = {item.case.provider for item in planned if item.autotunes}
    # What is left of a sweep may have no forward pass but of these packages.
    left = [item for item in planned if item.case.mode == "fwbw" or item.case.provider in choosing]
    for cases, mode in ((planned, "fw"), (left, "fwbw")):
        taken = list(as_taken(alone(runner.quickest_first(cases))))
        assert {item.case.case_id for item in taken} == {item.case.case_id for item in cases}
        assert taken[0].case.mode == mode
        assert mode == "fwbw" or taken[0].case.chunk_size == taken[0].case.seq_len
        late = [item.case.provider in choosing for item in taken]
        assert any(late) and not all(late)
        assert late == sorted(late)
