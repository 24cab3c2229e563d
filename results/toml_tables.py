"""TOML files that people write: an error in one names the key, what was expected and what was given."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple


class Must(NamedTuple):
    """A condition on a value, ``Annotated[int, Must("a positive integer", lambda n: n >= 1)]``, with its words."""

    words: str
    holds: Callable[[Any], bool]


AMOUNT = Annotated[float, Must("a number of at least 0", lambda value: value >= 0)]
SIZE = Annotated[int, Must("a positive integer", lambda value: value >= 1)]

_hints = functools.cache(typing.get_type_hints)
_WORDS = {str: "a text", bool: "true or false", int: "an integer", float: "a number"}


def read_toml(path: Path, form: Any, what: str) -> Any:
    """Read a TOML file of a form.

    A form is str, bool, int, float (finite), Literal, tuple[X, ...], Mapping[str, X], a dataclass, a union of these, or
    one of these Annotated with a condition (:class:`Must`). The table of a dataclass must have a key for each field
    without a default. A dict of names and forms is a table of any of these keys.

    Args:
        what: what the file holds, for the message where it cannot be read.

    Raises:
        ValueError: the file does not exist, is no TOML or is not of that form.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    # A ValueError may also be a number of thousands of digits; deep nesting is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a TOML file: {error}") from error
    except OSError as error:
        raise ValueError(f"{what} must be a TOML file, got {path} ({error.strerror})") from error
    try:
        return _convert(form, values, "")
    except Refused as error:
        raise ValueError(f"{path}: {error}") from None


class Refused(ValueError):
    """What a key's value must be, and what it is."""

    def __init__(self, where: str, expected: str, given: Any) -> None:
        got = "nothing" if given is None else repr(given)
        super().__init__(f"{where or 'the file'} must be {expected}, got {got}")
        self.where = where


def _convert(form: Any, value: Any, where: str, expected: str | None = None) -> Any:
    """Return a value as its form wants it; ``expected``: what to say that it must be, if not what the form says."""
    origin, arguments = typing.get_origin(form), typing.get_args(form)
    expected = expected or _expected(form)
    if isinstance(form, dict) or dataclasses.is_dataclass(form):
        made: Any = None if isinstance(form, dict) else form
        forms: Any = form if made is None else _hints(made, include_extras=True)
        fields = () if made is None else dataclasses.fields(made)
        required = [each.name for each in fields if each.default is each.default_factory is dataclasses.MISSING]
        if not isinstance(value, Mapping):
            raise Refused(where, expected, value)
        for key in value:
            if key not in forms:
                raise Refused(where, f"a table without other keys than {', '.join(forms)}", key)
        for key in required:
            if key not in value:
                raise Refused(_below(where, key), _expected(forms[key]), None)
        table = {key: _convert(forms[key], each, _below(where, key)) for key, each in value.items()}
        return table if made is None else made(**table)
    if origin is Annotated:
        converted = _convert(arguments[0], value, where, expected)
        if arguments[1].holds(converted):
            return converted
    elif origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _convert(option, value, where)
            except Refused as error:
                if error.where != where:
                    raise
    elif origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], each, f"{where} {n}") for n, each in enumerate(value, start=1))
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {
            _convert(arguments[0], key, _below(where, key)): _convert(arguments[1], each, _below(where, key))
            for key, each in value.items()
        }
    elif origin is typing.Literal and any(value is each or (value == each and each is not False) for each in arguments):
        return value
    elif form is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    elif type(value) is form and form is not float:
        return value
    raise Refused(where, expected, value)


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _expected(form: Any) -> str:
    """Return in words what a form takes."""
    origin, arguments = typing.get_origin(form), typing.get_args(form)
    if origin is Annotated:
        return arguments[1].words
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(option) for option in arguments if option is not type(None))
    if origin is typing.Literal:
        return " or ".join("false" if each is False else repr(each) for each in arguments)
    if origin is tuple:
        return f"a list, each {_expected(arguments[0])}"
    if isinstance(form, dict):
        return f"a table of {', '.join(form)}"
    return _WORDS.get(form, "a table") if isinstance(form, type) else "a table"
