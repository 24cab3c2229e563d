"""How figures are put together: implementations told apart, nothing cut off or on top of one another."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from lrbench.analysis.figures.layout import Drawing, Line, Panel, spread
from lrbench.analysis.figures.plots import KINDS, MODEL, RESULT_KINDS, plot
from lrbench.analysis.figures.roofline import roofline
from lrbench.analysis.figures.selection import Selection
from lrbench.analysis.figures.style import OPERATION_LABELS, curve_style, save_figure, series_style
from lrbench.results.select import load_results

RESULTS = Path(__file__).resolve().parents[3] / "results" / "h200_sxm"


# Machado, Oliveira and Fernandes 2009, full severity, on linear RGB.
VISION = {
    "all cones": np.eye(3),
    "no L cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no M cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def seen(colour: str, vision: np.ndarray) -> np.ndarray:
    """Return a colour's CIELAB coordinates as seen by an eye."""
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(vision @ linear, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
def test_operations_of_a_family_are_told_apart_by_every_eye(vision: str) -> None:
    """CIELAB distances of 15 and more; what one just notices is 2.3."""
    others = ("rglru", "linear_scan", "rglru_layer", "wkv4", "gated_mlp", "projections")
    family = [op for op in OPERATION_LABELS if op not in others]
    assert len(family) == 10
    colours = {op: seen(series_style(op, "fused_chunk").colour, VISION[vision]) for op in family}
    for one, other in itertools.combinations(family, 2):
        assert np.linalg.norm(colours[one] - colours[other]) > 15, (one, other)


def test_styles_are_the_same_everywhere_and_tell_implementations_apart() -> None:
    ours = ("fused_chunk", "xl_chunk", "limit_chunk", "torch", "parallel")
    known = [
        *((op, impl) for op in ("mlstm_sig", "mlstm_exp", "simple_gla", "retention", "mamba2_ssd") for impl in ours),
        ("mlstm_sig", "mlstm_kernels.xl_chunk_siging"),
        ("mlstm_sig", "mlstm_kernels.parallel_siging"),
        ("mlstm_exp", "mlstm_kernels.xl_chunk"),
        ("mlstm_exp", "mlstm_kernels.limit_chunk"),
        ("mlstm_exp", "mlstm_kernels.native_custbw"),
        ("mlstm_exp", "mlstm_kernels.native_autograd"),
        ("simple_gla", "fla.chunk_simple_gla"),
        ("gla", "fla.chunk_gla"),
        ("gla", "fla.fused_chunk_gla"),
        ("attention", "torch.sdpa_flash"),
        ("attention", "torch.sdpa_cudnn"),
        ("attention", "torch.sdpa_cpu"),
        *(("attention", f"flash_attn.{version}") for version in ("v2", "v3", "v4")),
    ]
    looks = {(s.colour, s.marker, str(s.dashes)) for s in (series_style(op, impl) for op, impl in known)}
    assert len(looks) == len(known)
    assert series_style("x", "unknown.kernel") == series_style("x", "unknown.kernel")
    assert len(set(OPERATION_LABELS.values())) == len(OPERATION_LABELS)


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([], []),
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5, 0.5], [0.5, 0.6, 0.7]),
        ([0.9, 0.95, 1.0], [0.8, 0.9, 1.0]),
        ([-1.0, 0.05], [0.0, 0.1]),
    ],
)
def test_labels_are_spread(wanted: list[float], places: list[float]) -> None:
    assert spread(wanted, 0.1, 0.0, 1.0) == pytest.approx(places)


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
    beyond = []
    texts = [
        *figure.texts,
        *(t for axes in figure.axes for t in (axes.yaxis.label, axes._left_title, axes.xaxis.label)),
    ]
    for each in texts:
        box = each.get_window_extent()
        if each.get_text() and (box.x0 < x0 or box.y0 < y0 or box.x1 > x1 or box.y1 > y1):
            beyond.append(each.get_text())
    return beyond


@functools.cache
def measured() -> pd.DataFrame:
    return load_results(RESULTS)


def drawn(kind: str, width: float | None) -> Figure:
    """Draw a figure of all rows measured on the H200 at head dim 256, up to 16 implementations, or of the counts."""
    frame = measured() if kind in (*RESULT_KINDS, MODEL, "roofline") else None
    if kind == "roofline":
        return roofline(frame, ["h200", "b200"], Selection(head_dim=256), width)
    return plot(kind, frame, Selection(head_dim=256 if kind != "head-dim" else None), width=width)


@pytest.mark.parametrize("width", [None, 3.3, 7.0])
@pytest.mark.parametrize("kind", [*KINDS, "roofline"])
def test_every_figure_fits(kind: str, width: float | None) -> None:
    figure = drawn(kind, width)
    assert overlapping(figure) == []
    assert cut_off(figure) == []
    assert width is None or figure.get_figwidth() == width
    labels = {axes.get_ylabel() for axes in figure.axes} | {axes.get_xlabel() for axes in figure.axes}
    for label in labels - {""}:
        assert "(" in label or "FLOP" in label or label == "% of the roof", f"{label!r} names no unit"


@pytest.mark.parametrize("kind", ["runtime", "trade-off", "intensity", "intensity-optimal", "roofline"])
def test_text_is_legible_in_a_column(kind: str) -> None:
    """At 3.3 inches nothing is set in less than 6 points; ticks and axes have at least 6.5."""
    figure = drawn(kind, 3.3)
    inside = [each for axes in figure.axes for each in axes.texts]
    assert min(each.get_fontsize() for each in [*figure.texts, *inside]) > 5.95
    ticks = [label for axes in figure.axes for label in axes.get_xticklabels()]
    assert min(each.get_fontsize() for each in [*ticks, *(axes.xaxis.label for axes in figure.axes)]) >= 6.5


def flat(value: float = 1.0) -> list[list[Panel]]:
    line = Line(x=[1, 2, 4], y=[value] * 3, style=curve_style(0, "constant"))
    return [[Panel(title="", lines=[line], x_label="L (tokens)", y_label="time (ms)", sizes=[1, 2, 4])]]


def test_a_constant_line_has_ticks() -> None:
    figure = Drawing(grid=flat(0.33), title="Constant", setting="a test").at()
    low, high = figure.axes[0].get_ylim()
    assert any(low <= tick <= high for tick in figure.axes[0].get_yticks())


def test_bad_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"width must be at least 2.5 inches, got 1"):
        Drawing(grid=flat(), title="t", setting="s").at(1.0)
    with pytest.raises(ValueError, match="dpi must be positive, got 0"):
        save_figure(Drawing(grid=flat(), title="t", setting="s").at(), tmp_path / "a.png", dpi=0)
