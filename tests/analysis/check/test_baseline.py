"""Promotion of runs: what is written, and which runs are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lrbench.analysis.check.baseline import promote
from lrbench.results.select import load_rows, newest

from ..rows import failed, measured, run_of, write


def run(tmp_path: Path) -> Path:
    return write(run_of(3, seed=1), tmp_path / "runs" / "new.parquet")


def test_promotes_a_run_with_its_provenance(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "h200_sxm"
    write(run_of(2, seed=2, git_commit="b" * 40, measured_at="2025-12-31T00:00:00+00:00"), folder / "old.parquet")
    source = run(tmp_path)
    path, provenance = promote(source, into=folder, by="A. Reviewer")
    assert path.read_bytes() == source.read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == ["new.baseline.json", "new.parquet", "old.parquet"]
    assert json.loads((folder / "new.baseline.json").read_text(encoding="utf-8")) == provenance
    assert provenance["promoted_by"] == "A. Reviewer"
    assert provenance["promoted_from"] == "new.parquet"
    assert (provenance["run_id"], provenance["git_commit"], provenance["git_dirty"]) == ("run1", "a" * 40, False)
    assert provenance["environment"]["triton_version"] == "3.6.0"
    assert provenance["cases"] == {"ok": 3}
    assert provenance["replaces"] == [{"run_id": "run2", "git_commit": "b" * 40, "cases": 2}]
    # Of every case the promoted row is the baseline's now.
    assert {row["run_id"] for row in newest(load_rows(folder)).values()} == {"run1"}


def test_the_folder_is_that_of_the_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTOR", "octocat")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    path, provenance = promote(run(tmp_path))
    assert path == Path("results/h200_sxm/new.parquet")
    assert provenance["promoted_by"] == "octocat"
    with pytest.raises(FileExistsError, match="this run is part of the baseline"):
        promote(tmp_path / "runs" / "new.parquet")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (run_of(2, git_dirty=True), "got uncommitted changes in .*--allow-dirty"),
        ([failed("oom", "full")], "must have measured cases, got none"),
        ([measured(), measured(accelerator="h100")], "accelerator, got h100_sxm, h200_sxm"),
        ([*run_of(1, seed=1), *run_of(1, seed=2)], r"one run, got run1 \(x.parquet\), run2 .* name it with --run"),
        ([measured(device_accelerator=None, device_name="GPU")], "GPU is no accelerator .* --into"),
    ],
)
def test_a_run_that_makes_no_baseline_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        promote(write(rows, tmp_path / "x.parquet"))
    assert not (tmp_path / "results").exists()


def test_a_run_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    write(run_of(3, seed=2, measured_at="2026-06-01T00:00:00+00:00"), folder / "newer.parquet")
    with pytest.raises(ValueError, match="must be newer than what it replaces"):
        promote(run(tmp_path), into=folder)
    other = tmp_path / "other"
    write([measured(accelerator="h100")], other / "h100.parquet")
    with pytest.raises(ValueError, match="must hold results of h200_sxm, got h100_sxm"):
        promote(run(tmp_path), into=other)


def test_a_run_is_found_in_a_folder_by_its_id(tmp_path: Path) -> None:
    run(tmp_path)
    write(run_of(2, seed=3, git_dirty=True), tmp_path / "runs" / "third.parquet")
    with pytest.raises(ValueError, match="name it with --run"):
        promote(tmp_path / "runs", into=tmp_path / "base")
    path, provenance = promote(tmp_path / "runs", run="run3", into=tmp_path / "base", allow_dirty=True)
    assert path.name == "third.parquet"
    assert provenance["git_dirty"] is True
