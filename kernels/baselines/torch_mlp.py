"""torch's own gated MLP: eager, what torch.compile makes of that, and its two matrix products alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

_torch = partial(
    Baseline,
    provider="torch",
    distribution="torch",
    tested="2.11.0",
    kernels=("gated-mlp",),
    plan="kernels.baselines.plans:mlp_sizes",
    dtypes=("bf16", "fp16", "fp32"),
    licence="BSD-3-Clause",
)

BASELINES = (
    _torch(
        name="torch.eager",
        op="gated_mlp",
        formulation="eager",
        build="kernels.baselines.torch_mlp:build_eager",
        settings="silu(x @ w_gate) * (x @ w_up): cuBLAS, and a kernel each for the activation and the product",
    ),
    _torch(
        name="torch.compile",
        op="gated_mlp",
        formulation="gemms_activation",
        build="kernels.baselines.torch_mlp:build_compiled",
        settings="torch.compile (static shapes) of the eager form: cuBLAS twice and one kernel for the gating",
    ),
    _torch(
        name="torch.gemms",
        op="projections",
        formulation="gemms",
        build="kernels.baselines.torch_mlp:build_products",
        modes=("fw",),
        settings="cuBLAS alone: the two products without activation and gating, which is not the same result",
    ),
)


def eager(x: Tensor, w_up: Tensor, w_gate: Tensor) -> Tensor:
    """Return silu(x W_gate) * (x W_up), a kernel a line."""
    from torch.nn.functional import silu

    return silu(x @ w_gate) * (x @ w_up)


def build_eager(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the eager form."""
    from ._tensors import on_leaves

    return on_leaves(eager, inputs)


def build_compiled(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the eager form for torch.compile, which compiles when it is first called."""
    import torch

    from ._tensors import on_leaves

    return on_leaves(torch.compile(eager, dynamic=False), inputs)


def build_products(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the two products, into the halves of one tensor [2, M, F]."""
    import torch

    x, w_up, w_gate = (tensor.detach() for tensor in inputs.values())

    def forward() -> Tensor:
        both = x.new_empty(2, x.shape[0], w_up.shape[1])
        torch.mm(x, w_up, out=both[0])
        torch.mm(x, w_gate, out=both[1])
        return both

    return Runnable(forward=forward, leaves={"x": x, "w_up": w_up, "w_gate": w_gate})
