"""How the programs of a scan pass on sums, or whole states: the memory, and the code.

Sums go through two buffers that take turns: a kernel passes its own through one and zeroes what the call before left in
the other, without a call of its own for it. States go from tile to tile as in :mod:`..common.exchange`, through words
that hold num, den and m beside the number of the call. Either way a word is written once a launch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
from torch import Tensor

from ..common.exchange import MAX_KEPT, PassCode

MAX_KEPT_BYTES = 16 * 2**20
"""Of one of two buffers for sums; beside what a call with larger ones does, zeroing them takes little time."""

_kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}


@contextmanager
def exchange_sums(k: Tensor, tiles: int, look: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield words for one launch, which are zero, spare ones for it to zero, and how many sums a program loads.

    One tile has no predecessor: words of any value, and 0.

    Args:
        k: [B, T, C].
        tiles: programs that one sequence's time is split over.
        look: sums that a program loads where there are several tiles.
    """
    B, _, C = k.shape
    if tiles == 1:
        words = torch.empty(1, device=k.device, dtype=torch.int64)
        yield words, words, 0
        return
    count = 2 * (tiles + triton.cdiv(tiles, look // 2)) * B * C
    stream = 0
    if k.device.type == "cuda":
        # What a graph holds is not free for other calls.
        if torch.cuda.is_current_stream_capturing() or 8 * count > MAX_KEPT_BYTES:
            words = torch.zeros(count, device=k.device, dtype=torch.int64)
            yield words, torch.empty_like(words), look
            return
        stream = torch.cuda.current_stream(k.device).cuda_stream
    # Calls of one thread on one stream run one after the other, and equal ones zero just what the one before wrote.
    key = (threading.get_ident(), k.device.index or 0, stream, tiles, look, B, C)
    pair = _kept.pop(key, None)
    if pair is None or pair[0].device != k.device:
        words = torch.zeros(count, device=k.device, dtype=torch.int64)
        pair = words, words.clone()
    words, spare = pair
    yield words, spare, look
    # A launch that failed has zeroed nothing, and its buffers are not kept.
    _kept[key] = spare, words
    while len(_kept) > MAX_KEPT:
        _kept.pop(next(iter(_kept)), None)


@cache
def gather_code(rows: int, channels: int, pack: int) -> PassCode:
    """Return the PTX that gives every thread the sums of a tile's rows but the last.

    Operands, ``pack`` neighbouring channels of each: m, num and den of every such row (out), the thread's own m, num
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
    """Return the PTX by which a tile's last row waits for the state before the tile, publishes the one behind it at
    once and shows the former to all threads of the tile.

    Operands, ``pack`` neighbouring channels of each: m, num and den of the state (out), the addresses of the word to
    read and of the word to write, the thread's turn (the number of its tile; tile 0 has no predecessor and reads
    nothing, -1 takes no part), the number of the call, the channel, the first state, the tile's sum, and by how much
    the tile lowers a state's exponent or, where elements.py's _holds_exponent says so, scales its num and den instead.

    A word of 128 bits, which is one access, holds num, den, m and the number of the call.

    Args:
        channels: of a tile.
        pack: channels of a thread.
    """
    each = range(pack)
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
            "mul.f32 small, small, 0f3E800000;",
            "max.f32 small, small, 0f3E800000;",
            "min.f32 small, small, 0f42200000;",
            f"setp.le.f32 held, {lag[n]}, small;",
            f"sub.f32 m, {state[0][n]}, {lag[n]};",
            f"selp.f32 m, {state[0][n]}, m, held;",
            f"selp.f32 small, {decay[n]}, 0f3F800000, held;",
            f"mul.f32 num, {state[1][n]}, small;",
            f"mul.f32 den, {state[2][n]}, small;",
            f"sub.f32 gap, m, {total[0][n]};",
            "abs.f32 small, gap;",
            "mul.f32 small, small, 0fBFB8AA3B;",  # -log2(e)
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
            "setp.lt.f32 stale, small, 0f39800000;",
            "setp.gt.and.f32 stale, small, 0f00000000, stale;",
            "@stale lg2.approx.ftz.f32 small, small;",
            "@stale mul.f32 small, small, 0fBD317218;",  # -1 / (16 log2(e))
            "@stale cvt.rmi.f32.f32 small, small;",
            "@stale fma.rn.f32 m, small, 0fC1800000, m;",
            "@stale mul.f32 small, small, 0f41B8AA3B;",  # 16 log2(e)
            "@stale ex2.approx.ftz.f32 small, small;",
            "@stale mul.f32 num, num, small;",
            "@stale mul.f32 den, den, small;",
            "mov.b64 low, {num, den};",
            f"mov.b64 high, {{m, {call[n]}}};",
            "mov.b128 word, {low, high};",
            f"st.relaxed.gpu.global.b128 [{after[0]}+{16 * n}], word;",
        ]
    lines += [_store(f"base+{part * size}", state[part]) for part in range(3)]
    # Threads of a warp may come from either branch, and the barrier wants whole warps.
    lines += ["shared:", "bar.warp.sync 0xffffffff;", "bar.sync 0;"]
    lines += [_load(f"base+{part * size}", state[part]) for part in range(3)]
    constraints = ["=&f"] * (3 * pack) + ["l"] * (2 * pack) + ["r"] * (3 * pack) + ["f"] * (8 * pack)
    return PassCode("{\n" + "\n".join(lines) + "\n}", ",".join(constraints), pack)


def _store(address: str, operands: list[str]) -> str:
    vector = f".v{len(operands)}" if len(operands) > 1 else ""
    return f"st.shared{vector}.f32 [{address}], {{{', '.join(operands)}}};"


def _load(address: str, operands: list[str]) -> str:
    vector = f".v{len(operands)}" if len(operands) > 1 else ""
    return f"ld.shared{vector}.f32 {{{', '.join(operands)}}}, [{address}];"
