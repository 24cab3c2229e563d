"""What the kernels that hold whole states share: the tensors' tiles in shared memory, their copies, and the gates."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.7 and 3.8 renamed what 3.6 has.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_async = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

WARPS = gl.constexpr(4)
"""Of a group: what a matrix product of Hopper takes."""
BZ = gl.constexpr(64)
"""Columns of the output in a tile: 16 for each warp."""


class Tensors(NamedTuple):
    """Descriptors of the tensors whose tiles are copied from and to global memory."""

    x: Any = None
    y: Any = None
    z: Any = None
    out: Any = None
    partial: Any = None
    pair: Any = None


class Buffers(NamedTuple):
    """What is in shared memory.

    Attributes:
        x, y, z: the tiles of a step, for each stage.
        scores: weighted scores, queries by keys, for each stage.
        gates: for each stage the vectors QUERY, KEY, ROW, WEIGHT, DECAY (the same value BT times), DIVISOR and FLOOR.
        out, pair: tiles of a walking group, for each group; of out, for each of its tiles. out first takes the partial
            result of the launch before, or the pair: only with both is pair a buffer of its own.
        n, weight: n and WEIGHT of a step as :func:`_split` returns them, transposed.
        loaded: barriers that complete when a stage's tiles of X and Y are there.
        loaded_z: barriers that complete when a stage's tile of Z is there.
        ready: barriers that complete when a stage's scores and gates are there.
        freed: barriers that complete when all who walk have read what a stage holds.
        extra_loaded: barriers that complete when a group's tiles of the pair and the partial result are there.
    """

    x: Any = None
    y: Any = None
    z: Any = None
    scores: Any = None
    gates: Any = None
    out: Any = None
    pair: Any = None
    n: Any = None
    weight: Any = None
    loaded: Any = None
    loaded_z: Any = None
    ready: Any = None
    freed: Any = None
    extra_loaded: Any = None


QUERY, KEY, ROW, WEIGHT, DECAY, FLOOR, DIVISOR = (gl.constexpr(n) for n in range(7))
VECTORS = gl.constexpr(8)
"""Of gates, with an unused one to make a power of two: log weights of the positions as queries and as keys of the tile,
factors of the output's rows and of what enters the state, the decay of the state, what mLSTMexp's denominators are at
least, and one over them."""


class Pointers(NamedTuple):
    """What is read and written without the bulk copy engine; see fused_chunk.fused_chunk_kernel."""

    gates: Any
    states: Any
    initial: Any
    sums: Any
    last: Any
    anchor_states: Any
    anchors: Any


class Chunk(NamedTuple):
    """Where a program works: positions of its chunk, batch times head, whether this head is not cut into chunks and if
    it is, the state's number among those of all chunks, first columns, and whether the second group that walks has
    columns."""

    start: Any
    end: Any
    pid_bh: Any
    whole: Any
    number: Any
    x_col: Any
    z_col: Any
    two_groups: Any


@gluon.jit
def load_tiles(tensors, buffers, stage, t0, x_col, z_col, pred):
    """Start the copies of one step's tiles; the stage's barriers complete when they are there.

    Without X all tiles share a barrier.
    """
    loaded = buffers.loaded.index(stage)
    loaded_z = loaded
    # Elements are of 16 bits.
    parts: gl.constexpr = len(tensors.y)
    columns: gl.constexpr = 128 * (parts - 1) + tensors.y[parts - 1].block_shape[1]
    bytes_y: gl.constexpr = 2 * tensors.z.block_shape[0] * columns
    bytes_z: gl.constexpr = 2 * tensors.z.block_shape[0] * tensors.z.block_shape[1]
    if tensors.x is None:
        mbarrier.expect(loaded, bytes_y + bytes_z, pred=pred)
    else:
        loaded_z = buffers.loaded_z.index(stage)
        mbarrier.expect(loaded, 2 * bytes_y, pred=pred)
        mbarrier.expect(loaded_z, bytes_z, pred=pred)
        for part in gl.static_range(parts):
            load_async(tensors.x[part], [t0, x_col + part * 128], loaded, buffers.x[part].index(stage), pred=pred)
    for part in gl.static_range(parts):
        load_async(tensors.y[part], [t0, x_col + part * 128], loaded, buffers.y[part].index(stage), pred=pred)
    load_async(tensors.z, [t0, z_col], loaded_z, buffers.z.index(stage), pred=pred)


@gluon.jit
def load_first_tiles(tensors, buffers, start, tiles, x_col, z_col, FUTURE: gl.constexpr, TILE: gl.constexpr):
    """Start the copies of a chunk's first steps: one step fewer than there are stages."""
    BT: gl.constexpr = TILE.block_t
    for step in gl.static_range(TILE.num_stages - 1):
        t0 = start + (tiles - 1 - step) * BT if FUTURE else start + step * BT
        load_tiles(tensors, buffers, step, t0, x_col, z_col, step < tiles)


@gluon.jit
def load_gates(gates, head, t0, T, log_scale, FUTURE: gl.constexpr, BT: gl.constexpr):
    """Load the gates of the tile at ``t0``.

    Returns:
        log2 of the weights of the positions as queries and as keys of the tile, of the factors of the output's rows and
        of what enters the state, [BT] each, of the decay of the state, and of what mLSTMexp's denominators are at
        least, [BT].
    """
    index = head * gl.cdiv(T, BT) + t0 // BT
    offs = gl.arange(0, BT, gl.BlockedLayout([1], [32], [WARPS], [0]))
    # Beyond the end rows of X, Y and Z are zero; with the last position's gates no weight of theirs overflows.
    at = head * T + t0 + gl.minimum(offs, T - 1 - t0)
    b = gl.load(gates.b + at)
    w = gl.load(gates.w + at)
    log_decay = gl.load(gates.g + index)
    query = b + log_scale
    key = -b
    if gates.u is not None:
        key += gl.load(gates.u + at)
    through = query
    # Without denominators of no use.
    floor = b
    if gates.m is not None:
        m_in = gl.load(gates.edge + head + index)
        m_out = gl.load(gates.edge + head + index + 1)
        log_decay += m_in - m_out
        w -= m_out
        m = gl.load(gates.m + at)
        floor = -m
        query -= m
        if gates.log_denom is not None:
            query -= gl.load(gates.log_denom + at)
        through = query + m_in
    if FUTURE:
        row, weight = w, through
    else:
        row, weight = through, w
    return query, key, row, weight, log_decay, floor


@gluon.jit
def elements(start, row, col, DX: gl.constexpr, DZ: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Return pointers to a state's elements (z = row, x = col): states are [DX, DZ], TRANSPOSED [DZ, DX]."""
    return start + (row[:, None] * DX + col[None, :] if TRANSPOSED else col[None, :] * DZ + row[:, None])
