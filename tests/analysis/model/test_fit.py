"""Fitted runtime models: they recover made-up efficiencies, report honest errors, and never predict a bare number."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.accelerators.roofs import with_roofs
from lrbench.analysis.model.fit import AS_SPECIFIED, Fit, case_of, fit_rows, likely_ratios, relative_fit
from lrbench.analysis.model.prediction import predict_case, stored_rows
from lrbench.analysis.model.runtime_model import runtime_model
from lrbench.analysis.model.terms import FORMULATION, Query, sequential_steps
from lrbench.results.select import records
from lrbench.results.store import committed_results

from .. import rows as made

H200, B200 = get_accelerator("h200"), get_accelerator("b200")
CASE = made.case("mlstm_sig", "fused_chunk")
AT_64_STEPS = Query("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", {**CASE.sizes, "seq_len": 64 * CASE.chunk_size})


def measured(noise: float, *, step_ms: float = 0.002) -> pd.DataFrame:
    """Return rows whose times follow the model with these factors, up to a uniform relative noise."""
    generator = random.Random(0)
    rows = []
    for seq_len in (1024, 4096, 16384):
        for chunk in (64, 128, 256, 512, 1024):
            for head_dim in (128, 256):
                sizes = {"seq_len": seq_len, "batch": 8, "chunk_size": chunk}
                sizes |= {"num_heads": 4096 // head_dim, "head_dim_v": head_dim}
                case = made.case("mlstm_sig", "fused_chunk", **sizes)
                model = runtime_model(made.count_of(case), H200, "bf16")
                steps = sequential_steps(Query(case.op, case.impl, case.mode, case.dtype, None, case.sizes))
                time_ms = 2 * 0.015 + steps * step_ms + 2.5 * model.flops_ms + 1.4 * model.bytes_ms
                rows.append(made.row_of(case, time_ms=time_ms * (1 + generator.uniform(-noise, noise))))
    return made.frame(rows)


def fit_of(frame: pd.DataFrame, op: str = "mlstm_sig", **options: str) -> Fit:
    return fit_rows(records(frame), op, "fused_chunk", "fw", "bf16", models=(FORMULATION,), **options)


def test_a_fit_recovers_the_factors() -> None:
    fit = fit_of(measured(0.0))
    assert tuple(fit.constants) == ("launch_ms", "step_ms", "flops_factor", "bytes_factor")
    assert tuple(fit.constants.values()) == pytest.approx((0.015, 0.002, 2.5, 1.4), rel=1e-6)
    assert fit.rows == 30
    assert fit.accelerator == "h200_sxm"
    assert fit.worst_error < 1e-6


def test_errors_are_those_of_rows_left_out() -> None:
    fit = fit_of(measured(0.1))
    assert 0.02 < fit.median_error < 0.1
    assert fit.median_error < fit.worst_error < 0.25
    assert 0.85 < fit.low_ratio < 1 < fit.high_ratio < 1.15


@pytest.mark.parametrize(("times_as_long", "rows"), [(1.4, 30), (1.6, 24)])
def test_chunks_at_which_a_kernel_spills_are_left_out(times_as_long: float, rows: int) -> None:
    """Twice the chunk takes over twice as long, by this factor, at each of the six problems."""
    frame = measured(0.0)
    per_step = frame[frame.chunk_size == 512].time_ms.to_numpy() / 512
    frame.loc[frame.chunk_size == 1024, "time_ms"] = 1024 * times_as_long * per_step
    fit = fit_of(frame)
    assert fit.rows == rows
    assert (fit.worst_error < 1e-6) == (rows == 24)


def test_an_interval_covers_what_was_measured() -> None:
    frame = measured(0.1)
    fit = fit_of(frame)
    inside = 0
    for row in records(frame):
        case = case_of(row, "fw", "bf16")
        prediction = predict_case(case, H200, fit)
        assert prediction.low_ms < prediction.time_ms < prediction.high_ms
        inside += prediction.low_ms <= row["time_ms"] <= prediction.high_ms
    assert inside >= 0.85 * len(frame)


def test_a_fit_is_carried_to_another_accelerator() -> None:
    fit = fit_of(measured(0.05))
    here, there = (predict_case(AT_64_STEPS, part, fit) for part in (H200, B200))
    assert there.time_ms < here.time_ms
    assert there.time_ms > there.model.lower_ms
    # From the vector units' 1.12 to the matrix units' 2.28, but for latency, which no rate shortens.
    latency_ms = 2 * fit.constants["launch_ms"] + 64 * fit.constants["step_ms"]
    gains = (2250 / 989, 75 / 66.9)
    expected = [
        ratio * (latency_ms + (here.time_ms - latency_ms) / gain)
        for ratio, gain in zip((fit.low_ratio / AS_SPECIFIED, fit.high_ratio * AS_SPECIFIED), gains, strict=True)
    ]
    assert (there.low_ms, there.high_ms) == pytest.approx(tuple(expected))
    assert there.low_ms < there.time_ms < there.high_ms
    # These rows tell products from memory: each part has its own rate's share.
    assert fit.told_apart and there.time_ms == fit.time_ms(AT_64_STEPS, B200)
    assert "carried to b200" in there.interval
    assert "carried" not in here.interval


def test_measured_roofs_give_other_efficiencies_and_the_same_time() -> None:
    """tau_FLOPs at 790 instead of 989 TFLOP/s: the kernel reaches a larger share of less."""
    frame = measured(0.0)
    on_spec = fit_of(frame)
    on_measured = fit_of(frame, roofs="measured")
    reached = with_roofs(H200, "measured")
    share = reached.peak_flops("bf16") / H200.peak_flops("bf16")
    assert on_measured.constants["flops_factor"] == pytest.approx(on_spec.constants["flops_factor"] * share, rel=1e-6)
    by_spec, as_reached = (predict_case(AT_64_STEPS, *on) for on in ((H200, on_spec), (reached, on_measured)))
    assert by_spec.time_ms == pytest.approx(as_reached.time_ms, rel=1e-6)


def test_steps_that_wait_for_one_another() -> None:
    sizes = {"seq_len": 1000, "chunk_size": 64}
    for op, impl, mode, of, steps in (
        ("mlstm_sig", "fused_chunk", "fw", sizes, 16),
        ("mlstm_sig", "fused_chunk", "step", {"seq_len": 1}, 1),
        ("mlstm_sig", "parallel", "fw", sizes, 1),
        ("attention", "torch.sdpa_flash", "fw", {"seq_len": 1000}, 1),
        ("selective_scan", "mamba_ssm.selective_scan", "fw", {"seq_len": 1000}, 1000),
    ):
        assert sequential_steps(Query(op, impl, mode, "bf16", None, of)) == steps, (op, impl)


def test_few_rows_are_fitted_with_those_of_their_kind() -> None:
    """Another operation's kernel of the same formulation, half as fast: each further own row narrows the interval."""
    fit = functools.partial(
        fit_rows, op="mlstm_sig", impl="fused_chunk", mode="fw", dtype="bf16", models=(FORMULATION,)
    )
    rows = records(measured(0.05))
    kind = [
        {**row, "op": op, "case_id": f"{op} {row['case_id']}", "time_ms": factor * row["time_ms"]}
        for op, factor in (("retention", 0.5), ("simple_gla", 0.7), ("lightning", 0.9))
        for row in rows
    ]
    fits = [fit([*kind, *rows[:own]]) for own in (0, 1, 4)]
    assert [(each.rows, each.others) for each in fits] == [(0, 3), (1, 3), (4, 3)]
    widths = [each.high_ratio / each.low_ratio for each in fits]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 2 > 1.5 > widths[-1]
    inside = []
    for row in rows[4:]:
        case = case_of(row, "fw", "bf16")
        found = predict_case(case, H200, fits[-1])
        inside.append(found.low_ms < row["time_ms"] < found.high_ms)
    assert np.mean(inside) > 0.85
    assert "from 4 rows of its own and those of 3 like it" in found.interval
    assert fit([*kind, *rows]).others == 0, "rows enough of its own"
    assert fit(rows[:4]) is None
    alone = fit([row for row in rows if row["chunk_size"] == 256][:4])
    assert (alone.rows, alone.others) == (4, 0) and alone.high_ratio > 1.1 * widths[-1] ** 0.5
    assert fit_rows(rows, "rglru", "fused", "fw", "bf16") is None, "another kind"


