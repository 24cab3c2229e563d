"""Optimal chunk lengths: the paper's closed forms, agreement with brute force, and measured regret."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.counts import count
from lrbench.analysis.model.answers import chunk_size_answer, chunk_size_report
from lrbench.analysis.model.chunk_size import CHUNKWISE_OPERATIONS, coefficients, feasible_chunks
from lrbench.analysis.model.prediction import stored_rows
from lrbench.analysis.model.runtime_model import model_time_ms
from lrbench.results.store import committed_results

from .. import rows as made

H100 = get_accelerator("h100")


@pytest.mark.parametrize("d_v", [64, 128, 512])
@pytest.mark.parametrize("p_qk", [0.5, 1.0])
@pytest.mark.parametrize("causal", [0.5, 0.66, 1.0])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_closed_forms_are_the_papers(d_v: int, p_qk: float, causal: float, state_dtype: str) -> None:
    """Equations 113 and 123."""
    closed = coefficients(
        "mlstm_sig", head_dim_qk=int(p_qk * d_v), head_dim_v=d_v, causal_factor=causal, state_dtype=state_dtype
    )
    cells, state_bytes = d_v**2 * p_qk, {"fp32": 4, "bf16": 2}[state_dtype]
    denominator = 2 * causal * (d_v * (1 + p_qk) + 3) + 1
    assert closed.flop_optimal() == pytest.approx(math.sqrt((2 * cells + 5) / denominator))
    intensity = 989e12 / 3.35e12
    numerator = 2 * cells + 5 + 2 * intensity * cells * state_bytes
    assert closed.runtime_optimal(intensity) == pytest.approx(math.sqrt(numerator / denominator))


@pytest.mark.parametrize("op", CHUNKWISE_OPERATIONS)
@pytest.mark.parametrize("mode", ["fw", "bw", "fwbw"])
def test_closed_forms_are_where_the_counts_are_least(op: str, mode: str) -> None:
    """Brute force over every chunk length that divides a long sequence finds the closed form's neighbourhood."""
    closed = coefficients(op, head_dim_qk=128, head_dim_v=256, causal_factor=0.5, mode=mode)
    sizes = {"seq_len": 2**14 * 3 * 5, "head_dim_qk": 128, "head_dim_v": 256, "num_groups": 1, "causal_factor": 0.5}
    divisors = [n for n in range(1, 4000) if sizes["seq_len"] % n == 0]
    counted = {n: count(op, mode=mode, chunk_size=n, **sizes) for n in divisors}
    tolerance = 1.25
    best = min(divisors, key=lambda n: counted[n].flops)
    assert best / tolerance <= closed.flop_optimal() <= best * tolerance
    best = min(divisors, key=lambda n: model_time_ms(counted[n], H100, "bf16"))
    assert best / tolerance <= closed.runtime_optimal(H100.intensity("bf16")) <= best * tolerance


def test_coefficients_reproduce_the_counts_of_any_chunk() -> None:
    closed = coefficients("simple_gla", head_dim_qk=64, head_dim_v=96, causal_factor=0.75)
    for length in (16, 100, 1024):
        one = count("simple_gla", seq_len=length, chunk_size=length, head_dim_qk=64, head_dim_v=96, causal_factor=0.75)
        assert one.flops == pytest.approx(closed.a * length**2 + closed.b * length + closed.c)
        assert one.bytes == pytest.approx(closed.p * length + closed.q)


def test_feasible_chunks() -> None:
    assert feasible_chunks(100) == (16, 32, 64)
    assert feasible_chunks(16) == (16,)
    assert feasible_chunks(15) == ()
    assert feasible_chunks(2**20)[-1] == 2**20


def test_modelled_memory_is_inputs_outputs_and_states() -> None:
    states = {}
    # Gates have 4 bytes, and a single chunk has no states between chunks.
    for mode, tensors, gates in (("fw", 2 * 128 + 2 * 256, 4), ("fwbw", 4 * 128 + 3 * 256, 8)):
        report = chunk_size_report(made.question(mode=mode))
        # Without rows memory is what the model says.
        for each in report["candidates"]:
            states[mode] = 8 * 16 * (8192 // each["chunk_size"]) * 128 * 256 * 4 * (1 if mode == "fw" else 2)
            states[mode] *= each["chunk_size"] < 8192
            if mode == "fwbw":
                # fused_chunk's anchors are 256 positions apart at most.
                states[mode] += 8 * 16 * (8192 // min(each["chunk_size"], 256)) * 128 * 256 * 2
            assert each["memory_bytes"] == 65536 * 16 * (tensors + gates) * 2 + states[mode]


@pytest.mark.parametrize(("mode", "chunk_size", "within"), [("fw", 64, 0.03), ("fw", 1024, 0.03), ("fwbw", 64, 0.08)])
def test_modelled_memory_is_what_was_measured_where_states_dominate(mode: str, chunk_size: int, within: float) -> None:
    """The model adds up everything; in a backward pass not all of it is there at once."""
    results = committed_results("h200_sxm")
    measured, modelled = (
        made.question(mode=mode, rows=rows).answers("fused_chunk", [chunk_size])[0]
        for rows in (stored_rows(results, mode, "bf16"), ())
    )
    assert measured.measured is not None and measured.memory_bytes == measured.measured["peak_memory_bytes"]
    assert modelled.memory_bytes == pytest.approx(measured.memory_bytes, rel=within)


def test_report_with_measurements(tmp_path: Path) -> None:
    times = {64: 2.0, 128: 1.5, 256: 1.2, 512: 1.3, 1024: 1.9}
    rows = [made.row("mlstm_sig", "fused_chunk", chunk_size=c, time_ms=t) for c, t in times.items()]
    rows.append({**rows[0], "measured_at": "2025-01-01T00:00:00+00:00", "time_ms": 9.0})
    rows.append(made.row("mlstm_sig", "fused_chunk", chunk_size=128, mode="fwbw", time_ms=0.1))
    rows.append(made.row("mlstm_sig", "fused_chunk", chunk_size=128, time_ms=0.1, accelerator="h100"))
    rows.append(made.row("mlstm_sig", "fused_chunk", chunk_size=32, status="oom", reason="out of memory"))
    made.write(rows, tmp_path / "results.parquet")
    report = chunk_size_report(made.question(rows=stored_rows((tmp_path,), "fw", "bf16")))
    measured = {each["chunk_size"]: each["measured_ms"] for each in report["candidates"]}
    assert {chunk: time_ms for chunk, time_ms in measured.items() if time_ms is not None} == times
    assert report["measured_best"] == 256
    assert report["runtime_optimal_feasible"] == 512
    assert report["regret_ms"] == pytest.approx(0.1)
    # A fit of few rows may expect nothing of the chosen length and something of others.
    for each in report["candidates"]:
        each["predicted_ms"] = None if each["measured_ms"] else 0.5
    assert "the model says" not in chunk_size_answer(report, 5)
    memory = [each["memory_bytes"] for each in report["candidates"] if each["measured_ms"]]
    assert memory == sorted(memory, reverse=True)
