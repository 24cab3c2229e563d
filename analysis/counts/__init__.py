"""FLOPs and bytes of every operation, per formulation and part by part. Imports neither torch nor numpy.

:func:`count` answers for any sizes; :func:`count_case` is what a row of the results stores. Conventions, from the TFLA
paper's appendix F: a multiply-accumulate is 2 FLOPs, one evaluation of exp, log, sigmoid, max, mask or abs is F_x (1
unless told otherwise), and recomputation inside a kernel is not counted (it is kept apart, see :class:`Count`). The
formulas of a chunk, sequence or step and head lie in :mod:`.mlstm` (published), :mod:`.scalar_decay` and
:mod:`.baselines` (derived); here they are added up over chunks, heads and the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from . import baselines, mlstm, scalar_decay
from .model import DTYPE_BYTES, Count, Factors, Head, Tally, Widths, Work

__all__ = [
    "ATTENTION_TILE",
    "CHUNKED",
    "FORMULATIONS",
    "MODES",
    "TILE",
    "Count",
    "Factors",
    "Head",
    "Tally",
    "Widths",
    "Work",
    "count",
    "count_case",
    "formulation_of",
    "tile_rounded_causal_factor",
]

MODES = ("fw", "bw", "fwbw", "step")
COUNTINGS = ("detailed", "published")

TILE = 64
"""Rows and columns of the tiles in which chunkwise kernels compute the intra-chunk square."""

ATTENTION_TILE = 128
"""Rows and columns of the tiles in which FlashAttention kernels compute the causal square."""

FORMULATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(scalar_decay.GATE_MODELS, ("chunkwise", "walk", "fused", "parallel", "recurrent")),
        "attention": ("flash", "recurrent"),
        "gla": ("chunkwise", "fused"),
        "selective_scan": ("scan",),
    }
)
"""Operation -> formulations, the first being the default.

