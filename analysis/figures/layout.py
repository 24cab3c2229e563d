"""How a figure is put together: panels, a title and the setting above them, labels at the lines or below, a note.

A figure function says what is to be seen, a :class:`Drawing`; :func:`compose` draws its panels at a width in inches.
Wide figures have their panels side by side and every line labelled where it ends; at the width of a column of text the
panels stand under one another and the labels below them, in letters that are still read there.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .style import (
    INK,
    MUTED,
    WARNING,
    SeriesStyle,
    binary,
    log_axis,
    new_figure,
    other_colours,
    set_alt_text,
    size_axis,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_WIDTH = 3.5
"""Inches of a panel where no width is asked for."""

NARROW = 5.5
"""Inches under which a figure is laid out for a column of text."""

MIN_WIDTH, MIN_PANEL = 2.5, 2.4
LABEL_SIZE, LABEL_HEIGHT = 8.5, 0.185
"""Points and inches of a label at full size."""

BOLD = 0.66
"""Mean width of a bold letter in em."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a panel.

    Attributes:
        ends: what is written beside the first and the last point.
        ringed: points to mark, by position.
    """

    x: Sequence[float]
    y: Sequence[float]
    style: SeriesStyle
    ends: tuple[str, str] | None = None
    ringed: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        sizes: the sizes that a base-2 x axis has ticks at; None: a base-10 log axis.
        x_limits, y_limits: None: from the lines.
        y_log: False for an axis that starts at 0.
        decorate: draws what is no line: roofs, marks.
        leaders: whether labels beside the panel are led to the lines that reach its edge.
    """

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    sizes: Sequence[float] | None = None
    x_limits: tuple[float, float] | None = None
    y_limits: tuple[float, float] | None = None
    y_log: bool = True
    decorate: Callable[[Axes], None] | None = None
    leaders: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The text of a figure: title, the setting that holds for all of it, and a note under it."""

    title: str
    setting: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What is to be seen in a figure, at whatever width it is drawn.

    Attributes:
        grid, heights: as :func:`compose` takes them.
        usual_width: inches where no width is asked for; None: what suits the number of panels.
    """

    grid: Sequence[Sequence[Panel]]
    words: Words
    heights: Sequence[float] | None = None
    usual_width: float | None = None

    def at(self, width: float | None = None) -> Figure:
        """Return the figure at a width in inches [the usual one]; ValueError for one in which nothing can be read."""
        return compose(self.grid, self.words, self.usual_width if width is None else width, heights=self.heights)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Sizes in inches, and the scale of the letters."""

    width: float
    height: float
    rows: int
    columns: int
    top: float
    bottom: float
    side: float
    scale: float
    ratios: tuple[float, ...]


def compose(
    grid: Sequence[Sequence[Panel]],
    words: Words,
    width: float | None = None,
    *,
    heights: Sequence[float] | None = None,
) -> Figure:
    """Draw rows of panels as one figure.

    Args:
        grid: rows of panels; every row has as many.
        heights: of the rows, relative to the usual height.
        width: inches; None: what suits the number of panels.

    Raises:
        ValueError: a width in which nothing can be read.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if width is not None and width < MIN_WIDTH:
        raise ValueError(f"width must be at least {MIN_WIDTH} inches, got {width:g}")
    grid = _told_apart(grid)
    styles = _styles(panel for row in grid for panel in row)
    layout = _layout(grid, words, styles, width, heights or [1.0] * len(grid))
    with styled(layout.scale):
        figure = new_figure(layout.width, layout.height)
        axes = figure.subplots(layout.rows, layout.columns, squeeze=False, height_ratios=layout.ratios).flat
        panel_width = (layout.width - layout.side) / layout.columns - 0.55
        pairs = ((panel, row[0]) for row in grid for panel in row)
        for n, ((panel, first), each) in enumerate(zip(pairs, axes, strict=True)):
            _draw(each, panel, panel_width, y_label=n % layout.columns == 0 or panel.y_label != first.y_label)
        # What lies outside the panels stands in inches from them, so their places are settled first, and once.
        box = (0.0, layout.bottom / layout.height, 1 - layout.side / layout.width)
        places = ConstrainedLayoutEngine(
            rect=(*box, 1 - (layout.bottom + layout.top) / layout.height),
            w_pad=0.05,
            h_pad=0.05,
            wspace=0.02,
            hspace=0.03,
        )
        places.execute(figure)
        last = figure.axes[layout.columns - 1]
        if layout.side:
            _label_beside(figure, last, grid[0][-1], styles, layout)
        elif styles:
            _label_below(figure, styles, layout)
        _write(figure, words, layout)
        set_alt_text(figure, describe(grid, words))
    return figure


