"""What folders of results hold and what they lack: the tables of `lrbench results` and `lrbench runs`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from .schema import Record, RoofRow, TritonRow
from .select import device_of, grouped, load_rows, newest
from .store import HERE, JOURNAL_SUFFIX, files_in, planned_rows, read_file, read_journal, result_files, row_set

COLUMNS = (
    "kernel", "op", "impl", "case_id", "status", "measured_at", "device_kind", "device_name", "device_accelerator",
    "torch_version", "triton_version", "git_commit",
)  # fmt: skip

FILE_COLUMNS = ("case_id", "run_id", "measured_at", "device_name", "driver_version")


def file_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each parquet file: the kind and number of its rows, their cases and runs, and when measured."""
    shown = []
    folders = [(path, path.rglob("*.parquet")) if path.is_dir() else (path.parent, [path]) for path in paths]
    for folder, path in ((folder, path) for folder, files in folders for path in sorted(files)):
        row, holds = row_set(path)
        rows = read_file(path, row, columns=FILE_COLUMNS).to_pylist()
        shown.append(
            {
                "file": str(path.relative_to(folder.parent)),
                "holds": holds,
                "rows": len(rows),
                "cases": None if row is RoofRow else len({each["case_id"] for each in rows}),
                "runs": len({each["run_id"] for each in rows}),
                "measured": _span(rows),
                "device": _values(each["device_name"] for each in rows),
                "driver": _values(each["driver_version"] for each in rows),
            }
        )
    return shown


def operation_rows(implementations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each operation: how many implementations were measured, and how many cases on each device."""
    devices = dict.fromkeys(row["device"] for row in implementations)
    shown = []
    for (kernel, op), rows in grouped(implementations, itemgetter("kernel", "op")).items():
        measured = {row["impl"] for row in rows if row["ok"]}
        cases = {device: sum(row["ok"] for row in rows if row["device"] == device) or None for device in devices}
        of = len({row["impl"] for row in rows})
        shown.append({"kernel": kernel, "op": op, "implementations": f"{len(measured)} of {of}", **cases})
    return shown


def run_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each run, the newest first: its id, when, on what, of which commit, and whether it is complete.

    A run that was stopped is not complete, and neither is one whose journal is still there. Of files that hold several
    runs it is not known.

    Raises:
        ValueError: as :func:`.store.read_results`.
    """
    columns = (*COLUMNS, "run_id", "git_dirty")
    found = [(load_rows(path, columns), planned_rows(path)[0]) for path in result_files(paths, (Record, TritonRow))]
    for path in itertools.chain.from_iterable(p.rglob(f"*{JOURNAL_SUFFIX}") for p in paths if p.is_dir()):
        with open(path, "rb") as journal:
            found.append(([row for row in read_journal(journal) if row is not None], False))
    completeness = {row["run_id"]: complete for rows, complete in found for row in rows}
    runs = grouped((row for rows, _ in found for row in rows), itemgetter("run_id"))
    newest_first = sorted(runs.items(), key=lambda run: max(row["measured_at"] for row in run[1]), reverse=True)
    return [
        {
            "run": run_id[:8],
            "measured": min(row["measured_at"] for row in rows)[:16].replace("T", " "),
            "device": _values(map(device_of, rows)),
            "commit": _values(f"{(row['git_commit'] or 'unknown')[:7]}{'+' * bool(row['git_dirty'])}" for row in rows),
            "kernel": _values(row["kernel"] for row in rows),
            "cases": len({row["case_id"] for row in rows}),
            "ok": len({row["case_id"] for row in rows if row["status"] == "ok"}),
            "complete": {True: "yes", False: "no", None: None}[completeness[run_id]],
        }
        for run_id, rows in newest_first
    ]


def triton_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the rows of sweeps over several Tritons; none where there are none. Raises as :func:`.read_results`."""
    found = ([path] if path.is_file() else files_in(path, [TritonRow]) for path in paths)
    files = list(itertools.chain.from_iterable(found))
    return load_rows(files) if files else []


def cases_left(path: Path) -> int:
    """Return how many cases of its plan the newest run of a file or folder lacks; 1 if it was stopped without a plan.

    Raises:
        ValueError: as :func:`.store.read_results`.
    """
    sizes = {}
    for file in result_files(path):
        rows = load_rows(file, ("measured_at",))
        sizes[max((row["measured_at"] for row in rows), default="")] = file, len(rows)
    newest_file, size = sizes[max(sizes)]
    complete, planned = planned_rows(newest_file)
    return int(complete is False) if planned is None else max(0, planned - size)


def implementation_rows(paths: Sequence[Path], declared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each implementation on each device: how its cases ended, and when and with what it was measured.

    Args:
        declared: what could be there: kernel, op, impl and devices. Of the families that were measured on a device,
            what runs on devices of its kind and has no row is listed too.
    """
    # A folder may hold calibrations alone.
    held = [path for path in paths if not path.is_dir() or files_in(path) or not any(path.rglob("*.parquet"))]
    rows = load_rows(held, COLUMNS) if held else []
    kinds = {itemgetter(*COLUMNS[:3])(row): row["devices"].split("/") for row in declared}
    shown = []
    for device, here in sorted(grouped(rows, device_of).items()):
        families = {row["kernel"] for row in here}
        # Rows that were measured beside another family count too.
        there = {(row["op"], row["impl"]) for row in here}
        groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {
            key: []
            for key, of in kinds.items()
            if key[0] in families and here[0]["device_kind"] in of and key[1:] not in there
        }
        groups |= grouped(here, itemgetter("kernel", "op", "impl"))
        places = {key: place for place, key in enumerate(kinds)}
        for key in sorted(groups, key=lambda key: places.get(key, len(places))):
            shown.append({"device": device, **dict(zip(COLUMNS[:3], key, strict=True)), **_summary(groups[key])})
    return shown


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    latest = list(newest(rows).values())
    counted = Counter(row["status"] for row in latest)
    measured = counted.pop("ok", 0)
    return {
        "ok": measured,
        "not_ok": ", ".join(f"{number} {status}" for status, number in sorted(counted.items())) or None,
        "older_rows": len(rows) - len(latest),
        "measured": _span(latest),
        "commits": _values((row["git_commit"] or "unknown")[:7] for row in latest),
        **{name: _values(row[f"{name}_version"] for row in latest) for name in ("torch", "triton")},
    }


def _span(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the first and the last day of rows, the last without the year where that is the same."""
    days = sorted({row["measured_at"][:10] for row in rows})
    if not days or days[0] == days[-1]:
        return days[0] if days else None
    return f"{days[0]} to {days[-1].removeprefix(days[0][:5])}"


def _values(values: Iterable[str | None]) -> str | None:
    return ", ".join(dict.fromkeys(value for value in values if value is not None)) or None


def as_markdown(files: Sequence[Mapping[str, Any]], implementations: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of a folder of results: an introduction and two tables, of what is there."""
    there = [row for row in implementations if row["ok"] or row["not_ok"]]
    tables = {name: "\n".join(markdown_table(rows)) for name, rows in (("files", files), ("implementations", there))}
    return (HERE / "contents.txt").read_text(encoding="utf-8").format(**tables).rstrip("\n") + "\n"


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of Markdown."""
    if not rows:
        return ["None.", ""]
    cells = ([("" if v is None else str(v)).replace("|", "\\|") for v in row.values()] for row in rows)
    lines = (f"| {' | '.join(each)} |" for each in ([*rows[0]], *cells))
    return [next(lines), "|" + "---|" * len(rows[0]), *lines, ""]
