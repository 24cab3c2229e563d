"""Times that documents state of their own accelerators: how many lie in the intervals of ours as translated.

What other software may cost (:data:`.verdicts.OTHER_SOFTWARE`) is estimated from the same times. So each
implementation is also held against intervals that follow from the other implementations alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import NamedTuple

from ..accelerators.known import get_accelerator
from .verdicts import OTHER_SOFTWARE, ClaimLine, Found


class Published(NamedTuple):
    """A time that a document states.

    Attributes:
        impl: operation and implementation.
        stated_ms: as the document states it.
        line: ours as translated; what it was translated from is its only value, None where it was not measured.
        slowest: how many times as long it would take there by the rate that is furthest below ours.
    """

    impl: tuple[str, str]
    stated_ms: float
    line: ClaimLine
    slowest: float

    @property
    def ratio(self) -> float:
        """The stated over the translated time."""
        return self.stated_ms / self.line.ours

    def is_held(self, factor: float) -> bool:
        """Return whether it lies in its interval, of which a factor is for other software."""
        low, high = self.line.interval or (math.inf, 0.0)
        return low <= self.stated_ms <= high * factor / OTHER_SOFTWARE


def published_times(found: Sequence[Found]) -> list[Published]:
    """Return the times of the claims that were translated to their document's accelerator."""
    times = []
    for each in found:
        for n, line in enumerate(each.lines):
            states = each.asked.claim.bounds(n)["states"]
            if line.interval is None or states is None:
                continue
            terms = each.asked.terms(each.asked.claim.sides[0], line.point)
            devices = map(get_accelerator, (*line.values, each.asked.document.device))
            rates = [(a.matrix_rate(terms["dtype"]), a.vector_flops, a.bandwidth_bytes_s) for a in devices]
            slowest = max(here / there for here, there in zip(*rates, strict=True))
            times.append(Published((terms["op"], terms["impl"]), float(states), line, slowest))
    return times


def excess(times: Sequence[Published]) -> dict[tuple[str, str], float]:
    """Return, for each implementation, how many times longer its stated times are than the slowest rate explains.

    It is the geometric mean over the times whose very case was measured here.
    """
    logs: dict[tuple[str, str], list[float]] = {}
    for each in times:
        ((here_ms,),) = each.line.values.values()
        if here_ms is not None:
            logs.setdefault(each.impl, []).append(math.log(each.stated_ms / here_ms / each.slowest))
    return {impl: math.exp(fmean(found)) for impl, found in logs.items()}


def software_factor(excesses: Sequence[float]) -> float:
    """Return what the next implementation's :func:`excess` is at most, with 95 % chance: the greatest of them all, or
    the end of Student's interval of their logarithms if that is more."""
    logs = [*map(math.log, excesses)]
    half = student(len(logs) - 1) * stdev(logs) * math.sqrt(1 + 1 / len(logs))
    return max(*excesses, math.exp(fmean(logs) + half))


def student(freedom: int) -> float:
    """Return the 95th percentile of Student's t, by its expansion in 1 / freedom; of 2 degrees where there are fewer.

    Off by 1 % at 2 degrees. Source: Abramowitz and Stegun, 26.7.5.
    """
    z, d = 1.6449, max(2, freedom)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / d**n for n, term in enumerate(terms))


def held_left_out(times: Sequence[Published]) -> int:
    """Return how many lie in their intervals by the factor that all implementations but their own come to."""
    found = excess(times)
    return sum(
        each.is_held(software_factor([other for impl, other in found.items() if impl != each.impl])) for each in times
    )


def in_words(found: Sequence[Found]) -> str:
    """Return how many published times lie in their intervals, and how far they are off; empty where there are none."""
    times = published_times(found)
    if not times:
        return ""
    ratio = median(each.ratio for each in times)
    text = (
        f"Times on other accelerators: of the {len(times)} that documents state, "
        f"{sum(each.is_held(OTHER_SOFTWARE) for each in times)} lie in the model's 90 % intervals; in the median, a "
        f"stated time is {ratio:.2f} times the model's. The intervals allow other software to take up to "
        f"{OTHER_SOFTWARE} times as long; without that, {sum(each.is_held(1.0) for each in times)} would lie in them, "
        f"and the median would be {ratio * OTHER_SOFTWARE**0.5:.2f}"
    )
    # Without one implementation two have to be left.
    if len(excess(times)) > 2:
        text += f". If that factor is estimated without the implementation in question, {held_left_out(times)} do"
    return text + "."
