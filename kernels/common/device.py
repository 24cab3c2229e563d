"""Properties of the device of a tensor."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from .arguments import CASE_DTYPES, dtype_name, is_interpreted, warn_once
from .spec import Implementation

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


def why_not_here(
    form: Implementation, dtype: torch.dtype, device: torch.device, sizes: Mapping[str, int], *, chosen: bool
) -> str | None:
    """Return why an implementation in Gluon does not run here on inputs of this dtype, device and sizes, or None.

    Call it in a :func:`.arguments.constant` function.

    Args:
        chosen: whether the caller asked for it; if not, a warning says that a slower form runs in its place where only
            the version of Triton is the reason.
    """
    if CASE_DTYPES[dtype] not in form.dtypes:
        allowed = " or ".join(dtype_name(known) for known, short in CASE_DTYPES.items() if short in form.dtypes)
        return f"dtype must be {allowed} for {form.name}, got {dtype_name(dtype)}"
    if reason := form.why_unsupported(form.modes[0], CASE_DTYPES[dtype], None, sizes):
        return reason
    here = "{}.{}".format(*capability(device)) if device.type == "cuda" else str(device)
    if reason := form.why_not_on(here):
        return reason
    if is_interpreted():
        return f"{form.name} is written in Gluon, which TRITON_INTERPRET=1 does not run"
    import triton

    versions = {"triton": triton.__version__}
    if not chosen and (slower := form.why_slower_with(versions)):
        warn_once(slower)
    return form.why_not_with(versions)


def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate memory for a kernel's tensor descriptors; ``triton.set_allocator`` takes this function."""
    return torch.empty(size, dtype=torch.int8, device=torch.cuda.current_device())
