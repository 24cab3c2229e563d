"""What the operations' Triton functions share: validation, defaults and the shape of what they return."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..common.device import on_device_of
from . import validate
from .config import EngineConfig, default_chunk_size, next_power_of_two
from .declare import HEAD_DIM_MULTIPLE, LIMIT_CHUNK_SIZES, MAX_HEAD_DIM, MIN_HEAD_DIM
from .engine import scalar_decay
from .reference import State
from .step import step_kernel

STATE_DTYPES = (torch.float32, torch.bfloat16)
SCHEMES = {"tfla": "walk", "xl_chunk": "sweep", "limit_chunk": "sweep"}
"""Implementation -> how it processes a chunk."""

STEP_BLOCK_K, STEP_BLOCK_V = 32, 64


def _check_support(q: Tensor, v: Tensor, *, gate: str) -> None:
    values = "x" if gate == "ssd" else "v"
    validate.check_on_gpu(values, v)
    for name, dim in (("head_dim_qk", q.shape[3]), ("head_dim_v", v.shape[3])):
        if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM or dim % HEAD_DIM_MULTIPLE:
            expected = f"a multiple of {HEAD_DIM_MULTIPLE} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            raise ValueError(f"{name} must be {expected}, got {dim}")


def _split_state(state: State | None, *, normalize: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if state is None:
        return None, None, None
    return tuple(state) if normalize else (state, None, None)


def run_chunkwise(
    implementation: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gate: str,
    decay: Tensor | None = None,
    input_gate: Tensor | None = None,
    head: Tensor | None = None,
    inv_tau: float = 1.0,
    scale: float,
    chunk_size: int | None,
    state_dtype: torch.dtype,
    initial_state: State | None,
    return_last_state: bool,
    config: EngineConfig[Any] | None = None,
) -> Tensor | tuple[Tensor, Any]:
    """Run one of the engine's chunkwise implementations on an operation's checked tensors.

    Args:
        implementation: tfla, xl_chunk or limit_chunk.
        q, k: [B, T, G, K] with G dividing H.
        v: [B, T, H, V].
        gate: gate function, see gates.py; ``decay``, ``input_gate`` [B, T, H] and ``head`` [H] are its arguments.
        chunk_size: power of two >= 16; None chooses one that fills the device (limit_chunk: 64). The backward pass of
            tfla takes shorter ones where these would leave the device idle.
        state_dtype: dtype of the states between chunks.
        initial_state: C, or (C, n, m) for gate "exp".
        return_last_state: whether to return the last state too.
        config: launches; chosen for the device when None.

    Raises:
        ValueError: on a head dim, dtype, chunk length, state or device the kernels do not take.
    """
    _check_support(q, v, gate=gate)
    validate.check_state_dtype(state_dtype, STATE_DTYPES)
    if chunk_size is None:
        chunk_size = 64
        if implementation != "limit_chunk":
            chunk_size = default_chunk_size(seq_len=v.shape[1], rows=v.shape[0] * v.shape[2], head_dim=v.shape[3])
    validate.check_chunk_size(chunk_size, minimum=16, power_of_two=True)
    if implementation == "limit_chunk" and chunk_size not in LIMIT_CHUNK_SIZES:
        expected = ", ".join(map(str, LIMIT_CHUNK_SIZES))
        raise ValueError(f"chunk_size must be one of {expected} for limit_chunk, got {chunk_size}")
    normalize = gate == "exp"
    validate.check_initial_state(initial_state, k if gate != "ssd" else _per_head(k, v), v, normalize=normalize)
    h, *last = scalar_decay(
        q, k, v,
        gate=gate, decay=decay, input_gate=input_gate, head=head, inv_tau=inv_tau, scale=scale,
        chunk_size=chunk_size, state_dtype=state_dtype, initial_state=_split_state(initial_state, normalize=normalize),
        return_last_state=return_last_state, scheme=SCHEMES[implementation], config=config,
    )  # fmt: skip
    if not return_last_state:
        return h
    return h, tuple(last) if normalize else last[0]


def _per_head(k: Tensor, v: Tensor) -> Tensor:
    """Return k's shape with one key head for each value head; no data moves."""
    return k[:, :, :1].expand(-1, -1, v.shape[2], -1)


@on_device_of("v")
def run_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gate: str,
    decay: Tensor | None = None,
    input_gate: Tensor | None = None,
    head: Tensor | None = None,
    inv_tau: float = 1.0,
    scale: float,
    initial_state: State | None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Any]:
    """Advance every head by one token; arguments as in :func:`run_chunkwise` with T = 1. Not differentiable.

    The state is read and written once, in float32; the one given is left as it is.
    """
    _check_support(q, v, gate=gate)
    if v.shape[1] != 1:
        raise ValueError(f"a decoding step takes one token: seq_len must be 1, got {v.shape[1]}")
    normalize = gate == "exp"
    validate.check_initial_state(initial_state, k if gate != "ssd" else _per_head(k, v), v, normalize=normalize)
    c, n, m = _split_state(initial_state, normalize=normalize)
    B, _, H, V = v.shape
    K = q.shape[3]
    h = torch.empty_like(v)
    c_out = torch.empty(B, H, K, V, device=v.device, dtype=torch.float32)
    n_out = torch.empty(B, H, K, device=v.device, dtype=torch.float32) if normalize else None
    m_out = torch.empty(B, H, device=v.device, dtype=torch.float32) if normalize else None
    block_v = min(STEP_BLOCK_V, max(16, next_power_of_two(V)))
    step_kernel[(triton.cdiv(V, block_v) * B * H,)](
        q.detach(), k.detach(), v.detach(), decay, input_gate, head, c, n, m, h, c_out, n_out, m_out, scale, inv_tau,
        H=H, K=K, V=V, GROUP=H // q.shape[2], GATE=gate, HAS_STATE=c is not None,
        BLOCK_K=min(STEP_BLOCK_K, max(16, next_power_of_two(K))), BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    if not return_last_state:
        return h
    return h, (c_out, n_out, m_out) if normalize else c_out
