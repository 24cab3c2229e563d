"""liger-kernel: SwiGLU after cuBLAS's products, and the projections fused with it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

_liger = partial(
    Baseline,
    provider="liger_kernel",
    distribution="liger-kernel",
    tested="0.8.5",
    op="gated_mlp",
    kernels=("gated-mlp",),
    dtypes=("bf16", "fp16", "fp32"),
    licence="BSD-2-Clause",
)

BASELINES = (
    _liger(
        name="liger_kernel.silu_mul",
        formulation="gemms_activation",
        build="kernels.baselines.liger:build_silu_mul",
        settings="LigerSiLUMulFunction on two cuBLAS products, as its SwiGLU MLP layer computes",
    ),
    _liger(
        name="liger_kernel.silu_mul_joint",
        formulation="cublas_activation",
        build="kernels.baselines.liger:build_joint",
        modes=("fw",),
        settings="LigerFusedGateUpSiLUMulFunction on one cuBLAS product with gate and up side by side, without copies",
    ),
    _liger(
        name="liger_kernel.fused",
        formulation="fused",
        build="kernels.baselines.liger:build_fused",
        modes=("fw",),
        dtypes=("bf16", "fp16"),
        settings="gemm_swiglu, the forward half of its fused MLP, autotuned, weights [F, D] as in nn.Linear",
    ),
)


def build_silu_mul(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare two products and the gating kernel, whose backward pass overwrites what its forward pass saved."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    from ._tensors import on_leaves

    return on_leaves(lambda x, w_up, w_gate: LigerSiLUMulFunction.apply(x @ w_gate, x @ w_up), inputs)


def build_joint(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare one product with the weights side by side, the gate's first."""
    import torch
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    x, w = inputs["x"].detach(), torch.cat((inputs["w_gate"], inputs["w_up"]), dim=1).detach()
    return Runnable(forward=lambda: LigerFusedGateUpSiLUMulFunction.apply(x @ w), leaves={"x": x, "w": w})


def build_fused(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the fused projections on x [1, M, D] and weights [F, D]."""
    from liger_kernel.ops.mlp import gemm_swiglu

    x = inputs["x"].detach()[None]
    w_up, w_gate = (inputs[name].detach().T.contiguous() for name in ("w_up", "w_gate"))

    def forward() -> Tensor:
        return gemm_swiglu(x, w_gate, w_up, 1.0, store_preact=False)[0][0]

    return Runnable(forward=forward, leaves={"x": x, "w_up": w_up, "w_gate": w_gate})
