"""Measured roofs: what is stored is found again, the newest of the right device, and replaces the specification."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lrbench.analysis.accelerators import roofs
from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.accelerators.roofs import RoofRow, stored_roofs, with_roofs, with_stored_roofs, write_roofs
from lrbench.analysis.counts import count
from lrbench.analysis.model.runtime_model import runtime_model

from .. import rows as made
from ..rows import calibration

H200 = get_accelerator("h200")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose results/ is the only place where calibrations are looked for."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(roofs, "_default_folders", lambda: [folder])
    return folder


def test_the_newest_calibration_of_a_device_is_taken(results: Path) -> None:
    write_roofs(calibration("old", "2026-11-01T00:00:00+00:00"), results / "h200_sxm" / "roofs.parquet")
    slower = [dataclasses.replace(row, rate=row.rate / 2) for row in calibration("new", short=True)]
    write_roofs(slower, results / "local" / "sweep-tfla-x.roofs.parquet")
    for run_id, when, key in (("h100", "2026-12-01", "h100_sxm"), ("unknown", "2026-12-02", None)):
        write_roofs(calibration(run_id, when, device_accelerator=key), results / "roofs.parquet")
    found = stored_roofs()
    assert set(found) == {"h100_sxm", "h200_sxm"}
    assert found["h200_sxm"].bandwidth_bytes_s == 2e12
    assert found["h200_sxm"].source == (
        "short calibration of 2026-11-20T10:00:00+00:00 on NVIDIA H200 (driver 580.159, torch 2.11.0), "
        "results/local/sweep-tfla-x.roofs.parquet"
    )


def test_measured_roofs_take_the_place_of_the_specification(results: Path) -> None:
    write_roofs(calibration(), results / "h200_sxm" / "roofs.parquet")
    measured = with_roofs(H200, "measured")
    assert (measured.bandwidth_bytes_s, measured.vector_flops) == (4e12, 60e12)
    assert dict(measured.matrix_flops) == {**H200.matrix_flops, "bf16": 700e12, "fp32": 50e12}
    assert "calibration of 2026-11-20" in measured.source
    problem = count("mlstm_sig", seq_len=8192, batch=8, num_heads=8, head_dim_qk=256, head_dim_v=512, chunk_size=128)
    model = runtime_model(problem, measured, "bf16")
    assert model.upper_ms == pytest.approx(1e3 * (problem.flops / 700e12 + problem.bytes / 4e12))
    assert with_roofs(H200, "spec") is H200


def test_without_a_stored_calibration(results: Path) -> None:
    """The H200 has measured roofs of its own, another part must say that it has none, the CPU is as measured."""
    assert with_stored_roofs(H200) is H200
    assert with_roofs(H200, "measured").peak_flops("bf16") == 790e12
    with pytest.raises(ValueError, match="no calibration of a b200 is stored: run `lrbench calibrate`"):
        with_roofs(get_accelerator("b200"), "measured")
    cpu = get_accelerator("cpu")
    write_roofs(calibration(device_accelerator="cpu"), results / "roofs.parquet")
    assert with_roofs(cpu, "measured") is cpu
    assert with_stored_roofs(cpu) is cpu


def test_a_path_names_the_calibration(results: Path) -> None:
    write_roofs(calibration("old"), results.parent / "mine.parquet")
    assert with_roofs(H200, "mine.parquet").bandwidth_bytes_s == 4e12
    with pytest.raises(ValueError, match=r"roofs must hold a calibration of b200, got mine.parquet with none"):
        with_roofs(get_accelerator("b200"), "mine.parquet")
    with pytest.raises(ValueError, match=r"roofs must be spec, measured, or a file or folder .*, got 'best'"):
        with_roofs(H200, "best")


def test_an_incomplete_calibration_is_passed_over(results: Path) -> None:
    write_roofs(calibration()[1:], results / "roofs.parquet")
    assert stored_roofs() == {}


def test_rows_are_added_to_what_is_there(results: Path) -> None:
    path = results / "roofs.parquet"
    write_roofs(calibration("first"), path)
    write_roofs(calibration("second", "2026-11-21T00:00:00+00:00"), path)
    rows = roofs.store.read_file(path, RoofRow).to_pylist()
    assert [row["run_id"] for row in rows] == ["first"] * 4 + ["second"] * 4
    assert [RoofRow(**row) for row in rows[:4]] == calibration("first")


def test_a_file_of_something_else_is_left_alone(results: Path) -> None:
    path = made.write([made.row("mlstm_sig", "fused_chunk")], results / "roofs.parquet")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="must have a column roofs_version to be an lrbench calibration"):
        write_roofs(calibration(), path)
    assert path.read_bytes() == before
