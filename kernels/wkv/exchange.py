"""How the rows of a tile add their sums up, and how the programs of a scan pass on sums or states: memory, device
functions and PTX.

Sums go through two buffers in turn: a launch writes its sums into one and zeroes the other, which the call before used,
so that zeroing takes no launch of its own. States are passed from tile to tile as in :mod:`..common.exchange`, in words
of 128 bits that hold num, den, m and the number of the call. In both cases a word is written once a launch.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Hashable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.exchange import MAX_KEPT, PassCode, stream_of
from ..common.sizes import cdiv
from ..common.time_tiles import INTERPRETED
from .elements import (
    EMPTY,
    LEAST_STATE,
    LOG2E,
    MAX_RATIO,
    RENEWAL,
    SLOW_RATE,
    add,
    decay_factor,
    drop_where,
    exp,
    renew_whole,
)

EMPTY_WORD = tl.constexpr((1 << 32) + 0xFE967699)
"""The word that _publish writes for the exponent EMPTY."""

MAX_KEPT_BYTES = 16 * 2**20
"""A buffer for sums is kept up to this size. A call with a larger one takes so long that zeroing it costs little."""

_kept: dict[tuple[Hashable, ...], tuple[Tensor, Tensor]] = {}


def exchange_sums(k: Tensor, tiles: int, look: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
    """Return zeroed words for one launch, spare words for the launch to zero, and a function to call after the launch.

    A single tile passes nothing on, so it gets uninitialised words.

    Args:
        k: [B, T, C].
        tiles: number of tiles into which a sequence is split.
        look: words that a program loads, see :func:`look_back`.
    """
    B, _, C = k.shape
    if tiles == 1:
        words = torch.empty(1, device=k.device, dtype=torch.int64)
        return words, words, lambda: None
    count = 2 * (tiles + cdiv(tiles, look // 2)) * B * C
    stream = stream_of(k)
    if stream is None or 8 * count > MAX_KEPT_BYTES:
        words = torch.zeros(count, device=k.device, dtype=torch.int64)
        return words, torch.empty_like(words), lambda: None
    # Calls of one thread on one stream run one after the other. A call zeroes the words that a call of the same sizes
    # wrote, so buffers are kept per size.
    key = (threading.get_ident(), *stream, tiles, look, B, C)
    pair = _kept.pop(key, None)
    if pair is None:
        words = torch.zeros(count, device=k.device, dtype=torch.int64)
        pair = words, words.clone()
    words, spare = pair

    def keep() -> None:
        # Not called after a launch that failed: its spare words may not be zero, so its words are dropped.
        _kept[key] = spare, words
        while len(_kept) > MAX_KEPT:
            _kept.pop(next(iter(_kept)), None)

    return words, spare, keep


@triton.jit
def any_begins(rows):
    """Return whether a document begins in any of the rows, see load_marks."""
    return tl.max(tl.max((rows[0] != 0).to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def _renew(m, a, b, AT_LEAST: tl.constexpr):
    """Lower a stale exponent by RENEWAL and scale a and b up to match."""
    stale = tl.maximum(tl.abs(a), tl.abs(b)) < AT_LEAST
    scale = tl.where(stale, 8886110.520507872, 1.0)  # e^16
    return m - tl.where(stale, RENEWAL, 0.0), a * scale, b * scale


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
def _clear_words(word_ptr, size, offs_c, mask_c):
    """Zero both words of channels."""
    zero = tl.zeros(offs_c.shape, dtype=tl.int64)
    tl.store(word_ptr + offs_c, zero, mask=mask_c)
    tl.store(word_ptr + size + offs_c, zero, mask=mask_c)


@triton.jit
def look_back(
    word_ptr, spare_ptr, tiles, position, stride, lag, all_m, all_a, all_b, rows, earliest, offs_o, offs_c, mask_c,
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
        rows: None, or see load_marks: of packed documents, whose sums hold the tile's last one (backward, its first).
        earliest: number of the first tile of the document that reaches into this one.
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
    used = (tile >= 0) & (tile < position)
    if rows is not None:
        used = used & (tile >= earliest)
    mask = used[:, None] & mask_c[None, :]
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
        fast = lag - slow
        if rows is not None:
            fast = drop_where(any_begins(rows), fast)
        group_m, group_a, group_b = add(m - fast, a * decay, b * decay, all_m, all_a, all_b)
        group_m, group_a, group_b = _renew(group_m, group_a, group_b, AT_LEAST)
        _publish(word_ptr + (tiles + group) * stride, size, group_m, group_a, group_b, offs_c, last_row)
        _clear_words(spare_ptr + (tiles + group) * stride, size, offs_c, mask_c)
    return m, a, b


@triton.jit
def _add_rows(lag1, m1, a1, b1, gap1, p1, q1, r1, lag2, m2, a2, b2, gap2, p2, q2, r2):
    """Join two runs of rows, the first one earlier, for :func:`scan_rows`. A run is given by its decay and its sum, and
    then by those without its last row."""
    m, a, b = add(m1 - lag2, a1, b1, m2, a2, b2)
    p, q, r = add(m1 - gap2, a1, b1, p2, q2, r2)
    return lag1 + lag2, m, a, b, lag1 + gap2, p, q, r


@triton.jit
def scan_rows(m, a, b, lag, rows):
    """Return for each row the tile's sum up to the row's end and up to its start; a row decays sums by e^-lag, and
    leaves nothing of them if a document begins in it (rows: None, or see load_marks)."""
    empty = tl.full(m.shape, EMPTY, tl.float32)
    zero = tl.zeros(m.shape, dtype=tl.float32)
    if rows is not None:
        lag = drop_where(rows[0] != 0, lag)
    lag = tl.broadcast_to(lag, m.shape)
    _, m, a, b, _, p, q, r = tl.associative_scan((lag, m, a, b, zero, empty, zero, zero), 0, _add_rows)
    return m, a, b, p, q, r


@cache
def gather_code(rows: int, channels: int, pack: int) -> PassCode:
    """Return the PTX that gives every thread the sums of all rows of a tile but the last, through shared memory.

    Operands, ``pack`` neighbouring channels of each: m, num and den of every such row (output), the thread's own m, num
    and den, its row and its channel.

    Args:
        rows, channels: of a tile.
        pack: channels of a thread.
    """
    size = 4 * rows * channels
    groups = [[f"${pack * group + n}" for n in range(pack)] for group in range(3 * (rows - 1) + 5)]
    out, own = groups[: 3 * (rows - 1)], groups[3 * (rows - 1) :]
    (row, *_), (channel, *_) = own[3:]
    lines = [
        f".shared .align 16 .b8 sums[{3 * size}];",
        ".reg .b32 base, at;",
        "mov.b32 base, sums;",
        f"mad.lo.s32 base, {channel}, 4, base;",
        f"mad.lo.s32 at, {row}, {4 * channels}, base;",
    ]
    lines += [_store(f"at+{part * size}", own[part]) for part in range(3)]
    lines += ["bar.sync 0;"]
    for index, operands in enumerate(out):
        lines += [_load(f"base+{index % 3 * size + index // 3 * 4 * channels}", operands)]
    constraints = ["=&f"] * (pack * len(out)) + ["f"] * (3 * pack) + ["r"] * (2 * pack)
    return PassCode("{\n" + "\n".join(lines) + "\n}", ",".join(constraints), pack)


@triton.jit
def gather_rows(m, a, b, lag, rows, starts, offs_o, offs_c, first_c, BLOCK_I: tl.constexpr, GATHER: tl.constexpr):
    """Return the same as :func:`scan_rows`: every thread reads the sums of all rows and adds those before its own.

    Args:
        starts: steps [BLOCK_O] of the tile at which the documents of the rows' first steps begin.
        first_c: first channel of the tile.
        GATHER: :func:`gather_code` for the tile.
    """
    BLOCK_O: tl.constexpr = m.shape[0]
    if not INTERPRETED:
        row = tl.broadcast_to(offs_o[:, None], m.shape)
        channel = tl.broadcast_to((offs_c - first_c)[None, :], m.shape)
        sums = tl.inline_asm_elementwise(
            GATHER.code, GATHER.constraints, [m, a, b, row, channel], dtype=(tl.float32,) * (3 * BLOCK_O - 3),
            is_pure=False, pack=GATHER.pack,
        )  # fmt: skip
    else:
        sums = ()
        for j in tl.static_range(BLOCK_O - 1):
            here = (offs_o == j)[:, None]
            for x in tl.static_range(3):
                part = m if x == 0 else (a if x == 1 else b)
                sums = sums + (tl.broadcast_to(tl.sum(tl.where(here, part, 0.0), axis=0)[None, :], m.shape),)
    tops = ()
    in_m = tl.full(m.shape, EMPTY, tl.float32)
    for j in tl.static_range(BLOCK_O - 1):
        distance = (offs_o - 1 - j).to(tl.float32)[:, None]
        top = tl.where(_is_before(j, offs_o, rows, starts, BLOCK_I), tl.fma(distance, -lag, sums[3 * j]), EMPTY)
        in_m = tl.maximum(in_m, top)
        tops = tops + (top,)
    in_a = tl.zeros(m.shape, dtype=tl.float32)
    in_b = in_a
    for j in tl.static_range(BLOCK_O - 1):
        weight = exp(tops[j] - in_m)
        # In the first row all exponents are EMPTY, so all weights would come out as 1.
        weight = tl.where(_is_before(j, offs_o, rows, starts, BLOCK_I), weight, 0.0)
        in_a = tl.fma(weight, sums[3 * j + 1], in_a)
        in_b = tl.fma(weight, sums[3 * j + 2], in_b)
    if rows is not None:
        lag = drop_where(rows[0] != 0, lag)
    all_m, all_a, all_b = add(in_m - lag, in_a, in_b, m, a, b)
    return all_m, all_a, all_b, in_m, in_a, in_b


@triton.jit
def _is_before(j, offs_o, rows, starts, BLOCK_I: tl.constexpr):
    """Return for which rows [BLOCK_O, 1] row j counts: later ones, of packed documents those of j's last document."""
    before = offs_o > j
    if rows is not None:
        before = before & (starts < (j + 1) * BLOCK_I)
    return before[:, None]


