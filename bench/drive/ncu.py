"""Nsight Compute: the command that counts a program's kernels, and what its output says.

Only what runs between cudaProfilerStart and cudaProfilerStop is profiled. Clocks are left alone. Caches are emptied
before each kernel and each of its replays, so counts do not depend on the order of replays; what a cache would carry
from one kernel to the next is read again. Kernels are counted, copies and fills by the driver are not.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TENSOR_METRICS = (
    "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "sm__ops_path_tensor_src_fp16_dst_fp32.sum",
    "sm__ops_path_tensor_src_fp16_dst_fp16.sum",
    "sm__ops_path_tensor_src_tf32_dst_fp32.sum",
    "sm__ops_path_tensor_src_fp64.sum",
)
DRAM_READ, DRAM_WRITE, L2 = "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"
METRICS = (*TENSOR_METRICS, DRAM_READ, DRAM_WRITE, L2)

PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")
_UNIT = re.compile(r"([KMGT]?)[a-z]*")
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCounts:
    """One profiled kernel: its name and the metrics that the device has, in operations and bytes."""

    name: str
    values: Mapping[str, float]


def find_ncu() -> str | None:
    """Return the path of ncu: on PATH, else the newest where its installers put it; None where there is none."""
    if found := shutil.which("ncu"):
        return found
    candidates = [path for place in PLACES for path in Path("/").glob(place.lstrip("/")) if os.access(path, os.X_OK)]
    return str(max(candidates, key=lambda path: path.stat().st_mtime)) if candidates else None


def available_metrics(ncu: str) -> tuple[str, ...]:
    """Return the metrics of :data:`METRICS` that ncu has for this device; all of them where it does not say."""
    listed = subprocess.run((ncu, "--query-metrics"), capture_output=True, text=True, timeout=120)
    names = {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}
    known = tuple(name for name in METRICS if name.partition(".")[0] in names)
    return known or METRICS


def ncu_version(ncu: str) -> str | None:
    """Return the version that ncu states, or None."""
    said = subprocess.run((ncu, "--version"), capture_output=True, text=True, timeout=60).stdout
    match = re.search(r"[Vv]ersion (\S+)", said)
    return match.group(1) if match else None


def command(ncu: str, metrics: Sequence[str], log: Path, program: Sequence[str]) -> list[str]:
    """Return the command that profiles ``program`` and writes the raw page as CSV to ``log``."""
    counting = "--target-processes all --profile-from-start off --clock-control none --cache-control all"
    printing = "--replay-mode kernel --page raw --csv --print-units base"
    chosen = ("--metrics", ",".join(metrics), "--log-file", str(log))
    return [ncu, *counting.split(), *printing.split(), *chosen, *program]


def parse_raw_csv(text: str) -> list[KernelCounts]:
    """Return the kernels of ncu's raw page in CSV, in the order they ran.

    The page starts with a row of column names and one of units; ncu's own lines before and after it begin with ``==``.
    Numbers may carry thousands separators and units a decimal prefix; n/a means that the device has no such counter.

    Raises:
        ValueError: there is no such page, or a unit or a number is none.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if not lines or '"Kernel Name"' not in lines[0]:
        raise ValueError("ncu's output must hold the raw page as CSV, got none")
    rows = list(csv.DictReader(lines))
    if not rows:
        raise ValueError("ncu's output must hold a row of units, got none")
    units, *kernels = rows
    return [
        KernelCounts(
            name=cells["Kernel Name"],
            values={m: _number(m, cells[m], units[m]) for m in METRICS if cells.get(m) not in (None, "", "n/a")},
        )
        for cells in kernels
    ]


def _number(metric: str, text: str, unit: str) -> float:
    match = _UNIT.fullmatch(unit)
    if match is None:
        raise ValueError(f"the unit of {metric} must be a word with a decimal prefix or none, got {unit!r}")
    try:
        return float(text.replace(",", "")) * _SCALE[match.group(1)]
    except ValueError:
        raise ValueError(f"{metric} must be a number, got {text!r}") from None


def total(kernels: Iterable[KernelCounts], *metrics: str) -> float | None:
    """Return the sum of metrics over kernels, None where no kernel has a counter of any."""
    values = [kernel.values[metric] for kernel in kernels for metric in metrics if metric in kernel.values]
    return sum(values) if values else None


def add_up(kernels: Sequence[KernelCounts]) -> dict[str, Any]:
    """Return what was measured of the kernels of one call as columns of a :class:`..results.schema.ProfileRow`."""
    return {
        "launches": len(kernels),
        "kernel_names": [kernel.name for kernel in kernels],
        "kernel_tensor_flops": [total([kernel], *TENSOR_METRICS) or 0.0 for kernel in kernels],
        "kernel_dram_bytes": [total([kernel], DRAM_READ, DRAM_WRITE) or 0.0 for kernel in kernels],
        "measured_tensor_flops": total(kernels, *TENSOR_METRICS),
        "dram_read_bytes": total(kernels, DRAM_READ),
        "dram_write_bytes": total(kernels, DRAM_WRITE),
        "l2_bytes": total(kernels, L2),
    }


def error_in(text: str) -> str | None:
    """Return the last line in which ncu reports an error, or warns that it found nothing to profile; None without."""
    told = [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING== No kernels"))]
    return told[-1].partition("== ")[2] if told else None
