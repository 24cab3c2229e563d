"""Launches and autograd of the kernels for diagonal recurrences h_t = a_t h_{t-1} + b_t.

A call has a strategy: "look_back" (one pass over memory, time split over programs that wait for each other's states),
"chunked" (reduce, then scan) or "walk" (one program per sequence and block of channels). Only the inputs and a float32
state every few steps are saved for the backward pass, which recomputes the elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..common.arguments import check_chunk_size
from ..common.channel_tensors import check_kernel_support, check_one_token
from ..common.channels import CHANNEL_MULTIPLE, TileConfig
from ..common.device import capability, on_device_of
from ..common.differentiable import Differentiable, Tensors
from ..common.exchange import NO_CODE, PassCode, exchange_words
from ..common.sizes import REMEMBERED, cdiv
from ..common.sums import sum_parts
from .backward import look_back_gradient_kernel, walk_gradient_kernel
from .config import ScanConfig, default_chunk_size, invalid_reason, select_config
from .elements import pass_code
from .forward import look_back_kernel, step_kernel, walk_kernel
from .reduce import merge_kernel, reduce_kernel

MERGE_BLOCK = 128
STEP_BLOCK = 256


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
    if strategy == "chunked" and chunk_size is not None:
        check_chunk_size(chunk_size, minimum=16, power_of_two=True)
    save = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
    h, last = DIAGONAL(Request(op, strategy, chunk_size, return_last_state, save, config), *given)
    return (h, last) if return_last_state else h


class Request(NamedTuple):
    """What a call asks for, see :func:`run`; ``save``: whether a backward pass may follow."""

    op: str
    strategy: str
    chunk_size: int | None
    want_last: bool
    save: bool
    config: ScanConfig | None


def make_problem(request: Request, x: Tensor) -> Problem:
    """Return the problem that a request is for x [B, T, C]."""
    return _make_problem(request, *x.shape, x.element_size(), capability(x.device))


@lru_cache(REMEMBERED)
def _make_problem(
    request: Request, batch: int, seq_len: int, channels: int, item_bytes: int, capability: tuple[int, int]
) -> Problem:
    op, strategy, chunk, config = request.op, request.strategy, request.chunk_size, request.config
    if strategy != "chunked":
        chunk = seq_len
    elif chunk is None:
        chunk = default_chunk_size(seq_len=seq_len, batch=batch, channels=channels)
    if config is None:
        config = select_config(
            op=op, strategy=strategy, capability=capability, item_bytes=item_bytes, batch=batch, channels=channels,
            training=request.save,
        )  # fmt: skip
    if reason := invalid_reason(config, chunk if strategy == "chunked" else None):
        raise ValueError(f"config: {reason}")
    return Problem(op=op, strategy=strategy, chunk=chunk, config=config, want_last=request.want_last, save=request.save)


def _forward(request: Request, x: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    """Return h and the last state, and the states that the backward pass starts from."""
    h, last, saved = run_forward(make_problem(request, x), x, *others)
    return (h, last), (saved,)


def _shapes(request: Request, x: Tensor, *_: Tensor | None) -> tuple[Tensors, Tensors]:
    """Allocate what :func:`_forward` returns."""
    B, T, C = x.shape
    # The states do not depend on the sequence's length, which may be unknown.
    problem = _make_problem(request, index(B), 2**16, index(C), x.element_size(), capability(x.device))
    last = x.new_empty(B, C, dtype=torch.float32) if request.want_last else None
    slots = cdiv(T, problem.config.backward.block_i)
    return (torch.empty_like(x), last), (x.new_empty(B, slots, C, dtype=torch.float32) if request.save else None,)


def _backward(
    request: Request, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, gradients: Tensors
) -> Tensors:
    """Return the gradients of x, r, i, c and the initial state."""
    x, r, i, c, _ = tensors
    dh, dlast = gradients
    dh = torch.zeros_like(x) if dh is None else dh.contiguous()
    dlast = None if dlast is None else dlast.contiguous()
    (states,) = saved
    return run_backward(make_problem(request, x), x, r, i, c, states, dh, dlast, want_dfirst=needs[4])


DIAGONAL = Differentiable(
    "diagonal_recurrence",
    request=Request,
    tensors=("x", "r", "i?", "c?", "initial_state?"),
    outputs=("h", "last"),
    saved=("states",),
    forward=_forward,
    backward=_backward,
    shapes=_shapes,
)
"""h and the last state, with gradients of x, r, i, c and the initial state."""


def _step(request: Request, x: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    """Return h and the state after one token."""
    return run_step(request.op, x, *others), ()


def _step_shapes(request: Request, x: Tensor, *_: Tensor | None) -> tuple[Tensors, Tensors]:
    """Allocate what :func:`_step` returns."""
    return (torch.empty_like(x), x.new_empty(x.shape[0], x.shape[2], dtype=torch.float32)), ()


STEP = Differentiable(
    "diagonal_recurrence_step",
    request=Request,
    tensors=("x", "r", "i?", "c?", "initial_state?"),
    outputs=("h", "last"),
    forward=_step,
    backward=None,
    shapes=_step_shapes,
)
"""A decoding step."""


def step(op: str, x: Tensor, *others: Tensor | None) -> Tensors:
    """Return h [B, 1, C] and the new state [B, C] after one token of checked x, r, i, c and the state before it.

    Raises:
        ValueError: on a dtype, device or number of channels that the kernel does not take, and on several tokens.
    """
    check_kernel_support("x", x)
    check_one_token(x)
    return STEP(Request(op, "step", None, True, False, None), x, *others)


@on_device_of("x")
def run_step(
    op: str, x: Tensor, r: Tensor, i: Tensor | None, c: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return h [B, 1, C] and the new state [B, C] after one token."""
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
    return dx, dr, di, None if dc is None else sum_parts(dc), dfirst


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
