"""RG-LRU: the fused kernel against this device's copy rate, the unfused operation and FlashAttention-2, bf16.

Batch 8 and 1024 channels over the sequence length, as in the source's figures, and one sequence of 65,536 steps and
2560 channels, which channels alone cannot spread over a GPU. Compulsory bytes: x, r, i and h once, forward; with the
backward pass also x, r, i, dh, dx, dr and di. The unfused operation is eager gates and fla's recurrent scan, without
the matrix products; FlashAttention-2 has 8 heads of 128 at the same tokens. The layer with its two matrix products is
measured beside both, and torch's own ways to compute the operation, without a bar.
"""

from __future__ import annotations

from .model import COPY, Bar, Setting, Side, Subject

UNFUSED = "fla.fused_recurrent_hgrn"
ATTENTION = "torch.sdpa_flash"
COPY_SHARES = {2048: {"fw": 0.70, "fwbw": 0.65}, 8192: {"fw": 0.85, "fwbw": 0.75}, 32768: {"fw": 0.85, "fwbw": 0.75}}
"""Sequence length -> mode -> share of the copy rate, at batch 8 and 1024 channels."""

LONG = {"batch": 1, "seq_len": 65536, "channels": 2560}
LONG_SHARE = 0.70
TORCH_STEPS = 2048
"""Steps at which the loop over time in eager torch, and what torch.compile takes to compile, are worth the wait."""


def _copy_bars(shares: dict[str, float]) -> tuple[Bar, ...]:
    return tuple(Bar(ours="fused", theirs=COPY, mode=mode, ratio=share) for mode, share in shares.items())


def _attention(sizes: dict[str, int]) -> Side:
    heads = {"num_heads": sizes["channels"] // 128, "head_dim_qk": 128, "head_dim_v": 128}
    return Side(impl=ATTENTION, op="attention", sizes={"batch": sizes["batch"], "seq_len": sizes["seq_len"], **heads})


def _operation(seq_len: int) -> Setting:
    sizes = {"batch": 8, "seq_len": seq_len, "channels": 1024}
    ahead = tuple(
        Bar(ours="fused", theirs=theirs, mode=mode, ratio=ratio)
        for theirs, ratio in ((UNFUSED, 20.0), (ATTENTION, 1.0))
        for mode in ("fw", "fwbw")
    )
    others = (Side(impl=name) for name in (UNFUSED, "fla.chunk_hgrn", "chunked"))
    return Setting(
        label=f"operation, L={seq_len}, B=8, R=1024",
        op="rglru",
        sizes=sizes,
        sides=(Side(impl="fused"), *others, _attention(sizes)),
        bars=(*_copy_bars(COPY_SHARES[seq_len]), *ahead),
    )


def _layer(seq_len: int) -> Setting:
    sizes = {"batch": 8, "seq_len": seq_len, "channels": 1024}
    return Setting(
        label=f"layer, L={seq_len}, B=8, R=1024",
        op="rglru_layer",
        sizes=sizes,
        sides=(Side(impl="fused"), Side(impl=UNFUSED), _attention(sizes)),
        bars=(),
    )


SUBJECT = Subject(
    name="rglru",
    kernel="rglru",
    summary="The fused RG-LRU against the copy rate, the unfused operation and FlashAttention-2.",
    settings=(
        *(_operation(seq_len) for seq_len in COPY_SHARES),
        Setting(
            label="operation, L=65536, B=1, R=2560",
            op="rglru",
            sizes=LONG,
            sides=(Side(impl="fused"), Side(impl="chunked")),
            bars=_copy_bars({"fw": LONG_SHARE, "fwbw": LONG_SHARE}),
        ),
        *(_layer(seq_len) for seq_len in COPY_SHARES),
        Setting(
            label=f"torch, L={TORCH_STEPS}, B=8, R=1024",
            op="rglru",
            sizes={"batch": 8, "seq_len": TORCH_STEPS, "channels": 1024},
            sides=tuple(Side(impl=name) for name in ("fused", "torch.eager", "torch.compile")),
            bars=(),
        ),
    ),
)
