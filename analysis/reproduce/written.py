"""Verdicts as rows and as the page docs/reproductions.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from ...results.contents import markdown_table
from ...results.select import grouped
from .published import in_words
from .verdicts import HOLDS, NOT, PARTLY, UNDECIDED, UNMEASURED, VERDICTS, ClaimLine, Found, shown

HEAD = """# Reproductions

Are the claims of papers and pages true on this GPU? Below is every claim of the documents whose kernels lrbench has,
with the number that the document states, ours, and a verdict. A number is what the claim is about, such as a ratio of
times; a range covers the claim's points (sequence lengths, modes and so on). Ours are from the committed rows, or
counted. The times of a ratio are of rows that were timed in turn, in one process. To see the points of a claim, run its
command; with `--run` it measures what is missing.

- *Holds in part*: at some of the points, at all that have a row, or only from a longer length on than stated.
- *Not decided*: a bound lies inside the 95 % interval of the ratio.
- *Not measured together*: there are rows of all sides, but of different runs alone.
- *Not testable here*, *not measured*: for the reason given.
- A time that a document states for another accelerator *holds* if it lies in the 90 % interval that the model gives for
  it ([how](choosing.md#another-accelerator)). Where we measured that accelerator, it holds from a tenth below our time
  there to 1.5 times our time, since other software may be slower (`published.py` says where the 1.5 is from).

The claims are data in `analysis/reproduce/`, a file for each document; `entries.py` says how to write one.
`lrbench reproduce --format markdown` writes this page.
"""

MAX_VALUES = 12
"""Values along an axis that stand in the columns of a table."""


def list_rows(found: Sequence[Found], *, lines: bool = False) -> list[dict[str, Any]]:
    """Return a row for each claim; with ``lines``, also those of its points."""
    return [
        {
            "id": each.asked.id,
            "document": each.asked.document.title,
            "where": each.asked.entry.where,
            "claim": each.asked.claim.text,
            "says": each.document,
            "ours": each.ours,
            "verdict": each.verdict,
            "reason": each.reason,
            **({"lines": line_rows(each, words=False)} if lines else {}),
        }
        for each in found
    ]


def line_rows(found: Found, *, words: bool = True) -> list[dict[str, Any]]:
    """Return a row for each line of a claim: where, the document's number, ours, and what that is the outcome of.

    Args:
        words: whether numbers are texts with their units, those that make a table too wide left out.
    """
    claim, rows = found.asked.claim, []
    for line in found.lines:
        of: dict[str, Any] = {name: [*values] for name, values in line.values.items()}
        if words:
            few = of if len(of) <= MAX_VALUES else {}
            of = {name: " | ".join(shown(claim, each, "value") for each in values) for name, values in few.items()}
        rows.append(
            {
                **line.point,
                "document": line.document,
                **_outcome(found, line, words=words),
                **({} if line.interval else of),
                "verdict": {None: UNMEASURED, 1.0: HOLDS, 0.5: PARTLY, 0.0: NOT}[line.holds]
                if line.decided
                else UNDECIDED,
            }
        )
    return rows


def _outcome(found: Found, line: ClaimLine, *, words: bool) -> dict[str, Any]:
    """Return what a line came to; of a translated time the measured ones, and what the model makes of it there."""
    claim = found.asked.claim
    if line.ends is not None and line.ours is not None:
        low, high = line.ends
        if words:
            return {"here": f"{shown(claim, line.ours)} ({low:.3g} to {high:.3g})"}
        return {"here": line.ours, "here_low": low, "here_high": None if math.isinf(high) else high}
    if line.interval is None:
        return {"here": shown(claim, line.ours) if words or line.ours == math.inf else line.ours}
    ((measured,),), (low, high), there = line.values.values(), line.interval, found.asked.document.device
    if words:
        of_model = f"{shown(claim, line.ours)} ({low:.3g} to {high:.3g})"
        return {"here": shown(claim, measured), f"measured on {there}": shown(claim, line.there), there: of_model}
    return {
        "here": measured, f"{there}_measured": line.there, there: line.ours, f"{there}_low": low, f"{there}_high": high
    }  # fmt: skip


def page(found: Sequence[Found], device: str) -> str:
    """Return the page: a table a document, a line a claim."""
    parts = [HEAD, f"Measured on `{device}`. " + _tally(found) + "\n", in_words(found), ""]
    for (title, ours), claims in grouped(found, lambda each: (each.asked.document.title, each.asked.ours)).items():
        head = f"### The same of lrbench's own kernels alone: {title}" if ours else f"## {title}"
        parts += [head, "", _tally(claims), ""]
        rows = []
        for row in list_rows(claims):
            # What ours is has a column of its own.
            reason = row["reason"].removeprefix(row["ours"]).removeprefix(";").strip()
            verdict = f"**{row['verdict']}**{reason and ': '}{reason}"
            cells = {"document": row["says"], "ours": row["ours"], "verdict": verdict}
            command = {"command": f"`lrbench reproduce {row['id']}`"}
            rows.append({"where": row["where"], "claim": row["claim"], **cells, **command})
        parts += markdown_table(rows)
    return "\n".join(parts)


def _tally(found: Sequence[Found]) -> str:
    """Return how many claims have which verdict, in words."""
    numbers = {verdict: len(items) for verdict, items in grouped(found, attrgetter("verdict")).items()}
    counted = ", ".join(f"{verdict} {numbers[verdict]}" for verdict in VERDICTS if verdict in numbers)
    return f"{len(found)} claims: {counted}."
