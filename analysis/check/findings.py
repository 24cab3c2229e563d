"""What the regression check found: as rows, JSON, JUnit XML, and Markdown for a step summary or a comment."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from ...results.contents import markdown_table
from ...results.select import describe_sizes, grouped
from .compare import NOISY, ends
from .regression import CaseResult, CheckResult, describe_case, summary
from .statistics import Interval

QUIET = ("ok", "new", "not measured")
"""Verdicts that a table for people leaves out."""

MAX_MARKDOWN_ROWS = 100
"""A step summary may have 1 MiB, a comment 65,536 characters."""


def noteworthy(found: CheckResult) -> tuple[CaseResult, ...]:
    """Return the cases that people want to see: all but those where nothing happened, and allowed absences."""
    return tuple(
        case for case in found.cases if case.verdict in found.failing or case.verdict not in (*QUIET, "missing")
    )


def table_rows(cases: Sequence[CaseResult]) -> list[dict[str, Any]]:
    """Return cases as rows to print."""
    rows = []
    for case in cases:
        time = case.time
        times = (time.old, time.new, time.ratio, *ends(Interval(time.low, time.high)).values()) if time else [None] * 5
        rows.append(
            {
                "verdict": case.verdict,
                **{name: case.row[name] for name in ("op", "impl", "mode")},
                "case": describe_sizes(case.row),
                **dict(zip(("old_ms", "new_ms", "ratio", "low", "high"), times, strict=True)),
                "reason": case.reason,
            }
        )
    return rows


def brief_rows(cases: Sequence[CaseResult]) -> list[dict[str, Any]]:
    """Return cases as rows for people: what was measured by itself, the others by their cause."""
    causes = grouped(cases, lambda case: (case.verdict, id(case) if case.metrics else case.reason))
    return [
        {
            "verdict": alike[0].verdict,
            "case": (f"{len(alike)} cases such as " if len(alike) > 1 else "") + describe_case(alike[0]),
            "why": alike[0].reason,
        }
        for alike in causes.values()
    ]


def as_dict(found: CheckResult) -> dict[str, Any]:
    """Return the findings as one JSON object."""
    return {
        **{n: getattr(found, n) for n in ("passed", "accelerator", "counts", "compared", "planned", "min_compared")},
        "failing_verdicts": list(found.failing),
        "environment": list(found.environment),
        "cases": [
            {
                "case_id": case.row["case_id"],
                "case": describe_case(case),
                "verdict": case.verdict,
                "reason": case.reason,
                "measured_again": case.measured_again,
                "metrics": [
                    {**dataclasses.asdict(each), **ends(Interval(each.low, each.high))} for each in case.metrics
                ],
            }
            for case in found.cases
        ],
    }


def junit_xml(found: CheckResult) -> str:
    """Return the findings as JUnit XML.

    A case is a failure where it fails the check and skipped where it is unclear or tolerated; the suite has one error
    more where too few cases were compared.
    """
    skipped, errors = sum(_is_skipped(case, found) for case in found.cases), int(found.too_few)
    numbers = map(str, (len(found.cases) + errors, len(found.failures), skipped, errors))
    counts = dict(zip(("tests", "failures", "skipped", "errors"), numbers, strict=True))
    root = ElementTree.Element("testsuites", {"name": "lrbench check", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": f"lrbench check on {found.accelerator}", **counts})
    if found.environment:
        properties = ElementTree.SubElement(suite, "properties")
        for line in found.environment:
            name, _, value = line.partition(": ")
            ElementTree.SubElement(properties, "property", {"name": _printable(name), "value": _printable(value)})
    if errors:
        element = ElementTree.SubElement(suite, "testcase", {"classname": "lrbench.check", "name": "cases compared"})
        ElementTree.SubElement(element, "error", {"message": _printable(summary(found))})
    for case in found.cases:
        row, time = case.row, case.time
        attributes = {
            "classname": _printable(f"{row['op']}.{row['impl']}.{row['mode']}"),
            "name": _printable(describe_sizes(row)),
            "time": f"{(time.new if time else 0.0) / 1e3:.6f}",
        }
        element = ElementTree.SubElement(suite, "testcase", attributes)
        message = _printable(f"{case.verdict}: {case.reason}")
        if case.verdict in found.failing:
            failure = ElementTree.SubElement(element, "failure", {"message": message, "type": case.verdict})
            failure.text = _printable(describe_case(case))
        elif _is_skipped(case, found):
            ElementTree.SubElement(element, "skipped", {"message": message})
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _is_skipped(case: CaseResult, found: CheckResult) -> bool:
    return case.verdict in ("unclear", NOISY, "missing", "not measured") and case.verdict not in found.failing


def _printable(text: str) -> str:
    """Return a text without the control characters that XML cannot hold; reasons quote the output of compilers."""
    return re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd]", "?", text)


def markdown(found: CheckResult) -> str:
    """Return the findings as Markdown: the outcome, what differs between the environments, and a table of cases."""
    lines = [f"### lrbench check {summary(found)}", ""]
    if found.environment:
        lines += ["The environments differ (baseline | run), which may be the cause:", ""]
        lines += [f"- {_escaped(line)}" for line in found.environment] + [""]
    cases = noteworthy(found)
    lines += markdown_table([_markdown_row(case, found) for case in cases[:MAX_MARKDOWN_ROWS]]) if cases else []
    if len(cases) > MAX_MARKDOWN_ROWS:
        lines += [f"and {len(cases) - MAX_MARKDOWN_ROWS} more", ""]
    return "\n".join(lines)


def _markdown_row(case: CaseResult, found: CheckResult) -> dict[str, str]:
    bold, row = "**" * (case.verdict in found.failing), dict.fromkeys(("old ms", "new ms", "ratio (90 % interval)"), "")
    if time := case.time:
        ends = f" ({time.low:.3f} to {time.high:.3f})" if math.isfinite(time.high) else ""
        row = dict(zip(row, (f"{time.old:.4g}", f"{time.new:.4g}", f"{time.ratio:.3f}{ends}"), strict=True))
    named = {"": f"{bold}{case.verdict}{bold}", "case": _escaped(describe_case(case))}
    return {**named, **row, "why": _escaped(case.reason)}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("<", "&lt;").replace("\n", " ")
