"""The device that kernels are launched on, which is that of their tensors, whichever is current; and what it has."""

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
"""Programs of a persistent launch where there is no GPU: few, so that each walks several tiles."""


def on_device_of(argument: str) -> Callable[[Launcher], Launcher]:
    """Make a launcher run with the device of one of its tensors current, and leave the current one as it was.

    Triton launches on the current device and its stream, and takes a kernel's scratch memory there, wherever the
    tensors lie. Autograd makes their device current for a backward pass of its own, but not for one that is compiled.

    Args:
        argument: name of the tensor; what checks a call's arguments sees to it that the others are where it is.
    """

    def decorate(launcher: Launcher) -> Launcher:
        position = list(signature(launcher).parameters).index(argument)

        @wraps(launcher)
        def launched(*args: Any, **kwargs: Any) -> Any:
            tensor: Tensor = args[position] if position < len(args) else kwargs[argument]
            if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
                return launcher(*args, **kwargs)
            with torch.cuda.device(tensor.get_device()):
                return launcher(*args, **kwargs)

        return cast(Launcher, launched)

    return decorate


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability that launches are chosen for; the interpreter on the CPU counts as sm_90."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; of the interpreter a few."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the few bytes in which a kernel builds its tensor descriptors; for ``triton.set_allocator``."""
    return torch.empty(size, dtype=torch.int8, device=torch.cuda.current_device())
