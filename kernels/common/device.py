"""The device that kernels are launched on: the one of their tensors, whichever is current."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Launcher = TypeVar("Launcher", bound=Callable[..., Any])


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
