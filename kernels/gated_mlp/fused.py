"""The gated half of an MLP in one kernel: launches, autograd and the public functions.

    y = act(x W_gate) * (x W_up)

    d_up = dy act(gate)                d_gate = dy up act'(gate)
    dx = d_up W_up^T + d_gate W_gate^T          dW_up = x^T d_up          dW_gate = x^T d_gate

The forward pass writes y alone, or y and the pre-activations for the backward pass, which else projects again; its
products are torch's. Source: see project.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.device import on_device_of
from ..scalar_decay.engine import capability
from .config import DIM_MULTIPLE, GatedMlpConfig, TileConfig, invalid_reason, select_tile
from .project import gate_gradient_kernel, project_kernel
from .validate import (
    check_activation,
    check_interleaved,
    check_kernel_support,
    check_layout,
    check_projections,
    is_k_major,
)

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
GRADIENT_BLOCK_M, GRADIENT_BLOCK_F = 8, 256
DESCRIPTOR_ALIGNMENT = 16
"""Bytes of which the address of a descriptor's tensor is a multiple."""
MAX_STRIDE = 2**40
"""Bytes between two rows of a descriptor's tensor."""
INTERPRETER_PROGRAMS = 3
"""Programs of a persistent launch where there is no GPU: few, so that each walks several tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What one call computes, beside its tensors; ``save`` only where a backward pass can come."""

    activation: str
    save: bool
    config: GatedMlpConfig | None


class PreActivations(NamedTuple):
    """Up and gate [M, F], or interleaved [M, 2F] and None, in the order of the weights; or their gradients."""

    first: Tensor
    gate: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights as they are held: W_up and W_gate [D, F], or interleaved [D, 2F] and None; layout is project_kernel's."""

    first: Tensor
    gate: Tensor | None
    layout: str

    @classmethod
    def of(cls, first: Tensor, gate: Tensor | None) -> Weights:
        """Return the weights of a call."""
        return cls(first, gate, "interleaved" if gate is None else "columns" if is_k_major(first) else "rows")

    def laid_out(self) -> Weights:
        """Return the weights in their layout: hooks on saved tensors may give them back in another."""
        lay = Tensor.contiguous if self.layout == "rows" else _k_major
        return Weights(lay(self.first), None if self.gate is None else lay(self.gate), self.layout)

    @property
    def columns(self) -> int:
        """F."""
        return self.first.shape[1] // (2 if self.gate is None else 1)

    @property
    def gap(self) -> int:
        """How many elements the gate's columns lie behind the other ones, as addresses go; 0 in other layouts."""
        if self.gate is None or self.layout != "columns":
            return 0
        return (self.gate.data_ptr() - self.first.data_ptr()) // self.first.element_size()

    def pre_activations(self, rows: int) -> PreActivations:
        """Return uninitialised pre-activations of ``rows`` rows."""
        first = self.first.new_empty(rows, self.first.shape[1])
        return PreActivations(first, None if self.gate is None else torch.empty_like(first))


def _k_major(weight: Tensor) -> Tensor:
    return weight.T.contiguous().T


def fused(x: Tensor, w: Tensor, *, activation: str = "silu", config: GatedMlpConfig | None = None) -> Tensor:
    """Compute y = act(x W_gate) * (x W_up) in one kernel that writes y alone; the backward pass projects again.

    Args:
        x: [M, D], contiguous; float32, float16 or bfloat16. D and F are multiples of 8.
        w: both weights in one, ``interleave(w_up, w_gate)`` [D, 2F], in x's dtype; :func:`fused_pair` takes them apart.
        activation: silu, gelu (exact), gelu_tanh, relu or sigmoid.
        config: launches; chosen for the device and the sizes when None.

    Returns:
        y [M, F] in x's dtype; differentiable once, in x and w. The gradient of w is interleaved as w is.

    Raises:
        ValueError: on an argument the kernel does not take; the message names it, what was expected and what came.

    Source: Shazeer, GLU Variants Improve Transformer (2020), equations 5 and 6.
    """
    return _run(x, w, save=False, activation=activation, config=config)


def fused_save(x: Tensor, w: Tensor, *, activation: str = "silu", config: GatedMlpConfig | None = None) -> Tensor:
    """Compute the same, and keep the pre-activations [M, 2F] in x's dtype for the backward pass.

    Arguments, result and errors as in :func:`fused`; without gradients it is that.
    """
    return _run(x, w, save=True, activation=activation, config=config)


def fused_pair(
    x: Tensor, w_up: Tensor, w_gate: Tensor, *, activation: str = "silu", config: GatedMlpConfig | None = None
) -> Tensor:
    """Compute the same from two weights.

    Args:
        x: [M, D], as in :func:`fused`.
        w_up, w_gate: [D, F] in x's dtype: both K-major, transposes of contiguous [F, D] as torch.nn.Linear holds them
            (``linear.weight.T``), or both contiguous, which is slower.
        activation, config: as in :func:`fused`.

    Returns:
        y [M, F] in x's dtype; differentiable once, in all three. Gradients of weights are laid out as they are.

    Raises:
        ValueError: as in :func:`fused`.
    """
    return _run_pair(x, w_up, w_gate, save=False, activation=activation, config=config)


