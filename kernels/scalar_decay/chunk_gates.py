"""The weights that the portable chunkwise form (chunkwise.py) computes from its gates, chunk by chunk.

With b the inclusive cumulative sum of the log decay within a chunk, u the log input gate and c_j = u_j - b_j, key j has
the weight exp(c_j - r_i) in output i, and the state before the chunk has the weight exp(p - r_i). chunkwise.py says
what r, p and a factored group's e are. All exponents are computed in float64 for the whole sequence and then cut into
groups of consecutive chunks, each of which chunkwise.py processes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.arguments import compute_dtype
from .reference import MIN_LOG_DECAY, MIN_STABILISER

MIN_LOG_INPUT = -1e30
"""In place of minus infinity, whose difference from itself is not a number."""

FACTORED_RANGE = (-60.0, 40.0)
"""Smallest c_j - e and largest e - r_i of a factored group, so that float32 neither underflows nor overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairwise:
    """Exponents of a group whose weights are computed pair by pair: G chunks of length L, S = B * H sequences.

    column, column_rest, row: [G, S, L] with c_j = column + column_rest and r_i = row; column_rest is None in float64.
    inter: [G, B, H, L, 1], exp(p - r_i), the weight of the state before the chunk in h_i.
    """

    column: Tensor
    column_rest: Tensor | None
    row: Tensor
    inter: Tensor

    def weights(self) -> Tensor:
        """Return exp(c_j - r_i) for j <= i, else 0, in row j and column i: [G, S, L, L]."""
        log_weights = self.column[..., :, None] - self.row[..., None, :]
        if self.column_rest is not None:
            log_weights += self.column_rest[..., :, None]
        # Below the diagonal the exponential may be inf, which triu_ overwrites (a product with 0 would give nan).
        return log_weights.exp_().triu_()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The gates of consecutive chunks of equal length L: G chunks, S = B * H sequences.

    update: [G, B, H, L, 1], exp(c_j - e), the weight of position j in the state after the group (pairwise: after the
        chunk), with e = m - b at the end of that (plain: m = 0).
    decay: [G, S, 1, 1], exp(p - e), the factor of the state before the chunk. In a factored group only the first one is
        used: it is the factor of the state before the group.
    floor: [G, S, L], exp(-(b_i + r_i)), the smallest denominator; in the plain form the denominator itself.
    pairwise: None in a factored group.
    """

    update: Tensor
    decay: Tensor
    floor: Tensor
    pairwise: Pairwise | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, S, L)"""
        return self.floor.shape  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Time steps from start to stop in chunks of equal length, in groups of ``size`` chunks (the last may have fewer).

    groups: the gates of every group.
    """

    start: int
    stop: int
    length: int
    size: int
    groups: list[Group]

    def view(self, x: Tensor) -> Tensor:
        """Return the segment's part of x [B, T, H, ...] as a view [N, B, H, L, ...] of its N chunks."""
        chunks = x[:, self.start : self.stop].unflatten(1, (-1, self.length))
        return chunks.permute(1, 0, 3, 2, *range(4, chunks.dim()))

    def cut(self, *tensors: Tensor) -> list[tuple[Any, ...]]:
        """Return for every group its gates and its part of each tensor [B, T, H, D], as a view [G, B, H, L, D]."""
        return list(zip(self.groups, *(self.view(x).split(self.size) for x in tensors), strict=True))


