"""Verdicts: what stored rows, or the counts, say of a claim.

value: the metric at each point. ratio: one side's over another's. span: the largest over the smallest along an axis.
slope: d log metric / d log axis from each value to the next. crossover: the smallest value from which on one side is
below the other. best: the value with the smallest metric.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...results.arguments import one_of
from ...results.schema import CASE_COLUMNS, SIZE_COLUMNS, ErrorsRow
from ...results.select import Row, grouped, load_rows, short_size
from ...results.store import read_file, row_set
from ..accelerators.known import Accelerator, get_accelerator
from ..counts import count, count_case, kv_savings
from ..model.answers import ask
from ..model.chunk_size import coefficients
from ..model.runtime_model import runtime_model
from .entries import ERRORS, MEASURED, Asked, Terms

HOLDS, PARTLY, NOT, UNTESTABLE, UNMEASURED = (
    "holds", "holds in part", "does not hold here", "not testable here", "not measured",
)  # fmt: skip
VERDICTS = (HOLDS, PARTLY, NOT, UNTESTABLE, UNMEASURED)
COLUMNS = (
    *CASE_COLUMNS, "case_id", "provider", "status", "time_ms", "peak_memory_bytes", "workspace_bytes", "rel_error",
    "noise", "suspect", "measured_at", "device_accelerator", "input_bytes",
)  # fmt: skip
Point = Mapping[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one comparison of a claim came to.

    Attributes:
        point: where, without the axis that is followed.
        ours: the outcome; None where a row is missing, and of a crossover that is not there.
        sides: each side's metric at the point, of value and ratio.
        document: the bound, in words.
        holds: 1, 0, or 0.5 for a crossover past its bound; None where nothing was measured.
        low, high: the interval of a time that is translated to the document's device.
    """

    point: Point
    ours: float | str | None = None
    sides: tuple[float | None, ...] = ()
    document: str = ""
    holds: float | None = None
    low: float | None = None
    high: float | None = None


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
    lines: tuple[Line, ...] = ()
    missing: tuple[tuple[str, Point, str], ...] = ()

    @property
    def document(self) -> str:
        """The document's number."""
        return self.asked.claim.says or " ".join(dict.fromkeys(line.document for line in self.lines))


class Store:
    """The rows of a device, the newest good one of each case."""

    def __init__(self, results: Sequence[Path], device: str) -> None:
        self.results, self.device = results, device
        rows = load_rows(results, COLUMNS, {"device_accelerator": device}) if results else []
        cases = grouped(rows, itemgetter("case_id")).values()
        self.cases = grouped(map(_newest, cases), itemgetter("op", "mode"))
        found = [file for path in results for file in ([path] if path.is_file() else path.rglob("*.parquet"))]
        tables = [read_file(file, ErrorsRow, what="errors") for file in found if row_set(file)[0] is ErrorsRow]
        self.errors = [row for each in tables for row in each.to_pylist() if row["device_accelerator"] == device]

    def error(self, metric: str, terms: Terms) -> float | str:
        """Return the mean of an error over the draws, of the newest row that terms select, or that there is none."""
        rows = [row for row in self.errors if _matches(row, terms)]
        return max(rows, key=itemgetter("measured_at"))[f"{metric}_mean"] if rows else UNMEASURED

    def row(self, terms: Terms) -> Row | str:
        """Return the fastest row that terms select, or why there is none: not measured, or a status."""
        wanted = {"state_dtype": "fp32", **terms}
        rows = [row for row in self.cases.get((wanted["op"], wanted["mode"]), []) if _matches(row, wanted)]
        ok = [row for row in rows if row["status"] == "ok"]
        if ok:
            return min(ok, key=itemgetter("time_ms"))
        return rows[0]["status"] if rows else UNMEASURED


def _newest(rows: Iterable[Row]) -> Row:
    """Return the newest row of a case that was measured on an idle machine, else measured, else any."""
    return max(rows, key=lambda r: (r["status"] == "ok", not (r["noise"] or r["suspect"]), r["measured_at"]))


