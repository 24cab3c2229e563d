"""Comparisons: selectors, matching, verdicts, geometric means, and what differs between environments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lrbench.analysis.check.compare import as_dict, case_rows, compare, group_rows, judge, unmatched_rows
from lrbench.analysis.check.statistics import Interval
from lrbench.results.select import newest

from ..rows import failed, measured, run_of, samples, timed


def test_a_verdict_follows_from_the_interval_and_the_margin() -> None:
    verdicts = {(0.99, 1.01): "same", (1.001, 1.01): "same", (1.005, 1.03): "slower", (1.10, 1.12): "slower"}
    verdicts |= {(0.97, 0.985): "faster", (0.5, 0.6): "faster"}
    verdicts |= dict.fromkeys([(0.99, 1.05), (0.9, 1.1), (0.0, float("inf"))], "unclear")
    assert {(low, high): judge(Interval(low=low, high=high), 0.02) for low, high in verdicts} == verdicts


def test_finds_what_is_slower_and_what_is_the_same() -> None:
    a = [*run_of(3, seed=1), timed(2.0, mode="fwbw")]
    b = [*run_of(3, seed=2, slower=1.2), measured(mode="fwbw", times=samples(2, noise=0.002, seed=9))]
    found = compare(a, b)
    assert [pair.verdict for pair in found.pairs] == ["slower"] * 3 + ["same"]
    forward, both, everything = found.groups
    assert (forward.values, forward.cases, both.cases, everything.cases) == ({"op": "mlstm_sig", "mode": "fw"}, 3, 1, 4)
    assert forward.interval.low < 1.2 < forward.interval.high
    assert everything.ratio == pytest.approx((forward.ratio**3 * both.ratio) ** 0.25)
    assert [row["cases"] for row in group_rows(found)] == [3, 1, 4]
    json.dumps(as_dict(found), allow_nan=False)


def test_times_on_the_host_are_shown_where_a_row_has_one() -> None:
    rows = [measured(), measured(mode="fwbw")]
    assert not {"a_host_ms", "b_host_ms"} & {*case_rows(compare(rows, rows))[0]}
    shown = case_rows(compare(rows, [measured(host_ms=0.25), measured(mode="fwbw")]))
    assert [row["b_host_ms"] for row in shown] == [0.25, None]
    assert "a_host_ms" not in shown[0]


def test_implementations_match_without_their_names_and_the_best_chunk_counts() -> None:
    ours = [measured(chunk_size=chunk, times=samples(time)) for chunk, time in ((64, 3.0), (128, 2.0))]
    theirs = [measured(impl="mlstm_kernels.xl_chunk_siging", chunk_size=256, state_dtype=None, times=samples(4.0))]
    with pytest.raises(
        ValueError, match=r"no case of A matches one of B \(\d+ of A: B has it with chunk_size 256 only.*--ignore"
    ):
        compare(ours, theirs)
    (pair,) = compare(ours, theirs, ignore=("chunk_size",)).pairs
    assert pair.a["chunk_size"] == 128
    assert pair.ratio == pytest.approx(2.0)


def test_newest_row_of_a_case_counts() -> None:
    old = measured(times=samples(9.0), measured_at="2026-01-01T00:00:00+00:00")
    new = measured(times=samples(2.0), measured_at="2026-01-02T00:00:00+00:00")
    for rows in ([old, new], [new, old]):
        assert newest(rows)[old["case_id"]] is new
        assert compare(rows, [new]).pairs[0].ratio == pytest.approx(1.0)
    # The ratio is B's time over A's, and turns with the sides.
    assert compare([old], [new]).pairs[0].ratio == pytest.approx(2 / 9)
    assert compare([new], [old]).pairs[0].verdict == "slower"


def test_says_what_could_not_be_matched_and_why() -> None:
    a = [measured(), measured(seq_len=1024), measured(mode="fwbw"), measured(mode="bw")]
    b = [measured(), failed("oom", "CUDA out of memory", mode="fwbw"), measured(seq_len=2048), measured(op="retention")]
    found = compare(a, b)
    assert len(found.pairs) == 1
    reasons = {(each.side, each.row["mode"], each.row["seq_len"]): each.reason for each in found.unmatched}
    assert reasons[("both", "fwbw", 8192)] == "B is oom: CUDA out of memory"
    assert reasons[("A", "bw", 8192)] == "B has it with mode fw, fwbw only"
    assert reasons[("A", "fw", 1024)] == "not in B"
    assert reasons[("B", "fw", 8192)] == "A has it with op mlstm_sig only"
    assert sum(line["cases"] for line in unmatched_rows(found)) == len(found.unmatched) == 5


def test_warns_where_environments_differ_and_names_the_difference() -> None:
    changed: dict[str, Any] = {"driver_version": "590", "triton_version": "3.7.1", "sm_clock_mhz": 1755.0}
    found = compare([measured()], [measured(**changed, throttled="software power cap", git_dirty=True)])
    assert found.environment == (
        "driver_version: 580 | 590",
        "triton_version: 3.6.0 | 3.7.1",
        "sm_clock_mhz (median): 1980 | 1755",
        "throttled rows: 0 | 1 of 1",
        "rows of a working tree with uncommitted changes: 0 | 1 of 1",
    )
    assert compare([measured()], [measured()]).environment == ()
    fused, unknown = measured(ptxas_version="12.9", fp_fusion=True), measured()
    found = compare([fused], [measured(ptxas_version="13.4", fp_fusion=False)])
    assert found.environment == ("ptxas_version: 12.9 | 13.4", "fp_fusion: True | False")
    # Early rows do not say it.
    assert compare([unknown], [fused]).environment == ()


def test_other_devices_compare_with_a_warning_but_common_ones_come_first() -> None:
    here, there = measured(), measured(accelerator="h100")
    assert compare([here], [there]).environment[0] == "device_accelerator: h200_sxm | h100_sxm"
    slow_there = measured(accelerator="h100", times=samples(50.0), measured_at="2027-01-01T00:00:00+00:00")
    (pair,) = compare([here], [measured(), slow_there]).pairs
    assert pair.ratio == pytest.approx(1.0)


def test_what_slowed_both_sides_of_a_round_does_not_widen_a_pair_s_interval() -> None:
    load = [1 + 0.5 * (n % 3) for n in range(12)]
    a, b = ({"times": [base * each for each in load], "impl": impl} for base, impl in ((1.0, "a"), (1.1, "b")))
    verdicts = {}
    for ids in (("x-0", "x-0"), ("x-0", "x-1")):
        rows = [measured(pair_id=pair_id, **side) for pair_id, side in zip(ids, (a, b), strict=True)]
        (pair,) = compare(*([row] for row in rows)).pairs
        verdicts[ids] = pair.verdict
    assert [*verdicts.values()] == ["slower", "unclear"]


def test_rows_without_samples_fall_back_on_their_intervals() -> None:
    row = measured(time_samples_ms=None, time_ms=2.0, time_ci_low_ms=1.9, time_ci_high_ms=2.1)
    found = compare([row], [{**row, "run_id": "other"}])
    interval = found.pairs[0].interval
    assert (interval.low, interval.high) == pytest.approx((1.9 / 2.1, 2.1 / 1.9))
    assert found.pairs[0].verdict == "unclear"
    assert as_dict(found)["groups"][-1]["high"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": ("opp",)}, r"by must be one of 19 names, got 'opp'; did you mean op\?"),
        ({"ignore": ("time_ms",)}, r"ignore must be one of .* got 'time_ms'"),
        ({"margin": 0.0}, "margin must be a positive number"),
        ({"margin": float("nan")}, "margin must be a positive number"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare([measured()], [measured()], **options)
