"""Mamba-2's state-space duality (SSD), portable chunkwise form."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scalar_decay import chunkwise as engine
from ..scalar_decay import validate
from .reference import expand_groups, log_gates


def chunkwise(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int = 64,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute SSD chunk by chunk: S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T, y_t = S_t^T C_t.

    Args:
        x: values [B, T, H, P], contiguous; float64, float32, float16 or bfloat16.
        dt: step sizes [B, T, H], > 0, float32 (float64 beside float64 inputs).
        A: rates [H], < 0, in dt's dtype.
        B, C: input and output maps [B, T, G, N] in x's dtype, G dividing H.
        chunk_size: at least 1; need not divide T.
        state_dtype: float32; float64 inputs hold float64 states.
        initial_state: S [B, H, N, P], float32 (float64 beside float64 inputs).
        return_last_state: also return S after the last step.
        scale: factor on C; None is 1.

    Returns:
        y [B, T, H, P] in x's dtype, or (y, S).

    Raises:
        ValueError: on a shape, dtype, device or layout that does not fit; the message names the argument.

    Source: Dao and Gu, Transformers are SSMs (2024), section 6.
    """
    validate.check_ssd(x, dt, A, B, C)
    B, C = (expand_groups(group, x.shape[2]) for group in (B, C))
    validate.check_chunk_size(chunk_size)
    validate.check_state_dtype(state_dtype)
    validate.check_initial_state(initial_state, B, x, normalize=False)
    return engine.chunkwise(
        C,
        B,
        x,
        *log_gates(dt, A),
        chunk_size=chunk_size,
        scale=validate.resolve_scale(1.0 if scale is None else scale, B.shape[-1]),
        initial_state=initial_state,
        return_last_state=return_last_state,
    )
