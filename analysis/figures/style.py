"""How figures look: a colour per operation, a marker and a line style per variant, the same in all figures.

In a figure of one operation, and of an operation that has a family to itself, every variant has a colour of its own.

Colours are Okabe and Ito's and Paul Tol's, which colour-blind readers can tell apart; labels at the lines repeat them.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from ...kernels import FAMILIES
from ...kernels.baselines import get_operation
from ...kernels.baselines.operations import OPERATIONS
from ...results.arguments import not_written
from ...results.select import short_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = {".png": ("Software", "Description"), ".svg": ("Date", "Title"), ".pdf": ("CreationDate", "Subject")}
"""Ending -> names in its metadata: of what would make equal figures differ, and of the figure's description."""

MIN_WIDTH, MAX_WIDTH = 2.5, 50.0
DPI, MAX_DPI = 130, 1200
"""Pixels per inch of a PNG on a page of the documentation; print takes SVG, PDF or more."""

OPERATION_LABELS: Mapping[str, str] = {
    op: get_operation(op).label or op for op in (*(op for ops in FAMILIES.values() for op in ops), *OPERATIONS)
}
"""Operation -> its name in legends and texts, as it is declared."""

_OPERATION_COLOURS: Mapping[str, str] = {
    "mlstm_sig": "#0072B2", "mlstm_exp": "#D55E00", "simple_gla": "#009E73", "retention": "#CC79A7",
    "gated_retention": "#882255", "mamba2_ssd": "#E69F00", "attention": "#222222",
    "gla": "#117733", "selective_scan": "#332288", "rglru": "#AA4499", "linear_scan": "#44AA99",
    "rglru_layer": "#999933", "projections": "#444444", "gated_delta_net": "#661100", "delta_net": "#6699CC",
    "kda": "#888800",
}  # fmt: skip
"""Those of one family differ for every kind of colour vision."""

_MARKER_COLOURS: Mapping[str, str] = {
    "o": "#0072B2", "s": "#E69F00", "D": "#D55E00", "^": "#117733", "v": "#009E73", "<": "#882255", ">": "#56B4E9",
    "X": "#CC79A7", "P": "#999933", "d": "#332288", "p": "#8B5A2B", "h": "#44AA99", "*": "#CC6677", "H": "#6B6B6B",
    "8": "#AA4499",
}  # fmt: skip
"""Colours of implementations of an operation that has none, since figures of its family show hardly another."""

_MARKERS: Mapping[str, str] = {
    "mlstm_kernels.xl": "s", "mlstm_kernels.limit": "p", "mlstm_kernels.parallel": "X", "native_custbw": "<",
    "native_autograd": ">", "lightning_attn.": "X", "fla.fused_recurrent": "^", "fla.fused": "<", "fla.": "v",
    "mamba_ssm.state_update": ">", "mamba_ssm": "<", "flash_attn.v2": "v", "flash_attn.v3": "<", "flash_attn": "^",
    "sdpa_flash": "P", "sdpa_cudnn": "X", "torch.sdpa": "s", "torch.eager": "P", "torch.compile": "X",
    "torch.inplace": "D", "torch.gemms": "s", "liger_kernel.silu_mul_joint": ">", "liger_kernel.silu_mul": "<",
    "liger_kernel": "v", "xformers": "p", "accelerated_scan": ">", "jax": "s", "torch_associative_scan": "p",
    "associative_scan": "*", "fused_chunk": "D", "xl_chunk": "*", "limit_chunk": "h", "lightning1": "p",
    "lightning2": "s", "fused_save_interleaved": "d", "interleaved": "*", "fused_save": "h", "parallel": "d",
    "chunked": "D", "naive": "d", "torch": "H",
}  # fmt: skip
"""Part of an implementation's name -> its marker; the first part that is in the name counts. Our other implementations
have a circle, those of other authors a spare marker by the author's name."""

_SPARE_MARKERS = ("*", "d", "H", "8")
_SOLID, _DASHED = "solid", (0, (4, 1.6))

CURVES = ("#0072B2", "#D55E00", "#009E73", "#882255", "#E69F00", "#56B4E9", "#222222", "#117733")
"""Colours of lines that stand for no operation: accelerators, head dims, factors."""

