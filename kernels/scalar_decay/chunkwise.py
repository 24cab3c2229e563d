"""Chunkwise form of the scalar-decay recurrence in torch: any device, any chunk length, differentiable.

Within a chunk of length L, with b the inclusive cumulative sum of the log decay a, u the log input gate and C the state
before the chunk,

    h_i = scale (sum_{j<=i} exp(b_i - b_j + u_j) (q_i . k_j) v_j + exp(b_i) C^T q_i)
    C'  = exp(b_L) C + sum_j exp(b_L - b_j + u_j) k_j v_j^T

With c_j = u_j - b_j and r_i = -b_i every weight is exp(c_j - r_i), that of the state before the chunk is exp(p - r_i)
with p = 0, and the weights of row L are those that update the state. The normalised form (see reference.py) differs in
r alone: r_i = max(p, max_{j<=i} c_j), where p is the stabiliser m of the state before the chunk. Then b cancels, every
exponent is <= 0, and m_i = b_i + r_i. TFLA paper, section 3, appendices A and B.

Numbers: [B, T, H] gate values are float64. r is rounded to the accumulators' dtype, which a factor per row of h makes
good, and c is split in two parts, so that differences of large cumulative sums keep their digits. Weights, states and
accumulators are float32; operands of matrix products are rounded to the inputs' dtype. Float64 inputs: all float64.

Speed: a CPU's time goes into matrix products if everything between them stays in its caches. Chunks are therefore taken
in groups: products chunk by chunk on views of the inputs, everything elementwise once a group. The backward pass
recomputes the states and the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .reference import State, compute_dtype, zero_state

ROWS_PER_GROUP = {"cpu": 1024, "cuda": 65536}
"""Rows (B * H * chunks * L) of a group: few enough for a core's cache, or enough to fill a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    chunk_size: int
    scale: float
    normalize: bool
    normalizer_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Consecutive chunks of equal length L, and their gates: G chunks, S = B * H sequences.

    start, stop: time steps covered.
    first: index of the first chunk.
    column, column_rest, row: [G, S, L] with c_j = column + column_rest and r_i = row; column_rest is None in float64.
    inter: [G, S, L], exp(p - r_i): weight of the state before the chunk.
    update: [G, S, L], exp(c_j - r_L): weight of position j in the state after the chunk.
    decay: [G, S, 1], exp(p - r_L): weight of the state before the chunk in the state after it.
    factor: [G, S, L], scale exp(b_i + r_i) (plain form).
    floor: [G, S, L], exp(-m_i), the least denominator (normalised form).
    """

    start: int
    stop: int
    first: int
    column: Tensor
    column_rest: Tensor | None
    row: Tensor
    inter: Tensor
    update: Tensor
    decay: Tensor
    factor: Tensor | None
    floor: Tensor | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, S, L)"""
        return self.row.shape  # type: ignore[return-value]

    def weights(self) -> Tensor:
        """Return exp(c_j - r_i) for j <= i, else 0: [G, S, L, L]."""
        log_weights = self.column[..., None, :] - self.row[..., :, None]
        if self.column_rest is not None:
            log_weights += self.column_rest[..., None, :]
        # Above the diagonal the exponential may be inf; tril_ overwrites, it does not multiply.
        return log_weights.exp_().tril_()


