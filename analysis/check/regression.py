"""The regression check: a run against a baseline, case by case: time, host time, peak memory, error and status.

docs/ci.md has the verdicts. A time regressed only if the one-sided 95 % confidence bound of the ratio (new over old,
bootstrap of the stored samples) lies beyond the case's threshold: it is slower by more than what is tolerated, not
merely slower. Memory, error and counts are not random and are compared with their thresholds as they are. So is the
host's time, of which a row has the median alone: its threshold is as wide as that of any wall clock on a shared
machine.

A run has hundreds of cases and fails if one of them regressed, so the false alarms of a case must be far rarer than one
in a hundred runs. The threshold makes them so, rather than a correction of the confidence: with 1 % noise and 10
samples the ratio of two medians scatters by 0.6 %, and a false alarm at a threshold of 2.5 % needs 3.3 %. It also
allows for what shifts all samples of a case, which no interval shows: clocks, placement in memory, another day. Samples
that follow each other are nearly independent (their lag-1 correlation in the stored H200 runs is about 0.1, which makes
an interval a tenth too narrow).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...results.select import Row, describe, device_of, environment_differences, newest, with_slowness
from .compare import NOISY, is_noisy, time_interval
from .statistics import Interval
from .thresholds import QUANTITIES, Limits, Quantity, Thresholds

CONFIDENCE = 0.90
"""Of the two-sided interval, each end of which is a one-sided bound of 95 %."""

BROKEN = ("oom", "crash", "timeout", "error", "incorrect")
NOT_IN_RUN = "the run has no such case"
BUSY = "measured on a busy machine"
VERDICTS = ("failed", "missing", "regression", "unclear", NOISY, "improved", "fixed", "new", "not measured", "ok")
"""Of a case, the worst first."""

FAILING = ("failed", "missing", "regression")
COMPARED = ("failed", "regression", "unclear", "improved", "ok")
"""Verdicts on cases that the baseline measured and the run tried; of a noisy time nothing can be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One quantity of a case.

    Attributes:
        name: its column, see thresholds.QUANTITIES.
        ratio: new / old, with the ends of its interval (equal to the ratio where there are no samples).
        limit: the ratio tolerated.
        verdict: ok, improved, regression, unclear or :data:`.compare.NOISY`.
    """

    name: str
    old: float
    new: float
    ratio: float
    low: float
    high: float
    limit: float
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The verdict on a case, one of :data:`VERDICTS`, and why."""

    row: Row
    verdict: str
    reason: str
    metrics: tuple[Metric, ...] = ()
    measured_again: bool = False

    @property
    def time(self) -> Metric | None:
        """The time on the device, where it was compared."""
        return next((metric for metric in self.metrics if metric.name == "time_ms"), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What :func:`check` found.

    Attributes:
        cases: the worst first; those of the run, and those of the baseline that the run lacks.
        environment: what differs between the two, a line each.
        failing: the verdicts that fail the check.
        planned: cases that the run planned, whatever their status.
        min_compared: share of them that must be compared.
        unchanged: whether the run's rows are the baseline's.
    """

    cases: tuple[CaseResult, ...]
    accelerator: str
    environment: tuple[str, ...]
    failing: tuple[str, ...]
    planned: int
    min_compared: float
    unchanged: bool

    @property
    def counts(self) -> dict[str, int]:
        """How many cases have which verdict."""
        counted = Counter(case.verdict for case in self.cases)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The cases that fail the check."""
        return tuple(case for case in self.cases if case.verdict in self.failing)

    @property
    def compared(self) -> int:
        """How many cases were compared."""
        return sum(case.verdict in COMPARED for case in self.cases)

    @property
    def too_few(self) -> bool:
        """Whether fewer cases were compared than a verdict needs: none, or less than the share asked for."""
        return not self.compared or self.compared / self.planned < self.min_compared

    @property
    def passed(self) -> bool:
        """Whether enough cases were compared and none fails the check."""
        return not self.failures and not self.too_few


def on_one_device(new: Sequence[Row], old: Sequence[Row]) -> tuple[str, list[Row]]:
    """Return the device of the new rows and the old rows of that device.

    ValueError where a side is empty, the new rows are of several devices, or the baseline has none of theirs.
    """
    if not new or not old:
        raise ValueError(f"the run and the baseline must have rows, got {len(new)} and {len(old)}")
    devices = sorted({device_of(row) for row in new})
    if len(devices) > 1:
        raise ValueError(f"the run must be of one accelerator, got {', '.join(devices)}")
    kept = [row for row in old if device_of(row) == devices[0]]
    if not kept:
        others = ", ".join(sorted({device_of(row) for row in old}))
        raise ValueError(f"the run was measured on {devices[0]} and the baseline on {others}: they are not comparable")
    return devices[0], kept


def check(
    new: Sequence[Row],
    old: Sequence[Row],
    thresholds: Thresholds,
    *,
    allow_missing: bool = False,
    fail_unclear: bool = False,
    min_compared: float = 0.5,
    left: int = 0,
) -> CheckResult:
    """Compare a run with a baseline; of cases that were measured repeatedly the newest row counts.

    Args:
        allow_missing: whether cases of the baseline may be absent from the run.
        fail_unclear: whether unclear cases fail the check.
        min_compared: share of the run's cases, 0 to 1, that must be compared; never less than one case.
        left: cases that the run planned and has no row of.

    Raises:
        ValueError: the sides are of different accelerators, or have no case in common.
    """
    device, kept = on_one_device(new, old)
    after, before = map(newest, with_slowness(new, kept))
    common = [case_id for case_id in before if case_id in after]
    if not common:
        counts = f"{len(after)} and {len(before)} others"
        raise ValueError(f"the run and the baseline must have a case in common, got {counts}")
    results = [_judge(after[each], before[each], thresholds) for each in common]
    lost = (row for each, row in before.items() if each not in after and row["status"] == "ok")
    results += [CaseResult(row=row, verdict="missing", reason=NOT_IN_RUN) for row in lost]
    added = (row for each, row in after.items() if each not in before)
    results += [CaseResult(row=row, verdict="new", reason="the baseline has no such case") for row in added]
    failing = tuple(verdict for verdict in FAILING if verdict != "missing" or not allow_missing)
    failing += ("unclear", NOISY) if fail_unclear else ()

    def place(case: CaseResult) -> tuple[bool, int, float]:
        beyond = max((metric.ratio / metric.limit for metric in case.metrics), default=0.0)
        return case.verdict not in failing, VERDICTS.index(case.verdict), -beyond

    return CheckResult(
        cases=tuple(sorted(results, key=place)),
        accelerator=device,
        environment=tuple(environment_differences([(before[each], after[each]) for each in common])),
        failing=failing,
        planned=len(after) + left,
        min_compared=min_compared,
        unchanged=after == before,
    )


def _judge(new: Row, old: Row, thresholds: Thresholds) -> CaseResult:
    was_ok, is_ok = old["status"] == "ok", new["status"] == "ok"
    if not (was_ok and is_ok):
        verdict = "fixed" if is_ok else "not measured"
        if was_ok:
            verdict = "failed" if new["status"] in BROKEN else "missing"
        why = f"was {old['status']}, is {new['status']}" + (f": {new['reason']}" if new["reason"] else "")
        return CaseResult(row=new, verdict=verdict, reason=why)
    limits = thresholds.limits(new)
    found = (each.what_is_wrong(new, old) for each in QUANTITIES if limits[each.limit] is not None)
    if wrong := sorted(filter(None, found)):
        verdict, why = wrong[0]
        return CaseResult(row=new, verdict=verdict, reason=why)
    metrics = tuple(_metrics(new, old, limits))
    verdict = min((metric.verdict for metric in metrics), key=VERDICTS.index, default="ok")
    reason = "; ".join(_in_words(metric) for metric in metrics if metric.verdict == verdict != "ok")
    if verdict == NOISY:
        reason += f", {BUSY} (baseline | run): {old['noise'] or 'idle'} | {new['noise'] or 'idle'}"
    if new["suspect"] and not old["suspect"] and verdict in ("ok", "improved"):
        # Faster than the hardware allows is no improvement to rely on.
        verdict, reason = "unclear", f"suspect: {new['suspect']}"
    return CaseResult(row=new, verdict=verdict, reason=reason, metrics=metrics)


def _metrics(new: Row, old: Row, limits: Limits) -> Iterable[Metric]:
    for quantity in QUANTITIES:
        tolerated, before, after = limits[quantity.limit], old[quantity.column], new[quantity.column]
        if None in (tolerated, before, after) or (quantity.where and new[quantity.where] != old[quantity.where]):
            continue
        floor = limits.get(quantity.floor) or 0.0
        if not before:
            # There is no ratio to 0: the new value is compared with the least one that counts.
            before, after = floor, max(after, floor)
        if before:
            interval = time_interval(new, old, CONFIDENCE) if quantity.column == "time_ms" else None
            metric = _metric(quantity, after, before, max(tolerated, floor / before), interval)
            # Load lengthens times: a run that is no slower in spite of it has no regression.
            noisy = quantity.is_time and is_noisy(new, old) and new != old and (metric.verdict != "ok" or old["noise"])
            yield dataclasses.replace(metric, verdict=NOISY) if noisy else metric


def _metric(quantity: Quantity, new: float, old: float, tolerated: float, interval: Interval | None) -> Metric:
    """Return the verdict on growth: beyond, within or across what is tolerated; improved by more than that.

    Args:
        interval: of the ratio, where there are samples.
    """
    ratio, limit = new / old, 1 + tolerated
    low, high = (interval.low, interval.high) if interval else (ratio, ratio)
    verdict = "ok"
    if low > limit or (quantity.exact and abs(ratio - 1) > tolerated):
        verdict = "regression"
    elif high > limit:
        verdict = "unclear"
    elif high < 1 / limit and not quantity.exact:
        verdict = "improved"
    return Metric(name=quantity.column, old=old, new=new, ratio=ratio, low=low, high=high, limit=limit, verdict=verdict)


def _in_words(metric: Metric) -> str:
    change = f"{metric.name} {metric.old:.5g} -> {metric.new:.5g}, {metric.ratio:.3f}x"
    if metric.low != metric.high:
        ends = f"{metric.low:.3f} to {metric.high:.3f}" if math.isfinite(metric.high) else "too few samples"
        change += f" ({ends})"
    return f"{change}, tolerated {metric.limit:.3f}x" if metric.verdict in ("regression", "unclear") else change


def worth_measuring_again(found: CheckResult) -> list[Row]:
    """Return the rows that a second measurement may settle: unclear and noisy times, and times that regressed.

    A real slowdown shows again; a shift of the whole run is not likely to.
    """
    times, verdicts = {quantity.column for quantity in QUANTITIES if quantity.is_time}, ("unclear", NOISY, "regression")
    return [
        case.row
        for case in found.cases
        if any(metric.name in times and metric.verdict in verdicts for metric in case.metrics)
    ]


def summary(found: CheckResult) -> str:
    """Return the outcome in one line."""
    allowed = {verdict: " (allowed)" for verdict in FAILING if verdict not in found.failing}
    counted = ", ".join(f"{count} {verdict}{allowed.get(verdict, '')}" for verdict, count in found.counts.items())
    outcome = f"{'passed' if found.passed else 'FAILED'} on {found.accelerator}{', nothing changed' * found.unchanged}"
    line = f"{outcome}: {counted}"
    line += f"; compared {found.compared} of {found.planned} cases"
    if found.too_few:
        tried = [case for case in found.cases if case.reason != NOT_IN_RUN]
        others = (case for case in tried if case.verdict not in COMPARED)
        reasons = Counter(BUSY if case.verdict == NOISY else " ".join(case.reason.split()) for case in others)
        reasons["the run was stopped before"] = found.planned - len(tried)
        line += f", too few (--min-compared {found.min_compared:g}), mostly because: {reasons.most_common(1)[0][0]}"
    return line


def describe_case(case: CaseResult) -> str:
    """Return a case in a few words, marked where it was measured again."""
    return describe(case.row) + (" (measured again)" if case.measured_again else "")


def check_twice(
    new: Sequence[Row],
    old: Sequence[Row],
    thresholds: Thresholds,
    *,
    measure: Callable[[Sequence[Row]], Mapping[str, Row]],
    **options: Any,
) -> CheckResult:
    """Compare as :func:`check` does, and once more with what a second measurement may settle measured again.

    Args:
        measure: measures the cases of rows again and returns the new rows by case id, or none if it cannot.
        options: of :func:`check`.
    """
    found = check(new, old, thresholds, **options)
    unsettled = worth_measuring_again(found)
    again = measure(unsettled) if unsettled else {}
    if not again:
        return found
    found = check([*(row for row in new if row["case_id"] not in again), *again.values()], old, thresholds, **options)
    marked = (dataclasses.replace(case, measured_again=case.row["case_id"] in again) for case in found.cases)
    return dataclasses.replace(found, cases=tuple(marked))
