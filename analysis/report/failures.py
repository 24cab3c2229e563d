"""Cases without a time, grouped by implementation, status and reason."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...results.select import failed_rows, short_size
from .markup import ABSENT, Html, TableRow, size, table
from .subject import Subject, lengths, name_cell

if TYPE_CHECKING:
    import pandas as pd

NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)

BY_DESIGN = ("unsupported", "unavailable")
"""Statuses of cases that were not tried: an implementation does not take them, or is not installed."""


def failed_of(subject: Subject) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the cases that failed, and those that were not tried."""
    failed = failed_rows(subject.rows)
    limits = failed["status"].isin(BY_DESIGN)
    return failed[~limits], failed[limits]


def failure_groups(failed: pd.DataFrame) -> list[pd.DataFrame]:
    """Return failed rows, largest group first: of one implementation, mode and status, with reasons that differ in
    figures only.
    """
    alike = failed["reason"].fillna("").map(lambda reason: NUMBER.sub("#", reason))
    groups = [group for _, group in failed.groupby(["op", "impl", "mode", "status", alike], dropna=False, sort=True)]
    return sorted(groups, key=len, reverse=True)


def failure_table(caption: str, failed: pd.DataFrame) -> Html:
    """Return one row for each group, with the reason of its first case."""
    rows: list[TableRow] = []
    for group in failure_groups(failed):
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
