"""The gated half of an MLP: definition, forms in plain torch, and inputs.

    y = act(x W_gate) * (x W_up)

act is silu (SwiGLU), gelu (GeGLU; exact, x Phi(x)), gelu_tanh (GeGLU with the tanh form that Gemma uses), relu (ReGLU)
or sigmoid (GLU). Source: Shazeer, GLU Variants Improve Transformer (2020), equations 5 and 6, without biases. The down
projection is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ...results.arguments import one_of
from ..common.arguments import compute_dtype
from ..common.inputs import Draw
from .config import ACTIVATIONS
from .validate import check_layout, check_projections


def activate(gate: Tensor, activation: str) -> Tensor:
    """Return act(gate) in gate's dtype; ValueError for an unknown activation."""
    one_of("activation", activation, ACTIVATIONS)
    if activation == "silu":
        return F.silu(gate)
    if activation == "relu":
        return F.relu(gate)
    if activation == "sigmoid":
        return torch.sigmoid(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def definition(x: Tensor, w_up: Tensor, w_gate: Tensor, *, activation: str = "silu") -> Tensor:
    """Compute y = act(x W_gate) * (x W_up) as it is defined.

    Args:
        x: [M, D]; float64 is computed in float64, all else in float32.
        w_up, w_gate: [D, F], of any strides.
        activation: silu, gelu, gelu_tanh, relu or sigmoid.

    Returns:
        y [M, F] in x's dtype.

    Raises:
        ValueError: on a shape, dtype or device that does not fit, or an unknown activation.
    """
    check_projections(x, w_up, w_gate)
    dtype = compute_dtype(x.dtype)
    wide = x.to(dtype)
    return (activate(wide @ w_gate.to(dtype), activation) * (wide @ w_up.to(dtype))).to(x.dtype)


def projections(x: Tensor, w_up: Tensor, w_gate: Tensor) -> Tensor:
    """Return x W_up and x W_gate as [2, M, F] in x's dtype, for x [M, D] and weights [D, F]."""
    dtype = compute_dtype(x.dtype)
    return torch.stack([x.to(dtype) @ w.to(dtype) for w in (w_up, w_gate)]).to(x.dtype)


def portable(x: Tensor, w_up: Tensor, w_gate: Tensor, *, activation: str = "silu") -> Tensor:
    """Compute y with torch alone in x's dtype; pre-activations are rounded to it.

    Arguments, result and errors as in :func:`definition`; weights are both contiguous or both K-major. If no gradient
    is needed, the gating is computed in place, so that two [M, F] tensors are in memory rather than four.
    """
    check_projections(x, w_up, w_gate)
    check_layout(w_up, w_gate)
    gate = x @ w_gate
    if gate.requires_grad or (torch.is_grad_enabled() and w_up.requires_grad):
        return activate(gate, activation) * (x @ w_up)
    activated = F.silu(gate, inplace=True) if activation == "silu" else activate(gate, activation)
    del gate
    return activated.mul_(x @ w_up)


def joint(x: Tensor, w_up: Tensor, w_gate: Tensor, *, activation: str = "silu") -> Tensor:
    """Compute y from one product with both weights side by side; arguments and result as in :func:`portable`."""
    check_projections(x, w_up, w_gate)
    up, gate = (x @ torch.cat((w_up, w_gate), dim=1)).chunk(2, dim=1)
    return activate(gate, activation) * up


def k_major_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an operation's inputs with the weights K-major, as torch.nn.Linear holds them."""
    return {**inputs, **{name: inputs[name].detach().T.contiguous().T for name in ("w_up", "w_gate")}}


def make_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw x [batch * seq_len, D] ~ N(0, 1), as a norm leaves it, and weights ~ N(0, 1/D), for gates ~ N(0, 1)."""
    batch, seq_len, d_model, d_ff = (draw.sizes[name] for name in ("batch", "seq_len", "d_model", "d_ff"))
    x = draw.normal(batch * seq_len, d_model)
    w_up, w_gate = (draw.noise(d_model, d_ff).mul_(d_model**-0.5).to(draw.dtype) for _ in range(2))
    return {"x": x, "w_up": w_up, "w_gate": w_gate}
