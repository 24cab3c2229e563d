"""How figures are put together: implementations told apart, nothing cut off or on top of one another."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.figure import Figure

from lrbench.analysis.figures.layout import Drawing, Line, Panel
from lrbench.analysis.figures.plots import KINDS, MODEL, RESULT_KINDS
from lrbench.analysis.figures.selection import Selection
from lrbench.analysis.figures.style import curve_style

from .drawing import COMMITTED, committed, decoding, plot, roofline


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Return the pairs of texts outside the panels' lines that cover one another by more than a hair."""
    figure.draw_without_rendering()
    texts = [*figure.texts]
    for axes in figure.axes:
        texts += [axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
            texts += [label for place, label in ticks if low <= place <= high]
    boxes = [(t.get_text(), t.get_window_extent().shrunk(0.94, 0.8)) for t in texts if t.get_text() and t.get_visible()]
    inside = [(said, box) for said, box in boxes if figure.bbox.overlaps(box)]
    return [(a, b) for (a, one), (b, other) in itertools.combinations(inside, 2) if one.overlaps(other)]


def cut_off(figure: Figure) -> list[str]:
    """Return the texts that reach beyond the figure's edges."""
    figure.draw_without_rendering()
    (x0, y0), (x1, y1) = figure.bbox.min, figure.bbox.max
    of_axes = [t for axes in figure.axes for t in (axes.yaxis.label, axes._left_title, axes.xaxis.label)]
    boxes = [(t.get_text(), t.get_window_extent()) for t in (*figure.texts, *of_axes) if t.get_text()]
    return [said for said, b in boxes if b.x0 < x0 or b.y0 < y0 or b.x1 > x1 or b.y1 > y1]


def drawn(kind: str, width: float | None) -> Figure:
    """Draw a figure of all rows measured on the H200 at head dim 256, up to 16 implementations, or of the counts."""
    if kind == "context":
        return plot(kind, decoding(), Selection(batch=16, head_dim=256), width=width)
    frame = committed() if kind in (*RESULT_KINDS, MODEL, "roofline") else None
    if kind == "roofline":
        return roofline(frame, ["h200", "b200"], COMMITTED["tfla"], width)
    return plot(kind, frame, COMMITTED["tfla"], width=width)


@pytest.mark.parametrize("width", [None, 3.3, pytest.param(7.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*KINDS, "roofline"])
def test_every_figure_fits(kind: str, width: float | None) -> None:
    figure = drawn(kind, width)
    assert overlapping(figure) == []
    assert cut_off(figure) == []
    assert width is None or figure.get_figwidth() == width
    labels = {axes.get_ylabel() for axes in figure.axes} | {axes.get_xlabel() for axes in figure.axes}
    for label in labels - {""}:
        assert "(" in label or "FLOP" in label or label == "% of the roof", f"{label!r} names no unit"
    written = [*figure.texts, *(each for axes in figure.axes for each in axes.texts)]
    assert min(each.get_fontsize() for each in written) > 5.95
    ticks = [label for axes in figure.axes for label in (*axes.get_xticklabels(), axes.xaxis.label)]
    assert min(each.get_fontsize() for each in ticks) >= 6.5


def test_a_constant_line_has_ticks() -> None:
    line = Line(x=[1, 2, 4], y=[0.33] * 3, style=curve_style(0, "constant"))
    panel = Panel(title="", lines=[line], x_label="L (tokens)", y_label="time (ms)", sizes=[1, 2, 4])
    figure = Drawing(grid=[[panel]], title="Constant", setting="a test").at()
    low, high = figure.axes[0].get_ylim()
    assert any(low <= tick <= high for tick in figure.axes[0].get_yticks())
