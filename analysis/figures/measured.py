"""Figures from results: runtime and memory over sequence length, chunk size and head dim. Rooflines: :mod:`.roofline`.

Every function takes a frame of result rows and returns what a figure of them shows: rows are selected, a panel is made
of each mode, and a note names the cases that were not measured; none is dropped silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...results.select import best_rows, ok_rows
from .layout import Drawing, Panel, measured_line
from .selection import (
    MODE_TITLES,
    Chosen,
    Selection,
    at_best_chunk,
    choose,
    choose_over_width,
    describe,
    failure_note,
    lowered_runs,
    other_head_dims,
    unmeasured,
)
from .style import axis_prefix, binary, series_style

if TYPE_CHECKING:
    import pandas as pd

LABELS = {
    "seq_len": "sequence length T (tokens)",
    "chunk_size": "chunk size L (tokens)",
    "head_dim_v": "value head dim (elements)",
    "embedding_dim": "channels",
}
INCLUDED = "memory includes inputs"


class Quantity(NamedTuple):
    """What an axis shows: its values from rows, its label, and its name in a panel's title."""

    of: Callable[[pd.DataFrame], pd.Series]
    label: str
    name: str


TIME = Quantity(lambda rows: rows["time_ms"], "time per call (ms)", "runtime")
TIME_PER_TOKEN = Quantity(lambda rows: 1e6 * rows["time_ms"] / rows["tokens"], "time per token (ns)", "runtime")


def _time(chosen: Chosen) -> Quantity:
    """Return time: per token where tokens have no order, whose times all grow as they do."""
    return TIME_PER_TOKEN if chosen.without_order else TIME


def _memory(rows: pd.DataFrame) -> Quantity:
    """Return peak memory in the unit that suits ``rows``."""
    unit, size = ("GiB", 2**30) if rows["peak_memory_bytes"].max() >= 2**30 / 10 else ("MiB", 2**20)
    return Quantity(lambda each: each["peak_memory_bytes"] / size, f"peak memory ({unit})", "memory")


def _prefixed(rows: pd.DataFrame, flops: Callable[[pd.DataFrame], pd.Series], unit: str, name: str) -> Quantity:
    """Return FLOPs or FLOP/s with the prefix that suits ``rows``."""
    factor, prefix = axis_prefix(float(flops(rows).max()))
    return Quantity(lambda each: flops(each) / factor, f"{prefix}{unit}", name)


def modes_of(rows: pd.DataFrame) -> list[str]:
    """Return the modes that ``rows`` have, in the order of the panels."""
    return [mode for mode in MODE_TITLES if mode in set(rows["mode"])]


def _panel(rows: pd.DataFrame, mode: str, x: str, y: Quantity, title: str) -> Panel:
    """Return one mode's panel: a line per (operation, implementation) over the size ``x``; suspect rows are ringed."""
    shown = rows[rows["mode"] == mode].sort_values(x)
    lines = [
        measured_line(line, x, y.of(line), series_style(str(op), str(impl)))
        for (op, impl), line in shown.groupby(["op", "impl"], sort=True)
    ]
    label = "tokens" if x == "seq_len" and rows["d_model"].notna().all() else LABELS[x]
    return Panel(title=title, lines=lines, x_label=label, y_label=y.label, sizes=sorted(map(float, set(rows[x]))))


def _drawing(
    chosen: Chosen,
    x: str,
    rows: pd.DataFrame,
    quantities: Sequence[Quantity],
    title: str,
    *setting: str,
    row_per_mode: bool = False,
) -> Drawing:
    """Return a figure of quantities over ``x``: a column of panels for each mode, or a row."""
    modes = modes_of(rows)
    if row_per_mode or (len(modes) == 1 < len(quantities)):
        grid = [[_panel(rows, m, x, q, f"{MODE_TITLES[m]}: {q.name}") for q in quantities] for m in modes]
    else:
        grid = [[_panel(rows, m, x, q, MODE_TITLES[m]) for m in modes] for q in quantities]
    words, note = describe(chosen, *setting), _notes(chosen, x, rows)
    return Drawing(grid=grid, title=title, setting=words, note=note, rows=rows, x=x)


def _notes(chosen: Chosen, x: str, shown: pd.DataFrame) -> str:
    """Return what stands under a figure: other head dims, why points are ringed, and what was not measured."""
    doubts = [
        f"Ringed, suspect: {row.impl} {row.mode}: {row.suspect}."
        for row in shown.loc[shown["suspect"].notna(), ["impl", "mode", "suspect"]].itertuples()
    ]
    if runs := lowered_runs(shown):
        doubts.append(
            f"Times of {runs} runs, most with lowered clocks: what a kernel takes then depends on what ran before it. "
            "Within a run they compare."
        )
    return " ".join([other_head_dims(chosen), *doubts, failure_note(unmeasured(chosen, x))]).strip()


