"""What the regression gate tolerates: a TOML file of defaults and of rules for some of the cases.

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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...results.case_rows import Row
from ...results.schema import SIZE_COLUMNS

TEXT_COLUMNS = (
    "kernel",
    "op",
    "impl",
    "provider",
    "mode",
    "dtype",
    "state_dtype",
    "device_kind",
    "device_accelerator",
)


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


METRICS = ("time", "memory", "error", "counts")
_KEYS = tuple(field.name for field in dataclasses.fields(Limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Limits for the cases that match.

    Attributes:
        match: column -> the values it may have, or for sizes a (least, greatest) range.
        limits: what the rule sets.
    """

    match: Mapping[str, frozenset[Any] | tuple[float, float]]
    limits: Mapping[str, float | None]
    why: str = ""

    def holds(self, row: Row) -> bool:
        """Return whether the rule is about a row."""
        for column, wanted in self.match.items():
            value = row[column]
            if isinstance(wanted, frozenset):
                if value not in wanted:
                    return False
            elif value is None or not wanted[0] <= value <= wanted[1]:
                return False
        return True


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
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a TOML file: {error}") from error
    except OSError as error:
        raise ValueError(f"thresholds must be a TOML file, got {path} ({error.strerror})") from error
    _check_keys(path, "the file", table, ("defaults", "rule"))
    defaults, rules = table.get("defaults", {}), table.get("rule", [])
    if not isinstance(defaults, dict):
        _refuse(path, "defaults", "a table [defaults]", defaults)
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        _refuse(path, "rule", "an array of tables [[rule]]", rules)
    _check_keys(path, "defaults", defaults, _KEYS)
    return Thresholds(
        defaults=dataclasses.replace(Limits(), **_limits(path, "defaults", defaults)),
        rules=tuple(_rule(path, f"rule {number}", rule) for number, rule in enumerate(rules, start=1)),
    )


def _rule(path: Path, where: str, table: Mapping[str, Any]) -> Rule:
    _check_keys(path, where, table, ("why", "match", *_KEYS))
    match, why = table.get("match"), table.get("why", "")
    if not isinstance(match, dict) or not match:
        _refuse(path, f"{where}.match", 'a table of columns such as { mode = "fw" }', match)
    if not isinstance(why, str):
        _refuse(path, f"{where}.why", "a text", why)
    _check_keys(path, f"{where}.match", match, (*TEXT_COLUMNS, *SIZE_COLUMNS))
    wanted = {column: _wanted(path, f"{where}.match.{column}", column, value) for column, value in match.items()}
    limits = _limits(path, where, {name: value for name, value in table.items() if name in _KEYS})
    if not limits:
        _refuse(path, where, f"a rule that sets one of {', '.join(_KEYS)}", None)
    return Rule(match=wanted, limits=limits, why=why)


def _wanted(path: Path, where: str, column: str, value: Any) -> frozenset[Any] | tuple[float, float]:
    values = value if isinstance(value, list) else [value]
    if column in TEXT_COLUMNS:
        if not values or not all(isinstance(each, str) for each in values):
            _refuse(path, where, "a text or a list of texts", value)
        return frozenset(values)
    if isinstance(value, dict):
        _check_keys(path, where, value, ("min", "max"))
        if not value or not all(_is_size(each) for each in value.values()):
            _refuse(path, where, "a table with min, max or both, positive integers", value)
        return float(value.get("min", 0)), float(value.get("max", math.inf))
    if not values or not all(_is_size(each) for each in values):
        _refuse(path, where, "a positive integer, a list of some, or { min = ..., max = ... }", value)
    return frozenset(values)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _limits(path: Path, where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    limits: dict[str, float | None] = {}
    for name, value in table.items():
        if value is False and name in METRICS:
            limits[name] = None
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            _refuse(path, f"{where}.{name}", f"a number of at least 0{' or false' * (name in METRICS)}", value)
        limits[name] = float(value)
    return limits


def _check_keys(path: Path, where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in table:
        if name not in known:
            _refuse(path, where, f"a table without other keys than {', '.join(known)}", name)


def _refuse(path: Path, where: str, expected: str, given: Any) -> NoReturn:
    raise ValueError(f"{path}: {where} must be {expected}, got {'nothing' if given is None else repr(given)}")