chunkwise: states stored once per chunk, two passes over the inputs. walk: the same traffic, but within a chunk tiles of
64 are walked in order with the state on the chip, so that FLOPs are those of chunks of 64; a single chunk is one pass.
fused: one pass, states kept on the chip, so that only inputs and outputs move. parallel: quadratic, no state.
recurrent: step by step, state loaded and stored at every step. flash: quadratic, matrices kept on the chip. scan: fused
over time.
"""

_PROVIDER_CHUNKS: Mapping[str, int] = MappingProxyType({"fla": 64, "mamba_ssm": 256, "lightning_attn": 64})
"""Chunk length that a package uses where its implementation has no chunk axis."""

_FULL_SQUARE_IMPLS = ("torch", "parallel")
"""Our implementations that compute whole squares and mask them."""

_WALKING_IMPLS = ("tfla",)
"""Our implementations that walk a chunk tile by tile, for 16-bit inputs."""

CHUNKED = ("chunkwise", "walk", "fused")
"""Formulations that take a chunk length."""


def tile_rounded_causal_factor(length: int, tile: int = TILE) -> float:
    """Return the share of a causal ``length`` x ``length`` square that tiles on or below the diagonal cover.

    With n = ceil(length / tile) tiles a side, n (n + 1) / 2 of n^2 are computed: (n + 1) / (2n), which is 1 for a chunk
    of one tile and tends to 0.5.
    """
    n = -(-length // tile)
    return (n + 1) / (2 * n)


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
    chunk_size: int | None = None,
    num_groups: int | None = None,
    dtype: str = "bf16",
    gate_dtype: str | None = None,
    state_dtype: str = "fp32",
    causal_factor: float | None = None,
    counting: str = "detailed",
    factors: Factors | None = None,
) -> Count:
    """Count the FLOPs and bytes of one problem: all heads, the whole batch and every chunk.

    Args:
        op: an operation of :data:`FORMULATIONS`.
        seq_len: T. A last chunk shorter than ``chunk_size`` is counted as such.
        formulation: one of the operation's; None means its first (recurrent for mode step).
        mode: fw, bw, fwbw, or step (one decoding step; attention over ``seq_len`` cached tokens).
        head_dim_qk, head_dim_v: K and V. selective_scan takes ``channels`` and, as ``head_dim_qk``, its state size.
        chunk_size: L, required by the formulations of :data:`CHUNKED`.
        num_groups: heads sharing q and k (Mamba-2's B and C) form this many groups; None means 1 for mamba2_ssd and one
            group a head elsewhere.
        dtype: of q, k, v and the output; ``gate_dtype`` (None: the same) of gates; ``state_dtype`` of states.
        causal_factor: share of the causal square that is computed, in [0.5, 1]; None: rounded up to whole tiles.
        counting: detailed (every operation's own parts), or published (mLSTM forward only: what the TFLA paper prints,
            its slips included, with all factors 1).
        factors: cost of elementary functions; None means 1 each.

    Returns:
        the count, part by part.

    Raises:
        ValueError: an unknown name, a size that is missing or not positive, ``chunk_size`` > ``seq_len``, a causal
            factor outside [0.5, 1], a formulation or mode that the operation does not have, or a published count where
            no paper prints one.
    """
    if chunk_size is not None and isinstance(chunk_size, int) and chunk_size > seq_len >= 1:
        raise ValueError(f"chunk_size must be <= seq_len = {seq_len}, got {chunk_size}")
    return _count(
        op,
        seq_len=seq_len,
        formulation=formulation,
        mode=mode,
        batch=batch,
        num_heads=num_heads,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        channels=channels,
        chunk_size=chunk_size,
        num_groups=num_groups,
        dtype=dtype,
        gate_dtype=gate_dtype,
        state_dtype=state_dtype,
        causal_factor=causal_factor,
        counting=counting,
        factors=factors,
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
    masks them). Gates are counted at 4 bytes (8 beside fp64), as the suite's inputs hold them.

    Args:
        op, impl, mode, dtype, state_dtype: of the case.
        sizes: the case's size columns. ``chunk_size`` may exceed ``seq_len`` (one ragged chunk); where an
            implementation has no chunk axis its package's own chunk length is taken.
        causal_factor: overrides the rounded one.

    Raises:
        ValueError: bad sizes, as :func:`count`.
    """
    if op not in FORMULATIONS or (mode == "step" and "recurrent" not in FORMULATIONS[op]):
        return None
    formulation = formulation_of(op, impl, mode, dtype)
    if formulation == "recurrent" and mode in ("bw", "fwbw"):
        return None
    if causal_factor is None and impl in _FULL_SQUARE_IMPLS and formulation in ("chunkwise", "parallel"):
        causal_factor = 1.0
    chunk_size = None
    if formulation in CHUNKED:
        chunk_size = sizes.get("chunk_size") or _PROVIDER_CHUNKS.get(impl.partition(".")[0], TILE)
    return _count(
        op,
        seq_len=sizes["seq_len"],
        formulation=formulation,
        mode=mode,
        batch=sizes.get("batch") or 1,
        num_heads=sizes.get("num_heads") or 1,
        head_dim_qk=sizes.get("head_dim_qk"),
        head_dim_v=sizes.get("head_dim_v"),
        channels=sizes.get("channels"),
        chunk_size=chunk_size,
        dtype=dtype,
        gate_dtype="fp64" if dtype == "fp64" else "fp32",
        state_dtype=state_dtype or ("fp64" if dtype == "fp64" else "fp32"),
        causal_factor=causal_factor,
    )


def formulation_of(op: str, impl: str, mode: str = "fw", dtype: str = "bf16") -> str:
    """Return the formulation by which implementation ``impl`` of ``op`` is counted."""
    known = FORMULATIONS[op]
    if mode == "step":
        return "recurrent"
    if impl in _WALKING_IMPLS and "walk" in known and dtype in ("fp16", "bf16"):
        return "walk"
    variant = impl.rpartition(".")[2]
    for marker, formulation in (
        ("fused_recurrent", "recurrent"),
        ("recurrent", "recurrent"),
        ("fused_chunk", "fused"),
        ("parallel", "parallel"),
    ):
        if marker in variant and formulation in known:
            return formulation
    return "fused" if op == "lightning" and impl.startswith("lightning_attn") else known[0]


def _count(
    op: str,
    *,
    seq_len: int,
    formulation: str | None,
    mode: str,
    num_heads: int,
    chunk_size: int | None,
    dtype: str,
    gate_dtype: str | None,
    state_dtype: str,
    causal_factor: float | None,
    batch: int = 1,
    head_dim_qk: int | None = None,
    head_dim_v: int | None = None,
    channels: int | None = None,
    num_groups: int | None = None,
    counting: str = "detailed",
    factors: Factors | None = None,
) -> Count:
    """As :func:`count`, but a chunk may be longer than the sequence: it is then one ragged chunk."""
    _one_of("op", op, tuple(FORMULATIONS))
    _one_of("mode", mode, MODES)
    _one_of("counting", counting, COUNTINGS)
    formulation = formulation or ("recurrent" if mode == "step" else FORMULATIONS[op][0])
    _one_of(f"formulation of {op}", formulation, FORMULATIONS[op])
    if mode == "step" and formulation != "recurrent":
        raise ValueError(f"formulation must be recurrent for mode step, got {formulation!r}")
    if formulation == "recurrent" and (mode in ("bw", "fwbw") or (op == "attention" and mode != "step")):
        allowed = "step" if op == "attention" else "fw or step"
        raise ValueError(f"mode must be {allowed} for the recurrent formulation of {op}, got {mode!r}")
    if counting == "published" and (
        op not in mlstm.OPERATIONS or mode not in ("fw", "step") or formulation in ("walk", "fused")
    ):
        raise ValueError(
            f"counting must be detailed for {op}, {formulation}, {mode}: no paper prints a total; got 'published'"
        )
    if counting == "published" and factors not in (None, Factors()):
        raise ValueError("factors must be 1 for the published counting, which prints simplified totals")
    if causal_factor is not None and not 0.5 <= causal_factor <= 1:
        raise ValueError(f"causal_factor must be in [0.5, 1], got {causal_factor}")
    required = {"seq_len": seq_len, "batch": batch, "num_heads": num_heads, "head_dim_qk": head_dim_qk}
    required |= {"channels": channels} if op == "selective_scan" else {"head_dim_v": head_dim_v}
    required |= {"chunk_size": chunk_size} if formulation in CHUNKED else {}
    required |= {"num_groups": num_groups} if num_groups is not None else {}
    for name, value in required.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if num_groups is not None and num_heads % num_groups:
        raise ValueError(f"num_groups must divide num_heads = {num_heads}, got {num_groups}")
    for name, named in (("dtype", dtype), ("gate_dtype", gate_dtype or dtype), ("state_dtype", state_dtype)):
        _one_of(name, named, tuple(DTYPE_BYTES))

    widths = Widths(qkv=DTYPE_BYTES[dtype], gate=DTYPE_BYTES[gate_dtype or dtype], state=DTYPE_BYTES[state_dtype])
    groups = num_groups or (1 if op == "mamba2_ssd" else num_heads)
    if formulation in CHUNKED:
        square = min(chunk_size or 1, seq_len, TILE if formulation == "walk" else seq_len)
        factor = causal_factor or tile_rounded_causal_factor(square)
    elif formulation in ("parallel", "flash"):
        factor = causal_factor or tile_rounded_causal_factor(seq_len, ATTENTION_TILE if op == "attention" else TILE)
    else:
        factor = None
    head = Head(
        length=seq_len,
        d_qk=head_dim_qk,
        d_v=channels if op == "selective_scan" else head_dim_v,
        causal=1.0 if factor is None else factor,
        f=factors or Factors(),
        widths=widths,
        qk_share=1 if groups == num_heads else groups / num_heads,
    )
    problem = _Problem(
        op=op,
        formulation=formulation,
        chunk_size=chunk_size or seq_len,
        published=counting == "published",
        head=head,
    )
    passes = {"fw": ("forward",), "step": ("step",), "bw": ("backward",), "fwbw": ("forward", "backward")}[mode]
    tally, compulsory = Tally(), 0.0
    heads = batch if op == "selective_scan" else batch * num_heads
    for name in passes:
        one, least = problem.passed(name)
        tally += (one.prefixed(f"{name}: ") if len(passes) > 1 else one) * heads
        compulsory += least * heads
    constants = 4.0 * num_heads * (scalar_decay.GATE_MODELS[op].head_constants if op in scalar_decay.GATE_MODELS else 0)
    if constants:
        tally += Tally(traffic={"per-head constants": constants * len(passes)})
    return Count(
        op=op,
        formulation=formulation,
        mode=mode,
        counting=counting,
        flops=float(tally.flops),
        tensor_flops=float(tally.matrix_flops),
        bytes=float(tally.bytes),
        compulsory_bytes=float(compulsory + constants * len(passes)),
        recomputed_flops=float(sum(w.flops for w in tally.recomputed_work.values())),
        recomputed_tensor_flops=float(sum(w.matrix for w in tally.recomputed_work.values())),
        recomputed_bytes=float(sum(tally.recomputed_traffic.values())),
        causal_factor=factor,
        parts=MappingProxyType({name: float(work.flops) for name, work in tally.work.items()}),
        byte_parts=MappingProxyType({name: float(value) for name, value in tally.traffic.items()}),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """One head of a problem (for selective_scan: one sequence, all channels); ``head.length`` is T."""

    op: str
    formulation: str
    chunk_size: int
    published: bool
    head: Head

    def passed(self, direction: str) -> tuple[Tally, float]:
        """Return the tally of one pass (forward, backward, step) and its compulsory bytes."""
        passes = {"attention": self._attention, "gla": self._gla, "selective_scan": self._selective_scan}
        return passes.get(self.op, self._scalar_decay)(direction)

    def _chunks(self, chunk: Callable[[Head], Tally]) -> Tally:
        """Add up whole chunks and a ragged last one; the published counting has T / L chunks, whole or not."""
        of_length = functools.partial(dataclasses.replace, self.head)
        if self.published:
            return chunk(of_length(length=self.chunk_size)) * (self.head.length / self.chunk_size)
        whole, rest = divmod(self.head.length, self.chunk_size)
        tally = chunk(of_length(length=self.chunk_size)) * whole if whole else Tally()
        return tally + chunk(of_length(length=rest)) if rest else tally

    def _scalar_decay(self, direction: str) -> tuple[Tally, float]:
        op, head, backward = self.op, self.head, direction == "backward"
        paper = op in mlstm.OPERATIONS
        compulsory = scalar_decay.compulsory_backward if backward else scalar_decay.compulsory_forward
        least = float(compulsory(op, head))
        if direction == "step" or self.formulation == "recurrent":
            step = mlstm.step(op, head) if paper else scalar_decay.step(op, head)
            return (step, float(step.bytes)) if direction == "step" else (step * head.length, least)
        if self.formulation == "parallel":
            if backward:
                return scalar_decay.parallel_backward(op, head), least
            if paper:
                return mlstm.parallel(op, head, published=self.published), least
            return scalar_decay.parallel_forward(op, head), least

        def chunk(piece: Head) -> Tally:
            if backward:
                return scalar_decay.chunk_backward(op, piece)
            if paper:
                return mlstm.chunk(op, piece, published=self.published)
            return scalar_decay.chunk_forward(op, piece)

        tally = self._chunks(chunk)
        if self.formulation == "walk":
            return self._walk(chunk, tally, least), least
        return (_one_pass(tally, least) if self.formulation == "fused" else tally), least

    def _walk(self, chunk: Callable[[Head], Tally], chunks: Tally, least: float) -> Tally:
        """Return the work of tiles with the traffic of ``chunks``; a single chunk needs no states outside the chip.

        With several chunks, their first states come from a pass of their own, which the walk then repeats tile by tile:
        recomputation, so it is kept apart.
        """
        tiles = dataclasses.replace(self, chunk_size=min(TILE, self.chunk_size))._chunks(chunk)
        if self.head.length <= self.chunk_size:
            return _one_pass(tiles, least)
        made = {**tiles.recomputed_work, **tiles.work}
        repeated = {f"{name}, of chunks": work for name, work in made.items() if name in ("state", "state gradient")}
        states = Tally(recomputed_work=repeated)
        return dataclasses.replace(chunks, work=tiles.work, recomputed_work=tiles.recomputed_work) + states

    def _attention(self, direction: str) -> tuple[Tally, float]:
        if direction == "step":
            step = baselines.attention_step(self.head)
            return step, float(step.bytes)
        backward = direction == "backward"
        formula = baselines.attention_backward if backward else baselines.attention_forward
        return formula(self.head), float(baselines.attention_compulsory(self.head, backward=backward))

    def _gla(self, direction: str) -> tuple[Tally, float]:
        backward = direction == "backward"
        tally = self._chunks(baselines.gla_chunk_backward if backward else baselines.gla_chunk_forward)
        least = float(baselines.gla_compulsory(self.head, backward=backward))
        return (_one_pass(tally, least) if self.formulation == "fused" else tally), least

    def _selective_scan(self, direction: str) -> tuple[Tally, float]:
        backward = direction == "backward"
        formula = baselines.selective_scan_backward if backward else baselines.selective_scan_forward
        tally = formula(self.head)
        return tally, float(tally.bytes)


def _one_pass(tally: Tally, least: float) -> Tally:
    """Return the tally with the traffic of a kernel that keeps states on the chip: inputs and outputs once."""
    return dataclasses.replace(tally, traffic={"inputs and outputs": least}, recomputed_traffic={})


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
