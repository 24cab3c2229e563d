"""The forward pass of WKV: tiles of time that look back for the sum of all before them, or one walk through time.

    y_t = (num_{t-1} + e^(u + k_t) v_t) / (den_{t-1} + e^(u + k_t))
    num_t = e^-w num_{t-1} + e^k_t v_t        den_t = e^-w den_{t-1} + e^k_t

Channels alone do not fill a GPU, so time is split too, and everything is read and written once. A program sums its
tile, publishes the sum, adds up what the tiles before it published, and only then makes its outputs. Since w is
constant, a sum's weight follows from its distance, so tiles are added directly.

Source: Peng et al., RWKV (2023), equations 16 and 22 to 26; Merrill and Garland, "Single-pass parallel prefix scan with
decoupled look-back" (2016), for the order of programs.
"""

import triton
import triton.language as tl

from ..diagonal.elements import _load_rows, _tile, _widen
from .elements import (
    EMPTY,
    MAX_BONUS,
    MAX_LEAD,
    MAX_RATIO,
    SLOW_RATE,
    _add,
    _advance,
    _all_at_least,
    _decay,
    _exp,
    _load_state,
    _look_back,
    _reciprocal,
    _scan_rows,
    _sum_run,
    _weights_below,
    _weights_under,
)


@triton.jit
def _store_state(state_ptr, size, m, num, den, offs, mask):
    """Store a state in num, den, max [3, size]."""
    tl.store(state_ptr + offs, num, mask=mask)
    tl.store(state_ptr + size + offs, den, mask=mask)
    tl.store(state_ptr + 2 * size + offs, m, mask=mask)


