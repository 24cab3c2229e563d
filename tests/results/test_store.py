"""The store: nothing measured is lost, nothing half-written is seen, and what is read is what was written."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrbench.bench.environment import finished_cases
from lrbench.results import store
from lrbench.results.contents import cases_left
from lrbench.results.schema import ENVIRONMENT_COLUMNS, RECORD_COLUMNS, Environment, Record
from lrbench.tests.results.test_lock import before_locking

RECORD = Record(
    run_id="r" * 32, case_id="0123456789abcdef", measured_at="2026-01-02T03:04:05+00:00", kernel="tfla", op="mlstm_sig",
    impl="fused_chunk", provider="lrbench", mode="fw", dtype="bf16", status="ok", seq_len=2**40, time_ms=0.1 + 0.2,
    time_samples_ms=[0.1, 0.2, 0.30000000000000004], git_dirty=False, device_name="NVIDIA H200", git_commit="c" * 40,
)  # fmt: skip
FAILED = dataclasses.replace(RECORD, case_id="fedcba9876543210", status="oom", reason="no memory", time_ms=None)


def write(folder: Path, *records: Record, name: str = "run") -> Path:
    with store.RunWriter(folder, name) as writer:
        for record in records:
            writer.append(record)
    return writer.path


def rows(path: Path) -> list[dict[str, object]]:
    return store.read_results(path).to_pylist()


def journalled(writer: store.RunWriter) -> list[dict[str, object] | None]:
    return store.read_journal(writer.journal.read_bytes().splitlines(keepends=True))


def line_of(record: Record, **changed: object) -> bytes:
    return json.dumps(dataclasses.asdict(record) | changed).encode() + b"\n"


def test_round_trip_keeps_every_column_and_value(tmp_path: Path) -> None:
    path = write(tmp_path, RECORD, FAILED)
    assert rows(path) == [dataclasses.asdict(RECORD), dataclasses.asdict(FAILED)]
    # Every column is in the file, and those without a value have their type all the same.
    schema = pq.read_schema(path)
    assert tuple(schema.names) == RECORD_COLUMNS
    assert schema.field("channels").type == pa.int64()
    assert schema.field("time_samples_ms").type.value_type == pa.float64()
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_run_without_rows_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_the_run_still_writes_the_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), store.RunWriter(tmp_path, "run") as writer:
        writer.append(RECORD)
        raise KeyboardInterrupt
    assert rows(writer.path) == [dataclasses.asdict(RECORD)]
    assert store.planned_rows(writer.path)[0] is False


def test_a_second_writer_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with store.RunWriter(tmp_path, "run"), pytest.raises(FileExistsError):
        store.RunWriter(tmp_path, "run")


@pytest.mark.parametrize(("planned", "left"), [(None, 1), (2, 0), (5, 3)])
def test_a_recovered_run_knows_how_much_it_planned(planned: int | None, left: int, tmp_path: Path) -> None:
    with store.RunWriter(tmp_path / "alive", "sweep-run", planned) as writer:
        writer.append(RECORD)
        # Written again, it says so again.
        writer.journal.unlink()
        writer.append(FAILED)
        assert len(journalled(writer)) == 2
        dead = tmp_path / "sweep-run.jsonl"
        dead.write_bytes(writer.journal.read_bytes())
    (path,) = store.recover(tmp_path)
    assert rows(path) == rows(writer.path) and not dead.exists()
    assert store.planned_rows(path) == (planned == 2, planned)
    assert cases_left(path) == left


@pytest.mark.parametrize("name", ["sweep-dead", "bars-dead", "live-dead"])
def test_recover_makes_parquet_of_a_journal_cut_short(tmp_path: Path, name: str) -> None:
    line = line_of(RECORD)
    (tmp_path / f"{name}.jsonl").write_bytes(line + line[:50])
    assert store.recover(tmp_path) == [tmp_path / f"{name}.parquet"]
    assert rows(tmp_path / f"{name}.parquet") == [dataclasses.asdict(RECORD)]
    assert store.recover(tmp_path) == []
    assert not (tmp_path / f"{name}.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.jsonl", b'{"text": "a"}\n{"text": "b"}\n'),
        ("notes.jsonl", b"not JSON at all\n"),
        ("notes.jsonl", b""),
        ("rows.jsonl", line_of(RECORD)),
        ("sweep-notes.jsonl", b'{"run_id": "a", "case_id": "b", "schema_version": 1, "mine": 2}\n'),
        ("sweep-notes.jsonl", b'{"seq_len": "abc"}\n'),
        ("sweep-notes.jsonl", b"1\n" + line_of(RECORD)),
        ("sweep-notes.jsonl", b"\x00\x00\n\n\xff\n"),
        ("sweep-notes.jsonl", b"\xff\xfe[[[" + b"[" * 100_000),
    ],
)
def test_recover_leaves_what_is_no_journal_of_a_sweep(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert store.recover(tmp_path) == []
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {name: content}


GOOD, ALSO_GOOD = line_of(RECORD), line_of(FAILED)
BAD_LINES = (
    line_of(RECORD, seq_len=10**23),
    line_of(RECORD, seq_len="abc"),
    line_of(RECORD, schema_version=6),
    b"1\n",
    line_of(RECORD, seq_len=1.5),
    line_of(RECORD, time_ms=0.0),
    line_of(RECORD, time_ms=None),
    line_of(RECORD, op=None),
    line_of(RECORD, compile_s=float("nan")),
    line_of(RECORD, time_samples_ms=[0.1, float("inf")]),
    GOOD.replace(b"0.30000000000000004", b"1e400"),
    b'{"seq_len": 1}\n',
    b"\x00\x00\x00\n",
)
DAMAGED_FIRST_LINES = (b"\x00\x00\x00\n", b"\xff\xfe\n", b"\n", GOOD[:50] + b"\n", b"{}\n")


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        *((GOOD + bad + ALSO_GOOD, [RECORD, FAILED]) for bad in BAD_LINES),
        *((first + GOOD, [RECORD]) for first in DAMAGED_FIRST_LINES),
        (line_of(RECORD, batch=2**63), []),
    ],
)
def test_recover_keeps_the_good_rows_and_sets_a_bad_journal_aside(
    tmp_path: Path, content: bytes, kept: list[Record]
) -> None:
    (tmp_path / "sweep-dead.jsonl").write_bytes(content)
    parquet, aside = tmp_path / "sweep-dead.parquet", tmp_path / "sweep-dead.jsonl.bad"
    assert store.recover(tmp_path) == [*([parquet] if kept else []), aside]
    assert parquet.exists() == bool(kept)
    assert not kept or rows(parquet) == [dataclasses.asdict(record) for record in kept]
    assert aside.read_bytes() == content
    assert store.recover(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "kept_text"),
    [
        ("no file \udcff here: ä", "no file \\udcff here: ä"),
        ("\x1b[2Jred\r\x9b", "\\x1b[2Jred\\r\\x9b"),
        ("a\tb\nc", "a\tb\nc"),
    ],
)
def test_text_that_utf8_or_a_terminal_cannot_take_is_kept_as_its_escape(
    tmp_path: Path, text: str, kept_text: str
) -> None:
    """Undecodable bytes, of a file's name say, are half a surrogate pair in Python's text."""
    broken = dataclasses.replace(FAILED, reason=text)
    kept = [dataclasses.asdict(row) for row in (RECORD, dataclasses.replace(FAILED, reason=kept_text))]
    path = write(tmp_path, RECORD, broken)
    assert rows(path) == kept
    assert [each.name for each in tmp_path.iterdir()] == ["run.parquet"]
    path.unlink()
    (tmp_path / "sweep-dead.jsonl").write_bytes(line_of(RECORD) + line_of(broken))
    assert store.recover(tmp_path) == [tmp_path / "sweep-dead.parquet"]
    assert rows(tmp_path) == kept


def test_recover_overwrites_no_parquet_file(tmp_path: Path) -> None:
    path = write(tmp_path, FAILED, name="sweep-dead")
    path.with_suffix(".jsonl").write_bytes(line_of(RECORD))
    assert store.recover(tmp_path) == [tmp_path / "sweep-dead.jsonl.bad"]
    assert rows(path) == [dataclasses.asdict(FAILED)]


def test_recover_leaves_a_live_run_alone(tmp_path: Path) -> None:
    with store.RunWriter(tmp_path, "sweep-run") as writer:
        writer.append(RECORD)
        assert store.recover(tmp_path) == []
        assert writer.journal.exists()


def test_recover_leaves_a_run_alone_that_is_about_to_lock_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovered: list[Path] = []
    before_locking(monkeypatch, lambda: recovered.extend(store.recover(tmp_path)))
    assert rows(write(tmp_path, RECORD, name="sweep-run")) == [dataclasses.asdict(RECORD)]
    assert recovered == []
    assert [path.name for path in tmp_path.iterdir()] == ["sweep-run.parquet"]


def test_recover_leaves_a_run_alone_that_ends_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = store.RunWriter(tmp_path, "sweep-run")
    writer.append(RECORD)
    before_locking(monkeypatch, writer.close)
    assert store.recover(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["sweep-run.parquet"]


def test_a_full_disk_keeps_whole_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = store.RunWriter(tmp_path, "sweep-run")
    writer.append(RECORD)

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        kept = f"No space left on device: the rows so far are kept in {writer.journal}"
        with pytest.raises(OSError, match=kept):
            writer.append(FAILED)
        assert journalled(writer) == [dataclasses.asdict(RECORD)]
        # No parquet either: the journal stays, and the partial file does not.
        with pytest.raises(OSError, match=kept):
            writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["sweep-run.jsonl"]
    (path,) = store.recover(tmp_path)
    assert [row["case_id"] for row in rows(path)] == [RECORD.case_id]


@pytest.mark.parametrize("what", ["journal", "folder"])
@pytest.mark.parametrize("when", ["before a row", "before the end"])
def test_rows_outlive_a_deleted_journal_or_folder(tmp_path: Path, what: str, when: str) -> None:
    folder = tmp_path / "out"
    writer = store.RunWriter(folder, "sweep-run")
    writer.append(RECORD)
    if what == "journal":
        writer.journal.unlink()
    else:
        shutil.rmtree(folder)
    if when == "before a row":
        writer.append(FAILED)
        assert journalled(writer) == [dataclasses.asdict(each) for each in (RECORD, FAILED)]
        assert store.recover(folder) == []
    expected = [dataclasses.asdict(record) for record in writer.records]
    writer.close()
    assert writer.path == folder / "sweep-run.parquet"
    assert rows(folder) == expected
    assert [path.name for path in folder.iterdir()] == ["sweep-run.parquet"]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    """While a writer rewrites the file over and over, every read finds a whole one."""
    path = tmp_path / "run.parquet"
    many = [dataclasses.asdict(RECORD)] * 500
    store.write_parquet(many, path)
    child = os.fork()
    if child == 0:
        for _ in range(10**6):
            store.write_parquet(many, path)
        os._exit(0)
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            assert len(rows(path)) == 500
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    table = pq.read_table(path)
    pq.write_table(change(table), path)
    return path


def test_reads_columns_that_cast_without_loss(tmp_path: Path) -> None:
    """pandas writes ints with nulls as doubles, strings as large strings, and may drop a column."""

    def change(table: pa.Table) -> pa.Table:
        table = table.set_column(table.column_names.index("seq_len"), "seq_len", table["seq_len"].cast(pa.float64()))
        table = table.set_column(table.column_names.index("op"), "op", table["op"].dictionary_encode())
        return table.drop_columns(["reason"]).append_column("extra", pa.array([1] * len(table)))

    path = rewrite(write(tmp_path, RECORD), change)
    assert rows(path) == [dataclasses.asdict(RECORD)]


def with_column(name: str, values: list[object]) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_column("seq_len", [1.5]), r"column seq_len must cast to int64 in .*run.parquet"),
        (with_column("schema_version", [6]), r"schema_version must be from 1 to 5, got 6 in .*run.parquet"),
        (lambda table: table.drop_columns(["schema_version"]), "must have a column schema_version"),
        (with_column("measured_at", [None]), r"measured_at must be in every row, got null in .*run.parquet"),
        *(
            (with_column("time_ms", [time_ms]), rf"time_ms must be a positive number .*ok, got {time_ms} in .*run.par")
            for time_ms in (None, 0.0, -1.0, math.inf, math.nan)
        ),
        (lambda table: table.append_column("op", table["op"]), r"must have each column once, got op several times"),
    ],
)
@pytest.mark.parametrize("size", [0, store.LARGE_BYTES])
def test_what_is_no_result_is_refused(
    change: Callable[[pa.Table], pa.Table], message: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a file is read as a whole or its rows are chosen while it is read."""
    write(tmp_path, RECORD, name="good")
    path = rewrite(write(tmp_path, RECORD), change)
    monkeypatch.setattr(store, "LARGE_BYTES", size)
    of_kernel = [[("kernel", "==", "tfla"), ("op", "==", "tfla")]]
    with pytest.raises(ValueError, match=message):
        store.read_results(tmp_path, where=of_kernel)
    path.write_text("no parquet")
    with pytest.raises(ValueError, match=r"results must be parquet files, got .*run.parquet"):
        store.read_results(tmp_path, where=of_kernel)


