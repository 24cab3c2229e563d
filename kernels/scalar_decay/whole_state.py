"""The fused chunk kernel for Hopper: one program holds the whole state of a head, in registers, transposed.

It computes what fused_chunk.py does, the four products of roles.py, for a chunk processed tile by tile. There a program
has the state of 64 columns of the output, so X and Y are read, and X Y^T is computed, once for every 64 columns. Here

    O^T = S^T X^T * rows(W_in) + Z^T (Y X^T * W^T)        S^T <- decay S^T + (Z^T * w) Y

with S^T as the left operand, which Hopper's tensor cores take from registers: the state makes no trip through shared
memory, and X and Y are read once. Two groups of four warps have half of the columns each. They share the tiles of X, Y
and Z, which the bulk copy engine loads a step ahead, and nothing else: each computes the scores X Y^T for itself, so
that one group's matrix products run while the other waits, weighs or stores. A group has one tile of S^T, of 64 x 128,
or two side by side: along Z (h and dv, whose Z is wide) or along X (dq and dk). A wider contraction takes two launches:
O^T is a sum over blocks of X and Y, and the second launch adds what the first one stored. Gates are loaded a step ahead
too, one value a thread, and pass through shared memory.

Written in Gluon, Triton's language of explicit layouts; `whole_state_reason` in config.py says where it runs.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.remember import remember_launches

WARPS = gl.constexpr(4)
"""Of a group: what a matrix product of Hopper takes."""
BZ = gl.constexpr(64)
"""Columns of the output in a tile: 16 for each warp."""


class Tensors(NamedTuple):
    """Descriptors of the tensors whose tiles are copied from and to global memory."""

    x: Any
    y: Any
    z: Any
    out: Any
    partial: Any
    pair: Any


class Buffers(NamedTuple):
    """What is in shared memory.

    Attributes:
        x, y, z: the tiles of a step, for each stage.
        scores, out, pair: tiles of a group, for each group; of out, for each of its tiles. out first takes the partial
            result of the launch before.
        gates: query, key, row and weight of two steps, for each group.
        loaded: barriers that complete when a stage's tiles are there.
        freed: barriers that complete when the second group has read a stage's tiles.
        extra_loaded: barriers that complete when a group's tiles of the pair and the partial result are there.
    """

    x: Any
    y: Any
    z: Any
    scores: Any
    out: Any
    pair: Any
    gates: Any
    loaded: Any
    freed: Any
    extra_loaded: Any


class Pointers(NamedTuple):
    """What is read and written without the bulk copy engine; see fused_chunk.fused_chunk_kernel."""

    gates: Any
    state: Any
    sums: Any
    last: Any
    anchor_states: Any
    anchors: Any


class Chunk(NamedTuple):
    """Where a program works: positions of its chunk, batch times head, first element of its state, first columns."""

    start: Any
    end: Any
    pid_bh: Any
    state: Any
    x_col: Any
    z_col: Any


@gluon.jit
def load_tiles(tensors, buffers, stage, t0, x_col, z_col, pred):
    """Start the copies of one step's tiles; the stage's barrier completes when they are there."""
    bar = buffers.loaded.index(stage)
    BYTES: gl.constexpr = tensors.y.block_type.nbytes + tensors.z.block_type.nbytes
    X_BYTES: gl.constexpr = 0 if tensors.x is None else tensors.x.block_type.nbytes
    mbarrier.expect(bar, BYTES + X_BYTES, pred=pred)
    if tensors.x is not None:
        tma.async_copy_global_to_shared(tensors.x, [t0, x_col], bar, buffers.x.index(stage), pred=pred)
    tma.async_copy_global_to_shared(tensors.y, [t0, x_col], bar, buffers.y.index(stage), pred=pred)
    tma.async_copy_global_to_shared(tensors.z, [t0, z_col], bar, buffers.z.index(stage), pred=pred)


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
        log weights of the positions as queries and as keys of the tile, factors of the output's rows and of what enters
        the state, [BT] each, and the decay of the state.
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
    if gates.m is not None:
        m_in = gl.load(gates.edge + head + index)
        m_out = gl.load(gates.edge + head + index + 1)
        log_decay += m_in - m_out
        w -= m_out
        query -= gl.load(gates.m + at) + gl.load(gates.log_denom + at)
        through = query + m_in
    if FUTURE:
        row, weight = w, through
    else:
        row, weight = through, w
    return query, key, gl.exp2(row), gl.exp2(weight), gl.exp2(log_decay)


@gluon.jit
def _store_gates(gates_s, first, query, key, row, weight):
    """Put a tile's gates where every warp finds them: four rows from ``first`` on."""
    gates_s.index(first).store(query)
    gates_s.index(first + 1).store(key)
    gates_s.index(first + 2).store(row)
    gates_s.index(first + 3).store(weight)


