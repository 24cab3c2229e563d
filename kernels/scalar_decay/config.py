"""Tile sizes of the engine's kernels: one frozen value a launch, and one predicate that says where it is valid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, TypeVar

from ..common.sizes import MIN_PROGRAMS, next_power_of_two

GATES_BLOCK_T = 256
WHOLE_STATE_BLOCK_T = 64
SCAN_BLOCK_N = 1024
MERGE_BLOCK_E = 1024
"""Positions of a program of the gates before chunk_o_kernel; of a tile of whole_state_kernel; gate tiles, or positions,
of a program that scans or finishes stabilisers or denominators; elements of a state that a merging program takes."""

ANCHOR_EVERY = {"ssd": 64}
DEFAULT_ANCHOR_EVERY = 256
"""Positions between anchors of the decay gradient in the fused kernel; rounding piles up over at most this many. SSD's
gradient of A sums that rounding over all tokens, so it needs more of them."""


ONE_CHUNK = 512
"""Longest sequence that is always one chunk, so that no pass over the chunks is launched: launching that takes the host
longer than the device takes for the few tiles, however they are split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesConfig:
    """Launch of the kernel of the states at the chunks' edges: time tile, state tile, warps, pipeline stages.

    ``parallel`` computes every chunk's own contribution at once and merges them, for grids too small otherwise.
    """

    block_t: int
    block_k: int
    block_v: int
    num_warps: int
    num_stages: int
    parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOutputsConfig:
    """Launch of chunk_o_kernel, a chunk's tiles in parallel.

    Row tile, column tile, contraction block, output block, warps, stages.
    """

    block_t: int
    block_s: int
    block_x: int
    block_z: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedChunkConfig:
    """Launch of fused_chunk_kernel, a chunk's tiles in order.

    Time tile, contraction block, output block, warps, pipeline stages.
    """

    block_t: int
    block_x: int
    block_z: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStateConfig:
    """Launch of the kernel that holds a whole state: time tile, contraction and output columns of a program, warps.

    The state [block_x, block_z] is one tile of at most 128 x 128, or two side by side.
    """

    block_t: int
    block_x: int
    block_z: int
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NormaliserConfig:
    """Launch of the normaliser's kernel, at the fused kernel's time tile: contraction block, warps, pipeline stages."""

    block_k: int
    num_warps: int
    num_stages: int


Tile = TypeVar("Tile", ChunkOutputsConfig, FusedChunkConfig | WholeStateConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Generic[Tile]):
    """Every launch of one forward and backward pass.

    The four products take either the tiles of a chunk in parallel (ChunkOutputsConfig) or in order (FusedChunkConfig,
    WholeStateConfig, with one common block_t).
    """

    states: StatesConfig
    d_states: StatesConfig
    output: Tile
    dq: Tile
    dk: Tile
    dv: Tile
    normaliser: NormaliserConfig

    @property
    def is_fused(self) -> bool:
        """Whether the tiles of a chunk are taken in order, the state on chip."""
        return isinstance(self.output, FusedChunkConfig | WholeStateConfig)

    def gate_chunk(self, chunk: int) -> int:
        """Return the stretch over which gate vectors accumulate: a tile in the fused kernel, else a chunk."""
        return self.output.block_t if self.is_fused else chunk


def fit_chunk(chunk_size: int, seq_len: int) -> int:
    """Return the chunk length in force: never longer than the sequence's next power of two (at least 16)."""
    return min(chunk_size, max(16, next_power_of_two(seq_len)))


