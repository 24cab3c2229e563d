"""Roofline figure: FLOP/s over arithmetic intensity, accelerators' roofs and the points measured on them.

Roofline(alpha, beta) = min(beta I, alpha) (TFLA paper, eq. 121). A point stands on the roof of the device that measured
it and on no other: rows from a CPU or from another GPU are left out of a GPU's figure, and the note says how many.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...results.schema import SIZE_COLUMNS
from ...results.select import best_rows, ok_rows
from ..accelerators.known import Accelerator, Roofs, get_accelerator
from ..accelerators.roofs import with_stored_roofs
from ..counts import count_case
from ..model.runtime_model import SUSPECT_MARGIN
from .layout import Drawing, Line, Panel, Words
from .measured import modes_of
from .selection import (
    MODE_TITLES,
    Chosen,
    Selection,
    choose,
    describe,
    failure_note,
    other_head_dims,
    unmeasured,
)
from .style import INK, MUTED, SeriesStyle, axis_prefix, binary, rate, series_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def roofline(
    frame: pd.DataFrame,
    gpus: str | Accelerator | Sequence[str | Accelerator],
    selection: Selection = Selection(),  # noqa: B008, frozen
    width: float | None = None,
) -> Figure:
    """Draw what :func:`roofline_drawing` returns, at ``width`` inches [what suits the number of modes]."""
    return roofline_drawing(frame, gpus, selection).at(width)


def roofline_drawing(
    frame: pd.DataFrame,
    gpus: str | Accelerator | Sequence[str | Accelerator],
    selection: Selection = Selection(),  # noqa: B008, frozen
) -> Drawing:
    """Return the rooflines of ``gpus`` with the points measured on each, and the share of the roof that they reach.

    One column per mode; of one mode, roof and share stand side by side. Implementations with a chunk axis are drawn as
    trajectories over chunk size (the longest and fastest one labelled at its ends), others as points. The first
    accelerator's newest measured roof, where there is one and it is not the roof that is drawn, is dashed. Points above
    the measured roof, under the time of their compulsory bytes, or otherwise suspect are ringed, and the note says why.

    Args:
        gpus: one or several accelerators, or their keys or aliases; at least one must have rows. Their rates, specified
            or measured (:func:`.roofs.with_roofs`), are the roofs. Points of all but the first with rows are hollow.
        selection: rows.

    Raises:
        ValueError: unknown accelerators, the CPU beside a GPU, or no row measured on any of them.
    """
    named = [gpus] if isinstance(gpus, str | Accelerator) else gpus
    listed = [get_accelerator(each) if isinstance(each, str) else each for each in named]
    accelerators = list({each.key: each for each in reversed(listed)}.values())[::-1]
    keys = [each.key for each in accelerators]
    if "cpu" in keys and len(keys) > 1:
        raise ValueError(f"gpu must not name the CPU beside others, got {', '.join(keys)}")
    having = [key for key in keys if not ok_rows(frame[frame["device_accelerator"] == key]).empty]
    if not having:
        found = ", ".join(sorted({str(v) for v in ok_rows(frame)["device_accelerator"].dropna()})) or "none"
        raise ValueError(
            f"results must hold rows measured on {' or '.join(keys)} for its roofline, got rows of: {found}"
        )
    accelerators.sort(key=lambda each: each.key != having[0])
    main = accelerators[0]
    if not main.is_measured:
        main = accelerators[0] = with_stored_roofs(main)
    chosen = choose(frame[frame["device_accelerator"] == main.key], selection, seq_len=True)
    points = [(each, _points(frame, each, chosen, selection)) for each in accelerators if each.key in having]
    modes = modes_of(points[0][1])
    shown = [rows for _, rows in points]
    low = 0.6 * min(float(rows["intensity"].min()) for rows in shown)
    high = 1.8 * max(float(rows["intensity"].max()) for rows in shown)
    ridges = [each.intensity(chosen.dtype) or 1.0 for each in accelerators]
    low, high = min(low, min(ridges) / 12), max(high, 4 * max(ridges))
    floor = 10 ** math.floor(math.log10(0.7e12 * min(float(rows["tflops"].min()) for rows in shown)))
    peak = max(each.peak_flops(chosen.dtype) or 0 for each in accelerators)
    unit = axis_prefix(peak)
    top = max(peak * 2.2, 1.5e12 * max(float(rows["tflops"].max()) for rows in shown))
    chunks = sorted({float(chunk) for rows in shown for chunk in rows["chunk_size"].dropna()})
    roofs, shares = [], []
    for mode in modes:
        of_mode = [(each, rows[rows["mode"] == mode]) for each, rows in points]
        lines = [line for n, (_, rows) in enumerate(of_mode) for line in _trajectories(rows, unit[0], hollow=n > 0)]
        roofs.append(
            Panel(
                title=MODE_TITLES[mode],
                lines=lines,
                x_label="arithmetic intensity (FLOP per byte moved)",
                y_label=f"{unit[1]}FLOP/s",
                x_limits=(low, high),
                y_limits=(floor / unit[0], top / unit[0]),
                decorate=functools.partial(
                    _roofs, accelerators=accelerators, dtype=chosen.dtype, unit=unit[0], low=low, high=high, lines=lines
                ),
                leaders=False,
            )
        )
        shares.append(
            Panel(
                title=f"{MODE_TITLES[mode]}: % of roof",
                lines=[line for n, (_, rows) in enumerate(of_mode) for line in _shares(rows, chunks, hollow=n > 0)],
                x_label="chunk size L (tokens)",
                y_label="% of the roof",
                sizes=[*chunks, 2 * max(chunks, default=8)],
                y_limits=(0, max(100.0, 1.05 * max(float(rows["share"].max()) for rows in shown))),
                y_log=False,
                decorate=functools.partial(_share_axis, chunks=chunks),
                leaders=False,
            )
        )
    words = Words(
        title=f"Roofline: {main.name}" + "".join(f", {each.name.removeprefix('NVIDIA ')}" for each in accelerators[1:]),
        setting=describe(chosen, "counted FLOPs and bytes"),
        note=" ".join(
            (
                other_head_dims(chosen),
                _note(frame, points, accelerators, chosen.dtype),
                failure_note(unmeasured(chosen, "seq_len")),
            )
        ),
    )
    if len(modes) == 1:
        return Drawing(grid=[[*roofs, *shares]], words=words)
    return Drawing(grid=[roofs, shares], words=words, heights=(1.3, 0.85))


def _points(frame: pd.DataFrame, accelerator: Accelerator, chosen: Chosen, selection: Selection) -> pd.DataFrame:
    """Return the points measured on ``accelerator`` in the chosen setting, with their share of its roof and doubts."""
    held = ("dtype", "tokens", "head_dim", "channels", "d_model", "d_ff", "seq_len")
    same = dataclasses.replace(selection, **{name: getattr(chosen, name) for name in held})
    rows = choose(frame[frame["device_accelerator"] == accelerator.key], same, seq_len=True).rows
    rows = best_rows(rows, ("op", "impl", "mode", "chunk_size"))
    rows = rows[(rows["intensity"] > 0) & (rows["tflops"] > 0)]
    if rows.empty:
        raise ValueError(f"results must hold counted rows measured on {accelerator.key} for its roofline, got none")
    reached = [each._asdict() for each in rows.itertuples(index=False)]
    return rows.assign(
        share=[100 * row["tflops"] * 1e12 / _roof_at(row, accelerator) for row in reached],
        doubt=[doubt(row, accelerator) for row in reached],
        device=accelerator.key,
    )


def _roof_at(row: dict[str, Any], accelerator: Accelerator) -> float:
    """Return min(beta I, alpha) in FLOP/s at a row's intensity; alpha is the vector rate without matrix products."""
    peak = accelerator.peak_flops(row["dtype"]) if row["tensor_flops"] else accelerator.vector_flops
    return min(accelerator.bandwidth_bytes_s * row["intensity"], peak or math.inf)


