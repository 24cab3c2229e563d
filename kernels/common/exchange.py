"""The memory through which programs of a single-pass scan hand a float32 state from tile to tile.

A word holds a channel's state in 64 bits: the value, and the number of the call, which says that the value is there.
Both arrive in one access, so no fence is needed. The threads that hold a tile's last row each wait for the words of
their own channels, apply the tile to the state and publish the result at once, without waiting for other threads. So a
hop, from one tile to the next, takes no longer than a store to the L2 cache and a load from it.

Every tile writes a word of its own, once a launch. If two programs wrote the same word, their relaxed stores would have
no order, even if one had read what the other stored: the older value could land last, and the next tile would wait
forever. Words are not zeroed between calls, because the number that an earlier call left in them is another one. This
module allocates the words; each family has its own code that passes states through them.

Sources: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back" (2016), for words that hold
their own flag; NVIDIA, PTX ISA, "Memory Consistency Model": relaxed accesses guarantee coherence of one word, but
causality order only through release and acquire, which would cost a fence at every hop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from triton.runtime import driver

MAX_KEPT_BYTES = 64 * 2**20
"""Largest buffer that is kept for later calls. Larger ones are allocated and zeroed in every call, which takes 1.6 %
(RG-LRU) or 2.1 % (WKV) of its time in half precision, the words' share of what a call reads and writes."""

MAX_KEPT = 8
"""Most buffers (in WKV pairs of buffers) that are kept; the least recently used is dropped first."""

MAX_CALL = 2**31 - 1
"""The largest number of a call, which a kernel takes as an int32."""


@dataclass(frozen=True, slots=True)
class PassCode:
    """PTX by which a tile's threads exchange values, constraints of its operands, and channels that a thread holds. The
    interpreter, which cannot run PTX, runs programs one after the other: a word of another call is then an error."""

    code: str
    constraints: str
    pack: int


P = ParamSpec("P")
R = TypeVar("R")

_kept: dict[tuple[torch.device, int, int], tuple[Tensor, int]] = {}
_lock = threading.Lock()
_local = threading.local()


def exchange_words(x: Tensor, count: int, width: int = 1) -> tuple[Tensor, int]:
    """Return at least ``count`` words on x's device, and a number that no earlier call wrote into this memory.

    Calls on one stream run one after the other, so they share words. Words of different widths are kept apart, because
    a value of one width could be read as a number of the other. New, zeroed words are returned if there are too many
    to keep, in calls that keep nothing, and while a CUDA graph is captured, since each replay zeroes them again.

    Args:
        x: a tensor of the call.
        count: words that the launch writes.
        width: int64 values of a word; the upper half of the last one holds the number.
    """
    stream = stream_of(x) if x.is_cuda else None
    if stream is None or 8 * count * width > MAX_KEPT_BYTES:
        return torch.zeros(count * width, device=x.device, dtype=torch.int64), 1
    return _next_call((*stream, width), count * width)


def keeping_nothing(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose calls keep no memory: torch.compile's, which may allocate all of it for a CUDA graph."""

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        _local.keeps_nothing = True
        try:
            return function(*args, **keywords)
        finally:
            _local.keeps_nothing = False

    return call


def stream_of(x: Tensor) -> tuple[torch.device, int] | None:
    """Return x's device and the handle of its current stream (0 on the CPU), by which memory is kept for later calls;
    None in calls that keep nothing, and while a CUDA graph is captured, whose memory no other call may use."""
    device = x.device
    if getattr(_local, "keeps_nothing", False):
        return None
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
