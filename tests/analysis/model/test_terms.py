"""What a case should take by its physics, and how the fits to stored rows of an H200 do: errors, regret."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from lrbench.analysis.accelerators.known import Accelerator, get_accelerator
from lrbench.analysis.counts import count_case
from lrbench.analysis.model.answers import chunk_size_report
from lrbench.analysis.model.fit import Fits
from lrbench.analysis.model.prediction import predict_case, stored_rows
from lrbench.analysis.model.terms import Query, expected
from lrbench.results.store import committed_results

from .. import rows as made

H200, H100, B200 = (get_accelerator(key) for key in ("h200", "h100", "b200"))
STORED = committed_results("h200_sxm")
SIZES = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256, "chunk_size": 512}
CASE = Query("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", SIZES)
FITTED = [*itertools.product(("mlstm_sig", "mlstm_exp"), ("fused_chunk", "whole_state"), ("fw", "fwbw"))]


def made_rows(times: float = 1.0) -> list[dict[str, Any]]:
    """Return rows on an H200 that take so many times as long as expected."""
    rows = []
    for seq_len, head_dim, chunk in itertools.product((1024, 8192, 65536), (64, 128, 256), (64, 256, 1024)):
        dims = {"num_heads": 4096 // head_dim, "head_dim_qk": head_dim // 2, "head_dim_v": head_dim}
        sizes = {"seq_len": seq_len, "batch": max(1, 16384 // seq_len), "chunk_size": chunk, **dims}
        case = made.case("mlstm_sig", "fused_chunk", **sizes)
        time_ms = times * sum(expected(Query("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", case.sizes), H200))
        rows.append(made.row_of(case, time_ms=time_ms, suspect=None, measured_at="2026-12-01T00:00:00+00:00"))
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
    b200 = [{**row, "device_accelerator": "b200", "device_name": "NVIDIA B200"} for row in good[:5]]
    chosen = [Fits([*good, *b200], "fw", "bf16", each).of("mlstm_sig", "fused_chunk") for each in (B200, H100)]
    assert [(each.accelerator, each.rows) for each in chosen] == [("b200", 5), ("h200_sxm", len(good))]


@pytest.mark.parametrize("names", FITTED, ids=" ".join)
def test_errors_and_regret_over_the_stored_sweep(names: tuple[str, str, str]) -> None:
    """Of rows left out, and of the chunk length that a fit without this sequence length chooses: both are small."""
    *names, mode = names
    rows = stored_rows(STORED, mode, "bf16")
    fit = Fits(rows, mode, "bf16", H200).of(*names)
    assert fit.model == "walks" and fit.rows >= 128 and fit.median_error <= 0.04 and fit.worst_error <= 1.0
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


@pytest.mark.parametrize("width", [128, 512])
@pytest.mark.parametrize("here", [H200, H100])
def test_no_time_is_below_what_the_accelerator_allows(here: Accelerator, width: int) -> None:
    """Its bandwidth for narrow heads and its rate for wide ones, whatever rows say, here or elsewhere."""
    case = CASE._replace(sizes={**SIZES, "head_dim_qk": width, "head_dim_v": max(256, width)})
    count = count_case(*case)
    found = predict_case(case, here, Fits(made_rows(times=1e-9), "fw", "bf16", here).of(*case[:2]))
    bytes_ms = 1e3 * count.compulsory_bytes / here.bandwidth_bytes_s
    products_ms = 1e3 * count.executed_tensor_flops / here.matrix_rate("bf16")
    assert (bytes_ms > products_ms) == (width == 128)
    assert found.low_ms == found.time_ms == found.high_ms == pytest.approx(max(bytes_ms, products_ms))
