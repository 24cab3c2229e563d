"""Figures from results: runtime and memory over sequence length, chunk size and head dim. Rooflines: :mod:`.roofline`.

Every function takes a frame of result rows (:func:`.frames.load_results`) and returns what a figure of them shows.
Cases that were not measured are named under the figure, never dropped silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...results.select import best_rows, ok_rows
from .layout import Drawing, Line, Panel, Words
from .selection import (
    MODE_TITLES,
    Chosen,
    Selection,
    at_best_chunk,
    choose,
    choose_over_width,
    describe,
    failure_note,
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
TOKENS = "tokens"
"""What stands for the sequence length of operations that mix nothing along it."""
TIME = "time per call (ms)"
TIME_PER_TOKEN = "time per token (ns)"
INCLUDED = "memory includes inputs"

Quantity = Callable[["pd.DataFrame"], "pd.Series"]
"""What an axis shows, from rows."""


def _time_ms(rows: pd.DataFrame) -> pd.Series:
    return rows["time_ms"]


def _time(chosen: Chosen) -> tuple[Quantity, str]:
    """Return time and its label: per token where tokens have no order, whose times all grow as they do."""
    if chosen.without_order:
        return lambda each: 1e6 * each["time_ms"] / each["tokens"], TIME_PER_TOKEN
    return _time_ms, TIME


def _memory(rows: pd.DataFrame) -> tuple[Quantity, str]:
    """Return peak memory as a quantity and its label, in the unit that suits ``rows``."""
    unit, size = ("GiB", 2**30) if rows["peak_memory_bytes"].max() >= 2**30 / 10 else ("MiB", 2**20)
    return lambda each: each["peak_memory_bytes"] / size, f"peak memory ({unit})"


def _prefixed(rows: pd.DataFrame, flops: Quantity, unit: str) -> tuple[Quantity, str]:
    """Return FLOPs or FLOP/s as a quantity and its label, with the prefix that suits ``rows``."""
    factor, prefix = axis_prefix(float(flops(rows).max()))
    return lambda each: flops(each) / factor, f"{prefix}{unit}"


def panel(
    rows: pd.DataFrame,
    mode: str,
    x: str,
    y: Quantity,
    y_label: str,
    *,
    title: str | None = None,
) -> Panel:
    """Return one mode's panel: a line per (operation, implementation) over the size ``x``; suspect rows are ringed."""
    shown = rows[rows["mode"] == mode]
    lines = []
    for (op, impl), line in shown.groupby(["op", "impl"], sort=True):
        line = line.sort_values(x)
        lines.append(
            Line(
                x=line[x].tolist(),
                y=y(line).tolist(),
                style=series_style(str(op), str(impl)),
                ringed=line["suspect"].notna().to_numpy().nonzero()[0].tolist(),
            )
        )
    return Panel(
        title=MODE_TITLES[mode] if title is None else title,
        lines=lines,
        x_label=TOKENS if x == "seq_len" and rows["d_model"].notna().all() else LABELS[x],
        y_label=y_label,
        sizes=sorted(float(value) for value in set(rows[x])),
    )


def modes_of(rows: pd.DataFrame) -> list[str]:
    """Return the modes that ``rows`` have, in the order of the panels."""
    return [mode for mode in MODE_TITLES if mode in set(rows["mode"])]


def notes(chosen: Chosen, x: str, shown: pd.DataFrame) -> str:
    """Return what stands under a figure: other head dims, why points are ringed, and what was not measured."""
    doubts = [
        f"Ringed, suspect: {row.impl} {row.mode}: {row.suspect}."
        for row in shown.loc[shown["suspect"].notna(), ["impl", "mode", "suspect"]].itertuples()
    ]
    lowered = shown[shown["throttled"].notna()]
    runs = shown["run_id"].nunique()
    if len(lowered) > len(shown) / 2 and runs > 1:
        doubts.append(
            f"Times of {runs} runs, most with lowered clocks: what a kernel takes then depends on what ran before it. "
            "Within a run they compare."
        )
    return " ".join([other_head_dims(chosen), *doubts, failure_note(unmeasured(chosen, x))]).strip()


def _length(chosen: Chosen) -> str:
    return "tokens" if chosen.without_order else "sequence length"


def _best(rows: pd.DataFrame, x: str) -> pd.DataFrame:
    """Keep the fastest row per implementation, mode and x."""
    return best_rows(rows, ("op", "impl", "mode", x))


def _chunked(frame: pd.DataFrame, selection: Selection) -> Chosen:
    """Choose rows at one sequence length of implementations with a chunk axis."""
    chosen = choose(frame, selection, seq_len=True)
    rows = chosen.rows[chosen.rows["chunk_size"].notna()]
    if ok_rows(rows).empty:
        raise ValueError("results must hold measured rows with a chunk size for this figure, got none")
    return dataclasses.replace(chosen, rows=rows)


