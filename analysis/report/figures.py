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

GIB = 2**30
NARROW_INCHES = 3.6
"""Width of a figure on a telephone."""

TIME = "time per call (ms)"


def runtime(subject: Subject) -> Html:
    """Return time over sequence length, a figure for each mode, and the numbers in them."""
    return join(_drawn(subject, "runtime"), _numbers(subject, _at_lengths, "time_ms", TIME))


def memory(subject: Subject) -> Html:
    """Return peak memory over sequence length, a figure for each mode, and the numbers in them."""
    gib = _numbers(subject, _at_lengths, "peak_memory_bytes", "peak memory (GiB)", scale=GIB)
    return join(_drawn(subject, "memory"), gib)


def over_chunk_size(subject: Subject) -> Html:
    """Return time over chunk size, a figure for each mode, and the numbers in them."""
    return join(_drawn(subject, "chunk-size"), _numbers(subject, _at_chunks, "time_ms", TIME))


def over_width(subject: Subject) -> Html:
    """Return time over head dim, or over channels, a figure for each mode, and the numbers in them."""
    return join(_drawn(subject, "head-dim"), _numbers(subject, _at_widths, "time_ms", TIME))


def trade_off(subject: Subject) -> Html:
    """Return runtime against memory over chunk size, a figure for each mode."""
    return _drawn(subject, "trade-off")


def _drawn(subject: Subject, kind: str) -> Html:
    return _each_mode(subject, lambda mode: drawing(kind, subject.rows, subject.selection(mode)))


Shown = tuple["pd.DataFrame", str, str]
"""The rows of a figure, the column along its x axis and what that is called."""


def _at_lengths(subject: Subject, mode: str) -> Shown:
    return choose(subject.rows, subject.selection(mode)).rows, "seq_len", subject.axis


def _at_chunks(subject: Subject, mode: str) -> Shown:
    return choose(subject.rows, subject.selection(mode), seq_len=True).rows, "chunk_size", "chunk size"


def _at_widths(subject: Subject, mode: str) -> Shown:
    chosen, x = choose_over_width(subject.rows, subject.selection(mode))
    return chosen.rows, x, {"head_dim_v": "value head dim", "embedding_dim": "channels"}[x]


def _numbers(
    subject: Subject, shown: Callable[[Subject, str], Shown], column: str, name: str, *, scale: float = 1.0
) -> Html:
    """Return what figures show as tables that open on demand: a column over sizes, each at its fastest chunk size."""
    tables = []
    for mode in subject.modes:
        # Where a figure finds nothing to show, it has said so.
        with contextlib.suppress(ValueError):
            rows, x, x_name = shown(subject, mode)
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


def _value(row: Mapping[Any, Any] | None, x: str, column: str, scale: float) -> str | Cell:
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
