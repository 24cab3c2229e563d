"""Old names of implementations: rows, references and journals of before are found under the names of today."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest

from lrbench.bench import plan
from lrbench.bench.environment import is_of
from lrbench.results import store
from lrbench.results.folder import finished_cases
from lrbench.results.names import RENAMED, current_names
from lrbench.results.schema import RECORD_COLUMNS, Case, Environment, Record
from lrbench.results.select import load_rows, matching

RENAMES = {("wkv4", "recurrent"): "naive", ("*", "tfla"): "fused_chunk", ("rglru", "tfla"): "scan"}
renaming = mock.patch.dict(RENAMED, RENAMES, clear=True)
without_renaming = mock.patch.dict(RENAMED, clear=True)


def record(op: str, impl: str, **columns: object) -> Record:
    case = Case(kernel="tfla", op=op, impl=impl, provider="lrbench", mode="fw", dtype="bf16", seq_len=1024)
    values = {**dataclasses.asdict(case), "case_id": case.case_id, "run_id": "r", "measured_at": "2026-01-01"}
    return Record(**{**values, "status": "ok", "time_ms": 1.5, **columns})


OLD = [record("wkv4", "recurrent"), record("mlstm_sig", "tfla"), record("rglru", "tfla"), record("rglru", "recurrent")]
NEW = [record("wkv4", "naive"), record("mlstm_sig", "fused_chunk"), record("rglru", "scan"), OLD[3]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "old.parquet"
    store.write_parquet(map(dataclasses.asdict, OLD), path)
    return path


@renaming
def test_a_typed_name_is_every_name_that_it_became() -> None:
    assert current_names(["recurrent"], ["wkv4"]) == ("naive",)
    assert current_names(["recurrent", "scan"], ["wkv4", "rglru"]) == ("naive", "recurrent", "scan")
    assert current_names(["tfla", "fused_chunk"], ["mlstm_sig"]) == ("fused_chunk",) * 2


def test_rows_are_read_under_the_names_of_today(file: Path) -> None:
    for names, rows in ((renaming, NEW), (without_renaming, OLD)):
        with names:
            assert store.read_file(file).to_pylist() == [dataclasses.asdict(row) for row in rows]


@renaming
@pytest.mark.parametrize("columns", [["case_id"], ["impl"], ["time_ms", "case_id"], ["time_ms"]])
def test_columns_alone_are_renamed_too(file: Path, columns: list[str]) -> None:
    table = store.read_file(file, columns=columns)
    assert table.column_names == [name for name in RECORD_COLUMNS if name in columns]
    assert table.to_pylist() == [{name: getattr(row, name) for name in table.column_names} for row in NEW]


@renaming
def test_a_selector_takes_old_names(file: Path) -> None:
    rows = store.read_file(file).to_pylist()
    for name in ("recurrent", "naive"):
        assert {row["op"] for row in matching(rows, {"impl": name})} >= {"wkv4"}
    assert [row["op"] for row in matching(rows, {"impl": "tfla"})] == ["mlstm_sig", "rglru"]


@renaming
def test_a_run_of_old_names_is_resumed(tmp_path: Path) -> None:
    """The journal of a run that died is in old names, and so is the file that is made of it."""
    with store.RunWriter(tmp_path, "sweep-old") as writer:
        for row in OLD:
            writer.append(row)
    here = Environment(device_kind="cpu", device_name=None, device_count=0, memory_bytes=0)  # type: ignore[arg-type]
    assert set(finished_cases(tmp_path, here, is_of)) == {row.case_id for row in NEW}
    assert {row["case_id"] for row in load_rows(tmp_path, ["case_id"])} == {row.case_id for row in NEW}


def test_committed_rows_have_the_names_of_today() -> None:
    """Their kernels of before, the gated MLP's on interleaved weights, have names of their own."""
    names_of_before = {old for _, old in RENAMED}
    with without_renaming:
        for file in store.result_files(store.committed_results()):
            assert names_of_before.isdisjoint(store.read_file(file, columns=["impl"])["impl"].to_pylist()), file


def test_a_new_name_is_no_old_one() -> None:
    """A row does not say which of the two it means."""
    for (op, old), new in RENAMED.items():
        assert not {("*", new), (op, new)} & set(RENAMED), (op, old)
        assert op != "*" or new not in {other for _, other in RENAMED}, old


@renaming
def test_a_sweep_takes_old_names() -> None:
    assert plan.current_impls("wkv", None, ("recurrent", "scan")) == ("naive", "scan")
    assert plan.current_impls("tfla", ("mlstm_sig",), ("tfla",)) == ("fused_chunk",)
    assert plan.current_impls("nothing", None, ("scan",)) == ("scan",)
    assert plan.current_impls("wkv", None, None) is None
