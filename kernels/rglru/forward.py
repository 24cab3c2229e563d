"""The forward pass of a diagonal recurrence h_t = a_t h_{t-1} + b_t: a look-back scan, and a walk.

Channels alone do not fill a GPU, so time is split over programs too. A program of ``look_back_kernel`` computes the
elements of its tile and from them the map h -> a h + b of the whole tile, waits for the state before the tile,
publishes the state after it, and then computes its outputs from the elements in registers: everything is read and
written once. A program of ``walk_kernel`` knows its first state and takes one tile after the other, either of the whole
sequence ("naive") or of a chunk whose first state reduce.py has computed ("chunked").

Source: Martin and Cundy, "Parallelizing linear recurrent neural nets over sequence length" (2018), for the composition
of steps; Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back" (2016), for the single pass.
"""

import triton
import triton.language as tl

from ..common.marks import documents_at, is_marked, load_marks
from ..common.remember import remember_launches
from ..common.time_tiles import INTERPRETED, tile_offsets
from .elements import (
    decay_rate,
    forget,
    issue_loads,
    load_inputs,
    load_of_documents,
    load_state,
    load_token,
    make_element,
    pass_state,
    prefetch_input,
    prefetch_words,
    program_position,
    scan_rows,
    store_last_row,
    take_last_row,
)


