"""How many times as fast: our kernels beside every baseline, each at its fastest chunk size, with an interval.

A baseline of an operation of ours is compared at equal sizes. One whose mathematics differs is compared at equal
tokens, sequence length and embedding dim, in the setting of the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...results.schema import SIZE_COLUMNS
from ...results.select import best_rows
from ..check.statistics import MIN_SAMPLES, ratio_interval
from .markup import ABSENT, Cell, Html, numeric, table
from .subject import OURS, Subject, known, name_cell, name_of, problem_in_words

if TYPE_CHECKING:
    import pandas as pd

SAME_SIZES = ("mode", "dtype", *(name for name in SIZE_COLUMNS if name != "chunk_size"))
SAME_WORK = ("mode", "dtype", "seq_len", "tokens", "embedding_dim")
TIMES = "\N{MULTIPLICATION SIGN}"
ENVIRONMENT = ("driver_version", "torch_version", "triton_version", "cuda_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """One of our kernels beside a baseline, on the same problem.

    Attributes:
        ours, theirs: the rows, as named tuples of their columns.
        ratio: theirs over our median time; above 1 ours is faster.
        low, high: 95 % bootstrap interval of it, from the samples of both; None where they were not stored.
        memory: our peak memory beyond inputs over theirs, or None.
        again: whether there is a newer row of one side, of another run.
    """

    ours: Any
    theirs: Any
    ratio: float
    low: float | None
    high: float | None
    memory: float | None
    again: bool = False

    @property
    def same_run(self) -> bool:
        """Whether one run measured both: an interval says nothing of how runs differ."""
        return bool(self.ours.run_id == self.theirs.run_id)

    @property
    def theirs_name(self) -> str:
        """How the baseline is called."""
        return name_of(self.theirs)

    @property
    def same_operation(self) -> bool:
        """Whether both compute the same function."""
        return bool(self.ours.op == self.theirs.op)

    def differences(self) -> list[str]:
        """Return in which versions the two sides' environments differ."""
        pairs = [(name, getattr(self.ours, name), getattr(self.theirs, name)) for name in ENVIRONMENT]
        return [f"{name.removesuffix('_version')} {a} beside {b}" for name, a, b in pairs if _differ(a, b)]

    @property
    def interval(self) -> str:
        """The interval in words, or an empty text."""
        return "" if self.low is None else f"{self.low:.2f} to {self.high:.2f}"


def _differ(a: Any, b: Any) -> bool:
    """Whether two versions are both known, and not the same."""
    return isinstance(a, str) and isinstance(b, str) and a != b


def compare(ours: Any, theirs: Any, *, again: bool = False) -> Speedup:
    """Compare two measured rows."""
    low = high = None
    samples = [row.time_samples_ms for row in (theirs, ours)]
    if all(each is not None and len(each) >= MIN_SAMPLES for each in samples):
        interval = ratio_interval(*samples)
        low, high = interval.low, interval.high
    held = [each.peak_memory_bytes - each.input_bytes for each in (ours, theirs)]
    memory = held[0] / held[1] if held[1] else math.nan
    return Speedup(
        ours=ours,
        theirs=theirs,
        ratio=theirs.time_ms / ours.time_ms,
        low=low,
        high=high,
        memory=None if math.isnan(memory) else float(memory),
        again=again,
    )


def speedups(subject: Subject) -> list[Speedup]:
    """Return our fastest kernel beside every baseline, for every problem that both were measured on.

    Newest rows are compared. Where clocks were lowered, a time depends on what ran before it: then the newest run that
    measured both sides counts, where there is one.
    """
    rows = subject.trusted
    best = best_rows(rows, ("op", "impl", *SAME_SIZES))
    ours = best_rows(best[best["provider"] == OURS], ("op", *SAME_SIZES))
    baselines = best[best["provider"] != OURS]
    known = set(ours["op"])
    same = _matched(ours, baselines[baselines["op"].isin(known)], ("op", *SAME_SIZES))
    other = baselines[~baselines["op"].isin(known)]
    if subject.chosen is not None:
        shown = subject.chosen.rows.index
        other, ours = other[other.index.isin(shown)], ours[ours.index.isin(shown)]
    pairs = [*same, *_matched(_widest(ours), other, SAME_WORK)]
    apart = {n for n, pair in enumerate(pairs) if pair[0].run_id != pair[1].run_id and _lowered(*pair)}
    together = _together(subject.repeated) if apart else None
    return [
        _of_one_run(pair, together) if n in apart and together is not None else compare(*pair)
        for n, pair in enumerate(pairs)
    ]


Runs = tuple[dict[tuple[Any, ...], Any], dict[tuple[Any, ...], list[Any]]]
"""Our fastest row by run, operation and sizes; a baseline's rows, the newest last, by operation, name and sizes."""


def _together(rows: pd.DataFrame) -> Runs:
    best = best_rows(rows, ("run_id", "op", "impl", *SAME_SIZES)).sort_values("measured_at", kind="stable")
    ours = best_rows(best[best["provider"] == OURS], ("run_id", "op", *SAME_SIZES))
    theirs: dict[tuple[Any, ...], list[Any]] = {}
    for row in best[best["provider"] != OURS].itertuples(index=False):
        theirs.setdefault(_key(row, ("op", "impl", *SAME_SIZES)), []).append(row)
    return {_key(row, ("run_id", "op", *SAME_SIZES)): row for row in ours.itertuples(index=False)}, theirs


