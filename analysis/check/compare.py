"""Two sets of results, case by case: ratio of times with a confidence interval, and a verdict.

The ratio is B's median time over A's, its interval the bootstrap's of the stored samples; docs/ci.md ("compare") says
which verdict follows. The interval is about the samples of these two runs. A whole run also differs from the next one
by a percent or so: the margin allows for that, and ``compare --live`` avoids it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...results.arguments import one_of
from ...results.select import (
    CASE_COLUMNS,
    SIZE_COLUMNS,
    Row,
    case_key,
    describe,
    describe_sizes,
    device_of,
    environment_differences,
    grouped,
    newest,
    with_slowness,
)
from .statistics import (
    CONFIDENCE,
    MIN_SAMPLES,
    UNKNOWN,
    Interval,
    geometric_mean_interval,
    interval_of,
    ratio_interval,
    resampled_in_turn,
    resampled_ratios,
)

MARGIN = 0.02
NOISY = "unclear: noisy"
SAME_ROW = Interval(low=1.0, high=1.0)
VERDICTS = ("faster", "slower", "same", "unclear", NOISY)
GROUP_COLUMNS = ("kernel", *CASE_COLUMNS)
BESIDE_COLUMNS = tuple(f"{side}_{name}" for name in ("host_ms", "sustained_ms", "energy_j") for side in "ab")
"""Columns of :func:`case_rows` that are shown but not judged: a call's time on the host and sustained, its energy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A case that both sides measured; the ratio is B's time over A's."""

    a: Row
    b: Row
    ratio: float
    interval: Interval
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """A case that cannot be compared: which side has it ("A", "B" or "both") and why not."""

    side: str
    row: Row
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The cases that share a group's values: their number, the geometric mean of their ratios, and their verdicts."""

    values: Mapping[str, Any]
    cases: int
    ratio: float
    interval: Interval
    verdicts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What :func:`compare` found; the last of ``groups`` holds every case."""

    pairs: tuple[Pair, ...]
    unmatched: tuple[Unmatched, ...]
    groups: tuple[Group, ...]
    environment: tuple[str, ...]
    margin: float


def time_interval(new: Row, old: Row, confidence: float = CONFIDENCE) -> Interval:
    """Return the interval of the ratio of two rows' times, from their rounds where they were timed in turn.

    Rows without samples fall back on their medians' intervals, which is wider; without these nothing is known. A row's
    ratio to itself is 1.
    """
    if new == old:
        return SAME_ROW
    if new["time_samples_ms"] and old["time_samples_ms"]:
        samples = new["time_samples_ms"], old["time_samples_ms"]
        in_turn = new.get("pair_id") is not None and new["pair_id"] == old.get("pair_id")
        if in_turn and len(samples[0]) == len(samples[1]) >= MIN_SAMPLES:
            of_new, of_old = resampled_in_turn(*samples)
            return interval_of(of_new / of_old, confidence)
        return ratio_interval(new["time_samples_ms"], old["time_samples_ms"], confidence=confidence)
    ends = [row[name] for row in (new, old) for name in ("time_ci_low_ms", "time_ci_high_ms")]
    if any(end is None for end in ends) or ends[2] <= 0:
        return UNKNOWN
    return Interval(low=ends[0] / ends[3], high=ends[1] / ends[2])


def is_noisy(*rows: Row) -> bool:
    """Return whether a row was measured on a busy machine."""
    return any(row["noise"] for row in rows)


def judge(interval: Interval, margin: float, *, noisy: bool = False) -> str:
    """Return faster, slower, same or unclear, as docs/ci.md says."""
    if interval.low >= 1 / (1 + margin) and interval.high <= 1 + margin:
        return "same"
    if noisy:
        return NOISY
    if interval.high < 1:
        return "faster"
    return "slower" if interval.low > 1 else "unclear"


def compare(
    a: Sequence[Row],
    b: Sequence[Row],
    *,
    by: Sequence[str] = ("op", "mode"),
    ignore: Sequence[str] = (),
    margin: float = MARGIN,
) -> Comparison:
    """Match two sets of rows by case and compare their times.

    Where the sides have no implementation in common, cases match without it. Where several rows of a side match, as
    they do when ``ignore`` names the chunk length, the fastest counts; of one case measured repeatedly, the newest row.

    Args:
        by: columns that group the geometric means.
        ignore: columns of a case by which cases need not agree.
        margin: relative difference that counts as equal.

    Raises:
        ValueError: a side is empty, an unknown column, a margin that is no positive number, or no case matches.
    """
    for name, given, known in (("by", by, GROUP_COLUMNS), ("ignore", ignore, CASE_COLUMNS)):
        for column in given:
            one_of(name, column, known)
    if not 0 < margin < math.inf:
        raise ValueError(f"margin must be a positive number such as 0.02, got {margin}")
    if not a or not b:
        raise ValueError(f"both sides must have rows, got {len(a)} and {len(b)}")
    versions = [{row["triton_version"] for row in side} for side in (a, b)]
    several = versions[0].isdisjoint(versions[1])
    if several:
        a, b = of_one_run(a, b)
    a, b = with_slowness(a, b)
    columns = key_columns((a, b), ignore)
    sides = (by_key(a, columns), by_key(b, columns))
    pairs, unmatched = [], []
    for first, second in ((first, sides[1][key]) for key, first in sides[0].items() if key in sides[1]):
        if is_measured(first) and is_measured(second):
            interval = time_interval(second, first)
            ratio = second["time_ms"] / first["time_ms"]
            verdict = judge(interval, margin, noisy=is_noisy(first, second))
            pairs.append(Pair(a=first, b=second, ratio=ratio, interval=interval, verdict=verdict))
        else:
            unmatched.append(_failed(first, second))
    for side, own, others in (("A", *sides), ("B", *reversed(sides))):
        unmatched += _only_on(side, own, others, columns)
    if not pairs:
        reasons = Counter((each.side, each.reason) for each in unmatched)
        text = "; ".join(f"{count} of {side}: {reason}" for (side, reason), count in reasons.most_common(3))
        raise ValueError(f"no case of A matches one of B ({text}); --ignore COLUMN leaves a column out")
    environment = environment_differences([(pair.a, pair.b) for pair in pairs])
    if several and (apart := sum(pair.a["run_id"] != pair.b["run_id"] for pair in pairs)):
        environment.append(f"run: the sides of {apart} of {len(pairs)} cases are of different runs")
    return Comparison(
        pairs=tuple(pairs),
        unmatched=tuple(unmatched),
        groups=tuple(_groups(pairs, by)),
        environment=tuple(environment),
        margin=margin,
    )


def of_one_run(*sides: Sequence[Row]) -> list[list[Row]]:
    """Leave out the rows of runs that a side was not part of; where no run has all sides, return all rows."""
    shared = set.intersection(*({row["run_id"] for row in side} for side in sides))
    return [[row for row in side if not shared or row["run_id"] in shared] for side in sides]


def key_columns(sides: Sequence[Sequence[Row]], ignore: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that cases match by: the device and the implementation only where the sides share some."""
    apart = (n for n in ("impl", "device_accelerator") if not set.intersection(*({row[n] for row in s} for s in sides)))
    dropped = {*ignore, *apart}
    return tuple(name for name in (*CASE_COLUMNS, "device_accelerator") if name not in dropped)