def plan(
    a: Tensor, u: Tensor | None, m: Tensor | None, chunk_size: int, rows_per_group: int, dtype: torch.dtype
) -> tuple[list[Segment], Tensor | None]:
    """Cut a sequence into groups of whole chunks and a shorter last chunk.

    Args:
        a, u: log decay and log input gate [B, T, H]; None means 0.
        m: stabiliser [S] of the initial state, None in the plain form.
        chunk_size: may exceed T.
        rows_per_group: most B * H * time steps of a group, which has at least one chunk all the same.
        dtype: of q, k and v.

    Returns:
        The segments in order and m [S] after the last step, float64.
    """
    batch, seq_len, heads = a.shape
    a, u = (
        torch.full_like(a, 0.0, dtype=torch.float64) if x is None else x.double().clamp(min=least)
        for x, least in ((a, MIN_LOG_DECAY), (u, MIN_LOG_INPUT))
    )
    a, u = (x.transpose(1, 2).reshape(batch * heads, seq_len) for x in (a, u))
    m = None if m is None else m.double().clamp(min=MIN_STABILISER)
    chunk = min(chunk_size, seq_len)
    whole = seq_len - seq_len % chunk
    segments: list[Segment] = []
    for start, stop, length in ((0, whole, chunk), (whole, seq_len, seq_len - whole)):
        if start < stop:
            size = max(1, rows_per_group // (length * batch * heads))
            groups, m = _groups(a[:, start:stop], u[:, start:stop], m, length, size, batch, dtype)
            segments.append(Segment(start=start, stop=stop, length=length, size=size, groups=groups))
    return segments, m


def _groups(
    a: Tensor, u: Tensor, m: Tensor | None, length: int, size: int, batch: int, dtype: torch.dtype
) -> tuple[list[Group], Tensor | None]:
    """Return groups of ``size`` chunks of equal length with float64 gates a, u [S, N * L], and m [S] after them."""
    compute = compute_dtype(dtype)
    b, u = (x.unflatten(1, (-1, length)).transpose(0, 1).contiguous() for x in (a, u))  # [N, S, L]
    b = b.cumsum(-1)
    column = u - b
    total = b[..., -1].cumsum(0) - b[..., -1]
    # p, and r of the first and the last row of every chunk, [N, S]; r never decreases within a chunk.
    if m is None:
        before = torch.zeros_like(total)
        first, end = -b[..., 0], -b[..., -1]
    else:
        # m_k = b_L + max(m_{k-1}, max_j c_j) for all chunks k at once: the running maximum over chunks of max_j c_j
        # minus the sum of the log decays before the chunk, plus that sum.
        peak = column.amax(-1)
        before = torch.cat((m[None], peak[:-1] - total[:-1])).cummax(0).values + total
        before.clamp_(min=MIN_STABILISER)
        end = torch.maximum(before, peak)
        m = (b[-1, :, -1] + end[-1]).clamp(min=MIN_STABILISER)
        least = MIN_STABILISER - b
        first, end = torch.maximum(before, column[..., 0]), torch.maximum(end, least[..., -1])

    num_chunks = len(b)
    starts = range(0, num_chunks, size)
    factored = [False] * len(starts)
    if dtype == compute:
        # e of the group, relative to the start of each of its chunks, where the chunk's b starts.
        ends = end - total
        ends = torch.cat((ends[size - 1 :: size], ends[-1:]))[: len(starts)]
        group_end = total + ends.repeat_interleave(size, 0)[:num_chunks]
        low, high = FACTORED_RANGE
        fits = (column.amin(-1) - group_end >= low) & (group_end - first <= high)
        fits_chunk = fits.all(-1).tolist()
        factored = [all(fits_chunk[i : i + size]) for i in starts]
    pairwise: list[Pairwise | None] = [None] * len(starts)
    if all(factored):
        end, row = group_end, group_end[..., None]
    else:
        row = -b
        if m is not None:
            row = torch.maximum(torch.maximum(before[..., None], column.cummax(-1).values), least)
        row = row.to(compute)
        inter = torch.exp(before[..., None] - row).to(compute).unflatten(1, (batch, -1))[..., None]
        rounded = column.to(compute)
        rest = None if compute == torch.float64 else (column - rounded).to(compute)
        for i, is_factored in enumerate(factored):
            span = slice(i * size, (i + 1) * size)
            if not is_factored:
                pairwise[i] = Pairwise(
                    column=rounded[span],
                    column_rest=None if rest is None else rest[span],
                    row=row[span],
                    inter=inter[span],
                )
        if any(factored):
            chosen = torch.tensor(factored, device=b.device).repeat_interleave(size)[:num_chunks, None]
            end = torch.where(chosen, group_end, end)
            row = torch.where(chosen[..., None], group_end[..., None], row)
    update = torch.exp(column - end[..., None]).to(compute).unflatten(1, (batch, -1))[..., None].split(size)
    decay = torch.exp(before - end).to(compute)[..., None, None].split(size)
    floor = torch.exp(-b - row).to(compute).split(size)
    groups = [
        Group(update=update_g, decay=decay_g, floor=floor_g, pairwise=pairwise_g)
        for update_g, decay_g, floor_g, pairwise_g in zip(update, decay, floor, pairwise, strict=True)
    ]
    return groups, m
