"""fla (flash-linear-attention): GLA, simple GLA, Retention, Lightning Attention and HGRN's scan."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...results.schema import Case
from .pytorch import LINE_BY_LINE
from .spec import Baseline, KnownBad, Runnable

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

CHUNK_RACE = KnownBad(
    reason="chunk_hgrn has a race: its results change from call to call",
    source=(
        "fla-core 0.6.0, fla/ops/hgrn/chunk.py: chunk_hgrn_fwd_kernel_o reads a chunk's last step, which other threads "
        "may not have stored yet; two calls on an H100 differed in 4 % of the elements (rglru, fp32, 2 x 512 steps)"
    ),
    versions={"fla-core": "==0.6.0"},
)

_fla = partial(
    Baseline,
    provider="fla",
    distribution="fla-core",
    tested="0.6.0",
    kernels=("tfla",),
    build="kernels.baselines.flash_linear_attention:build",
    dtypes=("bf16", "fp16"),
    chunk_sizes=(CHUNK_SIZE,),
    formulation="chunkwise",
    states_as_inputs=True,
    documents=True,
    licence="MIT",
)

BASELINES = (
    _fla(
        name="fla.chunk_simple_gla",
        op="simple_gla",
        known_bad=(GATED_BACKWARD,),
        settings="chunk_simple_gla, log decay [B, T, H] in float32, chunk 64 (its default)",
    ),
    _fla(
        name="fla.chunk_retention",
        op="retention",
        settings=(
            "the body of chunk_retention: chunk_simple_gla with one log decay per head, g_gamma = -slope, so that the "
            "decays are the operation's own; chunk 64"
        ),
    ),
    _fla(
        name="fla.chunk_gla",
        op="gla",
        settings="chunk_gla, log decay [B, T, H, K] in the activations' dtype as in its layer; chunk 64 (fixed)",
    ),
    _fla(
        name="fla.fused_chunk_gla",
        op="gla",
        chunk_sizes=(),
        formulation="fused",
        states_as_inputs=False,
        documents=False,
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
        own_sizes=True,
        settings=(
            "the body of chunk_lightning_attn: chunk_simple_gla with one log decay per head, g_gamma = -slope, and "
            "scale 1; chunk 64"
        ),
    ),
    *(
        _fla(
            name="fla.fused_recurrent",
            op=op,
            kernels=kernels,
            own_sizes=op == "lightning",
            modes=("step",),
            documents=False,
            dtypes=("bf16", "fp16", "fp32"),
            chunk_sizes=(),
            settings=f"{of}, from the state in float32, the new state returned",
        )
        for op, kernels, of in (
            ("simple_gla", ("tfla",), "fused_recurrent_simple_gla"),
            ("retention", ("tfla",), "the body of fused_recurrent_retention: g_gamma = -slope"),
            ("gla", ("tfla",), "fused_recurrent_gla, log decay [B, T, H, K] in the activations' dtype"),
            (
                "lightning",
                ("tfla", "lightning"),
                "the body of fused_recurrent_lightning_attn: g_gamma = -slope, scale 1",
            ),
        )
    ),
    *(
        _fla(
            name=f"fla.{name}",
            op=op,
            formulation=formulation,
            states_as_inputs=False,
            kernels=("rglru",),
            build="kernels.baselines.flash_linear_attention:build_scan",
            dtypes=("bf16", "fp16", "fp32"),
            chunk_sizes=(),
            documents=name != "chunk_hgrn",
            known_bad=(CHUNK_RACE,) if name == "chunk_hgrn" else (),
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
        documents=False,
        kernels=("wkv",),
        build="kernels.baselines.flash_linear_attention:build_rwkv4",
        dtypes=("fp32", "bf16", "fp16"),
        chunk_sizes=(),
        settings=(
            "fused_recurrent_rwkv4 on w as log rates (their logarithm taken beforehand) and an empty state, num, den "
            "and max of every step stored in the activations' dtype, as it does"
        ),
    ),
)


def build(case: Case, inputs: Mapping[str, Tensor], state: Tensor | None = None) -> Runnable:
    """Prepare one of GLA's functions or simple GLA's, the latter with gates and their gradient (simple GLA) or with
    fixed decays (Retention, and Lightning Attention, which has no scale), whose slopes get no gradient. A step is that
    of the recurrent kernel, which all these operations share."""
    from ._tensors import on_leaves, with_bounds

    after = {"initial_state": state, "output_final_state": True}
    if case.op == "gla":
        if state is None:
            return on_leaves(with_bounds(_function("gla", case), case, inputs), inputs)
        from fla.ops.gla import fused_recurrent_gla

        return on_leaves(lambda g, **leaves: fused_recurrent_gla(gk=g, **leaves, **after), inputs)
    simple_gla = importlib.import_module("fla.ops.simple_gla")
    if state is None:
        chunked = partial(simple_gla.chunk_simple_gla, chunk_size=case.chunk_size or CHUNK_SIZE)
        call = with_bounds(chunked, case, inputs)
    else:
        call = partial(simple_gla.fused_recurrent_simple_gla, **after)
    if case.op == "simple_gla":
        return on_leaves(call, inputs)
    scale = 1.0 if case.op == "lightning" else None
    return on_leaves(partial(call, g_gamma=-inputs["slope"].detach().float(), scale=scale), inputs, "q", "k", "v")


def build_scan(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare one of HGRN's scans behind the operation's gates: step by step, or over chunks of 128."""
    from ._tensors import as_leaf, on_leaves, with_bounds
    from .pytorch import LEAVES, elements

    scan = with_bounds(_function("hgrn", case), case, inputs)
    if case.op != "linear_scan":

        def gated(**leaves: Tensor) -> tuple[Tensor, Tensor | None]:
            log_a, b = elements(case.op, leaves)
            return scan(b, log_a)

        return on_leaves(gated, inputs, *LEAVES[case.op])

    decay = inputs["a"].detach().float()
    leaves = {"x": as_leaf(inputs["x"]), "a": as_leaf(decay.log())}

    def to_canonical(name: str, tensor: Tensor) -> Tensor:
        # The scan takes log a, so this gradient is that of log a.
        return (tensor / decay).to(inputs["a"].dtype) if name == "a" else tensor

    return Runnable(forward=lambda: scan(leaves["x"], leaves["a"])[0], leaves=leaves, to_canonical=to_canonical)


def build_rwkv4(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare RWKV-4's WKV, one program a sequence and block of channels; it takes log w, and returns its gradient."""
    from ._tensors import as_leaf

    wkv = _function("rwkv4", case)
    k, rate = inputs["k"], inputs["w"].detach()
    leaves = {"k": as_leaf(k), "v": as_leaf(inputs["v"]), "w": as_leaf(rate.log()), "u": as_leaf(inputs["u"])}
    state = k.new_zeros(k.shape[0], 3, 1, k.shape[2], dtype=rate.dtype)
    state[:, 2] = -1e38

    def run(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return wkv(w, u, k, v, state)[0]

    def on(tensors: Mapping[str, Tensor]) -> Tensor:
        return run(**{**tensors, "w": tensors["w"].log()})

    def to_canonical(name: str, tensor: Tensor) -> Tensor:
        return tensor / rate if name == "w" else tensor

    return Runnable(forward=lambda: run(**leaves), leaves=leaves, to_canonical=to_canonical, on=on)


def _function(module: str, case: Case) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Import the function that the baseline is named for."""
    return getattr(importlib.import_module(f"fla.ops.{module}"), case.impl.removeprefix("fla."))
