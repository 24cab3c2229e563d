"""Figures from results: runtime and memory over sequence length, chunk size and head dim. Rooflines: :mod:`.roofline`.

Every function takes a frame of result rows and returns what a figure of them shows: rows are selected, a panel is made
of each mode, and a note names the cases that were not measured; none is dropped silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...results.select import best_rows, is_ok, ok_rows, short_size
from ..derive import gradient_twice
from .findings import beside_others, best_chunk, in_lines, main_lines
from .layout import Drawing, Panel, measured_line
from .selection import (
    MODE_TITLES,
    Chosen,
    Selection,
    at_best_chunk,
    busy_note,
    choose,
    describe,
    failure_note,
    lowered_runs,
    modes_of,
    suspect_notes,
    unmeasured,
)
from .style import axis_prefix, series_label, series_style, sizes_in_words

if TYPE_CHECKING:
    import pandas as pd

LABELS = {
    "seq_len": "sequence length T (tokens)", "chunk_size": "chunk size L (tokens)", "context": "context (tokens)",
    "head_dim_v": "value head dim (elements)", "embedding_dim": "channels",
}  # fmt: skip
EVERY = {
    "seq_len": "sequence length", "head_dim_v": "head dim", "embedding_dim": "number of channels", "context": "context",
}  # fmt: skip
"""What a finding calls the axis: at every ..."""

INCLUDED = "memory includes inputs"
LOADED = "after 5 to 7 s of calls without a pause"


class Measure(NamedTuple):
    """What an axis shows: its values from rows, its label, and its name in a panel's title."""

    of: Callable[[pd.DataFrame], pd.Series]
    label: str
    name: str


TIME = Measure(lambda rows: rows["time_ms"], "time per call (ms)", "runtime")
TIME_PER_TOKEN = Measure(lambda rows: 1e6 * rows["time_ms"] / rows["tokens"], "time per token (ns)", "runtime")


def _time(chosen: Chosen) -> Measure:
    """Return time: per token where tokens have no order, whose times all grow as they do."""
    return TIME_PER_TOKEN if chosen.without_order else TIME


def _memory(rows: pd.DataFrame) -> Measure:
    """Return peak memory in the unit that suits ``rows``."""
    unit, size = ("GiB", 2**30) if rows["peak_memory_bytes"].max() >= 2**30 / 10 else ("MiB", 2**20)
    return Measure(lambda each: each["peak_memory_bytes"] / size, f"peak memory ({unit})", "memory")


def _prefixed(rows: pd.DataFrame, flops: Callable[[pd.DataFrame], pd.Series], unit: str, name: str) -> Measure:
    """Return FLOPs or FLOP/s with the prefix that suits ``rows``."""
    factor, prefix = axis_prefix(float(flops(rows).max()))
    return Measure(lambda each: flops(each) / factor, f"{prefix}{unit}", name)


def _panel(rows: pd.DataFrame, mode: str, x: str, y: Measure, title: str) -> Panel:
    """Return one mode's panel: a line per (operation, implementation) over the size ``x``; suspect rows are ringed."""
    shown = rows[rows["mode"] == mode].sort_values(x)
    alone = rows["op"].nunique() == 1
    lines = [
        measured_line(line, x, y.of(line), series_style(str(op), str(impl), alone=alone))
        for (op, impl), line in shown.groupby(["op", "impl"], sort=True)
    ]
    label = "tokens" if x == "seq_len" and rows["d_model"].notna().all() else LABELS[x]
    return Panel(title=title, lines=lines, x_label=label, y_label=y.label, sizes=sorted(map(float, set(rows[x]))))


