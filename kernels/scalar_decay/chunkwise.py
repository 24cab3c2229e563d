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
in groups: a group's q, k and v are copied into contiguous matrices, everything but the recurrence of the state is one
batched product or one elementwise pass over the group, and what h needs of n is one more column of the scores. The
backward pass recomputes the weights, and the states from one kept for each group.

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

ROWS_PER_GROUP = {"cpu": 1024, "cuda": 32768}
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
    """The gates of consecutive chunks of equal length L: G chunks, S = B * H sequences.

    update: [G, S, L], exp(c_j - e): weight of position j in the state after the group (pairwise: after the chunk), with
        e = m_end - b_end (plain: m = 0).
    decay: [G, S, 1], exp(p - e): what becomes of the state before the chunk. Factored: the first is that of the state
        before the group, the others do not count.
    floor: [G, S, L], exp(-(b_i + r_i)): the least denominator, or the plain form's only one.
    pairwise: None where factored.
    """

    update: Tensor
    decay: Tensor
    floor: Tensor
    pairwise: _Pairwise | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """A stretch of the sequence cut into chunks of equal length, and those into groups of ``size`` (the last: fewer).

    start, stop: time steps covered.
    """

    start: int
    stop: int
    length: int
    size: int
    groups: list[_Group]

    def view(self, x: Tensor) -> Tensor:
        """Return the segment's part of x [B, T, H, ...] as a view [N, B, H, L, ...]."""
        chunks = x[:, self.start : self.stop].unflatten(1, (-1, self.length))
        return chunks.permute(1, 0, 3, 2, *range(4, chunks.dim()))

    def cut(self, *tensors: Tensor) -> list[tuple[Any, ...]]:
        """Return every group with its part of each tensor [B, T, H, D], a view [G, B, H, L, D]."""
        return list(zip(self.groups, *(self.view(x).split(self.size) for x in tensors), strict=True))


