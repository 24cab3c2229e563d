"""Roofline figure: FLOP/s over arithmetic intensity, accelerators' roofs and the points measured on them.

Roofline(alpha, beta) = min(beta I, alpha) (TFLA paper, eq. 121). A point stands on the roof of the device that measured
it and on no other: rows from a CPU or from another GPU are left out of a GPU's figure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ...results.select import MODE_NAMES, best_rows, families, grouped, ok_rows, short_size
from ..accelerators.known import Accelerator, Roofs, get_accelerator
from ..accelerators.roofs import with_stored_roofs
from .findings import MAX_LINES, in_lines, main_lines, share_of_roof
from .layout import Drawing, Line, Panel, measured_line, write
from .measured import LABELS
from .selection import (
    MODE_TITLES,
    Chosen,
    Selection,
    busy_note,
    choose,
    describe_devices,
    failure_note,
    modes_of,
    sizes_held,
    suspect_notes,
    unmeasured,
)
from .style import CURVES, INK, MUTED, axis_prefix, operation_label, quantity, rate, series_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def roofline(
    frame: pd.DataFrame,
    gpus: str | Accelerator | Sequence[str | Accelerator],
    selection: Selection = Selection(),  # noqa: B008, frozen
) -> Drawing:
    """Return the rooflines of ``gpus`` with the points measured on each, and the share of the roof that they reach.

    One column per mode; of one mode, roof and share stand side by side. Implementations with a chunk axis are drawn as
    trajectories over chunk size (the longest and fastest one labelled at its ends), others as points. The first
    accelerator's newest measured roof, where there is one and it is not the roof that is drawn, is dashed.

    Of what the selection leaves open the value of most rows is shown. If it names no kernels, every family is that has
    rows: ours and its fastest rival, in one colour.

    Args:
        gpus: one or several accelerators, or their keys or aliases; at least one must have rows. Their rates, specified
            or measured (:func:`.roofs.with_roofs`), are the roofs. Points of all but the first with rows are pale.
        selection: rows.

    Raises:
        ValueError: unknown accelerators, the CPU beside a GPU, or no row measured on any of them.
    """
    import pandas as pd

    accelerators = _accelerators(frame, gpus)
    main = accelerators[0]
    parts = _parts(frame, selection, accelerators)
    points = pd.concat([part[1] for part in parts])
    dtype = str(parts[0][0].dtype)
    several = len(parts) > 1
    colours = {op: CURVES[n % len(CURVES)] for n, part in enumerate(parts) for op in part[1]["op"] if several}
    unit, roof_axes = _roof_axes(accelerators, dtype, points["intensity"], points["tflops"])
    chunks = sorted(map(float, set(points["chunk_size"].dropna())))
    beyond, sizes = 2 * max(chunks, default=8), chunks
    if points["chunk_size"].isna().any():
        sizes = [*chunks, beyond]
    points = points.assign(
        reached=points["tflops"] * (1e12 / unit), place=points["chunk_size"].astype(float).fillna(beyond)
    )
    share_axes: dict[str, Any] = {
        "x_label": LABELS["chunk_size"], "y_label": "% of the roof", "leaders": False, "sizes": sizes,
        "y_limits": (0, max(100.0, 1.05 * points["share"].max())), "y_log": False,
        "decorate": lambda axes: _share_axis(axes, sizes, beyond),
    }  # fmt: skip
    roofs, shares = [], []
    for mode in modes_of(points[points["device_accelerator"] == main.key]):
        here = points[points["mode"] == mode].sort_values("chunk_size")
        lines = _lines(here, accelerators, "intensity", "reached", colours, ends=True)
        roofs.append(Panel(title=MODE_TITLES[mode], lines=lines, **roof_axes))
        lines = _lines(here, accelerators, "place", "share", colours, ends=False)
        shares.append(Panel(title=f"{MODE_TITLES[mode]}: % of roof", lines=lines, **share_axes))
    # Without chunk sizes the roofs say it all.
    shares = shares if chunks else []
    one_row = len(roofs) == 1 or not shares
    notes = [*_notes(points, accelerators, dtype), busy_note(points)]
    if not several:
        ((chosen, _, at_best, first, hidden),) = parts
        notes += [failure_note(unmeasured(chosen)), hidden]
        setting = sizes_held(chosen)
        finding = share_of_roof(at_best, first, {mode: MODE_NAMES[mode] for mode in modes_of(at_best)})
    else:
        notes += [] if parts[0][0].every else ["Of each family ours and its fastest rival; --all: every line."]
        setting = ["sizes of most rows", *(f"{part[0].kernel}: {', '.join(sizes_held(part[0]))}" for part in parts)]
        best = pd.concat([part[2] for part in parts])
        best = best[in_lines(best, [part[3] for part in parts]) & (best["mode"] == modes_of(best)[0])]
        reached = ", ".join(f"{operation_label(row.op)} {row.share:.0f} %" for row in best.itertuples())
        finding = f"Of the roof {MODE_NAMES[best['mode'].iloc[0]]}: {reached}"
    return Drawing(
        grid=[[*roofs, *shares]] if one_row else [roofs, shares],
        title=f"Roofline: {main.name}" + "".join(f", {each.name.removeprefix('NVIDIA ')}" for each in accelerators[1:]),
        finding=finding,
        setting=" · ".join([describe_devices(parts[0][0]), *setting, "counted FLOPs and bytes"]),
        note=" ".join(filter(None, notes)),
        heights=None if one_row else (1.8 if several else 1.3, 0.85),
    )


def _parts(
    frame: pd.DataFrame, selection: Selection, accelerators: Sequence[Accelerator]
) -> list[tuple[Chosen, pd.DataFrame, pd.DataFrame, tuple[str, str], str]]:
    """Return the lines of the kernels that a selection names, or of every family that has what it asks for.

    Returns:
        what is chosen on the first accelerator, the points at every chunk size, those of the first accelerator at the
        best, the line that a statement is about, and a note on hidden ones.
    """
    main, refused, parts = accelerators[0].key, None, []
    rows = frame[frame["device_accelerator"].isin([each.key for each in accelerators])]
    kernels: Sequence[str | None]
    kernels = [selection.kernel] if selection.kernel or selection.ops else families(rows) or [selection.kernel]
    for kernel in kernels:
        try:
            chosen = choose(rows, dataclasses.replace(selection, kernel=kernel), over="", devices=True, most=True)
            points = _points(chosen.rows, accelerators)
        except ValueError as error:
            refused = refused or error
            continue
        # One roof: the further families are of the first one's dtype.
        selection = dataclasses.replace(selection, dtype=chosen.dtype)
        chosen = dataclasses.replace(chosen, rows=chosen.rows[chosen.rows["device_accelerator"] == main])
        at_best = best_rows(points[points["device_accelerator"] == main], ("op", "impl", "mode"))
        chosen, at_best, *about = main_lines(chosen, at_best, "seq_len", MAX_LINES if len(kernels) == 1 else 2)
        points = points[in_lines(points, zip(at_best["op"], at_best["impl"], strict=True))]
        parts.append((chosen, points, at_best, *about))
    if refused and not parts:
        raise refused
    return parts


def roofline_point(name: str, accelerator: Accelerator, dtype: str, intensity: float, tflops: float) -> Drawing:
    """Return the roofline of an accelerator with one point, that of a user's function (bench/drive/own_function.py)."""
    unit, axes = _roof_axes([accelerator], dtype, [intensity], [tflops])
    point = Line(x=[intensity], y=[tflops * 1e12 / unit], style=dataclasses.replace(series_style("", ""), label=name))
    return Drawing(
        grid=[[Panel(title="", lines=[point], **axes)]],
        title=f"Roofline: {accelerator.name}",
        setting=f"{name}, {dtype}",
        note=" ".join(_roof_notes(accelerator, dtype)),
    )


