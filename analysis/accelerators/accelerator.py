"""What describes an accelerator (rates, caches, source, rates measured on one), and the accelerators of
specified.toml. A user's own are tables of the same form (:mod:`.known`), ``cpu`` is this machine (:mod:`.cpu`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from ...results.arguments import unknown
from ...results.toml_tables import Must, read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofs:
    """Rates measured on a device, to stand beside its specification.

    Attributes:
        matrix_flops: dtype -> FLOP/s of a large square matrix product.
        bandwidth_bytes_s: bytes read plus bytes written per second by a large device-to-device copy.
        source: what was measured, where and with which software.
        vector_flops: FLOP/s of chains of fp32 fused multiply-adds, or None.
    """

    matrix_flops: Mapping[str, float]
    bandwidth_bytes_s: float
    source: str
    vector_flops: float | None = None


MIN_RATE, MIN_BYTES = 1e9, 1024
"""Rates and sizes below these are slips of units: TFLOP/s for FLOP/s, MiB for bytes."""


def _at_least(least: float, words: str) -> Must:
    return Must(f"{words} at least {least:g}", lambda value: value >= least)


_Text = Annotated[str, Must("a text", lambda value: bool(value.strip()))]
_Flops = Annotated[float, _at_least(MIN_RATE, "a number of FLOP/s,")]
_DTYPES = ("fp16", "bf16", "tf32", "fp32", "fp64")
_Dtype = Annotated[str, Must(" or ".join(map(repr, _DTYPES)), _DTYPES.__contains__)]
_Capability = Annotated[str, Must('a compute capability such as "9.0"', re.compile(r"\d+\.\d").fullmatch)]
_Bytes = Annotated[int, _at_least(MIN_BYTES, "an integer of")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """What is stated of an accelerator, which is also its table in a TOML file; docs/accelerators.md lists the keys.

    Attributes:
        part: which part exactly (form factor, memory size); rates differ between parts that share a name.
        device_names: as drivers call it: exactly so in a user's own file, else patterns.
        matrix_flops: with fp32 accumulation (fp64 for fp64), on the fastest unit that multiplies this dtype exactly.
        memory_bytes: as the maker states it: what the driver reports beyond that, contexts and allocators take.
        l2_bytes: last cache before the device memory that all processors share.
        smem_bytes: shared memory (local data share, L1 on a CPU) that one thread block can use.
        sms: multiprocessors, compute units or cores.
        measured: rates reached on the part, to stand beside these.
    """

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
    measured: Roofs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator(Specification):
    """What one accelerator can do: its specification, and its key (lower case)."""

    key: str

    def peak_flops(self, dtype: str) -> float | None:
        """Return the highest FLOP/s at which operands stored as ``dtype`` can be multiplied, or None if they cannot.

        For fp32 that is the TF32 rate where there is one: kernels may round fp32 operands to TF32, so a lower figure
        would not bound them.
        """
        names = ("fp32", "tf32") if dtype == "fp32" else (dtype,)
        return max((self.matrix_flops[name] for name in names if name in self.matrix_flops), default=None)

    @property
    def usual_dtype(self) -> str:
        """The dtype that a question is about where none is named: bf16, where it is not known fp16, on a CPU fp32."""
        return "fp32" if self.key == "cpu" else "bf16" if self.peak_flops("bf16") else "fp16"

    def matrix_rate(self, dtype: str) -> float:
        """Return :meth:`peak_flops`; ValueError where it is not known."""
        peak = self.peak_flops(dtype)
        if peak is None:
            hint = " (lrbench calibrate measures the others)" if self.key == "cpu" else ""
            raise unknown("dtype", dtype, self.matrix_flops, f" on {self.key}{hint}")
        return peak

    def intensity(self, dtype: str) -> float | None:
        """Return the FLOP per byte at which the matrix rate and the bandwidth balance (TFLA paper, eq. 119)."""
        peak = self.peak_flops(dtype)
        return None if peak is None else peak / self.bandwidth_bytes_s

    @property
    def is_measured(self) -> bool:
        """Whether the rates are the measured ones, put in place by :meth:`with_measured_roofs`."""
        return self.measured is not None and self.source == self.measured.source

    def with_measured_roofs(self) -> Accelerator:
        """Return the accelerator with measured rates in place of specified ones; ValueError if none were measured."""
        if self.measured is None:
            raise ValueError(f"accelerator must have measured roofs, got {self.key} (specification only)")
        return dataclasses.replace(
            self,
            matrix_flops=MappingProxyType({**self.matrix_flops, **self.measured.matrix_flops}),
            vector_flops=self.measured.vector_flops or self.vector_flops,
            bandwidth_bytes_s=self.measured.bandwidth_bytes_s,
            source=self.measured.source,
        )


def read_accelerators(path: Path, keys: Any, what: str) -> Mapping[str, Accelerator]:
    """Return the accelerators of a file, whose tables are named as ``keys`` says; errors as :func:`.read_toml`."""
    tables: Mapping[str, Specification] = read_toml(path, Mapping[keys, Specification], what)
    found = {}
    for key, table in tables.items():
        fields: dict[str, Any] = {name: getattr(table, name) for name in Specification.__dataclass_fields__}
        fields["matrix_flops"] = MappingProxyType(fields["matrix_flops"])
        found[key] = Accelerator(key=key, **fields)
    return MappingProxyType(found)


ACCELERATORS = read_accelerators(Path(__file__).with_name("specified.toml"), str, "specifications")
"""Specified accelerators by key; :func:`.get_accelerator` also knows the local CPU and the user's own."""

ALIASES: Mapping[str, str] = {"a100": "a100_80_pcie", "h100": "h100_sxm", "h200": "h200_sxm"}
"""Short names on the command line -> key: the SXM part, and for the A100 the TFLA paper's 80 GB PCIe card."""