def test_a_folder_is_read_without_calibrations_and_profiles(tmp_path: Path) -> None:
    path = write(tmp_path, RECORD)
    for name in ("roofs", "run.roofs", "run.profile"):
        (tmp_path / f"{name}.parquet").write_bytes(path.read_bytes())
    write(tmp_path, FAILED, name="myroofs")
    assert [row["status"] for row in rows(tmp_path)] == ["oom", "ok"]
    assert store.row_set(tmp_path / "profile-of-roofs.parquet") == (Record, "results")


@pytest.mark.parametrize("row", store.ROW_NAMES)
def test_every_row_set_has_a_name_in_messages(row: type, tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=f"^{store.ROW_NAMES[row]}s must be parquet files, got .*bad.parquet"):
        store.read_file(tmp_path / "bad.parquet", row)


def test_what_counts_as_finished(tmp_path: Path) -> None:
    columns = {name: getattr(RECORD, name) for name in ENVIRONMENT_COLUMNS}
    here = Environment(**columns, device_count=1, memory_bytes=0)
    write(tmp_path, RECORD, FAILED)
    assert finished_cases(tmp_path, here) == {(RECORD.case_id, None): RECORD}
    for name, other in (("device_name", "NVIDIA B200"), ("git_commit", "d" * 40), ("git_dirty", True)):
        assert finished_cases(tmp_path, dataclasses.replace(here, **{name: other})) == {}
    assert finished_cases(tmp_path / "absent", here) == {}


def test_rows_of_the_first_version_have_no_context(tmp_path: Path) -> None:
    def first(table: pa.Table) -> pa.Table:
        return with_column("schema_version", [1])(table.drop_columns(["context"]))

    old = rewrite(write(tmp_path, RECORD, name="old"), first)
    (row,) = store.read_results(old).to_pylist()
    assert (row["context"], row["schema_version"]) == (None, 1)
    line = json.loads(line_of(RECORD, schema_version=1))
    del line["context"]
    # They had NVML's power of the last second, which said little of the case.
    old_line = json.dumps({**line, "power_w": 122.0}).encode() + b"\n"
    assert store.read_journal([old_line]) == [line]
