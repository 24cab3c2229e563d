"""Rate of the vector units: chains of fused multiply-adds in registers. Nothing but the last value leaves them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4
"""Values a program: eight independent chains a thread, which with the warps beside it cover the latency of an fma."""

UNROLL = 32
PROGRAMS_PER_SM = 64
ITERATIONS = 1024


@triton.jit
def fma_kernel(out_ptr, factor, addend, iterations, UNROLL: tl.constexpr, BLOCK: tl.constexpr):
    """Iterate x = x factor + addend from x = 0, 1, 2, ...

    Grid: (programs,). Writes out [programs, BLOCK] after iterations x UNROLL steps.
    """
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = offs.to(tl.float32)
    for _ in range(iterations):
        for _ in tl.static_range(UNROLL):
            x = tl.fma(x, factor, addend)
    tl.store(out_ptr + offs, x)


def run_chains(out: Tensor, iterations: int = ITERATIONS) -> int:
    """Launch the kernel over ``out`` [programs x BLOCK] in float32 and return its FLOPs, two a multiply-add.

    factor and addend keep every chain near 1: neither infinity nor denormal numbers change what is timed.
    """
    if out.dtype != torch.float32 or out.numel() % BLOCK:
        raise ValueError(f"out must be float32 with a multiple of {BLOCK} elements, got {out.dtype}, {out.numel()}")
    fma_kernel[(out.numel() // BLOCK,)](out, 0.999, 0.001, iterations, UNROLL=UNROLL, BLOCK=BLOCK, num_warps=WARPS)
    return 2 * out.numel() * iterations * UNROLL
