"""Rows of the results as plain values, for commands that answer at once: pandas is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def matching_rows(results: Sequence[Path], key: Mapping[str, Any], wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Return the measured rows that match ``key`` in every column, with the columns ``wanted``.

    Compared in Python, column after column: once a Python value is made an arrow one, pyarrow imports pandas, and that
    takes longer than all the rest.

    Raises:
        ValueError: no results in a path, or of another schema version.
    """
    columns = _load_columns(results, [*COMMON, *key, *wanted])
    rows: Sequence[int] = range(len(columns["status"]))
    for name, value in {**key, "status": "ok"}.items():
        column = columns[name]
        rows = [n for n in rows if column[n].as_py() == value]
    return [{name: columns[name][n].as_py() for name in wanted} for n in rows]


COMMON = ("status", "chunk_size", "time_ms", "peak_memory_bytes", "measured_at")
"""Columns that are read along: a file costs more to open than a column to read."""

_loaded: dict[tuple[tuple[Path, int, int], ...], dict[str, pa.Array]] = {}
"""Columns of the results that were read last, by their files, times and sizes: one answer asks for rows twice."""


def _load_columns(results: Sequence[Path], names: Sequence[str]) -> Mapping[str, pa.Array]:
    """Return columns of results, read from their files where they are not at hand."""
    from .frames import read_table, result_files

    files = result_files(results)
    stats = (path.stat() for path in files)
    key = tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in zip(files, stats, strict=True))
    if key not in _loaded:
        _loaded.clear()
    columns = _loaded.setdefault(key, {})
    if missing := [name for name in dict.fromkeys(names) if name not in columns]:
        table: pa.Table = read_table(files, missing)
        columns.update({name: table[name].combine_chunks() for name in missing})
    return columns
