"""Launches and autograd of WKV's kernels: the scan, the walk and the decoding step.

Only the inputs, a float32 state every few steps and the last state are saved for the backward pass.
"""

from __future__ import annotations

from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.arguments import CASE_DTYPES
from ..common.device import capability
from ..common.differentiable import Differentiable, Tensors, contiguous_like, sequence_strides
from ..common.exchange import exchange_words
from ..common.marks import Documents, mark_documents
from ..common.sizes import REMEMBERED, cdiv
from ..common.sums import sum_parts
from .backward import look_back_gradient_kernel, walk_gradient_kernel
from .config import WkvConfig, invalid_reason, select_config
from .exchange import exchange_sums, gather_code, pass_code
from .forward import look_back_kernel, serial_kernel, step_kernel, walk_kernel
from .reference import EMPTY

STEP_BLOCK = 256


class WkvRequest(NamedTuple):
    """What a call asks for.

    Attributes:
        impl: "scan", "naive" or "step", a decoding step.
        want_last: whether the last state is returned.
        save: whether a backward pass may follow.
        config: launches; None chooses them.
    """

    impl: str
    want_last: bool
    save: bool
    config: WkvConfig | None


def launches(request: WkvRequest, k: Tensor) -> WkvConfig:
    """Return the launches for k [B, T, C]."""
    return _launches(request, index(k.shape[0]), index(k.shape[2]), k.dtype, capability(k.device))


@lru_cache(REMEMBERED)
def _launches(
    request: WkvRequest, batch: int, channels: int, dtype: torch.dtype, capability: tuple[int, int]
) -> WkvConfig:
    config = request.config
    if config is None:
        sizes = {"batch": batch, "channels": channels}
        config = select_config(sizes, CASE_DTYPES[dtype], capability, request.save, impl=request.impl)
    if reason := invalid_reason(config, walk=request.impl == "naive"):
        raise ValueError(f"config: {reason}")
    return config