def _drawing(
    chosen: Chosen,
    quantities: Callable[[pd.DataFrame], Sequence[Measure]],
    title: str,
    *setting: str,
    needs: str | None = None,
    row_per_mode: bool = False,
) -> Drawing:
    """Return a figure of quantities: a column of panels for each mode, or a row.

    Args:
        needs: the column without which a row is no point.
    """
    x = chosen.over
    chosen, lone = (chosen, "") if x == "chunk_size" else _without_lone_chunks(chosen)
    rows = best_rows(chosen.rows, ("op", "impl", "mode", x))
    twice = rows[gradient_twice(rows)] if needs == "peak_memory_bytes" else rows[:0]
    if needs:
        rows = rows[rows[needs].notna() & ~rows.index.isin(twice.index)]
    if rows.empty:
        lacking = "rows with measured memory" if needs == "peak_memory_bytes" else "counted rows"
        raise ValueError(f"results must hold {lacking} for this figure, got none")
    over = "number of tokens" if x == "seq_len" and chosen.without_order else EVERY.get(x, "")
    every = rows
    chosen, rows, first, hidden = main_lines(chosen, rows, x)
    # Over the context only attention's cache grows, so a state is compared with attention alone.
    held = rows[in_lines(rows, [first]) | rows["op"].eq("attention")] if x == "context" else rows
    column = "time_ms" if x == "context" else needs or "time_ms"
    known = held
    if x != "context":
        # Of the same operation, a line that only --all draws may be the best.
        undrawn = every[~every.index.isin(rows.index) & (every["op"] != first[0])]
        known = chosen.known[~in_lines(chosen.known, zip(undrawn["op"], undrawn["impl"], strict=True))]
        known = known[~gradient_twice(known)] if needs == "peak_memory_bytes" else known
    finding = best_chunk(rows, first) if x == "chunk_size" else beside_others(held, first, x, over, column, known)
    modes, shown = modes_of(rows), quantities(rows)
    if row_per_mode or (len(modes) == 1 < len(shown)):
        grid = [[_panel(rows, m, x, q, f"{MODE_TITLES[m]}: {q.name}") for q in shown] for m in modes]
    else:
        grid = [[_panel(rows, m, x, q, MODE_TITLES[m]) for m in modes] for q in shown]
    left_out = twice[twice.index.isin(chosen.rows.index)]
    names = ", ".join(sorted({series_label(*each) for each in zip(left_out["op"], left_out["impl"], strict=True)}))
    counted = f"Memory not shown, since a gradient was counted twice: {names}." if names else ""
    note = " ".join(filter(None, [*_notes(chosen, rows, timed=needs != "peak_memory_bytes"), lone, counted, hidden]))
    words = describe(chosen, *setting)
    return Drawing(grid=grid, title=title, finding=finding, setting=words, note=note, rows=rows, every=every, x=x)


def _without_lone_chunks(chosen: Chosen) -> tuple[Chosen, str]:
    """Leave out points at which one chunk size was measured, of lines with several at two points, and say which."""
    rows, line = ok_rows(chosen.rows), ["op", "impl", "mode"]
    sizes = rows.groupby([*line, chosen.over])["chunk_size"].transform("nunique")
    several = rows[chosen.over].where(sizes > 1).groupby([rows[name] for name in line]).transform("nunique")
    lone = rows[(sizes == 1) & (several > 1)]
    places = lone.groupby(["op", "impl"])[chosen.over]
    names = [f"{series_label(*key)} at {sizes_in_words(lengths)}" for key, lengths in places]
    said = f"Left out, since one chunk size was measured: {', '.join(names)}." if names else ""
    return dataclasses.replace(chosen, rows=chosen.rows.drop(index=lone.index)), said


def _notes(chosen: Chosen, shown: pd.DataFrame, *, timed: bool) -> list[str]:
    """Return what stands under a figure: why points are ringed or hollow, and what was not measured.

    Args:
        timed: whether times are shown, which clocks change.
    """
    doubts = suspect_notes(shown)
    if timed and (runs := lowered_runs(shown)):
        doubts.append(
            f"Times of {runs} runs, most with lowered clocks: what a kernel takes then depends on what ran before it. "
            "Within a run they compare."
        )
    return [*doubts, busy_note(shown), failure_note(unmeasured(chosen))]


