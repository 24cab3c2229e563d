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

The keys are the fields of :class:`.accelerator.Accelerator`, rates in FLOP/s and bytes/s.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...results.toml_tables import Kind, Table, is_number, read_toml
from .accelerator import Accelerator
from .specified import ACCELERATORS, ALIASES

VARIABLE = "LRBENCH_ACCELERATORS"

DTYPES = ("fp16", "bf16", "tf32", "fp32", "fp64")
MIN_RATE, MIN_BYTES = 1e9, 1024
"""Rates and sizes below these are slips of units: TFLOP/s for FLOP/s, MiB for bytes."""


def _rate(unit: str) -> Kind:
    return Kind(f"a number of {unit}, at least {MIN_RATE:g}", lambda value: is_number(value) and value >= MIN_RATE)


def _integer(least: int) -> Kind:
    words = f"an integer of at least {least}"
    return Kind(words, lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least)


_TEXT = Kind("a text", lambda value: isinstance(value, str) and bool(value.strip()))
_NAMES = Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value))
_TEXTS = ("name", "part", "source")
_FIGURES: Mapping[str, Kind] = MappingProxyType(
    {
        "vector_flops": _rate("FLOP/s"),
        "bandwidth_bytes_s": _rate("bytes/s"),
        "l2_bytes": _integer(MIN_BYTES),
        "smem_bytes": _integer(MIN_BYTES),
        "sms": _integer(1),
    }
)
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
    file = read_toml(path, VARIABLE)
    return MappingProxyType({key: _accelerator(file, key) for key in file.values})


def _accelerator(file: Table, key: str) -> Accelerator:
    if key in _RESERVED or not re.fullmatch(r"[a-z][a-z0-9_]*", key):
        file.refuse(f"[{key}]", "a name of lower-case letters, digits and _ that lrbench does not have already", key)
    table = file.table(key)
    table.check_keys(*_TEXTS, "device_names", "matrix_flops", *_FIGURES)
    words = f"a table of FLOP/s per dtype ({', '.join(DTYPES)})"
    rates = table.table("matrix_flops", words)
    if not rates.values:
        table.refuse("matrix_flops", words, table.values.get("matrix_flops"))
    rates.check_keys(*DTYPES)
    kinds = {**dict.fromkeys(_TEXTS, _TEXT), **_FIGURES}
    fields: dict[str, Any] = {name: _required(table, name, kind) for name, kind in kinds.items()}
    fields |= {name: float(fields[name]) for name in ("vector_flops", "bandwidth_bytes_s")}
    return Accelerator(
        key=key,
        matrix_flops=MappingProxyType({name: float(_required(rates, name, _rate("FLOP/s"))) for name in rates.values}),
        device_names=tuple(table.value("device_names", _NAMES, [])),
        **fields,
    )


def _required(table: Table, key: str, kind: Kind) -> Any:
    if key not in table.values:
        table.refuse(key, kind.words, None)
    return table.value(key, kind)
