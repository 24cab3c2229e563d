"""Mamba-2's state-space duality (SSD): definition, fully parallel form and inputs.

    S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T             S [N, P], one A < 0 per head
    y_t = S_t^T C_t

A head h of H reads B and C of group floor(h G / H). Source: Dao and Gu, Transformers are SSMs (2024), equation 16 with
the discretisation of section 7; the D skip, the convolution and the output gate of the block are not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..scalar_decay import reference as engine
from ..scalar_decay.inputs import InputGenerator
from ..scalar_decay.validate import resolve_scale


def log_gates(dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay dt A and the log input gate log dt [B, T, H] of step sizes dt [B, T, H] and rates A [H].

    A step of no length (padding) stays one, and passes no gradient through its log.
    """
    return dt * A, torch.log(dt.clamp(min=torch.finfo(dt.dtype).tiny))


def expand_groups(x: Tensor, num_heads: int) -> Tensor:
    """Repeat [B, T, G, N] to [B, T, H, N]: every group serves H / G consecutive heads."""
    return x if x.shape[2] == num_heads else x.repeat_interleave(num_heads // x.shape[2], dim=2)


def recurrent(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    round_operands: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run SSD one step at a time.

    Args:
        x: values [B, T, H, P]; float64 is computed in float64, all else in float32.
        dt: step sizes [B, T, H], > 0.
        A: rates [H], < 0.
        B, C: input and output maps [B, T, G, N], G dividing H.
        scale: factor on C; None is 1.
        initial_state: S [B, H, N, P].
        return_last_state: also return S after the last step.
        state_dtype: taken for the common signature; states have the dtype of the computation.
        round_operands: round the operands of products to x's dtype, as kernels do.

    Returns:
        y [B, T, H, P] in x's dtype, or (y, S).
    """
    B, C = (expand_groups(group, x.shape[2]) for group in (B, C))
    return engine.recurrent(
        C,
        B,
        x,
        *log_gates(dt, A),
        scale=resolve_scale(1.0 if scale is None else scale, B.shape[-1]),
        initial_state=initial_state,
        return_last_state=return_last_state,
        round_operands=round_operands,
    )


def parallel(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float64,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute SSD as one masked product, quadratic in T; arguments as :func:`recurrent`.

    gate_dtype is the dtype of the cumulative sums of the gates.
    """
    B, C = (expand_groups(group, x.shape[2]) for group in (B, C))
    return engine.parallel(
        C,
        B,
        x,
        *log_gates(dt, A),
        scale=resolve_scale(1.0 if scale is None else scale, B.shape[-1]),
        initial_state=initial_state,
        return_last_state=return_last_state,
        gate_dtype=gate_dtype,
    )


def make_inputs(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> dict[str, Tensor]:
    """Draw inputs: x, B, C ~ N(0, 1), dt log-uniform in [1e-3, 1e-1], -A spread evenly over [1, 16] by head.

    These are Mamba-2's initial ranges. B and C have ``num_groups`` groups (1 where the sizes do not say); dt and A are
    float32 (float64 beside float64 inputs).
    """
    draw = InputGenerator(sizes, dtype=dtype, device=device, seed=seed)
    batch, seq_len, heads = draw.tokens
    groups = sizes.get("num_groups", 1)
    x = draw.normal(*draw.tokens, draw.dim_v)
    unit = torch.rand(draw.tokens, generator=draw.generator, dtype=draw.draw_dtype, device=device)
    dt = draw.round_gate(1e-3 * 100**unit)
    rates = draw.round_gate(-torch.linspace(1, 16, heads, dtype=draw.draw_dtype, device=device))
    b, c = (draw.normal(batch, seq_len, groups, draw.dim_qk) for _ in range(2))
    return {"x": x, "dt": dt, "A": rates, "B": b, "C": c}
