"""`lrbench results`: what is stored, from when and with what, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lrbench.results.contents import file_rows, implementation_rows
from lrbench.results.store import HERE
from lrbench.tests.command_line import Lrbench, one_line

from ..analysis import rows as made

GPU, CPU, BOTH = ("cuda",), ("cpu",), ("cpu", "cuda")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    case = made.case("mlstm_sig", "fused_chunk")
    common = {"git_commit": "a" * 40, "torch_version": "2.11", "triton_version": "3.6.0"}
    made.write(
        [
            made.row(case, **common),
            made.row(case, **{**common, "measured_at": "2026-01-02T00:00:00+00:00", "git_commit": "b" * 40}),
            made.row(made.case("mlstm_sig", "fused_chunk", seq_len=1024), **common),
            made.row(made.case("mlstm_sig", "fused_chunk", seq_len=2048), **common, status="oom", reason="no memory"),
            made.row(made.case("attention", "torch.sdpa_cudnn"), **common),
        ],
        tmp_path / "a.parquet",
    )
    return tmp_path


def test_implementations_and_what_is_missing(results: Path) -> None:
    declared = {
        ("tfla", "mlstm_sig", "fused_chunk"): GPU,
        ("tfla", "mlstm_sig", "torch"): BOTH,
        ("tfla", "mlstm_sig", "only_on_a_cpu"): CPU,
        ("lightning", "attention", "torch.sdpa_cudnn"): GPU,
        ("wkv", "wkv4", "scan"): GPU,
    }
    ours, torch, peer = implementation_rows([results], declared)
    assert ours == {
        "device": "h200_sxm", "kernel": "tfla", "op": "mlstm_sig", "impl": "fused_chunk", "ok": 2, "not_ok": "1 oom",
        "older_rows": 1, "measured": "2026-01-01 to 2026-01-02", "commits": "bbbbbbb, aaaaaaa", "torch": "2.11",
        "triton": "3.6.0",
    }  # fmt: skip
    assert (torch["impl"], torch["ok"], torch["measured"]) == ("torch", 0, None)
    assert (peer["kernel"], peer["impl"], peer["ok"]) == ("tfla", "torch.sdpa_cudnn", 1)


def test_files(results: Path) -> None:
    (row,) = file_rows([results])
    assert (row["holds"], row["rows"], row["cases"], row["runs"]) == ("results", 5, 4, 1)
    assert file_rows([results / "a.parquet"]) == [row]
    kinds = {Path(row["file"]).name: row["holds"] for row in file_rows([HERE / "h200_sxm"])}
    assert (kinds["roofs.parquet"], kinds["profile.parquet"], kinds["wkv.parquet"]) == (
        "calibration", "profiles", "results",
    )  # fmt: skip


def test_command(results: Path, lrbench: Lrbench) -> None:
    code, out, _ = lrbench("results", results, "--format", "json")
    assert code == 0
    assert {row["impl"] for row in json.loads(out)} > {"fused_chunk", "torch.sdpa_cudnn", "xl_chunk"}
    table = lrbench("results", results)[1]
    assert "a.parquet" in table and "1 oom" in table


def test_bad_input(tmp_path: Path, lrbench: Lrbench) -> None:
    for arguments, message in (
        (("--format", "yaml"), "format must be one of table, json, csv, markdown, got 'yaml'"),
        ((tmp_path / "none",), "does not exist"),
        ((tmp_path,), "no parquet file in it"),
    ):
        assert message in one_line(lrbench("results", *arguments)[2])


def test_the_committed_page_is_what_the_command_writes(lrbench: Lrbench) -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    written = lrbench("results", "--format", "markdown")[1]
    assert written == page, "write it anew: lrbench results --format markdown > results/README.md"


def test_the_newest_row_of_a_case_is_in_its_familys_file() -> None:
    """history.parquet holds older rows alone."""
    for row in file_rows([HERE / "h200_sxm"]):
        if row["holds"] == "results" and "history" not in row["file"]:
            assert row["rows"] == row["cases"], row["file"]
