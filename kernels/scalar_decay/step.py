"""The decoding step of the engine: one token, the state read once and written once.

    C = exp(a) C_prev + exp(u) k v^T        h = scale C^T q   (mLSTMexp: / max(|scale n^T q|, exp(-m)))

Source: TFLA paper, section 2.1 (recurrent formulation); gate functions as in gates.py.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..common.differentiable import Tensors, contiguous_like
from ..common.remember import remember_launches
from ..common.sizes import cdiv, padded
from .gates import LN2, MIN_STABILISER, log_decay, log_input, start_of
from .launch import SCALAR_DECAY, EngineRequest, empty_state
from .roles import layout

FEW_PROGRAMS = 1024
"""Of so few programs of 64 columns each is cut in two, and takes 128 rows of the state at once: faster on an H200."""


@remember_launches
@triton.jit(do_not_specialize=["scale", "inv_tau"])
def step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    input_ptr,
    head_ptr,
    c_ptr,
    n_ptr,
    m_ptr,
    h_ptr,
    c_out_ptr,
    n_out_ptr,
    m_out_ptr,
    starts,
    scale,
    inv_tau,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Advance the state of one head by one token, for BLOCK_V value columns.

    Grid: (ceil(V / BLOCK_V) * B * H,).
    Reads q, k [B, 1, H / GROUP, K], v [B, 1, H, V], the gates [B, 1, H] or the per-head constant [H], C [B, H, K, V]
    and, for exp, n [B, H, K] and m [B, H] (None: the zero state); writes h [B, 1, H, V] and the new state.
    """
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    pid_v = pid % NV
    pid_bh = (pid // NV).to(tl.int64)
    head = pid_bh % H
    batch = pid_bh // H
    q_ptr = start_of(q_ptr, starts.x, batch, head // GROUP, 1, H // GROUP * K, K)
    k_ptr = start_of(k_ptr, starts.y, batch, head // GROUP, 1, H // GROUP * K, K)
    v_ptr = start_of(v_ptr, starts.z, batch, head, 1, H * V, V)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    offs_k = tl.arange(0, BLOCK_K)
    at = pid_bh * K * V + offs_k[:, None] * V + offs_v[None, :]
    # Loads wait for memory while gates are evaluated and stores are under way.
    c_next = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    if c_ptr is not None:
        c_next = tl.load(c_ptr + at, mask=(offs_k < K)[:, None] & mask_v[None, :], other=0.0)
    v = tl.load(v_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
    x = 0.0
    if GATE != "slope":
        x = tl.load(decay_ptr + pid_bh).to(tl.float32)
    u = 0.0
    if GATE == "ssd":
        u = log_input(x, GATE)
    head_value = 0.0
    if head_ptr is not None:
        head_value = tl.load(head_ptr + head).to(tl.float32)
    a = log_decay(x, head_value, inv_tau, GATE, tl.float32)
    if GATE == "sig" or GATE == "exp":
        u = log_input(tl.load(input_ptr + pid_bh).to(tl.float32), GATE)
    if GATE == "exp":
        m = tl.maximum(u, MIN_STABILISER * LN2)
        if c_ptr is not None:
            m_in = tl.maximum(tl.load(m_ptr + pid_bh), MIN_STABILISER * LN2)
            m = tl.maximum(a + m_in, m)
            a += m_in - m
        u -= m
        if pid_v == 0:
            tl.store(m_out_ptr + pid_bh, tl.where(m > MIN_STABILISER * LN2, m, -float("inf")))
    decay = tl.exp(a)
    gain = tl.exp(u)

    v *= gain
    h = tl.zeros((BLOCK_V,), dtype=tl.float32)
    denom = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for k0 in tl.static_range(0, K, BLOCK_K):
        mask_k = offs_k < K
        c_prev = c_next
        if (c_ptr is not None) and (k0 + BLOCK_K < K):
            c_next = tl.load(
                c_ptr + at + BLOCK_K * V, mask=(offs_k + BLOCK_K < K)[:, None] & mask_v[None, :], other=0.0
            )
        q = tl.load(q_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32) * scale
        k = tl.load(k_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        c = k[:, None] * v[None, :]
        if c_ptr is not None:
            c += c_prev * decay
        tl.store(c_out_ptr + at, c, mask=mask_k[:, None] & mask_v[None, :])
        h += tl.sum(q[:, None] * c, axis=0)
        if GATE == "exp":
            n = k * gain
            if c_ptr is not None:
                n += tl.load(n_ptr + pid_bh * K + offs_k, mask=mask_k, other=0.0) * decay
            denom += q * n
            if pid_v == 0:
                tl.store(n_out_ptr + pid_bh * K + offs_k, n, mask=mask_k)
        offs_k += BLOCK_K
        at += BLOCK_K * V
    if GATE == "exp":
        h /= tl.maximum(tl.abs(tl.sum(denom, axis=0)), tl.exp(-m))
    tl.store(h_ptr + pid_bh * V + offs_v, h.to(h_ptr.dtype.element_ty), mask=mask_v)


def _step(
    request: EngineRequest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
    c: Tensor | None,
    n: Tensor | None,
    m: Tensor | None,
    *_: Any,
) -> tuple[Tensors, Tensors]:
    """Return h [B, 1, H, V] and the new C, n and m. The given state is not overwritten."""
    B, H, V = v.shape[0], *v.shape[2:]
    K = q.shape[3]
    h, last = contiguous_like(v), empty_state(q, v, normalised=request.stabilised)
    block_k, block_v = (128, 32) if B * H * cdiv(V, 64) < FEW_PROGRAMS else (64, 64)
    block_k, block_v = min(block_k, padded(K)), min(block_v, padded(V))
    step_kernel[(cdiv(V, block_v) * B * H,)](
        q.detach(), k.detach(), v.detach(), decay, input_gate, head, c, n, m, h, *last, layout(q, k, v)[1],
        request.scale, request.inv_tau, H=H, K=K, V=V, GROUP=H // q.shape[2], GATE=request.gate,
        BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return (h, *last), ()


def _shapes(request: EngineRequest, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    return (contiguous_like(v), *empty_state(q, v, normalised=request.stabilised)), ()


STEP = SCALAR_DECAY.step(_step, _shapes)
"""h and the state after one token."""
