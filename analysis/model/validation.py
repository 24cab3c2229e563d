"""How often predictions hold: each problem left out of the rows in turn, and rows of one accelerator by another's fit.

A row counts as held if its time lies in the interval that a fit without any row of its problem gives it. A fit to
another accelerator has none of the rows of this one, and carries the very case's time where it has it, as an answer
would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...results.names import current_name
from ...results.schema import SIZE_COLUMNS
from ...results.select import load_rows
from ..accelerators.known import get_accelerator
from .fit import Row, case_of, errors_of, newest_cases
from .prediction import Prediction, answer, fit_to, stored_rows

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
    """Yield the coverage of each implementation's 90 % intervals, mode by mode.

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
            if (ops is None or op in ops) and (impl is None or current_name(op, impl) == name):
                for here in devices:
                    for fitted_on in devices:
                        found = _predicted(rows, op, name, mode, dtype, fitted_on, here)
                        if found:
                            yield _coverage((op, name, mode, dtype, fitted_on, here), found)


def _predicted(
    rows: Sequence[Row], op: str, impl: str, mode: str, dtype: str, fitted_on: str, here: str
) -> list[tuple[Row, Prediction]]:
    """Return an implementation's rows on an accelerator with what fits without them predict."""
    others = [row for row in rows if row["device_accelerator"] == fitted_on]
    own = [row for row in rows if (row["op"], row["impl"], row["device_accelerator"]) == (op, impl, here)]
    problems = [tuple(row[name] for name in SIZE_COLUMNS if name != "chunk_size") for row in own]
    fold_of = {problem: n % FOLDS for n, problem in enumerate(dict.fromkeys(problems))}
    # A fit to another accelerator has seen none of these rows anyway.
    folds = [fold_of[problem] if fitted_on == here else 0 for problem in problems]
    if fitted_on != here and not any((row["op"], row["impl"]) == (op, impl) for row in others):
        return []
    found = []
    for fold in dict.fromkeys(folds):
        held_out = [row for row, its in zip(own, folds, strict=True) if its == fold]
        seen = [row for row in others if not any(row is each for each in held_out)]
        fit, _ = fit_to(seen, op, impl, mode, dtype, device=fitted_on)
        for row in held_out:
            found.append((row, answer(case_of(row, impl, mode, dtype), get_accelerator(here), fit, seen).predicted))
    return found


def _coverage(names: tuple[str, ...], found: Sequence[tuple[Row, Prediction]]) -> Coverage:
    op, impl, mode, dtype, fitted_on, here = names
    fitted = [(row["time_ms"], each) for row, each in found if each.time_ms is not None]
    errors = [time_ms / each.time_ms for time_ms, each in fitted if each.time_ms is not None]
    widths = sorted(each.high_ms / each.low_ms for _, each in fitted)
    return Coverage(
        op=op,
        impl=impl,
        mode=mode,
        dtype=dtype,
        fitted_on=fitted_on,
        held_out_on=here,
        rows=len(fitted),
        held=sum(each.low_ms <= time_ms <= each.high_ms for time_ms, each in fitted),
        unfitted=len(found) - len(fitted),
        median_error=errors_of(errors)[0] if errors else None,
        width=widths[len(widths) // 2] if widths else None,
    )


def by_implementation(found: Sequence[Coverage]) -> list[dict[str, Any]]:
    """Return a row per implementation and accelerator, all modes together, the least held first.

    The median error and the width, high over low end, are those of the worst mode. ``fit`` says from which accelerator
    to which, where there is more than one.
    """
    groups: dict[tuple[str, str, str], list[Coverage]] = {}
    for each in found:
        carried = "" if each.fitted_on == each.held_out_on else f"{each.fitted_on} to "
        groups.setdefault((each.op, each.impl, carried + each.held_out_on), []).append(each)
    counted = {names: sum(each.rows for each in group) for names, group in groups.items()}
    held = {names: sum(each.held for each in groups[names]) / rows for names, rows in counted.items() if rows}
    several = len({fit for *_, fit in held}) > 1
    return [
        {
            **dict(zip(("op", "impl", *(("fit",) if several else ())), names, strict=False)),
            "rows": counted[names],
            "held": f"{share:.0%}",
            "error": f"{max(each.median_error or 0.0 for each in groups[names]):.0%}",
            "width": max(each.width or 0.0 for each in groups[names]),
        }
        for names, share in sorted(held.items(), key=lambda item: item[1])
    ]


def in_words(found: Sequence[Coverage]) -> str:
    """Return how many left-out rows lay in their intervals, where they were fitted and elsewhere."""
    lines = []
    for what, same in (("on the accelerator of the fit", True), ("by a fit carried from another accelerator", False)):
        group = [each for each in found if (each.fitted_on == each.held_out_on) == same]
        rows, held = sum(each.rows for each in group), sum(each.held for each in group)
        if rows:
            lines.append(f"{what}: {held / rows:.1%} of {rows} rows left out lie in their 90 % intervals")
        else:
            lines.append(f"{what}: no rows")
    unfitted = sum(each.unfitted for each in found)
    return "\n".join([*lines, *([f"no fit for {unfitted} rows"] if unfitted else [])])
