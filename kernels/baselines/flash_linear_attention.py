"""fla (flash-linear-attention): GLA, simple GLA, Retention, Lightning Attention and HGRN's scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, KnownBad, Runnable
from .torch_channels import LINE_BY_LINE

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_SIZE = 64

GATED_BACKWARD = KnownBad(
    reason="fla refuses the gated backward on Hopper with these Triton versions, which compile it to wrong gradients",
    source="fla-org/flash-linear-attention issue 640; the check is in fla/ops/common/chunk_o.py, chunk_bwd_dqkwg",
    versions={"triton": ">=3.4,<3.7.1"},
    architectures=("9.0",),
    modes=("fwbw", "bw"),
)

_fla = partial(
    Baseline,
    provider="fla",
    distribution="fla-core",
    tested="0.6.0",
    kernels=("tfla",),
    dtypes=("bf16", "fp16"),
    chunk_sizes=(CHUNK_SIZE,),
    formulation="chunkwise",
    states_as_inputs=True,
    licence="MIT",
)

BASELINES = (
    _fla(
        name="fla.chunk_simple_gla",
        op="simple_gla",
        build="kernels.baselines.flash_linear_attention:build_simple_gla",
        known_bad=(GATED_BACKWARD,),
        settings="chunk_simple_gla, log decay [B, T, H] in float32, chunk 64 (its default)",
    ),
    _fla(
        name="fla.chunk_retention",
        op="retention",
        build="kernels.baselines.flash_linear_attention:build_retention",
        settings=(
            "the body of chunk_retention: chunk_simple_gla with one log decay per head, g_gamma = -slope, so that the "
            "decays are the operation's own; chunk 64"
        ),
    ),
    _fla(
        name="fla.chunk_gla",
        op="gla",
        build="kernels.baselines.flash_linear_attention:build_gla",
        settings="chunk_gla, log decay [B, T, H, K] in the activations' dtype as in its layer; chunk 64 (fixed)",
    ),
    _fla(
        name="fla.fused_chunk_gla",
        op="gla",
        build="kernels.baselines.flash_linear_attention:build_fused_gla",
        chunk_sizes=(),
        formulation="fused",
        states_as_inputs=False,
        own_chunk=CHUNK_SIZE,
        tested="0.4.0",
        known_bad=(
            KnownBad(
                reason="fused_chunk_gla is a stub that raises NotImplementedError and points to chunk_gla",
                source="fla-core 0.4.1, fla/ops/gla/fused_chunk.py",
                versions={"fla-core": ">=0.4.1"},
            ),
            KnownBad(
                reason="fused_chunk_gla runs kernels written for [B, H, T, D] on [B, T, H, D] tensors: wrong results",
                source="fla-core 0.3.2 and 0.4.0, fla/ops/gla/fused_chunk.py: FusedChunkGLAFunction against its caller",
                versions={"fla-core": "<0.4.1"},
            ),
        ),
        settings="fused_chunk_gla as documented; no release that takes [B, T, H, D] tensors computes it",
    ),
    _fla(
        name="fla.chunk_lightning_attn",
        op="lightning",
        kernels=("tfla", "lightning"),
        build="kernels.baselines.flash_linear_attention:build_lightning",
        plan="kernels.baselines.plans:lightning_sizes",
        settings=(
            "the body of chunk_lightning_attn: chunk_simple_gla with one log decay per head, g_gamma = -slope, and "
            "scale 1; chunk 64"
        ),
    ),
    *(
        _fla(
            name=f"fla.{name}",
            op=op,
            formulation=formulation,
            states_as_inputs=False,
            kernels=("rglru",),
            build=f"kernels.baselines.flash_linear_attention:build_{name}",
            plan="kernels.baselines.plans:channel_sizes",
            dtypes=("bf16", "fp16", "fp32"),
            chunk_sizes=(),
            settings=(
                f"{name} on float32 log decays"
                + (" (their logarithm taken beforehand)" if op == "linear_scan" else "; the gates in eager torch")
            ),
        )
        for name in ("fused_recurrent_hgrn", "chunk_hgrn")
        for op, formulation in LINE_BY_LINE.items()
    ),
    _fla(
        name="fla.fused_recurrent_rwkv4",
        op="wkv4",
        formulation="recurrent",
        states_as_inputs=False,
        kernels=("wkv",),
        build="kernels.baselines.flash_linear_attention:build_fused_recurrent_rwkv4",
        plan="kernels.baselines.plans:channel_sizes",
        dtypes=("fp32", "bf16", "fp16"),
        chunk_sizes=(),
        settings=(
            "fused_recurrent_rwkv4 on w as log rates (their logarithm taken beforehand) and an empty state, num, den "
            "and max of every step stored in the activations' dtype, as it does"
        ),
    ),
)


def build_simple_gla(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare chunk_simple_gla with the gate's gradient."""
    from fla.ops.simple_gla import chunk_simple_gla

    return _build(inputs, ("q", "k", "v", "g"), partial(chunk_simple_gla, chunk_size=case.chunk_size or CHUNK_SIZE))


