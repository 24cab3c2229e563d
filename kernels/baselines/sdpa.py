"""torch.nn.functional.scaled_dot_product_attention with its fused backends."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEAD_DIM_FLASH = 256
MAX_HEAD_DIM_CUDNN = 128

_attention = partial(
    Baseline,
    provider="torch",
    distribution="torch",
    tested="2.11.0",
    build="kernels.baselines.sdpa:build",
    op="attention",
    formulation="flash",
    kernels=("tfla", "lightning", "rglru"),
    plan="kernels.baselines.plans:head_sizes",
    licence="BSD-3-Clause",
)
_LAYOUT = (
    "is_causal, heads of 128; [B, H, T, D] views of [B, T, H, D] memory, the layout a model's projections leave behind"
)

BASELINES = (
    _attention(
        name="torch.sdpa_flash",
        supports="kernels.baselines.sdpa:supports_flash",
        dtypes=("bf16", "fp16"),
        settings=f"SDPBackend.FLASH_ATTENTION (FlashAttention-2), {_LAYOUT}",
    ),
    _attention(
        name="torch.sdpa_cudnn",
        supports="kernels.baselines.sdpa:supports_cudnn",
        nvidia=True,
        dtypes=("bf16", "fp16"),
        settings=f"SDPBackend.CUDNN_ATTENTION, {_LAYOUT}",
    ),
    _attention(
        name="torch.sdpa_cpu",
        supports="kernels.baselines.sdpa:supports_cpu",
        dtypes=("fp32", "bf16"),
        devices=("cpu",),
        settings=f"SDPBackend.FLASH_ATTENTION (torch's blocked CPU kernel), {_LAYOUT}",
    ),
)


def supports_cpu(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why torch's blocked CPU kernel cannot run these sizes, or None."""
    if sizes["head_dim_qk"] != sizes["head_dim_v"]:
        return f"head_dim_qk must equal head_dim_v, got {sizes['head_dim_qk']} and {sizes['head_dim_v']}"
    return None


def supports_flash(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why FlashAttention-2 cannot run these sizes, or None."""
    if sizes["head_dim_v"] > MAX_HEAD_DIM_FLASH:
        return f"head_dim_v must be at most {MAX_HEAD_DIM_FLASH}, got {sizes['head_dim_v']}"
    return supports_cpu(sizes, dtype, state_dtype)


def supports_cudnn(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why cuDNN's attention cannot run these sizes, or None."""
    for name in ("head_dim_qk", "head_dim_v"):
        if sizes[name] % 8 or sizes[name] > MAX_HEAD_DIM_CUDNN:
            return f"{name} must be a multiple of 8 up to {MAX_HEAD_DIM_CUDNN}, got {sizes[name]}"
    return None


def build(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare causal SDPA restricted to one backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from ._tensors import on_leaves

    only = SDPBackend.CUDNN_ATTENTION if case.impl == "torch.sdpa_cudnn" else SDPBackend.FLASH_ATTENTION

    def attention(**leaves: Tensor) -> Tensor:
        q, k, v = (leaf.transpose(1, 2) for leaf in leaves.values())
        with sdpa_kernel(only):
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return on_leaves(attention, inputs)
