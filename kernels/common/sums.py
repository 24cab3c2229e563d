"""The sum of a gradient's parts, of which each program of an earlier launch has written one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .remember import remember_launches
from .sizes import cdiv

BLOCK_N, BLOCK_C = 128, 8


@remember_launches
@triton.jit(do_not_specialize=["N", "C"])
def sum_parts_kernel(part_ptr, sum_ptr, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sum N parts, always in the same order, so that results do not vary between runs.

    Grid: (ceil(C / BLOCK_C),). Reads parts [N, C]; writes their sum [C].
    """
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = (offs_c < C)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_C), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        at = offs_n.to(tl.int64)[:, None] * C + offs_c[None, :]
        total += tl.load(part_ptr + at, mask=(offs_n < N)[:, None] & mask_c, other=0.0)
    tl.store(sum_ptr + offs_c, tl.sum(total, axis=0), mask=offs_c < C)


def sum_parts(parts: Tensor) -> Tensor:
    """Return the sum [C] of parts [N, B, C] in float32."""
    C = parts.shape[2]
    total = torch.empty(C, device=parts.device, dtype=torch.float32)
    sum_parts_kernel[(cdiv(C, BLOCK_C),)](
        parts, total, parts.numel() // C, C, BLOCK_N=BLOCK_N, BLOCK_C=BLOCK_C, num_warps=4
    )
    return total
