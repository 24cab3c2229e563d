"""Sizes at which baselines of another mathematics run: equal batch, tokens and embedding dim. Data only.

Each function maps a kernel family's sizes (batch, seq_len and num_heads, head_dim_qk, head_dim_v or channels) to the
sizes its baseline would be configured with in a model of that embedding dim, which is ``num_heads * head_dim_v`` or the
channels.
"""

from __future__ import annotations

from collections.abc import Mapping

HEAD_DIM = 128
"""What FlashAttention is tuned for, and the most that lightning-attn's tiles hold; embedding 4096 is 32 heads."""

MAMBA2_HEAD_DIM, MAMBA2_STATE = 64, 128
"""Head dim and state that the Mamba2 layer has by default; embedding 4096 is 64 heads x 64."""

MAMBA_STATE = 16
"""Mamba's default state size per channel."""


def _embedding(sizes: Mapping[str, int]) -> int:
    return sizes["channels"] if "channels" in sizes else sizes["num_heads"] * sizes["head_dim_v"]


def _tokens(sizes: Mapping[str, int], **others: int) -> dict[str, int]:
    return {"batch": sizes["batch"], "seq_len": sizes["seq_len"], **others}


def _split(sizes: Mapping[str, int], head_dim: int, state: int | None = None) -> dict[str, int]:
    """Return heads of the largest power-of-two fraction of ``head_dim`` that divides the embedding."""
    embedding = _embedding(sizes)
    while embedding % head_dim:
        head_dim //= 2
    return _tokens(sizes, num_heads=embedding // head_dim, head_dim_qk=state or head_dim, head_dim_v=head_dim)


def head_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Heads of 128, query-key and value dims alike."""
    return _split(sizes, HEAD_DIM)


def mamba2_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Heads of 64 with a state of 128 (the query-key dim), one group of B and C."""
    return _split(sizes, MAMBA2_HEAD_DIM, MAMBA2_STATE)


def mamba_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """One channel per embedding dim, each with a state of 16 (the query-key dim)."""
    return _tokens(sizes, head_dim_qk=MAMBA_STATE, channels=_embedding(sizes))


def channel_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """One channel per embedding dim."""
    return _tokens(sizes, channels=_embedding(sizes))


def mlp_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The family's own sizes, or those of an MLP as in Llama at the embedding dim, all tokens in one sequence."""
    if "d_model" in sizes:
        return dict(sizes)
    d_model = _embedding(sizes)
    return {"batch": 1, "seq_len": sizes["batch"] * sizes["seq_len"], "d_model": d_model, "d_ff": 7 * d_model // 2}