def doubt(row: dict[str, Any], accelerator: Accelerator) -> str | None:
    """Return why a measured point should not be believed as it is drawn, or None.

    A row may say so itself (:func:`.runtime_model.suspect_reason`). Else it is held to the measured roof, where there
    is one, and to the time that its compulsory bytes take at the measured bandwidth (specified, where none was
    measured). The CPU's rates are no limits, so its rows are not held to them.
    """
    if isinstance(row["suspect"], str):
        return row["suspect"]
    if accelerator.key == "cpu":
        return None
    measured = accelerator.measured
    bandwidth = measured.bandwidth_bytes_s if measured else accelerator.bandwidth_bytes_s
    alpha = measured.matrix_flops.get(row["dtype"]) if measured and row["tensor_flops"] else None
    if alpha is not None:
        roof = min(bandwidth * row["intensity"], alpha)
        if row["tflops"] * 1e12 > SUSPECT_MARGIN * roof:
            return f"{row['tflops']:.0f} TFLOP/s is above the measured roof of {rate(roof, 'FLOP/s')} at its intensity"
    sizes = {name: int(row[name]) for name in SIZE_COLUMNS if row[name] == row[name] and row[name] is not None}
    state_dtype = row["state_dtype"] if isinstance(row["state_dtype"], str) else None
    counted = count_case(row["op"], row["impl"], row["mode"], row["dtype"], state_dtype, sizes)
    least_ms = 0.0 if counted is None else 1e3 * counted.compulsory_bytes / bandwidth
    if row["time_ms"] * SUSPECT_MARGIN < least_ms:
        return f"{row['time_ms']:.4g} ms is less than the {least_ms:.4g} ms of the compulsory bytes"
    return None


