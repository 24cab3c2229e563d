"""Calibration: rates of this machine that hang together, stored with where they were measured."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrbench.analysis.accelerators import cpu
from lrbench.analysis.accelerators.roofs import RoofRow
from lrbench.bench.drive import calibrate, session
from lrbench.bench.drive.calibrate import FORMS, Calibration, Form, measure_roofs, summary_rows
from lrbench.bench.drive.executors import LocalExecutor
from lrbench.bench.drive.ray import RayExecutor
from lrbench.bench.drive.run import Outcome
from lrbench.bench.environment import current_environment
from lrbench.bench.worker import clock
from lrbench.kernels.common.cache import CACHE_VARIABLE
from lrbench.results import store
from lrbench.tests.command_line import Lrbench, Run, refused
from lrbench.tests.results.test_store import RECORD

TINY = Form(dtypes=("fp32", "fp64"), fma=False, budget_s=0.0, ci_target=1.0, max_sample_s=1e-4)


@pytest.fixture(scope="module")
def short() -> Calibration:
    """The short form on this machine's device."""
    return calibrate.calibrate(short=True)


def test_rates_follow_from_sizes_and_times(short: Calibration) -> None:
    assert short.failure is None
    assert {"copy", "matmul"} <= {row.quantity for row in short.rows}
    for row in short.rows:
        work = 2 * row.size if row.quantity == "copy" else 2 * row.size**3
        assert row.rate == pytest.approx(1e3 * work / row.time_ms)
        assert row.best_rate == pytest.approx(1e3 * work / min(row.time_samples_ms))
        assert len(row.time_samples_ms) >= 10
        assert row.best_rate >= row.rate > 1e8
        assert row.device_name == short.environment.device_name
        assert row.short
    assert len({row.run_id for row in short.rows}) == 1


def test_matrices_get_smaller_until_they_fit_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calibrate.CACHES, "cpu", 0)
    environment = dataclasses.replace(current_environment(), device_kind="cpu", device_accelerator="cpu")
    rows, _ = measure_roofs(environment, TINY, short=True)
    sizes = {row.dtype: row.size for row in rows if row.quantity == "matmul"}
    assert sizes == {"fp32": 512, "fp64": 512}


def test_products_in_tf32_are_named_so_and_leave_no_trace() -> None:
    """tf32 is a precision of fp32 products that is set around them; the process goes on as it was."""
    before = torch.get_float32_matmul_precision()
    seen = {}
    for dtype in ("tf32", "fp32"):
        for call, what in calibrate._matmul(clock.CpuClock(), "cpu", dtype, 1e-4):
            seen[what["dtype"]] = torch.get_float32_matmul_precision()
            assert call(None).dtype == torch.float32
    assert seen == {"tf32": "high", "fp32": "highest"}
    assert torch.get_float32_matmul_precision() == before


