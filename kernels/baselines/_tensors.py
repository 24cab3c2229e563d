"""Tensors in a package's own layout. Adapters import this inside their build functions only, since it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

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
