"""The numbers of the summary, computed from the rows; ``sections.html.j2`` puts them into sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ...results.select import failed_rows, ok_rows
from ..figures.selection import lowered_runs
from .chunks import Choice
from .failures import failure_groups, reason
from .markup import listed, number
from .speedups import Speedup
from .subject import MODE_TITLES, OURS, Subject, known, name_of

if TYPE_CHECKING:
    import pandas as pd

PARTIAL = ("projections",)
"""Operations that are a part of the work alone: a floor beside the others, and no contender."""


def facts(subject: Subject, speedups: Sequence[Speedup], choices: Sequence[Choice]) -> dict[str, Any]:
    """Return what a summary says: what was run, what is fastest and by how much, how far from the roof, what failed."""
    rows, device = subject.rows, subject.device
    ok, others = ok_rows(rows), subject.everything[~subject.everything.index.isin(subject.rows.index)]
    groups = failure_groups(subject)
    lowered, suspects = (ok[ok[name].notna()] for name in ("throttled", "suspect"))
    return {
        "cases": len(rows),
        "implementations": len(rows[["op", "impl"]].drop_duplicates()),
        "operations": rows["op"].nunique(),
        "where": device if device == subject.device_name else f"{subject.device_name} ({device})",
        "when": _when(rows),
        "timed": len(ok),
        "failed": dict(failed_rows(rows)["status"].value_counts()),
        "off_target": "" if subject.on_target else f"{subject.accelerator.name} ({subject.accelerator.key})",
        "others": len(others),
        "other_devices": sorted(set(others["device_name"].dropna())),
        "setting": subject.setting(),
        "shown": None if subject.chosen is None else len(ok_rows(subject.chosen.rows)),
        "axis": "number of tokens" if subject.without_order else subject.axis,
        "at": subject.at(subject.seq_len or 0),
        "modes": [
            {"title": MODE_TITLES[mode], "fastest": _fastest(subject, mode), **_beside(subject, mode, speedups)}
            for mode in subject.modes
        ],
        "no_baseline": _no_baseline(subject, speedups),
        "roofs": [(MODE_TITLES[mode], shares) for mode in subject.modes if (shares := _shares(subject, mode))],
        "calibration": _calibration(subject),
        "chunks": _chunks(choices) if subject.on_target else None,
        "failures": [
            {"name": name_of(first), "mode": first.mode, "count": len(group), "status": first.status,
             "reason": reason(group)}
            for group in groups[:3]
            for first in [next(group.itertuples(index=False))]
        ],
        "more_failures": sum(map(len, groups[3:])),
        "lowered": len(lowered),
        "clock_reasons": sorted({str(value) for value in lowered["throttled"]}),
        "suspects": len(suspects),
        "suspicion": None if suspects.empty else suspects["suspect"].iloc[0],
        # A CPU's rates are what was once measured beside the machine's other load: no limits.
        "has_limits": bool((ok["device_kind"] == "cuda").any()),
        "differing": differing(rows),
        "speedups": len(speedups),
        "apart": sum(not each.same_run for each in speedups),
        "lowered_runs": 0 if subject.chosen is None else lowered_runs(ok_rows(subject.chosen.rows)),
    }  # fmt: skip


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


def _fastest(subject: Subject, mode: str) -> dict[str, Any] | None:
    """Return who is fastest at which lengths, and the time and memory of the fastest at the report's one length."""
    best = subject.best(mode)
    best = best[~best["op"].isin(PARTIAL)]
    if best.empty:
        return None
    # Where ours was not measured, a baseline alone is no fastest.
    own = best["seq_len"][best["provider"] == OURS]
    best = best if own.empty else best[best["seq_len"].isin(own)]
    winners = best.loc[best.groupby("seq_len")["time_ms"].idxmin()].sort_values("seq_len")
    spans: list[tuple[str, list[int]]] = []
    for row in winners.itertuples(index=False):
        if spans and spans[-1][0] == name_of(row):
            spans[-1][1].append(int(row.seq_len))
        else:
            spans.append((name_of(row), [int(row.seq_len)]))
    lengths = {int(length) for length in winners["seq_len"]}
    length = next((each for each in lengths if each == subject.seq_len), max(lengths))
    at = winners[winners["seq_len"] == length].iloc[0]
    return {
        "everywhere": len(spans) == 1 < len(winners),
        "spans": [(name, subject.at_all(at)) for name, at in spans],
        "at": subject.at(length),
        "name": name_of(at),
        "time_ms": at["time_ms"],
        "low": known(at["time_ci_low_ms"]),
        "high": known(at["time_ci_high_ms"]),
        "chunk": known(at["chunk_size"]),
        "peak": known(at["peak_memory_bytes"]),
    }


