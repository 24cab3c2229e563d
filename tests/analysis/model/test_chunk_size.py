"""Optimal chunk lengths: the paper's closed forms, agreement with brute force, and measured regret."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import sympy

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.counts import Head, Widths, count, mlstm
from lrbench.analysis.model.chunk_size import (
    CHUNKWISE_OPERATIONS,
    chunk_size_report,
    coefficients,
    feasible_chunks,
)
from lrbench.analysis.model.runtime_model import model_time_ms
from lrbench.results.store import committed_results

from .. import rows as made

LENGTH, DIM, SHARE, CAUSAL, WIDTH, INTENSITY = sympy.symbols("L d p F w I", positive=True)
H100, H200 = get_accelerator("h100"), get_accelerator("h200")


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


def symbolic_chunk(*, published: bool) -> tuple[sympy.Expr, sympy.Expr]:
    """Return FLOPs and bytes of a chunk of mLSTMsig in L, d (value head dim), p (p_qk), F and w (bytes_Cmn)."""
    widths = Widths(qkv=2, gate=2, state=WIDTH)
    head = Head(length=LENGTH, d_qk=SHARE * DIM, d_v=DIM, causal=CAUSAL, widths=widths)
    tally = mlstm.chunk("mlstm_sig", head, published=published)
    return tally.flops, tally.bytes


def least(per_chunk: sympy.Expr) -> sympy.Expr:
    """Return the chunk length at which a cost per token, its chunk's over L, has no slope."""
    (root,) = sympy.solve(sympy.diff(per_chunk / LENGTH, LENGTH), LENGTH)
    return root


def test_equations_113_and_123_follow_from_the_printed_total() -> None:
    flops, moved = symbolic_chunk(published=True)
    denominator = 2 * CAUSAL * (DIM * (1 + SHARE) + 3) + 1
    printed = (2 * DIM**2 * SHARE + 5) / denominator
    assert sympy.simplify(least(flops) ** 2 - printed) == 0
    printed = (2 * DIM**2 * SHARE + 5 + 2 * INTENSITY * DIM**2 * SHARE * WIDTH) / denominator
    assert sympy.simplify(least(flops + INTENSITY * moved) ** 2 - printed) == 0


def test_the_papers_slip_reaches_its_optima() -> None:
    """The printed total has mLSTMexp's gates, so 5 stands where mLSTMsig's own parts give 1; nothing else changes."""
    own, moved = symbolic_chunk(published=False)
    denominator = 2 * CAUSAL * (DIM * (1 + SHARE) + 3) + 1
    assert sympy.simplify(least(own) ** 2 - (2 * DIM**2 * SHARE + 1) / denominator) == 0
    right = (2 * DIM**2 * SHARE + 1 + 2 * INTENSITY * DIM**2 * SHARE * WIDTH) / denominator
    assert sympy.simplify(least(own + INTENSITY * moved) ** 2 - right) == 0


def test_the_papers_words_on_its_optima() -> None:
    """It reads 16 off figure 19 for d_hv = 512: the power of two beside 18.4. Both optima grow as sqrt(d_hv)."""
    flops, moved = symbolic_chunk(published=True)
    for optimum in (least(flops), least(flops + INTENSITY * moved)):
        assert sympy.limit(optimum / sympy.sqrt(DIM), DIM, sympy.oo).is_positive
    at = least(flops).subs({DIM: 512, SHARE: sympy.Rational(1, 2), CAUSAL: sympy.Rational(1, 2)})
    assert float(at) == pytest.approx(18.43, abs=0.01)


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


def test_optimum_grows_with_intensity_and_state_width() -> None:
    """Figures 24 and 25."""
    wide, narrow = (
        coefficients("mlstm_sig", head_dim_qk=128, head_dim_v=256, causal_factor=0.5, state_dtype=dtype)
        for dtype in ("fp32", "bf16")
    )
    optima = [wide.runtime_optimal(get_accelerator(key).intensity("fp16")) for key in ("v100", "a100", "h100")]
    assert optima == sorted(optima)
    assert wide.runtime_optimal(295) > narrow.runtime_optimal(295) > wide.flop_optimal() == narrow.flop_optimal()


def test_feasible_chunks() -> None:
    assert feasible_chunks(100) == (16, 32, 64)
    assert feasible_chunks(16) == (16,)
    assert feasible_chunks(15) == ()
    assert feasible_chunks(2**20)[-1] == 2**20


def test_report_without_measurements() -> None:
    report = chunk_size_report("mlstm_sig", H100, head_dim_v=512, head_dim_qk=256, causal_factor=0.5)
    assert report["flop_optimal"] == pytest.approx(18.43, abs=0.01)
    assert report["runtime_optimal"] == pytest.approx(633.5, abs=0.1)
    assert report["runtime_optimal_feasible"] == 512
    assert report["measured_best"] is report["regret_ms"] is None
    assert [each["chunk_size"] for each in report["candidates"]] == list(feasible_chunks(8192))
    assert {each["causal_factor"] for each in report["candidates"]} == {0.5}


def test_feasible_optima_are_the_least_candidates() -> None:
    for mode in ("fw", "bw", "fwbw"):
        report = chunk_size_report("mamba2_ssd", H100, head_dim_v=128, head_dim_qk=128, causal_factor=0.5, mode=mode)
        least = {name: min(report["candidates"], key=lambda each: each[name]) for name in ("flops", "model_upper_ms")}
        assert report["flop_optimal_feasible"] == least["flops"]["chunk_size"]
        assert report["runtime_optimal_feasible"] == least["model_upper_ms"]["chunk_size"]
        # The least of a function of L + c / L over powers of two lies within a factor of two of the real-valued one.
        for name in ("flop_optimal", "runtime_optimal"):
            assert report[name] / 2 <= report[f"{name}_feasible"] <= 2 * report[name]


