"""A report's figures, one mode each, with the numbers in them as tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...results.select import best_rows
from ..accelerators.known import get_accelerator, known_accelerators
from ..figures.plots import drawing
from ..figures.roofline import roofline
from ..figures.selection import choose, choose_over_width
from ..figures.style import binary
from .markup import ABSENT, Cell, Html, figure, join, numeric, paragraph, render, table
from .subject import MODE_TITLES, Subject, known, name_cell

if TYPE_CHECKING:
    import pandas as pd

    from ..figures.layout import Drawing

NARROW_INCHES = 3.6
"""Width of a figure on a telephone."""

NUMBERS = {"memory": ("peak_memory_bytes", "peak memory (GiB)", 2**30)}
"""Kind of figure -> the column of its numbers, what that is called, and the factor; of others it is the time."""


def drawn(subject: Subject, kind: str) -> Html:
    """Return a figure for each mode, and but for a trade-off the numbers in them."""
    figures = _each_mode(subject, lambda mode: drawing(kind, subject.rows, subject.selection(mode)))
    return figures if kind == "trade-off" else join(figures, _numbers(subject, kind))


def _shown(subject: Subject, kind: str, mode: str) -> tuple[pd.DataFrame, str, str]:
    """Return the rows of a figure, the column along its x axis and what that is called."""
    selection = subject.selection(mode)
    if kind == "head-dim":
        chosen, x = choose_over_width(subject.rows, selection)
        return chosen.rows, x, {"head_dim_v": "value head dim", "embedding_dim": "channels"}[x]
    over_chunks = kind == "chunk-size"
    rows = choose(subject.rows, selection, seq_len=over_chunks).rows
    return (rows, "chunk_size", "chunk size") if over_chunks else (rows, "seq_len", subject.axis)


def _numbers(subject: Subject, kind: str) -> Html:
    """Return what figures show as tables that open on demand: a column over sizes, each at its fastest chunk size."""
    column, name, scale = NUMBERS.get(kind, ("time_ms", "time per call (ms)", 1))
    tables = []
    for mode in subject.modes:
        # Where a figure finds nothing to show, it has said so.
        with contextlib.suppress(ValueError):
            rows, x, x_name = _shown(subject, kind, mode)
            rows = best_rows(rows[rows[x].notna() & rows[column].notna()], ("op", "impl", "mode", x))
            sizes = sorted({int(value) for value in rows[x]})
            columns = [*dict.fromkeys(("op", "impl", "chunk_size", x, column))]
            body: list[list[str | Cell]] = []
            for _, group in rows[columns].groupby(["op", "impl"], sort=True):
                at = {int(row[x]): row for row in group.to_dict("records")}
                cells = [_value(at.get(size), x, column, scale) for size in sizes]
                body.append([name_cell(group.iloc[0]), *cells])
            if body:
                caption = f"{MODE_TITLES[mode]}: {name} over {x_name}"
                tables.append(table(caption, ["implementation", *map(binary, sizes)], body))
    return render("details", "The numbers", join(*tables)) if tables else Html("")


def _value(row: Mapping[Any, Any] | None, x: str, column: str, scale: int) -> str | Cell:
    if row is None:
        return ABSENT
    chunk = None if x == "chunk_size" else known(row["chunk_size"])
    return numeric(row[column] / scale, detail="" if chunk is None else f"L {binary(chunk)}")


def rooflines(subject: Subject) -> Html:
    """Return the roofline of the accelerator with what was measured on it, one figure for each mode.

    Where nothing was measured on it, the measured GPU's, if it is a known one; a CPU row stands on no GPU's roofline.
    """
    accelerator, said = subject.accelerator, Html("")
    if not subject.on_target:
        known_here = subject.device != "cpu" and subject.device in known_accelerators()
        said = render("off_target", subject, known_here)
        if not known_here:
            return said
        accelerator = get_accelerator(subject.device)
    drawn = _each_mode(subject, lambda mode: roofline(subject.rows, accelerator, subject.selection(mode)), stacked=True)
    return join(said, drawn)


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
    return join(join(*drawn) if stacked else render("grid", drawn), *map(paragraph, missing))
