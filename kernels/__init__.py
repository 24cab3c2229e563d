"""Kernel families and their operations. Data only: importing this package imports neither torch nor triton.

Begin with an operation of the engine, such as simple_gla.py, then scalar_decay/__init__.py; rglru/ and wkv/ say where
to begin in theirs. What families share is in common/, outside packages' implementations are in baselines/. Tuned
numbers are in files config.py and scalar_decay/choice.py, measurements there or in docs/performance.md.
"""

from __future__ import annotations

import importlib

from ..results.arguments import one_of
from .common.spec import Implementation, Operation, resolve

__all__ = ["FAMILIES", "Implementation", "Operation", "get_operation", "resolve"]

FAMILIES: dict[str, tuple[str, ...]] = {
    "tfla": ("mlstm_sig", "mlstm_exp", "simple_gla", "retention", "gated_retention", "mamba2_ssd"),
    "lightning": ("lightning",),
    "rglru": ("rglru", "linear_scan", "rglru_layer"),
    "wkv": ("wkv4",),
    "delta": ("gated_delta_net", "delta_net", "kda"),
    "gated-mlp": ("gated_mlp", "projections"),
}
"""Family as users name it -> its operations, the first being the default of the sweep."""

FOLDERS = {
    "linear_scan": "rglru", "rglru_layer": "rglru", "wkv4": "wkv", "projections": "gated_mlp",
    **dict.fromkeys(FAMILIES["delta"], "delta_rule"),
}  # fmt: skip
"""Operation -> the folder that declares it, where that has another name."""


def get_operation(name: str) -> Operation:
    """Return the declaration of operation ``name``; ValueError lists the known ones."""
    known = [op for ops in FAMILIES.values() for op in ops]
    one_of("op", name, known)
    declared = importlib.import_module(f".{FOLDERS.get(name, name)}", __package__)
    return declared.OPERATIONS[name] if hasattr(declared, "OPERATIONS") else declared.OPERATION
