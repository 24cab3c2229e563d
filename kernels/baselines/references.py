"""Plain torch references and inputs of the operations in :mod:`.operations`.

Each ``*_recurrent`` is the definition, one step at a time. All of them compute in float64 for float64 inputs and in
float32 for any other dtype, and return the output in the dtype of the values. They are differentiable.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.arguments import compute_dtype
from ..common.inputs import Draw


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Compute causal softmax attention from the full [T, T] score matrix.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        scale: factor on the scores; K^-1/2 by default.

    Returns:
        h [B, T, H, V].
    """
    dtype = compute_dtype(v.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    scores = scale * torch.einsum("bthk,bshk->bhts", q.to(dtype), k.to(dtype))
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, v.to(dtype)).to(v.dtype)


def attention_recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, initial_state: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Compute causal softmax attention one query at a time over the keys seen so far (as in decoding).

    Args, Returns: as for :func:`attention`.
        initial_state: a cache of keys [B, S, H, K] and values [B, S, H, V] whose last T tokens k and v stand for. It is
            converted one sequence at a time, for it may fill the memory.
    """
    if initial_state is not None:
        past = [cache[:, : cache.shape[1] - q.shape[1]] for cache in initial_state]
        sequences = zip(*(x.split(1) for x in (q, k, v, *past)), strict=True)
        return torch.cat([_attend(scale, *each) for each in sequences])
    return _attend(scale, q, k, v, k[:, :0], v[:, :0])


def _attend(scale: float | None, q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
    dtype, past = compute_dtype(v.dtype), past_k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    queries = q.to(dtype) * scale
    keys, values = (torch.cat((cached.to(dtype), x.to(dtype)), dim=1) for cached, x in ((past_k, k), (past_v, v)))
    outputs = []
    for t in range(q.shape[1]):
        weights = torch.einsum("bhk,bshk->bhs", queries[:, t], keys[:, : past + t + 1]).softmax(-1)
        outputs.append(torch.einsum("bhs,bshv->bhv", weights, values[:, : past + t + 1]))
    return torch.stack(outputs, dim=1).to(v.dtype)


def gla_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute gated linear attention one step at a time.

        S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   h_t = scale S_t^T q_t

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        g: [B, T, H, K], log decay <= 0.
        scale: factor on q; K^-1/2 by default.
        initial_state: S_0 [B, H, K, V]; None is zero.
        return_last_state: also return S_T.

    Returns:
        h [B, T, H, V], or (h, S_T).

    Source: Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, equation 3.
    """
    dtype = compute_dtype(v.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    queries, keys, values, decays = q.to(dtype) * scale, k.to(dtype), v.to(dtype), g.to(dtype).exp()
    state = keys.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(q.shape[1]):
        state = decays[:, t, :, :, None] * state + keys[:, t, :, :, None] * values[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", queries[:, t], state))
    h = torch.stack(outputs, dim=1).to(v.dtype)
    return (h, state) if return_last_state else h


def selective_scan_recurrent(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Mamba's selective scan one step at a time.

        x_t = exp(delta_t A) x_{t-1} + delta_t B_t u_t,   y_t = C_t . x_t      for every channel

    Args:
        u: [B, T, D], inputs.
        delta: [B, T, D], step sizes > 0.
        A: [D, N] < 0.
        B, C: [B, T, N].
        initial_state: x_0 [B, D, N]; None is zero.
        return_last_state: also return x_T.

    Returns:
        y [B, T, D], or (y, x_T).

    Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, algorithm 2; the input is
    discretised as delta B, as the authors' kernel does.
    """
    dtype = compute_dtype(u.dtype)
    inputs, steps, rates, b, c = (x.to(dtype) for x in (u, delta, A, B, C))
    state = inputs.new_zeros(u.shape[0], *A.shape) if initial_state is None else initial_state
    outputs = []
    for t in range(u.shape[1]):
        decay = torch.exp(steps[:, t, :, None] * rates)
        state = decay * state + (steps[:, t] * inputs[:, t])[:, :, None] * b[:, t, None, :]
        outputs.append(torch.einsum("bdn,bn->bd", state, c[:, t]))
    y = torch.stack(outputs, dim=1).to(u.dtype)
    return (y, state) if return_last_state else y


def make_attention_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw q, k [B, T, H, K] and v [B, T, H, V] from N(0, 1)."""
    return draw.qkv()


def make_attention_cache(draw: Draw) -> tuple[Tensor, Tensor]:
    """Draw keys [B, S, H, K] and values [B, S, H, V] from N(0, 1), a sequence at a time: they may fill the memory."""
    keys, values = (torch.empty(shape, dtype=draw.dtype, device=draw.device) for shape in (draw.keys, draw.values))
    for sequence in (*keys, *values):
        sequence.copy_(draw.noise(*sequence.shape))
    return keys, values


def make_gla_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw attention's inputs and g [B, T, H, K] = log sigma(N(0, 1)) / 16 in the inputs' dtype.

    The temperature 16 and the gate in the dtype of the activations are those of the authors' layer.
    """
    return {**draw.qkv(), "g": (F.logsigmoid(draw.noise(*draw.keys)) / 16.0).to(draw.dtype)}


def make_selective_scan_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw the inputs of a freshly initialised Mamba layer.

    u [B, T, D], B and C [B, T, N] from N(0, 1); delta [B, T, D] log-uniform in [0.001, 0.1]; A [D, N] = -(1, ..., N)
    (S4D-real) in float32, all others in the inputs' dtype: what the authors' kernel asks for. D is ``channels``, N
    ``head_dim_qk``.
    """
    batch, seq_len, channels = draw.channels
    state = draw.sizes["head_dim_qk"]
    delta = (0.001 * 100 ** draw.uniform(*draw.channels)).to(draw.dtype)
    rates = -torch.arange(1, state + 1, dtype=draw.gate_dtype, device=draw.device).repeat(channels, 1)
    u, b, c = (draw.normal(batch, seq_len, columns) for columns in (channels, state, state))
    return {"u": u, "delta": delta, "A": rates, "B": b, "C": c}
