"""Roofline figure: FLOP/s over arithmetic intensity, accelerators' roofs and the points measured on them.

Roofline(alpha, beta) = min(beta I, alpha) (TFLA paper, eq. 121). A point stands on the roof of the device that measured
it and on no other: rows from a CPU or from another GPU are left out of a GPU's figure, and the note says how many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .accelerators import Accelerator, Roofs, get_accelerator
from .figure_style import GRID, INK, MUTED, WARNING, log_axis, new_figure, rate, series_style, styled
from .frames import best_rows, ok_rows
from .plots import (
    LEGEND_WIDTH,
    MODE_TITLES,
    PANEL_WIDTH,
    Selection,
    add_headings,
    add_legend,
    add_note,
    choose,
    describe,
    failure_note,
    figure_height,
    label_ends,
    unmeasured,
)
from .roofs import with_stored_roofs

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def roofline(
    frame: pd.DataFrame,
    gpu: str | Accelerator,
    selection: Selection = Selection(),  # noqa: B008, frozen
    *,
    beside: Sequence[str] = (),
) -> Figure:
    """Draw the roofline of ``gpu`` with the points that were measured on it, one panel per mode.

    Implementations with a chunk axis are drawn as trajectories over chunk size (the longest and fastest one
    labelled at its ends), others as points. The newest measured roof, where there is one and it is not the roof that is
    drawn, is dashed. Suspect rows are ringed.

    Args:
        gpu: the accelerator, or its key or alias; its rates, specified or measured (:func:`.roofs.with_roofs`), are the
            roof.
        selection: rows.
        beside: further accelerators whose roofs are drawn without points.

    Raises:
        ValueError: unknown accelerators, or no row measured on ``gpu``.
    """
    accelerator = get_accelerator(gpu) if isinstance(gpu, str) else gpu
    if not accelerator.is_measured:
        accelerator = with_stored_roofs(accelerator)
    others = [get_accelerator(name) for name in beside]
    mine = frame[frame["device_accelerator"] == accelerator.key]
    if ok_rows(mine).empty:
        found = ", ".join(sorted({str(v) for v in ok_rows(frame)["device_accelerator"].dropna()})) or "none"
        raise ValueError(f"results must hold rows measured on {accelerator.key} for its roofline, got rows of: {found}")
    chosen = choose(mine, selection, seq_len=True)
    points = best_rows(chosen.rows, ("op", "impl", "mode", "chunk_size"))
    points = points[(points["intensity"] > 0) & (points["tflops"] > 0)]
    modes = [mode for mode in MODE_TITLES if mode in set(points["mode"])]
    with styled():
        width = PANEL_WIDTH * len(modes) + LEGEND_WIDTH
        figure = new_figure(width, figure_height(points))
        axes_row = figure.subplots(1, len(modes), squeeze=False, sharex=True, sharey=True)[0]
        low, high = _intensity_range(points["intensity"], accelerator, chosen.dtype)
        floor = 10 ** math.floor(math.log10(0.7 * float(points["tflops"].min())))
        for axes, mode in zip(axes_row, modes, strict=True):
            axes.set_xscale("log")
            axes.set_yscale("log")
            for other in others:
                _roof(axes, other, chosen.dtype, low, high, main=False)
            _roof(axes, accelerator, chosen.dtype, low, high, main=True)
            _points(axes, points[points["mode"] == mode])
            axes.set_title(MODE_TITLES[mode])
            axes.set_xlabel("arithmetic intensity (FLOP per byte moved)")
            axes.set_xlim(low, high)
            peak = max(a.peak_flops(chosen.dtype) or 0 for a in (accelerator, *others)) / 1e12
            axes.set_ylim(floor, peak * 2.2)
            log_axis(axes.xaxis, low, high)
            log_axis(axes.yaxis, floor, peak)
        axes_row[0].set_ylabel("TFLOP/s")
        last = points[points["mode"] == modes[-1]].groupby(["op", "impl"])["tflops"].max()
        rank = points.groupby(["op", "impl"])["tflops"].max().to_dict() | last.to_dict()
        add_legend(figure, axes_row[-1], sorted(rank, key=lambda key: -rank[key]), width)
        setting = describe(chosen, "counted FLOPs and bytes")
        add_headings(figure, f"Roofline: {accelerator.name}", setting, width)
        note = _roofline_note(frame, points, accelerator, chosen.dtype)
        add_note(figure, f"{note} {failure_note(unmeasured(chosen, 'seq_len'))}".strip(), width)
    return figure


def _intensity_range(intensities: pd.Series, accelerator: Accelerator, dtype: str) -> tuple[float, float]:
    """Return axis limits that hold every point and the ridge."""
    ridge = accelerator.intensity(dtype) or float(intensities.max())
    return 0.6 * min(float(intensities.min()), ridge / 8), 1.8 * max(float(intensities.max()), 3 * ridge)


def _roof(axes: Axes, accelerator: Accelerator, dtype: str, low: float, high: float, *, main: bool) -> None:
    """Draw min(beta I, alpha): specified solid, measured dashed, labelled along both legs."""
    peak, bandwidth = accelerator.peak_flops(dtype), accelerator.bandwidth_bytes_s
    if peak is None:
        return
    ridge = peak / bandwidth
    colour = INK if main else MUTED
    xs = [low, ridge, high]
    axes.plot(xs, [min(bandwidth * x, peak) / 1e12 for x in xs], color=colour, linewidth=1.3 if main else 0.8, zorder=2)
    if not main:
        axes.annotate(
            accelerator.name.removeprefix("NVIDIA "),
            (high, peak / 1e12),
            xytext=(-2, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=7,
            color=MUTED,
        )
        return
    measured = _measured_beside(accelerator, dtype)
    if measured is not None:
        reached, copied = measured.matrix_flops[dtype], measured.bandwidth_bytes_s
        xs = [low, reached / copied, high]
        ys = [min(copied * x, reached) / 1e12 for x in xs]
        axes.plot(xs, ys, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=2)
    axes.annotate(
        rate(peak, "FLOP/s"),
        (high, peak / 1e12),
        xytext=(-3, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=7.5,
        color=INK,
    )
    # Along the slope: rotated in data coordinates, so that it stays on the line whatever the figure's size.
    start = low * (ridge / low) ** 0.5
    axes.annotate(
        rate(bandwidth, "B/s"),
        (start, bandwidth * start / 1e12),
        xytext=(-3, 3),
        textcoords="offset points",
        rotation=45,
        rotation_mode="anchor",
        transform_rotates_text=True,
        ha="left",
        va="bottom",
        fontsize=7.5,
        color=INK,
    )
    if accelerator.vector_flops < peak:
        _vector_roof(axes, accelerator, high)


def _measured_beside(accelerator: Accelerator, dtype: str) -> Roofs | None:
    """Return the measured roofs to draw beside the roof: none where it is measured itself."""
    measured = accelerator.measured
    return None if measured is None or dtype not in measured.matrix_flops or accelerator.is_measured else measured


def _vector_roof(axes: Axes, accelerator: Accelerator, high: float) -> None:
    """Draw where work without matrix products ends: the rate of the vector units."""
    axes.axhline(accelerator.vector_flops / 1e12, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=2)
    axes.annotate(
        f"{rate(accelerator.vector_flops, 'FLOP/s')} fp32 vector",
        (high, accelerator.vector_flops / 1e12),
        xytext=(-3, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=7,
        color=MUTED,
    )


def _points(axes: Axes, points: pd.DataFrame) -> None:
    labelled = _longest_trajectory(points)
    for (op, impl), line in points.groupby(["op", "impl"], sort=True):
        style = series_style(str(op), str(impl))
        line = line.sort_values("chunk_size")
        axes.plot(line["intensity"], line["tflops"], zorder=4 if style.width > 1.5 else 3, **style.line())
        if (op, impl) == labelled:
            label_ends(axes, line["chunk_size"], line["intensity"], line["tflops"], style.colour)
    for row in points[points["suspect"].notna()].itertuples():
        axes.plot(
            [row.intensity],
            [row.tflops],
            marker="o",
            markersize=11,
            markerfacecolor="none",
            markeredgecolor=WARNING,
            zorder=5,
        )
    axes.grid(color=GRID)


def _longest_trajectory(points: pd.DataFrame) -> object:
    """Return the (op, impl) whose chunk sizes are named: most chunk sizes, then fastest; None without trajectories."""
    chunked = points[points["chunk_size"].notna()]
    if chunked.empty:
        return None
    groups = chunked.groupby(["op", "impl"]).agg(chunks=("chunk_size", "size"), tflops=("tflops", "max"))
    groups = groups[groups["chunks"] > 1].sort_values(["chunks", "tflops"])
    return None if groups.empty else groups.index[-1]


def _roofline_note(frame: pd.DataFrame, points: pd.DataFrame, accelerator: Accelerator, dtype: str) -> str:
    parts = []
    measured = _measured_beside(accelerator, dtype)
    if measured is not None:
        parts.append(
            f"Dashed: measured, {rate(measured.matrix_flops[dtype], 'FLOP/s')} and "
            f"{rate(measured.bandwidth_bytes_s, 'B/s')} ({measured.source})."
        )
    elif accelerator.is_measured:
        parts.append(f"The roof is measured: {accelerator.source}.")
    elsewhere = ok_rows(frame[frame["device_accelerator"] != accelerator.key])
    if not elsewhere.empty:
        names = ", ".join(sorted({str(name) for name in elsewhere["device_name"].dropna()}))
        many = "rows measured on other devices" if len(elsewhere) > 1 else "row measured on another device"
        parts.append(f"Not on this roofline: {len(elsewhere)} {many} ({names}).")
    suspects = points[points["suspect"].notna()]
    for row in suspects.itertuples():
        parts.append(f"Ringed, suspect: {row.impl} {row.mode}: {row.suspect}.")
    return " ".join(parts)
