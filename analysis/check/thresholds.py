"""What the regression check tolerates: a TOML file of defaults and of rules for some of the cases.

A rule holds for the cases whose columns all match: a value, one of a list, or for sizes a table with ``min`` and
``max``. Later rules win over earlier ones, key by key. See results/thresholds.toml and "Thresholds" in docs/ci.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from ...results.schema import NUMERIC_SIZES
from ...results.select import Row
from ...results.toml_tables import AMOUNT, SIZE, Must, Refused, read_toml

TEXT_COLUMNS = (
    "kernel", "op", "impl", "provider", "mode", "dtype", "state_dtype", "documents", "device_kind",
    "device_accelerator",
)  # fmt: skip


Limits = Mapping[str, float | None]
"""What is tolerated of one case: names of :class:`Quantity` -> relative growth, or floor; None: not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A column that the check compares, and how.

    Attributes:
        column: of a row; where it is null in the baseline, nothing is compared.
        optional: whether a row may be without it, though the baseline has it.
        limit, tolerated: what a file of thresholds calls the relative growth tolerated, and how much it is by default.
        floor, least: the same of the growth below which it is never a regression, however large it is relatively.
        where: a column in which the rows must agree for the comparison to have a meaning.
        is_time: measured by a clock, so that measuring again may give another value.
        exact: a count, which may not move either way.
    """

    column: str
    limit: str
    tolerated: float | None
    floor: str = ""
    least: float = 0.0
    where: str | None = None
    is_time: bool = False
    exact: bool = False
    optional: bool = False

    def what_is_wrong(self, new: Row, old: Row) -> tuple[str, str] | None:
        """Return a verdict ("failed" or "not measured") and why, where the baseline's value cannot be compared."""
        before, after = old[self.column], new[self.column]
        if before is None or (after is None and self.optional):
            return None
        if not self._is_possible(before):
            return "not measured", f"the baseline's {self.column} is {before:g}"
        if after is None or not self._is_possible(after):
            return "failed", f"{self.column} is {'missing' if after is None else f'{after:g}'}, was {before:.5g}"
        return None

    def _is_possible(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or (value == 0 and not self.is_time))


_measured = functools.partial(Quantity, is_time=True)
_count = functools.partial(Quantity, limit="counts", tolerated=None, exact=True, optional=True)
_SLOWDOWN: dict[str, Any] = {"floor": "min_slowdown_ms", "least": 0.002}

QUANTITIES = (
    _measured(column="time_ms", limit="time", tolerated=0.025, **_SLOWDOWN),
    _measured(column="host_ms", limit="host", tolerated=0.25, floor="min_host_ms", least=0.01, optional=True),
    _measured(column="sustained_ms", limit="sustained", tolerated=0.04, optional=True, **_SLOWDOWN),
    Quantity(column="energy_j", limit="energy", tolerated=0.05, optional=True),
    Quantity(column="peak_memory_bytes", limit="memory", tolerated=0.01, floor="min_memory_bytes", least=65536.0),
    Quantity(column="rel_error", limit="error", tolerated=0.5, floor="min_error", least=1e-6, where="checked"),
    *(_count(column=name) for name in ("flops", "tensor_flops", "bytes")),
)

DEFAULTS: dict[str, float | None] = {each.limit: each.tolerated for each in QUANTITIES} | {
    each.floor: each.least for each in QUANTITIES if each.floor
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Defaults, and over them rules: the tables of the file."""

    defaults: Limits = field(default_factory=lambda: DEFAULTS)
    rules: tuple[Mapping[str, Any], ...] = ()

    def limits(self, row: Row) -> Limits:
        """Return the limits of a row's case."""
        changes: dict[str, Any] = {}
        for rule in self.rules:
            if all(_is_wanted(row[column], wanted) for column, wanted in rule["match"].items()):
                changes |= _limits(rule)
        return {**self.defaults, **changes}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The least and the greatest size that a rule holds for."""

    min: SIZE | None = None
    max: SIZE | None = None


_SPAN = Annotated[_Span, Must("a table with min, max or both, positive integers", lambda span: span != _Span())]
_TEXTS = str | Annotated[tuple[str, ...], Must("a list of texts", bool)]
_SIZES = SIZE | Annotated[tuple[SIZE, ...], Must("a list of some", bool)] | _SPAN
_MATCH = dict.fromkeys(TEXT_COLUMNS, _TEXTS) | dict.fromkeys(NUMERIC_SIZES, _SIZES)
_COMPARED = {quantity.limit for quantity in QUANTITIES}
_LIMITS = {name: AMOUNT | Literal[False] if name in _COMPARED else AMOUNT for name in DEFAULTS}
_RULE = {"why": str, "match": _MATCH, **_LIMITS}


def load_thresholds(path: Path) -> Thresholds:
    """Read a threshold file.

    Raises:
        ValueError: it does not exist or is not as this module says; the message names file, key, what was expected and
            what came.
    """
    form = {"defaults": _LIMITS, "rule": tuple[_RULE, ...]}  # type: ignore[valid-type]
    file = {"defaults": {}, "rule": ()} | read_toml(path, form, "thresholds")
    for n, rule in enumerate(file["rule"], start=1):
        if not rule.get("match"):
            raise Refused(f"{path}: rule {n}.match", 'a table of columns such as { mode = "fw" }', None)
        if not _limits(rule):
            raise ValueError(f"{path}: rule {n} must be a rule that sets one of {', '.join(DEFAULTS)}, got none")
    return Thresholds(defaults={**DEFAULTS, **_limits(file["defaults"])}, rules=file["rule"])


def _limits(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits among the keys of a table; a quantity that is false is not compared."""
    return {name: None if given[name] is False else given[name] for name in DEFAULTS if name in given}


def _is_wanted(value: Any, wanted: Any) -> bool:
    """Return whether a column's value is the wanted one, one of several, or in a span."""
    if isinstance(wanted, _Span):
        return value is not None and (wanted.min or 0) <= value <= (wanted.max or math.inf)
    return bool(value in wanted if isinstance(wanted, tuple) else value == wanted)
