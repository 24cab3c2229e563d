"""Gated Retention (YOCO): linear attention with a tempered sigmoid decay per head.

    C_t = sigma(f_t)^(1 / tau) C_{t-1} + k_t v_t^T        h_t = scale C_t^T q_t

Source: Sun et al., You Only Cache Once (2024), section 3.1, with one gate per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .common.calls import remember_calls
from .common.spec import XLSTM_MODELS
from .scalar_decay.declare import scalar_decay_operation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .common.inputs import Draw

OPERATION = scalar_decay_operation(
    "gated_retention",
    label="gated Retention",
    summary="linear attention with decay sigmoid(f)^(1/tau) per head",
    arguments=("q", "k", "v", "f"),
    differentiable=("q", "k", "v", "f"),
    models=XLSTM_MODELS,
)


def log_decay(f: Tensor, tau: float) -> Tensor:
    """Return the log decay [B, T, H] of gate pre-activations ``f`` [B, T, H] at temperature ``tau``."""
    from torch.nn.functional import logsigmoid

    return logsigmoid(f) / tau


@remember_calls
def gated_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    *,
    impl: str | None = None,
    tau: float = 16.0,
    chunk_size: int | None = None,
    state_dtype: torch.dtype | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute gated Retention: C_t = sigma(f_t)^(1/tau) C_{t-1} + k_t v_t^T, h_t = scale C_t^T q_t.

    Args:
        q, k: [B, T, H, K]; dtypes, strides and sizes as kernels/scalar_decay/engine.py says for each ``impl``.
        v: [B, T, H, V], the same dtype.
        f: gate pre-activations [B, T, H], float32 (float64 beside float64). f = inf with v = 0 masks a token.
        impl: None, fused_chunk, whole_state, xl_chunk, limit_chunk, torch, parallel, recurrent or step (engine.py).
        tau: temperature > 0; the larger, the nearer to 1 the decay.
        chunk_size, state_dtype, return_last_state, options: see kernels/scalar_decay/engine.py.
        initial_state: C [B, H, K, V], float32 (float64 beside float64).
        cu_seqlens: bounds of packed documents [N + 1], with states of the N documents; see engine.py.
        scale: factor of q; None is K^-1/2.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, C); differentiable in all tensors.

    Raises:
        ValueError: on an argument that does not fit; the message names it, what was expected and what came.

    Source: Sun et al., You Only Cache Once (2024), section 3.1.
    """
    from .scalar_decay import validate
    from .scalar_decay.engine import scalar_decay

    validate.check_qkv(q, k, v)
    validate.check_gates({"f": f}, v)
    validate.check_tau(tau)
    return scalar_decay(
        impl, q, k, v, lambda: (log_decay(f, tau), None), gate="tau", decay=f, inv_tau=1.0 / tau,
        scale=scale, chunk_size=chunk_size, state_dtype=state_dtype,
        initial_state=initial_state, return_last_state=return_last_state, cu_seqlens=cu_seqlens, options=options,
    )  # fmt: skip


def make_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw inputs: q, k, v, f ~ N(0, 1); with tau = 16 the decays lie around 0.96."""
    return {**draw.qkv(), "f": draw.gate(0.0)}
