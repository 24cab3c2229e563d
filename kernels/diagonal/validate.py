"""Checks of arguments that operations on channels [B, T, C] make; messages name argument, expected and given."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..scalar_decay.reference import compute_dtype
from ..scalar_decay.validate import check_first, check_on_gpu, check_state_dtype, check_tensor
from .config import CHANNEL_MULTIPLE


def check_channels(
    x: Tensor,
    others: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    initial_state: Tensor | None,
    state_dtype: torch.dtype,
) -> None:
    """Raise unless the arguments agree.

    Args:
        x: [B, T, C], contiguous and not empty; float64, float32, float16 or bfloat16.
        others: name -> tensor of x's shape and dtype.
        parameters: name -> [C], float32 (float64 beside a float64 x).
        initial_state: [B, C], float32 (float64 beside a float64 x), or None.
        state_dtype: float32.
    """
    check_first("x", x, "[B, T, C]")
    for name, other in others.items():
        check_tensor(name, other, x.shape, x.dtype, x.device)
    for name, parameter in parameters.items():
        check_tensor(name, parameter, x.shape[2:], compute_dtype(x.dtype), x.device)
    if initial_state is not None:
        check_tensor("initial_state", initial_state, (x.shape[0], x.shape[2]), compute_dtype(x.dtype), x.device)
    check_state_dtype(state_dtype)


def check_kernel_support(x: Tensor) -> None:
    """Raise unless the Triton kernels take x [B, T, C] here."""
    check_on_gpu("x", x)
    if x.shape[2] % CHANNEL_MULTIPLE:
        raise ValueError(f"channels must be a multiple of {CHANNEL_MULTIPLE}, got {x.shape[2]}")
