"""Launches and autograd of the kernels for diagonal recurrences h_t = a_t h_{t-1} + b_t.

The forward pass saves only the inputs and a float32 state every few steps; the backward pass recomputes the elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.arguments import CASE_DTYPES
from ..common.channels import CHANNEL_MULTIPLE, TileConfig
from ..common.device import capability
from ..common.differentiable import Differentiable, Tensors, contiguous_like, sequence_strides
from ..common.exchange import exchange_words
from ..common.marks import Documents, mark_documents
from ..common.sizes import REMEMBERED, cdiv
from ..common.sums import sum_parts
from ..common.versions import register_options
from .backward import look_back_gradient_kernel, walk_gradient_kernel
from .config import AHEAD, ScanConfig, invalid_reason, preferred_chunk, select_config
from .elements import Strides, pass_code
from .forward import look_back_kernel, step_kernel, walk_kernel
from .reduce import merge_kernel, reduce_kernel

MERGE_BLOCK = 128
STEP_BLOCK = 256


class ScanRequest(NamedTuple):
    """What a call asks for.

    Attributes:
        op: "rglru" or "linear_scan", see elements.py.
        impl: "fused", "scan", "chunked", "naive" or "step", a decoding step.
        chunk_size: for "chunked"; None chooses one.
        want_last: whether the last state is returned.
        save: whether a backward pass may follow.
        config: launches; None chooses them.
    """

    op: str
    impl: str
    chunk_size: int | None
    want_last: bool
    save: bool
    config: ScanConfig | None


def launches(request: ScanRequest, x: Tensor) -> tuple[int, ScanConfig]:
    """Return the chunk length in steps, all of time where there are no chunks, and the launches for x [B, T, C]."""
    return _launches(request, *x.shape, x.dtype, capability(x.device))


@lru_cache(REMEMBERED)
def _launches(
    request: ScanRequest, batch: int, seq_len: int, channels: int, dtype: torch.dtype, capability: tuple[int, int]
) -> tuple[int, ScanConfig]:
    sizes = {"batch": batch, "seq_len": seq_len, "channels": channels}
    chunked = request.impl == "chunked"
    chunk = (request.chunk_size or preferred_chunk(sizes)) if chunked else seq_len
    config = request.config
    if config is None:
        config = select_config(sizes, CASE_DTYPES[dtype], capability, request.save, impl=request.impl)
    if reason := invalid_reason(config, chunk if chunked else None):
        raise ValueError(f"config: {reason}")
    return chunk, config


def _forward(request: ScanRequest, x: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    """Return h and the last state; and, to save, the states [B, S, C] before each row of the backward pass."""
    *gates, first, cu_seqlens = others
    B, T, C = x.shape
    chunk, config = launches(request, x)
    tile, save = config.forward, config.backward.block_i
    slots = cdiv(T, save)
    h = contiguous_like(x)
    last = _last_states(request, x, first, cu_seqlens)
    saved = _float32(x, B, slots, C) if request.save else None
    after, documents = last, None
    if cu_seqlens is not None:
        first, after, documents = None, None, Documents(mark_documents(cu_seqlens, config, T), first, last)
    sizes, strides = (B, T, C // CHANNEL_MULTIPLE, slots), Strides(*sequence_strides(x, *gates[:2]))
    flags = {"OP": request.op, "SAVE": save if request.save else 0, **tile.options}
    if request.impl in AHEAD:
        words, call = exchange_words(x, cdiv(T, tile.steps) * B * C)
        look_back_kernel[tile.grid(B, T, C, tile.steps)](
            x, *gates, first, h, after, saved, strides, documents, words, call, *sizes,
            config.ahead // tile.blocks(B, C), PASS=pass_code(tile.channels), **flags,
        )  # fmt: skip
    else:
        if chunk < T:
            first = _chunk_states(request.op, chunk, tile, x, gates, None, first, documents)
        walk_kernel[tile.grid(B, T, C, chunk)](
            x, *gates, first, h, after, saved, strides, documents, *sizes, chunk, cdiv(T, chunk), **flags
        )
    return (h, last), (saved,)


def _last_states(request: ScanRequest, x: Tensor, first: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """Return memory for the last states; of packed documents holding those of empty ones, which no kernel writes."""
    if not request.want_last:
        return None
    if cu_seqlens is None:
        return _float32(x, x.shape[0], x.shape[2])
    return _of_empty(x, first, cu_seqlens)


def _of_empty(x: Tensor, first: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Return what goes in and comes out of empty documents [N, C]: a copy of ``first``, zero where it is None."""
    if first is not None:
        return first.detach().clone()
    return _float32(x, cu_seqlens.shape[0] - 1, x.shape[2]).zero_()


