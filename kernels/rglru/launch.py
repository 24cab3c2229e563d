"""Launches and autograd of the kernels for diagonal recurrences h_t = a_t h_{t-1} + b_t.

A call has a strategy: "look_back" (one pass over memory, time split over programs that wait for each other's states),
"chunked" (reduce, then scan) or "walk" (one program per sequence and block of channels). Only the inputs and a float32
state every few steps are saved for the backward pass, which recomputes the elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.arguments import check_chunk_size
from ..common.channel_tensors import check_kernel_support, check_one_token
from ..common.channels import CHANNEL_MULTIPLE, TileConfig
from ..common.device import capability, on_device_of
from ..common.exchange import NO_CODE, PassCode, exchange_words
from ..common.sizes import cdiv
from .backward import look_back_gradient_kernel, sum_parts_kernel, walk_gradient_kernel
from .config import ScanConfig, default_chunk_size, invalid_reason, select_config
from .elements import pass_code
from .forward import look_back_kernel, step_kernel, walk_kernel
from .reduce import merge_kernel, reduce_kernel

MERGE_BLOCK = 128
STEP_BLOCK = 256
SUM_BLOCK_N, SUM_BLOCK_C = 128, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything about one call but its tensors: operation, strategy, chunk length in steps, launches, and whether to
    return the last state and to save states for a backward pass."""

    op: str
    strategy: str
    chunk: int
    config: ScanConfig
    want_last: bool
    save: bool


def run(
    op: str,
    tensors: tuple[Tensor, ...],
    strategy: str,
    chunk_size: int | None,
    initial_state: Tensor | None,
    return_last_state: bool,
    config: ScanConfig | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a diagonal recurrence on an operation's checked tensors; return h, or h and the last state.

    Args:
        op: "rglru" or "linear_scan", see elements.py.
        tensors: x, r, i [B, T, C] and c [C], or x and a.
        strategy: "look_back", "chunked" or "walk".
        chunk_size: for "chunked", a power of two >= 16; None chooses one.

    Raises:
        ValueError: on a dtype, device, number of channels, chunk length or launches that the kernels do not take.
    """
    x = tensors[0]
    given = (*tensors, *(None,) * (4 - len(tensors)), initial_state)
    check_kernel_support("x", x)
    B, T, C = x.shape
    chunk = T
    if strategy == "chunked":
        chunk = default_chunk_size(seq_len=T, batch=B, channels=C) if chunk_size is None else chunk_size
        check_chunk_size(chunk, minimum=16, power_of_two=True)
    save = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
    if config is None:
        config = select_config(
            op=op, strategy=strategy, capability=capability(x.device), item_bytes=x.element_size(), batch=B,
            channels=C, training=save,
        )  # fmt: skip
    if reason := invalid_reason(config, chunk if strategy == "chunked" else None):
        raise ValueError(f"config: {reason}")
    problem = Problem(op=op, strategy=strategy, chunk=chunk, config=config, want_last=return_last_state, save=save)
    h, last = _Diagonal.apply(*given, problem)
    return (h, last) if return_last_state else h


class _Diagonal(torch.autograd.Function):
    """h and the last state, with gradients of x, r, i, c and the initial state."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        r: Tensor,
        i: Tensor | None,
        c: Tensor | None,
        first: Tensor | None,
        problem: Problem,
    ) -> tuple[Tensor, Tensor | None]:
        h, last, saved = run_forward(problem, x, r, i, c, first)
        ctx.save_for_backward(x, r, i, c, saved)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return h, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        x, r, i, c, saved = ctx.saved_tensors
        dh = torch.zeros_like(x) if dh is None else dh.contiguous()
        dlast = None if dlast is None else dlast.contiguous()
        gradients = run_backward(ctx.problem, x, r, i, c, saved, dh, dlast, want_dfirst=ctx.needs_input_grad[4])
        return *gradients, None


