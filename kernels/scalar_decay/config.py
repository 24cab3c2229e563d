"""Tile sizes of the engine's kernels: one frozen value for each launch, and predicates of where they are valid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

from ..common.sizes import MIN_PROGRAMS, next_power_of_two, padded

GATES_BLOCK_T = 512
"""Most positions that a program of the gate kernels takes at once."""

GATES_TILE = 2048
"""Most positions times heads that it takes at once."""

WHOLE_STATE_BLOCK_T = 64
"""Positions of a tile of whole_state_kernel."""

SCAN_BLOCK_N = 1024
"""Stretches that stabiliser_scan_kernel takes at once, and positions of the two kernels that finish vectors."""

MERGE_BLOCK_E = 1024
"""Elements of the state in a program that merges chunks."""

SUM_BLOCK = 1024
"""Results of a program of sum_kernel, eight a thread."""

KEPT_STATES = 16
"""The states between chunks are kept for the backward pass if q, k and v take at least this many times their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesConfig:
    """Launch of the pass over the chunks, with a [block_x, block_z] tile of the state in each program.

    ``parallel``: compute all chunks' contributions in parallel and merge them, so that more programs run;
    ``whole_state``: do so by the kernel of chunk_states_hopper.py.
    """

    block_t: int
    block_x: int
    block_z: int
    num_warps: int
    num_stages: int
    parallel: bool = False
    whole_state: bool = False


