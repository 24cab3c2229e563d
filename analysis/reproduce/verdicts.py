"""Verdicts: what stored rows, or the counts, say of a claim.

value: the metric at each point; a document's time holds from a tenth below that measured on its device to
:data:`OTHER_SOFTWARE` times that, and without such a row in the 90 % interval of ours as the model translates it.
ratio: one side's over another's; of four sides, the first ratio over the second. Times are of rows that were timed in
turn, as a crossover's are, and the ratio is decided where both ends of its interval come to the same. span: the largest
over the smallest along an axis. slope: d log metric / d log axis from each value to the next. crossover: the smallest
value from which on one side is below the other. best: the value with the smallest metric.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...results.schema import CASE_COLUMNS, SIZE_COLUMNS, ErrorsRow, Record, TrainingRow
from ...results.select import Row, grouped, load_rows, short_size
from ...results.store import read_file, result_files, row_set
from ..accelerators.known import get_accelerator
from ..check.statistics import MIN_SAMPLES, UNKNOWN, Interval, interval_of, resampled_in_turn
from ..counts import count, count_case, kv_savings
from ..derive import ONCE_SINCE
from ..model.answers import Question
from ..model.chunk_size import coefficients
from ..model.fit import Fits, case_of
from ..model.prediction import stored_rows
from ..model.runtime_model import runtime_model
from . import training
from .entries import ERRORS, MEASURED, PLANNED_KEYS, TRAINED, Asked, Claim, Terms

HOLDS, PARTLY, UNDECIDED, NOT, UNTESTABLE, UNMEASURED = VERDICTS = (
    "holds", "holds in part", "not decided", "does not hold here", "not testable here", "not measured",
)  # fmt: skip
APART = "not measured together"
"""What is said of sides that have rows, but none that were timed in turn (pair_id)."""

TIMED = ("time", "tokens_per_s", "tflops")
"""Metrics whose ratios and crossovers are of pairs."""

STORED = {"time": "time_ms", "memory": "peak_memory_bytes", "workspace": "workspace_bytes", "rel_error": "rel_error"}
"""Metric -> the column that holds it."""

COLUMNS = (
    "kernel", *CASE_COLUMNS, *STORED.values(), "case_id", "provider", "status", "noise", "suspect", "measured_at",
    "device_accelerator", "input_bytes", "pair_id", "time_samples_ms",
)  # fmt: skip
ROW_SETS = (Record, ErrorsRow, TrainingRow)
"""What claims are held against."""

OTHER_SOFTWARE = 1.5
"""In other versions, compiled by another Triton, a kernel takes at most so many times as long as the slowest rate
explains, with 95 % chance; estimated from what was published of an H100, see :func:`.published.excess`."""

UNITS = {"time": " ms", "model_ms": " ms", "tflops": " TFLOP/s"}
Point = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLine:
    """What one comparison of a claim came to.

    Attributes:
        point: where, without the axis that is followed.
        ours: the outcome; None where a row is missing, infinite for a crossover that is not there.
        values: what it is the outcome of, by names: the sides of a ratio, the device that a time is translated from,
            else values of the axis.
        document: the bound, in words.
        holds: 1, 0, or 0.5 for a crossover past its bound; None where nothing was measured.
        interval: of a time that is translated to the document's device.
        ends: of a ratio of a pair: its 95 % interval.
        decided: whether it comes to the same at both of these ends.
        there: the time that was measured on that device.
    """

    point: Point
    ours: Any = None
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    document: str = ""
    holds: float | None = None
    interval: tuple[float, float] | None = None
    ends: tuple[float, float] | None = None
    decided: bool = True
    there: float | None = None

    @property
    def outcome(self) -> Any:
        """What is held against the document's number."""
        return self.ours if self.there is None else self.there


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A claim's verdict, with the reason in a sentence, and what was compared.

    Attributes:
        missing: (side, point, why) of what no row says: not measured, or a status such as oom.
    """

    asked: Asked
    verdict: str
    reason: str
    ours: str = ""
    lines: tuple[ClaimLine, ...] = ()
    missing: tuple[tuple[str, Point, str], ...] = ()

    @property
    def document(self) -> str:
        """The document's number, of translated times the least and the greatest."""
        claim = self.asked.claim
        if isinstance(claim.states, tuple) and any(line.interval for line in self.lines):
            return " to ".join(shown(claim, bound(claim.states)) for bound in (min, max))
        return claim.says or ", ".join(dict.fromkeys(line.document for line in self.lines))


