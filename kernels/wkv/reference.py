"""RWKV-4's WKV: definition, associative form and inputs.

    y_t = (num_{t-1} + e^(u + k_t) v_t) / (den_{t-1} + e^(u + k_t))
    num_t = e^-w num_{t-1} + e^k_t v_t        den_t = e^-w den_{t-1} + e^k_t

A state (num, den, max) stands for num e^max and den e^max, so that no exponential overflows; implementations may choose
max, which carries no gradient. Before the first token the state is (0, 0, -1e38), and y_1 = v_1. No factor e^(t w),
which grows with the position t, is used, so precision does not depend on T.

Source: Peng et al., RWKV: Reinventing RNNs for the Transformer Era (2023), equations 16 and 22 to 26, with w the
positive rate; "Faster LLMs: Improving RWKV with Parallel Cumulative Sums" for the associative form.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..common.arguments import compute_dtype
from ..common.documents import each_document
from ..common.inputs import Draw

TORCHS_OWN = "torch._higher_order_ops.associative_scan"

EMPTY = -1e38
"""The max of the state before the first token; finite, so that differences are finite too."""

State = tuple[Tensor, Tensor, Tensor]
"""num, den, max [B, C]."""


def first_state(k: Tensor, initial_state: State | None, cu_seqlens: Tensor | None = None) -> State:
    """Return the state before the first step of k [B, T, C], or of each of N packed documents [N, C], in the dtype of
    the computation; max has no gradient."""
    dtype = compute_dtype(k.dtype)
    if initial_state is None:
        count = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        zero = torch.zeros(count, k.shape[2], dtype=dtype, device=k.device)
        return zero, zero, torch.full_like(zero, EMPTY)
    num, den, top = (x.to(dtype) for x in initial_state)
    return num, den, top.detach()


def run_documents(
    form: Callable[[Tensor, Tensor, State | None], tuple[Tensor, State]],
    k: Tensor,
    v: Tensor,
    first: State | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, State]:
    """Run a form on a batch or, given their bounds, on one packed document after the other."""
    if cu_seqlens is None:
        return form(k, v, first)
    y, (num, den, top) = each_document(form, cu_seqlens, (k, v), first_state(k, first, cu_seqlens))
    return y, (num, den, top)


def add(num1: Tensor, den1: Tensor, max1: Tensor, num2: Tensor, den2: Tensor, max2: Tensor) -> State:
    """Return the sum of two states at the same position."""
    top = torch.maximum(max1, max2).detach()
    first, second = torch.exp(max1 - top), torch.exp(max2 - top)
    return first * num1 + second * num2, first * den1 + second * den2, top


def outputs(num: Tensor, den: Tensor, top: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """Return y from the states before the tokens k, v; without a past y is v, even of a token left out (k = -inf)."""
    num, den, _ = add(num, den, top, v, torch.ones_like(v), (u + k).clamp(min=EMPTY))
    return num / den


def recurrent(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    initial_state: State | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, State]:
    """Run WKV one step at a time.

    Args:
        k, v: [B, T, C]; float64 is computed in float64, all else in float32.
        w: [C], positive; a step decays the past by e^-w.
        u: [C], bonus of the current token.
        initial_state: (num, den, max) [B, C]; None is the state before the first token. max carries no gradient.
        return_last_state: also return (num, den, max) after the last step.
        state_dtype: ignored, there because all operations share one signature.
        cu_seqlens: bounds of N packed documents [N + 1] in a batch of 1, whose states are [N, C].

    Returns:
        y [B, T, C] in v's dtype, or (y, (num, den, max)).
    """
    y, state = run_documents(partial(_recurrent, w, u), k, v, initial_state, cu_seqlens)
    return (y, state) if return_last_state else y


def _recurrent(w: Tensor, u: Tensor, k: Tensor, v: Tensor, initial_state: State | None) -> tuple[Tensor, State]:
    dtype = compute_dtype(v.dtype)
    keys, values, rate, bonus = (x.to(dtype) for x in (k, v, w, u))
    num, den, top = first_state(k, initial_state)
    ys = []
    for key, value in zip(keys.unbind(1), values.unbind(1), strict=True):
        ys.append(outputs(num, den, top, key, value, bonus))
        num, den, top = add(num, den, top - rate, value, torch.ones_like(value), key)
    return torch.stack(ys, dim=1).to(v.dtype), (num, den, top)


def associative(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: State | None, *, torchs_own: bool = False
) -> tuple[Tensor, State]:
    """Compute y [B, T, C] and the last state as one associative scan over time.

    Pass n = 0, 1, ... of ceil(log2 T) adds to the sum of the 2^n tokens up to each position that of the 2^n tokens
    before them, decayed. Source: Hillis and Steele, "Data parallel algorithms" (1986).

    Args:
        torchs_own: use torch's own associative_scan instead, a prototype higher-order operator made for torch.compile;
            eager mode runs it in log2(T) passes over whole tensors, forward and backward.
    """
    dtype = compute_dtype(v.dtype)
    keys, values, rate, bonus = (x.to(dtype) for x in (k, v, w, u))
    sums = tokens(keys, values)
    if torchs_own:
        elements = (rate.expand_as(keys).contiguous(), *sums)
        _, *summed = importlib.import_module(TORCHS_OWN).associative_scan(
            _combine, elements, dim=1, combine_mode="generic"
        )
        sums = (summed[0], summed[1], summed[2])
    distance = 1
    while not torchs_own and distance < keys.shape[1]:
        earlier = (sums[0][:, :-distance], sums[1][:, :-distance], sums[2][:, :-distance] - distance * rate)
        later = add(*earlier, *(x[:, distance:] for x in sums))
        num, den, top = (torch.cat((x[:, :distance], y), dim=1) for x, y in zip(sums, later, strict=True))
        sums = (num, den, top)
        distance *= 2
    y, last = finish(first_state(k, initial_state), sums, keys, values, rate, bonus)
    return y.to(v.dtype), last


def _combine(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Join two neighbouring runs of tokens, each (log decay over the run, num, den, max)."""
    (decay1, num1, den1, top1), (decay2, num2, den2, top2) = earlier, later
    return decay1 + decay2, *add(num1, den1, top1 - decay2, num2, den2, top2)


