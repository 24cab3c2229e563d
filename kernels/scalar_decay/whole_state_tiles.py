"""What whole_state.py and chunk_states_hopper.py share: tiles in shared memory, their copies, and the gates."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..common.versions import gluon_names
from . import gates

barrier, load_async, store_async, reinterpret = gluon_names()
start_of, document_of, stretch_of_document, document_at = (
    gluon.jit(function.fn)
    for function in (gates.start_of, gates.document_of, gates.stretch_of_document, gates.document_at)
)

WARPS = gl.constexpr(4)
"""Warps of a walker and of the preparing group: on Hopper, four warps make a matrix product together."""
BZ = gl.constexpr(64)
"""Columns of the output in a slice, 16 for each warp."""


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
        x, y, z: each stage's tiles of X and Y, part by part, and of Z.
        scores: each stage's weighted scores, a row for each row of X.
        gates: each stage's vectors QUERY, KEY, ROW, WEIGHT, DECAY, FLOOR and DIVISOR.
        out: a tile of the output for each slice; it first takes the partial result of the launch before, or the pair.
        pair: the tile of the pair for each walker; the same memory as ``out`` unless there is a partial result too.
        n, weight: n and WEIGHT of a tile as _split of whole_state.py returns them, transposed.

    The others are barriers, which complete when

        loaded: a stage's tiles of X and Y are there.
        loaded_z: a stage's tile of Z is there.
        ready: a stage's scores and gates are there.
        freed: all walkers have read what a stage holds.
        extra_loaded: a walker's tiles of the pair and the partial result are there.
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
"""Number of vectors in Buffers.gates, padded to a power of two. QUERY, KEY: log weights of the positions as queries and
as keys of the tile. ROW: W_in, the state's weight in each row of the output. WEIGHT: w, that of a position in the
state. DECAY: the state's factor, BT times. FLOOR: mLSTMexp's least denominators. DIVISOR: one over the denominators."""


class Pointers(NamedTuple):
    """Pointers to what is not copied by TMA; fused_chunk.fused_chunk_kernel explains each."""

    gates: Any
    states: Any
    initial: Any
    sums: Any
    last: Any
    anchors: Any


class Chunk(NamedTuple):
    """Where a program works.

    Attributes:
        start, end: positions of its chunk.
        pid_bh: which of the B * H heads.
        is_whole: whether this head is whole. Its state then comes from Pointers.initial, else from Pointers.states.
        number: index of the chunk's state among those of the cut heads.
        x_col, z_col: first columns of X and Y, and of Z.
        two_walkers: whether both walkers have columns.
        document: a :class:`.roles.PackedDocument`, and then pid_bh is the head and pointers the document's; or None.
    """

    start: Any
    end: Any
    pid_bh: Any
    is_whole: Any
    number: Any
    x_col: Any
    z_col: Any
    two_walkers: Any
    document: Any = None


@gluon.jit
def allocate_barriers(count: gl.constexpr):
    """Allocate ``count`` barriers in shared memory."""
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())


@gluon.jit
def load_tiles(tensors, buffers, stage, t0, x_col, z_col, pred):
    """Start the copies of the tiles at position ``t0`` into a stage; the stage's barriers complete when they are there.

    Without X (chunk_states_hopper.py) one barrier is for both Y and Z.
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
    """Start the copies of a chunk's first tiles, for all stages but one."""
    BT: gl.constexpr = TILE.block_t
    for step in gl.static_range(TILE.num_stages - 1):
        t0 = start + (tiles - 1 - step) * BT if FUTURE else start + step * BT
        load_tiles(tensors, buffers, step, t0, x_col, z_col, step < tiles)


@gluon.jit
def load_gates(gates, head, t0, T, length, log_scale, FUTURE: gl.constexpr, BT: gl.constexpr):
    """Load the gates of the tile at ``t0``, of a sequence of ``length`` positions where a head has T.

    Returns:
        The vectors QUERY and KEY [BT], and log2 of ROW, of WEIGHT [BT], of the state's decay and of FLOOR [BT].
    """
    index = head * gl.cdiv(T, BT) + t0 // BT
    offs = gl.arange(0, BT, gl.BlockedLayout([1], [32], [WARPS], [0]))
    # Rows of X, Y and Z beyond the end are zero; they get the last position's gates, so that no weight overflows.
    at = head * T + t0 + gl.minimum(offs, length - 1 - t0)
    b = gl.load(gates.b + at)
    w = gl.load(gates.w + at)
    log_decay = gl.load(gates.g + index)
    query = b + log_scale
    key = -b
    if gates.u is not None:
        key += gl.load(gates.u + at)
    log_row = query
    # A placeholder, which is not used without denominators.
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
        log_row = query + m_in
    if FUTURE:
        row, weight = w, log_row
    else:
        row, weight = log_row, w
    return query, key, row, weight, log_decay, floor


@gluon.jit
def elements(start, row, col, DX: gl.constexpr, DZ: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Return pointers to a state's elements (z = row, x = col); it is stored as [DX, DZ], TRANSPOSED as [DZ, DX]."""
    return start + (row[:, None] * DX + col[None, :] if TRANSPOSED else col[None, :] * DZ + row[:, None])
