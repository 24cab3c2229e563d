"""Chunkwise form of the scalar-decay recurrence in torch: any device, any chunk length, differentiable.

Within a chunk of length L, with b the inclusive cumulative sum of the log decay a, u the log input gate and C the state
before the chunk,

    h_i = scale (sum_{j<=i} exp(b_i - b_j + u_j) (q_i . k_j) v_j + exp(b_i) C^T q_i)
    C'  = exp(b_L) C + sum_j exp(b_L - b_j + u_j) k_j v_j^T

Both are written with c_j = u_j - b_j and r_i = -b_i: every weight is exp(c_j - r_i), the previous state's is
exp(p - r_i) with p = 0, and the last row of the weights is the one that updates the state. The normalised form (see
reference.py) replaces r_i by max(p, max_{j<=i} c_j) with p the stabiliser m of the previous state; then every exponent
is <= 0, b cancels, and m_i = b_i + r_i. See the TFLA paper, section 3 and appendix B.

Only [B, T, H] gate values are kept in float64; [L, L] weights, states and accumulators are float32, and operands of
matrix products are rounded to the inputs' dtype (float64 inputs: all float64). The backward pass recomputes the weights
and the states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .reference import State, compute_dtype, zero_state


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    chunk_size: int
    scale: float
    normalize: bool
    normalizer_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Gate values of ``num_chunks`` chunks of equal length L that start at time ``start``.

    column [S, N, L]: c_j; row [S, N, L]: r_i; both float64, with S = B * H sequences.
    inter [S, N, L]: exp(p - r_i), the weight of the state before the chunk.
    floor [S, N, L]: exp(-m_i), the least denominator (normalised form only).
    """

    start: int
    length: int
    num_chunks: int
    column: Tensor
    row: Tensor
    inter: Tensor
    floor: Tensor | None


def _segments(
    a: Tensor, u: Tensor | None, m0: Tensor | None, options: _Options
) -> tuple[list[_Segment], Tensor | None]:
    """Cut [B, T, H] gates into whole chunks and a ragged rest; also return the last stabiliser [B, H]."""
    batch, seq_len, heads = a.shape
    dtype = a.dtype
    a = a.double().transpose(1, 2).reshape(batch * heads, seq_len)
    u = torch.zeros_like(a) if u is None else u.double().transpose(1, 2).reshape(batch * heads, seq_len)
    m = None if m0 is None else m0.double().reshape(batch * heads)
    chunk = min(options.chunk_size, seq_len)
    whole = seq_len - seq_len % chunk
    segments = []
    for start, stop, length in ((0, whole, chunk), (whole, seq_len, seq_len - whole)):
        if start == stop:
            continue
        n = (stop - start) // length
        b = a[:, start:stop].reshape(-1, n, length).cumsum(-1)
        column = u[:, start:stop].reshape(-1, n, length) - b
        if options.normalize:
            total = b[..., -1].cumsum(-1)
            # m_k = b_L + max(m_{k-1}, max_j c_j), for all chunks at once: a running maximum of c less the decay so far.
            before = total - b[..., -1]
            peaks = torch.cat((m[:, None], column.amax(-1) - before), -1).cummax(-1).values
            p = peaks[:, :-1] + before
            m = peaks[:, -1] + total[:, -1]
            row = torch.maximum(p[..., None], column.cummax(-1).values)
            inter, floor = torch.exp(p[..., None] - row).to(dtype), torch.exp(-b - row).to(dtype)
        else:
            row = -b
            inter, floor = torch.exp(b).to(dtype), None
        segments.append(
            _Segment(start=start, length=length, num_chunks=n, column=column, row=row, inter=inter, floor=floor)
        )
    return segments, None if m is None else m.reshape(batch, heads).to(dtype)


