"""Reduce, then scan: the states between chunks of time.

A chunk maps the state h before it to a h + b. ``reduce_kernel`` computes a and b of all chunks in parallel, forward in
time for the states, or backward in time for w (see backward.py). ``merge_kernel`` applies these maps one after the
other and stores the state before each chunk. From there the walks of forward.py or backward.py take chunks in parallel.

Source: Martin and Cundy, "Parallelizing linear recurrent neural nets over sequence length" (2018), section 2.
"""

import triton
import triton.language as tl

from ..common.marks import load_marks
from ..common.remember import remember_launches
from ..common.time_tiles import load_rows, tile_offsets, widen
from .backward import add_last_gradients
from .elements import (
    decay_and_gate,
    decay_rate,
    forget,
    issue_loads,
    load_gate,
    load_inputs,
    load_state,
    scan_rows,
    take_last_row,
)
from .forward import forward_tile


@remember_launches
@triton.jit(do_not_specialize=["B", "T", "C8", "L", "N"])
def reduce_kernel(
    x_ptr, r_ptr, i_ptr, c_ptr, dh_ptr, a_ptr, b_ptr, strides, documents, B, T, C8, L, N,
    OP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the map of one chunk of L steps: of the state or, given dh, of w, backwards in time.

    Grid: (N chunks * B * ceil(C / BLOCK_C),).
    Reads x, r, i [B, T, C] and c [C] (given dh: r, dh [B, T, C] and c); writes a and b [N, B, C], given dh the last
    chunk's first.
    """
    BACKWARD: tl.constexpr = dh_ptr is not None
    PRECISE: tl.constexpr = r_ptr.dtype.element_ty == tl.float32
    BLOCK_I: tl.constexpr = TILE.block_i
    BLOCK_O: tl.constexpr = TILE.block_o
    BLOCK_C: tl.constexpr = TILE.block_c
    STEPS: tl.constexpr = TILE.steps
    C = C8 * 8
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    position = pid // (B * blocks)
    chunk = N - 1 - position if BACKWARD else position
    batch = (pid // blocks % B).to(tl.int64)
    offs_c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_o = tl.arange(0, BLOCK_O)
    if BACKWARD:
        offs_o = BLOCK_O - 1 - offs_o
    offs_t = offs_o * BLOCK_I
    rate = decay_rate(c_ptr, offs_c, mask_c, OP, PRECISE)[None, :]
    stop = tl.minimum(chunk * L + L, T)
    tiles = tl.cdiv(stop - chunk * L, STEPS)
    chunk_a = tl.full((1, BLOCK_C), 1.0, tl.float32)
    chunk_b = tl.full((1, BLOCK_C), 0.0, tl.float32)
    for step in range(tiles):
        start = chunk * L + (tiles - 1 - step if BACKWARD else step) * STEPS
        base = (batch * T + start) * C
        offs, left, mask = tile_offsets(offs_t, offs_c, mask_c, C, stop - start)
        at = batch, start, base, offs, offs_t, offs_c, left, mask
        rows = None
        if documents is not None:
            rows = load_marks(documents, T, start + offs_t, left, BLOCK_I)
        if BACKWARD:
            r = load_gate(r_ptr, strides, at, C, OP, BLOCK_I)
            dh = load_rows(dh_ptr + base, offs, left, mask, C, 0.0, BLOCK_I)
            dh = add_last_gradients(dh, rows, offs_c, mask, C, BLOCK_I)
            issue_loads()
            row_a = tl.full((BLOCK_O, BLOCK_C), 1.0, tl.float32)
            row_w = tl.full((BLOCK_O, BLOCK_C), 0.0, tl.float32)
            for n in tl.static_range(BLOCK_I - 1, -1, -1):
                a, _ = decay_and_gate(r[n], rate, OP, PRECISE)
                a = forget(a, rows, n)
                row_w = a * (widen(dh[n]) + row_w)
                row_a *= a
            after_a, after_b, _, _ = scan_rows(row_a, row_w)
        else:
            x, r, i = load_inputs(x_ptr, r_ptr, i_ptr, strides, at, C, OP, BLOCK_I)
            issue_loads()
            _, _, after_a, after_b, _, _ = forward_tile(x, r, i, rate, rows, offs_c, mask, C, OP, PRECISE, BLOCK_I)
        tile_a = take_last_row(after_a)
        chunk_b = tl.fma(tile_a, chunk_b, take_last_row(after_b))
        chunk_a *= tile_a
    offs = (position.to(tl.int64) * B + batch) * C + offs_c[None, :]
    tl.store(a_ptr + offs, chunk_a, mask=mask_c[None, :])
    tl.store(b_ptr + offs, chunk_b, mask=mask_c[None, :])


@remember_launches
@triton.jit(do_not_specialize=["E", "N"])
def merge_kernel(a_ptr, b_ptr, first_ptr, state_ptr, E, N, BLOCK_E: tl.constexpr):
    """Apply N chunks' maps one after the other and store the state before each chunk.

    Grid: (ceil(E / BLOCK_E),), where E = B * C. Reads a, b [N, E] and the first state [E]; writes states [N, E].
    """
    offs = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = offs < E
    state = tl.reshape(load_state(first_ptr, 0, offs, mask), (BLOCK_E,))
    row = tl.zeros((), dtype=tl.int64)
    for _ in range(N):
        tl.store(state_ptr + row + offs, state, mask=mask)
        a = tl.load(a_ptr + row + offs, mask=mask, other=0.0)
        b = tl.load(b_ptr + row + offs, mask=mask, other=0.0)
        state = tl.fma(a, state, b)
        row += E
