"""From samples to verdicts: the fastest chunk length of each side, their ratio with its interval, and the tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.table import Table

from ...analysis.check.statistics import Interval, median, median_interval, ratio_interval
from .model import COPY, Bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A side at a chunk length in a mode: its samples, or why there are none.

    Attributes:
        side: the implementation, or :data:`~.model.COPY`.
        memory_bytes: peak of one call above its inputs.
        remark: what is wrong with it, although it was timed or because it was not.
        moved_bytes: compulsory bytes of the problem; of the copy, read and written by each sample.
    """

    side: str
    chunk_size: int | None = None
    mode: str
    samples_ms: Sequence[float]
    memory_bytes: int | None = None
    remark: str | None = None
    moved_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A bar and what was measured: theirs / ours with its 95 % interval, and whom it compares.

    Attributes:
        ours, theirs: in words, with chunk length and value; where a side is missing, why.
        ratio: None where a side is missing.
    """

    bar: Bar
    ours: str
    theirs: str
    ratio: float | None
    interval: Interval | None

    @property
    def held(self) -> bool:
        """Whether both sides are there and their ratio reaches the bar."""
        return self.ratio is not None and self.ratio >= self.bar.ratio


def judge(bars: Sequence[Bar], measured: Sequence[Measured]) -> list[Verdict]:
    """Compare the fastest (by median) of both sides of every bar."""
    return [_judge(bar, measured) for bar in bars]


def overall(bars: Sequence[Bar], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Judge bars on the geometric mean of the ratios that ``verdicts`` of the same sides, mode and quantity have.

    The interval is the geometric mean of the intervals' ends: no narrower than that of independent settings.
    """
    judged = []
    for bar in bars:
        parts = [v for v in verdicts if _subject(v.bar) == _subject(bar)]
        ratios = [v.ratio for v in parts if v.ratio is not None]
        intervals = [v.interval for v in parts if v.interval is not None]
        if len(ratios) < len(parts) or not parts:
            words = f"{len(parts) - len(ratios)} of {len(parts)} settings could not be compared"
            judged.append(Verdict(bar=bar, ours=words, theirs="", ratio=None, interval=None))
            continue
        low, high = (_geometric_mean([getattr(i, end) for i in intervals]) for end in ("low", "high"))
        interval = Interval(low=low, high=high, confidence=min(i.confidence for i in intervals)) if intervals else None
        words = f"geometric mean of {len(ratios)} settings"
        ratio = _geometric_mean(ratios)
        judged.append(Verdict(bar=bar, ours=words, theirs=bar.theirs, ratio=ratio, interval=interval))
    return judged


def measured_table(measured: Sequence[Measured]) -> Table:
    """Return the table of every side's times."""
    table = Table("side", "chunk", "mode", "median ms", "95 % interval", "fastest ms", "memory GiB", "remark")
    for entry in sorted(measured, key=lambda entry: (entry.mode, entry.side, entry.chunk_size or 0)):
        times = ("", "", "")
        if entry.samples_ms:
            interval = median_interval(entry.samples_ms)
            times = (
                f"{median(entry.samples_ms):.4g}",
                f"{interval.low:.4g} - {interval.high:.4g}",
                f"{min(entry.samples_ms):.4g}",
            )
        memory = "" if entry.memory_bytes is None else f"{entry.memory_bytes / 2**30:.3g}"
        table.add_row(entry.side, _chunk(entry), entry.mode, *times, memory, entry.remark or "")
    return table


def verdict_table(verdicts: Sequence[Verdict], *, undecidable: Collection[Bar] = ()) -> Table:
    """Return the table of the bars; a miss of an ``undecidable`` one is marked: the machine was not what it means."""
    table = Table("mode", "ours", "theirs", "ratio", "95 % interval", "bar", "")
    for verdict in verdicts:
        interval = verdict.interval
        missed = "missed, not decidable here" if verdict.bar in undecidable else "missed"
        table.add_row(
            verdict.bar.mode,
            verdict.ours,
            verdict.theirs,
            "" if verdict.ratio is None else f"{verdict.ratio:.3g}",
            "" if interval is None else f"{interval.low:.3g} - {interval.high:.3g}",
            f"{verdict.bar.ratio:.3g}",
            "held" if verdict.held else missed if verdict.ratio is not None else "not measured",
        )
    return table


def _judge(bar: Bar, measured: Sequence[Measured]) -> Verdict:
    ours = _fastest(measured, bar.ours, bar.mode)
    theirs = _fastest(measured, bar.theirs, bar.mode, bar.their_chunk_size)
    if isinstance(ours, str) or isinstance(theirs, str):
        words = [side if isinstance(side, str) else _words(side, bar, side.samples_ms) for side in (ours, theirs)]
        return Verdict(bar=bar, ours=words[0], theirs=words[1], ratio=None, interval=None)
    ratio: float | None
    interval: Interval | None
    their_samples = theirs.samples_ms if theirs.side != COPY else _as_if_copied(ours, theirs)
    if bar.quantity == "memory":
        ratio = interval = None
        if ours.memory_bytes and theirs.memory_bytes is not None:
            ratio = theirs.memory_bytes / ours.memory_bytes
    else:
        ratio = median(their_samples) / median(ours.samples_ms)
        interval = ratio_interval(their_samples, ours.samples_ms)
    return Verdict(
        bar=bar,
        ours=_words(ours, bar, ours.samples_ms),
        theirs=_words(theirs, bar, their_samples),
        ratio=ratio,
        interval=interval,
    )


def _fastest(measured: Sequence[Measured], side: str, mode: str, chunk_size: int | None = None) -> Measured | str:
    """Return the fastest entry of a side, or why it has none."""
    entries = [
        entry
        for entry in measured
        if entry.side == side and (side == COPY or entry.mode == mode) and chunk_size in (None, entry.chunk_size)
    ]
    timed = [entry for entry in entries if entry.samples_ms]
    if timed:
        return min(timed, key=lambda entry: median(entry.samples_ms))
    reasons = dict.fromkeys(entry.remark for entry in entries if entry.remark)
    return f"{side}: {'; '.join(reasons) or 'was not measured'}"


def _as_if_copied(ours: Measured, copy: Measured) -> list[float]:
    """The copy's samples as if it moved the bytes of ours."""
    if ours.moved_bytes is None or copy.moved_bytes is None:
        raise ValueError(f"compulsory bytes of {ours.side}, {ours.mode}, must be counted to hold it against the copy")
    return [sample * ours.moved_bytes / copy.moved_bytes for sample in copy.samples_ms]


def _words(entry: Measured, bar: Bar, samples_ms: Sequence[float]) -> str:
    if bar.quantity == "memory":
        value = "no memory figure" if entry.memory_bytes is None else f"{entry.memory_bytes / 2**30:.3g} GiB"
    else:
        value = f"{median(samples_ms):.3g} ms"
    chunk = _chunk(entry)
    return f"{entry.side}{f' ({chunk})' if chunk else ''} {value}"


def _chunk(entry: Measured) -> str:
    return "" if entry.chunk_size is None else str(entry.chunk_size)


def _subject(bar: Bar) -> tuple[str, str, str, str]:
    return bar.ours, bar.theirs, bar.mode, bar.quantity


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