def _roof_axes(
    accelerators: Sequence[Accelerator], dtype: str, intensities: Sequence[float], tflops: Sequence[float]
) -> tuple[float, dict[str, Any]]:
    """Return the FLOP/s that the y axis counts in, and the axes of a panel that shows roofs and points."""
    peak = max(each.peak_flops(dtype) or 0 for each in accelerators)
    unit, prefix = axis_prefix(peak)
    ridges = [each.intensity(dtype) or 1.0 for each in accelerators]
    floor = 10 ** math.floor(math.log10(0.7e12 * min(tflops)))
    return unit, {
        "x_label": "arithmetic intensity (FLOP per byte moved)", "y_label": f"{prefix}FLOP/s", "leaders": False,
        "x_limits": (min(0.4 * min(intensities), min(ridges) / 12), max(1.8 * max(intensities), 4 * max(ridges))),
        "y_limits": (floor / unit, max(peak * 2.2, 1.5e12 * max(tflops)) / unit),
        "decorate": lambda axes: _roofs(axes, accelerators, dtype, unit),
    }  # fmt: skip


def _accelerators(frame: pd.DataFrame, gpus: str | Accelerator | Sequence[str | Accelerator]) -> list[Accelerator]:
    """Return the accelerators named, the first that has rows in front; if none has, the GPU with most rows besides."""
    named = [gpus] if isinstance(gpus, str | Accelerator) else gpus
    known: dict[str, Accelerator] = {}
    for each in (get_accelerator(n) if isinstance(n, str) else n for n in named):
        known.setdefault(each.key, each)
    if "cpu" in known and len(known) > 1:
        raise ValueError(f"gpu must not name the CPU beside others, got {', '.join(known)}")
    present = ok_rows(frame)["device_accelerator"].value_counts()
    gpus_here = present.index.drop("cpu", errors="ignore")
    if len(gpus_here) and "cpu" not in known and not known.keys() & {*gpus_here}:
        known[gpus_here[0]] = get_accelerator(gpus_here[0])
    main = next((known.pop(key) for key in list(known) if key in present), None)
    if main is None:
        raise ValueError(
            f"results must hold rows measured on {' or '.join(known)} for its roofline, got rows of: "
            f"{', '.join(sorted(present.index)) or 'none'}"
        )
    return [main if main.is_measured else with_stored_roofs(main), *known.values()]