INK, MUTED, WARNING = "#1A1A1A", "#6B6B6B", "#B00020"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesStyle:
    """How one implementation is drawn, wherever it is drawn."""

    colour: str
    marker: str
    dashes: Any
    width: float
    label: str
    bold: bool = False

    def line(self) -> dict[str, Any]:
        """Return keyword arguments for ``Axes.plot``."""
        drawn = {"color": self.colour, "linestyle": self.dashes, "linewidth": self.width, "label": self.label}
        # A star's points are thin: as large as the others it would hardly be seen.
        point = {"marker": self.marker, "markersize": 9 if self.marker == "*" else 5.4, "markerfacecolor": self.colour}
        return {**drawn, **point, "markeredgecolor": "white", "markeredgewidth": 0.5}

    def hollow(self) -> dict[str, Any]:
        """Return the same for points that are only an outline."""
        outline = {"markerfacecolor": "white", "markeredgecolor": self.colour, "markeredgewidth": 1.0}
        return {**self.line(), **outline, "linestyle": "none", "label": "_hollow"}

    def pale(self, label: str) -> SeriesStyle:
        """Return the style in a lighter colour, for the same implementation on another device."""
        channels = (int(self.colour[n : n + 2], 16) for n in (1, 3, 5))
        colour = "#" + "".join(f"{(each + 255) // 2:02X}" for each in channels)
        return dataclasses.replace(self, colour=colour, label=label)


def operation_label(op: str) -> str:
    """Return an operation's name in legends and texts."""
    return OPERATION_LABELS.get(op, op)


def series_label(op: str, impl: str) -> str:
    """Return the name of an implementation in legends: operation, author, variant."""
    provider, _, variant = impl.rpartition(".")
    return f"{operation_label(op)} · {provider or 'lrbench'} {variant}"


def series_style(op: str, impl: str, *, alone: bool = False) -> SeriesStyle:
    """Return the style of an implementation; ``alone``: in a figure of one operation, in a colour of its own."""
    provider = impl.rpartition(".")[0]
    ours = provider in ("", "lrbench")
    usual = "o" if ours else _by_name(_SPARE_MARKERS, provider)
    marker = next((marker for part, marker in _MARKERS.items() if part in impl), usual)
    return SeriesStyle(
        colour=_MARKER_COLOURS[marker] if alone else _OPERATION_COLOURS.get(op, _MARKER_COLOURS[marker]),
        marker=marker,
        dashes=_DASHED if ours and marker != usual else _SOLID,
        width=2.1 if ours else 1.2,
        label=series_label(op, impl),
        bold=ours,
    )


def _by_name(choices: Sequence[str], name: str) -> str:
    """Return one of several looks for a name that has none of its own, the same one every time."""
    return choices[zlib.crc32(name.encode()) % len(choices)]


def curve_style(index: int, label: str, *, dashed: bool = False) -> SeriesStyle:
    """Return the style of the ``index``-th line that stands for no operation and has no measured points."""
    colour, dashes = CURVES[index % len(CURVES)], _DASHED if dashed else _SOLID
    return SeriesStyle(colour=colour, marker="", dashes=dashes, width=1.6, label=label)


def sizes_in_words(values: Iterable[float]) -> str:
    """Return sizes in words: 8k; 1k, 2k; 1k to 64k."""
    ordered = sorted({int(value) for value in values})
    if len(ordered) > 3:
        return f"{short_size(ordered[0])} to {short_size(ordered[-1])}"
    return ", ".join(map(short_size, ordered))


PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def rate(value: float, unit: str) -> str:
    """Return a rate with the prefix that suits it: 4.8 TB/s, 989 TFLOP/s, 43.6 GFLOP/s."""
    factor, prefix = next((each for each in PREFIXES if value >= each[0]), (1.0, ""))
    scaled = value / factor
    return f"{scaled:,.0f} {prefix}{unit}" if prefix and scaled >= 100 else f"{scaled:.3g} {prefix}{unit}"


def axis_prefix(highest: float) -> tuple[float, str]:
    """Return factor and prefix of an axis whose highest value is given: at least a tenth in it, or mega."""
    return next((each for each in PREFIXES if 10 * highest >= each[0]), PREFIXES[-1])


def quantity(value: float) -> str:
    """Return a number without exponent and with no more digits than it needs: 0.05, 2, 30, 1500."""
    return f"{value:.10f}".rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:,.10g}"


