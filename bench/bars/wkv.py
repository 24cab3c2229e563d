"""WKV: the parallel scan against this device's copy rate and fla's recurrent kernel.

Batch 8 and 4096 steps of 768 and 2048 channels, and one sequence of 256 channels over its length. Compulsory bytes: k,
v and y once. Forward is held to a share of the copy rate; forward and backward is measured beside it. fla stores the
states of all steps in the dtype of the activations, so that its gradients are those of its outputs in float32 alone.
"""

from __future__ import annotations

from .model import COPY, Bar, Setting, Side, Subject

PEER = "fla.fused_recurrent_rwkv4"
COPY_SHARE = 0.70
WIDTHS = (768, 2048)
LONGEST, TIMES_PEER = 65536, 200.0
"""One sequence of 256 channels and this many steps, and how much faster than the peer it must be."""

LENGTHS = (128, 256, 512, 1024, 4096, 16384)
"""Where it must be ahead."""


def _wide(channels: int, dtype: str) -> Setting:
    sizes = {"batch": 8, "seq_len": 4096, "channels": channels}
    return Setting(
        label=f"T=4096, B=8, C={channels}",
        op="wkv4",
        sizes=sizes,
        sides=(Side(impl="scan"), Side(impl="recurrent"), Side(impl=PEER)),
        bars=(Bar(ours="scan", theirs=COPY, mode="fw", ratio=COPY_SHARE),),
        dtype=dtype,
    )


def _long(seq_len: int, dtype: str, ratio: float) -> Setting:
    return Setting(
        label=f"T={seq_len}, B=1, C=256",
        op="wkv4",
        sizes={"batch": 1, "seq_len": seq_len, "channels": 256},
        sides=(Side(impl="scan"), Side(impl="recurrent"), Side(impl=PEER)),
        bars=tuple(Bar(ours="scan", theirs=PEER, mode=mode, ratio=ratio) for mode in ("fw", "fwbw")),
        dtype=dtype,
    )


SUBJECT = Subject(
    name="wkv",
    kernel="wkv",
    summary="WKV's parallel scan against the copy rate and fla's recurrent kernel.",
    settings=(
        *(_wide(channels, dtype) for channels in WIDTHS for dtype in ("bf16", "fp32")),
        *(_long(LONGEST, dtype, TIMES_PEER) for dtype in ("fp32", "bf16")),
        *(_long(seq_len, "fp32", 1.0) for seq_len in LENGTHS),
    ),
)
