"""Reduce, then scan: what each chunk of time is to a state, and the states between chunks.

A chunk maps the state before it, h, to a h + b. ``reduce_kernel`` computes a and b of every chunk at once, forward in
time for the states or backward for the gradients that pass between steps (see backward.py); ``merge_kernel`` runs
through the chunks. The price is a second reading of the inputs.

Source: Martin and Cundy, "Parallelizing linear recurrent neural nets over sequence length" (2018), section 2.
"""

import triton
import triton.language as tl

from .elements import (
    _decay,
    _issue_loads,
    _last_row,
    _load_inputs,
    _load_rows,
    _load_state,
    _rate,
    _scan_rows,
    _tile,
    _widen,
)
from .forward import _forward_tile


@triton.jit(do_not_specialize=["B", "T", "C8", "L", "N"])
def reduce_kernel(
    x_ptr,
    r_ptr,
    i_ptr,
    c_ptr,
    dh_ptr,
    a_ptr,
    b_ptr,
    B,
    T,
    C8,
    L,
    N,
    OP: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Reduce one chunk of L steps to the map that it is to a state (BACKWARD: to w, the last chunk being the first).

    Grid: (N chunks * B * ceil(C / BLOCK_C),). Reads x, r, i [B, T, C] and c [C] (BACKWARD: r, c and dh [B, T, C]);
    writes a and b [N, B, C].
    """
    PRECISE: tl.constexpr = r_ptr.dtype.element_ty == tl.float32
    TILE: tl.constexpr = BLOCK_I * BLOCK_O
    C = C8 * 8
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    part = pid // (B * blocks)
    chunk = N - 1 - part if BACKWARD else part
    batch = (pid // blocks % B).to(tl.int64)
    offs_c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_o = tl.arange(0, BLOCK_O)
    if BACKWARD:
        offs_o = BLOCK_O - 1 - offs_o
    offs_t = offs_o * BLOCK_I
    rate = _rate(c_ptr, offs_c, mask_c, OP, PRECISE)[None, :]
    stop = tl.minimum(chunk * L + L, T)
    tiles = tl.cdiv(stop - chunk * L, TILE)
    chunk_a = tl.full((1, BLOCK_C), 1.0, tl.float32)
    chunk_b = tl.full((1, BLOCK_C), 0.0, tl.float32)
    for step in range(tiles):
        start = chunk * L + (tiles - 1 - step if BACKWARD else step) * TILE
        base = (batch * T + start) * C
        offs, left, mask = _tile(offs_t, offs_c, mask_c, C, stop - start)
        if BACKWARD:
            closed = -float("inf") if OP == "rglru" else 1.0
            r = _load_rows(r_ptr + base, offs, left, mask, C, closed, BLOCK_I)
            dh = _load_rows(dh_ptr + base, offs, left, mask, C, 0.0, BLOCK_I)
            _issue_loads()
            row_a = tl.full((BLOCK_O, BLOCK_C), 1.0, tl.float32)
            row_w = tl.full((BLOCK_O, BLOCK_C), 0.0, tl.float32)
            for n in tl.static_range(BLOCK_I - 1, -1, -1):
                a, _ = _decay(r[n], rate, OP, PRECISE)
                row_w = a * (_widen(dh[n]) + row_w)
                row_a *= a
            after_a, after_b, _, _ = _scan_rows(row_a, row_w, BLOCK_O, BLOCK_C)
        else:
            x, r, i = _load_inputs(x_ptr + base, r_ptr + base, i_ptr + base, offs, left, mask, C, OP, BLOCK_I)
            _issue_loads()
            _, _, after_a, after_b, _, _ = _forward_tile(x, r, i, rate, OP, PRECISE, BLOCK_I, BLOCK_O, BLOCK_C)
        tile_a = _last_row(after_a, BLOCK_O)
        chunk_b = tl.fma(tile_a, chunk_b, _last_row(after_b, BLOCK_O))
        chunk_a *= tile_a
    offs = (part.to(tl.int64) * B + batch) * C + offs_c[None, :]
    tl.store(a_ptr + offs, chunk_a, mask=mask_c[None, :])
    tl.store(b_ptr + offs, chunk_b, mask=mask_c[None, :])


@triton.jit(do_not_specialize=["E", "N"])
def merge_kernel(a_ptr, b_ptr, first_ptr, state_ptr, E, N, HAS_FIRST: tl.constexpr, BLOCK_E: tl.constexpr):
    """Run through N chunks' maps and store the state before each.

    Grid: (ceil(E / BLOCK_E),) over E = B * C channels of sequences. Reads a, b [N, E] and the first state [E]; writes
    states [N, E].
    """
    offs = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = offs < E
    state = tl.reshape(_load_state(first_ptr, offs, mask, HAS_FIRST), (BLOCK_E,))
    row = tl.zeros((), dtype=tl.int64)
    for _ in range(N):
        tl.store(state_ptr + row + offs, state, mask=mask)
        a = tl.load(a_ptr + row + offs, mask=mask, other=0.0)
        b = tl.load(b_ptr + row + offs, mask=mask, other=0.0)
        state = tl.fma(a, state, b)
        row += E


@triton.jit(do_not_specialize=["N", "C"])
def sum_parts_kernel(part_ptr, sum_ptr, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Add up N parts, always in the same order.

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
