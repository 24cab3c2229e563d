"""`lrbench results`: what is stored, from when and with what, and what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from lrbench.results.contents import as_markdown, file_rows, implementation_rows, operation_rows
from lrbench.results.schema import RECORD_COLUMNS, Record
from lrbench.results.select import load_rows
from lrbench.results.store import HERE, OTHER, RunWriter, current_files
from lrbench.tests.command_line import Lrbench, Run

from ..analysis import rows as made


def declare(*texts: str) -> list[dict[str, str]]:
    return [dict(zip(("kernel", "op", "impl", "devices"), text.split(), strict=True)) for text in texts]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    common = {"git_commit": "a" * 40, "torch_version": "2.11", "triton_version": "3.6.0"}
    later = {"measured_at": "2026-01-02T00:00:00+00:00", "git_commit": "b" * 40}
    made.write(
        [
            made.row("mlstm_sig", "fused_chunk", **common),
            made.row("mlstm_sig", "fused_chunk", **{**common, **later}),
            made.row("mlstm_sig", "fused_chunk", seq_len=1024, **common),
            made.row("mlstm_sig", "fused_chunk", seq_len=2048, **common, status="oom", reason="no memory"),
            made.row("attention", "torch.sdpa_cudnn", **common),
        ],
        tmp_path / "a.parquet",
    )
    return tmp_path


def test_implementations_and_what_is_missing(results: Path) -> None:
    names = "fused_chunk cuda", "torch cpu/cuda", "only_on_a_cpu cpu"
    declared = declare(*(f"tfla mlstm_sig {name}" for name in names), "lightning attention torch.sdpa_cudnn cuda")
    ours, torch, peer = implementation_rows([results], [*declared, *declare("wkv wkv4 scan cuda")])
    assert ours == {
        "device": "h200_sxm", "kernel": "tfla", "op": "mlstm_sig", "impl": "fused_chunk", "ok": 2, "not_ok": "1 oom",
        "older_rows": 1, "measured": "2026-01-01 to 01-02", "commits": "bbbbbbb, aaaaaaa", "torch": "2.11",
        "triton": "3.6.0",
    }  # fmt: skip
    assert (torch["impl"], torch["ok"], torch["measured"]) == ("torch", 0, None)
    assert (peer["kernel"], peer["impl"], peer["ok"]) == ("tfla", "torch.sdpa_cudnn", 1)
    assert operation_rows([ours, torch, {**peer, "device": "h100_sxm"}]) == [
        {"kernel": "tfla", "op": "mlstm_sig", "implementations": "1 of 2", "h200_sxm": 2, "h100_sxm": None},
        {"kernel": "tfla", "op": "attention", "implementations": "1 of 1", "h200_sxm": None, "h100_sxm": 1},
    ]


def test_files_are_listed_with_what_they_hold(results: Path) -> None:
    (row,) = file_rows([results])
    assert (row["holds"], row["rows"], row["cases"], row["runs"]) == ("results", 5, 4, 1)
    assert file_rows([results / "a.parquet"]) == [row]
    kinds = {Path(row["file"]).name: row["holds"] for row in file_rows([HERE / "h200_sxm"])}
    assert (kinds["roofs.parquet"], kinds["profile.parquet"], kinds["wkv.parquet"]) == (
        "calibration", "profiles", "results",
    )  # fmt: skip


def test_a_folder_may_hold_calibrations_alone(tmp_path: Path, run: Run) -> None:
    (tmp_path / "roofs.parquet").write_bytes((HERE / "h200_sxm" / OTHER / "roofs.parquet").read_bytes())
    assert run.json("results", tmp_path) == []


@pytest.mark.parametrize("ending", ["parquet", "csv", "json"])
def test_whole_rows_as_derived_today(tmp_path: Path, lrbench: Lrbench, run: Run, ending: str) -> None:
    """Of each case the newest row, with every column; a file is what pandas reads."""
    old = made.row("mlstm_sig", "fused_chunk", run_id="old", time_ms=3.0)
    new = {**old, "run_id": "new", "measured_at": "2026-12-01T00:00:00+00:00", "time_ms": 2.0, "flops": 1.0}
    made.write([old, new, made.row("mlstm_exp", "fused_chunk")], tmp_path / "a.parquet")
    named = ("results", tmp_path, "--rows", "op:mlstm_sig")
    (printed,) = run.json(*named)
    assert {*printed} == {*RECORD_COLUMNS} and (printed["run_id"], printed["time_ms"]) == ("new", 2.0)
    assert printed["flops"] == pytest.approx(old["flops"]), "counted today"
    path = tmp_path / f"rows.{ending}"
    assert lrbench(*named, "--output", path) == (0, "", f"1 rows: {path}\n")
    readers = {"parquet": pd.read_parquet, "csv": pd.read_csv, "json": pd.read_json}
    (stored,) = readers[ending](path)[["run_id", "flops", "batch"]].to_dict("records")
    assert stored == pytest.approx({name: printed[name] for name in stored})


def test_rows_say_which_device_where_there_are_several_and_what_a_cache_held(tmp_path: Path, run: Run) -> None:
    rows = [
        made.row("mlstm_sig", "fused_chunk", time_ms=ms, accelerator=key) for ms, key in ((1e-4, "h100"), (9.0, "h200"))
    ]
    made.write(rows, tmp_path / "a.parquet")
    fast, slow = (line.split() for line in run("results", tmp_path, "--rows", "op:mlstm_sig").splitlines()[1:])
    assert ("h100_sxm" in fast, "h200_sxm" in slow) == (True, True)
    assert ("(cache)" in fast, "(cache)" in slow) == (True, False)
    assert "h200_sxm" not in run("results", tmp_path, "--rows", "op:mlstm_sig,device:h200").splitlines()[1]


def test_command(results: Path, run: Run) -> None:
    assert {row["impl"] for row in run.json("results", results)} > {"fused_chunk", "torch.sdpa_cudnn", "xl_chunk"}
    table = run("results", results)
    assert "a.parquet" in table and "1 oom" not in table
    assert re.search(r"tfla +mlstm_sig +1 of \d+ +2\n", table), table
    table = run("results", results, "--all")
    assert "a.parquet" in table and "1 oom" in table


def test_the_committed_page_is_what_the_command_writes(run: Run) -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    assert run("results --format markdown") == page, (
        "write it anew: lrbench results --format markdown > results/README.md"
    )


def test_the_page_is_of_what_is_there(results: Path) -> None:
    """A kernel that was just added changes no page."""
    pages = [
        as_markdown([], implementation_rows([results], declare("tfla mlstm_sig fused_chunk cuda", *added)))
        for added in ((), ("tfla mlstm_sig new cuda",), ("tfla ema fused cuda",))
    ]
    assert pages[0] == pages[1] == pages[2]
    assert "fused_chunk" in pages[0]


def test_the_newest_row_of_a_case_is_in_its_familys_file() -> None:
    """history.parquet holds older rows alone: than one of the case or, of superseded code, of its implementation."""
    for row in file_rows([HERE / "h200_sxm"]):
        if row["holds"] == "results" and "history" not in row["file"]:
            assert row["rows"] == row["cases"], row["file"]
    columns = ("case_id", "op", "impl", "mode", "measured_at")
    current = sorted(load_rows(current_files([HERE / "h200_sxm"]), columns), key=lambda row: row["measured_at"])
    of_case = {row["case_id"]: row["measured_at"] for row in current}
    of_code = {(row["op"], row["impl"], row["mode"]): row["measured_at"] for row in current}
    for row in load_rows(HERE / "h200_sxm" / "history.parquet", columns):
        newest = of_case.get(row["case_id"]) or of_code[row["op"], row["impl"], row["mode"]]
        assert row["measured_at"] <= newest, row


def test_runs_are_listed_newest_first_and_say_whether_they_are_complete(tmp_path: Path, lrbench: Lrbench) -> None:
    """One that ended, one with a case left, one that is on or was killed; newest first, and files that say nothing."""
    days = {"whole": ("01", 2), "cut": ("02", 3)}
    cases = [made.case("mlstm_sig", "fused_chunk", seq_len=length) for length in (1024, 2048)]
    for run, (day, planned) in days.items():
        with RunWriter(tmp_path, run, planned) as writer:
            for case in cases:
                at = {"measured_at": f"2026-01-{day}T00:00:00+00:00", "git_commit": "a" * 40, "git_dirty": run == "cut"}
                writer.append(Record(**made.row_of(case, run_id=f"{run}-0123456789", **at)))
    on = RunWriter(tmp_path, "sweep-on")
    on.append(Record(**made.row_of(cases[0], run_id="on-0123456789", measured_at="2026-01-03T00:00:00+00:00")))
    old = {"run_id": "kept-0123456789", "measured_at": "2025-12-01T00:00:00+00:00"}
    kept = [made.row_of(case, **old, status="oom", reason="-") for case in cases]
    made.write(kept, tmp_path / "kept.parquet")
    rows = json.loads(lrbench("runs", str(tmp_path), "--format", "json")[1])
    assert [(row["run"], row["complete"], row["cases"], row["ok"]) for row in rows] == [
        ("on-01234", "no", 1, 1), ("cut-0123", "no", 2, 2), ("whole-01", "yes", 2, 2), ("kept-012", None, 2, 0),
    ]  # fmt: skip
    assert rows[1] | {"complete": None} == {
        "run": "cut-0123", "measured": "2026-01-02 00:00", "device": "h200_sxm", "commit": "aaaaaaa+", "kernel": "tfla",
        "cases": 2, "ok": 2, "complete": None,
    }  # fmt: skip
    on.close()
    (tmp_path / "junk.parquet").write_bytes(b"junk")
    assert f"got {tmp_path / 'junk.parquet'}: " in lrbench("runs", str(tmp_path / "junk.parquet"))[2]
    (tmp_path / "junk.parquet").unlink()
    assert len(json.loads(lrbench("runs", str(tmp_path), "--limit", "1", "--format", "json")[1])) == 1
    code, out, err = lrbench("runs", str(tmp_path), "--limit", "1")
    assert (code, out.splitlines()[1].split()[0], err) == (0, "on-01234", "and 3 older runs: --limit 4\n")
