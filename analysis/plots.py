"""Figures from results: runtime and memory over sequence length, chunk size and head dim. Rooflines: :mod:`.roofline`.

Every function takes a frame of result rows (:func:`.frames.load_results`) and returns a matplotlib figure. Cases that
were not measured are named under the figure, never dropped silently.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .figure_style import INK, MUTED, binary, log_axis, new_figure, series_label, series_style, size_axis, styled
from .frames import best_rows, failed_rows, latest_rows, ok_rows, single

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODE_TITLES: Mapping[str, str] = MappingProxyType(
    {"fw": "Forward", "fwbw": "Forward + backward", "bw": "Backward", "step": "Decoding step"}
)

REASON_LENGTH = 110
"""Characters of a failure's reason under a figure; the results hold all of it."""

PANEL_WIDTH, PANEL_HEIGHT, LEGEND_WIDTH, LEGEND_ROW = 3.5, 3.35, 2.35, 0.178
LEFT, TOP, BOTTOM = 0.62, 0.67, 0.5
"""Inches: a panel and the legend beside the panels; margins of the panels in the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows a figure shows; None leaves the choice to the figure, which says in its subtitle what it took.

    Attributes:
        device: the measured device's key (device_accelerator) or name; needed where results hold several.
        dtype: dtype of the inputs; None: the one with most rows.
        state_dtype: dtype of chunk states; None: fp32.
        tokens: batch x seq_len; None: the number with most rows.
        head_dim: value head dim of the family's own operations; None: the one with most rows. A baseline without a row
            at it (FlashAttention at its own 128) is shown at what it has.
        seq_len: of figures at one sequence length; None: 8192, the TFLA paper's, where every mode has it, else the
            longest that every mode has.
        modes, ops, impls: what to keep; None: all.
    """

    device: str | None = None
    dtype: str | None = None
    state_dtype: str | None = None
    tokens: int | None = None
    head_dim: int | None = None
    seq_len: int | None = None
    modes: tuple[str, ...] | None = None
    ops: tuple[str, ...] | None = None
    impls: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Rows after a selection, and what was chosen."""

    rows: pd.DataFrame
    dtype: str
    tokens: int | None
    head_dim: int | None
    seq_len: int | None


def choose(frame: pd.DataFrame, selection: Selection, *, head_dim: bool = True, seq_len: bool = False) -> Chosen:
    """Keep the rows that a figure shows.

    Args:
        head_dim: whether the figure shows one head dim.
        seq_len: whether it shows one sequence length.

    Raises:
        ValueError: nothing is left, or rows of several devices are and none is chosen.
    """
    rows = latest_rows(frame)
    by_key = selection.device is not None and selection.device in set(rows["device_accelerator"].dropna())
    rows = single(rows, "device_accelerator" if by_key else "device_name", selection.device, option="device")
    for column, wanted in (("mode", selection.modes), ("op", selection.ops), ("impl", selection.impls)):
        if wanted is not None:
            rows = rows[rows[column].isin(wanted)]
    measured = ok_rows(rows)
    if measured.empty:
        raise ValueError("results must hold measured rows for this figure, got none that match the selection")
    dtype = selection.dtype or _most_frequent(measured["dtype"])
    rows = rows[rows["dtype"] == dtype]
    rows = rows[rows["state_dtype"].isna() | (rows["state_dtype"] == (selection.state_dtype or "fp32"))]
    tokens = selection.tokens or _most_frequent(ok_rows(rows)["tokens"])
    if tokens is not None:
        rows = rows[rows["tokens"] == tokens]
    chosen_dim = selection.head_dim
    if head_dim:
        tunable = ok_rows(rows)
        tunable = tunable[tunable["chunk_size"].notna()]
        chosen_dim = chosen_dim or _most_frequent(tunable["head_dim_v"])
        if chosen_dim is not None:
            rows = rows[_at_head_dim(rows, chosen_dim)]
    length = selection.seq_len
    if seq_len:
        length = length or _common_length(ok_rows(rows))
        rows = rows[rows["seq_len"] == length]
    if ok_rows(rows).empty:
        raise ValueError("results must hold measured rows for this figure, got none that match the selection")
    return Chosen(rows=rows, dtype=dtype, tokens=_int(tokens), head_dim=_int(chosen_dim), seq_len=_int(length))


def _at_head_dim(rows: pd.DataFrame, head_dim: int) -> pd.Series:
    """Return a mask: rows at ``head_dim``, and all rows of implementations that have none there."""
    at = rows["head_dim_v"] == head_dim
    has = at.groupby([rows["op"], rows["impl"]]).transform("any")
    return at | ~has


def _most_frequent(values: pd.Series) -> Any:
    """Return the most frequent value, the largest of equally frequent ones; None without values."""
    counts = values.dropna().value_counts()
    return None if counts.empty else max(counts[counts == counts.max()].index)


PAPER_SEQ_LEN = 8192


def _common_length(rows: pd.DataFrame) -> int:
    """Return the sequence length to show where one is shown, see :class:`Selection`."""
    sets = [set(group["seq_len"]) for _, group in rows.groupby("mode")]
    common = set.intersection(*sets) or set.union(*sets)
    return PAPER_SEQ_LEN if PAPER_SEQ_LEN in common else int(max(common))


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """A row of panels, one per mode, sharing a legend on the right, a title above and a note below.

    Attributes:
        x: the size column along which lines run; also the x axis, unless ``x_values`` is given.
        x_values: what is drawn along the x axis instead; the ends of our lines are then labelled with their size.
        y: what is drawn along the y axis.
    """

    x: str
    x_values: Callable[[pd.DataFrame], pd.Series] | None = None
    x_label: str
    y: Callable[[pd.DataFrame], pd.Series]
    y_label: str
    title: str
    setting: str


def panels(rows: pd.DataFrame, failures: pd.DataFrame, spec: Panels) -> Figure:
    """Draw one line per (operation, implementation) and one panel per mode.

    Args:
        rows: measured rows, one per implementation, mode and x.
        failures: rows to name under the figure.
    """
    modes = [mode for mode in MODE_TITLES if mode in set(rows["mode"])]
    with styled():
        width = PANEL_WIDTH * len(modes) + LEGEND_WIDTH
        figure = new_figure(width, figure_height(rows))
        axes_row = figure.subplots(1, len(modes), squeeze=False)[0]
        order: dict[tuple[str, str], float] = {}
        for axes, mode in zip(axes_row, modes, strict=True):
            shown = rows[rows["mode"] == mode]
            for (op, impl), line in shown.groupby(["op", "impl"], sort=True):
                line = line.sort_values(spec.x)
                values = spec.y(line)
                style = series_style(str(op), str(impl))
                ours = style.width > 1.5
                along = line[spec.x] if spec.x_values is None else spec.x_values(line)
                axes.plot(along, values, zorder=4 if ours else 3, clip_on=False, **style.line())
                if ours and spec.x_values is not None:
                    label_ends(axes, line[spec.x], along, values, style.colour)
                order[str(op), str(impl)] = float(values.iloc[-1])
            axes.set_title(MODE_TITLES[mode])
            axes.set_yscale("log")
            log_axis(axes.yaxis, float(spec.y(shown).min()), float(spec.y(shown).max()))
            if spec.x_values is None:
                axes.grid(False, axis="x")
                size_axis(axes, sorted(float(value) for value in set(rows[spec.x])), spec.x_label)
            else:
                axes.set_xscale("log")
                axes.margins(x=0.22)
                log_axis(axes.xaxis, float(spec.x_values(shown).min()), float(spec.x_values(shown).max()))
                axes.set_xlabel(spec.x_label)
        axes_row[0].set_ylabel(spec.y_label)
        add_legend(figure, axes_row[-1], sorted(order, key=order.__getitem__, reverse=True), width)
        add_headings(figure, spec.title, spec.setting, width)
        add_note(figure, failure_note(failures), width)
    return figure


def figure_height(rows: pd.DataFrame) -> float:
    """Return a figure's height in inches: enough for the legend of all implementations in ``rows``."""
    series = len(rows[["op", "impl"]].drop_duplicates())
    return max(PANEL_HEIGHT, TOP + BOTTOM + LEGEND_ROW * series)