@on_device_of("x")
def run_step(
    op: str, x: Tensor, r: Tensor, i: Tensor | None, c: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return h [B, 1, C] and the new state [B, C] after one token."""
    check_kernel_support("x", x)
    check_one_token(x)
    B, _, C = x.shape
    h, last = torch.empty_like(x), torch.empty(B, C, device=x.device, dtype=torch.float32)
    inputs = (None if tensor is None else tensor.detach() for tensor in (x, r, i, c, first))
    step_kernel[(B, cdiv(C, STEP_BLOCK))](*inputs, h, last, C, OP=op, BLOCK_C=STEP_BLOCK, num_warps=4)
    return h, last


@on_device_of("x")
def run_forward(
    problem: Problem, x: Tensor, r: Tensor, i: Tensor | None, c: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return h [B, T, C], the last state [B, C] and the states [B, S, C] from which rows start in the backward pass."""
    B, T, C = x.shape
    tile, save = problem.config.forward, problem.config.backward.block_i
    slots = cdiv(T, save)
    h = torch.empty_like(x)
    last = torch.empty(B, C, device=x.device, dtype=torch.float32) if problem.want_last else None
    saved = torch.empty(B, slots, C, device=x.device, dtype=torch.float32) if problem.save else None
    sizes = (B, T, C // CHANNEL_MULTIPLE, slots)
    flags = {"OP": problem.op, "SAVE": save if problem.save else 0, **tile.options}
    if problem.strategy == "look_back":
        words, call = exchange_words(x, cdiv(T, tile.steps) * B * C)
        look_back_kernel[tile.grid(B, T, C, tile.steps)](
            x, r, i, c, first, h, last, saved, words, call, *sizes, problem.config.ahead // tile.blocks(B, C),
            PASS=_pass_code(tile, x), **flags,
        )  # fmt: skip
        return h, last, saved
    if problem.chunk < T:
        first = _chunk_states(problem, tile, x, r, i, c, None, first)
    walk_kernel[tile.grid(B, T, C, problem.chunk)](
        x, r, i, c, first, h, last, saved, *sizes, problem.chunk, cdiv(T, problem.chunk), **flags
    )
    return h, last, saved


@on_device_of("x")
def run_backward(
    problem: Problem,
    x: Tensor,
    r: Tensor,
    i: Tensor | None,
    c: Tensor | None,
    saved: Tensor,
    dh: Tensor,
    dlast: Tensor | None,
    *,
    want_dfirst: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, r, i [B, T, C], c [C] and the initial state [B, C]."""
    B, T, C = x.shape
    tile = problem.config.backward
    one_pass = problem.strategy == "look_back"
    parts = cdiv(T, tile.steps if one_pass else problem.chunk)
    dx, dr = torch.empty_like(x), torch.empty_like(x)
    di = None if i is None else torch.empty_like(x)
    dc = None if c is None else torch.empty(parts, B, C, device=x.device, dtype=torch.float32)
    dfirst = torch.empty(B, C, device=x.device, dtype=torch.float32) if want_dfirst else None
    sizes = (B, T, C // CHANNEL_MULTIPLE, saved.shape[1])
    flags = {"OP": problem.op, **tile.options}
    if one_pass:
        words, call = exchange_words(x, parts * B * C)
        look_back_gradient_kernel[tile.grid(B, T, C, tile.steps)](
            x, r, i, c, saved, dh, dlast, dx, dr, di, dc, dfirst, words, call, *sizes,
            problem.config.ahead // tile.blocks(B, C), PASS=_pass_code(tile, x), **flags,
        )  # fmt: skip
    else:
        if problem.chunk < T:
            dlast = _chunk_states(problem, tile, x, r, i, c, dh, dlast)
        walk_gradient_kernel[tile.grid(B, T, C, problem.chunk)](
            x, r, i, c, saved, dh, dlast, dx, dr, di, dc, dfirst, *sizes, problem.chunk, parts, **flags
        )
    return dx, dr, di, None if dc is None else _sum_parts(dc), dfirst


@on_device_of("parts")
def _sum_parts(parts: Tensor) -> Tensor:
    """Return the sum [C] of parts [N, B, C]."""
    C = parts.shape[2]
    total = torch.empty(C, device=parts.device, dtype=torch.float32)
    sum_parts_kernel[(cdiv(C, SUM_BLOCK_C),)](
        parts, total, parts.numel() // C, C, BLOCK_N=SUM_BLOCK_N, BLOCK_C=SUM_BLOCK_C, num_warps=4
    )
    return total


@on_device_of("x")
def _chunk_states(
    problem: Problem,
    tile: TileConfig,
    x: Tensor,
    r: Tensor,
    i: Tensor | None,
    c: Tensor | None,
    dh: Tensor | None,
    first: Tensor | None,
) -> Tensor:
    """Return the state before every chunk [N, B, C]; given dh, the w after every chunk, the last chunk's first."""
    B, T, C = x.shape
    chunks = cdiv(T, problem.chunk)
    a, b, states = (torch.empty(chunks, B, C, device=x.device, dtype=torch.float32) for _ in range(3))
    reduce_kernel[tile.grid(B, T, C, problem.chunk)](
        x, r, i, c, dh, a, b, B, T, C // CHANNEL_MULTIPLE, problem.chunk, chunks, OP=problem.op, **tile.options
    )
    merge_kernel[(cdiv(B * C, MERGE_BLOCK),)](a, b, first, states, B * C, chunks, BLOCK_E=MERGE_BLOCK, num_warps=4)
    return states


def _pass_code(tile: TileConfig, x: Tensor) -> PassCode:
    """Return the PTX by which a kernel's threads pass states on, or none in the interpreter."""
    return NO_CODE if x.device.type == "cpu" and triton.knobs.runtime.interpret else pass_code(tile.channels)