def _plan(
    a: Tensor, u: Tensor | None, m0: Tensor | None, options: _Options, operands: _Operands
) -> tuple[list[_Segment], Tensor | None]:
    """Cut [B, T, H] gates into groups of whole chunks and a ragged rest; also return the last m [S], float64."""
    batch, seq_len, heads = a.shape
    a = a.double().transpose(1, 2).reshape(batch * heads, seq_len)
    u = torch.zeros_like(a) if u is None else u.double().transpose(1, 2).reshape(batch * heads, seq_len)
    m = None if m0 is None else m0.double().reshape(batch * heads)
    chunk = min(options.chunk_size, seq_len)
    whole = seq_len - seq_len % chunk
    segments: list[_Segment] = []
    for start, stop, length in ((0, whole, chunk), (whole, seq_len, seq_len - whole)):
        if start < stop:
            size = max(1, ROWS_PER_GROUP.get(a.device.type, 1024) // (length * batch * heads))
            groups, m = _plan_groups(a[:, start:stop], u[:, start:stop], m, length, size, operands)
            segments.append(_Segment(start=start, stop=stop, length=length, size=size, groups=groups))
    return segments, m


def _plan_groups(
    a: Tensor, u: Tensor, m: Tensor | None, length: int, size: int, operands: _Operands
) -> tuple[list[_Group], Tensor | None]:
    """Return groups of ``size`` chunks of equal length with float64 gates a, u [S, N * L], and m [S] after them."""
    dtype = operands.compute
    b, u = (x.unflatten(1, (-1, length)).transpose(0, 1) for x in (a, u))  # [N, S, L]
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

    num_chunks = len(b)
    starts = range(0, num_chunks, size)
    factored = [False] * len(starts)
    if operands.exact:
        # e of the group, as the chunk counts: without the decay from the start of the chunk.
        group_end = total + torch.cat([x[-1:].expand_as(x) for x in (end - total).split(size)])
        low, high = FACTORED_RANGE
        fits = (column.amin(-1) - group_end >= low) & (group_end - row.amin(-1) <= high)
        fits_chunk = fits.all(-1).tolist()
        factored = [all(fits_chunk[i : i + size]) for i in starts]
    pairwise: list[_Pairwise | None] = [None] * len(starts)
    if all(factored):
        end, row = group_end, group_end[..., None]
    else:
        row = row.to(dtype)
        inter = torch.exp(before[..., None] - row).to(dtype)
        rounded = column.to(dtype)
        rest = None if dtype == torch.float64 else (column - rounded).to(dtype)
        for i, is_factored in enumerate(factored):
            span = slice(i * size, (i + 1) * size)
            if not is_factored:
                pairwise[i] = _Pairwise(
                    column=rounded[span],
                    column_rest=None if rest is None else rest[span],
                    row=row[span],
                    inter=inter[span],
                )
        if any(factored):
            chosen = torch.tensor(factored, device=b.device).repeat_interleave(size)[:num_chunks, None]
            end = torch.where(chosen, group_end, end)
            row = torch.where(chosen[..., None], group_end[..., None], row)
    update = torch.exp(column - end[..., None]).to(dtype).split(size)
    decay = torch.exp(before - end).to(dtype)[..., None].split(size)
    floor = torch.exp(-b - row).to(dtype).split(size)
    groups = [
        _Group(update=update_g, decay=decay_g, floor=floor_g, pairwise=pairwise_g)
        for update_g, decay_g, floor_g, pairwise_g in zip(update, decay, floor, pairwise, strict=True)
    ]
    return groups, m


class _Operands:
    """Moves the chunks of a group between [B, T, H, D] tensors and matrices, and rounds operands of products."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.compute = dtype, compute_dtype(dtype)

    @property
    def exact(self) -> bool:
        """Whether operands of matrix products are not rounded."""
        return self.dtype == self.compute

    def load(self, x: Tensor) -> Tensor:
        """Return a view [G, B, H, L, D] as contiguous [G, S, L, D] in the accumulators' dtype."""
        x = x.contiguous() if self.exact else x.to(self.compute, memory_format=torch.contiguous_format)
        return x.flatten(1, 2)

    def load_scaled(self, x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a view [G, B, H, L, D] times factor [G, S, L], as :meth:`load`."""
        if out is None:
            out = x.new_empty(x.shape, dtype=self.compute)
        torch.mul(x, factor.view(*x.shape[:-1], 1), out=out.view(x.shape))
        return out.view(*factor.shape, x.shape[-1])

    def store(self, x: Tensor, value: Tensor) -> None:
        """Write [G, S, L, D] into a view [G, B, H, L, D]."""
        x.copy_(value.view(x.shape))

    def store_scaled(self, x: Tensor, value: Tensor, factor: Tensor) -> None:
        """Write [G, S, L, D] times factor [G, S, L] into a view [G, B, H, L, D]."""
        value, factor = value.view(x.shape), factor.view(*x.shape[:-1], 1)
        if self.exact:
            torch.mul(value, factor, out=x)
        else:
            x.copy_(value.mul_(factor))

    def round(self, x: Tensor) -> Tensor:
        """Round an operand of a matrix product to the inputs' dtype."""
        return x if self.exact else x.to(self.dtype).to(self.compute)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b [G, S, ., .]."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(*a.shape[:-1], b.shape[-1])


def _add_products(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to out [G, S, ., .]."""
    out.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))


def _run_normalizer(n: Tensor, key: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
    """Return n before every chunk of the group [G, S, K] (factored: decayed to its end), and n [S, K] after it."""
    sums = key.sum(-2)
    if group.pairwise is None:
        running = torch.cat(((n * group.decay[0])[None], sums)).cumsum(0)
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
        return running[1:], running[0] * group.decay[0]
    after = []
    for part, decay in zip(reversed(sums.unbind()), reversed(group.decay.unbind()), strict=True):
        after.append(dn)
        dn = torch.addcmul(part, dn, decay)
    return torch.stack(after[::-1]), dn


@dataclass(slots=True, kw_only=True)
class _Keys:
    """The keys of a group.

    columns: [G, S, L, K], or [G, S, 1 + L, K] behind n before the chunk: what queries are multiplied with for the
        scores. Factored: scaled.
    update: [G, S, L, K], scaled by their weights in the state.
    """

    columns: Tensor
    update: Tensor

    @classmethod
    def load(cls, k: Tensor, group: _Group, operands: _Operands, *, normalize: bool) -> _Keys:
        """Cut a view [G, B, H, L, K]; n is left open."""
        chunks, sequences, length = group.update.shape
        columns = k.new_empty(chunks, sequences, normalize + length, k.shape[-1], dtype=operands.compute)
        keys = columns[:, :, int(normalize) :]
        if group.pairwise is None:
            return cls(columns=columns, update=operands.load_scaled(k, group.update, out=keys))
        operands.store(keys.view(k.shape), k)
        return cls(columns=columns, update=keys * group.update[..., None])

    def scores(self, query: Tensor, group: _Group) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return weighted products with queries [G, S, L, L], n^T q [G, S, L] (normalised), and the weights (pairwise).

        Neither has the scale.
        """
        extra = self.columns.shape[2] - self.update.shape[2]
        scores, weights = _products(query, self.columns.mT), None
        if group.pairwise is None:
            scores.tril_(extra)
        else:
            weights = group.pairwise.weights()
            scores[..., extra:] *= weights
            scores[..., :extra] *= group.pairwise.inter[..., None]
        return scores[..., extra:], scores.sum(-1) if extra else None, weights


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


class _Checkpoint(NamedTuple):
    """C [S, K, V] before a group and, in the normalised form, n before every chunk of it, as _run_normalizer's."""

    c: Tensor
    n: Tensor | None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    u: Tensor | None,
    state: _States,
    options: _Options,
    checkpoints: list[_Checkpoint] | None = None,
) -> tuple[Tensor, _States]:
    """Return h and the last state; append what the backward pass needs of every group to ``checkpoints``."""
    operands = _Operands(v.dtype)
    c, n = state.c.clone(), state.n
    segments, m = _plan(a, u, state.m, options, operands)
    h = torch.empty_like(v)
    for group, q_x, k_x, v_x, h_x in (parts for segment in segments for parts in segment.cut(q, k, v, h)):
        q_g, v_g = operands.load(q_x), operands.load(v_x)
        keys = _Keys.load(k_x, group, operands, normalize=n is not None)
        n_before = None
        if n is not None:
            n_before, n = _run_normalizer(n, keys.update, group)
            keys.columns[:, :, 0] = n_before
        if checkpoints is not None:
            checkpoints.append(_Checkpoint(c.clone(), n_before))
        scores, nq, _ = keys.scores(q_g, group)
        factor = _row_factor(nq, group, options.scale)
        out = _products(operands.round(scores), v_g)
        if group.pairwise is None:
            c *= group.decay[0, ..., None]
            for query_c, key_c, v_c, out_c in zip(q_g, keys.update.mT, v_g, out, strict=True):
                out_c.baddbmm_(query_c, c)
                c.baddbmm_(key_c, v_c)
        else:
            query, key = (operands.round(x) for x in (q_g * group.pairwise.inter[..., None], keys.update))
            for query_c, key_c, v_c, out_c, decay in zip(query, key.mT, v_g, out, group.decay, strict=True):
                out_c.baddbmm_(query_c, operands.round(c))
                c.mul_(decay[..., None]).baddbmm_(key_c, v_c)
        operands.store_scaled(h_x, out, factor)
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


def _sweep_factored(
    c: Tensor,
    dc: Tensor,
    query: Tensor,
    key: Tensor,
    v_g: Tensor,
    dnum: Tensor,
    dv_g: Tensor,
    group: _Group,
    operands: _Operands,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run C forwards and dC backwards through a group; see _sweep_pairwise. <C, dC> [1, S] of the last chunk alone."""
    c = c * group.decay[0, ..., None]
    dq_g, dk_g = query.new_empty(query.shape), key.new_empty(key.shape)
    first, *others = zip(dnum, dq_g, strict=True)
    torch.bmm(first[0], c.mT, out=first[1])
    for (dnum_c, dq_c), key_c, v_c in zip(others, key.mT, v_g, strict=False):
        c.baddbmm_(key_c, v_c)
        torch.bmm(dnum_c, c.mT, out=dq_c)
    dg = (c * dc).sum((-2, -1))[None]
    parts = (query.mT, key, v_g, dnum, dk_g, dv_g)
    for query_c, key_c, v_c, dnum_c, dk_c, dv_c in zip(*(reversed(x.unbind()) for x in parts), strict=True):
        torch.bmm(v_c, dc.mT, out=dk_c)
        dv_c.baddbmm_(key_c, dc)
        dc.baddbmm_(query_c, dnum_c)
    dc *= group.decay[0, ..., None]
    return dq_g, dk_g, dg


def _sweep_pairwise(
    c: Tensor,
    dc: Tensor,
    query: Tensor,
    key: Tensor,
    v_g: Tensor,
    dnum: Tensor,
    dv_g: Tensor,
    group: _Group,
    operands: _Operands,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run C forwards and dC backwards through a group.

    Takes C [S, K, V] before the group and dC after it, and leaves in dC that before it; adds what comes through the
    states to dv. Returns that part of dq and dk [G, S, L, K], as of the weighted operands, and the products <C, dC>
    [G, S] of C before and dC after every chunk.
    """
    states = c.new_empty(len(key), *c.shape)
    slots = states.unbind()
    slots[0].copy_(c)
    for before, after, key_c, v_c, decay in zip(slots, slots[1:], key.mT, v_g, group.decay, strict=False):
        torch.mul(before, decay[..., None], out=after).baddbmm_(key_c, v_c)
    dq_g, dk_g = _products(dnum, operands.round(states).mT), key.new_empty(key.shape)
    dg = dc.new_empty(group.decay.shape[:2])
    scratch = torch.empty_like(dc)
    parts = (query.mT, key, v_g, dnum, dk_g, dv_g, states, dg, group.decay)
    for query_c, key_c, v_c, dnum_c, dk_c, dv_c, c_c, dg_c, decay in zip(
        *(reversed(x.unbind()) for x in parts), strict=True
    ):
        dc_n = operands.round(dc)
        torch.bmm(v_c, dc_n.mT, out=dk_c)
        dv_c.baddbmm_(key_c, dc_n)
        # Not a product of matrices: K * V terms of either sign want torch.sum's pairwise summation.
        torch.sum(torch.mul(c_c, dc, out=scratch), (1, 2), out=dg_c)
        dc.mul_(decay[..., None]).baddbmm_(query_c, dnum_c)
    return dq_g, dk_g, dg * group.decay[..., 0]


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    u: Tensor | None,
    h: Tensor | None,
    state: _States,
    checkpoints: list[_Checkpoint],
    options: _Options,
    dh: Tensor,
    dlast: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, a, u and C, n; ``h`` is the output where dh reaches n."""
    operands = _Operands(v.dtype)
    segments, m_last = _plan(a, u, state.m, options, operands)
    dc, dn = _last_state_gradients(state, m_last, dlast)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    da, du = torch.empty_like(a), None if u is None else torch.empty_like(u)
    remaining = list(checkpoints)
    for segment in reversed(segments):
        gates = []
        for group, q_x, k_x, v_x, dh_x, h_x, dq_x, dk_x, dv_x in reversed(
            segment.cut(q, k, v, dh, dh if h is None else h, dq, dk, dv)
        ):
            checkpoint = remaining.pop()
            q_g, v_g = operands.load(q_x), operands.load(v_x)
            keys = _Keys.load(k_x, group, operands, normalize=checkpoint.n is not None)
            if checkpoint.n is not None:
                keys.columns[:, :, 0] = checkpoint.n
            scores, nq, weights = keys.scores(q_g, group)
            factor, dnq = _row_factor(nq, group, options.scale), None
            if nq is not None and h is not None:
                nq *= options.scale
                slope = torch.where(nq.abs() > group.floor, nq.sign(), 0.0)
                dnq = (h_x * dh_x).sum(-1, dtype=operands.compute).flatten(1, 2)
                dnq = dnq.mul_(factor).mul_(slope).neg_()[..., None]
            dnum = operands.round(operands.load_scaled(dh_x, factor))
            dscores = _products(dnum, v_g.mT)
            if dnq is not None:
                dscores += dnq
            # Row sums of this product are q . dq and column sums k . dk of what stays within the chunk.
            pairs = dscores * scores
            db = pairs.sum(-1) - (du_g := pairs.sum(-2))
            dscores = operands.round(dscores.tril_() if weights is None else dscores.mul_(weights))
            dv_g = _products(operands.round(scores).mT, dnum)

            if group.pairwise is None:
                query, key, q_n, k_n = q_g, keys.update, q_g, keys.update
            else:
                query, key = q_g * group.pairwise.inter[..., None], keys.update
                q_n, k_n = operands.round(query), operands.round(key)
            sweep = _sweep_factored if group.pairwise is None else _sweep_pairwise
            dq_g, dk_g, dg = sweep(checkpoint.c, dc, q_n, k_n, v_g, dnum, dv_g, group, operands)
            if dn is not None and checkpoint.n is not None:
                dn_g, dn = _run_normalizer_gradient(dn, query, dnq, group)
                dk_g += dn_g[..., None, :]
                dg += (checkpoint.n * dn_g)[-len(dg) :].sum(-1) * (1 if group.pairwise is None else group.decay[..., 0])
                if dnq is not None:
                    dq_g.addcmul_(dnq, checkpoint.n[..., None, :])
            query_dq, key_dk = (dq_g * query).sum(-1), (dk_g * key).sum(-1)
            if group.pairwise is None:
                # <C, dC> from chunk to chunk: less what its queries, plus what the one before's keys do to it.
                steps = query_dq[1:].sum(-1) - key_dk[:-1].sum(-1)
                dg = torch.cat((steps, dg)).flip(0).cumsum(0).flip(0)
                _add_products(dq_g, dscores, key)
                _add_products(dk_g, dscores.mT, q_g)
                operands.store_scaled(dk_x, dk_g, group.update)
            else:
                k_g = keys.columns[:, :, -key.shape[2] :]
                _add_products(dq_g.mul_(group.pairwise.inter[..., None]), dscores, k_g)
                _add_products(dk_g.mul_(group.update[..., None]), dscores.mT, q_g)
                operands.store(dk_x, dk_g)
            operands.store(dq_x, dq_g)
            operands.store(dv_x, dv_g)
            gates.append((db + query_dq, du_g + key_dk, key_dk, dg))
        db_s, du_s, key_dk_s, dg_s = (torch.cat(parts[::-1]) for parts in zip(*gates, strict=True))
        da_s = db_s.flip(-1).cumsum(-1).flip(-1) + (key_dk_s.cumsum(-1) - key_dk_s) + dg_s[..., None]
        segment.view(da).copy_(da_s.view(segment.view(da).shape))
        if du is not None:
            segment.view(du).copy_(du_s.view(segment.view(du).shape))
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
