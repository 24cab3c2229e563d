"""Formulations of every operation, the modes and sizes they take, and which of them an implementation is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import mlstm, rglru, scalar_decay
from .executed import LIGHTNING, TILES
from .executed_mlp import GATED_MLP

MODES = ("fw", "bw", "fwbw", "step")
COUNTINGS = ("detailed", "published")

TILE = 64
"""Rows and columns of the tiles in which chunkwise kernels compute the intra-chunk square."""

ATTENTION_TILE = 128
"""Rows and columns of the tiles in which quadratic kernels (FlashAttention, Lightning-1) compute the causal square."""

SWEEP_TILES: Mapping[int, int] = MappingProxyType({2: 128, 4: 32})
"""Bytes of an input element -> rows and columns of the squares that a sweep computes on the diagonal."""

_SCALAR_DECAY = ("chunkwise", "walk", "sweep", "fused", "parallel", "recurrent")

FORMULATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(scalar_decay.GATE_MODELS, _SCALAR_DECAY),
        "lightning": (*_SCALAR_DECAY, "lightning1", "lightning2"),
        "attention": ("flash", "recurrent"),
        "gla": ("chunkwise", "fused"),
        "selective_scan": ("scan",),
        "rglru": ("fused", "chunked", "unfused", "layer", "lines", "recurrent"),
        "rglru_layer": ("layer", "unfused"),
        "linear_scan": ("scan", "chunked", "recurrent"),
        "wkv4": ("recurrent", "scan"),
        "gated_mlp": ("fused", "fused_save", "cublas_activation", "gemms_activation", "eager"),
        "projections": ("gemms",),
    }
)
"""Operation -> formulations, the first being the default.

chunkwise: states stored once per chunk, two passes over the inputs. walk: the same traffic, but within a chunk tiles of
64 are walked in order with the state on the chip, so that FLOPs are those of chunks of 64; a single chunk is one pass.
sweep: chunkwise, in the tiles of the engine that sweeps whole chunks. fused: one pass, what lies between inputs and
outputs kept on the chip. parallel: quadratic, no state. recurrent: step by step; decoding loads and stores the state at
every step. flash: quadratic, matrices kept on the chip. scan: fused over time. lightning1, lightning2: see
:mod:`.lightning`. chunked, unfused, layer, lines: see :mod:`.rglru`. fused_save, cublas_activation,
gemms_activation, eager, gemms: see :mod:`.gated_mlp`.
"""

FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"rglru": ("rglru", "linear_scan", "rglru_layer"), "wkv": ("wkv4",), "gated-mlp": ("gated_mlp",)}
)
"""Family as users name it -> operations counted under it, for families that are more than one operation's own name."""

SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys((*scalar_decay.GATE_MODELS, "attention", "gla"), ("head_dim_qk", "head_dim_v")),
        "selective_scan": ("head_dim_qk", "channels"),
        **dict.fromkeys(("rglru", "rglru_layer", "linear_scan", "wkv4"), ("channels",)),
        **dict.fromkeys(("gated_mlp", "projections"), ("d_model", "d_ff")),
    }
)
"""Operation -> sizes it needs beside batch, seq_len and, where it has heads, num_heads."""

CHUNKED = ("chunkwise", "walk", "sweep", "fused", "lightning2")
"""Formulations that take a chunk length, of operations with heads; of those without, ``chunked`` does."""

REDUCED_CHUNK = 256
"""The shortest chunk that reduce-then-scan chooses by itself, taken where a case names none."""

_PROVIDER_CHUNKS: Mapping[str, int] = MappingProxyType({"fla": 64, "mamba_ssm": 256, "lightning_attn": 64})
"""Chunk length that a package uses where its implementation has no chunk axis."""

_STATES_AS_INPUTS = ("fla",)
"""Packages whose chunkwise forward passes store states in the inputs' dtype, and in fp32 in the backward pass alone."""

_LINE_BY_LINE: Mapping[str, str] = MappingProxyType({"rglru": "lines", "rglru_layer": "unfused", "linear_scan": "scan"})
"""Operation -> the formulation of baselines that make the gates in eager torch, a kernel a line."""

FULL_SQUARE_IMPLS = ("torch", "parallel")
"""Our implementations that compute whole squares and mask them."""

_GATED_MLP: Mapping[str, str] = MappingProxyType(
    {
        "fused_pair": "fused",
        "torch": "eager",
        "torch.compile": "gemms_activation",
        "liger_kernel.silu_mul": "gemms_activation",
        "liger_kernel.silu_mul_joint": "cublas_activation",
        "xformers.swiglu": "fused_save",
    }
)
"""Implementations of gated_mlp whose names do not say their formulation."""

_ENGINE_IMPLS = ("tfla", "xl_chunk", "limit_chunk")
"""Our implementations on the Triton engine. It walks a chunk for tfla and 16-bit inputs, and sweeps it elsewhere."""

_EXECUTED_IMPLS = (*_ENGINE_IMPLS, *LIGHTNING, *GATED_MLP)
"""Our implementations whose launches are counted: :mod:`.executed` and :mod:`.executed_mlp`."""


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is ``known``."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def default_formulation(op: str, mode: str) -> str:
    """Return the formulation counted where none is named; ValueError for an unknown operation."""
    one_of("op", op, tuple(FORMULATIONS))
    return "recurrent" if mode == "step" else FORMULATIONS[op][0]


