"""The gated half of an MLP: launches and gradients of its kernels.

    y = act(x W_gate) * (x W_up)

    d_up = dy act(gate)                d_gate = dy up act'(gate)
    dx = d_up W_up^T + d_gate W_gate^T          dW_up = x^T d_up          dW_gate = x^T d_gate

The forward pass writes y alone, or also saves the pre-activations up and gate; if they are not saved, the backward pass
computes them again. The matrix products of the backward pass are torch's. Source: see project.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...results.arguments import one_of
from ..common.device import capability, multiprocessors
from ..common.differentiable import Differentiable, Tensors, has_strides, on_device_of, readable
from ..common.sizes import REMEMBERED, cdiv
from .config import ACTIVATIONS, DIM_MULTIPLE, GatedMlpConfig, GemmConfig, invalid_reason, select_tile
from .project import gate_gradient_kernel, project_kernel
from .reference import portable
from .validate import check_kernel_support, check_layout, check_projections, is_k_major

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
GRADIENT_BLOCK = 2048
MAX_STRIDE = 2**40
"""A stride of a descriptor must be below this many bytes."""


def fused(
    x: Tensor, w_up: Tensor, w_gate: Tensor, *, save: bool, activation: str, config: GatedMlpConfig | None
) -> Tensor:
    """Compute y as :func:`..gated_mlp` says; ``save``: keep the pre-activations if a backward pass may follow."""
    one_of("activation", activation, ACTIVATIONS)
    check_projections(x, w_up, w_gate)
    check_layout(w_up, w_gate)
    check_kernel_support(x, *w_up.shape)
    if config is not None and (reason := invalid_reason(config)):
        raise ValueError(f"config: {reason}")
    if not len(x):
        return portable(x, w_up, w_gate, activation=activation)
    # Determined here because gradients are never enabled inside an autograd function.
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, w_up, w_gate))
    (y,) = GATED_MLP(MlpCall(activation, save and differentiated, is_k_major(w_up), config), x, w_up, w_gate)
    return y


def products(
    x: Tensor, w_up: Tensor, w_gate: Tensor, *, impl: str = "gemms", config: GatedMlpConfig | None = None
) -> Tensor:
    """Compute x W_up and x W_gate with the kernel of the gated MLP, which shows what the gating costs.

    Args:
        x, w_up, w_gate, config: as of :func:`..gated_mlp`; of config only the forward launch is used.
        impl: "gemms".

    Returns:
        Both products [2, M, F] in x's dtype; not differentiable.

    Raises:
        ValueError: on arguments that the kernel does not take.
    """
    one_of("impl", impl, ("gemms",), " for projections")
    check_projections(x, w_up, w_gate)
    check_layout(w_up, w_gate)
    check_kernel_support(x, *w_up.shape)
    if not len(x):
        return x.new_empty(2, 0, w_up.shape[1])
    x, w_up, w_gate = readable((x, w_up, w_gate), None)
    both = x.new_empty(2, x.shape[0], w_up.shape[1])
    call = MlpCall("silu", False, is_k_major(w_up), config)
    on_device_of(x, project, x, UpAndGate(w_up, w_gate), call, pre=UpAndGate(*both))
    return both


class MlpCall(NamedTuple):
    """Everything about one call but its tensors. ``save``: keep the pre-activations, since a backward pass may follow;
    ``k_major``: the weights, and so their gradients, are K-major."""

    activation: str
    save: bool
    k_major: bool
    config: GatedMlpConfig | None


class UpAndGate(NamedTuple):
    """Two tensors, one for up and one for the gate: weights [D, F], pre-activations [M, F] or gradients of either."""

    up: Tensor
    gate: Tensor

    @property
    def gap(self) -> int:
        """Distance in memory from the start of up to the start of gate, in elements; may be negative."""
        return (self.gate.data_ptr() - self.up.data_ptr()) // self.up.element_size()


def _uninitialised(x: Tensor, columns: int) -> UpAndGate:
    return UpAndGate(x.new_empty(x.shape[0], columns), x.new_empty(x.shape[0], columns))


def _forward(problem: MlpCall, x: Tensor, w_up: Tensor, w_gate: Tensor) -> tuple[Tensors, Tensors]:
    """Return y, and the pre-activations that are saved."""
    columns = w_up.shape[1]
    y = x.new_empty(x.shape[0], columns)
    pre = _uninitialised(x, columns) if problem.save else None
    project(x, UpAndGate(w_up, w_gate), problem, y=y, pre=pre)
    return (y,), pre or (None, None)


def _shapes(problem: MlpCall, x: Tensor, w_up: Tensor, w_gate: Tensor) -> tuple[Tensors, Tensors]:
    columns = w_up.shape[1]
    return (x.new_empty(x.shape[0], columns),), _uninitialised(x, columns) if problem.save else (None, None)


def _backward(
    problem: MlpCall, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, gradients: Tensors
) -> Tensors:
    """Return the gradients of x and both weights."""
    # Hooks on saved tensors may return them in another layout.
    x, w_up, w_gate = tensors
    k_major = problem.k_major
    (dy,) = gradients
    weights = UpAndGate(*(w.T.contiguous().T if k_major else w.contiguous() for w in (w_up, w_gate)))
    d_pre = _uninitialised(x, w_up.shape[1])
    if problem.save:
        gate_gradient(UpAndGate(*saved), dy, d_pre, problem)
    else:
        project(x, weights, problem, pre=d_pre, dy=dy)
    dx = (d_pre.up @ weights.up.T).addmm_(d_pre.gate, weights.gate.T) if needs[0] else None
    wanted = zip(d_pre, needs[1:], strict=True)
    return dx, *(None if not needed else (d.T @ x).T if k_major else x.T @ d for d, needed in wanted)


GATED_MLP = Differentiable(
    "gated_mlp",
    request=MlpCall,
    tensors=("x", "w_up", "w_gate"),
    outputs=("y",),
    saved=("up", "gate"),
    strided=None,
    forward=_forward,
    backward=_backward,
    shapes=_shapes,
)
"""y from x and both weights."""


def project(
    x: Tensor,
    weights: UpAndGate,
    problem: MlpCall,
    *,
    y: Tensor | None = None,
    pre: UpAndGate | None = None,
    dy: Tensor | None = None,
) -> None:
    """Launch project_kernel, which writes y and pre where given: with dy, the pre-activations' gradients into pre."""
    end = "gradient" if dy is not None else "products" if y is None else "gate" if pre is None else "save"
    (rows, inner), columns, k_major = x.shape, weights.up.shape[1], is_k_major(weights.up)
    gap = weights.gap if k_major else 0
    # In units of DIM_MULTIPLE, if it can be, so that the compiler knows that rows of both weights are aligned.
    unit = 1 if gap % DIM_MULTIPLE else DIM_MULTIPLE
    reason = no_descriptor(weights) if k_major else None
    which = "gradient" if end == "gradient" else "forward"
    if problem.config is not None and (config := getattr(problem.config, which)).use_tma and reason:
        raise ValueError(f"{reason}; config.{which} has use_tma")
    sizes = rows, inner, columns
    config, grid, flags = _choose(problem, end, k_major, sizes, x.dtype, x.device, capability(x.device), reason is None)

    def argument(tensor: Tensor | None, *block: int) -> Tensor | TensorDescriptor | None:
        if tensor is None or not config.use_tma:
            return None if tensor is None else tensor.detach()
        # The tensor's own stride may be anything if it has one row.
        row = tensor.shape[1] if tensor.is_contiguous() else tensor.stride(0)
        return TensorDescriptor(tensor.detach(), list(tensor.shape), [row, 1], list(block))

    if k_major:
        w, w_gate = _both(weights, config) if config.use_tma else weights.up.T.detach(), None
    else:
        w, w_gate = (argument(weight, config.block_k, config.block_f) for weight in weights)
    out = (config.block_m, config.block_f // config.subtiles)
    if not (x.is_contiguous() or (config.use_tma and has_strides(x))):
        x = x.contiguous()
    project_kernel[grid](
        argument(x, config.block_m, config.block_k), w, w_gate, argument(y, *out),
        *(argument(tensor, *out) for tensor in pre or (None, None)), argument(dy, *out), rows, inner // DIM_MULTIPLE,
        columns // DIM_MULTIPLE, gap // unit, UNIT=unit, **flags,
    )  # fmt: skip


@lru_cache(REMEMBERED)
def _choose(
    problem: MlpCall,
    end: str,
    k_major: bool,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    capability: tuple[int, int],
    described: bool,
) -> tuple[GemmConfig, tuple[int], dict[str, Any]]:
    """Return a launch's tiles, grid and keywords for ``sizes`` M, D, F; ``described``: see :func:`.select_tile`."""
    rows, inner, columns = sizes
    if problem.config is not None:
        config = problem.config.gradient if end == "gradient" else problem.config.forward
    else:
        config = select_tile(
            end=end, k_major=k_major, tokens=rows, work=rows * inner * columns, capability=capability,
            item_bytes=dtype.itemsize, described=described,
        )  # fmt: skip
    tiles = cdiv(rows, config.block_m) * cdiv(columns, config.block_f)
    flags = {
        "ACTIVATION": problem.activation, "END": end, "K_MAJOR": k_major, "DTYPE": DTYPES[dtype], "TILE": config,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    return config, (min(tiles, multiprocessors(device)) if config.persistent else tiles,), flags


def _both(weights: UpAndGate, config: GemmConfig) -> TensorDescriptor:
    """Return one descriptor [2, F, D] of two K-major weights, with their distance in memory as the first stride."""
    rows, columns = weights.up.shape
    first = weights.up if weights.gap >= 0 else weights.gate
    strides, block = [abs(weights.gap), rows, 1], [2, config.block_f, config.block_k]
    return TensorDescriptor(first.T.detach(), [2, columns, rows], strides, block)


def no_descriptor(weights: UpAndGate) -> str | None:
    """Return why one descriptor cannot describe both K-major weights, or None: their distance has to be a stride."""
    size, gap, limit = weights.up.numel(), abs(weights.gap), MAX_STRIDE // weights.up.element_size()
    if not size <= gap < limit:
        return f"w_gate must begin from {size} to {limit - 1} elements behind or before w_up, got {gap}"
    row = weights.up.shape[0]
    # Found by trial: except on Hopper, the distance must be a multiple of the next stride.
    if gap % row and capability(weights.up.device)[0] != 9:
        return f"w_gate must begin a multiple of {row} elements behind or before w_up, got {gap}"
    return None


def gate_gradient(saved: UpAndGate, dy: Tensor, d_pre: UpAndGate, problem: MlpCall) -> None:
    """Launch gate_gradient_kernel: write the gradients of the saved pre-activations into d_pre."""
    multiples = dy.numel() // DIM_MULTIPLE
    gate_gradient_kernel[(cdiv(dy.numel(), GRADIENT_BLOCK),)](
        *saved, dy, *d_pre, multiples, ACTIVATION=problem.activation, BLOCK=GRADIENT_BLOCK, num_warps=4
    )
