"""Checks of arguments that the engine's operations share; messages name argument, expected and given."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from ..common.arguments import check_dimensions, check_first, check_not_empty, check_tensor, check_three, compute_dtype
from .reference import State


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k [B, T, H, K] and v [B, T, H, V] agree in everything but V, and K and V are not 0."""
    check_first("q", q, "[B, T, H, D]")
    check_tensor("k", k, q.shape, q.dtype, q.device)
    check_dimensions("v", v, "[B, T, H, D]")
    check_not_empty("v", v)
    check_tensor("v", v, (*q.shape[:3], v.shape[3]), q.dtype, q.device)


def check_gates(gates: Mapping[str, Tensor], v: Tensor) -> None:
    """Raise unless every gate is [B, T, H] and float32 (float64 beside a float64 ``v`` [B, T, H, V])."""
    for name, gate in gates.items():
        check_tensor(name, gate, v.shape[:3], compute_dtype(v.dtype), v.device)


def check_head_constant(name: str, x: Tensor, v: Tensor) -> None:
    """Raise unless ``x`` has one value for each head of ``v`` [B, T, H, V], in float32 (float64 beside float64)."""
    check_tensor(name, x, v.shape[2:3], compute_dtype(v.dtype), v.device)


def check_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> None:
    """Raise unless x [B, T, H, P], dt [B, T, H], A [H] and B, C [B, T, G, N] agree and G divides H."""
    check_first("x", x, "[B, T, H, D]")
    for name, group in (("B", B), ("C", C)):
        if not isinstance(group, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(group).__name__}")
        if group.dim() != 4 or group.shape[:2] != x.shape[:2] or 0 in group.shape[2:]:
            expected = f"[{x.shape[0]}, {x.shape[1]}, G, N]"
            raise ValueError(f"{name} must have shape {expected}, got {tuple(group.shape)}")
        if x.shape[2] % group.shape[2]:
            raise ValueError(
                f"{name} must have a number of groups that divides the {x.shape[2]} heads, got {group.shape[2]}"
            )
    check_tensor("B", B, B.shape, x.dtype, x.device)
    check_tensor("C", C, B.shape, x.dtype, x.device)
    check_gates({"dt": dt}, x)
    check_head_constant("A", A, x)


def check_initial_state(
    initial_state: State | None, k: Tensor, v: Tensor, *, normalize: bool, cu_seqlens: Tensor | None = None
) -> None:
    """Raise unless initial_state is None, C [B, H, K, V] or, normalised, (C, n [B, H, K], m [B, H]).

    ``k`` is [B, T, G, K], ``v`` [B, T, H, V]; states are float32 (float64 beside float64 inputs). With cu_seqlens there
    is a state for each document instead of each of the batch.
    """
    if initial_state is None:
        return
    batch, _, heads, dim_v = v.shape
    batch = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = compute_dtype(v.dtype)
    shape = (batch, heads, k.shape[3], dim_v)
    if not normalize:
        check_tensor("initial_state", initial_state, shape, dtype, v.device)
        return
    check_three(initial_state, "C, n, m")
    for name, x, size in zip("Cnm", initial_state, (shape, shape[:3], shape[:2]), strict=True):
        check_tensor(f"initial_state {name}", x, size, dtype, v.device)


def check_tau(tau: float) -> None:
    """Raise ValueError unless the temperature is a finite number above zero."""
    if not (isinstance(tau, (int, float)) and 0 < tau < math.inf):
        raise ValueError(f"tau must be a finite number > 0, got {tau!r}")