def _beside(subject: Subject, mode: str, speedups: Sequence[Speedup]) -> dict[str, dict[str, list[Speedup]]]:
    """Return ours beside each baseline of its operation, and beside the fastest of every other, at one length."""
    shown: set[Any] = set() if subject.chosen is None else set(subject.chosen.rows["case_id"])
    here = [
        each
        for each in speedups
        if each.theirs.mode == mode and each.theirs.seq_len == subject.seq_len and each.theirs.case_id in shown
    ]
    # Our fastest operation first, and of each baseline the fastest: what comes first stays.
    least: dict[str, Speedup] = {}
    for each in sorted(here, key=lambda each: (each.ours.time_ms, each.theirs.time_ms)):
        least.setdefault(each.theirs_name if each.same_operation else each.theirs.op, each)
    found: dict[str, dict[str, list[Speedup]]] = {"same": {}, "other": {}}
    for each in least.values():
        found["same" if each.same_operation else "other"].setdefault(name_of(each.ours), []).append(each)
    return found


def _no_baseline(subject: Subject, speedups: Sequence[Speedup]) -> str:
    if speedups or subject.trusted.empty:
        return ""
    only_ours = set(subject.trusted["provider"]) <= {OURS}
    return "These results hold no timed baseline" if only_ours else "No baseline was timed on a problem of ours"


def _shares(subject: Subject, mode: str) -> list[dict[str, Any]]:
    """Return the highest shares of the roof: ours, then the baselines'."""
    best = subject.best(mode)
    best = best[best["roofline_fraction"].notna() & (best["seq_len"] == subject.seq_len)]
    sides = (best[best["provider"] == OURS], best[best["provider"] != OURS])
    tops = [rows.loc[rows["roofline_fraction"].idxmax()] for rows in sides if not rows.empty]
    return [
        {"percent": 100 * top["roofline_fraction"], "name": name_of(top), "tflops": top["tflops"],
         "gbps": known(top["gbps"])}
        for top in tops
    ]  # fmt: skip


def _calibration(subject: Subject) -> dict[str, Any] | None:
    """Return the accelerator's measured roofs beside the specified ones, where both are known."""
    accelerator = subject.accelerator
    if accelerator.measured is None or not subject.on_target or subject.chosen is None:
        return None
    dtype = subject.chosen.dtype
    reached, stated = accelerator.measured.matrix_flops.get(dtype), accelerator.peak_flops(dtype)
    if reached is None or stated is None:
        return None
    copied, bandwidth = accelerator.measured.bandwidth_bytes_s, accelerator.bandwidth_bytes_s
    return {"dtype": dtype, "reached": reached, "stated": stated, "copied": copied, "bandwidth": bandwidth}


def _chunks(choices: Sequence[Choice]) -> dict[str, Any] | None:
    """Return how good the models' choices are: how many are the fastest, what they cost, and the worst one."""
    regrets = [(each.regret, each) for each in choices if each.regret is not None]
    if not regrets:
        return None
    groups: dict[str, list[float]] = {}
    for regret, each in regrets:
        groups.setdefault(name_of(each.row), []).append(regret)
    percent, worst = max(regrets, key=lambda each: each[0])
    return {
        "right": sum(not regret for regret, _ in regrets),
        "problems": len(regrets),
        "medians": [
            f"{number(statistics.median(group), 2)} % for {name} ({len(group)})" for name, group in groups.items()
        ],
        "worst": percent
        and {
            "percent": percent,
            "name": name_of(worst.row),
            "mode": worst.row.mode,
            "seq_len": int(worst.row.seq_len),
            "head_dim": int(worst.row.head_dim_v),
            "modelled": worst.modelled,
            "measured": worst.row.chunk_size,
        },
    }


def differing(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Return the versions that differ between rows, by what they are of."""
    names = ("driver", "cuda", "torch", "triton", "python")
    values = {name: sorted({str(value) for value in rows[f"{name}_version"].dropna()}) for name in names}
    return {name: each for name, each in values.items() if len(each) > 1}


def heading(subject: Subject) -> str:
    """Return a title: the kernel families, and the device."""
    families = listed(sorted(set(subject.rows["kernel"])))
    beside = "" if set(subject.rows["provider"]) <= {OURS} else " and its baselines"
    return f"{families}{beside} on {subject.device_name}"