def _trajectories(rows: pd.DataFrame, unit: float, *, hollow: bool) -> list[Line]:
    """Return a line per implementation, FLOP/s in ``unit`` over intensity in the order of chunk size."""
    labelled = None if hollow else _longest_trajectory(rows)
    lines = []
    for (op, impl), line in rows.groupby(["op", "impl"], sort=True):
        line = line.sort_values("chunk_size")
        ends = None
        if (op, impl) == labelled:
            ends = (f"L = {binary(line['chunk_size'].iloc[0])}", f"L = {binary(line['chunk_size'].iloc[-1])}")
        lines.append(
            Line(
                x=line["intensity"].tolist(),
                y=(line["tflops"] * (1e12 / unit)).tolist(),
                style=_style(str(op), str(impl), line, hollow=hollow),
                ends=ends,
                ringed=line["doubt"].notna().to_numpy().nonzero()[0].tolist(),
            )
        )
    return lines


def _style(op: str, impl: str, line: pd.DataFrame, *, hollow: bool) -> SeriesStyle:
    style = series_style(op, impl)
    if not hollow:
        return style
    return dataclasses.replace(style, hollow=True, label=f"{style.label}, {line['device'].iloc[0]}")


def _shares(rows: pd.DataFrame, chunks: Sequence[float], *, hollow: bool) -> list[Line]:
    """Return a line per implementation, % of the roof over chunk size; beyond the chunks those without any."""
    beyond = 2 * max(chunks, default=8)
    lines = []
    for (op, impl), line in rows.groupby(["op", "impl"], sort=True):
        line = line.assign(chunk=line["chunk_size"].astype(float).fillna(beyond)).sort_values("chunk")
        style = _style(str(op), str(impl), line, hollow=hollow)
        lines.append(Line(x=line["chunk"].tolist(), y=line["share"].tolist(), style=style))
    return lines


def _share_axis(axes: Axes, chunks: Sequence[float]) -> None:
    """Name the place of implementations without a chunk axis, and draw the roof."""
    beyond = 2 * max(chunks, default=8)
    ticks = [tick for tick in axes.get_xticks() if tick < beyond]
    if len(ticks) > 1 and ticks[-1] * 4 > beyond and len(ticks) < len(chunks):
        ticks = ticks[:-1]
    axes.set_xticks([*ticks, beyond], [*map(binary, ticks), "none"])
    axes.axhline(100, color=INK, linewidth=1.0, zorder=2)


def _roofs(
    axes: Axes,
    *,
    accelerators: Sequence[Accelerator],
    dtype: str,
    unit: float,
    low: float,
    high: float,
    lines: Sequence[Line],
) -> None:
    for n, accelerator in reversed(list(enumerate(accelerators))):
        named = len(accelerators) > 1
        _roof(axes, accelerator, dtype, unit, low, high, main=n == 0, named=named, lines=lines)


def _roof(
    axes: Axes,
    accelerator: Accelerator,
    dtype: str,
    unit: float,
    low: float,
    high: float,
    *,
    main: bool,
    named: bool,
    lines: Sequence[Line],
) -> None:
    """Draw min(beta I, alpha) in ``unit``: specified solid, measured dashed, labelled along both legs."""
    peak, bandwidth = accelerator.peak_flops(dtype), accelerator.bandwidth_bytes_s
    if peak is None:
        return
    ridge = peak / bandwidth
    colour = INK if main else MUTED
    xs = [low, ridge, high]
    ys = [min(bandwidth * x, peak) / unit for x in xs]
    axes.plot(xs, ys, color=colour, linewidth=1.3 if main else 0.8, zorder=2)
    name = f"{accelerator.name.removeprefix('NVIDIA ')} " if named else ""
    _label_level(axes, f"{name}{rate(peak, 'FLOP/s')}", peak / unit, ridge, high, colour, lines)
    if not main:
        return
    measured = _measured_beside(accelerator, dtype)
    if measured is not None:
        reached, copied = measured.matrix_flops[dtype], measured.bandwidth_bytes_s
        xs = [low, reached / copied, high]
        ys = [min(copied * x, reached) / unit for x in xs]
        axes.plot(xs, ys, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=2)
    # Along the slope: rotated in data coordinates, so that it stays on the line whatever the figure's size.
    start = low * (ridge / low) ** 0.12
    axes.annotate(
        rate(bandwidth, "B/s"),
        (start, bandwidth * start / unit),
        xytext=(-3, 3),
        textcoords="offset points",
        rotation=45,
        rotation_mode="anchor",
        transform_rotates_text=True,
        ha="left",
        va="bottom",
        fontsize="small",
        color=INK,
    )
    if accelerator.vector_flops < peak:
        _vector_roof(axes, accelerator, unit, high)


