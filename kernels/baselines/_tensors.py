"""Tensors in a package's own layout. Adapters import this inside their build functions only, since it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...results.documents import lengths_of
from ...results.schema import Case
from ..common.inputs import bounds_of
from .spec import Runnable


def as_leaf(tensor: Tensor) -> Tensor:
    """Return a leaf over the same memory, for packages that take the canonical [B, T, ...] layout."""
    return tensor.detach().requires_grad_()


def as_heads_first(tensor: Tensor) -> Tensor:
    """Return a contiguous leaf [B, H, T, ...] copied from [B, T, H, ...]."""
    return tensor.detach().transpose(1, 2).contiguous().requires_grad_()


def to_time_first(name: str, tensor: Tensor) -> Tensor:
    """Map an output or a gradient [B, H, T, ...] back to [B, T, H, ...]."""
    return tensor.transpose(1, 2)


def on_leaves(
    call: Callable[..., Any], inputs: Mapping[str, Tensor], *names: str, heads_first: bool = False
) -> Runnable:
    """Prepare ``call(**leaves)`` on leaves of the named inputs, by default of all; it may return (output, ...).

    Args:
        heads_first: the package takes and returns [B, H, T, ...]; else the canonical layout.
    """
    lay = as_heads_first if heads_first else as_leaf
    leaves = {name: lay(inputs[name]) for name in names or inputs}

    def run(tensors: Mapping[str, Tensor]) -> Tensor:
        out = call(**tensors)
        return out[0] if isinstance(out, tuple) else out

    def on(tensors: Mapping[str, Tensor]) -> Tensor:
        if not heads_first:
            return run({name: tensors[name] for name in leaves})
        return run({name: tensors[name].transpose(1, 2).contiguous() for name in leaves}).transpose(1, 2)

    layout = {"to_canonical": to_time_first} if heads_first else {}
    return Runnable(forward=lambda: run(leaves), leaves=leaves, on=on, **layout)


def with_bounds(call: Callable[..., Any], case: Case, inputs: Mapping[str, Tensor]) -> Callable[..., Any]:
    """Return a call with ``cu_seqlens`` [N + 1] in int64, as fla takes it, where the case has packed documents."""
    if case.documents is None:
        return call
    device = next(iter(inputs.values())).device
    return partial(call, cu_seqlens=bounds_of(case.documents, case.seq_len or 0, device, torch.int64))


def on_documents(
    call: Callable[..., Any], case: Case, inputs: Mapping[str, Tensor], names: Sequence[str]
) -> Callable[..., Any]:
    """Return attention over packed documents, which takes q, k and v [T, H, D] and, by these four names, the bounds
    [N + 1] of queries and keys and the longest of both, as one over a batch of 1."""
    documents, seq_len = str(case.documents), case.seq_len or 0
    bounds = bounds_of(documents, seq_len, next(iter(inputs.values())).device)
    longest = max(lengths_of(documents, seq_len))
    packed = dict(zip(names, (bounds, bounds, longest, longest), strict=True))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = call(q.squeeze(0), k.squeeze(0), v.squeeze(0), **packed)
        return (out[0] if isinstance(out, tuple) else out).unsqueeze(0)

    return attention
