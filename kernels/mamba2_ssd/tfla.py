"""Mamba-2's state-space duality (SSD) on the Triton engine: chunkwise kernels and the decoding step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scalar_decay import validate
from ..scalar_decay.front import run_chunkwise, run_step


def tfla(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Mamba-2's state-space duality (SSD) chunk by chunk, each chunk walked with its state in registers.

        S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T        y_t = S_t^T C_t

    Args:
        x: values [B, T, H, P], contiguous; float32, float16 or bfloat16. N and P are multiples of 8 from 16 to 1024.
        dt: step sizes [B, T, H], > 0, float32.
        A: rates [H], < 0, float32.
        B, C: input and output maps [B, T, G, N] in x's dtype, G dividing H.
        chunk_size: power of two >= 16; need not divide T; None chooses one that fills the device.
        state_dtype: float32, or bfloat16 to halve the states' traffic.
        initial_state: S [B, H, N, P], float32.
        return_last_state: also return the state after the last token.
        scale: factor of C; None is 1.

    Returns:
        y [B, T, H, P] in x's dtype, or (y, S); differentiable in all tensors.

    Raises:
        ValueError: on an argument the kernels do not take; the message names it, what was expected and what came.

    Source: Dao and Gu, Transformers are SSMs (2024), section 6.
    """
    return _run(
        "tfla", x, dt, A, B, C, chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, scale=scale,
    )  # fmt: skip


def xl_chunk(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the same with TFLA as published: tiles sweep the whole chunk below the diagonal.

    Arguments, result, errors and source as in :func:`tfla`; chunk_size is a power of two >= 16.
    """
    return _run(
        "xl_chunk", x, dt, A, B, C, chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, scale=scale,
    )  # fmt: skip


def limit_chunk(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the same with one level of sequence parallelism: a chunk is a tile.

    Arguments, result, errors and source as in :func:`tfla`; chunk_size is 16, 32, 64 or 128 (None: 64).
    """
    return _run(
        "limit_chunk", x, dt, A, B, C, chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, scale=scale,
    )  # fmt: skip


def _scale(scale: float | None, B: Tensor) -> float:
    return validate.resolve_scale(1.0 if scale is None else scale, B.shape[-1])


def _run(
    implementation: str,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None,
    state_dtype: torch.dtype,
    initial_state: Tensor | None,
    return_last_state: bool,
    scale: float | None,
) -> Tensor | tuple[Tensor, Tensor]:
    validate.check_ssd(x, dt, A, B, C)
    return run_chunkwise(
        implementation, C, B, x, gate="ssd", decay=dt, head=A, scale=_scale(scale, B),
        chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state,
    )  # fmt: skip


def step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Advance by one token (T = 1); arguments and result as in :func:`tfla`. Not differentiable."""
    validate.check_ssd(x, dt, A, B, C)
    return run_step(
        C, B, x, gate="ssd", decay=dt, head=A, scale=_scale(scale, B),
        initial_state=initial_state, return_last_state=return_last_state,
    )  # fmt: skip
