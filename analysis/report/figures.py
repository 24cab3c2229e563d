"""A report's figures, one mode each, with the numbers in them as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..accelerators.known import get_accelerator, known_accelerators
from ..figures.plots import drawing
from ..figures.roofline import roofline
from ..figures.style import binary
from .markup import ABSENT, Cell, Html, figure, join, numeric, paragraph, render, table
from .subject import MODE_TITLES, Subject, known, name_cell

if TYPE_CHECKING:
    from ..figures.layout import Drawing

NARROW_INCHES = 3.6
"""Width of a figure on a telephone."""

X_NAMES = {"head_dim_v": "value head dim", "embedding_dim": "channels", "chunk_size": "chunk size"}


def drawn(subject: Subject, kind: str) -> Html:
    """Return a figure for each mode, and but for a trade-off the numbers in them, in tables that open on demand."""
    drawings, pictures = _each_mode(subject, lambda mode: drawing(kind, subject.rows, subject.selection(mode)))
    if not drawings or kind == "trade-off":
        return pictures
    numbers = join(*(_numbers(subject, kind, mode, shown) for mode, shown in drawings.items()))
    return join(pictures, render("details", "The numbers", numbers))


def _numbers(subject: Subject, kind: str, mode: str, shown: Drawing) -> Html:
    """Return a figure of one mode as a table: a column for each size."""
    assert shown.rows is not None
    column, name, scale = "time_ms", "time per call (ms)", 1
    if kind == "memory":
        column, name, scale = "peak_memory_bytes", "peak memory (GiB)", 2**30
    sizes = sorted({int(value) for value in shown.rows[shown.x]})
    columns = [*dict.fromkeys(("op", "impl", "chunk_size", shown.x, column))]
    body: list[list[str | Cell]] = []
    for _, group in shown.rows[columns].groupby(["op", "impl"], sort=True):
        at = {int(row[shown.x]): row for row in group.to_dict("records")}
        body.append([name_cell(group.iloc[0]), *(_value(at.get(size), shown.x, column, scale) for size in sizes)])
    caption = f"{MODE_TITLES[mode]}: {name} over {X_NAMES.get(shown.x, subject.axis)}"
    return table(caption, ["implementation", *map(binary, sizes)], body)


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
    _, pictures = _each_mode(
        subject, lambda mode: roofline(subject.rows, accelerator, subject.selection(mode)), stacked=True
    )
    return join(said, pictures)


def _each_mode(
    subject: Subject, draw: Callable[[str], Drawing], *, stacked: bool = False
) -> tuple[dict[str, Drawing], Html]:
    """Return what is to be seen of each mode, and its figures for wide and for narrow screens; or why there are none.

    Args:
        draw: returns what is to be seen of a mode.
        stacked: whether one stands above the other wherever they are read: figures of several panels.
    """
    drawings, pictures, missing = {}, [], []
    for mode in subject.modes:
        try:
            seen = draw(mode)
            pictures.append(figure(seen.at(), seen.at(NARROW_INCHES)))
            drawings[mode] = seen
        except ValueError as error:
            missing.append(f"{MODE_TITLES[mode]}: not drawn, {error}.")
    return drawings, join(join(*pictures) if stacked else render("grid", pictures), *map(paragraph, missing))
