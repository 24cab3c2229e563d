"""TOML files that people write: what is wrong in one is said with its key, what was expected and what came."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn


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
        raise ValueError(f"{self.path}: {where} must be {expected}, got {'nothing' if given is None else repr(given)}")

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
