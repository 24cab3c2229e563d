"""The model of walks: the times fitted to it, errors on stored H200 rows left out, regret."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.counts import count_case
from lrbench.analysis.model.answers import chunk_size_report
from lrbench.analysis.model.fit import Fit, fit_rows, left_out_ratios
from lrbench.analysis.model.prediction import predict_case, stored_rows
from lrbench.analysis.model.runtime_model import floor_ms
from lrbench.analysis.model.terms import FORMULATION, WALKS, Query
from lrbench.results.store import committed_results

from .. import rows as made

H200, H100, B200 = (get_accelerator(key) for key in ("h200", "h100", "b200"))
STORED = committed_results("h200_sxm")
SIZES = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256, "chunk_size": 512}
CASE = Query("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", SIZES)
CONSTANTS = WALKS.constants
MADE = (0.004, 1.3, 1.2, 0.2, 0.3)
fit_walks = functools.partial(fit_rows, models=(WALKS,))
FITTED = [*itertools.product(("mlstm_sig", "mlstm_exp"), ("fused_chunk", "whole_state"), ("fw", "fwbw"))]


@pytest.fixture(scope="module")
def fits() -> dict[tuple[str, str, str], Fit]:
    rows = {mode: stored_rows(STORED, mode, "bf16") for mode in ("fw", "fwbw")}
    return {(*names, mode): fit_rows(rows[mode], *names, mode, "bf16", device="h200_sxm") for *names, mode in FITTED}


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
                found = WALKS.terms(Query(op, "fused_chunk", "fw", "bf16", "fp32", case.sizes), H200)
                time_ms = times * sum(x * y for x, y in zip(constants, found, strict=True))
                row = made.row_of(case, time_ms=time_ms, suspect=None, measured_at="2026-12-01T00:00:00+00:00")
                rows.append({**row, **changes})
    return rows


def test_a_fit_recovers_its_constants_and_counts_waves() -> None:
    fit = fit_walks(made_rows("mlstm_exp", MADE), "mlstm_exp", "fused_chunk", "fw", "bf16")
    assert tuple(fit.constants.values()) == pytest.approx(MADE, rel=1e-5)
    assert tuple(fit.constants) == CONSTANTS == ("launch_ms", "walk_factor", "states_factor", *CONSTANTS[3:])
    assert (fit.rows, fit.others) == (120, 0) and fit.worst_error < 1e-6
    # Four programs a head, two of them on a multiprocessor at once: 66 heads fill 132 of these.
    one, two = (
        WALKS.terms(CASE._replace(sizes={**SIZES, "batch": heads, "num_heads": 1, "chunk_size": 8192}), H200)
        for heads in (66, 67)
    )
    assert one[2] == two[2] == 0, "a chunk needs no states"
    assert two[1] > 1.2 * one[1]


def test_what_a_fit_leaves_out() -> None:
    good = made_rows("mlstm_sig", MADE)
    wrong = made_rows("mlstm_sig", MADE, times=9.0)
    newer = [{**row, "measured_at": "2026-12-02T00:00:00+00:00"} for row in good]
    suspect = [{**row, "suspect": "above the roof", "case_id": row["case_id"] + "s"} for row in wrong]
    fit = fit_walks([*newer, *wrong, *suspect], "mlstm_sig", "fused_chunk", "fw", "bf16")
    assert fit.rows == len(good) == 120 and fit.worst_error < 1e-6
    assert fit_walks(good[:4], "mlstm_sig", "fused_chunk", "fw", "bf16") is None
    assert fit_walks(good, "mlstm_exp", "fused_chunk", "fw", "bf16") is None, "other kernels"
    b200 = [{**row, "device_accelerator": "b200", "device_name": "NVIDIA B200"} for row in good[:40]]
    chosen = [
        fit_walks([*good, *b200], "mlstm_sig", "fused_chunk", "fw", "bf16", device=key) for key in ("b200", "h100")
    ]
    assert [each.accelerator for each in chosen] == ["b200", "h200_sxm"]


@pytest.mark.parametrize("names", FITTED, ids=" ".join)
def test_errors_on_stored_rows_left_out(names: tuple[str, str, str], fits: dict[tuple[str, str, str], Fit]) -> None:
    fit = fits[names]
    assert fit.model is WALKS and fit.rows >= 128 and not fit.others
    assert fit.median_error <= 0.1 and fit.worst_error <= 0.7
    by_formulation = fit_rows(stored_rows(STORED, names[2], "bf16"), *names, "bf16", models=(FORMULATION,))
    assert 0.25 > by_formulation.median_error > 1.6 * fit.median_error
    assert by_formulation.low_ratio < 1 < by_formulation.high_ratio
    assert all(value >= 0 for value in fit.constants.values())


def test_operations_with_few_rows_share_their_kernels_fit() -> None:
    rows = stored_rows(STORED, "fw", "bf16")
    own = [row for row in rows if (row["op"], row["impl"]) == ("retention", "fused_chunk")][:3]
    rows = [row for row in rows if row["op"] != "retention"] + own
    fit = fit_rows(rows, "retention", "fused_chunk", "fw", "bf16", device="h200_sxm")
    assert fit is not None and fit.model is WALKS
    # mLSTMexp's kernels are others.
    others = {row["op"] for row in rows if row["impl"] == "fused_chunk"} - {"retention", "mlstm_exp"}
    assert (fit.rows, fit.others) == (3, len(others))
    assert fit.median_error <= 0.1 and fit.worst_error <= 0.25


@pytest.mark.parametrize("names", FITTED, ids=" ".join)
def test_regret_over_the_stored_sweep(names: tuple[str, str, str]) -> None:
    """The chunk length that a fit without this sequence length chooses is hardly slower than the best one measured."""
    *names, mode = names
    rows = stored_rows(STORED, mode, "bf16")
    own = [row for row in rows if [row["op"], row["impl"]] == names]
    regrets = []
    for seq_len in sorted({row["seq_len"] for row in own if row["device_accelerator"] == "h200_sxm"}):
        fit = fit_walks([row for row in own if row["seq_len"] != seq_len], *names, mode, "bf16", device="h200_sxm")
        for head_dim in (128, 256, 512):
            asked = made.question(
                names[0], seq_len=seq_len, head_dim=head_dim, mode=mode, rows=rows, known_fits={tuple(names): (fit, 0)}
            )
            current = [c for c in chunk_size_report(asked, names[1])["candidates"] if c["measured_ms"] is not None]
            if len(current) > 1:
                chosen = min(current, key=lambda c: c["predicted_ms"])
                regrets.append(chosen["measured_ms"] / min(c["measured_ms"] for c in current) - 1)
    assert len(regrets) >= 18
    assert np.median(regrets) <= 0.002 and max(regrets) <= (0.22 if names == ["mlstm_exp", "fused_chunk"] else 0.05)


def test_predictions_elsewhere_are_intervals(fits: dict[tuple[str, str, str], Fit]) -> None:
    case = Query("mlstm_sig", "fused_chunk", "fwbw", "bf16", "fp32", SIZES)
    fit = fits["mlstm_sig", "fused_chunk", "fwbw"]
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
    fit = fit_walks(rows, "mlstm_sig", "fused_chunk", "fw", "bf16")
    count = count_case("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", SIZES)
    found = predict_case(CASE, H200, fit)
    assert found.low_ms == found.time_ms == floor_ms(count, H200, "bf16") == pytest.approx(found.high_ms)
    assert floor_ms(count, H200, "bf16") == pytest.approx(1e3 * count.compulsory_bytes / H200.bandwidth_bytes_s)


def test_single_rows_of_one_group_are_left_out() -> None:
    matrix, times = np.array([[0.0, 1.0]] * 4), np.array([1.0, 1.0, 1.0, 2.0])
    assert left_out_ratios(matrix, times, ["a"] * 3 + ["b"])[-1] == pytest.approx(2.0)
    assert len(left_out_ratios(matrix, times, ["a"] * 4)) == 4
