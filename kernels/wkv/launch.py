"""Launches and autograd of WKV's kernels: the parallel scan, the walk and the decoding step.

Only the inputs, a float32 state every few steps and the last state are saved for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..common.channel_tensors import check_kernel_support, check_one_token
from ..common.device import capability, on_device_of
from ..common.differentiable import Differentiable, Tensors
from ..common.exchange import NO_CODE, exchange_words
from ..common.sizes import REMEMBERED, cdiv
from ..common.sums import sum_parts
from .backward import scan_gradient_kernel, walk_gradient_kernel
from .config import WkvConfig, invalid_reason, select_config
from .exchange import exchange_sums, gather_code, pass_code
from .forward import scan_kernel, step_kernel, walk_kernel
from .reference import State

STEP_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything about one call but its tensors: strategy ("scan" or "walk"), launches, whether to return the last
    state and to save states for a backward pass."""

    strategy: str
    config: WkvConfig
    want_last: bool
    save: bool


def run(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    strategy: str,
    initial_state: State | None,
    return_last_state: bool,
    config: WkvConfig | None,
) -> Tensor | tuple[Tensor, State]:
    """Run WKV on checked k, v, w, u with strategy "scan" or "walk"; return y, or y and the last state.

    Raises:
        ValueError: on a dtype, device, number of channels or launches that the kernels do not take.
    """
    k = tensors[0]
    check_kernel_support("k", k)
    num, den, top = initial_state or (None, None, None)
    # A state's max has no gradient, so it does not count here.
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, num, den))
    y, num, den, top = WKV(Request(strategy, return_last_state, save, config), *tensors, num, den, top)
    return (y, (num, den, top)) if return_last_state else y


class Request(NamedTuple):
    """What a call asks for, see :func:`run`; ``save``: whether a backward pass may follow."""

    strategy: str
    want_last: bool
    save: bool
    config: WkvConfig | None


def make_problem(request: Request, k: Tensor) -> Problem:
    """Return the problem that a request is for k [B, T, C]."""
    return _make_problem(request, k.shape[0], k.shape[2], k.element_size(), capability(k.device))


@lru_cache(REMEMBERED)
def _make_problem(request: Request, batch: int, channels: int, item_bytes: int, capability: tuple[int, int]) -> Problem:
    strategy, config = request.strategy, request.config
    if config is None:
        config = select_config(
            strategy=strategy, capability=capability, item_bytes=item_bytes, batch=batch, channels=channels,
            saving=request.save,
        )  # fmt: skip
    if reason := invalid_reason(config, walk=strategy == "walk"):
        raise ValueError(f"config: {reason}")
    return Problem(strategy=strategy, config=config, want_last=request.want_last, save=request.save)


