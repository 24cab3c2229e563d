"""Properties of the device of a tensor."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

INTERPRETER_PROGRAMS = 3
"""Programs of a persistent launch in the interpreter: few, so that each processes several tiles."""


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability to choose launches for; the CPU (the interpreter) counts as sm_90."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors, or INTERPRETER_PROGRAMS on the CPU."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def memory_rate(device: torch.device) -> float:
    """Return a GPU's specified memory bandwidth in bytes a second; 0 on the CPU and where the driver does not say."""
    if device.type != "cuda":
        return 0.0
    # Imported here because torch's forms run without Triton.
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(device.index)
    # Two transfers a cycle; the clock is in kHz, the bus width in bits.
    return 2e3 * properties["mem_clock_rate"] * properties["mem_bus_width"] / 8


def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate memory for a kernel's tensor descriptors; ``triton.set_allocator`` takes this function."""
    return torch.empty(size, dtype=torch.int8, device=torch.cuda.current_device())
