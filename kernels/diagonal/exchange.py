"""How programs of a single pass hand a float32 state from tile to tile.

The state travels in a 64-bit word a channel, beside the number of the call: value and flag arrive in one access, so no
fence is needed. One row of a tile's threads waits for its channels' words, takes each on through the tile and publishes
it at once, thread by thread: nothing but the way to the L2 cache and back lies between two tiles.

Every tile has a word of its own, which is written once a launch: relaxed accesses put stores of different programs to
one word in no order, even where one program has read what the other stored, so the older of two could land last and the
next tile would wait for ever. Nor is a word zeroed: what an earlier call left in it has another number.

Sources: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back" (2016), for words that hold
their own flag; NVIDIA, PTX ISA, "Memory Consistency Model", for what relaxed accesses promise: coherence of one word,
and causality order only through release and acquire, which would put a fence into every hop.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor

MAX_KEPT_BYTES = 64 * 2**20
"""Of one buffer: words are 1.6 % (RG-LRU) to 2.1 % (WKV) of what a call in half precision reads and writes, and zeroing
more of them takes as much of its time."""

MAX_KEPT = 8
"""Buffers, or pairs of them; the one unused for longest goes first."""

MAX_CALL = 2**31 - 1
"""The largest number of a call: a kernel takes it as an int32."""


@cache
def exchange_code(pack: int) -> tuple[str, str]:
    """Return the PTX that passes states on for ``pack`` channels of a thread at once, and its operand constraints.

    Operands, ``pack`` of each: the state (out; 0 where the channel is not this thread's to pass on), the addresses of
    the word to read and of the word to write, the thread's turn (the number of its tile; 0 waits for nobody and reads
    nothing, -1 takes no part), the number of the call, the first state, and the map a, b from a state before the tile
    to the one behind it.
    """
    each = range(pack)
    state, before, after, turn, call, first, a, b = ([f"${group * pack + n}" for n in each] for group in range(8))
    lines = [".reg .pred more;"]
    for n in each:
        lines += [
            f".reg .pred part{n}, wait{n}; .reg .b64 word{n}; .reg .b32 number{n}; .reg .f32 next{n};",
            f"setp.ge.s32 part{n}, {turn[n]}, 0;",
            f"setp.gt.s32 wait{n}, {turn[n]}, 0;",
            # Who waits for nobody has the word it would wait for.
            f"selp.f32 {state[n]}, {first[n]}, 0f00000000, part{n};",
            f"mov.b64 word{n}, {{{state[n]}, {call[n]}}};",
        ]
    # Two words an access, which count as two to the memory model: half as many polls are on their way.
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
    return "{\n" + "\n".join(lines) + "\n}", ",".join(constraints)


_kept: dict[tuple[torch.device, int, int], tuple[Tensor, int]] = {}
_lock = threading.Lock()


def exchange_words(x: Tensor, count: int, width: int = 1) -> tuple[Tensor, int]:
    """Return ``count`` words at least on x's device, and a number that no earlier call with this memory had.

    Calls on one stream run one after the other and share words of a width: what is a number in one width may be a value
    in the other. Many words, and those of a graph that is being captured, are new ones; a replay zeroes them again.

    Args:
        x: a tensor of the call.
        count: words that the launch writes.
        width: int64 values of a word; the upper half of the last is the number.
    """
    if x.device.type != "cuda" or torch.cuda.is_current_stream_capturing() or 8 * count * width > MAX_KEPT_BYTES:
        return torch.zeros(count * width, device=x.device, dtype=torch.int64), 1
    return _next_call((x.device, torch.cuda.current_stream(x.device).cuda_stream, width), count * width)


def _next_call(key: tuple[torch.device, int, int], count: int) -> tuple[Tensor, int]:
    """Return the words kept under (device, stream, width), ``count`` int64 at least, and the next call's number."""
    with _lock:
        words, call = _kept.pop(key, (None, 0))
        if words is None or words.numel() < count or call == MAX_CALL:
            words, call = torch.zeros(count, device=key[0], dtype=torch.int64), 0
        _kept[key] = words, call + 1
        while len(_kept) > MAX_KEPT:
            del _kept[next(iter(_kept))]
    return words, call + 1