def _forward(request: Request, k: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    """Return y and the last state, and what the backward pass starts from."""
    y, last, saved = run_forward(make_problem(request, k), k, *others)
    # Copies, so that a caller who modifies the state does not change the saved one.
    parts = (None, None, None) if last is None else tuple(x.clone() for x in last)
    return (y, *parts), (saved, last)


def _shapes(request: Request, k: Tensor, *_: Tensor | None) -> tuple[Tensors, Tensors]:
    """Allocate what :func:`_forward` returns."""
    B, T, C = k.shape
    problem = _make_problem(request, index(B), index(C), k.element_size(), capability(k.device))
    parts = tuple(k.new_empty(B, C, dtype=torch.float32) if request.want_last else None for _ in range(3))
    slots = cdiv(T, problem.config.backward.block_i)
    saved = k.new_empty(3, B, slots, C, dtype=torch.float32) if request.save else None
    return (torch.empty_like(k), *parts), (saved, _states(k) if request.want_last else None)


def _backward(
    request: Request, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, gradients: Tensors
) -> Tensors:
    """Return the gradients of k, v, w, u and the first state's num and den."""
    k, v, w, u, _, _, top = tensors
    states, last = saved
    dy, dnum, dden, _ = gradients
    dy = torch.zeros_like(k) if dy is None else dy.contiguous()
    dlast = None
    if dnum is not None or dden is not None:
        dlast = tuple(torch.zeros_like(last[0]) if x is None else x.contiguous() for x in (dnum, dden))
    problem = make_problem(request, k)
    dk, dv, dw, du, dfirst = run_backward(problem, k, v, w, u, top, states, dy, last, dlast, any(needs[4:6]))
    return dk, dv, dw, du, *((None, None) if dfirst is None else dfirst), None


WKV = Differentiable(
    "wkv4",
    request=Request,
    tensors=("k", "v", "w", "u", "num?", "den?", "max?"),
    outputs=("y", "num", "den", "max"),
    saved=("states", "last"),
    constant=("max",),
    forward=_forward,
    backward=_backward,
    shapes=_shapes,
)
"""y and the last state, with gradients of k, v, w, u and the first state's num and den."""


def _step(request: Request, *tensors: Any) -> tuple[Tensors, Tensors]:
    """Return y and the state after one token."""
    return run_step(*tensors), ()


def _step_shapes(request: Request, k: Tensor, *_: Tensor | None) -> tuple[Tensors, Tensors]:
    """Allocate what :func:`_step` returns."""
    return (torch.empty_like(k), *(k.new_empty(k.shape[0], k.shape[2], dtype=torch.float32) for _ in range(3))), ()


STEP = Differentiable(
    "wkv4_step",
    request=Request,
    tensors=("k", "v", "w", "u", "num?", "den?", "max?"),
    outputs=("y", "num", "den", "max"),
    forward=_step,
    backward=None,
    shapes=_step_shapes,
)
"""A decoding step."""


def step(k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: State | None) -> tuple[Tensor, State]:
    """Return y [B, 1, C] and the state after one token of checked k, v, w, u and the state before it.

    Raises:
        ValueError: on a dtype, device or number of channels that the kernel does not take, and on several tokens.
    """
    check_kernel_support("k", k)
    check_one_token(k)
    y, *state = STEP(Request("step", True, False, None), k, v, w, u, *(initial_state or (None,) * 3))
    return y, tuple(state)


@on_device_of("k")
def run_step(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, num: Tensor | None, den: Tensor | None, top: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y [B, 1, C] and num, den and max after one token."""
    B, _, C = k.shape
    y, last = torch.empty_like(k), _states(k)
    step_kernel[(B, cdiv(C, STEP_BLOCK))](
        k, v, w, u, num, den, top, y, last, B, C=C, BLOCK_C=STEP_BLOCK, num_warps=4
    )  # fmt: skip
    return y, last[0], last[1], last[2]


@on_device_of("k")
def run_forward(
    problem: Problem,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    num: Tensor | None,
    den: Tensor | None,
    top: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y [B, T, C], the last state [3, B, C] and the states [3, B, S, C] from which the backward pass starts."""
    B, T, C = k.shape
    tile, save = problem.config.forward, problem.config.backward.block_i
    slots = cdiv(T, save)
    y = torch.empty_like(k)
    last = _states(k) if problem.want_last else None
    saved = torch.empty(3, B, slots, C, device=k.device, dtype=torch.float32) if problem.save else None
    tensors = (k, v, w, u, num, den, top, y, last, saved)
    flags = {"C": C, "SAVE": save if problem.save else 0, **tile.options}
    if problem.strategy == "walk":
        walk_kernel[tile.grid(B, T, C, T)](*tensors, B, T, slots, **flags)
        return y, last, saved
    config = problem.config
    # With ``hold`` a program always loads a whole tile of k and v, so all sequences together must have that many steps.
    hold = config.hold and tile.steps <= B * T
    flags["KEEP"] = "tokens" if hold else "nothing" if config.reload or config.hold else "weights"
    grid, sizes = tile.grid(B, T, C, tile.steps), (B, T, slots, config.ahead // tile.blocks(B, C))
    tiles = cdiv(T, tile.steps)
    if config.serial:
        words, call = exchange_words(k, tiles * B * C, width=2)
        codes = (gather_code(tile.block_o, tile.block_c, tile.channels), pass_code(tile.block_c, tile.channels))
        gather, passing = (NO_CODE, NO_CODE) if triton.knobs.runtime.interpret else codes
        scan_kernel[grid](*tensors, words, None, call, *sizes, GATHER=gather, PASS=passing, LOOK=0, **flags)
    else:
        words, spare, keep = exchange_sums(k, tiles, config.look)
        look = config.look if tiles > 1 else 0
        scan_kernel[grid](*tensors, words, spare, 0, *sizes, GATHER=None, PASS=None, LOOK=look, **flags)
        keep()
    return y, last, saved


@on_device_of("k")
def run_backward(
    problem: Problem,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    top: Tensor | None,
    saved: Tensor,
    dy: Tensor,
    last: Tensor | None,
    dlast: tuple[Tensor, ...] | None,
    want_dfirst: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of k, v [B, T, C], w, u [C] and the first state's num and den [2, B, C]."""
    B, T, C = k.shape
    tile, slots = problem.config.backward, saved.shape[2]
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    parts = 1 if problem.strategy == "walk" else cdiv(T, tile.steps)
    dw, du = (torch.empty(parts, B, C, device=k.device, dtype=torch.float32) for _ in range(2))
    dfirst = torch.empty(2, B, C, device=k.device, dtype=torch.float32) if want_dfirst else None
    tensors = (k, v, w, u, top, saved, dy, *((None,) * 3 if dlast is None else (last, *dlast)), dk, dv, dw, du, dfirst)
    flags = {"C": C, **tile.options}
    if problem.strategy == "walk":
        walk_gradient_kernel[tile.grid(B, T, C, T)](*tensors, B, T, slots, **flags)
    else:
        words, spare, keep = exchange_sums(k, parts, problem.config.look)
        look = problem.config.look if parts > 1 else 0
        scan_gradient_kernel[tile.grid(B, T, C, tile.steps)](*tensors, words, spare, B, T, slots, LOOK=look, **flags)
        keep()
    return dk, dv, sum_parts(dw), sum_parts(du), dfirst


def _states(k: Tensor) -> Tensor:
    """Allocate a state [3, B, C]."""
    return torch.empty(3, k.shape[0], k.shape[2], device=k.device, dtype=torch.float32)
