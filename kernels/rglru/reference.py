"""RG-LRU: definition, associative form and inputs.

    a_t = exp(-8 softplus(c) sigma(r_t))
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigma(i_t) x_t

Source: De et al., Griffin (2024), section 2.4, equations 1 to 4, where a = sigma(Lambda) and softplus(c) = -log a, so
c = -Lambda. r and i are pre-activations: the layer's two matrix products lie outside.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..diagonal import reference as engine
from ..scalar_decay.reference import compute_dtype


def elements(x: Tensor, r: Tensor, i: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and b = sqrt(1 - a^2) sigma(i) x [B, T, C], in float32 (float64 beside float64 inputs).

    softplus(c) is -log sigma(-c), exact for c of any size and either sign; torch's own turns linear, or overflows.
    1 - a^2 is -expm1(2 log a), which keeps its bits for a -> 1. Where a gate is so closed that a is 1, b is 0, and so
    is its gradient: the limit of log(a) / sqrt(1 - a^2).
    """
    dtype = compute_dtype(x.dtype)
    log_a = 8.0 * logsigmoid(-c.to(dtype)) * torch.sigmoid(r.to(dtype))
    square = -torch.expm1(2.0 * log_a)
    is_open = square > 0
    root = torch.where(is_open, torch.where(is_open, square, 1.0).sqrt(), 0.0)
    return log_a.exp(), root * (torch.sigmoid(i.to(dtype)) * x.to(dtype))


def recurrent(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    c: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run RG-LRU one step at a time.

    Args:
        x: [B, T, C]; float64 is computed in float64, all else in float32.
        r, i: pre-activations of the recurrence and input gates [B, T, C].
        c: [C].
        initial_state: h_0 [B, C]; None is zero.
        return_last_state: also return h_T.
        state_dtype: taken for the common signature; states have the dtype of the computation.

    Returns:
        h [B, T, C] in x's dtype, or (h, h_T).
    """
    h, last = engine.recurrent(*elements(x, r, i, c), initial_state)
    return (h.to(x.dtype), last) if return_last_state else h.to(x.dtype)


def parallel(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    c: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute RG-LRU as one associative scan over time; arguments and result as in :func:`recurrent`."""
    h, last = engine.associative(*elements(x, r, i, c), initial_state)
    return (h.to(x.dtype), last) if return_last_state else h.to(x.dtype)


def make_inputs(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> dict[str, Tensor]:
    """Draw x and the pre-activations r, i ~ N(0, 1), as a layer's initial weights make them, and c as Griffin does.

    c is such that a, behind an open gate, is uniform in [0.9, 0.999] over the channels. It is float32 (float64 beside
    float64 inputs), as are parameters in mixed precision, with values that the inputs' dtype holds too.
    """
    generator = torch.Generator(device).manual_seed(seed)
    draw_dtype = torch.float64 if generator.device.type == "cpu" else torch.float32
    shape = tuple(sizes[name] for name in ("batch", "seq_len", "channels"))
    x, r, i = (torch.randn(shape, generator=generator, dtype=draw_dtype, device=device).to(dtype) for _ in range(3))
    a = 0.9 + 0.099 * torch.rand(shape[2], generator=generator, dtype=draw_dtype, device=device)
    c = torch.log(torch.expm1(-a.log() / 8.0))
    return {"x": x, "r": r, "i": i, "c": c.to(dtype).to(compute_dtype(dtype))}
