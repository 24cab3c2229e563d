"""Retention (RetNet): linear attention with one fixed decay per head.

    C_t = exp(-slope) C_{t-1} + k_t v_t^T        h_t = scale C_t^T q_t

Source: Sun et al., Retentive Network (2023), equation 5, without the rotation of q and k and the group norm.
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
    "retention",
    label="Retention",
    summary="linear attention with a fixed decay per head",
    arguments=("q", "k", "v", "slope"),
    differentiable=("q", "k", "v"),
    models=XLSTM_MODELS,
    # As its paper has them.
    head_dim=512,
    qk_ratio=0.5,
)


@remember_calls
def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
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
    """Compute Retention: C_t = exp(-slope) C_{t-1} + k_t v_t^T, h_t = scale C_t^T q_t.

    Args:
        q, k: [B, T, H, K]; dtypes, strides and sizes as kernels/scalar_decay/engine.py says for each ``impl``.
        v: [B, T, H, V], the same dtype.
        slope: decay rates [H], >= 0, float32 (float64 beside float64). Every token decays the past, so a token can be
            masked, by v = 0, only before all others.
        impl: None, fused_chunk, whole_state, xl_chunk, limit_chunk, torch, parallel, recurrent or step (engine.py).
        chunk_size, state_dtype, return_last_state, options: see kernels/scalar_decay/engine.py.
        initial_state: C [B, H, K, V], float32 (float64 beside float64).
        cu_seqlens: bounds of packed documents [N + 1], with states of the N documents; see engine.py.
        scale: factor of q; None is K^-1/2.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, C); differentiable in all tensors.

    Raises:
        ValueError: on an argument that does not fit; the message names it, what was expected and what came.

    Source: Sun et al., Retentive Network (2023), equation 5.
    """
    from .scalar_decay import validate
    from .scalar_decay.engine import scalar_decay

    validate.check_qkv(q, k, v)
    validate.check_head_constant("slope", slope, v)
    return scalar_decay(
        impl, q, k, v, lambda: ((-slope).expand(v.shape[:3]), None), gate="slope", head=slope,
        scale=scale, chunk_size=chunk_size, state_dtype=state_dtype,
        initial_state=initial_state, return_last_state=return_last_state, cu_seqlens=cu_seqlens, options=options,
    )  # fmt: skip


def slopes(num_heads: int) -> Tensor:
    """Return RetNet's decay rates [H] in float64: -log(1 - 2^(-5 - h)) for head h = 0 ... H - 1."""
    import torch

    return -torch.log1p(-torch.exp2(-5 - torch.arange(num_heads, dtype=torch.float64)))


def make_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw inputs: q, k, v ~ N(0, 1); slopes are RetNet's, decay 1 - 2^(-5 - h) for head h."""
    return {**draw.qkv(), "slope": slopes(draw.sizes["num_heads"]).to(draw.device, draw.gate_dtype)}
