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
    memory_bytes = 94_000_000_000               # optional: else nothing is said not to fit
    capability = "9.0"                          # optional, of NVIDIA's: else code for this part alone is left out

The keys are the fields of :class:`.accelerator.Accelerator`, rates in FLOP/s and bytes/s.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from ...results.toml_tables import Must, read_toml
from .accelerator import Accelerator
from .specified import ACCELERATORS, ALIASES

VARIABLE = "LRBENCH_ACCELERATORS"

MIN_RATE, MIN_BYTES = 1e9, 1024
"""Rates and sizes below these are slips of units: TFLOP/s for FLOP/s, MiB for bytes."""


def _at_least(least: float, words: str) -> Must:
    return Must(f"{words} at least {least:g}", lambda value: value >= least)


_RESERVED = frozenset({*ACCELERATORS, *ALIASES, "cpu"})
_Key = Annotated[
    str,
    Must(
        "a name of lower-case letters, digits and _ that lrbench does not have already",
        lambda key: key not in _RESERVED and re.fullmatch(r"[a-z][a-z0-9_]*", key) is not None,
    ),
]
_Text = Annotated[str, Must("a text", lambda value: bool(value.strip()))]
_Flops = Annotated[float, _at_least(MIN_RATE, "a number of FLOP/s,")]
_Dtype = Literal["fp16", "bf16", "tf32", "fp32", "fp64"]
_Capability = Annotated[str, Must('a compute capability such as "9.0"', re.compile(r"\d+\.\d").fullmatch)]
_Bytes = Annotated[int, _at_least(MIN_BYTES, "an integer of")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """An accelerator's table in the file; its fields are those of :class:`.accelerator.Accelerator`."""

    name: _Text
    part: _Text
    source: _Text
    device_names: tuple[str, ...] = ()
    matrix_flops: Annotated[Mapping[_Dtype, _Flops], Must("a table of FLOP/s per dtype", bool)]
    vector_flops: _Flops
    bandwidth_bytes_s: Annotated[float, _at_least(MIN_RATE, "a number of bytes/s,")]
    memory_bytes: Annotated[int, _at_least(MIN_RATE, "an integer of")] | None = None
    capability: _Capability | None = None
    l2_bytes: _Bytes
    smem_bytes: _Bytes
    sms: Annotated[int, _at_least(1, "an integer of")]


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
    tables: Mapping[str, _Table] = read_toml(path, Mapping[_Key, _Table], VARIABLE)
    return MappingProxyType({key: _accelerator(key, table) for key, table in tables.items()})


def _accelerator(key: str, table: _Table) -> Accelerator:
    fields: dict[str, Any] = {name: getattr(table, name) for name in _Table.__dataclass_fields__}
    return Accelerator(key=key, **fields | {"matrix_flops": MappingProxyType(fields["matrix_flops"])})
