"""The RG-LRU layer: r = x W_a, i = x W_x, then RG-LRU; definition, portable form, fused form and inputs.

Source: De et al., Griffin (2024), equations 1 to 4, without the biases, as in the published byte counts of its kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..rglru import chunkwise as portable
from ..rglru import reference
from ..scalar_decay.reference import compute_dtype
from ..scalar_decay.validate import check_dimensions, check_tensor


def recurrent(x: Tensor, w_a: Tensor, w_x: Tensor, c: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Run the layer one step at a time; float64 is computed in float64, all else in float32.

    Args:
        x: [B, T, C].
        w_a, w_x: [C, C], from x's channels to those of r and i.
        c: [C].
        kwargs: initial_state, return_last_state, state_dtype, as in :func:`..rglru.reference.recurrent`.

    Returns:
        h [B, T, C] in x's dtype, or (h, h_T).
    """
    wide = x.to(compute_dtype(x.dtype))
    result = reference.recurrent(wide, wide @ w_a.to(wide.dtype), wide @ w_x.to(wide.dtype), c, **kwargs)
    return (result[0].to(x.dtype), result[1]) if isinstance(result, tuple) else result.to(x.dtype)


def chunkwise(x: Tensor, w_a: Tensor, w_x: Tensor, c: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the layer with torch alone; the products are rounded to x's dtype.

    Arguments and result as in :func:`recurrent`; chunk_size too, and errors as in :func:`..rglru.chunkwise.chunkwise`.
    """
    return portable.chunkwise(x, *project(x, w_a, w_x), c, **kwargs)


def fused(x: Tensor, w_a: Tensor, w_x: Tensor, c: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the layer with torch's products and RG-LRU's single-pass kernel.

    Arguments and result as in :func:`recurrent`; config too, and errors as in :func:`..rglru.fused.fused`.
    """
    from ..rglru.fused import fused as rglru

    return rglru(x, *project(x, w_a, w_x), c, **kwargs)


def project(x: Tensor, w_a: Tensor, w_x: Tensor) -> tuple[Tensor, Tensor]:
    """Return r = x W_a and i = x W_x [B, T, C]; raise ValueError unless the weights are [C, C] in x's dtype."""
    check_dimensions("x", x, "[B, T, C]")
    for name, weight in (("w_a", w_a), ("w_x", w_x)):
        check_tensor(name, weight, (x.shape[2], x.shape[2]), x.dtype, x.device)
    return x @ w_a, x @ w_x


def make_inputs(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> dict[str, Tensor]:
    """Draw x and c as for RG-LRU, and weights ~ N(0, 1/C), so that pre-activations are ~ N(0, 1)."""
    inputs = reference.make_inputs(sizes, dtype=dtype, device=device, seed=seed)
    channels = sizes["channels"]
    generator = torch.Generator(device).manual_seed(seed + 1)
    draw_dtype = torch.float64 if generator.device.type == "cpu" else torch.float32
    w_a, w_x = torch.randn(2, channels, channels, generator=generator, dtype=draw_dtype, device=device).to(dtype)
    scale = channels**-0.5
    return {"x": inputs["x"], "w_a": w_a * scale, "w_x": w_x * scale, "c": inputs["c"]}
