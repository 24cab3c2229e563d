"""What the regression check tolerates: a TOML file of defaults and of rules for some of the cases.

::

    [defaults]
    time = 0.025                     # relative; false: not compared

    [[rule]]
    why = "a wall clock on a shared machine"
    match = { device_kind = "cpu", seq_len = { max = 1024 } }
    time = 0.15

A rule holds for the cases whose columns all match: a value, one of a list, or for sizes a table with ``min`` and
``max``. Later rules win over earlier ones, key by key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...results.names import current_names
from ...results.schema import SIZE_COLUMNS
from ...results.select import Row
from ...results.toml_tables import AMOUNT, SIZE, TEXT, Kind, Table, read_toml

TEXT_COLUMNS = (
    "kernel", "op", "impl", "provider", "mode", "dtype", "state_dtype", "device_kind", "device_accelerator",
)  # fmt: skip
METRICS = ("time", "memory", "error", "counts")
AMOUNT_OR_FALSE = Kind("a number of at least 0 or false", lambda value: value is False or AMOUNT.holds(value))

Wanted = frozenset[Any] | tuple[float, float]
"""The values that a column may have, or for sizes the least and the greatest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is tolerated of one case.

    Attributes:
        time, memory, error: relative growth of the median time, the peak memory and rel_error; None: not compared.
        counts: relative change, either way, of the counted flops, tensor_flops and bytes; None: not compared.
        min_slowdown_ms, min_memory_bytes, min_error: growth below these is never a regression, however large it is
            relatively.
    """

    time: float | None = 0.025
    memory: float | None = 0.01
    error: float | None = 0.5
    counts: float | None = None
    min_slowdown_ms: float = 0.002
    min_memory_bytes: float = 65536.0
    min_error: float = 1e-6


LIMITS = tuple(field.name for field in dataclasses.fields(Limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Limits for the cases whose columns all ``match``, and ``why``."""

    match: Mapping[str, Wanted]
    limits: Mapping[str, float | None]
    why: str = ""

    def holds(self, row: Row) -> bool:
        """Return whether the rule is about a row; an implementation may be named as it was before."""
        return all(
            _matches(row[column], _names_of_today(wanted, row["op"]) if column == "impl" else wanted)
            for column, wanted in self.match.items()
        )


def _matches(value: Any, wanted: Wanted) -> bool:
    if isinstance(wanted, frozenset):
        return value in wanted
    return value is not None and wanted[0] <= value <= wanted[1]


def _names_of_today(names: Wanted, op: str) -> Wanted:
    return frozenset(current_names(map(str, names), (op,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Defaults and the rules over them."""

    defaults: Limits = Limits()
    rules: tuple[Rule, ...] = ()

    def limits(self, row: Row) -> Limits:
        """Return the limits of a row's case."""
        changes: dict[str, Any] = {}
        for rule in self.rules:
            if rule.holds(row):
                changes |= rule.limits
        return dataclasses.replace(self.defaults, **changes) if changes else self.defaults


def load_thresholds(path: Path) -> Thresholds:
    """Read a threshold file.

    Raises:
        ValueError: it does not exist or is not as this module says; the message names file, key, what was expected and
            what came.
    """
    file = read_toml(path, "thresholds")
    file.check_keys("defaults", "rule")
    defaults = file.table("defaults")
    defaults.check_keys(*LIMITS)
    return Thresholds(
        defaults=dataclasses.replace(Limits(), **_limits(defaults)), rules=tuple(map(_rule, file.tables("rule")))
    )


def _limits(table: Table) -> dict[str, Any]:
    kinds = {name: AMOUNT_OR_FALSE if name in METRICS else AMOUNT for name in LIMITS if name in table.values}
    values = {name: table.value(name, kind) for name, kind in kinds.items()}
    return {name: None if value is False else float(value) for name, value in values.items()}


def _rule(table: Table) -> Rule:
    table.check_keys("why", "match", *LIMITS)
    match = table.table("match", words := 'a table of columns such as { mode = "fw" }')
    if not match.values:
        table.refuse("match", words, table.values.get("match"))
    match.check_keys(*TEXT_COLUMNS, *SIZE_COLUMNS)
    limits = _limits(table)
    if not limits:
        table.refuse("", f"a rule that sets one of {', '.join(LIMITS)}", None)
    wanted = {column: _wanted(match, column) for column in match.values}
    return Rule(match=wanted, limits=limits, why=table.value("why", TEXT, ""))


def _wanted(match: Table, column: str) -> Wanted:
    value = match.values[column]
    text = column in TEXT_COLUMNS
    if isinstance(value, dict) and not text:
        ends = match.table(column)
        ends.check_keys("min", "max")
        if not value or not all(map(SIZE.holds, value.values())):
            match.refuse(column, "a table with min, max or both, positive integers", value)
        return float(value.get("min", 0)), float(value.get("max", math.inf))
    values = value if isinstance(value, list) else [value]
    if not values or not all(map((TEXT if text else SIZE).holds, values)):
        sizes = "a positive integer, a list of some, or { min = ..., max = ... }"
        match.refuse(column, "a text or a list of texts" if text else sizes, value)
    return frozenset(values)
