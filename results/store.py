"""Results on disk: one parquet file per run, a journal while it runs, and reading both back.

While a run is on, every finished row is appended to ``<name>.jsonl`` and synced to disk; at the end the rows become
``<name>.parquet`` by atomic rename and the journal goes. A run that was killed leaves its journal; :func:`recover`
turns it into parquet. The writer holds a lock on its journal, so nobody recovers a run that is still alive.

Calibrations, profiles, tables of errors and trainings are row sets of their own, with a schema and a version of
their own; sweeps over several Tritons are one whose rows are those of a sweep. They lie in a subfolder (:data:`OTHER`)
and are known by their names, such as ``roofs.parquet`` and ``<run>.roofs.parquet`` (:data:`OTHER_ROW_SETS`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import math
import operator
import os
import re
import typing
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from .schema import RECORD_COLUMNS, RETIRED_COLUMNS, ErrorsRow, ProfileRow, Record, RoofRow, TrainingRow, TritonRow

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
"""Where the results that come with the package lie, in a folder for each accelerator; only written in a checkout."""

JOURNAL_SUFFIX = ".jsonl"
COMPLETE, PLANNED = "lrbench.complete", "lrbench.planned"
"""Keys of a file's metadata: yes or no, and how many rows its run planned."""

PREFIXES = SWEEP_PREFIX, PAIRS_PREFIX, BARS_PREFIX, LIVE_PREFIX, TIME_PREFIX = (
    "sweep-",
    "pairs-",
    "bars-",
    "live-",
    "time-",
)
"""What the names of runs begin with."""

TRITON_SUFFIX = ".triton"
"""What the names of runs over several Tritons end with."""

Where: TypeAlias = Sequence[Sequence[tuple[str, str, Any]]]
"""Which rows are wanted: those for which at least one condition (column, operator, value) of each part holds. Operators
are those of pyarrow.parquet's filters."""

LARGE_BYTES = 4 * 2**20
"""Bytes of files from which on rows are chosen while reading. Importing pyarrow.dataset takes longer than to read all
of fewer."""

SAME_CASE = ("case_id", "device_accelerator", "device_name", "status", "noise", "suspect")
"""Of rows that agree in these columns, the newest counts."""

NAMING = ("run_id", "case_id", "measured_at", "kernel", "op", "impl", "provider", "mode", "status")
"""Columns that name a row, of which none is null."""

OTHER = "_other"
"""Subfolder of a folder of results for files of other row sets. pandas and pyarrow pass over what is called so when
they read a folder, and take the rest for one table."""

OTHER_ROW_SETS = {
    "roofs": (RoofRow, "calibration"), "copies": (RoofRow, "copies"), "profile": (ProfileRow, "profiles"),
    "errors": (ErrorsRow, "errors"), "training": (TrainingRow, "trainings"),
    "triton": (TritonRow, "Tritons"),
}  # fmt: skip

ROW_NAMES = {RoofRow: "calibration", ProfileRow: "profile", ErrorsRow: "error table", TrainingRow: "training"}
"""What messages call a row set; those of sweeps are results."""


def row_set(path: Path) -> tuple[type, str]:
    """Return the type of the rows of a parquet file, by its name, and what it holds, in a word."""
    return OTHER_ROW_SETS.get(path.name.removesuffix(".parquet").rpartition(".")[2], (Record, "results"))


@functools.cache
def arrow_schema(row: type = Record) -> pa.Schema:
    """Return the parquet schema of a row set: the columns of its dataclass in field order, all nullable."""
    import pyarrow as pa

    types: dict[Any, pa.DataType] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    types |= {list[kind]: pa.list_(types[kind]) for kind in (float, str)}  # type: ignore[valid-type]
    types |= {kind | None: stored for kind, stored in types.items()}
    hints = typing.get_type_hints(row)
    return pa.schema([(field.name, types[hints[field.name]]) for field in dataclasses.fields(row)])


