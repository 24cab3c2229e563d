"""Launching on the device of the tensors rather than on the current one, and that device's properties."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Launcher = TypeVar("Launcher", bound=Callable[..., Any])

INTERPRETER_PROGRAMS = 3
"""Programs of a persistent launch in the interpreter: few, so that each processes several tiles."""


def on_device_of(argument: str) -> Callable[[Launcher], Launcher]:
    """Make a launcher run with the device of one of its arguments as the current device.

    Triton launches on the current device and its stream and allocates a kernel's scratch memory there, whatever the
    device of the tensors. Autograd sets the current device for an eager backward pass, but not for a compiled one.

    Args:
        argument: name of a tensor, or of a tuple that begins with one; all tensors must be on its device.
    """

    def decorate(launcher: Launcher) -> Launcher:
        position = list(signature(launcher).parameters).index(argument)

        @wraps(launcher)
        def launched(*args: Any, **kwargs: Any) -> Any:
            value = args[position] if position < len(args) else kwargs[argument]
            tensor: Tensor = value[0] if isinstance(value, tuple) else value
            if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
                return launcher(*args, **kwargs)
            with torch.cuda.device(tensor.get_device()):
                return launcher(*args, **kwargs)

        return cast(Launcher, launched)

    return decorate


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
