"""WKV on Triton kernels: the parallel scan, the recurrent walk and the decoding step; launches and autograd.

Nothing but the inputs, a float32 state every few steps and the last state is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.device import on_device_of
from ..diagonal.config import TileConfig
from ..diagonal.exchange import exchange_words
from ..scalar_decay.engine import capability
from .backward import scan_gradient_kernel, walk_gradient_kernel
from .config import WkvConfig, invalid_reason, select_config
from .exchange import exchange, gather_code, pass_code
from .forward import scan_kernel, walk_kernel
from .reference import State
from .step import step_kernel
from .validate import check_kernel_support, check_wkv

STEP_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What one call computes, beside its tensors: strategy ("scan" or "walk"), launches, what is returned and kept."""

    strategy: str
    config: WkvConfig
    want_last: bool
    save: bool


def scan(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
    initial_state: State | None = None,
    return_last_state: bool = False,
    config: WkvConfig | None = None,
) -> Tensor | tuple[Tensor, State]:
    """Compute WKV in one pass over memory, time split over programs.

        y_t = (num_{t-1} + e^(u + k_t) v_t) / (den_{t-1} + e^(u + k_t))
        num_t = e^-w num_{t-1} + e^k_t v_t        den_t = e^-w den_{t-1} + e^k_t

    Args:
        k, v: [B, T, C], contiguous; float32, float16 or bfloat16. C is a multiple of 8. A key of minus infinity leaves
            its token out.
        w: [C], positive, float32; a step decays the past by e^-w.
        u: [C], float32, bonus of the current token.
        state_dtype: float32.
        initial_state: (num, den, max) [B, C], float32, for num e^max and den e^max; None has seen nothing. max carries
            no gradient.
        return_last_state: also return (num, den, max) after the last token.
        config: launches; chosen for the device when None.

    Returns:
        y [B, T, C] in v's dtype, or (y, (num, den, max)); differentiable once, in all tensors but max.

    Raises:
        ValueError: on an argument the kernels do not take; the message names it, what was expected and what came.

    Source: Peng et al., RWKV (2023), equations 16 and 22 to 26.
    """
    return _call("scan", k, v, w, u, state_dtype, initial_state, return_last_state, config)


def walk(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
    initial_state: State | None = None,
    return_last_state: bool = False,
    config: WkvConfig | None = None,
) -> Tensor | tuple[Tensor, State]:
    """Compute the same with one program walking all of time for a block of channels; as :func:`scan` otherwise."""
    return _call("walk", k, v, w, u, state_dtype, initial_state, return_last_state, config)


