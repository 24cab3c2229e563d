"""The backward pass of WKV: gradients of k, v, w, u and the first state, recomputing states from saved ones.

With D_t the denominator of y_t, P_t = dy_t / D_t and R_t = -P_t y_t are the gradients of y_t's numerator and
denominator. A_t and B_t, the gradients of num_t and den_t, and dk, dv, du follow from

    A_{t-1} = e^-w A_t + P_t        B_{t-1} = e^-w B_t + R_t
    dv_t = e^(u + k_t) P_t + e^k_t A_t
    dk_t = e^(u + k_t) (P_t v_t + R_t) + e^k_t (A_t v_t + B_t)
    du = sum e^(u + k_t) (P_t v_t + R_t)

A and B are kept relative to the exponents of the states that they belong to. They are then multiplied by the same
weights as the states in the forward pass and need no exponent of their own, which would be rounded. Only between tiles
are they sums (o, A, B) as in elements.py, with o the negative exponent of the state. dw needs X and Z, the derivatives
of num and den by w. They are computed forward in time through a row, and multiplied by the gradients P and R of its
outputs and, at its end, by A and B. Rows are counted from the end of a tile: row o holds the steps from
(BLOCK_O - 1 - o) BLOCK_I on, so that gradients run from the first row to the last. The forward pass has saved the state
before each row. As in forward.py a program takes one tile (look-back scan) or all of time (walk).
"""

import triton
import triton.language as tl

from ..common.marks import documents_at, is_marked, load_marks
from ..common.remember import remember_launches
from ..common.time_tiles import load_rows, tile_offsets
from .elements import (
    EMPTY,
    LEAST_GRADIENT,
    SUBROW,
    add,
    decay_factor,
    exp,
    load_first,
    program_position,
    reciprocal,
    relative_weights,
    split_rate,
    state_before,
    step_offset,
)
from .exchange import look_back


