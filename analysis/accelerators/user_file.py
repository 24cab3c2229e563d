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
    capability = "9.0"                          # optional, of NVIDIA's: without it code for NVIDIA's GPUs is left out

The keys are the fields of :class:`.accelerator.Specification`, rates in FLOP/s and bytes/s.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from ...results.toml_tables import Must
from .accelerator import ACCELERATORS, ALIASES, Accelerator, read_accelerators

VARIABLE = "LRBENCH_ACCELERATORS"

_RESERVED = frozenset({*ACCELERATORS, *ALIASES, "cpu"})
_Key = Annotated[
    str,
    Must(
        "a name of lower-case letters, digits and _ that lrbench does not have already",
        lambda key: key not in _RESERVED and re.fullmatch(r"[a-z][a-z0-9_]*", key) is not None,
    ),
]


def user_file() -> Path | None:
    """Return the user's accelerator file, or None; ValueError where LRBENCH_ACCELERATORS names a missing one."""
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
    return read_accelerators(path, _Key, VARIABLE)
