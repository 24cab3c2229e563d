"""The scalar-decay recurrence that every operation of the engine is an instance of, in plain torch.

    C_t = exp(a_t) C_{t-1} + exp(u_t) k_t v_t^T            C [K, V], a_t <= 0 the log decay, u_t the log input gate
    h_t = scale C_t^T q_t                                                                              (plain)

    n_t = exp(a_t) n_{t-1} + exp(u_t) k_t                  n [K]
    h_t = scale C_t^T q_t / max(|scale n_t^T q_t|, 1)                                             (normalised)

The normalised form keeps C and n divided by exp(m_t) with m_t = max(a_t + m_{t-1}, u_t), but at least MIN_STABILISER,
so that no exponential overflows; its denominator is then max(|scale n_t^T q_t|, exp(-m_t)). The outputs do not depend
on m, which therefore carries no gradient. Source: TFLA paper, sections 2 and 4 and appendix A; Retention, Gated
Retention, simple GLA and Mamba-2 are the plain form with other gates.

An operation's own file turns its gates into a and u.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..common.arguments import compute_dtype, without_autocast

MIN_LOG_DECAY = -1000.0
"""Lower bound of the log decay in forms that sum log decays; its exponential is zero in float64 too."""

MIN_STABILISER = -1024.0
"""Lower bound of m. A weight of exp(-1024) is zero in float64 beside the 1 of the denominator, so outputs stay as they
are. A token whose log input gate is far below it, or minus infinity, has the weight exp(u - m) = 0: it is masked."""

State = Tensor | tuple[Tensor, Tensor, Tensor]
"""C [B, H, K, V], or (C, n [B, H, K], m [B, H]) in the normalised form."""


def zero_state(k: Tensor, v: Tensor, *, normalize: bool) -> State:
    """Return the state that stands for "nothing seen yet": C = 0 and, normalised, n = 0 and m = -inf."""
    (batch, _, heads, dim_v), dim_k = v.shape, k.shape[3]
    dtype = compute_dtype(v.dtype)
    c = torch.zeros(batch, heads, dim_k, dim_v, dtype=dtype, device=v.device)
    if not normalize:
        return c
    return c, c.new_zeros(batch, heads, dim_k), c.new_full((batch, heads), -math.inf)


def public_stabiliser(m: Tensor) -> Tensor:
    """Return m for the caller: minus infinity, that of :func:`zero_state`, at its lower bound."""
    return m.masked_fill(m <= MIN_STABILISER, -math.inf)


def denominator(nq: Tensor, m: Tensor, normalizer_gradient: bool) -> Tensor:
    """Return max(|n^T q|, exp(-m)), as a constant unless gradients are to pass through it."""
    value = torch.maximum(nq.abs(), torch.exp(-m))
    return value if normalizer_gradient else value.detach()


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to ``dtype``, in accumulators' dtype; what overflows float16 keeps its range, as if scaled by 2^n."""
    wide = compute_dtype(dtype)
    rounded = x.to(dtype).to(wide)
    if dtype != torch.float16:
        return rounded
    return torch.where(rounded.isinf(), (x * 2.0**-16).to(dtype).to(wide) * 2.0**16, rounded)


