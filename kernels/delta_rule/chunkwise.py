"""The delta rule in plain torch, chunk by chunk; runs anywhere, derivatives of any order.

Within a chunk of length L, with b the inclusive cumulative sum of the log decay g, S the state before the chunk and
x_i . y_j (i >= j) the product of x_i and y_j in which column c has the weight exp(b_ic - b_jc),

    T  = (I + A)^-1                    A_ij = beta_i k_i . k_j for j < i, else 0
    u  = T Diag(beta) (v - (exp(b) * k) S)
    o  = scale ((exp(b) * q) S + P u)  P_ij = q_i . k_j for j <= i, else 0
    S' = Diag(exp(b_L)) S + (exp(b_L - b) * k)^T u

u_i is beta_i times what is new in v_i beside what the state held for k_i: the WY form of the product of the chunk's
factors I - beta_i k_i k_i^T. Source: Yang et al. (2024), section 3.2; Gated Delta Networks (2025), section 3.3; Kimi
Linear (2025), section 3.2. No exponent is positive, so strong decays do not overflow.

As in scalar_decay/chunkwise.py exponents are float64, and chunks are taken in blocks of consecutive ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..common.arguments import compute_dtype
from ..common.sizes import next_power_of_two
from ..scalar_decay.chunkwise import block_lengths
from ..scalar_decay.reference import MIN_LOG_DECAY, OperandMatmul


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    chunk_size: int,
    scale: float,
    operand_dtype: torch.dtype | None = None,
    gate_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence of reference.py chunk by chunk; arguments and results as there.

    Args:
        chunk_size: at least 1; need not divide T and may exceed it.
        operand_dtype: to which operands of products are rounded; None: float32 (float64 beside float64).
        gate_dtype: of b.
    """
    chunk, outputs = min(chunk_size, v.shape[1]), []
    lengths = block_lengths(v, chunk)
    dtype = compute_dtype(v.dtype)
    gate_dtype = torch.promote_types(gate_dtype, dtype)
    run: Any = partial(_block, chunk=chunk, scale=scale, operand_dtype=operand_dtype or dtype, gate_dtype=gate_dtype)
    for parts in zip(*(x.flatten(2).split(lengths, 1) for x in (q, k, v, g, beta)), strict=True):
        o, state = run(*parts, state)
        outputs.append(o)
    return torch.cat(outputs, 1).unflatten(2, v.shape[2:]), state


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    chunk: int,
    scale: float,
    operand_dtype: torch.dtype,
    gate_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return o [B, N * L, H * V] of N whole chunks, or of a single shorter one, and S after them; as the forms' tensors
    but [B, N * L, H * D]."""
    dtype, heads, length = state.dtype, state.shape[1], min(chunk, v.shape[1])

    def cut(x: Tensor, to: torch.dtype = dtype) -> Tensor:
        """Return [N, B, H, L, D]."""
        return x.to(to).unflatten(2, (heads, -1)).unflatten(1, (-1, length)).permute(1, 0, 3, 2, 4)

    def product(x: Tensor, y: Tensor) -> Tensor:
        return OperandMatmul.apply(x, y, operand_dtype)

    query, key, value, rate = scale * cut(q), cut(k), cut(v), cut(beta)
    # exp is zero at this bound; a larger |g| would take bits from all sums after it.
    b = cut(g, gate_dtype).clamp(min=MIN_LOG_DECAY).cumsum(-2)
    entering, leaving, decay = (x.to(dtype).exp() for x in (b, b[..., -1:, :] - b, b[..., -1:, :].mT))
    decayed = partial(_of_columns if b.shape[-1] > 1 else _of_heads, b=b, product=product)
    one = torch.eye(length, dtype=dtype, device=v.device)
    inverse = torch.linalg.solve_triangular(
        one + (rate * decayed(key, key)).tril(-1), one.expand(*b.shape[:3], -1, -1), upper=False, unitriangular=True
    )
    held, keys = entering * key, (leaving * key).mT
    states, news = [], []
    for n in range(len(b)):
        states.append(state)
        news.append(product(inverse[n], rate[n] * (value[n] - product(held[n], state))))
        state = decay[n] * state + product(keys[n], news[n])
    o = product(entering * query, torch.stack(states)) + product(decayed(query, key), torch.stack(news))
    return o.to(v.dtype).permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2), state


Product = Callable[[Tensor, Tensor], Tensor]


def _of_heads(x: Tensor, y: Tensor, *, b: Tensor, product: Product) -> Tensor:
    """Return x_i . y_j for j <= i, else 0 [..., L, L], with one decay a head b [..., L, 1]."""
    future = torch.ones(b.shape[-2], b.shape[-2], dtype=torch.bool, device=b.device).triu(1)
    return product(x, y.mT) * (b - b.mT).masked_fill(future, -torch.inf).to(x.dtype).exp()


def _of_columns(x: Tensor, y: Tensor, *, b: Tensor, product: Product) -> Tensor:
    """Return the same with a decay for each column b [..., L, K].

    Squares on the diagonal double in size: below it, rows of the second half of a square meet columns of the first, and
    the weight exp(b_i - b_j) is that of i since the first half's end times that of j until there, both at most 1.
    """
    length = b.shape[-2]
    more = next_power_of_two(length) - length
    x, y = (torch.nn.functional.pad(z, (0, 0, 0, more)) for z in (x, y))
    b = torch.cat((b, b[..., -1:, :].expand(*b.shape[:-2], more, -1)), -2)
    squares = (x * y).sum(-1)[..., None, None]
    while (size := squares.shape[-1]) < length:
        (_, late), (early, _), (first, second) = (z.unflatten(-2, (-1, 2, size)).unbind(-3) for z in (x, y, b))
        edge = first[..., -1:, :]
        late, early = late * (second - edge).to(x.dtype).exp(), early * (edge - first).to(x.dtype).exp()
        upper, lower = squares.unflatten(-3, (-1, 2)).unbind(-3)
        below = product(late, early.mT)
        squares = torch.cat((torch.cat((upper, torch.zeros_like(below)), -1), torch.cat((below, lower), -1)), -2)
    return squares[..., 0, :length, :length]
