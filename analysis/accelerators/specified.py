"""Accelerator specifications: dense matrix rates, vector rate, memory and caches, each with its part and source.

Rates are what the maker states for the named part at boost clock, dense (a figure printed for 2:4 sparsity is halved),
in FLOP/s and bytes/s, decimal prefixes. ``cpu`` is the exception: this machine, measured (:mod:`.cpu`). Users add
accelerators of their own in a TOML file (:mod:`.user_file`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from .accelerator import Accelerator, Roofs

_KIB, _MIB, _GB = 1024, 1024**2, 10**9


_TABLE = (
    Accelerator(
        key="v100",
        name="NVIDIA V100",
        part="Tesla V100 SXM2, 16 or 32 GB HBM2",
        matrix_flops={"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12},
        vector_flops=15.7e12,
        bandwidth_bytes_s=0.9e12,
        memory_bytes=32 * _GB,
        l2_bytes=6 * _MIB,
        smem_bytes=96 * _KIB,
        sms=80,
        capability="7.0",
        source="NVIDIA V100 datasheet, SXM2 column (the TFLA paper's table 18 has 120e12 FLOP/s for fp16); caches and "
        "multiprocessors: Volta architecture white paper",
    ),
    Accelerator(
        key="a100_40",
        name="NVIDIA A100 40 GB",
        part="A100 40 GB HBM2, SXM4 and PCIe (the rates are the same)",
        matrix_flops={"fp16": 312e12, "bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12},
        vector_flops=19.5e12,
        bandwidth_bytes_s=1.555e12,
        memory_bytes=40 * _GB,
        l2_bytes=40 * _MIB,
        smem_bytes=163 * _KIB,
        sms=108,
        capability="8.0",
        source="NVIDIA A100 datasheet, 40 GB columns; L2 and multiprocessors: Ampere architecture white paper; shared "
        "memory: CUDA programming guide, compute capability 8.0",
    ),
    Accelerator(
        key="a100_80_pcie",
        name="NVIDIA A100 80 GB PCIe",
        part="A100 80 GB HBM2e PCIe",
        matrix_flops={"fp16": 312e12, "bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12},
        vector_flops=19.5e12,
        bandwidth_bytes_s=1.935e12,
        memory_bytes=80 * _GB,
        l2_bytes=40 * _MIB,
        smem_bytes=163 * _KIB,
        sms=108,
        capability="8.0",
        source="NVIDIA A100 datasheet, 80 GB PCIe column, the part of the TFLA paper's table 18; L2 and "
        "multiprocessors: Ampere architecture white paper; shared memory: CUDA programming guide, compute capability "
        "8.0",
    ),
    Accelerator(
        key="a100_80_sxm",
        name="NVIDIA A100 80 GB SXM",
        part="A100 80 GB HBM2e SXM4",
        matrix_flops={"fp16": 312e12, "bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12},
        vector_flops=19.5e12,
        bandwidth_bytes_s=2.039e12,
        memory_bytes=80 * _GB,
        l2_bytes=40 * _MIB,
        smem_bytes=163 * _KIB,
        sms=108,
        capability="8.0",
        source="NVIDIA A100 datasheet, 80 GB SXM column; L2 and multiprocessors: Ampere architecture white paper; "
        "shared memory: CUDA programming guide, compute capability 8.0",
    ),
    Accelerator(
        key="h100_pcie",
        name="NVIDIA H100 PCIe",
        part="H100 80 GB HBM2e PCIe",
        matrix_flops={"fp16": 756e12, "bf16": 756e12, "tf32": 378e12, "fp32": 51.2e12, "fp64": 51.2e12},
        vector_flops=51.2e12,
        bandwidth_bytes_s=2.0e12,
        memory_bytes=80 * _GB,
        l2_bytes=50 * _MIB,
        smem_bytes=227 * _KIB,
        sms=114,
        capability="9.0",
        source="NVIDIA H100 datasheet and Hopper architecture white paper, PCIe column, sparse figures halved; shared "
        "memory: CUDA programming guide, compute capability 9.0",
    ),
    Accelerator(
        key="h100_sxm",
        name="NVIDIA H100 SXM",
        part="H100 80 GB HBM3 SXM5",
        matrix_flops={"fp16": 989e12, "bf16": 989e12, "tf32": 494e12, "fp32": 66.9e12, "fp64": 66.9e12},
        vector_flops=66.9e12,
        bandwidth_bytes_s=3.35e12,
        memory_bytes=80 * _GB,
        l2_bytes=50 * _MIB,
        smem_bytes=227 * _KIB,
        sms=132,
        capability="9.0",
        source="NVIDIA H100 datasheet and Hopper architecture white paper, SXM column, sparse figures halved, the part "
        "of the TFLA paper's table 18; shared memory: CUDA programming guide, compute capability 9.0",
    ),
    Accelerator(
        key="h200_sxm",
        name="NVIDIA H200 SXM",
        part="H200 141 GB HBM3e SXM5",
        matrix_flops={"fp16": 989e12, "bf16": 989e12, "tf32": 494e12, "fp32": 66.9e12, "fp64": 66.9e12},
        vector_flops=66.9e12,
        bandwidth_bytes_s=4.8e12,
        memory_bytes=141 * _GB,
        l2_bytes=60 * _MIB,
        smem_bytes=227 * _KIB,
        sms=132,
        capability="9.0",
        source="NVIDIA H200 datasheet, SXM column, sparse figures halved; L2 (62,914,560 bytes), shared memory "
        "(232,448 bytes a block) and multiprocessors as the driver reports them on one H200: the datasheet states none "
        "and the H100's 50 MB do not hold for this part",
        measured=Roofs(
            matrix_flops={"bf16": 790e12},
            bandwidth_bytes_s=4.29e12,
            source="best of repeated runs on one H200 (driver 580.159, torch 2.11.0+cu130): 8192^3 bf16 matmul 750 to "
            "790 TFLOP/s, device-to-device copy 4.26 to 4.29 TB/s read plus written",
        ),
    ),
    Accelerator(
        key="b200",
        name="NVIDIA B200",
        part="B200 180 GB HBM3e on an HGX board (1000 W)",
        matrix_flops={"fp16": 2.25e15, "bf16": 2.25e15, "tf32": 1.1e15, "fp32": 75e12, "fp64": 37e12},
        vector_flops=75e12,
        bandwidth_bytes_s=7.7e12,
        memory_bytes=180 * _GB,
        l2_bytes=126 * _MIB,
        smem_bytes=227 * _KIB,
        sms=148,
        capability="10.0",
        source="NVIDIA Blackwell datasheet, HGX B200 column, sparse figures halved; 7.7e12 bytes/s as in the TFLA "
        "paper's table 18 (GB200 parts state 8e12); L2: CUDA Blackwell tuning guide; shared memory: CUDA programming "
        "guide, compute capability 10.0; multiprocessors as the driver reports them",
    ),
    Accelerator(
        key="l40s",
        name="NVIDIA L40S",
        part="L40S 48 GB GDDR6 PCIe",
        matrix_flops={"fp16": 362e12, "bf16": 362e12, "tf32": 183e12, "fp32": 91.6e12, "fp64": 1.43e12},
        vector_flops=91.6e12,
        bandwidth_bytes_s=0.864e12,
        memory_bytes=48 * _GB,
        l2_bytes=96 * _MIB,
        smem_bytes=99 * _KIB,
        sms=142,
        capability="8.9",
        source="NVIDIA L40S datasheet; L2 and multiprocessors: Ada GPU architecture white paper; fp64 (1/64 of fp32) "
        "and shared memory: CUDA programming guide, compute capability 8.9",
    ),
    Accelerator(
        key="rtx_4090",
        name="NVIDIA GeForce RTX 4090",
        part="GeForce RTX 4090 24 GB GDDR6X (desktop)",
        matrix_flops={"fp16": 165.2e12, "bf16": 165.2e12, "tf32": 82.6e12, "fp32": 82.6e12, "fp64": 1.29e12},
        vector_flops=82.6e12,
        bandwidth_bytes_s=1.008e12,
        memory_bytes=24 * _GB,
        l2_bytes=72 * _MIB,
        smem_bytes=99 * _KIB,
        sms=128,
        capability="8.9",
        source="NVIDIA Ada GPU architecture white paper, appendix A, fp32 accumulation; shared memory: CUDA "
        "programming guide, compute capability 8.9",
    ),
    Accelerator(
        key="rtx_5090",
        name="NVIDIA GeForce RTX 5090",
        part="GeForce RTX 5090 32 GB GDDR7 (desktop)",
        matrix_flops={"fp16": 209.5e12, "bf16": 209.5e12, "tf32": 104.8e12, "fp32": 104.8e12, "fp64": 1.64e12},
        vector_flops=104.8e12,
        bandwidth_bytes_s=1.792e12,
        memory_bytes=32 * _GB,
        l2_bytes=96 * _MIB,
        smem_bytes=99 * _KIB,
        sms=170,
        capability="12.0",
        source="NVIDIA RTX Blackwell GPU architecture white paper, appendix A, fp32 accumulation; shared memory: CUDA "
        "programming guide, compute capability 12.0",
    ),
    Accelerator(
        key="mi300x",
        name="AMD Instinct MI300X",
        part="MI300X 192 GB HBM3 OAM",
        matrix_flops={"fp16": 1307.4e12, "bf16": 1307.4e12, "tf32": 653.7e12, "fp32": 163.4e12, "fp64": 163.4e12},
        vector_flops=163.4e12,
        bandwidth_bytes_s=5.3e12,
        memory_bytes=192 * _GB,
        l2_bytes=256 * _MIB,
        smem_bytes=64 * _KIB,
        sms=304,
        source="AMD Instinct MI300X datasheet; the cache is the 256 MiB Infinity Cache; local data share: AMD CDNA 3 "
        "architecture white paper",
    ),
)


def _frozen(accelerator: Accelerator) -> Accelerator:
    return dataclasses.replace(accelerator, matrix_flops=MappingProxyType(dict(accelerator.matrix_flops)))


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType({a.key: _frozen(a) for a in _TABLE})
"""Specified accelerators by key; :func:`get_accelerator` also knows the local CPU and the user's own."""

ALIASES: Mapping[str, str] = MappingProxyType({"a100": "a100_80_pcie", "h100": "h100_sxm", "h200": "h200_sxm"})
"""Short names on the command line -> key: the SXM part, and for the A100 the TFLA paper's 80 GB PCIe card."""

PAPER_TABLE_18: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"v100": (120e12, 0.9e12), "a100": (312e12, 1.935e12), "h100": (989e12, 3.35e12), "b200": (2.25e15, 7.7e12)}
)
"""16-bit matrix FLOP/s and bytes/s that the TFLA paper computes with (table 18), kept to reproduce its figures."""