@pytest.mark.parametrize(("problems", "widest"), [(3, 3.0), (12, 1.5), (40, 1.2)])
def test_nine_of_ten_ratios_lie_in_the_interval_of_the_others(problems: int, widest: float) -> None:
    generator = np.random.default_rng(0)
    inside = []
    for _ in range(400):
        *known, new = np.exp(generator.normal(0, 0.1, problems + 1))
        low, high = likely_ratios(known, problems)
        inside.append(low <= new <= high)
    assert 0.86 <= np.mean(inside) <= 0.97
    assert 1 / widest < low < 1 < high < widest


def test_no_interval_is_below_what_the_accelerator_allows() -> None:
    """An H200's fit carried to a slower part whose rates differ by more than the fit knows."""
    rows, part = stored_rows(committed_results(), "fw", "bf16"), get_accelerator("rtx_4090")
    sizes = {"batch": 1, "seq_len": 65536, "d_model": 4096, "d_ff": 14336}
    fit = fit_rows(rows, "gated_mlp", "fused", "fw", "bf16", device=part.key)
    found = predict_case(Query("gated_mlp", "fused", "fw", "bf16", None, sizes), part, fit)
    flops = 4 * 65536 * 4096 * 14336
    assert found.low_ms >= 1e3 * flops / part.peak_flops("bf16")


