"""What the chunks of whole_state.py need beforehand: cumulative log decays, and T Diag(beta) of chunkwise.py."""

import triton
import triton.language as tl

from ..common.remember import remember_launches

LOG2E = tl.constexpr(1.4426950408889634)
MIN_LOG_DECAY = tl.constexpr(-150.0)
"""Lower bound of a log decay, in base 2: exp is zero there in float32, and a larger |g| would take bits from the sums
after it."""
BLOCK = tl.constexpr(16)
"""Rows of the blocks on the diagonal that are inverted row by row."""


@triton.jit
def _level(inverse, a, rows, columns, size: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of blocks of twice the size."""
    below = tl.where((rows // (2 * size) == columns // (2 * size)) & (rows // size > columns // size), a, 0.0)
    if PRECISION == "bf16":
        half = inverse.to(tl.bfloat16)
        return inverse - tl.dot(tl.dot(half, below.to(tl.bfloat16)).to(tl.bfloat16), half)
    elif PRECISION == "fp16":
        half = inverse.to(tl.float16)
        return inverse - tl.dot(tl.dot(half, below.to(tl.float16)).to(tl.float16), half)
    else:
        return inverse - tl.dot(tl.dot(inverse, below, input_precision=PRECISION), inverse, input_precision=PRECISION)


@triton.jit
def _inverse(a, L: tl.constexpr, VARIANT: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + a)^-1 for a strictly lower triangular ``a`` [L, L].

    Blocks on the diagonal double in size: with A below the diagonal blocks of a block, its inverse is T - T A T.
    """
    rows = tl.arange(0, L)[:, None]
    columns = tl.arange(0, L)[None, :]
    if VARIANT == 0:
        inverse = tl.where(rows == columns, 1.0, tl.where(rows // 2 == columns // 2, -a, 0.0))
        inverse = _level(inverse, a, rows, columns, 2, PRECISION)
        inverse = _level(inverse, a, rows, columns, 4, PRECISION)
        inverse = _level(inverse, a, rows, columns, 8, PRECISION)
    else:
        BLOCKS: tl.constexpr = L // 16
        offs_n = tl.arange(0, BLOCKS)
        same = offs_n[:, None, None, None] == offs_n[None, None, :, None]
        diagonal = tl.sum(tl.where(same, tl.reshape(a, [BLOCKS, 16, BLOCKS, 16]), 0.0), axis=2)
        i = tl.arange(0, 16)[None, :, None]
        j = tl.arange(0, 16)[None, None, :]
        small = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -diagonal, 0.0))
        small = _level(small, diagonal, i, j, 2, PRECISION)
        small = _level(small, diagonal, i, j, 4, PRECISION)
        small = _level(small, diagonal, i, j, 8, PRECISION)
        inverse = tl.reshape(tl.where(same, small[:, :, None, :], 0.0), [L, L])
    inverse = _level(inverse, a, rows, columns, 16, PRECISION)
    return _level(inverse, a, rows, columns, 32, PRECISION)


@remember_launches
@triton.jit(do_not_specialize=["T"])
def inverse_kernel(
    k_ptr, g_ptr, beta_ptr, inverse_ptr, b_ptr, T, H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    VARIANT: tl.constexpr = 0, PRECISION: tl.constexpr = "tf32",
):
    """Compute one chunk of one head.

    Grid: (N, B * H), N = ceil(T / L). Reads k [B, T, H / GROUP, K], g (None: 0) and beta [B, T, H]; writes
    T Diag(beta) [B * H, N, L, L] in k's dtype and b [B * H, N, L], in base 2.
    """
    pid_n = tl.program_id(0)
    pid_bh = tl.program_id(1).to(tl.int64)
    batch = pid_bh // H
    head = pid_bh % H
    BK: tl.constexpr = triton.next_power_of_2(K)
    offs_l = tl.arange(0, L)
    offs_t = pid_n * L + offs_l
    offs_k = tl.arange(0, BK)
    exists = offs_t < T
    k = tl.load(
        k_ptr + (batch * T * (H // GROUP) + head // GROUP) * K + offs_t[:, None] * (H // GROUP * K) + offs_k[None, :],
        mask=exists[:, None] & (offs_k < K)[None, :],
        other=0.0,
    )
    at = batch * T * H + head + offs_t * H
    beta = tl.load(beta_ptr + at, mask=exists, other=0.0).to(tl.float32)
    b = tl.zeros_like(beta)
    if g_ptr is not None:
        log_decay = tl.load(g_ptr + at, mask=exists, other=0.0).to(tl.float32) * LOG2E
        b = tl.cumsum(tl.maximum(log_decay, MIN_LOG_DECAY), axis=0)
    # Precision of float32 keys; half-precision ones are multiplied as they are.
    a = tl.dot(k, tl.trans(k), input_precision="tf32x3")
    before = offs_l[:, None] > offs_l[None, :]
    a = tl.where(before, a * beta[:, None] * tl.exp2(tl.where(before, b[:, None] - b[None, :], 0.0)), 0.0)
    scaled = _inverse(a, L, VARIANT, PRECISION) * beta[None, :]
    number = pid_bh * tl.num_programs(0) + pid_n
    tl.store(
        inverse_ptr + number * (L * L) + offs_l[:, None] * L + offs_l[None, :], scaled.to(inverse_ptr.dtype.element_ty)
    )
    tl.store(b_ptr + number * L + offs_l, b)
