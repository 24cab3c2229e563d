"""The decoding step of WKV: one token a sequence, the state read and written once."""

import triton
import triton.language as tl

from .elements import _advance, _load_state
from .forward import _output, _store_state


@triton.jit(do_not_specialize=["B"])
def step_kernel(
    k_ptr,
    v_ptr,
    w_ptr,
    u_ptr,
    num_ptr,
    den_ptr,
    max_ptr,
    y_ptr,
    last_ptr,
    B,
    C: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Advance BLOCK_C channels of one sequence by one token.

    Grid: (B, ceil(C / BLOCK_C)). Reads k, v [B, 1, C], w, u [C] and the state, num, den, max [B, C]; writes y [B, 1, C]
    and the new state [3, B, C].
    """
    PRECISE: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs = tl.program_id(0).to(tl.int64) * C + offs_c
    k = tl.load(k_ptr + offs, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    v = tl.load(v_ptr + offs, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    w = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0)[None, :]
    m, num, den = _load_state(num_ptr, den_ptr, max_ptr, offs, mask_c, HAS_FIRST)
    y = _output(m, num, den, k, v, u, PRECISE)
    tl.store(y_ptr + offs[None, :], y.to(y_ptr.dtype.element_ty), mask=mask_c[None, :])
    m, num, den = _advance(m, num, den, k, v, w)
    _store_state(last_ptr, B.to(tl.int64) * C, m, num, den, offs[None, :], mask_c[None, :])
