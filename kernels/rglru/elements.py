"""The elements (a_t, b_t) of a diagonal recurrence h_t = a_t h_{t-1} + b_t, their gradients, and scans of a tile.

The constexpr ``OP`` selects the operation:

    linear_scan   a_t (passed as r) and b_t = x_t are given
    rglru         a_t = exp(-8 softplus(c) sigma(r_t)), b_t = sqrt(1 - a_t^2) sigma(i_t) x_t

All arithmetic is float32. Half-precision inputs get by with five special functions an element: a sigmoid is the square
of rsqrt(1 + exp(-x)), and sqrt(1 - a^2) sigma(i) takes one rsqrt in all. Float32 inputs (PRECISE) take divisions,
square roots and compensated exponents. Loads beyond the end of the sequence return what makes a = 1 and b = 0, so that
these steps do not change the state. Source: De et al., Griffin (2024), equations 1 to 4.
"""

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl

from ..common.exchange import PassCode
from ..common.marks import documents_at, is_marked
from ..common.time_tiles import INTERPRETED, load_rows, widen

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.9259629911266175e-8)
"""log2(e) minus its nearest float32."""
LN2 = tl.constexpr(0.6931471805599453)


class Strides(NamedTuple):
    """Strides of batch and time of inputs, in units of eight elements; None for one that is contiguous."""

    x: tuple[int, int] | None
    r: tuple[int, int] | None
    i: tuple[int, int] | None


@triton.jit
def exp_minus(x, PRECISE: tl.constexpr):
    """Return exp(-x); PRECISE corrects for the rounding of x log2(e)."""
    if PRECISE:
        x = tl.minimum(tl.maximum(x, -200.0), 200.0)
        high = x * -LOG2E
        low = tl.fma(x, -LOG2E, -high) - x * LOG2E_LOW
        y = tl.exp2(high) * (1.0 + low * LN2)
    else:
        y = tl.exp2(x * -LOG2E)
    return y


@triton.jit
def sigmoid(x, PRECISE: tl.constexpr):
    """Return sigma(x), with a small relative error for either sign of x."""
    denominator = 1.0 + exp_minus(x, PRECISE)
    if PRECISE:
        y = 1.0 / denominator
    else:
        root = tl.rsqrt(denominator)
        y = root * root
    return y


@triton.jit
def softplus(x, PRECISE: tl.constexpr):
    """Return log(1 + exp(x)), with a small relative error for either sign of x.

    With e = exp(-|x|) and q = e / (2 + e) <= 1/3, log(1 + e) = 2 artanh(q) = 2 q (1 + q^2 / 3 + q^4 / 5 + ...). The
    series has no branch, past which the compiler would move no loads.
    """
    e = exp_minus(tl.abs(x), PRECISE)
    q = e / (2.0 + e)
    z = q * q
    series = 1.0 / 7.0 + z * (1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0 + z * (1.0 / 15.0))))
    series = 1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * series))
    return tl.maximum(x, 0.0) + 2.0 * (q * series)


@triton.jit
def one_minus_square(a, log_a, LN: tl.constexpr, PRECISE: tl.constexpr):
    """Return 1 - a^2, where log a = LN log_a; near a = 1 as a series in log_a, since the difference would lose bits.

    Where the two meet, each has a relative error of 2^-19 (PRECISE) or 2^-14. The square root halves that, and 2^-15 is
    16 times less than the rounding error of fp16.
    """
    if PRECISE:
        z = log_a * (-2.0 * LN)
        series = 1.0 / 24.0 + z * (-1.0 / 120.0 + z * (1.0 / 720.0 - z * (1.0 / 5040.0)))
        series = z * (1.0 + z * (-0.5 + z * (1.0 / 6.0 - z * series)))
        y = tl.where(z < 0.25, series, 1.0 - a * a)
    else:
        series = log_a * tl.fma(log_a, -2.0 * LN * LN, -2.0 * LN)
        y = tl.where(log_a > -0.0078125 / LN, series, 1.0 - a * a)
    return y