class RunWriter(contextlib.AbstractContextManager["RunWriter"]):
    """The rows of one run. Use as a context manager: leaving it, however that happens, writes the parquet file.

    Args:
        folder: created if need be.
        name: file name without suffix.
        planned: how many rows make the run whole; None where leaving without an error does.

    Raises:
        OSError: the folder cannot be written.
        FileExistsError: a run of that name is already there.
    """

    def __init__(self, folder: Path, name: str, planned: int | None = None) -> None:
        self.planned = planned
        self.path = folder / f"{name}.parquet"
        self.journal = folder / f"{name}{JOURNAL_SUFFIX}"
        self.records: list[Record] = []
        if self.journal.exists():
            raise FileExistsError(f"a run of this name is there already: {self.journal}")
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        """Create the journal and lock it until the run ends."""
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        # Renamed only when it is locked: recover would take an unlocked journal for that of a dead run.
        unlocked = self.journal.with_name(f".{self.journal.name}.{os.getpid()}")
        file = open(unlocked, "xb")  # noqa: SIM115, held open for the lock
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(self.journal)
        return file

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(whole=error is None)

    def append(self, record: Record) -> None:
        """Add a row and sync it to disk; when that fails, the journal keeps what it held and the error is raised.

        Control characters are stored as their escapes, because a terminal would obey them; so is half a surrogate
        pair (Python's form of an undecodable byte), because parquet holds UTF-8. A journal that somebody deleted, alone
        or with its folder, is written again.
        """
        self.records.append(Record(**_encodable(dataclasses.asdict(record))))
        new = self.records[-1:]
        if os.fstat(self._file.fileno()).st_nlink == 0:
            self._file.close()
            self._file, new = self._open(), self.records
        for row in new:
            self._write(row)

    def _write(self, record: Record) -> None:
        line = json.dumps(dataclasses.asdict(record), allow_nan=False).encode() + b"\n"
        end = self._file.tell()
        if not end and self.planned is not None:
            line = json.dumps({PLANNED: self.planned}).encode() + b"\n" + line
        try:
            with self._saying_where_rows_are():
                self._file.write(line)
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), end)
            raise

    @contextlib.contextmanager
    def _saying_where_rows_are(self) -> Iterator[None]:
        """Add to an error, such as that of a full disk, where the rows so far are kept."""
        try:
            yield
        except OSError as error:
            kept = f"the rows so far are kept in {self.journal}, and the next sweep into this folder recovers them"
            raise OSError(f"{error.strerror or error}: {kept}") from error

    def close(self, *, whole: bool = True) -> None:
        """Write the parquet file, if there are rows, and remove the journal; ``whole``: the run ended without error."""
        if self._file.closed:
            return
        try:
            if self.records:
                complete = whole and self.planned in (None, len(self.records))
                rows = (dataclasses.asdict(record) for record in self.records)
                with self._saying_where_rows_are():
                    write_parquet(rows, self.path, complete=complete, planned=self.planned)
            self.journal.unlink(missing_ok=True)
        finally:
            with contextlib.suppress(OSError):
                self._file.close()