def by_key(rows: Sequence[Row], columns: Sequence[str]) -> dict[tuple[Any, ...], Row]:
    """Return one row per key: newest of every case on a device, then the fastest that was measured."""
    latest = [row for group in grouped(rows, device_of).values() for row in newest(group).values()]
    by_key = grouped(latest, lambda row: case_key(row, columns))

    def time_ms(row: Row) -> float:
        return float(row["time_ms"]) if is_measured(row) else math.inf

    return {key: min(group, key=time_ms) for key, group in by_key.items()}


def is_measured(row: Row) -> bool:
    """Return whether a row has a time."""
    return row["status"] == "ok" and row["time_ms"] is not None


def _failed(a: Row, b: Row) -> Unmatched:
    """Return a case that a side, or both, could not measure, with their reasons."""
    failed = {side: row for side, row in (("A", a), ("B", b)) if not is_measured(row)}
    reasons = (
        f"{side} is {row['status']}" + (f": {row['reason']}" * bool(row["reason"])) for side, row in failed.items()
    )
    return Unmatched(side="both", row=b if set(failed) == {"A"} else a, reason="; ".join(reasons))


def _only_on(
    side: str, rows: Mapping[tuple[Any, ...], Row], others: Mapping[tuple[Any, ...], Row], columns: Sequence[str]
) -> Iterable[Unmatched]:
    """Yield the cases that the other side lacks; where it has one that differs in a single column, that is named."""
    other = "B" if side == "A" else "A"
    near: dict[tuple[int, tuple[Any, ...]], list[Any]] = {}
    for key in others:
        for index in range(len(columns)):
            near.setdefault((index, key[:index] + key[index + 1 :]), []).append(key[index])
    # Chunk length and implementation first: these are what users forget to leave out.
    order = sorted(range(len(columns)), key=lambda i: (columns[i] not in ("chunk_size", "impl", "op"), i))
    for key, row in rows.items():
        if key in others:
            continue
        reason = f"not in {other}"
        for index in order:
            if values := near.get((index, key[:index] + key[index + 1 :])):
                ordered = sorted(values, key=lambda v: (str(type(v)), v))
                listed = ", ".join("none" if v is None else str(v) for v in ordered)
                reason = f"{other} has it with {columns[index]} {listed} only"
                break
        yield Unmatched(side=side, row=row, reason=reason)