class Store:
    """The rows that claims are held against: of each case the newest good one, of ratios the newest pair.

    ``device`` is the one asked for, by default the one with most rows; only ``wanted`` rows are taken.

    Attributes:
        paired: whether the sides of a ratio must have been timed in turn.
    """

    paired = True

    def __init__(
        self, results: Sequence[Path], device: str | None = None, wanted: Callable[[Row], bool] = lambda _: True
    ) -> None:
        """Read files and folders; ValueError for one that is not there or holds no rows of :data:`ROW_SETS`."""
        self.fitted: dict[tuple[str, str, str], tuple[list[dict[str, Any]], Fits]] = {}
        files = result_files(results, ROW_SETS) if results else []
        self.sweeps = [file for file in files if row_set(file)[0] is Record]
        tables = [read_file(file, row_set(file)[0]) for file in files if file not in self.sweeps]
        rows = load_rows(self.sweeps, (*COLUMNS, "git_commit")) if self.sweeps else []
        others = [row for each in tables for row in each.to_pylist()]
        most = Counter(row["device_accelerator"] for row in (rows or others) if row["device_accelerator"])
        self.device = device or next((key for key, _ in most.most_common(1)), "")
        others = [row for row in others if row["device_accelerator"] == self.device and wanted(row)]
        self.others = sorted(others, key=itemgetter("measured_at"))
        rows = [row for row in rows if wanted(row)]
        self.cases = _by_case(rows)
        pairs = (row for row in rows if row["device_accelerator"] == self.device and row["pair_id"] is not None)
        groups = grouped(pairs, itemgetter("pair_id")).values()
        # Group by group, the newest first.
        self.pairs = sorted(groups, key=lambda group: max(row["measured_at"] for row in group), reverse=True)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Store:
        """Return the store of rows of one run, whose sides may all be compared."""
        store = cls([], next((row["device_accelerator"] or "" for row in rows), ""))
        store.cases, store.paired = _by_case(rows), False
        return store

    def other(self, metric: str, terms: Terms) -> float | str:
        """Return a metric of the newest row that terms select: an error's mean over the draws, or one of a training."""
        rows = [row for row in self.others if _matches(row, terms)]
        if rows and metric in ERRORS:
            return rows[-1][f"{metric}_mean"]
        if rows and metric != "curve_distance":
            said = training.spikes if metric == "spikes" else training.gradient_spread
            return said(rows[-1]["gradient_norms"])
        alike = {key: value for key, value in terms.items() if key != "seed"} | {"impl": training.REFERENCE}
        references = {row["seed"]: row["losses"] for row in self.others if _matches(row, alike)}
        if not rows or len(references) < 2 or terms["seed"] not in references:
            return UNMEASURED
        return training.curve_distance(rows[-1]["losses"], references, int(terms["seed"]))

    def row(self, terms: Terms, device: str | None = None) -> Row | str:
        """Return the fastest row that terms select, or why there is none: not measured, or a status."""
        return _fastest(self.cases.get((device or self.device, terms["op"], terms["mode"]), []), terms)

    def candidates(self, terms: Terms) -> list[Row]:
        """Return the rows that may be the fastest that terms select: within a tenth of it, three at most."""
        cases = self.cases.get((self.device, terms["op"], terms["mode"]), [])
        wanted = _selected(terms)
        ok = [row for row in cases if row["status"] == "ok" and _matches(row, wanted)]
        ok.sort(key=itemgetter("time_ms"))
        return [row for row in ok[:3] if row["time_ms"] <= 1.1 * ok[0]["time_ms"]]

    def together(self, sides: Sequence[Terms]) -> list[Row] | None:
        """Return the rows that sides select, each side's fastest, of the newest that were timed in turn, or None.

        Each is of a case that may be the fastest of all that the side selects, not just of those in turn.
        """
        cases = [{row["case_id"] for row in self.candidates(terms)} for terms in sides]
        for rows in self.pairs:
            found = [_fastest(rows, terms) for terms in sides]
            if all(not isinstance(row, str) and row["case_id"] in may for row, may in zip(found, cases, strict=True)):
                return found  # type: ignore[return-value]
        return None


