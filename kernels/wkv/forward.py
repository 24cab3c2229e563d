"""The forward pass of WKV: two scans over tiles of time, and a walk through all of time.

    y_t = (num_{t-1} + e^(u + k_t) v_t) / (den_{t-1} + e^(u + k_t))
    num_t = e^-w num_{t-1} + e^k_t v_t        den_t = e^-w den_{t-1} + e^k_t

Channels alone do not fill a GPU, so the scan splits time over programs too, and reads and writes everything once. A
program sums its tile, publishes the sum, adds the sums that the tiles before it have published, and then computes its
outputs (look_back_kernel). Since w is constant, the weight of a tile's sum follows from its distance, so sums can be
added in any grouping. If there are enough channels, states are passed from tile to tile instead (serial_kernel).

A row consists of RUNS runs of SUB steps. One exponent a run is fast. A tile in which that would be inaccurate (see
LEAST), or which the sequence's end cuts short, is computed with a new exponent at every step.

Source: Peng et al., RWKV (2023), equations 16 and 22 to 26; Merrill and Garland, "Single-pass parallel prefix scan with
decoupled look-back" (2016), for the order of programs.
"""

import triton
import triton.language as tl

from ..common.marks import documents_at, is_marked, load_marks
from ..common.remember import remember_launches
from ..common.time_tiles import INTERPRETED, load_rows, tile_offsets, widen
from .elements import (
    EMPTY,
    LEAST_STATE,
    LOG2E,
    MAX_RATIO,
    SLOW_RATE,
    SUBROW,
    add,
    decay_factor,
    drop_where,
    exp,
    load_first,
    program_position,
    reciprocal,
    relative_weights,
    renew_whole,
    split_rate,
    state_before,
    step_offset,
)
from .exchange import any_begins, gather_rows, look_back, pass_state, scan_rows

MAX_BONUS = tl.constexpr(20.0)
MAX_LEAD = tl.constexpr(20.0)
LEAST = tl.constexpr(2.0**-60)
"""Bounds within which a run of steps can share one exponent: u at most MAX_BONUS, the exponent of the state before the
run at most MAX_LEAD above the run's, and denominators, relative to that exponent, at least LEAST. Terms below 2^-126
are lost, and e^u multiplies them by at most 2^29, so they are negligible next to such a denominator."""

MIN_BONUS = tl.constexpr(-10.0)
LEAST_PAIR = tl.constexpr(2.0**-44)
"""Bounds for testing denominators after every second step only: u at least MIN_BONUS and the denominator at least
LEAST_PAIR. At least half of such a denominator comes either from the last step, whose weight e^u lowers by 2^-15 at
most, or from the state before it, so the outputs of this step and the next have large enough denominators."""


@triton.jit
def _load_state(first, offs, mask):
    """Return the first state [1, BLOCK_C], see :func:`load_first`."""
    m, num, den = load_first(first, offs, mask)
    return m[None, :], num[None, :], den[None, :]


