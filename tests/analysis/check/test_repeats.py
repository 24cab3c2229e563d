"""Repeats raise no false alarm: committed rows of the same code, and rows beside themselves."""

from __future__ import annotations

from operator import itemgetter

import pytest

from lrbench.analysis.check.compare import compare
from lrbench.analysis.check.regression import check
from lrbench.results.select import grouped, load_rows
from lrbench.results.store import HERE, committed_results
from lrbench.tests.command_line import Lrbench
from lrbench.tests.tools.repeats import COLUMNS, alarm_rate, beyond, log_ratios, repeats, table

from ..rows import THRESHOLDS, timed

MOST = 1e-3
"""False alarms of host time in a check of a run."""


def test_each_two_runs_raise_no_alarm_by_what_the_others_tell() -> None:
    """The threshold stands whichever two runs are left out, and neither of these is a regression of the other."""
    rows = load_rows(committed_results())
    found = repeats(rows)
    assert table(rows, THRESHOLDS)[0]["repeats"] == len(log_ratios(found, "host_ms"))
    pairs_of_runs = grouped(found, lambda pair: (pair[0]["run_id"], pair[1]["run_id"]))
    assert len(pairs_of_runs) >= 16 and len(found) >= 300
    for left_out, own in pairs_of_runs.items():
        others = [pair for runs, pairs in pairs_of_runs.items() if runs != left_out for pair in pairs]
        assert alarm_rate(log_ratios(others, "host_ms"), 1 + (THRESHOLDS.defaults["host"] or 0.0)) < MOST
        assert [beyond(own, column, THRESHOLDS) for column in COLUMNS] == [0, 0]
        for side in (0, 1):
            judged = check([pair[side] for pair in own], [pair[1 - side] for pair in own], THRESHOLDS)
            metrics = (metric for case in judged.cases for metric in case.metrics)
            assert not [m for m in metrics if m.name in COLUMNS and m.verdict == "regression"]


def test_repeats_are_of_one_code_and_an_idle_machine() -> None:
    one = timed(2.0, run_id="a", git_commit="x")
    assert repeats([one, {**one, "run_id": "b"}])
    for unlike in ({}, {"run_id": "b", "noise": "drift"}, {"run_id": "b", "git_commit": "y"}):
        assert not repeats([one, {**one, **unlike}])


@pytest.mark.parametrize("accelerator", ["h100_sxm", "h200_sxm"])
def test_a_folder_beside_itself_did_not_change(lrbench: Lrbench, accelerator: str) -> None:
    """Few samples and a busy machine leave nothing unclear about a row beside itself."""
    folder = HERE / accelerator
    code, out, _ = lrbench("check", folder, "--baseline", folder)
    assert code == 0 and out.startswith(f"passed on {accelerator}, nothing changed: ")
    assert "unclear" not in out and len(out.splitlines()) == 1
    rows = load_rows(folder)
    every = compare(rows, rows).groups[-1]
    assert every.verdicts["same"] == every.cases and tuple(every.interval) == (1.0, 1.0)


@pytest.mark.parametrize("run", ["0918469f", "3cbd30df", "4ff7a8e0"])
def test_runs_of_the_readme_pass(run: str, lrbench: Lrbench) -> None:
    """Beside the newest rows of their cases, which other machines measured."""
    code, out, _ = lrbench(f"check run:{run} --allow-missing --baseline", HERE / "h200_sxm")
    assert code == 0 and out.startswith("passed on h200_sxm: ")


def test_a_repeat_is_not_the_row_itself() -> None:
    """Equal samples of two runs are still too few to tell."""
    few = {"time_samples_ms": [2.0] * 4}
    old, new = ({**timed(2.0), **few, "run_id": name} for name in "ab")
    assert [each.verdict for each in check([new], [old], THRESHOLDS).cases] == ["unclear"]
    assert [each.verdict for each in check([old], [dict(old)], THRESHOLDS).cases] == ["ok"]
    assert itemgetter("unclear", "same")(compare([old], [new]).groups[-1].verdicts) == (1, 0)