@triton.jit
def forward_tile(
    x, r, i, rate, rows, offs_c, mask_c, C, OP: tl.constexpr, PRECISE: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip
    """Return the elements a, b of a tile's steps, and the maps of :func:`scan_rows`: from the state before the tile to
    the states after and before each row. Where a document begins (rows: None, or see load_marks) a is 0 and b holds
    what its initial state adds."""
    row_a = tl.full(x[0].shape, 1.0, tl.float32)
    row_b = tl.full(x[0].shape, 0.0, tl.float32)
    all_a, all_b = (), ()
    for n in tl.static_range(BLOCK_I):
        a, b = make_element(x[n], r[n], i[n], rate, OP, PRECISE)
        if rows is not None:
            if rows[4].first is not None:
                first = load_of_documents(rows[4].first, rows, n, is_marked(rows[0], n), offs_c, mask_c, C)
                b = tl.fma(a, first, b)
        a = forget(a, rows, n)
        all_a = all_a + (a,)
        all_b = all_b + (b,)
        row_b = tl.fma(a, row_b, b)
        row_a *= a
    after_a, after_b, before_a, before_b = scan_rows(row_a, row_b)
    return all_a, all_b, after_a, after_b, before_a, before_b


@triton.jit
def _store_states(
    h_ptr, saved_ptr, all_a, all_b, h, rows, offs_t, offs_c, offs, left, mask_c, C,
    SAVE: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Compute h from the states before a tile's rows; store h, every SAVE steps the state before the step, and the last
    states of documents."""
    for n in tl.static_range(BLOCK_I):
        mask = (left > n) & mask_c
        if SAVE > 0:
            if n % SAVE == 0:
                slots = (offs_t + n) // SAVE
                kept = mask & ((offs_t + n) % SAVE == 0)[:, None]
                tl.store(saved_ptr + slots[:, None] * C + offs_c[None, :], h, mask=kept)
        h = tl.fma(all_a[n], h, all_b[n])
        tl.store(h_ptr + n * C + offs, h.to(h_ptr.dtype.element_ty), mask=mask)
        if rows is not None:
            if rows[4].last is not None:
                ends = is_marked(rows[1], n)
                tl.store(rows[4].last + (documents_at(rows, n, ends, C) + offs_c[None, :]), h, mask=ends & mask_c)


@remember_launches
@triton.jit(do_not_specialize=["call", "B", "T", "C8", "S", "ahead"])
def look_back_kernel(
    x_ptr, r_ptr, i_ptr, c_ptr, first_ptr, h_ptr, last_ptr, saved_ptr, strides, documents, word_ptr, call, B, T, C8, S,
    ahead, OP: tl.constexpr, SAVE: tl.constexpr, PASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of BLOCK_I * BLOCK_O steps and BLOCK_C channels in a single pass over memory.

    Grid: (tiles of T * B * ceil(C / BLOCK_C),). GPUs start programs in the order of their numbers (CUB's prefix scans
    rely on it too), so a program only waits for programs that have started.
    Reads x, r, i [B, T, C], c [C] and the first state [B, C]; writes h [B, T, C], the last state [B, C] and, for the
    backward pass, the states before every SAVE steps [B, S, C]; passes states on through words [tiles, B, C], see
    pass_state. Prefetches inputs ``ahead`` tiles later. C8 is C / 8, which tells the compiler that rows are aligned.
    With packed documents (marks.py) their states take the places of the first and the last state.
    """
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    BLOCK_I: tl.constexpr = TILE.block_i
    BLOCK_C: tl.constexpr = TILE.block_c
    STEPS: tl.constexpr = TILE.steps
    C = C8 * 8
    blocks = tl.cdiv(C, BLOCK_C)
    tile, batch, block = program_position(B, blocks)
    offs_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_t = tl.arange(0, TILE.block_o) * BLOCK_I
    base = (batch * T + tile * STEPS) * C
    end = T - tile * STEPS
    offs, left, mask = tile_offsets(offs_t, offs_c, mask_c, C, end)
    at = batch, tile * STEPS, base, offs, offs_t, offs_c, left, mask
    rows = None
    if documents is not None:
        rows = load_marks(documents, T, tile * STEPS + offs_t, left, BLOCK_I)
    x, r, i = load_inputs(x_ptr, r_ptr, i_ptr, strides, at, C, OP, BLOCK_I)
    if not INTERPRETED:
        prefetch_words(word_ptr, B, C, batch, tile, block * BLOCK_C, BLOCK_C)
        later = (tile + ahead) * STEPS
        if (ahead > 0) & (later < T):
            prefetch_input(x_ptr, strides.x, batch, later, T, C, block * BLOCK_C, STEPS, BLOCK_C)
            prefetch_input(r_ptr, strides.r, batch, later, T, C, block * BLOCK_C, STEPS, BLOCK_C)
            if OP == "rglru":
                prefetch_input(i_ptr, strides.i, batch, later, T, C, block * BLOCK_C, STEPS, BLOCK_C)
    issue_loads()
    rate = decay_rate(c_ptr, offs_c, mask_c, OP, PRECISE)[None, :]
    all_a, all_b, after_a, after_b, before_a, before_b = forward_tile(
        x, r, i, rate, rows, offs_c, mask, C, OP, PRECISE, BLOCK_I
    )
    first = load_state(first_ptr, batch * C, offs_c, mask_c)
    state = pass_state(
        word_ptr, call, B, C, batch, tile, tl.cdiv(T, STEPS), first, after_a, after_b, offs_c, mask_c, PASS
    )  # fmt: skip
    if last_ptr is not None:
        if end <= STEPS:
            after = tl.fma(after_a, state, after_b)
            store_last_row(last_ptr + batch * C, after, offs_c, mask_c)
    h = tl.fma(before_a, state, before_b)
    if SAVE > 0:
        saved_ptr += (batch * S + tile * STEPS // SAVE) * C
    _store_states(h_ptr + base, saved_ptr, all_a, all_b, h, rows, offs_t, offs_c, offs, left, mask, C, SAVE, BLOCK_I)


@remember_launches
@triton.jit(do_not_specialize=["B", "T", "C8", "S", "L", "N"])
def walk_kernel(
    x_ptr, r_ptr, i_ptr, c_ptr, first_ptr, h_ptr, last_ptr, saved_ptr, strides, documents, B, T, C8, S, L, N,
    OP: tl.constexpr, SAVE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Take one chunk of L steps, tile by tile, from the state before it.

    Grid: (N chunks * B * ceil(C / BLOCK_C),).
    Reads x, r, i [B, T, C], c [C] and the states before the chunks [N, B, C]; writes h [B, T, C], the state after the
    last chunk [B, C] and the states before every SAVE steps [B, S, C].
    """
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    BLOCK_I: tl.constexpr = TILE.block_i
    BLOCK_C: tl.constexpr = TILE.block_c
    STEPS: tl.constexpr = TILE.steps
    C = C8 * 8
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    chunk = pid // (B * blocks)
    batch = (pid // blocks % B).to(tl.int64)
    offs_c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_t = tl.arange(0, TILE.block_o) * BLOCK_I
    rate = decay_rate(c_ptr, offs_c, mask_c, OP, PRECISE)[None, :]
    stop = tl.minimum(chunk * L + L, T)
    state = load_state(first_ptr, (chunk.to(tl.int64) * B + batch) * C, offs_c, mask_c)
    for start in range(chunk * L, stop, STEPS):
        base = (batch * T + start) * C
        offs, left, mask = tile_offsets(offs_t, offs_c, mask_c, C, stop - start)
        at = batch, start, base, offs, offs_t, offs_c, left, mask
        rows = None
        if documents is not None:
            rows = load_marks(documents, T, start + offs_t, left, BLOCK_I)
        x, r, i = load_inputs(x_ptr, r_ptr, i_ptr, strides, at, C, OP, BLOCK_I)
        issue_loads()
        all_a, all_b, after_a, after_b, before_a, before_b = forward_tile(
            x, r, i, rate, rows, offs_c, mask, C, OP, PRECISE, BLOCK_I
        )
        h = tl.fma(before_a, state, before_b)
        saved = saved_ptr
        if SAVE > 0:
            saved += (batch * S + start // SAVE) * C
        _store_states(h_ptr + base, saved, all_a, all_b, h, rows, offs_t, offs_c, offs, left, mask, C, SAVE, BLOCK_I)
        state = take_last_row(tl.fma(after_a, state, after_b))
    if last_ptr is not None:
        if chunk == N - 1:
            tl.store(last_ptr + batch * C + offs_c[None, :], state, mask=mask_c[None, :])


@remember_launches
@triton.jit(do_not_specialize=["C"])
def step_kernel(
    x_ptr, r_ptr, i_ptr, c_ptr, first_ptr, h_ptr, last_ptr, strides, C, OP: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Advance BLOCK_C channels of one sequence by one token.

    Grid: (B, ceil(C / BLOCK_C)). Reads x, r, i [B, 1, C], c [C] and the state [B, C]; writes h [B, 1, C] and the new
    state [B, C].
    """
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    batch = tl.program_id(0).to(tl.int64)
    row = batch * C
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    x = load_token(x_ptr, strides.x, batch, C, offs_c, mask_c)
    r = load_token(r_ptr, strides.r, batch, C, offs_c, mask_c)
    i = x
    if OP == "rglru":
        i = load_token(i_ptr, strides.i, batch, C, offs_c, mask_c)
    a, b = make_element(x, r, i, decay_rate(c_ptr, offs_c, mask_c, OP, PRECISE), OP, PRECISE)
    state = tl.reshape(load_state(first_ptr, row, offs_c, mask_c), (BLOCK_C,))
    h = tl.fma(a, state, b)
    tl.store(h_ptr + row + offs_c, h.to(h_ptr.dtype.element_ty), mask=mask_c)
    tl.store(last_ptr + row + offs_c, h, mask=mask_c)
