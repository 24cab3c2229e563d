"""Formulations of every operation, the modes and sizes they take, and which of them an implementation is."""

from __future__ import annotations

from collections.abc import Mapping

from ...kernels import FAMILIES
from ...kernels.baselines import get_implementation, get_operation
from ...kernels.baselines.operations import OPERATIONS
from ...kernels.baselines.spec import Baseline
from ...kernels.common.spec import Counted, Implementation
from ...results.arguments import one_of
from . import mlstm, rglru
from .executed import GATED_MLP

MODES = ("fw", "bw", "fwbw", "step")

TILE = 64
"""Rows and columns of the tiles in which chunkwise kernels compute the intra-chunk square."""

ATTENTION_TILE = 128
"""Rows and columns of the tiles in which quadratic kernels (FlashAttention, Lightning-1) compute the causal square."""

_DECLARED = (*(get_operation(op) for ops in FAMILIES.values() for op in ops), *OPERATIONS.values())
FORMULATIONS: Mapping[str, tuple[str, ...]] = {op.name: op.formulations for op in _DECLARED if op.formulations}
"""Operation -> formulations, the first being the default; docs/counts.md says what each of them computes."""

TILED = ("walk", "whole_state", "sweep", "lightning1", "lightning2")
"""Formulations of the engine's and the Lightning kernels, whose launches :mod:`.executed` counts."""

CHUNKED = ("chunkwise", "walk", "whole_state", "sweep", "fused", "lightning2")
"""Formulations that take a chunk length, of operations with heads; of those without, ``chunked`` does."""

QUADRATIC = ("parallel", "flash", "lightning1")
"""Formulations over the square of a whole sequence."""

DECODING = ("attention", "gla", "selective_scan")
"""Operations whose formulation ``recurrent`` is decoding alone."""


def default_formulation(op: str, mode: str) -> str:
    """Return the formulation counted where none is named; ValueError for an unknown operation."""
    one_of("op", op, tuple(FORMULATIONS))
    return "recurrent" if mode == "step" else FORMULATIONS[op][0]


def sizes_of(op: str) -> tuple[str, ...]:
    """Return the sizes that an operation needs beside batch, seq_len and num_heads."""
    return tuple(name for name in get_operation(op).sizes if name not in ("batch", "seq_len", "num_heads"))


def has_heads(op: str) -> bool:
    """Whether the operation's tensors have heads."""
    return "head_dim_v" in get_operation(op).sizes


def is_chunked(op: str, formulation: str) -> bool:
    """Whether the formulation takes a chunk length."""
    return formulation == "chunked" or (formulation in CHUNKED and has_heads(op))


def check_formulation(op: str, formulation: str, mode: str, counting: str) -> None:
    """Raise ValueError unless the operation has the formulation, and that the mode and the counting."""
    one_of("op", op, tuple(FORMULATIONS))
    one_of("mode", mode, MODES)
    one_of("counting", counting, ("detailed", "published"))
    if mode == "step" and "recurrent" not in FORMULATIONS[op]:
        raise ValueError(f"mode must be fw, bw or fwbw for {op}, got 'step'")
    one_of(f"formulation of {op}", formulation, FORMULATIONS[op])
    if mode == "step" and formulation != "recurrent":
        raise ValueError(f"formulation must be recurrent for mode step, got {formulation!r}")
    modes = _modes_of(op, formulation)
    if mode not in modes:
        raise ValueError(f"mode must be {' or '.join(modes)} for the recurrent formulation of {op}, got {mode!r}")
    printed = {**dict.fromkeys(mlstm.OPERATIONS, mlstm.PUBLISHED), "rglru": rglru.PUBLISHED}.get(op, ())
    if counting == "published" and (formulation, mode) not in printed:
        case = f"{op}, {formulation}, {mode}"
        raise ValueError(f"counting must be detailed for {case}: no paper prints a total; got 'published'")


def _modes_of(op: str, formulation: str) -> tuple[str, ...]:
    """Return the modes of a formulation: of the recurrent ones only WKV's is trained with, some are decoding alone."""
    if formulation != "recurrent":
        return ("fw", "bw", "fwbw")
    return {"wkv4": MODES, **dict.fromkeys(DECODING, ("step",))}.get(op, ("fw", "step"))


def is_counted(op: str, formulation: str, mode: str) -> bool:
    """Whether a row of this operation, formulation and mode has a count."""
    return formulation in FORMULATIONS[op] and mode in _modes_of(op, formulation)


def declared(op: str, impl: str) -> Counted:
    """Return what implementation ``impl`` of ``op`` declares; the defaults for one that is not declared here."""
    try:
        return get_implementation(op, impl)
    except ValueError:
        return Counted()


def state_dtype_of(op: str, impl: str, asked: str) -> str | None:
    """Return the state dtype of an implementation's cases: as asked for, None where it has no such choice."""
    known = declared(op, impl)
    has_none = isinstance(known, Baseline) or (isinstance(known, Implementation) and not known.state_dtypes)
    return None if has_none else asked


def formulation_of(op: str, impl: str, mode: str = "fw", dtype: str = "bf16") -> str:
    """Return the formulation by which implementation ``impl`` of ``op`` is counted: what it declares, or the first."""
    if mode == "step":
        return "recurrent"
    return declared(op, impl).formulation_of(mode, dtype) or FORMULATIONS[op][0]


def chunk_of(op: str, impl: str, formulation: str, chunk_size: int | None) -> int | None:
    """Return the chunk length to count: the case's, else the implementation's own, or a package's recommended one."""
    if not is_chunked(op, formulation):
        return None
    known = declared(op, impl)
    recommended = known.chunk_sizes[:1] if isinstance(known, Baseline) else ()
    return chunk_size or known.own_chunk or next(iter(recommended), TILE)


def has_launches(op: str, formulation: str, impl: str | None = None) -> bool:
    """Whether the launches of a formulation are counted: those of our own kernels.

    An outside package's run in other tiles, whatever its formulation. Without ``impl`` it is ours of the formulation.
    """
    if impl is not None and not isinstance(declared(op, impl), Implementation):
        return False
    return formulation in (GATED_MLP if op == "gated_mlp" else TILED)


def tile_rounded_causal_factor(length: int, tile: int = TILE) -> float:
    """Return the share of a causal ``length`` x ``length`` square that tiles on or below the diagonal cover.

    With n = ceil(length / tile) tiles a side, n (n + 1) / 2 of n^2 are computed: (n + 1) / (2n), which is 1 for a chunk
    of one tile and tends to 0.5.
    """
    n = -(-length // tile)
    return (n + 1) / (2 * n)