def is_chunked(op: str, formulation: str) -> bool:
    """Whether the formulation takes a chunk length."""
    return formulation == "chunked" or (formulation in CHUNKED and "head_dim_v" in SIZES.get(op, ()))


def check_formulation(op: str, formulation: str, mode: str, counting: str) -> None:
    """Raise ValueError unless the operation has the formulation, and that the mode and the counting."""
    one_of("op", op, tuple(FORMULATIONS))
    one_of("mode", mode, MODES)
    one_of("counting", counting, COUNTINGS)
    if mode == "step" and "recurrent" not in FORMULATIONS[op]:
        raise ValueError(f"mode must be fw, bw or fwbw for {op}, got 'step'")
    one_of(f"formulation of {op}", formulation, FORMULATIONS[op])
    if mode == "step" and formulation != "recurrent":
        raise ValueError(f"formulation must be recurrent for mode step, got {formulation!r}")
    modes = _recurrent_modes(op) if formulation == "recurrent" else MODES
    if mode not in modes:
        raise ValueError(f"mode must be {' or '.join(modes)} for the recurrent formulation of {op}, got {mode!r}")
    if counting == "published" and not _is_published(op, formulation, mode):
        raise ValueError(
            f"counting must be detailed for {op}, {formulation}, {mode}: no paper prints a total; got 'published'"
        )


def _recurrent_modes(op: str) -> tuple[str, ...]:
    """Return the modes of a recurrent formulation: only WKV's is trained with, and attention's is decoding alone."""
    return {"attention": ("step",), "wkv4": MODES}.get(op, ("fw", "step"))


def _is_published(op: str, formulation: str, mode: str) -> bool:
    if op == "rglru":
        return mode == "fw" and formulation in rglru.PUBLISHED
    return (
        op in mlstm.OPERATIONS and mode in ("fw", "step") and formulation in ("chunkwise", "parallel", "recurrent")
    )  # fmt: skip


def is_counted(op: str, formulation: str, mode: str) -> bool:
    """Whether a row of this operation, formulation and mode has a count."""
    if formulation != "recurrent":
        return mode != "step"
    return formulation in FORMULATIONS[op] and mode in _recurrent_modes(op)


def formulation_of(op: str, impl: str, mode: str = "fw", dtype: str = "bf16") -> str:
    """Return the formulation by which implementation ``impl`` of ``op`` is counted."""
    known = FORMULATIONS[op]
    if mode == "step":
        return "recurrent"
    if impl in _ENGINE_IMPLS and "walk" in known:
        return "walk" if impl == "tfla" and dtype in ("fp16", "bf16") else "sweep"
    if op == "lightning" and impl.startswith("lightning_attn"):
        return "lightning2"
    if op in _LINE_BY_LINE and impl.startswith(("fla.", "torch.eager")):
        return _LINE_BY_LINE[op]
    if op == "gated_mlp" and (impl, mode) == ("fused_save", "fw"):
        return "fused"
    if op == "gated_mlp" and impl in _GATED_MLP:
        return _GATED_MLP[impl]
    if op == "wkv4" and "associative" in impl:
        return "scan"
    variant = impl.rpartition(".")[2]
    if "fused_recurrent" in variant and "recurrent" in known:
        return "recurrent"
    # The longest name first: unfused has fused in it.
    return next((name for name in sorted(known, key=len, reverse=True) if name in variant), known[0])


def chunk_of(op: str, impl: str, formulation: str, chunk_size: int | None) -> int | None:
    """Return the chunk length to count: the case's, else that of the implementation's package."""
    if not is_chunked(op, formulation):
        return None
    own = REDUCED_CHUNK if formulation == "chunked" else TILE
    return chunk_size or _PROVIDER_CHUNKS.get(impl.partition(".")[0], own)


def stores_states_as_inputs(impl: str, formulation: str) -> bool:
    """Whether the forward pass of an outside implementation stores its chunks' states in the inputs' dtype."""
    return formulation == "chunkwise" and impl.partition(".")[0] in _STATES_AS_INPUTS


def kernels_of(op: str, formulation: str, impl: str | None = None) -> str | None:
    """Return the name under which launches of ``formulation`` are counted, None where those of ``impl`` are not.

    They are our own kernels': an outside package's run in other tiles, whatever its formulation. Without an
    implementation it is ours of the formulation.
    """
    if impl is not None and impl not in _EXECUTED_IMPLS:
        return None
    if op == "gated_mlp":
        ours = impl if impl == "fused_pair" else formulation
        return ours if ours in GATED_MLP else None
    return formulation if formulation in TILES else None


def causal_tile(op: str, formulation: str, dtype_bytes: int) -> int:
    """Return the rows and columns of the tiles to which a formulation rounds the causal square up."""
    if formulation == "sweep":
        return SWEEP_TILES.get(dtype_bytes, TILE)
    return ATTENTION_TILE if formulation in ("flash", "lightning1") else TILE


def tile_rounded_causal_factor(length: int, tile: int = TILE) -> float:
    """Return the share of a causal ``length`` x ``length`` square that tiles on or below the diagonal cover.

    With n = ceil(length / tile) tiles a side, n (n + 1) / 2 of n^2 are computed: (n + 1) / (2n), which is 1 for a chunk
    of one tile and tends to 0.5.
    """
    n = -(-length // tile)
    return (n + 1) / (2 * n)