def test_the_copy_is_out_of_the_caches_reach_and_copies() -> None:
    copy, what = calibrate._copy("cpu")
    assert what["work"] == 2 * what["size"]
    assert what["size"] >= min(4 * (cpu.cache_bytes(level=3) or 0), cpu.free_memory_bytes() // 10)
    target = copy(None)
    for part in (target[:10_000], target[-10_000:]):
        assert part.unique().numel() > 1000, "a copy of constant data may be compressed"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_others_use_is_noise_of_a_cpu_alone(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Where no thread waited, and the samples show nothing."""
    monkeypatch.setattr(clock, "measure", lambda *_: [SimpleNamespace(noise=None, failure=None, columns=dict)])
    monkeypatch.setattr(clock, "CudaClock", clock.CpuClock)
    monkeypatch.setattr(calibrate, "_workloads", lambda *_: [(None, {})])
    monkeypatch.setattr(calibrate, "roof_row", lambda *_, **columns: columns)
    monkeypatch.setattr(cpu.Waiting, "busy", lambda _, *, alone: "others used 50% of the cores" if alone else None)
    environment: Any = SimpleNamespace(device_kind=device, device_accelerator=None)
    _, noises = calibrate.measure_roofs(environment, calibrate.FORMS[device, True], short=True)
    assert noises == (["others used 50% of the cores"] if device == "cpu" else [])


def test_without_a_gpu_a_sweep_measures_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("it has a GPU")
    found = calibrate.measure_here(None, short=True, gpu_only=True)
    assert (found["rows"], found["failure"], found["environment"]["device_kind"]) == ([], None, "cpu")


def test_the_command_prints_stores_and_remembers(
    short: Calibration, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dataclasses.replace(short.environment, device_kind="cpu", device_accelerator="cpu")
    found = dataclasses.replace(short, environment=environment, noise=None)
    monkeypatch.setattr(calibrate, "calibrate", lambda **_: found)
    cpu.local_cpu.cache_clear()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    printed = run.json("calibrate")
    assert printed == summary_rows(short.rows)
    assert printed[0]["unit"] == "TB/s"
    stored = store.read_file(tmp_path / "results" / "local" / store.OTHER / "roofs.parquet", RoofRow).to_pylist()
    assert stored == [dataclasses.asdict(row) for row in short.rows]
    best = {row.dtype: row.best_rate for row in short.rows if row.quantity == "matmul"}
    assert dict(cpu.local_cpu().matrix_flops) == best
    cpu.local_cpu.cache_clear()


@pytest.mark.parametrize(
    ("options", "noise", "said"),
    [
        ("", None, None),
        ("", "busy CPU: load 3.1", "calibrate again when the machine is idle"),
        ("--output elsewhere", None, "calibrate without --output"),
    ],
)
def test_only_an_idle_machine_renews_its_roofs_and_not_for_another_file(
    short: Calibration, tmp_path: Path, lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch,
    options: str, noise: str | None, said: str | None,
) -> None:  # fmt: skip
    environment = dataclasses.replace(short.environment, device_kind="cpu", device_accelerator="cpu")
    found = dataclasses.replace(short, environment=environment, noise=noise)
    monkeypatch.setattr(calibrate, "calibrate", lambda **_: found)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    cpu.local_cpu.cache_clear()
    code, _, err = lrbench(f"calibrate {options}")
    assert (code, cpu.recall() is None, (said or "") in err) == (0, said is not None, True)
    assert (f"warning: measured on a busy machine: {noise}" in err) == (noise is not None)
    assert list(Path("elsewhere" if options else "results/local").rglob("roofs.parquet"))


def test_what_cannot_be_calibrated_leaves_no_file(
    tmp_path: Path, short: Calibration, lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = dataclasses.replace(short, rows=[], failure="CUDA out of memory")
    monkeypatch.setattr(calibrate, "calibrate", lambda *, short: failed)
    code, _, err = lrbench("calibrate", "--output", tmp_path)
    assert (code, ": CUDA out of memory" in err, list(tmp_path.rglob("*.parquet"))) == (1, True, [])
    # What is wrong with the file is said before anything is measured.
    (tmp_path / store.OTHER / "roofs.parquet").write_text("no parquet")
    monkeypatch.setattr(calibrate, "calibrate", lambda *, short: pytest.fail("measured"))
    assert "calibrations must be parquet files, got" in refused(lrbench, "calibrate", "--output", tmp_path)


def test_calibrate_shows_what_it_could_not_write(
    short: Calibration, tmp_path: Path, lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(rows: object, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(calibrate, "calibrate", lambda **_: short)
    monkeypatch.setattr(session, "write_roofs", full)
    code, out, err = lrbench("calibrate", "--output", tmp_path, "--format", "json")
    path = tmp_path / store.OTHER / "roofs.parquet"
    assert (code, len(json.loads(out))) == (2, len(short.rows))
    assert err.endswith(f"lrbench: --output must be a file that can be written, got {path}: No space left on device\n")
    monkeypatch.setattr(calibrate, "calibrate", lambda *, short: pytest.fail("measured before the output was tried"))
    path.mkdir()
    assert "--output must be a file that can be written" in refused(lrbench, "calibrate", "--output", tmp_path)


@pytest.mark.parametrize(
    ("options", "asked", "failure"),
    [
        ("", {"short": True, "gpu_only": True}, None),
        ("--calibrate", {"short": True, "gpu_only": False}, None),
        ("--calibrate", {"short": True, "gpu_only": False}, "CUDA out of memory"),
        ("--no-calibrate", None, None),
        ("--executor ray", None, None),
    ],
)
def test_a_sweep_calibrates_a_local_gpu_unless_told_otherwise(
    options: str,
    asked: dict[str, bool] | None,
    failure: str | None,
    short: Calibration,
    tmp_path: Path,
    lrbench: Lrbench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A calibration that fails does not keep the sweep from running."""
    seen: dict[str, Any] = {}
    answer = dataclasses.replace(short, rows=[], failure=failure) if failure else short
    done = Outcome(path=None, records=[RECORD], resumed=[], remaining=0, interrupted=False)
    monkeypatch.setattr(calibrate, "calibrate", lambda session, **given: seen.update(asked=given) or answer)
    monkeypatch.setattr(session, "sweep", lambda *_, roofs, **__: seen.update(roofs=roofs) or done)
    for executor in (LocalExecutor, RayExecutor):
        monkeypatch.setattr(executor, "environment", lambda _: short.environment)
    code, _, err = lrbench(f"sweep --impl torch {options}", "--output", tmp_path)
    assert (code, seen.get("asked")) == (0, asked)
    assert seen["roofs"] == (answer.rows if asked else [])
    assert (f"not calibrated: {failure}" in err) == bool(failure)


@pytest.mark.gpu
def test_a_gpu_reaches_most_of_its_specification_and_no_more() -> None:
    environment = current_environment()
    rows = measure_roofs(environment, FORMS["cuda", True], short=True)
    shares = {(row.quantity, row.dtype): row.rate / row.spec_rate for row in rows if row.spec_rate}
    if not shares:
        pytest.skip(f"{environment.device_name} is not specified")
    assert all(0.3 < share < 1.02 for share in shares.values()), shares
    assert all(row.sm_clock_mhz for row in rows)


@pytest.mark.gpu
def test_multiply_adds_come_close_to_the_vector_rate() -> None:
    environment = current_environment()
    form = dataclasses.replace(FORMS["cuda", True], dtypes=(), fma=True)
    (row,) = (row for row in measure_roofs(environment, form, short=True) if row.quantity == "fma")
    assert row.spec_rate is None or 0.7 < row.rate / row.spec_rate < 1.02
