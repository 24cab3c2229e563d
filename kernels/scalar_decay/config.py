"""Tile sizes of the engine's kernels: one frozen value a launch, and one predicate that says where it is valid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, TypeVar

from ..common.sizes import MIN_PROGRAMS, next_power_of_two

GATES_BLOCK_T = 512
GATES_TILE = 2048
WHOLE_STATE_BLOCK_T = 64
SCAN_BLOCK_N = 1024
MERGE_BLOCK_E = 1024
SUM_BLOCK = 1024
"""Positions that a program of the gates takes at once, and times heads; positions of a tile of whole_state_kernel; gate
tiles, or positions, of a program that scans or finishes stabilisers or denominators; elements of a state that a merging
program takes; sums that a program of gradients of shared heads or constants makes, eight a thread."""


def anchor_every(scheme: str, chunk: int, *, sums_decay: bool) -> int:
    """Return the positions between anchors of the decay gradient where a chunk is processed tile by tile.

    Rounding piles up over at most this many; no interval crosses a chunk's edge. Anchors cost whole_state, which has
    less else to do, relatively more.

    Args:
        sums_decay: whether the operation sums the decay's gradient over all tokens, with its rounding errors (SSD's A).
    """
    return min(chunk, 64 if sums_decay else 512 if scheme == "whole_state" else 256)


KEPT_STATES = 16
"""States at the chunks' edges are kept for the backward pass if q, k and v are at least this many times larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesConfig:
    """Launch of the kernel of the states at the chunks' edges: time tile, state tile, warps, pipeline stages.

    ``parallel`` computes every chunk's own contribution at once and merges them, for grids too small otherwise;
    ``whole_state`` does it by the kernel of whole_state_h.py.
    """

    block_t: int
    block_k: int
    block_v: int
    num_warps: int
    num_stages: int
    parallel: bool = False
    whole_state: bool = False


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
    """Launch of the kernel that holds a whole state.

    Time tile, widths of the contraction's parts (of two the first has 128 columns), output columns of a program, groups
    of four warps that share these, steps whose tiles are in shared memory.
    """

    block_t: int
    widths: tuple[int, ...]
    block_z: int
    groups: int
    num_stages: int

    @property
    def block_x(self) -> int:
        """Columns of the contraction."""
        return sum(self.widths)

    @property
    def state_registers(self) -> int:
        """Registers in which a thread of a walking group holds its state."""
        return self.block_x * self.block_z // self.groups // 128

    @property
    def makes_denominators(self) -> bool:
        """Whether the program of mLSTMexp's output makes the denominators too: all keys' columns are in one part."""
        return self.groups == 2 and len(self.widths) == 1

    @property
    def max_registers(self) -> int | None:
        """Registers a thread where a multiprocessor is to hold two programs, which small tiles leave room for."""
        return 128 if self.groups == 1 and self.block_x <= 128 else None

    def multiplied_columns(self, dim_z: int) -> int:
        """Return how many output columns the programs of a head compute, of which the last may be empty."""
        columns = self.block_z // self.groups
        if self.groups == 2 and dim_z <= self.block_z:
            return columns + (64 if dim_z <= columns + 64 else columns)
        return columns * -(-dim_z // columns)

    def narrowed(self, columns: int) -> WholeStateConfig:
        """Return the launch for the contraction's last ``columns`` columns."""
        return replace(self, widths=_widths(min(columns, self.block_x)))


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
    WholeStateConfig, with one common block_t). ``normaliser`` is None where the output's kernel makes mLSTMexp's
    denominators itself.
    """

    states: StatesConfig
    output: Tile
    dq: Tile
    dk: Tile
    dv: Tile
    normaliser: NormaliserConfig | None

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


def whole_state_reason(head_dim_qk: int, head_dim_v: int, chunk: int) -> str | None:
    """Return why whole_state.py does not run with these head dims and chunk length, or None."""
    if chunk < WHOLE_STATE_BLOCK_T:
        return f"chunk_size must be at least {WHOLE_STATE_BLOCK_T} for whole_state, got {chunk}"
    if min(head_dim_qk, head_dim_v) <= 32 or max(head_dim_qk, head_dim_v) > 512:
        return f"head dims must be above 32 and at most 512 for whole_state, got {head_dim_qk} and {head_dim_v}"
    return None


def _widths(columns: int) -> tuple[int, ...]:
    """Return the widths of the parts of at most 256 columns of a contraction: powers of two."""
    if columns <= 128:
        return (max(64, next_power_of_two(columns)),)
    return (128, max(32, next_power_of_two(columns - 128)))


def fit_whole_state(dim_x: int, dim_z: int, *, sums: bool = False) -> WholeStateConfig:
    """Return the launch for head dims that :func:`whole_state_reason` has nothing against.

    Args:
        sums: whether rows are summed for the gates' gradients (dq, dk): a program then has one tile of the output.
    """
    widths = _widths(min(dim_x, 256))
    block_x = sum(widths)
    block_z = min(128 if block_x > 128 or sums else 256, max(64, next_power_of_two(dim_z)))
    groups = 1 if block_z == 64 else 2
    # Three steps where a multiprocessor has room for them, with the other tiles; of single groups it holds two.
    num_stages = 3 if 2 * block_x + block_z <= 192 * groups else 2
    return WholeStateConfig(
        block_t=WHOLE_STATE_BLOCK_T, widths=widths, block_z=block_z, groups=groups, num_stages=num_stages
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
        scheme: "walk", a chunk's tiles in order, "whole_state", the same by programs that hold whole states, or
            "sweep", all in parallel, as float32 always is.
        capability: compute capability of the device, such as (9, 0).
        item_bytes: bytes of one input element: 2 (bf16, fp16) or 4 (fp32).
        head_dim_qk: K.
        head_dim_v: V.
        chunk: chunk length in force, a power of two >= 16.
        rows: batch * heads; few of them leave the kernel of the states short of programs.

    Returns:
        the launches; tiles never exceed the chunk or the padded head dims.
    """

    def padded(dim: int) -> int:
        return max(16, next_power_of_two(dim))

    k_pad, v_pad = padded(head_dim_qk), padded(head_dim_v)
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
    whole_state = fused and scheme == "whole_state" and whole_state_reason(k_pad, v_pad, chunk) is None
    if whole_state:
        states = replace(states, block_v=128, parallel=True, whole_state=True)
    elif fused:
        tiles = -(-k_pad // states.block_k) * -(-v_pad // states.block_v)
        states = replace(states, parallel=rows * tiles < MIN_PROGRAMS)
    states = replace(
        states,
        block_t=min(states.block_t, chunk),
        block_k=min(states.block_k, k_pad),
        block_v=min(states.block_v, v_pad),
    )

    def fit_fused(dx: int, dz: int, *, sums: bool = False) -> FusedChunkConfig | WholeStateConfig:
        if whole_state:
            return fit_whole_state(dx, dz, sums=sums)
        # Before Hopper operands pass through registers: only half the tile leaves room for the state.
        block_t, block_x = (64, 128) if capability >= (9, 0) else (32, 64)
        return FusedChunkConfig(
            block_t=min(block_t, chunk), block_x=min(block_x, padded(dx)), block_z=min(64, padded(dz)), num_warps=4,
            num_stages=2,
        )  # fmt: skip

    def fit_outputs(dx: int, dz: int, *, sums: bool = False) -> ChunkOutputsConfig:
        block_t = min(outputs.block_t, chunk)
        return replace(
            outputs,
            block_t=block_t,
            block_s=min(outputs.block_s, block_t),
            block_x=min(outputs.block_x, padded(dx)),
            block_z=min(outputs.block_z, padded(dz)),
            num_warps=outputs.num_warps if block_t == outputs.block_t else 4,
        )

    # whole_state has few programs, and so does its normaliser: small ones wait less. On Blackwell a large one spills.
    normaliser_k = 128 if capability[0] == 9 and not whole_state else 64
    normaliser = NormaliserConfig(block_k=min(normaliser_k, k_pad), num_warps=2 if whole_state else 4, num_stages=3)
    fit = fit_fused if fused else fit_outputs
    output = fit(head_dim_qk, head_dim_v)
    makes_denominators = isinstance(output, WholeStateConfig) and output.makes_denominators
    dq = fit(head_dim_v, head_dim_qk, sums=True)
    if isinstance(dq, FusedChunkConfig) and capability >= (10, 0):
        # With a state to load, four warps would spill.
        dq = replace(dq, num_warps=8)
    return EngineConfig(
        states=states,
        output=output,
        dq=dq,
        dk=fit(head_dim_v, head_dim_qk, sums=True),
        dv=fit(head_dim_qk, head_dim_v),
        normaliser=None if makes_denominators else normaliser,
    )