def _told_apart(grid: Sequence[Sequence[Panel]]) -> Sequence[Sequence[Panel]]:
    """Return the panels with another colour for operations of two families that share one."""
    colours = other_colours(line.style.op for row in grid for panel in row for line in panel.lines if line.style.op)
    if not colours:
        return grid

    def recoloured(line: Line) -> Line:
        colour = colours.get(line.style.op, line.style.colour)
        return dataclasses.replace(line, style=dataclasses.replace(line.style, colour=colour))

    return [[dataclasses.replace(panel, lines=[*map(recoloured, panel.lines)]) for panel in row] for row in grid]


def _styles(panels: Iterable[Panel]) -> list[SeriesStyle]:
    """Return every labelled style once, the highest line of the last panel that has it first."""
    at: dict[SeriesStyle, float] = {}
    for panel in panels:
        for line in panel.lines:
            if line.style.label and len(line.y):
                at[line.style] = float(line.y[-1])
    return sorted(at, key=lambda style: -at[style])


def _layout(
    grid: Sequence[Sequence[Panel]],
    words: Words,
    styles: Sequence[SeriesStyle],
    width: float | None,
    heights: Sequence[float],
) -> _Layout:
    rows, columns = len(grid), len(grid[0])
    side = 0.45 + _label_width(styles) if styles else 0.0
    width = width or PANEL_WIDTH * columns + side
    scale = 0.8 if width < NARROW else 1.0
    if width - side < MIN_PANEL * columns:
        side = 0.0
    ratios = tuple(heights)
    if width - side < MIN_PANEL * columns:
        ratios = tuple(height for height in heights for _ in range(columns))
        rows, columns = rows * columns, 1
    top = (0.16 + 0.19 * len(_lines(words.title, width, 12 * scale, BOLD))) * scale + 0.04
    top += 0.16 * scale * len(_lines(words.setting, width, 8.5 * scale))
    below = 0 if side else math.ceil(len(styles) / _label_columns(styles, width, scale))
    bottom = 0.06 + LABEL_HEIGHT * scale * below + (0.08 if below else 0)
    bottom += 0.145 * scale * len(_lines(words.note, width, 7.5 * scale)) + (0.06 if words.note else 0)
    panels = (2.0 if scale < 1 else 2.75 if rows == 1 else 2.35) * sum(ratios)
    if side:
        panels = max(panels, LABEL_HEIGHT * len(styles) + 0.1)
    return _Layout(
        width=width,
        height=top + bottom + panels,
        rows=rows,
        columns=columns,
        top=top,
        bottom=bottom,
        side=side,
        scale=scale,
        ratios=ratios,
    )


def _lines(text: str, width: float, size: float, letter: float = 0.56) -> list[str]:
    """Wrap text of ``size`` points to the figure's width; DejaVu's letters are 0.56 em wide on average, bold 0.66."""
    return textwrap.wrap(text, width=int((width - 0.2) * 72 / (letter * size)))


def _label_width(styles: Sequence[SeriesStyle]) -> float:
    """Return the inches that the longest label takes at full size, its piece of line included."""
    letters = max(len(style.label) * (BOLD if style.bold else 0.56) for style in styles)
    return 0.45 + letters * LABEL_SIZE / 72


def _label_columns(styles: Sequence[SeriesStyle], width: float, scale: float) -> int:
    """Return how many labels fit beside one another under the panels."""
    return max(1, int(width / (_label_width(styles) * scale + 0.1))) if styles else 1


