"""The backward pass of a diagonal recurrence; elements and states are recomputed from the inputs and saved states.

Let g_t be the gradient of h_t and w_t = a_t g_t the part of it that h_{t-1} gets. Then

    w_t = a_t (dh_t + w_{t+1})        g_t = dh_t + w_{t+1}

is a diagonal recurrence too, backwards in time; w_1 is the gradient of the initial state. It is computed as forward.py
computes h, by a look-back scan or by a walk. Rows are counted from the end of a tile: row o holds the BLOCK_I steps
from (BLOCK_O - 1 - o) BLOCK_I on, so that w, too, runs from the first row to the last. The forward pass saved the
float32 state before every BLOCK_I steps, from which each row recomputes its h_{t-1}. Every program writes a part of
c's gradient; the parts are summed in a fixed order.
"""

import triton
import triton.language as tl

from ..common.marks import documents_at, is_marked, load_marks
from ..common.remember import remember_launches
from ..common.time_tiles import INTERPRETED, load_rows, tile_offsets, widen
from .elements import (
    decay_and_gate,
    decay_rate,
    forget,
    gradient_element,
    issue_loads,
    load_inputs,
    load_of_documents,
    load_state,
    pass_state,
    prefetch_input,
    prefetch_words,
    program_position,
    scan_rows,
    sigmoid,
    state_before,
    store_last_row,
    take_last_row,
)


@triton.jit
def add_last_gradients(dh, rows, offs_c, mask_c, C, BLOCK_I: tl.constexpr):
    """Return a tile of dh with the gradients of the documents' last states added where documents end; rows: None, or
    see load_marks."""
    if rows is not None:
        if rows[4].last is not None:
            both = ()
            for n in tl.static_range(BLOCK_I):
                last = load_of_documents(rows[4].last, rows, n, is_marked(rows[1], n), offs_c, mask_c, C)
                both = both + (widen(dh[n]) + last,)
            dh = both
    return dh


@triton.jit
def _backward_tile(r, dh, rate, rows, OP: tl.constexpr, PRECISE: tl.constexpr, BLOCK_I: tl.constexpr):
    """Return a tile's decays and gates, and the maps of :func:`scan_rows`: from the w that enters the tile (from later
    steps) to the w after and before each row."""
    all_a, all_open = (), ()
    for n in tl.static_range(BLOCK_I):
        a, open_r = decay_and_gate(r[n], rate, OP, PRECISE)
        all_a = all_a + (forget(a, rows, n),)
        all_open = all_open + (open_r,)
    row_a = all_a[BLOCK_I - 1]
    g = widen(dh[BLOCK_I - 1])
    for n in tl.static_range(BLOCK_I - 2, -1, -1):
        g = tl.fma(all_a[n + 1], g, widen(dh[n]))
        row_a *= all_a[n]
    after_a, after_w, before_a, before_w = scan_rows(row_a, all_a[0] * g)
    return all_a, all_open, after_a, after_w, before_a, before_w


