"""A site of results: a folder of pages that need nothing beside it, each number a link to the row that it comes from.

An operation has two pages: what is fastest at each problem and how times changed over runs, and every row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...results.schema import PROBLEM_SIZES
from ...results.select import (
    MODE_NAMES,
    best_rows,
    describe_sizes,
    device_of,
    grouped,
    latest_rows,
    load_results,
    ok_rows,
    records,
)
from ...results.store import replacing
from ..derive import without_removed
from ..figures.history import MAX_CASES, history_figure
from ..figures.plots import drawing
from ..figures.selection import Selection, choose
from ..figures.style import operation_label
from . import markup
from .markup import ABSENT, Cell, Html, TableRow, join, number, numeric, paragraph, size, table, templates

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

PROBLEM = ("device_accelerator", "mode", "dtype", *PROBLEM_SIZES)


def write(results: Sequence[Path], folder: Path) -> Path:
    """Write the pages of results into a folder and return its first page.

    Args:
        results: files and folders of them.
        folder: made if it is missing; pages of the same names are replaced.

    Raises:
        ValueError: no row, or a folder that cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--site must be a folder that can be written, got {folder}: {error.strerror}") from error
    frame = load_results(results)
    if frame.empty:
        raise ValueError(f"results must hold rows for a site, got none in {', '.join(map(str, results))}")
    pages: dict[str, str] = {name: _template(f"{name}.j2").render() for name in ("style.css", "tables.js")}
    operations: list[TableRow] = []
    # In this order families stand together.
    for op in frame.sort_values(["kernel", "op"], kind="stable")["op"].unique():
        rows = frame[frame["op"] == op]
        current = without_removed(latest_rows(rows))
        best = best_rows(current[current["suspect"].isna()], (*PROBLEM, "provider"))
        problems = _problems(records(best))
        devices = sorted({device_of(row) for row in records(ok_rows(rows))})
        sections = {
            "Time over length": join(*(_over_length(rows, op, device) for device in devices)),
            "Fastest kernel": _fastest(problems),
            "Over runs": _over_runs(problems, records(ok_rows(rows))),
        }
        title, every, home = operation_label(op), f"{op}-rows.html", {"All operations": "index.html"}
        pages[f"{op}.html"] = _page(title, {**home, "Every row": every}, sections)
        pages[every] = _page(f"{title}: every row", {**home, title: f"{op}.html"}, {}, _groups(records(rows)))
        operations.append(
            {
                "operation": Cell(title, link=f"{op}.html"),
                "kernels": size(rows["impl"].nunique())._replace(link=every),
                "problems": size(len(problems))._replace(link=f"{op}.html#fastest-kernel"),
                "rows": size(len(rows))._replace(link=every),
                "devices": ", ".join(sorted(set(rows["device_name"].dropna()))),
                "newest row": str(rows["measured_at"].max())[:10],
            }
        )
    said = paragraph("The fastest kernel of every problem, times over runs, and every row. Numbers lead to their rows.")
    pages["index.html"] = _page("Results of lrbench", {}, {"Operations": join(said, table("", operations))})
    for name, text in pages.items():
        with replacing(folder / name) as file:
            file.write(text.encode())
    return folder / "index.html"


def _page(title: str, nav: Mapping[str, str], sections: Mapping[str, Html], groups: Sequence[Any] = ()) -> str:
    """Return a page: links by their texts, sections by their headings, and rows by problem."""
    return _template("site.html.j2").render(title=title, nav=nav, sections=sections, groups=groups)


def _template(name: str) -> Any:
    return templates().get_template(name)


