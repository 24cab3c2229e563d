"""Mamba-2's state-space duality (SSD) with a scalar A per head.

    S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T             S [N, P], one A < 0 per head
    y_t = S_t^T C_t

A head h of H reads B and C of group floor(h G / H). Source: Dao and Gu, Transformers are SSMs (2024), equation 16 with
the discretisation of section 7; the D skip, the convolution and the output gate of the block are not part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .common.calls import remember_calls
from .scalar_decay.declare import scalar_decay_operation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .common.inputs import Draw

OPERATION = scalar_decay_operation(
    "mamba2_ssd",
    label="Mamba-2",
    summary="Mamba-2 SSD core: scalar A per head, groups of B and C, without the D skip and the gate",
    arguments=("x", "dt", "A", "B", "C"),
    differentiable=("x", "dt", "A", "B", "C"),
    # The defaults of the Mamba2 layer.
    head_dim=64,
    state_dim=128,
)


def log_gates(dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay dt A and the log input gate log dt [B, T, H] of step sizes dt [B, T, H] and rates A [H].

    The log of a step dt = 0 (padding) is that of the least normal number, so it is finite; it passes no gradient.
    """
    import torch

    return dt * A, torch.log(dt.clamp(min=torch.finfo(dt.dtype).tiny))


@remember_calls
def mamba2_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
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
    """Compute SSD: S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T, y_t = scale S_t^T C_t.

    Args:
        x: values [B, T, H, P]; dtypes, strides and sizes as kernels/scalar_decay/engine.py says for each ``impl``,
            with C, B and x for q, k and v.
        dt: step sizes [B, T, H], > 0, float32 (float64 beside float64). dt = 0 masks a token; its gradient is then that
            of the decay alone.
        A: rates [H], < 0, in dt's dtype.
        B, C: input and output maps [B, T, G, N] in x's dtype, G dividing H.
        impl: None, fused_chunk, whole_state, xl_chunk, limit_chunk, torch, parallel, recurrent or step (engine.py).
        chunk_size, state_dtype, return_last_state, options: see kernels/scalar_decay/engine.py.
        initial_state: S [B, H, N, P], float32 (float64 beside float64).
        cu_seqlens: bounds of packed documents [N + 1], with states of the N documents; see engine.py.
        scale: factor of C; None is 1.

    Returns:
        y [B, T, H, P] in x's dtype, or (y, S); differentiable in all tensors.

    Raises:
        ValueError: on an argument that does not fit; the message names it, what was expected and what came.

    Source: Dao and Gu, Transformers are SSMs (2024), section 6.
    """
    from .scalar_decay import validate
    from .scalar_decay.engine import scalar_decay

    validate.check_ssd(x, dt, A, B, C)
    return scalar_decay(
        impl, C, B, x, lambda: log_gates(dt, A), gate="ssd", decay=dt, head=A,
        scale=1.0 if scale is None else scale, chunk_size=chunk_size,
        state_dtype=state_dtype, initial_state=initial_state, return_last_state=return_last_state,
        cu_seqlens=cu_seqlens, options=options,
    )  # fmt: skip


def make_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw inputs: x, B, C ~ N(0, 1), dt log-uniform in [1e-3, 1e-1], -A spread evenly over [1, 16] by head.

    These are Mamba-2's initial ranges. B and C have ``num_groups`` groups (1 where the sizes do not say).
    """
    import torch

    batch, seq_len, heads = draw.tokens
    groups = draw.sizes.get("num_groups", 1)
    x = draw.normal(*draw.values)
    dt = draw.round_gate(1e-3 * 100 ** draw.uniform(*draw.tokens))
    rates = draw.round_gate(-torch.linspace(1, 16, heads, dtype=draw.draw_dtype, device=draw.device))
    b, c = (draw.normal(batch, seq_len, groups, draw.sizes["head_dim_qk"]) for _ in range(2))
    return {"x": x, "dt": dt, "A": rates, "B": b, "C": c}