@gluon.jit
def elements(start, row, col, DX: gl.constexpr, DZ: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Return pointers to a state's elements (z = row, x = col): states are [DX, DZ], TRANSPOSED [DZ, DX]."""
    if TRANSPOSED:
        offs = row[:, None] * DX + col[None, :]
    else:
        offs = col[None, :] * DZ + row[:, None]
    return start + offs


@gluon.jit
def _flatten(state, BX: gl.constexpr):
    """Return a state tile's elements in an order in which every thread has 16 bytes side by side, as it holds them."""
    # A thread of the layout has rows lane / 4 and lane / 4 + 8 of its warp's sixteen, and of every eight columns the
    # pair lane % 4: rows are (warp, half, lane / 4), columns (which 32, which 8 of them, lane % 4, which of the pair).
    parts = state.reshape([WARPS, 2, 8, BX // 32, 4, 4, 2])
    flat = parts.permute((1, 3, 0, 2, 5, 4, 6)).reshape([BZ * BX])
    return gl.convert_layout(flat, gl.BlockedLayout([8], [32], [WARPS], [0]))


@gluon.jit
def _walk(
    tensors,
    buffers,
    pointers,
    chunk,
    log_scale,
    T,
    BH,
    every,
    group: gl.constexpr,
    SHAPE: gl.constexpr,
    ROLE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Process a chunk tile by tile for one group's columns. The first group starts the copies for both, but for those
    of the first steps, which are under way."""
    DX: gl.constexpr = SHAPE.dim_x
    DZ: gl.constexpr = SHAPE.dim_z
    BT: gl.constexpr = TILE.block_t
    BX: gl.constexpr = min(TILE.block_x, 128)
    NX: gl.constexpr = TILE.block_x // BX
    NZ: gl.constexpr = TILE.block_z // (BZ * TILE.groups)
    TWO: gl.constexpr = NX * NZ == 2
    STAGES: gl.constexpr = TILE.num_stages
    FUTURE: gl.constexpr = ROLE.future
    SUMS: gl.constexpr = pointers.sums is not None
    ANCHORS: gl.constexpr = pointers.anchor_states is not None
    PARTIAL: gl.constexpr = tensors.partial is not None
    DTYPE: gl.constexpr = buffers.x.dtype
    start, end, pid_bh = chunk.start, chunk.end, chunk.pid_bh
    x_col, z_col = chunk.x_col, chunk.z_col
    gl.static_assert(not (SUMS or PARTIAL) or NZ == 1, "row sums and partial results are those of one tile")
    COLUMNS: gl.constexpr = (DZ + TILE.block_z - 1) // TILE.block_z
    STATE: gl.constexpr = COLUMNS * TILE.block_z * TILE.block_x
    GATES: gl.constexpr = 8 * group
    Z: gl.constexpr = group * NZ * BZ

    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BX, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BT, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    weighted_layout: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)
    sums_layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
    flat_layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])

    offs_s = gl.arange(0, BT, gl.SliceLayout(1, out_layout))
    offs_t = gl.arange(0, BT, gl.SliceLayout(0, out_layout))
    offs_z = z_col + Z + gl.arange(0, BZ, gl.SliceLayout(1, state_layout))
    offs_x = gl.arange(0, BX, gl.SliceLayout(0, state_layout))
    other_z = offs_z + (BZ if NZ == 2 else 0)
    other_x = offs_x + (BX if NX == 2 else 0)
    mask = (offs_z < DZ)[:, None] & (offs_x < DX - x_col)[None, :]
    other_mask = (other_z < DZ)[:, None] & (other_x < DX - x_col)[None, :]
    corner = x_col if ROLE.transposed else x_col * DZ
    state = gl.zeros([BZ, BX], gl.float32, state_layout)
    other = gl.zeros([BZ, BX], gl.float32, state_layout)
    if pointers.state is not None:
        entry = pointers.state + chunk.state + corner
        at = elements(entry, offs_z, offs_x, DX, DZ, ROLE.transposed)
        state += gl.load(at, mask=mask, other=0.0).to(gl.float32)
        if TWO:
            at = elements(entry, other_z, other_x, DX, DZ, ROLE.transposed)
            other += gl.load(at, mask=other_mask, other=0.0).to(gl.float32)

    scores_s = buffers.scores.index(group)
    share = z_col // (NZ * BZ) + group
    planes = BH.to(gl.int64) * T
    num_anchors = gl.cdiv(T, every)
    tiles = gl.cdiv(end - start, BT)
    # Between two anchors is a stretch; only the last one may be shorter.
    per_stretch = every // BT if ANCHORS else tiles
    stretches = gl.cdiv(tiles, per_stretch)
    # In the last block of columns the second group may have none: it does nothing, and nobody waits for it.
    two_groups = z_col + NZ * BZ < DZ
    if group == 1:
        stretches = gl.where(two_groups, stretches, 0)
    t0 = start + (tiles - 1) * BT if FUTURE else start
    query, key, row, weight, decay = load_gates(pointers.gates, pid_bh, t0, T, log_scale, FUTURE, BT)
    _store_gates(buffers.gates, GATES, query, key, row, weight)
    gl.thread_barrier()
    tile = 0
    for stretch in range(stretches):
        is_last = stretch == (0 if FUTURE else stretches - 1)
        count = gl.where(is_last, tiles - (stretches - 1) * per_stretch, per_stretch)
        if ANCHORS:
            index = pid_bh * num_anchors + start // every + (stretches - 1 - stretch if FUTURE else stretch)
            anchor = pointers.anchor_states + index * STATE + share * NX * BZ * BX
            anchor += gl.arange(0, BZ * BX, layout=flat_layout)
            if not FUTURE:
                gl.store(anchor, _flatten(state.to(DTYPE), BX))
                if TWO:
                    gl.store(anchor + BZ * BX, _flatten(other.to(DTYPE), BX))
        for _ in range(count):
            stage = tile % STAGES
            ahead = tile + STAGES - 1
            next_t = t0 - BT if FUTURE else t0 + BT
            next_t = gl.where(tile + 1 < tiles, next_t, t0)
            query, key, row, weight, next_decay = load_gates(pointers.gates, pid_bh, next_t, T, log_scale, FUTURE, BT)
            gate = GATES + 4 * (tile & 1)
            if SUMS or PARTIAL:
                extra = buffers.extra_loaded.index(group)
                mbarrier.expect(extra, 2 * BT * BZ * (SUMS + PARTIAL))
            if SUMS:
                tma.async_copy_global_to_shared(tensors.pair, [t0, z_col + Z], extra, buffers.pair.index(group))
            if PARTIAL:
                tma.store_wait(0)
                gl.thread_barrier()
                tma.async_copy_global_to_shared(tensors.partial, [t0, z_col + Z], extra, buffers.out.index(group))
            if group == 0:
                if TILE.groups == 2:
                    freed = buffers.freed.index(ahead % STAGES)
                    mbarrier.wait(freed, (ahead // STAGES + 1) & 1, pred=(tile > 0) & two_groups)
                ahead_t = t0 - (STAGES - 1) * BT if FUTURE else t0 + (STAGES - 1) * BT
                load_tiles(tensors, buffers, ahead % STAGES, ahead_t, x_col, z_col, ahead < tiles)
            mbarrier.wait(buffers.loaded.index(stage), (tile // STAGES) & 1)
            x = buffers.x.index(stage)
            y = buffers.y.index(stage)
            z = buffers.z.index(stage)
            x_t = x.permute((1, 0))

            zeros = gl.zeros([BT, BT], gl.float32, out_layout)
            scores = warpgroup_mma(y, x_t, zeros, is_async=True, use_acc=False)
            if FUTURE:
                exponent = (
                    buffers.gates.index(gate).load(offs_s.type.layout)[:, None]
                    + buffers.gates.index(gate + 1).load(offs_t.type.layout)[None, :]
                )
                kept = gl.where(offs_s[:, None] >= offs_t[None, :], gl.exp2(exponent), 0.0)
            else:
                exponent = (
                    buffers.gates.index(gate + 1).load(offs_s.type.layout)[:, None]
                    + buffers.gates.index(gate).load(offs_t.type.layout)[None, :]
                )
                kept = gl.where(offs_s[:, None] <= offs_t[None, :], gl.exp2(exponent), 0.0)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores_s.store((scores * kept).to(DTYPE))
            fence_async_shared()

            zeros = gl.zeros([BZ, BT], gl.float32, out_layout)
            operand = gl.convert_layout(state.to(DTYPE), operand_layout)
            out = warpgroup_mma(operand, x.slice(0, BX, dim=1).permute((1, 0)), zeros, is_async=True, use_acc=False)
            if NX == 2:
                out = warpgroup_mma_wait(0, deps=[out])
                operand = gl.convert_layout(other.to(DTYPE), operand_layout)
                out = warpgroup_mma(operand, x.slice(BX, BX, dim=1).permute((1, 0)), out, is_async=True)
            gl.thread_barrier()
            for half in gl.static_range(NZ):
                if half == 1:
                    operand = gl.convert_layout(other.to(DTYPE), operand_layout)
                    out = warpgroup_mma(operand, x_t, zeros, is_async=True, use_acc=False)
                z_t = z.slice(Z + half * BZ, BZ, dim=1).permute((1, 0))
                row_factor = buffers.gates.index(gate + 2).load(gl.SliceLayout(0, out_layout))[None, :]
                out = warpgroup_mma_wait(0, deps=[out])
                out = warpgroup_mma(z_t, scores_s, out * row_factor, is_async=True)
                enters = buffers.gates.index(gate + 3).load(gl.SliceLayout(0, weighted_layout))[None, :]
                weighted = (z_t.load(weighted_layout).to(gl.float32) * enters).to(DTYPE)
                if NX == 2:
                    state = warpgroup_mma(weighted, y.slice(0, BX, dim=1), state * decay, is_async=True)
                    other = warpgroup_mma(weighted, y.slice(BX, BX, dim=1), other * decay, is_async=True)
                    out = warpgroup_mma_wait(2, deps=[out])
                elif half == 0:
                    state = warpgroup_mma(weighted, y, state * decay, is_async=True)
                    out = warpgroup_mma_wait(1, deps=[out])
                else:
                    other = warpgroup_mma(weighted, y, other * decay, is_async=True)
                    out = warpgroup_mma_wait(1, deps=[out])
                out_s = buffers.out.index(group * NZ + half)
                if SUMS or PARTIAL:
                    mbarrier.wait(extra, tile & 1)
                tma.store_wait(NZ - 1)
                gl.thread_barrier()
                if PARTIAL:
                    out += out_s.permute((1, 0)).load(out_layout).to(gl.float32)
                if SUMS:
                    pair = buffers.pair.index(group).permute((1, 0)).load(out_layout).to(gl.float32)
                    # One sum a warp: adding those of several would take a barrier.
                    sums = gl.sum((out * pair).reshape([WARPS, BZ // WARPS, BT]), axis=1)
                    sums = gl.convert_layout(sums, sums_layout)
                    warp = share * WARPS + gl.arange(0, WARPS, gl.SliceLayout(1, sums_layout))[:, None]
                    offs = t0 + gl.arange(0, BT, gl.SliceLayout(0, sums_layout))[None, :]
                    gl.store(pointers.sums + warp * planes + pid_bh * T + offs, sums, mask=offs < T)
                out_s.permute((1, 0)).store(out.to(DTYPE))
                fence_async_shared()
                gl.thread_barrier()
                tma.async_copy_shared_to_global(tensors.out, [t0, z_col + Z + half * BZ], out_s)
            if TWO:
                state, other = warpgroup_mma_wait(0, deps=[state, other])
            else:
                state = warpgroup_mma_wait(0, deps=[state])
            _store_gates(buffers.gates, GATES + 4 * ((tile + 1) & 1), query, key, row, weight)
            decay = next_decay
            t0 = next_t
            tile += 1
            gl.thread_barrier()
            if group == 1:
                mbarrier.arrive(buffers.freed.index(stage), count=1)
        if ANCHORS and FUTURE:
            dot = gl.sum(gl.load(anchor).to(gl.float32) * _flatten(state, BX), axis=0)
            if TWO:
                dot += gl.sum(gl.load(anchor + BZ * BX).to(gl.float32) * _flatten(other, BX), axis=0)
            gl.store(pointers.anchors + share * BH.to(gl.int64) * num_anchors + index, dot)
    tma.store_wait(0)

    if pointers.last is not None:
        entry = pointers.last + pid_bh * DX * DZ + corner
        gl.store(elements(entry, offs_z, offs_x, DX, DZ, ROLE.transposed), state, mask=mask)
        if TWO:
            gl.store(elements(entry, other_z, other_x, DX, DZ, ROLE.transposed), other, mask=other_mask)


@remember_launches
@gluon.jit(do_not_specialize=["T", "L", "N", "BH", "log_scale", "every", "x_col"])
def whole_state_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    state_ptr,
    partial_ptr,
    out_ptr,
    gates,
    pair_ptr,
    sums_ptr,
    last_ptr,
    anchor_states_ptr,
    anchor_ptr,
    log_scale,
    T,
    L,
    N,
    BH,
    every,
    x_col,
    SHAPE: gl.constexpr,
    ROLE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Process one chunk for block_z columns of the output and block_x of the contraction, from column ``x_col`` on.

    Grid: (ceil(DZ / block_z) * N * B * H,).
    Reads and writes what fused_chunk.fused_chunk_kernel does, where the arguments are explained too. ``partial_ptr`` is
    the ``out_ptr`` of the launch for the contraction's first columns; ``log_scale`` is the scale's logarithm to base 2;
    the row sums are those of every warp, [shares * 4, B, H, T] with a share for every 64 columns; the states at the
    anchors are [B, H, ceil(T / every)] tiles in the order of :func:`_flatten`, padded to whole blocks.
    """
    H: gl.constexpr = SHAPE.heads
    DX: gl.constexpr = SHAPE.dim_x
    DZ: gl.constexpr = SHAPE.dim_z
    BT: gl.constexpr = TILE.block_t
    STAGES: gl.constexpr = TILE.num_stages
    GROUPS: gl.constexpr = TILE.groups
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    X_ROW: gl.constexpr = (H // SHAPE.group_x) * DX
    Z_ROW: gl.constexpr = (H // SHAPE.group_z) * DZ
    OUT_ROW: gl.constexpr = H * DZ
    COLUMNS: gl.constexpr = (DZ + TILE.block_z - 1) // TILE.block_z

    pid = gl.program_id(0)
    z_col = pid % COLUMNS * TILE.block_z
    pid_n = (pid // COLUMNS) % N
    pid_bh = (pid // (COLUMNS * N)).to(gl.int64)
    batch = pid_bh // H
    head = pid_bh % H
    start = pid_n * L
    x_offset = batch * T * X_ROW + (head // SHAPE.group_x) * DX
    z_offset = batch * T * Z_ROW + (head // SHAPE.group_z) * DZ
    out_offset = batch * T * OUT_ROW + head * DZ

    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_desc = tma.make_tensor_descriptor(x_ptr + x_offset, [T, DX], [X_ROW, 1], [BT, TILE.block_x], layout)
    y_desc = tma.make_tensor_descriptor(y_ptr + x_offset, [T, DX], [X_ROW, 1], [BT, TILE.block_x], layout)
    z_desc = tma.make_tensor_descriptor(z_ptr + z_offset, [T, DZ], [Z_ROW, 1], [BT, TILE.block_z], layout)
    pair_s = None
    if pair_ptr is not None:
        pair_s = gl.allocate_shared_memory(DTYPE, [GROUPS, BT, BZ], layout)
    buffers = Buffers(
        gl.allocate_shared_memory(DTYPE, [STAGES, BT, TILE.block_x], layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, BT, TILE.block_x], layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, BT, TILE.block_z], layout),
        gl.allocate_shared_memory(DTYPE, [GROUPS, BT, BT], layout),
        gl.allocate_shared_memory(DTYPE, [TILE.block_z // BZ, BT, BZ], layout),
        pair_s,
        gl.allocate_shared_memory(gl.float32, [8 * GROUPS, BT], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout()),
    )
    # Only barriers that are waited for: the memory of others would be used again, and the hardware writes to it.
    for stage in gl.static_range(STAGES):
        mbarrier.init(buffers.loaded.index(stage), count=1)
        if GROUPS == 2:
            mbarrier.init(buffers.freed.index(stage), count=1)
    if pair_ptr is not None or partial_ptr is not None:
        for group in gl.static_range(GROUPS):
            mbarrier.init(buffers.extra_loaded.index(group), count=1)
    fence_async_shared()
    gl.thread_barrier()
    end = gl.minimum(start + L, T)
    tensors = Tensors(x_desc, y_desc, z_desc, None, None, None)
    load_first_tiles(tensors, buffers, start, gl.cdiv(end - start, BT), x_col, z_col, ROLE.future, TILE)
    # The other descriptors are made while these copies are under way.
    out_desc = tma.make_tensor_descriptor(out_ptr + out_offset, [T, DZ], [OUT_ROW, 1], [BT, BZ], layout)
    partial_desc = None
    if partial_ptr is not None:
        partial_desc = tma.make_tensor_descriptor(partial_ptr + out_offset, [T, DZ], [OUT_ROW, 1], [BT, BZ], layout)
    pair_desc = None
    if pair_ptr is not None:
        pair_desc = tma.make_tensor_descriptor(pair_ptr + z_offset, [T, DZ], [Z_ROW, 1], [BT, BZ], layout)
    tensors = Tensors(x_desc, y_desc, z_desc, out_desc, partial_desc, pair_desc)

    pointers = Pointers(gates, state_ptr, sums_ptr, last_ptr, anchor_states_ptr, anchor_ptr)
    chunk = Chunk(start, end, pid_bh, (pid_bh * N + pid_n) * DX * DZ, x_col, z_col)
    if GROUPS == 1:
        _walk(tensors, buffers, pointers, chunk, log_scale, T, BH, every, 0, SHAPE, ROLE, TILE)
    else:
        gl.warp_specialize(
            [
                (_walk, (tensors, buffers, pointers, chunk, log_scale, T, BH, every, 0, SHAPE, ROLE, TILE)),
                (_walk, (tensors, buffers, pointers, chunk, log_scale, T, BH, every, 1, SHAPE, ROLE, TILE)),
            ],
            [WARPS],
            [256],
        )
