"""HTML of a report: sentences, sortable tables, embedded figures, formulas set as SVG. Nothing here needs a network."""

from __future__ import annotations

import base64
import functools
import html
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABSENT = "\N{EN DASH}"
"""What a table shows where there is nothing."""


@dataclass(frozen=True, slots=True)
class Html:
    """A piece of HTML that Jupyter shows as such."""

    text: str

    def _repr_html_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<{len(self.text)} characters of HTML>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A table's cell.

    Attributes:
        text: what it shows.
        value: what it is sorted by, where that is a number.
        detail: shown small after the text.
    """

    text: str
    value: float | None = None
    detail: str = ""


def join(*parts: Html) -> Html:
    """Return the parts one after the other."""
    return Html("\n".join(part.text for part in parts if part.text))


def paragraph(text: str) -> Html:
    """Return a paragraph; nothing for an empty text."""
    return Html(f"<p>{html.escape(text)}</p>" if text else "")


def terms(parts: Iterable[tuple[str, Sequence[str]]]) -> Html:
    """Return a list of (what it is about, the sentences on it)."""
    each = (
        f"<dt>{html.escape(about)}</dt><dd>{''.join(f'<p>{html.escape(one)}</p>' for one in said)}</dd>"
        for about, said in parts
    )
    return Html("<dl>" + "\n".join(each) + "</dl>")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with that many significant digits, without exponent from 0.0001 on; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return ABSENT
    # What rounds up to the next power of ten has a digit more before the point.
    if value == 0 or abs(float(f"{value:.{digits}g}")) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}" if abs(value) >= 1e-4 else f"{value:.{digits - 1}e}"


def numeric(value: float | None, digits: int = 3, *, unit: str = "", detail: str = "") -> Cell:
    """Return a cell that shows a number and sorts by it."""
    if value is None or math.isnan(value):
        return Cell(text=ABSENT)
    return Cell(text=f"{number(value, digits)}{unit}", value=float(value), detail=detail)


def size(value: float | None) -> Cell:
    """Return a cell that shows a whole number in full and sorts by it; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return Cell(text=ABSENT)
    return Cell(text=f"{int(value):,}", value=float(value))


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> Html:
    """Return a table that the page's script makes sortable; columns with numbers are set right.

    Args:
        header: names of the columns.
        rows: cells, as many in each row as in the header; the first names the row.
    """
    right = [any(isinstance(row[n], Cell) and row[n].value is not None for row in rows) for n in range(len(header))]  # type: ignore[union-attr]
    head = "".join(
        f'<th scope="col"{_number_class(on_right)}>{html.escape(name)}</th>'
        for name, on_right in zip(header, right, strict=True)
    )
    body = "\n".join(
        "<tr>" + "".join(_cell(cell, n == 0, right[n]) for n, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return Html(
        f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(caption, quote=True)}">'
        f'<table class="sortable"><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _number_class(on_right: bool) -> str:
    return ' class="number"' if on_right else ""


def _cell(cell: str | Cell, first: bool, on_right: bool) -> str:
    cell = Cell(text=cell) if isinstance(cell, str) else cell
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    detail = f" <small>{html.escape(cell.detail)}</small>" if cell.detail else ""
    return f"<{tag}{scope}{_number_class(on_right)}{value}>{html.escape(cell.text)}{detail}</{tag}>"


def details(summary: str, inner: Html) -> Html:
    """Return something that opens on demand; in print it is open."""
    return Html(f"<details><summary>{html.escape(summary)}</summary>{inner.text}</details>")


def figure(wide: Figure, narrow: Figure | None = None) -> Html:
    """Return a figure embedded as SVG, with its alt text.

    Args:
        narrow: the same figure for narrow screens, whose width it fills.
    """
    from ..figures.style import alt_text

    alt = html.escape(alt_text(wide), quote=True)
    source = "" if narrow is None else f'<source media="(max-width: 40rem)" {_embedded(narrow, "srcset", crop=False)}>'
    return Html(f'<figure><picture>{source}<img alt="{alt}" {_embedded(wide, "src", crop=True)}></picture></figure>')


def _embedded(drawn: Figure, attribute: str, *, crop: bool) -> str:
    """Return the attributes of an image: its size, and itself, ``crop`` to what is drawn."""
    from ..figures.style import styled

    buffer = io.StringIO()
    with styled():
        # What is drawn is looked for here: savefig would draw it all a second time for that.
        box = drawn.get_tightbbox().padded(0.06) if crop else None
        drawn.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches=box)
    width, height = _svg_size(buffer.getvalue())
    return f'width="{width:.0f}" height="{height:.0f}" {attribute}="{_data_uri(buffer.getvalue())}"'


def grid(parts: Sequence[Html]) -> Html:
    """Return parts side by side where the page is wide enough."""
    return Html('<div class="grid">' + "\n".join(part.text for part in parts) + "</div>") if parts else Html("")


@functools.lru_cache(maxsize=256)
def formula(tex: str) -> str:
    """Return a formula, in matplotlib's TeX, as an inline image that sits on the line.

    Raises:
        ValueError: matplotlib cannot set it.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    buffer = io.StringIO()
    size = 12
    with _math_font():
        depth = math_to_image(f"${tex}$", buffer, prop=FontProperties(size=size), format="svg")
    width, height = _svg_size(buffer.getvalue())
    alt = html.escape(tex.replace("\\", ""), quote=True)
    # In ems, so that a formula grows with the text around it.
    style = f"width:{width / size:.3f}em;height:{height / size:.3f}em;vertical-align:{-depth / size:.3f}em"
    return f'<img class="formula" alt="{alt}" style="{style}" src="{_data_uri(buffer.getvalue())}">'


def with_formulas(markdown: str) -> str:
    """Replace every $formula$ of a text by its image."""
    return re.sub(r"\$([^$\n]+)\$", lambda match: formula(match[1]), markdown)


def _math_font():  # type: ignore[no-untyped-def]
    import matplotlib

    return matplotlib.rc_context({"mathtext.fontset": "stix", "svg.fonttype": "path", "svg.hashsalt": "lrbench"})


def _svg_size(svg: str) -> tuple[float, float]:
    """Return width and height in points."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if found is None:
        raise ValueError("svg must have a viewBox, got none")
    return float(found[1]), float(found[2])


def _data_uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
