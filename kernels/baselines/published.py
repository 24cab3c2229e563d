"""Sizes of published models, by the name that ``--like`` takes, and of a problem that a command names. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...results.arguments import one_of
from ...results.documents import lengths_of, parse_documents, positions_of
from .. import FAMILIES
from . import get_operation


def _heads(num_heads: int, head_dim_qk: int, head_dim_v: int) -> dict[str, int]:
    return {"num_heads": num_heads, "head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v}


def _llama(num_heads: int, d_model: int, d_ff: int) -> dict[str, dict[str, int]]:
    return {"attention": _heads(num_heads, 128, 128), "gated_mlp": {"d_model": d_model, "d_ff": d_ff}}


MODELS: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    # xLSTM 7B (arXiv 2503.13427), the configuration of NX-AI/xLSTM-7b. Its gate is exp; TFLA proposes sig for it.
    "xlstm-7b": dict.fromkeys(("mlstm_exp", "mlstm_sig"), _heads(8, 256, 512)),
    # state-spaces/mamba2-*: twice the model dim, heads of 64, state 128 (Dao and Gu 2024, appendix D).
    "mamba2-1.3b": {"mamba2_ssd": _heads(64, 128, 64)},
    "mamba2-2.7b": {"mamba2_ssd": _heads(80, 128, 64)},
    # state-spaces/mamba-2.8b: twice the model dim, state 16.
    "mamba-2.8b": {"selective_scan": {"head_dim_qk": 16, "channels": 5120}},
    # Qwen/Qwen3-Next-80B-A3B: Gated DeltaNet in three layers of four, a head of keys for two of values.
    "qwen3-next": {"gated_delta_net": {**_heads(32, 128, 128), "num_heads_qk": 16}},
    # Kimi Linear (arXiv 2510.26692), 48B-A3B: KDA in three layers of four.
    "kimi-linear": {"kda": _heads(32, 128, 128)},
    # Yang et al., Gated Linear Attention (2023), section 5.
    "gla-1.3b": {"gla": _heads(4, 256, 512)},
    # MiniMax-Text-01 (arXiv 2501.08313): lightning attention in seven layers of eight, of which the last is softmax's.
    "minimax-01": dict.fromkeys(("lightning", "attention"), _heads(64, 128, 128)),
    # google/recurrentgemma-*, lru_width.
    "recurrentgemma-2b": {op: {"channels": 2560} for op in FAMILIES["rglru"]},
    "recurrentgemma-9b": {op: {"channels": 4096} for op in FAMILIES["rglru"]},
    # Peng et al., RWKV (2023), table 2.
    "rwkv4-169m": {"wkv4": {"channels": 768}},
    "rwkv4-1.5b": {"wkv4": {"channels": 2048}},
    "rwkv4-7b": {"wkv4": {"channels": 4096}},
    # The Llama 3 Herd of Models (2024), table 3: query heads.
    "llama3-8b": _llama(32, 4096, 14336),
    "llama3-70b": _llama(64, 8192, 28672),
    "llama3-405b": _llama(128, 16384, 53248),
}
"""Model -> operation of its blocks -> the sizes beside batch and length."""


def model_operation(like: str, kernel: str | None) -> str | None:
    """Return the operation of a model's blocks that a family has, None if it has none; without a family the first."""
    one_of("like", like, MODELS)
    return next((op for op in MODELS[like] if kernel is None or op in FAMILIES[kernel]), None)


def problem_sizes(
    op: str,
    *,
    mode: str = "fw",
    like: str | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    embedding: int | None = None,
    documents: str | None = None,
    **given: int | None,
) -> dict[str, Any]:
    """Return the sizes of the problem that an operation, a mode and what else is given stand for.

    Every command that answers about one problem takes them from here.

    Args:
        like: a model of :data:`MODELS` whose sizes are taken, in place of ``embedding`` and ``given``.
        batch: 8 if it is left out.
        seq_len: the length, 8192 if it is left out; of a decoding step, whose own is 1, the context of an operation
            that reads one; of documents all positions, if it is left out those of given lengths.
        documents: packed into a batch of 1, as :func:`...results.documents.parse_documents` takes them.
        embedding, given: as :meth:`..common.spec.Operation.sizes_at` takes them.

    Raises:
        ValueError: an unknown model or one without the operation, sizes that contradict one another or the model.
    """
    operation = get_operation(op)
    if like is None:
        own = operation.sizes_at(embedding, **given)
    else:
        one_of("like", like, [name for name, ops in MODELS.items() if op in ops], f" for {op}")
        own = dict(MODELS[like][op])
        for name, size in {"embedding": embedding, **given}.items():
            if size is not None:
                name = "head_dim" if name == "head_dim_v" else name
                raise ValueError(f"{name} must be left out beside --like {like}, got {size}")
    if documents is not None:
        if mode == "step" or "d_model" in own or batch not in (None, 1):
            others = "mode step, an operation that mixes no tokens and a batch other than 1"
            raise ValueError(f"documents must be left out beside {others}, got {documents}")
        documents = parse_documents(documents)
        batch, seq_len = 1, seq_len or positions_of(documents)
    batch, seq_len = batch or 8, seq_len or 8192
    if documents is not None:
        lengths_of(documents, seq_len)
        return {"batch": batch, "seq_len": seq_len, **own, "documents": documents}
    if mode != "step":
        return {"batch": batch, "seq_len": seq_len, **own}
    return {"batch": batch, "seq_len": 1, **({"context": seq_len} if operation.cache else {}), **own}
