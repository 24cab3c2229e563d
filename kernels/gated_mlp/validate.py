"""Checks of a gated MLP's arguments; messages name the argument, what was expected and what came."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..scalar_decay.validate import INPUT_DTYPES, dtype_name
from .config import ACTIVATIONS, DIM_MULTIPLE

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_activation(activation: str) -> None:
    """Raise ValueError unless the activation is known."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def check_projections(x: Tensor, w_up: Tensor, w_gate: Tensor) -> None:
    """Raise unless x [M, D] and w_up, w_gate [D, F] are floating, not empty, and agree in dtype and device."""
    for name, tensor in (("x", x), ("w_up", w_up), ("w_gate", w_gate)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 2:
            shape = "[M, D]" if name == "x" else "[D, F]"
            raise ValueError(f"{name} must have 2 dimensions {shape}, got shape {tuple(tensor.shape)}")
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(dtype_name, INPUT_DTYPES))}, got {dtype_name(x.dtype)}")
    for name, tensor in (("x", x), ("w_up", w_up), ("w_gate", w_gate)):
        if 0 in tensor.shape:
            raise ValueError(f"{name} must have no empty dimension, got shape {tuple(tensor.shape)}")
    if w_up.shape[0] != x.shape[1]:
        raise ValueError(f"w_up must have {x.shape[1]} rows, one a column of x, got shape {tuple(w_up.shape)}")
    if w_gate.shape != w_up.shape:
        raise ValueError(f"w_gate must have shape {tuple(w_up.shape)}, got {tuple(w_gate.shape)}")
    for name, tensor in (("w_up", w_up), ("w_gate", w_gate)):
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} must be {dtype_name(x.dtype)}, got {dtype_name(tensor.dtype)}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device}, got {tensor.device}")


def is_k_major(weight: Tensor) -> bool:
    """Return whether a weight [D, F] is the transpose of a contiguous tensor [F, D] and not contiguous itself."""
    return weight.T.is_contiguous() and not weight.is_contiguous()


def check_layout(x: Tensor, w_up: Tensor, w_gate: Tensor) -> None:
    """Raise unless x is contiguous, and the weights both are, or are both K-major."""
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")
    if is_k_major(w_up) and is_k_major(w_gate):
        return
    for name, weight in (("w_up", w_up), ("w_gate", w_gate)):
        if not weight.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, or both weights transposes of contiguous tensors, got strides "
                f"{weight.stride()} for shape {tuple(weight.shape)}"
            )


def check_interleaved(x: Tensor, w: Tensor) -> None:
    """Raise unless w [D, 2F] can be interleaved weights for x [M, D]: K-major, of x's dtype, on its device."""
    for name, tensor in (("x", x), ("w", w)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if x.dim() != 2:
        raise ValueError(f"x must have 2 dimensions [M, D], got shape {tuple(x.shape)}")
    if x.dtype not in TRITON_DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(dtype_name, TRITON_DTYPES))}, got {dtype_name(x.dtype)}")
    for name, tensor in (("x", x), ("w", w)):
        if 0 in tensor.shape:
            raise ValueError(f"{name} must have no empty dimension, got shape {tuple(tensor.shape)}")
    if w.dim() != 2 or w.shape[1] % (2 * DIM_MULTIPLE) or not w.T.is_contiguous():
        raise ValueError(
            f"w must be K-major [D, 2F], F a multiple of {DIM_MULTIPLE}, as interleave(w_up, w_gate) gives it, got "
            f"shape {tuple(w.shape)}, strides {w.stride()}"
        )
    if w.shape[0] != x.shape[1]:
        raise ValueError(f"w must have {x.shape[1]} rows, one a column of x, got shape {tuple(w.shape)}")
    if w.dtype != x.dtype or w.device != x.device:
        raise ValueError(f"w must be {dtype_name(x.dtype)} on {x.device}, got {dtype_name(w.dtype)} on {w.device}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")


def check_kernel_support(x: Tensor, D: int, F: int) -> None:
    """Raise unless the Triton kernels take x [M, D] and weights [D, F] here."""
    if x.dtype not in TRITON_DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(dtype_name, TRITON_DTYPES))}, got {dtype_name(x.dtype)}")
    for name, size in (("D", D), ("F", F)):
        if size % DIM_MULTIPLE:
            raise ValueError(f"{name} must be a multiple of {DIM_MULTIPLE}, got {size}")
    if x.device.type == "cuda" and triton.knobs.runtime.interpret:
        # The interpreter copies tensors to the host one by one, but two weights can be reached from the first.
        raise ValueError(f"x must be on the CPU under TRITON_INTERPRET=1, got a tensor on {x.device}")
    if x.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"x must be on a GPU (or run under TRITON_INTERPRET=1), got a tensor on {x.device}")