def _plan(a: Tensor, u: Tensor | None, m0: Tensor | None, options: _Options) -> tuple[list[_Group], Tensor | None]:
    """Cut [B, T, H] gates into groups of whole chunks and a ragged rest; also return the last stabiliser [S], float64."""
    batch, seq_len, heads = a.shape
    dtype = a.dtype
    a = a.double().transpose(1, 2).reshape(batch * heads, seq_len)
    u = torch.zeros_like(a) if u is None else u.double().transpose(1, 2).reshape(batch * heads, seq_len)
    m = None if m0 is None else m0.double().reshape(batch * heads)
    chunk = min(options.chunk_size, seq_len)
    whole = seq_len - seq_len % chunk
    groups: list[_Group] = []
    first = 0
    for start, stop, length in ((0, whole, chunk), (whole, seq_len, seq_len - whole)):
        if start == stop:
            continue
        num_chunks = (stop - start) // length
        b, u_chunks = (
            x[:, start:stop].reshape(-1, num_chunks, length).transpose(0, 1).contiguous() for x in (a, u)
        )  # [N, S, L]
        b = b.cumsum(-1)
        column = u_chunks - b
        if m is None:
            row = (-b).to(dtype)
            before = torch.zeros_like(b[..., -1:])
            factor, floor = (options.scale * torch.exp(b + row)).to(dtype), None
        else:
            # m_k = b_L + max(m_{k-1}, max_j c_j), for all chunks at once: a running maximum of c less the decay so far.
            total = b[..., -1].cumsum(0) - b[..., -1]
            peaks = torch.cat((m[None], column.amax(-1) - total)).cummax(0).values
            before = (peaks[:-1] + total)[..., None]
            row = torch.maximum(before, column.cummax(-1).values).to(dtype)
            after = b + row
            before = torch.cat((m[None], after[:-1, :, -1]))[..., None]
            factor, floor = None, torch.exp(-after).to(dtype)
            m = after[-1, :, -1]
        inter = torch.exp(before - row).to(dtype)
        update = torch.exp(column - row[..., -1:]).to(dtype)
        column, rest = column.to(dtype), (column - column.to(dtype)).to(dtype) if dtype != torch.float64 else None
        size = max(1, ROWS_PER_GROUP.get(a.device.type, 1024) // (length * a.shape[0]))
        for i in range(0, num_chunks, size):
            j = min(i + size, num_chunks)
            groups.append(
                _Group(
                    start=start + i * length,
                    stop=start + j * length,
                    first=first + i,
                    column=column[i:j],
                    column_rest=None if rest is None else rest[i:j],
                    row=row[i:j],
                    inter=inter[i:j],
                    update=update[i:j],
                    decay=inter[i:j, :, -1:],
                    factor=None if factor is None else factor[i:j],
                    floor=None if floor is None else floor[i:j],
                )
            )
        first += num_chunks
    return groups, m


class _Operands:
    """Cuts [B, T, H, D] tensors into the chunks of a group and rounds operands of matrix products."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.compute = dtype, compute_dtype(dtype)

    @staticmethod
    def view(x: Tensor, group: _Group) -> Tensor:
        """Return the group's part of x as a view [G, B, H, L, D]."""
        chunks, _, length = group.shape
        batch, _, heads, dim = x.shape
        return x[:, group.start : group.stop].view(batch, chunks, length, heads, dim).permute(1, 0, 3, 2, 4)

    def load(self, x: Tensor, group: _Group) -> Tensor:
        """Return the group's part of x as [G, S, L, D] in the accumulators' dtype: a view where B = 1."""
        return self.view(x, group).flatten(1, 2).to(self.compute)

    def store(self, x: Tensor, group: _Group, value: Tensor) -> None:
        """Write [G, S, L, D] into the group's part of x."""
        target = self.view(x, group)
        target.copy_(value.view(target.shape))

    def round(self, x: Tensor) -> Tensor:
        """Round an operand of a matrix product to the inputs' dtype."""
        return x if self.dtype == self.compute else x.to(self.dtype).to(self.compute)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b [G, S, ., .], one chunk at a time: operands of different chunks need not have a common stride."""
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    for x, y, z in zip(a, b, out, strict=True):
        torch.bmm(x, y, out=z)
    return out


def _add_products(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to out [G, S, ., .]."""
    for x, y, z in zip(a, b, out, strict=True):
        z.baddbmm_(x, y)


def _run_normalizer(n: Tensor, key: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
    """Return n before every chunk of the group [G, S, K], and n [S, K] after it."""
    sums = key.sum(-2)
    before = []
    for decay, part in zip(group.decay, sums, strict=True):
        before.append(n)
        n = torch.addcmul(part, n, decay)
    return torch.stack(before), n


def _normalizer_product(scores: Tensor, query: Tensor, n: Tensor) -> Tensor:
    """Return n_i^T q_i [G, S, L] without the scale, from weighted scores, weighted queries and n before each chunk."""
    inter = torch.bmm(query.flatten(0, 1), n.flatten(0, 1)[..., None]).view(query.shape[:-1])
    return inter.add_(scores.sum(-1))


def _row_factor(nq: Tensor, group: _Group, scale: float) -> Tensor:
    """Return scale / max(|scale n^T q|, exp(-m)), [G, S, L]."""
    return scale / torch.maximum((scale * nq).abs_(), group.floor)


def _flat_state(state: State, normalize: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    c, n, m = state if normalize else (state, None, None)
    return c.flatten(0, 1), None if n is None else n.flatten(0, 1), m


def _forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, state: State, options: _Options
) -> tuple[Tensor, State]:
    """Return (h, last state)."""
    operands = _Operands(v.dtype)
    c, n, m = _flat_state(state, options.normalize)
    c = c.clone()
    groups, m = _plan(a, u, m, options)
    h = torch.empty_like(v)
    for group in groups:
        q_g, k_g, v_g = (operands.load(x, group) for x in (q, k, v))
        scores = _products(q_g, k_g.mT).mul_(group.weights())
        query = q_g * group.inter[..., None]
        key = k_g * group.update[..., None]
        if n is None:
            factor = group.factor
        else:
            n_before, n = _run_normalizer(n, key, group)
            factor = _row_factor(_normalizer_product(scores, query, n_before), group, options.scale)
        scores, query, key = (operands.round(x) for x in (scores, query, key))
        out = v_g.new_empty(v_g.shape)
        for i, decay in enumerate(group.decay):
            torch.bmm(scores[i], v_g[i], out=out[i])
            out[i].baddbmm_(query[i], operands.round(c))
            c.mul_(decay[..., None]).baddbmm_(key[i].mT, v_g[i])
        operands.store(h, group, out.mul_(factor[..., None]))
    return h, _shape_state(c, n, m, v)


def _shape_state(c: Tensor, n: Tensor | None, m: Tensor | None, v: Tensor) -> State:
    shape = (v.shape[0], v.shape[2])
    c = c.unflatten(0, shape)
    if n is None:
        return c
    m_rounded = m.to(c.dtype)
    rest = torch.exp(m - m_rounded).to(c.dtype)
    return c.mul_(rest.view(*shape, 1, 1)), n.unflatten(0, shape) * rest.view(*shape, 1), m_rounded.view(shape)


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
        h, last = _forward(q, k, v, a, u, state if options.normalize else state[0], options)
        ctx.options = options
        ctx.save_for_backward(q, k, v, a, u, h if options.normalizer_gradient else None, *state)
        ctx.set_materialize_grads(False)
        if not options.normalize:
            return h, last
        ctx.mark_non_differentiable(last[2])
        return h, *last

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, *dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, a, u, h, *state = ctx.saved_tensors
        state = tuple(state) if ctx.options.normalize else state[0]
        dh = torch.zeros_like(v) if dh is None else dh.contiguous()
        return None, *_backward(q, k, v, a, u, h, state, ctx.options, dh, dlast)


def _run_states(
    k: Tensor, v: Tensor, c: Tensor, n: Tensor | None, groups: list[_Group], operands: _Operands
) -> tuple[Tensor, Tensor | None]:
    """Return C [N, S, K, V] and n [N, S, K] before every chunk."""
    last = groups[-1]
    states = c.new_empty(last.first + last.shape[0], *c.shape)
    normalizers = []
    states[0] = c
    for group in groups:
        k_g, v_g = (operands.load(x, group) for x in (k, v))
        key = k_g * group.update[..., None]
        if n is not None:
            n_before, n = _run_normalizer(n, key, group)
            normalizers.append(n_before)
        key = operands.round(key)
        for i, decay in enumerate(group.decay, group.first):
            if i + 1 < len(states):
                torch.mul(states[i], decay[..., None], out=states[i + 1])
                states[i + 1].baddbmm_(key[i - group.first].mT, v_g[i - group.first])
    return states, torch.cat(normalizers) if normalizers else None


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    u: Tensor | None,
    h: Tensor | None,
    state: State,
    options: _Options,
    dh: Tensor,
    dlast: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, a, u and the state; ``h`` is the output where the denominator is differentiated."""
    operands = _Operands(v.dtype)
    c, n, m = _flat_state(state, options.normalize)
    groups, m_last = _plan(a, u, m, options)
    states, normalizers = _run_states(k, v, c, n, groups, operands)
    dc, dn = _last_state_gradients(c, n, m_last, dlast)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    da, du = torch.empty_like(a), None if u is None else torch.empty_like(u)
    for group in reversed(groups):
        chunks = slice(group.first, group.first + group.shape[0])
        c_g = states[chunks]
        n_g = None if normalizers is None else normalizers[chunks]
        q_g, k_g, v_g, dh_g = (operands.load(x, group) for x in (q, k, v, dh))
        weights = group.weights()
        scores = _products(q_g, k_g.mT).mul_(weights)
        query = q_g * group.inter[..., None]
        key = operands.round(k_g * group.update[..., None])
        factor, dnq = group.factor, None
        if n_g is not None:
            nq = _normalizer_product(scores, query, n_g)
            factor = _row_factor(nq, group, options.scale)
            if h is not None:
                nq *= options.scale
                slope = torch.where(nq.abs() > group.floor, nq.sign(), 0.0)
                dnq = (operands.load(h, group) * dh_g).sum(-1).mul_(factor).mul_(slope).neg_()[..., None]
        dnum = operands.round(dh_g * factor[..., None])
        dscores = _products(dnum, v_g.mT)
        if dnq is not None:
            dscores += dnq
        # Row sums of this product are q . dq and column sums k . dk of what stays within the chunk.
        pairs = dscores * scores
        db = pairs.sum(-1) - (du_g := pairs.sum(-2))
        dscores = operands.round(dscores.mul_(weights))
        scores, query_n = operands.round(scores), operands.round(query)

        dq_g, dk_g, dv_g = torch.empty_like(query), torch.empty_like(query), v_g.new_empty(v_g.shape)
        dg = torch.empty_like(group.decay)
        for i in reversed(range(len(dg))):
            decay = group.decay[i]
            dc_n = operands.round(dc)
            torch.bmm(dnum[i], operands.round(c_g[i]).mT, out=dq_g[i])
            torch.bmm(v_g[i], dc_n.mT, out=dk_g[i])
            torch.bmm(scores[i].mT, dnum[i], out=dv_g[i])
            dv_g[i].baddbmm_(key[i], dc_n)
            torch.bmm(c_g[i].flatten(1)[:, None], dc.flatten(1)[..., None], out=dg[i][..., None])
            dc.mul_(decay[..., None]).baddbmm_(query_n[i].mT, dnum[i])
            if dn is not None:
                dk_g[i] += dn[:, None]
                dg[i] += (n_g[i] * dn).sum(-1, keepdim=True)
                dn = dn * decay
                if dnq is not None:
                    dn += (query[i] * dnq[i]).sum(-2)
        if dnq is not None:
            torch.addcmul(dq_g, dnq, n_g[..., None, :], out=dq_g)
        dq_g.mul_(group.inter[..., None])
        dk_g.mul_(group.update[..., None])
        db += (dq_g * q_g).sum(-1)
        dk_state = (dk_g * k_g).sum(-1)
        da_g = db.flip(-1).cumsum(-1).flip(-1) + (dk_state.cumsum(-1) - dk_state) + dg * group.decay
        _add_products(dq_g, dscores, k_g)
        _add_products(dk_g, dscores.mT, q_g)
        for x, value in ((dq, dq_g), (dk, dk_g), (dv, dv_g)):
            operands.store(x, group, value)
        operands.store(da[..., None], group, da_g[..., None])
        if du is not None:
            operands.store(du[..., None], group, (du_g + dk_state)[..., None])
    shape = (v.shape[0], v.shape[2])
    dc = dc.unflatten(0, shape)
    dstate = (dc,) if n is None else (dc, None if dn is None else dn.unflatten(0, shape), None)
    return dq, dk, dv, da, du, *dstate


def _last_state_gradients(
    c: Tensor, n: Tensor | None, m_last: Tensor | None, dlast: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of C [S, K, V] and n [S, K] as the last chunk leaves them: the converse of _shape_state."""
    dc = torch.zeros_like(c) if dlast[0] is None else dlast[0].reshape(c.shape).clone()
    if n is None:
        return dc, None
    dn = torch.zeros_like(n) if dlast[1] is None else dlast[1].reshape(n.shape)
    rest = torch.exp(m_last - m_last.to(c.dtype)).to(c.dtype)[:, None]
    return dc.mul_(rest[..., None]), dn * rest


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
    options = _Options(
        chunk_size=chunk_size,
        scale=scale,
        normalize=normalize,
        normalizer_gradient=normalize and normalizer_gradient,
    )
    state = zero_state(k, v, normalize=normalize) if initial_state is None else initial_state
    parts = tuple(state) if normalize else (state,)
    inputs = (q, k, v, log_decay, log_input, *parts)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        h, *last_parts = _Chunkwise.apply(options, *inputs)
        last: State = tuple(last_parts) if normalize else last_parts[0]
    else:
        h, last = _forward(q, k, v, log_decay, log_input, state, options)
    return (h, last) if return_last_state else h
