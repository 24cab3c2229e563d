"""Checks of arguments that operations on channels [B, T, C] make; messages name argument, expected and given."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from ..scalar_decay.reference import compute_dtype
from ..scalar_decay.validate import INPUT_DTYPES, check_state_dtype, check_tensor, dtype_name
from .config import CHANNEL_MULTIPLE

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if x.dim() != 3:
        raise ValueError(f"x must have 3 dimensions [B, T, C], got shape {tuple(x.shape)}")
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(dtype_name, INPUT_DTYPES))}, got {dtype_name(x.dtype)}")
    if 0 in x.shape:
        raise ValueError(f"x must have no empty dimension, got shape {tuple(x.shape)}")
    check_tensor("x", x, x.shape, x.dtype, x.device)
    for name, other in others.items():
        check_tensor(name, other, x.shape, x.dtype, x.device)
    for name, parameter in parameters.items():
        check_tensor(name, parameter, x.shape[2:], compute_dtype(x.dtype), x.device)
    if initial_state is not None:
        check_tensor("initial_state", initial_state, (x.shape[0], x.shape[2]), compute_dtype(x.dtype), x.device)
    check_state_dtype(state_dtype)


def check_kernel_support(x: Tensor) -> None:
    """Raise unless the Triton kernels take x [B, T, C] here."""
    if x.dtype not in TRITON_DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(dtype_name, TRITON_DTYPES))}, got {dtype_name(x.dtype)}")
    if x.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"x must be on a GPU (or run under TRITON_INTERPRET=1), got a tensor on {x.device}")
    if x.shape[2] % CHANNEL_MULTIPLE:
        raise ValueError(f"channels must be a multiple of {CHANNEL_MULTIPLE}, got {x.shape[2]}")
