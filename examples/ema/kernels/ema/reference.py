"""Exponential moving sum per head: h_t = exp(-slope) h_{t-1} + v_t."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.inputs import Draw


def recurrent(
    v: Tensor,
    slope: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the recurrence one step at a time.

    Args:
        v: [B, T, H, V]; float64 is computed in float64, all else in float32.
        slope: [H], at least 0.
        initial_state: h_0 [B, H, V]; None is zero.
        return_last_state: also return h_T.
        state_dtype: taken for the common signature.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, h_T).
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    decay = torch.exp(-slope.to(dtype))[:, None]
    state = torch.zeros_like(v[:, 0], dtype=dtype) if initial_state is None else initial_state.to(dtype)
    states = []
    for x in v.to(dtype).unbind(1):
        state = decay * state + x
        states.append(state)
    h = torch.stack(states, dim=1).to(v.dtype)
    return (h, state) if return_last_state else h


def make_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw v ~ N(0, 1); the heads' slopes fall from 1/4 to 1/64."""
    slope = torch.logspace(-2, -6, draw.sizes["num_heads"], base=2.0, device=draw.device)
    return {"v": draw.normal(*draw.values), "slope": slope}