def runtime_over_length(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime of one call over sequence length, every implementation at its best chunk size (TFLA paper, figure 5)."""
    chosen = choose(frame, selection)
    title = f"Runtime over {chosen.axis}"
    return _drawing(chosen, lambda _: [_time(chosen)], title, at_best_chunk(chosen), "median")


def memory_over_length(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Peak memory of one call over sequence length, inputs included, every implementation at its fastest chunk size."""
    chosen = choose(frame, selection)
    title, setting = f"Memory over {chosen.axis}", (at_best_chunk(chosen, "fastest"), INCLUDED)
    return _drawing(chosen, lambda rows: [_memory(rows)], title, *setting, needs="peak_memory_bytes")


def throughput_over_length(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Tokens a second over sequence length, of each length's largest batch (Lightning Attention-2, figure 1)."""
    chosen = choose(frame, selection, batches=True)

    def rate(rows: pd.DataFrame) -> list[Measure]:
        factor, prefix = (1e6, "million ") if (rows["tokens"] / rows["time_ms"]).max() > 1e4 else (1e3, "thousand ")
        of = lambda each: 1e3 * each["tokens"] / each["time_ms"] / factor  # noqa: E731
        return [Measure(of, f"throughput ({prefix}tokens/s)", "throughput")]

    return _drawing(chosen, rate, f"Throughput over {chosen.axis}", at_best_chunk(chosen), "median")


def runtime_and_memory(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime and, under it, peak memory over sequence length, at each one's fastest chunk size (TFLA, 15 and 16)."""
    chosen = choose(frame, selection)
    title, setting = f"Runtime and memory over {chosen.axis}", (at_best_chunk(chosen, "fastest"), "median", INCLUDED)
    return _drawing(chosen, lambda rows: [_time(chosen), _memory(rows)], title, *setting, needs="peak_memory_bytes")


def decoding_over_context(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Time and memory of a decoding step over the tokens in attention's cache; a state's are the same at each."""
    import pandas as pd

    steps = frame[frame["mode"] == "step"]
    chosen = None if steps.empty else choose(steps, selection, "context")
    if chosen is None or ok_rows(chosen.rows)["context"].isna().all():
        raise ValueError("results must hold decoding steps of attention, which have a context, got none")
    states = chosen.rows[chosen.rows["context"].isna()]
    everywhere = [states.assign(context=context) for context in sorted(set(chosen.rows["context"].dropna()))]
    rows = pd.concat([chosen.rows[chosen.rows["context"].notna()], *everywhere], ignore_index=True)
    chosen = dataclasses.replace(chosen, rows=rows)
    each = Measure(lambda rows: 1e3 * rows["time_ms"] / rows["tokens"], "time per token (\N{MICRO SIGN}s)", "runtime")
    title, setting = "Decoding over context", ("median", INCLUDED)
    return _drawing(chosen, lambda rows: [each, _memory(rows)], title, *setting, needs="peak_memory_bytes")


def _loaded(frame: pd.DataFrame, selection: Selection, title: str, needs: str, *shown: Measure) -> Drawing:
    """Return a figure over sequence length of what only rows of sustained sweeps have; their failed cases are named."""
    if (loaded := frame[needs].notna()).sum() == 0:
        raise ValueError(f"results must hold rows of lrbench sweep --sustained with {needs} for this figure, got none")
    chosen = choose(frame[loaded | (~is_ok(frame) & frame["run_id"].isin(frame["run_id"][loaded]))], selection)
    setting = at_best_chunk(chosen, "fastest"), LOADED
    return _drawing(chosen, lambda _: shown, f"{title} over {chosen.axis}", *setting, needs=needs)


def sustained_over_length(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Time of one call once clocks and power have settled, and that over the usual (burst) time."""
    time = Measure(lambda rows: rows["sustained_ms"], "sustained time per call (ms)", "sustained time")
    ratio = Measure(lambda rows: rows["sustained_ms"] / rows["time_ms"], "sustained time (x burst)", "over burst time")
    return _loaded(frame, selection, "Sustained time", "sustained_ms", time, ratio)


def energy_over_length(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Energy for a token, as the GPU draws it and without what it draws idle."""
    micro = "(\N{MICRO SIGN}J)"
    every = Measure(lambda rows: 1e6 * rows["energy_j"] / rows["tokens"], f"energy per token {micro}", "energy")
    net = Measure(lambda rows: 1e6 * rows["net_energy_j"] / rows["tokens"], f"without idle power {micro}", "net energy")
    return _loaded(frame, selection, "Energy", "energy_j", every, net)


def runtime_over_chunk_size(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime of one call over chunk size, implementations with a chunk axis."""
    chosen = choose(frame, selection, "chunk_size")
    return _drawing(chosen, lambda _: [TIME], "Runtime over chunk size", "median")


def memory_against_runtime(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime against peak memory, one point per chunk size: the trade-off the chunk size makes (TFLA, figure 6)."""
    chosen = choose(frame, selection, "chunk_size")
    title, setting = "Runtime against memory, over chunk size", ("median time", INCLUDED)
    both = _drawing(chosen, lambda rows: [TIME, _memory(rows)], title, *setting, needs="peak_memory_bytes")
    panels = [panel for row in both.grid for panel in row]
    half, grid = len(panels) // 2, []
    for times, peaks in zip(panels[:half], panels[half:], strict=True):
        lines = []
        named = max(times.lines, key=lambda line: (line.style.bold, len(line.x) > 2, -min(line.y)))
        for time, peak in zip(times.lines, peaks.lines, strict=True):
            ends = (f"L = {short_size(time.x[0])}", f"L = {short_size(time.x[-1])}") if time is named else None
            lines.append(dataclasses.replace(time, x=peak.y, ends=ends))
        mode, x_label = times.title.partition(":")[0], peaks.y_label
        grid.append(dataclasses.replace(times, title=mode, lines=lines, x_label=x_label, sizes=None, leaders=False))
    return dataclasses.replace(both, grid=[grid])


def runtime_over_width(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """Runtime of one call over value head dim at constant embedding dim, or over channels, each at its best chunk size.

    Implementations with one width only are left out. TFLA paper, figure 17.
    """
    chosen = choose(frame, selection, "width")
    several = chosen.rows.groupby(["op", "impl"])[chosen.over].transform("nunique") > 1
    chosen = dataclasses.replace(chosen, rows=chosen.rows[several])
    if ok_rows(chosen.rows).empty:
        lacking = "more than one head dim, or number of channels, of an implementation"
        raise ValueError(f"results must hold {lacking} for this figure, got none")
    title = "Runtime over head dim" if chosen.over == "head_dim_v" else "Runtime over channels"
    return _drawing(chosen, lambda _: [TIME], title, at_best_chunk(chosen), "median")


def rate_flops_and_runtime(frame: pd.DataFrame, selection: Selection) -> Drawing:
    """FLOP/s, FLOPs and runtime over chunk size together: the highest rate need not be the shortest time (TFLA, 23)."""

    def quantities(rows: pd.DataFrame) -> list[Measure]:
        rate = _prefixed(rows, lambda each: each["tflops"] * 1e12, "FLOP/s", "rate")
        work = _prefixed(rows, lambda each: each["flops"], "FLOP per call", "work")
        return [rate, work, TIME._replace(name="time")]

    chosen = choose(frame, selection, "chunk_size")
    title, setting = "FLOP/s, FLOPs and runtime over chunk size", ("counted FLOPs", "median")
    return _drawing(chosen, quantities, title, *setting, needs="flops", row_per_mode=True)