def _draw(axes: Axes, panel: Panel, width: float, *, y_label: bool) -> None:
    for line in panel.lines:
        ours = line.style.bold
        axes.plot(line.x, line.y, zorder=4 if ours else 3, **line.style.line())
        if line.ends is not None:
            _label_ends(axes, line)
        for n in line.ringed:
            mark(axes, line.x[n], line.y[n])
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    if y_label:
        axes.set_ylabel(panel.y_label)
    _scale(axes, panel, width)
    if panel.decorate is not None:
        panel.decorate(axes)


def _scale(axes: Axes, panel: Panel, width: float) -> None:
    """Set scales, limits and ticks of both axes."""
    if panel.sizes is None:
        axes.set_xscale("log")
        low, high = panel.x_limits or _range(value for line in panel.lines for value in line.x)
        if panel.x_limits:
            axes.set_xlim(low, high)
        elif any(line.ends for line in panel.lines):
            axes.margins(x=0.3)
        log_axis(axes.xaxis, *axes.get_xlim(), width)
    else:
        axes.grid(False, axis="x")
        sizes = sorted(panel.sizes)
        size_axis(axes, sizes, panel.x_label)
        axes.set_xticks(sizes[:: -math.ceil(len(sizes) * 0.3 / width)][::-1])
        axes.set_xticklabels([binary(value) for value in axes.get_xticks()])
        if panel.x_limits:
            axes.set_xlim(*panel.x_limits)
    if panel.y_log:
        axes.set_yscale("log")
        low, high = _range(value for line in panel.lines for value in line.y)
        # A line that does not change would leave an axis of a hair's breadth, without a single tick.
        limits = panel.y_limits or ((low / 1.5, high * 1.5) if high < 1.1 * low else None)
        if limits:
            low, high = limits
            axes.set_ylim(low, high)
        log_axis(axes.yaxis, low, high)
    else:
        axes.set_ylim(*(panel.y_limits or (0, None)))


def _range(values: Iterable[float]) -> tuple[float, float]:
    finite = [float(value) for value in values]
    return min(finite), max(finite)


def mark(axes: Axes, x: float, y: float) -> None:
    """Ring a point that should not be believed."""
    axes.plot([x], [y], marker="o", markersize=11, markerfacecolor="none", markeredgecolor=WARNING, zorder=5)


def _label_ends(axes: Axes, line: Line) -> None:
    """Write beside the first and the last point of a line, away from the line."""
    from matplotlib.patheffects import withStroke

    assert line.ends is not None
    forward = line.x[-1] >= line.x[0]
    for end, outward in ((0, -1 if forward else 1), (-1, 1 if forward else -1)):
        if end and len(line.x) == 1:
            continue
        axes.annotate(
            line.ends[end],
            (line.x[end], line.y[end]),
            xytext=(6 * outward, 0),
            textcoords="offset points",
            ha="left" if outward > 0 else "right",
            va="center",
            fontsize="small",
            color=line.style.colour,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            zorder=6,
        )


