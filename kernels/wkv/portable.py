"""WKV in plain torch, chunk by chunk; runs anywhere.

The sums of all chunks are computed at once, then the states between chunks, and then all chunks advance together, one
step at a time. The gradients of the states are a diagonal recurrence backwards in time; backward.py has the formulas.
Gradients that are to be differentiated again are those of the definition: one step at a time, with all steps kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..common.arguments import compute_dtype
from ..common.second_derivatives import differentiable_gradients
from .reference import EMPTY, State, add, first_state, recurrent

MIN_EXPONENTS = {torch.float32: -80.0, torch.float64: -690.0}
"""Lower bounds of logarithms of weights: negligible next to 1, but not denormal, since processors are slow at those."""

MAX_RATIOS = {torch.float32: 40.0, torch.float64: 200.0}
"""Upper bounds of log(weight of the past / weight of the token): beyond, the token is below the dtype's epsilon."""

RUN = 8
"""Steps of a run. A slow rate lowers the exponent once a run, for all of its steps."""

SLOW_RATE = 0.25
"""Rates w below this count as slow. Subtracting so small a w from a large exponent at every step would round in the
same direction each time, and since many steps contribute to a state, the errors would add up."""

USUAL_DEN = (1e-6, 1e6)
"""An initial state whose den is within these bounds is not rescaled."""


def chunkwise(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: State | None, chunk_size: int
) -> tuple[Tensor, State]:
    """Compute y [B, T, C] and the last state of checked tensors, chunk by chunk."""
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
    return (torch.cat(ys, dim=1) if len(ys) > 1 else ys[0]).to(v.dtype), state


