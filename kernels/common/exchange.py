"""The memory through which programs of a single-pass scan hand a float32 state from tile to tile.

A state travels in a word, 64 bits per channel: the value, and the number of the call, which serves as the flag that the
value is there. Both arrive in one access, so no fence is needed. The threads that hold a tile's last row each wait for
the words of their own channels, apply the tile to the state and publish the result at once, without waiting for other
threads. A hop from one tile to the next therefore takes no longer than a store to the L2 cache and a load from it.

Every tile writes its own word, once a launch. Two programs must not write the same word: relaxed stores of different
programs have no order, even if one program has read what the other stored, so the older value could land last and the
next tile would wait forever. Words need no zeroing between calls, because an earlier call left another number in them.
This module allocates the words; the code that passes states through them belongs to each family.

Sources: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back" (2016), for words that hold
their own flag; NVIDIA, PTX ISA, "Memory Consistency Model": relaxed accesses guarantee coherence of one word, but
causality order only through release and acquire, which would cost a fence at every hop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime import driver

from .remember import different_each_call

MAX_KEPT_BYTES = 64 * 2**20
"""Largest buffer that is kept for later calls. A larger one is zeroed by every call, which takes 1.6 % (RG-LRU) or
2.1 % (WKV) of its time: in half precision words are that share of what a call reads and writes."""

MAX_KEPT = 8
"""Number of buffers, or pairs of buffers, that are kept; the least recently used is dropped first."""

MAX_CALL = 2**31 - 1
"""The largest number of a call, which a kernel takes as an int32."""


@dataclass(frozen=True, slots=True)
class PassCode:
    """PTX by which a tile's threads exchange values, the constraints of its operands, and the channels of a thread."""

    code: str
    constraints: str
    pack: int


NO_CODE = PassCode("", "", 1)
"""For the interpreter, which cannot run PTX."""

_kept: dict[tuple[torch.device, int, int], tuple[Tensor, int]] = {}
_lock = threading.Lock()


@different_each_call
def exchange_words(x: Tensor, count: int, width: int = 1) -> tuple[Tensor, int]:
    """Return at least ``count`` words on x's device, and a number that no earlier call wrote into this memory.

    Calls on one stream run one after the other, so they share words; words of different widths are kept apart, because
    a value of one width could be read as a number of the other. New zeroed words are returned if there are too many to
    keep, and during the capture of a CUDA graph, whose replays zero them again.

    Args:
        x: a tensor of the call.
        count: words that the launch writes.
        width: int64 values of a word; the upper half of the last one holds the number.
    """
    stream = stream_of(x) if x.is_cuda else None
    if stream is None or 8 * count * width > MAX_KEPT_BYTES:
        return torch.zeros(count * width, device=x.device, dtype=torch.int64), 1
    return _next_call((*stream, width), count * width)


def stream_of(x: Tensor) -> tuple[torch.device, int] | None:
    """Return x's device and the address of its current stream (0 on the CPU), for which memory may be kept; None during
    the capture of a CUDA graph, whose memory no other call may use."""
    device = x.device
    if device.type != "cuda":
        return device, 0
    if torch.cuda.is_current_stream_capturing():
        return None
    # torch.cuda.current_stream would take the host several times as long.
    return device, driver.active.get_current_stream(device.index)


def _next_call(key: tuple[torch.device, int, int], count: int) -> tuple[Tensor, int]:
    """Return the words kept for (device, stream, width), at least ``count`` int64, and the next call's number."""
    with _lock:
        words, call = _kept.pop(key, (None, 0))
        if words is None or words.numel() < count or call == MAX_CALL:
            words, call = torch.zeros(count, device=key[0], dtype=torch.int64), 0
        _kept[key] = words, call + 1
        while len(_kept) > MAX_KEPT:
            del _kept[next(iter(_kept))]
    return words, call + 1
