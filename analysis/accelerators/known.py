"""Accelerators by name: the specified ones, the user's own, and this machine's CPU.

The user's own are tables of a TOML file, whose keys are the fields of :class:`.accelerator.Specification`: the file
that the variable LRBENCH_ACCELERATORS names (set but empty: none), else ``$XDG_CONFIG_HOME/lrbench/accelerators.toml``,
by default ``~/.config/lrbench/accelerators.toml``, where there is one. docs/accelerators.md has an example.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from ...results.arguments import unknown
from ...results.toml_tables import Must
from .accelerator import ACCELERATORS, ALIASES, Accelerator, Roofs, read_accelerators
from .cpu import local_cpu

VARIABLE = "LRBENCH_ACCELERATORS"
_RESERVED = frozenset({*ACCELERATORS, *ALIASES, "cpu"})
_Key = Annotated[
    str,
    Must(
        "a name of lower-case letters, digits and _ that lrbench does not have already",
        lambda key: key not in _RESERVED and re.fullmatch(r"[a-z][a-z0-9_]*", key) is not None,
    ),
]

USUAL = "h100"
"""What a question is about where no accelerator is named and none is here."""

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver says which GPUs there are."""


def key_here() -> str | None:
    """Return the key of the GPU that is here, as its driver calls it, or None. Imports no torch."""
    if visible_gpus(1):
        for path in sorted(DRIVER.glob("*/information")):
            found = re.search(r"^Model:\s*(.+)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
            if found and (key := match_device(found[1])):
                return key
    return None


def visible_gpus(count: int) -> list[str]:
    """Return the names of the first GPUs that workers may see, as CUDA_VISIBLE_DEVICES takes them: as CUDA does, up to
    the first name that is none, such as -1 or NoDevFiles."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(count)] if visible is None else [name.strip() for name in visible.split(",")]
    return list(takewhile(lambda name: name[:1].isdigit() or name.startswith(("GPU-", "MIG-")), names))[:count]


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


def known_accelerators() -> tuple[str, ...]:
    """Return every key and alias that :func:`get_accelerator` takes, keys first; ValueError for a bad user file."""
    return (*ACCELERATORS, *user_accelerators(), "cpu", *ALIASES)


def canonical_key(name: str) -> str:
    """Return a key or alias as given on the command line (any case, - for _) as the key it stands for."""
    key = name.strip().lower().replace("-", "_")
    return ALIASES.get(key, key)


def get_accelerator(name: str) -> Accelerator:
    """Return the accelerator called ``name``: a key or an alias, specified here or in the user's file.

    ``cpu`` is this machine, see :func:`.cpu.local_cpu`.

    Raises:
        ValueError: no such accelerator (the message lists the known ones), or the user's file is bad.
    """
    key = canonical_key(name)
    if key == "cpu":
        return local_cpu()
    accelerator = ACCELERATORS.get(key) or user_accelerators().get(key)
    if accelerator is None:
        error = str(unknown("accelerator", name, known_accelerators(), " (`lrbench gpus`)"))
        end = "" if error.endswith("?") else "."
        raise ValueError(f"{error}{end} A table in ~/.config/lrbench/accelerators.toml adds one: docs/accelerators.md")
    return accelerator


def match_device(name: str) -> str | None:
    """Return the key of the accelerator that a driver calls ``name`` ("NVIDIA H100 80GB HBM3"), or None.

    A name in the user's file decides. Parts whose rates differ from the specified ones (H100 NVL, H200 NVL, laptop
    GPUs, MIG slices) match nothing.
    """
    name = name.strip()
    if own := [each.key for each in user_accelerators().values() if name in each.device_names]:
        return own[0]
    if "MIG" in name or "Laptop" in name:
        return None
    known = ((each.key, pattern) for each in ACCELERATORS.values() for pattern in each.device_names)
    return next((key for key, pattern in known if re.search(pattern, name, flags=re.IGNORECASE)), None)