def _groups(pairs: Sequence[Pair], by: Sequence[str]) -> Iterable[Group]:
    groups = grouped(pairs, lambda pair: tuple(pair.a[name] for name in by))
    ordered = sorted(groups.items(), key=lambda item: [str(value) for value in item[0]])
    return [*(_group(dict(zip(by, values, strict=True)), group) for values, group in ordered), _group({}, pairs)]


def _group(values: Mapping[str, Any], pairs: Sequence[Pair]) -> Group:
    samples = [[pair.b["time_samples_ms"] or (), pair.a["time_samples_ms"] or ()] for pair in pairs]
    known = all(len(side) >= MIN_SAMPLES for sides in samples for side in sides)
    counted = Counter(pair.verdict for pair in pairs)
    interval = geometric_mean_interval([resampled_ratios(*sides) for sides in samples]) if known else UNKNOWN
    if all(pair.a == pair.b for pair in pairs):
        interval = SAME_ROW
    return Group(
        values=values,
        cases=len(pairs),
        ratio=math.exp(sum(math.log(pair.ratio) for pair in pairs) / len(pairs)),
        interval=interval,
        verdicts={name: counted[name] for name in VERDICTS},
    )


def case_rows(found: Comparison) -> list[dict[str, Any]]:
    """Return the compared cases as rows to print; what differs between the sides is shown as A | B.

    What is beside the times has columns only where a row has it.
    """
    rows = [
        {
            **{name: _both(pair.a[name], pair.b[name]) for name in ("op", "impl", "mode")},
            "case": _both(describe_sizes(pair.a), describe_sizes(pair.b)),
            **_times(pair),
        }
        for pair in found.pairs
    ]
    return _without_empty(rows, BESIDE_COLUMNS)


