"""A report's figures: those of :mod:`..plots` and :mod:`..roofline`, one mode each, with what they show in words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...results.select import best_rows
from ..accelerators.known import known_accelerators
from ..figures.plots import drawing
from ..figures.roofline import roofline_drawing
from ..figures.selection import choose_over_width
from ..figures.style import binary
from .markup import ABSENT, Cell, Html, details, figure, grid, join, numeric, paragraph, table
from .subject import MODE_TITLES, Subject, choose, name_cell

if TYPE_CHECKING:
    import pandas as pd

    from ..figures.layout import Drawing

GIB = 2**30
NARROW_INCHES = 3.6
"""Width of a figure on a telephone."""


def over(subject: Subject, kind: str, x: str, column: str, *, x_name: str, y_name: str, scale: float = 1.0) -> Html:
    """Return one figure for each mode, and the numbers in it as tables.

    Args:
        kind: a kind of :func:`..plots.plot`.
        x: the size column along the x axis.
        column: what is drawn; divided by ``scale`` it is in the unit of ``y_name``.
        x_name, y_name: how the two are called, units included.
    """
    drawn = _each_mode(subject, lambda mode: drawing(kind, subject.rows, subject.selection(mode)))
    tables = []
    for mode in subject.modes:
        # Where a figure finds nothing to show, it has said so.
        with contextlib.suppress(ValueError):
            rows = _shown(subject, mode, x, column)
            if not rows.empty:
                tables.append(_numbers(mode, rows, x, column, x_name, y_name, scale))
    return join(drawn, details("The numbers", join(*tables)) if tables else Html(""))


def _shown(subject: Subject, mode: str, x: str, column: str) -> pd.DataFrame:
    """Return the rows of a figure: every implementation's fastest for each ``x``, and a column ``x`` alone varies."""
    rows = choose(subject.rows, subject.selection(mode), seq_len=x != "seq_len").rows
    return _fastest(rows, x, column)


def _fastest(rows: pd.DataFrame, x: str, column: str) -> pd.DataFrame:
    return best_rows(rows[rows[x].notna() & rows[column].notna()], ("op", "impl", "mode", x))


def _numbers(mode: str, rows: pd.DataFrame, x: str, column: str, x_name: str, y_name: str, scale: float) -> Html:
    sizes = sorted({int(value) for value in rows[x]})
    body: list[list[str | Cell]] = []
    rows = rows[[*dict.fromkeys(("op", "impl", "chunk_size", x, column))]]
    for _, group in rows.groupby(["op", "impl"], sort=True):
        values = {int(row[x]): row for _, row in group.iterrows()}
        cells = [_value(values.get(size), x, column, scale) for size in sizes]
        body.append([name_cell(next(iter(values.values()))), *cells])
    caption = f"{MODE_TITLES[mode]}: {y_name} over {x_name}"
    return table(caption, ["implementation", *(binary(size) for size in sizes)], body)


def over_width(subject: Subject) -> Html:
    """Return time over head dim, or over channels, one figure for each mode, and the numbers in it as tables."""
    drawn = _each_mode(subject, lambda mode: drawing("head-dim", subject.rows, subject.selection(mode)))
    tables = []
    for mode in subject.modes:
        with contextlib.suppress(ValueError):
            chosen, x = choose_over_width(subject.rows, subject.selection(mode))
            rows = _fastest(chosen.rows, x, "time_ms")
            name = {"head_dim_v": "value head dim", "embedding_dim": "channels"}[x]
            tables.append(_numbers(mode, rows, x, "time_ms", name, "time per call (ms)", 1.0))
    return join(drawn, details("The numbers", join(*tables)) if tables else Html(""))


def _value(row: pd.Series | None, x: str, column: str, scale: float) -> str | Cell:
    if row is None:
        return ABSENT
    chunk = row["chunk_size"]
    shown = "" if x == "chunk_size" or chunk != chunk else f"L {binary(chunk)}"
    return numeric(row[column] / scale, detail=shown)


def trade_off(subject: Subject) -> Html:
    """Return runtime against memory over chunk size, one figure for each mode."""
    return _each_mode(subject, lambda mode: drawing("trade-off", subject.rows, subject.selection(mode)))


def rooflines(subject: Subject) -> Html:
    """Return the roofline of the accelerator with what was measured on it, one figure for each mode.

    Where nothing was measured on it, the measured GPU's, if it is a known one; a CPU row stands on no GPU's roofline.
    """
    said = ""
    key = subject.accelerator.key
    if not subject.on_target:
        said = f"Nothing was measured on {subject.accelerator.name} ({key}), so nothing stands on its roofline."
        if subject.device == "cpu" or subject.device not in known_accelerators():
            return paragraph(f"{said} The rows are of {subject.device_name}.")
        key = subject.device
        said += f" This one is of {subject.device_name}, where the rows were measured."
    accelerator = subject.accelerator if subject.on_target else key

    drawn = _each_mode(
        subject,
        lambda mode: roofline_drawing(subject.rows, accelerator, subject.selection(mode)),
        stacked=True,
    )
    return join(paragraph(said), drawn)


def _each_mode(subject: Subject, draw: Callable[[str], Drawing], *, stacked: bool = False) -> Html:
    """Return a figure for each mode, for wide and for narrow screens; a sentence where there is nothing to draw.

    Args:
        draw: returns what is to be seen of a mode.
        stacked: whether one stands above the other wherever they are read: figures of several panels.
    """
    drawn, missing = [], []
    for mode in subject.modes:
        try:
            seen = draw(mode)
            drawn.append(figure(seen.at(), seen.at(NARROW_INCHES)))
        except ValueError as error:
            missing.append(f"{MODE_TITLES[mode]}: not drawn, {error}.")
    return join(join(*drawn) if stacked else grid(drawn), *map(paragraph, missing))
