"""Loading results: what is accepted, what is refused with one clear line, and the shared selections."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from lrbench.analysis.check.history import case_history
from lrbench.analysis.model.prediction import stored_rows
from lrbench.results import store
from lrbench.results.schema import RECORD_COLUMNS
from lrbench.results.select import (
    best_rows,
    latest_rows,
    load_results,
    load_rows,
    matching,
    newest,
    parse_terms,
    select,
)
from lrbench.results.store import current_files, read_results, result_files

from ..analysis import rows as made

DAYS = [f"2026-01-0{day}T00:00:00+00:00" for day in range(1, 9)]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    made.write([made.row("mlstm_sig", "fused_chunk", chunk_size=c) for c in (64, 128)], tmp_path / "a.parquet")
    (tmp_path / "more").mkdir()
    made.write([made.row("attention", "torch.sdpa_cudnn")], tmp_path / "more" / "b.parquet")
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
    assert read_results(results, ["time_ms", "op"]).column_names == ["op", "time_ms"]
    assert "time_samples_ms" in load_results(results, samples=True)
    with pytest.raises(ValueError, match="columns must be columns of a record, got speed"):
        read_results(results, ["speed"])


def test_best_rows_choose_the_chunk_size_and_nothing_else() -> None:
    frame = made.frame(
        made.row("mlstm_sig", "fused_chunk", chunk_size=chunk, mode=mode, seq_len=seq_len)
        for chunk in (64, 128, 256)
        for mode in ("fw", "fwbw")
        for seq_len in (1024, 8192)
    )
    best = best_rows(frame)
    problem = ["mode", "seq_len"]
    assert best.groupby(problem)["time_ms"].apply(list).to_dict() == {
        key: [time_ms] for key, time_ms in frame.groupby(problem)["time_ms"].min().items()
    }


def test_latest_rows_keep_the_newest_of_a_case_per_device() -> None:
    frame = made.frame(
        made.row("mlstm_sig", "fused_chunk", measured_at=day, time_ms=ms, accelerator=gpu)
        for day, ms, gpu in ((DAYS[1], 1.0, "h200"), (DAYS[0], 2.0, "h200"), (DAYS[0], 3.0, "h100"))
    )
    assert sorted(latest_rows(frame)["time_ms"]) == [1.0, 3.0]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all files large enough to choose rows while they are read."""
    monkeypatch.setattr(store, "LARGE_BYTES", 0)


COMMITTED = store.committed_results()
SELECTORS = (
    "kernel:wkv",
    "kernel:lightning,mode:fw,seq_len:8k",
    "run:c0d954a9",
    "case:77034a48",
    "commit:4a4cb51,op:mlstm_exp,chunk_size:4k",
    "impl:fused_chunk,op:mlstm_sig,dtype:bf16",
    "impl:naive,op:wkv4",
    "device:h200_sxm,provider:mlstm_kernels,head_dim_v:256",
)


@pytest.mark.parametrize("text", SELECTORS)
def test_rows_chosen_while_they_are_read_are_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = select(text, COMMITTED)
    assert 0 < len(every) < 3000
    monkeypatch.setattr(store, "LARGE_BYTES", 0)
    assert select(text, COMMITTED) == every
    assert newest(select(text, COMMITTED, newest=True)) == newest(every)
    (run, *_) = {row["run_id"] for row in every}
    others = [row for row in every if row["run_id"] != run]
    assert newest(select(text, COMMITTED, newest=True, without=[run])) == newest(others or every)


def test_of_many_rows_the_newest_of_each_kind_are_loaded(large: None, tmp_path: Path) -> None:
    """Models take the newest right row of an idle machine, whatever was measured since."""
    kinds = ({}, {"noise": "drift"}, {"status": "incorrect", "reason": "wrong"}, {"suspect": "above the roof"})
    rows = [
        made.row("mlstm_sig", "fused_chunk", seq_len=seq_len, accelerator=device, measured_at=DAYS[n], **kinds[n % 4])
        for n in range(8)
        for seq_len in (1024, 2048)
        for device in ("h100", "h200")
    ]
    made.write(rows[::2], tmp_path / "a.parquet")
    made.write(rows[1::2], tmp_path / "b.parquet")
    found = load_rows(tmp_path, newest=True)
    assert len(found) == 16
    assert {row["measured_at"] for row in found} == {*DAYS[4:]}


def test_a_missing_value_meets_no_condition(large: None, tmp_path: Path) -> None:
    """A newer row without a value hides no older one that has it, although statistics leave it out."""
    commits = {DAYS[0]: "abc", DAYS[1]: None}
    rows = [made.row("mlstm_sig", "fused_chunk", measured_at=at, git_commit=each) for at, each in commits.items()]
    made.write(rows, tmp_path / "a.parquet")
    for newest_alone in (False, True):
        table = read_results(tmp_path, ["git_commit"], [[("git_commit", "==", "abc")]], newest=newest_alone)
        assert table["git_commit"].to_pylist() == ["abc"]


