"""TOML files that people write: what is wrong in one is said with its key, what was expected and what came."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

T = TypeVar("T")


class Kind(NamedTuple):
    """What a value must be, in words, and whether a value is that."""

    words: str
    holds: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_size(value: Any) -> bool:
    """Return whether a value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


TEXT = Kind("a text", lambda value: isinstance(value, str))
AMOUNT = Kind("a number of at least 0", lambda value: is_number(value) and value >= 0)
SIZE = Kind("a positive integer", is_size)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a TOML file.

    Attributes:
        path: the file.
        name: how messages call the table: "rule 1", "defaults.match"; "" for the file's own.
        values: its keys and values.
    """

    path: Path
    name: str
    values: Mapping[str, Any]

    def check_keys(self, *known: str) -> None:
        """Raise ValueError where the table has a key that is not ``known``."""
        for key in self.values:
            if key not in known:
                self.refuse("", f"a table without other keys than {', '.join(known)}", key)

    def value(self, key: str, kind: Kind, default: Any = None) -> Any:
        """Return a value, ``default`` where the key is absent; ValueError where it is not of that kind."""
        given = self.values.get(key, default)
        if key in self.values and not kind.holds(given):
            self.refuse(key, kind.words, given)
        return given

    def table(self, key: str, words: str | None = None) -> Table:
        """Return the table under a key, empty where it is absent; ValueError for anything else (``words``: wanted)."""
        given = self.values.get(key, {})
        if not isinstance(given, dict):
            self.refuse(key, words or f"a table [{key}]", given)
        return Table(self.path, self._named(key), given)

    def tables(self, key: str) -> list[Table]:
        """Return the tables of an array [[key]], none where it is absent; ValueError for anything else."""
        given = self.values.get(key, [])
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            self.refuse(key, f"an array of tables [[{key}]]", given)
        return [Table(self.path, f"{self._named(key)} {n}", each) for n, each in enumerate(given, start=1)]

    def refuse(self, key: str, expected: str, given: Any) -> NoReturn:
        """Raise the ValueError that says what a key's value, or with "" the table, must be and what it is."""
        where = self._named(key) or "the file"
        raise _refusal(f"{self.path}: {where}", expected, given)

    def _named(self, key: str) -> str:
        return ".".join(filter(None, (self.name, key)))


def read_toml(path: Path, what: str) -> Table:
    """Read a TOML file; ``what`` it holds is named where it cannot be read.

    Raises:
        ValueError: the file does not exist or is no TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return Table(path, "", tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a TOML file: {error}") from error
    except OSError as error:
        raise ValueError(f"{what} must be a TOML file, got {path} ({error.strerror})") from error


def build(form: type[T], table: Any, where: str) -> T:
    """Return a dataclass of a table: a key for each field, those without a default required.

    Fields are texts, numbers, true or false, Literal, other dataclasses, tuple[X, ...], Mapping[str, X] or unions of
    these; a field that may be None is left out of the file.

    Raises:
        ValueError: a key is missing or unknown, or a value is of another type.
    """
    if not isinstance(table, Mapping):
        raise _refusal(where, "a table", table)
    fields = {each.name: each for each in dataclasses.fields(form)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise _refusal(where, f"a table without other keys than {', '.join(fields)}", key)
    hints = typing.get_type_hints(form)
    values = {}
    for name, each in fields.items():
        if name in table:
            values[name] = _convert(hints[name], table[name], f"{where}: {name}")
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise _refusal(f"{where}: {name}", _expected(hints[name]), None)
    return form(**values)


def _refusal(where: str, expected: str, given: Any) -> ValueError:
    return ValueError(f"{where} must be {expected}, got {'nothing' if given is None else repr(given)}")


_WORDS = {str: "a text", bool: "true or false", int: "an integer", float: "a number"}


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, where)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _convert(option, value, where)
            except ValueError as error:
                last = error
                if len(arguments) - (type(None) in arguments) == 1:
                    raise
        raise _refusal(where, _expected(hint), value) from last
    if origin is typing.Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], each, f"{where}[{n}]") for n, each in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: _convert(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in _WORDS and type(value) is hint:
        return value
    raise _refusal(where, _expected(hint), value)


def _expected(hint: Any) -> str:
    """Return in words what a field takes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(option) for option in arguments if option is not type(None))
    if origin is typing.Literal:
        return " or ".join(repr(each) for each in arguments)
    if origin is tuple:
        return f"a list, each {_expected(arguments[0])}"
    return _WORDS.get(hint, "a table")