def test_factors_are_never_negative() -> None:
    """And no allowed step lowers the error (Karush, Kuhn, Tucker)."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        matrix, times = generator.uniform(0.1, 1, (12, 4)), generator.uniform(0.5, 2, 12)
        solution = relative_fit(matrix, times)
        gradient = (matrix / times[:, None]).T @ (matrix @ solution / times - 1)
        assert (solution >= 0).all() and (gradient >= -1e-9).all() and abs(gradient[solution > 0]).max() < 1e-9


def test_no_kernel_lends_its_time_to_an_eager_loop() -> None:
    """Its host takes as long as it: with few rows of its own it has no fit, and none with it in it."""
    rows = stored_rows(committed_results("h200_sxm"), "fw", "bf16")
    assert fit_rows(rows, "rglru", "torch.eager", "fw", "bf16", device="h200_sxm") is None
    beside = fit_rows(rows, "rglru", "fla.fused_recurrent_hgrn", "fw", "bf16", device="h200_sxm")
    without = fit_rows(
        [row for row in rows if row["impl"] != "torch.eager"], "rglru", "fla.fused_recurrent_hgrn", "fw", "bf16",
        device="h200_sxm",
    )  # fmt: skip
    assert beside is not None and beside.constants == without.constants


def test_rows_stand_in_for_the_cases_that_have_none_of_their_own(tmp_path: Path) -> None:
    """One fp16 row does not keep bf16 rows of other problems from standing in for fp16."""
    cases = [("bf16", 1024), ("bf16", 8192), ("fp16", 1024)]
    made.write(
        (made.row("mlstm_sig", "xl_chunk", dtype=dtype, seq_len=seq_len) for dtype, seq_len in cases),
        tmp_path / "rows.parquet",
    )
    found = {row["seq_len"]: row.get("stands_in") for row in stored_rows([tmp_path], "fw", "fp16")}
    assert found == {1024: None, 8192: "bf16"}