def write_parquet(
    rows: Iterable[Mapping[str, Any]],
    path: Path,
    row: type = Record,
    *,
    complete: bool | None = None,
    planned: int | None = None,
) -> None:
    """Write rows of a row set as parquet under ``path`` by atomic rename: readers see the whole file or none.

    Args:
        complete: whether the rows are all that their run planned; kept in the file's metadata, if not None.
        planned: how many rows the run planned, likewise.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([_encodable(each) for each in rows], schema=arrow_schema(row))
    if complete is not None:
        number = {} if planned is None else {PLANNED: str(planned)}
        table = table.replace_schema_metadata({COMPLETE: "yes" if complete else "no", **number})
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd")


def replace_columns(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write a result file anew with other values in some columns of :class:`Record`, NaN as null; all else is kept."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _opened(path) as file:
        table, group = file.read(), file.metadata.row_group(0).num_rows
    types = arrow_schema()
    new = {name: pa.array(found, types.field(name).type, from_pandas=True) for name, found in columns.items()}
    held = dict(zip(table.column_names, table.columns, strict=True))
    with replacing(path) as target:
        renewed = pa.table({**held, **new}, metadata=table.schema.metadata)
        pq.write_table(renewed, target, compression="zstd", row_group_size=group)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Make the folder of ``path``, and open a file that replaces it when complete: readers see the old file or all of
    the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_journal(lines: Iterable[bytes]) -> list[dict[str, Any] | None]:
    """Return the row in each line of a journal; None for a line that is no valid row.

    The line that says how many rows were planned is left out, and a last line that a kill cut short.
    """
    rows: list[dict[str, Any] | None] = []
    for line in lines:
        if _planned(line) is not None:
            continue
        row = _parse(line)
        if row is not None and _is_valid(row):
            rows.append(row)
        elif line.endswith(b"\n"):
            rows.append(None)
    return rows


def _is_valid(row: Mapping[str, Any]) -> bool:
    """Whether parquet keeps a row as it is, and :func:`read_file` takes it."""
    import pyarrow as pa

    try:
        table = pa.Table.from_pylist([row], schema=arrow_schema())
        _check_version(table["schema_version"].to_pylist(), Record, "a journal")
        _check_rows(table, "a journal")
        (stored,) = table.to_pylist()
        # Infinities are not written by lrbench.
        json.dumps(stored, allow_nan=False)
    except (pa.ArrowException, ValueError, OverflowError):
        return False
    # The conversion drops fractions of integer columns.
    return all(stored[name] == value for name, value in row.items())


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object in a line if its columns are a row's, whatever their values."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    needed, known = {"run_id", "case_id", "schema_version"}, {*RECORD_COLUMNS, *RETIRED_COLUMNS}
    return _encodable(row) if isinstance(row, dict) and needed <= row.keys() <= known else None


def _planned(line: bytes) -> int | None:
    """Return how many rows the run planned if the line says so, as the first of a journal does; else None."""
    found = re.fullmatch(rb'\{"%s": (\d{1,9})\}\n' % PLANNED.encode(), line)
    return None if found is None else int(found[1])


def _encodable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns with escapes in their texts for control characters and for what UTF-8 cannot encode."""
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    escaped = {
        name: _CONTROLS.sub(lambda c: c[0].encode("unicode_escape").decode(), each) for name, each in texts.items()
    }
    return {name: value for name, value in {**row, **escaped}.items() if name not in RETIRED_COLUMNS}


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def _is_journal(lines: Sequence[bytes]) -> bool:
    """Whether a file is a journal: a line has a row's columns, and the first is an object or, damaged, no JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        if not isinstance(json.loads(lines[0]), dict):
            return False
    return any(_parse(line) is not None for line in lines)


def recover(folder: Path) -> list[Path]:
    """Turn the journals of runs that died into parquet files.

    A journal has a run's name and a line with a row's columns, and does not begin with JSON that is no object. Other
    files are left alone, and so is a journal that its writer still holds.

    Returns:
        The files made. A journal with lines that are no rows, or whose parquet file is there already, is kept as
        ``<name>.jsonl.bad`` and is among them.
    """
    made = []
    folders = (folder, folder / OTHER)
    journals = (each.glob(f"{prefix}*{JOURNAL_SUFFIX}") for each in folders for prefix in PREFIXES)
    for journal in sorted(itertools.chain.from_iterable(journals)):
        with contextlib.suppress(BlockingIOError, FileNotFoundError, IsADirectoryError, PermissionError):
            made += _recover(journal)
    return made


def recovered_notes(folder: Path) -> list[str]:
    """Recover what runs that died left in a folder (:func:`recover`), and return a line about each file made."""
    made = recover(folder)
    return [f"{'kept' if path.suffix == '.bad' else 'recovered'} from a run that died: {path}" for path in made]


def _recover(journal: Path) -> list[Path]:
    with open(journal, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lines = file.readlines()
        # Without a link, the run ended between the opening and the lock.
        if os.fstat(file.fileno()).st_nlink == 0 or (lines and not _is_journal(lines)):
            return []
        rows = read_journal(lines)
        good = [row for row in rows if row is not None]
        target = journal.with_suffix(".parquet")
        made = []
        if good and not target.exists():
            planned = _planned(lines[0])
            write_parquet(good, target, complete=planned == len(good), planned=planned)
            made.append(target)
        if len(good) == len(rows) and (made or not good):
            journal.unlink()
        else:
            made.append(journal.replace(journal.with_name(f"{journal.name}.bad")))
        return made


def result_files(paths: str | Path | Iterable[str | Path], row_sets: Sequence[type] = (Record,)) -> list[Path]:
    """Return the result files that ``paths`` name or hold, subfolders too, sorted within a folder.

    Files of a folder with other row sets (calibrations, profiles, tables of errors) are passed over.

    Raises:
        ValueError: no such path, or no parquet file in it.
    """
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(path)
        found = [path] if path.exists() and not path.is_dir() else files_in(path, row_sets)
        if not found:
            why = "no parquet file in it" if path.exists() else "does not exist"
            raise ValueError(f"results must be a parquet file or a folder with some, got {path} ({why})")
        files += found
    if not files:
        raise ValueError("results must name at least one parquet file or folder, got none")
    return files


def current_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return result files without those of older rows, ``history.parquet`` and ``*.history.parquet``.

    The files beside them hold newer rows. Where there are no others, they are returned.
    """
    files = result_files(paths)
    return [path for path in files if not f".{path.name}".endswith(".history.parquet")] or files


