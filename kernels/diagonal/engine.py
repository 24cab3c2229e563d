"""The Triton engine for diagonal recurrences h_t = a_t h_{t-1} + b_t: launches and autograd.

One call has a strategy: "look_back" (one pass over memory, time split over programs that wait for each other's
states), "chunked" (reduce, then scan) or "walk" (one program a sequence and block of channels). Nothing but the inputs
and a float32 state every few steps is kept for the backward pass; elements are recomputed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.device import on_device_of
from ..scalar_decay.engine import capability
from ..scalar_decay.validate import check_chunk_size
from .backward import look_back_gradient_kernel, walk_gradient_kernel
from .config import CHANNEL_MULTIPLE, DiagonalConfig, TileConfig, default_chunk_size, invalid_reason, select_config
from .exchange import exchange_code, exchange_words
from .forward import look_back_kernel, walk_kernel
from .reduce import merge_kernel, reduce_kernel, sum_parts_kernel
from .step import step_kernel
from .validate import check_kernel_support

MERGE_BLOCK = 128
STEP_BLOCK = 256
SUM_BLOCK_N, SUM_BLOCK_C = 128, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What one call computes, beside its tensors: operation, strategy, chunk length in steps, launches."""

    op: str
    strategy: str
    chunk: int
    config: DiagonalConfig
    want_last: bool
    save: bool


