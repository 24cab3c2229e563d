"""FlashAttention 2 (flash_attn), 3 (flash_attn_interface) and 4 (flash_attn.cute)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, KnownBad, Runnable

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEAD_DIM = 256

_attention = partial(
    Baseline,
    provider="flash_attn",
    op="attention",
    formulation="flash",
    kernels=("tfla", "lightning"),
    plan="kernels.baselines.plans:attention_sizes",
    supports="kernels.baselines.flash_attention:supports",
    dtypes=("bf16", "fp16"),
    licence="BSD-3-Clause",
)

BASELINES = (
    _attention(
        name="flash_attn.v2",
        distribution="flash-attn",
        tested="2.8.3",
        module="flash_attn.flash_attn_interface",
        install="pip install flash-attn==2.8.3 --no-build-isolation",
        build="kernels.baselines.flash_attention:build_v2",
        settings="causal, heads of 128, default scale and tiles",
    ),
    _attention(
        name="flash_attn.v3",
        distribution="flash-attn-3",
        tested="3.0.0b1",
        module="flash_attn_interface",
        install=(
            "pip install --no-build-isolation 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'"
        ),
        build="kernels.baselines.flash_attention:build_v3",
        known_bad=(
            KnownBad(
                reason="FlashAttention-3 is written for Hopper alone: wgmma and the tensor memory accelerator of sm_90",
                source="Dao-AILab/flash-attention, README, section FlashAttention-3 beta release",
                architectures=("8.0", "8.6", "8.9", "10.0", "10.3", "12.0", "12.1"),
            ),
        ),
        settings="causal, heads of 128, default scale and tiles",
    ),
    _attention(
        name="flash_attn.v4",
        distribution="flash-attn-4",
        tested="4.0.0b36",
        module="flash_attn.cute",
        install="pip install 'flash-attn-4[cu13]==4.0.0b36'",
        build="kernels.baselines.flash_attention:build_v4",
        settings="causal, heads of 128, default scale and tiles",
    ),
)


def supports(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why FlashAttention cannot run these sizes, or None."""
    if sizes["head_dim_qk"] != sizes["head_dim_v"]:
        return f"head_dim_qk must equal head_dim_v, got {sizes['head_dim_qk']} and {sizes['head_dim_v']}"
    if sizes["head_dim_v"] > MAX_HEAD_DIM or sizes["head_dim_v"] % 8:
        return f"head_dim_v must be a multiple of 8 up to {MAX_HEAD_DIM}, got {sizes['head_dim_v']}"
    return None


def build_v2(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare flash_attn.flash_attn_func, causal."""
    from flash_attn.flash_attn_interface import flash_attn_func

    return _build(inputs, flash_attn_func)


def build_v3(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare flash_attn_interface.flash_attn_func, causal."""
    from flash_attn_interface import flash_attn_func

    return _build(inputs, flash_attn_func)


def build_v4(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare flash_attn.cute.flash_attn_func, causal."""
    from flash_attn.cute import flash_attn_func

    return _build(inputs, flash_attn_func)


def _build(inputs: Mapping[str, Tensor], flash_attn_func: Callable[..., Tensor | tuple[Tensor, ...]]) -> Runnable:
    from ._tensors import as_leaf

    leaves = {name: as_leaf(inputs[name]) for name in ("q", "k", "v")}
    q, k, v = leaves.values()

    def forward() -> Tensor:
        out = flash_attn_func(q, k, v, causal=True)
        # Some releases of 3 and 4 return (out, logsumexp).
        return out[0] if isinstance(out, tuple) else out

    return Runnable(forward=forward, leaves=leaves)
