"""Memory and PTX by which the programs of a scan pass on sums or states.

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
from torch import Tensor

from ..common.exchange import MAX_KEPT, PassCode, stream_of
from ..common.sizes import cdiv
from .elements import LEAST_STATE, LOG2E, MAX_RATIO, RENEWAL, SLOW_RATE

MAX_KEPT_BYTES = 16 * 2**20
"""A buffer for sums is kept up to this size. A call with a larger one takes so long that zeroing it costs little."""

_kept: dict[tuple[Hashable, ...], tuple[Tensor, Tensor]] = {}


def exchange_sums(k: Tensor, tiles: int, look: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
    """Return zeroed words for one launch, spare words for the launch to zero, and a function to call after the launch.

    A single tile passes nothing on, so it gets uninitialised words.

    Args:
        k: [B, T, C].
        tiles: number of tiles into which a sequence is split.
        look: words that a program loads, see elements.look_back.
    """
    B, _, C = k.shape
    if tiles == 1:
        words = torch.empty(1, device=k.device, dtype=torch.int64)
        return words, words, _keep_nothing
    count = 2 * (tiles + cdiv(tiles, look // 2)) * B * C
    stream = stream_of(k)
    if stream is None or 8 * count > MAX_KEPT_BYTES:
        words = torch.zeros(count, device=k.device, dtype=torch.int64)
        return words, torch.empty_like(words), _keep_nothing
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


def _keep_nothing() -> None:
    pass


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


@cache
def pass_code(channels: int, pack: int) -> PassCode:
    """Return the PTX by which the threads of a tile's last row wait for the state before the tile, publish the state
    after it at once, and pass the state before it to all threads of the tile through shared memory.

    Operands, ``pack`` neighbouring channels of each: m, num and den of the state (output), the addresses of the word to
    read and of the word to write, the turn (the tile's number; tile 0 reads nothing; -1 for threads of other rows), the
    number of the call, the channel, the first state, the tile's sum, and the tile's decay as lag and e^-lag: where
    _holds_exponent in elements.py is true num and den are multiplied by e^-lag, elsewhere the exponent is lowered by
    lag. pass_state in elements.py computes the same for the interpreter.

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


def _float32(x: float) -> str:
    """Return a number as PTX writes a float32."""
    return f"0f{struct.pack('>f', x).hex().upper()}"


def _store(address: str, operands: list[str]) -> str:
    vector = f".v{len(operands)}" if len(operands) > 1 else ""
    return f"st.shared{vector}.f32 [{address}], {{{', '.join(operands)}}};"


def _load(address: str, operands: list[str]) -> str:
    vector = f".v{len(operands)}" if len(operands) > 1 else ""
    return f"ld.shared{vector}.f32 {{{', '.join(operands)}}}, [{address}];"
