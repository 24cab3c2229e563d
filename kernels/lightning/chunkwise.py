"""Lightning Attention, portable chunkwise form."""

from __future__ import annotations

import torch
from torch import Tensor

from ..retention import chunkwise as retention


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
    scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Lightning Attention chunk by chunk.

    kv_t = exp(-slope) kv_{t-1} + k_t v_t^T
    o_t = scale kv_t^T q_t

    Args:
        q, k: [B, T, H, K], contiguous; float64, float32, float16 or bfloat16.
        v: [B, T, H, V], the same dtype.
        slope: decay rate per head [H], >= 0, float32 (float64 beside float64 inputs).
        chunk_size: at least 1; need not divide T.
        state_dtype: float32; float64 inputs hold float64 states.
        initial_state: kv [B, H, K, V], float32 (float64 beside float64 inputs).
        return_last_state: also return kv after the last step.
        scale: factor on q, 1 as published.

    Returns:
        o [B, T, H, V] in v's dtype, or (o, kv).

    Raises:
        ValueError: on a shape, dtype, device or layout that does not fit; the message names the argument.

    Source: Qin et al., Lightning Attention-2 (2024), the recursion below equation 3.
    """
    return retention.chunkwise(
        q, k, v, slope, chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, scale=scale,
    )  # fmt: skip