class OperandMatmul(torch.autograd.Function):
    """a @ b, and its gradients, with operands rounded to ``dtype`` and accumulated in float32 (float64 for float64)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        # As they came, not rounded: else the gradients would not depend on them, and second derivatives be lost.
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return _rounded(a, dtype) @ _rounded(b, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, grad = (_rounded(x, ctx.dtype) for x in (*ctx.saved_tensors, grad))
        # Forward passes run without autocast, but a backward pass may be called under it.
        return *(without_autocast(torch.matmul, a, *pair) for pair in ((grad, b.mT), (a.mT, grad))), None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("forms in plain torch have no forward-mode derivative, got an input with a tangent")


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    log_input: Tensor | None,
    *,
    scale: float,
    initial_state: State | None = None,
    return_last_state: bool = False,
    normalize: bool = False,
    normalizer_gradient: bool = False,
    round_operands: bool = False,
) -> Tensor | tuple[Tensor, Any]:
    """Run the recurrence one step at a time; this is the definition.

    Args:
        q, k: [B, T, H, K]; float64 inputs are computed in float64, all others in float32.
        v: [B, T, H, V].
        log_decay: [B, T, H], a_t <= 0.
        log_input: [B, T, H], u_t; None means 0.
        scale: factor on q.
        initial_state: the state before the first step; None is :func:`zero_state`.
        return_last_state: also return the state after the last step.
        normalize: the normalised form.
        normalizer_gradient: differentiate through the denominator instead of taking it as a constant.
        round_operands: round the operands of k v^T and C^T q to v's dtype, as kernels do. Tests allow implementations
            in that dtype the errors of this form and of :func:`parallel`.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, last_state).
    """
    dtype = compute_dtype(v.dtype)
    out_dtype = v.dtype
    operand_dtype = out_dtype if round_operands else dtype
    q, k, v, log_decay = (x.to(dtype) for x in (q, k, v, log_decay))
    log_input = torch.zeros_like(log_decay) if log_input is None else log_input.to(dtype)
    state = zero_state(k, v, normalize=normalize) if initial_state is None else initial_state
    parts: Any = state if normalize else (state, None, None)
    c, n, m = parts
    if normalize:
        m = m.clamp(min=MIN_STABILISER)
    outputs = []
    for t in range(q.shape[1]):
        a, u = log_decay[:, t], log_input[:, t]
        if normalize:
            m_previous, m = m.detach(), torch.maximum(a + m, u).clamp(min=MIN_STABILISER).detach()
            a, u = a + m_previous - m, u - m
        decay, key, query = torch.exp(a)[..., None], torch.exp(u)[..., None] * k[:, t], scale * q[:, t]
        c = decay[..., None] * c + OperandMatmul.apply(key[..., :, None], v[:, t, :, None, :], operand_dtype)
        h = OperandMatmul.apply(query[..., None, :], c, operand_dtype)[..., 0, :]
        if normalize:
            n = decay * n + key
            h = h / denominator((n * query).sum(-1), m, normalizer_gradient)[..., None]
        outputs.append(h)
    last: State = (c, n, public_stabiliser(m)) if normalize else c
    h = torch.stack(outputs, dim=1).to(out_dtype)
    return (h, last) if return_last_state else h


def parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    log_input: Tensor | None,
    *,
    scale: float,
    initial_state: State | None = None,
    return_last_state: bool = False,
    normalize: bool = False,
    normalizer_gradient: bool = False,
    gate_dtype: torch.dtype = torch.float64,
) -> Tensor | tuple[Tensor, Any]:
    """Compute the recurrence as one masked product, quadratic in T.

        h = (scale Q K^T * D) V,  D_ij = exp(b_i - b_j + u_j) for j <= i, else 0

    where b is the cumulative sum of the log decay. Matrix products take their operands in v's dtype and accumulate in
    float32 (float64 for float64 inputs).

    Args:
        gate_dtype: dtype of b. b_i - b_j has an error of about eps * |b|, too much in float32 for |b| in the hundreds.

    All else, and the result, are as in :func:`recurrent`.
    """
    dtype, operand_dtype = compute_dtype(v.dtype), v.dtype
    gate_dtype = torch.promote_types(gate_dtype, dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # exp is zero at this bound; a larger |a| would take bits from all sums after it.
    a = log_decay.transpose(1, 2).to(gate_dtype).clamp(min=MIN_LOG_DECAY)
    u = torch.zeros_like(a) if log_input is None else log_input.transpose(1, 2).to(gate_dtype)
    b = a.cumsum(-1)
    length = b.shape[-1]
    log_weights = b[..., :, None] - b[..., None, :] + u[..., None, :]
    future = torch.ones(length, length, dtype=torch.bool, device=b.device).triu(1)
    log_weights = log_weights.masked_fill(future, -math.inf)
    log_inter = b
    if normalize:
        c0, n0, m0 = (None, None, None) if initial_state is None else initial_state
        m = log_weights.detach().amax(-1).clamp(min=MIN_STABILISER)
        if m0 is not None:
            log_inter = b + m0.detach().to(gate_dtype).clamp(min=MIN_STABILISER)[..., None]
            m = torch.maximum(m, log_inter.detach())
            log_inter = log_inter - m
        log_weights = log_weights - m[..., None]
    else:
        c0 = initial_state
    weights = torch.exp(log_weights.to(dtype))
    inter = torch.exp(log_inter.to(dtype))[..., None]

    scores = scale * OperandMatmul.apply(q, k.mT, operand_dtype) * weights
    h = OperandMatmul.apply(scores, v, operand_dtype)
    query = scale * q.to(dtype)
    if c0 is not None:
        h = h + inter * OperandMatmul.apply(query, c0.to(dtype), operand_dtype)
    last: State
    # The positions' weights in the last output are also those in the last state.
    key = weights[..., -1, :, None] * k.to(dtype)
    c = OperandMatmul.apply(key.mT, v, operand_dtype)
    if c0 is not None:
        c = c + inter[..., -1:, :] * c0
    if normalize:
        nq, n = scores.sum(-1), key.sum(-2)
        if n0 is not None:
            nq = nq + inter[..., 0] * (query * n0[..., None, :]).sum(-1)
            n = n + inter[..., -1, :] * n0
        m = m.to(dtype)
        h = h / denominator(nq, m, normalizer_gradient)[..., None]
        last = (c, n, public_stabiliser(m[..., -1]))
    else:
        last = c
    h = h.transpose(1, 2).contiguous().to(operand_dtype)
    return (h, last) if return_last_state else h
