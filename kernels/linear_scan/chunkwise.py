"""Linear scan, portable chunkwise form."""

from __future__ import annotations

import torch
from torch import Tensor

from ..diagonal import chunkwise as engine
from ..diagonal.validate import check_channels
from ..scalar_decay.reference import compute_dtype
from ..scalar_decay.validate import check_chunk_size


def chunkwise(
    x: Tensor,
    a: Tensor,
    *,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute h_t = a_t h_{t-1} + x_t chunk by chunk.

    Args:
        x, a: [B, T, C], contiguous; float64, float32, float16 or bfloat16.
        chunk_size: at least 1, need not divide T; None chooses one.
        state_dtype: float32; float64 inputs hold float64 states.
        initial_state: h_0 [B, C], float32 (float64 beside float64 inputs); None is zero.
        return_last_state: also return h_T.

    Returns:
        h [B, T, C] in x's dtype, or (h, h_T); differentiable once, in all tensors.

    Raises:
        ValueError: on a shape, dtype, device or layout that does not fit; the message names the argument.

    Source: Martin and Cundy (2018), section 2.
    """
    check_channels(x, {"a": a}, {}, initial_state, state_dtype)
    chunk_size = engine.default_chunk_size(x) if chunk_size is None else chunk_size
    check_chunk_size(chunk_size)
    dtype = compute_dtype(x.dtype)
    h, last = engine.scan(a.to(dtype), x.to(dtype), initial_state, chunk_size)
    return (h.to(x.dtype), last) if return_last_state else h.to(x.dtype)