@cache
def pass_code(channels: int, pack: int) -> PassCode:
    """Return the PTX by which the threads of a tile's last row wait for the state before the tile, publish the state
    after it at once, and pass the state before it to all threads of the tile through shared memory.

    Operands, ``pack`` neighbouring channels of each: m, num and den of the state (output), the addresses of the word to
    read and of the word to write, the turn (the tile's number; tile 0 reads nothing; -1 for threads of other rows), the
    number of the call, the channel, the first state, the tile's sum, and the tile's decay as lag and e^-lag: where
    :func:`_holds_exponent` is true num and den are multiplied by e^-lag, elsewhere the exponent is lowered by lag.
    :func:`pass_state` computes the same for the interpreter.

    Args:
        channels: of a tile.
        pack: channels of a thread.
    """
    each, log2e, renewal = range(pack), LOG2E.value, RENEWAL.value
    quarter, slow_rate, max_ratio, least = map(_float32, (0.25, SLOW_RATE.value, MAX_RATIO.value, LEAST_STATE.value))
    groups = [[f"${pack * group + n}" for n in each] for group in range(16)]
    state, (before, after, turn, call, channel), first, total, (lag, decay) = (
        groups[:3], groups[3:8], groups[8:11], groups[11:14], groups[14:],
    )  # fmt: skip
    size = 4 * channels
    lines = [
        f".shared .align 16 .b8 shown[{3 * size}];",
        ".reg .pred part, wait, more, held, old, stale; .reg .b32 base, number; .reg .b64 low, high;",
        ".reg .b128 word; .reg .f32 m, num, den, gap, small, e1, e2;",
        "mov.b32 base, shown;",
        f"mad.lo.s32 base, {channel[0]}, 4, base;",
        f"setp.ge.s32 part, {turn[0]}, 0;",
        f"setp.gt.s32 wait, {turn[0]}, 0;",
        "@!part bra shared;",
    ]
    lines += [f"mov.b32 {state[part][n]}, {first[part][n]};" for part in range(3) for n in each]
    lines += [f".reg .b128 word{n};" for n in each]
    lines += ["@!wait bra there;", "again:"]
    for n in each:
        lines += [f"ld.relaxed.gpu.global.b128 word{n}, [{before[0]}+{16 * n}];"]
    lines += ["setp.ne.s32 more, 0, 0;"]
    for n in each:
        lines += [
            f"mov.b128 {{low, high}}, word{n};",
            f"mov.b64 {{{state[1][n]}, {state[2][n]}}}, low;",
            f"mov.b64 {{{state[0][n]}, number}}, high;",
            f"setp.ne.or.s32 more, number, {call[n]}, more;",
        ]
    lines += ["@more bra again;", "there:"]
    for n in each:
        lines += [
            f"abs.f32 small, {state[0][n]};",
            f"mul.f32 small, small, {quarter};",
            f"max.f32 small, small, {slow_rate};",
            f"min.f32 small, small, {max_ratio};",
            f"setp.le.f32 held, {lag[n]}, small;",
            f"sub.f32 m, {state[0][n]}, {lag[n]};",
            f"selp.f32 m, {state[0][n]}, m, held;",
            f"selp.f32 small, {decay[n]}, 0f3F800000, held;",
            f"mul.f32 num, {state[1][n]}, small;",
            f"mul.f32 den, {state[2][n]}, small;",
            f"sub.f32 gap, m, {total[0][n]};",
            "abs.f32 small, gap;",
            f"mul.f32 small, small, {_float32(-log2e)};",
            "ex2.approx.ftz.f32 small, small;",
            "setp.gt.f32 old, gap, 0f00000000;",
            "selp.f32 e1, 0f3F800000, small, old;",
            "selp.f32 e2, small, 0f3F800000, old;",
            f"max.f32 m, m, {total[0][n]};",
            "mul.f32 num, num, e1;",
            "mul.f32 den, den, e1;",
            f"fma.rn.f32 num, e2, {total[1][n]}, num;",
            f"fma.rn.f32 den, e2, {total[2][n]}, den;",
            "abs.f32 small, num;",
            "max.f32 small, small, den;",
            f"setp.lt.f32 stale, small, {least};",
            "setp.gt.and.f32 stale, small, 0f00000000, stale;",
            "@stale lg2.approx.ftz.f32 small, small;",
            f"@stale mul.f32 small, small, {_float32(-1 / (renewal * log2e))};",
            "@stale cvt.rmi.f32.f32 small, small;",
            f"@stale fma.rn.f32 m, small, {_float32(-renewal)}, m;",
            f"@stale mul.f32 small, small, {_float32(renewal * log2e)};",
            "@stale ex2.approx.ftz.f32 small, small;",
            "@stale mul.f32 num, num, small;",
            "@stale mul.f32 den, den, small;",
            "mov.b64 low, {num, den};",
            f"mov.b64 high, {{m, {call[n]}}};",
            "mov.b128 word, {low, high};",
            f"st.relaxed.gpu.global.b128 [{after[0]}+{16 * n}], word;",
        ]
    lines += [_store(f"base+{part * size}", state[part]) for part in range(3)]
    # Threads of a warp may come from either branch, but the barrier needs whole warps.
    lines += ["shared:", "bar.warp.sync 0xffffffff;", "bar.sync 0;"]
    lines += [_load(f"base+{part * size}", state[part]) for part in range(3)]
    constraints = ["=&f"] * (3 * pack) + ["l"] * (2 * pack) + ["r"] * (3 * pack) + ["f"] * (8 * pack)
    return PassCode("{\n" + "\n".join(lines) + "\n}", ",".join(constraints), pack)


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
        PASS: :func:`pass_code` for the tile.
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


def _float32(x: float) -> str:
    """Return a number as PTX writes a float32."""
    return f"0f{struct.pack('>f', x).hex().upper()}"


def _store(address: str, operands: list[str]) -> str:
    vector = f".v{len(operands)}" if len(operands) > 1 else ""
    return f"st.shared{vector}.f32 [{address}], {{{', '.join(operands)}}};"


def _load(address: str, operands: list[str]) -> str:
    vector = f".v{len(operands)}" if len(operands) > 1 else ""
    return f"ld.shared{vector}.f32 {{{', '.join(operands)}}}, [{address}];"