def _best(chosen: Chosen, x: str, needs: str | None = None) -> pd.DataFrame:
    """Keep the fastest row per implementation, mode and x; ValueError where none has the column that a figure needs."""
    rows = best_rows(chosen.rows, ("op", "impl", "mode", x))
    if needs is None:
        return rows
    rows = rows[rows[needs].notna()]
    if rows.empty:
        lacking = {"peak_memory_bytes": "rows with measured memory", "flops": "counted rows"}[needs]
        raise ValueError(f"results must hold {lacking} for this figure, got none")
    return rows


def _chunked(frame: pd.DataFrame, selection: Selection) -> Chosen:
    """Choose rows at one sequence length of implementations with a chunk axis."""
    chosen = choose(frame, selection, seq_len=True)
    rows = chosen.rows[chosen.rows["chunk_size"].notna()]
    if ok_rows(rows).empty:
        raise ValueError("results must hold measured rows with a chunk size for this figure, got none")
    return dataclasses.replace(chosen, rows=rows)


def _over(chosen: Chosen) -> str:
    return "tokens" if chosen.without_order else "sequence length"


def runtime_over_length(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime of one call over sequence length at constant tokens, every implementation at its best chunk size.

    TFLA paper, figure 5.
    """
    chosen = choose(frame, selection)
    rows, title = _best(chosen, "seq_len"), f"Runtime over {_over(chosen)}"
    return _drawing(chosen, "seq_len", rows, [_time(chosen)], title, at_best_chunk(chosen), "median")


def memory_over_length(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Peak memory of one call over sequence length, inputs included, every implementation at its fastest chunk size."""
    chosen = choose(frame, selection)
    rows, title = _best(chosen, "seq_len", needs="peak_memory_bytes"), f"Memory over {_over(chosen)}"
    return _drawing(chosen, "seq_len", rows, [_memory(rows)], title, at_best_chunk(chosen, "fastest"), INCLUDED)


def runtime_and_memory(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime and, under it, peak memory over sequence length, at each one's fastest chunk size (TFLA, 15 and 16)."""
    chosen = choose(frame, selection)
    rows, title = _best(chosen, "seq_len", needs="peak_memory_bytes"), f"Runtime and memory over {_over(chosen)}"
    setting = (at_best_chunk(chosen, "fastest"), "median time", INCLUDED)
    return _drawing(chosen, "seq_len", rows, [_time(chosen), _memory(rows)], title, *setting)


def runtime_over_chunk_size(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime of one call over chunk size, implementations with a chunk axis."""
    chosen = _chunked(frame, selection)
    rows = _best(chosen, "chunk_size")
    return _drawing(chosen, "chunk_size", rows, [TIME], "Runtime over chunk size", "median")


def memory_against_runtime(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime against peak memory, one point per chunk size: the trade-off the chunk size makes (TFLA, figure 6)."""
    chosen = _chunked(frame, selection)
    rows = _best(chosen, "chunk_size", needs="peak_memory_bytes")
    memory = _memory(rows)
    panels = []
    for mode in modes_of(rows):
        times, peaks = (_panel(rows, mode, "chunk_size", each, MODE_TITLES[mode]) for each in (TIME, memory))
        lines = []
        for time, peak in zip(times.lines, peaks.lines, strict=True):
            named = time.style.bold and len(time.x) > 2
            ends = (f"L = {binary(time.x[0])}", f"L = {binary(time.x[-1])}") if named else None
            lines.append(dataclasses.replace(time, x=peak.y, ends=ends))
        panels.append(dataclasses.replace(times, lines=lines, x_label=memory.label, sizes=None, leaders=False))
    drawing = _drawing(
        chosen, "chunk_size", rows, [TIME], "Runtime against memory, over chunk size", "median time", INCLUDED
    )
    return dataclasses.replace(drawing, grid=[panels])


def runtime_over_width(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime of one call over value head dim at constant embedding dim, or over channels, each at its best chunk size.

    Implementations with one width only are left out. TFLA paper, figure 17.
    """
    chosen, x = choose_over_width(frame, selection)
    title = "Runtime over head dim" if x == "head_dim_v" else "Runtime over channels"
    return _drawing(chosen, x, _best(chosen, x), [TIME], title, at_best_chunk(chosen), "median")


def rate_flops_and_runtime(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """FLOP/s, FLOPs and runtime over chunk size together: the highest rate need not be the shortest time (TFLA, 23)."""
    chosen = _chunked(frame, selection)
    rows = _best(chosen, "chunk_size", needs="flops")
    quantities = (
        _prefixed(rows, lambda each: each["tflops"] * 1e12, "FLOP/s", "rate"),
        _prefixed(rows, lambda each: each["flops"], "FLOP per call", "work"),
        TIME._replace(name="time"),
    )
    title, setting = "FLOP/s, FLOPs and runtime over chunk size", ("counted FLOPs", "median")
    return _drawing(chosen, "chunk_size", rows, quantities, title, *setting, row_per_mode=True)