def _matches(row: Row, wanted: Terms) -> bool:
    """Return whether a row is what is wanted; outside packages leave the dtype of states null."""
    return all(row[name] == value or (name == "state_dtype" and row[name] is None) for name, value in wanted.items())


def evaluate(asked: Asked, store: Store) -> Found:
    """Return the verdict on a claim.

    Raises:
        ValueError: what is counted has no such size or name.
    """
    claim = asked.claim
    if claim.not_testable or claim.unmeasured:
        verdict = UNTESTABLE if claim.not_testable else UNMEASURED
        return Found(asked=asked, verdict=verdict, reason=claim.not_testable or claim.unmeasured or "")
    values: dict[tuple[str, tuple[Any, ...]], Any] = {}
    missing: list[tuple[str, Point, str]] = []
    for side in claim.sides:
        for point in asked.points():
            value = _metric(asked, asked.terms(side, point), store)
            if isinstance(value, str):
                missing.append((side, point, value))
            values[side, tuple(point.values())] = None if isinstance(value, str) else value
    lines = list(_compared(asked, values))
    if translated(asked, store):
        lines = [_translated(asked, line, store) for line in lines]
    lines = [_judged(asked, line, n) for n, line in enumerate(lines)]
    return Found(asked=asked, lines=tuple(lines), missing=tuple(missing), **_verdict(asked, lines, missing))


def translated(asked: Asked, store: Store) -> bool:
    """Return whether a claim gives times of another device than the one whose rows there are."""
    return asked.claim.kind == "value" and asked.claim.metric == "time" and asked.document.device != store.device


def _metric(asked: Asked, terms: Terms, store: Store) -> float | str:
    """Return a side's metric at a point, or why there is none."""
    metric = terms.get("metric", asked.claim.metric)
    if metric in ERRORS:
        return store.error(metric, terms)
    if metric not in MEASURED:
        return _counted(metric, {name: value for name, value in terms.items() if name != "metric"})
    row = store.row(terms)
    if isinstance(row, str):
        return row
    if metric in ("tflops", "over_model", "roof_share"):
        sizes = {name: row[name] for name in SIZE_COLUMNS if row[name] is not None}
        counted = count_case(row["op"], row["impl"], row["mode"], row["dtype"], row["state_dtype"], sizes)
        if counted is None:
            return "not counted"
        model = runtime_model(counted, get_accelerator(store.device), row["dtype"])
        rates = {"over_model": row["time_ms"] / model.upper_ms, "roof_share": model.lower_ms / row["time_ms"]}
        return rates.get(metric) or counted.flops / (row["time_ms"] * 1e9)
    if metric == "allocated":
        return UNMEASURED if row["peak_memory_bytes"] is None else row["peak_memory_bytes"] - row["input_bytes"]
    if metric == "tokens_per_s":
        return 1e3 * row["batch"] * row["seq_len"] / row["time_ms"]
    columns = {"time": "time_ms", "memory": "peak_memory_bytes", "workspace": "workspace_bytes"}
    value = row[columns.get(metric, metric)]
    return UNMEASURED if value is None else value


def _counted(metric: str, terms: Terms) -> float:
    """Return what is counted or modelled of a side."""
    known: dict[str, Any] = dict(terms)
    device = get_accelerator(known.pop("device")) if "device" in known else None
    dtype, mode = known.pop("dtype"), known.pop("mode")
    if "model" in known:
        models = {each.name: each for each in kv_savings.MODELS}
        one_of("model", known["model"], models)
        saved = kv_savings.savings(models[known["model"]], known["seq_len"], dtype=dtype)
        return getattr(next(each for each in saved if each.baseline == known["baseline"]), metric)
    if metric == "balance":
        return _balance(device, dtype)
    if metric in ("flop_optimal", "runtime_optimal"):
        names = ("op", "head_dim_qk", "head_dim_v", "state_dtype")
        own = {name: known[name] for name in names if name in known}
        closed = coefficients(**own, causal_factor=known.get("causal_factor", 0.5), dtype=dtype, mode=mode)
        return closed.flop_optimal() if metric == "flop_optimal" else closed.runtime_optimal(_balance(device, dtype))
    counted = count(known.pop("op"), dtype=dtype, mode=mode, **known)
    if metric == "model_ms":
        assert device is not None
        return runtime_model(counted, device, dtype).upper_ms
    return getattr(counted, metric)


