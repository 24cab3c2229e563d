"""WKV in plain torch, chunk by chunk; runs anywhere.

The sum of every chunk is taken at once, then the states between chunks, then all chunks run through their tokens side
by side, one step at a time. The gradients of the states are a diagonal recurrence, whose coefficients are the weights
that the states ran through; backward.py has the formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..diagonal.chunkwise import _scan, default_chunk_size
from ..scalar_decay.reference import compute_dtype
from ..scalar_decay.validate import check_chunk_size
from .reference import EMPTY, State, add, first_state
from .validate import check_wkv

MAX_RATIOS = {torch.float32: 40.0, torch.float64: 200.0}
"""Logarithm of how much heavier than a token its past can be: the token is then far below the dtype's epsilon."""

USUAL_DEN = (1e-6, 1e6)
"""Denominators of a given state that are left as they are."""


def chunkwise(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: State | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Compute WKV chunk by chunk.

        y_t = (num_{t-1} + e^(u + k_t) v_t) / (den_{t-1} + e^(u + k_t))

    Args:
        k, v: [B, T, C], contiguous; float64, float32, float16 or bfloat16.
        w: [C], positive, float32 (float64 beside float64 inputs); a step decays the past by e^-w.
        u: [C], bonus of the current token, as w.
        chunk_size: at least 1, need not divide T; None chooses one.
        state_dtype: float32; float64 inputs hold float64 states.
        initial_state: (num, den, max) [B, C], float32 (float64 beside float64 inputs); None has seen nothing. max
            carries no gradient.
        return_last_state: also return (num, den, max) after the last token.

    Returns:
        y [B, T, C] in v's dtype, or (y, (num, den, max)); differentiable once, in all tensors but max.

    Raises:
        ValueError: on a shape, dtype, device or layout that does not fit; the message names the argument.

    Source: Peng et al., RWKV (2023), equations 16 and 22 to 26.
    """
    check_wkv(k, v, w, u, initial_state, state_dtype)
    chunk_size = default_chunk_size(k) if chunk_size is None else chunk_size
    check_chunk_size(chunk_size)
    dtype = compute_dtype(k.dtype)
    keys, values = k.to(dtype), v.to(dtype)
    seq_len = k.shape[1]
    whole = seq_len // chunk_size * chunk_size
    state, ys = first_state(k, initial_state), []
    for start, stop in ((0, whole), (whole, seq_len)):
        if start < stop:
            part = slice(start, stop)
            y, *last = _Chunkwise.apply(keys[:, part], values[:, part], w, u, *state, min(chunk_size, stop - start))
            state = (last[0], last[1], last[2])
            ys.append(y)
    y = (torch.cat(ys, dim=1) if len(ys) > 1 else ys[0]).to(v.dtype)
    return (y, state) if return_last_state else y


class _Chunkwise(torch.autograd.Function):
    """y and the last state, with gradients of k, v, w, u and the first state; keeps a state a chunk."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, w: Tensor, u: Tensor, num: Tensor, den: Tensor, top: Tensor, size: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values = _chunks(k, size), _chunks(v, size)
        steps = torch.arange(size, dtype=k.dtype, device=k.device)[:, None]
        start = top
        sums = _sum(keys - (size - 1 - steps) * w, values)
        # Where the denominator is of order 1 a state's exponent says how heavy it is.
        scale = torch.where((den > 0) & ((den < USUAL_DEN[0]) | (den > USUAL_DEN[1])), den, 1.0)
        first = (num / scale, den / scale, torch.where(den > 0, top + scale.log(), EMPTY))
        states, last = _run_through(first, sums, size * w)
        y = torch.empty_like(keys)
        num, den, top = states
        for t in range(size):
            key, value = keys[:, :, t], values[:, :, t]
            past = (top - key).sub_(u).clamp_(max=MAX_RATIOS[k.dtype]).exp_()
            numerator, denominator = torch.addcmul(value, past, num), past.mul_(den).add_(1)
            torch.div(numerator, denominator, out=y[:, :, t])
            num, den, top, _ = _advance(num, den, top, key, value, w)
        ctx.save_for_backward(k, v, w, u, *states, last[2], start)
        ctx.size = size
        ctx.mark_non_differentiable(last[2])
        ctx.set_materialize_grads(False)
        return y.flatten(1, 2), *last

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dnum: Tensor | None, dden: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        k, v, w, u, num, den, top, end, start = ctx.saved_tensors
        size = ctx.size
        dy = torch.zeros_like(k) if dy is None else dy
        keys, values = _chunks(k, size), _chunks(v, size)
        first = top[:, 0]
        behind = torch.cat((top[:, 1:], end[:, None]), dim=1)
        # All relative to the exponents of the states: none of the weights exceeds 1, and a state's gradients run
        # backwards through those that it ran forward through.
        past, now, old, new, mean, inverse, nums, dens = (torch.empty_like(keys) for _ in range(8))
        for t in range(size):
            key, value = keys[:, :, t], values[:, :, t]
            nums[:, :, t], dens[:, :, t] = num, den
            numerator, denominator, exponent = add(num, den, top, value, torch.ones_like(value), key + u)
            torch.div(numerator, denominator, out=mean[:, :, t])
            torch.reciprocal(denominator, out=inverse[:, :, t])
            torch.exp(top - exponent, out=past[:, :, t])
            torch.exp(key + u - exponent, out=now[:, :, t])
            num, den, top, old[:, :, t] = _advance(num, den, top, key, value, w)
            torch.exp(key - top, out=new[:, :, t])
        old[:, :, -1] *= torch.exp(top - behind)
        new[:, :, -1] *= torch.exp(top - behind)
        past, now, old, new, mean, inverse, nums, dens = (
            x.flatten(1, 2) for x in (past, now, old, new, mean, inverse, nums, dens)
        )
        p = inverse.mul_(dy)
        # Zero where the output is the token's own value, which p v - p y need not be.
        d_token = (v - mean).mul_(p).mul_(now)
        r = mean.mul_(p).neg_()
        before_a = _scan(old, past * p, dnum, size, backward=True)
        before_b = _scan(old, past.mul_(r), dden, size, backward=True)
        worth = torch.exp(start - first)
        d_first = before_a[:, 0] * worth, before_b[:, 0] * worth
        a, b = _after(before_a, dnum), _after(before_b, dden)
        dw = -(old * torch.addcmul(a * nums, b, dens)).sum((0, 1))
        dk = torch.addcmul(b, a, v).mul_(new).add_(d_token)
        dv = torch.addcmul(a.mul_(new), now, p)
        return dk, dv, dw, d_token.sum((0, 1)), *d_first, None, None


def _after(before: Tensor, last: Tensor | None) -> Tensor:
    """Return the gradients of the states after every step, from those of the states before them and of the last."""
    return torch.cat((before[:, 1:], (torch.zeros_like(before[:, 0]) if last is None else last)[:, None]), dim=1)


def _chunks(x: Tensor, size: int) -> Tensor:
    """Return x [B, T, C] as [B, N, size, C]."""
    return x.reshape(x.shape[0], -1, size, x.shape[2])


def _sum(log_weight: Tensor, v: Tensor) -> State:
    """Return the sums over a chunk of e^log_weight v and e^log_weight, and their max [B, N, C]."""
    top = log_weight.amax(2).clamp_(min=EMPTY)
    weight = (log_weight - top[:, :, None]).exp_()
    return (weight * v).sum(2), weight.sum(2), top


def _run_through(first: State, sums: State, decay: Tensor) -> tuple[State, State]:
    """Return the states before all chunks [B, N, C] and the state behind them [B, C]."""
    states = tuple(torch.empty_like(x) for x in sums)
    state = first
    for n in range(sums[0].shape[1]):
        for x, part in zip(states, state, strict=True):
            x[:, n] = part
        state = add(state[0], state[1], state[2] - decay, *(x[:, n] for x in sums))
    return (states[0], states[1], states[2]), state


def _advance(
    num: Tensor, den: Tensor, top: Tensor, k: Tensor, v: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return num, den and max after one more token, and what the past was multiplied by."""
    decayed = top - w
    top = torch.maximum(decayed, k)
    old, new = decayed.sub_(top).exp_(), (k - top).exp_()
    return (new * v).addcmul_(old, num), new.addcmul(old, den), top, old
