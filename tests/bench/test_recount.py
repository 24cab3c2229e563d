"""What is counted of rows is filled in anew, and nothing else of them; the committed rows need none of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lrbench.bench import recount
from lrbench.results import store
from lrbench.results.schema import Record

RESULTS = Path(__file__).resolve().parents[2] / "results"
RECORD = Record(
    run_id="r" * 32, case_id="0123456789abcdef", measured_at="2026-01-02T03:04:05+00:00", kernel="tfla", op="mlstm_sig",
    impl="tfla", provider="lrbench", mode="fw", dtype="bf16", state_dtype="fp32", status="ok", batch=8, seq_len=8192,
    num_heads=16, head_dim_qk=128, head_dim_v=256, chunk_size=256, time_ms=0.9, time_samples_ms=[0.9, 0.8, 1.0],
    device_accelerator="h200_sxm", device_name="NVIDIA H200", peak_memory_bytes=2**30, flops=1.0,
)  # fmt: skip


def test_counts_are_filled_in_and_what_was_measured_stays(tmp_path: Path) -> None:
    failed = dataclasses.replace(RECORD, status="oom", reason="no memory", time_ms=None, time_samples_ms=None)
    with store.RunWriter(tmp_path, "run") as writer:
        for record in (RECORD, failed):
            writer.append(record)
    before = writer.path.read_bytes()
    said = CliRunner().invoke(recount.app, [str(tmp_path), "--dry-run"])
    assert (said.exit_code, said.stdout) == (0, f"{writer.path}: 2 of 2 rows\n")
    assert writer.path.read_bytes() == before
    assert CliRunner().invoke(recount.app, [str(tmp_path)]).exit_code == 0
    rows = [Record(**row) for row in store.read_results([writer.path]).to_pylist()]
    assert rows[0].flops == rows[1].flops > 1e9
    assert rows[0].tflops == pytest.approx(rows[0].flops / 0.9e9)
    assert 0 < rows[0].roofline_fraction < 1
    assert rows[1].tflops is None
    names = "flops tensor_flops bytes intensity causal_factor tflops gbps roofline_fraction suspect model_time_ms"
    counted = dict.fromkeys(names.split())
    for row, record in zip(rows, (RECORD, failed), strict=True):
        assert dataclasses.replace(row, **counted) == dataclasses.replace(record, **counted)
    assert CliRunner().invoke(recount.app, [str(tmp_path)]).stdout == "", "once is enough"


def test_what_cannot_be_counted_anew_is_said(tmp_path: Path) -> None:
    said = CliRunner().invoke(recount.app, [str(tmp_path)])
    assert said.exit_code == 2
    assert str(tmp_path) in said.output


def test_committed_rows_say_what_is_counted_today() -> None:
    said = CliRunner().invoke(recount.app, [str(RESULTS), "--dry-run"])
    assert (said.exit_code, said.output) == (0, ""), "where that is meant: python -m lrbench.bench.recount results"
