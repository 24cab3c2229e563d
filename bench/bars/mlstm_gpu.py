"""The Triton mLSTMsig against mlstm_kernels' xl_chunk_siging: 65,536 tokens, 16 heads, dqk 128, dv 256, bf16."""

from __future__ import annotations

from .model import Bar, Setting, Side, Subject

TOKENS = 65536
THEIRS = "mlstm_kernels.xl_chunk_siging"
RATIOS = {8192: {"fw": 2.5, "fwbw": 2.0}, 65536: {"fw": 2.0, "fwbw": 1.7}}
"""Sequence length -> mode -> how many times as fast; the batch makes 65,536 tokens of it."""

MEMORY_CHUNK_SIZE = 256
"""Their chunk length whose forward and backward memory ours may not exceed."""


def _setting(seq_len: int) -> Setting:
    speed = tuple(Bar(ours="tfla", theirs=THEIRS, mode=mode, ratio=ratio) for mode, ratio in RATIOS[seq_len].items())
    memory = Bar(
        ours="tfla",
        theirs=THEIRS,
        mode="fwbw",
        ratio=1.0,
        quantity="memory",
        their_chunk_size=MEMORY_CHUNK_SIZE,
    )
    return Setting(
        label=f"T={seq_len}, B={TOKENS // seq_len}",
        op="mlstm_sig",
        sizes={
            "batch": TOKENS // seq_len,
            "seq_len": seq_len,
            "num_heads": 16,
            "head_dim_qk": 128,
            "head_dim_v": 256,
        },
        sides=(Side(impl="tfla", chunk_sizes=(None, 1024)), Side(impl=THEIRS, chunk_sizes=(64, 128, 256))),
        bars=(*speed, memory),
    )


SUBJECT = Subject(
    name="gpu",
    kernel="tfla",
    summary="mLSTMsig tfla against mlstm_kernels' xl_chunk_siging: 65,536 tokens, 16 heads, dqk 128, dv 256, bf16.",
    settings=tuple(_setting(seq_len) for seq_len in RATIOS),
)