def label_ends(axes: Axes, sizes: pd.Series, along: pd.Series, values: pd.Series, colour: str) -> None:
    """Write the chunk size beside the first and the last point of a line, away from the line."""
    from matplotlib.patheffects import withStroke

    forward = float(along.iloc[-1]) >= float(along.iloc[0])
    for end, outward in ((0, -1 if forward else 1), (-1, 1 if forward else -1)):
        if end and len(sizes) == 1:
            continue
        axes.annotate(
            f"L = {binary(float(sizes.iloc[end]))}",
            (along.iloc[end], values.iloc[end]),
            xytext=(6 * outward, 0),
            textcoords="offset points",
            ha="left" if outward > 0 else "right",
            va="center",
            fontsize=7,
            color=colour,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            zorder=6,
        )


def add_legend(figure: Figure, axes: Axes, series: Sequence[tuple[str, str]], width: float) -> None:
    """Put the legend right of the last panel, in the order in which the lines end there."""
    from matplotlib.lines import Line2D

    right = 1 - LEGEND_WIDTH / width
    height = float(figure.get_figheight())
    figure.subplots_adjust(left=LEFT / width, right=right, bottom=BOTTOM / height, top=1 - TOP / height, wspace=0.2)
    handles = []
    for op, impl in series:
        handles.append(Line2D([], [], **series_style(op, impl).line()))
    legend = axes.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(1.03, 0.5),
        borderaxespad=0,
        handlelength=2.6,
        labelspacing=0.55,
    )
    for text, (op, impl) in zip(legend.get_texts(), series, strict=True):
        text.set_color(INK)
        if series_style(op, impl).width > 1.5:
            text.set_fontweight("bold")


