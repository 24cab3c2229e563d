"""What commands print of comparisons, checks, profiles, counts, claims, and of how often predictions hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...analysis.check import compare, findings, matrix
from ...analysis.check.compare import Comparison
from ...analysis.check.regression import CheckResult, summary
from ...results.schema import CASE_COLUMNS, ProfileRow
from ...results.select import Row, describe_sizes, grouped
from .. import note
from .display import reader_may_leave, say, show

if TYPE_CHECKING:
    from ...analysis.counts import Count
    from ...analysis.model import validation
    from ...analysis.reproduce.verdicts import Found

SCREEN = 10
"""Rows of a table that are shown without --all; each may take several lines."""


def show_first(rows: Sequence[dict[str, Any]], *, every: bool, title: str | None = None, fold: bool = False) -> None:
    """Print a table; without ``every`` only its first rows."""
    shown = rows if every else rows[:SCREEN]
    show(shown, "table", title=title, fold=fold)
    if len(rows) > len(shown):
        print(f"and {len(rows) - len(shown)} more: --all")


def show_comparison(found: Comparison, a: str, b: str, *, every: bool, output_format: str) -> None:
    """Print a comparison, its summary first; differences of the environments go to standard error."""
    note(*(f"warning: the environments differ (A | B): {line}" for line in found.environment))
    if output_format == "json":
        show({"A": a, "B": b, **compare.as_dict(found)}, output_format)
        return
    if output_format != "table":
        show(compare.case_rows(found), output_format)
        return
    print(compare.in_words(found))
    print(f"A = {a}, B = {b}; ratio = time of B / time of A")
    if len(found.groups) > 2 or every:
        title = f"geometric means, 95 % interval, equal within {found.margin:g}"
        print()
        show(compare.group_rows(found), "table", title=title)
    tables = {"every case": compare.case_rows(found)} if every else {"what differs": compare.brief_rows(found)}
    for title, rows in {**tables, "not compared": compare.unmatched_rows(found, brief=not every)}.items():
        if rows:
            print()
            show_first(rows, every=every, title=title)


def show_matrix(sides: Mapping[str, Sequence[Row]], output_format: str, **more: Any) -> None:
    """Print sides beside one another, a case a row; ``more`` is for :func:`.matrix.matrix`."""
    lines = matrix.matrix(sides, **more)
    if apart := matrix.runs_differ(lines):
        note(f"warning: the sides of {apart} of {len(lines)} cases are of different runs")
    if output_format != "table":
        show(matrix.long_rows(lines), output_format)
        return
    for title, rows in (("ms (times the fastest)", matrix.wide_rows(lines, sides)), ("not run", matrix.why_not(lines))):
        if rows:
            show(rows, "table", title=title)
            print()


def show_check(found: CheckResult, *, every: bool, output_format: str) -> None:
    """Print what the check found, its outcome in one line first, which goes to standard error in other formats."""
    note(*(f"warning: the environments differ (baseline | run): {line}" for line in found.environment))
    if output_format != "table":
        note(summary(found))
    with reader_may_leave():
        if output_format == "json":
            show(findings.as_dict(found), "json")
        elif output_format == "csv":
            show(findings.table_rows(found.cases), "csv")
        elif output_format == "markdown":
            print(findings.markdown(found))
        elif output_format == "junit":
            print(findings.junit_xml(found))
        else:
            print(summary(found))
            rows = findings.table_rows(found.cases) if every else findings.brief_rows(findings.noteworthy(found))
            if rows:
                show_first(rows, every=every)


def show_coverage(found: Sequence[validation.LeftOut], *, every: bool, output_format: str) -> None:
    """Print how often the intervals of predictions hold; in a table, where they hold least often."""
    from ...analysis.model import validation

    if output_format != "table":
        show([dataclasses.asdict(each) for each in found], output_format)
        return
    print(validation.in_words(found))
    show_first(validation.by_implementation(found), every=every)


def show_profile(rows: Sequence[ProfileRow], output_format: str) -> None:
    """Print profiled cases."""
    if output_format == "json":
        show([dataclasses.asdict(row) for row in rows], "json")
        return
    show(_profile_rows(rows), output_format)
    if output_format == "table":
        print()
        show(_kernel_rows(rows), "table", title="kernels")
        for n, row in enumerate(rows):
            for said in filter(None, (row.reason and f"{row.status}: {row.reason}", row.explanation)):
                print(f"case {n}: {said}")


def _profile_rows(rows: Sequence[ProfileRow]) -> list[dict[str, Any]]:
    """Return what people see of the cases: GFLOP and GB, measured, run by the kernels and counted, and the ratios."""
    flops = {"measured": "measured_tensor_flops", "executed": "executed_tensor_flops", "counted": "tensor_flops"}
    moved = {"read": "dram_read_bytes", "written": "dram_write_bytes", "l2": "l2_bytes", "executed": "executed_bytes"}

    def giga(row: ProfileRow, unit: str, columns: Mapping[str, str]) -> dict[str, float | None]:
        values = {f"{name}_{unit}": getattr(row, column) for name, column in columns.items()}
        return {name: None if value is None else value / 1e9 for name, value in values.items()}

    return [
        {
            "case": n,
            **{name: getattr(row, name) for name in ("op", "impl", "mode", "seq_len")},
            "dims": f"{row.head_dim_qk}/{row.head_dim_v}" if row.head_dim_v else None,
            "chunk": row.chunk_size,
            "status": row.status,
            "kernels": row.launches,
            **giga(row, "gflop", flops),
            "flops_ratio": row.tensor_flops_ratio,
            **giga(row, "gb", {**moved, "counted": "bytes"}),
            "bytes_ratio": row.bytes_ratio,
        }
        for n, row in enumerate(rows)
    ]


def _kernel_rows(rows: Sequence[ProfileRow]) -> list[dict[str, Any]]:
    """Return a row per case and kernel: launches, measured tensor GFLOP and device-memory traffic."""
    shown: dict[tuple[int, str], dict[str, Any]] = {}
    for n, row in enumerate(rows):
        columns = (row.kernel_names or (), row.kernel_tensor_flops or (), row.kernel_dram_bytes or ())
        for name, flops, moved in zip(*columns, strict=True):
            empty = {"case": n, "kernel": name, "launches": 0, "tensor_gflop": 0.0, "dram_gb": 0.0}
            total = shown.setdefault((n, name), empty)
            total["launches"] += 1
            total["tensor_gflop"] += flops / 1e9
            total["dram_gb"] += moved / 1e9
    return list(shown.values())


def count_in_words(result: Count, columns: Mapping[str, Any]) -> str:
    """Return a count in a line: of which problem, and what it comes to.

    Args:
        columns: sizes and dtypes.
    """
    problem = describe_sizes({**dict.fromkeys(CASE_COLUMNS), **columns})
    factor = "" if result.causal_factor is None else f", causal factor {result.causal_factor}"
    return (
        f"{result.op} {result.formulation} {result.mode} {problem}: {result.flops:.4g} FLOPs, {result.bytes:.4g} "
        f"bytes, intensity {result.intensity:.4g} FLOP per byte{factor}"
    )


def count_rows(result: Count) -> list[dict[str, Any]]:
    """Return a count as rows to print: its parts, and totals."""
    rows: list[dict[str, Any]] = [{"part": name, "flops": value} for name, value in result.parts.items()]
    rows += [{"part": name, "bytes": value} for name, value in result.byte_parts.items()]
    rows.append({"part": "total", "flops": result.flops, "bytes": result.bytes})
    rows.append({"part": "on tensor cores", "flops": result.tensor_flops})
    rows.append({"part": "compulsory", "bytes": result.compulsory_bytes})
    if result.executed_tensor_flops is not None:
        executed = {"flops": result.executed_tensor_flops, "bytes": result.executed_bytes}
        rows.append({"part": "executed on tensor cores", **executed})
    return rows


def show_reproduced(found: Sequence[Found], device: str, *, every: bool) -> None:
    """Print the claims of documents with what is compared, long tables cut without ``every``, and the verdicts."""
    from ...analysis.reproduce.written import line_rows

    for entry, claims in grouped(found, lambda each: each.asked.id).items():
        asked = claims[0].asked
        say(f"{entry}: {asked.document.title}, {asked.entry.where}; rows of {device}", "\n\n")
        for each in claims:
            say(each.asked.claim.text)
            if each.lines:
                show_first(line_rows(each), every=every, fold=True)
            say(f"{each.verdict}: {each.reason}", "\n\n")
