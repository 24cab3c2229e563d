"""Accelerators that a user adds: one TOML table each.

The file is the one that the variable LRBENCH_ACCELERATORS names (set but empty: none), else
``$XDG_CONFIG_HOME/lrbench/accelerators.toml``, by default ``~/.config/lrbench/accelerators.toml``, where there is one::

    [h100_nvl]                                  # the key for --gpu
    name = "NVIDIA H100 NVL"
    part = "H100 94 GB HBM3 PCIe"
    source = "NVIDIA H100 NVL product brief"
    device_names = ["NVIDIA H100 NVL"]          # optional: the driver's names, so that rows measured on it are known
    matrix_flops = { bf16 = 835e12, fp16 = 835e12, tf32 = 417e12, fp32 = 60e12, fp64 = 60e12 }
    vector_flops = 60e12
    bandwidth_bytes_s = 3.9e12
    l2_bytes = 62914560
    smem_bytes = 232448
    sms = 132

The keys are the fields of :class:`.accelerators.Accelerator`, rates in FLOP/s and bytes/s.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from .known import ACCELERATORS, ALIASES, Accelerator

VARIABLE = "LRBENCH_ACCELERATORS"

DTYPES = ("fp16", "bf16", "tf32", "fp32", "fp64")
MIN_RATE, MIN_BYTES = 1e9, 1024
"""Rates and sizes below these are slips of units: TFLOP/s for FLOP/s, MiB for bytes."""

_TEXTS = ("name", "part", "source")
_RATES = {"vector_flops": "FLOP/s", "bandwidth_bytes_s": "bytes/s"}
_COUNTS = {"l2_bytes": MIN_BYTES, "smem_bytes": MIN_BYTES, "sms": 1}
_KEYS = ("name", "part", "source", "device_names", "matrix_flops", *_RATES, *_COUNTS)
_RESERVED = frozenset({*ACCELERATORS, *ALIASES, "cpu"})


def user_file() -> Path | None:
    """Return the user's accelerator file, or None where there is none.

    Raises:
        ValueError: LRBENCH_ACCELERATORS names a file that does not exist.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        if named and not Path(named).is_file():
            raise ValueError(f"{VARIABLE} must name a TOML file, got {named} (no such file)")
        return Path(named) if named else None
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(folder) / "lrbench" / "accelerators.toml"
    return path if path.is_file() else None


def user_accelerators() -> Mapping[str, Accelerator]:
    """Return the accelerators of the user's file by key.

    Raises:
        ValueError: the file is not as this module says; the message names file, key, what was expected and given.
    """
    path = user_file()
    return MappingProxyType({}) if path is None else _load(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _load(path: Path, _modified_ns: int) -> Mapping[str, Accelerator]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a TOML file: {error}") from error
    return MappingProxyType({key: _accelerator(path, key, table) for key, table in tables.items()})


def _accelerator(path: Path, key: str, table: Any) -> Accelerator:
    if key in _RESERVED or not re.fullmatch(r"[a-z][a-z0-9_]*", key):
        expected = "a name of lower-case letters, digits and _ that lrbench does not have already"
        _refuse(path, f"[{key}]", expected, key)
    if not isinstance(table, dict):
        _refuse(path, key, f"a table [{key}]", table)
    _check_keys(path, key, table, _KEYS)
    rates = table.get("matrix_flops")
    if not isinstance(rates, dict) or not rates:
        _refuse(path, f"{key}.matrix_flops", f"a table of FLOP/s per dtype ({', '.join(DTYPES)})", rates)
    _check_keys(path, f"{key}.matrix_flops", rates, DTYPES)
    names = table.get("device_names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        _refuse(path, f"{key}.device_names", "a list of texts", names)
    texts = {name: _text(path, f"{key}.{name}", table.get(name)) for name in _TEXTS}
    figures = {name: _rate(path, f"{key}.{name}", table.get(name), unit) for name, unit in _RATES.items()}
    counts = {name: _count(path, f"{key}.{name}", table.get(name), least) for name, least in _COUNTS.items()}
    matrix = {name: _rate(path, f"{key}.matrix_flops.{name}", rate, "FLOP/s") for name, rate in rates.items()}
    return Accelerator(
        key=key,
        name=texts["name"],
        part=texts["part"],
        matrix_flops=MappingProxyType(matrix),
        vector_flops=figures["vector_flops"],
        bandwidth_bytes_s=figures["bandwidth_bytes_s"],
        l2_bytes=counts["l2_bytes"],
        smem_bytes=counts["smem_bytes"],
        sms=counts["sms"],
        source=texts["source"],
        device_names=tuple(names),
    )


def _check_keys(path: Path, where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in table:
        if name not in known:
            _refuse(path, where, f"a table without other keys than {', '.join(known)}", name)


def _text(path: Path, where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        _refuse(path, where, "a text", value)
    return value


def _rate(path: Path, where: str, value: Any, unit: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not MIN_RATE <= value < math.inf:
        _refuse(path, where, f"a number of {unit}, at least {MIN_RATE:g}", value)
    return float(value)


def _count(path: Path, where: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        _refuse(path, where, f"an integer of at least {least}", value)
    return value


def _refuse(path: Path, where: str, expected: str, given: Any) -> NoReturn:
    raise ValueError(f"{path}: {where} must be {expected}, got {'nothing' if given is None else repr(given)}")
