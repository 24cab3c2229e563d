"""What the chunks of whole_state.py need beforehand: cumulative log decays, and the inverse T of chunkwise.py."""

import triton
import triton.language as tl

from ..common.remember import remember_launches

LOG2E = tl.constexpr(1.4426950408889634)
MIN_LOG_DECAY = tl.constexpr(-150.0)
"""Lower bound of a log decay, in base 2: exp is zero there in float32, and a larger |g| would take bits from the sums
after it."""


@triton.jit
def _double(inverse, a, rows, columns, size: tl.constexpr, dtype: tl.constexpr):
    """Return the inverses of the blocks of 2 ``size`` rows on the diagonal of I + a, given those of ``size`` rows.

    With the blocks' inverses T on the diagonal and A below it, the inverse of a block is T - T A T.
    """
    below = tl.where((rows // (2 * size) == columns // (2 * size)) & (rows // size > columns // size), a, 0.0)
    rounded = inverse.to(dtype)
    product = tl.dot(rounded, below.to(dtype), input_precision="tf32x3")
    return inverse - tl.dot(product.to(dtype), rounded, input_precision="tf32x3")


@triton.jit
def _inverse(a, L: tl.constexpr, dtype: tl.constexpr):
    """Return (I + a)^-1 for a strictly lower triangular ``a`` [L, L], from blocks of 16 rows, inverted side by side."""
    offs_n = tl.arange(0, L // 16)
    same = offs_n[:, None, None, None] == offs_n[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(a, [L // 16, 16, L // 16, 16]), 0.0), axis=2)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    blocks = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -diagonal, 0.0))
    blocks = _double(blocks, diagonal, row, column, 2, dtype)
    blocks = _double(blocks, diagonal, row, column, 4, dtype)
    blocks = _double(blocks, diagonal, row, column, 8, dtype)
    inverse = tl.reshape(tl.where(same, blocks[:, :, None, :], 0.0), [L, L])
    rows = tl.arange(0, L)[:, None]
    columns = tl.arange(0, L)[None, :]
    inverse = _double(inverse, a, rows, columns, 16, dtype)
    return _double(inverse, a, rows, columns, 32, dtype)


@remember_launches
@triton.jit(do_not_specialize=["T"])
def inverse_kernel(
    k_ptr,
    g_ptr,
    beta_ptr,
    inverse_ptr,
    b_ptr,
    T,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
):
    """Compute T and b of one chunk of one head.

    Grid: (B * H * N,), N = ceil(T / L). Reads k [B, T, H / GROUP, K], g (None: 0) and beta [B, T, H]; writes the
    inverse [B * H, N, L, L] in k's dtype, to which operands of its products are rounded, and b [B * H, N, L], in base
    2. Beyond the end beta is 0 and b the last position's.
    """
    number = tl.program_id(0).to(tl.int64)
    N = tl.cdiv(T, L)
    pid_n = (number % N).to(tl.int32)
    pid_bh = number // N
    batch = pid_bh // H
    head = pid_bh % H
    BK: tl.constexpr = triton.next_power_of_2(K)
    ROW: tl.constexpr = H // GROUP * K
    offs_l = tl.arange(0, L)
    offs_t = pid_n * L + offs_l
    offs_k = tl.arange(0, BK)
    exists = offs_t < T
    k = tl.load(
        k_ptr + batch * T * ROW + head // GROUP * K + offs_t[:, None] * ROW + offs_k[None, :],
        mask=exists[:, None] & (offs_k < K)[None, :],
        other=0.0,
    )
    at = batch * T * H + head + offs_t * H
    beta = tl.load(beta_ptr + at, mask=exists, other=0.0)
    b = tl.zeros_like(beta)
    if g_ptr is not None:
        b = tl.cumsum(tl.maximum(tl.load(g_ptr + at, mask=exists, other=0.0) * LOG2E, MIN_LOG_DECAY), axis=0)
    before = offs_l[:, None] > offs_l[None, :]
    decay = tl.exp2(tl.where(before, b[:, None] - b[None, :], 0.0))
    a = tl.where(before, tl.dot(k, tl.trans(k), input_precision="tf32x3") * decay * beta[:, None], 0.0)
    out = inverse_ptr + number * (L * L) + offs_l[:, None] * L + offs_l[None, :]
    tl.store(out, _inverse(a, L, k.dtype).to(k.dtype))
    tl.store(b_ptr + number * L + offs_l, b)