def _points(rows: pd.DataFrame, accelerators: Sequence[Accelerator]) -> pd.DataFrame:
    """Return the fastest row at each chunk size and the share that it reaches of its accelerator's roof."""
    points = best_rows(rows, ("device_accelerator", "op", "impl", "mode", "chunk_size"))
    points = points[(points["intensity"] > 0) & (points["tflops"] > 0)]
    main, by_key = accelerators[0].key, {each.key: each for each in accelerators}
    if main not in set(points["device_accelerator"]):
        raise ValueError(f"results must hold counted rows measured on {main} for its roofline, got none")
    shares = []
    for row in points.itertuples():
        device = by_key[row.device_accelerator]
        # Without matrix products alpha is the vector rate.
        peak = device.peak_flops(row.dtype) if row.tensor_flops else device.vector_flops
        shares.append(100 * row.tflops * 1e12 / min(device.bandwidth_bytes_s * row.intensity, peak or math.inf))
    return points.assign(share=shares)


def _lines(
    points: pd.DataFrame, accelerators: Sequence[Accelerator], x: str, y: str, colours: Mapping[str, str], *, ends: bool
) -> list[Line]:
    """Return a line per implementation and accelerator; all but the first accelerator's are pale.

    Args:
        points: of one mode, in the order of chunk size.
        colours: of operations that do not have their usual one.
        ends: whether the longest trajectory's ends are named and suspect points ringed.
    """
    lines = []
    for n, accelerator in enumerate(accelerators):
        rows = points[points["device_accelerator"] == accelerator.key]
        labelled = _longest_trajectory(rows) if ends and not n else None
        for (op, impl), group in rows.groupby(["op", "impl"], sort=True):
            style = series_style(str(op), str(impl), alone=points["op"].nunique() == 1)
            style = dataclasses.replace(style, colour=colours.get(str(op), style.colour))
            if n:
                style = style.pale(f"{style.label}, {accelerator.key}")
            line = measured_line(group, x, group[y], style)
            if not ends:
                line = dataclasses.replace(line, ringed=())
            elif (op, impl) == labelled:
                first, last = group["chunk_size"].iloc[[0, -1]]
                line = dataclasses.replace(line, ends=(f"L = {short_size(first)}", f"L = {short_size(last)}"))
            lines.append(line)
    return lines


def _longest_trajectory(points: pd.DataFrame) -> object:
    """Return the (op, impl) whose chunk sizes are named: most chunk sizes, then fastest; None without trajectories."""
    chunked = points[points["chunk_size"].notna()]
    groups = chunked.groupby(["op", "impl"]).agg(chunks=("chunk_size", "size"), tflops=("tflops", "max"))
    groups = groups[groups["chunks"] > 1].sort_values(["chunks", "tflops"])
    return None if groups.empty else groups.index[-1]


def _share_axis(axes: Axes, sizes: Sequence[float], beyond: float) -> None:
    """Name the place of implementations without a chunk axis, if there are any, and draw the roof."""
    if beyond in sizes:
        ticks = [tick for tick in axes.get_xticks() if tick < beyond]
        if len(ticks) > 1 and ticks[-1] * 4 > beyond and len(ticks) < len(sizes) - 1:
            ticks = ticks[:-1]
        axes.set_xticks([*ticks, beyond], [*map(short_size, ticks), "none"])
    axes.axhline(100, color=INK, linewidth=1.0, zorder=2)


