"""The diagonal recurrence h_t = a_t h_{t-1} + b_t in plain torch, chunk by chunk; runs anywhere.

All chunks advance together, one step at a time, from a zero state, and then take the states before them; a chunk of
about sqrt(T) steps makes both loops short. The gradient is the same scan backwards in time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..scalar_decay.config import next_power_of_two


def default_chunk_size(seq_len: int) -> int:
    """Return the power of two next to sqrt(seq_len), at least 16."""
    return max(16, next_power_of_two(math.isqrt(seq_len)))


def scan(a: Tensor, b: Tensor, first: Tensor | None, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Run the recurrence on a, b [B, T, C] from first [B, C] (None: zero); return all h [B, T, C] and the last."""
    h = _Scan.apply(a, b, first, chunk_size)
    return h, h[:, -1].contiguous()


class _Scan(torch.autograd.Function):
    """All states, with gradients of a, b and the first state; keeps a and h."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, first: Tensor | None, chunk_size: int) -> Tensor:
        h = _scan(a, b, first, chunk_size)
        ctx.save_for_backward(a, h, first)
        ctx.chunk_size = chunk_size
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        a, h, first = ctx.saved_tensors
        # w_t = a_t (dh_t + w_{t+1}) is what step t passes to the step before.
        w = _scan(a.flip(1), (a * dh).flip(1), None, ctx.chunk_size).flip(1)
        g = dh.clone()
        g[:, :-1] += w[:, 1:]
        da = torch.empty_like(a)
        torch.mul(g[:, 1:], h[:, :-1], out=da[:, 1:])
        da[:, 0] = 0 if first is None else g[:, 0] * first
        return da, g, None if first is None else w[:, 0], None


def _scan(a: Tensor, b: Tensor, first: Tensor | None, chunk_size: int) -> Tensor:
    batch, seq_len, channels = b.shape
    size = min(chunk_size, seq_len)
    whole = seq_len // size * size
    h = torch.empty_like(b)
    state = torch.zeros_like(b[:, 0]) if first is None else first
    if whole:
        shape = (batch, whole // size, size, channels)
        run = torch.empty(shape, dtype=b.dtype, device=b.device)
        product = torch.empty_like(run)
        chunks_a, chunks_b = a[:, :whole].reshape(shape), b[:, :whole].reshape(shape)
        run[:, :, 0], product[:, :, 0] = chunks_b[:, :, 0], chunks_a[:, :, 0]
        for t in range(1, size):
            torch.addcmul(chunks_b[:, :, t], chunks_a[:, :, t], run[:, :, t - 1], out=run[:, :, t])
            torch.mul(chunks_a[:, :, t], product[:, :, t - 1], out=product[:, :, t])
        before = []
        for n in range(shape[1]):
            before.append(state)
            state = torch.addcmul(run[:, n, -1], product[:, n, -1], state)
        run.addcmul_(product, torch.stack(before, dim=1)[:, :, None])
        h[:, :whole] = run.view(batch, whole, channels)
    for t in range(whole, seq_len):
        state = torch.addcmul(b[:, t], a[:, t], state)
        h[:, t] = state
    return h
