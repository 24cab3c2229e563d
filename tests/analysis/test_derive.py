"""Derived columns: as they are counted today where that is known here, else as they are stored."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrbench.analysis.derive import DERIVED, DERIVED_COLUMNS, derive_anew, derive_file
from lrbench.results.select import latest_rows, load_results
from lrbench.results.store import COMPLETE, arrow_schema, committed_results, result_files

from ..command_line import Lrbench, full_speed_seconds
from . import rows as made

CASE = made.case("mlstm_sig", "fused_chunk")
STALE = {name: 7.5 for name in DERIVED_COLUMNS if name != "suspect"} | {"suspect": "it was too fast"}


def test_columns_are_derived_anew() -> None:
    now = made.row_of(CASE, gbps=1.0)
    (row,) = derive_anew(made.frame([{**now, **STALE, "accelerator": "h100_sxm"}])).to_dict("records")
    for name in ("flops", "tensor_flops", "bytes", "intensity", "causal_factor", "tflops", "roofline_fraction"):
        assert row[name] == pytest.approx(now[name]), name
    assert row["gbps"] == pytest.approx(made.count_of(CASE).bytes / now["time_ms"] / 1e6)
    assert row["model_time_ms"] > 1e-2
    assert row["suspect"] is None


def test_no_committed_row_is_above_its_roof() -> None:
    """Else a count has FLOPs or bytes that the kernel leaves out."""
    shares = load_results(committed_results())["roofline_fraction"].dropna()
    assert len(shares) > 3000
    assert shares.max() < 1


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"op": "hyena"}, DERIVED_COLUMNS),
        ({"chunk_size": -1}, DERIVED_COLUMNS),
        ({"device_accelerator": None}, ("roofline_fraction", "suspect")),
        ({"device_accelerator": "h1000"}, ("roofline_fraction", "suspect")),
        ({"device_accelerator": "cpu", "device_kind": "cpu"}, ("roofline_fraction", "suspect")),
        ({"accelerator": None}, ("model_time_ms",)),
        ({"status": "oom", "time_ms": None}, ("tflops", "gbps", "roofline_fraction", "suspect")),
    ],
)
def test_what_is_not_known_here_stays_as_stored(changed: dict, kept: tuple[str, ...]) -> None:
    stored = {**made.row_of(CASE), **STALE, "accelerator": "h100_sxm", **changed}
    (row,) = derive_anew(made.frame([stored, made.row_of(CASE)]).iloc[:1]).to_dict("records")
    assert {name for name in DERIVED_COLUMNS if row[name] == STALE[name]} == set(kept)


def test_columns_that_are_not_loaded_are_not_added() -> None:
    frame = made.frame([made.row_of(CASE)]).drop(columns=["flops", "suspect"])
    assert list(derive_anew(frame).columns) == [*frame.columns, DERIVED]


def test_committed_rows_store_what_is_counted_today(tmp_path: Path) -> None:
    stale = {str(path): derive_file(Path(shutil.copy(path, tmp_path))) for path in result_files(committed_results())}
    assert not any(stale.values()), f"a count or a roof changed: `make pages` in the same commit; rows: {stale}"


def test_a_file_is_brought_up_to_date(tmp_path: Path, lrbench: Lrbench) -> None:
    """And keeps the order of its rows, what was measured, a column of somebody's own, metadata and row groups."""
    now = made.row_of(CASE)
    later = {**now, "measured_at": "2026-01-02T00:00:00+00:00", "time_samples_ms": [1.0, 2.0]}
    stale = {**later, **STALE, "model_time_ms": None}
    path, expected = tmp_path / "store.parquet", tmp_path / "expected.parquet"
    for file, rows in ((path, [stale, now, stale]), (expected, [later, now, later])):
        table = pa.Table.from_pylist(rows, schema=arrow_schema().with_metadata({COMPLETE: "no"}))
        pq.write_table(table.append_column("mine", pa.array([1, 2, 3])), file, row_group_size=2)
    for said in (f"{path}: derived columns of 2 rows are as they are counted today\n", ""):
        assert lrbench("results", path, "--derive")[::2] == (0, said)
        assert pq.read_table(path).equals(pq.read_table(expected), check_metadata=True)
        assert pq.read_metadata(path).num_row_groups == 2


@pytest.mark.speed
def test_all_committed_rows_are_derived_quickly() -> None:
    frame = latest_rows(load_results(committed_results()))
    assert full_speed_seconds(lambda: derive_anew(frame)) < 2.0


def test_rows_are_derived_once() -> None:
    """A report draws many figures of one frame, and of parts of it."""
    rows = made.frame([made.row("mlstm_sig", "fused_chunk"), made.row("mlstm_sig", "xl_chunk")])
    derived = derive_anew(rows)
    part = derived[derived["impl"] == "xl_chunk"]
    assert derived is not rows and derive_anew(part) is part
