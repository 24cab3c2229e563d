"""Gated Retention on the Triton engine: chunkwise kernels and the decoding step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scalar_decay import validate
from ..scalar_decay.front import run_chunkwise, run_step


def tfla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    *,
    tau: float = 16.0,
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Gated Retention chunk by chunk, each chunk walked with its state in registers.

        C_t = sigma(f_t)^(1/tau) C_{t-1} + k_t v_t^T        h_t = scale C_t^T q_t

    Args:
        q, k: [B, T, H, K], contiguous; float32, float16 or bfloat16. K and V are multiples of 8 from 16 to 1024.
        v: [B, T, H, V], the same dtype.
        f: gate pre-activations [B, T, H], float32.
        tau: temperature, > 0.
        chunk_size: power of two >= 16; need not divide T; None chooses one that fills the device.
        state_dtype: float32, or bfloat16 to halve the states' traffic.
        initial_state: C [B, H, K, V], float32.
        return_last_state: also return the state after the last token.
        scale: factor of q; None is K^-1/2.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, C); differentiable in all tensors.

    Raises:
        ValueError: on an argument the kernels do not take; the message names it, what was expected and what came.

    Source: Sun et al., You Only Cache Once (2024), section 3.1.
    """
    return _run(
        "tfla", q, k, v, f, tau=tau, chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, scale=scale,
    )  # fmt: skip


def xl_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    *,
    tau: float = 16.0,
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
        "xl_chunk", q, k, v, f, tau=tau, chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, scale=scale,
    )  # fmt: skip


def limit_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    *,
    tau: float = 16.0,
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
        "limit_chunk", q, k, v, f, tau=tau, chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, scale=scale,
    )  # fmt: skip


def _run(
    implementation: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    *,
    tau: float,
    chunk_size: int | None,
    state_dtype: torch.dtype,
    initial_state: Tensor | None,
    return_last_state: bool,
    scale: float | None,
) -> Tensor | tuple[Tensor, Tensor]:
    validate.check_qkv(q, k, v)
    validate.check_gates({"f": f}, v)
    validate.check_tau(tau)
    return run_chunkwise(
        implementation, q, k, v, gate="tau", decay=f, inv_tau=1.0 / tau,
        scale=validate.resolve_scale(scale, q.shape[-1]),
        chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state,
    )  # fmt: skip


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    *,
    tau: float = 16.0,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Advance by one token (T = 1); arguments and result as in :func:`tfla`. Not differentiable."""
    validate.check_qkv(q, k, v)
    validate.check_gates({"f": f}, v)
    validate.check_tau(tau)
    return run_step(
        q, k, v, gate="tau", decay=f, inv_tau=1.0 / tau, scale=validate.resolve_scale(scale, q.shape[-1]),
        initial_state=initial_state, return_last_state=return_last_state,
    )  # fmt: skip