def _forward(request: WkvRequest, k: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    """Return y and the last state; and, to save, the states before each row [3, B, S, C] and the last one [3, B, C]."""
    B, T, C = k.shape
    *parameters, cu_seqlens = others
    first = tuple(parameters[3:])
    config = launches(request, k)
    tile, save = config.forward, config.backward.block_i
    slots = cdiv(T, save)
    y = contiguous_like(k)
    last = _last_states(k, first, cu_seqlens) if request.want_last else None
    after, documents = last, None
    if cu_seqlens is not None:
        documents = Documents(mark_documents(cu_seqlens, config, T), first, None if last is None else tuple(last))
        first, after = (None, None, None), None
    saved = k.new_empty(3, B, slots, C, dtype=torch.float32) if request.save else None
    strides, rows = _layout(k, others[0])
    tensors = (k, *others[:3], first, y, after, saved, strides, documents)
    flags: dict[str, Any] = {"C": C, **rows, "SAVE": save if request.save else 0, **tile.options}
    if request.impl == "naive":
        walk_kernel[tile.grid(B, T, C, T)](*tensors, B, T, slots, **flags)
    else:
        # To keep tokens every program loads a whole tile of k and v, so all sequences that lie behind each other must
        # together be as long as one.
        steps = B * T if strides == (None, None) else T
        flags["KEEP"] = "nothing" if config.keep == "tokens" and tile.steps > steps else config.keep
        grid, sizes = tile.grid(B, T, C, tile.steps), (B, T, slots, config.ahead // tile.blocks(B, C))
        tiles = cdiv(T, tile.steps)
        if config.serial:
            words, call = exchange_words(k, tiles * B * C, width=2)
            gather = gather_code(tile.block_o, tile.block_c, tile.channels)
            passing = pass_code(tile.block_c, tile.channels)
            serial_kernel[grid](*tensors, words, call, *sizes, GATHER=gather, PASS=passing, **flags)
        else:
            words, spare, keep = exchange_sums(k, tiles, config.look)
            look = config.look if tiles > 1 else 0
            look_back_kernel[grid](*tensors, words, spare, *sizes, LOOK=look, **flags)
            keep()
    # Copies, so that a caller who modifies the state does not change the saved one.
    parts = (None, None, None) if last is None else tuple(x.clone() for x in last)
    return (y, *parts), (saved, last)


def _last_states(k: Tensor, first: tuple[Any, ...], cu_seqlens: Tensor | None) -> Tensor:
    """Return memory for the last states; of packed documents holding those of empty ones, which no kernel writes."""
    if cu_seqlens is None:
        return _states(k)
    if first[0] is not None:
        return torch.stack(first)
    last = k.new_empty(3, cu_seqlens.shape[0] - 1, k.shape[2], dtype=torch.float32).zero_()
    last[2].fill_(EMPTY)
    return last


def _shapes(request: WkvRequest, k: Tensor, *others: Tensor | None) -> tuple[Tensors, Tensors]:
    B, T, C = k.shape
    last = _last_states(k, others[3:6], others[6]) if request.want_last else None
    parts = (None, None, None) if last is None else tuple(torch.empty_like(x) for x in last)
    slots = cdiv(T, launches(request, k).backward.block_i)
    saved = k.new_empty(3, B, slots, C, dtype=torch.float32) if request.save else None
    return (contiguous_like(k), *parts), (saved, last)


def _backward(
    request: WkvRequest, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, gradients: Tensors
) -> Tensors:
    """Return the gradients of k, v, w, u and the first state's num and den."""
    k, *parameters, num, den, top, cu_seqlens = tensors
    states, last = saved
    dy, dnum, dden, _ = gradients
    dy = k.new_zeros(k.shape) if dy is None else dy
    dlast: tuple[Any, ...] = (None, None, None)
    if dnum is not None or dden is not None:
        dlast = (last, *(torch.zeros_like(last[0]) if x is None else x for x in (dnum, dden)))
    B, T, C = k.shape
    config, slots = launches(request, k), states.shape[2]
    tile = config.backward
    dk, dv = contiguous_like(k), contiguous_like(k)
    parts = 1 if request.impl == "naive" else cdiv(T, tile.steps)
    dw, du = (k.new_empty(parts, B, C, dtype=torch.float32) for _ in range(2))
    dfirst = k.new_empty(2, *top.shape, dtype=torch.float32) if any(needs[4:6]) else None
    before, documents = dfirst, None
    if cu_seqlens is not None:
        if dfirst is not None:
            # An empty document's; kernels write the others.
            dfirst = dfirst.zero_() if dlast[0] is None else torch.stack(dlast[1:])
        into = None if dfirst is None else tuple(dfirst)
        of_last = None if dlast[0] is None else (last[2], *dlast[1:])
        marks = mark_documents(cu_seqlens, config, T)
        documents = Documents(marks, (num, den, top), of_last, into)
        top, before, dlast = None, None, (None, None, None)
    strides, rows = _layout(k, parameters[0])
    used = (k, *parameters, top, states, dy, dlast, dk, dv, (dw, du), before, strides, documents)
    flags = {"C": C, **rows, **tile.options}
    if request.impl == "naive":
        walk_gradient_kernel[tile.grid(B, T, C, T)](*used, B, T, slots, **flags)
    else:
        words, spare, keep = exchange_sums(k, parts, config.look)
        look = config.look if parts > 1 else 0
        look_back_gradient_kernel[tile.grid(B, T, C, tile.steps)](*used, words, spare, B, T, slots, LOOK=look, **flags)
        keep()
    return dk, dv, sum_parts(dw), sum_parts(du), *((None, None) if dfirst is None else dfirst), None, None


WKV = Differentiable(
    "wkv4",
    request=WkvRequest,
    tensors=("k", "v", "w", "u", "num?", "den?", "max?", "cu_seqlens?"),
    outputs=("y", "num", "den", "max"),
    saved=("states", "last"),
    strided=2,
    constant=("max",),
    forward=_forward,
    backward=_backward,
    shapes=_shapes,
)
"""y and the last state, with gradients of k, v, w, u and the first state's num and den."""


def _step(request: WkvRequest, k: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    """Return y [B, 1, C] and num, den, max after one token: views of one tensor."""
    B, _, C = k.shape
    y, last = contiguous_like(k), _states(k)
    strides, _ = _layout(k, others[0])
    tensors = (k, *others[:3], others[3:6], y, last, strides)
    step_kernel[(B, cdiv(C, STEP_BLOCK))](*tensors, B, C=C, BLOCK_C=STEP_BLOCK, num_warps=4)
    return (y, *last), ()


def _step_shapes(request: WkvRequest, k: Tensor, *_: Tensor | None) -> tuple[Tensors, Tensors]:
    parts = (k.new_empty(k.shape[0], k.shape[2], dtype=torch.float32) for _ in range(3))
    return (contiguous_like(k), *parts), ()


STEP = WKV.step(_step, _step_shapes)


def _layout(k: Tensor, v: Tensor) -> tuple[tuple[int | None, int | None], dict[str, int]]:
    """Return the batch's strides in units of eight elements, None of what is contiguous, and those of steps."""
    each, C = sequence_strides(k, v), k.shape[2]
    k_row, v_row = (C if strides is None else 8 * strides[1] for strides in each)
    return (each[0] and each[0][0], each[1] and each[1][0]), {"K_ROW": k_row, "V_ROW": v_row}


def _states(k: Tensor) -> Tensor:
    """Allocate a state [3, B, C]."""
    return k.new_empty(3, k.shape[0], k.shape[2], dtype=torch.float32)
