"""The sweep: whatever happens to a case becomes its row, and the rows survive whatever happens to the sweep."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lrbench.analysis.accelerators.roofs import RoofRow
from lrbench.bench import sweep
from lrbench.bench.environment import Environment
from lrbench.bench.plan import PlannedCase
from lrbench.bench.sweep import Outcome, Settings
from lrbench.results import store
from lrbench.results.schema import Record
from lrbench.tests.bench import faults

ENVIRONMENT = Environment(
    device_kind="cpu", device_name="a processor, 1 thread", device_accelerator=None, capability=None, device_count=0,
    memory_bytes=2**34, torch_version="2.13.0", triton_version="3.6.0", cuda_version=None, driver_version=None,
    python_version="3.11", lrbench_version="0.1.0", git_commit="c" * 40, git_dirty=False,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def without_gpu() -> Iterator[None]:
    """These sweeps are about a CPU: on a machine with a GPU their workers do not see it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


class Silent:
    """Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.started_cases: list[PlannedCase] = []
        self.statuses: list[str] = []
        self.total = 0

    def begin(self, total: int, what: str) -> None:
        self.total = total

    def started(self, item: PlannedCase) -> None:
        self.started_cases.append(item)

    def finished(self, item: PlannedCase, status: str) -> None:
        self.statuses.append(status)

    def end(self) -> None:
        pass


def run(
    folder: Path, planned: Sequence[PlannedCase], progress: sweep.Progress | None = None, **settings: object
) -> Outcome:
    return sweep.sweep(planned, ENVIRONMENT, Settings(output=folder, budget_s=0.0, **settings), progress or Silent())


FAULTS = (
    "right", "raises", "right", "killed", "noisy", "hangs", "right", "exhausts_memory", "wrong", "aborts",
    "unwritten", "exits", "imports_missing", "right", "wrong_gradient",
)  # fmt: skip


def faulty_case(n: int, fault: str) -> PlannedCase:
    """The n-th case: one implementation name for all, so that all run in one worker, replaced when it is lost."""
    item = faults.planned(fault, seq_len=32 + n, mode="fwbw" if fault == "wrong_gradient" else "fw")
    return dataclasses.replace(item, case=dataclasses.replace(item.case, impl="faulty"))


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Silent]:
    """One sweep in which every kind of misbehaviour follows another."""
    progress = Silent()
    planned = [faulty_case(n, fault) for n, fault in enumerate(FAULTS)]
    return run(tmp_path_factory.mktemp("faulty"), planned, progress, timeout_s=20.0), progress


def rows_of(outcome: Outcome, fault: str) -> list[Record]:
    return [record for record, name in zip(outcome.records, FAULTS, strict=True) if name == fault]


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("raises", "error", "RuntimeError: this shape is not tuned"),
        ("killed", "crash", "the process was ended by SIGKILL (as the system's out-of-memory killer does)"),
        ("aborts", "crash", "the process was ended by SIGABRT; its output: LLVM ERROR: operation destroyed but still"),
        ("exits", "crash", "the process ended with exit code 3"),
        ("hangs", "timeout", "no result within 20 s; it was in hangs (bench/faults.py:"),
        ("exhausts_memory", "oom", "allocate memory: you tried to allocate 1125899906842624 bytes"),
        ("wrong", "incorrect", "output has relative error 1.00e-03, above"),
        ("unwritten", "incorrect", "output contains non-finite values"),
        ("wrong_gradient", "incorrect", "gradient of v has relative error"),
        ("imports_missing", "unavailable", "No module named 'lrbench_has_no_such_module'"),
    ],
)
def test_a_fault_becomes_a_typed_row(faulty_run: tuple[Outcome, Silent], name: str, status: str, reason: str) -> None:
    (record,) = rows_of(faulty_run[0], name)
    assert record.status == status, record.reason
    assert record.reason is not None
    assert reason in record.reason
    assert record.time_ms is None
    assert record.time_samples_ms is None


@pytest.mark.parametrize("name", ["right", "noisy"])
def test_the_cases_after_a_fault_are_measured(faulty_run: tuple[Outcome, Silent], name: str) -> None:
    for record in rows_of(faulty_run[0], name):
        assert (record.status, record.reason) == ("ok", None)
        assert record.time_ms is not None
        assert record.time_ms > 0
        assert len(record.time_samples_ms or ()) >= 10
        assert record.checked == "same shape"
        assert record.rel_error is not None
        assert 0 < record.rel_error < 1e-5
        assert record.flops
        assert record.tflops == pytest.approx(record.flops / record.time_ms / 1e9)


def test_every_case_has_its_row_and_the_file_holds_them(faulty_run: tuple[Outcome, Silent]) -> None:
    outcome, progress = faulty_run
    assert outcome.remaining == 0
    assert progress.total == len(outcome.records) == len(progress.statuses) == len(progress.started_cases) == 15
    assert outcome.path is not None
    assert store.read_results(outcome.path).to_pylist() == [dataclasses.asdict(r) for r in outcome.records]
    assert {record.run_id for record in outcome.records} == {outcome.records[0].run_id}
    assert outcome.path.name.startswith("sweep-tfla-")
    assert outcome.path.stem.endswith(outcome.records[0].run_id[:8])


def test_no_number_is_nan(faulty_run: tuple[Outcome, Silent]) -> None:
    for record in faulty_run[0].records:
        numbers = [value for value in dataclasses.asdict(record).values() if isinstance(value, float)]
        assert all(math.isfinite(number) for number in numbers)


def test_roofs_lie_beside_the_rows_of_their_sweep(tmp_path: Path) -> None:
    environment = ENVIRONMENT.columns()
    timing = {f"time_{name}ms": 1.0 for name in ("", "p20_", "p80_", "ci_low_", "ci_high_")}
    copy = RoofRow(
        run_id="calibration", measured_at="2026-01-01T00:00:00+00:00", quantity="copy", size=2**30, unit="bytes/s",
        rate=2e12, best_rate=2.1e12, short=True, time_samples_ms=[1.0], **timing, **environment,
    )  # fmt: skip
    outcome = run(tmp_path, [faults.planned("right")], roofs=(copy,))
    assert outcome.path is not None
    (stored,) = store.read_file(outcome.path.with_suffix(".roofs.parquet"), RoofRow).to_pylist()
    assert stored == dataclasses.asdict(dataclasses.replace(copy, run_id=outcome.records[0].run_id))
    assert len(store.read_results(tmp_path)) == 1
    files = set(tmp_path.iterdir())
    run(tmp_path, [faults.planned("right")], roofs=(copy,), resume=True)
    assert set(tmp_path.iterdir()) == files


def test_resume_runs_what_is_not_ok_at_this_commit(tmp_path: Path) -> None:
    planned = [faults.planned("right"), faults.planned("raises")]
    first = run(tmp_path, planned)
    assert [record.status for record in first.records] == ["ok", "error"]
    again = run(tmp_path, planned, resume=True)
    assert [record.impl for record in again.resumed] == ["right"]
    assert [record.impl for record in again.records] == ["raises"]
    later = dataclasses.replace(ENVIRONMENT, git_commit="d" * 40)
    settings = Settings(output=tmp_path, budget_s=0.0, resume=True)
    other_commit = sweep.sweep(planned[:1], later, settings, Silent())
    assert (other_commit.resumed, len(other_commit.records)) == ([], 1)


def test_a_time_limit_leaves_the_rest(tmp_path: Path) -> None:
    planned = [faults.planned("right", seq_len=32 + n) for n in range(3)]
    outcome = run(tmp_path, planned, time_limit_s=0.0)
    assert (len(outcome.records), outcome.remaining) == (1, 2)
    rest = run(tmp_path, planned, resume=True)
    assert (len(rest.resumed), len(rest.records), rest.remaining) == (1, 2, 0)


def test_attention_is_measured_at_the_head_dims_asked_for(tmp_path: Path) -> None:
    from lrbench.bench.plan import Request, plan

    sizes = {"seq_lens": (64,), "head_dims": (64,), "num_heads": 1, "batch": 1, "modes": ("fw",)}
    outcome = run(tmp_path, plan(Request(ops=("attention",), **sizes), device_kind="cpu"))
    (record,) = outcome.records
    assert (record.impl, record.status, record.reason) == ("torch.sdpa_cpu", "ok", None)
    assert (record.head_dim_qk, record.head_dim_v) == (64, 64)
    unequal = run(tmp_path, plan(Request(ops=("attention",), head_dims_qk=(32,), **sizes), device_kind="cpu"))
    (record,) = unequal.records
    assert (record.status, record.reason) == ("unsupported", "head_dim_qk must equal head_dim_v, got 32 and 64")


def test_no_time_limit_is_too_long(tmp_path: Path) -> None:
    (record,) = run(tmp_path, [faults.planned("right")], timeout_s=math.inf).records
    assert (record.status, record.reason) == ("ok", None)


def test_refusals_need_no_worker(tmp_path: Path) -> None:
    item = faults.planned("right")
    refused = [
        dataclasses.replace(item, target=dataclasses.replace(item.target, devices=("cuda",))),
        dataclasses.replace(item, case=dataclasses.replace(item.case, mode="step")),
        dataclasses.replace(item, case=dataclasses.replace(item.case, dtype="bf16")),
        dataclasses.replace(item, case=dataclasses.replace(item.case, state_dtype="bf16")),
        dataclasses.replace(item, target=dataclasses.replace(item.target, requires=("lrbench-no-such-package",))),
        dataclasses.replace(
            item,
            case=dataclasses.replace(item.case, chunk_size=48),
            target=dataclasses.replace(item.target, supports="kernels.scalar_decay.declare:supports_engine"),
        ),
    ]
    step = dataclasses.replace(item.case, mode="step", state_dtype="bf16", chunk_size=None)
    able = dataclasses.replace(item.target, modes=("step",), state_dtypes=("fp32", "bf16"))
    refused.append(PlannedCase(case=step, target=able))
    progress = Silent()
    outcome = run(tmp_path, refused, progress)
    assert progress.started_cases == []
    assert [(record.status, record.reason) for record in outcome.records] == [
        ("unsupported", "right runs on cuda, this device is cpu"),
        ("unsupported", "mode must be one of fw, fwbw, bw for right, got step"),
        ("unsupported", "dtype must be one of fp32 for right, got bf16"),
        ("unsupported", "state_dtype must be one of fp32 for right, got bf16"),
        ("unavailable", "lrbench-no-such-package is not installed: pip install lrbench-no-such-package"),
        ("unsupported", "chunk_size must be a power of two >= 16, got 48"),
        ("unsupported", "state_dtype must be fp32 in mode step, got bf16"),
    ]


SWEEP_SLOWLY = """
import sys
from pathlib import Path
from lrbench.tests.bench import faults
from lrbench.tests.bench.test_sweep import Silent, run

