"""The trial of all baselines: every one gets a row, with the reason where it has no result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lrbench.kernels.baselines import BASELINES
from lrbench.tests.tools import trial


def test_every_baseline_gets_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all packages but mlstm_kernels, only torch's CPU attention can run on a CPU."""
    monkeypatch.setattr(trial, "CHECK_SIZES", {**trial.CHECK_SIZES, "seq_len": 128, "num_heads": 1})
    chosen = [baseline for baseline in BASELINES if baseline.provider != "mlstm_kernels"]
    path = tmp_path / "trial.json"
    arguments = ["--stages", "check", "--json", str(path), "--jobs", "1", "--only", *{b.provider for b in chosen}]
    status = trial.main(arguments)
    result = json.loads(path.read_text())
    rows = {row["impl"]: row for row in result["rows"]}
    assert set(rows) == {baseline.name for baseline in chosen}
    assert status == 0, [row for row in rows.values() if row["status"] not in ("ok", "unsupported", "unavailable")]
    assert rows["torch.sdpa_cpu"]["status"] == (
        "ok" if result["environment"]["device_kind"] == "cpu" else "unsupported"
    )
    assert result["versions"]["torch"]
    for row in rows.values():
        assert (row["status"] == "ok") == ("rel_error" in row)
        assert row["status"] == "ok" or row["reason"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)


def test_known_failures_are_tried_only_when_asked() -> None:
    planned = trial.plan_trial([b for b in BASELINES if b.known_bad], "check")
    assert planned
    for item in planned:
        assert item.target.known_bad
        assert not trial._forget_known_bad(item.target).known_bad


def test_timed_stage_has_forward_and_both_passes() -> None:
    modes: dict[str, list[str]] = {}
    for item in trial.plan_trial(BASELINES, "time"):
        modes.setdefault(item.case.impl, []).append(item.case.mode)
    assert modes["torch.sdpa_flash"] == ["fw", "fwbw"]
    assert modes["mlstm_kernels.native_autograd"] == ["fw"]


def test_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        trial.main(["--only", "fla.no_such_kernel"])
    assert exit_info.value.code == 2
    assert "got fla.no_such_kernel" in capsys.readouterr().err