def test_modelled_memory_is_inputs_outputs_and_states() -> None:
    sizes = {"batch": 8, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}
    states = {}
    for mode, tensors, gates in (("fw", 2 * 128 + 2 * 256, 2), ("fwbw", 4 * 128 + 3 * 256, 4)):
        report = chunk_size_report("mlstm_sig", H200, **sizes, mode=mode)
        for each in report["candidates"]:
            states[mode] = 8 * 16 * (8192 // each["chunk_size"]) * 128 * 256 * 4 * (1 if mode == "fw" else 2)
            assert each["model_memory_bytes"] == 65536 * 16 * (tensors + gates) * 2 + states[mode]


@pytest.mark.parametrize(("mode", "chunk_size", "within"), [("fw", 64, 0.03), ("fw", 1024, 0.03), ("fwbw", 64, 0.08)])
def test_modelled_memory_is_what_was_measured_where_states_dominate(mode: str, chunk_size: int, within: float) -> None:
    """The model adds up everything; in a backward pass not all of it is there at once."""
    results = committed_results("h200_sxm")
    report = chunk_size_report("mlstm_sig", H200, head_dim_v=256, head_dim_qk=128, mode=mode, results=results)
    each = next(each for each in report["candidates"] if each["chunk_size"] == chunk_size)
    assert each["model_memory_bytes"] == pytest.approx(each["peak_memory_bytes"], rel=within)


def test_long_chunks_that_were_measured_are_found() -> None:
    """The engine's walk is fastest at chunks far beyond those of the paper's kernels."""
    results = committed_results("h200_sxm")
    report = chunk_size_report(
        "mlstm_sig", H200, head_dim_v=256, head_dim_qk=128, seq_len=65536, batch=1, results=results
    )
    measured = {each["chunk_size"]: each["measured_ms"] for each in report["candidates"] if each["measured_ms"]}
    assert max(measured) == 65536
    assert report["measured_best"] == min(measured, key=measured.__getitem__) > 4096
    assert report["regret_ms"] == measured[report["runtime_optimal_feasible"]] - measured[report["measured_best"]]


def test_report_with_measurements(tmp_path: Path) -> None:
    times = {64: 2.0, 128: 1.5, 256: 1.2, 512: 1.3, 1024: 1.9}
    rows = [made.row(made.case("mlstm_sig", "fused_chunk", chunk_size=c), time_ms=t) for c, t in times.items()]
    rows.append(made.row(made.case("mlstm_sig", "fused_chunk", chunk_size=128, mode="fwbw"), time_ms=0.1))
    rows.append(made.row(made.case("mlstm_sig", "fused_chunk", chunk_size=128), time_ms=0.1, accelerator="h100"))
    rows.append(made.row(made.case("mlstm_sig", "fused_chunk", chunk_size=32), status="oom", reason="out of memory"))
    made.write(rows, tmp_path / "results.parquet")
    report = chunk_size_report("mlstm_sig", H200, head_dim_v=256, head_dim_qk=128, results=(tmp_path,))
    measured = {each["chunk_size"]: each["measured_ms"] for each in report["candidates"]}
    assert {chunk: time_ms for chunk, time_ms in measured.items() if time_ms is not None} == times
    assert report["measured_best"] == 256
    assert report["runtime_optimal_feasible"] == 512
    assert report["regret_ms"] == pytest.approx(0.1)
    memory = [each["peak_memory_bytes"] for each in report["candidates"] if each["measured_ms"]]
    assert memory == sorted(memory, reverse=True)


def test_a_newer_measurement_replaces_an_older_one(tmp_path: Path) -> None:
    case = made.case("mlstm_sig", "fused_chunk", chunk_size=256)
    rows = [
        made.row(case, time_ms=1.0, measured_at="2026-02-01T00:00:00+00:00"),
        made.row(case, time_ms=9.0, measured_at="2026-01-01T00:00:00+00:00"),
    ]
    made.write(rows, tmp_path / "results.parquet")
    report = chunk_size_report("mlstm_sig", H200, head_dim_v=256, head_dim_qk=128, results=(tmp_path,))
    assert [e["measured_ms"] for e in report["candidates"] if e["measured_ms"]] == [1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "attention"}, r"op must be one of mlstm_exp, .*gla to have a modelled chunk size, got 'attention'"),
        ({"seq_len": 8}, "seq_len must be >= 16 to have a feasible chunk size, got 8"),
        ({"causal_factor": 0.3}, r"causal_factor must be in \[0.5, 1\], got 0.3"),
        ({"head_dim_qk": -1}, "head_dim_qk must be a positive integer, got -1"),
        ({"mode": "step"}, "mode must be one of fw, bw, fwbw for a chunk size, got 'step'"),
    ],
)
def test_bad_input(change: dict, message: str) -> None:
    arguments = {"op": "mlstm_sig", "head_dim_v": 256, "head_dim_qk": 128, **change}
    with pytest.raises(ValueError, match=message):
        chunk_size_report(arguments.pop("op"), H100, **arguments)


def test_committed_results_are_found_by_accelerator() -> None:
    assert committed_results("no_such_accelerator") == []
    assert [folder.name for folder in committed_results("h200_sxm")] == ["h200_sxm"]