class _Blocks:
    """How a product's launches divide columns of X and of the output; see WholeStateConfig, where it is less simple."""

    __slots__ = ()
    block_z: int

    def launches(self, dim_x: int) -> list[tuple[int, Any]]:
        return [(0, self)]

    def multiplied_columns(self, dim_z: int) -> int:
        return self.block_z * -(-dim_z // self.block_z)

    def row_sums(self, dim_z: int) -> int:
        return -(-dim_z // self.block_z)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOutputsConfig(_Blocks):
    """Launch of chunk_o_kernel: tiles [block_t, block_s] of X Y^T, summed over block_x columns of X and Y at a time,
    and block_z columns of the output a program."""

    block_t: int
    block_s: int
    block_x: int
    block_z: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedChunkConfig(_Blocks):
    """Launch of fused_chunk_kernel: tiles of block_t positions, block_x columns of X and Y (rows of the state) a
    launch, and block_z columns of the output and of the state a program."""

    block_t: int
    block_x: int
    block_z: int
    num_warps: int
    num_stages: int

    def launches(self, dim_x: int) -> list[tuple[int, FusedChunkConfig]]:
        return [(first, self) for first in range(0, dim_x, self.block_x)]

    def anchor_columns(self, dim_z: int) -> int:
        return dim_z

    def partial_bytes(self, dim_x: int, *, bf16: bool) -> int:
        """In bfloat16 two blocks' is rounded once, which costs little accuracy; errors of more blocks would add up."""
        return 2 if bf16 and dim_x <= 2 * self.block_x else 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStateConfig:
    """Launch of whole_state_kernel; its module defines part, walker and stage.

    Attributes:
        block_t: positions of a tile.
        widths: columns of each part of X and Y; the first of two parts has 128.
        block_z: columns of the output of a program, which its walkers share.
        walkers: 1 or 2.
        num_stages: tiles of X, Y and Z that shared memory holds.
    """

    block_t: int
    widths: tuple[int, ...]
    block_z: int
    walkers: int
    num_stages: int

    @property
    def block_x(self) -> int:
        """Columns of X and Y in one launch."""
        return sum(self.widths)

    @property
    def copied_widths(self) -> tuple[int, ...]:
        """Columns of each part in shared memory, where a row of a tile has at least 128 bytes."""
        return tuple(max(64, width) for width in self.widths)

    @property
    def state_registers(self) -> int:
        """Registers that a walker's state takes in each of its threads."""
        return self.block_x * self.block_z // self.walkers // 128

    @property
    def makes_denominators(self) -> bool:
        """Whether the launch for mLSTMexp's output makes the denominators too: one part must hold all of k."""
        return self.walkers == 2 and len(self.widths) == 1

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds: two with one walker and at most 128 columns of X and Y, else one."""
        return 2 if self.walkers == 1 and self.block_x <= 128 else 1

    def multiplied_columns(self, dim_z: int) -> int:
        """Return how many output columns the programs of a head compute; the last ones may lie beyond ``dim_z``."""
        columns = self.block_z // self.walkers
        if self.walkers == 2 and dim_z <= self.block_z:
            return columns + (64 if dim_z <= columns + 64 else columns)
        return columns * -(-dim_z // columns)

    def row_sums(self, dim_z: int) -> int:
        """Return how many sums a row has: one of each of a walker's four warps, but in fused_chunk one of a program."""
        return 4 * -(-dim_z // (self.block_z // self.walkers))

    def anchor_columns(self, dim_z: int) -> int:
        """Return the columns of a state that are written at an anchor."""
        return self.multiplied_columns(dim_z)

    def partial_bytes(self, dim_x: int, *, bf16: bool) -> int:
        """Return the bytes of an element of the partial result between two launches; bf16: the output's dtype."""
        return 2

    def launches(self, dim_x: int) -> list[tuple[int, WholeStateConfig]]:
        """Return (first column, launch) of each launch for ``dim_x`` columns of X and Y.

        A launch takes block_x columns. If 65 to 128 are left over, another one takes 128, with one walker, so that a
        multiprocessor holds two of its programs. It is the first one: the last one needs shared memory for the partial
        result and the pair as well, with which two programs would not fit.
        """
        whole, left = divmod(dim_x, self.block_x)
        tiles = [self] * max(1, whole)
        if whole and 64 < left <= 128:
            tiles.insert(0, fit_whole_state(128, 64))
        elif whole and left:
            tiles.append(replace(self, widths=_widths(left)))
        firsts = accumulate((tile.block_x for tile in tiles[:-1]), initial=0)
        return list(zip(firsts, tiles, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormaliserConfig:
    """Launch of normaliser_kernel: block_k columns of k a program, in tiles as long as those of the output."""

    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every launch of one forward and backward pass.

    The launches of the four products (roles.py) take a chunk's tiles all in parallel (ChunkOutputsConfig) or all in
    order (FusedChunkConfig, WholeStateConfig, of equal block_t). ``normaliser`` is None where the output's kernel makes
    mLSTMexp's denominators itself.
    """

    states: StatesConfig
    output: Any
    dq: Any
    dk: Any
    dv: Any
    normaliser: NormaliserConfig | None

    @property
    def takes_tiles_in_order(self) -> bool:
        """Whether a chunk's tiles are taken in order, rather than in parallel."""
        return not isinstance(self.output, ChunkOutputsConfig)

    @property
    def whole_state(self) -> bool:
        """Whether whole_state.py takes them."""
        return isinstance(self.output, WholeStateConfig)

    def gate_stretch(self, chunk: int) -> int:
        """Return the positions over which gate vectors accumulate: a tile if tiles are taken in order, else a chunk."""
        return self.output.block_t if self.takes_tiles_in_order else chunk


def fit_chunk(chunk_size: int, seq_len: int) -> int:
    """Return the chunk length, limited to the power of two, at least 16, that holds the sequence."""
    return min(chunk_size, padded(seq_len))


def why_no_whole_state(head_dim_qk: int, head_dim_v: int, chunk: int) -> str | None:
    """Return why whole_state.py does not run with these head dims and chunk length, or None.

    A part of X and Y has at least 64 columns, so a head dim of 32 would waste half.
    """
    if chunk < WHOLE_STATE_BLOCK_T:
        return f"chunk_size must be at least {WHOLE_STATE_BLOCK_T} for whole_state, got {chunk}"
    if min(head_dim_qk, head_dim_v) <= 32:
        return f"head dims must be above 32 for whole_state, got {head_dim_qk} and {head_dim_v}"
    return None


def _widths(columns: int) -> tuple[int, ...]:
    """Return the widths, powers of two, of the parts for ``columns`` (at most 256) columns of X and Y."""
    if columns <= 128:
        return (max(64, next_power_of_two(columns)),)
    return (128, max(32, next_power_of_two(columns - 128)))


def fit_whole_state(dim_x: int, dim_z: int, *, sums: bool = False) -> WholeStateConfig:
    """Return the launch for head dims that :func:`why_no_whole_state` allows.

    Args:
        sums: whether rows are summed for the gates' gradients (dq, dk); a walker then has 64 columns of the output.
    """
    widths = _widths(min(dim_x, 256))
    block_x = sum(widths)
    block_z = min(128 if block_x > 128 or sums else 256, max(64, next_power_of_two(dim_z)))
    walkers = 1 if block_z == 64 else 2
    # Three stages, if shared memory has room for them in all programs of a multiprocessor (``resident``).
    num_stages = 3 if 2 * block_x + block_z <= 192 * walkers else 2
    return WholeStateConfig(
        block_t=WHOLE_STATE_BLOCK_T, widths=widths, block_z=block_z, walkers=walkers, num_stages=num_stages
    )


def takes_tiles_in_order(scheme: str, item_bytes: int) -> bool:
    """Return whether a chunk's tiles are taken in order."""
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
    batch_heads: int,
    precision: str = "ieee",
) -> EngineConfig:
    """Choose the launches for an architecture and problem.

    Args:
        scheme: "walk", "whole_state" or "sweep", see scalar_decay/__init__.py.
        capability: compute capability of the device, such as (9, 0).
        item_bytes: bytes of one input element: 2 (bf16, fp16) or 4 (fp32).
        head_dim_qk, head_dim_v: K and V; tiles never exceed these, padded, or the chunk.
        chunk: chunk length, a power of two >= 16.
        batch_heads: B * H; if they are few, the pass over the chunks is ``parallel``.
        precision: of products in fp32: "ieee", without tensor cores, or "tf32x3".
    """
    k_pad, v_pad = padded(head_dim_qk), padded(head_dim_v)
    if item_bytes == 4 and precision == "tf32x3":
        states = StatesConfig(block_t=32, block_x=64, block_z=64, num_warps=4, num_stages=2)
        outputs = ChunkOutputsConfig(block_t=64, block_s=64, block_x=32, block_z=64, num_warps=4, num_stages=1)
    elif item_bytes == 4:
        states = StatesConfig(block_t=32, block_x=32, block_z=32, num_warps=4, num_stages=1)
        outputs = ChunkOutputsConfig(block_t=32, block_s=32, block_x=32, block_z=32, num_warps=4, num_stages=1)
    elif capability >= (9, 0):
        states = StatesConfig(block_t=64, block_x=128, block_z=64, num_warps=4, num_stages=3)
        outputs = ChunkOutputsConfig(block_t=128, block_s=64, block_x=128, block_z=128, num_warps=8, num_stages=2)
    else:
        states = StatesConfig(block_t=64, block_x=64, block_z=64, num_warps=4, num_stages=2)
        outputs = ChunkOutputsConfig(block_t=64, block_s=64, block_x=64, block_z=64, num_warps=4, num_stages=2)
    fused = takes_tiles_in_order(scheme, item_bytes)
    # A sequence of up to 32 positions is too short a chunk for whole_state.py; fused_chunk.py takes it.
    whole_state = fused and scheme == "whole_state" and why_no_whole_state(k_pad, v_pad, chunk) is None
    if whole_state:
        states = replace(states, block_z=128, parallel=True, whole_state=True)
    elif fused:
        tiles = -(-k_pad // states.block_x) * -(-v_pad // states.block_z)
        states = replace(states, parallel=batch_heads * tiles < MIN_PROGRAMS)
    block_x, block_z = min(states.block_x, k_pad), min(states.block_z, v_pad)
    states = replace(states, block_t=min(states.block_t, chunk), block_x=block_x, block_z=block_z)

    def fit_fused(dx: int, dz: int, *, sums: bool = False) -> FusedChunkConfig | WholeStateConfig:
        if whole_state:
            return fit_whole_state(dx, dz, sums=sums)
        # Before Hopper a product's operands are in registers, and only half the tile fits there beside the state.
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

    # With whole_state few programs of the normaliser run, and smaller ones wait less. On Blackwell larger ones spill.
    normaliser_k = 128 if capability[0] == 9 and not whole_state else 64
    normaliser = NormaliserConfig(block_k=min(normaliser_k, k_pad), num_warps=2 if whole_state else 4, num_stages=3)
    fit = fit_fused if fused else fit_outputs
    output = fit(head_dim_qk, head_dim_v)
    makes_denominators = isinstance(output, WholeStateConfig) and output.makes_denominators
    dq = fit(head_dim_v, head_dim_qk, sums=True)
    if isinstance(dq, FusedChunkConfig) and capability >= (10, 0):
        # If there is a state to load, four warps spill registers.
        dq = replace(dq, num_warps=8)
    return EngineConfig(
        states=states,
        output=output,
        dq=dq,
        dk=fit(head_dim_v, head_dim_qk, sums=True),
        dv=fit(head_dim_qk, head_dim_v),
        normaliser=None if makes_denominators else normaliser,
    )
