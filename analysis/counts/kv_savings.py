"""What a fused gated MLP saves of a layer's activations, and how many tokens of key-value cache that memory holds.

An inference engine keeps the activations of one layer at a time, for the tokens of one chunk. With S tokens, model dim
D and MLP dim U a layer holds, in elements,

    plain     4 S D (queries, keys, values, output) + 3 S U (up, gate, gated) + S D (down)
    in place  3 S D (output over queries) + 2 S U (gated over up) + S D
    fused     the same with S U in place of 3 S U or 2 S U: up and gate never stand in memory

and a token's keys and values take 2 n_layers n_kv_heads head_dim elements. Source: "Towards Fused Kernels for Gated
MLP", section Inference, footnote 3 and last figure. Its ratios for U = c D, (5 + c) / (5 + 3c) and (4 + c) / (4 + 2c),
follow from the sums; its text and its footnote state different ranges for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...results.arguments import one_of

BASELINES: Mapping[str, tuple[int, int]] = {"plain": (4, 3), "in place": (3, 2)}
"""What is compared with -> tensors of S D elements in attention and of S U elements in the MLP."""

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheModel:
    """A decoder's sizes, as its configuration file gives them."""

    name: str
    d_model: int
    d_ff: int
    layers: int
    kv_heads: int
    head_dim: int


MODELS = (
    CacheModel(name="Llama 3.1 8B", d_model=4096, d_ff=14336, layers=32, kv_heads=8, head_dim=128),
    CacheModel(name="Llama 3.1 70B", d_model=8192, d_ff=28672, layers=80, kv_heads=8, head_dim=128),
    CacheModel(name="Llama 3.1 405B", d_model=16384, d_ff=53248, layers=126, kv_heads=8, head_dim=128),
    CacheModel(name="Gemma 2 27B", d_model=4608, d_ff=36864, layers=46, kv_heads=16, head_dim=128),
)
"""The models that the source names."""


class Saving(NamedTuple):
    """What a model saves against one baseline: the share of a layer's activations, and as many tokens of cache."""

    model: str
    baseline: str
    tokens: int
    saved_share: float
    extra_tokens: int


def savings(model: CacheModel, tokens: int, *, dtype: str = "bf16") -> list[Saving]:
    """Return what the fused kernel saves on a model, against each of :data:`BASELINES`.

    Args:
        tokens: S, of a chunk in chunked prefill or of a whole prompt.
        dtype: of the activations and of the cache: fp32, fp16, bf16 or fp8; ValueError for others.
    """
    one_of("dtype", dtype, DTYPE_BYTES)
    token_bytes = 2 * model.layers * model.kv_heads * model.head_dim * DTYPE_BYTES[dtype]
    width, wide = (tokens * size * DTYPE_BYTES[dtype] for size in (model.d_model, model.d_ff))
    rows = []
    for baseline, (attention, mlp) in BASELINES.items():
        before, saved = (attention + 1) * width + mlp * wide, (mlp - 1) * wide
        rows.append(Saving(model.name, baseline, tokens, saved / before, saved // token_bytes))
    return rows
