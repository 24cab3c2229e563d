"""How figures are put together: implementations told apart, nothing cut off or on top of one another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure

from lrbench.analysis.figures.layout import Drawing, Line, Panel
from lrbench.analysis.figures.plots import KINDS, MODEL, OF_ENTRIES, THEORY_KINDS
from lrbench.analysis.figures.selection import Selection
from lrbench.analysis.figures.style import curve_style

from .drawing import COMMITTED, committed, decoding, of_committed, plot, roofline


def outlines(figure: Figure) -> list[tuple[str, np.ndarray]]:
    """Return everything that is written in a figure, and the corners of each text, a hair further in, in pixels."""
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
            texts += [label for place, label in ticks if low <= place <= high]
    found = []
    for text in texts:
        if text.get_text() and text.get_visible():
            # Its frame, unlike its extent, turns with a text.
            text.set_bbox({"pad": -0.8})
            text.update_bbox_position_size(figure.canvas.get_renderer())
            frame = text.get_bbox_patch()
            found.append((text.get_text(), frame.get_transform().transform(frame.get_path().vertices)))
    return found


def apart(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether a line along a side of one of two rectangles lies between them."""
    if (a.max(0) <= b.min(0)).any() or (b.max(0) <= a.min(0)).any():
        return True
    sides = [side for corners in (a, b) for side in np.diff(corners[:3], axis=0)]
    return any((a @ side).max() <= (b @ side).min() or (b @ side).max() <= (a @ side).min() for side in sides)


def points(figure: Figure) -> list[tuple[str, np.ndarray]]:
    """Return the corners of all markers in a figure's panels, a hair further in, in pixels."""
    lines = [line for axes in figure.axes for line in axes.lines if line.get_marker() not in ("", "None")]
    square = 3 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
    return [("a point", at + square) for line in lines for at in line.get_transform().transform(line.get_xydata())]


def faults(figure: Figure) -> list[tuple[str, ...]]:
    """Return the texts that cover one another or a point, in pairs, and those that reach beyond the figure's edges."""
    found = outlines(figure)
    pairs = itertools.chain(itertools.combinations(found, 2), itertools.product(found, points(figure)))
    over = [(a, b) for (a, one), (b, other) in pairs if not apart(one, other)]
    return over + [(said,) for said, corners in found if figure.bbox.count_contains(corners) < len(corners)]


def drawn(kind: str, family: str, width: float | None) -> Figure:
    """Draw a figure of what was measured on the H200 of a family, up to 16 implementations, or of the counts."""
    if kind == "context":
        return plot(kind, decoding(), Selection(batch=16, head_dim=256), width=width)
    if kind in OF_ENTRIES:
        return OF_ENTRIES[kind]().at(width)
    if kind == "kernels":
        return roofline(committed(), ROOFLINES[kind], Selection(), width)
    return of_committed(kind, family, ROOFLINES.get(kind, ())).at(width)


ROOFLINES = {
    "roofline": ("h200", "b200"),
    "roofs": ("a100", "h100", "h200", "b200"),
    "kernels": ("a100", "h100", "b200"),
}
OF_ONE_FAMILY = ("context", "roofs", "kernels", MODEL, *THEORY_KINDS, *OF_ENTRIES)
NOT_MEASURED = {
    "wkv": ("chunk-size", "trade-off", "rate", "sustained", "energy"), "rglru": ("head-dim",),
    "gated-mlp": ("chunk-size", "trade-off", "rate", "head-dim"),
}  # fmt: skip
FIGURES = [
    pytest.param(kind, family, width, marks=[pytest.mark.slow] if width == 7.0 or (width and family != "tfla") else [])
    for kind in (*KINDS, *ROOFLINES, *OF_ENTRIES)
    for family in (("tfla",) if kind in OF_ONE_FAMILY else COMMITTED)
    for width in (None, 3.3, 7.0)
    if kind not in NOT_MEASURED.get(family, ())
]


@pytest.mark.parametrize(("kind", "family", "width"), FIGURES)
def test_every_figure_fits(kind: str, family: str, width: float | None) -> None:
    """No text of a figure covers another or is cut off, and all can be read."""
    figure = drawn(kind, family, width)
    assert faults(figure) == []
    assert width is None or figure.get_figwidth() == width
    labels = {axes.get_ylabel() for axes in figure.axes} | {axes.get_xlabel() for axes in figure.axes}
    for label in labels - {""}:
        assert "(" in label or "FLOP" in label or label in ("% of the roof", "tokens", "channels"), (
            f"{label!r} names no unit"
        )
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
