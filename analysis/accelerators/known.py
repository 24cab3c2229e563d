"""Accelerators by name: the specified ones, the user's own, and this machine's CPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...results.arguments import unknown
from .accelerator import ACCELERATORS, ALIASES, Accelerator, Roofs
from .cpu import local_cpu
from .user_file import user_accelerators

_DEVICE_NAMES = (
    (r"V100-SXM2", "v100"),
    (r"A100-(SXM4|PCIE|PG509)[- ]40GB", "a100_40"),
    (r"A100-SXM4-80GB", "a100_80_sxm"),
    (r"A100[- ]80GB PCIe|A100-PCIE-80GB", "a100_80_pcie"),
    (r"H100 PCIe", "h100_pcie"),
    (r"H100 80GB HBM3|H100 SXM", "h100_sxm"),
    (r"H200( SXM.*| 141GB.*)?$", "h200_sxm"),
    (r"(?<!G)B200( .*)?$", "b200"),
    (r"L40S$", "l40s"),
    (r"RTX 4090$", "rtx_4090"),
    (r"RTX 5090$", "rtx_5090"),
    (r"MI300X", "mi300x"),
)

USUAL = "h100"
"""What a question is about where no accelerator is named and none is here."""

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver says which GPUs there are."""


def default_key() -> str:
    """Return the key of the GPU that is here, as its driver calls it, else :data:`USUAL`. Imports no torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        for path in sorted(DRIVER.glob("*/information")):
            found = re.search(r"^Model:\s*(.+)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
            if found and (key := match_device(found[1])):
                return key
    return USUAL


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
        raise unknown("accelerator", name, known_accelerators(), " (`lrbench gpus`)")
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
    return next((key for pattern, key in _DEVICE_NAMES if re.search(pattern, name, flags=re.IGNORECASE)), None)
