"""The figure of a case over commits."""

from __future__ import annotations

import re

import pytest

from lrbench.analysis.figures.history import MAX_CASES, history_figure

from ..measured import failed, measured, run_of, samples


def test_figure() -> None:
    days = {"c": 2.0, "b": None, "a": 3.0}
    rows = []
    for day, (commit, time) in enumerate(days.items(), start=1):
        run = {"git_commit": commit * 40, "run_id": f"run-{commit}", "measured_at": f"2026-01-0{day}T00:00:00+00:00"}
        timed = measured(times=samples(time or 1, noise=0.002), **run)
        rows.append(timed if time else failed("crash", "died", **run))
    figure = history_figure([rows])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["ccccccc\nrun-c", "aaaaaaa\nrun-a"]
    (line,) = axes.containers
    assert list(line[0].get_ydata()) == pytest.approx([2.0, 3.0], rel=0.01)
    # Nothing is cut off: the legend and the labels lie within the figure.
    figure.draw_without_rendering()
    boxes = [figure.legends[0].get_window_extent(), axes.get_tightbbox()]
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 + 1 for box in boxes)
    said = r"Time over 2 runs, oldest first: mlstm_sig fused_chunk .* from (1.99|2)\S* to (2.99|3)\S* ms"
    assert re.search(said, figure.get_label())
    busy = history_figure([[rows[0], {**rows[2], "noise": "busy CPU: load 9"}]])
    for drawn, said in ((figure, False), (busy, True)):
        labels = {label.get_text() for label in drawn.legends[0].get_texts()}
        assert ("hollow: measured on a busy machine" in labels) == said
    assert [len(line.get_xdata()) for line in busy.axes[0].lines if line.get_markerfacecolor() == "white"] == [1, 0]


def test_a_figure_of_too_many_cases_is_refused() -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_CASES} measured cases, got 9"):
        history_figure([[row] for row in run_of(MAX_CASES + 1)])
    with pytest.raises(ValueError, match="got 0"):
        history_figure([[failed("oom", "")]])