def build_retention(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare Retention's fixed decays; the slopes get no gradient."""
    return _build_fixed_decay(case, inputs, scale=None)


def build_lightning(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare Lightning Attention's fixed decays without a scale; the slopes get no gradient."""
    return _build_fixed_decay(case, inputs, scale=1.0)


def build_gla(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare chunk_gla."""
    from fla.ops.gla import chunk_gla

    return _build(inputs, ("q", "k", "v", "g"), chunk_gla)


def build_fused_gla(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare fused_chunk_gla."""
    from fla.ops.gla import fused_chunk_gla

    return _build(inputs, ("q", "k", "v", "g"), fused_chunk_gla)


def build_fused_recurrent_hgrn(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare HGRN's scan, one program a sequence and block of channels, behind the operation's gates."""
    from fla.ops.hgrn import fused_recurrent_hgrn

    return _build_scan(case, inputs, fused_recurrent_hgrn)


def build_chunk_hgrn(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare HGRN's scan over chunks of 128 behind the operation's gates."""
    from fla.ops.hgrn import chunk_hgrn

    return _build_scan(case, inputs, chunk_hgrn)


def _build_scan(
    case: Case, inputs: Mapping[str, Tensor], scan: Callable[..., tuple[Tensor, Tensor | None]]
) -> Runnable:
    from ._tensors import as_leaf
    from .torch_channels import LEAVES, elements

    if case.op != "linear_scan":
        leaves = {name: as_leaf(inputs[name]) for name in LEAVES[case.op]}

        def gated() -> Tensor:
            log_a, b = elements(case.op, leaves)
            return scan(b, log_a)[0]

        return Runnable(forward=gated, leaves=leaves)

    decay = inputs["a"].detach().float()
    leaves = {"x": as_leaf(inputs["x"]), "a": as_leaf(decay.log())}

    def to_canonical(name: str, tensor: Tensor) -> Tensor:
        # Its gradient is that of log a.
        return (tensor / decay).to(inputs["a"].dtype) if name == "a" else tensor

    return Runnable(forward=lambda: scan(leaves["x"], leaves["a"])[0], leaves=leaves, to_canonical=to_canonical)


def build_fused_recurrent_rwkv4(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare RWKV-4's WKV, one program a sequence and block of channels; w and its gradient are those of log w."""
    from fla.ops.rwkv4 import fused_recurrent_rwkv4

    from ._tensors import as_leaf

    k, rate = inputs["k"], inputs["w"].detach()
    leaves = {"k": as_leaf(k), "v": as_leaf(inputs["v"]), "w": as_leaf(rate.log()), "u": as_leaf(inputs["u"])}
    state = k.new_zeros(k.shape[0], 3, 1, k.shape[2], dtype=rate.dtype)
    state[:, 2] = -1e38

    def forward() -> Tensor:
        return fused_recurrent_rwkv4(leaves["w"], leaves["u"], leaves["k"], leaves["v"], state)[0]

    def to_canonical(name: str, tensor: Tensor) -> Tensor:
        return tensor / rate if name == "w" else tensor

    return Runnable(forward=forward, leaves=leaves, to_canonical=to_canonical)


def _build_fixed_decay(case: Case, inputs: Mapping[str, Tensor], scale: float | None) -> Runnable:
    from fla.ops.simple_gla import chunk_simple_gla

    log_decay = -inputs["slope"].detach().float()
    chunk_size = case.chunk_size or CHUNK_SIZE
    return _build(
        inputs, ("q", "k", "v"), partial(chunk_simple_gla, g_gamma=log_decay, scale=scale, chunk_size=chunk_size)
    )


def _build(
    inputs: Mapping[str, Tensor], names: tuple[str, ...], call: Callable[..., tuple[Tensor, Tensor | None]]
) -> Runnable:
    from ._tensors import as_leaf

    leaves = {name: as_leaf(inputs[name]) for name in names}

    def forward() -> Tensor:
        return call(**leaves)[0]

    return Runnable(forward=forward, leaves=leaves)
