"""A processor and an H200 as tests describe them, whatever machine they run on."""

from __future__ import annotations

import dataclasses

from lrbench.results.schema import Environment

PROCESSOR = Environment(
    device_kind="cpu", device_name="a processor, 1 thread", device_accelerator=None, capability=None, device_count=0,
    memory_bytes=2**34, torch_version="2.13.0", triton_version="3.6.0", cuda_version=None, driver_version=None,
    python_version="3.11", lrbench_version="0.1.0", git_commit="c" * 40, git_dirty=False,
)  # fmt: skip
H200 = dataclasses.replace(
    PROCESSOR, device_kind="cuda", device_name="NVIDIA H200", device_accelerator="h200_sxm", capability="9.0",
    device_count=1, memory_bytes=141 * 10**9, cuda_version="13.0", driver_version="580",
)  # fmt: skip
