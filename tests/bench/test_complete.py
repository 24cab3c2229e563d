"""A complete set of results, measured in several calls: what is there is left as it is, and at the end it says so."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from lrbench.analysis.reproduce import entries
from lrbench.bench.drive import bars, complete
from lrbench.bench.environment import current_environment
from lrbench.bench.plan import Request, plan
from lrbench.kernels import FAMILIES
from lrbench.results.select import load_rows
from lrbench.tests import ROOT
from lrbench.tests.command_line import Lrbench

CLAIM = (ROOT / "tests/data/claim.toml").read_text()

SWEEPS = (ROOT / "tests/data/sweeps.toml").read_text()


def days(path: Path) -> dict[tuple[str, str, int], str]:
    """Return when each case of a file was measured."""
    return {(row["op"], row["impl"], row["seq_len"]): row["measured_at"] for row in load_rows(path)}


def test_calls_go_on_where_the_last_one_ended(
    lrbench: Lrbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweeps.toml").write_text(SWEEPS)
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "a_doc.toml").write_text(CLAIM)
    sweeps = complete.load_sweeps(tmp_path / "sweeps.toml")
    monkeypatch.setattr(complete, "load_sweeps", lambda: sweeps)
    monkeypatch.setattr(entries, "FOLDER", tmp_path / "claims")
    monkeypatch.setattr(bars, "load_bars", dict)
    monkeypatch.setattr(complete, "probe_environment", current_environment)
    monkeypatch.setenv("LRBENCH_GIT_COMMIT", "a" * 40)
    folder = tmp_path / "cpu"
    command = ("results", folder, "--run")
    code, _, said = lrbench(*command, "--time-limit", "0")
    assert code == 1 and f"{folder}: cases are left; run the same command again" in said, said
    first = {path.name: days(path) for path in folder.iterdir()}
    assert first, "a call of no time measures one case all the same"
    code, _, said = lrbench(*command)
    assert code == 0 and f"{folder}: all cases of this machine are there" in said, said
    assert {path.name for path in folder.iterdir()} == {"tfla.parquet", "wkv.parquet"}
    whole = {path.name: days(path) for path in folder.iterdir()}
    assert {case for rows in whole.values() for case in rows} == {
        ("mlstm_sig", "torch", 32), ("mlstm_sig", "fused_chunk", 32), ("wkv4", "torch", 32), ("wkv4", "torch", 64),
    }  # fmt: skip
    assert all(whole[name].items() >= rows.items() for name, rows in first.items())
    code, _, said = lrbench(*command)
    assert code == 0 and "nothing is left to measure" in said and f"nothing to merge in {folder}" in said
    assert {path.name: days(path) for path in folder.iterdir()} == whole
    # Of another commit, all is measured anew; what cannot be tried here has a row already.
    monkeypatch.setenv("LRBENCH_GIT_COMMIT", "b" * 40)
    assert lrbench(*command)[0] == 0
    assert days(folder / "history.parquet") == {
        case: at for rows in whole.values() for case, at in rows.items() if case[1] == "torch"
    }
    assert {row["git_commit"] for row in load_rows(folder / "wkv.parquet")} == {"b" * 40}
    # What has no row at all is measured before what has one of another commit.
    for name in ("wkv", "history"):
        (folder / f"{name}.parquet").unlink()
    monkeypatch.setenv("LRBENCH_GIT_COMMIT", "c" * 40)
    assert lrbench(*command, "--time-limit", "0")[0] == 1
    (newest,) = (row for row in load_rows(sorted(folder.iterdir())) if row["git_commit"] == "c" * 40)
    assert newest["op"] == "wkv4"


def test_the_committed_sweeps_have_cases_and_hold_what_the_default_sweep_of_every_family_measures() -> None:
    """Every implementation in every mode, at one length at least."""

    def measured(requests: Iterable[Request]) -> set[tuple[str, ...]]:
        cases = [item.case for each in requests for item in plan(each, device_kind="cuda")]
        return {(case.kernel, case.op, case.impl, case.mode) for case in cases}

    sweeps = complete.load_sweeps()
    assert all(plan(each, device_kind="cuda") for each in sweeps)
    assert measured(Request(kernel=kernel) for kernel in FAMILIES) <= measured(sweeps)


def test_what_does_not_fit_a_file_of_sweeps_is_refused(tmp_path: Path) -> None:
    for text, why in (("[[sweeps]]\nseq_len = [32]\n", "keys than ops, seq_lens"), ("", "at least one table")):
        (tmp_path / "sweeps.toml").write_text(text)
        with pytest.raises(ValueError, match=why):
            complete.load_sweeps(tmp_path / "sweeps.toml")
