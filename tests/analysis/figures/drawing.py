"""Reading figures back in tests."""

from __future__ import annotations

from matplotlib.figure import Figure


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
