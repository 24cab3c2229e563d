"""Chunkwise form of the scalar-decay recurrence in torch: any device, any chunk length, differentiable.

Within a chunk of length L, with b the inclusive cumulative sum of the log decay a, u the log input gate and C the state
before the chunk,

    h_i = scale (sum_{j<=i} exp(b_i - b_j + u_j) (q_i . k_j) v_j + exp(b_i) C^T q_i)
    C'  = exp(b_L) C + sum_j exp(b_L - b_j + u_j) k_j v_j^T

With c_j = u_j - b_j and r_i = -b_i, key j has the weight exp(c_j - r_i) in row i. The state before the chunk has the
weight exp(p - r_i) with p = 0, and the weights of row L are those that update the state. The normalised form (see
reference.py) differs in r and p alone: r_i = max(p, max_{j<=i} c_j), where p is the stabiliser m of the state before
the chunk. Then b cancels, every exponent is <= 0, and m_i = b_i + r_i. TFLA paper, section 3, appendices A and B.

Precision: gate values [B, T, H] are float64. r is rounded to the accumulators' dtype, and a factor per row of h
corrects for the rounding; c is split in two parts, so that differences of large cumulative sums keep their digits.
Weights, states and accumulators are float32. Operands of matrix products are rounded to bfloat16 beside bfloat16
inputs, but not to float16, which might not hold them. For float64 inputs everything is float64.

Speed: on a CPU, matrix products dominate only if everything between them stays in its caches. So chunks are taken in
groups of consecutive ones. The q, k and v of a group are copied into matrices that are allocated once, and all but the
recurrence of the state is one batched product, or one elementwise pass, over the whole group. n is stored as one more
key, so the denominators' n^T q come with the scores. The backward pass recomputes the weights, and the states from one
that the forward pass keeps for each group. Only for gradients that are to be differentiated again does autograd compute
them, from the parallel form of each chunk: it keeps some [L, L] matrices, and the state, of every chunk.

If the gates of a group allow it (FACTORED_RANGE in chunk_gates.py), the group is factored: all its rows take the same
r_i = e, the r of the group's last row. The weights then become factors exp(c_j - e) of the keys, and between the chunks
of the group neither q nor the state is scaled. Otherwise, and in low precision, where scaled keys would be rounded, the
weights are computed pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..common.arguments import compute_dtype
from ..common.second_derivatives import differentiable_gradients
from .chunk_gates import Group, Segment, plan
from .reference import State, parallel, public_stabiliser, zero_state

ROWS_PER_GROUP = {"cpu": 1024, "cuda": 32768}
"""Rows (B * H * chunks * L) of a group: few enough for a CPU core's cache, enough to fill a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    chunk_size: int
    scale: float
    normalize: bool
    normalizer_gradient: bool


class _Matrices:
    """Matrices [G, S, R, D] of a group (G chunks, S = B * H sequences) and views of them, each made once.

    heads: [G, B, H, R, D], the layout of Segment.view. flat: [G * S, R, D]. chunks: G of [S, R, D]. _t: transposed.
    """

    def __init__(self, data: Tensor, batch: int) -> None:
        self.data = data
        self.heads = data.unflatten(1, (batch, -1))
        self.flat = data.flatten(0, 1)
        self.flat_t = self.flat.mT
        self.chunks = data.unbind()
        self.chunks_t = data.mT.unbind()


