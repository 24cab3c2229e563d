"""accelerated-scan: the linear scan in Triton, one program a sequence and channel, on [B, C, T] tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

BASELINES = (
    Baseline(
        name="accelerated_scan.triton",
        provider="accelerated_scan",
        distribution="accelerated-scan",
        tested="0.3.1",
        module="accelerated_scan.scalar",
        op="linear_scan",
        formulation="scan",
        kernels=("rglru",),
        build="kernels.baselines.accelerated_scans:build",
        dtypes=("bf16", "fp16", "fp32"),
        settings="accelerated_scan.scalar.scan, its Triton kernels, on contiguous [B, C, T] tensors: the scan alone",
        licence="MIT",
    ),
)


def build(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare scan(forget, inputs) with both gradients."""
    from accelerated_scan.scalar import scan

    from ._tensors import on_leaves

    # The package takes [B, C, T]; heads_first swaps the second and the third dimension.
    return on_leaves(lambda x, a: scan(a, x), inputs, "x", "a", heads_first=True)
