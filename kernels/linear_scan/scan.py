"""Linear scan on the Triton engine: single-pass kernel, reduce-then-scan, the naive scan and the decoding step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..diagonal import engine
from ..diagonal.config import DiagonalConfig
from ..diagonal.validate import check_channels


def scan(
    x: Tensor,
    a: Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    config: DiagonalConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute h_t = a_t h_{t-1} + x_t in one pass over memory.

    Args:
        x, a: [B, T, C], contiguous; float32, float16 or bfloat16. C is a multiple of 8.
        state_dtype: float32.
        initial_state: h_0 [B, C], float32; None is zero.
        return_last_state: also return h_T.
        config: launches; chosen for the device when None.

    Returns:
        h [B, T, C] in x's dtype, or (h, h_T); differentiable once, in all tensors.

    Raises:
        ValueError: on an argument the kernels do not take; the message names it, what was expected and what came.

    Source: Martin and Cundy (2018), section 2.
    """
    check_channels(x, {"a": a}, {}, initial_state, state_dtype)
    return engine.diagonal(
        "scan", x, a, strategy="look_back", initial_state=initial_state,
        return_last_state=return_last_state, config=config,
    )  # fmt: skip


def chunked(
    x: Tensor,
    a: Tensor,
    *,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    config: DiagonalConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the same by reducing every chunk, merging the states between chunks, and walking the chunks.

    Arguments, result, errors and source as in :func:`scan`; chunk_size is a power of two >= 16, None chooses one.
    """
    check_channels(x, {"a": a}, {}, initial_state, state_dtype)
    return engine.diagonal(
        "scan", x, a, strategy="chunked", chunk_size=chunk_size, initial_state=initial_state,
        return_last_state=return_last_state, config=config,
    )  # fmt: skip


def naive(
    x: Tensor,
    a: Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    config: DiagonalConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the same with one program walking all of time for a block of channels; as :func:`scan` otherwise."""
    check_channels(x, {"a": a}, {}, initial_state, state_dtype)
    return engine.diagonal(
        "scan", x, a, strategy="walk", initial_state=initial_state,
        return_last_state=return_last_state, config=config,
    )  # fmt: skip


def step(
    x: Tensor,
    a: Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Advance by one token (T = 1); arguments and result as in :func:`scan`. Not differentiable."""
    check_channels(x, {"a": a}, {}, initial_state, state_dtype)
    return engine.step("scan", x, a, initial_state=initial_state, return_last_state=return_last_state)
