"""Packed documents for kernels: the document of a position; and over channels where documents begin and end, found
once a pass for all programs.

Documents may be of any lengths without any other launch: a kernel goes through all of time as through one sequence, and
where a document begins it forgets the state before. ``mark_documents`` searches cu_seqlens for the document of each
position, on the device. A row (see time_tiles.py) then takes one word, whose bit n tells whether a document begins, or
ends, at its step n. Whatever cu_seqlens holds, no number of a document is outside of 0 to N - 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .remember import remember_launches
from .sizes import cdiv

BITS = 32
"""Positions of a word; rows of a tile are no longer."""

WORDS = 8
"""Words that a program marks."""


class Documents(NamedTuple):
    """What kernels take of N packed documents, beside tensors of one sequence of T positions.

    Attributes:
        marks: [5, T]: bits of first positions (BITS of them a word) and of last ones, and for each position where its
            document begins and ends, and its number.
        first: initial states, or their parts [N, C]; None where documents begin empty.
        last: last states, of the forward pass, or their gradients.
        dfirst: gradients of the initial states.
    """

    marks: Tensor
    first: Tensor | tuple[Tensor | None, ...] | None = None
    last: Tensor | tuple[Tensor | None, ...] | None = None
    dfirst: Tensor | tuple[Tensor, ...] | None = None


@triton.jit
def document_at(resets, positions):
    """Return the number of the document of each position, for ``resets``: cu_seqlens and the number of documents, N.

    Bisection takes log2 N loads. Numbers are in [0, N), whatever cu_seqlens [N + 1] holds.
    """
    cu_seqlens, documents = resets
    low = positions * 0
    high = low + documents - 1
    count = documents - 1
    while count > 0:
        middle = (low + high + 1) // 2
        is_later = tl.load(cu_seqlens + middle) > positions
        high = tl.where(is_later, tl.maximum(middle - 1, low), high)
        low = tl.where(is_later, low, middle)
        count = count // 2
    return low


@remember_launches
@triton.jit(do_not_specialize=["T", "N"])
def mark_kernel(bound_ptr, mark_ptr, T, N, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Mark WORDS * BITS positions. Grid: (ceil(T / (WORDS * BITS)),). Reads bounds [N + 1]; writes marks [5, T]."""
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bits = tl.arange(0, BITS)[None, :]
    t = words[:, None] * BITS + bits
    number = document_at((bound_ptr, N), t)
    start = tl.minimum(tl.maximum(tl.load(bound_ptr + number), 0), T).to(tl.int32)
    end = tl.minimum(tl.maximum(tl.load(bound_ptr + number + 1), 0), T).to(tl.int32)
    inside = t < T
    first = tl.sum(((start == t) & inside).to(tl.int32) << bits, axis=1)
    last = tl.sum(((end == t + 1) & inside).to(tl.int32) << bits, axis=1)
    size = tl.full((), T, tl.int64)
    tl.store(mark_ptr + words, first, mask=words * BITS < T)
    tl.store(mark_ptr + size + words, last, mask=words * BITS < T)
    tl.store(mark_ptr + 2 * size + t, start, mask=inside)
    tl.store(mark_ptr + 3 * size + t, end, mask=inside)
    tl.store(mark_ptr + 4 * size + t, number, mask=inside)


def mark_documents(cu_seqlens: Tensor, config: Any, seq_len: int) -> Tensor:
    """Return the marks [5, T] of documents with the bounds cu_seqlens [N + 1], see :class:`Documents`.

    Raise ValueError if rows of the launches' tiles, ``forward`` and ``backward``, are longer than a word.
    """
    for name in ("forward", "backward"):
        if (steps := getattr(config, name).block_i) > BITS:
            raise ValueError(f"config: {name}.block_i must be at most {BITS} with cu_seqlens, got {steps}")
    count = cu_seqlens.shape[0] - 1
    marks = torch.empty(5, seq_len, dtype=torch.int32, device=cu_seqlens.device)
    mark_kernel[(cdiv(seq_len, WORDS * BITS),)](
        cu_seqlens, marks, seq_len, count, WORDS=WORDS, BITS=BITS, num_warps=WORDS
    )
    return marks


@triton.jit
def load_marks(documents, T, t, left, BLOCK_I: tl.constexpr):
    """Return what rows of BLOCK_I steps from positions ``t`` [BLOCK_O] need to know of documents: bits of first and of
    last positions [BLOCK_O, 1], of those before the end, which is ``left`` steps away; the rest serves documents_at."""
    word = documents.marks + (t // 32)[:, None]
    bit = (t % 32)[:, None]
    steps = tl.minimum(tl.maximum(left, 0), BLOCK_I)
    own = tl.where(steps < 32, (1 << (steps % 32)) - 1, -1)
    first = (tl.load(word, mask=left > 0, other=0) >> bit) & own
    last = (tl.load(word + T, mask=left > 0, other=0) >> bit) & own
    return first, last, t[:, None], T, documents


@triton.jit
def is_marked(bits, n):
    """Return whether bit n is set."""
    return ((bits >> n) & 1) != 0


@triton.jit
def documents_at(rows, n, at, C):
    """Return the offsets in [N, C] of the documents of step n of the rows where ``at`` [BLOCK_O, 1]; else of the first
    one."""
    _, _, t, T, documents = rows
    number = tl.load(documents.marks + (4 * tl.full((), T, tl.int64) + t + n), mask=at, other=0)
    return number.to(tl.int64) * C
