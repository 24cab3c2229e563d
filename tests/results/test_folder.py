"""Runs merged into one file for each family: the newest row of a case is there, nothing measured is lost."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lrbench.results import folder, store
from lrbench.results.folder import merge
from lrbench.results.lock import LOCK_FILE, hold
from lrbench.results.schema import RECORD_COLUMNS, RETIRED_COLUMNS, ErrorsRow
from lrbench.results.select import load_rows
from lrbench.tests.command_line import Lrbench, refused

from ..analysis import rows as made

NOTHING = ("unavailable", "fla is not installed: pip install fla")


def row(day: int, op: str = "mlstm_sig", impl: str = "fused_chunk", **columns: Any) -> dict[str, Any]:
    """Return a row of one case of an operation, measured on a day of January."""
    at = {"run_id": f"{day:032}", "measured_at": f"2026-01-{day:02}T00:00:00+00:00"}
    return made.row(op, impl, **at, **columns)


def held(path: Path) -> dict[str, list[tuple[str, int]]]:
    """Return what the files of a folder hold: implementation and day of each row."""
    return {
        file.name: [(each["impl"], int(each["measured_at"][8:10])) for each in load_rows(file)]
        for file in sorted(path.glob("*.parquet"))
    }


def test_the_newest_row_of_a_case_takes_the_place_of_the_older_one(tmp_path: Path) -> None:
    made.write([row(1), row(1, "gla", "fla.chunk_gla")], tmp_path / "sweep-tfla-a.parquet")
    made.write([row(3), row(3, "attention", "torch.sdpa_cudnn", kernel="lightning")], tmp_path / "tfla.parquet")
    made.write([row(2), row(2, "attention", "torch.sdpa_cudnn")], tmp_path / "bars-b.parquet")
    # A package that is missing today leaves yesterday's time where it is; that it was missing is not kept.
    status, reason = NOTHING
    untried = [row(4, "gla", "fla.chunk_gla", status=status, reason=reason)]
    untried += [row(day, "simple_gla", "fla.chunk_simple_gla", status=status, reason=reason) for day in (4, 5)]
    (tmp_path / "sweep-died.jsonl").write_text("".join(json.dumps(each) + "\n" for each in untried))
    said = merge(tmp_path)
    assert said[0].startswith("recovered from a run that died: ")
    assert said[1].startswith("merged the results of bars-b.parquet, sweep-")
    assert held(tmp_path) == {
        "history.parquet": [("fused_chunk", 1), ("fused_chunk", 2)],
        "lightning.parquet": [("torch.sdpa_cudnn", 3)],
        "tfla.parquet": [("torch.sdpa_cudnn", 2), ("fla.chunk_gla", 1), ("fused_chunk", 3)],
    }
    assert merge(tmp_path) == [f"nothing to merge in {tmp_path}"]
    # An older row goes to the history, whenever it comes.
    made.write([row(1, time_ms=7.0)], tmp_path / "late.parquet")
    merge(tmp_path)
    assert held(tmp_path)["history.parquet"] == [("fused_chunk", 1), ("fused_chunk", 1), ("fused_chunk", 2)]
    made.write(untried, tmp_path / "alone" / "sweep.parquet")
    assert merge(tmp_path / "alone") == ["merged the results of sweep.parquet: none was measured"]


def test_a_failed_import_takes_the_place_of_no_time(tmp_path: Path) -> None:
    """Where it is all that a case has it stays: a complete set asks for it last, and its bars have what they can."""
    broken = {"status": "unavailable", "reason": "import failed: No module named 'triton'"}
    made.write([row(1), row(2, **broken), row(2, impl="whole_state", **broken)], tmp_path / "sweep-a.parquet")
    merge(tmp_path)
    assert held(tmp_path) == {"tfla.parquet": [("fused_chunk", 1), ("whole_state", 2)]}


@pytest.mark.parametrize(("times_as_long", "cases", "kept"), [(1.3, 5, 0), (0.7, 5, 0), (1.1, 5, 1), (1.3, 4, 1)])
def test_rows_of_superseded_code_are_history(times_as_long: float, cases: int, kept: int, tmp_path: Path) -> None:
    """Else a chunk length that was measured long ago looks slower than others that were measured since."""
    old = [row(1, chunk_size=64 + n, time_ms=times_as_long, git_commit="old") for n in range(cases + 1)]
    new = [row(2, chunk_size=64 + n, time_ms=1.0, git_commit="new") for n in range(cases)]
    made.write([*old, *new], tmp_path / "sweep-a.parquet")
    merge(tmp_path)
    assert held(tmp_path)["tfla.parquet"].count(("fused_chunk", 1)) == kept
    assert sum(map(len, held(tmp_path).values())) == len(old) + len(new), "nothing is lost"


def test_copies_are_called_copies(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(store.HERE / "h200_sxm" / store.OTHER / "copies.parquet", tmp_path / f"{name}.copies.parquet")
    assert merge(tmp_path)[0].startswith("merged the copies of a.copies.parquet, b.copies.parquet: ")


@pytest.mark.parametrize("after", range(3))
def test_a_merge_that_was_killed_is_ended_by_the_next(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "killed"):
        made.write([row(1), row(1, "mlstm_exp", kernel="lightning")], tmp_path / name / "tfla.parquet")
        made.write([row(2), row(2, "mlstm_exp", kernel="lightning")], tmp_path / name / "sweep-a.parquet")
    merge(tmp_path / "whole")
    written: list[Path] = []

    def killed(rows: Any, path: Path, *rest: Any) -> None:
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(path)
        store.write_parquet(rows, path, *rest)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(folder, "write_parquet", killed)
        merge(tmp_path / "killed")
    everything = sorted(each for rows in held(tmp_path / "whole").values() for each in rows)
    assert set(everything) == {each for rows in held(tmp_path / "killed").values() for each in rows}
    merge(tmp_path / "killed")
    assert held(tmp_path / "killed") == held(tmp_path / "whole")


def test_every_kind_of_rows_has_a_file(tmp_path: Path) -> None:
    values = {field.name: None for field in dataclasses.fields(ErrorsRow)}
    numbers = {name: 1.0 for name in values if name.endswith(("_mean", "_std"))}
    for day in (1, 2):
        errors = ErrorsRow(**{**values, **numbers, "run_id": str(day), "draws": 10, "errors_version": 1})  # type: ignore[arg-type]
        store.write_parquet([dataclasses.asdict(errors)], tmp_path / f"errors-{day}.errors.parquet", ErrorsRow)
    made.write([row(1)], tmp_path / "sweep-a.parquet")
    merge(tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [store.OTHER, "tfla.parquet"]
    (errors,) = (tmp_path / store.OTHER).iterdir()
    assert store.read_file(errors, ErrorsRow)["run_id"].to_pylist() == ["1", "2"]
    assert errors.name == "errors.parquet" and merge(tmp_path) == [f"nothing to merge in {tmp_path}"]


@pytest.mark.parametrize("committed", store.committed_results(), ids=lambda path: path.name)
def test_pandas_reads_the_rows_of_sweeps_alone(committed: Path) -> None:
    """pandas takes all files of a folder for one table, those of subfolders too, but not what lies in _other."""
    table = pd.read_parquet(committed)
    assert {*table.columns} <= {*RECORD_COLUMNS, *RETIRED_COLUMNS}
    assert sorted(table["case_id"]) == sorted(store.read_results(committed, ["case_id"])["case_id"].to_pylist())
    assert table["status"].notna().all()
    assert list((committed / store.OTHER).iterdir())


def test_the_committed_results_are_merged(tmp_path: Path) -> None:
    shutil.copytree(store.HERE / "h200_sxm", tmp_path, dirs_exist_ok=True)
    assert merge(tmp_path) == [f"nothing to merge in {tmp_path}"]


def test_command(tmp_path: Path, lrbench: Lrbench) -> None:
    made.write([row(1)], tmp_path / "sweep-a.parquet")
    said = refused(lrbench, "results", tmp_path / "sweep-a.parquet", "--merge")
    assert "RESULTS must be one folder for --merge, got " in said
    with hold(tmp_path / LOCK_FILE, "the folder"):
        assert "is in use by another lrbench" in refused(lrbench, "results", tmp_path, "--merge")
    code, shown, said = lrbench("results", tmp_path, "--merge")
    assert (code, said) == (0, "merged the results of sweep-a.parquet: 1 in tfla.parquet\n")
    assert "tfla.parquet" in shown
