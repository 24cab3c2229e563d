"""The delta rule's definition, one step at a time, and inputs.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), equation 5; Gated Delta Networks
(2025), equation 10; Kimi Team, Kimi Linear (2025), equation 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.arguments import compute_dtype
from ..common.inputs import Draw

EPS = 1e-6
"""Beside the squared norm of a query or key under the root, where these are normalised."""


def normalised(x: Tensor) -> Tensor:
    """Return x / sqrt(sum x^2 + 1e-6) over the last axis, in x's dtype, computed in float32 at least."""
    wide = x.to(compute_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence one step at a time; this is the definition.

    Args:
        q, k: [B, T, H, K]; float64 inputs are computed in float64, all others in float32.
        v: [B, T, H, V].
        g: log decays [B, T, H, K], or [B, T, H, 1] of a whole head.
        beta: [B, T, H].
        state: S before the first step [B, H, K, V].
        scale: factor on q.

    Returns:
        o [B, T, H, V] in v's dtype, and S after the last step.
    """
    dtype = compute_dtype(v.dtype)
    tensors = (x.to(dtype).unbind(1) for x in (scale * q.to(dtype), k, v, g.exp(), beta[..., None]))
    outputs = []
    for query, key, value, decay, rate in zip(*tensors, strict=True):
        state = decay[..., None] * state
        held = key[..., None, :] @ state
        state = state + key[..., None] * (rate[..., None] * (value[..., None, :] - held))
        outputs.append((query[..., None, :] @ state)[..., 0, :])
    return torch.stack(outputs, dim=1).to(v.dtype), state


def delta_net_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw q, k of unit norm, v ~ N(0, 1) and beta = sigma(N(0, 1)), as a layer's projections begin."""
    q, k = (F.normalize(draw.noise(*draw.keys), dim=-1).to(draw.dtype) for _ in range(2))
    beta = draw.round_gate(draw.noise(*draw.tokens).sigmoid())
    return {"q": q, "k": k, "v": draw.normal(*draw.values), "beta": beta}


def gated_delta_net_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw delta_net's inputs, and g = -A softplus(x + b) with x ~ N(0, 1).

    As Gated DeltaNet's layer begins, and Mamba-2's: A of a head uniform in [0, 16], softplus(b) of a head log-uniform
    in [0.001, 0.1].
    """
    return _decayed(draw, 1, 0.0)


def kda_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw delta_net's inputs, and g as Gated DeltaNet's, with x and b of each key channel and A from 1 on.

    As Kimi Delta Attention's layer begins.
    """
    return _decayed(draw, draw.sizes["head_dim_qk"], 1.0)


def _decayed(draw: Draw, columns: int, least: float) -> dict[str, Tensor]:
    *_, heads = draw.tokens
    rate = least + (16 - least) * draw.uniform(heads, 1)
    step = 0.001 * 100 ** draw.uniform(heads, columns)
    # The inverse of softplus.
    bias = step + torch.log(-torch.expm1(-step))
    g = draw.round_gate(-rate * F.softplus(draw.noise(*draw.tokens, columns) + bias))
    q, k, v, beta = delta_net_inputs(draw).values()
    return {"q": q, "k": k, "v": v, "g": g if columns > 1 else g[..., 0].contiguous(), "beta": beta}