@triton.jit
def decay_rate(c_ptr, offs_c, mask_c, OP: tl.constexpr, PRECISE: tl.constexpr):
    """Return -8 softplus(c) log2(e), log2 of a channel's decay when its gate is open; 0 for a linear scan."""
    if OP == "rglru":
        c = tl.load(c_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        rate = (-8.0 * LOG2E) * softplus(c, PRECISE)
    else:
        rate = tl.zeros(offs_c.shape, dtype=tl.float32)
    return rate


@triton.jit
def _load_input(ptr, strides, at, C, other, BLOCK_I: tl.constexpr):
    """Load a tile of an input. ``at`` is its sequence, first step, offset in a contiguous input, offsets of rows there,
    first steps of the rows, channels, and what else :func:`load_rows` takes."""
    batch, start, base, offs, offs_t, offs_c, left, mask_c = at
    if strides is None:
        ptr += base
        row = C
    else:
        # Triton takes a stride of 1 for a constant, which has no method ``to``.
        row = tl.full((), strides[1], tl.int32) * 8
        ptr += batch * (tl.full((), strides[0], tl.int64) * 8) + start * row.to(tl.int64)
        offs = offs_t[:, None] * row + offs_c[None, :]
    return load_rows(ptr, offs, left, mask_c, row, other, BLOCK_I)


@triton.jit
def load_gate(r_ptr, strides, at, C, OP: tl.constexpr, BLOCK_I: tl.constexpr):
    """Load a tile of r; beyond the end of the sequence it holds what makes a = 1."""
    return _load_input(r_ptr, strides.r, at, C, -float("inf") if OP == "rglru" else 1.0, BLOCK_I)


@triton.jit
def load_inputs(x_ptr, r_ptr, i_ptr, strides, at, C, OP: tl.constexpr, BLOCK_I: tl.constexpr):
    """Load a tile of x, r and i (see _load_input); a linear scan has no i and gets x instead."""
    x = _load_input(x_ptr, strides.x, at, C, 0.0, BLOCK_I)
    r = load_gate(r_ptr, strides, at, C, OP, BLOCK_I)
    if OP == "rglru":
        i = _load_input(i_ptr, strides.i, at, C, 0.0, BLOCK_I)
    else:
        i = x
    return x, r, i


@triton.jit
def load_token(ptr, strides, batch, C, offs_c, mask_c):
    """Load the only step of a sequence of an input [BLOCK_C]."""
    if strides is None:
        ptr += batch * C
    else:
        ptr += batch * (tl.full((), strides[0], tl.int64) * 8)
    return tl.load(ptr + offs_c, mask=mask_c, other=0.0)


@triton.jit
def prefetch_input(ptr, strides, batch, start, T, C, first_c, TILE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Prefetch a tile of an input, see :func:`prefetch_tile`."""
    if strides is None:
        prefetch_tile(ptr + batch * T * C, start, T, C, C, first_c, TILE, BLOCK_C)
    else:
        sequence = ptr + batch * (tl.full((), strides[0], tl.int64) * 8)
        prefetch_tile(sequence, start, T, C, tl.full((), strides[1], tl.int32) * 8, first_c, TILE, BLOCK_C)


@triton.jit
def prefetch_tile(ptr, start, T, C, row, first_c, TILE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Prefetch TILE steps from ``start`` on of BLOCK_C channels into the L2 cache, an address a sector; steps are
    ``row`` elements apart. A later program uses them; memory stays busy while this one computes."""
    SECTOR: tl.constexpr = 32 * 8 // ptr.dtype.element_ty.primitive_bitwidth
    steps = tl.minimum(start + tl.arange(0, TILE), T - 1)
    SECTORS: tl.constexpr = BLOCK_C // SECTOR if BLOCK_C > SECTOR else 1
    channels = tl.minimum(first_c + tl.arange(0, SECTORS) * SECTOR, C - 1)
    address = (ptr + steps.to(tl.int64)[:, None] * row + channels[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_words(word_ptr, B, C, batch, tile, first_c, BLOCK_C: tl.constexpr):
    """Prefetch into the L2 cache the words that a tile will publish. Each is written once a launch, so it would not be
    there, and the next tile, which polls it, would first wait for memory."""
    row = tile.to(tl.int64) * B + batch
    prefetch_tile(word_ptr + row * C, 0, 1, C, C, first_c, 1, BLOCK_C)


@triton.jit
def issue_loads():
    """Issue all loads above this line before any is used. Otherwise ptxas moves each load down to its first use, and
    they wait one after the other. It moves none past a barrier, and the barrier does not wait for their data."""
    tl.debug_barrier()


@triton.jit
def decay_and_gate(r, rate, OP: tl.constexpr, PRECISE: tl.constexpr):
    """Return a and sigma(r); a linear scan has no gate, so it gets a twice."""
    r = widen(r)
    if OP == "rglru":
        open_r = sigmoid(r, PRECISE)
        a = tl.exp2(rate * open_r)
    else:
        open_r = r
        a = r
    return a, open_r


@triton.jit
def make_element(x, r, i, rate, OP: tl.constexpr, PRECISE: tl.constexpr):
    """Return a and b of one step of every row."""
    x = widen(x)
    a, open_r = decay_and_gate(r, rate, OP, PRECISE)
    if OP == "rglru":
        square = one_minus_square(a, rate * open_r, LN2, PRECISE)
        i = widen(i)
        if PRECISE:
            b = tl.sqrt(square) * (x * sigmoid(i, PRECISE))
        else:
            # With s = sqrt(square), s sigma(i) = s^2 / sqrt(s^2 (1 + exp(-i))^2). It is 0 where the argument of the
            # root overflows, for sigma(i) < 2^-63.
            closed = 1.0 + exp_minus(i, PRECISE)
            b = square * tl.rsqrt(tl.maximum(square * (closed * closed), 1e-37)) * x
    else:
        b = x
    return a, b


@triton.jit
def gradient_element(x, i, open_r, rate, h, OP: tl.constexpr, PRECISE: tl.constexpr):
    """Return (a, b, dx / g, di / g, D / g, dr / D), where g is the gradient of h_t = a h + b.

    With s = sqrt(1 - a^2) and y = sigma(i) x

        dx = g s sigma(i)    di = g s y (1 - sigma(i))    D = g sigma(r) a (h - y a / s)
        dr = -8 softplus(c) D (1 - sigma(r))              dc = -8 sigma(c) sum of D

    which stay finite for a -> 1, where sigma(r) / s -> 0. a is computed again from its natural logarithm, because there
    are not enough registers to keep it from :func:`decay_and_gate`'s result until here.
    """
    x = widen(x)
    if OP == "rglru":
        natural = rate * LN2
        ln_a = natural * open_r
        a = tl.exp2(ln_a * LOG2E)
        square = one_minus_square(a, ln_a, 1.0, PRECISE)
        open_i = sigmoid(widen(i), PRECISE)
        open_i_by_s = open_i * tl.rsqrt(tl.maximum(square, 1e-37))
        dx = square * open_i_by_s
        b = dx * x
        di = tl.fma(-b, open_i, b)
        d_log = open_r * a * tl.fma(-a, x * open_i_by_s, h)
        dr = tl.fma(-open_r, natural, natural)
    else:
        a = open_r
        b = x
        dx = 1.0
        di = 0.0
        d_log = h
        dr = 1.0
    return a, b, dx, di, d_log, dr


@triton.jit
def load_of_documents(ptr, rows, n, at, offs_c, mask_c, C):
    """Return the states [BLOCK_O, BLOCK_C] of the documents of step n where ``at``, else 0; rows: see load_marks."""
    return tl.load(ptr + (documents_at(rows, n, at, C) + offs_c[None, :]), mask=at & mask_c, other=0.0)


@triton.jit
def forget(a, rows, n):
    """Return the decay of step n of the rows with 0 where a document begins; rows: None, or see load_marks."""
    if rows is not None:
        a = tl.where(is_marked(rows[0], n), 0.0, a)
    return a


@triton.jit
def state_before(h, rows, n, offs_c, mask_c, C):
    """Return the state before step n of the rows: where a document begins, its initial state instead of h."""
    if rows is not None:
        begins = is_marked(rows[0], n)
        first = 0.0
        if rows[4].first is not None:
            first = load_of_documents(rows[4].first, rows, n, begins, offs_c, mask_c, C)
        h = tl.where(begins, first, h)
    return h


@triton.jit
def _compose_rows(a_first, b_first, p_first, q_first, a_then, b_then, p_then, q_then):
    """Compose two runs of rows. A run maps the state h before it to a h + b; without its last row it gives p h + q."""
    return (
        a_first * a_then,
        tl.fma(a_then, b_first, b_then),
        a_first * p_then,
        tl.fma(p_then, b_first, q_then),
    )


@triton.jit
def scan_rows(a, b):
    """Scan the rows of a tile, each given as the map h -> a h + b of its steps alone.

    Returns a, b, p, q: from the state h before the tile, a h + b is the state after each row, p h + q the one before.
    """
    p = tl.full(a.shape, 1.0, tl.float32)
    q = tl.full(a.shape, 0.0, tl.float32)
    if a.shape[0] > 1:
        a, b, p, q = tl.associative_scan((a, b, p, q), 0, _compose_rows)
    return a, b, p, q


@triton.jit
def _is_last_row(x):
    """Return a mask [BLOCK_O, 1] of the last row of x [BLOCK_O, BLOCK_C]."""
    return (tl.arange(0, x.shape[0]) == x.shape[0] - 1)[:, None]


@triton.jit
def take_last_row(x):
    """Return the last row of x [BLOCK_O, BLOCK_C] as [1, BLOCK_C]."""
    return tl.sum(tl.where(_is_last_row(x), x, 0.0), axis=0)[None, :]


@triton.jit
def program_position(B, blocks):
    """Return (tile, batch, block of channels) of a program; blocks of channels vary fastest, tiles of time slowest."""
    pid = tl.program_id(0)
    # Unsigned division takes fewer instructions, and two divisions suffice.
    row = (pid.to(tl.uint32) // blocks.to(tl.uint32)).to(tl.int32)
    tile = (row.to(tl.uint32) // B.to(tl.uint32)).to(tl.int32)
    return tile, (row - tile * B).to(tl.int64), pid - row * blocks


@cache
def pass_code(pack: int) -> PassCode:
    """Return the PTX that passes states from tile to tile, for the ``pack`` channels of a thread at once.

    Operands, ``pack`` of each: the state before the tile (output; 0 in threads that do not take part), the addresses of
    the word to read and of the word to write, the turn (the tile's number; tile 0 reads nothing; -1 for a channel that
    this thread does not pass on), the number of the call, the first state, and the tile's map a, b: h -> a h + b.
    """
    each = range(pack)
    state, before, after, turn, call, first, a, b = ([f"${group * pack + n}" for n in each] for group in range(8))
    lines = [".reg .pred more;"]
    for n in each:
        lines += [
            f".reg .pred part{n}, wait{n}; .reg .b64 word{n}; .reg .b32 number{n}; .reg .f32 next{n};",
            f"setp.ge.s32 part{n}, {turn[n]}, 0;",
            f"setp.gt.s32 wait{n}, {turn[n]}, 0;",
            # A tile with no predecessor uses its own word.
            f"selp.f32 {state[n]}, {first[n]}, 0f00000000, part{n};",
            f"mov.b64 word{n}, {{{state[n]}, {call[n]}}};",
        ]
    # Two words per access halve the number of loads in flight; the memory model treats them as two separate accesses.
    pairs = [(n, f"{{word{n}, word{n + 1}}}") for n in range(0, pack, 2)] if pack > 1 else [(0, "word0")]
    kind = "v2.b64" if pack > 1 else "b64"
    lines += ["again:"]
    lines += [f"@wait{n} ld.relaxed.gpu.global.{kind} {word}, [{before[n]}];" for n, word in pairs]
    lines += ["setp.ne.s32 more, 0, 0;"]
    for n in each:
        lines += [
            f"mov.b64 {{{state[n]}, number{n}}}, word{n};",
            f"setp.ne.or.s32 more, number{n}, {call[n]}, more;",
        ]
    lines += ["@more bra again;"]
    for n in each:
        lines += [f"fma.rn.f32 next{n}, {a[n]}, {state[n]}, {b[n]};", f"mov.b64 word{n}, {{next{n}, {call[n]}}};"]
    lines += [f"@part{n} st.relaxed.gpu.global.{kind} [{after[n]}], {word};" for n, word in pairs]
    constraints = ["=&f"] * pack + ["l"] * (2 * pack) + ["r"] * (2 * pack) + ["f"] * (3 * pack)
    return PassCode("{\n" + "\n".join(lines) + "\n}", ",".join(constraints), pack)


@triton.jit
def pass_state(
    word_ptr, call, B, C, batch, tile, tiles, first, after_a, after_b, offs_c, mask_c, PASS: tl.constexpr
):  # fmt: skip
    """Wait for the state before a tile, publish the state after it, and return the state before it [1, BLOCK_C].

    The threads of the tile's last row do this, since theirs are after_a, after_b of the whole tile.

    Args:
        word_ptr: words [tiles, B, C]; a tile writes its own word and reads the word of the tile before.
        call: number of the call, which no word holds before the launch.
        tile, tiles: number of the tile in the order in which states are passed, and how many tiles there are.
        first: state before the first tile [1, BLOCK_C].
        PASS: :func:`pass_code` for the channels of a thread; in the interpreter a word of another call gives NaN.
    """
    last_row = _is_last_row(after_a) & mask_c[None, :]
    offs = tl.broadcast_to(offs_c[None, :], after_a.shape)
    after_ptr = word_ptr + (tile * B.to(tl.int64) + batch) * C + offs
    before_ptr = after_ptr - B.to(tl.int64) * C
    state = tl.where(last_row, first, 0.0)
    # A single tile passes nothing on. The branch also keeps the compiler from computing output addresses before the
    # wait, for which registers would run out.
    if tiles > 1:
        if INTERPRETED:
            waits = tl.where(last_row, tile, 0) > 0
            word = tl.load(before_ptr, mask=waits, other=0)
            before = tl.where(word >> 32 == call, word.to(tl.int32).to(tl.float32, bitcast=True), float("nan"))
            state = tl.where(waits, before, state)
            after = tl.fma(after_a, state, after_b)
            word = (after.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)
            tl.store(after_ptr, word, mask=last_row)
        else:
            turn = tl.where(last_row, tile, -1)
            state = tl.inline_asm_elementwise(
                PASS.code,
                PASS.constraints,
                [before_ptr.to(tl.int64), after_ptr.to(tl.int64), turn, call, first, after_a, after_b],
                dtype=tl.float32,
                is_pure=False,
                pack=PASS.pack,
            )
    return tl.sum(state, axis=0)[None, :]


@triton.jit
def store_last_row(ptr, state, offs_c, mask_c):
    """Store the last row of ``state`` [BLOCK_O, BLOCK_C]."""
    at = tl.broadcast_to(ptr + offs_c[None, :], state.shape)
    tl.store(at, state, mask=_is_last_row(state) & mask_c[None, :])


@triton.jit
def load_state(ptr, row, offs_c, mask_c):
    """Return the states [1, BLOCK_C] at offset ``row``, or zeros where there are none (None)."""
    if ptr is not None:
        state = tl.load(ptr + row + offs_c, mask=mask_c, other=0.0)
    else:
        state = tl.zeros(offs_c.shape, dtype=tl.float32)
    return state[None, :]
