"""Checks of WKV's arguments; messages name argument, expected and given."""

from __future__ import annotations

import torch
from torch import Tensor

from ..diagonal.config import CHANNEL_MULTIPLE
from ..scalar_decay.reference import compute_dtype
from ..scalar_decay.validate import check_first, check_on_gpu, check_state_dtype, check_tensor
from .reference import State


def check_wkv(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: State | None, state_dtype: torch.dtype
) -> None:
    """Raise unless the arguments agree.

    Args:
        k: [B, T, C], contiguous and not empty; float64, float32, float16 or bfloat16.
        v: of k's shape and dtype.
        w, u: [C], float32 (float64 beside a float64 k).
        initial_state: (num, den, max) [B, C], float32 (float64 beside a float64 k), or None.
        state_dtype: float32.
    """
    check_first("k", k, "[B, T, C]")
    check_tensor("v", v, k.shape, k.dtype, k.device)
    dtype = compute_dtype(k.dtype)
    for name, parameter in (("w", w), ("u", u)):
        check_tensor(name, parameter, k.shape[2:], dtype, k.device)
    check_state_dtype(state_dtype)
    if initial_state is None:
        return
    if not isinstance(initial_state, tuple | list) or len(initial_state) != 3:
        is_list = isinstance(initial_state, tuple | list)
        given = f"{len(initial_state)} of them" if is_list else type(initial_state).__name__
        raise ValueError(f"initial_state must be three tensors (num, den, max), got {given}")
    for name, part in zip(("num", "den", "max"), initial_state, strict=True):
        check_tensor(f"initial_state {name}", part, (k.shape[0], k.shape[2]), dtype, k.device)


def check_kernel_support(k: Tensor) -> None:
    """Raise unless the Triton kernels take k [B, T, C] here."""
    check_on_gpu("k", k)
    if k.shape[2] % CHANNEL_MULTIPLE:
        raise ValueError(f"channels must be a multiple of {CHANNEL_MULTIPLE}, got {k.shape[2]}")