def _label_level(
    axes: Axes, label: str, level: float, left: float, right: float, colour: str, lines: Sequence[Line]
) -> None:
    """Write a label along a level from ``left`` to ``right``, where it covers no point if there is such a place."""
    x_range, y_range = (math.log(b / a) for a, b in (axes.get_xlim(), axes.get_ylim()))
    # Shares of the panel that a letter's width and a line's height take, marks included, in a panel of usual size.
    long, tall = 0.026 * len(label) + 0.03, 0.13
    places = ((right, "right", "bottom"), (right, "right", "top"), (left, "left", "bottom"), (left, "left", "top"))

    def covers(x: float, ha: str, va: str) -> bool:
        across = (-1 if ha == "right" else 1) / x_range
        up = (-1 if va == "top" else 1) / y_range
        points = ((px, py) for line in lines for px, py in zip(line.x, line.y, strict=True))
        return any(
            -0.02 < across * math.log(px / x) < long and -0.02 < up * math.log(py / level) < tall for px, py in points
        )

    x, ha, va = next((place for place in places if not covers(*place)), places[0])
    axes.annotate(
        label,
        (x, level),
        xytext=(-3 if ha == "right" else 3, 2 if va == "bottom" else -3),
        textcoords="offset points",
        ha=ha,
        va=va,
        fontsize="small",
        color=colour,
    )


def _measured_beside(accelerator: Accelerator, dtype: str) -> Roofs | None:
    """Return the measured roofs to draw beside the roof: none where it is measured itself."""
    measured = accelerator.measured
    return None if measured is None or dtype not in measured.matrix_flops or accelerator.is_measured else measured


def _vector_roof(axes: Axes, accelerator: Accelerator, unit: float, high: float) -> None:
    """Draw where work without matrix products ends: the rate of the vector units."""
    from matplotlib.patheffects import withStroke

    axes.axhline(accelerator.vector_flops / unit, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=2)
    axes.annotate(
        f"vector {rate(accelerator.vector_flops, 'FLOP/s')}",
        (high, accelerator.vector_flops / unit),
        xytext=(-3, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize="small",
        color=MUTED,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )


def _longest_trajectory(points: pd.DataFrame) -> object:
    """Return the (op, impl) whose chunk sizes are named: most chunk sizes, then fastest; None without trajectories."""
    chunked = points[points["chunk_size"].notna()]
    if chunked.empty:
        return None
    groups = chunked.groupby(["op", "impl"]).agg(chunks=("chunk_size", "size"), tflops=("tflops", "max"))
    groups = groups[groups["chunks"] > 1].sort_values(["chunks", "tflops"])
    return None if groups.empty else groups.index[-1]


def _note(
    frame: pd.DataFrame,
    points: Sequence[tuple[Accelerator, pd.DataFrame]],
    accelerators: Sequence[Accelerator],
    dtype: str,
) -> str:
    main = accelerators[0]
    parts = []
    if any(rows["chunk_size"].isna().any() for _, rows in points):
        parts.append("None: no chunk axis.")
    measured = _measured_beside(main, dtype)
    if measured is not None:
        parts.append(
            f"Dashed: measured, {rate(measured.matrix_flops[dtype], 'FLOP/s')} and "
            f"{rate(measured.bandwidth_bytes_s, 'B/s')} ({measured.source})."
        )
    elif main.is_measured:
        parts.append(f"The roof is measured: {main.source}.")
    bare = [each.name for each in accelerators if each.key not in {known.key for known, _ in points}]
    if bare:
        parts.append(f"Roof only, nothing measured: {', '.join(bare)}.")
    elsewhere = ok_rows(frame[~frame["device_accelerator"].isin([each.key for each in accelerators])])
    if not elsewhere.empty:
        names = ", ".join(sorted({str(name) for name in elsewhere["device_name"].dropna()}))
        many = "rows measured on other devices" if len(elsewhere) > 1 else "row measured on another device"
        parts.append(f"Not on this roofline: {len(elsewhere)} {many} ({names}).")
    for _, rows in points:
        for row in rows.loc[rows["doubt"].notna(), ["impl", "mode", "chunk_size", "doubt"]].itertuples():
            chunk = "" if row.chunk_size != row.chunk_size else f" L = {binary(float(row.chunk_size))}"
            parts.append(f"Ringed, suspect: {row.impl} {row.mode}{chunk}: {row.doubt}.")
    return " ".join(parts)
