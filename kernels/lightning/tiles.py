"""Load and store tiles of one head of a tensor [B, T, H, D], by descriptor or by pointer.

Beyond T and D loads return zeros and nothing is stored. Descriptors are made on the host, so that a kernel needs no
memory to build them in. They order the axes as B, H, T, D, so that a tile's axes of length 1 come first and dropping
them moves no data.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

DESCRIPTOR_ALIGNMENT = 16
"""The address of a descriptor's tensor must be a multiple of this many bytes."""


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
    """Load the tile [ROWS, COLS] of x at position t0 and column col; arguments in capitals but T are constexpr."""
    if USE_TMA:
        return tl.reshape(x.load([batch, head, t0, col]), (ROWS, COLS))
    else:
        offs, mask = _offsets(batch, head, t0, col, T, H, D, ROWS, COLS)
        return tl.load(x + offs, mask=mask, other=0.0)


@triton.jit
def store_tile(x, tile, batch, head, t0, col, T, H, D, USE_TMA):
    """Store the part of a tile that lies inside x; arguments in capitals but T are constexpr."""
    if USE_TMA:
        x.store([batch, head, t0, col], tl.reshape(tile, (1, 1, tile.shape[0], tile.shape[1])))
    else:
        offs, mask = _offsets(batch, head, t0, col, T, H, D, tile.shape[0], tile.shape[1])
        tl.store(x + offs, tile, mask=mask)


def takes_descriptors(capability: tuple[int, int], *tensors: Tensor) -> bool:
    """Return whether the device has descriptors and the tensors are aligned as descriptors need."""
    return capability >= (9, 0) and all(x.data_ptr() % DESCRIPTOR_ALIGNMENT == 0 for x in tensors)


def tiles_of(x: Tensor, rows: int, columns: int, *, use_tma: bool) -> Tensor | TensorDescriptor:
    """Return what to pass to a kernel for tiles [rows, columns] of x [B, T, H, D]: a descriptor, or x itself."""
    x = x.detach()
    if not use_tma:
        return x
    B, T, H, D = x.shape
    return TensorDescriptor(x, [B, H, T, D], [T * H * D, D, H * D, 1], [1, 1, rows, columns])
