"""What both Lightning kernels share: tiles of one head of a tensor [B, T, H, D], and powers of its decay.

Tiles are loaded and stored by tensor descriptor or by pointer. Beyond T and D loads return zeros and nothing is stored.
Descriptors are made on the host, so that a kernel needs no memory to build them in. They order the axes as B, H, T, D,
so that a tile's axes of length 1 come first and dropping them moves no data.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.device import capability

MAX_SLOPE = 150.0
"""Upper bound of the slopes: the decay of one step is zero in float32 there, and multiples of the rate stay finite."""

LOG2E = tl.constexpr(1.4426950408889634)
MAX_RATE = tl.constexpr(MAX_SLOPE * 1.4426950408889634)


@triton.jit
def head_rate(slope_ptr, head):
    """Return a head's decay rate in base 2: lambda = exp(-slope) = 2^-rate."""
    return tl.minimum(tl.load(slope_ptr + head) * LOG2E, MAX_RATE)


@triton.jit
def power(rate, n):
    """Return lambda^n for n >= 0, else 0, which masks the positions that a causal sum leaves out."""
    return tl.where(n >= 0, tl.math.exp2(-rate * tl.maximum(n, 0).to(tl.float32)), 0.0)


@triton.jit
def _offsets(batch, head, t0, col, T, H, D, ROWS, COLS):
    """Return offsets and mask of a tile [ROWS, COLS] that starts at position t0 and column col."""
    offs_t = t0 + tl.arange(0, ROWS)
    offs_d = col + tl.arange(0, COLS)
    start = batch.to(tl.int64) * T * (H * D) + head * D
    return (
        start + offs_t.to(tl.int64)[:, None] * (H * D) + offs_d[None, :],
        (offs_t < T)[:, None] & (offs_d < D)[None, :],
    )


@triton.jit
def load_tile(x, batch, head, t0, col, T, H, D, ROWS, COLS, USE_TMA):
    """Load the tile [ROWS, COLS] of x at position t0 and column col. All arguments in capitals but T are constexpr."""
    if USE_TMA:
        return tl.reshape(x.load([batch, head, t0, col]), (ROWS, COLS))
    else:
        offs, mask = _offsets(batch, head, t0, col, T, H, D, ROWS, COLS)
        return tl.load(x + offs, mask=mask, other=0.0)


@triton.jit
def store_tile(x, tile, batch, head, t0, col, T, H, D, USE_TMA):
    """Store the part of a tile that lies inside x. All arguments in capitals but T are constexpr."""
    if USE_TMA:
        x.store([batch, head, t0, col], tl.reshape(tile, (1, 1, tile.shape[0], tile.shape[1])))
    else:
        offs, mask = _offsets(batch, head, t0, col, T, H, D, tile.shape[0], tile.shape[1])
        tl.store(x + offs, tile, mask=mask)


def tiles_of(
    tensors: Sequence[Tensor], boxes: Sequence[tuple[int, int]]
) -> tuple[list[Tensor | TensorDescriptor], bool]:
    """Return what a kernel takes for tensors [B, T, H, D], and USE_TMA: whether these are descriptors.

    Otherwise they are the tensors, or contiguous copies: if the device has no descriptors.

    Args:
        boxes: rows and columns of each tensor's tiles.
    """
    plain = [x.detach() for x in tensors]
    if capability(plain[0].device) < (9, 0):
        return [x.contiguous() for x in plain], False
    tiles: list[Tensor | TensorDescriptor] = []
    for x, box in zip(plain, boxes, strict=True):
        B, T, H, D = x.shape
        # A contiguous tensor's own strides say nothing along dimensions of size 1.
        batch, row, head = (T * H * D, H * D, D) if x.is_contiguous() else x.stride()[:3]
        tiles.append(TensorDescriptor(x, [B, H, T, D], [batch, head, row, 1], [1, 1, *box]))
    return tiles, True