def tokens(k: Tensor, v: Tensor) -> State:
    """Return the state (v, 1, k) that each token adds; k's gradient goes through den = e^(k - max), not through max."""
    top = k.detach().clamp(min=EMPTY)
    den = torch.exp(k.clamp(min=EMPTY) - top)
    return den * v, den, top


def finish(first: State, sums: State, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, State]:
    """Return y and the last state from ``first``, the state before all tokens, and their inclusive sums [B, T, C]."""
    steps = torch.arange(1, k.shape[1] + 1, dtype=k.dtype, device=k.device)[:, None]
    num, den, top = (x[:, None] for x in first)
    states = add(num, den, top - steps * w, *sums)
    before = (torch.cat((x[:, None], y[:, :-1]), dim=1) for x, y in zip(first, states, strict=True))
    num, den, top = before
    y = outputs(num, den, top, k, v, u)
    num, den, top = (x[:, -1].contiguous() for x in states)
    return y, (num, den, top)


def wkv4_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw k, v ~ N(0, 1) and, as a layer's initial weights, w = exp(-5 ... 3) and u = log 0.3 + (-0.5, 0, 0.5).

    w and u are float32 (float64 beside float64 inputs). Source: Peng et al., RWKV (2023), appendix on initialisation.
    """
    k, v = (draw.normal(*draw.channels) for _ in range(2))
    channels = draw.sizes["channels"]
    channel = torch.arange(channels, dtype=draw.draw_dtype, device=draw.device)
    jitter = draw.noise(2, channels)
    log_rate = -5.0 + 8.0 * (channel / max(channels - 1, 1)) ** 0.7 + 0.1 * jitter[0]
    u = -1.2 + 0.5 * ((channel + 1) % 3 - 1) + 0.1 * jitter[1]
    return {"k": k, "v": v, "w": log_rate.exp().to(draw.gate_dtype), "u": u.to(draw.gate_dtype)}