@triton.jit
def _load_saved(saved_ptr, size, offs_t, offs_c, mask, C: tl.constexpr, SAVE: tl.constexpr):
    """Load the states before steps offs_t [BLOCK_O], multiples of SAVE."""
    offs = (offs_t // SAVE).to(tl.int64)[:, None] * C + offs_c[None, :]
    num = tl.load(saved_ptr + offs, mask=mask, other=0.0)
    den = tl.load(saved_ptr + size + offs, mask=mask, other=1.0)
    m = tl.load(saved_ptr + 2 * size + offs, mask=mask, other=0.0)
    return m, num, den


@triton.jit
def _next_exponent(
    saved_ptr, size, last_ptr, last_row, last_size, offs_t, offs_c, m, left, mask_c,
    C: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Return the exponents to which the gradients that enter rows are relative; rows end before steps ``offs_t``.

    They are those of the next row's state and, at the sequence's end, of the last state (m if that has no gradient).
    """
    offs = (offs_t // SAVE).to(tl.int64)[:, None] * C + offs_c[None, :]
    before_end = (left > SAVE) & mask_c
    exponent = tl.load(saved_ptr + 2 * size + offs, mask=before_end, other=0.0)
    exponent = tl.where(before_end, exponent, m)
    if last_ptr is not None:
        last = tl.load(last_ptr + last_row + 2 * last_size + offs_c, mask=offs_c < C, other=0.0)[None, :]
        exponent = tl.where((left > 0) & (left <= SAVE), last, exponent)
    return exponent


@triton.jit
def _within_document(exponent, m, rows, BLOCK_I: tl.constexpr):
    """Return m instead of the next row's exponent where a row's last step ends a document, so that none is of an empty
    state; nothing comes from there. rows: None, or see load_marks."""
    if rows is not None:
        exponent = tl.where(is_marked(rows[1], BLOCK_I - 1), m, exponent)
    return exponent


@triton.jit
def _load_run(
    k_ptr, v_ptr, dy_ptr, k_offs, v_offs, offs, left, mask_c,
    C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Load k, v and dy of SUB steps."""
    k = load_rows(k_ptr, k_offs, left, mask_c, K_ROW, -float("inf"), SUB)
    v = load_rows(v_ptr, v_offs, left, mask_c, V_ROW, 0.0, SUB)
    dy = load_rows(dy_ptr, offs, left, mask_c, C, 0.0, SUB)
    return k, v, dy


@triton.jit
def _forward_step(k, v, dy, m, num, den, slow, fast, u, n, inside, PRECISE: tl.constexpr):
    """Compute step n of a row, forward in time, from the state before it, whose exponent is m - n slow.

    k, v and dy have the inputs' dtype. Returns the past's weight in the output, the token's weight times P, P, R, the
    gradient of u + k, the weights of past and token in the state, and the state after the step (m, num, den), which
    stays the same unless the step is ``inside`` the sequence.
    """
    k, v, dy = k.to(tl.float32), v.to(tl.float32), dy.to(tl.float32)
    # The bound by EMPTY makes the output v if the token is left out (k = -inf) and there is no past either.
    past, now = relative_weights(m, tl.maximum(tl.fma(slow, n, k) + u, EMPTY))
    inverse = reciprocal(tl.fma(past, den, now), PRECISE)
    p = dy * inverse
    y = tl.fma(past, num, now * v) * inverse
    # Exactly 0 if the output is v, which p v - p y need not be.
    d_token = now * p * (v - y)
    m -= tl.where(inside, fast, 0.0)
    key = tl.fma(slow, n + 1.0, k)
    old, new = relative_weights(m, key)
    num, den = tl.fma(old, num, new * v), tl.fma(old, den, new)
    return past, now * p, p, -p * y, d_token, old, new, tl.maximum(m, key), num, den


@triton.jit
def _last_gradients(m, rows, n, offs_c, mask_c, C: tl.constexpr):
    """Return the gradients of the last states of the documents that end with step n of the rows (see load_marks),
    relative to exponent m; else 0."""
    ends = is_marked(rows[1], n)
    offs = documents_at(rows, n, ends, C) + offs_c[None, :]
    mask = ends & mask_c
    top, dnum, dden = rows[4].last
    scale = exp(tl.where(mask, m - tl.load(top + offs, mask=mask, other=0.0), 0.0))
    a = tl.load(dnum + offs, mask=mask, other=0.0) * scale
    return a, tl.load(dden + offs, mask=mask, other=0.0) * scale


@triton.jit
def _run_forward(
    k, v, dy, m, num, den, x, z, dw, du, c, a, b, slow, fast, u, start, left, rows, offs_c, mask_c,
    C: tl.constexpr, PRECISE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Compute SUB steps from step ``start`` of a row, forward in time; steps beyond the sequence change nothing.

    Takes and returns the state, X and Z (x, z), the sums dw and du, the factor c by which the state before the row has
    decayed, and the sums a and b of what the steps add to that state's gradients. Where a document begins (rows: None,
    or see load_marks) nothing is left of the state before.
    """
    for n in tl.static_range(SUB):
        inside = left > n
        m, num, den = state_before(m, num, den, slow * (start + n), rows, start + n, offs_c, mask_c, C)
        if rows is not None:
            begins = is_marked(rows[0], start + n)
            x = tl.where(begins, 0.0, x)
            z = tl.where(begins, 0.0, z)
            c = tl.where(begins, 0.0, c)
        before_num, before_den = num, den
        past, _, p, r, d_token, old, _new, m, num, den = _forward_step(
            k[n], v[n], dy[n], m, num, den, slow, fast, u, start + n * 1.0, inside, PRECISE
        )
        du += d_token
        dw = tl.fma(past, tl.fma(x, p, z * r), dw)
        x = old * (x - tl.where(inside, before_num, 0.0))
        z = old * (z - tl.where(inside, before_den, 0.0))
        a = tl.fma(c * past, p, a)
        b = tl.fma(c * past, r, b)
        c *= old
        if rows is not None:
            if rows[4].last is not None:
                last_a, last_b = _last_gradients(m - slow * (start + n + 1), rows, start + n, offs_c, mask_c, C)
                dw += tl.fma(last_a, x, last_b * z)
                a = tl.fma(c, last_a, a)
                b = tl.fma(c, last_b, b)
    return m, num, den, x, z, dw, du, c, a, b


@triton.jit
def _add_up(total, lost, term):
    """Add ``term`` to a sum by Kahan summation; return the sum and its rounding error so far."""
    term -= lost
    after = total + term
    return after, (after - total) - term


@triton.jit
def _change_of_exponent(m, end_m, slow, left, BLOCK_I: tl.constexpr):
    """Return the factor from gradients after rows at exponent end_m to those at m, not yet lowered by slow rates."""
    steps = tl.minimum(tl.maximum(left, 0), BLOCK_I).to(tl.float32)
    return exp(m - end_m) * decay_factor(steps * slow)


@triton.jit
def _run_backward(
    dk_ptr, dv_ptr, k, v, dy, m, num, den, a, b, slow, fast, u, offs, start, left, rows, offs_c, mask_c,
    C: tl.constexpr, PRECISE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Compute SUB steps from step ``start`` of a row from the state before them, forward in time, then backward from
    the gradients a, b of the state after them. Store dk and dv; return the gradients of the state before them."""
    steps, tops = (), ()
    for n in tl.static_range(SUB):
        m, num, den = state_before(m, num, den, slow * (start + n), rows, start + n, offs_c, mask_c, C)
        past, d_v, p, r, d_token, old, new, m, num, den = _forward_step(
            k[n], v[n], dy[n], m, num, den, slow, fast, u, start + n * 1.0, left > n, PRECISE
        )
        steps = steps + ((past * p, past * r, d_v, d_token, old, new),)
        tops = tops + (m,)
    for n in tl.static_range(SUB - 1, -1, -1):
        d_num, d_den, d_v, d_token, old, new = steps[n]
        token_v, mask = v[n].to(tl.float32), (left > n) & mask_c
        if rows is not None:
            if rows[4].last is not None:
                last_m = tops[n] - slow * (start + n + 1)
                last_a, last_b = _last_gradients(last_m, rows, start + n, offs_c, mask_c, C)
                a += last_a
                b += last_b
        dv = tl.fma(new, a, d_v)
        dk = tl.fma(new, tl.fma(a, token_v, b), d_token)
        tl.store(dv_ptr + n * C + offs, dv.to(dv_ptr.dtype.element_ty), mask=mask)
        tl.store(dk_ptr + n * C + offs, dk.to(dk_ptr.dtype.element_ty), mask=mask)
        a = tl.fma(old, a, d_num)
        b = tl.fma(old, b, d_den)
        if rows is not None:
            begins = is_marked(rows[0], start + n)
            if rows[4].dfirst is not None:
                at = documents_at(rows, n + start, begins, C) + offs_c[None, :]
                first_m, _num, _den = load_first(rows[4].first, at, begins & mask_c)
                top = tl.load(rows[4].first[2] + at, mask=begins & mask_c, other=0.0)
                scale = exp(tl.where(begins, top - first_m, 0.0))
                tl.store(rows[4].dfirst[0] + at, a * scale, mask=begins & mask_c)
                tl.store(rows[4].dfirst[1] + at, b * scale, mask=begins & mask_c)
            a = tl.where(begins, 0.0, a)
            b = tl.where(begins, 0.0, b)
    return a, b


@triton.jit
def _compose_rows(c1, a1, b1, gap1, p1, q1, c2, a2, b2, gap2, p2, q2):
    """Join two runs of rows, the second earlier in time. A run maps the gradient g of num to c g + a, that of den to
    c g + b; without its last row it gives gap g + p and gap g + q."""
    return c1 * c2, tl.fma(c2, a1, a2), tl.fma(c2, b1, b2), c1 * gap2, tl.fma(gap2, a1, p2), tl.fma(gap2, b1, q2)


@triton.jit
def _replace(values, index, value, N: tl.constexpr):
    """Return a tuple of N values with the one at ``index`` replaced."""
    out = ()
    for n in tl.static_range(N):
        out = out + (tl.where(index == n, value, values[n]),)
    return out


@triton.jit
def _select(values, index, N: tl.constexpr):
    """Return the value at ``index`` of a tuple of N."""
    out = values[0]
    for n in tl.static_range(1, N):
        out = tl.where(index == n, values[n], out)
    return out


@triton.jit
def _load_last(dlast, size, offs, mask):
    """Return the gradients (o, A, B) [1, BLOCK_C] of the last state: those given, or an empty sum."""
    o = tl.full(offs.shape, EMPTY, tl.float32)
    a = tl.zeros(offs.shape, dtype=tl.float32)
    b = tl.zeros(offs.shape, dtype=tl.float32)
    if dlast[0] is not None:
        o = -tl.load(dlast[0] + 2 * size + offs, mask=mask, other=0.0)
        a = tl.load(dlast[1] + offs, mask=mask, other=0.0)
        b = tl.load(dlast[2] + offs, mask=mask, other=0.0)
    return o[None, :], a[None, :], b[None, :]


@triton.jit
def _store_first(dfirst_ptr, size, max_ptr, m, a, b, offs, mask):
    """Store the gradients of the first state's num and den, converted from exponent m to the first state's max."""
    scale = exp(tl.load(max_ptr + offs, mask=mask, other=0.0) - m)
    tl.store(dfirst_ptr + offs, a * scale, mask=mask)
    tl.store(dfirst_ptr + size + offs, b * scale, mask=mask)


@remember_launches
@triton.jit(do_not_specialize=["B", "T", "S"])
def look_back_gradient_kernel(
    k_ptr, v_ptr, w_ptr, u_ptr, max_ptr, saved_ptr, dy_ptr, dlast, dk_ptr, dv_ptr, sum_ptrs, dfirst_ptr, strides,
    documents, word_ptr, spare_ptr, B, T, S, C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    LOOK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile in a single pass over memory; the first programs take the end of the sequence.

    Grid: (tiles of T * B * ceil(C / BLOCK_C),), in the order of look_back_kernel.
    Reads k, v, dy [B, T, C], w, u [C], the saved states [3, B, S, C], the last state's exponent and gradients and the
    first state's exponent [B, C]; writes dk, dv [B, T, C], the parts of dw and du [tiles, B, C] and the first state's
    gradients [2, B, C]; sums pass through words as in look_back_kernel.
    """
    PRECISE: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    BLOCK_I: tl.constexpr = TILE.block_i
    BLOCK_O: tl.constexpr = TILE.block_o
    BLOCK_C: tl.constexpr = TILE.block_c
    STEPS: tl.constexpr = TILE.steps
    SUB: tl.constexpr = SUBROW if BLOCK_I > SUBROW else BLOCK_I
    position, batch, block = program_position(B, C, BLOCK_C)
    tiles = tl.cdiv(T, STEPS)
    tile = tiles - 1 - position
    offs_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_o = tl.arange(0, BLOCK_O)
    offs_t = (BLOCK_O - 1 - offs_o) * BLOCK_I
    base = (batch * T + tile * STEPS) * C
    offs, left, mask = tile_offsets(offs_t, offs_c, mask_c, C, T - tile * STEPS)
    k_base = step_offset(strides[0], base, batch, tile * STEPS, K_ROW)
    v_base = step_offset(strides[1], base, batch, tile * STEPS, V_ROW)
    k_offs = offs_t[:, None] * K_ROW + offs_c[None, :]
    v_offs = offs_t[:, None] * V_ROW + offs_c[None, :]
    w = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    stride = B.to(tl.int64) * C
    saved_ptr += batch * S * C
    saved_size = S * stride
    used = (left > 0) & mask
    rows, earliest = None, None
    if documents is not None:
        rows = load_marks(documents, T, tile * STEPS + offs_t, left, BLOCK_I)
    m, num, den = _load_saved(saved_ptr, saved_size, tile * STEPS + offs_t, offs_c, used, C, BLOCK_I)
    first_m = m
    slow, fast = split_rate(first_m, w, BLOCK_I)
    one = tl.full((BLOCK_O, BLOCK_C), 1.0, tl.float32)
    zero = tl.zeros((BLOCK_O, BLOCK_C), dtype=tl.float32)
    x, z, dw, du, c, a, b = zero, zero, zero, zero, one, zero, zero
    RUNS: tl.constexpr = BLOCK_I // SUB
    all_m, all_num, all_den = (), (), ()
    for _ in tl.static_range(RUNS):
        all_m = all_m + (m,)
        all_num = all_num + (num,)
        all_den = all_den + (den,)
    for run in range(RUNS):
        all_m = _replace(all_m, run, m, RUNS)
        all_num = _replace(all_num, run, num, RUNS)
        all_den = _replace(all_den, run, den, RUNS)
        at, rest = base + run * SUB * C, left - run * SUB
        k, v, dy = _load_run(
            k_ptr + (k_base + run * SUB * K_ROW), v_ptr + (v_base + run * SUB * V_ROW), dy_ptr + at, k_offs, v_offs,
            offs, rest, mask, C, K_ROW, V_ROW, SUB,
        )  # fmt: skip
        m, num, den, x, z, dw, du, c, a, b = _run_forward(
            k, v, dy, m, num, den, x, z, dw, du, c, a, b, slow, fast, u, run * SUB, rest, rows, offs_c, mask,
            C, PRECISE, SUB,
        )  # fmt: skip
    # Gradients that enter a row are relative to the exponent of the state after it; ``change`` converts them to m.
    end_m = _next_exponent(
        saved_ptr, saved_size, dlast[0], batch * C, stride, tile * STEPS + offs_t + BLOCK_I, offs_c, m, left, mask,
        C, BLOCK_I,
    )  # fmt: skip
    end_m = _within_document(end_m, m, rows, BLOCK_I)
    change = _change_of_exponent(m, end_m, slow, left, BLOCK_I)
    c = tl.where(used, c * change, 1.0)
    a, b = tl.where(used, a, 0.0), tl.where(used, b, 0.0)
    _, all_a, all_b, in_c, in_a, in_b = tl.associative_scan((c, a, b, one, zero, zero), 0, _compose_rows)
    o, a, b = _load_last(dlast, stride, batch * C + offs_c, mask_c)
    if LOOK > 0:
        if documents is not None:
            # The document of the tile's last step; the sequence's last tile has none after it.
            mark = documents.marks + (3 * tl.full((), T, tl.int64) + tl.minimum((tile + 1) * STEPS, T) - 1)
            earliest = tiles - 1 - (tl.load(mark) - 1) // STEPS
        later_o, later_a, later_b = look_back(
            word_ptr + batch * C, spare_ptr + batch * C, tiles, position, stride, STEPS * w, -first_m, all_a, all_b,
            rows, earliest, offs_o, offs_c, mask_c, LOOK, LEAST_GRADIENT,
        )  # fmt: skip
        o -= tl.maximum(T - (tile + 1) * STEPS, 0).to(tl.float32) * w
        o, a, b = add(later_o, later_a, later_b, o, a, b)
    # The last tile only gets the last state's gradients, which are relative to that state's exponent already.
    end = tl.load(
        saved_ptr + 2 * saved_size + (tile + 1).to(tl.int64) * (STEPS // BLOCK_I) * C + offs_c,
        mask=mask_c & (tl.full((1,), position, tl.int32) > 0), other=0.0,
    )[None, :]  # fmt: skip
    scale = exp(tl.where(position > 0, o + end, 0.0))
    a, b = tl.fma(in_c, a * scale, in_a) * change, tl.fma(in_c, b * scale, in_b) * change
    dw = tl.where(used, dw + tl.fma(a, x, b * z), 0.0)
    # Run forward again and then backward, SUB steps at a time: the values of a whole row would not fit into registers.
    for step in range(RUNS):
        run = RUNS - 1 - step
        at, rest = base + run * SUB * C, left - run * SUB
        k, v, dy = _load_run(
            k_ptr + (k_base + run * SUB * K_ROW), v_ptr + (v_base + run * SUB * V_ROW), dy_ptr + at, k_offs, v_offs,
            offs, rest, mask, C, K_ROW, V_ROW, SUB,
        )  # fmt: skip
        m, num, den = _select(all_m, run, RUNS), _select(all_num, run, RUNS), _select(all_den, run, RUNS)
        a, b = _run_backward(
            dk_ptr + at, dv_ptr + at, k, v, dy, m, num, den, a, b, slow, fast, u, offs, run * SUB, rest, rows,
            offs_c, mask, C, PRECISE, SUB,
        )  # fmt: skip
    if dfirst_ptr is not None:
        if tile == 0:
            at = tl.broadcast_to(batch * C + offs_c[None, :], (BLOCK_O, BLOCK_C))
            last_row = (offs_o == BLOCK_O - 1)[:, None] & mask
            _store_first(dfirst_ptr, stride, max_ptr, first_m, a, b, at, last_row)
    dw_ptr, du_ptr = sum_ptrs
    at = (tile.to(tl.int64) * B + batch) * C + offs_c[None, :]
    tl.store(dw_ptr + at, tl.sum(dw, axis=0)[None, :], mask=mask_c[None, :])
    tl.store(du_ptr + at, tl.sum(tl.where(used, du, 0.0), axis=0)[None, :], mask=mask_c[None, :])


@remember_launches
@triton.jit(do_not_specialize=["B", "T", "S"])
def walk_gradient_kernel(
    k_ptr, v_ptr, w_ptr, u_ptr, max_ptr, saved_ptr, dy_ptr, dlast, dk_ptr, dv_ptr, sum_ptrs, dfirst_ptr, strides,
    documents, B, T, S, C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Go backwards through all of time in order, loading BLOCK_I steps at once.

    Grid: (B * ceil(C / BLOCK_C),).
    Reads and writes the same as look_back_gradient_kernel, without words; dw and du have one part per sequence.
    """
    PRECISE: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    BLOCK_I: tl.constexpr = TILE.block_i
    BLOCK_C: tl.constexpr = TILE.block_c
    blocks = tl.cdiv(C, BLOCK_C)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    offs_c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    w = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    count = tl.cdiv(T, BLOCK_I)
    stride = B.to(tl.int64) * C
    saved_ptr += batch * S * C
    saved_size = S * stride
    _, a, b = _load_last(dlast, stride, batch * C + offs_c, mask_c)
    one = tl.full((1, BLOCK_C), 1.0, tl.float32)
    zero = tl.zeros((1, BLOCK_C), dtype=tl.float32)
    dw, du, dw_lost, du_lost = zero, zero, zero, zero
    offs_o = tl.arange(0, 1)
    for step in range(count):
        start = (count - 1 - step) * BLOCK_I
        base = (batch * T + start) * C
        offs, left, mask = tile_offsets(offs_o, offs_c, mask_c, C, T - start)
        k_base = step_offset(strides[0], base, batch, start, K_ROW)
        v_base = step_offset(strides[1], base, batch, start, V_ROW)
        k, v, dy = _load_run(
            k_ptr + k_base, v_ptr + v_base, dy_ptr + base, offs, offs, offs, left, mask, C, K_ROW, V_ROW, BLOCK_I
        )
        rows = None
        if documents is not None:
            rows = load_marks(documents, T, start + offs_o, left, BLOCK_I)
        first_m, first_num, first_den = _load_saved(saved_ptr, saved_size, start + offs_o, offs_c, mask, C, BLOCK_I)
        slow, fast = split_rate(first_m, w, BLOCK_I)
        m, _num, _den, x, z, row_dw, row_du, _c, _a, _b = _run_forward(
            k, v, dy, first_m, first_num, first_den, zero, zero, zero, zero, one, zero, zero, slow, fast, u, 0, left,
            rows, offs_c, mask, C, PRECISE, BLOCK_I,
        )  # fmt: skip
        end_m = _next_exponent(
            saved_ptr, saved_size, dlast[0], batch * C, stride, start + BLOCK_I + offs_o, offs_c, m, left, mask,
            C, BLOCK_I,
        )  # fmt: skip
        end_m = _within_document(end_m, m, rows, BLOCK_I)
        change = _change_of_exponent(m, end_m, slow, left, BLOCK_I)
        a *= change
        b *= change
        dw, dw_lost = _add_up(dw, dw_lost, row_dw + tl.fma(a, x, b * z))
        du, du_lost = _add_up(du, du_lost, row_du)
        a, b = _run_backward(
            dk_ptr + base, dv_ptr + base, k, v, dy, first_m, first_num, first_den, a, b, slow, fast, u, offs, 0, left,
            rows, offs_c, mask, C, PRECISE, BLOCK_I,
        )  # fmt: skip
    at = batch * C + offs_c[None, :]
    if dfirst_ptr is not None:
        m = tl.load(saved_ptr + 2 * saved_size + offs_c, mask=mask_c, other=0.0)[None, :]
        _store_first(dfirst_ptr, stride, max_ptr, m, a, b, at, mask_c[None, :])
    dw_ptr, du_ptr = sum_ptrs
    tl.store(dw_ptr + at, dw, mask=mask_c[None, :])
    tl.store(du_ptr + at, du, mask=mask_c[None, :])
