"""Loading tiles of x [B, T, C], for the kernels over channels.

A row is block_i consecutive steps, all held by one thread for its channels. A tile is block_o consecutive rows, kept as
a tuple of block_i arrays [block_o, block_c]: array n holds step n of every row. So time runs first within a thread,
then over rows, then over programs.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in the interpreter, which cannot run PTX."""


@triton.jit
def widen(x):
    """Return x as float32; a bf16 is the upper half of a float32, so one shift converts it."""
    if x.dtype == tl.bfloat16:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def tile_offsets(offs_t, offs_c, mask_c, C, end):
    """Return the offsets [BLOCK_O, BLOCK_C] of rows that start at steps ``offs_t``, how many steps are left from each
    row's start to ``end``, and the mask of channels."""
    return offs_t[:, None] * C + offs_c[None, :], (end - offs_t)[:, None], mask_c[None, :]


@triton.jit
def load_rows(ptr, offs, left, mask_c, C, other, BLOCK_I: tl.constexpr):
    """Load a tile as BLOCK_I arrays [BLOCK_O, BLOCK_C], with ``other`` where a row has no step n."""
    rows = ()
    for n in tl.static_range(BLOCK_I):
        rows = rows + (tl.load(ptr + n * C + offs, mask=(left > n) & mask_c, other=other),)
    return rows
