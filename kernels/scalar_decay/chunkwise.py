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
recomputes the weights, and the states from one kept for each group.

Where the gates of a group allow it (:data:`FACTORED_RANGE`), every row of the group takes the same r_i = e, that of its
end: the weights become factors exp(c_j - e) of the keys, and neither q nor the state is touched between the group's
chunks. Elsewhere, and in low precision, where scaled keys would be rounded, the weights are computed pair by pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reference import State, compute_dtype, zero_state

ROWS_PER_GROUP = {"cpu": 1024, "cuda": 65536}
"""Rows (B * H * chunks * L) of a group: few enough for a core's cache, or enough to fill a GPU."""

FACTORED_RANGE = (-60.0, 40.0)
"""Least c_j - e and largest e - r_i of a group with which float32 neither underflows nor overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    chunk_size: int
    scale: float
    normalize: bool
    normalizer_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairwise:
    """What a group needs where its weights are computed pair by pair: G chunks of length L, S = B * H sequences.

    column, column_rest, row: [G, S, L] with c_j = column + column_rest and r_i = row; column_rest is None in float64.
    inter: [G, S, L], exp(p - r_i): weight of the state before the chunk in h_i.
    """

    column: Tensor
    column_rest: Tensor | None
    row: Tensor
    inter: Tensor

    def weights(self) -> Tensor:
        """Return exp(c_j - r_i) for j <= i, else 0: [G, S, L, L]."""
        log_weights = self.column[..., None, :] - self.row[..., :, None]
        if self.column_rest is not None:
            log_weights += self.column_rest[..., None, :]
        # Above the diagonal the exponential may be inf; tril_ overwrites, it does not multiply.
        return log_weights.exp_().tril_()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Consecutive chunks of equal length L, and their gates: G chunks, S = B * H sequences.

    start, stop: time steps covered.
    update: [G, S, L], exp(c_j - e): weight of position j in the state after the group (pairwise: after the chunk), with
        e = m_end - b_end (plain: m = 0).
    decay: [S, 1], exp(p - e): what becomes of the state before the group (pairwise: [G, S, 1], before the chunk).
    floor: [G, S, L], exp(-(b_i + r_i)): the least denominator, or the plain form's only one.
    pairwise: None where factored.
    """

    start: int
    stop: int
    update: Tensor
    decay: Tensor
    floor: Tensor
    pairwise: _Pairwise | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, S, L)"""
        return self.update.shape  # type: ignore[return-value]

    def decays(self) -> Sequence[Tensor | None]:
        """Return what the state [S, K, V] is multiplied by after every chunk, None for nothing."""
        return [None] * len(self.update) if self.pairwise is None else self.decay[..., None].unbind()


def _plan(
    a: Tensor, u: Tensor | None, m0: Tensor | None, options: _Options, operands: _Operands
) -> tuple[list[_Group], Tensor | None]:
    """Cut [B, T, H] gates into groups of whole chunks and a ragged rest; also return the last m [S], float64."""
    batch, seq_len, heads = a.shape
    a = a.double().transpose(1, 2).reshape(batch * heads, seq_len)
    u = torch.zeros_like(a) if u is None else u.double().transpose(1, 2).reshape(batch * heads, seq_len)
    m = None if m0 is None else m0.double().reshape(batch * heads)
    chunk = min(options.chunk_size, seq_len)
    whole = seq_len - seq_len % chunk
    groups: list[_Group] = []
    for start, stop, length in ((0, whole, chunk), (whole, seq_len, seq_len - whole)):
        if start < stop:
            m = _plan_segment(groups, a[:, start:stop], u[:, start:stop], m, start, length, operands)
    return groups, m


def _plan_segment(
    groups: list[_Group],
    a: Tensor,
    u: Tensor,
    m: Tensor | None,
    start: int,
    length: int,
    operands: _Operands,
) -> Tensor | None:
    """Append the groups of chunks of equal length with float64 gates a, u [S, N * L]; return m [S] after them."""
    dtype = operands.compute
    b, u = (x.unflatten(1, (-1, length)).transpose(0, 1).contiguous() for x in (a, u))  # [N, S, L]
    b = b.cumsum(-1)
    column = u - b
    total = b[..., -1].cumsum(0) - b[..., -1]
    if m is None:
        before = after = torch.zeros_like(total)
        row = -b
    else:
        # m_k = b_L + max(m_{k-1}, max_j c_j), for all chunks at once: a running maximum of c less the decay so far.
        peaks = torch.cat((m[None], column.amax(-1) - total)).cummax(0).values
        before = peaks[:-1] + total
        row = torch.maximum(before[..., None], column.cummax(-1).values)
        after = b[..., -1] + row[..., -1]
        m = after[-1].contiguous()
    end = after - b[..., -1]  # e of every chunk, [N, S]

    num_chunks, sequences, _ = b.shape
    size = max(1, ROWS_PER_GROUP.get(a.device.type, 1024) // (length * sequences))
    first = torch.arange(num_chunks, device=a.device) // size * size
    last = (first + (size - 1)).clamp_(max=num_chunks - 1)
    offset = total - total[first]  # decay from the start of the group to that of the chunk
    group_end = end[last] - offset[last] + offset  # e of the group, as the chunk counts
    key_exponent = column - group_end[..., None]
    factored = [False] * num_chunks
    if operands.exact:
        low, high = FACTORED_RANGE
        query_exponent = group_end - row.amin(-1)
        factored = ((key_exponent.amin(-1) >= low) & (query_exponent <= high)).all(-1).tolist()
    factored = [all(factored[i : i + size]) for i in range(0, num_chunks, size)]
    if any(factored):
        update = key_exponent.exp_().to(dtype)
        decay = torch.exp(before[first] + offset - group_end).to(dtype)[..., None]
        floor = torch.exp(-b - group_end[..., None]).to(dtype)
    if not all(factored):
        pairwise_row = row.to(dtype)
        pairwise_update = torch.exp(column - end[..., None]).to(dtype)
        pairwise_decay = torch.exp(before - end).to(dtype)[..., None]
        pairwise_floor = torch.exp(-b - pairwise_row).to(dtype)
        inter = torch.exp(before[..., None] - pairwise_row).to(dtype)
        rounded = column.to(dtype)
        rest = None if dtype == torch.float64 else (column - rounded).to(dtype)
    for i, is_factored in zip(range(0, num_chunks, size), factored, strict=True):
        j = min(i + size, num_chunks)
        span = {"start": start + i * length, "stop": start + j * length}
        if is_factored:
            groups.append(_Group(**span, update=update[i:j], decay=decay[i], floor=floor[i:j], pairwise=None))
            continue
        pairwise = _Pairwise(
            column=rounded[i:j],
            column_rest=None if rest is None else rest[i:j],
            row=pairwise_row[i:j],
            inter=inter[i:j],
        )
        groups.append(
            _Group(
                **span,
                update=pairwise_update[i:j],
                decay=pairwise_decay[i:j],
                floor=pairwise_floor[i:j],
                pairwise=pairwise,
            )
        )
    return m


class _Operands:
    """Cuts [B, T, H, D] tensors into the chunks of a group and rounds operands of matrix products."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.compute = dtype, compute_dtype(dtype)

    @property
    def exact(self) -> bool:
        """Whether operands of matrix products are not rounded."""
        return self.dtype == self.compute

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

    def store_scaled(self, x: Tensor, group: _Group, value: Tensor, factor: Tensor) -> None:
        """Write [G, S, L, D] times factor [G, S, L] into the group's part of x."""
        target = self.view(x, group)
        value, factor = value.view(target.shape), factor.reshape(target.shape[:-1])[..., None]
        if self.exact:
            torch.mul(value, factor, out=target)
        else:
            target.copy_(value.mul_(factor))

    def round(self, x: Tensor) -> Tensor:
        """Round an operand of a matrix product to the inputs' dtype."""
        return x if self.exact else x.to(self.dtype).to(self.compute)


