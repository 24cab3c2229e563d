"""The specified accelerators, read from specified.toml; a user's own are tables of the same form (:mod:`.user_file`).

``cpu`` is in neither: it is this machine, measured (:mod:`.cpu`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...results.toml_tables import read_toml
from .accelerator import Accelerator, Roofs, Specification

_MEASURED = {
    "h200_sxm": Roofs(
        matrix_flops={"bf16": 790e12},
        bandwidth_bytes_s=4.29e12,
        source="best of repeated runs on one H200 (driver 580.159, torch 2.11.0+cu130): 8192^3 bf16 matmul 750 to "
        "790 TFLOP/s, device-to-device copy 4.26 to 4.29 TB/s read plus written",
    )
}


def read_accelerators(path: Path, keys: Any, what: str) -> Mapping[str, Accelerator]:
    """Return the accelerators of a file, whose tables are named as ``keys`` says; errors as :func:`.read_toml`."""
    tables: Mapping[str, Specification] = read_toml(path, Mapping[keys, Specification], what)
    found = {}
    for key, table in tables.items():
        fields: dict[str, Any] = {name: getattr(table, name) for name in Specification.__dataclass_fields__}
        fields["matrix_flops"] = MappingProxyType(fields["matrix_flops"])
        found[key] = Accelerator(key=key, measured=_MEASURED.get(key), **fields)
    return MappingProxyType(found)


ACCELERATORS = read_accelerators(Path(__file__).with_name("specified.toml"), str, "specifications")
"""Specified accelerators by key; :func:`.get_accelerator` also knows the local CPU and the user's own."""

ALIASES: Mapping[str, str] = {"a100": "a100_80_pcie", "h100": "h100_sxm", "h200": "h200_sxm"}
"""Short names on the command line -> key: the SXM part, and for the A100 the TFLA paper's 80 GB PCIe card."""
