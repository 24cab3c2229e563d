"""FlashAttention 2 (flash_attn), 3 (flash_attn_interface) and 4 (flash_attn.cute)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, KnownBad, Runnable

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEAD_DIM = 256
VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
"""What flash_attn_varlen_func of every release calls the documents' bounds and the longest of them."""

_attention = partial(
    Baseline,
    provider="flash_attn",
    op="attention",
    formulation="flash",
    kernels=("tfla", "lightning", "delta"),
    nvidia=True,
    build="kernels.baselines.flash_attention:build",
    settings="causal, heads of 128, default scale and tiles; of documents flash_attn_varlen_func",
    own_sizes=True,
    documents=True,
    why_not="kernels.baselines.flash_attention:why_not",
    dtypes=("bf16", "fp16"),
    autotunes=False,
    licence="BSD-3-Clause",
)

_cached = partial(
    _attention,
    modes=("fw", "fwbw", "bw", "step"),
    settings=(
        "causal, heads of 128, default scale and tiles; of documents flash_attn_varlen_func; a step is "
        "flash_attn_with_kvcache, its token appended"
    ),
)

BASELINES = (
    _cached(
        name="flash_attn.v2",
        distribution="flash-attn",
        # MI200 and MI300 by composable_kernel: Dao-AILab/flash-attention, README, section AMD ROCm Support.
        nvidia=False,
        tested="2.8.3",
        module="flash_attn.flash_attn_interface",
        extension="flash_attn_2_cuda",
        install="pip install flash-attn==2.8.3 --no-build-isolation",
        known_bad=(
            KnownBad(
                reason="FlashAttention-2 is written for Ampere and later",
                source="Dao-AILab/flash-attention, README, section FlashAttention-2, NVIDIA CUDA support",
                architectures=("7.0",),
            ),
        ),
    ),
    _cached(
        name="flash_attn.v3",
        distribution="flash-attn-3",
        tested="3.0.0b1",
        module="flash_attn_interface",
        install=(
            "pip install --no-build-isolation 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'"
        ),
        known_bad=(
            KnownBad(
                reason="FlashAttention-3 is written for Hopper alone: wgmma and the tensor memory accelerator of sm_90",
                source="Dao-AILab/flash-attention, README, section FlashAttention-3 beta release",
                architectures=("7.0", "8.0", "8.6", "8.9", "10.0", "10.3", "12.0", "12.1"),
            ),
        ),
    ),
    _attention(
        name="flash_attn.v4",
        distribution="flash-attn-4",
        tested="4.0.0b36",
        module="flash_attn.cute",
        install="pip install 'flash-attn-4[cu13]==4.0.0b36'",
        known_bad=(
            KnownBad(
                reason="FlashAttention-4 is written for Hopper and Blackwell",
                source="flash-attn-4 on PyPI, project description",
                architectures=("7.0", "8.0", "8.6", "8.9"),
            ),
        ),
    ),
)


def why_not(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why FlashAttention cannot run these sizes, or None."""
    if sizes["head_dim_qk"] != sizes["head_dim_v"]:
        return f"head_dim_qk must equal head_dim_v, got {sizes['head_dim_qk']} and {sizes['head_dim_v']}"
    if sizes["head_dim_v"] > MAX_HEAD_DIM or sizes["head_dim_v"] % 8:
        return f"head_dim_v must be a multiple of 8 up to {MAX_HEAD_DIM}, got {sizes['head_dim_v']}"
    return None


def build(case: Case, inputs: Mapping[str, Tensor], cache: tuple[Tensor, ...] = ()) -> Runnable:
    """Prepare the release's flash_attn_func, or of documents flash_attn_varlen_func, causal; some releases of 3 and 4
    return (out, logsumexp).

    A step is flash_attn_with_kvcache. Release 4 has none, and on Hopper it does not split the keys among programs.
    """
    from ._tensors import on_documents, on_leaves

    (module,) = (baseline.module for baseline in BASELINES if baseline.name == case.impl)
    package = importlib.import_module(str(module))
    if case.documents is not None:
        call = partial(package.flash_attn_varlen_func, causal=True)
        return on_leaves(on_documents(call, case, inputs, VARLEN), inputs)
    if not cache:
        return on_leaves(partial(package.flash_attn_func, causal=True), inputs)
    keys, values = cache
    before = keys.new_full((keys.shape[0],), keys.shape[1] - 1).int()
    kept = {"k_cache": keys, "v_cache": values, "cache_seqlens": before}
    return on_leaves(partial(package.flash_attn_with_kvcache, causal=True, **kept), inputs)
