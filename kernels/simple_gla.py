"""Simple GLA: linear attention with one data-dependent decay per head.

    C_t = exp(g_t) C_{t-1} + k_t v_t^T        h_t = scale C_t^T q_t

Source: Yang et al., Gated Linear Attention (2024), with the gate reduced to a scalar per head.
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
    "simple_gla",
    label="simple GLA",
    summary="linear attention with a data-dependent scalar decay per head",
    arguments=("q", "k", "v", "g"),
    differentiable=("q", "k", "v", "g"),
    models=XLSTM_MODELS,
)


@remember_calls
def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    impl: str | None = None,
    chunk_size: int | None = None,
    state_dtype: torch.dtype | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute simple GLA: C_t = exp(g_t) C_{t-1} + k_t v_t^T, h_t = scale C_t^T q_t.

    Args:
        q, k: [B, T, H, K]; dtypes, strides and sizes as kernels/scalar_decay/engine.py says for each ``impl``.
        v: [B, T, H, V], the same dtype.
        g: log decays [B, T, H], <= 0, float32 (float64 beside float64). g = 0 with v = 0 masks a token.
        impl: None, fused_chunk, whole_state, xl_chunk, limit_chunk, torch, parallel, recurrent or step (engine.py).
        chunk_size, state_dtype, return_last_state, options: see kernels/scalar_decay/engine.py.
        initial_state: C [B, H, K, V], float32 (float64 beside float64).
        cu_seqlens: bounds of packed documents [N + 1], with states of the N documents; see engine.py.
        scale: factor of q; None is K^-1/2.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, C); differentiable in all tensors.

    Raises:
        ValueError: on an argument that does not fit; the message names it, what was expected and what came.

    Source: Yang et al., Gated Linear Attention (2024), with one decay a head.
    """
    from .scalar_decay import validate
    from .scalar_decay.engine import scalar_decay

    validate.check_qkv(q, k, v)
    validate.check_gates({"g": g}, v)
    return scalar_decay(
        impl, q, k, v, lambda: (g, None), gate="log", decay=g, scale=scale,
        chunk_size=chunk_size, state_dtype=state_dtype, initial_state=initial_state,
        return_last_state=return_last_state, cu_seqlens=cu_seqlens, options=options,
    )  # fmt: skip


def make_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw inputs: q, k, v ~ N(0, 1), g = log sigma(x) with x biased towards decays near 1 head by head."""
    from torch.nn.functional import logsigmoid

    return {**draw.qkv(), "g": draw.round_gate(logsigmoid(draw.forget_gate()))}
