"""What the regression check tolerates: a TOML file of defaults and of rules for some of the cases.

A rule holds for the cases whose columns all match: a value, one of a list, or for sizes a table with ``min`` and
``max``. Later rules win over earlier ones, key by key. See results/thresholds.toml and "Thresholds" in docs/ci.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ...results.schema import NUMERIC_SIZES
from ...results.select import Row
from ...results.toml_tables import AMOUNT, SIZE, Must, Refused, read_toml

TEXT_COLUMNS = (
    "kernel", "op", "impl", "provider", "mode", "dtype", "state_dtype", "documents", "device_kind",
    "device_accelerator",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is tolerated of one case.

    Attributes:
        time, host, sustained, energy, memory, error: relative growth of the median times on the device, on the host
            and after seconds of load, the energy of a call, the peak memory and rel_error; None: not compared.
        counts: relative change, either way, of the counted flops, tensor_flops and bytes; None: not compared.
        min_slowdown_ms, min_host_ms, min_memory_bytes, min_error: growth below these is never a regression, however
            large it is relatively.
    """

    time: float | None = 0.025
    host: float | None = 0.25
    sustained: float | None = 0.04
    energy: float | None = 0.05
    memory: float | None = 0.01
    error: float | None = 0.5
    counts: float | None = None
    min_slowdown_ms: float = 0.002
    min_host_ms: float = 0.01
    min_memory_bytes: float = 65536.0
    min_error: float = 1e-6


LIMITS = tuple(field.name for field in dataclasses.fields(Limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A column that the check compares, and how.

    Attributes:
        column: of a row; where it is null in the baseline, nothing is compared.
        optional: whether a row may be without it, though the baseline has it.
        limit, floor: the growth tolerated and the growth that never counts, as :class:`Limits` calls them.
        where: a column in which the rows must agree for the comparison to have a meaning.
        is_time: measured by a clock, so that measuring again may give another value.
        exact: a count, which may not move either way.
    """

    column: str
    limit: str
    floor: str | None = None
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


QUANTITIES = (
    Quantity(column="time_ms", limit="time", floor="min_slowdown_ms", is_time=True),
    Quantity(column="host_ms", limit="host", floor="min_host_ms", is_time=True, optional=True),
    Quantity(column="sustained_ms", limit="sustained", floor="min_slowdown_ms", is_time=True, optional=True),
    Quantity(column="energy_j", limit="energy", optional=True),
    Quantity(column="peak_memory_bytes", limit="memory", floor="min_memory_bytes"),
    Quantity(column="rel_error", limit="error", floor="min_error", where="checked"),
    *(Quantity(column=name, limit="counts", exact=True, optional=True) for name in ("flops", "tensor_flops", "bytes")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Defaults, and over them rules: the tables of the file."""

    defaults: Limits = Limits()
    rules: tuple[Mapping[str, Any], ...] = ()

    def limits(self, row: Row) -> Limits:
        """Return the limits of a row's case."""
        changes: dict[str, Any] = {}
        for rule in self.rules:
            if all(_is_wanted(row[column], wanted) for column, wanted in rule["match"].items()):
                changes |= _limits(rule)
        return dataclasses.replace(self.defaults, **changes) if changes else self.defaults


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
_LIMITS = {name: AMOUNT | Literal[False] if name in _COMPARED else AMOUNT for name in LIMITS}
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
            raise ValueError(f"{path}: rule {n} must be a rule that sets one of {', '.join(LIMITS)}, got none")
    return Thresholds(defaults=Limits(**_limits(file["defaults"])), rules=file["rule"])


def _limits(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits among the keys of a table; a quantity that is false is not compared."""
    return {name: None if given[name] is False else given[name] for name in LIMITS if name in given}


def _is_wanted(value: Any, wanted: Any) -> bool:
    """Return whether a column's value is the wanted one, one of several, or in a span."""
    if isinstance(wanted, _Span):
        return value is not None and (wanted.min or 0) <= value <= (wanted.max or math.inf)
    return bool(value in wanted if isinstance(wanted, tuple) else value == wanted)
