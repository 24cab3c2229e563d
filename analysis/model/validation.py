"""How often predictions hold, on rows that they have not seen: on an accelerator with rows of its own, with those of a
calibration alone, and with none.

A row counts as held if its time lies in the interval that is predicted for it

- by the rows of its accelerator, those of its problem left out (``fit``: the accelerator);
- by those of another accelerator alone (``other to this``), the very case's among them, as for a new accelerator;
- by those of the other one and the calibration's on this, those of its problem left out on both (``calibrated``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

from ...results.select import grouped, load_rows
from ..accelerators.known import get_accelerator
from ..counts import count_case
from ..counts.formulations import MODES
from .fit import USELESS, Z90, Row, Surface, case_of, kinds, newest_cases, problems, surface, trust
from .prediction import stored_rows
from .runtime_model import floor_ms

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A measured row and what was predicted for it.

    Attributes:
        fitted_on, held_out_on: keys of the accelerators whose rows the prediction rests on, and of the row's own.
        calibrated: whether it also rests on a calibration's rows on the row's own accelerator.
        low_ms, likely_ms, high_ms: as predicted, None where the rows say too little.
    """

    op: str
    impl: str
    mode: str
    dtype: str
    case_id: str
    fitted_on: str
    held_out_on: str
    calibrated: bool = False
    time_ms: float
    low_ms: float | None = None
    likely_ms: float | None = None
    high_ms: float | None = None

    @property
    def held(self) -> bool:
        """Whether the time lies in the interval."""
        return self.low_ms is not None and self.high_ms is not None and self.low_ms <= self.time_ms <= self.high_ms


def validate(
    results: Sequence[Path],
    ops: Sequence[str] | None = None,
    impl: str | None = None,
    calibration: Collection[str] = (),
) -> Iterator[LeftOut]:
    """Yield what is predicted for each measured row without it; not for what is no longer declared.

    Args:
        results: result files and folders.
        ops: operations; None for all.
        impl: an implementation; None for all.
        calibration: ids of the cases of a calibration.
    """
    groups = load_rows(results, ("mode", "dtype"), {"status": "ok"})
    for mode, dtype in dict.fromkeys((row["mode"], row["dtype"]) for row in groups):
        rows = newest_cases(row for row in stored_rows(results, mode, dtype) if not row["noise"])
        devices = [*dict.fromkeys(row["device_accelerator"] for row in rows)]
        for kind in kinds(grouped(rows, itemgetter("op", "impl")), mode, dtype).values() if mode in MODES else ():
            for one in _of_kind(kind, mode, dtype, devices, calibration):
                if (ops is None or one.op in ops) and (impl is None or one.impl == impl):
                    yield one


def _of_kind(
    rows: Sequence[Row], mode: str, dtype: str, known_on: Sequence[str], calibration: Collection[str]
) -> Iterator[LeftOut]:
    import numpy as np

    rows = [row for row in rows if count_case(*case_of(row, mode, dtype), launches=False) is not None]
    devices = np.array([row["device_accelerator"] for row in rows])
    own = np.array(["stands_in" not in row for row in rows])
    calibrating = own & np.array([row["case_id"] in calibration for row in rows])
    groups = problems(rows)
    for here in known_on:
        if not (own & (devices == here)).any():
            continue
        known, at_here = surface(rows, mode, dtype, get_accelerator(here)), devices == here
        assert known is not None, "the rows are counted"
        yield from _predicted(known, groups, at_here, at_here & own, here, here)
        for there in (each for each in known_on if each != here):
            at_there = devices == there
            apart = np.where(at_here, -1, groups)
            if at_there.any():
                yield from _predicted(known, apart, at_there, at_here & own, there, here)
            if (calibrating & at_here).any():
                seen = at_there | (calibrating & at_here)
                yield from _predicted(known, groups, seen, at_here & own & ~seen, there, here, calibrated=True)


def _predicted(
    known: Surface, groups: np.ndarray, seen: np.ndarray, asked: np.ndarray, there: str, here: str, **names: bool
) -> Iterator[LeftOut]:
    """Yield the rows asked for as those seen predict them, without those of their group."""
    import numpy as np

    means, variances = known.left_out(groups, seen)
    deviations = np.sqrt(variances)
    errors = np.abs(known.logs - means) / deviations
    for n in map(int, np.flatnonzero(asked)):
        row, case, count = known.rows[n], known.cases[n], count_case(*known.cases[n])
        others = (known.points.names == known.points.names[n]) & (groups != groups[n]) & seen
        likely = float(known.points.expected_ms[n] * np.exp(means[n]))
        half = math.exp(trust([*map(float, errors[others])]) * Z90 * deviations[n])
        said: tuple[float | None, ...] = (None,) * 3
        if count is not None and half**2 <= USELESS:
            floor = floor_ms(count, get_accelerator(here), case.dtype)
            least = max(floor, known.least_ms(known.points.sizes[n], others))
            said = max(likely / half, floor), max(likely, least), max(likely * half, least)
        yield LeftOut(
            op=case.op, impl=case.impl, mode=case.mode, dtype=case.dtype, case_id=row["case_id"], fitted_on=there,
            held_out_on=here, time_ms=row["time_ms"], low_ms=said[0], likely_ms=said[1], high_ms=said[2], **names,
        )  # fmt: skip


