"""How often predictions hold: each problem left out of the rows in turn, and rows of one accelerator by another's fit.

A row counts as held if its time lies in the interval that a fit without any row of its problem gives it. A fit to
another accelerator has none of the rows of this one, and carries the very case's time where it has it, as an answer
would.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

from ...results.select import grouped, load_rows
from ..accelerators.known import get_accelerator
from ..counts.formulations import MODES
from .fit import Row, case_of, errors_of, fit_rows, newest_cases, problem_of
from .prediction import Answer, Prediction, stored_rows
from .terms import FORMULATION

FOLDS = 10
"""Problems of more than these are left out several at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Rows of one implementation, mode and dtype that a fit had not seen, and what it said of them.

    Attributes:
        fitted_on, held_out_on: keys of the accelerators of the fit and of the rows.
        rows: the number of rows that a fit was there for; ``held`` of them lay in their intervals.
        unfitted: the number of rows that nothing could be fitted for.
        median_error: absolute relative error of the predicted times, None without one.
        width: median of the intervals' high over low end, None without one.
    """

    op: str
    impl: str
    mode: str
    dtype: str
    fitted_on: str
    held_out_on: str
    rows: int
    held: int
    unfitted: int
    median_error: float | None
    width: float | None


def validate(results: Sequence[Path], ops: Sequence[str] | None = None, impl: str | None = None) -> Iterator[Coverage]:
    """Yield the coverage of each implementation's 90 % intervals, mode by mode; not of what is no longer declared.

    Args:
        results: result files and folders.
        ops: operations; None for all.
        impl: an implementation; None for all.
    """
    groups = load_rows(results, ("mode", "dtype"), {"status": "ok"})
    for mode, dtype in dict.fromkeys((row["mode"], row["dtype"]) for row in groups):
        rows = newest_cases(stored_rows(results, mode, dtype))
        devices = dict.fromkeys(row["device_accelerator"] for row in rows)
        for op, name in dict.fromkeys((row["op"], row["impl"]) for row in rows):
            declared = mode in MODES and FORMULATION.kind(op, name, mode, dtype) is not None
            if declared and (ops is None or op in ops) and (impl is None or impl == name):
                for here, fitted_on in itertools.product(devices, repeat=2):
                    if found := _predicted(rows, op, name, mode, dtype, fitted_on, here):
                        names = {"op": op, "impl": name, "mode": mode, "dtype": dtype}
                        yield _coverage(found, **names, fitted_on=fitted_on, held_out_on=here)


def _predicted(
    rows: Sequence[Row], op: str, impl: str, mode: str, dtype: str, fitted_on: str, here: str
) -> list[tuple[Row, Prediction]]:
    """Return an implementation's rows on an accelerator with what fits without them predict."""
    others = [row for row in rows if row["device_accelerator"] == fitted_on]
    same = [row for row in rows if (row["op"], row["impl"]) == (op, impl)]
    own = [row for row in same if row["device_accelerator"] == here and "stands_in" not in row]
    fold_of = {problem: n % FOLDS for n, problem in enumerate(dict.fromkeys(map(problem_of, own)))}
    if not any(row["device_accelerator"] == fitted_on for row in same):
        return []
    found, accelerator = [], get_accelerator(here)
    # A fit to another accelerator has seen none of these rows anyway.
    for held_out in grouped(own, lambda row: fold_of[problem_of(row)] if fitted_on == here else 0).values():
        seen = [row for row in others if not any(row is each for each in held_out)]
        fit = functools.cache(functools.partial(fit_rows, seen, op, impl, mode, dtype, device=fitted_on))
        known = [row for row in seen if (row["op"], row["impl"]) == (op, impl)]
        for row in held_out:
            asked = Answer(case=case_of(row, mode, dtype), accelerator=accelerator, rows=known, fit=fit)
            found.append((row, asked.predicted))
    return found


