"""Fitted runtime models: they recover made-up efficiencies, report honest errors, and never predict a bare number."""

from __future__ import annotations

import random

import numpy as np
import pandas as pd
import pytest

from lrbench.analysis.accelerators import get_accelerator
from lrbench.analysis.counts import count_case
from lrbench.analysis.efficiency import MIN_ROWS, _non_negative_fit, fit_efficiency, predict
from lrbench.analysis.runtime_model import runtime_model

from . import rows as made

H200, B200 = get_accelerator("h200"), get_accelerator("b200")


def measured(noise: float, *, launch_ms: float = 0.03, on_flops: float = 2.5, on_bytes: float = 1.4) -> pd.DataFrame:
    """Return rows whose times follow the model with these factors, up to a uniform relative noise."""
    generator = random.Random(0)
    rows = []
    for seq_len in (1024, 4096, 16384):
        for chunk in (64, 128, 256, 512, 1024):
            for head_dim in (128, 256):
                case = made.case(
                    "mlstm_sig",
                    "tfla",
                    seq_len=seq_len,
                    chunk_size=chunk,
                    num_heads=4096 // head_dim,
                    head_dim_v=head_dim,
                )
                counted = count_case(case.op, case.impl, case.mode, case.dtype, case.state_dtype, case.sizes)
                model = runtime_model(counted, H200, "bf16")
                time_ms = launch_ms + on_flops * model.flops_ms + on_bytes * model.bytes_ms
                rows.append(made.row(case, time_ms=time_ms * (1 + generator.uniform(-noise, noise))))
    return made.frame(rows)


def test_a_fit_recovers_the_factors() -> None:
    fit = fit_efficiency(measured(0.0), "mlstm_sig", "tfla", "fw", "bf16")
    assert (fit.launch_ms, fit.flops_factor, fit.bytes_factor) == pytest.approx((0.03, 2.5, 1.4), rel=1e-6)
    assert fit.rows == 30
    assert fit.accelerator == "h200_sxm"
    assert fit.worst_error < 1e-6


def test_errors_are_those_of_rows_left_out() -> None:
    fit = fit_efficiency(measured(0.1), "mlstm_sig", "tfla", "fw", "bf16")
    assert 0.02 < fit.median_error < 0.1
    assert fit.median_error < fit.worst_error < 0.25
    assert 0.85 < fit.low_ratio < 1 < fit.high_ratio < 1.15


def test_an_interval_covers_what_was_measured() -> None:
    frame = measured(0.1)
    fit = fit_efficiency(frame, "mlstm_sig", "tfla", "fw", "bf16")
    inside = 0
    for row in frame.to_dict("records"):
        sizes = {n: int(row[n]) for n in ("batch", "seq_len", "num_heads", "head_dim_qk", "head_dim_v", "chunk_size")}
        counted = count_case("mlstm_sig", "tfla", "fw", "bf16", "fp32", sizes)
        prediction = predict(counted, H200, "bf16", fit)
        assert prediction.low_ms < prediction.time_ms < prediction.high_ms
        inside += prediction.low_ms <= row["time_ms"] <= prediction.high_ms
    assert inside >= 0.85 * len(frame)


def test_without_measurements_the_bounds_are_the_interval() -> None:
    counted = count_case("mlstm_sig", "tfla", "fw", "bf16", "fp32", made.case("mlstm_sig", "tfla").sizes)
    prediction = predict(counted, B200, "bf16")
    assert prediction.time_ms is None
    assert (prediction.low_ms, prediction.high_ms) == (prediction.model.lower_ms, prediction.model.upper_ms)


def test_a_fit_is_carried_to_another_accelerator() -> None:
    fit = fit_efficiency(measured(0.05), "mlstm_sig", "tfla", "fw", "bf16")
    counted = count_case("mlstm_sig", "tfla", "fw", "bf16", "fp32", made.case("mlstm_sig", "tfla").sizes)
    here, there = predict(counted, H200, "bf16", fit), predict(counted, B200, "bf16", fit)
    assert there.time_ms < here.time_ms
    assert there.time_ms > there.model.lower_ms


def test_too_few_rows_are_not_fitted() -> None:
    frame = measured(0.0)
    assert fit_efficiency(frame.head(MIN_ROWS - 1), "mlstm_sig", "tfla", "fw", "bf16") is None
    assert fit_efficiency(frame, "mlstm_exp", "tfla", "fw", "bf16") is None


def test_factors_are_never_negative() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        matrix, times = generator.uniform(0.1, 1, (12, 3)), generator.uniform(0.5, 2, 12)
        solution = _non_negative_fit(matrix, times)
        assert (solution >= 0).all()
        residual = matrix @ solution / times - 1
        # Optimality (Karush, Kuhn, Tucker): no allowed step lowers the error.
        gradient = (matrix / times[:, None]).T @ residual
        assert (gradient >= -1e-9).all()
        assert abs(gradient[solution > 0]).max() < 1e-9
