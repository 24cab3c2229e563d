"""Packed documents: N sequences one after the other in a batch of 1, with their bounds in cu_seqlens [N + 1].

Here are the checks, and the documents one by one for the forms in torch. Kernels find a document's bounds themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .arguments import check_dimensions, check_tensor, dtype_name


def check_documents(cu_seqlens: Tensor, x: Tensor, impl: str, packed: Sequence[str], given: str = "cu_seqlens") -> None:
    """Raise unless the implementation is one of ``packed``, which take what is ``given``, and cu_seqlens [N + 1] can be
    the bounds of N documents in a batch of 1 of ``x`` [1, T, ...].

    Its values are read only on a CPU, since reading them would wait for a GPU.
    """
    if impl not in packed:
        raise ValueError(f"impl must be one of {', '.join(packed)} with {given}, got {impl}")
    check_dimensions("cu_seqlens", cu_seqlens, "[N + 1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {dtype_name(cu_seqlens.dtype)}")
    check_tensor("cu_seqlens", cu_seqlens, cu_seqlens.shape, cu_seqlens.dtype, x.device)
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have the bounds of at least one document, got {cu_seqlens.shape[0]} values")
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens takes documents that are packed into a batch of 1, got a batch of {x.shape[0]}")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling() and type(cu_seqlens) is Tensor:
        check_bounds(cu_seqlens.tolist(), x.shape[1])


def check_bounds(bounds: Sequence[int], seq_len: int) -> None:
    """Raise unless the values of cu_seqlens rise from 0 to seq_len, or stay where a document is empty."""
    if bounds[0] != 0 or bounds[-1] != seq_len or any(end < start for start, end in pairwise(bounds)):
        given = ", ".join(map(str, bounds if len(bounds) <= 8 else [*bounds[:4], "...", bounds[-1]]))
        raise ValueError(f"cu_seqlens must rise from 0 to {seq_len}, the number of positions, got {given}")


def each_document(
    form: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
    cu_seqlens: Tensor,
    tensors: Sequence[Tensor | None],
    state: tuple[Tensor, ...],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a form on one packed document after the other.

    Args:
        form: (*tensors, state) -> (output, last state) of one document of at least one position.
        cu_seqlens: bounds of the N documents [N + 1], which the host reads.
        tensors: those that lie along time, [1, T, ...].
        state: parts of the states before the documents [N, ...].

    Returns:
        The outputs [1, T, ...], and the states after the documents.
    """
    run = _each_document
    # torch.compile would unroll the loop, anew for every length. disable imports the compiler.
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(run)
    return run(form, cu_seqlens, tensors, state)


def _each_document(
    form: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
    cu_seqlens: Tensor,
    tensors: Sequence[Tensor | None],
    state: tuple[Tensor, ...],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    bounds = cu_seqlens.tolist()
    check_bounds(bounds, next(x.shape[1] for x in tensors if x is not None))
    outputs, last = [], []
    for number, (start, end) in enumerate(pairwise(bounds)):
        after = tuple(x[number : number + 1] for x in state)
        if start < end:
            output, after = form(*(None if x is None else x[:, start:end] for x in tensors), after)
            outputs.append(output)
        last.append(after)
    return torch.cat(outputs, 1), tuple(map(torch.cat, zip(*last, strict=True)))
