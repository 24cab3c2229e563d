"""The figure of `lrbench history`: the times of cases over the runs that measured them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...results.select import Row, describe, device_of, with_slowness
from .style import CURVES, MUTED, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X"
MAX_CASES = len(MARKERS)
HOLLOW: dict[str, Any] = {"markersize": 4.5, "markerfacecolor": "white"}


def history_figure(histories: Sequence[Sequence[Row]]) -> Figure:
    """Draw the times of cases over the runs that measured them, with their 95 % intervals; noisy ones are hollow.

    ValueError for more than :data:`MAX_CASES` cases, or none that was measured.
    """
    timed = ([row for row in rows if row["time_ms"] is not None] for rows in with_slowness(*histories))
    measured = [rows for rows in timed if rows]
    if not 0 < len(measured) <= MAX_CASES:
        raise ValueError(f"a figure must show 1 to {MAX_CASES} measured cases, got {len(measured)}: select fewer")
    # Runs stand side by side in the order of time: commits have no distances.
    oldest_first = sorted((row for rows in measured for row in rows), key=lambda row: row["measured_at"])
    places = {run: x for x, run in enumerate(dict.fromkeys(map(_run, oldest_first)))}
    with styled():
        figure = new_figure(max(5.5, 1.2 + 0.9 * len(places)), 2.9 + 0.17 * len(measured))
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        for marker, colour, rows in zip(MARKERS, CURVES, measured, strict=False):
            times = [row["time_ms"] for row in rows]
            ends = [[_distance(row, name) for row in rows] for name in ("time_ci_low_ms", "time_ci_high_ms")]
            label = f"{describe(rows[0])}, {device_of(rows[0])}"
            axes.errorbar(
                [places[_run(row)] for row in rows], times, yerr=ends, label=label,
                marker=marker, color=colour, markersize=4.5, capsize=2, linewidth=1.2,
            )  # fmt: skip
            noisy = [row for row in rows if row["noise"]]
            at, times = [places[_run(row)] for row in noisy], [row["time_ms"] for row in noisy]
            axes.plot(at, times, marker, color=colour, zorder=3, **HOLLOW)
        if any(row["noise"] for rows in measured for row in rows):
            axes.plot([], [], "o", color=MUTED, label="hollow: measured on a busy machine", **HOLLOW)
        axes.set_xticks(list(places.values()), [f"{commit}\n{run}" for commit, run in places])
        axes.set(xlabel="commit and run, oldest first", ylabel="time (ms)", xlim=(-0.5, len(places) - 0.5))
        axes.set_ylim(bottom=0)
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside upper left", fontsize=7.5, labelspacing=0.35)
    spans = (f"{describe(rows[0])} from {rows[0]['time_ms']:.4g} to {rows[-1]['time_ms']:.4g} ms" for rows in measured)
    figure.set_label(f"Time over {len(places)} runs, oldest first: {'; '.join(spans)}.")
    return figure


def _run(row: Row) -> tuple[str, str]:
    return (row["git_commit"] or "unknown")[:7], row["run_id"][:8]


def _distance(row: Row, end: str) -> float:
    """Return how far an end of a time's interval is from the time; 0 where it is not known."""
    return 0.0 if row[end] is None or not math.isfinite(row[end]) else abs(row[end] - row["time_ms"])