def add_headings(figure: Figure, title: str, setting: str, width: float) -> None:
    """Put a title and, under it, the setting above the panels."""
    left, height = LEFT / width, float(figure.get_figheight())
    lines = textwrap.wrap(setting, width=int(width * 15.5))
    above = 1 - (TOP - 0.285) / height
    figure.text(left, above, "\n".join(lines), fontsize=8.5, color=MUTED, va="bottom", linespacing=1.3)
    above += (0.067 + 0.17 * len(lines)) / height
    figure.text(left, above, title, fontsize=12, fontweight="bold", color=INK, va="bottom")


def add_note(figure: Figure, note: str, width: float) -> None:
    """Put a note under the panels, wrapped to the figure's width."""
    if note:
        lines = textwrap.wrap(note, width=int(width * 17))
        figure.text(LEFT / width, -0.01, "\n".join(lines), fontsize=7.5, color=MUTED, va="top", linespacing=1.35)


def failure_note(failures: pd.DataFrame) -> str:
    """Return one sentence on every case that was not measured, grouped by implementation, mode, status and reason."""
    if failures.empty:
        return ""
    absent = failures[failures["status"] == "unavailable"]
    parts = []
    rest = failures[failures["status"] != "unavailable"]
    keys = ["op", "impl", "status"]
    for (op, impl, status), group in rest.groupby(keys, sort=True):
        modes = [mode for mode in MODE_TITLES if mode in set(group["mode"])]
        lengths = sorted({int(value) for value in group["seq_len"].dropna()})
        where = f" at T = {_sizes(lengths)}" if lengths else ""
        reasons = sorted({str(reason) for reason in group["reason"].dropna()})
        first = textwrap.shorten(reasons[0], REASON_LENGTH, placeholder=" ...") if reasons else ""
        why = f" ({first}{'; and others' if len(reasons) > 1 else ''})" if reasons else ""
        parts.append(f"{series_label(str(op), str(impl))} {', '.join(modes)}{where}: {status}{why}")
    if not absent.empty:
        parts.append(f"Not installed: {', '.join(sorted(set(absent['impl'])))}")
    return f"Not shown. {'. '.join(parts)}."


def _sizes(values: Sequence[int]) -> str:
    if len(values) > 3:
        return f"{binary(values[0])} to {binary(values[-1])}"
    return ", ".join(binary(value) for value in values)


def describe(chosen: Chosen, *extra: str) -> str:
    """Return the setting that a figure holds constant: device, dtype, tokens, head dims."""
    rows = ok_rows(chosen.rows)
    device = " / ".join(sorted(set(rows["device_name"].dropna())))
    parts = [device, chosen.dtype]
    if chosen.seq_len is not None:
        parts.append(f"T = {chosen.seq_len:,}")
    if chosen.tokens is not None:
        parts.append(f"{chosen.tokens:,} tokens")
    widths = {int(value) for value in rows["embedding_dim"].dropna()}
    if len(widths) == 1:
        parts.append(f"embedding dim {widths.pop():,}")
    if chosen.head_dim is not None:
        at = rows[(rows["head_dim_v"] == chosen.head_dim) & rows["chunk_size"].notna()]
        dims = sorted({int(value) for value in at["head_dim_qk"].dropna()})
        keys = "/".join(str(dim) for dim in dims)
        parts.append(f"head dim {keys} (qk), {chosen.head_dim} (v)" if keys else f"head dim {chosen.head_dim}")
    return " · ".join([*parts, *extra])


def _time_ms(rows: pd.DataFrame) -> pd.Series:
    return rows["time_ms"]


def _memory_gib(rows: pd.DataFrame) -> pd.Series:
    return rows["peak_memory_bytes"] / 2**30


def _best(rows: pd.DataFrame, x: str) -> pd.DataFrame:
    """Keep the fastest row per implementation, mode and x."""
    return best_rows(rows, ("op", "impl", "mode", x))


def unmeasured(chosen: Chosen, x: str) -> pd.DataFrame:
    """Return failed rows of points that no other setting (chunk size) of the same implementation stands in for."""
    failed = failed_rows(chosen.rows)
    keys = ["op", "impl", "mode", x]
    shown = ok_rows(chosen.rows)[keys].drop_duplicates()
    merged = failed.merge(shown, on=keys, how="left", indicator="found")
    return merged[merged["found"] == "left_only"]


