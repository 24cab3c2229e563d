"""Checks of arguments that lightning1 and lightning2 share; messages name argument, expected and given."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.arguments import check_on_gpu, check_state_dtype, resolve_scale
from ..scalar_decay.validate import check_head_constant, check_initial_state, check_qkv
from .config import supports


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    *,
    implementation: str,
    state_dtype: torch.dtype,
    initial_state: Tensor | None,
    scale: float,
) -> float:
    """Check the arguments of :func:`.lightning2.lightning2` or lightning1 and return the scale."""
    check_qkv(q, k, v)
    check_head_constant("slope", slope, v)
    check_state_dtype(state_dtype)
    check_initial_state(initial_state, k, v, normalize=False)
    check_kernel_support(q, v)
    if torch.is_grad_enabled() and slope.requires_grad:
        raise ValueError(f"slope must not require a gradient for {implementation}: only q, k, v and the state get one")
    return resolve_scale(scale, q.shape[3])


def check_kernel_support(q: Tensor, v: Tensor) -> None:
    """Raise ValueError on a dtype, device or head dim that the kernels do not take."""
    check_on_gpu("v", v)
    if reason := supports({"head_dim_qk": q.shape[3], "head_dim_v": v.shape[3]}, "", None):
        raise ValueError(reason)
