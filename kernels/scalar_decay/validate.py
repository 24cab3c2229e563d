"""Checks of arguments that every implementation of the engine makes; messages name argument, expected and given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import triton
from torch import Tensor

from .reference import State, compute_dtype

INPUT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TRITON_DTYPES = INPUT_DTYPES[1:]
"""Of inputs that kernels take."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def check_dimensions(name: str, x: object, dims: str) -> None:
    """Raise unless ``x`` is a tensor of dimensions such as "[B, T, C]"."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    count = dims.count(",") + 1
    if x.dim() != count:
        raise ValueError(f"{name} must have {count} dimensions {dims}, got shape {tuple(x.shape)}")


def check_dtype(name: str, x: Tensor, dtypes: Sequence[torch.dtype] = INPUT_DTYPES) -> None:
    """Raise unless ``x`` is of one of the dtypes."""
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must be one of {', '.join(map(dtype_name, dtypes))}, got {dtype_name(x.dtype)}")


def check_not_empty(name: str, x: Tensor) -> None:
    """Raise unless ``x`` holds an element."""
    if 0 in x.shape:
        raise ValueError(f"{name} must have no empty dimension, got shape {tuple(x.shape)}")


def check_on_gpu(name: str, x: Tensor) -> None:
    """Raise unless kernels can run on ``x``'s dtype and device."""
    check_dtype(name, x, TRITON_DTYPES)
    if x.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"{name} must be on a GPU (or run under TRITON_INTERPRET=1), got a tensor on {x.device}")


def check_tensor(name: str, x: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless ``x`` is a contiguous tensor of this shape and dtype on this device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype_name(dtype)}, got {dtype_name(x.dtype)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")


def check_first(name: str, x: Tensor, dims: str) -> None:
    """Raise unless ``x``, which an operation's other arguments are held to, is a floating tensor of dimensions such as
    "[B, T, C]", not empty and contiguous."""
    check_dimensions(name, x, dims)
    check_dtype(name, x)
    check_not_empty(name, x)
    check_tensor(name, x, x.shape, x.dtype, x.device)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, names: Sequence[str] = ("q", "k", "v")) -> None:
    """Raise unless q, k [B, T, H, K] and v [B, T, H, V] agree in everything but V and hold at least one element."""
    name_q, name_k, name_v = names
    for name, x in zip(names, (q, k, v), strict=True):
        check_dimensions(name, x, "[B, T, H, D]")
    check_dtype(name_q, q)
    check_not_empty(name_q, q)
    if v.shape[-1] == 0:
        check_not_empty(name_v, v)
    check_tensor(name_q, q, q.shape, q.dtype, q.device)
    check_tensor(name_k, k, q.shape, q.dtype, q.device)
    check_tensor(name_v, v, (*q.shape[:3], v.shape[3]), q.dtype, q.device)


def check_gates(gates: Mapping[str, Tensor], v: Tensor) -> None:
    """Raise unless every gate is [B, T, H] and float32 (float64 beside a float64 ``v`` [B, T, H, V])."""
    for name, gate in gates.items():
        check_tensor(name, gate, v.shape[:3], compute_dtype(v.dtype), v.device)


def check_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> None:
    """Raise unless x [B, T, H, P], dt [B, T, H], A [H] and B, C [B, T, G, N] agree and G divides H."""
    check_qkv(x, x, x, ("x", "x", "x"))
    for name, group in (("B", B), ("C", C)):
        if not isinstance(group, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(group).__name__}")
        if group.dim() != 4 or group.shape[:2] != x.shape[:2] or 0 in group.shape:
            expected = f"[{x.shape[0]}, {x.shape[1]}, G, N]"
            raise ValueError(f"{name} must have shape {expected}, got {tuple(group.shape)}")
        if x.shape[2] % group.shape[2]:
            raise ValueError(
                f"{name} must have a number of groups that divides the {x.shape[2]} heads, got {group.shape[2]}"
            )
    check_tensor("B", B, B.shape, x.dtype, x.device)
    check_tensor("C", C, B.shape, x.dtype, x.device)
    check_gates({"dt": dt}, x)
    check_tensor("A", A, x.shape[2:3], compute_dtype(x.dtype), x.device)


def check_chunk_size(chunk_size: int, *, minimum: int = 1, power_of_two: bool = False) -> None:
    """Raise unless chunk_size is an int of at least ``minimum`` (and a power of two where asked)."""
    valid = isinstance(chunk_size, int) and not isinstance(chunk_size, bool) and chunk_size >= minimum
    if not valid or (power_of_two and chunk_size & (chunk_size - 1)):
        kind = "a power of two" if power_of_two else "an integer"
        raise ValueError(f"chunk_size must be {kind} >= {minimum}, got {chunk_size!r}")


def check_state_dtype(state_dtype: torch.dtype, allowed: Sequence[torch.dtype] = (torch.float32,)) -> None:
    """Raise unless state_dtype is one that the implementation can hold states in."""
    if state_dtype not in allowed:
        expected = " or ".join(map(dtype_name, allowed))
        given = dtype_name(state_dtype) if isinstance(state_dtype, torch.dtype) else repr(state_dtype)
        raise ValueError(f"state_dtype must be {expected}, got {given}")


def check_initial_state(initial_state: State | None, k: Tensor, v: Tensor, *, normalize: bool) -> None:
    """Raise unless initial_state is None, C [B, H, K, V] or, normalised, (C, n [B, H, K], m [B, H]).

    ``k`` is [B, T, H, K], ``v`` [B, T, H, V]; states are float32 (float64 beside float64 inputs).
    """
    if initial_state is None:
        return
    batch, _, heads, dim_k = k.shape
    dtype = compute_dtype(v.dtype)
    shape = (batch, heads, dim_k, v.shape[-1])
    if not normalize:
        check_tensor("initial_state", initial_state, shape, dtype, v.device)
        return
    if not isinstance(initial_state, tuple | list) or len(initial_state) != 3:
        given = (
            f"{len(initial_state)} of them" if isinstance(initial_state, tuple | list) else type(initial_state).__name__
        )
        raise ValueError(f"initial_state must be three tensors (C, n, m), got {given}")
    for name, x, size in zip("Cnm", initial_state, (shape, shape[:3], shape[:2]), strict=True):
        check_tensor(f"initial_state {name}", x, size, dtype, v.device)


def resolve_scale(scale: float | None, dim_qk: int) -> float:
    """Return ``scale``, or dim_qk^-1/2 for None; raise unless it is a finite number."""
    if scale is None:
        return dim_qk**-0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    return float(scale)


def check_tau(tau: float) -> None:
    """Raise ValueError unless the temperature is a finite number above zero."""
    if not (isinstance(tau, (int, float)) and math.isfinite(tau) and tau > 0):
        raise ValueError(f"tau must be a finite number > 0, got {tau!r}")
