"""What was run, on what, what failed, and what to be careful with; ``sections.html.j2`` puts it into sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ...results.select import families, ok_rows, short_size
from ..figures.findings import OURS
from ..figures.selection import lowered_runs
from .markup import ABSENT, Html, TableRow, listed, size, table
from .speedups import Speedup
from .subject import Subject, lengths, name_cell

if TYPE_CHECKING:
    import pandas as pd

NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)

FAILED_COLUMNS = ("op", "impl", "mode", "status", "seq_len", "head_dim_v", "chunk_size", "reason")

BY_DESIGN = ("unsupported", "unavailable")
"""Statuses of cases that were not tried: an implementation does not take them, or is not installed."""


def facts(subject: Subject, speedups: Sequence[Speedup]) -> dict[str, Any]:
    """Return the numbers of all rows together that the template puts into sentences."""
    rows, device = subject.rows, subject.device
    ok, others = ok_rows(rows), subject.everything[~subject.everything.index.isin(subject.rows.index)]
    lowered, suspects = (ok[ok[name].notna()] for name in ("throttled", "suspect"))
    failed, limits = failed_of(subject)
    return {
        "cases": len(rows),
        "implementations": len(rows[["op", "impl"]].drop_duplicates()),
        "operations": rows["op"].nunique(),
        "where": device if device == subject.device_name else f"{subject.device_name} ({device})",
        "when": _when(rows),
        "timed": len(ok),
        "failed": dict(failed["status"].value_counts()),
        "limits": len(limits),
        "off_target": "" if subject.on_target else f"{subject.accelerator.name} ({subject.accelerator.key})",
        "others": len(others),
        "other_devices": sorted(set(others["device_name"].dropna())),
        "lowered": len(lowered),
        "busy": int(ok["noise"].notna().sum()),
        "clock_reasons": sorted({str(value) for value in lowered["throttled"]}),
        "suspects": len(suspects),
        "suspicion": None if suspects.empty else suspects["suspect"].iloc[0],
        # A CPU's rates are what was once measured beside the machine's other load: no limits.
        "has_limits": bool((ok["device_kind"] == "cuda").any()),
        "differing": differing(rows),
        "speedups": len(speedups),
        "apart": sum(not each.same_run for each in speedups),
        "lowered_runs": 0 if subject.chosen is None else lowered_runs(ok_rows(subject.chosen.rows)),
    }


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


def differing(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Return the versions that differ between rows, by what they are of."""
    names = ("driver", "cuda", "torch", "triton", "python")
    values = {name: sorted({str(value) for value in rows[f"{name}_version"].dropna()}) for name in names}
    return {name: each for name, each in values.items() if len(each) > 1}


def heading(subject: Subject) -> str:
    """Return a title: the kernel families, and the device."""
    several = families(subject.rows)
    others = f" and {'its' if len(several) == 1 else 'their'} baselines"
    beside = "" if set(subject.rows["provider"]) <= {OURS} else others
    return f"{listed(several)}{beside} on {subject.device_name}"


def failed_of(subject: Subject) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the cases that failed, and those that were not tried."""
    failed = subject.rows.loc[subject.rows["status"] != "ok", [*FAILED_COLUMNS]]
    limits = failed["status"].isin(BY_DESIGN)
    return failed[~limits], failed[limits]


def failure_table(caption: str, failed: pd.DataFrame) -> Html:
    """Return one row for each implementation, mode, status and reason, the most cases first.

    Reasons that differ in figures only count as one, and that of the first case is shown.
    """
    alike = failed["reason"].fillna("").map(lambda reason: NUMBER.sub("#", reason))
    groups = [group for _, group in failed.groupby(["op", "impl", "mode", "status", alike], dropna=False, sort=True)]
    rows: list[TableRow] = []
    for group in sorted(groups, key=len, reverse=True):
        first = next(group.itertuples(index=False))
        rows.append(
            {
                "implementation": name_cell(first),
                "mode": first.mode,
                "status": first.status,
                "cases": size(len(group)),
                "sequence lengths": lengths(group["seq_len"].dropna()) if group["seq_len"].notna().any() else ABSENT,
                "head dims": _listed(group["head_dim_v"]),
                "chunk lengths": _listed(group["chunk_size"]),
                "reason": reason(group),
            }
        )
    return table(caption, rows)


def reason(group: pd.DataFrame) -> str:
    """Return the first reason of a group, and how many more there are that differ in their figures."""
    reasons = list(dict.fromkeys(str(each) for each in group["reason"].dropna()))
    if not reasons:
        return "no reason was stored"
    return reasons[0] if len(reasons) == 1 else f"{reasons[0]} (and {len(reasons) - 1} more that differ in figures)"


def _listed(values: Any) -> str:
    return ", ".join(short_size(value) for value in sorted({int(value) for value in values.dropna()})) or ABSENT
