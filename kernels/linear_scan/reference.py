"""The linear scan: definition, associative form and inputs.

    h_t = a_t h_{t-1} + x_t

a is the decay itself, of any sign and size. Source: Martin and Cundy, "Parallelizing linear recurrent neural nets over
sequence length" (2018), equation 1; it is the recurrence of De et al., Griffin (2024), equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..diagonal import reference as engine
from ..scalar_decay.reference import compute_dtype


def recurrent(
    x: Tensor,
    a: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the scan one step at a time.

    Args:
        x, a: [B, T, C]; float64 is computed in float64, all else in float32.
        initial_state: h_0 [B, C]; None is zero.
        return_last_state: also return h_T.
        state_dtype: taken for the common signature; states have the dtype of the computation.

    Returns:
        h [B, T, C] in x's dtype, or (h, h_T).
    """
    dtype = compute_dtype(x.dtype)
    h, last = engine.recurrent(a.to(dtype), x.to(dtype), initial_state)
    return (h.to(x.dtype), last) if return_last_state else h.to(x.dtype)


def parallel(
    x: Tensor,
    a: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute it as an associative scan over time; arguments and result as in :func:`recurrent`."""
    dtype = compute_dtype(x.dtype)
    h, last = engine.associative(a.to(dtype), x.to(dtype), initial_state)
    return (h.to(x.dtype), last) if return_last_state else h.to(x.dtype)


def make_inputs(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> dict[str, Tensor]:
    """Draw x ~ N(0, 1) and decays a = sigma(z), z ~ N(3, 1)."""
    generator = torch.Generator(device).manual_seed(seed)
    draw_dtype = torch.float64 if generator.device.type == "cpu" else torch.float32
    shape = tuple(sizes[name] for name in ("batch", "seq_len", "channels"))
    x, z = (torch.randn(shape, generator=generator, dtype=draw_dtype, device=device) for _ in range(2))
    return {"x": x.to(dtype), "a": torch.sigmoid(z + 3.0).to(dtype)}