def _scale_rows(x: Tensor, factor: Tensor) -> Tensor:
    """Return x [G, S, L, D] times factor [G, S, L], contiguous whatever the strides of x."""
    return torch.mul(x, factor[..., None], out=x.new_empty(x.shape))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b [G, S, ., .], one chunk at a time: operands of different chunks need not have a common stride."""
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    for a_c, b_c, out_c in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
        torch.bmm(a_c, b_c, out=out_c)
    return out


def _add_products(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to out [G, S, ., .]."""
    for a_c, b_c, out_c in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
        out_c.baddbmm_(a_c, b_c)


def _run_normalizer(n: Tensor, key: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
    """Return n before every chunk of the group [G, S, K] (factored: decayed to its end), and n [S, K] after it."""
    sums = key.sum(-2)
    if group.pairwise is None:
        running = torch.cat(((n * group.decay)[None], sums)).cumsum(0)
        return running[:-1], running[-1]
    before = []
    for decay, part in zip(group.decay.unbind(), sums.unbind(), strict=True):
        before.append(n)
        n = torch.addcmul(part, n, decay)
    return torch.stack(before), n


def _run_normalizer_gradient(dn: Tensor, query: Tensor, dnq: Tensor | None, group: _Group) -> tuple[Tensor, Tensor]:
    """Return the gradient of n after every chunk of the group [G, S, K], and of n [S, K] before it."""
    sums = torch.zeros_like(query[:, :, 0]) if dnq is None else (query * dnq).sum(-2)
    if group.pairwise is None:
        running = torch.cat((dn[None], sums.flip(0))).cumsum(0).flip(0)
        return running[1:], running[0] * group.decay
    after = []
    for part, decay in zip(reversed(sums.unbind()), reversed(group.decay.unbind()), strict=True):
        after.append(dn)
        dn = torch.addcmul(part, dn, decay)
    return torch.stack(after[::-1]), dn


def _scale_operands(q_g: Tensor, k_g: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
    """Return the queries that meet the state and the keys that update it, [G, S, L, K]."""
    query = q_g if group.pairwise is None else _scale_rows(q_g, group.pairwise.inter)
    return query, _scale_rows(k_g, group.update)


def _scores(q_g: Tensor, k_g: Tensor, key: Tensor, group: _Group) -> tuple[Tensor, Tensor | None]:
    """Return the weighted products of queries and keys [G, S, L, L], and their weights where not factored."""
    if group.pairwise is None:
        return _products(q_g, key.mT).tril_(), None
    weights = group.pairwise.weights()
    return _products(q_g, k_g.mT).mul_(weights), weights


def _normalizer_product(scores: Tensor, query: Tensor, n: Tensor) -> Tensor:
    """Return n_i^T q_i [G, S, L] without the scale, from weighted scores, weighted queries and n before each chunk."""
    return _products(query, n[..., None])[..., 0].add_(scores.sum(-1))


def _row_factor(nq: Tensor | None, group: _Group, scale: float) -> Tensor:
    """Return scale / max(|scale n^T q|, floor), [G, S, L]; the plain form has no n."""
    return scale / (group.floor if nq is None else torch.maximum((scale * nq).abs_(), group.floor))


class _States(NamedTuple):
    """C [S, K, V] and, in the normalised form, n [S, K] and m [S] (float64 within this module)."""

    c: Tensor
    n: Tensor | None = None
    m: Tensor | None = None

    @classmethod
    def flatten(cls, parts: Sequence[Tensor]) -> _States:
        """Merge B and H of C [B, H, K, V] or C, n, m."""
        return cls(*(x.flatten(0, 1) for x in parts))

    def unflatten(self, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """Split S into B and H and round m, C and n making good for it: the state as the caller sees it."""
        if self.n is None or self.m is None:
            return (self.c.unflatten(0, shape),)
        rounded, rest = _round_stabilizer(self.m, self.c.dtype)
        parts = (self.c * rest[:, None, None], self.n * rest[:, None], rounded)
        return tuple(x.unflatten(0, shape) for x in parts)


def _round_stabilizer(m: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return m in ``dtype`` and the factor exp(m - rounded m) that C and n take for it."""
    rounded = m.to(dtype)
    return rounded, torch.exp(m - rounded).to(dtype)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    u: Tensor | None,
    state: _States,
    options: _Options,
    checkpoints: list[_States] | None = None,
) -> tuple[Tensor, _States]:
    """Return h and the last state; append the state before every group to ``checkpoints``."""
    operands = _Operands(v.dtype)
    c, n = state.c.clone(), state.n
    groups, m = _plan(a, u, state.m, options, operands)
    h = torch.empty_like(v)
    for group in groups:
        if checkpoints is not None:
            checkpoints.append(_States(c.clone(), n))
        q_g, k_g, v_g = (operands.load(x, group) for x in (q, k, v))
        query, key = _scale_operands(q_g, k_g, group)
        scores, _ = _scores(q_g, k_g, key, group)
        nq = None
        if n is not None:
            n_before, n = _run_normalizer(n, key, group)
            nq = _normalizer_product(scores, query, n_before)
        factor = _row_factor(nq, group, options.scale)
        scores, query, key = (operands.round(x) for x in (scores, query, key))
        out = v_g.new_empty(v_g.shape)
        if group.pairwise is None:
            c.mul_(group.decay[..., None])
        chunks = [x.unbind() for x in (scores, v_g, query, key.mT, out)]
        for scores_c, v_c, query_c, key_c, out_c, decay in zip(*chunks, group.decays(), strict=True):
            torch.bmm(scores_c, v_c, out=out_c)
            out_c.baddbmm_(query_c, operands.round(c))
            if decay is not None:
                c.mul_(decay)
            c.baddbmm_(key_c, v_c)
        operands.store_scaled(h, group, out, factor)
    return h, _States(c, n, m)


class _Chunkwise(torch.autograd.Function):
    """The chunkwise form; saves its arguments and a state per group and recomputes the rest."""

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
        ctx.checkpoints = []
        h, last = _forward(q, k, v, a, u, _States.flatten(state), options, ctx.checkpoints)
        ctx.options = options
        ctx.save_for_backward(q, k, v, a, u, h if options.normalizer_gradient else None, *state)
        ctx.set_materialize_grads(False)
        parts = last.unflatten((v.shape[0], v.shape[2]))
        ctx.mark_non_differentiable(*parts[2:])
        return h, *parts

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, *dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, a, u, h, *state = ctx.saved_tensors
        dh = torch.zeros_like(v) if dh is None else dh.contiguous()
        return None, *_backward(q, k, v, a, u, h, _States.flatten(state), ctx.checkpoints, ctx.options, dh, dlast)


def _run_states(c: Tensor, key: Tensor, v_g: Tensor, group: _Group) -> Tensor:
    """Return C [G, S, K, V] before every chunk of the group (factored: decayed to its end), C [S, K, V] first."""
    states = c.new_empty(group.shape[0], *c.shape)
    slots = states.unbind()
    torch.mul(c, group.decay[..., None] if group.pairwise is None else 1.0, out=slots[0])
    for before, after, key_c, v_c, decay in zip(
        slots, slots[1:], key.mT.unbind(), v_g.unbind(), group.decays(), strict=False
    ):
        if decay is None:
            torch.baddbmm(before, key_c, v_c, out=after)
        else:
            torch.mul(before, decay, out=after).baddbmm_(key_c, v_c)
    return states


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    u: Tensor | None,
    h: Tensor | None,
    state: _States,
    checkpoints: list[_States],
    options: _Options,
    dh: Tensor,
    dlast: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, a, u and C, n; ``h`` is the output where dh reaches n."""
    operands = _Operands(v.dtype)
    groups, m_last = _plan(a, u, state.m, options, operands)
    dc, dn = _last_state_gradients(state, m_last, dlast)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    da, du = torch.empty_like(a), None if u is None else torch.empty_like(u)
    scratch = torch.empty_like(dc)
    for group, checkpoint in zip(reversed(groups), reversed(checkpoints), strict=True):
        q_g, k_g, v_g, dh_g = (operands.load(x, group) for x in (q, k, v, dh))
        query, key = _scale_operands(q_g, k_g, group)
        c_g = _run_states(checkpoint.c, operands.round(key), v_g, group)
        n_g = None if checkpoint.n is None else _run_normalizer(checkpoint.n, key, group)[0]
        scores, weights = _scores(q_g, k_g, key, group)
        nq = None if n_g is None else _normalizer_product(scores, query, n_g)
        factor, dnq = _row_factor(nq, group, options.scale), None
        if nq is not None and h is not None:
            nq *= options.scale
            slope = torch.where(nq.abs() > group.floor, nq.sign(), 0.0)
            dnq = (operands.load(h, group) * dh_g).sum(-1).mul_(factor).mul_(slope).neg_()[..., None]
        dnum = operands.round(_scale_rows(dh_g, factor))
        dscores = _products(dnum, v_g.mT)
        if dnq is not None:
            dscores += dnq
        # Row sums of this product are q . dq and column sums k . dk of what stays within the chunk.
        pairs = dscores * scores
        db = pairs.sum(-1) - (du_g := pairs.sum(-2))
        dscores = operands.round(dscores.tril_() if weights is None else dscores.mul_(weights))
        scores, query_n, key_n = (operands.round(x) for x in (scores, query, key))

        dq_g, dk_g, dv_g = torch.empty_like(key), torch.empty_like(key), torch.empty_like(dnum)
        dg = torch.empty_like(group.update[..., 0])
        parts = (dnum, c_g.mT, v_g, scores.mT, key_n, query_n.mT, dq_g, dk_g, dv_g, dg)
        chunks = zip(*(reversed(x.unbind()) for x in parts), reversed(group.decays()), strict=True)
        for dnum_c, c_c, v_c, scores_c, key_c, query_c, dq_c, dk_c, dv_c, dg_c, decay in chunks:
            dc_n = operands.round(dc)
            torch.bmm(dnum_c, operands.round(c_c), out=dq_c)
            torch.bmm(v_c, dc_n.mT, out=dk_c)
            torch.bmm(scores_c, dnum_c, out=dv_c)
            dv_c.baddbmm_(key_c, dc_n)
            # Not a product of matrices: K * V terms of either sign want torch.sum's pairwise summation.
            torch.sum(torch.mul(c_c.mT, dc, out=scratch), (1, 2), out=dg_c)
            if decay is not None:
                dc.mul_(decay)
            dc.baddbmm_(query_c, dnum_c)
        if group.pairwise is None:
            dc.mul_(group.decay[..., None])
        if dn is not None and n_g is not None:
            dn_g, dn = _run_normalizer_gradient(dn, query, dnq, group)
            dk_g += dn_g[..., None, :]
            dg += (n_g * dn_g).sum(-1)
            if dnq is not None:
                dq_g.addcmul_(dnq, n_g[..., None, :])
        db += (dq_g * query).sum(-1)
        dk_state = (dk_g * key).sum(-1)
        dg = dg[..., None] if group.pairwise is None else dg[..., None] * group.decay
        da_g = db.flip(-1).cumsum(-1).flip(-1) + (dk_state.cumsum(-1) - dk_state) + dg
        if group.pairwise is None:
            _add_products(dq_g, dscores, key)
            _add_products(dk_g, dscores.mT, q_g)
            operands.store(dq, group, dq_g)
            operands.store_scaled(dk, group, dk_g, group.update)
        else:
            _add_products(dq_g.mul_(group.pairwise.inter[..., None]), dscores, k_g)
            _add_products(dk_g.mul_(group.update[..., None]), dscores.mT, q_g)
            operands.store(dq, group, dq_g)
            operands.store(dk, group, dk_g)
        operands.store(dv, group, dv_g)
        operands.store(da[..., None], group, da_g[..., None])
        if du is not None:
            operands.store(du[..., None], group, (du_g + dk_state)[..., None])
    shape = (v.shape[0], v.shape[2])
    dstate = (dc.unflatten(0, shape),) if dn is None else (dc.unflatten(0, shape), dn.unflatten(0, shape), None)
    return dq, dk, dv, da, du, *dstate


def _last_state_gradients(
    state: _States, m_last: Tensor | None, dlast: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of C and n as the last chunk leaves them: the converse of _States.unflatten."""
    dc = torch.zeros_like(state.c) if dlast[0] is None else dlast[0].reshape(state.c.shape).clone()
    if state.n is None or m_last is None:
        return dc, None
    dn = torch.zeros_like(state.n) if dlast[1] is None else dlast[1].reshape(state.n.shape)
    rest = _round_stabilizer(m_last, dc.dtype)[1][:, None]
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
) -> Tensor | tuple[Tensor, Any]:
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
    parts = (state,) if isinstance(state, Tensor) else tuple(state)
    inputs = (q, k, v, log_decay, log_input, *parts)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        h, *last = _Chunkwise.apply(options, *inputs)
    else:
        h, last_state = _forward(q, k, v, log_decay, log_input, _States.flatten(parts), options)
        last = last_state.unflatten((v.shape[0], v.shape[2])) if return_last_state else ()
    if not return_last_state:
        return h
    return h, tuple(last) if normalize else last[0]
