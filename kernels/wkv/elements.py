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

from ..common.marks import documents_at, is_marked
from ..common.time_tiles import INTERPRETED

EMPTY = tl.constexpr(-1e38)
"""Exponent of a sum without terms."""

LOG2E = tl.constexpr(1.4426950408889634)
MAX_RATIO = tl.constexpr(40.0)
"""Upper bound of log(weight of the past / weight of the token): e^-40 is far below float32's epsilon, and the product
of two such ratios does not overflow."""

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

DROP = tl.constexpr(2e38)
"""A lag that leaves nothing of an element: its exponent falls below EMPTY."""

SUBROW = tl.constexpr(8)
"""Steps of a run: slow rates lower an exponent once a run, and the backward pass loads a run at once."""


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
def renew_whole(m, a, b, AT_LEAST: tl.constexpr):
    """Lower a stale exponent by the multiple of RENEWAL that brings the larger of a and b near 1."""
    large = tl.maximum(tl.abs(a), tl.abs(b))
    stale = (large > 0) & (large < AT_LEAST)
    lowered = tl.floor(tl.log(tl.where(stale, large, 1.0)) * (-1.0 / RENEWAL)) * RENEWAL
    scale = exp(lowered)
    return m - lowered, a * scale, b * scale


@triton.jit
def load_first(first, offs, mask):
    """Return the first state (max, num, den) at ``offs``: the empty one for three times None, else the given one (num,
    den, max), scaled so that den is of order 1. If den is below float32's normal numbers, the state counts as empty."""
    m = tl.full(offs.shape, EMPTY, tl.float32)
    num = tl.zeros(offs.shape, dtype=tl.float32)
    den = tl.zeros(offs.shape, dtype=tl.float32)
    if first[0] is not None:
        den = tl.load(first[1] + offs, mask=mask, other=0.0)
        exists = den >= LEAST_NORMAL
        usual = (den > 1e-6) & (den < 1e6)
        shift = tl.log(tl.where(exists & (usual == 0), den, 1.0))
        scale = exp(-shift)
        m = tl.where(exists, tl.load(first[2] + offs, mask=mask, other=0.0) + shift, EMPTY)
        num = tl.where(exists, tl.load(first[0] + offs, mask=mask, other=0.0) * scale, 0.0)
        den = tl.where(exists, den * scale, 0.0)
    return m, num, den


@triton.jit
def state_before(m, num, den, raised, rows, n, offs_c, mask_c, C: tl.constexpr):
    """Return the state before step n of the rows (None, or see load_marks): where a document begins, its first state
    instead of (m, num, den), its exponent raised by ``raised``."""
    if rows is not None:
        begins = is_marked(rows[0], n)
        offs = documents_at(rows, n, begins, C) + offs_c[None, :]
        first_m, first_num, first_den = load_first(rows[4].first, offs, begins & mask_c)
        m = tl.where(begins, first_m + raised, m)
        num = tl.where(begins, first_num, num)
        den = tl.where(begins, first_den, den)
    return m, num, den


@triton.jit
def drop_where(drop, lag):
    """Return a lag that leaves nothing where ``drop`` is true."""
    return tl.where(drop, DROP, lag)


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
def step_offset(stride, base, batch, start, ROW: tl.constexpr):
    """Return the offset of step ``start`` of a sequence in k or v: ``base`` in a contiguous one (stride None)."""
    if stride is None:
        offset = base
    else:
        offset = batch * (tl.full((), stride, tl.int64) * 8) + start * tl.full((), ROW, tl.int64)
    return offset


@triton.jit
def program_position(B, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return (tile, batch, block of channels) of a program; blocks of channels vary fastest, tiles of time slowest."""
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    # Unsigned division takes fewer instructions.
    pid = tl.program_id(0).to(tl.uint32)
    row = pid // blocks
    tile = row // B.to(tl.uint32)
    return tile.to(tl.int32), (row - tile * B.to(tl.uint32)).to(tl.int64), (pid - row * blocks).to(tl.int32)