def _balance(device: Accelerator | None, dtype: str) -> float:
    """Return the FLOP per byte of a device, in fp16 where it multiplies no ``dtype``."""
    if device is None:
        raise ValueError("a side must name a device for this metric, got none")
    return device.intensity(dtype) or device.intensity("fp16") or math.nan


def _compared(asked: Asked, values: Mapping[tuple[str, tuple[Any, ...]], Any]) -> Iterator[Line]:
    """Yield what is held against the bounds, line by line."""
    claim, points = asked.claim, asked.points()
    if claim.kind in ("value", "ratio"):
        for point in points:
            of = tuple(values[side, tuple(point.values())] for side in claim.sides)
            a, b = of if len(of) == 2 else (of[0], 1.0)
            yield Line(point=point, sides=of, ours=a / b if a is not None and b else None)
        return
    axis = asked.along
    rest = lambda point: tuple((name, value) for name, value in point.items() if name != axis)  # noqa: E731
    for group, members in grouped(points, rest).items():
        there = [(point[axis], [values[side, tuple(point.values())] for side in claim.sides]) for point in members]
        there = [(x, of) for x, of in there if None not in of]
        if claim.kind == "slope" and len(there) > 1:
            for (x, (y,)), (x_next, (y_next,)) in itertools.pairwise(there):
                step = {**dict(group), axis: f"{_size(x)} to {_size(x_next)}"}
                yield Line(point=step, ours=math.log(y_next / y) / math.log(int(x_next) / int(x)))
        else:
            yield Line(point=dict(group), ours=_followed(claim.kind, there) if len(there) > 1 else None)


def _followed(kind: str, there: Sequence[tuple[Any, list[Any]]]) -> Any:
    """Return what the sides' values along an axis come to: a factor, or a value of the axis."""
    if kind == "span":
        found = [of[0] for _, of in there]
        return max(found) / min(found)
    if kind == "best":
        return min(there, key=itemgetter(1))[0]
    below = (x for n, (x, _) in enumerate(there) if all(a < b for _, (a, b) in there[n:]))
    return next(below, math.inf)


def _translated(asked: Asked, line: Line, store: Store) -> Line:
    """Return a time as the model carries it to the document's device."""
    terms = asked.terms(asked.claim.sides[0], line.point)
    sizes = {name: terms[name] for name in SIZE_COLUMNS if name in terms and name != "chunk_size"}
    question = ask(
        terms["op"], sizes=sizes, results=store.results, mode=terms["mode"], dtype=terms["dtype"],
        accelerator=get_accelerator(asked.document.device),
    )  # fmt: skip
    chunk = terms.get("chunk_size")
    predicted = question.answer(terms["impl"], None if chunk is None else str(chunk)).predicted
    return dataclasses.replace(line, ours=predicted.time_ms, low=predicted.low_ms, high=predicted.high_ms)


