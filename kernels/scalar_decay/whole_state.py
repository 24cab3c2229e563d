"""The fused chunk kernel for Hopper: one program holds the whole state of a head, in registers, transposed.

It computes what fused_chunk.py does, the four products of roles.py, for a chunk processed tile by tile. There a program
has the state of 64 columns of the output, so X and Y are read, and X Y^T is computed, once for every 64 columns. Here

    O^T = S^T X^T * rows(W_in) + Z^T (Y X^T * W^T)        S^T <- decay S^T + (Z^T * w) Y

with S^T as the left operand, which Hopper's tensor cores take from registers: the state makes no trip through shared
memory, and X and Y are read once. The work is split between groups of four warps that run side by side. One prepares
the steps: it has the bulk copy engine load the tiles of X, Y and Z, evaluates the gates and makes the weighted scores
Y X^T * W^T (and mLSTMexp's denominators). One or two others walk: each has the state of half of the columns, takes from
shared memory what was prepared, and stores the output. A walking group has one tile of S^T, of 64 x 128, or two side by
side: along Z (h and dv, whose Z is wide) or along X (dq and dk). A wider contraction takes two launches: O^T is a sum
over blocks of X and Y, and the second launch adds what the first one stored.

Written in Gluon, Triton's language of explicit layouts; `whole_state_reason` in config.py says where it runs.
"""

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
from .whole_state_tiles import (
    BZ,
    DECAY,
    DIVISOR,
    FLOOR,
    KEY,
    QUERY,
    ROW,
    VECTORS,
    WARPS,
    WEIGHT,
    Buffers,
    Chunk,
    Pointers,
    Tensors,
    barrier,
    elements,
    load_async,
    load_first_tiles,
    load_gates,
    load_tiles,
    store_async,
)


