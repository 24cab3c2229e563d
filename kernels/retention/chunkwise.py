"""Retention, portable chunkwise form."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scalar_decay import chunkwise as engine
from ..scalar_decay import validate
from .reference import log_decay


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    *,
    chunk_size: int = 64,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Retention chunk by chunk.

    C_t = exp(-slope) C_{t-1} + k_t v_t^T
    h_t = scale C_t^T q_t

    Args:
        q, k: [B, T, H, K], contiguous; float64, float32, float16 or bfloat16.
        v: [B, T, H, V], the same dtype.
        slope: fixed decay rate per head [H], >= 0, float32 (float64 beside float64 inputs).
        chunk_size: at least 1; need not divide T.
        state_dtype: float32; float64 inputs hold float64 states.
        initial_state: C [B, H, K, V], float32 (float64 beside float64 inputs).
        return_last_state: also return C after the last step.
        scale: factor on q; None is K^-1/2.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, C).

    Raises:
        ValueError: on a shape, dtype, device or layout that does not fit; the message names the argument.

    Source: Sun et al., Retentive Network (2023), equation 5, without the rotation of q and k and the group norm.
    """
    validate.check_qkv(q, k, v)
    validate.check_tensor("slope", slope, v.shape[2:3], validate.compute_dtype(v.dtype), v.device)
    validate.check_chunk_size(chunk_size)
    validate.check_state_dtype(state_dtype)
    validate.check_initial_state(initial_state, k, v, normalize=False)
    return engine.chunkwise(
        q,
        k,
        v,
        log_decay(slope, v),
        None,
        chunk_size=chunk_size,
        scale=validate.resolve_scale(scale, q.shape[-1]),
        initial_state=initial_state,
        return_last_state=return_last_state,
    )