def runtime_over_length(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime of one call over sequence length at constant tokens, every implementation at its best chunk size.

    TFLA paper, figure 5.
    """
    chosen = choose(frame, selection)
    rows = _best(chosen.rows, "seq_len")
    words = Words(
        title=f"Runtime over {_length(chosen)}",
        setting=describe(chosen, at_best_chunk(chosen), "median"),
        note=notes(chosen, "seq_len", rows),
    )
    y, label = _time(chosen)
    return Drawing(grid=[[panel(rows, mode, "seq_len", y, label) for mode in modes_of(rows)]], words=words)


def memory_over_length(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Peak memory of one call over sequence length, inputs included, every implementation at its fastest chunk size."""
    chosen = choose(frame, selection)
    rows = _with_memory(_best(chosen.rows, "seq_len"))
    words = Words(
        title=f"Memory over {_length(chosen)}",
        setting=describe(chosen, at_best_chunk(chosen, "fastest"), INCLUDED),
        note=notes(chosen, "seq_len", rows),
    )
    y, label = _memory(rows)
    return Drawing(grid=[[panel(rows, mode, "seq_len", y, label) for mode in modes_of(rows)]], words=words)


def runtime_and_memory(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime and, under it, peak memory over sequence length, at each one's fastest chunk size (TFLA, 15 and 16)."""
    chosen = choose(frame, selection)
    rows = _with_memory(_best(chosen.rows, "seq_len"))
    words = Words(
        title=f"Runtime and memory over {_length(chosen)}",
        setting=describe(chosen, at_best_chunk(chosen, "fastest"), "median time", INCLUDED),
        note=notes(chosen, "seq_len", rows),
    )
    modes = modes_of(rows)
    time, taken = _time(chosen)
    held, memory = _memory(rows)
    if len(modes) == 1:
        title = MODE_TITLES[modes[0]]
        pair = ((time, taken, f"{title}: runtime"), (held, memory, f"{title}: memory"))
        return Drawing(
            grid=[[panel(rows, modes[0], "seq_len", y, label, title=t) for y, label, t in pair]], words=words
        )
    grid = [[panel(rows, mode, "seq_len", y, label) for mode in modes] for y, label in ((time, taken), (held, memory))]
    return Drawing(grid=grid, words=words)


def _with_memory(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows[rows["peak_memory_bytes"].notna()]
    if rows.empty:
        raise ValueError("results must hold rows with measured memory for this figure, got none")
    return rows


def runtime_over_chunk_size(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime of one call over chunk size, implementations with a chunk axis."""
    chosen = _chunked(frame, selection)
    rows = _best(chosen.rows, "chunk_size")
    words = Words(
        title="Runtime over chunk size",
        setting=describe(chosen, "median"),
        note=notes(chosen, "chunk_size", rows),
    )
    return Drawing(grid=[[panel(rows, mode, "chunk_size", _time_ms, TIME) for mode in modes_of(rows)]], words=words)


def memory_against_runtime(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime against peak memory, one point per chunk size: the trade-off the chunk size makes (TFLA, figure 6)."""
    chosen = _chunked(frame, selection)
    rows = _with_memory(_best(chosen.rows, "chunk_size"))
    row_of_panels = []
    peak, label = _memory(rows)
    for mode in modes_of(rows):
        over_chunks = panel(rows, mode, "chunk_size", _time_ms, TIME)
        memory = panel(rows, mode, "chunk_size", peak, label)
        lines = []
        for time, held in zip(over_chunks.lines, memory.lines, strict=True):
            named = time.style.bold and len(time.x) > 2
            ends = (f"L = {binary(time.x[0])}", f"L = {binary(time.x[-1])}") if named else None
            lines.append(dataclasses.replace(time, x=held.y, ends=ends))
        row_of_panels.append(dataclasses.replace(over_chunks, lines=lines, x_label=label, sizes=None, leaders=False))
    words = Words(
        title="Runtime against memory, over chunk size",
        setting=describe(chosen, "median time", INCLUDED),
        note=notes(chosen, "chunk_size", rows),
    )
    return Drawing(grid=[row_of_panels], words=words)


def runtime_over_width(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime of one call over value head dim at constant embedding dim, or over channels, each at its best chunk size.

    Implementations with one width only are left out. TFLA paper, figure 17.
    """
    chosen, x = choose_over_width(frame, selection)
    best = _best(chosen.rows, x)
    words = Words(
        title="Runtime over head dim" if x == "head_dim_v" else "Runtime over channels",
        setting=describe(chosen, at_best_chunk(chosen), "median"),
        note=notes(chosen, x, best),
    )
    return Drawing(grid=[[panel(best, mode, x, _time_ms, TIME) for mode in modes_of(best)]], words=words)


def rate_flops_and_runtime(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """FLOP/s, FLOPs and runtime over chunk size together: the highest rate need not be the shortest time (TFLA, 23)."""
    chosen = _chunked(frame, selection)
    rows = _best(chosen.rows, "chunk_size")
    rows = rows[rows["flops"].notna()]
    if rows.empty:
        raise ValueError("results must hold counted rows for this figure, got none")
    quantities: tuple[tuple[Quantity, str, str], ...] = (
        (*_prefixed(rows, lambda each: each["tflops"] * 1e12, "FLOP/s"), "rate"),
        (*_prefixed(rows, lambda each: each["flops"], "FLOP per call"), "work"),
        (_time_ms, TIME, "time"),
    )
    grid = [
        [
            panel(rows, mode, "chunk_size", y, label, title=f"{MODE_TITLES[mode]}: {what}")
            for y, label, what in quantities
        ]
        for mode in modes_of(rows)
    ]
    words = Words(
        title="FLOP/s, FLOPs and runtime over chunk size",
        setting=describe(chosen, "counted FLOPs", "median"),
        note=notes(chosen, "chunk_size", rows),
    )
    return Drawing(grid=grid, words=words)