def size_axis(axes: Axes, sizes: Sequence[float], width: float) -> None:
    """Make the x axis a base-2 scale with ticks at those of the sizes that there is room for in ``width`` inches."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    apart = (max(sizes) / min(sizes) * 2**0.7) ** (0.3 / width)
    shown: list[float] = []
    for size in sorted(sizes, reverse=True):
        if not shown or shown[-1] >= apart * size:
            shown.append(size)
    axes.set_xticks(shown[::-1], [*map(short_size, shown[::-1])])
    axes.set_xlim(min(sizes) / 2**0.35, max(sizes) * 2**0.35)


_DECADES = (
    (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,),
)  # fmt: skip
"""Where a log axis may have its ticks in a decade, the most of them first."""


def log_axis(axis: Any, low: float, high: float, length: float) -> None:
    """Label a log axis of ``length`` inches with plain numbers, as many as stand apart."""
    import matplotlib
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    em = float(matplotlib.rcParams["xtick.labelsize"]) / 72

    def apart(a: float, b: float) -> bool:
        """Whether two labels have room: digits are 0.64 em wide, and one more keeps two numbers apart."""
        upright = axis.axis_name == "y"
        needed = 1.8 * em if upright else 0.64 * em * ((len(quantity(a)) + len(quantity(b))) / 2 + 1)
        return math.log(b / a) * length / math.log(high / low) >= needed

    locators: list[Any] = [LogLocator(base=10, subs=subs, numticks=30) for subs in _DECADES]
    locators += [MaxNLocator(nbins=count, steps=[1, 2, 2.5, 5, 10]) for count in (5, 4, 3, 2, 1)]
    for locator in locators:
        ticks = [float(f"{value:.6g}") for value in locator.tick_values(low, high) if low <= value <= high]
        if len(ticks) > 1 and all(apart(a, b) for a, b in itertools.pairwise(ticks)):
            break
    else:
        ticks = ticks[:1]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value)))


def styled(scale: float = 1.0) -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws in this style, its text ``scale`` times as large."""
    import matplotlib

    settings = matplotlib.rc_params_from_file(Path(__file__).with_name("lrbench.mplstyle"), use_default_template=False)
    for name in settings:
        if name.endswith("size"):
            settings[name] = settings[name] * scale
    return matplotlib.rc_context(dict(settings))


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure in inches, which pyplot does not know of and whose contents no layout engine moves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    figure.set_layout_engine("none")
    # This canvas remembers the sizes of texts; without it they are measured whenever they are asked for.
    FigureCanvasAgg(figure)
    return figure


def check_format(path: Path) -> None:
    """Raise ValueError where the ending of ``path`` is no figure format, before anything is drawn."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"output must end in one of {', '.join(FORMATS)}, got {path.name!r}")


def check_size(width: float | None = None, dpi: int = DPI) -> None:
    """Raise ValueError for a width in inches in which nothing can be read, or a resolution that no picture has."""
    if width is not None and not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ValueError(f"width must be from {MIN_WIDTH} to {MAX_WIDTH:g} inches, got {width:g}")
    if not 1 <= dpi <= MAX_DPI:
        raise ValueError(f"dpi must be from 1 to {MAX_DPI}, got {dpi}")


def save_figure(figure: Figure, path: Path, *, dpi: int = DPI) -> Path:
    """Write a figure in the format of the file's ending (.png, .svg, .pdf); equal figures give equal files.

    Its label, a sentence for readers who cannot see it, goes with it: as Description of a PNG, as title and desc of an
    SVG, as Subject of a PDF. ``dpi``: pixels per inch of a PNG.

    Raises:
        ValueError: another ending, a resolution that no picture has, or a file that cannot be written.
    """
    check_format(path)
    check_size(dpi=dpi)
    text, ending, file = str(figure.get_label()), path.suffix.lower(), io.BytesIO()
    undated, described = FORMATS[ending]
    metadata = {undated: None, **({described: text} if text else {})}
    # Composed figures fill the width that was asked for; others are cropped to what they show.
    crop: dict[str, Any] = {} if text else {"bbox_inches": "tight", "pad_inches": 0.12}
    with styled():
        figure.savefig(file, dpi=dpi, format=ending[1:], metadata=metadata, **crop)
    content = file.getvalue()
    if ending == ".svg":
        # matplotlib would write a description into the RDF block only, which no screen reader looks at.
        content = content.replace(b"</title>", f"</title>\n <desc>{escape(text)}</desc>".encode(), 1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise not_written(path, "--output", error) from error
    return path
