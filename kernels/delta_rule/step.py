"""The delta rule's decoding step: one token, the state read once and written once.

    S = Diag(exp(g)) S_prev        u = beta (v - S^T k)        S += k u^T        o = scale S^T q

Source: Yang et al., Gated Delta Networks (2025), equation 10.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..common.differentiable import Differentiable, Tensors, contiguous_like
from ..common.remember import remember_launches
from ..common.sizes import cdiv, padded

MAX_TILE = 4096
"""Values of the state that a program of four warps holds: 32 a thread."""


class StepRequest(NamedTuple):
    """What a step asks for beside its tensors."""

    scale: float


@remember_launches
@triton.jit(do_not_specialize=["scale"])
def step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    s_ptr,
    o_ptr,
    s_out_ptr,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Advance the state of one head by one token, for BLOCK_V value columns.

    Grid: (ceil(V / BLOCK_V) * B * H,).
    Reads q, k [B, 1, H / GROUP, K], v [B, 1, H, V], g [B, 1, H] or, BY_CHANNEL, [B, 1, H, K] (None: 0), beta [B, 1, H]
    and S [B, H, K, V] (None: zero); writes o [B, 1, H, V] and the new S.
    """
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    pid_bh = (pid // NV).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid % NV * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = offs_k < K
    mask_v = offs_v < V
    at = pid_bh * K * V + offs_k[:, None] * V + offs_v[None, :]
    mask = mask_k[:, None] & mask_v[None, :]
    row = pid_bh // GROUP * K + offs_k
    q = tl.load(q_ptr + row, mask=mask_k, other=0.0).to(tl.float32) * scale
    k = tl.load(k_ptr + row, mask=mask_k, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + pid_bh * V + offs_v, mask=mask_v, other=0.0).to(tl.float32)
    s = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    if s_ptr is not None:
        s = tl.load(s_ptr + at, mask=mask, other=0.0)
        if g_ptr is not None:
            if BY_CHANNEL:
                s *= tl.exp(tl.load(g_ptr + pid_bh * K + offs_k, mask=mask_k, other=0.0))[:, None]
            else:
                s *= tl.exp(tl.load(g_ptr + pid_bh))
    u = tl.load(beta_ptr + pid_bh) * (v - tl.sum(k[:, None] * s, axis=0))
    s += k[:, None] * u[None, :]
    tl.store(s_out_ptr + at, s, mask=mask)
    o = tl.sum(q[:, None] * s, axis=0)
    tl.store(o_ptr + pid_bh * V + offs_v, o.to(o_ptr.dtype.element_ty), mask=mask_v)


def _step(
    request: StepRequest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor | None,
) -> tuple[Tensors, Tensors]:
    """Return o [B, 1, H, V] and the new state. The given one is not overwritten."""
    (B, _, H, V), (HK, K) = v.shape, q.shape[2:]
    (o, last), _ = _shapes(request, q, k, v, g, beta, state)
    block_k = padded(K)
    block_v = min(padded(V), max(MAX_TILE // block_k, 16))
    step_kernel[(cdiv(V, block_v) * B * H,)](
        q, k, v, g, beta, state, o, last, request.scale, K=K, V=V, GROUP=H // HK,
        BY_CHANNEL=g is not None and g.dim() == 4, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return (o, last), ()


def _shapes(request: StepRequest, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    batch, _, heads, dim_v = v.shape
    return (contiguous_like(v), others[1].new_empty(batch, heads, q.shape[3], dim_v)), ()


STEP = Differentiable(
    "delta_rule_step", request=StepRequest, tensors=("q", "k", "v", "g?", "beta", "state?"), outputs=("o", "state"),
    forward=_step, backward=None, shapes=_shapes,
)  # fmt: skip
"""o and the state after one token."""
