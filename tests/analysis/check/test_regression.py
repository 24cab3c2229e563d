"""The regression check: what fails, what does not, and how often it errs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from lrbench.analysis.check.compare import compare
from lrbench.analysis.check.findings import as_dict, junit_xml, markdown, noteworthy, table_rows
from lrbench.analysis.check.regression import (
    BROKEN,
    FAILING,
    CheckResult,
    check,
    check_twice,
    summary,
    worth_measuring_again,
)
from lrbench.analysis.check.thresholds import DEFAULTS, Limits, Thresholds, load_thresholds
from lrbench.results.select import load_rows, select
from lrbench.tests import ROOT

from ..rows import BASE_MS, THRESHOLDS, Row, failed, measured, run_of, samples, timed

H200 = ROOT / "results" / "h200_sxm"


def judge(new: Row, old: Row, thresholds: Thresholds = THRESHOLDS, **options: bool) -> CheckResult:
    return check([new], [old], thresholds, **options)


def with_times(row: Row, times: Any) -> Row:
    return {**row, "time_samples_ms": list(map(float, times)), "time_ms": float(np.median(times))}


GIB = 2**30
SMALL = {"peak_memory_bytes": 100_000, "rel_error": 1e-7}
SAME = timed(2.0)


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (timed(2.00), SAME, "ok"),
        (timed(2.03), SAME, "ok"),
        (timed(2.10), SAME, "regression"),
        (timed(2.05, 0.01), timed(2.0, 0.01), "unclear"),
        (timed(1.80), SAME, "improved"),
        (timed(1.97), SAME, "ok"),
        # What the clock cannot resolve is tolerated.
        (timed(0.0215), timed(0.02), "ok"),
        (timed(0.0240), timed(0.02), "regression"),
        # Few samples tell nothing.
        (measured(times=[2.0] * 4, run_id="other"), measured(times=[2.0] * 4), "unclear"),
        (timed(2.0, peak_memory_bytes=int(1.005 * GIB)), SAME, "ok"),
        (timed(2.0, peak_memory_bytes=int(1.02 * GIB)), SAME, "regression"),
        (timed(2.0, peak_memory_bytes=int(0.9 * GIB)), SAME, "improved"),
        (timed(2.0, peak_memory_bytes=None), SAME, "failed"),
        (timed(2.0, rel_error=2.5e-3), SAME, "ok"),
        (timed(2.0, rel_error=4e-3), SAME, "regression"),
        (timed(2.0, rel_error=4e-3, checked="T=256"), SAME, "ok"),
        (timed(2.0, flops=1.0), SAME, "ok"),
        # Small memory and small errors have room, and so has the error of a result that was exact.
        (timed(2.0, peak_memory_bytes=4_200_000, rel_error=9e-7), timed(2.0, **SMALL), "ok"),
        (timed(2.0, peak_memory_bytes=4_400_000, rel_error=1e-7), timed(2.0, **SMALL), "regression"),
        (timed(2.0, peak_memory_bytes=100_000, rel_error=2e-6), timed(2.0, **SMALL), "regression"),
        (timed(2.0, rel_error=1e-7), timed(2.0, rel_error=0.0), "ok"),
        (timed(2.0, rel_error=1e-3), timed(2.0, rel_error=0.0), "regression"),
        (timed(2.0, rel_error=0.0), timed(2.0, rel_error=0.0), "ok"),
        (timed(2.0, suspect="above the roof"), timed(2.0, suspect="above the roof"), "ok"),
        # What did not work before does not fail.
        (failed("oom", ""), failed("timeout", ""), "not measured"),
        (SAME, failed("crash", ""), "fixed"),
    ],
)
def test_a_regression_is_growth_beyond_a_threshold(new: Row, old: Row, expected: str) -> None:
    found = judge(new, old)
    assert [case.verdict for case in found.cases] == [expected]
    assert bool(found.failures) == (expected in FAILING)
    assert bool(judge(new, old, fail_unclear=True).failures) == (expected in (*FAILING, "unclear"))


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (1.39, 0.2, "ok"),
        (1.41, 0.2, "regression"),
        (0.028, 0.2, "improved"),
        # An interpreter's jitter is tolerated.
        (0.0109, 0.001, "ok"),
        (0.0111, 0.001, "regression"),
        # Rows of a CPU, or of an older version, have none.
        (0.2, None, "ok"),
        (None, 0.2, "ok"),
    ],
)
def test_the_time_on_the_host_is_a_regression_only_beyond_its_threshold(
    new: float | None, old: float | None, expected: str
) -> None:
    found = judge(timed(2.0, host_ms=new), timed(2.0, host_ms=old))
    (case,) = found.cases
    assert case.verdict == expected
    assert worth_measuring_again(found) == [case.row] * (expected == "regression")
    assert ("host_ms" in case.reason) == (expected != "ok")
    assert "host_ms" in {metric.name for metric in case.metrics} or None in (new, old)


@pytest.mark.parametrize("column", ["time_ms", "rel_error"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_a_value_that_nothing_measures_is_a_failure(column: str, value: float | None) -> None:
    good = measured(**SMALL)
    bad = {**good, column: value}
    (case,) = judge(bad, good).cases
    if column == "rel_error" and value == 0:
        assert case.verdict == "improved"
    else:
        assert case.verdict == "failed"
        assert case.reason.startswith(f"{column} is {'missing' if value is None else f'{value:g}'}, was ")
    if value:
        (case,) = judge(good, bad).cases
        assert (case.verdict, case.reason) == ("not measured", f"the baseline's {column} is {value:g}")


def test_faster_than_the_hardware_allows_is_unclear() -> None:
    (case,) = judge(timed(0.5, suspect="above the roof"), timed(2.0)).cases
    assert (case.verdict, case.reason) == ("unclear", "suspect: above the roof")


@pytest.mark.parametrize(
    ("new", "old", "limits", "expected"),
    [
        # 2.4 % slower for sure is tolerated, and a regression at a tighter threshold.
        (timed(2.048, 0.0005), timed(2.0, 0.0005), THRESHOLDS.defaults, "ok"),
        (timed(2.048, 0.0005), timed(2.0, 0.0005), {**DEFAULTS, "time": 0.01}, "regression"),
        # Counts may not move either way where they are compared.
        *(
            ({**SAME, "bytes": factor * SAME["bytes"]}, SAME, {**DEFAULTS, "counts": 0.0}, expected)
            for factor, expected in ((1.0, "ok"), (1.001, "regression"), (0.999, "regression"))
        ),
    ],
)
def test_thresholds_decide(new: Row, old: Row, limits: Limits, expected: str) -> None:
    (case,) = judge(new, old, Thresholds(defaults=limits)).cases
    assert case.verdict == expected


@pytest.mark.parametrize("status", BROKEN)
def test_what_worked_and_does_not_always_fails(status: str) -> None:
    new = failed(status, "it broke")
    lenient = Thresholds(defaults=DEFAULTS | dict.fromkeys(("time", "memory", "error")))
    found = judge(new, timed(2.0), lenient, allow_missing=True)
    assert not found.passed
    (case,) = found.cases
    assert (case.verdict, case.reason) == ("failed", f"was ok, is {status}: it broke")


def test_a_vanished_case_fails_unless_allowed() -> None:
    old = run_of(3, seed=1)
    for gone in (old[:2], [*old[:2], failed("unavailable", "not installed", chunk_size=48)]):
        found = check(gone, old, THRESHOLDS)
        assert found.counts["missing"] == 1
        assert not found.passed
        allowed = check(gone, old, THRESHOLDS, allow_missing=True)
        assert allowed.passed
        assert "1 missing (allowed)" in summary(allowed)
    assert check(old, old[:2], THRESHOLDS).counts == {"new": 1, "ok": 2}


def test_a_share_of_the_planned_cases_must_be_compared() -> None:
    """New cases count as planned, absent ones do not; what broke was compared, what began to work was not."""
    old = [*run_of(3, seed=1), failed("oom", "", mode="bw")]
    new = [failed("crash", "", chunk_size=16), *run_of(2, seed=1)[1:], timed(2.0, mode="bw"), timed(2.0, mode="fwbw")]
    found = check(new, old, THRESHOLDS, allow_missing=True)
    assert found.counts == {"failed": 1, "missing": 1, "fixed": 1, "new": 1, "ok": 1}
    assert (found.compared, found.planned, found.too_few) == (2, 4, False)
    # 3 of 30 are a tenth, whatever 0.1 * 30 is.
    many = [*run_of(3), *(failed("unavailable", "", chunk_size=16 * n) for n in range(4, 31))]
    shares = {share: check(many, run_of(30), THRESHOLDS, min_compared=share).too_few for share in (0.1, 0.11)}
    assert shares == {0.1: False, 0.11: True}


def test_other_accelerators_are_refused() -> None:
    with pytest.raises(ValueError, match="measured on h200_sxm and the baseline on h100_sxm: they are not comparable"):
        judge(timed(2.0), timed(2.0, accelerator="h100"))
    with pytest.raises(ValueError, match="must be of one accelerator, got h100_sxm, h200_sxm"):
        check([timed(2.0), timed(2.0, accelerator="h100")], [timed(2.0)], THRESHOLDS)
    # A baseline of several accelerators is read where the run's own is among them.
    assert check([timed(2.0)], [timed(2.0), timed(9.0, accelerator="h100")], THRESHOLDS).passed


def test_a_second_measurement_settles_a_case() -> None:
    """Unclear and slower cases are worth measuring again, failures and memory are not; the new row then counts."""
    old = [timed(2.0), timed(2.0, mode="fwbw"), timed(2.0, mode="bw"), timed(2.0, seq_len=1024)]
    new = [
        timed(2.05, 0.01),
        timed(2.2, mode="fwbw"),
        failed("crash", "", mode="bw"),
        timed(2.0, seq_len=1024, peak_memory_bytes=2**31),
    ]
    found = check(new, old, THRESHOLDS)
    assert found.counts == {"failed": 1, "regression": 2, "unclear": 1}
    times = samples(2.0, noise=0.002, seed=5)

    def measure(again: list[Row]) -> dict[str, Row]:
        assert {row["mode"] for row in again} == {"fw", "fwbw"}
        return {row["case_id"]: with_times(row, times) for row in again}

    settled = check_twice(new, old, THRESHOLDS, measure=measure)
    assert settled.counts == {"failed": 1, "regression": 1, "ok": 2}
    assert [case.measured_again for case in settled.cases if case.verdict == "ok"] == [True, True]


# How often the check errs. Samples scatter by `noise` around a median that a run shifts as a whole and case by case, so
# that the ratio of two runs of the same code scatters by 0.4 % beyond its samples, as on the H200.

RUN_SHIFT, CASE_SHIFT = 0.002, 0.002
CASES, TRIALS = 300, 100


def test_two_runs_of_the_same_code_pass() -> None:
    """Of 100 pairs of runs of 300 cases with 1 % noise and ten samples, at least 99 pass, every case of them."""
    generator = np.random.default_rng(20)
    base = run_of(CASES)
    medians = np.array([row["time_ms"] for row in base])[:, None]

    def drawn() -> list[Row]:
        """Return the run with its medians shifted and its samples drawn anew."""
        shifts = np.exp(RUN_SHIFT * generator.standard_normal() + CASE_SHIFT * generator.standard_normal((CASES, 1)))
        times = medians * shifts * (1 + 0.01 * generator.standard_normal((CASES, 10)))
        return [with_times(row, each) for row, each in zip(base, times, strict=True)]

    passed = sum(check(drawn(), drawn(), THRESHOLDS).passed for _ in range(TRIALS))
    assert passed >= 99


@pytest.mark.parametrize("count", [10, 30])
def test_a_slowdown_of_5_percent_is_caught(count: int) -> None:
    """One case of a run 5 % slower, 1 % noise: the check fails, and for that case, in at least 99 of 100 trials."""
    generator = np.random.default_rng(22)
    base = [measured(mode=mode) for mode in ("fw", "bw")]

    def run(*medians: float) -> list[Row]:
        drawn = 1 + 0.01 * generator.standard_normal((2, count))
        return [with_times(row, each * ms) for row, each, ms in zip(base, drawn, medians, strict=True)]

    caught = 0
    for _ in range(4 * TRIALS):
        old, new = run(BASE_MS, BASE_MS), run(1.05 * BASE_MS, BASE_MS)
        caught += [case.row["mode"] for case in check(new, old, THRESHOLDS).failures] == ["fw"]
    assert caught >= 0.99 * 4 * TRIALS


RUNS_OF_ONE_COMMIT = ("3cf2934d", "7a4f7529")
"""Two runs of the same code on the same H200, one after the other."""
ROWS_OF_ONE_COMMIT = Path(__file__).with_name("two_runs_of_one_commit.parquet")


def runs_of_one_commit() -> tuple[list[Row], list[Row]]:
    """Return the cases that the two have in common, in the same order."""
    first, second = (
        {row["case_id"]: row for row in select(f"run:{run}", [ROWS_OF_ONE_COMMIT])} for run in RUNS_OF_ONE_COMMIT
    )
    common = [case for case in first if case in second]
    return [first[case] for case in common], [second[case] for case in common]


def test_two_runs_of_one_commit_on_the_h200_are_the_same() -> None:
    """Neither run is slower than the other in any case, for the check; `compare` finds no case faster or slower."""
    first, second = runs_of_one_commit()
    assert len(first) > 100
    assert len({(row["git_commit"], row["device_name"], row["driver_version"]) for row in first + second}) == 1
    assert {row["git_dirty"] for row in first + second} == {False}
    for old, new in ((first, second), (second, first)):
        found = check(new, old, THRESHOLDS, fail_unclear=True)
        assert (found.passed, found.counts) == (True, {"ok": len(first)})
        assert {pair.verdict for pair in compare(old, new).pairs} == {"same"}


@pytest.fixture(scope="module")
def mixed() -> CheckResult:
    old = [*run_of(3, seed=1), timed(2.0, mode="fwbw"), timed(2.0, mode="bw"), timed(2.0, seq_len=1024)]
    new = [
        *run_of(2, seed=2, triton_version="3.7.1"),
        timed(2.3, mode="fwbw"),
        failed("crash", "ptxas | died \x1b[31m<at once>", mode="bw"),
        timed(2.05, 0.02, seq_len=1024),
    ]
    return check(new, old, THRESHOLDS)


def test_cases_are_listed_worst_first(mixed: CheckResult) -> None:
    assert [case.verdict for case in mixed.cases] == ["failed", "missing", "regression", "unclear", "ok", "ok"]
    assert [row["verdict"] for row in table_rows(noteworthy(mixed))] == ["failed", "missing", "regression", "unclear"]
    assert (
        summary(mixed)
        == "FAILED on h200_sxm: 1 failed, 1 missing, 1 regression, 1 unclear, 2 ok; compared 5 of 5 cases"
    )


def test_json_has_the_interval_and_the_limit_of_a_regression(mixed: CheckResult) -> None:
    data = json.loads(json.dumps(as_dict(mixed), allow_nan=False))
    assert not data["passed"]
    time = next(c for c in data["cases"] if c["verdict"] == "regression")["metrics"][0]
    assert time["name"] == "time_ms"
    assert time["low"] > time["limit"] == 1.025


def test_junit_counts_what_failed_and_what_is_unclear(mixed: CheckResult) -> None:
    root = ElementTree.fromstring(junit_xml(mixed))
    suite = root.find("testsuite")
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["6", "3", "1"]
    assert len(suite.findall("testcase/failure")) == 3
    assert len(suite.findall("testcase/skipped")) == 1
    assert "ptxas | died ?[31m<at once>" in suite.findall("testcase/failure")[0].get("message", "")
    assert suite.find("properties/property").attrib == {"name": "triton_version", "value": "3.6.0 | 3.6.0, 3.7.1"}


def test_markdown_escapes_bars(mixed: CheckResult) -> None:
    text = markdown(mixed)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 5
    # A bar in a reason does not open another column.
    assert all(line.replace("\\|", "").count("|") == 7 for line in rows)
    assert "- triton_version: 3.6.0 | 3.6.0, 3.7.1" in text
    assert "**regression**" in text


def test_later_rules_win_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.toml"
    path.write_text("""
        [defaults]
        time = 0.03
        [[rule]]
        match = { kernel = "tfla", mode = ["fw", "fwbw"] }
        time = 0.05
        memory = false
        [[rule]]
        why = "short"
        match = { impl = "fused_chunk", seq_len = { max = 4096 }, head_dim_v = [128, 256] }
        time = 0.1
    """)
    thresholds = load_thresholds(path)
    assert thresholds.limits(timed(2.0, mode="bw")) == {**DEFAULTS, "time": 0.03}
    assert thresholds.limits(timed(2.0)) == {**DEFAULTS, "time": 0.05, "memory": None}
    assert thresholds.limits(timed(2.0, seq_len=4096)) == {**DEFAULTS, "time": 0.1, "memory": None}
    assert thresholds.limits(timed(2.0, seq_len=4096, head_dim_v=64)) == {**DEFAULTS, "time": 0.05, "memory": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time = 0.1", "the file must be a table without other keys than defaults, rule, got 'time'"),
        ("[defaults]\ntimes = 0.1", "defaults must be a table without other keys than time, host, .* got 'times'"),
        ("[defaults]\ntime = -0.1", "defaults.time must be a number of at least 0 or false, got -0.1"),
        ("[defaults]\ntime = true", "defaults.time must be a number of at least 0 or false, got True"),
        ("[defaults]\nmin_error = false", "defaults.min_error must be a number of at least 0, got False"),
        ("[rule]\ntime = 1", "rule must be a list, each a table of why, match, time"),
        ("[[rule]]\ntime = 1", "rule 1.match must be a table of columns"),
        ('[[rule]]\nmatch = { mode = "fw" }', "rule 1 must be a rule that sets one of time"),
        ('[[rule]]\nmatch = { colour = "red" }\ntime = 1', "rule 1.match must be a table without other keys"),
        ("[[rule]]\nmatch = { mode = 3 }\ntime = 1", "rule 1.match.mode must be a text or a list of texts, got 3"),
        ("[[rule]]\nmatch = { seq_len = 0 }\ntime = 1", "rule 1.match.seq_len must be a positive integer"),
        ("[[rule]]\nmatch = { seq_len = { least = 1 } }\ntime = 1", "match.seq_len must be .* with min, max or both"),
        ("[[rule]]\nmatch = { seq_len = { min = 0.5 } }\ntime = 1", "seq_len.min must be a positive integer, got 0.5"),
    ],
)
def test_bad_thresholds(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "thresholds.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        load_thresholds(path)
    assert str(raised.value).startswith(str(path))


def test_missing_thresholds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"thresholds must be a TOML file, got .*none.toml \(No such file"):
        load_thresholds(tmp_path / "none.toml")


def test_committed_thresholds_say_why() -> None:
    assert THRESHOLDS.rules
    assert all(rule["why"] for rule in THRESHOLDS.rules)
    rows = load_rows(H200)
    fused_chunk = next(row for row in rows if row["impl"] == "fused_chunk" and row["mode"] == "fw")
    assert THRESHOLDS.limits(fused_chunk) == THRESHOLDS.defaults
    assert THRESHOLDS.limits({**fused_chunk, "device_kind": "cpu"})["time"] == 0.25
