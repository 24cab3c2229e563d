"""How far repeats differ: what the thresholds of host time and memory in results/thresholds.toml were found from.

    python -m lrbench.tests.tools.repeats [RESULTS ...]        # the committed results, where none are named

Repeats are two rows of one case from different runs, of the same commit, device and versions, on an idle machine. The
table has a line for each quantity, device and package: how many repeats there are, their median and largest ratio, how
many are beyond what the file tolerates, and how often a check of :data:`CASES` cases would raise a false alarm.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from lrbench.analysis.check.thresholds import QUANTITIES, Thresholds, load_thresholds
from lrbench.bench.show.display import show
from lrbench.results.select import COMPARED_COLUMNS, Row, device_of, grouped, load_rows
from lrbench.results.store import HERE, committed_results

COLUMNS = ("host_ms", "peak_memory_bytes")
CASES = 100
"""Of a run that is checked: most of the committed ones have fewer."""

TAIL = 0.1
"""Share of the ratios from which the tail is extrapolated."""

Repeat = tuple[Row, Row]

_same = itemgetter("case_id", "git_commit", "provider_version", *COMPARED_COLUMNS)


def repeats(rows: Iterable[Row]) -> list[Repeat]:
    """Return (older, newer) row of every repeat."""
    idle = (row for row in rows if row["status"] == "ok" and not row["noise"] and row["git_commit"])
    cases = (sorted(group, key=itemgetter("measured_at")) for group in grouped(idle, _same).values())
    pairs = itertools.chain.from_iterable(itertools.combinations(case, 2) for case in cases)
    return [(old, new) for old, new in pairs if old["run_id"] != new["run_id"]]


def log_ratios(found: Sequence[Repeat], column: str) -> Any:
    """Return how far each repeat's values are apart: the logarithm of the larger over the smaller."""
    return np.array([abs(np.log(new[column] / old[column])) for old, new in found if old[column] and new[column]])


def beyond(found: Sequence[Repeat], column: str, thresholds: Thresholds) -> int:
    """Return how many repeats would be regressions, were the smaller value the baseline's."""
    (quantity,) = (each for each in QUANTITIES if each.column == column)
    alarms = 0
    for old, new in found:
        limits = thresholds.limits(new)
        if None not in (old[column], new[column]):
            least, most = sorted((old[column], new[column]))
            floor = limits[quantity.floor]
            alarms += most - least > max(limits[quantity.limit] * least, floor)
    return alarms


def alarm_rate(logs: Any, limit: float) -> float:
    """Return how often a check of :data:`CASES` cases has one whose ratio grew beyond ``limit`` by chance.

    The excess of the largest ratios over the quantile at which they begin is taken as exponential, which overestimates:
    its mean falls from there on. Half of the differences are growth.
    """
    start = np.quantile(logs, 1 - TAIL)
    excess = float(np.mean(logs[logs > start] - start))
    return float(CASES * TAIL / 2 * np.exp(-(np.log(limit) - start) / excess))


def table(rows: Sequence[Row], thresholds: Thresholds) -> list[dict[str, Any]]:
    """Return what repeats do, of each quantity: all of them, then by device and package."""
    lines = []
    found = repeats(rows)
    for column in COLUMNS:
        measured = {(device_of(row), row["provider"]) for row in rows if row[column] is not None}
        for where in (("all", "all"), *sorted(measured)):
            of = [pair for pair in found if where in (("all", "all"), (device_of(pair[0]), pair[0]["provider"]))]
            logs = log_ratios(of, column)
            line: dict[str, Any] = dict(zip(("quantity", "device", "package"), (column, *where), strict=True))
            line["repeats"] = len(logs) or "none"
            if len(logs):
                median, largest = np.exp(np.quantile(logs, (0.5, 1)))
                line |= {"median": float(median), "largest": float(largest), "beyond": beyond(of, column, thresholds)}
            if column == "host_ms" and where == ("all", "all"):
                line[f"false alarms in a check of {CASES}"] = alarm_rate(logs, 1 + thresholds.defaults["host"])
            lines.append(line)
    return lines


if __name__ == "__main__":
    results = [Path(each) for each in sys.argv[1:]] or committed_results()
    show(table(load_rows(results), load_thresholds(HERE / "thresholds.toml")), "table")