def _shapes(request: ScanRequest, x: Tensor, *others: Tensor | None) -> tuple[Tensors, Tensors]:
    B, T, C = x.shape
    # The spacing of saved states is the same for any sequence length, so 2**16 stands in for T, which may be symbolic.
    config = _launches(request, index(B), 2**16, index(C), x.dtype, capability(x.device))[1]
    last = _last_states(request, x, *others[3:])
    slots = cdiv(T, config.backward.block_i)
    return (contiguous_like(x), last), (_float32(x, B, slots, C) if request.save else None,)


def _backward(
    request: ScanRequest, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, gradients: Tensors
) -> Tensors:
    """Return the gradients of x, r, i, c and the initial state."""
    x, *gates, first, cu_seqlens = tensors
    (states,) = saved
    dh, dlast = gradients
    dh = x.new_zeros(x.shape) if dh is None else dh
    B, T, C = x.shape
    chunk, config = launches(request, x)
    tile = config.backward
    one_pass = request.impl in AHEAD
    parts = cdiv(T, tile.steps if one_pass else chunk)
    dx, dr = contiguous_like(x), contiguous_like(x)
    di, dc = (contiguous_like(x), _float32(x, parts, B, C)) if request.op == "rglru" else (None, None)
    documents = None
    if cu_seqlens is not None:
        dfirst = _of_empty(x, dlast, cu_seqlens) if needs[4] else None
        documents, dlast = Documents(mark_documents(cu_seqlens, config, T), first, dlast, dfirst), None
    else:
        dfirst = _float32(x, B, C) if needs[4] else None
    before = None if documents else dfirst
    sizes, strides = (B, T, C // CHANNEL_MULTIPLE, states.shape[1]), Strides(*sequence_strides(x, *gates[:2]))
    flags = {"OP": request.op, **tile.options, **register_options(capability(x.device))}
    if one_pass:
        words, call = exchange_words(x, parts * B * C)
        look_back_gradient_kernel[tile.grid(B, T, C, tile.steps)](
            x, *gates, states, dh, dlast, dx, dr, di, dc, before, strides, documents, words, call, *sizes,
            config.ahead // tile.blocks(B, C), PASS=pass_code(tile.channels), **flags,
        )  # fmt: skip
    else:
        if chunk < T:
            dlast = _chunk_states(request.op, chunk, tile, x, gates, dh, dlast, documents)
        walk_gradient_kernel[tile.grid(B, T, C, chunk)](
            x, *gates, states, dh, dlast, dx, dr, di, dc, before, strides, documents, *sizes, chunk, parts, **flags
        )
    return dx, dr, di, None if dc is None else sum_parts(dc), dfirst, None


DIAGONAL = Differentiable(
    "diagonal_recurrence",
    request=ScanRequest,
    tensors=("x", "r", "i?", "c?", "initial_state?", "cu_seqlens?"),
    outputs=("h", "last"),
    saved=("states",),
    strided=3,
    forward=_forward,
    backward=_backward,
    shapes=_shapes,
)
"""h and the last state, with gradients of x, r, i, c and the initial state."""


def _step(request: ScanRequest, x: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    """Return h [B, 1, C] and the state [B, C] after one token."""
    B, _, C = x.shape
    h, last = contiguous_like(x), _float32(x, B, C)
    inputs = (None if tensor is None else tensor.detach() for tensor in (x, *others[:4]))
    strides = Strides(*sequence_strides(x, *others[:2]))
    step_kernel[(B, cdiv(C, STEP_BLOCK))](*inputs, h, last, strides, C, OP=request.op, BLOCK_C=STEP_BLOCK, num_warps=4)
    return (h, last), ()


def _step_shapes(request: ScanRequest, x: Tensor, *_: Tensor | None) -> tuple[Tensors, Tensors]:
    return (contiguous_like(x), _float32(x, x.shape[0], x.shape[2])), ()


STEP = DIAGONAL.step(_step, _step_shapes)


def _chunk_states(
    op: str,
    chunk: int,
    tile: TileConfig,
    x: Tensor,
    gates: Sequence[Tensor | None],
    dh: Tensor | None,
    first: Tensor | None,
    documents: Documents | None,
) -> Tensor:
    """Return the state before every chunk [N, B, C]; given dh, the w after every chunk, the last chunk's first."""
    B, T, C = x.shape
    chunks = cdiv(T, chunk)
    a, b, states = (_float32(x, chunks, B, C) for _ in range(3))
    strides = Strides(*sequence_strides(x, *gates[:2]))
    reduce_kernel[tile.grid(B, T, C, chunk)](
        x, *gates, dh, a, b, strides, documents, B, T, C // CHANNEL_MULTIPLE, chunk, chunks, OP=op, **tile.options
    )
    merge_kernel[(cdiv(B * C, MERGE_BLOCK),)](a, b, first, states, B * C, chunks, BLOCK_E=MERGE_BLOCK, num_warps=4)
    return states


def _float32(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)
