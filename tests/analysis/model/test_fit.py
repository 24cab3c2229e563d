"""Predicted times: they recover made-up factors, know how far they are off, and are never a bare number."""

from __future__ import annotations

import random
from operator import itemgetter
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any

import numpy as np
import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.accelerators.roofs import with_roofs
from lrbench.analysis.model.fit import Fit, Fits, case_of, newest_cases, trust
from lrbench.analysis.model.prediction import predict_case, stored_rows
from lrbench.analysis.model.terms import Query, carried_ms, expected, sequential_steps
from lrbench.results.select import grouped
from lrbench.results.store import committed_results

from .. import rows as made

H200, H100, B200 = (get_accelerator(key) for key in ("h200", "h100", "b200"))
Rows = list[dict[str, Any]]


def measured(noise: float, impl: str = "xl_chunk", *, device: str = "h200", seed: int = 0) -> Rows:
    """Return rows that take 1.7 times as long as expected, twice that at 128 wide, up to a uniform relative noise."""
    generator, rows = random.Random(seed), []
    for seq_len in (1024, 2048, 4096, 8192, 16384):
        for chunk in (64, 128, 256):
            for head_dim in (128, 256):
                sizes = {"seq_len": seq_len, "batch": 8, "chunk_size": chunk, "num_heads": 4096 // head_dim}
                case = made.case("mlstm_sig", impl, **sizes, head_dim_v=head_dim, head_dim_qk=128)
                asked = Query(case.op, case.impl, case.mode, case.dtype, case.state_dtype, case.sizes)
                time_ms = 1.7 * 256 / head_dim * sum(expected(asked, get_accelerator(device)))
                time_ms *= 1 + generator.uniform(-noise, noise)
                rows.append(made.row_of(case, time_ms=time_ms, accelerator=device, suspect=None))
    return rows


def fit_of(rows: Rows, impl: str = "xl_chunk", op: str = "mlstm_sig", **where: Any) -> Fit | None:
    return Fits(rows, "fw", "bf16", **{"here": H200, **where}).of(op, impl)


def width(fit: Fit, case: Query) -> float:
    ((low, _, high),) = fit.intervals_ms([case])
    return high / low


CASE = case_of(measured(0.0)[20], "fw", "bf16")


def test_a_fit_recovers_how_far_a_kernel_is_off() -> None:
    fit = fit_of(measured(0.0))
    assert (fit.rows, fit.others, fit.accelerator, fit.model) == (30, 0, "h200_sxm", "formulation")
    assert fit.worst_error < 0.1 and fit.median_error < 0.02
    between = CASE._replace(sizes={**CASE.sizes, "seq_len": 6000})
    assert fit.time_ms(between) == pytest.approx(1.7 * 2 * sum(expected(between, H200)), rel=0.03)
    far = CASE._replace(sizes={**CASE.sizes, "seq_len": 262144, "batch": 1, "num_heads": 4})
    assert width(fit, far) > 1.5 * width(fit, between), "nothing was measured near"


def test_nine_of_ten_rows_lie_in_the_intervals_of_the_others() -> None:
    rows = measured(0.1)
    fit = fit_of(rows)
    assert 0.02 < fit.median_error < 0.1 and fit.median_error < fit.worst_error < 0.3
    found = fit.intervals_ms([case_of(row, "fw", "bf16") for row in rows])
    assert mean(low <= row["time_ms"] <= high for row, (low, _, high) in zip(rows, found, strict=True)) >= 0.85
    assert all(1.02 < high / low < 1.7 for low, _, high in found)


def test_a_row_is_not_in_its_own_prediction() -> None:
    rows = measured(0.0)
    doubled = [{**row, "time_ms": 2 * row["time_ms"]} if n == 20 else row for n, row in enumerate(rows)]
    before, after = (fit_of(each).time_ms(CASE) for each in (rows, doubled))
    assert after == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize(("scale", "least", "most"), [(0.3, 1.0, 1.1), (1.0, 1.0, 1.1), (3.0, 2.5, 3.1)])
def test_errors_that_are_larger_than_said_widen_intervals(scale: float, least: float, most: float) -> None:
    errors = [scale * abs(NormalDist().inv_cdf((n + 0.5) / 400)) for n in range(400)]
    assert least <= trust(errors) <= most
    assert trust([9.0]) < 1.5, "one says little"


@pytest.mark.parametrize("impl", ["xl_chunk", "fused_chunk"])
def test_what_was_measured_elsewhere_is_carried_by_the_rates(impl: str) -> None:
    rows = measured(0.05, impl)
    case = CASE._replace(impl=impl, sizes={**CASE.sizes, "seq_len": 6000})
    here, there, slow = (predict_case(case, each, fit_of(rows, impl, here=each)) for each in (H200, B200, H100))
    assert there.time_ms < here.time_ms < slow.time_ms, "by multiprocessors and memory"
    assert there.high_ms / there.low_ms > 1.2 * here.high_ms / here.low_ms
    assert "on h200_sxm, carried to b200: its rates are 1.12 to 2.28 times as high" in there.interval
    assert "carried" not in here.interval
    assert all(0 < each.low_ms < each.time_ms < each.high_ms for each in (here, there, slow))
    # There and back again.
    assert carried_ms(carried_ms(3.0, case, H200, B200), case, B200, H200) == pytest.approx(3.0, rel=0.2)
    assert 1.0 < carried_ms(1.0, case, H200, H100) < H200.bandwidth_bytes_s / H100.bandwidth_bytes_s


def test_a_few_rows_of_a_device_calibrate_what_another_measured() -> None:
    """The H100 made up here is 1.2 times as slow as its rates say."""
    slower = [{**row, "time_ms": 1.2 * row["time_ms"]} for row in measured(0.01, device="h100", seed=1)]
    alone, calibrated = (fit_of([*measured(0.01), *own], here=H100) for own in ([], slower[2:28:8]))
    assert (alone.accelerator, alone.rows, alone.elsewhere) == ("h200_sxm", 30, 0)
    assert (calibrated.accelerator, calibrated.rows, calibrated.elsewhere) == ("h100_sxm", 4, 30)
    errors = [
        mean(abs(fit.time_ms(case_of(row, "fw", "bf16")) / row["time_ms"] - 1) for row in slower)
        for fit in (alone, calibrated)
    ]
    assert errors[0] > 0.1 > 0.05 > errors[1]
    assert width(calibrated, CASE) < width(alone, CASE)


def test_measured_roofs_leave_the_time_as_it_is() -> None:
    times = [
        fit_of(measured(0.0), here=with_roofs(H200, roofs), roofs=roofs).time_ms(CASE) for roofs in ("spec", "measured")
    ]
    assert times[0] == pytest.approx(times[1], rel=0.02)


def test_steps_that_wait_for_one_another() -> None:
    sizes = {"seq_len": 1000, "chunk_size": 64}
    for op, impl, mode, of, steps in (
        ("mlstm_sig", "fused_chunk", "fw", sizes, 16),
        ("mlstm_sig", "fused_chunk", "step", {"seq_len": 1}, 1),
        ("mlstm_sig", "parallel", "fw", sizes, 1),
        ("attention", "torch.sdpa_flash", "fw", {"seq_len": 1000}, 1),
        ("wkv4", "scan", "fw", {"seq_len": 1000}, 1),
        ("wkv4", "naive", "fw", {"seq_len": 1000}, 1000),
    ):
        assert sequential_steps(Query(op, impl, mode, "bf16", None, of)) == steps, (op, impl)


def test_few_rows_are_helped_by_those_of_their_kind() -> None:
    """Another operation's kernel of the same formulation, half as fast: each further own row narrows the interval."""
    rows = measured(0.05)
    kin = [
        {**row, "op": op, "case_id": f"{op} {row['case_id']}", "time_ms": factor * row["time_ms"]}
        for op, factor in (("retention", 0.5), ("simple_gla", 0.7))
        for row in rows
    ]
    fits = [fit_of([*kin, *rows[:own]]) for own in (0, 1, 4)]
    assert [(each.rows, each.others) for each in fits] == [(0, 2), (1, 2), (4, 2)]
    widths = [width(each, CASE) for each in fits]
    assert widths == sorted(widths, reverse=True) and widths[0] > 10 > 4 > widths[2]
    assert "from 4 rows of its own on h200_sxm and those of 2 like it" in fits[2].basis(CASE)
    assert width(fit_of(rows[:1]), CASE) > widths[1], "alone"
    assert fit_of(rows, op="rglru", impl="fused") is None, "another kind"


def test_what_says_too_little_gives_bounds() -> None:
    fit = fit_of(measured(0.0)[:1])
    sizes = {"batch": 1, "seq_len": 2**20, "num_heads": 1, "head_dim_qk": 16, "head_dim_v": 16, "chunk_size": 16}
    case = CASE._replace(sizes=sizes)
    for found in (predict_case(case, H200, each) for each in (fit, None)):
        assert found.time_ms is None and found.low_ms == found.model.lower_ms


def test_no_kernel_lends_its_time_to_an_eager_loop() -> None:
    """Its host takes as long as it, so it is a kind of its own."""
    rows = stored_rows(committed_results("h200_sxm"), "fw", "bf16")
    eager = Fits(rows, "fw", "bf16", H200).of("rglru", "torch.eager")
    assert (eager.rows, eager.others) == (3, 0)
    asked = "rglru", "fla.fused_recurrent_hgrn"
    beside, without = (
        Fits([row for row in rows if row["impl"] not in left_out], "fw", "bf16", H200).of(*asked)
        for left_out in ((), ("torch.eager",))
    )
    case = Query(*asked, "fw", "bf16", None, {"batch": 8, "seq_len": 3000, "channels": 1024})
    assert beside.intervals_ms([case]) == without.intervals_ms([case])


def test_of_many_rows_the_own_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrbench.analysis.model.fit.MOST_ROWS", 32)
    kin = [{**row, "op": "retention", "case_id": "r" + row["case_id"]} for row in measured(0.05)]
    fit = Fits([*measured(0.05), *kin], "fw", "bf16", H200).of("mlstm_sig", "xl_chunk")
    assert (fit.rows, len(fit.surface.rows)) == (30, 32)


@pytest.mark.parametrize("mode", ["fw", "fwbw"])
def test_a_larger_problem_takes_no_less_time(mode: str) -> None:
    """Than a smaller one was measured to take; if neither was, hardly less, but for walks of other plans."""
    stored = [row for row in stored_rows(committed_results("h200_sxm"), mode, "bf16") if not row["noise"]]
    fits, generator = Fits(stored, mode, "bf16", H200), random.Random(mode)
    for kernel, rows in grouped(newest_cases(stored), itemgetter("op", "impl")).items():
        fit = fits.of(*kernel)
        for row in generator.sample(rows, min(3, len(rows))) if fit else ():
            case = case_of(row, mode, "bf16")
            size = generator.choice([name for name in ("batch", "num_heads", "seq_len") if name in case.sizes])
            larger, smaller, largest = (
                fit.time_ms(case._replace(sizes={**case.sizes, size: times * case.sizes[size]})) for times in (2, 3, 6)
            )
            assert larger >= row["time_ms"] * (1 - 1e-9), (case, size)
            assert largest > 0.85 * smaller or fit.model == "walks", (case, size)


def test_twice_the_heads_of_the_only_row_take_twice_as_long() -> None:
    """Though its kin are faster where they have many heads, which are narrow there."""
    name = "gated_delta_net", "fla.chunk_gated_delta_rule"
    stored = stored_rows(committed_results("h200_sxm"), "fw", "bf16")
    own = next(row for row in stored if (row["op"], row["impl"]) == name)
    fit = Fits([own, *(row for row in stored if (row["op"], row["impl"]) != name)], "fw", "bf16", H200).of(*name)
    sizes = case_of(own, "fw", "bf16").sizes
    twice = fit.time_ms(case_of(own, "fw", "bf16")._replace(sizes={**sizes, "num_heads": 2 * sizes["num_heads"]}))
    assert fit.rows == 1 and fit.others > 3 and 1.6 < twice / own["time_ms"] < 2.4


@pytest.mark.parametrize("mode", ["fw", "fwbw"])
def test_a_scan_takes_as_much_longer_as_it_has_more_channels(mode: str) -> None:
    """Its tokens do not wait for one another, so that its time is that of its bytes, not of steps."""
    fit = Fits(stored_rows(committed_results("h200_sxm"), mode, "bf16"), mode, "bf16", H200).of("rglru", "fused")
    cases = [
        Query("rglru", "fused", mode, "bf16", "fp32", {"batch": 8, "seq_len": 8192, "channels": n})
        for n in (1024, 4096)
    ]
    narrow, wide = fit.intervals_ms(cases)
    assert 3 < wide[1] / narrow[1] < 6
    # Of several cases each has the interval that it has alone.
    assert np.allclose([narrow, wide], [fit.intervals_ms([case])[0] for case in cases], rtol=1e-9)


def test_rows_stand_in_for_the_cases_that_have_none_of_their_own(tmp_path: Path) -> None:
    """One fp16 row does not keep bf16 rows of other problems from standing in for fp16."""
    cases = [("bf16", 1024), ("bf16", 8192), ("fp16", 1024)]
    made.write(
        (made.row("mlstm_sig", "xl_chunk", dtype=dtype, seq_len=seq_len) for dtype, seq_len in cases),
        tmp_path / "rows.parquet",
    )
    found = {row["seq_len"]: row.get("stands_in") for row in stored_rows([tmp_path], "fw", "fp16")}
    assert found == {1024: None, 8192: "bf16"}


def test_left_out_rows_are_predicted_as_if_they_were_not_there() -> None:
    """Of all at once, as of each fit without them; hidden rows too."""
    rows = measured(0.1)
    known = Fits(rows, "fw", "bf16", H200).of("mlstm_sig", "xl_chunk").surface
    groups, seen = np.arange(len(rows)) // 4, np.arange(len(rows)) % 5 != 0
    means, variances = known.left_out(groups, seen)
    for n in (1, 5, 20, 22):
        left = np.flatnonzero(seen & (groups != groups[n]))
        weights = np.linalg.solve(known.covariance[np.ix_(left, left)], known.covariance[left, n])
        assert means[n] == pytest.approx(weights @ known.logs[left], rel=1e-6, abs=1e-9)
        assert variances[n] == pytest.approx(known.covariance[n, n] - weights @ known.covariance[left, n], rel=1e-5)
