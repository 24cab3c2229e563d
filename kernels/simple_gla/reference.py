"""simple GLA: definition, fully parallel form and inputs.

    C_t = exp(g_t) C_{t-1} + k_t v_t^T
    h_t = scale C_t^T q_t

Source: Yang et al., Gated Linear Attention (2024), with the gate reduced to a scalar per head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..scalar_decay import reference as engine
from ..scalar_decay.inputs import InputGenerator
from ..scalar_decay.validate import resolve_scale


def log_decay(g: Tensor) -> Tensor:
    """Return the log decay [B, T, H]: g itself."""
    return g


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    round_operands: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run simple GLA one step at a time.

    Args:
        q, k: [B, T, H, K]; float64 is computed in float64, all else in float32.
        v: [B, T, H, V].
        g: log decay [B, T, H], <= 0, float32 (float64 beside float64 inputs).
        scale: factor on q; None is K^-1/2.
        initial_state: C [B, H, K, V].
        return_last_state: also return C after the last step.
        state_dtype: taken for the common signature; states have the dtype of the computation.
        round_operands: round the operands of products to v's dtype, as kernels do.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, C).
    """
    return engine.recurrent(
        q,
        k,
        v,
        log_decay(g),
        None,
        scale=resolve_scale(scale, q.shape[-1]),
        initial_state=initial_state,
        return_last_state=return_last_state,
        round_operands=round_operands,
    )


def parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float64,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute simple GLA as one masked product, quadratic in T; arguments as :func:`recurrent`.

    gate_dtype is the dtype of the cumulative sums of the gates.
    """
    return engine.parallel(
        q,
        k,
        v,
        log_decay(g),
        None,
        scale=resolve_scale(scale, q.shape[-1]),
        initial_state=initial_state,
        return_last_state=return_last_state,
        gate_dtype=gate_dtype,
    )


def make_inputs(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> dict[str, Tensor]:
    """Draw inputs: q, k, v ~ N(0, 1), g = log sigma(x) with x biased towards decays near 1 head by head."""
    draw = InputGenerator(sizes, dtype=dtype, device=device, seed=seed)
    return {**draw.qkv(), "g": draw.round_gate(logsigmoid(draw.forget_gate()))}
