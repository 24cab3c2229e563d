"""FLOPs and bytes of every operation, per formulation and part by part. Imports neither torch nor numpy.

:func:`count` answers for any sizes; :func:`count_case` is what a row of the results stores. Conventions, from the TFLA
paper's appendix F: a multiply-accumulate is 2 FLOPs, one evaluation of exp, log, sigmoid, max, mask or abs is F_x (1
unless told otherwise), and recomputation inside a kernel is not counted (it is kept apart, see :class:`Count`). The
formulas lie in :mod:`.mlstm` (published) and :mod:`.scalar_decay`, :mod:`.lightning`, :mod:`.baselines`, :mod:`.rglru`,
:mod:`.wkv` and :mod:`.gated_mlp` (derived); :mod:`.problem` adds them up, :mod:`.formulations` says what there is, and
:mod:`.executed` and :mod:`.executed_mlp` count what our Triton kernels really run, recomputation included.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from . import baselines, mlstm, scalar_decay
from .executed import LIGHTNING, TILES, Run, Tiles, executed
from .executed_mlp import Projections, executed_mlp
from .formulations import (
    ATTENTION_TILE,
    CHUNKED,
    FORMULATIONS,
    MODES,
    TILE,
    causal_tile,
    check_formulation,
    chunk_of,
    declared,
    default_formulation,
    formulation_of,
    has_heads,
    is_chunked,
    is_counted,
    kernels_of,
    one_of,
    sizes_of,
    tile_rounded_causal_factor,
)
from .model import DTYPE_BYTES, Count, Factors, Head, Layer, Tally, Widths, Work
from .problem import Problem

__all__ = [
    "ATTENTION_TILE",
    "CHUNKED",
    "FORMULATIONS",
    "MODES",
    "TILE",
    "TILES",
    "Count",
    "Factors",
    "Head",
    "Layer",
    "Tally",
    "Tiles",
    "Widths",
    "Work",
    "baselines",
    "count",
    "count_case",
    "default_formulation",
    "formulation_of",
    "is_chunked",
    "mlstm",
    "scalar_decay",
    "tile_rounded_causal_factor",
]


def count(
    op: str,
    *,
    seq_len: int,
    formulation: str | None = None,
    mode: str = "fw",
    batch: int = 1,
    num_heads: int = 1,
    head_dim_qk: int | None = None,
    head_dim_v: int | None = None,
    channels: int | None = None,
    d_model: int | None = None,
    d_ff: int | None = None,
    chunk_size: int | None = None,
    num_groups: int | None = None,
    dtype: str = "bf16",
    gate_dtype: str | None = None,
    state_dtype: str = "fp32",
    causal: bool = True,
    causal_factor: float | None = None,
    counting: str = "detailed",
    factors: Factors | None = None,
    tiles: Tiles | None = None,
) -> Count:
    """Count the FLOPs and bytes of one problem: all heads, the whole batch and every chunk.

    Args:
        op: an operation of :data:`FORMULATIONS`.
        seq_len: T; tokens of a gated MLP. A last chunk shorter than ``chunk_size`` is counted as such.
        formulation: one of the operation's; None means its first (recurrent for mode step).
        mode: fw, bw, fwbw, or step (one decoding step; attention over ``seq_len`` cached tokens).
        head_dim_qk, head_dim_v: K and V. selective_scan takes ``channels`` and, as ``head_dim_qk``, its state size.
        channels: of operations without heads. d_model, d_ff: of a gated MLP.
        chunk_size: L, required by the formulations of :data:`CHUNKED` of operations with heads, and by ``chunked``.
        num_groups: heads sharing q and k (Mamba-2's B and C) form this many groups; None means 1 for mamba2_ssd and one
            group a head elsewhere.
        dtype: of q, k, v and the output; ``gate_dtype`` (None: the same) of gates; ``state_dtype`` of states.
        causal: False for attention of every query to every key.
        causal_factor: share of the causal square that is computed, in [0.5, 1]; None: rounded up to whole tiles.
        counting: detailed (every operation's own parts), or published (what a paper prints, its slips included, with
            all factors 1: the TFLA paper's mLSTM forward, the RG-LRU page's bytes).
        factors: cost of elementary functions; None means 1 each.
        tiles: tile sizes of the executed counts (formulations of :data:`TILES`); None: those of sm_90.

    Returns:
        the count, part by part.

    Raises:
        ValueError: an unknown name, a size that is missing or not positive, ``chunk_size`` > ``seq_len``, a causal
            factor outside [0.5, 1], a formulation or mode that the operation does not have, or a published count where
            no paper prints one.
    """
    if chunk_size is not None and isinstance(chunk_size, int) and chunk_size > seq_len >= 1:
        raise ValueError(f"chunk_size must be <= seq_len = {seq_len}, got {chunk_size}")
    formulation = formulation or default_formulation(op, mode)
    return _count(
        op,
        formulation=formulation,
        mode=mode,
        sizes={
            "seq_len": seq_len,
            "batch": batch,
            "num_heads": num_heads,
            "head_dim_qk": head_dim_qk,
            "head_dim_v": head_dim_v,
            "channels": channels,
            "d_model": d_model,
            "d_ff": d_ff,
            "chunk_size": chunk_size,
            "num_groups": num_groups,
        },
        dtypes=(dtype, gate_dtype or dtype, state_dtype),
        causal=causal,
        causal_factor=causal_factor,
        counting=counting,
        factors=factors,
        kernels=kernels_of(op, formulation),
        tiles=tiles,
    )


def count_case(
    op: str,
    impl: str,
    mode: str,
    dtype: str,
    state_dtype: str | None,
    sizes: Mapping[str, int],
    causal_factor: float | None = None,
) -> Count | None:
    """Return the count that a row of the results stores, or None for an operation that is not counted.

    Detailed, every factor 1, at the tile-rounded causal factor (1 where the implementation computes whole squares and
    masks them). Gates are counted at 4 bytes (8 beside fp64), as the suite's inputs hold them. States without a dtype
    of the case are as wide, but in forward passes known to store them in the inputs' dtype.

    Args:
        op, impl, mode, dtype, state_dtype: of the case.
        sizes: the case's size columns. ``chunk_size`` may exceed ``seq_len`` (one ragged chunk); where an
            implementation has no chunk axis its package's own chunk length is taken.
        causal_factor: overrides the rounded one.

    Raises:
        ValueError: bad sizes, as :func:`count`.
    """
    if op not in FORMULATIONS:
        return None
    formulation = formulation_of(op, impl, mode, dtype)
    if not is_counted(op, formulation, mode):
        return None
    known = declared(op, impl)
    if causal_factor is None and known.full_square:
        causal_factor = 1.0
    wide = "fp64" if dtype == "fp64" else "fp32"
    return _count(
        op,
        formulation=formulation,
        mode=mode,
        sizes={
            **sizes,
            "batch": sizes.get("batch") or 1,
            "num_heads": sizes.get("num_heads") or 1,
            "chunk_size": chunk_of(op, impl, formulation, sizes.get("chunk_size")),
        },
        dtypes=(dtype, wide, state_dtype or wide),
        forward_state=dtype if state_dtype is None and known.states_as_inputs else None,
        causal_factor=causal_factor,
        kernels=kernels_of(op, formulation, impl),
    )


def _count(
    op: str,
    *,
    formulation: str,
    mode: str,
    sizes: Mapping[str, int | None],
    dtypes: tuple[str, str, str],
    causal_factor: float | None,
    causal: bool = True,
    counting: str = "detailed",
    factors: Factors | None = None,
    forward_state: str | None = None,
    kernels: str | None = None,
    tiles: Tiles | None = None,
) -> Count:
    """As :func:`count`, but a chunk may be longer than the sequence: it is then one ragged chunk.

    ``forward_state`` is the dtype of the states that the forward pass stores, where it is not that of the backward
    pass. ``kernels`` are those whose launches are counted too, as :func:`.formulations.kernels_of` names them.
    """
    check_formulation(op, formulation, mode, counting)
    if counting == "published" and factors not in (None, Factors()):
        raise ValueError("factors must be 1 for the published counting, which prints simplified totals")
    if tiles is not None and formulation not in TILES:
        raise ValueError(f"tiles must be left out for the formulation {formulation}, got {tiles}")
    size = _checked_sizes(op, formulation, sizes)
    for name, named in zip(("dtype", "gate_dtype", "state_dtype"), dtypes, strict=True):
        one_of(name, named, tuple(DTYPE_BYTES))
    widths = Widths(**{name: DTYPE_BYTES[d] for name, d in zip(("qkv", "gate", "state"), dtypes, strict=True)})
    factor = _causal_factor(op, formulation, size, widths, causal=causal, causal_factor=causal_factor)
    groups = size["num_groups"] or (1 if op == "mamba2_ssd" else size["num_heads"])
    qk_share = 1 if groups == size["num_heads"] else groups / size["num_heads"]
    problem = Problem(
        op=op,
        formulation=formulation,
        published=counting == "published",
        **{name: value for name, value in size.items() if name not in ("chunk_size", "num_groups")},
        chunk_size=size["chunk_size"] or size["seq_len"],
        qk_share=qk_share,
        causal=1.0 if factor is None else factor,
        f=factors or Factors(),
        widths=widths,
    )
    forward = problem
    if forward_state is not None:
        forward = dataclasses.replace(problem, widths=dataclasses.replace(widths, state=DTYPE_BYTES[forward_state]))
    passes = {"fw": ("forward",), "step": ("step",), "bw": ("backward",), "fwbw": ("forward", "backward")}[mode]
    tally, compulsory = Tally(), 0
    for name in passes:
        one, least = (forward if name == "forward" else problem).passed(name)
        tally += one.prefixed(f"{name}: ") if len(passes) > 1 else one
        compulsory += least
    return Count(
        op=op,
        formulation=formulation,
        mode=mode,
        counting=counting,
        flops=float(tally.flops),
        tensor_flops=float(tally.matrix_flops),
        bytes=float(tally.bytes),
        compulsory_bytes=float(compulsory),
        recomputed_flops=float(sum(w.flops for w in tally.recomputed_work.values())),
        recomputed_tensor_flops=float(sum(w.matrix for w in tally.recomputed_work.values())),
        recomputed_bytes=float(sum(tally.recomputed_traffic.values())),
        causal_factor=factor,
        parts=MappingProxyType({name: float(work.flops) for name, work in tally.work.items()}),
        byte_parts=MappingProxyType({name: float(value) for name, value in tally.traffic.items()}),
        **_executed(problem, passes, dtypes[0], kernels, tiles),
    )


def _checked_sizes(op: str, formulation: str, sizes: Mapping[str, int | None]) -> dict[str, int]:
    """Return every size, 0 for one that does not apply; ValueError for one that is missing or not positive."""
    needed = ["seq_len", "batch", "num_heads", *sizes_of(op)]
    needed += ["chunk_size"] if is_chunked(op, formulation) else []
    needed += ["num_groups"] if sizes.get("num_groups") is not None else []
    for name in needed:
        value = sizes.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    names = ("head_dim_qk", "head_dim_v", "channels", "d_model", "d_ff", "chunk_size", "num_groups")
    checked = {name: sizes.get(name) or 0 for name in needed}
    checked = dict.fromkeys(names, 0) | checked
    if checked["num_groups"] and checked["num_heads"] % checked["num_groups"]:
        raise ValueError(f"num_groups must divide num_heads = {checked['num_heads']}, got {checked['num_groups']}")
    return checked


def _causal_factor(
    op: str,
    formulation: str,
    size: Mapping[str, int],
    widths: Widths,
    *,
    causal: bool,
    causal_factor: float | None,
) -> float | None:
    """Return the share of the square that is computed, None where there is no square."""
    if causal_factor is not None and not 0.5 <= causal_factor <= 1:
        raise ValueError(f"causal_factor must be in [0.5, 1], got {causal_factor}")
    if not causal:
        if op != "attention":
            raise ValueError(f"causal must be left on for {op}, a causal operation; got off")
        if causal_factor not in (None, 1):
            raise ValueError(f"causal_factor must be 1 for attention that is not causal, got {causal_factor}")
        causal_factor = 1.0
    if not has_heads(op):
        return None
    tile = causal_tile(op, formulation, widths.qkv)
    if is_chunked(op, formulation):
        square = min(size["chunk_size"], size["seq_len"], TILE if formulation == "walk" else size["seq_len"])
    elif formulation in ("parallel", "flash", "lightning1"):
        square = size["seq_len"]
    else:
        return None
    return causal_factor or tile_rounded_causal_factor(square, tile)


def _executed(
    problem: Problem, passes: tuple[str, ...], dtype: str, kernels: str | None, tiles: Tiles | None
) -> dict[str, Any]:
    """Return the executed fields of a count: of sizes that ``kernels`` take, in a 16-bit dtype."""
    if kernels is None or dtype not in ("bf16", "fp16"):
        return {}
    if kernels in TILES:
        run = _engine_run(problem, dtype, tiles or TILES[kernels])
        if run is None:
            if tiles is not None and kernels in LIGHTNING:
                dims = f"{problem.head_dim_qk} and {problem.head_dim_v}"
                raise ValueError(
                    f"tile block_x must be at least the head dims {dims} of {kernels}, got {tiles.block_x}"
                )
            return {}
        counted = {direction: executed(run, direction) for direction in passes}
    else:
        projections = Projections(
            kernels=kernels,
            tokens=problem.batch * problem.seq_len,
            d_model=problem.d_model,
            d_ff=problem.d_ff,
            width=problem.widths.qkv,
        )
        counted = {direction: executed_mlp(projections, direction) for direction in passes}
    flops: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for direction, one in counted.items():
        prefix = f"{direction}: " if len(passes) > 1 else ""
        flops.update({prefix + name: value for name, value in one.flops.items()})
        moved.update({prefix + name: value for name, value in one.bytes.items()})
    return {
        "executed_tensor_flops": float(flops.total()),
        "executed_bytes": float(moved.total()),
        "reread_bytes": float(sum(one.rereads.total() for one in counted.values())),
        "library_tensor_flops": float(sum(one.library.total() for one in counted.values())),
        "executed_parts": MappingProxyType({name: float(value) for name, value in flops.items()}),
        "executed_byte_parts": MappingProxyType({name: float(value) for name, value in moved.items()}),
    }


def _engine_run(problem: Problem, dtype: str, tiles: Tiles) -> Run | None:
    """Return the problem as the engine or the Lightning kernels run it, None where they do not take its sizes."""
    chunk, dims = problem.chunk_size, (problem.head_dim_qk, problem.head_dim_v)
    if problem.formulation in LIGHTNING:
        if max(dims) > tiles.block_x:
            return None
    elif chunk < 16 or chunk & (chunk - 1):
        return None
    return Run(
        op=problem.op,
        formulation=problem.formulation,
        rows=problem.batch * problem.num_heads,
        length=problem.seq_len,
        d_qk=problem.head_dim_qk,
        d_v=problem.head_dim_v,
        chunk_size=chunk,
        qk_share=problem.qk_share,
        bf16=dtype == "bf16",
        widths=problem.widths,
        tiles=tiles,
    )
