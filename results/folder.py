"""The runs of a folder of results, merged into one file for each family of kernels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from .lock import LOCK_FILE, hold
from .schema import IMPORT_FAILED, Record, was_tried
from .select import Row, grouped
from .store import OTHER, read_file, recovered_notes, row_set, write_parquet

ORDER = ("kernel", "op", "impl", "mode", "dtype", "seq_len", "case_id", "measured_at")
"""By what the rows of a file are sorted: see "Many rows" in docs/results.md."""

HISTORY = "history"

SUPERSEDED, FEWEST_CASES = 1.2, 5
"""Code is superseded if newer code is faster or slower by this factor, in the median of so many cases or more."""

_code = itemgetter("op", "impl", "mode", "dtype", "device_name", "provider_version", "triton_version", "git_commit")
"""Return what was measured: an implementation of one commit, with the versions of its package and of Triton."""


def merge(folder: Path) -> list[str]:
    """Put the rows of a folder's runs into one file for each family and ``history.parquet``, and remove the others.

    A family's file has the newest row of every case on every device but those of superseded code
    (:data:`SUPERSEDED`), ``history.parquet`` all others that were measured. Rows that only say that a package was
    missing are left out; so are rows that say that one did not import, where the case has another row. Calibrations,
    copies and other row sets go to a file of each kind in :data:`.store.OTHER`. Other subfolders are left as they are.
    If it is killed in between, every row is still in a file, and the next call finishes the merge.

    Returns:
        what to say of it.

    Raises:
        ValueError: there is no such folder, a file cannot be read, or another lrbench is at work in the folder.
    """
    if not folder.is_dir():
        raise ValueError(f"results must be a folder to be merged, got {folder}")
    with hold(folder / LOCK_FILE, f"the folder {folder}"):
        said = recovered_notes(folder)
        found = (sorted(each.glob("*.parquet")) for each in (folder, folder / OTHER))
        files = [path for path in itertools.chain.from_iterable(found) if path.name[0] != "."]
        kinds = grouped(files, lambda path: HISTORY if row_set(path)[0] is Record else path.stem.rpartition(".")[2])
        for kind, group in kinds.items():
            row, what = row_set(group[0])
            present = {path: read_file(path, row).to_pylist() for path in group}
            # Rows that agree in every column count once.
            distinct = {json.dumps(row, sort_keys=True): row for row in itertools.chain.from_iterable(present.values())}
            rows = list(distinct.values())
            parts = _by_family(rows) if kind == HISTORY else {f"{OTHER}/{kind}": rows}
            targets = {folder / f"{name}.parquet": part for name, part in parts.items() if part}
            before, after = ({path: len(part) for path, part in files.items()} for files in (present, targets))
            if before == after:
                continue
            # History first: killed in between, an older row is in two files rather than in none.
            for path, part in sorted(targets.items(), key=lambda target: target[0].stem != HISTORY):
                write_parquet(part, path, row)
            for path in set(group) - set(targets):
                path.unlink()
            into = ", ".join(f"{len(part)} in {path.name}" for path, part in targets.items()) or "none was measured"
            said.append(f"merged the {what} of {', '.join(path.name for path in group)}: {into}")
    return said or [f"nothing to merge in {folder}"]


def _by_family(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return file name -> rows: of each family the newest of every case, and the older ones."""
    newest: dict[str, list[Row]] = {}
    older: list[Row] = []
    kept = (row for row in rows if row["status"] != "unavailable" or row["reason"].startswith(IMPORT_FAILED))
    by_case = grouped(kept, itemgetter("kernel", "case_id", "device_name"))
    cases = {key: sorted(group, key=lambda row: (was_tried(row), row["measured_at"])) for key, group in by_case.items()}
    superseded = _superseded(cases.values())
    for (kernel, *_), (*others, last) in cases.items():
        (older if _code(last) in superseded else newest.setdefault(kernel, [])).append(last)
        older += filter(was_tried, others)

    def place(row: Row) -> list[tuple[bool, Any]]:
        return [(row[key] is None, row[key]) for key in ORDER]

    return {name: sorted(part, key=place) for name, part in {**newest, HISTORY: older}.items()}


def _superseded(cases: Iterable[Sequence[Row]]) -> set[tuple[Any, ...]]:
    """Return the code that is superseded (:data:`SUPERSEDED`), given the rows of each case, oldest first."""
    ratios: dict[tuple[Any, ...], list[float]] = {}
    for group in cases:
        timed = [row for row in group if row["status"] == "ok" and not row["noise"]]
        for row in timed[:-1]:
            if _code(row) != _code(timed[-1]):
                ratios.setdefault(_code(row), []).append(row["time_ms"] / timed[-1]["time_ms"])
    return {
        code
        for code, found in ratios.items()
        if len(found) >= FEWEST_CASES and not 1 / SUPERSEDED < median(found) < SUPERSEDED
    }