@triton.jit
def _prefetch(ptr, first_c, C: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Prefetch TILE steps, ROW elements apart, of BLOCK_C channels into the L2 cache, an address a sector; none may lie
    beyond the sequence. A later program uses them; memory stays busy while this one computes."""
    SECTOR: tl.constexpr = 32 * 8 // ptr.dtype.element_ty.primitive_bitwidth
    # PIECE steps at once take about one sector per thread; the addresses of further pieces differ by constants.
    PIECE: tl.constexpr = 32 if TILE > 32 else TILE
    SECTORS: tl.constexpr = BLOCK_C // SECTOR if BLOCK_C > SECTOR else 1
    channels = first_c + tl.arange(0, SECTORS) * SECTOR
    if C % BLOCK_C:
        channels = tl.minimum(channels, C - 1)
    offs = tl.arange(0, PIECE)[:, None] * ROW + channels[None, :]
    for start in tl.static_range(0, TILE, PIECE):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(ptr + start * ROW + offs).to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _widen_anew(x, SUB: tl.constexpr):
    """Return SUB half-precision arrays as float32, by other instructions than :func:`widen`: if they were the same, the
    compiler would keep the earlier results in registers instead of converting again."""
    values = ()
    for n in tl.static_range(SUB):
        if INTERPRETED or x[n].dtype == tl.float32:
            value = widen(x[n])
        elif x[n].dtype == tl.bfloat16:
            value = tl.inline_asm_elementwise(
                "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;", "=&r,=r,r", [x[n]],
                dtype=tl.int32, is_pure=True, pack=2,
            ).to(tl.float32, bitcast=True)  # fmt: skip
        else:
            value = tl.inline_asm_elementwise(
                "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }", "=&f,=f,r", [x[n]],
                dtype=tl.float32, is_pure=False, pack=2,
            )  # fmt: skip
        values = values + (value,)
    return values


@triton.jit
def _largest(k, late_zero, SUB: tl.constexpr):
    """Return the largest key of SUB steps; half-precision keys are compared two channels at once."""
    if INTERPRETED or k[0].dtype == tl.float32:
        top = tl.maximum(late_zero + EMPTY, widen(k[0]))
        for n in tl.static_range(1, SUB):
            top = tl.maximum(top, widen(k[n]))
    else:
        KIND: tl.constexpr = "bf16x2" if k[0].dtype == tl.bfloat16 else "f16x2"
        top = k[0]
        for n in tl.static_range(1, SUB):
            top = tl.inline_asm_elementwise(
                "max." + KIND + " $0, $1, $2;", "=r,r,r", [top, k[n]], dtype=k[0].dtype, is_pure=True, pack=2
            )
        top = tl.maximum(late_zero + EMPTY, widen(top))
    return top


@triton.jit
def _weights_under(k, top, late_zero, SUB: tl.constexpr):
    """Return e^(k - top) of SUB steps. Adding ``late_zero`` makes them wait for _zeros_after_loads."""
    shift = tl.fma(top, -LOG2E, late_zero)
    weights = ()
    for n in tl.static_range(SUB):
        weights = weights + (tl.exp2(tl.fma(widen(k[n]), LOG2E, shift)),)
    return weights


@triton.jit
def _weights_below(k, late_zero, SUB: tl.constexpr):
    """Return the largest key of SUB steps, and the weights e^(k - largest)."""
    top = _largest(k, late_zero, SUB)
    return top, _weights_under(k, top, 0.0, SUB)


@triton.jit
def _sum_run(weights, v, decay, rows, START: tl.constexpr, SUB: tl.constexpr):
    """Return the sum of a run of steps, num and den relative to the exponent of the weights; of packed documents that
    of the last one (rows: None, or see load_marks)."""
    num = weights[0] * widen(v[0])
    den = weights[0]
    for n in tl.static_range(1, SUB):
        keep = decay
        if rows is not None:
            keep = tl.where(is_marked(rows[0], START + n), 0.0, decay)
        num = tl.fma(keep, num, weights[n] * widen(v[n]))
        den = tl.fma(keep, den, weights[n])
    return num, den


@triton.jit
def _all_at_least(x, AT_LEAST: tl.constexpr = LEAST):
    """Return whether all denominators are at least AT_LEAST."""
    # Reduced as integers, because warps have a min instruction for those.
    x = tl.where(x >= AT_LEAST, 1, 0)
    return tl.min(tl.min(x, axis=1), axis=0) > 0


@triton.jit
def _advance(m, num, den, k, v, w):
    """Return the state (m, num, den) after one more token."""
    m -= w
    old, new = relative_weights(m, k)
    return tl.maximum(m, k), tl.fma(old, num, new * v), tl.fma(old, den, new)


@triton.jit
def _tighten(m, num, den):
    """Return the state with den scaled to order 1 and the exponent lowered to match, if decay has made den small."""
    loose = (den > 0) & (den < LEAST_STATE)
    shift = tl.log(tl.where(loose, den, 1.0))
    scale = exp(-shift)
    return m + shift, num * scale, den * scale


@triton.jit
def _store_state(state_ptr, size, m, num, den, offs, mask):
    """Store a state in num, den, max [3, size]."""
    tl.store(state_ptr + offs, num, mask=mask)
    tl.store(state_ptr + size + offs, den, mask=mask)
    tl.store(state_ptr + 2 * size + offs, m, mask=mask)


@triton.jit
def _store_last(m, num, den, rows, n, offs_c, mask_c, C: tl.constexpr):
    """Store the states after step n of the rows (None, or see load_marks) where documents end."""
    if rows is not None:
        if rows[4].last is not None:
            ends = is_marked(rows[1], n)
            offs = documents_at(rows, n, ends, C) + offs_c[None, :]
            tl.store(rows[4].last[0] + offs, num, mask=ends & mask_c)
            tl.store(rows[4].last[1] + offs, den, mask=ends & mask_c)
            tl.store(rows[4].last[2] + offs, m, mask=ends & mask_c)


@triton.jit
def _save_state(saved_ptr, size, m, num, den, step, offs_c, mask, C: tl.constexpr, SAVE: tl.constexpr):
    """Store the states before the steps [BLOCK_O] that are multiples of SAVE."""
    offs = (step // SAVE).to(tl.int64)[:, None] * C + offs_c[None, :]
    _store_state(saved_ptr, size, m, num, den, offs, mask & (step % SAVE == 0)[:, None])


@triton.jit
def _output(m, num, den, k, v, u, PRECISE: tl.constexpr):
    """Return y of one step from the state before it.

    With r = e^(m - u - k), the weight of the past relative to the token's, y = (r num + v) / (r den + 1).
    """
    past = exp(tl.minimum(m - (k + u), MAX_RATIO))
    return tl.fma(past, num, v) * reciprocal(tl.fma(past, den, 1.0), PRECISE)


@triton.jit
def _load_runs(
    ptr, offs, mask_c, C: tl.constexpr, ROW: tl.constexpr, BLOCK_C: tl.constexpr, RUNS: tl.constexpr, SUB: tl.constexpr
):  # fmt: skip
    """Load RUNS runs of SUB steps of every row, none beyond the end of the sequence."""
    runs = ()
    for run in tl.static_range(RUNS):
        steps = ()
        for n in tl.static_range(SUB):
            at = ptr + (run * SUB + n) * ROW + offs
            # Without a mask where none is needed: it takes an instruction more, to clear the register.
            steps = steps + (tl.load(at) if C % BLOCK_C == 0 else tl.load(at, mask=mask_c, other=0.0),)
        runs = runs + (steps,)
    return runs


@triton.jit
def _zero_runs(like, RUNS: tl.constexpr, SUB: tl.constexpr):
    """Return zeros shaped as RUNS runs of SUB steps."""
    runs = ()
    for _ in tl.static_range(RUNS):
        steps = ()
        for _ in tl.static_range(SUB):
            steps = steps + (like,)
        runs = runs + (steps,)
    return runs


@triton.jit
def _zeros_after_loads(w_ptr, offs_c, mask_c):
    """Return zeros to add to what must wait until all loads above this line have been issued.

    Else ptxas moves each load down to its first use, and they wait one after the other; it moves none past a barrier.
    """
    tl.debug_barrier()
    return tl.load(w_ptr + offs_c, mask=mask_c, other=0.0)[None, :] * 0.0


@triton.jit
def _sum_rows_by_run(k, v, w, late_zero, rows, RUNS: tl.constexpr, SUB: tl.constexpr):
    """Return for each row its sum (m, num, den), the smallest den of its runs, the exponents of the runs and the
    weights of all steps."""
    decay = decay_factor(w)
    m, weights = _weights_below(k[0], late_zero, SUB)
    num, den = _sum_run(weights, v[0], decay, rows, 0, SUB)
    least = den
    tops, all_weights = (m,), (weights,)
    for run in tl.static_range(1, RUNS):
        top, weights = _weights_below(k[run], 0.0, SUB)
        new_num, new_den = _sum_run(weights, v[run], decay, rows, run * SUB, SUB)
        lag = SUB * w
        if rows is not None:
            lag = drop_where(((rows[0] >> (run * SUB)) & ((1 << SUB) - 1)) != 0, lag)
        m, num, den = add(m - lag, num, den, top, new_num, new_den)
        least = tl.minimum(least, new_den)
        tops = tops + (top,)
        all_weights = all_weights + (weights,)
    return m, num, den, least, tops, all_weights


@triton.jit
def _compute_run(
    y_ptr, saved_ptr, size, weights, v, num, den, top, decay, bonus, rows, step, offs_c, offs, mask_c,
    C: tl.constexpr, SAVE: tl.constexpr, PRECISE: tl.constexpr, START: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Compute steps START to START + SUB of every row from the states before them, all relative to exponent ``top``.

    Stores y and the states to be saved except those before a row's first step. Returns the states after the steps and
    the smallest of the tested denominators, which are those after every second step (see LEAST_PAIR).
    """
    least = tl.full(den.shape, 1.0, tl.float32)
    for n in tl.static_range(SUB):
        if SAVE > 0:
            if START + n > 0 and (START + n) % SAVE == 0:
                _save_state(saved_ptr, size, top, num, den, step + START + n, offs_c, mask_c, C, SAVE)
        value = weights[n] * widen(v[n])
        if n % 2 == 1:
            least = tl.minimum(least, den)
        if rows is not None:
            # The first denominator of a document is its first weight alone.
            begins = is_marked(rows[0], START + n)
            num = tl.where(begins, 0.0, num)
            den = tl.where(begins, 0.0, den)
            least = tl.minimum(least, tl.where(begins, weights[n], 1.0))
        now = tl.fma(bonus, weights[n], den)
        y = tl.fma(bonus, value, num) * reciprocal(now, PRECISE)
        tl.store(y_ptr + (START + n) * C + offs, y.to(y_ptr.dtype.element_ty), mask=mask_c)
        num = tl.fma(decay, num, value)
        den = tl.fma(decay, den, weights[n])
        _store_last(top, num, den, rows, START + n, offs_c, mask_c, C)
    return num, den, least


@triton.jit
def _compute_rows_by_run(
    y_ptr, saved_ptr, size, weights, v, m, num, den, tops, w, u, rows, step, offs_c, offs, mask_c,
    C: tl.constexpr, SAVE: tl.constexpr, PRECISE: tl.constexpr, RUNS: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Compute whole rows from the states before them; store y and the states to be saved.

    Returns the states after the rows, and whether the results are accurate: u, denominators and exponents of states are
    within the bounds for one exponent per run (see LEAST and LEAST_PAIR).
    """
    decay = decay_factor(w)
    bonus = exp(u)
    least = tl.where((u > MIN_BONUS) & (u < MAX_BONUS), 1.0, 0.0) + tl.zeros(den.shape, dtype=tl.float32)
    if SAVE > 0:
        _save_state(saved_ptr, size, m, num, den, step, offs_c, mask_c, C, SAVE)
    for run in tl.static_range(RUNS):
        lead = m - tops[run]
        scale = exp(lead)
        num, den, run_least = _compute_run(
            y_ptr, saved_ptr, size, weights[run], v[run], scale * num, scale * den, tops[run], decay, bonus, rows, step,
            offs_c, offs, mask_c, C, SAVE, PRECISE, run * SUB, SUB,
        )  # fmt: skip
        m = tops[run]
        least = tl.minimum(least, tl.where(lead < MAX_LEAD, run_least, 0.0))
    return m, num, den, _all_at_least(tl.where(mask_c, least, 1.0), LEAST_PAIR)


@triton.jit
def _slow_rate(k_ptr, w, offs, left, mask_c, ROW: tl.constexpr, BLOCK_I: tl.constexpr):
    """Return a row's slow rates [BLOCK_O, BLOCK_C], 0 for fast ones. A rate is slow if a run lowers the exponent by at
    most a quarter of the largest key, so that its rounding error does not grow (compare split_rate)."""
    RUN: tl.constexpr = SUBROW if BLOCK_I > SUBROW else BLOCK_I
    largest = tl.zeros(offs.shape, dtype=tl.float32)
    for n in range(BLOCK_I):
        k = tl.load(k_ptr + n * ROW + offs, mask=(left > n) & mask_c, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.where(k > EMPTY, tl.abs(k), 0.0))
    return tl.where(w * RUN <= tl.maximum(RUN * SLOW_RATE, 0.25 * largest), w, 0.0)


@triton.jit
def _sum_rows_by_step(
    k_ptr, v_ptr, w, rows, offs_c, k_offs, v_offs, left, mask_c,
    C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Return for each row its sum, with a new exponent at every step; of packed documents (rows: None, or see
    load_marks) that of the last one with its initial state.

    Slow rates are not subtracted from m at every step, see SLOW_RATE: the exponent of the sum before step n of a run is
    m - n slow.
    """
    RUN: tl.constexpr = SUBROW if BLOCK_I > SUBROW else BLOCK_I
    slow = _slow_rate(k_ptr, w, k_offs, left, mask_c, K_ROW, BLOCK_I)
    m = tl.full(k_offs.shape, EMPTY, tl.float32)
    num = tl.zeros(k_offs.shape, dtype=tl.float32)
    den = num
    for start in range(0, BLOCK_I, RUN):
        for n in range(RUN):
            mask = (left > start + n) & mask_c
            k = tl.load(k_ptr + ((start + n) * K_ROW + k_offs), mask=mask, other=-float("inf")).to(tl.float32)
            v = tl.load(v_ptr + ((start + n) * V_ROW + v_offs), mask=mask, other=0.0).to(tl.float32)
            m, num, den = state_before(m, num, den, n * slow, rows, start + n, offs_c, mask_c, C)
            m, num, den = _advance(m, num, den, tl.fma(slow, n + 1.0, k), v, w - slow)
        m -= RUN * slow
    return m, num, den


@triton.jit
def _compute_rows_by_step(
    y_ptr, saved_ptr, size, k_ptr, v_ptr, m, num, den, w, u, rows, step, offs_c, offs, k_offs, v_offs, left, mask_c,
    C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, SAVE: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Compute the rows with a new exponent at every step (see _sum_rows_by_step); return the states after the rows."""
    RUN: tl.constexpr = SUBROW if BLOCK_I > SUBROW else BLOCK_I
    slow = _slow_rate(k_ptr, w, k_offs, left, mask_c, K_ROW, BLOCK_I)
    for start in range(0, BLOCK_I, RUN):
        rest = left - start
        for n in range(RUN):
            inside = rest > n
            mask = inside & mask_c
            at = (start + n) * C + offs
            if SAVE > 0:
                if (start + n) % SAVE == 0:
                    _save_state(saved_ptr, size, m - n * slow, num, den, step + start + n, offs_c, mask, C, SAVE)
            k = tl.load(k_ptr + ((start + n) * K_ROW + k_offs), mask=mask, other=-float("inf")).to(tl.float32)
            v = tl.load(v_ptr + ((start + n) * V_ROW + v_offs), mask=mask, other=0.0).to(tl.float32)
            m, num, den = state_before(m, num, den, n * slow, rows, start + n, offs_c, mask_c, C)
            y = _output(m, num, den, tl.fma(slow, n * 1.0, k), v, u, PRECISE)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
            m, num, den = _advance(m, num, den, tl.fma(slow, n + 1.0, k), v, tl.where(inside, w - slow, 0.0))
            _store_last(m - (n + 1) * slow, num, den, rows, start + n, offs_c, mask_c, C)
        m -= tl.minimum(tl.maximum(rest, 0), RUN).to(tl.float32) * slow
    return m, num, den


@triton.jit
def _tile_position(
    strides, B, T, C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return where a program's tile lies: the numbers of tile and sequence, the first channel, the channels and their
    mask, the rows, the offset of the tile in y, the steps from its start to the sequence's end, the first steps of the
    rows, what :func:`tile_offsets` returns for them, and the offsets of the tile and of the rows in k and in v."""
    BLOCK_C: tl.constexpr = TILE.block_c
    STEPS: tl.constexpr = TILE.steps
    tile, batch, block = program_position(B, C, BLOCK_C)
    offs_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs_o = tl.arange(0, TILE.block_o)
    base = (batch * T + tile * STEPS) * C
    end = T - tile * STEPS
    step = tile * STEPS + offs_o * TILE.block_i
    offs, left, mask = tile_offsets(offs_o * TILE.block_i, offs_c, mask_c, C, end)
    inputs = (
        step_offset(strides[0], base, batch, tile * STEPS, K_ROW),
        (offs_o * TILE.block_i)[:, None] * K_ROW + offs_c[None, :],
        step_offset(strides[1], base, batch, tile * STEPS, V_ROW),
        (offs_o * TILE.block_i)[:, None] * V_ROW + offs_c[None, :],
    )
    return tile, batch, block * BLOCK_C, offs_c, mask_c, offs_o, base, end, step, offs, left, mask, inputs


@triton.jit
def _by_run(accurate, rows):
    """Return ``accurate``, or false if documents begin in the rows (None, or see load_marks) from initial states, whose
    exponents may be far from those of the tokens."""
    if rows is not None:
        if rows[4].first[0] is not None:
            accurate = accurate & (any_begins(rows) == 0)
    return accurate


@triton.jit
def _tile_documents(documents, T, position, TILE: tl.constexpr):
    """Return load_marks for a tile, and the steps of the tile at which the documents of its rows' first steps begin."""
    tile, _, _, _, _, _, _, _, step, _, left, _, _ = position
    start = tl.load(documents.marks + (2 * tl.full((), T, tl.int64) + step), mask=step < T, other=0)
    return load_marks(documents, T, step, left, TILE.block_i), start - tile * TILE.steps


@triton.jit
def _rows_from_tile(m, w, starts, offs_o, BLOCK_I: tl.constexpr):
    """Return the exponents at the rows of the state before the tile, whose exponents are m; starts: None, or see
    _tile_documents."""
    lag = (offs_o * BLOCK_I).to(tl.float32)[:, None] * w
    if starts is not None:
        lag = drop_where((starts >= 0)[:, None], lag)
    return m - lag


@triton.jit
def _sum_tile(
    k_ptr, v_ptr, w_ptr, word_ptr, w, B, ahead, position, rows,
    C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the sum (m, num, den) of every row, the exponents of the runs and what to keep for the outputs (KEEP: see
    KEEPS in config.py; "tokens" needs B * T of at least a tile). Prefetch k and v of the tile ``ahead`` tiles later and
    the words that this tile will write (word_ptr None: none)."""
    BLOCK_I: tl.constexpr = TILE.block_i
    BLOCK_O: tl.constexpr = TILE.block_o
    BLOCK_C: tl.constexpr = TILE.block_c
    STEPS: tl.constexpr = TILE.steps
    LONGEST: tl.constexpr = 16 if k_ptr.dtype.element_ty == tl.float32 else 32
    SUB: tl.constexpr = LONGEST if BLOCK_I > LONGEST else BLOCK_I
    RUNS: tl.constexpr = BLOCK_I // SUB
    tile, batch, first_c, offs_c, mask_c, _offs_o, _base, end, _step, _offs, left, mask, inputs = position
    k_base, k_offs, v_base, v_offs = inputs
    whole = end >= STEPS
    accurate = whole
    row_m = tl.full((BLOCK_O, BLOCK_C), EMPTY, tl.float32)
    row_num = tl.zeros((BLOCK_O, BLOCK_C), dtype=tl.float32)
    row_den = row_num
    tops = _zero_runs(row_num, 1, RUNS)[0]
    if KEEP == "tokens":
        # Loaded outside of the branch: half-precision values that only one branch loads would be unpacked into twice
        # the registers. A tile that is not whole loads the first tile instead, and does not use it.
        k = _load_runs(k_ptr + tl.where(whole, k_base, 0), k_offs, mask, C, K_ROW, BLOCK_C, RUNS, SUB)
        v = _load_runs(v_ptr + tl.where(whole, v_base, 0), v_offs, mask, C, V_ROW, BLOCK_C, RUNS, SUB)
    elif KEEP == "weights":
        weights = _zero_runs(row_num, RUNS, SUB)
        v = _zero_runs(row_num.to(v_ptr.dtype.element_ty), RUNS, SUB)
    if whole:
        if KEEP != "tokens":
            k = _load_runs(k_ptr + k_base, k_offs, mask, C, K_ROW, BLOCK_C, RUNS, SUB)
            v = _load_runs(v_ptr + v_base, v_offs, mask, C, V_ROW, BLOCK_C, RUNS, SUB)
        if not INTERPRETED:
            later = (ahead * STEPS).to(tl.int64)
            if (ahead > 0) & (end >= (ahead + 1) * STEPS):
                _prefetch(k_ptr + k_base + later * K_ROW, first_c, C, K_ROW, STEPS, BLOCK_C)
                _prefetch(v_ptr + v_base + later * V_ROW, first_c, C, V_ROW, STEPS, BLOCK_C)
                if word_ptr is not None:
                    # Without this the next tile, which polls these words, would first wait for memory. If channels
                    # alone keep memory busy (ahead is 0), prefetching words costs more than it saves.
                    words = word_ptr + 2 * C * (tile.to(tl.int64) * B + batch)
                    _prefetch(words, 2 * first_c, 2 * C, 2 * C, 1, 2 * BLOCK_C)
        late_zero = _zeros_after_loads(w_ptr, offs_c, mask_c) if RUNS == 1 else 0.0
        if KEEP == "tokens":
            row_m, row_num, row_den, least, tops, _ = _sum_rows_by_run(k, v, w, late_zero, rows, RUNS, SUB)
        else:
            row_m, row_num, row_den, least, tops, weights = _sum_rows_by_run(k, v, w, late_zero, rows, RUNS, SUB)
        accurate = _by_run(_all_at_least(tl.where(mask, least, 1.0)), rows)
    if accurate == 0:
        row_m, row_num, row_den = _sum_rows_by_step(
            k_ptr + k_base, v_ptr + v_base, w, rows, offs_c, k_offs, v_offs, left, mask, C, K_ROW, V_ROW, BLOCK_I
        )
    kept = ()
    if KEEP == "tokens":
        kept = (k, v)
    elif KEEP == "weights":
        kept = (weights, v)
    return row_m, row_num, row_den, tops, kept


@triton.jit
def _compute_tile(
    y_ptr, last_ptr, saved_ptr, k_ptr, v_ptr, w_ptr, m, num, den, tops, kept, w, u, stride, S, position, rows,
    C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, SAVE: tl.constexpr, KEEP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Compute a tile from the states before its rows and what :func:`_sum_tile` returned.

    Stores y, the states to be saved and, if the sequence ends in this tile, the last state.
    """
    PRECISE: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    BLOCK_I: tl.constexpr = TILE.block_i
    BLOCK_C: tl.constexpr = TILE.block_c
    RUNS: tl.constexpr = len(tops)
    SUB: tl.constexpr = BLOCK_I // RUNS
    _tile, batch, _first_c, offs_c, mask_c, _offs_o, base, end, step, offs, left, mask, inputs = position
    k_base, k_offs, v_base, v_offs = inputs
    whole = end >= TILE.steps
    saved_size = S * stride
    if SAVE > 0:
        saved_ptr += batch * S * C
    accurate = whole
    last_m, last_num, last_den = m, num, den
    if whole:
        if KEEP == "nothing":
            k = _load_runs(k_ptr + k_base, k_offs, mask, C, K_ROW, BLOCK_C, RUNS, SUB)
            values = _load_runs(v_ptr + v_base, v_offs, mask, C, V_ROW, BLOCK_C, RUNS, SUB)
            late_zero = _zeros_after_loads(w_ptr, offs_c, mask_c) if RUNS == 1 else 0.0
            weights = ()
            for run in tl.static_range(RUNS):
                weights = weights + (_weights_under(k[run], tops[run], late_zero, SUB),)
        elif KEEP == "tokens":
            k, v = kept
            weights, values = (), ()
            for run in tl.static_range(RUNS):
                weights = weights + (_weights_under(_widen_anew(k[run], SUB), tops[run], 0.0, SUB),)
                values = values + (_widen_anew(v[run], SUB),)
        else:
            weights, values = kept
        last_m, last_num, last_den, accurate = _compute_rows_by_run(
            y_ptr + base, saved_ptr, saved_size, weights, values, m, num, den, tops, w, u, rows, step, offs_c, offs,
            mask, C, SAVE, PRECISE, RUNS, SUB,
        )  # fmt: skip
        accurate = _by_run(accurate, rows)
    if accurate == 0:
        tl.debug_barrier()
        # With a den of order 1, bounding the weight of the past by e^MAX_RATIO does not change the result.
        m, num, den = _tighten(m, num, den)
        last_m, last_num, last_den = _compute_rows_by_step(
            y_ptr + base, saved_ptr, saved_size, k_ptr + k_base, v_ptr + v_base, m, num, den, w, u, rows, step, offs_c,
            offs, k_offs, v_offs, left, mask, C, K_ROW, V_ROW, SAVE, PRECISE, BLOCK_I,
        )  # fmt: skip
    if last_ptr is not None:
        at = tl.broadcast_to(batch * C + offs_c[None, :], (TILE.block_o, BLOCK_C))
        last_row = (left > 0) & (left <= BLOCK_I) & mask
        _store_state(last_ptr, stride, last_m, last_num, last_den, at, last_row)


@remember_launches
@triton.jit(do_not_specialize=["call", "B", "T", "S", "ahead"])
def serial_kernel(
    k_ptr, v_ptr, w_ptr, u_ptr, first, y_ptr, last_ptr, saved_ptr, strides, documents, word_ptr, call, B, T,
    S, ahead, C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, SAVE: tl.constexpr, KEEP: tl.constexpr,
    GATHER: tl.constexpr, PASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of BLOCK_I * BLOCK_O steps and BLOCK_C channels, each tile from the state that the one before
    it passes on, in a single pass over memory.

    Grid: (tiles of T * B * ceil(C / BLOCK_C),). GPUs start programs in the order of their numbers, so a program only
    waits for programs that have started.
    Reads k, v [B, T, C], whose steps are K_ROW and V_ROW elements apart and whose batch has ``strides`` (None:
    contiguous), w, u [C] and the first state, num, den, max [B, C]; writes y [B, T, C], the last state [3, B, C] and
    the states before every SAVE steps [3, B, S, C]. States are passed through words [tiles, B, C] of two
    int64, by the code of exchange.py in GATHER and PASS. With packed documents (marks.py) their states take the places
    of the first and the last state.
    """
    BLOCK_I: tl.constexpr = TILE.block_i
    position = _tile_position(strides, B, T, C, K_ROW, V_ROW, TILE)
    rows, starts = None, None
    if documents is not None:
        rows, starts = _tile_documents(documents, T, position, TILE)
    tile, batch, first_c, offs_c, mask_c, offs_o, _, _, _, _, _, _, _ = position
    w = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    row_m, row_num, row_den, tops, kept = _sum_tile(
        k_ptr, v_ptr, w_ptr, word_ptr, w, B, ahead, position, rows, C, K_ROW, V_ROW, KEEP, TILE
    )
    all_m, all_num, all_den, in_m, in_num, in_den = gather_rows(
        row_m, row_num, row_den, BLOCK_I * w, rows, starts, offs_o, offs_c, first_c, BLOCK_I, GATHER
    )
    stride = B.to(tl.int64) * C
    m, num, den = _load_state(first, batch * C + offs_c, mask_c)
    lag = TILE.steps * w
    if rows is not None:
        lag = drop_where(any_begins(rows), lag)
    m, num, den = pass_state(
        word_ptr + 2 * batch * C, call, stride, tile, m, num, den, all_m, all_num, all_den,
        lag, offs_o, offs_c, first_c, mask_c, PASS, LEAST_STATE,
    )  # fmt: skip
    m, num, den = add(_rows_from_tile(m, w, starts, offs_o, BLOCK_I), num, den, in_m, in_num, in_den)
    _compute_tile(
        y_ptr, last_ptr, saved_ptr, k_ptr, v_ptr, w_ptr, m, num, den, tops, kept, w, u, stride, S, position, rows,
        C, K_ROW, V_ROW, SAVE, KEEP, TILE,
    )  # fmt: skip


@remember_launches
@triton.jit(do_not_specialize=["B", "T", "S", "ahead"])
def look_back_kernel(
    k_ptr, v_ptr, w_ptr, u_ptr, first, y_ptr, last_ptr, saved_ptr, strides, documents, word_ptr, spare_ptr, B,
    T, S, ahead, C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, SAVE: tl.constexpr, KEEP: tl.constexpr,
    LOOK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile from the sums of the tiles before it, in a single pass over memory.

    Grid: (tiles of T * B * ceil(C / BLOCK_C),), in the order of serial_kernel. Reads and writes the same tensors. Sums
    go through words [2, tiles + groups, B, C], which must be zero before the launch; the launch zeroes the spare words.
    LOOK = 0 means that the sequence is one tile.
    """
    BLOCK_I: tl.constexpr = TILE.block_i
    STEPS: tl.constexpr = TILE.steps
    position = _tile_position(strides, B, T, C, K_ROW, V_ROW, TILE)
    rows, starts, earliest = None, None, None
    if documents is not None:
        rows, starts = _tile_documents(documents, T, position, TILE)
    tile, batch, _first_c, offs_c, mask_c, offs_o, _, _, _, _, _, _, _ = position
    w = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    row_m, row_num, row_den, tops, kept = _sum_tile(
        k_ptr, v_ptr, w_ptr, None, w, B, ahead, position, rows, C, K_ROW, V_ROW, KEEP, TILE
    )
    all_m, all_num, all_den, in_m, in_num, in_den = scan_rows(row_m, row_num, row_den, BLOCK_I * w, rows)
    stride = B.to(tl.int64) * C
    m, num, den = _load_state(first, batch * C + offs_c, mask_c)
    if LOOK > 0:
        if documents is not None:
            mark = documents.marks + (2 * tl.full((), T, tl.int64) + tile * STEPS)
            earliest = tl.load(mark) // STEPS
        before_m, before_num, before_den = look_back(
            word_ptr + batch * C, spare_ptr + batch * C, tl.cdiv(T, STEPS), tile, stride, STEPS * w,
            all_m, all_num, all_den, rows, earliest, offs_o, offs_c, mask_c, LOOK, LEAST_STATE,
        )  # fmt: skip
        m, num, den = add(m - (tile * STEPS).to(tl.float32) * w, num, den, before_m, before_num, before_den)
    m, num, den = add(_rows_from_tile(m, w, starts, offs_o, BLOCK_I), num, den, in_m, in_num, in_den)
    _compute_tile(
        y_ptr, last_ptr, saved_ptr, k_ptr, v_ptr, w_ptr, m, num, den, tops, kept, w, u, stride, S, position, rows,
        C, K_ROW, V_ROW, SAVE, KEEP, TILE,
    )  # fmt: skip


@remember_launches
@triton.jit(do_not_specialize=["B", "T", "S"])
def walk_kernel(
    k_ptr, v_ptr, w_ptr, u_ptr, first, y_ptr, last_ptr, saved_ptr, strides, documents, B, T, S,
    C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, SAVE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Go through all of time in order, loading BLOCK_I steps at once.

    Grid: (B * ceil(C / BLOCK_C),).
    Reads k, v [B, T, C], w, u [C] and the first state, num, den, max [B, C]; writes y [B, T, C], the last state
    [3, B, C] and the states before every SAVE steps [3, B, S, C].
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
    m, num, den = _load_state(first, batch * C + offs_c, mask_c)
    offs_o = tl.arange(0, 1)
    stride = B.to(tl.int64) * C
    saved_size = S * stride
    if SAVE > 0:
        saved_ptr += batch * S * C
    full_rows_end = T // BLOCK_I * BLOCK_I
    for start in range(0, full_rows_end, BLOCK_I):
        base = (batch * T + start) * C
        offs, left, mask = tile_offsets(offs_o, offs_c, mask_c, C, T - start)
        k_base = step_offset(strides[0], base, batch, start, K_ROW)
        v_base = step_offset(strides[1], base, batch, start, V_ROW)
        rows = None
        if documents is not None:
            rows = load_marks(documents, T, start + offs_o, left, BLOCK_I)
        k = load_rows(k_ptr + k_base, offs, left, mask, K_ROW, 0.0, BLOCK_I)
        v = load_rows(v_ptr + v_base, offs, left, mask, V_ROW, 0.0, BLOCK_I)
        # The exponent of the state before step n of the row is m - n slow; after the row num and den decay instead.
        slow, fast = split_rate(m, w, BLOCK_I)
        for n in tl.static_range(BLOCK_I):
            if SAVE > 0:
                if n % SAVE == 0:
                    _save_state(
                        saved_ptr, saved_size, m - n * slow, num, den, start + n + offs_o, offs_c, mask, C, SAVE
                    )
            token_k, token_v = k[n].to(tl.float32), v[n].to(tl.float32)
            m, num, den = state_before(m, num, den, n * slow, rows, n, offs_c, mask, C)
            y = _output(m, num, den, tl.fma(slow, n * 1.0, token_k), token_v, u, PRECISE)
            tl.store(y_ptr + base + n * C + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
            m, num, den = _advance(m, num, den, tl.fma(slow, n + 1.0, token_k), token_v, fast)
            _store_last(m - (n + 1) * slow, num, den, rows, n, offs_c, mask, C)
        decay = decay_factor(BLOCK_I * slow)
        m, num, den = renew_whole(m, num * decay, den * decay, LEAST_STATE)
    for t in range(full_rows_end, T):
        offs = (batch * T + t) * C + offs_c[None, :]
        if SAVE > 0:
            if t % SAVE == 0:
                _save_state(saved_ptr, saved_size, m, num, den, t + offs_o, offs_c, mask_c[None, :], C, SAVE)
        k_offs = step_offset(strides[0], (batch * T + t) * C, batch, t, K_ROW) + offs_c[None, :]
        v_offs = step_offset(strides[1], (batch * T + t) * C, batch, t, V_ROW) + offs_c[None, :]
        token_k = tl.load(k_ptr + k_offs, mask=mask_c[None, :], other=0.0).to(tl.float32)
        token_v = tl.load(v_ptr + v_offs, mask=mask_c[None, :], other=0.0).to(tl.float32)
        rows = None
        if documents is not None:
            rows = load_marks(documents, T, t + offs_o, tl.full((1, 1), 1, tl.int32), 1)
        m, num, den = state_before(m, num, den, 0.0, rows, 0, offs_c, mask_c[None, :], C)
        y = _output(m, num, den, token_k, token_v, u, PRECISE)
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask_c[None, :])
        m, num, den = _advance(m, num, den, token_k, token_v, w)
        _store_last(m, num, den, rows, 0, offs_c, mask_c[None, :], C)
    if last_ptr is not None:
        _store_state(last_ptr, stride, m, num, den, batch * C + offs_c[None, :], mask_c[None, :])


@remember_launches
@triton.jit(do_not_specialize=["B"])
def step_kernel(
    k_ptr, v_ptr, w_ptr, u_ptr, first, y_ptr, last_ptr, strides, B, C: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Advance BLOCK_C channels of one sequence by one token.

    Grid: (B, ceil(C / BLOCK_C)). Reads k, v [B, 1, C], w, u [C] and the state, num, den, max [B, C]; writes y [B, 1, C]
    and the new state [3, B, C].
    """
    PRECISE: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    batch = tl.program_id(0).to(tl.int64)
    offs = batch * C + offs_c
    k_base, v_base = step_offset(strides[0], batch * C, batch, 0, C), step_offset(strides[1], batch * C, batch, 0, C)
    k = tl.load(k_ptr + k_base + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    v = tl.load(v_ptr + v_base + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    w = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    m, num, den = _load_state(first, offs, mask_c)
    y = _output(m, num, den, k, v, u, PRECISE)
    tl.store(y_ptr + offs[None, :], y.to(y_ptr.dtype.element_ty), mask=mask_c[None, :])
    m, num, den = _advance(m, num, den, k, v, w)
    _store_state(last_ptr, B.to(tl.int64) * C, m, num, den, offs[None, :], mask_c[None, :])