class _Operands:
    """Cuts [B, T, H, D] tensors into chunks [S, L, D] in the accumulators' dtype and rounds operands."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.compute = dtype, compute_dtype(dtype)

    def chunk(self, x: Tensor, start: int, stop: int) -> Tensor:
        piece = x[:, start:stop].transpose(1, 2)
        return piece.reshape(-1, stop - start, x.shape[-1]).to(self.compute)

    def round(self, x: Tensor) -> Tensor:
        return x if self.dtype == self.compute else x.to(self.dtype).to(self.compute)

    def store(self, out: Tensor, start: int, stop: int, piece: Tensor) -> None:
        target = out[:, start:stop].transpose(1, 2)
        target.copy_(piece.view(target.shape))


def _weights(segment: _Segment, index: int, dtype: torch.dtype) -> Tensor:
    """Return exp(c_j - r_i) for j <= i, else 0: [S, L, L] of chunk ``index``."""
    log_weights = (segment.column[:, index, None, :] - segment.row[:, index, :, None]).to(dtype)
    future = torch.ones(segment.length, segment.length, dtype=torch.bool, device=log_weights.device).triu_(1)
    return log_weights.masked_fill_(future, -math.inf).exp_()


def _denominator(nq: Tensor, floor: Tensor) -> Tensor:
    return torch.maximum(nq.abs(), floor)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, state: State, options: _Options, states: list | None
) -> tuple[Tensor, State]:
    """Return (h, last state); append the state before every chunk to ``states``."""
    operands = _Operands(v.dtype)
    normalize = options.normalize
    c, n, m = state if normalize else (state, None, None)
    sequences = v.shape[0] * v.shape[2]
    c = c.reshape(sequences, *c.shape[2:]).clone()
    n = n.reshape(sequences, -1).clone() if normalize else None
    segments, m = _segments(a, u, m, options)
    h = torch.empty_like(v)
    for segment in segments:
        for index in range(segment.num_chunks):
            start = segment.start + index * segment.length
            stop = start + segment.length
            q_c, k_c, v_c = (operands.chunk(x, start, stop) for x in (q, k, v))
            weights = _weights(segment, index, c.dtype)
            inter = segment.inter[:, index, :, None]
            if states is not None:
                states.append((c.clone(), n))
            scores = torch.bmm(q_c, k_c.mT).mul_(options.scale).mul_(weights)
            query = q_c * (inter * options.scale)
            out = torch.bmm(operands.round(scores), v_c)
            out.baddbmm_(operands.round(query), operands.round(c))
            key = k_c * weights[:, -1, :, None]
            decay = inter[:, -1:]
            if normalize:
                nq = scores.sum(-1) + torch.bmm(query, n[..., None])[..., 0]
                out /= _denominator(nq, segment.floor[:, index])[..., None]
                n = n * decay[..., 0] + key.sum(-2)
            c.mul_(decay).baddbmm_(operands.round(key).mT, v_c)
            operands.store(h, start, stop, out)
    batch, heads = v.shape[0], v.shape[2]
    c = c.view(batch, heads, *c.shape[1:])
    return h, (c, n.view(batch, heads, -1), m) if normalize else c


class _Chunkwise(torch.autograd.Function):
    """The chunkwise form; saves its arguments and recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        u: Tensor | None,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        h, last = _forward(q, k, v, a, u, state if options.normalize else state[0], options, None)
        ctx.options, ctx.has_u = options, u is not None
        ctx.save_for_backward(q, k, v, a, *(() if u is None else (u,)), *state)
        ctx.set_materialize_grads(False)
        if not options.normalize:
            return h, last
        ctx.mark_non_differentiable(last[2])
        return h, *last

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, *dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        options = ctx.options
        q, k, v, a, *rest = ctx.saved_tensors
        u = rest.pop(0) if ctx.has_u else None
        dq, dk, dv, da, du, dstate = _backward(q, k, v, a, u, rest, options, dh, dlast)
        return None, dq, dk, dv, da, du if ctx.has_u else None, *dstate


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    u: Tensor | None,
    state: list[Tensor],
    options: _Options,
    dh: Tensor | None,
    dlast: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Return dq, dk, dv, d(log decay), d(log input) and the gradients of the initial state."""
    operands = _Operands(v.dtype)
    normalize, through_denominator = options.normalize, options.normalizer_gradient
    batch, seq_len, heads, dim_k = q.shape
    sequences, dim_v = batch * heads, v.shape[-1]
    if dh is None:
        dh = torch.zeros_like(v)
    states: list = []
    _forward(q, k, v, a, u, tuple(state) if normalize else state[0], options, states)
    segments, _ = _segments(a, u, state[2] if normalize else None, options)
    dtype = a.dtype
    zeros = torch.zeros(sequences, dim_k, dim_v, dtype=dtype, device=v.device)
    dc = zeros if dlast[0] is None else dlast[0].reshape(zeros.shape).clone()
    dn = None
    if normalize:
        dn = zeros.new_zeros(sequences, dim_k) if dlast[1] is None else dlast[1].reshape(sequences, dim_k).clone()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    da, du = (torch.empty(sequences, seq_len, dtype=dtype, device=v.device) for _ in range(2))
    for segment in reversed(segments):
        for index in reversed(range(segment.num_chunks)):
            start = segment.start + index * segment.length
            stop = start + segment.length
            q_c, k_c, v_c, dh_c = (operands.chunk(x, start, stop) for x in (q, k, v, dh))
            c, n = states.pop()
            weights = _weights(segment, index, dtype)
            inter = segment.inter[:, index, :, None]
            decay = inter[:, -1:]
            last_row = weights[:, -1, :, None]
            query = q_c * (inter * options.scale)
            scores = torch.bmm(q_c, k_c.mT).mul_(options.scale).mul_(weights)
            dnq = None
            if normalize:
                nq = scores.sum(-1) + torch.bmm(query, n[..., None])[..., 0]
                denominator = _denominator(nq, segment.floor[:, index])[..., None]
                scores_n = operands.round(scores)
                if through_denominator:
                    out = torch.bmm(scores_n, v_c).baddbmm_(operands.round(query), operands.round(c)) / denominator
                    slope = torch.where(nq.abs() > segment.floor[:, index], nq.sign(), 0.0)
                    dnq = (-(out * dh_c).sum(-1) * slope)[..., None] / denominator
                dh_c = dh_c / denominator
            dnum = operands.round(dh_c)
            dscores = torch.bmm(dnum, v_c.mT)
            if dnq is not None:
                dscores += dnq
            dscores = operands.round(dscores.mul_(weights).mul_(options.scale))
            dq_inter = torch.bmm(dnum, operands.round(c).mT)
            if dnq is not None:
                dq_inter += dnq * n[:, None, :]
            dq_c = dq_inter.mul_(inter * options.scale).baddbmm_(dscores, k_c)
            dk_intra = torch.bmm(dscores.mT, q_c)
            dk_inter = torch.bmm(v_c, operands.round(dc).mT)
            if normalize:
                dk_inter += dn[:, None, :]
            dk_inter *= last_row
            key = operands.round(k_c * last_row)
            dv_c = torch.bmm(operands.round(scores).mT, dnum).baddbmm_(key, operands.round(dc))
            dg = decay[:, :, 0] * (c * dc).sum((1, 2))[:, None]
            if normalize:
                dg += decay[:, :, 0] * (n * dn).sum(1, keepdim=True)
            dk_inter_k = (dk_inter * k_c).sum(-1)
            dk_intra_k = (dk_intra * k_c).sum(-1)
            db = (q_c * dq_c).sum(-1) - dk_intra_k
            du[:, start:stop] = dk_intra_k + dk_inter_k
            da[:, start:stop] = dg + db.flip(-1).cumsum(-1).flip(-1) + dk_inter_k.cumsum(-1) - dk_inter_k
            operands.store(dq, start, stop, dq_c)
            operands.store(dk, start, stop, dk_intra.add_(dk_inter))
            operands.store(dv, start, stop, dv_c)
            dc.mul_(decay).baddbmm_(operands.round(query).mT, dnum)
            if normalize:
                dn = dn * decay[..., 0]
                if dnq is not None:
                    dn += (query * dnq).sum(1)
    da, du = (x.view(batch, heads, seq_len).transpose(1, 2) for x in (da, du))
    dc = dc.view(batch, heads, dim_k, dim_v)
    dstate = (dc, dn.view(batch, heads, dim_k), None) if normalize else (dc,)
    return dq, dk, dv, da, du, dstate


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    log_input: Tensor | None,
    *,
    chunk_size: int,
    scale: float,
    initial_state: State | None = None,
    return_last_state: bool = False,
    normalize: bool = False,
    normalizer_gradient: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Compute the recurrence of reference.py chunk by chunk, with a backward pass of its own.

    Args:
        q, k: [B, T, H, K], contiguous; float64, float32, float16 or bfloat16.
        v: [B, T, H, V], the same dtype.
        log_decay: [B, T, H], a_t <= 0; float32, or float64 beside float64 inputs.
        log_input: [B, T, H], u_t in the same dtype; None means 0.
        chunk_size: at least 1; need not divide T and may exceed it.
        scale: factor on q.
        initial_state: C [B, H, K, V], or (C, n [B, H, K], m [B, H]) where ``normalize``; None is the zero state.
        return_last_state: also return the state after the last step.
        normalize: divide by max(|scale n^T q|, 1).
        normalizer_gradient: differentiate through that denominator instead of taking it as a constant.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, last_state).
    """
    options = _Options(chunk_size=chunk_size, scale=scale, normalize=normalize, normalizer_gradient=normalizer_gradient)
    state = zero_state(k, v, normalize=normalize) if initial_state is None else initial_state
    tensors = (q, k, v, log_decay, *(() if log_input is None else (log_input,)), *(state if normalize else (state,)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        h, *last_tensors = _Chunkwise.apply(options, q, k, v, log_decay, log_input, *(state if normalize else (state,)))
        last: State = tuple(last_tensors) if normalize else last_tensors[0]
    else:
        h, last = _forward(q, k, v, log_decay, log_input, state, options, None)
    return (h, last) if return_last_state else h
