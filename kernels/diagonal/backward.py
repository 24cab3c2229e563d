"""The backward pass of a diagonal recurrence, everything between inputs and states recomputed.

With g_t the gradient of h_t and w_t = a_t g_t what it passes to h_{t-1},

    w_t = a_t (dh_t + w_{t+1})        g_t = dh_t + w_{t+1}

is again a diagonal recurrence, backwards in time, whose last w is the gradient of the initial state. Row o of a tile
holds the stretch BLOCK_O - 1 - o of time, so that states still run down the rows. The forward pass left the float32
state before every BLOCK_I steps, so each row makes its h_{t-1} from there. The gradient of c leaves as a partial sum a
program, added up in a fixed order.
"""

import triton
import triton.language as tl

from .elements import (
    LN2,
    _await_state,
    _decay,
    _gradient_element,
    _last_row,
    _load_inputs,
    _load_rows,
    _load_state,
    _publish_state,
    _rate,
    _scan_rows,
    _sigmoid_times,
    _softplus,
    _store_last_row,
    _tile,
)


@triton.jit
def _backward_tile(
    x_ptr,
    r_ptr,
    i_ptr,
    saved_ptr,
    dh_ptr,
    offs_t,
    offs_c,
    offs,
    left,
    mask_c,
    C,
    rate,
    OP: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Return a tile's inputs, decays and states before its rows, and the maps of w to behind and to before each row."""
    x, r, i = _load_inputs(x_ptr, r_ptr, i_ptr, offs, left, mask_c, C, OP, BLOCK_I)
    dh = _load_rows(dh_ptr, offs, left, mask_c, C, 0.0, BLOCK_I)
    slots = (offs_t // BLOCK_I)[:, None] * C + offs_c[None, :]
    h = tl.load(saved_ptr + slots, mask=(left > 0) & mask_c, other=0.0)
    all_a = ()
    for n in tl.static_range(BLOCK_I):
        a, _ = _decay(r[n], rate, OP, PRECISE)
        all_a = all_a + (a,)
    row_a = all_a[BLOCK_I - 1]
    g = dh[BLOCK_I - 1].to(tl.float32)
    for n in tl.static_range(BLOCK_I - 2, -1, -1):
        g = tl.fma(all_a[n + 1], g, dh[n].to(tl.float32))
        row_a *= all_a[n]
    after_a, after_w, before_a, before_w = _scan_rows(row_a, all_a[0] * g, BLOCK_O, BLOCK_C)
    return x, r, i, dh, all_a, h, after_a, after_w, before_a, before_w


@triton.jit
def _run_back(
    dx_ptr,
    dr_ptr,
    di_ptr,
    x,
    r,
    i,
    dh,
    all_a,
    h,
    w,
    offs,
    left,
    mask_c,
    C,
    rate,
    OP: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Make g from the w before each row, backwards, then store the gradients, forwards: no factor of them has to wait
    in a register. Return the sum of D [BLOCK_C]."""
    dtype = dx_ptr.dtype.element_ty
    total = tl.full((BLOCK_O, BLOCK_C), 0.0, tl.float32)
    g = dh[BLOCK_I - 1].to(tl.float32) + w
    all_g = (g,)
    for n in tl.static_range(BLOCK_I - 2, -1, -1):
        g = tl.fma(all_a[n + 1], g, dh[n].to(tl.float32))
        all_g = all_g + (g,)
    for n in tl.static_range(BLOCK_I):
        g = all_g[BLOCK_I - 1 - n]
        mask = (left > n) & mask_c
        a, b, to_x, to_i, to_log, to_r = _gradient_element(x[n], r[n], i[n], rate, h, OP, PRECISE)
        h = tl.fma(a, h, b)
        d = g * to_log
        tl.store(dx_ptr + n * C + offs, (g * to_x).to(dtype), mask=mask)
        tl.store(dr_ptr + n * C + offs, (d * to_r).to(dtype), mask=mask)
        if OP == "rglru":
            tl.store(di_ptr + n * C + offs, (g * to_i).to(dtype), mask=mask)
            total += d
    return tl.sum(total, axis=0)


@triton.jit
def _store_dc(dc_ptr, c_ptr, total, offs_c, mask_c, PRECISE: tl.constexpr):
    """Store ln 2 sigma(c) / softplus(c) times the sum of D; the quotient tends to 1 for c -> -inf."""
    c = tl.load(c_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    softplus = _softplus(c, PRECISE)
    factor = tl.where(softplus > 1e-30, _sigmoid_times(c, 1.0, PRECISE) / tl.maximum(softplus, 1e-30), 1.0)
    tl.store(dc_ptr + offs_c, total * (factor * LN2), mask=mask_c)


@triton.jit(do_not_specialize=["B", "T", "C8", "S"])
def look_back_gradient_kernel(
    x_ptr,
    r_ptr,
    i_ptr,
    c_ptr,
    saved_ptr,
    dh_ptr,
    dlast_ptr,
    dx_ptr,
    dr_ptr,
    di_ptr,
    dc_ptr,
    dfirst_ptr,
    word_ptr,
    ticket_ptr,
    B,
    T,
    C8,
    S,
    OP: tl.constexpr,
    HAS_DLAST: tl.constexpr,
    WANT_DFIRST: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the gradients of one tile in a single pass over memory, tiles in order from the end of time.

    Grid: (tiles of T * B * ceil(C / BLOCK_C),), in the order of tickets. Reads x, r, i, dh [B, T, C], c [C], the saved
    states [B, S, C] and the last state's gradient [B, C]; writes dx, dr, di [B, T, C], dc's parts [tiles, B, C] and the
    first state's gradient [B, C]; passes w on in the words [tiles, B, C], zero beforehand, as is the ticket.
    """
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    TILE: tl.constexpr = BLOCK_I * BLOCK_O
    C = C8 * 8
    blocks = tl.cdiv(C, BLOCK_C)
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed").to(tl.int32)
    behind = ticket // (B * blocks)
    tile = tl.cdiv(T, TILE) - 1 - behind
    batch = (ticket // blocks % B).to(tl.int64)
    offs_c = ticket % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_t = (BLOCK_O - 1 - tl.arange(0, BLOCK_O)) * BLOCK_I
    base = (batch * T + tile * TILE) * C
    offs, left, mask = _tile(offs_t, offs_c, mask_c, C, T - tile * TILE)
    rate = _rate(c_ptr, offs_c, mask_c, OP, PRECISE)[None, :]
    saved_ptr += (batch * S + tile * BLOCK_O) * C
    x, r, i, dh, all_a, h, after_a, after_w, before_a, before_w = _backward_tile(
        x_ptr + base, r_ptr + base, i_ptr + base, saved_ptr, dh_ptr + base, offs_t, offs_c, offs, left, mask, C, rate,
        OP, PRECISE, BLOCK_I, BLOCK_O, BLOCK_C,
    )  # fmt: skip
    word_ptr += (behind.to(tl.int64) * B + batch) * C
    if behind == 0:
        state = _load_state(dlast_ptr + batch * C, offs_c, mask_c, HAS_DLAST)
    else:
        state = _await_state(word_ptr - B.to(tl.int64) * C, offs_c, mask_c)
    after = tl.fma(after_a, state, after_w)
    _publish_state(word_ptr, after, offs_c, mask_c, BLOCK_O, BLOCK_C)
    if WANT_DFIRST:
        if tile == 0:
            _store_last_row(dfirst_ptr + batch * C, after, offs_c, mask_c, BLOCK_O, BLOCK_C)
    w = tl.fma(before_a, state, before_w)
    total = _run_back(
        dx_ptr + base, dr_ptr + base, di_ptr + base, x, r, i, dh, all_a, h, w, offs, left, mask, C, rate,
        OP, PRECISE, BLOCK_I, BLOCK_O, BLOCK_C,
    )  # fmt: skip
    if OP == "rglru":
        _store_dc(dc_ptr + (tile.to(tl.int64) * B + batch) * C, c_ptr, total, offs_c, mask_c, PRECISE)


@triton.jit(do_not_specialize=["B", "T", "C8", "S", "L", "N"])
def walk_gradient_kernel(
    x_ptr,
    r_ptr,
    i_ptr,
    c_ptr,
    saved_ptr,
    dh_ptr,
    dlast_ptr,
    dx_ptr,
    dr_ptr,
    di_ptr,
    dc_ptr,
    dfirst_ptr,
    B,
    T,
    C8,
    S,
    L,
    N,
    OP: tl.constexpr,
    HAS_DLAST: tl.constexpr,
    WANT_DFIRST: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Walk one chunk of L steps backwards, tile by tile, from the w behind it.

    Grid: (N chunks * B * ceil(C / BLOCK_C),), from the last chunk on. Reads x, r, i, dh [B, T, C], c [C], the saved
    states [B, S, C] and the w behind the chunks [N, B, C], the last chunk's first; writes dx, dr, di [B, T, C], dc's
    parts [N, B, C] and the first state's gradient [B, C].
    """
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    TILE: tl.constexpr = BLOCK_I * BLOCK_O
    C = C8 * 8
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    behind = pid // (B * blocks)
    chunk = N - 1 - behind
    batch = (pid // blocks % B).to(tl.int64)
    offs_c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_t = (BLOCK_O - 1 - tl.arange(0, BLOCK_O)) * BLOCK_I
    rate = _rate(c_ptr, offs_c, mask_c, OP, PRECISE)[None, :]
    stop = tl.minimum(chunk * L + L, T)
    tiles = tl.cdiv(stop - chunk * L, TILE)
    state = _load_state(dlast_ptr + (behind.to(tl.int64) * B + batch) * C, offs_c, mask_c, HAS_DLAST)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for step in range(tiles):
        start = chunk * L + (tiles - 1 - step) * TILE
        base = (batch * T + start) * C
        offs, left, mask = _tile(offs_t, offs_c, mask_c, C, stop - start)
        saved = saved_ptr + (batch * S + start // BLOCK_I) * C
        x, r, i, dh, all_a, h, after_a, after_w, before_a, before_w = _backward_tile(
            x_ptr + base, r_ptr + base, i_ptr + base, saved, dh_ptr + base, offs_t, offs_c, offs, left, mask, C, rate,
            OP, PRECISE, BLOCK_I, BLOCK_O, BLOCK_C,
        )  # fmt: skip
        w = tl.fma(before_a, state, before_w)
        total += _run_back(
            dx_ptr + base, dr_ptr + base, di_ptr + base, x, r, i, dh, all_a, h, w, offs, left, mask, C, rate,
            OP, PRECISE, BLOCK_I, BLOCK_O, BLOCK_C,
        )  # fmt: skip
        state = _last_row(tl.fma(after_a, state, after_w), BLOCK_O)
    if WANT_DFIRST:
        if chunk == 0:
            tl.store(dfirst_ptr + batch * C + offs_c[None, :], state, mask=mask_c[None, :])
    if OP == "rglru":
        _store_dc(dc_ptr + (chunk.to(tl.int64) * B + batch) * C, c_ptr, total, offs_c, mask_c, PRECISE)
