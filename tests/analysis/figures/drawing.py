"""Drawing figures in tests, and reading them back."""

from __future__ import annotations

import functools
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lrbench.analysis.figures import plots
from lrbench.analysis.figures import roofline as rooflines
from lrbench.analysis.figures.layout import Drawing
from lrbench.analysis.figures.selection import Selection
from lrbench.analysis.figures.theory import Theory
from lrbench.results.select import load_results
from lrbench.results.store import committed_results

from .. import rows as made

COMMITTED = {
    "tfla": Selection(kernel="tfla", tokens=65536, head_dim=256, head_dim_qk=128, channels=4096, seq_len=8192),
    "lightning": Selection(kernel="lightning", tokens=65536, head_dim=128, seq_len=65536),
    "rglru": Selection(kernel="rglru", batch=8, channels=1024, seq_len=8192),
    "wkv": Selection(kernel="wkv", dtype="bf16", batch=1, channels=256, seq_len=8192),
    "gated-mlp": Selection(kernel="gated-mlp", d_model=4096, seq_len=65536),
}
"""Family -> a problem of which the committed rows have most."""


@functools.cache
def committed() -> pd.DataFrame:
    """Return the rows measured on the H200."""
    return load_results(committed_results("h200_sxm"))


@functools.cache
def sweep() -> pd.DataFrame:
    """Return made-up rows shaped like the default sweep."""
    return made.frame(made.default_sweep())


@functools.cache
def decoding() -> pd.DataFrame:
    """Return made-up rows of the preset ``decode``."""
    return made.frame(made.decoding())


@functools.cache
def of_committed(kind: str, family: str, gpus: tuple[str, ...] = ()) -> Drawing:
    """Return what a figure of a family shows: of what was measured on the H200, or of the counts alone."""
    if kind in plots.THEORY_KINDS:
        return plots.drawing(kind, None, COMMITTED[family], Theory())
    if gpus:
        return rooflines.roofline(committed(), [*gpus], COMMITTED[family])
    return plots.drawing(kind, committed(), COMMITTED[family], Theory())


def plot(
    kind: str,
    frame: pd.DataFrame | None = None,
    selection: Selection = Selection(),  # noqa: B008, frozen
    *,
    theory: Theory = Theory(),  # noqa: B008, frozen
    width: float | None = None,
) -> Figure:
    return plots.drawing(kind, frame, selection, theory).at(width)


def roofline(
    frame: pd.DataFrame,
    gpus: Any,
    selection: Selection = Selection(),  # noqa: B008, frozen
    width: float | None = None,
) -> Figure:
    return rooflines.roofline(frame, gpus, selection).at(width)


def lines(figure: Figure, panel: int) -> dict[str, list[tuple[float, float]]]:
    """Return label -> points of a panel's labelled lines."""
    return {
        str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in figure.axes[panel].lines
        if not str(line.get_label()).startswith("_")
    }


def text(figure: Figure) -> str:
    """Return everything that is written outside the panels."""
    return " ".join(" ".join(t.get_text().split()) for t in figure.texts)


def words(shown: Drawing) -> str:
    """Return what will be written outside the panels, without drawing it."""
    return " ".join((shown.finding, shown.title, shown.setting, shown.note))
