"""The figure of a case over commits."""

from __future__ import annotations

import re

import pytest

from lrbench.analysis.figures.history import MAX_CASES, history_figure

from ..rows import failed, run_of, three_commits


def test_runs_stand_in_the_order_of_time_and_those_of_a_busy_machine_are_hollow() -> None:
    rows = three_commits()
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
