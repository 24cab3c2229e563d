"""xformers: its fused SwiGLU, CUTLASS's dual GEMM, in the releases that still have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, KnownBad, Runnable

if TYPE_CHECKING:
    from torch import Tensor

OPERATOR = "dual_gemm_silu_identity_mul"

BASELINES = (
    Baseline(
        name="xformers.swiglu",
        provider="xformers",
        distribution="xformers",
        tested="0.0.33.post2",
        op="gated_mlp",
        formulation="fused_save",
        nvidia=True,
        kernels=("gated-mlp",),
        build="kernels.baselines.xformers:build",
        install="pip install xformers==0.0.33.post2, which needs torch 2.9.1",
        modes=("fw",),
        dtypes=("bf16", "fp16"),
        known_bad=(
            KnownBad(
                reason="the fused SwiGLU is gone: what is left multiplies and gates in eager torch",
                source="the operators in the wheel of 0.0.35",
                versions={"xformers": ">=0.0.35"},
            ),
        ),
        settings=f"{OPERATOR}, the projections of its fused SwiGLU, which stores them too; weights [F, D] packed",
        licence="BSD-3-Clause",
    ),
)


def build(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the dual GEMM on weights [F, D] in one allocation, as its documentation recommends.

    Raises:
        ImportError: this release has no such operator.
    """
    import torch
    import xformers
    import xformers.ops

    operator = getattr(torch.ops.xformers, OPERATOR, None)
    if operator is None:
        raise ImportError(f"xformers {xformers.__version__} has no operator {OPERATOR}: its fused SwiGLU is gone")
    x = inputs["x"].detach()
    packed = torch.stack((inputs["w_gate"].T, inputs["w_up"].T)).detach()
    w_gate, w_up = packed.unbind(0)

    def forward() -> Tensor:
        return operator(x, w_gate, None, w_up, None)[2]

    return Runnable(forward=forward, leaves={"x": x, "w_gate": w_gate, "w_up": w_up})
