"""The diagonal recurrence h_t = a_t h_{t-1} + b_t in plain torch, chunk by chunk; runs anywhere.

All chunks advance together, one step at a time, from a zero state; then the contribution of the state before each chunk
is added. If the chunk size covers the sequence, the recurrence is run directly. The gradient is a scan back in time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def scan(a: Tensor, b: Tensor, first: Tensor | None, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Run the recurrence on a, b [B, T, C] from first [B, C] (None: zero); return all h [B, T, C] and the last."""
    h = _Scan.apply(a, b, first, chunk_size, False)
    return h, h[:, -1].contiguous()


class _Scan(torch.autograd.Function):
    """All states h, with gradients of a, b and the first state; saves a, h and the first state.

    ``backward``: from the last step to the first. The gradients are a scan the other way, so they have gradients too.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, first: Tensor | None, chunk_size: int, backward: bool) -> Tensor:
        h = _scan(a, b, first, chunk_size, backward=backward)
        ctx.save_for_backward(a, h, first)
        ctx.options = chunk_size, backward
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        a, h, first = ctx.saved_tensors
        chunk_size, backward = ctx.options
        # w_t = a_t (dh_t + w_{t+1}) is the part of h_{t-1}'s gradient that comes from step t on.
        w = _Scan.apply(a, a * dh, None, chunk_size, not backward)
        g = _previous(w, None, not backward).add_(dh)
        da = _previous(h, first, backward).mul_(g)
        return da, g, None if first is None else w[:, 0], None, None


def _previous(x: Tensor, first: Tensor | None, backward: bool) -> Tensor:
    """Return x [B, T, C] one step earlier in a scan's order, ``first`` [B, C] (None: 0) at the first step."""
    first = torch.zeros_like(x[:, 0]) if first is None else first
    return torch.cat((x[:, 1:], first[:, None]) if backward else (first[:, None], x[:, :-1]), dim=1)


def _scan(a: Tensor, b: Tensor, first: Tensor | None, chunk_size: int, *, backward: bool = False) -> Tensor:
    """Return all states; ``backward`` runs from the last step to the first one."""
    batch, seq_len, channels = b.shape
    size = min(chunk_size, seq_len)
    whole = seq_len // size * size if size < seq_len else 0
    h = torch.empty_like(b)
    state = torch.zeros_like(b[:, 0]) if first is None else first
    if whole:
        shape = (batch, whole // size, size, channels)
        chunked = slice(seq_len - whole, seq_len) if backward else slice(0, whole)
        chunks_a, chunks_b = a[:, chunked].reshape(shape), b[:, chunked].reshape(shape)
        run, product = torch.empty_like(chunks_b), torch.empty_like(chunks_a)
        steps = _in_order(0, size, backward)
        run[:, :, steps[0]], product[:, :, steps[0]] = chunks_b[:, :, steps[0]], chunks_a[:, :, steps[0]]
        for past, t in pairwise(steps):
            torch.addcmul(chunks_b[:, :, t], chunks_a[:, :, t], run[:, :, past], out=run[:, :, t])
            torch.mul(chunks_a[:, :, t], product[:, :, past], out=product[:, :, t])
        before = torch.empty_like(run[:, :, 0])
        for n in _in_order(0, shape[1], backward):
            before[:, n] = state
            state = torch.addcmul(run[:, n, steps[-1]], product[:, n, steps[-1]], state)
        h[:, chunked] = run.addcmul_(product, before[:, :, None]).view(batch, whole, channels)
    rest = (0, seq_len - whole) if backward else (whole, seq_len)
    for t in _in_order(*rest, backward):
        state = torch.addcmul(b[:, t], a[:, t], state, out=h[:, t])
    return h


def _in_order(start: int, stop: int, backward: bool) -> range:
    return range(stop - 1, start - 1, -1) if backward else range(start, stop)