class _Chunkwise(torch.autograd.Function):
    """y and the last state, with gradients of k, v, w, u and the first state; saves one state per chunk."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, w: Tensor, u: Tensor, num: Tensor, den: Tensor, top: Tensor, size: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values = _chunks(k, size), _chunks(v, size)
        steps = torch.arange(size, dtype=k.dtype, device=k.device)[:, None]
        initial = num, den, top
        sums = _sum(keys - (size - 1 - steps) * w, values)
        # Rescale the first state so that den is of order 1, since MAX_RATIOS bounds the weight of the past by its max.
        scale = torch.where((den > 0) & ((den < USUAL_DEN[0]) | (den > USUAL_DEN[1])), den, 1.0)
        first = (num / scale, den / scale, torch.where(den > 0, top + scale.log(), EMPTY))
        states, last = _run_through(first, sums, size * w)
        y = torch.empty_like(keys)
        rates = _rates(w)
        num, den, top = states
        for t, n, key, value in _tokens(keys, values, rates):
            past = _exp_((top - key).sub_(u).clamp_(max=MAX_RATIOS[k.dtype]))
            numerator, denominator = torch.addcmul(value, past, num), past.mul_(den).add_(1)
            torch.div(numerator, denominator, out=y[:, :, t])
            num, den, top, _, _ = _advance(num, den, top, key, value, rates, (n + 1) * _ends_run(t, size))
        ctx.save_for_backward(k, v, w, u, *initial, *states, last[2])
        ctx.size = size
        ctx.mark_non_differentiable(last[2])
        ctx.set_materialize_grads(False)
        return y.flatten(1, 2), *last

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dnum: Tensor | None, dden: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        k, v, w, u, *initial, num, den, top, end = ctx.saved_tensors
        if torch.is_grad_enabled():
            given, needs = (k, v, w, u, *initial), ctx.needs_input_grad[:7]
            return *differentiable_gradients(partial(_defined, end), given, needs, (dy, dnum, dden)), None
        start, size = initial[2], ctx.size
        dy = torch.zeros_like(k) if dy is None else dy
        keys, values, dys = _chunks(k, size), _chunks(v, size), _chunks(dy, size)
        behind, first = torch.cat((top[:, 1:], end[:, None]), dim=1), top[:, 0]
        rates = _rates(w)
        # Gradients (a, b) of a state's num and den are relative to the exponent of that state, so all weights are at
        # most 1 and are the same as those of the states in the forward pass. The first loop recomputes the states and,
        # for each chunk, the factor ``left`` from gradients after it to those before it, and the sums that it adds.
        left, sum_a, sum_b = torch.ones_like(num), torch.zeros_like(num), torch.zeros_like(num)
        steps = []
        for t, n, key, value in _tokens(keys, values, rates):
            token = key + u
            exponent = torch.maximum(top, token)
            past, now = _exp_(top - exponent), _exp_(token.sub_(exponent))
            inverse = torch.addcmul(now, past, den).reciprocal_()
            mean = torch.addcmul(past * num, now, value).mul_(inverse)
            p = inverse.mul_(dys[:, :, t])
            # Exactly 0 if the output is v, which p v - p y need not be.
            d_token = (value - mean).mul_(p).mul_(now)
            d_value, d_num = now.mul_(p), past.mul_(p)
            d_den = mean.mul_(d_num).neg_()
            before = num, den
            num, den, top, old, new = _advance(num, den, top, key, value, rates, (n + 1) * _ends_run(t, size))
            if t == size - 1:
                change = torch.exp(top - behind)
                old, new = old * change, new * change
            sum_a.addcmul_(left, d_num)
            sum_b.addcmul_(left, d_den)
            left.mul_(old)
            steps.append((d_token, d_value, d_num, d_den, *before, old, new))
        a, b = (torch.zeros_like(end) if x is None else x for x in (dnum, dden))
        after_a, after_b = torch.empty_like(left), torch.empty_like(left)
        for n in range(keys.shape[1] - 1, -1, -1):
            after_a[:, n], after_b[:, n] = a, b
            a, b = torch.addcmul(sum_a[:, n], left[:, n], a), torch.addcmul(sum_b[:, n], left[:, n], b)
        worth = torch.exp(start - first)
        d_first = a * worth, b * worth
        a, b = after_a, after_b
        dk, dv = torch.empty_like(keys), torch.empty_like(keys)
        dw, du = torch.zeros_like(a), torch.zeros_like(a)
        for t in range(size - 1, -1, -1):
            d_token, d_value, d_num, d_den, num, den, old, new = steps.pop()
            dw.addcmul_(old, torch.addcmul(num * a, den, b), value=-1)
            du += d_token
            torch.addcmul(d_value, new, a, out=dv[:, :, t])
            torch.addcmul(d_token, new, torch.addcmul(b, a, values[:, :, t]), out=dk[:, :, t])
            a, b = d_num.addcmul_(old, a), d_den.addcmul_(old, b)
        return dk.flatten(1, 2), dv.flatten(1, 2), dw.sum((0, 1)), du.sum((0, 1)), *d_first, None, None


def _defined(end: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *initial: Tensor) -> tuple[Tensor, ...]:
    """Return y and, relative to the max ``end``, the last num and den, by the definition."""
    y, (num, den, top) = recurrent(k, v, w, u, initial_state=initial, return_last_state=True)
    change = torch.exp(top - end)
    return y, num * change, den * change


def _chunks(x: Tensor, size: int) -> Tensor:
    """Return x [B, T, C] as [B, N, size, C]."""
    return x.reshape(x.shape[0], -1, size, x.shape[2])


def _sum(log_weight: Tensor, v: Tensor) -> State:
    """Return the sums over a chunk of e^log_weight v and e^log_weight, and their max [B, N, C]."""
    top = log_weight.amax(2).clamp_(min=EMPTY)
    weight = _exp_(log_weight - top[:, :, None])
    return (weight * v).sum(2), weight.sum(2), top


def _exp_(x: Tensor) -> Tensor:
    """Replace x by e^x, bounded from below by MIN_EXPONENTS, and return it."""
    return x.clamp_(min=MIN_EXPONENTS[x.dtype]).exp_()


def _run_through(first: State, sums: State, decay: Tensor) -> tuple[State, State]:
    """Return the states before all chunks [B, N, C] and after the last [B, C]; a chunk decays them by e^-decay."""
    states = tuple(torch.empty_like(x) for x in sums)
    state = first
    for n in range(sums[0].shape[1]):
        for x, part in zip(states, state, strict=True):
            x[:, n] = part
        state = add(state[0], state[1], state[2] - decay, *(x[:, n] for x in sums))
    return (states[0], states[1], states[2]), state


def _rates(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return w as a slow and a fast rate, one of which is zero in each channel."""
    slow = torch.where(w < SLOW_RATE, w, 0.0)
    return slow, w - slow


def _tokens(keys: Tensor, values: Tensor, rates: tuple[Tensor, Tensor]) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield (t, its number n in its run, keys + n slow, values) for every step t of all chunks [B, N, size, C].

    The exponent of the state before step n is max - n slow, but max is lowered only at the end of a run (SLOW_RATE).
    Only differences between max and keys matter, so keys are raised instead.
    """
    for t in range(keys.shape[2]):
        n = t % RUN
        yield t, n, keys[:, :, t] + n * rates[0], values[:, :, t]


def _ends_run(t: int, size: int) -> bool:
    return t % RUN == RUN - 1 or t == size - 1


def _advance(
    num: Tensor, den: Tensor, top: Tensor, k: Tensor, v: Tensor, rates: tuple[Tensor, Tensor], run: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return num, den and max after one more token, and the weights of past and token.

    ``run``: steps by which to lower max, those of a run if the token ends one, else 0.
    """
    slow, fast = rates
    k, top = k + slow, top - fast
    after = torch.maximum(top, k)
    old, new = _exp_(top.sub_(after)), _exp_(k.sub_(after))
    num, den = (new * v).addcmul_(old, num), new.addcmul(old, den)
    return num, den, after - run * slow if run else after, old, new
