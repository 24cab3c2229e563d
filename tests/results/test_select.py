"""Loading results: what is accepted, what is refused with one clear line, and the shared selections."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
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