def files_in(folder: Path, row_sets: Sequence[type] = (Record,)) -> list[Path]:
    """Return the files of row sets in a folder and its subfolders, sorted; none where there is no folder."""
    return sorted(p for p in folder.rglob("*.parquet") if not p.name.startswith(".") and row_set(p)[0] in row_sets)


def planned_rows(path: Path) -> tuple[bool | None, int | None]:
    """Return whether a file holds all rows that its run planned, and how many these are; None where it does not say."""
    with _opened(path) as file:
        said = file.metadata.metadata or {}
    complete, number = (said.get(key.encode()) for key in (COMPLETE, PLANNED))
    return None if complete is None else complete == b"yes", None if number is None else int(number)


def committed_results(accelerator: str | None = None) -> list[Path]:
    """Return the folders of results that come with the package, of one accelerator by its key or of every one."""
    folders = [folder for folder in sorted(HERE.iterdir()) if folder.is_dir() and folder.name != "local"]
    return [f for f in folders if accelerator in (None, f.name) and files_in(f)]


def read_results(
    paths: str | Path | Iterable[str | Path],
    columns: Sequence[str] | None = None,
    where: Where = (),
    *,
    newest: bool = False,
) -> pa.Table:
    """Read result files, and all result files of folders, as one table.

    Columns are cast where that loses nothing; columns a file lacks are those of its folders' names (``kernel=tfla``) or
    null, and columns lrbench does not know are left out.

    Args:
        columns: None is every column of :class:`Record`.
        where: which rows are wanted; the others are left out only if the files have :data:`LARGE_BYTES` in all.
        newest: whether rows older than one with the same :data:`SAME_CASE` are left out in the same way.

    Raises:
        ValueError: no such path, no parquet file in it, a file that is no lrbench result or has another schema version,
            or a column that does not cast without loss.
    """
    import pyarrow as pa

    if unknown := sorted(set(columns or ()) - set(RECORD_COLUMNS)):
        raise ValueError(f"columns must be columns of a record, got {', '.join(unknown)}")
    files = result_files(paths)
    if not (where or newest) or sum(path.stat().st_size for path in files) < LARGE_BYTES:
        return pa.concat_tables([read_file(path, columns=columns) for path in files])
    try:
        return _read_where(files, columns or RECORD_COLUMNS, where, newest)
    except (pa.ArrowException, OSError, ValueError) as error:
        # Reading them one by one finds the bad one and says what is wrong with it.
        for path in files:
            read_file(path, columns=columns)
        raise ValueError(f"results must be parquet files of lrbench: {' '.join(str(error).split())}") from error


def _read_where(files: Sequence[Path], columns: Sequence[str], where: Where, newest: bool) -> pa.Table:
    """Read the rows wanted: a first pass finds the row groups that hold one, of which all columns are read."""
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    schema = arrow_schema()
    names = [name for name in schema.names if name in columns]
    folders = ds.partitioning(schema, flavor="hive")
    stored = ds.dataset(list(map(str, files)), schema=schema, format="parquet", partitioning=folders)

    def passing(where: Where) -> ds.Expression:
        parts = (pq.filters_to_expression([[condition] for condition in part]) for part in where)
        return functools.reduce(operator.and_, parts, ds.scalar(True))

    wanted = passing(where)
    if newest:
        # A file at a time: the keys of all rows take as much memory as there is.
        keys = {"columns": [*SAME_CASE, "measured_at"], "filter": wanted}
        times = _newest_times(file.to_table(schema, **keys) for file in stored.get_fragments(filter=wanted))
        if not times:
            return schema.empty_table().select(names)
        where = [*where, [("measured_at", ">=", min(times))], [("measured_at", "in", times)]]
        wanted = passing(where)
    groups = [g for file in stored.get_fragments(filter=wanted) for g in file.split_by_row_group(wanted, schema=schema)]

    def read(groups: Sequence[ds.Fragment], columns: Iterable[str]) -> pa.Table:
        return ds.FileSystemDataset(groups, schema, stored.format).to_table(columns=list(columns), filter=wanted)

    held = read(groups, ["__fragment_index"])["__fragment_index"].unique().to_pylist()
    table = read([groups[n] for n in sorted(held)], dict.fromkeys((*columns, "schema_version")))
    table.validate(full=True)
    _check_version(table["schema_version"].unique().to_pylist(), Record, "these results")
    _check_rows(table, "these results")
    return table.select(names)