@triton.jit
def _save_state(saved_ptr, size, m, num, den, step, offs_c, mask, C: tl.constexpr, SAVE: tl.constexpr):
    """Store the states before the steps [BLOCK_O] that are multiples of SAVE."""
    offs = (step // SAVE).to(tl.int64)[:, None] * C + offs_c[None, :]
    _store_state(saved_ptr, size, m, num, den, offs, mask & (step % SAVE == 0)[:, None])


@triton.jit
def _output(m, num, den, k, v, u, PRECISE: tl.constexpr):
    """Return y of one step from the state before it.

    With the past's weight relative to the token's, e = e^(m - u - k), it is (e num + v) / (e den + 1): v itself where
    there is no past.
    """
    past = _exp(tl.minimum(m - (k + u), MAX_RATIO))
    return tl.fma(past, num, v) * _reciprocal(tl.fma(past, den, 1.0), PRECISE)


@triton.jit
def _load_run(ptr, offs, mask, C: tl.constexpr, SUB: tl.constexpr):
    """Load SUB steps of every row, under a mask that is the same for all: anything where it is not set."""
    steps = ()
    for n in tl.static_range(SUB):
        steps = steps + (tl.load(ptr + n * C + offs, mask=mask),)
    return steps


@triton.jit
def _run(
    y_ptr, saved_ptr, size, weights, v, num, den, top, decay, bonus, step, offs_c, offs, mask,
    C: tl.constexpr, SAVE: tl.constexpr, PRECISE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Run through SUB steps of every row from the states before them, all on the exponents ``top``.

    Stores y and the states to be saved but the first; returns the states behind the steps and the least denominator.
    """
    least = tl.full(den.shape, 1.0, tl.float32)
    for n in tl.static_range(SUB):
        if SAVE > 0:
            if n > 0 and n % SAVE == 0:
                _save_state(saved_ptr, size, top, num, den, step + n, offs_c, mask, C, SAVE)
        value = weights[n] * _widen(v[n])
        now = tl.fma(bonus, weights[n], den)
        y = tl.fma(bonus, value, num) * _reciprocal(now, PRECISE)
        tl.store(y_ptr + n * C + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
        least = tl.minimum(least, now)
        num = tl.fma(decay, num, value)
        den = tl.fma(decay, den, weights[n])
    return num, den, least


@triton.jit
def _resum_rows(k_ptr, v_ptr, w, offs, left, mask_c, C: tl.constexpr, BLOCK_I: tl.constexpr):
    """Return what each row adds to a state behind it, with an exponent of its own at every step."""
    m = tl.full(offs.shape, EMPTY, tl.float32)
    num = tl.zeros(offs.shape, dtype=tl.float32)
    den = num
    for n in range(BLOCK_I):
        mask = (left > n) & mask_c
        k = tl.load(k_ptr + n * C + offs, mask=mask, other=-float("inf")).to(tl.float32)
        v = tl.load(v_ptr + n * C + offs, mask=mask, other=0.0).to(tl.float32)
        m, num, den = _advance(m, num, den, k, v, w)
    return m, num, den


@triton.jit
def _rerun_rows(
    y_ptr, saved_ptr, size, k_ptr, v_ptr, m, num, den, w, u, step, offs_c, offs, left, mask_c,
    C: tl.constexpr, SAVE: tl.constexpr, PRECISE: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Run through the rows with an exponent of its own at every step; return the states after the last ones."""
    for n in range(BLOCK_I):
        inside = left > n
        mask = inside & mask_c
        if SAVE > 0:
            if n % SAVE == 0:
                _save_state(saved_ptr, size, m, num, den, step + n, offs_c, mask, C, SAVE)
        k = tl.load(k_ptr + n * C + offs, mask=mask, other=-float("inf")).to(tl.float32)
        v = tl.load(v_ptr + n * C + offs, mask=mask, other=0.0).to(tl.float32)
        y = _output(m, num, den, k, v, u, PRECISE)
        tl.store(y_ptr + n * C + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
        m, num, den = _advance(m, num, den, k, v, tl.where(inside, w, 0.0))
    return m, num, den


@triton.jit(do_not_specialize=["B", "T", "S"])
def scan_kernel(
    k_ptr,
    v_ptr,
    w_ptr,
    u_ptr,
    num_ptr,
    den_ptr,
    max_ptr,
    y_ptr,
    last_ptr,
    saved_ptr,
    word_ptr,
    ticket_ptr,
    B,
    T,
    S,
    C: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    WANT_LAST: tl.constexpr,
    SAVE: tl.constexpr,
    RELOAD: tl.constexpr,
    LOOK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute one tile of BLOCK_I * BLOCK_O steps and BLOCK_C channels in a single pass over memory.

    Grid: (tiles of T * B * ceil(C / BLOCK_C),), tiles in the order of tickets, so that whoever waits waits for a
    program that runs. Reads k, v [B, T, C], w, u [C] and the first state, num, den, max [B, C]; writes y [B, T, C], the
    last state [3, B, C] and the states before every SAVE steps [3, B, S, C]. Sums pass through the words
    [2, tiles + groups, B, C], zero beforehand, as is the ticket; LOOK = 0 says that all of time is one tile. RELOAD
    reads k and v again for the outputs, from the cache, instead of holding them in registers.
    """
    PRECISE: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    TILE: tl.constexpr = BLOCK_I * BLOCK_O
    LONGEST: tl.constexpr = 16 if PRECISE else 32
    SUB: tl.constexpr = LONGEST if BLOCK_I > LONGEST else BLOCK_I
    PARTS: tl.constexpr = BLOCK_I // SUB
    blocks = tl.cdiv(C, BLOCK_C)
    if LOOK > 0:
        ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed").to(tl.int32)
    else:
        ticket = tl.program_id(0)
    tile = ticket // (B * blocks)
    batch = (ticket // blocks % B).to(tl.int64)
    offs_c = ticket % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_o = tl.arange(0, BLOCK_O)
    base = (batch * T + tile * TILE) * C
    end = T - tile * TILE
    step = tile * TILE + offs_o * BLOCK_I
    offs, left, mask = _tile(offs_o * BLOCK_I, offs_c, mask_c, C, end)
    whole = mask & (end >= TILE)
    all_k, all_v = (), ()
    for part in tl.static_range(PARTS):
        all_k = all_k + (_load_run(k_ptr + base + part * SUB * C, offs, whole, C, SUB),)
        all_v = all_v + (_load_run(v_ptr + base + part * SUB * C, offs, whole, C, SUB),)
    w = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    if PARTS == 1:
        # Else the assembler moves loads down to their first use, one wait behind the other.
        tl.debug_barrier()
    decay = _decay(w)
    tops, all_weights = (), ()
    for part in tl.static_range(PARTS):
        top, weights = _weights_below(all_k[part], SUB)
        part_num, part_den = _sum_run(weights, all_v[part], decay, SUB)
        if part == 0:
            row_m, row_num, row_den, least = top, part_num, part_den, part_den
        else:
            row_m, row_num, row_den = _add(row_m - SUB * w, row_num, row_den, top, part_num, part_den)
            least = tl.minimum(least, part_den)
        tops = tops + (top,)
        all_weights = all_weights + (weights,)
    # Under one exponent a run's sum may be too small to be right; so it is not in a tile that time ends in.
    if _all_at_least(tl.where(whole, least, tl.where(mask, 0.0, 1.0))) == 0:
        row_m, row_num, row_den = _resum_rows(k_ptr + base, v_ptr + base, w, offs, left, mask, C, BLOCK_I)
    all_m, all_num, all_den, in_m, in_num, in_den = _scan_rows(row_m, row_num, row_den, BLOCK_I * w)
    stride = B.to(tl.int64) * C
    m, num, den = _load_state(num_ptr, den_ptr, max_ptr, batch * C + offs_c, mask_c, HAS_FIRST)
    if LOOK > 0:
        before_m, before_num, before_den = _look_back(
            word_ptr + batch * C, tl.cdiv(T, TILE), tile, stride, TILE * w, all_m, all_num, all_den, offs_o, offs_c,
            mask_c, BLOCK_O, LOOK,
        )  # fmt: skip
        m, num, den = _add(m - (tile * TILE).to(tl.float32) * w, num, den, before_m, before_num, before_den)
    m, num, den = _add(m - (offs_o * BLOCK_I).to(tl.float32)[:, None] * w, num, den, in_m, in_num, in_den)
    states = S * stride
    saved_ptr += batch * S * C
    if SAVE > 0:
        _save_state(saved_ptr, states, m, num, den, step, offs_c, whole, C, SAVE)
    if RELOAD:
        all_k, all_v = (), ()
        for part in tl.static_range(PARTS):
            all_k = all_k + (_load_run(k_ptr + base + part * SUB * C, offs, whole, C, SUB),)
            all_v = all_v + (_load_run(v_ptr + base + part * SUB * C, offs, whole, C, SUB),)
        if PARTS == 1:
            tl.debug_barrier()
    bonus = _exp(u)
    least = tl.where(tl.abs(u) < MAX_BONUS, 1.0, 0.0) + tl.zeros(den.shape, dtype=tl.float32)
    run_m, run_num, run_den = m, num, den
    for part in tl.static_range(PARTS):
        top, weights = tops[part], all_weights[part]
        if RELOAD:
            weights = _weights_under(all_k[part], top, SUB)
        lead = run_m - top
        scale = _exp(lead)
        run_num, run_den, part_least = _run(
            y_ptr + base + part * SUB * C, saved_ptr, states, weights, all_v[part], scale * run_num, scale * run_den,
            top, decay, bonus, step + part * SUB, offs_c, offs, whole, C, SAVE, PRECISE, SUB,
        )  # fmt: skip
        run_m = top
        least = tl.minimum(least, tl.where(lead < MAX_LEAD, part_least, 0.0))
    last_row = (left > 0) & (left <= BLOCK_I) & mask
    if _all_at_least(tl.where(whole, least, tl.where(mask, 0.0, 1.0))) == 0:
        tl.debug_barrier()
        run_m, run_num, run_den = _rerun_rows(
            y_ptr + base, saved_ptr, states, k_ptr + base, v_ptr + base, m, num, den, w, u, step, offs_c, offs, left,
            mask, C, SAVE, PRECISE, BLOCK_I,
        )  # fmt: skip
    if WANT_LAST:
        at = tl.broadcast_to(batch * C + offs_c[None, :], (BLOCK_O, BLOCK_C))
        _store_state(last_ptr, stride, run_m, run_num, run_den, at, last_row)


@triton.jit(do_not_specialize=["B", "T", "S"])
def walk_kernel(
    k_ptr,
    v_ptr,
    w_ptr,
    u_ptr,
    num_ptr,
    den_ptr,
    max_ptr,
    y_ptr,
    last_ptr,
    saved_ptr,
    B,
    T,
    S,
    C: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    WANT_LAST: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Walk through all of time, BLOCK_I steps at once.

    Grid: (B * ceil(C / BLOCK_C),). Reads k, v [B, T, C], w, u [C] and the first state, num, den, max [B, C]; writes y
    [B, T, C], the last state [3, B, C] and the states before every SAVE steps [3, B, S, C].
    """
    PRECISE: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    blocks = tl.cdiv(C, BLOCK_C)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    offs_c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    w = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    m, num, den = _load_state(num_ptr, den_ptr, max_ptr, batch * C + offs_c, mask_c, HAS_FIRST)
    offs_o = tl.arange(0, 1)
    stride = B.to(tl.int64) * C
    states = S * stride
    saved_ptr += batch * S * C
    # A slow rate is not subtracted from the exponent at every step, which would round it the same way every time: the
    # state before step n of a row lies on m - n slow.
    slow = tl.where(w < SLOW_RATE, w, 0.0)
    whole = T // BLOCK_I * BLOCK_I
    for start in range(0, whole, BLOCK_I):
        base = (batch * T + start) * C
        offs, left, mask = _tile(offs_o, offs_c, mask_c, C, T - start)
        k = _load_rows(k_ptr + base, offs, left, mask, C, 0.0, BLOCK_I)
        v = _load_rows(v_ptr + base, offs, left, mask, C, 0.0, BLOCK_I)
        for n in tl.static_range(BLOCK_I):
            if SAVE > 0:
                if n % SAVE == 0:
                    _save_state(saved_ptr, states, m - n * slow, num, den, start + n + offs_o, offs_c, mask, C, SAVE)
            token_k, token_v = k[n].to(tl.float32), v[n].to(tl.float32)
            y = _output(m, num, den, tl.fma(slow, n * 1.0, token_k), token_v, u, PRECISE)
            tl.store(y_ptr + base + n * C + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
            m, num, den = _advance(m, num, den, tl.fma(slow, n + 1.0, token_k), token_v, w - slow)
        m -= BLOCK_I * slow
    for t in range(whole, T):
        offs = (batch * T + t) * C + offs_c[None, :]
        if SAVE > 0:
            if t % SAVE == 0:
                _save_state(saved_ptr, states, m, num, den, t + offs_o, offs_c, mask_c[None, :], C, SAVE)
        token_k = tl.load(k_ptr + offs, mask=mask_c[None, :], other=0.0).to(tl.float32)
        token_v = tl.load(v_ptr + offs, mask=mask_c[None, :], other=0.0).to(tl.float32)
        y = _output(m, num, den, token_k, token_v, u, PRECISE)
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask_c[None, :])
        m, num, den = _advance(m, num, den, token_k, token_v, w)
    if WANT_LAST:
        _store_state(last_ptr, stride, m, num, den, batch * C + offs_c[None, :], mask_c[None, :])
