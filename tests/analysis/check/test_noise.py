"""Times measured on a busy machine: what the check and compare call them, and how often both err."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from lrbench.analysis.check.compare import compare
from lrbench.analysis.check.history import history_rows
from lrbench.analysis.check.regression import check, summary, worth_measuring_again
from lrbench.results.select import load_rows, with_slowness
from lrbench.tests.command_line import Lrbench

from ..rows import THRESHOLDS, Row, failed, slower, timed, write

BUSY = "busy CPU: load 3.1"
NOISY = "unclear: noisy"


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (timed(2.2), timed(2.0), "regression"),
        (timed(2.2, noise=BUSY), timed(2.0), NOISY),
        (timed(2.2), timed(2.0, noise=BUSY), NOISY),
        (timed(1.8, noise=BUSY), timed(2.0), NOISY),
        (timed(1.8), timed(2.0, noise=BUSY), NOISY),
        # No slower in spite of load is no regression; a baseline that load lengthened would hide one.
        (timed(2.0, noise=BUSY), timed(2.0), "ok"),
        (timed(2.0), timed(2.0, noise=BUSY), NOISY),
        # Memory, errors and what broke do not depend on load.
        (timed(2.2, noise=BUSY, peak_memory_bytes=2**31), timed(2.0), "regression"),
        (timed(2.0, noise=BUSY, host_ms=1.4), timed(2.0, host_ms=0.2), NOISY),
        (failed("crash", ""), timed(2.0, noise=BUSY), "failed"),
        # The same CPU at another speed, by the yardstick; another CPU has another yardstick.
        (timed(2.2, yardstick_ms=1.1), timed(2.0, yardstick_ms=1.0), "regression"),
        (timed(2.8, yardstick_ms=1.5), timed(2.0, yardstick_ms=1.0), NOISY),
        (timed(2.0, yardstick_ms=1.0), timed(2.8, yardstick_ms=1.5), NOISY),
        (timed(2.8, yardstick_ms=1.5, torch_version="2.12"), timed(2.0, yardstick_ms=1.0), "regression"),
        (timed(2.8, yardstick_ms=1.5), timed(2.0), "regression"),
    ],
)
def test_a_noisy_time_is_no_verdict(new: Row, old: Row, expected: str) -> None:
    found = check([new], [old], THRESHOLDS)
    (case,) = found.cases
    assert case.verdict == expected
    assert (found.compared == 0) == (expected == NOISY)
    assert worth_measuring_again(found) == [case.row] * (expected in (NOISY, "regression"))


def test_the_three_sweeps_of_one_commit() -> None:
    """Beside another job they took 3.886, 1.435 and 0.963 ms: neither improved nor regressed, and not compared."""
    sweeps = [timed(ms, noise=BUSY) for ms in (3.886, 1.435, 0.963)]
    for old, new in itertools.permutations(sweeps, 2):
        found = check([new], [old], THRESHOLDS)
        assert found.counts == {NOISY: 1}
        assert (found.failures, found.too_few, found.passed) == ((), True, False)
        assert compare([old], [new]).pairs[0].verdict == NOISY
        assert len(check([new], [old], THRESHOLDS, fail_unclear=True).failures) == 1
    text = summary(check([sweeps[2]], [sweeps[0]], THRESHOLDS))
    assert text.endswith("1 unclear: noisy; compared 0 of 1 cases, too few (--min-compared 0.5), mostly because: "
                         "measured on a busy machine")  # fmt: skip
    assert [row["verdict"] for row in history_rows(sweeps)] == [None, NOISY, NOISY]


def test_check_and_compare_say_which_rows_were_noisy(lrbench: Lrbench, tmp_path: Path) -> None:
    """The check cannot tell and exits with 2; compare has the same word; both say which rows were noisy."""
    sizes = [{"chunk_size": 16 * n} for n in (1, 2, 3)]
    old = write([timed(2.0, run_id="a", **each) for each in sizes], tmp_path / "old.parquet")
    rows = [timed(2.9, noise=BUSY, run_id="b", **each) for each in sizes[:2]] + [timed(2.0, run_id="b", **sizes[2])]
    new = write(rows, tmp_path / "new.parquet")
    code, out, err = lrbench("check", new, "--baseline", old)
    first, _, *lines = out.splitlines()
    assert code == 2 and first.startswith("FAILED on h200_sxm: 2 unclear: noisy, 1 ok; compared 1 of 3 cases, too few")
    assert all(line.startswith(NOISY) and f"(baseline | run): idle | {BUSY}" in line for line in lines)
    assert "rows measured on a busy machine: 0 | 2 of 3" in err
    assert lrbench("check", new, "--baseline", old, "--min-compared", "0.3")[0] == 0
    assert lrbench("check", new, "--baseline", old, "--min-compared", "0.3", "--fail-unclear")[0] == 1
    assert 'skipped message="unclear: noisy: ' in lrbench("check", new, "--baseline", old, "--format", "junit")[1]
    assert "of 3 cases 1 same, 2 unclear: noisy" in lrbench("compare", old, new)[1]


def test_rows_without_a_yardstick_stay_as_they_are() -> None:
    rows = [timed(2.0), timed(2.0, noise=BUSY, yardstick_ms=9.0), timed(2.0, yardstick_ms=1.0)]
    (same,) = with_slowness(rows)
    assert all(a is b for a, b in zip(same, rows, strict=True))


SIX_RUNS = Path(__file__).with_name("busy_machine.parquet")
"""Six sweeps of one commit on a virtual machine of two cores that other jobs kept busy, with the portable RG-LRU:

    lrbench sweep --kernel rglru --op rglru --impl torch --mode fw,fwbw --seq-len 256,512 --channels 64,256 \\
        --chunk-size 32,64 --baselines none --no-calibrate

