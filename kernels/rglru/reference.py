"""RG-LRU, the linear scan and the RG-LRU layer in plain torch: definitions, associative forms and inputs.

    RG-LRU        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigma(i_t) x_t        a_t = exp(-8 softplus(c) sigma(r_t))
    linear scan   h_t = a_t h_{t-1} + x_t                                   a_t of any sign and size
    layer         RG-LRU of x, r = x W_a and i = x W_x

Each is a diagonal recurrence h_t = a_t h_{t-1} + b_t. Functions here compute in float64 for float64 inputs, else in
float32, and return h [B, T, C] in x's dtype, or (h, h_T) with ``return_last_state``. ``cu_seqlens`` holds the bounds of
N packed documents in a batch of 1, whose states are [N, C]. ``state_dtype`` is ignored; it is there because all
operations share one signature.

Sources: De et al., Griffin (2024), section 2.4, equations 1 to 4, where a = sigma(Lambda) and softplus(c) = -log a, so
c = -Lambda; the layer is without biases, as in the published byte counts of its kernel. Martin and Cundy,
"Parallelizing linear recurrent neural nets over sequence length" (2018), equation 1 and section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..common.arguments import compute_dtype
from ..common.documents import each_document
from ..common.inputs import Draw


def recurrent(a: Tensor, b: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a diagonal recurrence on a, b [B, T, C] from first [B, C] (None: zero); return h [B, T, C] and the last h."""
    h = first_state(b, first, None)
    states = []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
        h = a_t * h + b_t
        states.append(h)
    return torch.stack(states, dim=1), h


def associative(a: Tensor, b: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute what :func:`recurrent` does in ceil(log2 T) passes over all of time: pass n = 0, 1, ... composes the map
    h -> a h + b of the 2^n steps up to each position with the map of the 2^n steps before them.

    Source: Hillis and Steele, "Data parallel algorithms" (1986); Martin and Cundy (2018), section 2.
    """
    first = first_state(b, first, None)
    b = torch.cat((b[:, :1] + a[:, :1] * first[:, None], b[:, 1:]), dim=1)
    distance = 1
    while distance < b.shape[1]:
        head_a, head_b = a[:, :distance], b[:, :distance]
        later = a[:, distance:]
        b = torch.cat((head_b, b[:, distance:] + later * b[:, :-distance]), dim=1)
        a = torch.cat((head_a, later * a[:, :-distance]), dim=1)
        distance *= 2
    return b, b[:, -1].contiguous()


def first_state(b: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the state before b [B, T, C], or before each of N packed documents [N, C], in b's dtype."""
    if initial_state is not None:
        return initial_state.to(b.dtype)
    return b.new_zeros(b.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, b.shape[2])


def run_documents(
    form: Callable[..., tuple[Tensor, Tensor]], a: Tensor, b: Tensor, first: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run a form, such as :func:`recurrent`, on a batch or, given their bounds, on packed documents in turn."""
    if cu_seqlens is None:
        return form(a, b, first)

    def run(a: Tensor, b: Tensor, state: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        h, last = form(a, b, *state)
        return h, (last,)

    h, (last,) = each_document(run, cu_seqlens, (a, b), (first_state(b, first, cu_seqlens),))
    return h, last


def rglru_elements(x: Tensor, r: Tensor, i: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return RG-LRU's a and b = sqrt(1 - a^2) sigma(i) x [B, T, C], in float32 (float64 beside float64 inputs).

    softplus(c) is computed as -log sigma(-c), which is exact for c of any size and either sign; torch's own softplus
    becomes linear, or overflows. 1 - a^2 is computed as -expm1(2 log a), which loses no bits for a -> 1. Where sigma(r)
    is so small that a rounds to 1, b and its gradients are 0: log(a) / sqrt(1 - a^2), a factor of r's, tends to 0.
    """
    dtype = compute_dtype(x.dtype)
    log_a = 8.0 * logsigmoid(-c.to(dtype)) * torch.sigmoid(r.to(dtype))
    square = -torch.expm1(2.0 * log_a)
    is_open = square > 0
    root = torch.where(is_open, torch.where(is_open, square, 1.0).sqrt(), 0.0)
    return log_a.exp(), root * (torch.sigmoid(i.to(dtype)) * x.to(dtype))


def linear_scan_elements(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the linear scan's a and b = x [B, T, C], in float32 (float64 beside float64 inputs)."""
    dtype = compute_dtype(x.dtype)
    return a.to(dtype), x.to(dtype)


def _run(
    x: Tensor,
    elements: tuple[Tensor, Tensor],
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    h, last = run_documents(recurrent, *elements, initial_state, cu_seqlens)
    return (h.to(x.dtype), last) if return_last_state else h.to(x.dtype)


def rglru_recurrent(x: Tensor, r: Tensor, i: Tensor, c: Tensor, **keywords: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Run RG-LRU one step at a time on x, pre-activations r, i [B, T, C], c [C] and h_0, ``initial_state`` [B, C]."""
    return _run(x, rglru_elements(x, r, i, c), **keywords)


def linear_scan_recurrent(x: Tensor, a: Tensor, **keywords: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Run the linear scan one step at a time on x, a [B, T, C] and, as ``initial_state``, h_0 [B, C]."""
    return _run(x, linear_scan_elements(x, a), **keywords)


def rglru_layer_recurrent(
    x: Tensor, w_a: Tensor, w_x: Tensor, c: Tensor, **keywords: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the layer one step at a time on x [B, T, C], w_a, w_x [C, C] from x's channels to those of r and i, c [C].

    Keywords as in :func:`rglru_recurrent`.
    """
    wide = x.to(compute_dtype(x.dtype))
    result = rglru_recurrent(wide, wide @ w_a.to(wide.dtype), wide @ w_x.to(wide.dtype), c, **keywords)
    return (result[0].to(x.dtype), result[1]) if isinstance(result, tuple) else result.to(x.dtype)


def rglru_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw x and the pre-activations r, i ~ N(0, 1), as a layer's initial weights make them, and c as Griffin does.

    c is such that a, with the gate open, is uniform in [0.9, 0.999] over the channels. As parameters in mixed precision
    it is float32 (float64 beside float64 inputs), with values that the inputs' dtype represents exactly.
    """
    x, r, i = (draw.normal(*draw.channels) for _ in range(3))
    a = 0.9 + 0.099 * draw.uniform(draw.channels[2])
    return {"x": x, "r": r, "i": i, "c": draw.round_gate(torch.log(torch.expm1(-a.log() / 8.0)))}


def linear_scan_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw x ~ N(0, 1) and decays a = sigma(z), z ~ N(3, 1)."""
    x, z = (draw.noise(*draw.channels) for _ in range(2))
    return {"x": x.to(draw.dtype), "a": torch.sigmoid(z + 3.0).to(draw.dtype)}


def rglru_layer_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw x and c as for RG-LRU, and weights ~ N(0, 1/C), so that pre-activations are ~ N(0, 1)."""
    inputs, channels = rglru_inputs(draw), draw.sizes["channels"]
    weights = Draw(draw.sizes, dtype=draw.dtype, device=draw.device, seed=draw.seed + 1)
    w_a, w_x = weights.normal(2, channels, channels)
    scale = channels**-0.5
    return {"x": inputs["x"], "w_a": w_a * scale, "w_x": w_x * scale, "c": inputs["c"]}
