"""Memory in which the programs of a scan pass sums on: zero before a call, without a call of its own to zero it.

Two buffers take turns: a kernel passes its sums through one and zeroes what the call before left in the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from torch import Tensor

MAX_KEPT_BYTES = 16 * 2**20
"""Of one buffer; beside what a call with larger ones does, zeroing them takes no time."""

MAX_KEPT = 8
"""Pairs of buffers; the one unused for longest goes first."""

_kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}


@contextmanager
def exchange(k: Tensor, tiles: int, look: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield words for one launch, which are zero, spare ones for it to zero, and how many sums a program loads.

    Where there is one tile nobody waits: words of any value, and 0.

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
