"""What a case should take by its physics, and how the fits to stored rows of an H200 do: errors, regret."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.counts import count_case
from lrbench.analysis.model.answers import chunk_size_report
from lrbench.analysis.model.fit import Fit, Fits
from lrbench.analysis.model.prediction import predict_case, stored_rows
from lrbench.analysis.model.runtime_model import floor_ms
from lrbench.analysis.model.terms import Query, expected
from lrbench.results.store import committed_results

from .. import rows as made

H200, H100, B200 = (get_accelerator(key) for key in ("h200", "h100", "b200"))
STORED = committed_results("h200_sxm")
SIZES = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256, "chunk_size": 512}
CASE = Query("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", SIZES)
FITTED = [*itertools.product(("mlstm_sig", "mlstm_exp"), ("fused_chunk", "whole_state"), ("fw", "fwbw"))]


@pytest.fixture(scope="module")
def fits() -> dict[str, Fits]:
    return {mode: Fits(stored_rows(STORED, mode, "bf16"), mode, "bf16", H200) for mode in ("fw", "fwbw")}


def made_rows(*, times: float = 1.0, **changes: Any) -> list[dict[str, Any]]:
    """Return rows on an H200 that take so many times as long as expected."""
    rows = []
    for seq_len, head_dim, chunk in itertools.product((1024, 8192, 65536), (64, 128, 256), (64, 256, 1024)):
        dims = {"num_heads": 4096 // head_dim, "head_dim_qk": head_dim // 2, "head_dim_v": head_dim}
        sizes = {"seq_len": seq_len, "batch": max(1, 16384 // seq_len), "chunk_size": chunk, **dims}
        case = made.case("mlstm_sig", "fused_chunk", **sizes)
        time_ms = times * sum(expected(Query("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", case.sizes), H200))
        row = made.row_of(case, time_ms=time_ms, suspect=None, measured_at="2026-12-01T00:00:00+00:00")
        rows.append({**row, **changes})
    return rows


def test_walks_count_waves() -> None:
    """Four programs a head, two of them on a multiprocessor at once: 66 heads fill 132 of these."""
    one, two = (
        expected(CASE._replace(sizes={**SIZES, "batch": heads, "num_heads": 1, "chunk_size": 8192}), H200)
        for heads in (66, 67)
    )
    assert one[2] == two[2] == 0, "a chunk needs no states"
    assert two[1] > 1.2 * one[1]
    assert sum(expected(CASE, H100)) > sum(expected(CASE, H200)) > sum(expected(CASE, B200))


def test_what_a_fit_leaves_out() -> None:
    good, wrong = made_rows(), made_rows(times=9.0)
    newer = [{**row, "measured_at": "2026-12-02T00:00:00+00:00"} for row in good]
    suspect = [{**row, "suspect": "above the roof", "case_id": row["case_id"] + "s"} for row in wrong]
    noisy = [{**row, "noise": "busy", "case_id": row["case_id"] + "n"} for row in wrong]
    fit = Fits([*newer, *wrong, *suspect, *noisy], "fw", "bf16", H200).of("mlstm_sig", "fused_chunk")
    assert fit.model == "walks" and fit.rows == len(good) and fit.worst_error < 1e-6
    assert Fits(good, "fw", "bf16", H200).of("mlstm_sig", "xl_chunk") is None, "other kernels"
    b200 = [{**row, "device_accelerator": "b200", "device_name": "NVIDIA B200"} for row in good[:5]]
    chosen = [Fits([*good, *b200], "fw", "bf16", each).of("mlstm_sig", "fused_chunk") for each in (B200, H100)]
    assert [(each.accelerator, each.rows) for each in chosen] == [("b200", 5), ("h200_sxm", len(good))]


@pytest.mark.parametrize("names", FITTED, ids=" ".join)
def test_errors_on_stored_rows_left_out(names: tuple[str, str, str], fits: dict[str, Fits]) -> None:
    fit = fits[names[2]].of(*names[:2])
    assert fit.model == "walks" and fit.rows >= 128
    assert fit.median_error <= 0.04 and fit.worst_error <= 1.0


@pytest.mark.parametrize("names", FITTED, ids=" ".join)
def test_regret_over_the_stored_sweep(names: tuple[str, str, str]) -> None:
    """The chunk length that a fit without this sequence length chooses is hardly slower than the best one measured."""
    *names, mode = names
    rows = stored_rows(STORED, mode, "bf16")
    own = [row for row in rows if [row["op"], row["impl"]] == names]
    regrets = []
    for seq_len in sorted({row["seq_len"] for row in own if row["device_accelerator"] == "h200_sxm"}):
        fits = Fits([row for row in own if row["seq_len"] != seq_len], mode, "bf16", H200)
        for head_dim in (128, 256, 512):
            asked = made.question(names[0], seq_len=seq_len, head_dim=head_dim, mode=mode, rows=rows, fits=fits)
            current = [c for c in chunk_size_report(asked, names[1])["candidates"] if c["measured_ms"] is not None]
            if len(current) > 1:
                chosen = min(current, key=lambda c: c["predicted_ms"])
                regrets.append(chosen["measured_ms"] / min(c["measured_ms"] for c in current) - 1)
    assert len(regrets) >= 18
    assert np.median(regrets) <= 0.002 and max(regrets) <= 0.05


def test_predictions_elsewhere_are_intervals() -> None:
    case = CASE._replace(mode="fwbw")
    rows = stored_rows(STORED, "fwbw", "bf16")

    def predicted(here: Any) -> Any:
        fit: Fit | None = Fits(rows, "fwbw", "bf16", here).of("mlstm_sig", "fused_chunk")
        return predict_case(case, here, fit)

    here, there, slow = map(predicted, (H200, B200, H100))
    for each in (here, there, slow):
        assert 0 < each.low_ms < each.time_ms < each.high_ms
    assert there.high_ms / there.low_ms > 1.5 * here.high_ms / here.low_ms
    assert there.time_ms < here.time_ms < slow.time_ms, "by multiprocessors and memory"
    bounds = predict_case(case, H200, None)
    assert bounds.time_ms is None and bounds.low_ms == bounds.model.lower_ms


def test_no_time_is_below_the_roofline() -> None:
    fit = Fits(made_rows(times=1e-9), "fw", "bf16", H200).of("mlstm_sig", "fused_chunk")
    count = count_case("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", SIZES)
    found = predict_case(CASE, H200, fit)
    assert found.low_ms == found.time_ms == floor_ms(count, H200, "bf16") == pytest.approx(found.high_ms)
    assert floor_ms(count, H200, "bf16") == pytest.approx(1e3 * count.compulsory_bytes / H200.bandwidth_bytes_s)