@triton.jit
def _load_saved(saved_ptr, offs_t, offs_c, left, mask_c, C, BLOCK_I: tl.constexpr):
    """Load the states before the rows [BLOCK_O, BLOCK_C]."""
    slots = (offs_t // BLOCK_I)[:, None] * C + offs_c[None, :]
    return tl.load(saved_ptr + slots, mask=(left > 0) & mask_c, other=0.0)


@triton.jit
def _store_gradients(
    dx_ptr, dr_ptr, di_ptr, base, x, i, dh, all_a, all_open, h, w, rows, offs_c, offs, left, mask_c, C, rate,
    OP: tl.constexpr, PRECISE: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Compute g from the w that enters each row, backwards in time, then store the gradients forwards in time: only g
    is held in registers in between. Return the sum of D (see gradient_element) [BLOCK_C]."""
    dx_ptr += base
    dr_ptr += base
    if OP == "rglru":
        di_ptr += base
    dtype = dx_ptr.dtype.element_ty
    total = tl.full(offs.shape, 0.0, tl.float32)
    g = widen(dh[BLOCK_I - 1]) + w
    all_g = (g,)
    for n in tl.static_range(BLOCK_I - 2, -1, -1):
        g = tl.fma(all_a[n + 1], g, widen(dh[n]))
        all_g = all_g + (g,)
    for n in tl.static_range(BLOCK_I):
        g = all_g[BLOCK_I - 1 - n]
        mask = (left > n) & mask_c
        h = state_before(h, rows, n, offs_c, mask_c, C)
        a, b, to_x, to_i, to_log, to_r = gradient_element(x[n], i[n], all_open[n], rate, h, OP, PRECISE)
        h = tl.fma(a, h, b)
        d = g * to_log
        tl.store(dx_ptr + n * C + offs, (g * to_x).to(dtype), mask=mask)
        tl.store(dr_ptr + n * C + offs, (d * to_r).to(dtype), mask=mask)
        if OP == "rglru":
            tl.store(di_ptr + n * C + offs, (g * to_i).to(dtype), mask=mask)
            total += d
        if rows is not None:
            if rows[4].dfirst is not None:
                begins = is_marked(rows[0], n)
                at = documents_at(rows, n, begins, C) + offs_c[None, :]
                tl.store(rows[4].dfirst + at, a * g, mask=begins & mask_c)
    return tl.sum(total, axis=0)


@triton.jit
def _store_dc(dc_ptr, c_ptr, total, offs_c, mask_c, PRECISE: tl.constexpr):
    """Store a part of c's gradient: -8 sigma(c) times the sum of D."""
    c = tl.load(c_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    tl.store(dc_ptr + offs_c, total * (-8.0 * sigmoid(c, PRECISE)), mask=mask_c)


@remember_launches
@triton.jit(do_not_specialize=["call", "B", "T", "C8", "S", "ahead"])
def look_back_gradient_kernel(
    x_ptr, r_ptr, i_ptr, c_ptr, saved_ptr, dh_ptr, dlast_ptr, dx_ptr, dr_ptr, di_ptr, dc_ptr, dfirst_ptr, strides,
    documents, word_ptr, call, B, T, C8, S, ahead, OP: tl.constexpr, PASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile in a single pass over memory; the first programs take the end of the sequence.

    Grid: (tiles of T * B * ceil(C / BLOCK_C),), in the order of look_back_kernel.
    Reads x, r, i, dh [B, T, C], c [C], the saved states [B, S, C] and the last state's gradient [B, C]; writes dx, dr,
    di [B, T, C], dc's parts [tiles, B, C] and the first state's gradient [B, C]; passes w on through words
    [tiles, B, C], the last tile's first, which hold the number of the call too.
    """
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    BLOCK_I: tl.constexpr = TILE.block_i
    BLOCK_O: tl.constexpr = TILE.block_o
    BLOCK_C: tl.constexpr = TILE.block_c
    STEPS: tl.constexpr = TILE.steps
    C = C8 * 8
    blocks = tl.cdiv(C, BLOCK_C)
    position, batch, block = program_position(B, blocks)
    tiles = tl.cdiv(T, STEPS)
    tile = tiles - 1 - position
    offs_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_t = (BLOCK_O - 1 - tl.arange(0, BLOCK_O)) * BLOCK_I
    base = (batch * T + tile * STEPS) * C
    offs, left, mask = tile_offsets(offs_t, offs_c, mask_c, C, T - tile * STEPS)
    at = batch, tile * STEPS, base, offs, offs_t, offs_c, left, mask
    rows = None
    if documents is not None:
        rows = load_marks(documents, T, tile * STEPS + offs_t, left, BLOCK_I)
    x, r, i = load_inputs(x_ptr, r_ptr, i_ptr, strides, at, C, OP, BLOCK_I)
    dh = load_rows(dh_ptr + base, offs, left, mask, C, 0.0, BLOCK_I)
    h = _load_saved(saved_ptr + (batch * S + tile * BLOCK_O) * C, offs_t, offs_c, left, mask, C, BLOCK_I)
    if not INTERPRETED:
        prefetch_words(word_ptr, B, C, batch, position, block * BLOCK_C, BLOCK_C)
        earlier = (tile - ahead) * STEPS
        if (ahead > 0) & (earlier >= 0):
            prefetch_input(x_ptr, strides.x, batch, earlier, T, C, block * BLOCK_C, STEPS, BLOCK_C)
            prefetch_input(r_ptr, strides.r, batch, earlier, T, C, block * BLOCK_C, STEPS, BLOCK_C)
            prefetch_input(dh_ptr, None, batch, earlier, T, C, block * BLOCK_C, STEPS, BLOCK_C)
            if OP == "rglru":
                prefetch_input(i_ptr, strides.i, batch, earlier, T, C, block * BLOCK_C, STEPS, BLOCK_C)
    issue_loads()
    rate = decay_rate(c_ptr, offs_c, mask_c, OP, PRECISE)[None, :]
    dh = add_last_gradients(dh, rows, offs_c, mask, C, BLOCK_I)
    all_a, all_open, after_a, after_w, before_a, before_w = _backward_tile(r, dh, rate, rows, OP, PRECISE, BLOCK_I)
    last = load_state(dlast_ptr, batch * C, offs_c, mask_c)
    state = pass_state(
        word_ptr, call, B, C, batch, position, tiles, last, after_a, after_w, offs_c, mask_c, PASS
    )  # fmt: skip
    if dfirst_ptr is not None:
        if tile == 0:
            after = tl.fma(after_a, state, after_w)
            store_last_row(dfirst_ptr + batch * C, after, offs_c, mask_c)
    w = tl.fma(before_a, state, before_w)
    total = _store_gradients(
        dx_ptr, dr_ptr, di_ptr, base, x, i, dh, all_a, all_open, h, w, rows, offs_c, offs, left, mask, C, rate,
        OP, PRECISE, BLOCK_I,
    )  # fmt: skip
    if OP == "rglru":
        _store_dc(dc_ptr + (tile.to(tl.int64) * B + batch) * C, c_ptr, total, offs_c, mask_c, PRECISE)


@remember_launches
@triton.jit(do_not_specialize=["B", "T", "C8", "S", "L", "N"])
def walk_gradient_kernel(
    x_ptr, r_ptr, i_ptr, c_ptr, saved_ptr, dh_ptr, dlast_ptr, dx_ptr, dr_ptr, di_ptr, dc_ptr, dfirst_ptr, strides,
    documents, B, T, C8, S, L, N, OP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Take one chunk of L steps backwards in time, tile by tile, from the w after it.

    Grid: (N chunks * B * ceil(C / BLOCK_C),), the last chunk first.
    Reads x, r, i, dh [B, T, C], c [C], the saved states [B, S, C] and the w after each chunk [N, B, C], the last
    chunk's first; writes dx, dr, di [B, T, C], dc's parts [N, B, C] and the first state's gradient [B, C].
    """
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    BLOCK_I: tl.constexpr = TILE.block_i
    BLOCK_O: tl.constexpr = TILE.block_o
    BLOCK_C: tl.constexpr = TILE.block_c
    STEPS: tl.constexpr = TILE.steps
    C = C8 * 8
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    position = pid // (B * blocks)
    chunk = N - 1 - position
    batch = (pid // blocks % B).to(tl.int64)
    offs_c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_t = (BLOCK_O - 1 - tl.arange(0, BLOCK_O)) * BLOCK_I
    rate = decay_rate(c_ptr, offs_c, mask_c, OP, PRECISE)[None, :]
    stop = tl.minimum(chunk * L + L, T)
    tiles = tl.cdiv(stop - chunk * L, STEPS)
    state = load_state(dlast_ptr, (position.to(tl.int64) * B + batch) * C, offs_c, mask_c)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for step in range(tiles):
        start = chunk * L + (tiles - 1 - step) * STEPS
        base = (batch * T + start) * C
        offs, left, mask = tile_offsets(offs_t, offs_c, mask_c, C, stop - start)
        at = batch, start, base, offs, offs_t, offs_c, left, mask
        rows = None
        if documents is not None:
            rows = load_marks(documents, T, start + offs_t, left, BLOCK_I)
        x, r, i = load_inputs(x_ptr, r_ptr, i_ptr, strides, at, C, OP, BLOCK_I)
        dh = load_rows(dh_ptr + base, offs, left, mask, C, 0.0, BLOCK_I)
        saved = saved_ptr + (batch * S + start // BLOCK_I) * C
        h = _load_saved(saved, offs_t, offs_c, left, mask, C, BLOCK_I)
        issue_loads()
        dh = add_last_gradients(dh, rows, offs_c, mask, C, BLOCK_I)
        all_a, all_open, after_a, after_w, before_a, before_w = _backward_tile(r, dh, rate, rows, OP, PRECISE, BLOCK_I)
        w = tl.fma(before_a, state, before_w)
        total += _store_gradients(
            dx_ptr, dr_ptr, di_ptr, base, x, i, dh, all_a, all_open, h, w, rows, offs_c, offs, left, mask, C, rate,
            OP, PRECISE, BLOCK_I,
        )  # fmt: skip
        state = take_last_row(tl.fma(after_a, state, after_w))
    if dfirst_ptr is not None:
        if chunk == 0:
            tl.store(dfirst_ptr + batch * C + offs_c[None, :], state, mask=mask_c[None, :])
    if OP == "rglru":
        _store_dc(dc_ptr + (chunk.to(tl.int64) * B + batch) * C, c_ptr, total, offs_c, mask_c, PRECISE)
