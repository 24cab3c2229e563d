"""gated Retention: definition, fully parallel form and inputs.

    C_t = sigma(f_t)^(1 / tau) C_{t-1} + k_t v_t^T
    h_t = scale C_t^T q_t

Source: Sun et al., You Only Cache Once (2024), section 3.1, with one gate per head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..scalar_decay import reference as engine
from ..scalar_decay.inputs import InputGenerator
from ..scalar_decay.validate import resolve_scale


def log_decay(f: Tensor, tau: float) -> Tensor:
    """Return the log decay [B, T, H] of gate pre-activations ``f`` [B, T, H] at temperature ``tau``."""
    return logsigmoid(f) / tau


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    *,
    tau: float = 16.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    round_operands: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run gated Retention one step at a time.

    Args:
        q, k: [B, T, H, K]; float64 is computed in float64, all else in float32.
        v: [B, T, H, V].
        f: gate pre-activation [B, T, H], float32 (float64 beside float64 inputs).
        tau: temperature > 0; the larger, the nearer to 1 the decay.
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
        log_decay(f, tau),
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
    f: Tensor,
    *,
    tau: float = 16.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float64,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute gated Retention as one masked product, quadratic in T; arguments as :func:`recurrent`.

    gate_dtype is the dtype of the cumulative sums of the gates.
    """
    return engine.parallel(
        q,
        k,
        v,
        log_decay(f, tau),
        None,
        scale=resolve_scale(scale, q.shape[-1]),
        initial_state=initial_state,
        return_last_state=return_last_state,
        gate_dtype=gate_dtype,
    )


def make_inputs(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> dict[str, Tensor]:
    """Draw inputs: q, k, v, f ~ N(0, 1); with tau = 16 the decays lie around 0.96."""
    draw = InputGenerator(sizes, dtype=dtype, device=device, seed=seed)
    return {**draw.qkv(), "f": draw.gate(0.0)}
