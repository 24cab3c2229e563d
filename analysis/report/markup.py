"""HTML of a report: sections of ``sections.html.j2``, tables and embedded figures; all lies in the page."""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..figures.style import styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..figures.layout import Drawing

ABSENT = "\N{EN DASH}"
"""What a table shows where there is nothing."""

SHORTER = (
    (rb"\s+", b" "),
    (rb"<\?xml.*?\?> <!DOCTYPE.*?>", b""),
    (rb"> <", b"><"),
    (rb" font-family: 'DejaVu Sans';", b""),
    # Where DejaVu is not installed a font of its width stands in.
    (rb'(<style type="text/css">)', rb"\1text{font-family:'DejaVu Sans',Verdana,sans-serif}"),
    # Hundredths of a point are enough, but not of a label.
    (rb"<[^>]+>", lambda tag: re.sub(rb"(\.\d\d)\d+", rb"\1", tag[0])),
    (rb' transform="rotate\(-0 [^"]*"', b""),
    (rb"<metadata>.*</metadata>", b""),
    (rb'<g id="[^"]*">', b"<g>"),
)
"""(pattern, what replaces it): what makes the pictures in a page smaller."""


@dataclass(frozen=True, slots=True)
class Html:
    """A piece of HTML that Jupyter shows as such."""

    text: str

    def __html__(self) -> str:
        """Return the text, which templates and Jupyter take as it is."""
        return self.text

    _repr_html_ = __html__

    def __repr__(self) -> str:
        return f"<{len(self.text)} characters of HTML>"


class Cell(NamedTuple):
    """A table's cell: what it shows, the number it is sorted by, what is shown small after the text, where it leads."""

    text: str
    value: float | None = None
    detail: str = ""
    link: str = ""


TableRow = Mapping[str, str | Cell]


@functools.cache
def templates() -> Any:
    """Return the environment of the folder's templates."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "listed": listed,
        "many": lambda count, noun: f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s",
        "was": lambda count: "was" if count == 1 else "were",
        "whole": lambda count: f"{count:,}",
    }
    return environment


def render(section: str, *values: Any, **named: Any) -> Html:
    """Return a section of the template with its values."""
    return Html(str(getattr(templates().get_template("sections.html.j2").module, section)(*values, **named)).strip())


def join(*parts: Html) -> Html:
    """Return the parts one after the other."""
    return Html("\n".join(part.text for part in parts if part.text))


def paragraph(text: str) -> Html:
    """Return a paragraph; nothing for an empty text."""
    return render("paragraph", text)


def listed(parts: Iterable[str]) -> str:
    """Return texts as a list in words: a; a and b; a, b and c."""
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


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
        return Cell(ABSENT)
    return Cell(f"{number(value, digits)}{unit}", float(value), detail)


def size(value: float | None) -> Cell:
    """Return a cell that shows a whole number in full and sorts by it; a dash for None and NaN."""
    return Cell(ABSENT) if value is None or math.isnan(value) else Cell(f"{int(value):,}", float(value))


def table(caption: str, rows: Sequence[TableRow]) -> Html:
    """Return a table that the page's script makes sortable, nothing without rows; columns with numbers are set right.

    Args:
        rows: cells by the names of their columns, the same in all; the first names the row.
    """
    cells = [[Cell(cell) if isinstance(cell, str) else cell for cell in row.values()] for row in rows]
    right = [any(cell.value is not None for cell in column) for column in zip(*cells, strict=True)]
    return render("table", caption, [*rows[0]], cells, right) if rows else Html("")


class Image(NamedTuple):
    """A picture to embed, its size in a page's pixels."""

    width: str
    height: str
    uri: str


def picture(drawn: Figure) -> Html:
    """Return a figure embedded as SVG, with its alt text."""
    return render("picture", str(drawn.get_label()), _image(drawn))


def figure(shown: Drawing) -> Html:
    """Return a figure embedded as SVG, with its alt text; title, setting and note are text, which fits any screen.

    A screen that is narrower than the panels scrolls from one to the next.
    """
    bare = dataclasses.replace(shown, title="", finding="", setting="", note="")
    picture_of_it = render("picture", shown.described, _image(bare.at()))
    return render("figure", shown.finding or shown.title, shown.words, picture_of_it, shown.note)


def _image(drawn: Figure) -> Image:
    """Return a figure as an image, uncropped: a browser's letters may be wider than those that were measured."""
    import matplotlib

    buffer = io.BytesIO()
    # Letters stay letters: as outlines they would be most of the page.
    with styled(), matplotlib.rc_context({"svg.fonttype": "none"}):
        drawn.savefig(buffer, format="svg", metadata={"Date": None})
    inches = drawn.bbox_inches
    svg = buffer.getvalue()
    for found, shorter in SHORTER:
        svg = re.sub(found, shorter, svg)
    svg = _with_classes(svg)
    uri = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return Image(f"{96 * inches.width:.0f}", f"{96 * inches.height:.0f}", uri)


def _with_classes(svg: bytes) -> bytes:
    """Return a picture whose styles are classes, each written once; they are half of what matplotlib writes."""
    classes: dict[bytes, bytes] = {}

    def name(found: re.Match[bytes]) -> bytes:
        return b' class="s%s"' % classes.setdefault(found[1], b"%d" % len(classes))

    named = re.sub(rb' style="([^"]*)"', name, svg)
    rules = b"".join(b".s%s{%s}" % (number, style) for style, number in classes.items())
    return named.replace(b"</style>", rules + b"</style>", 1)
