"""A case over commits: order, and what changed between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrbench.analysis.check.history import case_history, history_rows

from ..rows import measured, three_commits, write


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for row in three_commits():
        write([row], tmp_path / f"{row['run_id']}.parquet")
    return tmp_path


def test_runs_stand_in_the_order_of_time(results: Path) -> None:
    case_id = measured()["case_id"]
    for text in (case_id, case_id[:6], "op:mlstm_sig,seq_len:8k"):
        histories = case_history(text, [results])
        assert list(histories) == [(case_id, "h200_sxm")]
    first, second, third = history_rows(histories[case_id, "h200_sxm"])
    assert [line["commit"] for line in (first, second, third)] == ["cccccccccc", "bbbbbbbbbb", "aaaaaaaaaa"]
    assert (first["ratio"], first["verdict"], first["changed"]) == (None, None, None)
    assert (second["status"], second["time_ms"], second["ratio"]) == ("crash", None, None)
    # The run that failed is skipped: the third is compared with the first.
    assert third["ratio"] == pytest.approx(1.5)
    assert (third["verdict"], third["changed"]) == ("slower", "triton_version 3.6.0 -> 3.7.1")


def test_devices_have_histories_of_their_own(tmp_path: Path) -> None:
    write([measured(), measured(accelerator="h100")], tmp_path / "x.parquet")
    assert [device for _, device in case_history("op:mlstm_sig", [tmp_path])] == ["h100_sxm", "h200_sxm"]


def test_unknown_cases(results: Path) -> None:
    with pytest.raises(ValueError, match="case:00000000 selects no row"):
        case_history("00000000", [results])
    with pytest.raises(ValueError, match="a selector must be"):
        case_history("zz", [results])