@pytest.mark.parametrize("size", [0, store.LARGE_BYTES])
def test_a_partitioned_store(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pyarrow writes it, without the columns that the folders' names tell."""
    folder = tmp_path / "with blank"
    monkeypatch.setattr(store, "LARGE_BYTES", size)
    every = read_results(COMMITTED)
    names = ("device_accelerator", "kernel", "channels")
    parts = ds.partitioning(pa.schema([every.schema.field(name) for name in names]), flavor="hive")
    ds.write_dataset(every, folder, format="parquet", partitioning=parts)
    key = RECORD_COLUMNS[:3]
    assert (
        read_results(folder)
        .sort_by([(name, "ascending") for name in key])
        .equals(every.sort_by([(name, "ascending") for name in key]))
    )
    for text in SELECTORS:
        found, wanted = (
            {tuple(map(row.get, key)): row for row in select(text, pool)} for pool in ([folder], COMMITTED)
        )
        assert found == wanted, text


def test_files_of_other_writers_are_chosen_from(large: None, tmp_path: Path) -> None:
    """Other types that cast, columns that are missing or unknown."""
    table = read_results(COMMITTED).drop(["throttled", "noise"])
    for name, kind in (("op", pa.large_string()), ("seq_len", pa.int32()), ("chunk_size", pa.float64())):
        table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
    table = table.set_column(0, "run_id", table["run_id"].dictionary_encode()).append_column("own", table["op"])
    pq.write_table(table, tmp_path / "x.parquet")
    for text in SELECTORS:
        wanted = [{**row, "throttled": None, "noise": None} for row in select(text, COMMITTED)]
        assert select(text, [tmp_path]) == wanted, text


def test_what_selects_no_row_among_many(large: None, tmp_path: Path) -> None:
    made.write([made.row("mlstm_sig", "fused_chunk")], tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="kernel:rglru selects no row; kernel or op is one of tfla, mlstm_sig here"):
        select("kernel:rglru,mode:fw", [tmp_path])
    with pytest.raises(ValueError, match="seq_len:9k selects no row; seq_len is one of"):
        select("kernel:tfla,seq_len:9k", [tmp_path])


def test_files_of_older_rows_are_not_read_for_the_newest(tmp_path: Path) -> None:
    names = ("a.parquet", "history.parquet", "a.history.parquet", "prehistory.parquet")
    for day, name in enumerate(names, start=1):
        row = made.row("mlstm_sig", "fused_chunk", measured_at=f"2026-01-0{day}T00:00:00+00:00")
        made.write([row], tmp_path / name)
    assert [path.name for path in current_files([tmp_path])] == ["a.parquet", "prehistory.parquet"]
    assert {row["measured_at"][:10] for row in stored_rows([tmp_path], "fw", "bf16")} == {"2026-01-01", "2026-01-04"}
    assert [path.name for path in current_files([tmp_path / "history.parquet"])] == ["history.parquet"]
    (rows,) = case_history("kernel:tfla", [tmp_path]).values()
    assert len(rows) == 4


def test_a_kernel_is_a_family_or_an_operation() -> None:
    """Also where another family's sweep measured the operation: the case is the same, and its newest row counts."""
    rows = [{"kernel": kernel, "op": op} for kernel, op in (("tfla", "lightning"), ("lightning", "attention"))]
    assert matching([*rows, {"kernel": "tfla", "op": "mlstm_sig"}], {"kernel": "lightning"}) == rows


SELECTABLE = [
    made.row("mlstm_sig", "fused_chunk", git_commit="abc123", run_id="r1"),
    made.row("mlstm_sig", "fused_chunk", seq_len=1024, git_commit="abc123456", run_id="r2"),
    made.row("retention", "fused_chunk", git_commit="def", run_id="s1"),
]


def test_terms_select_rows() -> None:
    assert matching(SELECTABLE, parse_terms("commit:abc123")) == SELECTABLE[:2]
    assert matching(SELECTABLE, parse_terms("op:mlstm_sig,seq_len:1k")) == SELECTABLE[1:2]


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ("colour:red", "KEY one of run, commit, case"),
        ("op:", "a selector must be"),
        ("op:a,op:b", "must name op once"),
        ("run:r", "run:r must name one run, got r1, r2"),
        ("op:gla", "op:gla selects no row; op is one of mlstm_sig, retention here"),
        ("run:r12", "run:r12 selects no row; did you mean r2 or r1"),
        ("impl:fused_chunks", "impl:fused_chunks selects no row; did you mean fused_chunk"),
        ("kernel:mlstm", "kernel:mlstm selects no row; did you mean mlstm_sig"),
        ("seq_len:many", "a size must be a positive integer"),
    ],
)
def test_bad_selectors(terms: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matching(SELECTABLE, parse_terms(terms))