def _of_one_run(pair: tuple[Any, Any], runs: Runs) -> Speedup:
    """Compare a pair as the newest run that has both measured it, or as it is."""
    ours, theirs = runs
    mine, row = pair
    sizes = _key(mine, ("op", *SAME_SIZES))
    for each in reversed(theirs.get(_key(row, ("op", "impl", *SAME_SIZES)), [])):
        beside = ours.get((each.run_id, *sizes))
        if beside is not None:
            return compare(beside, each, again=True)
    return compare(mine, row)


def _lowered(*rows: Any) -> bool:
    """Whether clocks were lowered while one of the rows was measured."""
    return any(isinstance(row.throttled, str) for row in rows)


def _widest(ours: pd.DataFrame) -> pd.DataFrame:
    """Keep the operations that were measured at most sequence lengths: those that stand for the others."""
    if ours.empty:
        return ours
    count = ours.groupby("op")["seq_len"].nunique()
    return ours[ours["op"].isin(count.index[count == count.max()])]


def _matched(ours: pd.DataFrame, theirs: pd.DataFrame, by: Iterable[str]) -> list[tuple[Any, Any]]:
    """Return the pairs of rows that agree in ``by``; null agrees with null."""
    by = list(by)
    found: dict[tuple[Any, ...], list[Any]] = {}
    for row in ours.itertuples(index=False):
        found.setdefault(_key(row, by), []).append(row)
    return [(mine, row) for row in theirs.itertuples(index=False) for mine in found.get(_key(row, by), [])]


def _key(row: Any, by: Iterable[str]) -> tuple[Any, ...]:
    values = (getattr(row, name) for name in by)
    return tuple(map(known, values))


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def speedup_table(subject: Subject, found: list[Speedup]) -> Html:
    """Return a row for each baseline, operation of ours, mode and width, with a column for each sequence length."""
    lines: dict[tuple[Any, ...], list[Speedup]] = {}
    for each in found:
        lines.setdefault(_line(subject, each), []).append(each)
    columns = sorted({int(each.theirs.seq_len) for each in found})
    rows = []
    for line in sorted(
        lines, key=lambda key: [f"{part:012.1f}" if isinstance(part, float | int) else str(part) for part in key]
    ):
        group = lines[line]
        at = {int(each.theirs.seq_len): each for each in group}
        first = group[0]
        rows.append(
            [
                name_cell(first.theirs),
                _ours_cell(group),
                first.theirs.mode,
                problem_in_words(first.ours),
                *(_ratio_cell(at.get(length)) for length in columns),
                numeric(geometric_mean(each.ratio for each in group), unit=TIMES),
                _memory_cell(group),
                remarks(group),
            ]
        )
    header = [
        "baseline",
        "ours",
        "mode",
        "sizes",
        *(subject.at_all([length]) for length in columns),
        "geometric mean",
        "our memory / theirs, beyond inputs",
        "remarks",
    ]
    caption = f"Speed-up: their median time over ours, 95 % interval, {subject.device_name}"
    return table(caption, header, rows)


def _line(subject: Subject, each: Speedup) -> tuple[Any, ...]:
    theirs, ours = each.theirs, each.ours
    dims = _key(ours, ("num_heads", "head_dim_v", "head_dim_qk", "channels", "d_model", "d_ff", "state_dtype"))
    # Where no number of tokens is held they are the sequence length, which has columns of its own.
    tokens = theirs.tokens if subject.chosen is not None and subject.chosen.tokens else None
    return (not each.same_operation, theirs.op, theirs.impl, ours.op, theirs.mode, theirs.dtype, *dims, tokens)


def _ours_cell(group: list[Speedup]) -> Cell:
    """Return a cell that names our implementations, the fastest at each length, in the order of the lengths."""
    by_length = sorted(group, key=lambda each: each.theirs.seq_len)
    cells = [name_cell(each.ours) for each in by_length]
    return Cell(text=cells[0].text, detail=", ".join(dict.fromkeys(cell.detail for cell in cells)))


def _ratio_cell(each: Speedup | None) -> str | Cell:
    return ABSENT if each is None else Cell(text=f"{each.ratio:.2f}{TIMES}", value=each.ratio, detail=each.interval)


def _memory_cell(group: list[Speedup]) -> str | Cell:
    ratios = [each.memory for each in group if each.memory]
    return numeric(geometric_mean(ratios), unit=TIMES) if ratios else ABSENT


def remarks(group: list[Speedup]) -> str:
    """Return what a reader of these ratios should know: other mathematics, other runs, other versions."""
    notes = [] if group[0].same_operation else ["other mathematics"]
    apart = sum(not each.same_run for each in group)
    if apart:
        notes.append("two runs" if apart == len(group) else f"two runs in {apart} of {len(group)}")
    notes += sorted({difference for each in group for difference in each.differences()})
    if any(_lowered(each.ours, each.theirs) for each in group):
        notes.append("clocks lowered in part")
    if any(each.again for each in group):
        notes.append("of the run that measured both; one alone since")
    return "; ".join(notes)
