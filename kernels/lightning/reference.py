"""Lightning Attention: definition, fully parallel form and inputs.

    kv_t = exp(-slope) kv_{t-1} + k_t v_t^T
    o_t = kv_t^T q_t

Retention without its scale, so its forms are computed by Retention's.

Source: Qin et al., Lightning Attention-2 (2024), section 3.2: equation 3 and the recursion below it, with lambda =
exp(-slope).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..retention import reference as retention
from ..scalar_decay.inputs import InputGenerator


def slopes(num_heads: int) -> Tensor:
    """Return the decay rates [H] of the authors' models in float64, ALiBi's: 2^(-8 (h + 1) / H) for head h."""
    return torch.exp2(-8.0 * torch.arange(1, num_heads + 1, dtype=torch.float64) / num_heads)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    round_operands: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run Lightning Attention one step at a time.

    Args:
        q, k: [B, T, H, K]; float64 is computed in float64, all else in float32.
        v: [B, T, H, V].
        slope: decay rate per head [H], >= 0, float32 (float64 beside float64 inputs).
        scale: factor on q, 1 as published.
        initial_state: kv [B, H, K, V].
        return_last_state: also return kv after the last step.
        state_dtype: taken for the common signature; states have the dtype of the computation.
        round_operands: round the operands of products to v's dtype, as kernels do.

    Returns:
        o [B, T, H, V] in v's dtype, or (o, kv).
    """
    return retention.recurrent(
        q, k, v, slope, scale=scale, initial_state=initial_state, return_last_state=return_last_state,
        round_operands=round_operands,
    )  # fmt: skip


def parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float64,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Lightning Attention as one masked product, quadratic in T; arguments as :func:`recurrent`.

    gate_dtype is the dtype of the cumulative sums of the log decays.
    """
    return retention.parallel(
        q, k, v, slope, scale=scale, initial_state=initial_state, return_last_state=return_last_state,
        gate_dtype=gate_dtype,
    )  # fmt: skip


def make_inputs(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> dict[str, Tensor]:
    """Draw inputs: v ~ N(0, 1), q and k ~ N(0, K^-1/2), so that scores are of order one; ALiBi's slopes."""
    draw = InputGenerator(sizes, dtype=dtype, device=device, seed=seed)
    shrink = sizes["head_dim_qk"] ** -0.25
    return {
        "q": (shrink * draw.noise(*draw.tokens, draw.dim_qk)).to(dtype),
        "k": (shrink * draw.noise(*draw.tokens, draw.dim_qk)).to(dtype),
        "v": draw.normal(*draw.tokens, draw.dim_v),
        "slope": slopes(sizes["num_heads"]).to(draw.device, draw.gate_dtype),
    }
