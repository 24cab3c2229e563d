"""Launches as data and the times fitted to them: the grids that ran, errors on stored H200 rows left out, regret."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.counts import count_case
from lrbench.analysis.model.chunk_size import chunk_size_report
from lrbench.analysis.model.fit import ROW_COLUMNS, Fit, fit_rows, left_out_ratios
from lrbench.analysis.model.prediction import predict_case, stored_rows
from lrbench.analysis.model.runtime_model import floor_ms
from lrbench.analysis.model.schedule import Launch, launches_of
from lrbench.analysis.model.terms import FORMULATION, LAUNCHES, Case, terms_of_launches
from lrbench.results.schema import SIZE_COLUMNS
from lrbench.results.select import load_rows
from lrbench.results.store import committed_results

from .. import rows as made

H200, H100, B200 = (get_accelerator(key) for key in ("h200", "h100", "b200"))
STORED = committed_results("h200_sxm")
SIZES = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256, "chunk_size": 512}
CASE = Case("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", SIZES)
CONSTANTS = LAUNCHES.constants
fit_launches = functools.partial(fit_rows, models=(LAUNCHES,))
FITTED = [(op, mode) for op in ("mlstm_sig", "mlstm_exp") for mode in ("fw", "fwbw")]


def launches(op: str = "mlstm_sig", mode: str = "fw", **sizes: int) -> tuple[Launch, ...]:
    return launches_of(op, "fused_chunk", mode, "bf16", "fp32", {**SIZES, **sizes})


@pytest.fixture(scope="module")
def fits() -> dict[tuple[str, str], Fit]:
    rows = {mode: stored_rows(STORED, mode, "bf16") for mode in ("fw", "fwbw")}
    return {(op, mode): fit_rows(rows[mode], op, "fused_chunk", mode, "bf16", device="h200_sxm") for op, mode in FITTED}


def made_rows(op: str, constants: Iterable[float], *, times: float = 1.0, **changes: Any) -> list[dict[str, Any]]:
    """Return rows on an H200 that take exactly what these constants say."""
    rows = []
    for seq_len in (1024, 2048, 8192, 16384, 32768, 65536):
        for head_dim in (32, 64, 128, 256, 512):
            for chunk in (64, 128, 256, 1024):
                dims = {"num_heads": 4096 // head_dim, "head_dim_qk": head_dim // 2, "head_dim_v": head_dim}
                case = made.case(
                    op, "fused_chunk", seq_len=seq_len, batch=max(1, 16384 // seq_len), chunk_size=chunk, **dims
                )
                found = LAUNCHES.terms(Case(op, "fused_chunk", "fw", "bf16", "fp32", case.sizes), H200)
                time_ms = times * sum(x * y for x, y in zip(constants, found, strict=True))
                row = made.row_of(case, time_ms=time_ms, suspect=None, measured_at="2026-12-01T00:00:00+00:00")
                rows.append({**row, **changes})
    return rows


def test_launches_are_those_that_hardware_counters_saw() -> None:
    profiles = STORED[0].glob("*profile.parquet")
    rows = [row for path in profiles for row in pq.read_table(path).to_pylist() if row["impl"] == "fused_chunk"]
    assert len(rows) >= 6
    for row in rows:
        sizes = {name: row[name] for name in SIZE_COLUMNS if row.get(name) is not None}
        found = launches_of(row["op"], row["impl"], row["mode"], row["dtype"], row["state_dtype"] or "fp32", sizes)
        kernels = {
            "gates": "gates_forward", "scan": "stabiliser_scan", "stabiliser": "stabiliser_finish",
            "denominators": "denominator", "gate gradients": "gates_backward",
        }  # fmt: skip
        assert [f"{kernels.get(each.kind, each.kind)}_kernel" for each in found] == row["kernel_names"]
        assert [each.flops for each in found] == row["kernel_tensor_flops"]


@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp", "mamba2_ssd"])
@pytest.mark.parametrize(("seq_len", "chunk_size", "batch"), [(8192, 512, 8), (8192, 64, 1), (1000, 256, 2)])
def test_work_and_state_traffic_of_launches_are_the_executed_counts(
    op: str, seq_len: int, chunk_size: int, batch: int
) -> None:
    sizes = {**SIZES, "seq_len": seq_len, "chunk_size": chunk_size, "batch": batch}
    for mode in ("fw", "bw", "fwbw"):
        count = count_case(op, "fused_chunk", mode, "bf16", "fp32", sizes)
        found = launches(op, mode, **sizes)
        assert sum(each.flops for each in found) == pytest.approx(count.executed_tensor_flops)
        parts = {name: value for name, value in count.executed_byte_parts.items() if "gate" not in name}
        stored = [v for name, v in parts.items() if name.endswith(("pass: store", "h: states", "d: states"))]
        stored += [v for name, v in parts.items() if name.endswith(("dq: states", "dk: states", "dv: states"))]
        assert sum(each.state_bytes for each in found) == pytest.approx(sum(stored))
        merged = [v for name, v in parts.items() if name.endswith(": merge")]
        assert sum(each.merge_bytes for each in found) == pytest.approx(sum(merged))


def test_one_chunk_needs_no_states_and_few_programs_merge_theirs() -> None:
    kinds = [each.kind for each in launches(chunk_size=8192)]
    assert kinds == ["gates", "walk"]
    assert [each.kind for each in launches(chunk_size=512)] == ["gates", "states", "walk"]
    split = launches(chunk_size=512, batch=1)
    assert [(each.kind, each.steps) for each in split[1:3]] == [("states", 8), ("merge", 16)]
    backward = launches(mode="bw", chunk_size=8192, batch=1)
    assert {each.steps for each in backward if each.kind == "walk"} == {16}, "chunks of 1,024 fill the device"


def test_unknown_launches_are_none() -> None:
    short = {**SIZES, "chunk_size": 100}
    for change in ({"impl": "xl_chunk"}, {"impl": "torch"}, {"mode": "step"}, {"dtype": "fp32"}, {"sizes": short}):
        assert launches_of(*CASE._replace(**change)) is None, change


def test_a_fit_recovers_its_constants_and_counts_waves() -> None:
    constants = (0.004, 0.008, 0.005, 0.002, 0.003, 0.001, 0.0035, 1.2, 1.3, 3.0)
    fit = fit_launches(made_rows("mlstm_exp", constants), "mlstm_exp", "fused_chunk", "fw", "bf16")
    assert tuple(fit.constants.values()) == pytest.approx(constants, rel=1e-5)
    assert tuple(fit.constants) == CONSTANTS
    assert (fit.rows, fit.others) == (120, 0)
    assert set(fit.errors) == {"seq_len", "head_dim_v", "chunk_size"} and fit.worst_error < 1e-6
    at = {
        programs: terms_of_launches([Launch(kind="walk", programs=programs, steps=9)], H200, "bf16")[
            CONSTANTS.index("step_ms")
        ]
        for programs in (264, 265)
    }
    assert at == {264: 9, 265: 18}


def test_what_a_fit_leaves_out() -> None:
    good = made_rows("mlstm_sig", [0.001] * len(CONSTANTS))
    wrong = made_rows("mlstm_sig", [0.001] * len(CONSTANTS), times=9.0)
    newer = [{**row, "measured_at": "2026-12-02T00:00:00+00:00"} for row in good]
    suspect = [{**row, "suspect": "above the roof", "case_id": row["case_id"] + "s"} for row in wrong]
    fit = fit_launches([*newer, *wrong, *suspect], "mlstm_sig", "fused_chunk", "fw", "bf16")
    assert fit.rows == len(good) == 120 and fit.worst_error < 1e-6
    assert fit_launches(good[: LAUNCHES.min_rows - 1], "mlstm_sig", "fused_chunk", "fw", "bf16") is None
    assert fit_launches(good, "mlstm_exp", "fused_chunk", "fw", "bf16") is None, "other kernels"
    b200 = [{**row, "device_accelerator": "b200", "device_name": "NVIDIA B200"} for row in good[: LAUNCHES.min_rows]]
    chosen = [
        fit_launches([*good, *b200], "mlstm_sig", "fused_chunk", "fw", "bf16", device=key) for key in ("b200", "h100")
    ]
    assert [each.accelerator for each in chosen] == ["b200", "h200_sxm"]


@pytest.mark.parametrize(("op", "mode"), FITTED)
def test_errors_on_stored_rows_left_out(op: str, mode: str, fits: dict[tuple[str, str], Fit]) -> None:
    fit = fits[op, mode]
    assert fit.model is LAUNCHES and fit.rows >= 140 and not fit.others
    assert fit.median_error <= 0.05 and fit.worst_error <= 0.3
    assert all(median <= 0.07 and worst <= 0.3 for median, worst in fit.errors.values())
    rows = stored_rows(STORED, mode, "bf16")
    by_formulation = fit_rows(rows, op, "fused_chunk", mode, "bf16", models=(FORMULATION,))
    assert 0.25 > by_formulation.median_error > 2 * fit.median_error
    assert by_formulation.low_ratio < 1 < by_formulation.high_ratio
    assert all(value >= 0 for value in fit.constants.values())


def test_operations_with_few_rows_share_their_kernels_fit() -> None:
    rows = stored_rows(STORED, "fw", "bf16")
    own = [row for row in rows if (row["op"], row["impl"]) == ("retention", "fused_chunk")][:3]
    rows = [row for row in rows if row["op"] != "retention"] + own
    fit = fit_rows(rows, "retention", "fused_chunk", "fw", "bf16", device="h200_sxm")
    assert fit is not None and fit.model is LAUNCHES
    # mLSTMexp has launches that the others have not.
    others = {row["op"] for row in rows if row["impl"] == "fused_chunk"} - {"retention", "mlstm_exp"}
    assert (fit.rows, fit.others) == (3, len(others))
    assert set(fit.errors) == {"implementation"}
    assert fit.median_error <= 0.07 and fit.worst_error <= 0.2


@pytest.mark.parametrize(("op", "mode"), FITTED)
def test_regret_over_the_stored_sweep(op: str, mode: str) -> None:
    """Of the chunk lengths measured with today's launches, the one that the fit chooses is hardly slower than the best.

    The fit has not seen the problem's sequence length.
    """
    key = {"op": op, "impl": "fused_chunk", "mode": mode, "dtype": "bf16"}
    rows = load_rows(STORED, ROW_COLUMNS, {**key, "status": "ok"})
    regrets = []
    for seq_len in sorted({row["seq_len"] for row in rows}):
        seen = [row for row in rows if row["seq_len"] != seq_len]
        fit = fit_launches(seen, op, "fused_chunk", mode, "bf16")
        for head_dim in (64, 128, 256, 512):
            fits, rows = {(op, "fused_chunk"): (fit, 0)}, stored_rows(STORED, mode, "bf16")
            asked = made.question(op, seq_len=seq_len, head_dim=head_dim, mode=mode, rows=rows, known_fits=fits)
            report = chunk_size_report(asked)
            current = [c for c in report["candidates"] if c["measured_ms"] is not None]
            if len(current) > 1:
                chosen = min(current, key=lambda c: c["predicted_ms"])
                regrets.append(chosen["measured_ms"] / min(c["measured_ms"] for c in current) - 1)
    assert len(regrets) >= 24
    assert np.median(regrets) <= 0.01 and max(regrets) <= 0.12


def test_predictions_elsewhere_are_intervals(fits: dict[tuple[str, str], Fit]) -> None:
    case = Case("mlstm_sig", "fused_chunk", "fwbw", "bf16", "fp32", SIZES)
    fit = fits["mlstm_sig", "fwbw"]
    here, there = (predict_case(case, each, fit) for each in (H200, B200))
    for each in (here, there):
        assert 0 < each.low_ms < each.time_ms < each.high_ms
    assert there.high_ms / there.low_ms > 1.5 * here.high_ms / here.low_ms
    assert there.time_ms < here.time_ms, "more multiprocessors, and rates"
    assert "carried to b200" in there.interval and "carried" not in here.interval
    slow = predict_case(case, H100, fit)
    assert slow.time_ms > here.time_ms, "states wait for a narrower memory"
    bounds = predict_case(case, H200, None)
    assert bounds.time_ms is None and bounds.low_ms == bounds.model.lower_ms


def test_no_time_is_below_the_roofline() -> None:
    rows = made_rows("mlstm_sig", [1e-9] * len(CONSTANTS))
    fit = fit_launches(rows, "mlstm_sig", "fused_chunk", "fw", "bf16")
    count = count_case("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", SIZES)
    found = predict_case(CASE, H200, fit)
    assert found.low_ms == found.time_ms == floor_ms(count, H200, "bf16") == pytest.approx(found.high_ms)
    assert floor_ms(count, H200, "bf16") == pytest.approx(1e3 * count.compulsory_bytes / H200.bandwidth_bytes_s)


def test_single_rows_of_one_group_are_left_out() -> None:
    matrix, times = np.array([[0.0, 1.0]] * 4), np.array([1.0, 1.0, 1.0, 2.0])
    assert left_out_ratios(matrix, times, ["a"] * 3 + ["b"])[-1] == pytest.approx(2.0)
    assert len(left_out_ratios(matrix, times, ["a"] * 4)) == 4


@pytest.mark.compile
@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp"])
def test_multiprocessors_hold_as_many_programs_as_compiled_kernels_leave_room_for(op: str) -> None:
    import torch

    from lrbench.analysis.model.schedule import RESIDENT
    from lrbench.tests.kernels.compiling import record
    from lrbench.tests.kernels.laws import Case
    from lrbench.tests.kernels.offline import compile_launch

    sizes = {"batch": 1, "seq_len": 128, "num_heads": 1, "head_dim_qk": 128, "head_dim_v": 256}
    case = Case(op=op, impl="fused_chunk", dtype=torch.bfloat16, sizes=sizes, kwargs={"chunk_size": 64})
    kinds = {
        "fused_chunk_kernel": "walk",
        "chunk_states_kernel": "states",
        "normaliser_kernel": "normaliser",
        "merge_chunk_states_kernel": "merge",
    }
    for item in record(case, training=False, carry=False):
        kind = kinds.get(item.kernel.__name__)
        if kind is not None:
            used = compile_launch(item, 90)
            threads = 32 * used.num_warps
            by_registers = 65536 // (-(-used.registers // 8) * 8 * threads)
            by_shared = 228 * 1024 // (used.shared_bytes + 1024)
            room = min(by_registers, by_shared)
            near = {RESIDENT[kind]} if kind in ("walk", "normaliser") else range(RESIDENT[kind] - 1, RESIDENT[kind] + 3)
            assert room in near, used