def _problems(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each problem, the fastest first and what failed last."""
    by_time = sorted(rows, key=lambda row: row["time_ms"] or math.inf)
    place = ("mode", "dtype", "num_heads", "head_dim_v", "seq_len", "batch")
    problems = grouped(by_time, _problem).values()
    return sorted(problems, key=lambda of: (device_of(of[0]), *(of[0][name] or 0 for name in place)))


def _problem(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in PROBLEM)


def _sizes(row: Row) -> str:
    """Return the sizes and the dtype of a problem without batch and lengths."""
    return describe_sizes(row | dict.fromkeys(("batch", "seq_len", "chunk_size", "state_dtype")))


def _id(row: Row) -> str:
    """Return the name of a row in its page, the same however many rows there are."""
    return f"{row['case_id'][:8]}-{row['run_id'][:6]}-{row['measured_at'][11:19].replace(':', '')}"


def _link(row: Row) -> str:
    return f"{row['op']}-rows.html#{_id(row)}"


def _timed(row: Row, detail: str = "") -> Cell:
    return numeric(row["time_ms"], 4, detail=detail)._replace(link=_link(row))


def _fastest(problems: Sequence[Sequence[Row]]) -> Html:
    """Return a table of the fastest kernel of every problem beside the fastest of another author."""
    body: list[TableRow] = []
    for fastest, *others in problems:
        second, ratio = ABSENT, Cell(ABSENT)
        if others:
            second = others[0]["impl"]
            ratio = numeric(others[0]["time_ms"] / fastest["time_ms"])._replace(link=_link(others[0]))
        body.append(
            {
                "fastest kernel": fastest["impl"],
                "time (ms)": _timed(fastest, "" if fastest["chunk_size"] is None else f"L {fastest['chunk_size']}"),
                "mode": fastest["mode"],
                "T": size(fastest["seq_len"]),
                "batch": size(fastest["batch"]),
                "heads, dims, dtype": _sizes(fastest),
                "device": device_of(fastest),
                "next author's": second,
                "times as long": ratio,
            }
        )
    return table("The fastest kernel of every problem, at its fastest chunk length L", body)


def _over_length(rows: pd.DataFrame, op: str, device: str) -> Html:
    """Return the figure of time over sequence length on a device, at the sizes of most rows; nothing if none fits."""
    try:
        return markup.figure(drawing("runtime", rows, choose(rows, Selection(ops=(op,), device=device), most=True)))
    except ValueError:
        return Html("")


def _over_runs(problems: Sequence[Sequence[Row]], rows: Sequence[Row]) -> Html:
    """Return a figure and a table of how each author's fastest kernels changed where several runs measured them."""
    fastest = {(row["case_id"], device_of(row)) for of in problems for row in of}
    oldest_first = sorted(rows, key=lambda row: row["measured_at"])
    cases = [
        of for key, of in grouped(oldest_first, lambda row: (row["case_id"], device_of(row))).items() if key in fastest
    ]
    several = sorted((of for of in cases if len({row["run_id"] for row in of}) > 1), key=len, reverse=True)
    if not several:
        return paragraph("None of these kernels was measured by more than one run.")
    body: list[TableRow] = [
        {
            "kernel": of[-1]["impl"],
            "first time (ms)": _timed(of[0], of[0]["measured_at"][:10]),
            "newest time (ms)": _timed(of[-1], of[-1]["measured_at"][:10]),
            "newest / first": numeric(of[-1]["time_ms"] / of[0]["time_ms"])._replace(link=_link(of[-1])),
            "runs": size(len({row["run_id"] for row in of}))._replace(link=f"{of[0]['op']}-rows.html#{_group(of[0])}"),
            "mode": of[0]["mode"],
            "case": describe_sizes(of[0]),
            "device": device_of(of[0]),
        }
        for of in several
    ]
    beside = [of for of in several if _problem(of[0]) == _problem(several[0][0])]
    return join(
        markup.picture(history_figure(beside[:MAX_CASES])),
        table("Each author's fastest kernels that several runs measured", body),
    )


def _group(row: Row) -> str:
    """Return the name of a problem's rows in their page."""
    return "-".join("" if value is None else str(value) for value in _problem(row))


def _groups(rows: Sequence[Row]) -> list[tuple[str, str, dict[str, dict[str, str]]]]:
    """Return every row by problem: heading and name of the problem, and names and cells of its rows."""
    found = []
    for of in _problems(rows):
        first = of[0]
        words = describe_sizes(first | dict.fromkeys(("chunk_size", "state_dtype")))
        heading = f"{device_of(first)}, {MODE_NAMES.get(first['mode'], first['mode'])}, {words}"
        found.append((heading, _group(first), {_id(row): _cells(row) for row in of}))
    return found


def _cells(row: Row) -> dict[str, str]:
    """Return a row as its page shows it."""
    low, high = (number(row[f"time_ci_{end}_ms"], 4) for end in ("low", "high"))
    doubts = "; ".join(f"{name}: {row[name]}" for name in ("suspect", "noise", "throttled") if row[name])
    return {
        "implementation": row["impl"],
        "L": str(row["chunk_size"] or ABSENT),
        "states": row["state_dtype"] or ABSENT,
        "time (ms)": number(row["time_ms"], 4),
        "95 % interval": ABSENT if low == ABSENT else f"{low} to {high}",
        "memory (GiB)": number(row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**30),
        "TFLOP/s": number(row["tflops"]),
        "roof (%)": number(row["roofline_fraction"] and 100 * row["roofline_fraction"], 2),
        "error": number(row["rel_error"], 2),
        "measured (UTC)": row["measured_at"][:16].replace("T", " "),
        "run": row["run_id"][:8],
        "commit": (row["git_commit"] or ABSENT)[:7],
        "torch": row["torch_version"] or ABSENT,
        "Triton": row["triton_version"] or ABSENT,
        "note": doubts if row["status"] == "ok" else f"{row['status']}: {row['reason']}",
    }
