"""How programs of a single pass hand a float32 state from tile to tile.

The state travels in a 64-bit word a channel, beside the number of the call: value and flag arrive in one access, so no
fence is needed. One row of a tile's threads waits for its channels' words, takes each on through the tile and publishes
it at once, thread by thread: nothing but the way to the L2 cache and back lies between two tiles.

Every tile has a word of its own, which is written once a launch: relaxed accesses put stores of different programs to
one word in no order, even where one program has read what the other stored, so the older of two could land last and the
next tile would wait for ever. Nor is a word zeroed: what an earlier call left in it has another number. This
module keeps the words; the code that passes states through them is each family's own.

Sources: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back" (2016), for words that hold
their own flag; NVIDIA, PTX ISA, "Memory Consistency Model", for what relaxed accesses promise: coherence of one word,
and causality order only through release and acquire, which would put a fence into every hop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_KEPT_BYTES = 64 * 2**20
"""Of one buffer: words are 1.6 % (RG-LRU) to 2.1 % (WKV) of what a call in half precision reads and writes, and zeroing
more of them takes as much of its time."""

MAX_KEPT = 8
"""Buffers, or pairs of them; the one unused for longest goes first."""

MAX_CALL = 2**31 - 1
"""The largest number of a call: a kernel takes it as an int32."""


@dataclass(frozen=True, slots=True)
class PassCode:
    """PTX by which a tile's threads exchange values, its operand constraints, and the channels of a thread."""

    code: str
    constraints: str
    pack: int


NO_CODE = PassCode("", "", 1)
"""For the interpreter, which runs no PTX."""

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