@gluon.jit
def _flatten(state, BX: gl.constexpr):
    """Return a state tile's elements in an order in which every thread has 16 bytes side by side, as it holds them."""
    # A thread of the layout has rows lane / 4 and lane / 4 + 8 of its warp's sixteen, and of every eight columns the
    # pair lane % 4: rows are (warp, half, lane / 4), columns (which 32, which 8 of them, lane % 4, which of the pair).
    parts = state.reshape([WARPS, 2, 8, BX // 32, 4, 4, 2])
    flat = parts.permute((1, 3, 0, 2, 5, 4, 6)).reshape([BZ * BX])
    return gl.convert_layout(flat, gl.BlockedLayout([8], [32], [WARPS], [0]))


@gluon.jit
def _multiply(state, x, out, use_acc: gl.constexpr, layout: gl.constexpr):
    """Return ``out + state @ x`` [BZ, BT] for a tile of S^T [BZ, BX] and of X^T [BX, BT].

    In two steps, so that only half of the rounded state is in registers at a time.
    """
    BX: gl.constexpr = state.shape[1]
    halves = state.reshape([BZ, 2, BX // 2]).permute((0, 2, 1)).split()
    for half in gl.static_range(2):
        operand = gl.convert_layout(halves[half].to(x.dtype), layout)
        columns = x.slice(half * (BX // 2), BX // 2)
        out = warpgroup_mma(operand, columns, out, is_async=True, use_acc=use_acc or half == 1)
        if half == 0:
            out = warpgroup_mma_wait(0, deps=[out])
    return out


@gluon.jit
def _split(vector, dtype: gl.constexpr, layout: gl.constexpr):
    """Return a float32 vector [N] as the columns [N, 8] of a matrix product: its rounded value and what is left of it,
    in turn; all eight add up to four times the vector."""
    high = vector.to(dtype)
    low = (vector - high.to(gl.float32)).to(dtype)
    column = gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    return gl.where(column % 2 == 0, high[:, None], low[:, None])


@gluon.jit
def _store_gates(buffers, stage, gates, n, DIVIDED: gl.constexpr):
    """Put a tile's gates, as :func:`load_gates` returns them, into shared memory, with denominators also n."""
    query, key, log_row, log_weight, log_decay, log_floor = gates
    row, weight, floor = gl.exp2(log_row), gl.exp2(log_weight), gl.exp2(log_floor)
    decay = gl.exp2(log_decay)
    # All in one store: between several there would be barriers.
    first = gl.join(gl.join(query, key), gl.join(row, weight))
    second = gl.join(gl.join(gl.zeros_like(row) + decay, floor), gl.join(row, row))
    vectors = gl.join(first, second).permute((3, 2, 1, 0))
    buffers.gates.index(stage).store(vectors.reshape([VECTORS * query.shape[0]]))
    if DIVIDED:
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
        n_layout: gl.constexpr = n.type.layout.parent
        enters = gl.convert_layout(weight, gl.SliceLayout(1, layout))
        buffers.weight.permute((1, 0)).store(_split(enters, buffers.weight.dtype, layout))
        buffers.n.permute((1, 0)).store(_split(n, buffers.n.dtype, n_layout))
        fence_async_shared()
    barrier()
    return decay


@gluon.jit
def _prepare(
    tensors,
    buffers,
    pointers,
    denominators,
    chunk,
    log_scale,
    T,
    SHAPE: gl.constexpr,
    ROLE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Prepare a chunk tile by tile for the groups that walk it. The copies of the first steps are under way.

    With ``denominators`` also compute those of mLSTMexp, as normaliser.py does:

        n_t = exp(a_t + m_{t-1} - m_t) n_{t-1} + exp(u_t - m_t) k_t      denom_t = max(|scale n_t^T q_t|, exp(-m_t))
    """
    DX: gl.constexpr = SHAPE.dim_x
    BT: gl.constexpr = TILE.block_t
    BX: gl.constexpr = TILE.block_x
    # Of wide blocks the tile of the columns beyond 128, of which the last may be empty.
    BEYOND: gl.constexpr = max(TILE.used_x - 128, 0)
    STAGES: gl.constexpr = TILE.num_stages
    FUTURE: gl.constexpr = ROLE.future
    DIVIDED: gl.constexpr = denominators.log_denom is not None
    DTYPE: gl.constexpr = buffers.x.dtype
    # Groups with two tiles of the state leave few registers: scores then come in parts, but for h of wide heads, and
    # beside denominators the next gates are loaded when they are needed.
    LATE: gl.constexpr = DIVIDED and TILE.state_tiles == 2
    QUARTERS: gl.constexpr = LATE and denominators.n_states is None
    WHOLE: gl.constexpr = BX > 128 and not (FUTURE or ROLE.transposed)
    BS: gl.constexpr = BT // 4 if QUARTERS else BT if WHOLE else BT // TILE.state_tiles
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BS, 16])
    query_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    key_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    # Products with vectors have eight columns, the least that there can be: the vector's rounded value and the rest.
    vector_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 16])
    n_layout: gl.constexpr = gl.SliceLayout(1, vector_layout)
    start, end, pid_bh = chunk.start, chunk.end, chunk.pid_bh

    offs_t = gl.arange(0, BT, query_layout)
    offs_s = gl.arange(0, BS, key_layout)
    offs_x = gl.arange(0, BX, n_layout)
    n = gl.zeros([BX], gl.float32, n_layout)
    if DIVIDED and denominators.n_states is not None:
        n += gl.load(denominators.n_states + chunk.state // SHAPE.dim_z + offs_x, mask=offs_x < DX, other=0.0)
    tiles = gl.cdiv(end - start, BT)
    t0 = start + (tiles - 1) * BT if FUTURE else start
    gates = load_gates(pointers.gates, pid_bh, t0, T, log_scale, FUTURE, BT)
    decay = _store_gates(buffers, 0, gates, n, DIVIDED)
    for tile in range(tiles):
        stage = tile % STAGES
        vectors = buffers.gates.index(stage)
        next_t = t0 - BT if FUTURE else t0 + BT
        next_t = gl.where(tile + 1 < tiles, next_t, t0)
        if not LATE:
            gates = load_gates(pointers.gates, pid_bh, next_t, T, log_scale, FUTURE, BT)
        mbarrier.wait(buffers.loaded.index(stage), (tile // STAGES) & 1)
        x = buffers.x.index(stage)
        y = buffers.y.index(stage)
        if DIVIDED:
            zeros = gl.zeros([BT, 8], gl.float32, vector_layout)
            past = warpgroup_mma(x, buffers.n.permute((1, 0)), zeros, is_async=True, use_acc=False)
            n_q = gl.zeros([BT], gl.float32, query_layout)
        rows = vectors.slice((KEY if FUTURE else QUERY) * BT, BT).load(query_layout)
        for part in gl.static_range(BT // BS):
            zeros = gl.zeros([BT, BS], gl.float32, scores_layout)
            keys = y.slice(part * BS, BS).permute((1, 0))
            if BEYOND == 0 or BEYOND == 128:
                scores = warpgroup_mma(x, keys, zeros, is_async=True, use_acc=False)
            else:
                past_128 = x.slice(128, BEYOND, dim=1)
                scores = warpgroup_mma(x.slice(0, 128, dim=1), keys.slice(0, 128), zeros, is_async=True, use_acc=False)
                scores = warpgroup_mma(past_128, keys.slice(128, BEYOND), scores, is_async=True)
            columns = vectors.slice((QUERY if FUTURE else KEY) * BT + part * BS, BS).load(key_layout)
            if DIVIDED and part == 0:
                scores, past = warpgroup_mma_wait(0, deps=[scores, past])
            else:
                scores = warpgroup_mma_wait(0, deps=[scores])
            there = part * BS + offs_s
            kept = (offs_t[:, None] <= there[None, :]) if FUTURE else (offs_t[:, None] >= there[None, :])
            scores = gl.where(kept, scores * gl.exp2(rows[:, None] + columns[None, :]), 0.0)
            buffers.scores.index(stage).slice(part * BS, BS, dim=1).store(scores.to(DTYPE))
            if DIVIDED:
                n_q += gl.sum(scores, axis=1)
        if DIVIDED:
            past = gl.convert_layout(gl.sum(past, axis=1), query_layout) * 0.25
            n_q += past * vectors.slice(ROW * BT, BT).load(query_layout)
            denominator = gl.maximum(gl.abs(n_q), vectors.slice(FLOOR * BT, BT).load(query_layout))
            vectors.slice(DIVISOR * BT, BT).store(1.0 / denominator)
        fence_async_shared()
        barrier()
        mbarrier.arrive(buffers.ready.index(stage), count=1)
        ahead = tile + STAGES - 1
        ahead_t = t0 - (STAGES - 1) * BT if FUTURE else t0 + (STAGES - 1) * BT
        mbarrier.wait(buffers.freed.index(ahead % STAGES), (ahead // STAGES + 1) & 1, pred=tile > 0)
        load_tiles(tensors, buffers, ahead % STAGES, ahead_t, chunk.x_col, chunk.z_col, ahead < tiles)
        if LATE:
            gates = load_gates(pointers.gates, pid_bh, next_t, T, log_scale, FUTURE, BT)
        if DIVIDED:
            at = pid_bh * T + t0 + offs_t
            gl.store(denominators.log_denom + at, gl.log2(denominator), mask=(t0 + offs_t < end) & (chunk.z_col == 0))
            zeros = gl.zeros([BX, 8], gl.float32, vector_layout)
            weight = buffers.weight.permute((1, 0))
            entered = warpgroup_mma(y.permute((1, 0)), weight, zeros, is_async=True, use_acc=False)
            entered = warpgroup_mma_wait(0, deps=[entered])
            n = n * decay + gl.sum(entered, axis=1) * 0.25
        t0 = next_t
        decay = _store_gates(buffers, (tile + 1) % STAGES, gates, n, DIVIDED)
    if DIVIDED and denominators.n_last is not None:
        gl.store(denominators.n_last + pid_bh * DX + offs_x, n, mask=(offs_x < DX) & (chunk.z_col == 0))


@gluon.jit
def _walk(
    tensors,
    buffers,
    pointers,
    chunk,
    T,
    BH,
    every,
    group: gl.constexpr,
    DIVIDED: gl.constexpr,
    SHAPE: gl.constexpr,
    ROLE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Process a chunk tile by tile for one group's columns."""
    DX: gl.constexpr = SHAPE.dim_x
    DZ: gl.constexpr = SHAPE.dim_z
    BT: gl.constexpr = TILE.block_t
    BX: gl.constexpr = min(TILE.block_x, 128)
    NX: gl.constexpr = TILE.block_x // BX
    # Columns of the second tile, where there is one.
    OTHER: gl.constexpr = TILE.used_x - BX if NX == 2 else BX
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
    Z: gl.constexpr = group * NZ * BZ

    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BX, 16])
    other_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, OTHER, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BT, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    weighted_layout: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)
    other_weighted_layout: gl.constexpr = gl.DotOperandLayout(0, other_layout, 2)
    sums_layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
    flat_layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])

    offs_z = z_col + Z + gl.arange(0, BZ, gl.SliceLayout(1, state_layout))
    offs_x = gl.arange(0, BX, gl.SliceLayout(0, state_layout))
    other_z = z_col + Z + (BZ if NZ == 2 else 0) + gl.arange(0, BZ, gl.SliceLayout(1, other_layout))
    other_x = (BX if NX == 2 else 0) + gl.arange(0, OTHER, gl.SliceLayout(0, other_layout))
    mask = (offs_z < DZ)[:, None] & (offs_x < DX - x_col)[None, :]
    other_mask = (other_z < DZ)[:, None] & (other_x < DX - x_col)[None, :]
    corner = x_col if ROLE.transposed else x_col * DZ
    state = gl.zeros([BZ, BX], gl.float32, state_layout)
    other = gl.zeros([BZ, OTHER], gl.float32, other_layout)
    if pointers.state is not None:
        entry = pointers.state + chunk.state + corner
        at = elements(entry, offs_z, offs_x, DX, DZ, ROLE.transposed)
        state += gl.load(at, mask=mask, other=0.0).to(gl.float32)
        if TWO:
            at = elements(entry, other_z, other_x, DX, DZ, ROLE.transposed)
            other += gl.load(at, mask=other_mask, other=0.0).to(gl.float32)

    share = z_col // (NZ * BZ) + group
    planes = BH.to(gl.int64) * T
    num_anchors = gl.cdiv(T, every)
    tiles = gl.cdiv(end - start, BT)
    # Between two anchors is a stretch; only the last one may be shorter.
    per_stretch = every // BT if ANCHORS else tiles
    stretches = gl.cdiv(tiles, per_stretch)
    if group == 1:
        # In the last block of columns it may have none, and does nothing.
        stretches = gl.where(chunk.two_groups, stretches, 0)
    t0 = start + (tiles - 1) * BT if FUTURE else start
    tile = 0
    for stretch in range(stretches):
        is_last = stretch == (0 if FUTURE else stretches - 1)
        count = gl.where(is_last, tiles - (stretches - 1) * per_stretch, per_stretch)
        if ANCHORS:
            index = pid_bh * num_anchors + start // every + (stretches - 1 - stretch if FUTURE else stretch)
            anchor = pointers.anchor_states + index * STATE + share * NX * BZ * BX
            if TWO:
                other_anchor = anchor + BZ * BX + gl.arange(0, BZ * OTHER, layout=flat_layout)
            anchor += gl.arange(0, BZ * BX, layout=flat_layout)
            if not FUTURE:
                gl.store(anchor, _flatten(state.to(DTYPE), BX))
                if TWO:
                    gl.store(other_anchor, _flatten(other.to(DTYPE), OTHER))
        for _ in range(count):
            stage = tile % STAGES
            gates = buffers.gates.index(stage)
            if SUMS or PARTIAL:
                extra = buffers.extra_loaded.index(group)
                mbarrier.expect(extra, 2 * BT * BZ * (SUMS + PARTIAL))
                # They come where the output of the step before was.
                tma.store_wait(0)
                barrier()
            if SUMS:
                load_async(tensors.pair, [t0, z_col + Z], extra, buffers.pair.index(group))
            if PARTIAL:
                load_async(tensors.partial, [t0, z_col + Z], extra, buffers.out.index(group))
            mbarrier.wait(buffers.loaded.index(stage), (tile // STAGES) & 1)
            x = buffers.x.index(stage)
            y = buffers.y.index(stage)
            z = buffers.z.index(stage)
            x_t = x.permute((1, 0))
            scores_t = buffers.scores.index(stage).permute((1, 0))

            zeros = gl.zeros([BZ, BT], gl.float32, out_layout)
            out = _multiply(state, x_t.slice(0, BX), zeros, False, operand_layout)
            if NX == 2:
                out = warpgroup_mma_wait(0, deps=[out])
                out = _multiply(other, x_t.slice(BX, OTHER), out, True, operand_layout)
            mbarrier.wait(buffers.ready.index(stage), (tile // STAGES) & 1)
            mbarrier.wait(buffers.loaded_z.index(stage), (tile // STAGES) & 1)
            decay = gates.slice(DECAY * BT, BT).load(gl.SliceLayout(1, state_layout))[:, None]
            other_decay = gl.convert_layout(decay, other_layout)
            for half in gl.static_range(NZ):
                if half == 1:
                    out = _multiply(other, x_t, zeros, False, operand_layout)
                z_t = z.slice(Z + half * BZ, BZ, dim=1).permute((1, 0))
                row_factor = gates.slice(ROW * BT, BT).load(gl.SliceLayout(0, out_layout))[None, :]
                out = warpgroup_mma_wait(0, deps=[out])
                out = warpgroup_mma(z_t, scores_t, out * row_factor, is_async=True)
                enters = gates.slice(WEIGHT * BT, BT).load(gl.SliceLayout(0, weighted_layout))[None, :]
                weighted = (z_t.load(weighted_layout).to(gl.float32) * enters).to(DTYPE)
                if NX == 2:
                    state = warpgroup_mma(weighted, y.slice(0, BX, dim=1), state * decay, is_async=True)
                    weighted = gl.convert_layout(weighted, other_weighted_layout)
                    other = warpgroup_mma(weighted, y.slice(BX, OTHER, dim=1), other * other_decay, is_async=True)
                    out = warpgroup_mma_wait(2, deps=[out])
                elif half == 0:
                    state = warpgroup_mma(weighted, y, state * decay, is_async=True)
                    out, state = warpgroup_mma_wait(0, deps=[out, state])
                else:
                    other = warpgroup_mma(weighted, y, other * other_decay, is_async=True)
                    out = warpgroup_mma_wait(1, deps=[out])
                out_s = buffers.out.index(group * NZ + half)
                if SUMS or PARTIAL:
                    mbarrier.wait(extra, tile & 1)
                tma.store_wait(NZ - 1)
                barrier()
                if PARTIAL:
                    out += out_s.permute((1, 0)).load(out_layout).to(gl.float32)
                if DIVIDED:
                    out *= gates.slice(DIVISOR * BT, BT).load(gl.SliceLayout(0, out_layout))[None, :]
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
                barrier()
                store_async(tensors.out, [t0, z_col + Z + half * BZ], out_s)
            if TWO:
                state, other = warpgroup_mma_wait(0, deps=[state, other])
            else:
                state = warpgroup_mma_wait(0, deps=[state])
            barrier()
            mbarrier.arrive(buffers.freed.index(stage), count=1)
            if group == 0 and TILE.groups == 2:
                mbarrier.arrive(buffers.freed.index(stage), count=1, pred=chunk.two_groups == 0)
            t0 = t0 - BT if FUTURE else t0 + BT
            tile += 1
        if ANCHORS and FUTURE:
            dot = gl.sum(gl.load(anchor).to(gl.float32) * _flatten(state, BX), axis=0)
            if TWO:
                dot += gl.sum(gl.load(other_anchor).to(gl.float32) * _flatten(other, OTHER), axis=0)
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
    denominators,
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
    With ``denominators`` (roles.Denominators) the program makes those of mLSTMexp, divides by them and writes them;
    all of DX is then one block.
    """
    H: gl.constexpr = SHAPE.heads
    DX: gl.constexpr = SHAPE.dim_x
    DZ: gl.constexpr = SHAPE.dim_z
    BT: gl.constexpr = TILE.block_t
    STAGES: gl.constexpr = TILE.num_stages
    GROUPS: gl.constexpr = TILE.groups
    DIVIDED: gl.constexpr = denominators.log_denom is not None
    # A thread's registers in the second group that walks and in the one that prepares; the first gets what they leave.
    # As measured: where the state takes many, more for those who walk until the other one spills.
    REGISTERS: gl.constexpr = [176, 152] if TILE.state_tiles == 1 else [208, 88] if DIVIDED else [216, 72]
    PREPARES_ALONE: gl.constexpr = [112 if TILE.block_x == 64 else 88]
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
    out_s = gl.allocate_shared_memory(DTYPE, [TILE.block_z // BZ, BT, BZ], layout)
    pair_s = out_s
    if pair_ptr is not None and partial_ptr is not None:
        pair_s = gl.allocate_shared_memory(DTYPE, [GROUPS, BT, BZ], layout)
    n_s = None
    weight_s = None
    if DIVIDED:
        n_s = gl.allocate_shared_memory(DTYPE, [8, TILE.block_x], layout)
        weight_s = gl.allocate_shared_memory(DTYPE, [8, BT], layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = Buffers(
        gl.allocate_shared_memory(DTYPE, [STAGES, BT, TILE.block_x], layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, BT, TILE.block_x], layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, BT, TILE.block_z], layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, BT, BT], layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, VECTORS * BT], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        out_s,
        pair_s,
        n_s,
        weight_s,
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barriers),
    )
    # Only barriers that are waited for: the memory of others would be used again, and the hardware writes to it.
    for stage in gl.static_range(STAGES):
        mbarrier.init(buffers.loaded.index(stage), count=1)
        mbarrier.init(buffers.loaded_z.index(stage), count=1)
        mbarrier.init(buffers.ready.index(stage), count=1)
        mbarrier.init(buffers.freed.index(stage), count=GROUPS)
    if pair_ptr is not None or partial_ptr is not None:
        for group in gl.static_range(GROUPS):
            mbarrier.init(buffers.extra_loaded.index(group), count=1)
    fence_async_shared()
    barrier()
    end = gl.minimum(start + L, T)
    tensors = Tensors(x_desc, y_desc, z_desc)
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
    chunk = Chunk(start, end, pid_bh, (pid_bh * N + pid_n) * DX * DZ, x_col, z_col, z_col + TILE.block_z // GROUPS < DZ)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_walk, (tensors, buffers, pointers, chunk, T, BH, every, 0, DIVIDED, SHAPE, ROLE, TILE)),
                (_prepare, (tensors, buffers, pointers, denominators, chunk, log_scale, T, SHAPE, ROLE, TILE)),
            ],
            [WARPS],
            PREPARES_ALONE,
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (tensors, buffers, pointers, chunk, T, BH, every, 0, DIVIDED, SHAPE, ROLE, TILE)),
                (_walk, (tensors, buffers, pointers, chunk, T, BH, every, 1, DIVIDED, SHAPE, ROLE, TILE)),
                (_prepare, (tensors, buffers, pointers, denominators, chunk, log_scale, T, SHAPE, ROLE, TILE)),
            ],
            [WARPS, WARPS],
            REGISTERS,
        )
