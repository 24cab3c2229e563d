"""The summary: what the rows say, in sentences. Every figure in them is computed here from the rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ...results.select import failed_rows, ok_rows
from ..figures.style import OPERATION_LABELS, binary, rate
from .chunks import Choice
from .failures import failure_groups, reason
from .markup import number
from .speedups import Comparison
from .subject import MODE_TITLES, OURS, Subject, name_of

if TYPE_CHECKING:
    import pandas as pd


PARTIAL = ("projections",)
"""Operations that are a part of the work alone: a floor beside the others, and no contender."""


def sentences(subject: Subject, found: list[Comparison], chosen: list[Choice]) -> list[tuple[str, list[str]]]:
    """Return the summary as (about, sentences): what was run, what is fastest and by how much, how far from the roof.

    And what failed, and what to be careful with.
    """
    return _told([*_what(subject), *_own(subject, found, chosen), *_doubts(subject, found)])


def of_all(subject: Subject, found: list[Comparison]) -> list[tuple[str, list[str]]]:
    """Return what the summary of several families says of all: what was run, failures, what to be careful with."""
    return _told([*_what(subject), ("Distance from the roof", _calibration(subject)), *_doubts(subject, found)])


def of_family(subject: Subject, found: list[Comparison], chosen: list[Choice]) -> list[tuple[str, list[str]]]:
    """Return what the summary of several families says of one of them: what is fastest, and how far from the roof."""
    parts = [each for each in _own(subject, found, chosen) if each[1] != _calibration(subject)]
    return _told([*parts, ("With care", _lowered(subject))])


def _lowered(subject: Subject) -> str:
    """Return that times of several runs with lowered clocks stand side by side, or ""."""
    if subject.chosen is None:
        return ""
    shown = ok_rows(subject.chosen.rows)
    if shown["run_id"].nunique() < 2 or 2 * shown["throttled"].notna().sum() <= len(shown):
        return ""
    return (
        "Most clocks were lowered, and what a kernel takes then depends on what ran before it: times are those of "
        f"{shown['run_id'].nunique()} runs, and which is fastest may be the run's doing. Speed-ups are of one run "
        "where one measured both."
    )


Part = tuple[str, str]
"""What a sentence is about, and the sentence; "" where there is nothing to say."""


def _what(subject: Subject) -> list[Part]:
    return [("Measured", _scope(subject)), ("Measured", _elsewhere(subject))]


def _own(subject: Subject, found: list[Comparison], chosen: list[Choice]) -> list[Part]:
    parts = [("Measured", _shown(subject))]
    for mode in subject.modes:
        parts += [
            (MODE_TITLES[mode], _fastest(subject, mode)),
            (MODE_TITLES[mode], _against_baselines(subject, mode, found)),
        ]
    return [
        *parts,
        ("Baselines", _no_baseline(subject, found)),
        ("Distance from the roof", _roof(subject)),
        ("Distance from the roof", _calibration(subject)),
        ("Chunk size", _chunks(subject, chosen)),
    ]


def _doubts(subject: Subject, found: list[Comparison]) -> list[Part]:
    return [
        ("Failures", _failures(subject)),
        ("With care", _caution(subject)),
        ("With care", _environments(subject)),
        ("With care", _runs(found)),
    ]


def _told(parts: Iterable[Part]) -> list[tuple[str, list[str]]]:
    """Return sentences under what they are about, in the order of first mention; empty ones are left out."""
    told: dict[str, list[str]] = {}
    for about, sentence in parts:
        if sentence:
            told.setdefault(about, []).append(sentence)
    return list(told.items())


def _scope(subject: Subject) -> str:
    rows = subject.rows
    ok = len(ok_rows(rows))
    where = f"{subject.device_name} ({subject.device})" if subject.device != subject.device_name else subject.device
    impls = len(rows[["op", "impl"]].drop_duplicates())
    ops = rows["op"].nunique()
    said = (
        f"{_many(len(rows), 'case')} of {_many(impls, 'implementation')} and {_many(ops, 'operation')} were run on "
        f"{where}{_when(rows)}: {ok:,} {'was' if ok == 1 else 'were'} timed"
    )
    failed = failed_rows(rows)
    if failed.empty:
        return f"{said}, none failed."
    counts = ", ".join(f"{count:,} {status}" for status, count in failed["status"].value_counts().items())
    return f"{said}, {len(failed):,} {'was' if len(failed) == 1 else 'were'} not ({counts})."


def _when(rows: pd.DataFrame) -> str:
    days = sorted({str(value)[:10] for value in rows["measured_at"].dropna()})
    if not days:
        return ""
    first, last = (_day(day) for day in (days[0], days[-1]))
    return f" on {first}" if first == last else f", {first} to {last}"


def _day(text: str) -> str:
    try:
        day = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{day.day} {day:%B %Y}"


def _elsewhere(subject: Subject) -> str:
    said = []
    if not subject.on_target:
        said.append(
            f"Nothing was measured on {subject.accelerator.name} ({subject.accelerator.key}), which the report is "
            f"about; what it says of that accelerator comes from the runtime model"
        )
    others = len(subject.everything) - len(subject.rows)
    if others:
        names = subject.everything["device_name"][~subject.everything.index.isin(subject.rows.index)].dropna()
        where = ", ".join(sorted(set(names)))
        said.append(
            f"{_many(others, 'row')} of other devices ({where}) {'is' if others == 1 else 'are'} in the data only"
        )
    return "; ".join(said) + "." if said else ""


def _shown(subject: Subject) -> str:
    if subject.chosen is None:
        return ""
    shown, timed = len(ok_rows(subject.chosen.rows)), len(ok_rows(subject.rows))
    if shown == timed:
        return ""
    return (
        f"Where no axis or column says otherwise, figures and tables show {subject.setting()}: {shown:,} of "
        f"{_many(timed, 'timed case')}. All are in the data."
    )


def _fastest(subject: Subject, mode: str) -> str:
    best = subject.best(mode)
    best = best[~best["op"].isin(PARTIAL)]
    if best.empty:
        return ""
    # Where ours was not measured, a baseline alone is no fastest.
    own = best["seq_len"][best["provider"] == OURS]
    best = best if own.empty else best[best["seq_len"].isin(own)]
    winners = best.loc[best.groupby("seq_len")["time_ms"].idxmin()].sort_values("seq_len")
    spans: list[tuple[Any, list[int]]] = []
    for row in winners.itertuples(index=False):
        if spans and name_of(spans[-1][0]) == name_of(row):
            spans[-1][1].append(int(row.seq_len))
        else:
            spans.append((row, [int(row.seq_len)]))
    everywhere = len(spans) == 1 and len(winners) > 1
    told = "; ".join(f"{name_of(row)} at {subject.at_all(at)}" for row, at in spans)
    if everywhere:
        every = "number of tokens" if subject.without_order else subject.axis
        told = f"{name_of(spans[0][0])} at every {every}, {subject.at_all(spans[0][1])}"
    length = _single_length(subject, winners)
    at = winners[winners["seq_len"] == length].iloc[0]
    chunk = "" if at["chunk_size"] != at["chunk_size"] else f" with chunk size {binary(at['chunk_size'])}"
    low, high = at["time_ci_low_ms"], at["time_ci_high_ms"]
    interval = "" if low != low else f" (95 % interval {number(low, 4)} to {number(high, 4)})"
    return (
        f"With {subject.setting()}, the fastest is {told}. At {subject.at(length)} {name_of(at)} takes "
        f"{number(at['time_ms'])} ms{interval}{chunk}{_memory(at)}."
    )


def _memory(row: pd.Series) -> str:
    peak = row["peak_memory_bytes"]
    if peak != peak:
        return ""
    unit, scale = ("GiB", 2**30) if peak >= 2**27 else ("MiB", 2**20)
    return f", and {number(peak / scale)} {unit} at its peak"


def _single_length(subject: Subject, rows: pd.DataFrame) -> int:
    length = subject.seq_len
    if length is not None and length in set(rows["seq_len"]):
        return length
    return int(rows["seq_len"].max())


def _against_baselines(subject: Subject, mode: str, found: list[Comparison]) -> str:
    """Compare with each baseline of an operation of ours, and with the fastest of every other operation, at one T."""
    length = subject.seq_len
    shown: set[Any] = set() if subject.chosen is None else set(subject.chosen.rows["case_id"])
    here = [c for c in found if c.theirs.mode == mode and c.theirs.seq_len == length and c.theirs.case_id in shown]
    # Our fastest operation first, and of each baseline the fastest: what comes first stays.
    least: dict[str, Comparison] = {}
    for each in sorted(here, key=lambda c: (c.ours.time_ms, c.theirs.time_ms)):
        least.setdefault(name_of(each.theirs) if each.same_operation else each.theirs.op, each)
    same = [each for each in least.values() if each.same_operation]
    other = [each for each in least.values() if not each.same_operation]
    said = [f"At {subject.at(length)} {_ratios(same)}."] if same and length is not None else []
    said += [f"Beside other mathematics, at equal tokens and embedding dim, {_ratios(other)}."] if other else []
    return " ".join(said)


def _ratios(found: list[Comparison]) -> str:
    groups: dict[str, list[str]] = {}
    for each in found:
        interval = f" ({each.interval()})" if each.low is not None else ""
        told = f"{each.ratio:.2f} times{interval} as fast as {name_of(each.theirs)}"
        groups.setdefault(name_of(each.ours), []).append(told)
    return "; ".join(f"{ours} is {_and(told)}" for ours, told in groups.items())


def _no_baseline(subject: Subject, found: list[Comparison]) -> str:
    if found or subject.trusted.empty:
        return ""
    if set(subject.trusted["provider"]) <= {OURS}:
        return "These results hold no timed baseline, so nothing is said of speed-ups."
    return "No baseline was timed on a problem of ours, so nothing is said of speed-ups."


def _roof(subject: Subject) -> str:
    said = []
    for mode in subject.modes:
        best = subject.best(mode)
        best = best[best["roofline_fraction"].notna() & (best["seq_len"] == subject.seq_len)]
        if best.empty:
            continue
        ours = best[best["provider"] == OURS]
        shares = [_share(rows) for rows in (ours, best[best["provider"] != OURS]) if not rows.empty]
        said.append(f"{MODE_TITLES[mode].lower()} {_and(shares)}")
    if not said:
        return "How far the times are from a roof is not known: no row has a share of a roofline."
    where = subject.at(subject.seq_len or 0)
    return f"Of the device's roofline, the highest shares reached at {where} are {'; '.join(said)}."


def _share(rows: pd.DataFrame) -> str:
    top = rows.loc[rows["roofline_fraction"].idxmax()]
    moved = "" if top["gbps"] != top["gbps"] else f", {number(top['gbps'])} GB/s"
    return f"{100 * top['roofline_fraction']:.0f} % by {name_of(top)} ({number(top['tflops'])} TFLOP/s{moved})"


def _calibration(subject: Subject) -> str:
    accelerator = subject.accelerator
    if accelerator.measured is None or not subject.on_target or subject.chosen is None:
        return ""
    dtype = subject.chosen.dtype
    reached, stated = accelerator.measured.matrix_flops.get(dtype), accelerator.peak_flops(dtype)
    if reached is None or stated is None:
        return ""
    return (
        f"Measured roofs beside the specified ones: {rate(reached, 'FLOP/s')} of {rate(stated, 'FLOP/s')} in {dtype} "
        f"matrix products and {rate(accelerator.measured.bandwidth_bytes_s, 'B/s')} of "
        f"{rate(accelerator.bandwidth_bytes_s, 'B/s')} copying."
    )


def _chunks(subject: Subject, chosen: list[Choice]) -> str:
    known = [each for each in chosen if each.regret is not None]
    if not known or not subject.on_target:
        return ""
    groups: dict[str, list[float]] = {}
    for each in known:
        groups.setdefault(name_of(each.row), []).append(100 * (each.regret or 0.0))
    told = [f"{number(statistics.median(group), 2)} % for {name} ({len(group)})" for name, group in groups.items()]
    worst = max(known, key=lambda each: each.regret or 0.0)
    right = sum(not each.regret for each in known)
    return (
        f"The chunk length of the runtime model's choosing is the fastest measured one in {right} of "
        f"{_many(len(known), 'problem')}. In the median over problems it costs {_and(told)}"
        + (f"; at most {_worst(worst)}." if worst.regret else ".")
    )


def _worst(worst: Choice) -> str:
    return (
        f"{number(100 * (worst.regret or 0.0), 2)} % ({name_of(worst.row)}, {worst.row.mode}, T = "
        f"{int(worst.row.seq_len):,}, value head dim {int(worst.row.head_dim_v)}: {binary(worst.modelled or 0)} in "
        f"place of {binary(worst.row.chunk_size)})"
    )


def _failures(subject: Subject) -> str:
    groups = failure_groups(subject)
    if not groups:
        return ""
    told = []
    for group in groups[:3]:
        first = next(group.itertuples(index=False))
        told.append(f"{name_of(first)} {first.mode}, {len(group):,} {first.status}: {reason(group)}")
    rest = sum(len(group) for group in groups[3:])
    more = f"; and {_many(rest, 'more case')}" if rest else ""
    return f"Without a time: {'; '.join(told)}{more}."


def _caution(subject: Subject) -> str:
    rows = ok_rows(subject.rows)
    lowered = rows[rows["throttled"].notna()]
    suspects = rows[rows["suspect"].notna()]
    said = []
    if len(lowered):
        reasons = ", ".join(sorted({str(value) for value in lowered["throttled"]}))
        said.append(f"{_many(len(lowered), 'time')} {_were(lowered)} taken with lowered clocks ({reasons}) and stay in")
    if len(suspects):
        said.append(
            f"{_many(len(suspects), 'row')} {_were(suspects)} suspect ({suspects['suspect'].iloc[0]}) and left out of "
            f"comparisons"
        )
    elif (rows["device_kind"] == "cuda").any():
        # Nobody asks it of a CPU: its rates are what was once measured beside the machine's other load.
        said.append("no time is beyond what the device allows" if said else "No time is beyond what the device allows")
    return "; ".join(said) + "." if said else ""


def _environments(subject: Subject) -> str:
    told = [f"{name.removesuffix('_version')} {_and(values)}" for name, values in differing(subject.rows).items()]
    return f"The rows come from environments that differ: {'; '.join(told)}." if told else ""


def differing(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Return the versions that differ between rows: column -> values."""
    columns = ("driver_version", "cuda_version", "torch_version", "triton_version", "python_version")
    values = {name: sorted({str(value) for value in rows[name].dropna()}) for name in columns}
    return {name: each for name, each in values.items() if len(each) > 1}


def _runs(found: list[Comparison]) -> str:
    apart = sum(not each.same_run for each in found)
    if not apart:
        return ""
    return (
        f"{apart:,} of {_many(len(found), 'comparison')} set rows of two runs side by side; an interval covers the "
        f"scatter of samples within a run, not what changes from run to run."
    )


def _were(rows: pd.DataFrame) -> str:
    return "was" if len(rows) == 1 else "were"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _and(parts: Iterable[str]) -> str:
    listed = list(parts)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"


def heading(subject: Subject) -> str:
    """Return a title: the kernel families, and the device."""
    families = _and(sorted(set(subject.rows["kernel"])))
    beside = "" if set(subject.rows["provider"]) <= {OURS} else " and its baselines"
    return f"{families}{beside} on {subject.device_name}"


def operations(rows: pd.DataFrame) -> str:
    """Return the operations in words."""
    return _and(OPERATION_LABELS.get(op, op) for op in sorted(set(rows["op"])))
