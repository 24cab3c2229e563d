"""The progress of a pass over cases, on standard error."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import MappingProxyType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..plan import Identity, PlannedCase

FAILED = ("oom", "timeout", "crash", "error", "incorrect")
PRINT_EVERY_S = 10.0
EXPECTED_S = 10.0
"""A sweep begins as if this many seconds had been measured and taken as long as expected: so one slow first case does
not multiply the estimate."""


def describe_s(seconds: float) -> str:
    """Return a duration in the unit that suits it, "about 3 h"."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:.0f} {unit}"
    return f"about {max(1, round(seconds))} s"


class _Bar(Progress):
    """A progress bar with the failures so far and the case on a line of their own, cut where the terminal ends."""

    failures = case = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """Return the bar and the line below it."""
        yield from super().get_renderables()
        failures = f"{self.failures}; " if self.failures else ""
        yield Text.assemble((failures, "red"), self.case, no_wrap=True, overflow="ellipsis")


class SweepProgress:
    """A progress bar with the case, the time left and the failures so far; without a terminal a line now and then.

    Args:
        expected_s: seconds that each case should take, by its identity; what is left is that, corrected by
            what was seen.
    """

    def __init__(self, expected_s: Mapping[Identity, float] = MappingProxyType({})) -> None:
        self._expected_s = expected_s
        self._console = Console(stderr=True, highlight=False)
        self._bar: _Bar | None = None
        self._uncompiled_s = 0.0
        self._compiling: tuple[float, int, int] | None = None

    def begin(self, total: int, what: str) -> None:
        """A pass over ``total`` cases begins."""
        self._total, self._what, self._statuses = total, what, Counter[str]()
        self._left = self._whole = sum(self._expected_s.values()) or total
        self._began = self._printed = time.monotonic()
        if not self._console.is_terminal:
            return
        self._bar = _Bar(
            TextColumn("{task.fields[what]}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, what=what, left="-:--:--")
        self._bar.start()

    def compiling(self, count: int, left: int) -> None:
        """``count`` cases are compiled before the next one is measured, ``left`` more in later batches."""
        self._compiling = time.monotonic(), count, left
        text = f"compiling {count} case{'s' * (count > 1)}"
        if self._bar is not None:
            self._bar.case = text
        else:
            self._console.print(text)

    def started(self, item: PlannedCase) -> None:
        """A case runs now."""
        if self._compiling is not None:
            began, count, left = self._compiling
            took, self._compiling = time.monotonic() - began, None
            self._began += took
            self._uncompiled_s = took / count * left
        if self._bar is not None:
            self._bar.case = str(item)

    def finished(self, item: PlannedCase, status: str) -> None:
        """A case has its outcome."""
        self._statuses[status] += 1
        self._left -= self._expected_s.get(item.identity, 0.0) if self._expected_s else 1
        failures = ", ".join(f"{self._statuses[each]} {each}" for each in FAILED if self._statuses[each])
        if self._bar is not None:
            self._bar.failures = failures
            self._bar.update(self._task, advance=1, left=timedelta(seconds=round(self._seconds_left())))
        elif time.monotonic() - self._printed > PRINT_EVERY_S:
            self._printed = time.monotonic()
            done, left = self._statuses.total(), describe_s(self._seconds_left())
            line = f"{self._what}: {done} of {self._total} cases, {left} left{failures and ', '}{failures}; {item}"
            self._console.print(line, markup=False, soft_wrap=True)

    def _seconds_left(self) -> float:
        """Return the expected seconds of the cases that are left, scaled by how long those before took.

        A case that is left to compile counts as long as one of the last batch took.
        """
        known = EXPECTED_S if self._expected_s else 0.0
        longer = (time.monotonic() - self._began + known) / (self._whole - self._left + known)
        return self._left * longer + self._uncompiled_s

    def end(self) -> None:
        """The pass is over."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
