"""A case over commits: a row per run that measured it, each against the one before, as a table and as a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...results.case_rows import (
    ENVIRONMENT_COLUMNS,
    Row,
    describe,
    device_of,
    load_rows,
    matching,
    parse_terms,
)
from .compare import CONFIDENCE, MARGIN, judge, time_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours; each line has a marker of its own as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#222222", "#E69F00", "#56B4E9", "#8C8C8C")
MARKERS = "osD^vP*X"
MAX_FIGURE_CASES = len(COLOURS)


def case_history(case: str, results: Sequence[str | Path]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of cases, oldest first, by case id and device.

    Args:
        case: a case id or how it begins (4 hex digits at least), or selector terms such as ``op:mlstm_sig,mode:fw``.
        results: files and folders.

    Raises:
        ValueError: nothing is selected, or a bad term.
    """
    is_id = re.fullmatch(r"[0-9a-f]{4,16}", case) is not None
    rows = matching(load_rows(results), {"case": case} if is_id else parse_terms(case))
    histories: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["measured_at"]):
        histories.setdefault((row["case_id"], device_of(row)), []).append(row)
    return dict(sorted(histories.items(), key=lambda item: (describe(item[1][0]), item[0])))


def history_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the history of one case on one device as rows to print.

    ``ratio`` is the time over that of the last run before it that measured the case, with the verdict of ``compare``;
    ``changed`` names what else is not as it was then.
    """
    lines = []
    before: Row | None = None
    for row in rows:
        line: dict[str, Any] = {
            "measured_at": row["measured_at"],
            "commit": (row["git_commit"] or "unknown")[:10] + ("+" if row["git_dirty"] else ""),
            "run": row["run_id"][:8],
            "status": row["status"],
            "time_ms": row["time_ms"],
            "low_ms": row["time_ci_low_ms"],
            "high_ms": row["time_ci_high_ms"],
            "ratio": None,
            "verdict": None,
            "peak_memory_bytes": row["peak_memory_bytes"],
            "rel_error": row["rel_error"],
            "changed": None,
        }
        measured = row["status"] == "ok" and row["time_ms"] is not None
        if before is not None:
            line["changed"] = _changed(before, row)
            if measured:
                line["ratio"] = row["time_ms"] / before["time_ms"]
                line["verdict"] = judge(time_interval(row, before, confidence=CONFIDENCE), MARGIN)
        if measured:
            before = row
        lines.append(line)
    return lines


def _changed(old: Row, new: Row) -> str | None:
    columns = (*ENVIRONMENT_COLUMNS, "provider_version", "throttled")
    changes = [f"{name} {old[name]} -> {new[name]}" for name in columns if old[name] != new[name]]
    return "; ".join(changes) or None


def history_figure(histories: Sequence[Sequence[Row]]) -> Figure:
    """Draw the times of cases over the runs that measured them, with their 95 % intervals.

    Raises:
        ValueError: more than :data:`MAX_FIGURE_CASES` cases, or none that was measured.
    """
    from ..figures.style import new_figure, set_alt_text, styled

    measured = [[row for row in rows if row["time_ms"] is not None] for rows in histories]
    measured = [rows for rows in measured if rows]
    if not 0 < len(measured) <= MAX_FIGURE_CASES:
        raise ValueError(
            f"a figure must show 1 to {MAX_FIGURE_CASES} measured cases, got {len(measured)}: select fewer"
        )
    # Runs stand side by side in the order of time: commits have no distances.
    first_seen: dict[tuple[str, str], str] = {}
    for row in (row for rows in measured for row in rows):
        key = _label(row)
        first_seen[key] = min(first_seen.get(key, row["measured_at"]), row["measured_at"])
    places = {key: x for x, key in enumerate(sorted(first_seen, key=lambda key: first_seen[key]))}
    with styled():
        # A legend line per case above the axes, in inches: the labels are long.
        width, legend = max(5.5, 1.2 + 0.9 * len(places)), 0.17 * len(measured) + 0.1
        height = 2.9 + legend
        figure = new_figure(width, height)
        axes = figure.add_axes((0.8 / width, 0.65 / height, 1 - 1.0 / width, 1 - (0.75 + legend) / height))
        for marker, colour, rows in zip(MARKERS, COLOURS, measured, strict=False):
            x = [places[_label(row)] for row in rows]
            times = [row["time_ms"] for row in rows]
            low = [max(0.0, t - _or(row["time_ci_low_ms"], t)) for t, row in zip(times, rows, strict=True)]
            high = [max(0.0, _or(row["time_ci_high_ms"], t) - t) for t, row in zip(times, rows, strict=True)]
            label = f"{describe(rows[0])}, {device_of(rows[0])}"
            style: dict[str, Any] = {
                "marker": marker,
                "color": colour,
                "markersize": 4.5,
                "capsize": 2,
                "linewidth": 1.2,
            }
            axes.errorbar(x, times, yerr=(low, high), label=label, **style)
        axes.set_xticks(list(places.values()), [f"{commit}\n{run}" for commit, run in places])
        axes.set_xlabel("commit and run, oldest first")
        axes.set_ylabel("time (ms)")
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        figure.legend(loc="upper left", bbox_to_anchor=(0.01, 1.0), frameon=False, fontsize=7.5, labelspacing=0.35)
    spans = (f"{describe(rows[0])} from {rows[0]['time_ms']:.4g} to {rows[-1]['time_ms']:.4g} ms" for rows in measured)
    set_alt_text(figure, f"Time over {len(places)} runs, oldest first: {'; '.join(spans)}.")
    return figure


def _label(row: Row) -> tuple[str, str]:
    return (row["git_commit"] or "unknown")[:7], row["run_id"][:8]


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None or not math.isfinite(value) else value