def diagonal(
    op: str,
    x: Tensor,
    r: Tensor,
    i: Tensor | None = None,
    c: Tensor | None = None,
    *,
    strategy: str,
    chunk_size: int | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    config: DiagonalConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a diagonal recurrence on an operation's checked tensors.

    Args:
        op: "rglru" or "scan", see elements.py.
        x, r, i: [B, T, C]; a scan's r is a, and it has no i.
        c: [C], of rglru.
        strategy: "look_back", "chunked" or "walk".
        chunk_size: of "chunked", a power of two >= 16; None chooses one.
        initial_state: [B, C], float32, or None.
        return_last_state: whether to return the last state [B, C] too.
        config: launches; chosen for the device when None.

    Raises:
        ValueError: on a dtype, device, number of channels, chunk length or launches that the kernels do not take.
    """
    check_kernel_support(x)
    B, T, C = x.shape
    chunk = T
    if strategy == "chunked":
        chunk = default_chunk_size(seq_len=T, batch=B, channels=C) if chunk_size is None else chunk_size
        check_chunk_size(chunk, minimum=16, power_of_two=True)
    tensors = (x, r, i, c, initial_state)
    save = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if config is None:
        config = select_config(
            op=op,
            strategy=strategy,
            capability=capability(x.device),
            item_bytes=x.element_size(),
            batch=B,
            channels=C,
            training=save,
        )
    if reason := invalid_reason(config, chunk if strategy == "chunked" else None):
        raise ValueError(f"config: {reason}")
    problem = Problem(op=op, strategy=strategy, chunk=chunk, config=config, want_last=return_last_state, save=save)
    h, last = _Diagonal.apply(*tensors, problem)
    return (h, last) if return_last_state else h


@on_device_of("x")
def step(
    op: str,
    x: Tensor,
    r: Tensor,
    i: Tensor | None = None,
    c: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Advance every channel by one token; arguments as in :func:`diagonal` with T = 1. Not differentiable."""
    check_kernel_support(x)
    B, T, C = x.shape
    if T != 1:
        raise ValueError(f"a decoding step takes one token: seq_len must be 1, got {T}")
    h, last = torch.empty_like(x), torch.empty(B, C, device=x.device, dtype=torch.float32)
    step_kernel[(B, triton.cdiv(C, STEP_BLOCK))](
        x.detach(), r.detach(), _or(i, x).detach(), _or(c, x).detach(), _or(initial_state, x).detach(), h, last, C,
        OP=op, HAS_FIRST=initial_state is not None, BLOCK_C=STEP_BLOCK, num_warps=4,
    )  # fmt: skip
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
def run_forward(
    problem: Problem, x: Tensor, r: Tensor, i: Tensor | None, c: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return h [B, T, C], the last state [B, C] and the states [B, S, C] that the backward pass starts rows from."""
    B, T, C = x.shape
    tile, save = problem.config.forward, problem.config.backward.block_i
    slots = triton.cdiv(T, save)
    h = torch.empty_like(x)
    last = torch.empty(B, C, device=x.device, dtype=torch.float32) if problem.want_last else None
    saved = torch.empty(B, slots, C, device=x.device, dtype=torch.float32) if problem.save else None
    inputs = (x, r, _or(i, x), _or(c, x))
    flags = {"OP": problem.op, "WANT_LAST": problem.want_last, "SAVE": save if problem.save else 0}
    outputs = (h, _or(last, x), _or(saved, x))
    if problem.strategy == "look_back":
        words, call = exchange_words(x, triton.cdiv(T, tile.steps) * B * C)
        look_back_kernel[_grid(tile, x, tile.steps)](
            *inputs, _or(first, x), *outputs, words, call, B, T, C // CHANNEL_MULTIPLE, slots,
            _ahead(problem, tile, x), HAS_FIRST=first is not None,
            **flags, **_exchange(tile, x), **_launch(tile),
        )  # fmt: skip
        return h, last, saved
    if problem.chunk < T:
        first = _chunk_states(problem, tile, inputs, x, first, backward=False)
    walk_kernel[_grid(tile, x, problem.chunk)](
        *inputs, _or(first, x), *outputs, B, T, C // CHANNEL_MULTIPLE, slots, problem.chunk,
        triton.cdiv(T, problem.chunk), HAS_FIRST=first is not None, **flags, **_launch(tile),
    )  # fmt: skip
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
    tile, slots = problem.config.backward, saved.shape[1]
    one_pass = problem.strategy == "look_back"
    parts = triton.cdiv(T, tile.steps if one_pass else problem.chunk)
    dx, dr = torch.empty_like(x), torch.empty_like(x)
    di = None if i is None else torch.empty_like(x)
    dc = None if c is None else torch.empty(parts, B, C, device=x.device, dtype=torch.float32)
    dfirst = torch.empty(B, C, device=x.device, dtype=torch.float32) if want_dfirst else None
    inputs = (x, r, _or(i, x), _or(c, x))
    outputs = (dx, dr, _or(di, x), _or(dc, x), _or(dfirst, x))
    flags = {"OP": problem.op, "WANT_DFIRST": want_dfirst}
    if one_pass:
        words, call = exchange_words(x, parts * B * C)
        look_back_gradient_kernel[_grid(tile, x, tile.steps)](
            *inputs, saved, dh, _or(dlast, x), *outputs, words, call, B, T, C // CHANNEL_MULTIPLE, slots,
            _ahead(problem, tile, x), HAS_DLAST=dlast is not None,
            **flags, **_exchange(tile, x), **_launch(tile),
        )  # fmt: skip
    else:
        if problem.chunk < T:
            dlast = _chunk_states(problem, tile, inputs, dh, dlast, backward=True)
        walk_gradient_kernel[_grid(tile, x, problem.chunk)](
            *inputs, saved, dh, _or(dlast, x), *outputs, B, T, C // CHANNEL_MULTIPLE, slots, problem.chunk, parts,
            HAS_DLAST=dlast is not None, **flags, **_launch(tile),
        )  # fmt: skip
    return dx, dr, di, None if dc is None else _sum_parts(dc), dfirst


@on_device_of("parts")
def _sum_parts(parts: Tensor) -> Tensor:
    """Return the sum [C] of parts [N, B, C], in one short launch."""
    C = parts.shape[2]
    total = torch.empty(C, device=parts.device, dtype=torch.float32)
    sum_parts_kernel[(triton.cdiv(C, SUM_BLOCK_C),)](
        parts, total, parts.numel() // C, C, BLOCK_N=SUM_BLOCK_N, BLOCK_C=SUM_BLOCK_C, num_warps=4
    )
    return total


@on_device_of("dh")
def _chunk_states(
    problem: Problem,
    tile: TileConfig,
    inputs: tuple[Tensor, ...],
    dh: Tensor,
    first: Tensor | None,
    *,
    backward: bool,
) -> Tensor:
    """Return the state before every chunk [N, B, C]; backward, the w behind every chunk, the last one's first."""
    x = inputs[0]
    B, T, C = x.shape
    chunks = triton.cdiv(T, problem.chunk)
    a, b, states = (torch.empty(chunks, B, C, device=x.device, dtype=torch.float32) for _ in range(3))
    reduce_kernel[_grid(tile, x, problem.chunk)](
        *inputs, dh, a, b, B, T, C // CHANNEL_MULTIPLE, problem.chunk, chunks,
        OP=problem.op, BACKWARD=backward, **_launch(tile),
    )  # fmt: skip
    merge_kernel[(triton.cdiv(B * C, MERGE_BLOCK),)](
        a, b, _or(first, x), states, B * C, chunks,
        HAS_FIRST=first is not None, BLOCK_E=MERGE_BLOCK, num_warps=4,
    )  # fmt: skip
    return states


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, or one to stand for a pointer that the kernel will not follow."""
    return other if tensor is None else tensor


def _grid(tile: TileConfig, x: Tensor, steps: int) -> tuple[int]:
    B, T, C = x.shape
    return (triton.cdiv(T, steps) * B * triton.cdiv(C, tile.block_c),)


def _launch(tile: TileConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"BLOCK_I": tile.block_i, "BLOCK_O": tile.block_o, "BLOCK_C": tile.block_c}
    options["num_warps"] = tile.num_warps
    return options if tile.maxnreg is None else {**options, "maxnreg": tile.maxnreg}


def _ahead(problem: Problem, tile: TileConfig, x: Tensor) -> int:
    """Return how many tiles of time ahead inputs are brought into the cache."""
    B, _, C = x.shape
    return problem.config.ahead // (B * triton.cdiv(C, tile.block_c))


def _exchange(tile: TileConfig, x: Tensor) -> dict[str, Any]:
    """Return how a kernel's threads pass states on; nothing waits in the interpreter, which runs no PTX."""
    if x.device.type == "cpu" and triton.knobs.runtime.interpret:
        return {"CODE": "", "CONSTRAINTS": "", "PACK": 1}
    code, constraints = exchange_code(tile.channels)
    return {"CODE": code, "CONSTRAINTS": constraints, "PACK": tile.channels}