class _Workspace:
    """The matrices of a group, overwritten for every group of the same shape (G, S, L).

    query: q times the scale.
    columns: n (normalised form only), then the keys; in a factored group the keys are multiplied by their weights in
        the state. key: the view of the keys.
    value: v.
    weighted: products of columns and queries, later times their weights; a row for each column. scores: the view of the
        keys' rows.
    out: sum of weighted values; in the backward pass dh divided by the denominator.
    row: [G, S, L], first n^T q of every query, then one over its denominator. factor: a view of it [G, B, H, L, 1].
    n: [1 + G, S, K], n before every chunk and after the last one, used in factored groups.
    """

    def __init__(self, shape: tuple[int, int, int], q: Tensor, v: Tensor, *, normalize: bool) -> None:
        chunks, sequences, length = self.shape = shape
        dim_k, dim_v = q.shape[-1], v.shape[-1]
        self.dtype, self.compute = v.dtype, compute_dtype(v.dtype)
        self.exact = self.dtype == self.compute
        self.like, self.normalize = v, normalize
        self.query, self.value, self.out = (self.empty(length, dim) for dim in (dim_k, dim_v, dim_v))
        self.columns = self.empty(normalize + length, dim_k)
        self.key = self.wrap(self.columns.data[:, :, int(normalize) :])
        self.weighted = self.empty(normalize + length, length)
        self.scores = self.wrap(self.weighted.data[:, :, int(normalize) :])
        self.row = v.new_empty(shape, dtype=self.compute)
        self.factor = self.row.unflatten(1, (v.shape[0], -1))[..., None]
        self.n = v.new_empty(1 + chunks, sequences, dim_k, dtype=self.compute)
        self.n_first, self.n_sums, self.n_before, self.n_last = self.n[0], self.n[1:], self.n[:-1], self.n[-1]
        self.n_column = self.columns.data[:, :, 0]

    def empty(self, rows: int, columns: int) -> _Matrices:
        """Make matrices of the accumulators' dtype."""
        return self.wrap(self.like.new_empty(*self.shape[:2], rows, columns, dtype=self.compute))

    def wrap(self, data: Tensor) -> _Matrices:
        """Return the views of [G, S, R, D]."""
        return _Matrices(data, self.like.shape[0])

    def round(self, x: Tensor) -> Tensor:
        """Round an operand of a matrix product, beside bfloat16 inputs to their dtype."""
        return x.to(self.dtype).to(self.compute) if self.dtype == torch.bfloat16 else x

    def round_(self, x: Tensor) -> Tensor:
        """Round in place, as :meth:`round`."""
        return x.copy_(x.to(self.dtype)) if self.dtype == torch.bfloat16 else x

    def load(self, q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float) -> None:
        """Fill query, key and value from views [G, B, H, L, D]."""
        if self.exact:
            torch.mul(q, scale, out=self.query.heads)
        else:
            self.query.heads.copy_(q).mul_(scale)
        self.value.heads.copy_(v)
        if group.pairwise is None:
            torch.mul(k, group.update, out=self.key.heads)
        else:
            self.key.heads.copy_(k)

    def run_normalizer(self, n: Tensor, key: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """Return n before every chunk [G, S, K] (factored: decayed to the group's end), and n [S, K] after the group.

        Args:
            n: before the group.
            key: weighted keys [G, S, L, K].
        """
        if group.pairwise is None:
            torch.mul(n, group.decay[0, ..., 0], out=self.n_first)
            torch.sum(key, -2, out=self.n_sums)
            self.n.cumsum_(0)
            return self.n_before, self.n_last
        before = []
        for decay, part in zip(group.decay[..., 0].unbind(), key.sum(-2).unbind(), strict=True):
            before.append(n)
            n = torch.addcmul(part, n, decay)
        return torch.stack(before), n

    def score(self, group: Group, n: Tensor | None) -> Tensor | None:
        """Fill scores and, given n before every chunk [G, S, K], row with n^T q; return a pairwise group's weights."""
        if n is not None:
            self.n_column.copy_(n)
        torch.bmm(self.columns.flat, self.query.flat_t, out=self.weighted.flat)
        weights = None
        if group.pairwise is None:
            self.weighted.data.triu_(-int(self.normalize))
        else:
            weights = group.pairwise.weights()
            self.scores.data *= weights
            if n is not None:
                self.weighted.data[:, :, 0] *= group.pairwise.inter.view(self.shape)
        if n is not None:
            torch.sum(self.weighted.data, -2, out=self.row)
        return weights

    def invert_denominator(self, group: Group) -> None:
        """Replace n^T q in row by 1 / max(|n^T q|, floor), or by 1 / floor in the plain form, which has no n."""
        denominator = torch.maximum(self.row.abs_(), group.floor, out=self.row) if self.normalize else group.floor
        torch.reciprocal(denominator, out=self.row)

    def store(self, x: Tensor, value: _Matrices, factor: Tensor | float) -> None:
        """Write matrices times ``factor``, a number or [G, B, H, L, 1], into a view [G, B, H, L, D]."""
        if self.exact:
            torch.mul(value.heads, factor, out=x)
        else:
            x.copy_(value.heads.mul_(factor))


class _States(NamedTuple):
    """C [S, K, V] and, in the normalised form, n [S, K] and m [S] (m in float64 within this module)."""

    c: Tensor
    n: Tensor | None = None
    m: Tensor | None = None

    @classmethod
    def flatten(cls, parts: Sequence[Tensor]) -> _States:
        """Merge B and H of C [B, H, K, V] or C, n, m."""
        return cls(*(x.flatten(0, 1) for x in parts))

    def unflatten(self, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """Return the state for the caller: S split into B and H, m rounded, C and n scaled to match the rounded m."""
        if self.n is None or self.m is None:
            return (self.c.unflatten(0, shape),)
        rounded, rest = _round_stabilizer(self.m, self.c.dtype)
        parts = (self.c * rest[:, None, None], self.n * rest[:, None], public_stabiliser(rounded))
        return tuple(x.unflatten(0, shape) for x in parts)


def _round_stabilizer(m: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return m in ``dtype`` and exp(m - rounded m), by which C and n are to be multiplied."""
    rounded = m.to(dtype)
    return rounded, torch.exp(m - rounded).to(dtype)


class _Checkpoint(NamedTuple):
    """C [S, K, V] before a group and, in the normalised form, what _Workspace.run_normalizer returned for it."""

    c: Tensor
    n: Tensor | None


def _plan(
    a: Tensor, u: Tensor | None, state: _States, options: _Options, dtype: torch.dtype
) -> tuple[list[Segment], Tensor | None]:
    rows = ROWS_PER_GROUP.get(a.device.type, ROWS_PER_GROUP["cpu"])
    return plan(a, u, state.m, options.chunk_size, rows, dtype)


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
    """Return h and the last state; append a checkpoint per group for the backward pass to ``checkpoints``."""
    h, c, n, work = torch.empty_like(v), state.c.clone(), state.n, None
    # Without inference mode, autograd's bookkeeping for a thousand small calls takes 2 % of the time on two cores.
    with torch.inference_mode():
        segments, m = _plan(a, u, state, options, v.dtype)
        for group, q_g, k_g, v_g, h_g in (parts for segment in segments for parts in segment.cut(q, k, v, h)):
            if work is None or work.shape != group.shape:
                work = _Workspace(group.shape, q, v, normalize=n is not None)
            work.load(q_g, k_g, v_g, group, options.scale)
            update = work.key.data if group.pairwise is None else (work.key.heads * group.update).flatten(1, 2)
            n_before = None
            if n is not None:
                n_before, n = work.run_normalizer(n, update, group)
            if checkpoints is not None:
                checkpoints.append(_Checkpoint(c.clone(), None if n_before is None else n_before.clone()))
            work.score(group, n_before)
            work.round_(work.scores.data)
            torch.bmm(work.scores.flat_t, work.value.flat, out=work.out.flat)
            if group.pairwise is None:
                c *= group.decay[0]
                for query_c, key_c, v_c, out_c in zip(
                    work.query.chunks, work.key.chunks_t, work.value.chunks, work.out.chunks, strict=True
                ):
                    out_c.baddbmm_(query_c, c)
                    c.baddbmm_(key_c, v_c)
            else:
                query = work.round_((work.query.heads * group.pairwise.inter).flatten(1, 2)).unbind()
                key = work.round_(update).mT.unbind()
                for query_c, key_c, v_c, out_c, decay in zip(
                    query, key, work.value.chunks, work.out.chunks, group.decay.unbind(), strict=True
                ):
                    out_c.baddbmm_(query_c, work.round(c))
                    c.mul_(decay).baddbmm_(key_c, v_c)
            work.invert_denominator(group)
            work.store(h_g, work.out, work.factor)
    # Autograd does not accept tensors made in inference mode, so n and m are copied.
    return h, _States(c, *(None if x is None else x.clone() for x in (n, m)))


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
        if torch.is_grad_enabled():
            given, form = (q, k, v, a, u, *state), partial(_parallel_chunks, ctx.options)
            return None, *differentiable_gradients(form, given, ctx.needs_input_grad[1:], (dh, *dlast))
        dh = torch.zeros_like(v) if dh is None else dh.contiguous()
        return None, *_backward(q, k, v, a, u, h, _States.flatten(state), ctx.checkpoints, ctx.options, dh, dlast)


def _parallel_chunks(
    options: _Options, q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, *state: Tensor
) -> tuple[Tensor, ...]:
    """Return what :class:`_Chunkwise` does, by the parallel form of each chunk, which would round to float16."""
    dtype = v.dtype
    if dtype == torch.float16:
        q, k, v = (x.float() for x in (q, k, v))
    keywords = asdict(options)
    size = keywords.pop("chunk_size")
    outputs = []
    for start in range(0, v.shape[1], size):
        parts: Any = (None if x is None else x[:, start : start + size] for x in (q, k, v, a, u))
        carried: Any = state if options.normalize else state[0]
        h, last = parallel(*parts, initial_state=carried, return_last_state=True, **keywords)
        state = last if options.normalize else (last,)
        outputs.append(h)
    return torch.cat(outputs, 1).to(dtype), *state


class _BackwardWorkspace(_Workspace):
    """The matrices of a group in the backward pass.

    dscores, pairs: gradient of scores, and its elementwise product with the scores.
    dquery, dkey, dvalue: gradients of query, key and value.
    """

    def __init__(self, shape: tuple[int, int, int], q: Tensor, v: Tensor, *, normalize: bool) -> None:
        super().__init__(shape, q, v, normalize=normalize)
        length, dim_k, dim_v = shape[2], q.shape[-1], v.shape[-1]
        self.dscores, self.pairs = self.empty(length, length), self.empty(length, length)
        self.dquery, self.dkey, self.dvalue = (self.empty(length, dim) for dim in (dim_k, dim_k, dim_v))

    def denominator_gradient(self, h: Tensor, dh: Tensor, group: Group) -> Tensor:
        """Replace n^T q in row by the inverse denominator and return the gradient of n^T q [G, S, L]."""
        slope = torch.where(self.row.abs() > group.floor, self.row.sign(), 0.0)
        self.invert_denominator(group)
        if not self.exact:
            h = h.to(self.compute)
        return (h * dh).sum(-1).view(self.shape).mul_(self.row).mul_(slope).neg_()

    def state_gradients_factored(self, c: Tensor, dc: Tensor, group: Group) -> Tensor:
        """As :meth:`state_gradients_pairwise`, for a factored group; return <C, dC> [1, S] of its last chunk only."""
        c = c * group.decay[0]
        for chunk, (dout_c, dquery_c) in enumerate(zip(self.out.chunks, self.dquery.chunks, strict=True)):
            if chunk:
                c.baddbmm_(self.key.chunks_t[chunk - 1], self.value.chunks[chunk - 1])
            torch.bmm(dout_c, c.mT, out=dquery_c)
        last = (c * dc).sum((-2, -1))[None]
        dc_t = dc.mT
        parts = (x.chunks for x in (self.key, self.value, self.out, self.dkey, self.dvalue))
        for query_c, key_c, v_c, dout_c, dkey_c, dvalue_c in zip(
            *map(reversed, (self.query.chunks_t, *parts)), strict=True
        ):
            torch.bmm(v_c, dc_t, out=dkey_c)
            dvalue_c.baddbmm_(key_c, dc)
            dc.baddbmm_(query_c, dout_c)
        dc *= group.decay[0]
        return last

    def state_gradients_pairwise(self, c: Tensor, dc: Tensor, group: Group) -> Tensor:
        """Run C forwards and dC backwards through the group and compute the gradients that pass through the states.

        Writes dquery and dkey, gradients of the weighted queries and keys that are multiplied with states, and adds to
        dvalue.

        Args:
            c: C before the group.
            dc: dC after the group; overwritten with dC before the group.

        Returns:
            <C, dC> [G, S] of C before and dC after every chunk.
        """
        assert group.pairwise is not None
        query = self.round_((self.query.heads * group.pairwise.inter).flatten(1, 2)).mT.unbind()
        key = self.wrap(self.round_((self.key.heads * group.update).flatten(1, 2)))
        states = c.new_empty(len(group.decay), *c.shape)
        slots, decays = states.unbind(), group.decay.unbind()
        slots[0].copy_(c)
        for before, after, key_c, v_c, decay in zip(
            slots, slots[1:], key.chunks_t, self.value.chunks, decays, strict=False
        ):
            torch.mul(before, decay, out=after).baddbmm_(key_c, v_c)
        products = dc.new_empty(group.decay.shape[:2])
        scratch = torch.empty_like(dc)
        parts = (x.chunks for x in (key, self.value, self.out, self.dquery, self.dkey, self.dvalue))
        for query_c, key_c, v_c, dout_c, dquery_c, dkey_c, dvalue_c, c_c, product, decay in zip(
            *map(reversed, (query, *parts, slots, products.unbind(), decays)), strict=True
        ):
            dc_n = self.round(dc)
            torch.bmm(dout_c, self.round(c_c).mT, out=dquery_c)
            torch.bmm(v_c, dc_n.mT, out=dkey_c)
            dvalue_c.baddbmm_(key_c, dc_n)
            # torch.sum, not a matrix product: its pairwise summation is more exact for K * V terms of either sign.
            torch.sum(torch.mul(c_c, dc, out=scratch), (1, 2), out=product)
            dc.mul_(decay).baddbmm_(query_c, dout_c)
        return products

    def run_normalizer_gradient(self, dn: Tensor, dnq: Tensor | None, group: Group) -> tuple[Tensor, Tensor]:
        """Return the gradient of n after every chunk of the group [G, S, K], and of n [S, K] before the group.

        Args:
            dn: gradient of n after the group.
            dnq: gradient of n^T q, [G, S, L, 1], times the queries' weights, so that it applies to unweighted queries.
        """
        sums = torch.zeros_like(self.n_sums) if dnq is None else (self.query.data * dnq).sum(-2)
        if group.pairwise is None:
            running = torch.cat((dn[None], sums.flip(0))).cumsum(0).flip(0)
            return running[1:], running[0] * group.decay[0, ..., 0]
        after = []
        for part, decay in zip(reversed(sums.unbind()), reversed(group.decay[..., 0].unbind()), strict=True):
            after.append(dn)
            dn = torch.addcmul(part, dn, decay)
        return torch.stack(after[::-1]), dn


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
    """Return the gradients of q, k, v, a, u, C and n; ``h``: the output, None if denominators are constants."""
    segments, m_last = _plan(a, u, state, options, v.dtype)
    dc, dn = _last_state_gradients(state, m_last, dlast, n_matters=h is not None)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    da, du = torch.empty_like(a), None if u is None else torch.empty_like(u)
    work, remaining = None, list(checkpoints)
    for segment in reversed(segments):
        gates = []
        tensors = (q, k, v, dh, dh if h is None else h, dq, dk, dv)
        for group, q_g, k_g, v_g, dh_g, h_g, dq_g, dk_g, dv_g in reversed(segment.cut(*tensors)):
            c, n = remaining.pop()
            if work is None or work.shape != group.shape:
                work = _BackwardWorkspace(group.shape, q, v, normalize=n is not None)
            work.load(q_g, k_g, v_g, group, options.scale)
            weights = work.score(group, n)
            dnq = None
            if h is None:
                work.invert_denominator(group)
            else:
                dnq = work.denominator_gradient(h_g, dh_g, group)
            torch.mul(dh_g, work.factor, out=work.out.heads)
            work.round_(work.out.data)
            torch.bmm(work.value.flat, work.out.flat_t, out=work.dscores.flat)
            if dnq is not None:
                work.dscores.data += dnq[..., None, :]
            # Contributions of pairs of positions in a chunk: their sum over keys is q . dq, that over queries k . dk.
            pairs = torch.mul(work.dscores.data, work.scores.data, out=work.pairs.data)
            query_dq, key_dk = pairs.sum(-2), pairs.sum(-1)
            if weights is None:
                work.dscores.data.triu_()
            else:
                work.dscores.data *= weights
            work.round_(work.dscores.data)
            torch.bmm(work.round_(work.scores.data).flatten(0, 1), work.out.flat, out=work.dvalue.flat)

            factored = group.pairwise is None
            products = (work.state_gradients_factored if factored else work.state_gradients_pairwise)(c, dc, group)
            if dnq is not None:
                dnq = dnq[..., None] if factored else dnq[..., None] * group.pairwise.inter.flatten(1, 2)
            if n is not None and dn is not None:
                dn_g, dn = work.run_normalizer_gradient(dn, dnq, group)
                work.dkey.data += dn_g[..., None, :]
                products += (n * dn_g)[-len(products) :].sum(-1)
            if not factored:
                work.dquery.heads *= group.pairwise.inter
                work.dkey.heads *= group.update
            if n is not None and dnq is not None:
                work.dquery.data.addcmul_(dnq, n[..., None, :])
            state_dq = (work.dquery.data * work.query.data).sum(-1)
            state_dk = (work.dkey.data * work.key.data).sum(-1)
            if factored:
                # From a chunk to the one before, <C, dC> gains q . dq of the later chunk's queries and loses k . dk of
                # the earlier chunk's keys, both as far as they go through states.
                steps = state_dq[1:].sum(-1) - state_dk[:-1].sum(-1)
                products = torch.cat((steps, products)).flip(0).cumsum(0).flip(0)
            else:
                products *= group.decay[..., 0, 0]
            gates.append((query_dq - key_dk + state_dq, key_dk + state_dk, state_dk, products))

            work.dquery.flat.baddbmm_(work.dscores.flat_t, work.key.flat)
            work.dkey.flat.baddbmm_(work.dscores.flat, work.query.flat)
            work.store(dq_g, work.dquery, options.scale)
            work.store(dk_g, work.dkey, group.update if factored else 1.0)
            work.store(dv_g, work.dvalue, 1.0)
        later, du_s, state_dk, products = (torch.cat(parts[::-1]) for parts in zip(*gates, strict=True))
        da_s = later.flip(-1).cumsum(-1).flip(-1) + (state_dk.cumsum(-1) - state_dk) + products[..., None]
        segment.view(da).copy_(da_s.view_as(segment.view(da)))
        if du is not None:
            segment.view(du).copy_(du_s.view_as(segment.view(du)))
    shape = (v.shape[0], v.shape[2])
    if state.n is None:
        return dq, dk, dv, da, du, dc.unflatten(0, shape)
    dn = torch.zeros_like(state.n) if dn is None else dn
    return dq, dk, dv, da, du, dc.unflatten(0, shape), dn.unflatten(0, shape), None


def _last_state_gradients(
    state: _States, m_last: Tensor | None, dlast: tuple[Tensor | None, ...], *, n_matters: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of C and n after the last chunk: the backward pass of _States.unflatten.

    That of n is None if it has none: neither from denominators (``n_matters``) nor from the n that was returned.
    """
    dc = torch.zeros_like(state.c) if dlast[0] is None else dlast[0].reshape(state.c.shape).clone()
    if state.n is None or m_last is None:
        return dc, None
    rest = _round_stabilizer(m_last, dc.dtype)[1][:, None]
    dc *= rest[..., None]
    if dlast[1] is not None:
        return dc, dlast[1].reshape(state.n.shape) * rest
    return dc, torch.zeros_like(state.n) if n_matters else None


Function = TypeVar("Function", bound=Callable[..., Any])


def _uncompiled(function: Function) -> Function:
    """Make torch.compile call a function rather than trace it: how chunks are grouped depends on the gates' values.

    ``torch.compiler.disable`` imports the compiler, which takes seconds, so it is called only when compiling.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@_uncompiled
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
    """Compute the recurrence of reference.py chunk by chunk, with a hand-written backward pass.

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

    Raises:
        NotImplementedError: on an input with a tangent (forward-mode differentiation).
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
        if any(x is not None and unpack_dual(x).tangent is not None for x in inputs):
            # Inference mode would silently drop the tangents.
            raise NotImplementedError("the portable form has no forward-mode derivative, got an input with a tangent")
        h, last_state = _forward(q, k, v, log_decay, log_input, _States.flatten(parts), options)
        last = last_state.unflatten((v.shape[0], v.shape[2])) if return_last_state else ()
    if not return_last_state:
        return h
    return h, tuple(last) if normalize else last[0]