def step(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
    initial_state: State | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Advance by one token (T = 1); arguments and result as in :func:`scan`. Not differentiable."""
    check_wkv(k, v, w, u, initial_state, state_dtype)
    check_kernel_support(k)
    if k.shape[1] != 1:
        raise ValueError(f"a decoding step takes one token: seq_len must be 1, got {k.shape[1]}")
    y, last = run_step(k, v, w, u, initial_state)
    return (y, (last[0], last[1], last[2])) if return_last_state else y


def _call(
    strategy: str,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    state_dtype: torch.dtype,
    initial_state: State | None,
    return_last_state: bool,
    config: WkvConfig | None,
) -> Tensor | tuple[Tensor, State]:
    check_wkv(k, v, w, u, initial_state, state_dtype)
    check_kernel_support(k)
    tensors = (k, v, w, u, *(initial_state or (None,) * 3))
    # A state's max has no gradient, so it alone asks for none.
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors[:6])
    if config is None:
        config = select_config(
            strategy=strategy, capability=capability(k.device), item_bytes=k.element_size(), batch=k.shape[0],
            channels=k.shape[2], saving=save,
        )  # fmt: skip
    if reason := invalid_reason(config, walk=strategy == "walk"):
        raise ValueError(f"config: {reason}")
    problem = Problem(strategy=strategy, config=config, want_last=return_last_state, save=save)
    y, num, den, top = _Wkv.apply(*tensors, problem)
    return (y, (num, den, top)) if return_last_state else y


class _Wkv(torch.autograd.Function):
    """y and the last state, with gradients of k, v, w, u and the first state's num and den."""

    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        u: Tensor,
        num: Tensor | None,
        den: Tensor | None,
        top: Tensor | None,
        problem: Problem,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        y, last, saved = run_forward(problem, k, v, w, u, num, den, top)
        ctx.save_for_backward(k, v, w, u, top, saved, last)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        if last is None:
            return y, None, None, None
        # Copies: what a caller does to a state must not change what is kept.
        parts = tuple(x.clone() for x in last)
        ctx.mark_non_differentiable(parts[2])
        return y, *parts

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dnum: Tensor | None, dden: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        k, v, w, u, top, saved, last = ctx.saved_tensors
        dy = torch.zeros_like(k) if dy is None else dy.contiguous()
        dlast = None
        if dnum is not None or dden is not None:
            dlast = tuple(torch.zeros_like(last[0]) if x is None else x.contiguous() for x in (dnum, dden))
        want_dfirst = any(ctx.needs_input_grad[4:6])
        dk, dv, dw, du, dfirst = run_backward(ctx.problem, k, v, w, u, top, saved, dy, last, dlast, want_dfirst)
        first = (None, None) if dfirst is None else (dfirst[0], dfirst[1])
        return dk, dv, dw, du, *first, None, None


@on_device_of("k")
def run_step(k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: State | None) -> tuple[Tensor, Tensor]:
    """Return y [B, 1, C] and the new state [3, B, C]."""
    B, _, C = k.shape
    y, last = torch.empty_like(k), _states(k)
    first = [w if x is None else x.detach() for x in initial_state or (None,) * 3]
    step_kernel[(B, triton.cdiv(C, STEP_BLOCK))](
        k.detach(), v.detach(), w.detach(), u.detach(), *first, y, last, B,
        C=C, HAS_FIRST=initial_state is not None, BLOCK_C=STEP_BLOCK, num_warps=4,
    )  # fmt: skip
    return y, last


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
    """Return y [B, T, C], the last state [3, B, C] and the states [3, B, S, C] that the backward pass starts from."""
    B, T, C = k.shape
    tile, save = problem.config.forward, problem.config.backward.block_i
    slots = triton.cdiv(T, save)
    y = torch.empty_like(k)
    last = _states(k) if problem.want_last else None
    saved = torch.empty(3, B, slots, C, device=k.device, dtype=torch.float32) if problem.save else None
    first = (w, w, w) if num is None else (num, den, top)
    tensors = (k, v, w, u, *first, y, w if last is None else last, w if saved is None else saved)
    flags = {
        "C": C,
        "HAS_FIRST": num is not None,
        "WANT_LAST": problem.want_last,
        "SAVE": save if problem.save else 0,
    }
    if problem.strategy == "walk":
        walk_kernel[_grid(tile, k, T)](*tensors, B, T, slots, **flags, **_launch(tile, walk=True))
        return y, last, saved
    config, compiled = problem.config, not triton.knobs.runtime.interpret
    # A sequence shorter than a tile has nothing to hold, and one alone no steps to load in their place.
    hold = config.hold and tile.steps <= B * T
    gather = passing = ("", "")
    if compiled and config.serial:
        gather = gather_code(tile.block_o, tile.block_c, tile.channels)
        passing = pass_code(tile.block_c, tile.channels)
    tiles = triton.cdiv(T, tile.steps)
    with _scan_words(config, k, tiles) as (words, spare, look, call):
        scan_kernel[_grid(tile, k, tile.steps)](
            *tensors, words, spare, call, B, T, slots, _ahead(config, k),
            RELOAD=(config.reload or config.hold) and not hold, HOLD=hold, SERIAL=config.serial,
            GATHER=gather[0], GATHER_CONSTRAINTS=gather[1], PASS=passing[0], PASS_CONSTRAINTS=passing[1],
            PACK=tile.channels, LOOK=look, PREFETCH=compiled, **flags, **_launch(tile),
        )  # fmt: skip
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
    parts = 1 if problem.strategy == "walk" else triton.cdiv(T, tile.steps)
    dw, du = (torch.empty(parts, B, C, device=k.device, dtype=torch.float32) for _ in range(2))
    dfirst = torch.empty(2, B, C, device=k.device, dtype=torch.float32) if want_dfirst else None
    tensors = (
        k, v, w, u, w if top is None else top, saved, dy, *((w, w, w) if dlast is None else (last, *dlast)),
        dk, dv, dw, du, w if dfirst is None else dfirst,
    )  # fmt: skip
    flags = {"C": C, "WANT_DFIRST": want_dfirst, "HAS_DLAST": dlast is not None}
    if problem.strategy == "walk":
        walk_gradient_kernel[_grid(tile, k, T)](*tensors, B, T, slots, **flags, **_launch(tile, walk=True))
    else:
        with exchange(k, parts, problem.config.look) as (words, spare, look):
            scan_gradient_kernel[_grid(tile, k, tile.steps)](
                *tensors, words, spare, B, T, slots, LOOK=look, **flags, **_launch(tile)
            )
    return dk, dv, dw.sum((0, 1)), du.sum((0, 1)), dfirst


@contextmanager
def _scan_words(config: WkvConfig, k: Tensor, tiles: int) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Yield what :func:`exchange` does, or words for states that pass from tile to tile, and the number of the call."""
    if config.serial:
        words, call = exchange_words(k, tiles * k.shape[0] * k.shape[2], width=2)
        # There are no spare words, and any number but 0 says that there are several tiles.
        yield words, words, 2, call
    else:
        with exchange(k, tiles, config.look) as (words, spare, look):
            yield words, spare, look, 0


def _states(k: Tensor) -> Tensor:
    """Return room for a state [3, B, C]."""
    return torch.empty(3, k.shape[0], k.shape[2], device=k.device, dtype=torch.float32)


def _grid(tile: TileConfig, k: Tensor, steps: int) -> tuple[int]:
    B, T, C = k.shape
    return (triton.cdiv(T, steps) * B * triton.cdiv(C, tile.block_c),)


def _ahead(config: WkvConfig, k: Tensor) -> int:
    """Return how many tiles of time ahead k and v are brought into the cache."""
    B, _, C = k.shape
    return config.ahead // (B * triton.cdiv(C, config.forward.block_c))


def _launch(tile: TileConfig, *, walk: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"BLOCK_I": tile.block_i, "BLOCK_C": tile.block_c, "num_warps": tile.num_warps}
    if not walk:
        options["BLOCK_O"] = tile.block_o
    return options if tile.maxnreg is None else {**options, "maxnreg": tile.maxnreg}