class Telling(Silent):
    def started(self, item):
        print("started", flush=True)

outcome = run(Path(sys.argv[1]), [faults.planned(sys.argv[2], seq_len=32 + n) for n in range(60)], Telling())
print("interrupted", outcome.interrupted, outcome.remaining + len(outcome.records), outcome.path, flush=True)
"""


def start_sweep(folder: Path, fault: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SWEEP_SLOWLY, str(folder), fault],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def wait_for_cases(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline() == "started\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_measured(tmp_path: Path, number: signal.Signals) -> None:
    process = start_sweep(tmp_path, "slow")
    wait_for_cases(process, 4)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    last = output.splitlines()[-1].split()
    assert last[:3] == ["interrupted", "True", "60"]
    assert process.returncode == 0
    table = store.read_results(Path(last[3]))
    assert table.num_rows >= 3
    assert set(table["status"].to_pylist()) == {"ok"}
    assert [path.suffix for path in tmp_path.iterdir()] == [".parquet"]


def test_a_second_interrupt_keeps_no_row_from_its_file(tmp_path: Path) -> None:
    class Impatient(Silent):
        def finished(self, item: PlannedCase, status: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        def end(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run(tmp_path, [faults.planned("right", seq_len=32 + n) for n in range(2)], Impatient())
    assert (outcome.interrupted, len(outcome.records), outcome.remaining) == (True, 1, 1)
    assert list(tmp_path.iterdir()) == [outcome.path]


def test_an_interrupt_ends_a_hanging_worker(tmp_path: Path) -> None:
    process = start_sweep(tmp_path, "hangs")
    wait_for_cases(process, 1)
    children = wait_for_children(process.pid)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert output.split() == ["interrupted", "True", "60", "None"]
    assert not any(is_running(child) for child in children)
    assert list(tmp_path.iterdir()) == []


def test_killing_the_sweep_loses_no_row_and_leaves_no_worker(tmp_path: Path) -> None:
    process = start_sweep(tmp_path, "slow")
    wait_for_cases(process, 4)
    children = wait_for_children(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(is_running(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(child) for child in children)
    outcome = run(tmp_path, [faults.planned("slow", seq_len=32)], resume=True)
    assert len(outcome.recovered) == 1
    assert store.read_results(outcome.recovered[0]).num_rows >= 3
    assert (len(outcome.resumed), outcome.records) == (1, [])


def wait_for_children(pid: int) -> list[int]:
    import psutil

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
        if children:
            return children
        time.sleep(0.05)
    raise AssertionError("the sweep started no worker")


def is_running(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_several_workers_at_once(tmp_path: Path) -> None:
    from lrbench.bench.executors import Limits
    from lrbench.bench.executors.local import LocalExecutor

    groups = [[faults.planned("right", seq_len=32 + n)] for n in range(3)]
    executor = LocalExecutor(workers_per_device=2)
    outcomes = list(executor.run(groups, Limits(timeout_s=120.0, budget_s=0.0), lambda _: None))
    assert sorted(item.case.seq_len or 0 for item, _ in outcomes) == [32, 33, 34]
    assert {reply["status"] for _, reply in outcomes} == {"ok"}


def test_closing_several_workers_stops_them(tmp_path: Path) -> None:
    from lrbench.bench.executors import Limits
    from lrbench.bench.executors.local import LocalExecutor

    groups = [[faults.planned("right")], [faults.planned("hangs")]]
    outcomes = LocalExecutor(workers_per_device=2).run(groups, Limits(timeout_s=600.0, budget_s=0.0), lambda _: None)
    item, _ = next(outcomes)
    assert item.case.impl == "right"
    begin = time.monotonic()
    outcomes.close()
    assert time.monotonic() - begin < 20


def test_unknown_executor_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="executor must be one of local, ray, got 'slurm'"):
        run(tmp_path, [faults.planned("right")], executor="slurm")


@pytest.mark.parametrize(("device_count", "devices", "most"), [(0, 2, 1), (1, 2, 1), (4, 5, 4), (4, 0, 4)])
def test_more_devices_than_there_are_is_refused(tmp_path: Path, device_count: int, devices: int, most: int) -> None:
    environment = dataclasses.replace(ENVIRONMENT, device_count=device_count)
    settings = Settings(output=tmp_path / "out", devices=devices)
    with pytest.raises(ValueError, match=f"devices must be from 1 to {most} on a processor, 1 thread, got {devices}"):
        sweep.sweep([faults.planned("right")], environment, settings, Silent())
    assert not (tmp_path / "out").exists()


def test_a_sweep_about_a_gpu_keeps_no_row_of_a_worker_without_one(tmp_path: Path) -> None:
    environment = dataclasses.replace(ENVIRONMENT, device_kind="cuda", device_name="NVIDIA H200", device_count=1)
    settings = Settings(output=tmp_path, budget_s=0.0)
    outcome = sweep.sweep([faults.planned("right")], environment, settings, Silent())
    (record,) = outcome.records
    assert (record.status, record.time_ms) == ("error", None)
    assert record.reason == "the worker runs on cpu, the sweep is about cuda"


def test_compile_ahead_takes_two_lengths_of_ours_and_every_shape_of_theirs() -> None:
    from lrbench.bench.plan import Request, plan

    planned = plan(Request(preset="default"), device_kind="cuda")
    chosen = sweep.compile_cases(planned)
    ours = [item.case for item in chosen if item.case.impl == "tfla"]
    # 2 operations x 2 modes x 4 head dims x (5 chunk lengths + 4 of its own choice), at the shortest sequence length of
    # each and, behind all of those, at the longest.
    first, further = ours[: 2 * 2 * 4 * (5 + 4)], ours[2 * 2 * 4 * (5 + 4) :]
    assert len({dataclasses.replace(case, batch=0, seq_len=0) for case in first}) == len(first)
    given = [case for case in further if case.chunk_size in (64, 128, 256, 512, 1024)]
    assert {case.seq_len for case in given} == {65536}
    assert len({dataclasses.replace(case, batch=0, seq_len=0) for case in given}) == len(given) == 2 * 2 * 4 * 5
    theirs = [item.case for item in chosen if item.case.impl == "mlstm_kernels.xl_chunk"]
    assert len({case.seq_len for case in theirs}) == 7
    assert all("triton" not in item.case.impl for item in chosen)
    assert not any(item.case.impl == "torch" for item in chosen)


def test_compile_ahead_takes_no_case_that_fills_the_memory() -> None:
    """Where the batch is the same at every length, the longest are not what many processes call side by side."""
    from lrbench.bench.plan import Request, plan

    planned = plan(Request(kernel="wkv", preset="default", impls=("scan",)), device_kind="cuda")
    chosen = [(item.case.mode, item.case.channels, item.case.seq_len) for item in sweep.compile_cases(planned)]
    assert sorted(chosen) == [(m, c, t) for m in ("fw", "fwbw") for c in (768, 2048) for t in (128, 4096)]


def test_compile_ahead_takes_a_case_for_each_choice_of_launches() -> None:
    """Choices of products too large to be called come with the shortest case, once each."""
    from lrbench.bench.plan import Request, plan

    axes = Request(kernel="gated-mlp", preset="default", modes=("fw",), impls=("fused",))
    planned = plan(axes, device_kind="cuda")
    without, chosen = sweep.compile_cases(planned), sweep.compile_cases(planned, "9.0")
    assert chosen[: len(without)] == without
    further = [(i.case.impl, i.case.d_ff, i.case.seq_len, i.config_of) for i in chosen[len(without) :]]
    assert [(*what, large and large.seq_len) for *what, large in further] == [
        ("fused", 28672, 1024, 65536),
        ("fused", 53248, 1024, 16384),
    ]


def test_compile_ahead_takes_no_backward_pass_that_another_case_compiles() -> None:
    from lrbench.bench.plan import Request, plan

    axes = Request(kernel="wkv", preset="default", modes=("fwbw", "bw"), seq_lens=(128, 512), channels=(768,))
    chosen = [(i.case.impl, i.case.mode, i.case.seq_len) for i in sweep.compile_cases(plan(axes, device_kind="cuda"))]
    assert len(set(chosen)) == len(chosen)
    assert {mode for _, mode, _ in chosen} == {"fwbw"}
