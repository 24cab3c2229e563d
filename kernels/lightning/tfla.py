"""Lightning Attention on the Triton engine: Retention's chunkwise kernels and decoding step, without its scale."""

from __future__ import annotations

import torch
from torch import Tensor

from ..retention import tfla as retention


def tfla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    *,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Lightning Attention chunk by chunk, each chunk walked with its state in registers.

        kv_t = exp(-slope) kv_{t-1} + k_t v_t^T        o_t = scale kv_t^T q_t

    Args:
        q, k: [B, T, H, K], contiguous; float32, float16 or bfloat16. K and V are multiples of 8 from 16 to 1024.
        v: [B, T, H, V], the same dtype.
        slope: decay rates [H], >= 0, float32.
        chunk_size: power of two >= 16; need not divide T; None chooses one that fills the device.
        state_dtype: float32, or bfloat16 to halve the states' traffic.
        initial_state: kv [B, H, K, V], float32.
        return_last_state: also return the state after the last token.
        scale: factor of q, 1 as published.

    Returns:
        o [B, T, H, V] in v's dtype, or (o, kv); differentiable in all tensors.

    Raises:
        ValueError: on an argument the kernels do not take; the message names it, what was expected and what came.

    Source: Qin et al., Lightning Attention-2 (2024), for the operation; TFLA paper, section 3.2, for the scheme.
    """
    return retention.tfla(
        q, k, v, slope, chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, scale=scale,
    )  # fmt: skip


def xl_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    *,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the same with TFLA as published: tiles sweep the whole chunk below the diagonal.

    Arguments, result, errors and source as in :func:`tfla`; chunk_size is a power of two >= 16.
    """
    return retention.xl_chunk(
        q, k, v, slope, chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, scale=scale,
    )  # fmt: skip


def limit_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    *,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the same with one level of sequence parallelism: a chunk is a tile.

    Arguments, result, errors and source as in :func:`tfla`; chunk_size is 16, 32, 64 or 128 (None: 64).
    """
    return retention.limit_chunk(
        q, k, v, slope, chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, scale=scale,
    )  # fmt: skip


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Advance by one token (T = 1); arguments and result as in :func:`tfla`. Not differentiable."""
    return retention.step(
        q, k, v, slope, initial_state=initial_state, return_last_state=return_last_state, scale=scale
    )  # fmt: skip
