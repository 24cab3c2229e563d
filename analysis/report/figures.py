"""A report's figures, with the numbers of all lines as tables."""

from __future__ import annotations

import itertools
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ...results.select import MODE_NAMES, grouped, short_size
from ..accelerators.known import get_accelerator, known_accelerators
from ..figures.findings import OURS
from ..figures.plots import drawing
from ..figures.roofline import roofline
from ..figures.selection import MODE_TITLES
from .markup import ABSENT, Cell, Html, TableRow, figure, join, numeric, paragraph, render, table
from .subject import Subject, known, name_cell, name_of

if TYPE_CHECKING:
    from ..figures.layout import Drawing

KINDS = ("runtime", "memory", "chunk-size", "roofline", "head-dim", "trade-off")
"""The figures of a family of kernels, the most telling findings first; the last one's only repeats another."""

X_NAMES = {"head_dim_v": "value head dim", "embedding_dim": "channels", "chunk_size": "chunk size"}


class Drawn(NamedTuple):
    """The figures of a family.

    Attributes:
        findings: what they say, a sentence each.
        first: the figure of runtime; ``every``: all, with the numbers of their lines.
    """

    findings: list[str]
    first: Html
    every: Html


def drawing_of(subject: Subject, kind: str) -> Drawing:
    """Return what a figure shows, in the setting of the report; ValueError where there is nothing to show."""
    selection = subject.selection
    if kind in ("chunk-size", "trade-off"):
        selection = subject.selection_over_chunks
    elif kind in ("runtime", "memory"):
        selection = subject.chosen or selection
    if kind != "roofline":
        return drawing(kind, subject.rows, selection)
    if subject.on_target:
        return roofline(subject.rows, subject.accelerator, selection)
    # A CPU's row stands on no GPU's roofline.
    if subject.device == "cpu" or subject.device not in known_accelerators():
        name = f"{subject.accelerator.name} ({subject.accelerator.key})"
        raise ValueError(f"nothing was measured on {name}, so nothing stands on its roofline")
    return roofline(subject.rows, get_accelerator(subject.device), selection)


def drawn(subject: Subject, *, chunked: bool) -> Drawn:
    """Return a family's figures and findings; without a comparison of times one says what ours takes.

    Args:
        chunked: whether there are figures over chunk lengths.
    """
    findings, pictures = [], []
    for kind in KINDS:
        said, tables = "", Html("")
        if kind in ("chunk-size", "trade-off") and not chunked:
            continue
        try:
            shown = drawing_of(subject, kind)
            said, picture = shown.finding if kind != KINDS[-1] else "", figure(shown)
            if kind not in ("trade-off", "roofline"):
                numbers = join(*(_numbers(subject, kind, mode, shown) for mode in subject.modes))
                tables = render("details", "The numbers of every line", numbers)
        except ValueError as error:
            picture = paragraph(f"{kind}: not drawn, {error}.")
        findings += [said] if said else _fastest(subject) if kind == KINDS[0] else []
        pictures.append((picture, tables))
    return Drawn(findings, pictures[0][0], join(*itertools.chain(*pictures)))


def _fastest(subject: Subject) -> list[str]:
    """Return the time of the fastest, ours if there is one, in each mode."""
    said = []
    for mode in subject.modes:
        best = subject.best(mode)
        own = best[best["provider"] == OURS]
        best = best if own.empty else own
        at = best[best["seq_len"] == subject.seq_len].nsmallest(1, "time_ms")
        said += [
            f"{name_of(row)} takes {row.time_ms:.3g} ms {MODE_NAMES[mode]} at {subject.at(int(row.seq_len))}"
            for row in at.itertuples()
        ]
    return said


def _numbers(subject: Subject, kind: str, mode: str, shown: Drawing) -> Html:
    """Return one mode of a figure as a table: a column for each size."""
    assert shown.every is not None
    column, name, scale = "time_ms", "time per call (ms)", 1
    if kind == "memory":
        column, name, scale = "peak_memory_bytes", "peak memory (GiB)", 2**30
    rows = shown.every[shown.every["mode"] == mode]
    sizes = sorted({int(value) for value in rows[shown.x]})
    columns = [*dict.fromkeys(("op", "impl", "chunk_size", shown.x, column))]
    body: list[TableRow] = []
    for _, group in sorted(grouped(rows[columns].itertuples(index=False), attrgetter("op", "impl")).items()):
        at = {int(getattr(row, shown.x)): row for row in group}
        values = {short_size(size): _value(at.get(size), shown.x, column, scale) for size in sizes}
        body.append({"implementation": name_cell(group[0]), **values})
    return table(f"{MODE_TITLES[mode]}: {name} over {X_NAMES.get(shown.x, subject.axis)}", body)


def _value(row: Any, x: str, column: str, scale: int) -> str | Cell:
    if row is None:
        return ABSENT
    chunk = None if x == "chunk_size" else known(row.chunk_size)
    return numeric(getattr(row, column) / scale, detail="" if chunk is None else f"L {short_size(chunk)}")