def _judged(asked: Asked, line: Line, n: int) -> Line:
    """Return a line with the document's bound and whether it holds."""
    claim = asked.claim
    bounds = (claim.states, claim.at_least, claim.at_most)
    states: Any
    least: Any
    most: Any
    states, least, most = (bound[n] if isinstance(bound, tuple) else bound for bound in bounds)
    words = [] if states is None else [shown(states, claim.metric, claim.kind)]
    words += [] if least is None else [f"≥ {shown(least, claim.metric, claim.kind)}"]
    words += [] if most is None else [f"≤ {shown(most, claim.metric, claim.kind)}"]
    holds: float | None = None
    ours: Any = line.ours
    if line.low is not None and states is not None:
        holds = float(line.low <= states <= (line.high or 0.0))
    elif isinstance(ours, str) or isinstance(states, str):
        holds = None if ours is None else float(ours == states)
    elif ours is not None:
        near = states is None or abs(ours - states) <= claim.within * (abs(states) or 1.0)
        holds = float(near and (least is None or ours >= least) and (most is None or ours <= most))
        if claim.kind == "crossover" and not holds and not math.isinf(ours):
            holds = 0.5
    return dataclasses.replace(line, document=" ".join(words), holds=holds)


def _verdict(asked: Asked, lines: Sequence[Line], missing: Sequence[tuple[str, Point, str]]) -> dict[str, str]:
    claim = asked.claim
    known = [line for line in lines if line.holds is not None]
    absent = _absences(asked, missing)
    if not known:
        return {"verdict": UNMEASURED, "reason": absent or "too few points"}
    ours = _range([line.ours for line in known], claim.metric, claim.kind)
    good, bad = [line for line in known if line.holds == 1], [line for line in known if line.holds == 0]
    verdict = NOT if len(bad) == len(known) else HOLDS if len(good) == len(known) and not missing else PARTLY
    parts = []
    for which, some in (("holds", good), ("holds later", [x for x in known if x.holds == 0.5]), ("not", bad)):
        if some and len(some) < len(known):
            parts.append(f"{which} at {_places(some)} ({_range([x.ours for x in some], claim.metric, claim.kind)})")
    if not parts:
        parts = [
            f"{_range([x.ours for x in known], claim.metric, claim.kind)} at {_places(known)}".removesuffix(" at ")
        ]
    return {"verdict": verdict, "ours": ours, "reason": "; ".join([*parts, *filter(None, [absent])])}


def _absences(asked: Asked, missing: Sequence[tuple[str, Point, str]]) -> str:
    """Return in words which sides have no row where."""
    parts = []
    for (side, why), items in grouped(missing, itemgetter(0, 2)).items():
        where = _axes([point for _, point, _ in items])
        terms = asked.terms(side, items[0][1])
        name = terms.get("impl") or ("ours" if terms.get("provider") == "lrbench" else terms["op"])
        parts.append(f"{name} {why}{where and f' at {where}'}")
    return "; ".join(parts)


def _places(lines: Sequence[Line]) -> str:
    return _axes([line.point for line in lines])


def _axes(points: Sequence[Point]) -> str:
    """Return points in words: each axis with its values, which is exact where one varies."""
    values = {name: dict.fromkeys(point[name] for point in points) for name in (points[0] if points else ())}
    return ", ".join(f"{name} {'/'.join(map(_size, known))}" for name, known in values.items())


def _size(value: Any) -> str:
    return short_size(value) if isinstance(value, int) else str(value)


def shown(value: float | str | None, metric: str, kind: str) -> str:
    """Return a number of a claim with its unit."""
    if value is None or isinstance(value, str):
        return value or ""
    if math.isinf(value):
        return "nowhere"
    if kind in ("crossover", "best"):
        return _size(int(value))
    if kind == "value":
        if metric in ("memory", "workspace", "allocated"):
            return f"{value / 1e9:.3g} GB"
        unit = {"time": " ms", "model_ms": " ms", "tflops": " TFLOP/s"}.get(metric, "")
        return (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}") + unit
    return f"{value:.4g}" if 0.9 < value < 1.1 else f"{value:.3g}"


def _range(values: Sequence[float | str | None], metric: str, kind: str) -> str:
    texts = list(
        dict.fromkeys(shown(each, metric, kind) for each in sorted(values, key=lambda v: (isinstance(v, str), v)))
    )
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
