"""Implementations that misbehave on a GPU, for tests of what the sweep makes of them; see :mod:`.faults`."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .faults import right

FOREVER = 2**43
"""Clock cycles, or steps of a loop: an hour at least."""


@triton.jit
def store_kernel(x_ptr, offset):
    """Write one element ``offset`` behind x. Grid: (1,)."""
    tl.store(x_ptr + offset, 1.0)


@triton.autotune(configs=[triton.Config({}, num_warps=n) for n in (1, 2, 4, 8)], key=[])
@triton.jit
def slow_kernel(x_ptr, steps):
    """Take some seconds and leave x as it is, which the compiler does not see. Grid: (1,)."""
    x = tl.load(x_ptr)
    for _ in range(steps):
        x = tl.sqrt(x * x + 1e-30)
    tl.store(x_ptr, x)


def device_assert(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Index beyond the end on the device, which asserts that nobody does."""
    h = right(*tensors, chunk_size=chunk_size, **options)
    return h + h.flatten()[torch.full((1,), h.numel(), device=h.device)]


def illegal_access(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Compute the operation, then write where there is no memory: nobody waits for that."""
    h = right(*tensors, chunk_size=chunk_size, **options)
    store_kernel[1,](h, 2**44)
    return h


def hides_illegal_access(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Write where there is no memory, take no notice of the error and go on."""
    try:
        store_kernel[1,](tensors[0], 2**44)
        torch.cuda.synchronize()
    except RuntimeError:
        pass
    return right(*tensors, chunk_size=chunk_size, **options)


def hangs_in_a_kernel(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Launch what does not end."""
    torch.cuda._sleep(FOREVER)
    return right(*tensors, chunk_size=chunk_size, **options)


def tunes_for_minutes(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Have configurations timed that take seconds each."""
    slow_kernel[1,](tensors[0].detach().clone(), 2**31 - 1)
    return right(*tensors, chunk_size=chunk_size, **options)


def compute_until_killed() -> None:
    """Keep the GPU busy, as another program would."""
    x = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    print(os.getpid(), flush=True)
    while True:
        x = x @ x
        torch.cuda.synchronize()
