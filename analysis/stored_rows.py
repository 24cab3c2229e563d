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
    from .frames import read_table

    table: pa.Table = read_table(results, [*dict.fromkeys(["status", *key, *wanted])])
    rows: Sequence[int] = range(len(table))
    for name, value in {**key, "status": "ok"}.items():
        column = table[name].combine_chunks()
        rows = [n for n in rows if column[n].as_py() == value]
    columns = {name: table[name].combine_chunks() for name in wanted}
    return [{name: column[n].as_py() for name, column in columns.items()} for n in rows]
