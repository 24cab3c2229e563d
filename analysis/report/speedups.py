"""How many times as fast: our kernels beside every baseline, each at its fastest chunk size, with an interval.

A baseline of an operation of ours is compared at equal sizes. One whose mathematics differs is compared at equal
tokens, sequence length and embedding dim, in the setting of the figures.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from ...results.schema import PROBLEM_SIZES
from ...results.select import MODE_NAMES, best_rows, grouped
from ..check.statistics import MIN_SAMPLES, ratio_interval
from ..figures.findings import OURS
from .markup import ABSENT, Cell, Html, TableRow, number, numeric, table
from .subject import Subject, known, name_cell, name_of, problem_in_words

if TYPE_CHECKING:
    import pandas as pd

SAME_SIZES = ("mode", "dtype", *PROBLEM_SIZES)
SAME_WORK = ("mode", "dtype", "seq_len", "tokens", "embedding_dim")
PEER_MODES = {mode: MODE_NAMES[mode] for mode in ("fw", "fwbw")}
TIMES = "\N{MULTIPLICATION SIGN}"
MEMORY = "our memory / theirs, beyond inputs"
ENVIRONMENT = ("driver_version", "torch_version", "triton_version", "cuda_version")


@dataclass(frozen=True)
class Speedup:
    """One of our kernels beside a baseline, on the same problem.

    Attributes:
        ours, theirs: the rows, as named tuples of their columns.
        again: whether a side has a newer row, of another run, that is not compared here.
    """

    ours: Any
    theirs: Any
    again: bool = False

    @property
    def ratio(self) -> float:
        """Their median time over ours; above 1 ours is faster."""
        return float(self.theirs.time_ms / self.ours.time_ms)

    @functools.cached_property
    def ends(self) -> tuple[float, float] | None:
        """The 95 % bootstrap interval of the ratio, from the samples of both; None where too few were stored."""
        samples = [row.time_samples_ms for row in (self.theirs, self.ours)]
        if any(each is None or len(each) < MIN_SAMPLES for each in samples):
            return None
        return ratio_interval(*samples)

    @property
    def memory(self) -> float | None:
        """Our peak memory beyond inputs over theirs, where both are known."""
        ours, theirs = (each.peak_memory_bytes - each.input_bytes for each in (self.ours, self.theirs))
        return known(float(ours / theirs)) if min(ours, theirs) > 0 else None

    @property
    def length(self) -> int:
        """The sequence length, of a step over a cache its context."""
        return int(known(self.theirs.context) or self.theirs.seq_len)

    @property
    def same_run(self) -> bool:
        """Whether one run measured both: an interval says nothing of how runs differ."""
        return bool(self.ours.run_id == self.theirs.run_id)

    @property
    def same_operation(self) -> bool:
        """Whether both compute the same function."""
        return bool(self.ours.op == self.theirs.op)

    @property
    def clocks_lowered(self) -> bool:
        """Whether clocks were lowered while one of the sides was measured."""
        return isinstance(self.ours.throttled, str) or isinstance(self.theirs.throttled, str)

    def differences(self) -> list[str]:
        """Return which versions are known of both sides and differ."""
        sides = {name: (getattr(self.ours, name), getattr(self.theirs, name)) for name in ENVIRONMENT}
        return [
            f"{name.removesuffix('_version')} {ours} beside {theirs}"
            for name, (ours, theirs) in sides.items()
            if isinstance(ours, str) and isinstance(theirs, str) and ours != theirs
        ]


def speedups(subject: Subject) -> list[Speedup]:
    """Return our fastest kernel beside every baseline, for every problem that both were measured on.

    Newest rows are compared. Where clocks were lowered, a time depends on what ran before it: then the newest run that
    measured these two counts, where there is one.
    """
    best = best_rows(subject.trusted, ("op", "impl", *SAME_SIZES))
    ours = best_rows(best[best["provider"] == OURS], ("op", *SAME_SIZES))
    baselines = best[best["provider"] != OURS]
    comparable = baselines["op"].isin(set(ours["op"]))
    same, other = _matched(ours, baselines[comparable], ("op", *SAME_SIZES)), baselines[~comparable]
    if subject.chosen is not None:
        shown = subject.chosen.rows.index
        other, ours = other[other.index.isin(shown)], ours[ours.index.isin(shown)]
    # Operations that were measured at most sequence lengths stand for the others.
    count = ours.groupby("op")["seq_len"].nunique()
    widest = ours[ours["op"].isin(count.index[count == count.max()])]
    found = [*same, *_matched(widest, other, SAME_WORK)]
    doubtful = [each.clocks_lowered and not each.same_run for each in found]
    together = _within_runs(subject.repeated) if any(doubtful) else {}
    return [together.get(_pair(each), each) if doubt else each for each, doubt in zip(found, doubtful, strict=True)]


def _pair(each: Speedup) -> tuple[Any, ...]:
    return tuple(_key(side, ("op", "impl", *SAME_SIZES)) for side in (each.ours, each.theirs))


def _within_runs(rows: pd.DataFrame) -> dict[tuple[Any, ...], Speedup]:
    """Return our fastest kernel beside every baseline in the newest run that measured both."""
    best = best_rows(rows, ("run_id", "op", "impl", *SAME_SIZES)).sort_values("measured_at", kind="stable")
    ours = best_rows(best[best["provider"] == OURS], ("run_id", "op", *SAME_SIZES))
    pairs = _matched(ours, best[best["provider"] != OURS], ("run_id", *SAME_WORK))
    return {_pair(each): dataclasses.replace(each, again=True) for each in pairs}


def _matched(ours: pd.DataFrame, theirs: pd.DataFrame, by: Iterable[str]) -> list[Speedup]:
    """Return our rows beside theirs where they agree in ``by``; null agrees with null."""
    by = list(by)
    found = grouped(ours.itertuples(index=False), lambda row: _key(row, by))
    return [Speedup(mine, row) for row in theirs.itertuples(index=False) for mine in found.get(_key(row, by), [])]


def _key(row: Any, by: Iterable[str]) -> tuple[Any, ...]:
    values = (getattr(row, name) for name in by)
    return tuple(map(known, values))


def speedup_table(subject: Subject, found: list[Speedup]) -> Html:
    """Return a row for each baseline, operation of ours, mode and width, with a column for each sequence length."""
    lines = grouped(found, lambda each: _line(subject, each))
    columns = sorted({each.length for each in found})
    rows: list[TableRow] = []
    ordered = sorted(lines, key=lambda line: [f"{x:012.1f}" if isinstance(x, float | int) else str(x) for x in line])
    for line in ordered:
        group, first = lines[line], lines[line][0]
        at = {each.length: each for each in group}
        # Our fastest implementation at each length, in the order of the lengths.
        ours = [name_cell(each.ours) for each in sorted(group, key=lambda each: each.length)]
        rows.append(
            {
                "baseline": name_cell(first.theirs),
                "ours": Cell(text=ours[0].text, detail=", ".join(dict.fromkeys(cell.detail for cell in ours))),
                "mode": first.theirs.mode,
                "sizes": problem_in_words(first.ours),
                **{subject.at_all([length]): _ratio_cell(at.get(length)) for length in columns},
                "geometric mean": numeric(geometric_mean(each.ratio for each in group), unit=TIMES),
                MEMORY: _memory_cell(group),
                "remarks": remarks(group),
            }
        )
    return table(f"Speed-up: their median time over ours, 95 % interval, {subject.device_name}", rows)


def peer_rows(subject: Subject, found: Iterable[Speedup]) -> list[TableRow]:
    """Return the rows of the table that a report opens with, at the report's one length, a row for each peer.

    Peers are the baselines of our operations, and the fastest of every operation that is other mathematics; beside them
    stands our fastest kernel, forward and with the backward pass.
    """
    shown: set[Any] = set() if subject.chosen is None else set(subject.chosen.rows["case_id"])
    here = [each for each in found if each.theirs.seq_len == subject.seq_len and each.theirs.case_id in shown]
    pairs: dict[Any, dict[str, Speedup]] = {}
    # Our fastest first, and of other mathematics the fastest: what comes first stays.
    for each in sorted(here, key=lambda each: (not each.same_operation, each.ours.time_ms, each.theirs.time_ms)):
        peer = name_of(each.theirs) if each.same_operation else each.theirs.op
        pairs.setdefault(peer, {}).setdefault(each.theirs.mode, each)
    rows: list[TableRow] = []
    for group in pairs.values():
        times = {title: _ratio_cell(group.get(mode), times=True) for mode, title in PEER_MODES.items()}
        memory, notes = _memory_cell([*group.values()]), remarks([*group.values()])
        rows.append({"ours beside peer": _names(group), **times, MEMORY: memory, "remarks": notes})
    return rows


def _names(group: Mapping[str, Speedup]) -> Cell:
    """Return a cell that names both sides: once, or of each mode where they are not the same in both."""
    shown = [mode for mode in PEER_MODES if mode in group] or [*group]
    ops = dict.fromkeys(name_cell(group[mode].ours).text for mode in shown)
    named = {}
    for mode in shown:
        each, ours = group[mode], name_cell(group[mode].ours)
        theirs = name_of(each.theirs)
        by = theirs.partition(" · ")[2] if each.same_operation else theirs
        named[mode] = f"{ours.detail if len(ops) == 1 else name_of(each.ours)} beside {by}"
    said = [*dict.fromkeys(named.values())]
    if len(said) > 1:
        said = [f"{PEER_MODES.get(mode, mode)}: {names}" for mode, names in named.items()]
    return Cell(text=", ".join(ops), detail="; ".join(said))


def _line(subject: Subject, each: Speedup) -> tuple[Any, ...]:
    theirs, ours = each.theirs, each.ours
    dims = _key(ours, ("num_heads", "head_dim_v", "head_dim_qk", "channels", "d_model", "d_ff", "state_dtype"))
    # Unless the report holds tokens constant, they are the sequence length, which has columns of its own.
    tokens = theirs.tokens if subject.chosen is not None and subject.chosen.tokens else None
    return (not each.same_operation, theirs.op, theirs.impl, ours.op, theirs.mode, theirs.dtype, *dims, tokens)


def _ratio_cell(each: Speedup | None, *, times: bool = False) -> str | Cell:
    """Return a cell of a ratio, beside it its interval, or both ``times``."""
    if each is None:
        return ABSENT
    detail = "" if each.ends is None else "{:.2f} to {:.2f}".format(*each.ends)
    if times:
        detail = f"{number(each.ours.time_ms)} ms beside {number(each.theirs.time_ms)}"
    return Cell(text=f"{each.ratio:.2f}{TIMES}", value=each.ratio, detail=detail)


def _memory_cell(group: list[Speedup]) -> str | Cell:
    ratios = [each.memory for each in group if each.memory]
    return numeric(geometric_mean(ratios), unit=TIMES) if ratios else ABSENT


def remarks(group: list[Speedup]) -> str:
    """Return what a reader of these ratios should know: other mathematics, other runs, other versions."""
    notes = [] if group[0].same_operation else ["other mathematics"]
    apart = sum(not each.same_run for each in group)
    if apart:
        notes.append("sides from two runs" + (f" in {apart} of {len(group)}" if apart < len(group) else ""))
    notes += sorted({difference for each in group for difference in each.differences()})
    notes += ["clocks lowered in part"] if any(each.clocks_lowered for each in group) else []
    noisy = any(isinstance(side.noise, str) for each in group for side in (each.ours, each.theirs))
    notes += ["busy machine in part"] if noisy else []
    notes += ["from an older run that measured both"] if any(each.again for each in group) else []
    return "; ".join(notes)
