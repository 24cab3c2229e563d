"""Exponential moving sum per head, h_t = exp(-slope) h_{t-1} + v_t; its gradient is the same sum backwards in time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..common.arguments import check_first, check_tensor
from ..common.remember import remember_launches

BLOCK_V = 64


@remember_launches
@triton.jit
def scan_kernel(x_ptr, slope_ptr, init_ptr, y_ptr, last_ptr, T, H, V, REVERSE: tl.constexpr, BLOCK_V: tl.constexpr):
    """Scan one block of one head's columns along time; backwards, the state decays after each step, not before it.

    Grid: (B * H, ceil(V / BLOCK_V)). Reads x [B, T, H, V], slope [H], init [B, H, V]; writes y like x, last like init.
    """
    pid_bh, pid_v = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = pid_bh // H, pid_bh % H
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    decay = tl.exp(-tl.load(slope_ptr + head))
    state = tl.load(init_ptr + pid_bh * V + offs_v, mask=mask_v, other=0.0)
    for step in range(T):
        t = T - 1 - step if REVERSE else step
        offs = ((batch * T + t) * H + head) * V + offs_v
        x = tl.load(x_ptr + offs, mask=mask_v, other=0.0).to(tl.float32)
        y = state + x if REVERSE else decay * state + x
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask_v)
        state = decay * y if REVERSE else y
    tl.store(last_ptr + pid_bh * V + offs_v, state, mask=mask_v)


def run_scan(x: Tensor, slope: Tensor, init: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Launch the kernel on x [B, T, H, V] from init [B, H, V]; return y like x and the state after the last step."""
    batch, seq_len, heads, dim_v = x.shape
    y, last = torch.empty_like(x), torch.empty_like(init)
    grid = (batch * heads, triton.cdiv(dim_v, BLOCK_V))
    with torch.cuda.device(x.get_device()):
        scan_kernel[grid](x, slope, init, y, last, seq_len, heads, dim_v, REVERSE=reverse, BLOCK_V=BLOCK_V)
    return y, last


class Scan(torch.autograd.Function):
    """h and the last state from v and the initial state; its gradient is a Scan too, so that has a gradient as well."""

    @staticmethod
    def forward(ctx: FunctionCtx, v: Tensor, slope: Tensor, init: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(slope)
        ctx.reverse = reverse
        return run_scan(v, slope, init, reverse=reverse)

    @staticmethod
    def backward(ctx: FunctionCtx, dh: Tensor, dlast: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (slope,) = ctx.saved_tensors
        dv, dinit = Scan.apply(dh.contiguous(), slope, dlast.contiguous(), not ctx.reverse)
        return dv, None, dinit, None


def scan(
    v: Tensor,
    slope: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the moving sum; arguments and results as :func:`.reference.recurrent`, float64 excepted."""
    check_first("v", v, "[B, T, H, V]")
    check_tensor("slope", slope, v.shape[2:3], torch.float32, v.device)
    if initial_state is None:
        initial_state = v.new_zeros((v.shape[0], *v.shape[2:]), dtype=torch.float32)
    check_tensor("initial_state", initial_state, (v.shape[0], *v.shape[2:]), torch.float32, v.device)
    h, last_state = Scan.apply(v.contiguous(), slope.contiguous(), initial_state.contiguous(), False)
    return (h, last_state) if return_last_state else h
