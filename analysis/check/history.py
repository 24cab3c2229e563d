"""A case over commits: a row per run that measured it, each compared with the one before."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...results.select import COMPARED_COLUMNS, Row, describe, device_of, grouped, parse_terms, select, with_slowness
from .compare import MARGIN, is_measured, is_noisy, judge, time_interval

WITH = (*COMPARED_COLUMNS, "provider_version", "throttled")
"""Columns that say how a row was measured."""


def case_history(case: str, results: Sequence[str | Path]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of cases, oldest first, by case id and device.

    Args:
        case: a case id or how it begins (4 hex digits at least), or selector terms such as ``op:mlstm_sig,mode:fw``.
        results: files and folders.

    Raises:
        ValueError: nothing is selected, or a bad term.
    """
    terms = f"case:{case}" if re.fullmatch(r"[0-9a-f]{4,16}", case) else case
    # A path would be taken for results of its own.
    parse_terms(terms)
    rows = select(terms, results)
    oldest_first = sorted(rows, key=lambda row: row["measured_at"])
    histories: dict[tuple[str, str], list[Row]] = grouped(oldest_first, lambda row: (row["case_id"], device_of(row)))
    return dict(sorted(histories.items(), key=lambda item: (describe(item[1][0]), item[0])))


def history_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the history of one case on one device as rows to print.

    ``ratio`` is the time over that of the last run before it that measured the case, with the verdict of ``compare``;
    ``changed`` names what else is not as it was then.
    """
    lines = []
    before: Row | None = None
    for row in with_slowness(rows)[0]:
        ratio = verdict = None
        changed = [f"{name} {before[name]} -> {row[name]}" for name in WITH if before and before[name] != row[name]]
        if before is not None and is_measured(row):
            ratio = row["time_ms"] / before["time_ms"]
            verdict = judge(time_interval(row, before), MARGIN, noisy=is_noisy(row, before))
        lines.append(
            {
                "measured_at": row["measured_at"],
                "commit": (row["git_commit"] or "unknown")[:10] + ("+" if row["git_dirty"] else ""),
                "run": row["run_id"][:8],
                **{name: row[name] for name in ("status", "time_ms")},
                "low_ms": row["time_ci_low_ms"],
                "high_ms": row["time_ci_high_ms"],
                "ratio": ratio,
                "verdict": verdict,
                "peak_memory_bytes": row["peak_memory_bytes"],
                "rel_error": row["rel_error"],
                "noise": ", ".join(reason.partition(":")[0] for reason in (row["noise"] or "").split("; ")) or None,
                "changed": "; ".join(changed) or None,
            }
        )
        before = row if is_measured(row) else before
    return lines
