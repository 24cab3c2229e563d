"""RG-LRU on the Triton engine: the fused single-pass kernel, reduce-then-scan, the naive scan and the decoding step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..diagonal import engine
from ..diagonal.config import DiagonalConfig
from ..diagonal.validate import check_channels


def fused(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    c: Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    config: DiagonalConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute RG-LRU with gates, softplus, exp, sqrt and the recurrence in one pass over memory.

        a_t = exp(-8 softplus(c) sigma(r_t))        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigma(i_t) x_t

    Args:
        x, r, i: [B, T, C], contiguous; float32, float16 or bfloat16. r and i are pre-activations. C is a multiple of 8.
        c: [C], float32.
        state_dtype: float32.
        initial_state: h_0 [B, C], float32; None is zero.
        return_last_state: also return h_T.
        config: launches; chosen for the device when None.

    Returns:
        h [B, T, C] in x's dtype, or (h, h_T); differentiable once, in all tensors.

    Raises:
        ValueError: on an argument the kernels do not take; the message names it, what was expected and what came.

    Source: De et al., Griffin (2024), equations 1 to 4.
    """
    check_channels(x, {"r": r, "i": i}, {"c": c}, initial_state, state_dtype)
    return engine.diagonal(
        "rglru", x, r, i, c, strategy="look_back", initial_state=initial_state,
        return_last_state=return_last_state, config=config,
    )  # fmt: skip


def chunked(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    c: Tensor,
    *,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    config: DiagonalConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the same by reducing every chunk, merging the states between chunks, and walking the chunks.

    Arguments, result, errors and source as in :func:`fused`; chunk_size is a power of two >= 16, None chooses one.
    """
    check_channels(x, {"r": r, "i": i}, {"c": c}, initial_state, state_dtype)
    return engine.diagonal(
        "rglru", x, r, i, c, strategy="chunked", chunk_size=chunk_size, initial_state=initial_state,
        return_last_state=return_last_state, config=config,
    )  # fmt: skip


def naive(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    c: Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    config: DiagonalConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the same with one program walking all of time for a block of channels; as :func:`fused` otherwise."""
    check_channels(x, {"r": r, "i": i}, {"c": c}, initial_state, state_dtype)
    return engine.diagonal(
        "rglru", x, r, i, c, strategy="walk", initial_state=initial_state,
        return_last_state=return_last_state, config=config,
    )  # fmt: skip


def step(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    c: Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Advance by one token (T = 1); arguments and result as in :func:`fused`. Not differentiable."""
    check_channels(x, {"r": r, "i": i}, {"c": c}, initial_state, state_dtype)
    return engine.step("rglru", x, r, i, c, initial_state=initial_state, return_last_state=return_last_state)
