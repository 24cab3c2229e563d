"""Tile sizes of the engine's kernels: one frozen value a launch, and one predicate that says where it is valid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ..common.sizes import MIN_PROGRAMS, next_power_of_two

GATES_BLOCK_T = 256
SCAN_BLOCK_N = 1024
MERGE_BLOCK_E = 1024
"""Positions of a program of the gates of a sweep; gate tiles, or positions, of one that scans or finishes stabilisers
or denominators; elements of a state that a merging program takes."""

ANCHOR_EVERY = {"ssd": 64}
DEFAULT_ANCHOR_EVERY = 256
"""Positions between anchors of the decay gradient in the fused kernel; rounding piles up over at most this many. SSD's
gradient of A sums that rounding over all tokens, so it needs more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesConfig:
    """Launch of the recurrent kernel: time tile, state tile, warps, pipeline stages.

    ``parallel`` computes every chunk's own contribution at once and merges them, for grids too small otherwise.
    """

    block_t: int
    block_k: int
    block_v: int
    num_warps: int
    num_stages: int
    parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixConfig:
    """Launch of the parallel kernel: row tile, column tile, contraction block, output block, warps, stages."""

    block_t: int
    block_s: int
    block_x: int
    block_z: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkConfig:
    """Launch of the walking kernel: time tile, contraction block, output block, warps, pipeline stages."""

    block_t: int
    block_x: int
    block_z: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NormaliserConfig:
    """Launch of the normaliser's kernel, at the walk's time tile: contraction block, warps, pipeline stages."""

    block_k: int
    num_warps: int
    num_stages: int


Tile = TypeVar("Tile", MixConfig, WalkConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Generic[Tile]):
    """Every launch of one forward and backward pass.

    The four products either all sweep (MixConfig) or all walk (WalkConfig, with one common block_t).
    """

    states: StatesConfig
    d_states: StatesConfig
    output: Tile
    dq: Tile
    dk: Tile
    dv: Tile
    normaliser: NormaliserConfig

    @property
    def walks(self) -> bool:
        """Whether chunks are walked, not swept."""
        return isinstance(self.output, WalkConfig)

    def gate_chunk(self, chunk: int) -> int:
        """Return the stretch over which gate vectors accumulate: a chunk when sweeping, a tile when walking."""
        return self.output.block_t if self.walks else chunk


def fit_chunk(chunk_size: int, seq_len: int) -> int:
    """Return the chunk length in force: never longer than the sequence's next power of two (at least 16)."""
    return min(chunk_size, max(16, next_power_of_two(seq_len)))


def default_chunk_size(*, seq_len: int, rows: int, head_dim: int) -> int:
    """Return a chunk length that gives a walk enough programs: the whole sequence where batch and heads suffice.

    Args:
        seq_len: T.
        rows: batch * heads.
        head_dim: head dim of what is walked for (V for h and dv, K for dq and dk); a program takes 64 columns.
    """
    chunks = -(-MIN_PROGRAMS // (rows * max(1, head_dim // 64)))
    return max(256, next_power_of_two(seq_len) // next_power_of_two(chunks))


def preferred_chunk(sizes: Mapping[str, int]) -> int:
    """Return :func:`default_chunk_size` for a case's sizes (batch, seq_len, num_heads, head_dim_v)."""
    rows = sizes["batch"] * sizes["num_heads"]
    return default_chunk_size(seq_len=sizes["seq_len"], rows=rows, head_dim=sizes["head_dim_v"])


def select_config(
    *,
    scheme: str,
    capability: tuple[int, int],
    item_bytes: int,
    head_dim_qk: int,
    head_dim_v: int,
    chunk: int,
    rows: int,
) -> EngineConfig[Any]:
    """Choose the launches for an architecture and problem.

    Args:
        scheme: "walk" or "sweep", how a chunk is processed; float32 always sweeps.
        capability: compute capability of the device, such as (9, 0).
        item_bytes: bytes of one input element: 2 (bf16, fp16) or 4 (fp32).
        head_dim_qk: K.
        head_dim_v: V.
        chunk: chunk length in force, a power of two >= 16.
        rows: batch * heads; few of them leave the recurrent kernel short of programs.

    Returns:
        the launches; tiles never exceed the chunk or the padded head dims.
    """
    k_pad, v_pad = max(16, next_power_of_two(head_dim_qk)), max(16, next_power_of_two(head_dim_v))
    if item_bytes == 4:
        states = StatesConfig(block_t=32, block_k=32, block_v=32, num_warps=4, num_stages=1)
        sweep = MixConfig(block_t=32, block_s=32, block_x=32, block_z=32, num_warps=4, num_stages=1)
    elif capability >= (9, 0):
        states = StatesConfig(block_t=64, block_k=128, block_v=64, num_warps=4, num_stages=3)
        sweep = MixConfig(block_t=128, block_s=64, block_x=128, block_z=128, num_warps=8, num_stages=2)
    else:
        states = StatesConfig(block_t=64, block_k=64, block_v=64, num_warps=4, num_stages=2)
        sweep = MixConfig(block_t=64, block_s=64, block_x=64, block_z=64, num_warps=4, num_stages=2)
    if scheme == "walk" and item_bytes == 2:
        tiles = -(-k_pad // states.block_k) * -(-v_pad // states.block_v)
        states = replace(states, parallel=rows * tiles < MIN_PROGRAMS)
    states = replace(
        states,
        block_t=min(states.block_t, chunk),
        block_k=min(states.block_k, k_pad),
        block_v=min(states.block_v, v_pad),
    )

    def fit_walk(dx: int, dz: int) -> WalkConfig:
        # Before Hopper operands pass through registers: only half the tile leaves room for the state.
        block_t, block_x = (64, 128) if capability >= (9, 0) else (32, 64)
        return WalkConfig(
            block_t=min(block_t, chunk), block_x=min(block_x, dx), block_z=min(64, dz), num_warps=4, num_stages=2
        )

    def fit_sweep(dx: int, dz: int) -> MixConfig:
        block_t = min(sweep.block_t, chunk)
        return replace(
            sweep,
            block_t=block_t,
            block_s=min(sweep.block_s, block_t),
            block_x=min(sweep.block_x, dx),
            block_z=min(sweep.block_z, dz),
            num_warps=sweep.num_warps if block_t == sweep.block_t else 4,
        )

    walking = scheme == "walk" and item_bytes == 2
    fit = fit_walk if walking else fit_sweep
    dq = fit(v_pad, k_pad)
    if walking and capability >= (10, 0):
        # With a state to load, four warps would spill.
        dq = replace(dq, num_warps=8)
    return EngineConfig(
        states=states,
        d_states=states,
        output=fit(k_pad, v_pad),
        dq=dq,
        dk=fit(v_pad, k_pad),
        dv=fit(k_pad, v_pad),
        normaliser=NormaliserConfig(block_k=min(128 if capability >= (9, 0) else 64, k_pad), num_warps=4, num_stages=3),
    )