def _newest_times(tables: Iterable[pa.Table]) -> list[str]:
    """Return when the newest row of every case on every device was measured."""
    import pyarrow as pa

    def reduced(table: pa.Table) -> pa.Table:
        found = table.group_by(list(SAME_CASE)).aggregate([("measured_at", "max")])
        return found.rename_columns([name.removesuffix("_max") for name in found.column_names])

    found = [reduced(table) for table in tables]
    return [] if not found else reduced(pa.concat_tables(found))["measured_at"].drop_null().to_pylist()


def read_file(path: Path, row: type = Record, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one file of a row set, as :func:`read_results` does.

    It uses neither pyarrow.dataset nor pyarrow.compute, which import pandas: that takes longer than a small file.

    Args:
        row: dataclass of the rows; its last field is the version of its columns.
    """
    import pyarrow as pa

    whole = arrow_schema(row)
    names = [name for name in whole.names if columns is None or name in set(columns)]
    schema = pa.schema([field for field in whole if field.name in names])
    version, what = dataclasses.fields(row)[-1], ROW_NAMES.get(row, "result")
    with _opened(path, what) as file:
        present = Counter(file.schema_arrow.names)
        if version.name not in present:
            raise ValueError(f"{path} must have a column {version.name} to be an lrbench {what}, got none")
        wanted = dict.fromkeys([*(name for name in schema.names if name in present), version.name])
        if twice := [name for name in wanted if present[name] > 1]:
            raise ValueError(f"{what}s must have each column once, got {', '.join(twice)} several times in {path}")
        # Files are small: threads cost more than they save.
        table = file.read(columns=[*wanted], use_threads=False)
        table.validate(full=True)
    _check_version(table[version.name].to_pylist(), row, str(path))
    if row is Record:
        _check_rows(table, str(path))
    folders = _named_by_folders(path)
    found = []
    for field in schema:
        if field.name not in present:
            value, size = folders.get(field.name), len(table)
            found.append(pa.nulls(size, field.type) if value is None else pa.repeat(value, size).cast(field.type))
            continue
        column = table[field.name]
        try:
            found.append(column if column.type == field.type else column.cast(field.type, safe=True))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ValueError(f"column {field.name} must cast to {field.type} in {path}: {error}") from error
    return pa.table(found, schema=schema)


def _check_version(found: Iterable[int | None], row: type, where: str) -> None:
    version = dataclasses.fields(row)[-1]
    most: Any = version.default
    if others := set(found) - {*range(1, most + 1)}:
        given = ", ".join(sorted(map(str, others)))
        raise ValueError(f"{version.name} must be {f'from 1 to {most}' if most > 1 else most}, got {given} in {where}")


def _check_rows(table: pa.Table, where: str) -> None:
    """Refuse rows that lrbench does not write: without what names them, or timed without a time."""
    held = set(table.column_names)
    for name in NAMING:
        if name in held and table[name].null_count:
            raise ValueError(f"{name} must be in every row, got null in {where}")
    if {"status", "time_ms"} <= held:
        for status, time_ms in zip(table["status"].to_pylist(), table["time_ms"].to_pylist(), strict=True):
            if status == "ok" and not (time_ms is not None and 0 < time_ms < math.inf):
                raise ValueError(f"time_ms must be a positive number in rows with status ok, got {time_ms} in {where}")


def _named_by_folders(path: Path) -> dict[str, str | None]:
    """Return the columns that the folders of a partitioned store name, such as ``kernel=tfla``."""
    named = (part.partition("=") for part in path.parent.parts if "=" in part)
    return {n: None if v == "__HIVE_DEFAULT_PARTITION__" else urllib.parse.unquote(v) for n, _, v in named}


@contextlib.contextmanager
def _opened(path: Path, what: str = "result") -> Iterator[pq.ParquetFile]:
    """Open a parquet file; ValueError where opening or reading it finds that it is none, or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{what}s must be parquet files, got {path}: {problem}") from error