def _label_beside(figure: Figure, axes: Axes, panel: Panel, styles: Sequence[SeriesStyle], layout: _Layout) -> None:
    """Write every label right of the last panel, where its line ends, and lead it to lines that reach the edge."""
    from matplotlib.lines import Line2D

    height, width = layout.height, layout.width
    box = axes.get_position()
    ends: dict[SeriesStyle, tuple[float, float]] = {}
    for line in panel.lines:
        if line.style in styles and len(line.x):
            x, y = axes.transData.transform(max(zip(line.x, line.y, strict=True), key=lambda point: point[0]))
            ends[line.style] = tuple(figure.transFigure.inverted().transform((x, y)))
    wanted = [ends[style][1] if style in ends else box.y0 for style in styles]
    order = sorted(range(len(styles)), key=lambda n: wanted[n])
    gap = LABEL_HEIGHT * layout.scale / height
    places = spread(
        [wanted[n] for n in order], gap, gap / 2 + layout.bottom / height, 1 - layout.top / height - gap / 2
    )
    start = (width - layout.side) / width
    edge = max((x for x, _ in ends.values()), default=box.x1)
    for n, y in zip(order, places, strict=True):
        style = styles[n]
        end = ends.get(style)
        at = start + 0.3 / width
        if panel.leaders and end is not None and end[0] > edge - 0.02:
            points = ([end[0] + 0.05 / width, start + 0.08 / width, at], [end[1], y, y])
            figure.add_artist(Line2D(*points, color=style.colour, linewidth=0.6, alpha=0.5))
        handle = Line2D([at, at + 0.15 / width, at + 0.3 / width], [y, y, y], **style.line())
        handle.set_markevery([1])
        figure.add_artist(handle)
        _label(figure, at + 0.37 / width, y, style, layout.scale)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places at least ``gap`` apart in [low, high], in order and near the ``wanted`` ones, which ascend."""
    places = [min(max(value, low), high) for value in wanted]
    for n in range(1, len(places)):
        places[n] = max(places[n], places[n - 1] + gap)
    ceiling = high
    for n in reversed(range(len(places))):
        places[n] = min(places[n], ceiling)
        ceiling = places[n] - gap
    return places


def _label_below(figure: Figure, styles: Sequence[SeriesStyle], layout: _Layout) -> None:
    """Write the labels in columns under the panels."""
    from matplotlib.lines import Line2D

    columns = _label_columns(styles, layout.width, layout.scale)
    rows = math.ceil(len(styles) / columns)
    step, each = LABEL_HEIGHT * layout.scale / layout.height, 1 / columns
    top = (layout.bottom - 0.05) / layout.height
    for n, style in enumerate(styles):
        x, y = n // rows * each + 0.08 / layout.width, top - (n % rows + 0.5) * step
        length = 0.3 * layout.scale / layout.width
        handle = Line2D([x, x + length / 2, x + length], [y, y, y], **style.line())
        handle.set_markevery([1])
        figure.add_artist(handle)
        _label(figure, x + length + 0.08 * layout.scale / layout.width, y, style, layout.scale)


def _label(figure: Figure, x: float, y: float, style: SeriesStyle, scale: float) -> None:
    weight = "bold" if style.bold else "normal"
    figure.text(x, y, style.label, va="center", fontsize=LABEL_SIZE * scale, color=INK, fontweight=weight)


def _write(figure: Figure, words: Words, layout: _Layout) -> None:
    """Write the title and the setting above the panels, the note below them."""
    left, height, scale = 0.08 / layout.width, layout.height, layout.scale
    title = "\n".join(_lines(words.title, layout.width, 12 * scale, BOLD))
    setting = "\n".join(_lines(words.setting, layout.width, 8.5 * scale))
    figure.text(left, 1 - 0.06 / height, title, fontsize=12 * scale, fontweight="bold", color=INK, va="top")
    below = (0.1 + 0.2 * len(title.splitlines()) * scale) / height
    figure.text(left, 1 - below, setting, fontsize=8.5 * scale, color=MUTED, va="top", linespacing=1.25)
    note = "\n".join(_lines(words.note, layout.width, 7.5 * scale))
    figure.text(left, 0.06 / height, note, fontsize=7.5 * scale, color=MUTED, va="bottom", linespacing=1.3)


def describe(grid: Sequence[Sequence[Panel]], words: Words) -> str:
    """Return one sentence on what a figure shows: its axes, its setting, and which line ends lowest and highest."""
    panel = grid[0][-1]
    titles = ", ".join(dict.fromkeys(p.title.lower() for row in grid for p in row if p.title))
    said = f"{words.title} ({words.setting}): {panel.y_label} over {panel.x_label}"
    said += f", panels {titles}" if titles else ""
    lines = [line for line in panel.lines if len(line.y) and line.style.label]
    if lines:
        low, high = (choose(lines, key=lambda line: line.y[-1]) for choose in (min, max))
        said += f"; {len(lines)} line{'s' * (len(lines) > 1)}, ending"
        said += f" from {low.y[-1]:.3g} ({low.style.label})" if low is not high else ""
        said += f" {'to' if low is not high else 'at'} {high.y[-1]:.3g} ({high.style.label})"
    return f"{said}."
