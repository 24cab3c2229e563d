"""How figures look: one colour per author, one marker per operation, one line style per variant, the same everywhere.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; markers and line styles repeat what colour says.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")

OPERATION_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "mlstm_sig": "mLSTMsig",
        "mlstm_exp": "mLSTMexp",
        "simple_gla": "simple GLA",
        "retention": "Retention",
        "gated_retention": "gated Retention",
        "mamba2_ssd": "Mamba-2",
        "lightning": "Lightning",
        "attention": "attention",
        "gla": "GLA",
        "selective_scan": "Mamba",
        "rglru": "RG-LRU",
        "wkv4": "WKV-4",
        "gated_mlp": "gated MLP",
    }
)

_PROVIDER_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "lrbench": "#0072B2",
        "mlstm_kernels": "#D55E00",
        "fla": "#009E73",
        "mamba_ssm": "#CC79A7",
        "flash_attn": "#222222",
        "torch": "#8C8C8C",
        "lightning_attn": "#56B4E9",
        "liger_kernel": "#E69F00",
        "accelerated_scan": "#B59B00",
    }
)
_SPARE_COLOURS = ("#56B4E9", "#E69F00", "#B59B00", "#8C564B")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d")
_DASHES: tuple[tuple[str, Any], ...] = (
    ("limit", (0, (4, 1.6))),
    ("fused", (0, (4, 1.6))),
    ("cudnn", (0, (4, 1.6))),
    ("parallel", (0, (5, 1.4, 1, 1.4))),
    ("recurrent", (0, (1, 1.4))),
    ("native_autograd", (0, (1, 1.4))),
    ("custbw", (0, (4, 1.6))),
    ("v2", (0, (1, 1.4))),
    ("v3", (0, (4, 1.6))),
)

INK, MUTED, GRID = "#1A1A1A", "#6B6B6B", "#E3E3E3"
WARNING = "#B00020"

RC: Mapping[str, Any] = MappingProxyType(
    {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 9,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "xtick.major.width": 0.7,
        "ytick.major.width": 0.7,
        "ytick.minor.size": 0,
        "xtick.minor.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "lines.solid_capstyle": "round",
        "pdf.fonttype": 42,
        "svg.fonttype": "path",
        "svg.hashsalt": "lrbench",
        "savefig.facecolor": "white",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesStyle:
    """How one implementation is drawn, wherever it is drawn."""

    colour: str
    marker: str
    dashes: Any
    width: float
    label: str

    def line(self) -> dict[str, Any]:
        """Return keyword arguments for ``Axes.plot``."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dashes,
            "linewidth": self.width,
            "markersize": 5.2 if self.width > 1.5 else 4.2,
            "markeredgecolor": "white",
            "markeredgewidth": 0.6,
            "label": self.label,
        }


def series_label(op: str, impl: str) -> str:
    """Return the name of an implementation in legends: operation, author, variant."""
    provider, _, variant = impl.rpartition(".")
    operation = OPERATION_LABELS.get(op, op)
    return f"{operation} · {provider or 'lrbench'} {variant}"


def series_style(op: str, impl: str) -> SeriesStyle:
    """Return the style of an implementation; it depends on nothing but its names."""
    provider, _, variant = impl.rpartition(".")
    provider = provider or "lrbench"
    colour = _PROVIDER_COLOURS.get(provider)
    if colour is None:
        colour = _SPARE_COLOURS[zlib.crc32(provider.encode()) % len(_SPARE_COLOURS)]
    operations = list(OPERATION_LABELS)
    rank = operations.index(op) if op in operations else zlib.crc32(op.encode())
    dashes = next((dash for marker, dash in _DASHES if marker in variant), "solid")
    return SeriesStyle(
        colour=_shade(colour, (0.0, -0.4, 0.4)[rank % 3] if provider in ("lrbench", "mlstm_kernels", "fla") else 0.0),
        marker=_MARKERS[rank % len(_MARKERS)],
        dashes=dashes if impl != "torch" else (0, (1, 1.4)),
        width=2.1 if provider == "lrbench" else 1.2,
        label=series_label(op, impl),
    )


def _shade(colour: str, amount: float) -> str:
    """Return ``colour`` mixed with black (amount < 0) or white (amount > 0)."""
    target = 0 if amount < 0 else 255
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (target - c) * abs(amount)):02X}" for c in channels)


def binary(value: float) -> str:
    """Return a power-of-two size as people write it: 512, 1k, 64k, 2M."""
    for factor, suffix in ((1024**2, "M"), (1024, "k")):
        if value >= factor and value % factor == 0:
            return f"{int(value // factor)}{suffix}"
    return f"{value:g}"


def rate(value: float, unit: str) -> str:
    """Return a rate with the prefix that suits it: 4.8 TB/s, 989 TFLOP/s, 43.6 GFLOP/s."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            scaled = value / factor
            return f"{scaled:,.0f} {prefix}{unit}" if scaled >= 100 else f"{scaled:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def quantity(value: float) -> str:
    """Return a number without exponent and with no more digits than it needs: 0.05, 2, 30, 1500."""
    return f"{value:.10f}".rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:,.10g}"


def size_axis(axes: Axes, values: list[float], label: str) -> None:
    """Make the x axis a base-2 scale with ticks at the sizes that occur, and no further away than half a step."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(values, [binary(value) for value in values])
    if values:
        axes.set_xlim(min(values) / 2**0.35, max(values) * 2**0.35)
    axes.set_xlabel(label)


def log_axis(axis: Any, low: float, high: float) -> None:
    """Label a log axis with plain numbers, at 1, 2, 5 of every decade or finer where ``high`` / ``low`` is small."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    span = high / low
    subs: tuple[float, ...] = (1, 2, 5)
    if span <= 8:
        subs = (1, 1.5, 2, 3, 4, 5, 7) if span > 2.5 else (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)
    elif span > 200:
        subs = (1, 3)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=30))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value)))


def styled() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws in this style."""
    import matplotlib

    settings: Any = dict(RC)
    return matplotlib.rc_context(settings)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure in inches; it has no part in pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white")


def check_format(path: str | Path) -> Path:
    """Return ``path``; ValueError where its ending is no figure format, before anything is drawn."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"output must end in one of {', '.join(FORMATS)}, got {path.name!r}")
    return path


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure in the format of the file's ending (.png, .svg, .pdf); equal figures give equal files.

    Raises:
        ValueError: another ending.
    """
    path = check_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[path.suffix.lower()]
    with styled():
        figure.savefig(path, dpi=200, metadata=metadata, bbox_inches="tight", pad_inches=0.12)
    return path
