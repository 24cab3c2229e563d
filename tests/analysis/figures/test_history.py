"""The figure of a case over commits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lrbench.analysis.figures.history import MAX_CASES, history_figure
from lrbench.analysis.figures.style import alt_text, save_figure

from ..measured import failed, measured, run_of, samples


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_figure(tmp_path: Path, suffix: str) -> None:
    days = {"c": 2.0, "b": None, "a": 3.0}
    runs = [
        {"git_commit": commit * 40, "run_id": f"run-{commit}", "measured_at": f"2026-01-0{day}T00:00:00+00:00"}
        for day, commit in enumerate(days, start=1)
    ]
    rows = [
        failed("crash", "died", **run) if time is None else measured(times=samples(time, noise=0.002), **run)
        for run, time in zip(runs, days.values(), strict=True)
    ]
    figure = history_figure([rows])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["ccccccc\nrun-c", "aaaaaaa\nrun-a"]
    (line,) = axes.containers
    assert list(line[0].get_ydata()) == pytest.approx([2.0, 3.0], rel=0.01)
    # Nothing is cut off: the legend and the labels lie within the figure.
    figure.draw_without_rendering()
    boxes = [figure.legends[0].get_window_extent(), axes.get_tightbbox()]
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 + 1 for box in boxes)
    assert re.search(
        r"Time over 2 runs, oldest first: mlstm_sig fused_chunk .* from (1.99|2)\S* to (2.99|3)\S* ms", alt_text(figure)
    )
    assert save_figure(figure, tmp_path / f"h{suffix}").stat().st_size > 1000


def test_a_figure_of_too_many_cases_is_refused() -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_CASES} measured cases, got 9"):
        history_figure([[row] for row in run_of(MAX_CASES + 1)])
    with pytest.raises(ValueError, match="got 0"):
        history_figure([[failed("oom", "")]])
