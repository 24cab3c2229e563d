"""The gated half of an MLP: definition, forms in plain torch, the layout of interleaved weights, and inputs.

    y = act(x W_gate) * (x W_up)

act is silu (SwiGLU), gelu (GeGLU; exact, x Phi(x)), gelu_tanh (GeGLU with the tanh form that Gemma uses), relu (ReGLU)
or sigmoid (GLU). Source: Shazeer, GLU Variants Improve Transformer (2020), equations 5 and 6, without biases. The down
projection is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional as F

from ..scalar_decay.reference import compute_dtype
from .config import INTERLEAVE_COLUMNS
from .validate import check_activation, check_layout, check_projections


def activate(gate: Tensor, activation: str) -> Tensor:
    """Return act(gate) in gate's dtype; ValueError for an unknown activation."""
    check_activation(activation)
    if activation == "silu":
        return F.silu(gate)
    if activation == "relu":
        return F.relu(gate)
    if activation == "sigmoid":
        return torch.sigmoid(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated_mlp(x: Tensor, w_up: Tensor, w_gate: Tensor, *, activation: str = "silu") -> Tensor:
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


def portable(x: Tensor, w_up: Tensor, w_gate: Tensor, *, activation: str = "silu") -> Tensor:
    """Compute y with torch alone in x's dtype; pre-activations are rounded to it.

    Arguments, result and errors as in :func:`gated_mlp`; weights are both contiguous or both K-major. Where nothing
    is differentiated the product is taken in place, so that two [M, F] tensors stand in memory rather than four.
    """
    check_projections(x, w_up, w_gate)
    check_layout(x, w_up, w_gate)
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


@overload
def interleave(w_up: Tensor, w_gate: None = None) -> tuple[Tensor, Tensor]: ...
@overload
def interleave(w_up: Tensor, w_gate: Tensor) -> Tensor: ...
def interleave(w_up: Tensor, w_gate: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Interleave the columns of two weights, or take interleaved weights apart: ``interleave`` undoes itself.

        w = interleave(w_up, w_gate)        w_up, w_gate = interleave(w)

    Columns 0 to 7 of w are W_up's first eight, 8 to 15 W_gate's, 16 to 23 W_up's next, and so on: eight columns lie
    between two elements that a matrix unit leaves with one thread. w is K-major, each column in one piece, as
    torch.nn.Linear holds weights and as matrix units read them best. (As a permutation of the 2F columns of weights
    side by side this is not its own inverse; the function is: what it makes of a pair, it makes a pair of.) Weights
    interleaved column by column look the same and are not: store weights apart.

    Args:
        w_up: W_up [D, F] of any strides, F a multiple of 8, or interleaved weights [D, 2F].
        w_gate: W_gate [D, F] in w_up's dtype and on its device; None to take w_up apart.

    Returns:
        Interleaved weights [D, 2F], or (W_up, W_gate) [D, F]; copies, K-major. Autograd differentiates either way.

    Raises:
        ValueError: on a shape, dtype or device that does not fit; the message names the argument.
    """
    for name, weight in (("w_up", w_up), ("w_gate", w_gate)):
        if not isinstance(weight, Tensor) and (name == "w_up" or weight is not None):
            raise TypeError(f"{name} must be a tensor, got {type(weight).__name__}")
    if w_up.dim() != 2:
        raise ValueError(f"w_up must have 2 dimensions, got shape {tuple(w_up.shape)}")
    columns = w_up.shape[1]
    if w_gate is None:
        if columns % (both := 2 * INTERLEAVE_COLUMNS):
            raise ValueError(f"w_up must have a multiple of {both} interleaved columns, got shape {tuple(w_up.shape)}")
        blocks = w_up.T.unflatten(0, (-1, 2, INTERLEAVE_COLUMNS))
        return blocks[:, 0].flatten(0, 1).contiguous().T, blocks[:, 1].flatten(0, 1).contiguous().T
    if w_gate.shape != w_up.shape:
        raise ValueError(f"w_gate must have shape {tuple(w_up.shape)}, got {tuple(w_gate.shape)}")
    if (w_gate.dtype, w_gate.device) != (w_up.dtype, w_up.device):
        raise ValueError(
            f"w_gate must be {w_up.dtype} on {w_up.device}, as w_up is, got {w_gate.dtype} on {w_gate.device}"
        )
    if columns % INTERLEAVE_COLUMNS:
        raise ValueError(f"w_up must have a multiple of {INTERLEAVE_COLUMNS} columns, got shape {tuple(w_up.shape)}")
    blocks = (w.T.unflatten(0, (-1, INTERLEAVE_COLUMNS)) for w in (w_up, w_gate))
    return torch.stack(tuple(blocks), dim=1).flatten(0, 2).T


def k_major_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an operation's inputs with the weights K-major, as torch.nn.Linear holds them."""
    return {**inputs, **{name: inputs[name].detach().T.contiguous().T for name in ("w_up", "w_gate")}}


def interleave_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return x and w: an operation's inputs with the weights interleaved, as a model keeps them after loading."""
    return {"x": inputs["x"], "w": interleave(inputs["w_up"].detach(), inputs["w_gate"].detach())}


def take_gradients_apart(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of x, w_up and w_gate from those of x and interleaved weights w."""
    up, gate = interleave(gradients["w"])
    return {"x": gradients["x"], "w_up": up, "w_gate": gate}


def make_inputs(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> dict[str, Tensor]:
    """Draw x [batch * seq_len, D] ~ N(0, 1), as a norm leaves it, and weights ~ N(0, 1/D), so that gates are ~ N(0, 1).

    Numbers are drawn on the device, which is quick at sizes of gigabytes, in float32 (float64 on a CPU).
    """
    generator = torch.Generator(device).manual_seed(seed)
    draw_dtype = torch.float64 if generator.device.type == "cpu" else torch.float32
    d_model, d_ff = sizes["d_model"], sizes["d_ff"]

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, dtype=draw_dtype, device=device)
        return drawn.mul_(scale).to(dtype)

    return {
        "x": normal(sizes["batch"] * sizes["seq_len"], d_model, 1.0),
        "w_up": normal(d_model, d_ff, d_model**-0.5),
        "w_gate": normal(d_model, d_ff, d_model**-0.5),
    }