def runtime_over_length(frame: pd.DataFrame, selection: Selection = Selection()) -> Figure:
    """Runtime of one call over sequence length at constant tokens, every implementation at its best chunk size."""
    chosen = choose(frame, selection)
    spec = Panels(
        x="seq_len",
        x_label="sequence length T (tokens)",
        y=_time_ms,
        y_label="time per call (ms)",
        title="Runtime over sequence length",
        setting=describe(chosen, "best chunk size each", "median"),
    )
    return panels(_best(chosen.rows, "seq_len"), unmeasured(chosen, "seq_len"), spec)


def memory_over_length(frame: pd.DataFrame, selection: Selection = Selection()) -> Figure:
    """Peak memory of one call over sequence length, inputs included, every implementation at its fastest chunk size."""
    chosen = choose(frame, selection)
    spec = Panels(
        x="seq_len",
        x_label="sequence length T (tokens)",
        y=_memory_gib,
        y_label="peak memory, inputs included (GiB)",
        title="Memory over sequence length",
        setting=describe(chosen, "fastest chunk size each"),
    )
    best = _best(chosen.rows, "seq_len")
    return panels(best[best["peak_memory_bytes"].notna()], unmeasured(chosen, "seq_len"), spec)


def runtime_over_chunk_size(frame: pd.DataFrame, selection: Selection = Selection()) -> Figure:
    """Runtime of one call over chunk size, implementations with a chunk axis."""
    chosen = choose(frame, selection, seq_len=True)
    rows = chosen.rows[chosen.rows["chunk_size"].notna()]
    if ok_rows(rows).empty:
        raise ValueError("results must hold measured rows with a chunk size for this figure, got none")
    chosen = dataclasses.replace(chosen, rows=rows)
    spec = Panels(
        x="chunk_size",
        x_label="chunk size L (tokens)",
        y=_time_ms,
        y_label="time per call (ms)",
        title="Runtime over chunk size",
        setting=describe(chosen, "median"),
    )
    return panels(_best(rows, "chunk_size"), unmeasured(chosen, "chunk_size"), spec)


def memory_against_runtime(frame: pd.DataFrame, selection: Selection = Selection()) -> Figure:
    """Runtime against peak memory, one point per chunk size: the trade-off the chunk size makes (TFLA, figure 6)."""
    chosen = choose(frame, selection, seq_len=True)
    rows = chosen.rows[chosen.rows["chunk_size"].notna()]
    measured = _best(rows, "chunk_size")
    measured = measured[measured["peak_memory_bytes"].notna()]
    if measured.empty:
        raise ValueError("results must hold measured rows with a chunk size and memory for this figure, got none")
    chosen = dataclasses.replace(chosen, rows=rows)
    spec = Panels(
        x="chunk_size",
        x_values=_memory_gib,
        x_label="peak memory, inputs included (GiB)",
        y=_time_ms,
        y_label="time per call (ms)",
        title="Runtime against memory, over chunk size",
        setting=describe(chosen, "median"),
    )
    return panels(measured, unmeasured(chosen, "chunk_size"), spec)


def runtime_over_head_dim(frame: pd.DataFrame, selection: Selection = Selection()) -> Figure:
    """Runtime of one call over value head dim at constant embedding dim, every implementation at its best chunk size.

    Implementations with one head dim only are left out.
    """
    chosen = choose(frame, selection, head_dim=False, seq_len=True)
    rows = chosen.rows
    several = rows.groupby(["op", "impl"])["head_dim_v"].transform("nunique") > 1
    rows = rows[several]
    if ok_rows(rows).empty:
        raise ValueError("results must hold more than one head dim for this figure, got one")
    chosen = dataclasses.replace(chosen, rows=rows)
    spec = Panels(
        x="head_dim_v",
        x_label="value head dim",
        y=_time_ms,
        y_label="time per call (ms)",
        title="Runtime over head dim",
        setting=describe(chosen, "best chunk size each", "median"),
    )
    return panels(_best(rows, "head_dim_v"), unmeasured(chosen, "head_dim_v"), spec)


KINDS: Mapping[str, Callable[[pd.DataFrame, Selection], Figure]] = MappingProxyType(
    {
        "runtime": runtime_over_length,
        "chunk-size": runtime_over_chunk_size,
        "head-dim": runtime_over_head_dim,
        "memory": memory_over_length,
        "trade-off": memory_against_runtime,
    }
)
"""Figures by their name on the command line."""


def plot(kind: str, frame: pd.DataFrame, selection: Selection = Selection()) -> Figure:
    """Draw the figure called ``kind``; ValueError lists the known ones."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return KINDS[kind](frame, selection)