def _coverage(found: Sequence[tuple[Row, Prediction]], **names: str) -> Coverage:
    fitted = [(row["time_ms"], each) for row, each in found if each.time_ms is not None]
    errors = [time_ms / each.time_ms for time_ms, each in fitted if each.time_ms is not None]
    return Coverage(
        **names,
        rows=len(fitted),
        held=sum(each.low_ms <= time_ms <= each.high_ms for time_ms, each in fitted),
        unfitted=len(found) - len(fitted),
        median_error=errors_of(errors)[0] if errors else None,
        width=median_high(each.high_ms / each.low_ms for _, each in fitted) if fitted else None,
    )


def by_chance(rows: int) -> tuple[int, int]:
    """Return the fewest and the most of so many rows that are likely in intervals which hold 85 to 95 % of all.

    Fewer, or more, have a chance below 5 %: of 6 rows that is fewer than 4. Rows of one problem err alike, so that
    chance has somewhat more room than this.
    """

    def at_least(held: int, share: float) -> float:
        return sum(math.comb(rows, n) * share**n * (1 - share) ** (rows - n) for n in range(held, rows + 1))

    few = next(held for held in range(rows + 1) if at_least(held + 1, 0.85) <= 0.95)
    return few, next(held for held in range(rows, -1, -1) if at_least(held, 0.95) >= 0.05)


def by_implementation(found: Sequence[Coverage]) -> list[dict[str, Any]]:
    """Return a row per implementation and accelerator, all modes together, the least held first.

    ``chance`` is between which shares intervals of 85 to 95 % hold of so many rows (:func:`by_chance`). The median
    error and the width, high over low end, are those of the worst mode. ``fit`` says from which accelerator to which,
    where there is more than one.
    """
    groups = _groups(found)
    several = len({fit for *_, fit in groups}) > 1
    rows = []
    for names, group in groups.items():
        counted, held = sum(each.rows for each in group), sum(each.held for each in group)
        rows.append(
            {
                **dict(zip(("op", "impl", *(("fit",) if several else ())), names, strict=False)),
                "rows": counted,
                "held": f"{held / counted:.0%}",
                "chance": "{:.0%} to {:.0%}".format(*(each / counted for each in by_chance(counted))),
                "error": f"{max(each.median_error or 0.0 for each in group):.0%}",
                "width": f"{max(each.width or 0.0 for each in group):.3g}",
            }
        )
    return sorted(rows, key=lambda row: float(row["held"].rstrip("%")))


def _groups(found: Sequence[Coverage]) -> dict[tuple[str, str, str], list[Coverage]]:
    """Return what was found of each implementation and pair of accelerators that there was a fit for."""

    def names(each: Coverage) -> tuple[str, str, str]:
        carried = "" if each.fitted_on == each.held_out_on else f"{each.fitted_on} to "
        return each.op, each.impl, carried + each.held_out_on

    return grouped((each for each in found if each.rows), names)


def in_words(found: Sequence[Coverage]) -> str:
    """Return how many left-out rows lay in their intervals, where they were fitted and elsewhere."""
    lines = []
    for what, same in (("on the accelerator of the fit", True), ("by a fit carried from another accelerator", False)):
        group = [each for each in found if (each.fitted_on == each.held_out_on) == same]
        rows, held = sum(each.rows for each in group), sum(each.held for each in group)
        said = f"{held / rows:.1%} of {rows} rows left out lie in their 90 % intervals" if rows else "no rows"
        lines.append(f"{what}: {said}")
    totals = [(sum(each.rows for each in group), sum(each.held for each in group)) for group in _groups(found).values()]
    if totals:
        few = sum(held < by_chance(rows)[0] for rows, held in totals)
        many = sum(held > by_chance(rows)[1] for rows, held in totals)
        lines.append(
            f"of {len(totals)} implementations {len(totals) - few - many} hold as many as 85 to 95 % come to by "
            f"chance, {few} fewer, {many} more"
        )
    unfitted = sum(each.unfitted for each in found)
    return "\n".join([*lines, *([f"no fit for {unfitted} rows"] if unfitted else [])])
