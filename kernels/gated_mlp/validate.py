"""Checks of a gated MLP's arguments; messages name the argument, what was expected and what came."""

from __future__ import annotations

from torch import Tensor

from ..common.arguments import check_dimensions, check_dtype, check_not_empty, check_on_gpu, dtype_name, is_interpreted
from .config import DIM_MULTIPLE


def check_projections(x: Tensor, w_up: Tensor, w_gate: Tensor) -> None:
    """Raise unless x [M, D] and w_up, w_gate [D, F] are floating, not empty but in M, and agree in dtype and device."""
    given = {"x": (x, "[M, D]"), "w_up": (w_up, "[D, F]"), "w_gate": (w_gate, "[D, F]")}
    for name, (tensor, dims) in given.items():
        check_dimensions(name, tensor, dims)
    check_dtype("x", x)
    for name, (tensor, _) in given.items():
        check_not_empty(name, tensor, tokens=name == "x")
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


def check_layout(w_up: Tensor, w_gate: Tensor) -> None:
    """Raise unless the weights are both contiguous or both K-major."""
    if is_k_major(w_up) and is_k_major(w_gate):
        return
    for name, weight in (("w_up", w_up), ("w_gate", w_gate)):
        if not weight.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, or both weights transposes of contiguous tensors, got strides "
                f"{weight.stride()} for shape {tuple(weight.shape)}"
            )


def check_kernel_support(x: Tensor, D: int, F: int) -> None:
    """Raise unless the Triton kernels take x [M, D] and weights [D, F] here."""
    for name, size in (("D", D), ("F", F)):
        if size % DIM_MULTIPLE:
            raise ValueError(f"{name} must be a multiple of {DIM_MULTIPLE}, got {size}")
    if x.device.type == "cuda" and is_interpreted():
        # The interpreter copies each tensor to the host, where W_gate is not ``gap`` elements behind W_up.
        raise ValueError(f"x must be on the CPU under TRITON_INTERPRET=1, got a tensor on {x.device}")
    check_on_gpu("x", x)
