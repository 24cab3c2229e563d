"""The elements of WKV's scans: exponentially weighted sums (m, a, b), which stand for a e^m and b e^m.

In the forward pass a and b are the numerator and the denominator of a state, in the backward pass the gradients of
these. Each step multiplies both by e^-w. To add two elements, the exponent of the earlier one is lowered by w times
their distance, and the sum gets the larger exponent. Only differences of nearby exponents enter an exponential, so
precision does not depend on the sequence length. An empty element has the exponent -1e38: unlike minus infinity, it can
be subtracted from itself.

    run    consecutive steps of a row during which the exponent stays the same
    slow   a rate w too small to be subtracted from an exponent at every step (see SLOW_RATE); others are fast
    stale  an exponent that should be lower, because decay has made a and b small (see RENEWAL)
    sum    the element of the tokens of one row or tile, at its end; a state is the sum of all tokens so far
"""

import triton
import triton.language as tl

from ..common.time_tiles import INTERPRETED, widen

EMPTY = tl.constexpr(-1e38)
"""Exponent of a sum without terms."""

EMPTY_WORD = tl.constexpr((1 << 32) + 0xFE967699)
"""The word that _publish writes for the exponent EMPTY."""

LOG2E = tl.constexpr(1.4426950408889634)
MAX_RATIO = tl.constexpr(40.0)
"""Upper bound of log(weight of the past / weight of the token): e^-40 is far below float32's epsilon, and the product
of two such ratios does not overflow."""

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

SLOW_RATE = tl.constexpr(0.25)
"""Rates w below this count as slow (split_rate, _slow_rate and look_back have further conditions). Subtracting so small
a w from a large exponent at every step would round in the same direction each time, and since many steps contribute to
a state, the errors would add up."""

RENEWAL = tl.constexpr(16.0)
"""A stale exponent is lowered by this, or by multiples of it; float32 subtracts 16 without rounding."""

LEAST_STATE = tl.constexpr(2.0**-12)
LEAST_GRADIENT = tl.constexpr(2.0**-60)
"""An exponent is stale if num and den (LEAST_STATE), or their gradients (LEAST_GRADIENT), are both smaller than this.
den should be of order 1, because the weight of the past is bounded by e^MAX_RATIO; gradients may all be small."""

LEAST_NORMAL = tl.constexpr(2.0**-126)
"""An initial state with a smaller den counts as empty."""

SUBROW = tl.constexpr(8)
"""Steps of a run: slow rates lower an exponent once a run, and the backward pass loads a run at once."""


