"""Packed documents: N sequences one after the other in a batch of 1, with their bounds in cu_seqlens [N + 1].

Here are the checks, and the documents one by one for the forms in torch. Kernels find the bounds themselves: is_first
in gates.py and, where documents have states, document_of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..common.arguments import check_dimensions, check_tensor, dtype_name
from .declare import PACKED, PACKED_STATES
from .reference import State, zero_state


def check_documents(cu_seqlens: Tensor, v: Tensor, impl: str, *, states: bool = False) -> None:
    """Raise unless the implementation takes packed documents, and cu_seqlens [N + 1] can be the bounds of N in a batch
    of 1 of ``v`` [1, T, H, V].

    Its values are read only on a CPU, since reading them would wait for a GPU.

    Args:
        states: whether the call has initial or last states.
    """
    if impl not in (packed := PACKED_STATES if states else PACKED):
        given = "cu_seqlens and states" if states else "cu_seqlens"
        raise ValueError(f"impl must be one of {', '.join(packed)} with {given}, got {impl}")
    check_dimensions("cu_seqlens", cu_seqlens, "[N + 1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {dtype_name(cu_seqlens.dtype)}")
    check_tensor("cu_seqlens", cu_seqlens, cu_seqlens.shape, cu_seqlens.dtype, v.device)
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have the bounds of at least one document, got {cu_seqlens.shape[0]} values")
    if v.shape[0] != 1:
        raise ValueError(f"cu_seqlens takes documents that are packed into a batch of 1, got a batch of {v.shape[0]}")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling() and type(cu_seqlens) is Tensor:
        check_bounds(cu_seqlens.tolist(), v.shape[1])


def check_bounds(bounds: Sequence[int], seq_len: int) -> None:
    """Raise unless the values of cu_seqlens rise from 0 to seq_len, or stay where a document is empty."""
    if bounds[0] != 0 or bounds[-1] != seq_len or any(end < start for start, end in pairwise(bounds)):
        given = ", ".join(map(str, bounds if len(bounds) <= 8 else [*bounds[:4], "...", bounds[-1]]))
        raise ValueError(f"cu_seqlens must rise from 0 to {seq_len}, the number of positions, got {given}")


def each_document(
    form: Callable[..., Any],
    cu_seqlens: Tensor,
    *tensors: Tensor | None,
    normalize: bool,
    initial_state: State | None,
    return_last_state: bool,
    **keywords: Any,
) -> Any:
    """Run a form on one packed document after the other.

    Args:
        form: recurrent or parallel of reference.py, or chunkwise.
        cu_seqlens: bounds of the N documents [N + 1], which the host reads.
        tensors: q, k, v, log_decay and log_input of a batch of 1.
        initial_state, return_last_state: states of the N documents.
        normalize, keywords: as the form takes them.
    """
    bounds = cu_seqlens.tolist()
    _, k, v, *_ = tensors
    assert k is not None and v is not None
    check_bounds(bounds, v.shape[1])
    state: Any = initial_state
    if initial_state is None:
        state = zero_state(k, v.expand(len(bounds) - 1, -1, -1, -1), normalize=normalize)
    state = state if normalize else (state,)
    outputs: list[Tensor] = [v[:, :0]]
    last: list[Any] = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        first = tuple(x[number : number + 1] for x in state)
        last.append(first)
        if start < end:
            parts = (None if x is None else x[:, start:end] for x in tensors)
            h, after = form(
                *parts, normalize=normalize, initial_state=first if normalize else first[0], return_last_state=True,
                **keywords,
            )  # fmt: skip
            outputs.append(h)
            last[-1] = after if normalize else (after,)
    h = torch.cat(outputs, 1)
    states = tuple(map(torch.cat, zip(*last, strict=True)))
    return (h, states if normalize else states[0]) if return_last_state else h
