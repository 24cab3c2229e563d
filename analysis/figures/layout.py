"""How a figure is put together: panels, a title and the setting above them, labels at the lines or below, a note.

A figure function says what is to be seen, a :class:`Drawing`; :meth:`Drawing.at` draws its panels at a width in inches.
Wide figures have their panels side by side and every line labelled where it ends; at the width of a column of text the
panels stand under one another and the labels below them, in letters that are still read there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .style import MUTED, WARNING, SeriesStyle, check_size, log_axis, new_figure, size_axis, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

PANEL_WIDTH = 3.5
"""Inches of a panel where no width is asked for."""

NARROW = 5.5
"""Inches under which a figure is laid out for a column of text."""

MIN_PANEL = 2.4
TITLE_SIZE, LABEL_SIZE, NOTE_SIZE = 12, 8.5, 7.5
"""Points, at full size."""

LABEL_HEIGHT = 0.185
"""Inches from one label to the next."""

AROUND = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""Where a name may stand beside its point, the best place first: to the right where its line goes that way, upwards."""

PLAIN, BOLD = 0.56, 0.66
"""Mean width of a letter of DejaVu Sans in em."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a panel.

    Attributes:
        ends: what is written beside the first and the last point, where there is room.
        ringed: points to mark, by position.
        hollow: points that were measured on a busy machine, by position.
    """

    x: Sequence[float]
    y: Sequence[float]
    style: SeriesStyle
    ends: tuple[str, str] | None = None
    ringed: Sequence[int] = ()
    hollow: Sequence[int] = ()


def measured_line(rows: pd.DataFrame, x: str, y: pd.Series, style: SeriesStyle) -> Line:
    """Return a line of rows in order over the column ``x``, ringed if suspect, hollow if noisy."""
    ringed, hollow = (rows[name].notna().to_numpy().nonzero()[0].tolist() for name in ("suspect", "noise"))
    return Line(x=rows[x].tolist(), y=y.tolist(), style=style, ringed=ringed, hollow=hollow)


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
class Drawing:
    """What is to be seen in a figure, at whatever width it is drawn.

    Attributes:
        grid: rows of panels; every row has as many.
        title, setting, note: the text above the panels (what holds for all of them, second) and below.
        finding: the statement that the figure makes, its headline; "": the title is.
        heights: of the rows, relative to the usual height.
        usual_width: inches where no width is asked for; None: what suits the number of panels.
        rows, every, x: of a figure of results: the rows that are its points, those of the lines that it leaves out
            besides, and the column along its x axis.
    """

    grid: Sequence[Sequence[Panel]]
    title: str
    setting: str
    note: str = ""
    finding: str = ""
    heights: Sequence[float] | None = None
    usual_width: float | None = None
    rows: pd.DataFrame | None = None
    every: pd.DataFrame | None = None
    x: str = ""

    def at(self, width: float | None = None) -> Figure:
        """Return the figure at a width in inches [the usual one]; ValueError for one in which nothing can be read."""
        check_size(width)
        return _compose(self, self.usual_width if width is None else width)

    @property
    def words(self) -> str:
        """What stands under the headline."""
        return f"{self.title} · {self.setting}" if self.finding else self.setting

    @property
    def described(self) -> str:
        """One sentence on what the figure shows: its axes, its setting, and which line ends lowest and highest."""
        panel = self.grid[0][-1]
        titles = ", ".join(dict.fromkeys(p.title.lower() for row in self.grid for p in row if p.title))
        finding = f"{self.finding}; " if self.finding else ""
        said = f"{self.title} ({self.setting}): {finding}{panel.y_label} over {panel.x_label}"
        said += f", panels {titles}" if titles else ""
        if lines := [line for line in panel.lines if len(line.y) and line.style.label]:
            low, high = (choose(lines, key=lambda line: line.y[-1]) for choose in (min, max))
            said += f"; {len(lines)} line{'s' * (len(lines) > 1)}, ending"
            said += f" from {low.y[-1]:.3g} ({low.style.label})" if low is not high else ""
            said += f" {'to' if low is not high else 'at'} {high.y[-1]:.3g} ({high.style.label})"
        return f"{said}."