def _without_empty(rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows without those of the columns that say nothing in any row."""
    absent = {name for name in columns if not any(row[name] for row in rows)}
    return [{name: value for name, value in row.items() if name not in absent} for row in rows]


def brief_rows(found: Comparison) -> list[dict[str, Any]]:
    """Return the compared cases that differ as rows for people, the largest difference first."""
    changed = sorted((p for p in found.pairs if p.verdict != "same"), key=lambda p: -abs(math.log(p.ratio)))
    # The title says what all cases have in common.
    names = [name for name in ("op", "impl", "mode") if len({(p.a[name], p.b[name]) for p in found.pairs}) > 1]
    return [
        {
            **{name: _both(pair.a[name], pair.b[name]) for name in names},
            "case": describe_sizes(pair.a) + _unlike(pair),
            "a_ms": pair.a["time_ms"],
            "b_ms": pair.b["time_ms"],
            "ratio": pair.ratio,
            "verdict": pair.verdict,
        }
        for pair in changed
    ]


def _unlike(pair: Pair) -> str:
    """Return in which sizes and dtypes B differs from A."""
    names = (*SIZE_COLUMNS, "dtype", "state_dtype")
    unlike = [f"{name} {pair.b[name]}" for name in names if pair.a[name] != pair.b[name] and pair.b[name] is not None]
    return f" | {', '.join(unlike)}" if unlike else ""


def in_words(found: Comparison) -> str:
    """Return how B compares with A over all cases, in one line."""
    every, counts = found.groups[-1], found.groups[-1].verdicts
    known = math.isfinite(every.interval.high)
    interval = f" ({every.interval.low:.4g} to {every.interval.high:.4g})" if known else ""
    verdicts = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    unmatched = f"; {len(found.unmatched)} not compared" if found.unmatched else ""
    cases = f"{every.cases} case{'s' * (every.cases != 1)}"
    return f"B takes {every.ratio:.4g}{interval} times as long as A, of {cases} {verdicts}{unmatched}"


def _times(pair: Pair) -> dict[str, Any]:
    times = {"a_ms": pair.a["time_ms"], "b_ms": pair.b["time_ms"]}
    beside = {name: (pair.a if name[0] == "a" else pair.b)[name[2:]] for name in BESIDE_COLUMNS}
    return {**times, "ratio": pair.ratio, **ends(pair.interval), "verdict": pair.verdict, **beside}


def group_rows(found: Comparison) -> list[dict[str, Any]]:
    """Return the geometric means as rows to print; noisy cases have a column only where there are any."""
    first = next(iter(found.groups[0].values), "group")
    return _without_empty([{**(group.values or {first: "all"}), **_mean(group)} for group in found.groups], (NOISY,))


def _mean(group: Group) -> dict[str, Any]:
    return {"cases": group.cases, "ratio": group.ratio, **ends(group.interval), **group.verdicts}


def unmatched_rows(found: Comparison, *, brief: bool = False) -> list[dict[str, Any]]:
    """Return what could not be compared as rows to print, equal reasons together, the most cases first.

    Args:
        brief: whether reasons are equal for all operations, implementations, modes and values of a column.
    """
    names = () if brief else ("op", "impl", "mode")
    another, say = re.compile(r"(has it with) (\S+) .*"), describe if brief else describe_sizes

    def cause(each: Unmatched) -> tuple[str, ...]:
        reason = another.sub(r"\1 another \2", each.reason) if brief else each.reason
        return each.side, *(each.row[name] for name in names), reason

    causes = sorted(grouped(found.unmatched, cause).items(), key=lambda item: -len(item[1]))
    return [
        {"in": side, **dict(zip(names, values, strict=True)), "cases": len(alike), "reason": reason,
         "such as": say(alike[0].row)}
        for (side, *values, reason), alike in causes
    ]  # fmt: skip


def as_dict(found: Comparison) -> dict[str, Any]:
    """Return a comparison as one JSON object."""
    return {
        "ratio": "time of B / time of A",
        "margin": found.margin,
        "confidence": CONFIDENCE,
        "cases": [{"a": _identity(pair.a), "b": _identity(pair.b), **_times(pair)} for pair in found.pairs],
        "groups": [{"group": dict(group.values), **_mean(group)} for group in found.groups],
        "unmatched": [
            {"side": each.side, "case": describe(each.row), "case_id": each.row["case_id"], "reason": each.reason}
            for each in found.unmatched
        ],
        "environment": list(found.environment),
    }


def _identity(row: Row) -> dict[str, Any]:
    names = ("case_id", "run_id", "git_commit", "device_accelerator", *CASE_COLUMNS)
    return {name: row[name] for name in names if row[name] is not None}


def ends(interval: Interval) -> dict[str, float | None]:
    """Return the ends as columns; an unknown interval has none."""
    known = math.isfinite(interval.high)
    return {"low": interval.low if known else None, "high": interval.high if known else None}


def _both(first: Any, second: Any) -> str:
    return str(first) if first == second else f"{first} | {second}"
