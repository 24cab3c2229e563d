"""Lightning Attention: ours against the authors' kernels, lightning-attn, at 65,536 tokens and embedding dim 4096."""

from __future__ import annotations

from .model import Bar, Setting, Side, Subject

TOKENS = 65536
SEQ_LENS = (8192, 65536)
THEIRS = "lightning_attn.v2"
TFLA_RATIOS = {(32, 128): {"fw": 4.0, "fwbw": 5.0}, (64, 64): {"fw": 1.5, "fwbw": 2.5}}
"""(heads, head dim) -> mode -> how many times as fast the engine must be."""


def _setting(heads: int, head_dim: int, seq_len: int) -> Setting:
    engine = tuple(
        Bar(ours="tfla", theirs=THEIRS, mode=mode, ratio=ratio)
        for mode, ratio in TFLA_RATIOS[heads, head_dim].items()
    )  # fmt: skip
    same_algorithm = tuple(Bar(ours="lightning2", theirs=THEIRS, mode=mode, ratio=1.0) for mode in ("fw", "fwbw"))
    # Forward, both allocate their output and nothing else to speak of: it is training that differs.
    memory = Bar(ours="lightning2", theirs=THEIRS, mode="fwbw", ratio=1.0, quantity="memory")
    return Setting(
        label=f"{heads} heads x {head_dim}, T={seq_len}, B={TOKENS // seq_len}",
        op="lightning",
        sizes={
            "batch": TOKENS // seq_len,
            "seq_len": seq_len,
            "num_heads": heads,
            "head_dim_qk": head_dim,
            "head_dim_v": head_dim,
        },
        sides=(
            Side(impl="lightning2"),
            Side(impl="tfla", chunk_sizes=(None,) if seq_len == SEQ_LENS[0] else (None, 4096)),
            Side(impl=THEIRS),
        ),
        bars=(*same_algorithm, memory, *engine),
    )


SUBJECT = Subject(
    name="lightning",
    kernel="lightning",
    summary="lightning2 and tfla against lightning-attn: 65,536 tokens, 32 heads x 128 and 64 x 64, bf16.",
    settings=tuple(_setting(*shape, seq_len) for seq_len in SEQ_LENS for shape in TFLA_RATIOS),
)