@triton.jit
def prefetch(ptr, first_c, C: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Prefetch TILE steps of BLOCK_C channels into the L2 cache, an address a sector; none may lie beyond the sequence.
    A later program uses them; memory stays busy while this one computes."""
    SECTOR: tl.constexpr = 32 * 8 // ptr.dtype.element_ty.primitive_bitwidth
    # PIECE steps at once take about one sector per thread; the addresses of further pieces differ by constants.
    PIECE: tl.constexpr = 32 if TILE > 32 else TILE
    SECTORS: tl.constexpr = BLOCK_C // SECTOR if BLOCK_C > SECTOR else 1
    channels = first_c + tl.arange(0, SECTORS) * SECTOR
    if C % BLOCK_C:
        channels = tl.minimum(channels, C - 1)
    offs = tl.arange(0, PIECE)[:, None] * C + channels[None, :]
    for start in tl.static_range(0, TILE, PIECE):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(ptr + start * C + offs).to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def exp(x):
    """Return e^x."""
    return tl.exp2(x * LOG2E)


@triton.jit
def relative_weights(m1, m2):
    """Return e^(m1 - m) and e^(m2 - m), where m is the larger of the two: one of them is 1."""
    gap = m1 - m2
    small = exp(-tl.abs(gap))
    return tl.where(gap > 0, 1.0, small), tl.where(gap > 0, small, 1.0)


@triton.jit
def add(m1, a1, b1, m2, a2, b2):
    """Return the sum of two elements at the same position."""
    e1, e2 = relative_weights(m1, m2)
    return tl.maximum(m1, m2), e1 * a1 + e2 * a2, e1 * b1 + e2 * b2


@triton.jit
def advance(m, num, den, k, v, w):
    """Return the state (m, num, den) after one more token."""
    m -= w
    old, new = relative_weights(m, k)
    return tl.maximum(m, k), tl.fma(old, num, new * v), tl.fma(old, den, new)


@triton.jit
def reciprocal(x, PRECISE: tl.constexpr):
    """Return 1 / x for x from 2^-60 to e^80, approximated by one special function; PRECISE corrects the result."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    if PRECISE:
        y = tl.fma(tl.fma(-x, y, 1.0), y, y)
    return y


@triton.jit
def decay_factor(w):
    """Return e^-w; for slow rates by a series exact to half an ulp, since errors add up over the steps of a row."""
    series = 1.0 - w * (1.0 / 5.0 - w * (1.0 / 30.0))
    series = 1.0 - w * (1.0 / 3.0 - w * (1.0 / 12.0) * series)
    series = 1.0 - w * (1.0 - w * 0.5 * series)
    return tl.where(w < SLOW_RATE, series, exp(-w))


@triton.jit
def _renew(m, a, b, AT_LEAST: tl.constexpr):
    """Lower a stale exponent by RENEWAL and scale a and b up to match."""
    stale = tl.maximum(tl.abs(a), tl.abs(b)) < AT_LEAST
    scale = tl.where(stale, 8886110.520507872, 1.0)  # e^16
    return m - tl.where(stale, RENEWAL, 0.0), a * scale, b * scale


@triton.jit
def renew_whole(m, a, b, AT_LEAST: tl.constexpr):
    """Lower a stale exponent by the multiple of RENEWAL that brings the larger of a and b near 1."""
    large = tl.maximum(tl.abs(a), tl.abs(b))
    stale = (large > 0) & (large < AT_LEAST)
    lowered = tl.floor(tl.log(tl.where(stale, large, 1.0)) * (-1.0 / RENEWAL)) * RENEWAL
    scale = exp(lowered)
    return m - lowered, a * scale, b * scale


@triton.jit
def split_rate(m, w, BLOCK_I: tl.constexpr):
    """Split w into a slow and a fast rate [BLOCK_O, BLOCK_C], one of which is 0, for rows that start with exponents m.

    Only fast rates are subtracted from the exponent at every step. A rate is slow if a whole row would lower the
    exponent by at most 2 or a quarter of its size, so that its rounding error does not grow, and by no more than
    MAX_RATIO, so that num and den can decay instead.
    """
    size = tl.where(m > EMPTY, tl.abs(m), 0.0)
    limit = tl.minimum(tl.maximum(SUBROW * SLOW_RATE, 0.25 * size), MAX_RATIO)
    slow = tl.where(BLOCK_I * w <= limit, w, 0.0)
    return slow, w - slow


@triton.jit
def tighten(m, num, den):
    """Return the state with den scaled to order 1 and the exponent lowered to match, if decay has made den small."""
    loose = (den > 0) & (den < LEAST_STATE)
    shift = tl.log(tl.where(loose, den, 1.0))
    scale = exp(-shift)
    return m + shift, num * scale, den * scale


@triton.jit
def weights_under(k, top, late_zero, SUB: tl.constexpr):
    """Return e^(k - top) of SUB steps. Adding ``late_zero`` makes them wait for forward.py's _zeros_after_loads."""
    shift = tl.fma(top, -LOG2E, late_zero)
    weights = ()
    for n in tl.static_range(SUB):
        weights = weights + (tl.exp2(tl.fma(widen(k[n]), LOG2E, shift)),)
    return weights


@triton.jit
def weights_below(k, late_zero, SUB: tl.constexpr):
    """Return the largest key of SUB steps, and the weights e^(k - largest)."""
    top = _largest(k, late_zero, SUB)
    return top, weights_under(k, top, 0.0, SUB)


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
def widen_anew(x, SUB: tl.constexpr):
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
def sum_run(weights, v, decay, SUB: tl.constexpr):
    """Return the sum of a run of steps, num and den relative to the exponent of the weights."""
    num = weights[0] * widen(v[0])
    den = weights[0]
    for n in tl.static_range(1, SUB):
        num = tl.fma(decay, num, weights[n] * widen(v[n]))
        den = tl.fma(decay, den, weights[n])
    return num, den


@triton.jit
def all_at_least(x, AT_LEAST: tl.constexpr = LEAST):
    """Return whether all denominators are at least AT_LEAST."""
    # Reduced as integers, because warps have a min instruction for those.
    x = tl.where(x >= AT_LEAST, 1, 0)
    return tl.min(tl.min(x, axis=1), axis=0) > 0


@triton.jit
def _add_rows(lag1, m1, a1, b1, gap1, p1, q1, r1, lag2, m2, a2, b2, gap2, p2, q2, r2):
    """Join two runs of rows, the first one earlier, for :func:`scan_rows`. A run is given by its decay and its sum, and
    then by those without its last row."""
    m, a, b = add(m1 - lag2, a1, b1, m2, a2, b2)
    p, q, r = add(m1 - gap2, a1, b1, p2, q2, r2)
    return lag1 + lag2, m, a, b, lag1 + gap2, p, q, r


@triton.jit
def scan_rows(m, a, b, lag):
    """Return for each row the tile's sum up to the row's end and up to its start; a row decays sums by e^-lag."""
    empty = tl.full(m.shape, EMPTY, tl.float32)
    zero = tl.zeros(m.shape, dtype=tl.float32)
    lag = tl.broadcast_to(lag, m.shape)
    _, m, a, b, _, p, q, r = tl.associative_scan((lag, m, a, b, zero, empty, zero, zero), 0, _add_rows)
    return m, a, b, p, q, r


@triton.jit
def gather_rows(m, a, b, lag, offs_o, offs_c, first_c, GATHER: tl.constexpr):
    """Return the same as :func:`scan_rows`: every thread reads the sums of all rows and adds those before its own.

    Args:
        first_c: first channel of the tile.
        GATHER: exchange.py's gather_code for the tile.
    """
    BLOCK_O: tl.constexpr = m.shape[0]
    if not INTERPRETED:
        row = tl.broadcast_to(offs_o[:, None], m.shape)
        channel = tl.broadcast_to((offs_c - first_c)[None, :], m.shape)
        rows = tl.inline_asm_elementwise(
            GATHER.code, GATHER.constraints, [m, a, b, row, channel], dtype=(tl.float32,) * (3 * BLOCK_O - 3),
            is_pure=False, pack=GATHER.pack,
        )  # fmt: skip
    else:
        rows = ()
        for j in tl.static_range(BLOCK_O - 1):
            here = (offs_o == j)[:, None]
            for x in tl.static_range(3):
                part = m if x == 0 else (a if x == 1 else b)
                rows = rows + (tl.broadcast_to(tl.sum(tl.where(here, part, 0.0), axis=0)[None, :], m.shape),)
    tops = ()
    in_m = tl.full(m.shape, EMPTY, tl.float32)
    for j in tl.static_range(BLOCK_O - 1):
        distance = (offs_o - 1 - j).to(tl.float32)[:, None]
        top = tl.where((offs_o > j)[:, None], tl.fma(distance, -lag, rows[3 * j]), EMPTY)
        in_m = tl.maximum(in_m, top)
        tops = tops + (top,)
    in_a = tl.zeros(m.shape, dtype=tl.float32)
    in_b = in_a
    for j in tl.static_range(BLOCK_O - 1):
        weight = exp(tops[j] - in_m)
        # In the first row all exponents are EMPTY, so all weights would come out as 1.
        weight = tl.where((offs_o > j)[:, None], weight, 0.0)
        in_a = tl.fma(weight, rows[3 * j + 1], in_a)
        in_b = tl.fma(weight, rows[3 * j + 2], in_b)
    all_m, all_a, all_b = add(in_m - lag, in_a, in_b, m, a, b)
    return all_m, all_a, all_b, in_m, in_a, in_b


@triton.jit
def _holds_exponent(m, lag):
    """Return whether a decay of e^-lag scales num and den, rather than lowering the exponent m, as for slow rates in
    :func:`split_rate`. MAX_RATIO keeps num and den from vanishing."""
    return lag <= tl.minimum(tl.maximum(SLOW_RATE, 0.25 * tl.abs(m)), MAX_RATIO)


@triton.jit
def pass_state(
    word_ptr, call, size, tile, first_m, first_a, first_b, all_m, all_a, all_b, lag, offs_o, offs_c, first_c, mask_c,
    PASS: tl.constexpr, AT_LEAST: tl.constexpr,
):  # fmt: skip
    """Wait for the state before a tile, publish the state after it, and return the state before it [BLOCK_O, BLOCK_C].

    Where :func:`_holds_exponent` is true the exponent stays: lowering it would round the same way at every tile.

    Args:
        word_ptr: words [tiles, size, 2 int64] at the sequence's channels; a tile writes its own word and reads the word
            of the tile before.
        call: number of the call, which no word holds before the launch.
        first_m, first_a, first_b: state before the first tile [1, BLOCK_C].
        all_m, all_a, all_b: the tile's sum, in the last row.
        lag: the tile decays a state by e^-lag.
        PASS: exchange.py's pass_code for the tile.
    """
    last_row = tl.broadcast_to((offs_o == all_m.shape[0] - 1)[:, None] & mask_c[None, :], all_m.shape)
    offs = tl.broadcast_to(2 * offs_c[None, :], all_m.shape)
    after_ptr = word_ptr + tile * (2 * size) + offs
    before_ptr = after_ptr - 2 * size
    decay = decay_factor(lag)
    first_m = tl.broadcast_to(first_m, all_m.shape)
    first_a = tl.broadcast_to(first_a, all_m.shape)
    first_b = tl.broadcast_to(first_b, all_m.shape)
    if not INTERPRETED:
        turn = tl.where(last_row, tile, -1)
        channel = tl.broadcast_to((offs_c - first_c)[None, :], all_m.shape)
        m, a, b = tl.inline_asm_elementwise(
            PASS.code,
            PASS.constraints,
            [
                before_ptr.to(tl.int64), after_ptr.to(tl.int64), turn, call, channel,
                first_m, first_a, first_b, all_m, all_a, all_b,
                tl.broadcast_to(lag, all_m.shape), tl.broadcast_to(decay, all_m.shape),
            ],
            dtype=(tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=PASS.pack,
        )  # fmt: skip
    else:
        waits = tl.where(last_row, tile, 0) > 0
        low = tl.load(before_ptr, mask=waits, other=0)
        high = tl.load(before_ptr + 1, mask=waits, other=0)
        # In the interpreter programs run one after the other, so a word of another call is an error: NaN.
        m = tl.where(high >> 32 == call, high.to(tl.int32).to(tl.float32, bitcast=True), float("nan"))
        m = tl.where(waits, m, first_m)
        a = tl.where(waits, low.to(tl.int32).to(tl.float32, bitcast=True), first_a)
        b = tl.where(waits, (low >> 32).to(tl.int32).to(tl.float32, bitcast=True), first_b)
        held = _holds_exponent(m, lag)
        keep = tl.where(held, decay, 1.0)
        after_m, after_a, after_b = add(tl.where(held, m, m - lag), a * keep, b * keep, all_m, all_a, all_b)
        after_m, after_a, after_b = renew_whole(after_m, after_a, after_b, AT_LEAST)
        low = after_a.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        low |= after_b.to(tl.int32, bitcast=True).to(tl.int64) << 32
        high = after_m.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        high |= call.to(tl.int64) << 32
        tl.store(after_ptr, low, mask=last_row)
        tl.store(after_ptr + 1, high, mask=last_row)
        m = tl.sum(tl.where(last_row, m, 0.0), axis=0)[None, :]
        a = tl.sum(tl.where(last_row, a, 0.0), axis=0)[None, :]
        b = tl.sum(tl.where(last_row, b, 0.0), axis=0)[None, :]
    return m, a, b


@triton.jit
def _publish(word_ptr, size, m, a, b, offs_c, mask):
    """Publish elements, each in two words that hold their own flag: (a, b) and (m, 1).

    Value and flag of a word arrive in one access, so no fence is needed. A word of zero is not written yet; the last
    bit of a is set so that no written word is zero. Unlike atomics, plain stores do not fetch the old value.
    """
    high = (a.to(tl.int32, bitcast=True) | 1).to(tl.int64) << 32
    low = b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    exponent = (m.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)
    at = tl.broadcast_to(word_ptr + offs_c[None, :], m.shape)
    tl.store(at, high | low, mask=mask)
    tl.store(at + size, exponent, mask=mask)


@triton.jit
def _load_words(at, size, mask):
    """Load words [LOOK, BLOCK_C]: zero where not written yet, the words of an empty sum outside of the mask."""
    pair = tl.load(at, mask=mask, other=1 << 32, volatile=True)
    exponent = tl.load(at + size, mask=mask, other=EMPTY_WORD, volatile=True)
    return pair, exponent


@triton.jit
def _is_missing(pair, exponent):
    """Return whether any word is not written yet."""
    written = ((pair >> 32).to(tl.int32) != 0) & ((exponent >> 32).to(tl.int32) != 0)
    return tl.min(tl.min(written.to(tl.int32), axis=1), axis=0) == 0


@triton.jit
def _add_pairs(a1, b1, a2, b2):
    """Return the sum of two pairs."""
    return a1 + a2, b1 + b2


@triton.jit
def program_position(B, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return (tile, batch, block of channels) of a program; blocks of channels vary fastest, tiles of time slowest."""
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    # Unsigned division takes fewer instructions.
    pid = tl.program_id(0).to(tl.uint32)
    row = pid // blocks
    tile = row // B.to(tl.uint32)
    return tile.to(tl.int32), (row - tile * B.to(tl.uint32)).to(tl.int64), (pid - row * blocks).to(tl.int32)


@triton.jit
def _clear_words(word_ptr, size, offs_c, mask_c):
    """Zero both words of channels."""
    zero = tl.zeros(offs_c.shape, dtype=tl.int64)
    tl.store(word_ptr + offs_c, zero, mask=mask_c)
    tl.store(word_ptr + size + offs_c, zero, mask=mask_c)


@triton.jit
def look_back(
    word_ptr, spare_ptr, tiles, position, stride, lag, all_m, all_a, all_b, offs_o, offs_c, mask_c,
    LOOK: tl.constexpr, AT_LEAST: tl.constexpr,
):  # fmt: skip
    """Publish a tile's sum, and return the sum of all tiles before it [1, BLOCK_C], decayed up to the tile's start.

    LOOK / 2 tiles are a group, whose last tile also publishes the sum of all tiles up to its own end. A tile of group g
    adds the earlier tiles of g, all tiles of group g - 1, and the sum that the last tile of g - 2 published long ago.
    These at most LOOK words are loaded at once. The order of additions is fixed: results do not depend on timing.

    The groups' sums form a chain as long as the sequence. A slow rate therefore decays a and b, not the exponent, which
    would be rounded in the same direction from group to group.

    No two threads may load the same word, because one might read it before and the other after it is written. LOOK *
    BLOCK_C must therefore be at least the number of threads.

    Args:
        word_ptr: [2, tiles + groups, stride], two words per channel, at the sequence's channels.
        spare_ptr: the words of the call before, which are zeroed.
        position: number of the tile, from 0 on.
        lag: a tile decays sums by e^-lag.
        all_m, all_a, all_b: the tile's sum, in the last row.
        AT_LEAST: a group's sum gets a lower exponent if its a and b are smaller than this.
    """
    GROUP: tl.constexpr = LOOK // 2
    size = (tiles + tl.cdiv(tiles, GROUP)) * stride
    last_row = (offs_o == all_m.shape[0] - 1)[:, None] & mask_c[None, :]
    _publish(word_ptr + position * stride, size, all_m, all_a, all_b, offs_c, last_row)
    _clear_words(spare_ptr + position * stride, size, offs_c, mask_c)
    group = position // GROUP
    index = tl.arange(0, LOOK)
    tile = (group - 1) * GROUP - 1 + index
    mask = ((tile >= 0) & (tile < position))[:, None] & mask_c[None, :]
    row = tl.where(index == 0, tiles + group - 2, tile)
    at = word_ptr + row.to(tl.int64)[:, None] * stride + offs_c[None, :]
    pair, exponent = _load_words(at, size, mask)
    while _is_missing(pair, exponent):
        pair, exponent = _load_words(at, size, mask)
    new_m = exponent.to(tl.int32).to(tl.float32, bitcast=True)
    slow = tl.where(lag < SLOW_RATE / LOOK, lag, 0.0)
    distance = (position - 1 - tile).to(tl.float32)[:, None]
    new_m -= distance * (lag - slow)
    m = tl.max(new_m, axis=0)[None, :]
    scale = exp(new_m - m) * decay_factor(distance * slow)
    a = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True) * scale
    b = pair.to(tl.int32).to(tl.float32, bitcast=True) * scale
    a, b = tl.reduce((a, b), 0, _add_pairs)
    a, b = a[None, :], b[None, :]
    if position % GROUP == GROUP - 1:
        decay = decay_factor(slow)
        group_m, group_a, group_b = add(m - (lag - slow), a * decay, b * decay, all_m, all_a, all_b)
        group_m, group_a, group_b = _renew(group_m, group_a, group_b, AT_LEAST)
        _publish(word_ptr + (tiles + group) * stride, size, group_m, group_a, group_b, offs_c, last_row)
        _clear_words(spare_ptr + (tiles + group) * stride, size, offs_c, mask_c)
    return m, a, b


@triton.jit
def load_state(num_ptr, den_ptr, max_ptr, offs, mask):
    """Return a state (max, num, den) [1, BLOCK_C]: the empty one for None, else the given one, scaled so that den is of
    order 1. If den is below float32's normal numbers, the state counts as empty."""
    m = tl.full(offs.shape, EMPTY, tl.float32)
    num = tl.zeros(offs.shape, dtype=tl.float32)
    den = tl.zeros(offs.shape, dtype=tl.float32)
    if num_ptr is not None:
        den = tl.load(den_ptr + offs, mask=mask, other=0.0)
        exists = den >= LEAST_NORMAL
        usual = (den > 1e-6) & (den < 1e6)
        shift = tl.log(tl.where(exists & (usual == 0), den, 1.0))
        scale = exp(-shift)
        m = tl.where(exists, tl.load(max_ptr + offs, mask=mask, other=0.0) + shift, EMPTY)
        num = tl.where(exists, tl.load(num_ptr + offs, mask=mask, other=0.0) * scale, 0.0)
        den = tl.where(exists, den * scale, 0.0)
    return m[None, :], num[None, :], den[None, :]