def _by_case(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Return device, operation and mode -> of each case the newest row of an idle machine, else measured, else any."""

    def quality(row: Row) -> tuple[bool, bool, str]:
        return row["status"] == "ok", not (row["noise"] or row["suspect"]), row["measured_at"]

    cases = grouped(rows, itemgetter("device_accelerator", "case_id")).values()
    best = (max(rows, key=quality) for rows in cases)
    return grouped(best, lambda row: (row["device_accelerator"] or "", row["op"], row["mode"]))


def _fastest(cases: Iterable[Row], terms: Terms) -> Row | str:
    """Return the fastest row that terms select, or why there is none."""
    wanted = _selected(terms)
    rows = [row for row in cases if _matches(row, wanted)]
    ok = [row for row in rows if row["status"] == "ok"]
    return min(ok, key=itemgetter("time_ms")) if ok else rows[0]["status"] if rows else UNMEASURED


def _selected(terms: Terms) -> dict[str, Any]:
    """Return the columns, with their values, that terms ask of a row."""
    return {"state_dtype": "fp32", **{key: value for key, value in terms.items() if key not in PLANNED_KEYS}}


def memory_bytes(row: Row) -> int | None:
    """Return the peak of one call above its inputs, None where it was not measured."""
    known = row["peak_memory_bytes"] is not None and row["input_bytes"] is not None
    return row["peak_memory_bytes"] - row["input_bytes"] if known else None


def _matches(row: Row, wanted: Terms) -> bool:
    """Return whether a row has the values wanted; outside packages leave the dtype of states null."""
    return all(
        row.get(name) == value or (name == "state_dtype" and row[name] is None) for name, value in wanted.items()
    )


def evaluate(asked: Asked, store: Store) -> Found:
    """Return the verdict on a claim; ValueError where what is counted lacks a size, or has no such name."""
    claim = asked.claim
    if claim.not_testable or claim.unmeasured:
        verdict = UNTESTABLE if claim.not_testable else UNMEASURED
        return Found(asked=asked, verdict=verdict, reason=claim.not_testable or claim.unmeasured or "")
    values: dict[tuple[str, tuple[Any, ...]], float | None] = {}
    intervals: dict[tuple[Any, ...], Interval] = {}
    missing = []
    for point in asked.points():
        key, terms = tuple(point.values()), {side: asked.terms(side, point) for side in claim.sides}
        pair = _pair(asked, terms, store)
        if pair is None:
            missing.append((claim.sides[-1], point, APART))
            values |= {(side, key): None for side in claim.sides}
            continue
        if pair and claim.kind == "ratio" and len(pair) == len(claim.sides):
            intervals[key] = _interval(asked, [pair[side] for side in claim.sides])
        for side in claim.sides:
            try:
                value = _metric(asked, terms[side], store, pair.get(side))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{asked.id}, side {side}: {error}") from error
            if isinstance(value, str):
                missing.append((side, point, value))
            values[side, key] = None if isinstance(value, str) else value
    lines: Iterable[ClaimLine] = _compared(asked, values, intervals)
    lacking = tuple(missing)
    if claim.kind == "value" and claim.metric == "time" and asked.document.device == store.device:
        lines = [dataclasses.replace(line, there=line.ours) for line in lines]
    elif claim.kind == "value" and claim.metric == "time" and store.sweeps:
        lines = [_translated(asked, line, store) for line in lines]
        # What was not measured is fitted, and --run may still measure it.
        lacking = () if any(line.interval for line in lines) else lacking
    lines = tuple(judged(claim, line, n) for n, line in enumerate(lines))
    return dataclasses.replace(_verdict(asked, lines, lacking), missing=tuple(missing))


def _pair(asked: Asked, terms: Mapping[str, dict[str, Any]], store: Store) -> dict[str, Row] | None:
    """Return side -> row of what was timed in turn, for those sides that need it; None where nothing was.

    None needs it where a side has no row at all, or one case is all that is measured.
    """
    claim = asked.claim
    if not (store.paired and claim.kind in ("ratio", "crossover")):
        return {}
    timed = {side: each for side, each in terms.items() if each.get("metric", claim.metric) in TIMED}
    cases = {row if isinstance(row, str) else row["case_id"]: row for row in map(store.row, timed.values())}
    if len(cases) < 2 or any(isinstance(row, str) for row in cases.values()):
        return {}
    found = store.together(list(timed.values()))
    return None if found is None else dict(zip(timed, found, strict=True))


def _interval(asked: Asked, rows: Sequence[Row]) -> Interval:
    """Return the 95 % interval of a ratio of two or four rows that were timed in turn."""
    samples = [row["time_samples_ms"] for row in rows]
    if len({len(each) for each in samples}) > 1 or len(samples[0]) < MIN_SAMPLES:
        return UNKNOWN
    medians: list[Any] = [*resampled_in_turn(*samples), 1.0, 1.0]
    a, b, c, d = medians[:4]
    ratios = a * d / (b * c)
    if asked.claim.metric == "time":
        return interval_of(ratios)
    # Of rates the ratio is the other way round, times that of their work.
    rates = [_metric(asked, {}, Store.of(rows), row) for row in rows]
    work = [0.0 if isinstance(rate, str) else rate * row["time_ms"] for rate, row in zip(rates, rows, strict=True)]
    e, f, g, h = (*work, 1.0, 1.0)[:4]
    return interval_of(e * h / (f * g) / ratios)


def apart(found: Sequence[Found], store: Store) -> list[list[Row]]:
    """Return the rows, in groups, whose cases must be timed in turn before claims can be judged; a case is in one.

    Groups whose calls take the least come first: what a time limit cuts off are few.
    """
    groups: list[dict[str, Row]] = []
    for each in found:
        for _, point, why in each.missing:
            if why == APART:
                sides = [each.asked.terms(side, point) for side in each.asked.claim.sides]
                timed = [terms for terms in sides if terms.get("metric", each.asked.claim.metric) in TIMED]
                new = {row["case_id"]: row for terms in timed for row in store.candidates(terms)}
                for other in [group for group in groups if new.keys() & group.keys()]:
                    groups.remove(other)
                    new |= other
                groups.append(new)
    return sorted(([*each.values()] for each in groups), key=lambda group: sum(row["time_ms"] for row in group))


def _metric(asked: Asked, terms: dict[str, Any], store: Store, row: Row | str | None = None) -> float | str:
    """Return a side's metric at a point, of ``row`` if it is given, or why there is none."""
    metric = terms.pop("metric", asked.claim.metric)
    if metric in ERRORS or metric in TRAINED:
        return store.other(metric, terms)
    if metric not in MEASURED:
        return _counted(metric, **terms)
    row = row or store.row(terms)
    if isinstance(row, str):
        return row
    if metric in STORED or metric == "allocated":
        # An older row's memory holds a gradient twice.
        twice = metric == "memory" and row["mode"] == "fwbw" and row["measured_at"] < ONCE_SINCE
        value = row[STORED[metric]] if metric in STORED else memory_bytes(row)
        return UNMEASURED if twice or value is None else value
    if metric == "tokens_per_s":
        return 1e3 * row["batch"] * row["seq_len"] / row["time_ms"]
    counted = count_case(*case_of(row, row["mode"], row["dtype"]))
    if counted is None:
        return "not counted"
    if metric == "tflops":
        return counted.flops / (row["time_ms"] * 1e9)
    model = runtime_model(counted, get_accelerator(store.device), row["dtype"])
    return row["time_ms"] / model.upper_ms if metric == "over_model" else model.lower_ms / row["time_ms"]


def _counted(metric: str, *, mode: str, dtype: str, device: str = "h100_sxm", **terms: Any) -> float:
    """Return what is counted, modelled or computed of a side."""
    if metric == "number":
        return terms["number"]
    if metric in ("gain_before", "gain_after"):
        from ..transfer import gains

        return gains(**terms)[metric == "gain_after"]
    if metric in ("saved_share", "extra_tokens"):
        (model,) = (each for each in kv_savings.MODELS if each.name == terms["model"])
        saved = {each.baseline: each for each in kv_savings.savings(model, terms["seq_len"], dtype=dtype)}
        return getattr(saved[terms["baseline"]], metric)
    accelerator = get_accelerator(device)
    # V100 multiplies no bf16.
    balance = accelerator.intensity(dtype) or accelerator.intensity("fp16") or math.nan
    if metric == "balance":
        return balance
    if metric in ("flop_optimal", "runtime_optimal"):
        own = {name: terms[name] for name in ("op", "head_dim_qk", "head_dim_v", "state_dtype") if name in terms}
        closed = coefficients(**own, causal_factor=terms.get("causal_factor", 0.5), dtype=dtype, mode=mode)
        return closed.flop_optimal() if metric == "flop_optimal" else closed.runtime_optimal(balance)
    counted = count(terms.pop("op"), dtype=dtype, mode=mode, **terms)
    return runtime_model(counted, accelerator, dtype).upper_ms if metric == "model_ms" else getattr(counted, metric)


def _compared(
    asked: Asked,
    values: Mapping[tuple[str, tuple[Any, ...]], float | None],
    intervals: Mapping[tuple[Any, ...], Interval],
) -> Iterator[ClaimLine]:
    """Yield what is held against the bounds, line by line; ``intervals``: of ratios, by the values of their points."""
    claim, axis = asked.claim, asked.along
    points: list[tuple[Point, list[Any]]]
    points = [(point, [values[side, tuple(point.values())] for side in claim.sides]) for point in asked.points()]
    if claim.kind in ("value", "ratio"):
        for point, of in points:
            a, b, c, d = (*of, 1, 1, 1)[:4]
            ours = None if None in of else a if len(of) == 1 else a * d / (b * c or math.nan)
            named = {side: (value,) for side, value in zip(claim.sides, of, strict=True)}
            ends = intervals.get(tuple(point.values()))
            yield ClaimLine(point=point, ours=ours, values=named if len(of) > 1 else {}, ends=ends)
        return
    for group, members in grouped(points, lambda item: tuple((n, v) for n, v in item[0].items() if n != axis)).items():
        there: list[tuple[Any, Any]] = [(point[axis], of) for point, of in members if None not in of]
        if claim.kind == "slope" and len(there) > 1:
            for (x, (y,)), (x_next, (y_next,)) in itertools.pairwise(there):
                step = {**dict(group), axis: f"{_size(x)} to {_size(x_next)}"}
                ours = math.log(y_next / y) / math.log(x_next / x)
                yield ClaimLine(point=step, ours=ours, values={"from": (y,), "to": (y_next,)})
        else:
            ours = _followed(claim.kind, there) if len(there) > 1 else None
            yield ClaimLine(point=dict(group), ours=ours, values={_size(x): tuple(of) for x, of in there})


def _followed(kind: str, there: Sequence[tuple[Any, Any]]) -> Any:
    """Return what the sides' values along an axis come to: a factor, or a value of the axis."""
    if kind == "span":
        found = [of[0] for _, of in there]
        return max(found) / min(found)
    if kind == "best":
        return min(there, key=itemgetter(1))[0]
    below = (x for n, (x, _) in enumerate(there) if all(a < b for _, (a, b) in there[n:]))
    return next(below, math.inf)


def _translated(asked: Asked, line: ClaimLine, store: Store) -> ClaimLine:
    """Return a time as the model carries it to the document's device, with those measured here and there.

    The document's software takes from 1 to :data:`OTHER_SOFTWARE` times as long; the time is in the middle of all that.
    """
    terms = asked.terms(asked.claim.sides[0], line.point)
    if "impl" not in terms:
        raise ValueError(f"{asked.id}, side {asked.claim.sides[0]}: impl must be said, to translate its time")
    sizes = {name: terms[name] for name in SIZE_COLUMNS if name in terms and name != "chunk_size"}
    mode, dtype, device = key = terms["mode"], terms["dtype"], asked.document.device
    if key not in store.fitted:
        rows = [row for row in stored_rows(store.sweeps, mode, dtype) if row["device_accelerator"] == store.device]
        store.fitted[key] = rows, Fits(rows, mode, dtype, get_accelerator(device))
    rows, fits = store.fitted[key]
    question = Question(
        op=terms["op"], mode=mode, dtype=dtype, state_dtype=terms.get("state_dtype", "fp32"), sizes=sizes, rows=rows,
        accelerator=get_accelerator(device), fits=fits,
    )  # fmt: skip
    chunk = terms.get("chunk_size")
    found = question.answer(terms["impl"], None if chunk is None else str(chunk)).predicted
    interval = None if found.time_ms is None else (found.low_ms, OTHER_SOFTWARE * found.high_ms)
    ours = interval and math.sqrt(math.prod(interval))
    row = store.row(terms, device)
    there = None if isinstance(row, str) else row["time_ms"]
    return dataclasses.replace(line, values={store.device: (line.ours,)}, ours=ours, interval=interval, there=there)


def judged(claim: Claim, line: ClaimLine, n: int) -> ClaimLine:
    """Return a line with the document's bound and whether it holds."""
    bounds = claim.bounds(n)
    signs = zip(("", "≥ ", "≤ "), bounds.values(), strict=True)
    words = " ".join(f"{sign}{shown(claim, bound)}" for sign, bound in signs if bound is not None)
    states, least, most = bounds.values()
    if line.ours is None and line.there is None:
        return dataclasses.replace(line, document=words)

    def holds(ours: Any) -> float:
        if isinstance(ours, str):
            return float(ours == states)
        if line.there is not None and states is not None:
            near = (1 - claim.within) * line.there <= states <= OTHER_SOFTWARE * line.there
        elif line.interval and states is not None:
            near = line.interval[0] <= states <= line.interval[1]
        else:
            near = states is None or abs(ours - states) <= claim.within * (abs(states) or 1.0)
        found = float(near and (least is None or ours >= least) and (most is None or ours <= most))
        return 0.5 if claim.kind == "crossover" and not found and not math.isinf(ours) else found

    decided = len({holds(ours) for ours in (line.outcome, *(line.ends or ()))}) == 1
    return dataclasses.replace(line, document=words, holds=holds(line.outcome), decided=decided)


def _verdict(asked: Asked, lines: tuple[ClaimLine, ...], missing: tuple[tuple[str, Point, str], ...]) -> Found:
    """Return the verdict that lines come to, and the reason: which hold, which do not, and what has no row."""
    known = [line for line in lines if line.holds is not None]
    kinds = {line.holds if line.decided else None for line in known}
    verdict, parts = PARTLY, []
    if not known:
        verdict = UNMEASURED
    elif 0.0 in kinds and kinds <= {None, 0.0}:
        verdict = NOT
    elif kinds == {1.0} and not missing:
        verdict = HOLDS
    elif None in kinds and kinds <= {None, 1.0}:
        verdict = UNDECIDED
    for holds, word in ((1.0, "holds at "), (0.5, "later at "), (None, "not decided at "), (0.0, "not at ")):
        if some := [line for line in known if (line.holds if line.decided else None) == holds]:
            where, outcome = _axes([line.point for line in some]), _range(asked.claim, some)
            alone = f"{outcome} at {where}" if where else outcome
            parts.append(f"{word}{where} ({outcome})" if len(kinds) > 1 else alone)
    for (side, why), items in grouped(missing, itemgetter(0, 2)).items():
        where = _axes([point for _, point, _ in items])
        terms = asked.terms(side, items[0][1])
        name = terms.get("impl") or ("ours" if terms.get("provider") == "lrbench" else terms["op"])
        parts.append(f"{name} {why}{where and f' at {where}'}")
    ours = _range(asked.claim, known)
    if any(line.interval for line in known):
        measured = [ClaimLine(point={}, ours=of) for line in known for (of,) in line.values.values() if of]
        here = f"{_range(asked.claim, measured)} here, " if measured else ""
        not_there = [line for line in known if line.there is None]
        off = [max(line.ours / line.interval[0], line.interval[1] / line.ours) for line in not_there if line.interval]
        there = len(known) - len(not_there)
        how = [f"{there} of {len(known)} measured"] if there else []
        how += [f"{'the others' if there else 'each'} within a factor of {max(off):.2g}"] if off else []
        ours = f"{here}{ours} on {asked.document.device}, {', '.join(how)}"
    reason = "; ".join(dict.fromkeys(parts))
    return Found(asked=asked, verdict=verdict, reason=reason, ours=ours, lines=lines)


def _axes(points: Sequence[Point]) -> str:
    """Return points in words: each axis with its values, apart where they are no product of these."""
    values = {name: dict.fromkeys(point[name] for point in points) for name in points[0]}
    if math.prod(map(len, values.values())) != len(points):
        first = next(name for name, found in values.items() if len(found) > 1)
        return " and ".join(map(_axes, grouped(points, itemgetter(first)).values()))
    parts = []
    for name, found in values.items():
        texts = [*map(_size, found)]
        parts.append(f"{name} {'/'.join(texts) if len(texts) < 8 else f'{texts[0]} ... {texts[-1]}'}")
    return ", ".join(parts)


def _size(value: Any) -> str:
    return short_size(value) if isinstance(value, int) else str(value)


def shown(claim: Claim, value: Any, kind: str | None = None) -> str:
    """Return a number of a claim with its unit; ``kind``: of a side's metric, value."""
    kind = kind or claim.kind
    if value is None or isinstance(value, str):
        return value or ""
    if math.isinf(value):
        return "nowhere"
    if kind in ("crossover", "best"):
        return _size(int(value) if value == int(value) else value)
    if kind == "value" and claim.metric in ("memory", "workspace", "allocated"):
        return f"{value / 1e9:.3g} GB"
    digits, bounds = 4 if 0.9 < value < 1.1 else 3, [claim.at_least, claim.at_most]
    bounds = [bound for each in bounds for bound in (each if isinstance(each, tuple) else (each,))]
    # 1.198 beside a bound of 1.2 is no 1.2.
    while digits < 6 and value not in bounds and float(f"{value:.{digits}g}") in bounds:
        digits += 1
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"
    return text + (UNITS.get(claim.metric, "") if kind == "value" else "")


def _range(claim: Claim, lines: Sequence[ClaimLine]) -> str:
    """Return the outcomes of lines, the smallest and the largest."""
    ordered = sorted((line.outcome for line in lines), key=lambda value: (isinstance(value, str), value))
    texts = [*dict.fromkeys(shown(claim, each) for each in ordered)]
    return " to ".join(dict.fromkeys((*texts[:1], *texts[-1:])))