def default_chunk_size(*, seq_len: int, rows: int, head_dim: int, scheme: str = "walk") -> int:
    """Return a chunk length that gives the fused kernel enough programs: the whole sequence where B * H suffices.

    Args:
        seq_len: T.
        rows: batch * heads.
        head_dim: head dim of the output (V for h and dv, K for dq and dk). A program of scheme "walk" takes 64 columns
            of it; one of "whole_state" 256, and then fills a multiprocessor where the other leaves room for a second.
    """
    if seq_len <= ONE_CHUNK:
        return max(256, next_power_of_two(seq_len))
    programs, wanted = rows * max(1, head_dim // 64), MIN_PROGRAMS
    if scheme == "whole_state" and head_dim > 64:
        programs, wanted = rows * -(-head_dim // 256), MIN_PROGRAMS // 2
    return max(256, next_power_of_two(seq_len) // next_power_of_two(-(-wanted // programs)))


def preferred_chunk(sizes: Mapping[str, int], scheme: str = "walk") -> int:
    """Return :func:`default_chunk_size` for a case's sizes (batch, seq_len, num_heads, head_dim_v)."""
    rows = sizes["batch"] * sizes["num_heads"]
    return default_chunk_size(seq_len=sizes["seq_len"], rows=rows, head_dim=sizes["head_dim_v"], scheme=scheme)


def preferred_whole_state_chunk(sizes: Mapping[str, int]) -> int:
    """Return :func:`preferred_chunk` of whole_state."""
    return preferred_chunk(sizes, "whole_state")


def whole_state_reason(dim_x: int, dim_z: int, chunk: int) -> str | None:
    """Return why whole_state.py does not compute a product (roles.py) with head dims DX and DZ, or None."""
    if chunk < WHOLE_STATE_BLOCK_T:
        return f"chunk_size must be at least {WHOLE_STATE_BLOCK_T} for whole_state, got {chunk}"
    if dim_x > 256:
        return f"a program of whole_state holds a state of at most 256 rows, got a head dim of {dim_x}"
    if min(dim_x, dim_z) <= 32:
        return f"tiles of whole_state are 64 wide, head dims must be above 32, got {min(dim_x, dim_z)}"
    return None


def fit_whole_state(dim_x: int, dim_z: int, *, sums: bool = False) -> WholeStateConfig:
    """Return the launch for head dims that :func:`whole_state_reason` has nothing against.

    Args:
        sums: whether rows are summed for the gates' gradients (dq, dk): a program then has one tile of the output.
    """
    block_x = max(64, next_power_of_two(dim_x))
    block_z = min(128 if block_x > 128 or sums else 256, max(64, next_power_of_two(dim_z)))
    return WholeStateConfig(
        block_t=WHOLE_STATE_BLOCK_T, block_x=block_x, block_z=block_z, num_warps=min(128, block_z) // 16
    )


def is_fused(scheme: str, item_bytes: int) -> bool:
    """Return whether the tiles of a chunk are taken in order; float32 takes them all in parallel."""
    return scheme in ("walk", "whole_state") and item_bytes == 2


@cache
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
        scheme: "walk", a chunk's tiles in order, "whole_state", the same by programs that hold whole states where these
            fit, or "sweep", all in parallel, as float32 always is.
        capability: compute capability of the device, such as (9, 0).
        item_bytes: bytes of one input element: 2 (bf16, fp16) or 4 (fp32).
        head_dim_qk: K.
        head_dim_v: V.
        chunk: chunk length in force, a power of two >= 16.
        rows: batch * heads; few of them leave the kernel of the states short of programs.

    Returns:
        the launches; tiles never exceed the chunk or the padded head dims.
    """
    k_pad, v_pad = max(16, next_power_of_two(head_dim_qk)), max(16, next_power_of_two(head_dim_v))
    if item_bytes == 4:
        states = StatesConfig(block_t=32, block_k=32, block_v=32, num_warps=4, num_stages=1)
        outputs = ChunkOutputsConfig(block_t=32, block_s=32, block_x=32, block_z=32, num_warps=4, num_stages=1)
    elif capability >= (9, 0):
        states = StatesConfig(block_t=64, block_k=128, block_v=64, num_warps=4, num_stages=3)
        outputs = ChunkOutputsConfig(block_t=128, block_s=64, block_x=128, block_z=128, num_warps=8, num_stages=2)
    else:
        states = StatesConfig(block_t=64, block_k=64, block_v=64, num_warps=4, num_stages=2)
        outputs = ChunkOutputsConfig(block_t=64, block_s=64, block_x=64, block_z=64, num_warps=4, num_stages=2)
    fused = is_fused(scheme, item_bytes)
    if fused:
        tiles = -(-k_pad // states.block_k) * -(-v_pad // states.block_v)
        states = replace(states, parallel=rows * tiles < MIN_PROGRAMS)
    states = replace(
        states,
        block_t=min(states.block_t, chunk),
        block_k=min(states.block_k, k_pad),
        block_v=min(states.block_v, v_pad),
    )

    def fit_fused(dx: int, dz: int, *, sums: bool = False) -> FusedChunkConfig | WholeStateConfig:
        if scheme == "whole_state" and whole_state_reason(dx, dz, chunk) is None:
            return fit_whole_state(dx, dz, sums=sums)
        # Before Hopper operands pass through registers: only half the tile leaves room for the state.
        block_t, block_x = (64, 128) if capability >= (9, 0) else (32, 64)
        return FusedChunkConfig(
            block_t=min(block_t, chunk), block_x=min(block_x, dx), block_z=min(64, dz), num_warps=4, num_stages=2
        )

    def fit_outputs(dx: int, dz: int, *, sums: bool = False) -> ChunkOutputsConfig:
        block_t = min(outputs.block_t, chunk)
        return replace(
            outputs,
            block_t=block_t,
            block_s=min(outputs.block_s, block_t),
            block_x=min(outputs.block_x, dx),
            block_z=min(outputs.block_z, dz),
            num_warps=outputs.num_warps if block_t == outputs.block_t else 4,
        )

    fit = fit_fused if fused else fit_outputs
    dq = fit(v_pad, k_pad, sums=True)
    if fused and capability >= (10, 0):
        # With a state to load, four warps would spill.
        dq = replace(dq, num_warps=8)
    return EngineConfig(
        states=states,
        d_states=states,
        output=fit(k_pad, v_pad),
        dq=dq,
        dk=fit(v_pad, k_pad, sums=True),
        dv=fit(k_pad, v_pad),
        normaliser=NormaliserConfig(block_k=min(128 if capability >= (9, 0) else 64, k_pad), num_warps=4, num_stages=3),
    )