def same_limits(panels: Sequence[Panel], below: float = 0.8, above: float = 1.25) -> list[Panel]:
    """Return panels with one y axis, from ``below`` times their least value to ``above`` times their highest."""
    values = [value for panel in panels for line in panel.lines for value in line.y]
    limits = (below * min(values), above * max(values))
    return [dataclasses.replace(panel, y_limits=limits) for panel in panels]


def _compose(drawing: Drawing, width: float | None) -> Figure:
    """Draw a figure: choose sizes in inches, draw the panels, then place labels and texts in inches from them."""
    panels = [panel for row in drawing.grid for panel in row]
    labelled = (line for panel in panels for line in panel.lines if line.style.label and len(line.y))
    # Every style once, the highest line of the last panel that has it first.
    ends = {line.style: float(line.y[-1]) for line in labelled}
    styles = sorted(ends, key=lambda style: -ends[style])
    rows, columns = len(drawing.grid), len(drawing.grid[0])
    heights = [*(drawing.heights or [1.0] * rows)]
    letters = max((len(style.label) * (BOLD if style.bold else PLAIN) for style in styles), default=0)
    label_width = 0.45 + letters * LABEL_SIZE / 72
    side = 0.45 + label_width if styles else 0.0
    width = width or PANEL_WIDTH * columns + side
    scale = 0.8 if width < NARROW else 1.0
    if width < NARROW or width - side < MIN_PANEL * columns:
        side = 0.0
    if width - side < MIN_PANEL * columns:
        heights = [height for height in heights for _ in range(columns)]
        rows, columns = rows * columns, 1

    def wrapped(text: str, size: float, letter: float = PLAIN) -> list[str]:
        return textwrap.wrap(text, width=int((width - 0.2) * 72 / (letter * size * scale)))

    title = wrapped(drawing.finding or drawing.title, TITLE_SIZE, BOLD)
    setting, note = wrapped(drawing.words, LABEL_SIZE), wrapped(drawing.note, NOTE_SIZE)
    top = 0.04 + scale * (0.19 * len(title) + 0.16 * len(setting) + 0.16 * bool(title))
    label_columns = 1 if side else max(1, int(width / (label_width * scale + 0.1)))
    labels = LABEL_HEIGHT * scale * math.ceil(len(styles) / label_columns) + 0.08 if styles else 0.0
    note_height = 0.145 * scale * len(note) + (0.06 if note else 0)
    bottom = 0.06 + note_height + (0 if side else labels)
    panel_height = 2.0 if scale < 1 else 2.75 if rows == 1 else 2.35
    room = max(panel_height * sum(heights), labels if side else 0)
    height = top + bottom + room
    with styled(scale):
        figure = new_figure(width, height)
        axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).flat
        for n, (each, panel) in enumerate(zip(axes, panels, strict=True)):
            first = panels[n - n % len(drawing.grid[0])]
            _draw(each, panel, (width - side) / columns - 0.55, room * heights[n // columns] / sum(heights) - 0.6)
            each.set_ylabel(panel.y_label if n % columns == 0 or panel.y_label != first.y_label else "")
        _place(figure, columns, (0.05, bottom + 0.05, width - side - 0.02, height - top))
        for each, panel in zip(figure.axes, panels, strict=True):
            _name_ends(each, panel)
        if side:
            column = (width - side, bottom + LABEL_HEIGHT / 2, height - top - LABEL_HEIGHT / 2)
            _label_beside(figure, figure.axes[columns - 1], drawing.grid[0][-1], styles, *column)
        elif styles:
            _label_below(figure, styles, label_columns, (0.06 + note_height) / height)
        under_title = height - 0.1 - 0.2 * len(title) * scale
        for y, lines, size, looks in (
            (height - 0.06, title, TITLE_SIZE, {"va": "top", "weight": "bold"}),
            (under_title, setting, LABEL_SIZE, {"va": "top", "color": MUTED}),
            (0.06, note, NOTE_SIZE, {"va": "bottom", "color": MUTED}),
        ):
            options = {"fontsize": size * scale, "linespacing": 1.3, **looks}
            figure.text(0.08 / width, y / height, "\n".join(lines), options)
        figure.set_label(drawing.described)
    return figure


def _place(figure: Figure, columns: int, box: tuple[float, float, float, float]) -> None:
    """Put a figure's panels into a box, as far apart as their ticks, labels and titles need.

    Matplotlib's own layouts measure every text twice for that, which takes as long as drawing.

    Args:
        box: left, lower, right and upper end, in inches in the figure.
    """
    import matplotlib

    panels, (left, low, right, high), (full, tall) = figure.axes, box, figure.get_size_inches()
    line = 1.25 * float(matplotlib.rcParams["axes.labelsize"]) / 72
    ticks = 0.1 + 0.5 * line * max(len(label.get_text()) for each in panels for label in each.get_yticklabels())
    right -= line / 4 * max(len(each.get_xticklabels()[-1].get_text()) for each in panels)
    across = 0.1 + ticks + line * any(each.get_ylabel() for n, each in enumerate(panels) if n % columns)
    ends = [(text.get_window_extent().y1 - each.bbox.y1) / figure.dpi for each in panels for text in each.texts]
    above = max(0.1 + 1.1 * line * any(each.get_title("left") for each in panels), *ends, 0.0)
    left, low, high, down = left + line + ticks, low + 0.1 + 2 * line, high - above, above + 0.16 + 2 * line
    width = (right - left + across) / columns - across
    height = (high - low + down) * columns / len(panels) - down
    figure.subplots_adjust(left / full, low / tall, right / full, high / tall, across / width, down / height)
    for each in panels:
        # Else matplotlib looks for their places in every drawing.
        each.yaxis.set_label_coords(-ticks / width, 0.5)
        each.xaxis.set_label_coords(0.5, -(0.1 + line) / (each.get_position().height * tall))


def _label_beside(
    figure: Figure, axes: Axes, panel: Panel, styles: Sequence[SeriesStyle], left: float, low: float, high: float
) -> None:
    """Write every label right of the last panel, where its line ends, and lead it to lines that reach the edge.

    Args:
        left, low, high: inches in the figure: where the labels' column begins, and its lower and upper end.
    """
    from matplotlib.lines import Line2D

    inches = figure.dpi_scale_trans
    to_inches = axes.transData - inches
    last = {line.style: max(zip(line.x, line.y, strict=True)) for line in panel.lines if len(line.x)}
    ends = {style: to_inches.transform(last[style]) for style in styles if style in last}
    edge = max(x for x, _ in ends.values())
    upwards = sorted(styles, key=lambda style: ends[style][1] if style in ends else low)
    places = spread([ends[style][1] if style in ends else low for style in upwards], LABEL_HEIGHT, low, high)
    for style, y in zip(upwards, places, strict=True):
        if panel.leaders and style in ends and ends[style][0] > edge - 0.2:
            x, end = ends[style]
            leader = ([x + 0.05, left + 0.08, left + 0.3], [end, y, y])
            figure.add_artist(Line2D(*leader, color=style.colour, linewidth=0.6, alpha=0.5, transform=inches))
        sample = ([left + 0.3, left + 0.45, left + 0.6], [y, y, y])
        figure.add_artist(Line2D(*sample, markevery=[1], transform=inches, **style.line()))
        weight = "bold" if style.bold else "normal"
        figure.text(left + 0.67, y, style.label, va="center", fontsize=LABEL_SIZE, fontweight=weight, transform=inches)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places at least ``gap`` apart in [low, high], in order and near the ``wanted`` ones, which ascend."""
    places: list[float] = []
    for n, value in enumerate(wanted):
        # What comes after needs its room as well.
        value = min(max(value, low), high - gap * (len(wanted) - 1 - n))
        places.append(max(value, places[-1] + gap) if places else value)
    return places


def _label_below(figure: Figure, styles: Sequence[SeriesStyle], columns: int, bottom: float) -> None:
    """Write the labels in columns under the panels, from ``bottom``, a share of the figure, upwards."""
    from matplotlib.lines import Line2D

    handles = [Line2D([0], [0], **style.line()) for style in styles]
    legend = figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.08 / figure.get_figwidth(), bottom), ncols=columns,
        borderpad=0.2, borderaxespad=0.0, handlelength=2.4, labelspacing=0.35,
    )  # fmt: skip
    for text, style in zip(legend.get_texts(), styles, strict=True):
        text.set_fontweight("bold" if style.bold else "normal")


def _draw(axes: Axes, panel: Panel, width: float, height: float) -> None:
    """Draw a panel into axes of about that many inches."""
    for line in panel.lines:
        zorder = 4 if line.style.bold else 3
        axes.plot(line.x, line.y, zorder=zorder, **line.style.line())
        if line.hollow:
            x, y = ([values[n] for n in line.hollow] for values in (line.x, line.y))
            axes.plot(x, y, zorder=zorder + 0.5, **line.style.hollow())
        for n in line.ringed:
            axes.plot(
                line.x[n], line.y[n], "o", markersize=11, markerfacecolor="none", markeredgecolor=WARNING, zorder=5
            )
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    if panel.sizes is None:
        axes.set_xscale("log")
        if any(line.ends for line in panel.lines):
            axes.margins(x=0.3)
        if panel.x_limits:
            axes.set_xlim(*panel.x_limits)
        log_axis(axes.xaxis, *axes.get_xlim(), width)
    else:
        axes.grid(visible=False, axis="x")
        size_axis(axes, panel.sizes, width)
    if panel.y_log:
        axes.set_yscale("log")
        values = [float(value) for line in panel.lines for value in line.y]
        # A line that does not change would leave an axis of a hair's breadth, without a single tick.
        if panel.y_limits is None and max(values) < 1.1 * min(values):
            axes.set_ylim(min(values) / 1.5, max(values) * 1.5)
    if panel.y_limits:
        axes.set_ylim(*panel.y_limits)
    if panel.y_log:
        log_axis(axes.yaxis, *axes.get_ylim(), height)
    if panel.decorate is not None:
        panel.decorate(axes)


def _name_ends(axes: Axes, panel: Panel) -> None:
    """Name the ends of lines: outwards, or wherever the name is in the panel and covers no text or point, or nowhere.

    Turn what is written along a slope as the panel's place has turned it.
    """
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    in_pixels = axes.transData.transform
    for each in axes.texts:
        if isinstance(each, Annotation) and each.get_transform_rotates_text():
            x, y = in_pixels([[2 * at for at in each.xy]])[0] - in_pixels([each.xy])[0]
            each.set(rotation=math.degrees(math.atan2(y, x)), transform_rotates_text=False)
    if not any(line.ends for line in panel.lines):
        return
    taken = [each.get_window_extent() for each in axes.texts]
    places = [at for line in panel.lines for at in zip(line.x, line.y, strict=True)]
    taken += [Bbox([at, at]).padded(4.0) for at in in_pixels(places)]  # half of a marker
    for line in panel.lines:
        out = 1 if line.x[-1] >= line.x[0] else -1
        for text, end, side in zip(line.ends or (), (0, -1), (-out, out), strict=False):
            for far, (x, y) in itertools.product((6, 14), AROUND):
                move = (side * far * x, far * y)
                name = write(axes, text, (line.x[end], line.y[end]), move, color=line.style.colour)
                box = name.get_window_extent()
                if all(axes.bbox.contains(*corner) for corner in box.corners()) and not box.count_overlaps(taken):
                    taken.append(box)
                    break
                name.remove()


def write(axes: Axes, text: str, at: tuple[float, float], move: tuple[float, float], **options: Any) -> Annotation:
    """Write small text ``move`` points beside a place, running away from it, on white that keeps it legible.

    Args:
        options: as ``Axes.annotate`` takes them.
    """
    usual = {
        "ha": "left" if move[0] >= 0 else "right",
        "va": "center" if not move[1] else "bottom" if move[1] > 0 else "top",
        "fontsize": "small",
        "bbox": {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6},
        "zorder": 6,
    }
    return axes.annotate(text, at, xytext=move, textcoords="offset points", **{**usual, **options})
