"""Chunkwise form of the scalar-decay recurrence in torch: any device, any chunk length, derivatives of any order.

Within a chunk of length L, with b the inclusive cumulative sum of the log decay a, u the log input gate, C the state
before the chunk and m = 0,

    h_i = scale (sum_{j<=i} exp(b_i - b_j + u_j - m_i) (q_i . k_j) v_j + exp(b_i + m_0 - m_i) C^T q_i)
    C'  = exp(b_L + m_0 - m_L) C + sum_j exp(b_L - b_j + u_j - m_L) k_j v_j^T

In the normalised form (see reference.py) m is the stabiliser, m_i = b_i + max(m_0, max_{j<=i} u_j - b_j), m_0 that of
the state before the chunk, and n is one more column of C, whose values v are 1: the same products make n and n^T q.
TFLA paper, section 3, appendices A and B.

Exponents are float64, since differences of long sums of gates need the digits; what is multiplied is float32 (float64
for float64 inputs). Chunks are taken in blocks of consecutive ones: all but the recurrence of C is one product, or one
elementwise pass, over a block. Blocks bound the memory of a forward pass and keep what is between products in a CPU's
caches. For its backward pass autograd keeps scores, weights and states of all blocks.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .reference import MIN_LOG_DECAY, MIN_STABILISER, OperandMatmul, State, denominator, public_stabiliser, zero_state

ROWS_PER_BLOCK = {"cpu": 4096, "cuda": 32768}
"""Rows (batch * heads * time steps) of a block: few enough for a CPU's caches, enough to fill a GPU."""

LOG2_E = math.log2(math.e)
"""Weights are powers of 2: torch's exp takes 30 times as long on a CPU where its result is no normal float32."""

MIN_LOG_INPUT = -1e30
"""In place of minus infinity, whose difference from itself is not a number."""


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
    """Compute the recurrence of reference.py chunk by chunk.

    Args:
        q, k: [B, T, H, K]; float64, float32, float16 or bfloat16.
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
    heads, dim_v = v.shape[2:]
    state: Any = zero_state(k, v, normalize=normalize) if initial_state is None else initial_state
    c, m = state, None
    if normalize:
        c, m = torch.cat((state[0], state[1][..., None]), -1), state[2].detach().double()[..., None, None]
    chunk = min(chunk_size, v.shape[1])
    lengths = block_lengths(v, chunk)
    run: Any = partial(_block, heads=heads, chunk=chunk, scale=scale, normalizer_gradient=normalizer_gradient)
    outputs = []
    tensors = (x if x is None else x.flatten(2).split(lengths, 1) for x in (q, k, v, log_decay, log_input))
    for parts in zip(*(repeat(None, len(lengths)) if x is None else x for x in tensors), strict=True):
        h, c, m = run(*parts, c, m)
        outputs.append(h)
    h = torch.cat(outputs, 1).unflatten(2, (heads, dim_v))
    if not return_last_state:
        return h
    if m is None:
        return h, c
    last_c, last_n = c.split((dim_v, 1), -1)
    return h, (last_c.contiguous(), last_n[..., 0].contiguous(), public_stabiliser(m[..., 0, 0].to(c.dtype)))


def block_lengths(v: Tensor, chunk: int) -> list[int]:
    """Return the lengths of the blocks of v [B, T, H, V]: of whole chunks, then of a shorter one."""
    batch, seq_len, heads, _ = v.shape
    rows = ROWS_PER_BLOCK.get(v.device.type, ROWS_PER_BLOCK["cpu"])
    size = max(1, rows // (batch * heads * chunk)) * chunk
    whole = seq_len - seq_len % chunk
    return [*repeat(size, whole // size), *filter(None, (whole % size, seq_len - whole))]


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    log_input: Tensor | None,
    c: Tensor,
    m: Tensor | None,
    *,
    heads: int,
    chunk: int,
    scale: float,
    normalizer_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return h of N chunks, or of a single shorter one, and C and m after them.

    Args:
        q, k, v, log_decay, log_input: [B, N * L, H * D], where D is 1 for gates.
        c: [B, H, K, V], or [B, H, K, V + 1] with n as the last column where there is an m.
        m: [B, H, 1, 1], float64; None in the plain form.
    """
    length, dtype = min(chunk, v.shape[1]), c.dtype

    def cut(x: Tensor, to: torch.dtype) -> Tensor:
        """Return [N, B, H, L, D]."""
        x = x.to(to).unflatten(2, (heads, -1)).unflatten(1, (-1, length))
        return x.permute(1, 0, 3, 2, 4).contiguous()

    def product(x: Tensor, y: Tensor) -> Tensor:
        return OperandMatmul.apply(x, y, dtype)

    query, key, value = scale * cut(q, dtype), cut(k, dtype), cut(v, dtype)
    # exp is zero at this bound; a larger |a| would take bits from all sums after it.
    b = cut(log_decay, torch.float64).clamp(min=MIN_LOG_DECAY).cumsum(-2)
    column = -b if log_input is None else cut(log_input, torch.float64).clamp(min=MIN_LOG_INPUT) - b
    if m is None:
        edges, tops = b.new_zeros(len(b) + 1, *c.shape[:2], 1, 1), torch.zeros_like(b)
    else:
        # Rounded as the caller gets them; weights, states and denominators then agree on them to the last digit.
        edges, tops = (x.to(dtype).double() for x in _stabilisers(b.detach(), column.detach(), m))
        value = pad(value, (0, 1), value=1.0)
    before, after, total = edges[:-1], edges[1:], b[..., -1:, :]
    inter, update, decay = (
        (LOG2_E * x).to(dtype).exp2_() for x in (b + before - tops, total + column - after, total + before - after)
    )
    future = b.new_full((length, length), -torch.inf).triu(1)
    weights = (LOG2_E * column.mT + LOG2_E * (b - tops)).add_(future).to(dtype).exp2_()
    states = []
    for factor, new in zip(decay.unbind(), product((update * key).mT, value).unbind(), strict=True):
        states.append(c)
        c = torch.addcmul(new, factor, c)
    h = product(product(query, key.mT) * weights, value) + product(inter * query, torch.stack(states))
    if m is not None:
        h, nq = h.split((h.shape[-1] - 1, 1), -1)
        h = h / denominator(nq, tops.to(dtype), normalizer_gradient)
        m = edges[-1]
    return h.to(v.dtype).permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2), c, m


def _stabilisers(b: Tensor, column: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Return m at the edges of all chunks [N + 1, B, H, 1, 1] and m of all rows [N, B, H, L, 1].

    m_{n+1} = b_L + max(m_n, max_j column_j) for all chunks n at once: without the sum of the log decays before the
    chunk it is a running maximum.
    """
    totals = pad(b[..., -1:, :].cumsum(0), (*repeat(0, 8), 1, 0))
    peaks = column.amax(-2, keepdim=True) - totals[:-1]
    edges = torch.cat((m[None].clamp(min=MIN_STABILISER), peaks)).cummax(0).values + totals
    edges.clamp_(min=MIN_STABILISER)
    return edges, (b + torch.maximum(edges[:-1], column.cummax(-2).values)).clamp_(min=MIN_STABILISER)