def _roofs(axes: Axes, accelerators: Sequence[Accelerator], dtype: str, unit: float) -> None:
    """Draw the roofs in ``unit`` FLOP/s, those of one peak under one name: the main one last, and what goes with it."""
    peaks = [(peak, each) for each in accelerators if (peak := each.peak_flops(dtype)) is not None]
    for peak, of in reversed(grouped(peaks, itemgetter(0)).items()):
        names = ", ".join(each.name.removeprefix("NVIDIA ") for _, each in of) if len(accelerators) > 1 else ""
        for _, each in reversed(of):
            colour, width = (INK, 1.3) if each is accelerators[0] else (MUTED, 0.8)
            _roof(axes, peak / unit, each.bandwidth_bytes_s / unit, color=colour, linewidth=width)
        # Under the points: a CPU's rates are no limits, and its points may stand above the roof.
        # Of several the axis says the unit: whole rates would reach the points.
        label = f"{names} {quantity(float(f'{peak / unit:.3g}'))}" if names else rate(peak, "FLOP/s")
        end = (axes.get_xlim()[1], peak / unit)
        write(axes, label, end, (-3, 2.5), color=colour, zorder=2.5)
    if accelerators[0].peak_flops(dtype) is not None:
        _beside_the_roof(axes, accelerators[0], dtype, unit)


def _roof(axes: Axes, peak: float, bandwidth: float, **look: Any) -> None:
    """Draw min(beta I, alpha) over the whole axis."""
    low, high = axes.get_xlim()
    axes.plot(xs := [low, peak / bandwidth, high], [min(bandwidth * x, peak) for x in xs], zorder=2, **look)


def _beside_the_roof(axes: Axes, accelerator: Accelerator, dtype: str, unit: float) -> None:
    """Draw what goes with the main roof: the bandwidth along its slope, the measured roof, the vector units' rate."""
    (low, high), floor = axes.get_xlim(), axes.get_ylim()[0] * unit
    bandwidth, peak = accelerator.bandwidth_bytes_s, accelerator.peak_flops(dtype) or math.inf
    if measured := _measured_beside(accelerator, dtype):
        ends = measured.matrix_flops[dtype] / unit, measured.bandwidth_bytes_s / unit
        _roof(axes, *ends, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    # The panel's place will turn it, so that it stays on the line whatever the figure's size.
    lowest = max(low, floor / bandwidth)
    start = lowest * (peak / bandwidth / lowest) ** 0.12
    turned = {"rotation_mode": "anchor", "transform_rotates_text": True, "bbox": None}
    write(axes, rate(bandwidth, "B/s"), (start, bandwidth * start / unit), (-3, 3), ha="left", color=INK, **turned)
    vector = accelerator.vector_flops
    if floor < vector < peak:
        axes.axhline(vector / unit, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=2)
        # Left of the roof, where no point can be, if there is room.
        end, move = (low, 3) if vector / bandwidth > 20 * lowest else (high, -3)
        write(axes, f"vector {vector / unit:.3g}", (end, vector / unit), (move, 2), color=MUTED, zorder=3)


def _measured_beside(accelerator: Accelerator, dtype: str) -> Roofs | None:
    """Return the measured roofs to draw beside the roof: none where it is measured itself."""
    measured = accelerator.measured
    return None if measured is None or dtype not in measured.matrix_flops or accelerator.is_measured else measured


def _notes(points: pd.DataFrame, accelerators: Sequence[Accelerator], dtype: str) -> list[str]:
    main, parts = accelerators[0], []
    if points["chunk_size"].isna().any() and points["chunk_size"].notna().any():
        parts.append("None: no chunk axis.")
    parts += _roof_notes(main, dtype)
    if bare := [each.name for each in accelerators if each.key not in set(points["device_accelerator"])]:
        parts.append(f"Roof only, nothing measured: {', '.join(bare)}.")
    return parts + suspect_notes(points)


def _roof_notes(main: Accelerator, dtype: str) -> list[str]:
    """Say which roofs are measured."""
    if measured := _measured_beside(main, dtype):
        reached = f"{rate(measured.matrix_flops[dtype], 'FLOP/s')} and {rate(measured.bandwidth_bytes_s, 'B/s')}"
        return [f"Dashed: measured, {reached} ({measured.source})."]
    return [f"The roof is measured: {main.source}."] if main.is_measured else []