The first three with real-time priority (``chrt -f 1``), so that other jobs had the cores one second in twenty only;
during the third the host gave the cores' second hyperthreads to other machines. The last three without, beside two
processes of ``while True: pass``.
"""


@pytest.fixture(scope="module")
def six() -> list[list[Row]]:
    runs: dict[str, list[Row]] = {}
    for row in load_rows(SIX_RUNS):
        runs.setdefault(row["run_id"], []).append(row)
    assert [len(rows) for rows in runs.values()] == [16] * 6
    assert len({(row["git_commit"], row["device_name"]) for rows in runs.values() for row in rows}) == 1
    return list(runs.values())


def verdicts(pairs: Sequence[tuple[Sequence[Row], Sequence[Row]]]) -> Counter[str]:
    """Return how often the check has which verdict, with each of a pair as the baseline of the other."""
    return sum(
        (Counter(check(new, old, THRESHOLDS).counts) for pair in pairs for old, new in itertools.permutations(pair)),
        Counter(),
    )


def test_no_false_alarm_in_runs_of_one_commit(six: list[list[Row]]) -> None:
    """No time of six runs of the same code regressed or improved; without the marks more than half would."""
    pairs = list(itertools.combinations(six, 2))
    found = verdicts(pairs)
    assert found.total() == 15 * 2 * 16
    assert {*found} == {"ok", "unclear", NOISY}
    unmarked = [[{**row, "noise": None, "yardstick_ms": None} for row in rows] for rows in six]
    wrong = verdicts(list(itertools.combinations(unmarked, 2)))
    assert wrong["regression"] + wrong["improved"] > found.total() / 2


@pytest.mark.parametrize(("factor", "least"), [(1.3, 6), (1.5, 15)])
def test_a_slowdown_is_found_in_quiet_runs(six: list[list[Row]], factor: float, least: int) -> None:
    """The threshold of times on a CPU is 1.25: of 15 cases without a mark, those made 1.5x slower are all found."""
    for old, new in itertools.permutations(six[:2]):
        found = check([slower(row, factor) for row in new], old, THRESHOLDS)
        assert not found.passed and not found.too_few
        assert found.counts["regression"] >= least
        assert found.counts[NOISY] == 1
