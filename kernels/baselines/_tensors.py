"""Tensors in a package's own layout. Imported by adapters inside their build functions only."""

from __future__ import annotations

from torch import Tensor


def as_leaf(tensor: Tensor) -> Tensor:
    """Return a leaf over the same memory: the package takes the canonical [B, T, ...] layout."""
    return tensor.detach().requires_grad_()


def as_heads_first(tensor: Tensor) -> Tensor:
    """Return a contiguous leaf [B, H, T, ...] copied from [B, T, H, ...]."""
    return tensor.detach().transpose(1, 2).contiguous().requires_grad_()


def to_time_first(name: str, tensor: Tensor) -> Tensor:
    """Map an output or a gradient [B, H, T, ...] back to [B, T, H, ...]."""
    return tensor.transpose(1, 2)
