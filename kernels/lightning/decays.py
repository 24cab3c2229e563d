"""Decays of the Lightning kernels: powers of lambda = exp(-slope), one slope per head."""

import triton
import triton.language as tl

MAX_SLOPE = 150.0
"""Upper bound of the slopes: the decay of one step is zero in float32 there, and multiples of the rate stay finite."""

LOG2E = tl.constexpr(1.4426950408889634)
MAX_RATE = tl.constexpr(MAX_SLOPE * 1.4426950408889634)


@triton.jit
def head_rate(slope_ptr, head):
    """Return a head's decay rate in base 2: lambda = 2^-rate."""
    return tl.minimum(tl.load(slope_ptr + head) * LOG2E, MAX_RATE)


@triton.jit
def power(rate, n):
    """Return lambda^n for n >= 0, else 0, which masks the positions that a causal sum leaves out."""
    return tl.where(n >= 0, tl.math.exp2(-rate * tl.maximum(n, 0).to(tl.float32)), 0.0)
