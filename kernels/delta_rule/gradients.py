"""All gradients of the delta rule within chunks, one program for each, from the states before and after them.

In the words of chunkwise.py, with q scaled, D_ij = exp(b_i - b_j) for j <= i, else 0, w = exp(b_L - b) and dS the
gradient of the state after the chunk,

    X  = v - exp(b) * (k S)         u  = T Y,  Y = beta * X       dY = T^T (P^T do + (w * k) dS)
    dv = beta * dY                  dP = D * (do u^T)             dA = -D * (dY u^T) below the diagonal
    dq = exp(b) * (do S^T) + dP k
    dk = w * (u dS^T) - exp(b) * (dv S^T) + dP^T q + (M + M^T) k,  M = beta * dA
    dbeta = rows(dY * X) + rows(dA * k k^T)

where rows are the sums over them. Every exponential weighs rows of a product with q or k, so the gradient of b is

    db = rows(q * dq) - rows(k * dk) + 2 (rows(M * k k^T) - exp(b) * rows(dv * k S))

and that of g the sum of db over the positions from a token on, and of S' * dS, S' being the state after the chunk. dY
comes from the walk over chunks that makes dS. Source: reverse mode of Gated Delta Networks (2025), section 3.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.remember import remember_launches
from .inverse import LOG2E, MIN_LOG_DECAY


@triton.jit
def _load(ptr, rows, columns, exists, STRIDE: tl.constexpr, D: tl.constexpr):
    """Load ptr[rows * STRIDE + columns], 0 outside."""
    return tl.load(
        ptr + rows[:, None] * STRIDE + columns[None, :], mask=exists[:, None] & (columns < D)[None, :], other=0.0
    )


@triton.jit
def _store(ptr, x, rows, columns, exists, STRIDE: tl.constexpr, D: tl.constexpr):
    """Store ptr[rows * STRIDE + columns]."""
    tl.store(
        ptr + rows[:, None] * STRIDE + columns[None, :],
        x.to(ptr.dtype.element_ty),
        mask=exists[:, None] & (columns < D)[None, :],
    )


@remember_launches
@triton.jit(do_not_specialize=["scale", "T"])
def gradients_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, b_ptr, inverse_ptr, state_ptr, do_ptr, dy_ptr, dstate_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, scale, T,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one chunk of one head.

    Grid: (B * H * N,), N = ceil(T / L). Reads q, k [B, T, H / GROUP, K], v, do, dY [B, T, H, V], g (None: 0) and beta
    [B, T, H], b [B * H, N, L] in base 2, T [B * H, N, L, L], and S^T and dS^T [B * H, N, ROWS, K]; writes dq, dk
    [B, T, H, K], dv [B, T, H, V], and dg (if g is given) and dbeta [B, T, H].
    """
    number = tl.program_id(0).to(tl.int64)
    N = tl.cdiv(T, L)
    pid_n = (number % N).to(tl.int32)
    pid_bh = number // N
    DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    HK: tl.constexpr = H // GROUP
    first = pid_bh // H * T + pid_n * L
    head = pid_bh % H
    offs_l = tl.arange(0, L)
    BLOCK_K: tl.constexpr = triton.next_power_of_2(K)
    # Columns of V at a time: more leave registers and shared memory for one program alone.
    BLOCK_V: tl.constexpr = 16 if V <= 16 else 32
    offs_k = tl.arange(0, BLOCK_K)
    exists = pid_n * L + offs_l < T
    of_qk = (first * HK + head // GROUP) * K
    of_dqk = (first * H + head) * K
    of_v = (first * H + head) * V
    of_state = number * (ROWS * K)
    at = first * H + head + offs_l * H

    b = tl.load(b_ptr + number * L + offs_l)
    last = tl.load(b_ptr + number * L + L - 1)
    beta = tl.load(beta_ptr + at, mask=exists, other=0.0).to(tl.float32)
    entering = tl.exp2(b)
    leaving = tl.exp2(last - b)[:, None]
    k = _load(k_ptr + of_qk, offs_l, offs_k, exists, HK * K, K)
    inverse = tl.load(inverse_ptr + number * (L * L) + offs_l[:, None] * L + offs_l[None, :])

    dk = tl.zeros([L, BLOCK_K], tl.float32)
    da = tl.zeros([L, L], tl.float32)
    dp = tl.zeros([L, L], tl.float32)
    dbeta = tl.zeros([L], tl.float32)
    of_held = tl.zeros([L], tl.float32)
    of_states = tl.zeros([BLOCK_V], tl.float32)
    for column in tl.range(0, V, BLOCK_V, num_stages=2):
        offs_v = column + tl.arange(0, BLOCK_V)
        state = _load(state_ptr + of_state, offs_v, offs_k, offs_v < V, K, K)
        dstate = _load(dstate_ptr + of_state, offs_v, offs_k, offs_v < V, K, K)
        v = _load(v_ptr + of_v, offs_l, offs_v, exists, H * V, V)
        dy = _load(dy_ptr + of_v, offs_l, offs_v, exists, H * V, V)
        do = _load(do_ptr + of_v, offs_l, offs_v, exists, H * V, V)
        if g_ptr is not None:
            of_states += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
        state = state.to(DTYPE)
        dstate = dstate.to(DTYPE)
        held = tl.dot(k, tl.trans(state)) * entering[:, None]
        x = v - held
        u = tl.dot(inverse, (x * beta[:, None]).to(DTYPE))
        dbeta += tl.sum(dy * x, axis=1)
        dv = dy * beta[:, None]
        of_held += tl.sum(dv * held, axis=1)
        _store(dv_ptr + of_v, dv, offs_l, offs_v, exists, H * V, V)
        dk = tl.dot((u * leaving).to(DTYPE), dstate, dk)
        dk = tl.dot((dv * -entering[:, None]).to(DTYPE), state, dk)
        u = u.to(DTYPE)
        da = tl.dot(u, tl.trans(dy), da)
        dp = tl.dot(u, tl.trans(do), dp)

    rows = offs_l[None, :]
    columns = offs_l[:, None]
    decay = tl.exp2(tl.where(rows >= columns, b[None, :] - b[:, None], float("-inf")))
    dp = (dp * (decay * scale)).to(DTYPE)
    da *= -tl.where(rows > columns, decay, 0.0)
    m = (da * beta[None, :]).to(DTYPE)
    da = da.to(DTYPE)
    of_k = _load(k_ptr + of_qk, offs_l, offs_k, exists, HK * K, K)
    within = tl.dot(tl.trans(da), k)
    of_rate = tl.sum(within * of_k, axis=1)
    tl.store(dbeta_ptr + at, dbeta + of_rate, mask=exists)
    of_rate *= beta
    dk += within * beta[:, None]
    of_keys = tl.sum(dk * of_k, axis=1) - of_rate + of_held
    of_states = tl.exp2(last) * tl.sum(of_states, axis=0) + tl.sum(of_keys, axis=0)
    dk = tl.dot(m, k, dk)
    q = _load(q_ptr + of_qk, offs_l, offs_k, exists, HK * K, K)
    dk = tl.dot(dp, q, dk)
    db = 2 * (of_rate - of_held) - tl.sum(dk * of_k, axis=1)
    _store(dk_ptr + of_dqk, dk, offs_l, offs_k, exists, H * K, K)

    dq = tl.zeros([L, BLOCK_K], tl.float32)
    for column in tl.range(0, V, BLOCK_V, num_stages=2):
        offs_v = column + tl.arange(0, BLOCK_V)
        state = _load(state_ptr + of_state, offs_v, offs_k, offs_v < V, K, K)
        do = _load(do_ptr + of_v, offs_l, offs_v, exists, H * V, V)
        dq = tl.dot(do, state.to(DTYPE), dq)
    q = _load(q_ptr + of_qk, offs_l, offs_k, exists, HK * K, K)
    dq = tl.dot(tl.trans(dp), k, dq * (entering * scale)[:, None])
    _store(dq_ptr + of_dqk, dq, offs_l, offs_k, exists, H * K, K)
    if g_ptr is not None:
        db += tl.sum(dq * q, axis=1)
        dg = tl.cumsum(db, axis=0, reverse=True) + of_states
        g = tl.load(g_ptr + at, mask=exists, other=0.0).to(tl.float32) * LOG2E
        tl.store(dg_ptr + at, tl.where(g >= MIN_LOG_DECAY, dg, 0.0), mask=exists)


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    b: Tensor,
    inverse: Tensor,
    state: Tensor,
    do: Tensor,
    dy: Tensor,
    dstate: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Compute the gradients of q, k, v, g and beta.

    Args: see :func:`gradients_kernel`; g, beta and b are float32, state and dstate float32 or of k's dtype, as all
        others are. All are contiguous.

    Returns:
        dq, dk [B, T, HK, K], dv [B, T, H, V] in the inputs' dtype, dg [B, T, H] (None without g) and dbeta, float32.
    """
    B, T, H, V = v.shape
    HK, K = k.shape[2:]
    N, L = b.shape[1:]
    dq, dk = (v.new_empty(B, T, H, K, dtype=v.dtype if HK == H else torch.float32) for _ in range(2))
    dv, dg, dbeta = torch.empty_like(v), None if g is None else torch.empty_like(g), torch.empty_like(beta)
    gradients_kernel[(B * H * N,)](
        q, k, v, g, beta, b, inverse, state, do, dy, dstate, dq, dk, dv, dg, dbeta, scale, T,
        H=H, GROUP=H // HK, K=K, V=V, ROWS=state.shape[2], L=L, num_warps=4,
    )  # fmt: skip
    if HK != H:
        dq, dk = (x.unflatten(2, (HK, -1)).sum(3).to(v.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta
