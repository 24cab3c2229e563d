"""The decoding step of a diagonal recurrence: one token a sequence, h = a h_prev + b, state read and written once."""

import triton
import triton.language as tl

from .elements import _element, _load_state, _rate


@triton.jit(do_not_specialize=["C"])
def step_kernel(
    x_ptr,
    r_ptr,
    i_ptr,
    c_ptr,
    first_ptr,
    h_ptr,
    last_ptr,
    C,
    OP: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Advance BLOCK_C channels of one sequence by one token.

    Grid: (B, ceil(C / BLOCK_C)). Reads x, r, i [B, 1, C], c [C] and the state [B, C]; writes h [B, 1, C] and the new
    state [B, C].
    """
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64) * C
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    x = tl.load(x_ptr + row + offs_c, mask=mask_c, other=0.0)
    r = tl.load(r_ptr + row + offs_c, mask=mask_c, other=0.0)
    i = x
    if OP == "rglru":
        i = tl.load(i_ptr + row + offs_c, mask=mask_c, other=0.0)
    a, b = _element(x, r, i, _rate(c_ptr, offs_c, mask_c, OP, PRECISE), OP, PRECISE)
    state = tl.reshape(_load_state(first_ptr + row, offs_c, mask_c, HAS_FIRST), (BLOCK_C,))
    h = tl.fma(a, state, b)
    tl.store(h_ptr + row + offs_c, h.to(h_ptr.dtype.element_ty), mask=mask_c)
    tl.store(last_ptr + row + offs_c, h, mask=mask_c)