def by_chance(rows: int) -> tuple[int, int]:
    """Return the fewest and the most of so many rows that are likely in intervals which hold 85 to 95 % of all.

    Fewer, or more, have a chance below 5 %: of 6 rows that is fewer than 4. Rows of one problem err alike, so that
    chance has somewhat more room than this.
    """

    def at_least(share: float) -> list[float]:
        chances = [math.comb(rows, n) * share**n * (1 - share) ** (rows - n) for n in range(rows, -1, -1)]
        return [*itertools.accumulate(chances)][::-1]

    low, high = at_least(0.85), at_least(0.95)
    few = next(held for held in range(rows + 1) if held == rows or low[held + 1] <= 0.95)
    return few, next(held for held in range(rows, -1, -1) if high[held] >= 0.05)


def summary(found: Sequence[LeftOut]) -> dict[str, Any]:
    """Return of rows with a prediction how many there are and lie in their intervals, and the medians of the absolute
    relative errors of the predicted times and of how many times as long the high end is as the time."""
    fitted = [each for each in found if each.likely_ms]
    return {
        "rows": len(fitted),
        "held": sum(each.held for each in fitted),
        "error": median_high(abs((each.likely_ms or 0.0) / each.time_ms - 1) for each in fitted),
        "width": median_high(math.sqrt((each.high_ms or 0.0) / (each.low_ms or 1.0)) for each in fitted),
    }


def _way(each: LeftOut) -> str:
    if each.fitted_on == each.held_out_on:
        return each.held_out_on
    return f"{each.fitted_on} to {each.held_out_on}{', calibrated' * each.calibrated}"


def by_implementation(found: Sequence[LeftOut]) -> list[dict[str, Any]]:
    """Return a row per implementation and way to predict it, all modes together, the least held first.

    ``chance`` is between which shares intervals of 85 to 95 % hold of so many rows (:func:`by_chance`). The error and
    the width, how many times as long on either side, are medians.
    """
    rows = []
    for (op, impl, fit), group in _groups(found).items():
        counted_rows = summary(group)
        number = counted_rows["rows"]
        rows.append(
            {
                "op": op,
                "impl": impl,
                "fit": fit,
                "rows": number,
                "held": f"{counted_rows['held'] / number:.0%}",
                "chance": "{:.0%} to {:.0%}".format(*(each / number for each in by_chance(number))),
                "error": f"{counted_rows['error']:.1%}",
                "width": f"{counted_rows['width']:.3g}",
            }
        )
    return sorted(rows, key=lambda row: float(row["held"].rstrip("%")))


def _groups(found: Sequence[LeftOut]) -> dict[tuple[str, str, str], list[LeftOut]]:
    return grouped((each for each in found if each.likely_ms), lambda each: (each.op, each.impl, _way(each)))


def in_words(found: Sequence[LeftOut]) -> str:
    """Return for each way to predict how many rows lay in their intervals, how far off and how wide these were."""
    lines = []
    for way, group in sorted(grouped((each for each in found if each.likely_ms), _way).items()):
        of = summary(group)
        lines.append(
            f"{way}: {of['held'] / of['rows']:.1%} of {of['rows']} rows left out lie in their 90 % intervals; median "
            f"error {of['error']:.1%}, intervals {of['width']:.3g} times each way"
        )
    totals = [(of["rows"], of["held"]) for of in map(summary, _groups(found).values())]
    if totals:
        few = sum(held < by_chance(rows)[0] for rows, held in totals)
        many = sum(held > by_chance(rows)[1] for rows, held in totals)
        lines.append(
            f"of {len(totals)} implementations {len(totals) - few - many} hold as many as 85 to 95 % come to by "
            f"chance, {few} fewer, {many} more"
        )
    unfitted = sum(not each.likely_ms for each in found)
    return "\n".join([*lines, *([f"no fit for {unfitted} row{'s' * (unfitted > 1)}"] if unfitted else [])])
