"""The fused gated MLP against cuBLAS and Liger's SiLU-mul: Llama 8B, 70B and 405B over the tokens, bf16, forward."""

from __future__ import annotations

from .model import Bar, Setting, Side, Subject

MODELS = {"8B": (4096, 14336), "70B": (8192, 28672), "405B": (16384, 53248)}
"""Model -> (d_model, d_ff)."""

TOKENS = (1024, 4096, 16384, 65536)
THEIRS = ("liger_kernel.silu_mul", "liger_kernel.silu_mul_joint")
"""cuBLAS + Liger with a product for each weight, as its layer computes, and with one for both."""

EACH, MEAN = 0.98, 1.0
"""Their time / ours: at every size, and in the geometric mean of the sizes."""

MEMORY = 2.0
"""Their peak memory beyond inputs and weights / ours."""


def _setting(model: str, tokens: int) -> Setting:
    d_model, d_ff = MODELS[model]
    sizes = {"batch": 1, "seq_len": tokens, "d_model": d_model, "d_ff": d_ff}
    speed = tuple(Bar(ours="fused", theirs=theirs, mode="fw", ratio=EACH) for theirs in THEIRS)
    memory = tuple(Bar(ours="fused", theirs=theirs, mode="fw", ratio=MEMORY, quantity="memory") for theirs in THEIRS)
    return Setting(
        label=f"Llama {model} ({d_model} -> {d_ff}), {tokens} tokens",
        op="gated_mlp",
        sizes=sizes,
        sides=(
            Side(impl="fused"),
            *(Side(impl=theirs) for theirs in THEIRS),
            # What the two products take alone: no bar, for it is another result, but where the gating would be free.
            Side(impl="torch.gemms", op="projections"),
        ),
        bars=(*speed, *memory),
        modes=("fw",),
    )


SUBJECT = Subject(
    name="gated-mlp",
    kernel="gated-mlp",
    summary="gated_mlp fused against cuBLAS + Liger's SiLU-mul: Llama 8B, 70B, 405B, bf16, forward.",
    settings=tuple(_setting(model, tokens) for model in MODELS for tokens in TOKENS),
    overall=tuple(Bar(ours="fused", theirs=theirs, mode="fw", ratio=MEAN) for theirs in THEIRS),
)