def fused_pair_save(
    x: Tensor, w_up: Tensor, w_gate: Tensor, *, activation: str = "silu", config: GatedMlpConfig | None = None
) -> Tensor:
    """Compute the same, and keep the pre-activations [M, 2F] in x's dtype for the backward pass.

    Arguments, result and errors as in :func:`fused_pair`; without gradients it is that.
    """
    return _run_pair(x, w_up, w_gate, save=True, activation=activation, config=config)


def _run(x: Tensor, w: Tensor, *, save: bool, activation: str, config: GatedMlpConfig | None) -> Tensor:
    check_activation(activation)
    check_interleaved(x, w)
    check_kernel_support(x, w.shape[0], w.shape[1] // 2)
    return _GatedMlp.apply(x, w, None, _problem((x, w), activation, save, config))


def _run_pair(
    x: Tensor, w_up: Tensor, w_gate: Tensor, *, save: bool, activation: str, config: GatedMlpConfig | None
) -> Tensor:
    check_activation(activation)
    check_projections(x, w_up, w_gate)
    check_layout(x, w_up, w_gate)
    check_kernel_support(x, *w_up.shape)
    return _GatedMlp.apply(x, w_up, w_gate, _problem((x, w_up, w_gate), activation, save, config))


def _problem(given: tuple[Tensor, ...], activation: str, save: bool, config: GatedMlpConfig | None) -> Problem:
    """Return the problem of arguments that fit; ValueError for launches that cannot run."""
    if config is not None and (reason := invalid_reason(config)):
        raise ValueError(f"config: {reason}")
    # An autograd function is not told that gradients are switched off.
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    return Problem(activation=activation, save=save and differentiated, config=config)


class _GatedMlp(torch.autograd.Function):
    """y from x and both weights, or from x and interleaved weights with None in the other's place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, gate: Tensor | None, problem: Problem) -> Tensor:
        weights = Weights.of(first, gate)
        y = x.new_empty(x.shape[0], weights.columns)
        saved = weights.pre_activations(x.shape[0]) if problem.save else None
        project(x, weights, problem, y=y, pre=saved)
        ctx.save_for_backward(x, first, gate, *(saved or ()))
        ctx.problem, ctx.layout = problem, weights.layout
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, first, gate, *saved = ctx.saved_tensors
        wants_x, *wants_w = ctx.needs_input_grad[:3]
        weights = Weights(first, gate, ctx.layout).laid_out()
        x, dy = x.contiguous(), dy.contiguous()
        d_pre = weights.pre_activations(x.shape[0])
        if saved:
            kept, kept_gate = saved
            kept_gate = None if kept_gate is None else kept_gate.contiguous()
            gate_gradient(PreActivations(kept.contiguous(), kept_gate), dy, d_pre, ctx.problem)
        else:
            project(x, weights, ctx.problem, pre=d_pre, dy=dy)
        dx = None
        # Gradients have the dtype of what they are of, whatever products are cast to around here.
        with torch.autocast(x.device.type, enabled=False):
            if wants_x:
                dx = d_pre.first @ weights.first.T
                if weights.gate is not None and d_pre.gate is not None:
                    dx.addmm_(d_pre.gate, weights.gate.T)
            d_first, d_gate = (
                _weight_gradient(x, d, ctx.layout) if wanted and d is not None else None
                for d, wanted in zip((d_pre.first, d_pre.gate), wants_w, strict=True)
            )
        return dx, d_first, d_gate, None


def _weight_gradient(x: Tensor, d_pre: Tensor, layout: str) -> Tensor:
    """Return x^T d_pre, laid out as its weight is."""
    return x.T @ d_pre if layout == "rows" else (d_pre.T @ x).T


@on_device_of("x")
def project(
    x: Tensor,
    weights: Weights,
    problem: Problem,
    *,
    y: Tensor | None = None,
    pre: PreActivations | None = None,
    dy: Tensor | None = None,
) -> None:
    """Launch project_kernel: write y, and pre where given; or with dy the pre-activations' gradients into pre."""
    end = "gate" if pre is None else "save" if dy is None else "gradient"
    rows, columns, layout, gap = x.shape[0], weights.columns, weights.layout, weights.gap
    # A distance in whole groups of elements tells the compiler that rows of both weights are aligned.
    unit = 1 if gap % DIM_MULTIPLE else DIM_MULTIPLE
    reason = no_descriptors(x, weights, dy)
    if problem.config is not None:
        which = "gradient" if end == "gradient" else "forward"
        config = getattr(problem.config, which)
        if config.use_tma and reason:
            raise ValueError(f"{reason}; config.{which} has use_tma")
    else:
        config = select_tile(
            end=end,
            layout=layout,
            tokens=rows,
            work=rows * x.shape[1] * columns,
            capability=capability(x.device),
            item_bytes=x.element_size(),
            aligned=reason is None,
        )
    block_m, block_f, block_k = config.block_m, config.block_f, config.block_k
    parts = config.subtiles
    # Parts of a tile are halves of its tokens where its transpose is accumulated, else of its columns.
    out_rows, out_columns = (block_m // parts, 1) if layout == "interleaved" else (block_m, parts)
    pre_block = (out_rows, (2 if layout == "interleaved" else 1) * block_f // out_columns)

    def tile(tensor: Tensor | None, *block: int) -> Tensor | TensorDescriptor | None:
        if tensor is None or not config.use_tma:
            return None if tensor is None else tensor.detach()
        # Of one row a contiguous tensor may have any stride.
        return TensorDescriptor(tensor.detach(), list(tensor.shape), [tensor.shape[1], 1], list(block))

    tiles = triton.cdiv(rows, block_m) * triton.cdiv(columns, block_f)
    programs = min(tiles, multiprocessors(x.device)) if config.persistent else tiles
    project_kernel[(programs,)](
        tile(x, block_m, block_k),
        *_weight_tiles(weights, config, tile),
        tile(y, out_rows, block_f // out_columns),
        tile(None if pre is None else pre.first, *pre_block),
        tile(None if pre is None else pre.gate, *pre_block),
        tile(dy, out_rows, block_f // out_columns),
        rows,
        x.shape[1] // DIM_MULTIPLE,
        columns // DIM_MULTIPLE,
        gap // unit,
        UNIT=unit,
        ACTIVATION=problem.activation,
        END=end,
        LAYOUT=layout,
        DTYPE=DTYPES[x.dtype],
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        USE_TMA=config.use_tma,
        PERSISTENT=config.persistent,
        BLOCK_M=block_m,
        BLOCK_F=block_f,
        BLOCK_K=block_k,
        GROUP_M=config.group_m,
        SUBTILES=parts,
        FLATTEN=config.flatten,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def no_descriptors(x: Tensor, weights: Weights, dy: Tensor | None) -> str | None:
    """Return which argument descriptors cannot hold, what they need and what came, or None where they hold all."""
    up = "w" if weights.gate is None else "w_up"
    for name, tensor in (("x", x), (up, weights.first), ("w_gate", weights.gate), ("dy", dy)):
        if tensor is not None and (past := tensor.data_ptr() % DESCRIPTOR_ALIGNMENT):
            return f"{name} must begin at a multiple of {DESCRIPTOR_ALIGNMENT} bytes, got {past} bytes past one"
    if weights.layout != "columns":
        return None
    # One descriptor of both weights has their distance as a stride.
    size, gap, limit = weights.first.numel(), abs(weights.gap), MAX_STRIDE // weights.first.element_size()
    if not size <= gap < limit:
        return f"w_gate must begin from {size} to {limit - 1} elements behind or before w_up, got {gap}"
    row = weights.first.shape[0]
    # As measured, on Hopper alone, it need not be a multiple of the next stride.
    if gap % row and capability(x.device)[0] != 9:
        return f"w_gate must begin a multiple of {row} elements behind or before w_up, got {gap}"
    return None


def _weight_tiles(
    weights: Weights, config: TileConfig, tile: Callable[..., Tensor | TensorDescriptor | None]
) -> tuple[Tensor | TensorDescriptor | None, Tensor | TensorDescriptor | None]:
    """Return w and w_gate as project_kernel reads them; see its LAYOUT."""
    first, gate = weights.first, weights.gate
    if gate is None:
        return tile(first.T, 2 * config.block_f, config.block_k), None
    if weights.layout == "rows":
        return tile(first, config.block_k, config.block_f), tile(gate, config.block_k, config.block_f)
    if not config.use_tma:
        return first.T.detach(), None
    # One tensor of both: addresses are all that a descriptor knows of memory.
    rows, columns = first.shape
    base, apart = (first, weights.gap) if weights.gap >= 0 else (gate, -weights.gap)
    block = [2, config.block_f, config.block_k]
    return TensorDescriptor(base.T.detach(), [2, columns, rows], [apart, rows, 1], block), None


@on_device_of("dy")
def gate_gradient(saved: PreActivations, dy: Tensor, d_pre: PreActivations, problem: Problem) -> None:
    """Launch gate_gradient_kernel: write the gradients of the saved pre-activations into d_pre."""
    rows, columns = dy.shape
    grid = (triton.cdiv(rows, GRADIENT_BLOCK_M), triton.cdiv(columns, GRADIENT_BLOCK_F))
    gate_gradient_kernel[grid](
        saved.first, saved.gate, dy, d_pre.first, d_pre.gate, rows, columns // DIM_MULTIPLE,
        ACTIVATION=problem.activation, PAIR=saved.gate is not None,
        BLOCK_M=GRADIENT_BLOCK_M, BLOCK_F=GRADIENT_BLOCK_F, num_warps=4,
    )  # fmt: skip


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; of the interpreter a few."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count
