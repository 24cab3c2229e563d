"""Loading results: what is accepted, what is refused with one clear line, and the shared selections."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrbench.results.schema import RECORD_COLUMNS
from lrbench.results.select import (
    best_rows,
    failed_rows,
    latest_rows,
    load_results,
    ok_rows,
    single,
)
from lrbench.results.store import result_files

from ..analysis import rows as made


@pytest.fixture
def results(tmp_path: Path) -> Path:
    made.write(
        [made.row(made.case("mlstm_sig", "fused_chunk", chunk_size=c)) for c in (64, 128)], tmp_path / "a.parquet"
    )
    (tmp_path / "more").mkdir()
    made.write([made.row(made.case("attention", "torch.sdpa_cudnn"))], tmp_path / "more" / "b.parquet")
    return tmp_path


def rewrite(path: Path, change) -> Path:
    table = pq.read_table(path)
    pq.write_table(change(table), path)
    return path


def test_calibrations_and_profiles_beside_results_are_passed_over(results: Path) -> None:
    for name in ("roofs.parquet", "a.roofs.parquet", "more/b.profile.parquet"):
        (results / name).write_bytes((results / "a.parquet").read_bytes())
    assert [path.name for path in result_files(results)] == ["a.parquet", "b.parquet"]
    (results / "only").mkdir()
    (results / "only" / "roofs.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="no parquet file in it"):
        result_files(results / "only")


def test_a_folder_is_read_with_its_subfolders_in_column_order(results: Path) -> None:
    frame = load_results(results)
    assert len(frame) == 3
    assert list(frame.columns) == [c for c in RECORD_COLUMNS if c != "time_samples_ms"] + ["tokens", "embedding_dim"]
    assert set(frame["tokens"]) == {65536}
    assert set(frame["embedding_dim"]) == {4096}
    assert [path.name for path in result_files(results)] == ["a.parquet", "b.parquet"]
    assert len(load_results([results / "a.parquet", results / "more"])) == 3


def test_columns_are_projected(results: Path) -> None:
    assert list(load_results(results, ["time_ms", "op"]).columns) == ["op", "time_ms"]
    assert "time_samples_ms" in load_results(results, samples=True)
    with pytest.raises(ValueError, match="columns must be columns of a record, got speed"):
        load_results(results, ["speed"])


def test_columns_that_cast_without_loss_are_accepted(results: Path) -> None:
    path = rewrite(
        results / "a.parquet",
        lambda t: t.set_column(t.column_names.index("seq_len"), "seq_len", t["seq_len"].cast(pa.float32())),
    )
    assert load_results(path)["seq_len"].tolist() == [8192, 8192]


def test_missing_columns_are_null_and_foreign_ones_left_out(results: Path) -> None:
    path = rewrite(
        results / "a.parquet", lambda t: t.drop_columns(["power_w"]).append_column("mood", pa.array(["good"] * len(t)))
    )
    frame = load_results(path)
    assert frame["power_w"].isna().all()
    assert "mood" not in frame


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.set_column(
                t.column_names.index("schema_version"), "schema_version", pa.array([1, 99], pa.int64())
            ),
            "schema_version must be 1, got 99 in .*a.parquet",
        ),
        (lambda t: t.drop_columns(["schema_version"]), "must have a column schema_version"),
        (
            lambda t: t.set_column(t.column_names.index("batch"), "batch", pa.array([1.5, 2.0])),
            "column batch must cast to int64 in .*a.parquet",
        ),
    ],
)
def test_foreign_results_are_refused(results: Path, change, message: str) -> None:
    path = rewrite(results / "a.parquet", change)
    with pytest.raises(ValueError, match=message):
        load_results(path)


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got .*nowhere.parquet \(does not exist\)"):
        load_results(tmp_path / "nowhere.parquet")
    with pytest.raises(ValueError, match="no parquet file in it"):
        load_results(tmp_path)
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"results must be parquet files, got .*text.parquet"):
        load_results(tmp_path)


def test_best_rows_choose_the_chunk_size_and_nothing_else() -> None:
    cases = [
        made.case("mlstm_sig", "fused_chunk", chunk_size=chunk, mode=mode, seq_len=seq_len)
        for chunk in (64, 128, 256)
        for mode in ("fw", "fwbw")
        for seq_len in (1024, 8192)
    ]
    frame = made.frame([made.row(case) for case in cases])
    best = best_rows(frame)
    assert len(best) == 4
    for _, group in frame.groupby(["mode", "seq_len"]):
        fastest = group.loc[group["time_ms"].idxmin()]
        assert fastest["chunk_size"] in best.loc[(best["mode"] == fastest["mode"])]["chunk_size"].tolist()
    assert best["time_ms"].sum() == pytest.approx(frame.groupby(["mode", "seq_len"])["time_ms"].min().sum())


def test_failed_rows_never_count_as_measured() -> None:
    frame = made.frame(
        [
            made.row(made.case("mlstm_sig", "fused_chunk", chunk_size=64)),
            made.row(made.case("mlstm_sig", "fused_chunk", chunk_size=128), status="oom", reason="out of memory"),
        ]
    )
    assert best_rows(frame)["chunk_size"].tolist() == [64]
    assert ok_rows(frame)["chunk_size"].tolist() == [64]
    assert failed_rows(frame)["chunk_size"].tolist() == [128]


def test_latest_rows_keep_the_newest_of_a_case_per_device() -> None:
    case = made.case("mlstm_sig", "fused_chunk")
    frame = made.frame(
        [
            made.row(case, measured_at="2026-01-02T00:00:00+00:00", time_ms=1.0),
            made.row(case, measured_at="2026-01-01T00:00:00+00:00", time_ms=2.0),
            made.row(case, measured_at="2026-01-01T00:00:00+00:00", time_ms=3.0, accelerator="h100"),
        ]
    )
    assert sorted(latest_rows(frame)["time_ms"]) == [1.0, 3.0]


def test_single() -> None:
    frame = pd.DataFrame({"device_name": ["A", "B", None]})
    with pytest.raises(ValueError, match="device must be chosen where results hold several: A, B"):
        single(frame, "device_name", option="device")
    with pytest.raises(ValueError, match="device_name must be one of A, B in these results, got 'C'"):
        single(frame, "device_name", "C")
    assert len(single(frame, "device_name", "A")) == 1
