"""torch's batched matrix product: a moving sum as the product with the T x T matrix of its decays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

BASELINES = (
    Baseline(
        name="torch.matmul",
        provider="torch",
        distribution="torch",
        tested="2.13.0",
        op="ema",
        kernels=("ema",),
        formulation="parallel",
        build="kernels.baselines.decay_matrix:build",
        dtypes=("fp32", "bf16"),
        devices=("cpu", "cuda"),
        settings="[B, H, T, V] layout; the matrix is made beforehand, since the slopes are constants",
        licence="BSD-3-Clause",
    ),
)


def build(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the product in the layout that suits it; none of this is timed."""
    import torch

    from ._tensors import on_leaves

    time = torch.arange(inputs["v"].shape[1], device=inputs["v"].device)
    distance = (time[:, None] - time).clamp(min=0)
    decay = torch.exp(-inputs["slope"].double()[:, None, None] * distance).tril().to(inputs["v"].dtype)
    return on_leaves(lambda v: decay @ v, inputs, "v", heads_first=True)
