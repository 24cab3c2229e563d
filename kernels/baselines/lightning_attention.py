"""lightning-attn: the authors' Lightning Attention-2 kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 128

BASELINES = (
    Baseline(
        name="lightning_attn.v2",
        provider="lightning_attn",
        distribution="lightning-attn",
        tested="0.0.5",
        op="lightning",
        formulation="lightning2",
        own_chunk=64,
        kernels=("tfla", "lightning"),
        build="kernels.baselines.lightning_attention:build",
        own_sizes=True,
        why_not="kernels.baselines.lightning_attention:why_not",
        dtypes=("bf16", "fp16"),
        autotunes=False,
        settings="lightning_attn_func with slopes [H, 1, 1]; blocks of 64 (32 backward) are fixed in its source",
        licence="MIT",
    ),
)


def why_not(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why lightning-attn cannot run these sizes, or None.

    Its kernels hold a whole [K, V] state in one tile, so both dims are powers of two; above 128 its front end splits
    the heads into slices and sums their outputs, which is another algorithm.
    """
    for name in ("head_dim_qk", "head_dim_v"):
        dim = sizes[name]
        if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM or dim & (dim - 1):
            return f"{name} must be a power of two from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {dim}"
    return None


def build(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare lightning_attn_func on [B, H, T, D] tensors; the slopes get no gradient."""
    from lightning_attn.ops import lightning_attn_func

    from ._tensors import on_leaves

    slope = inputs["slope"].detach().float().reshape(-1, 1, 1).contiguous()
    return on_leaves(lambda q, k, v: lightning_attn_func(q, k, v, slope), inputs, "q", "k", "v", heads_first=True)
