"""The fused chunk kernel for Hopper: one program holds the whole state of a head, in registers, transposed.

It computes what fused_chunk.py does, the four products of roles.py, for a chunk processed tile by tile. There a program
has the state of 64 columns of the output, so X and Y are read, and X Y^T is computed, once for every 64 columns. Here

    O^T = S^T X^T * rows(W_in) + Z^T (Y X^T * W^T)        S^T <- decay S^T + Z^T (rows(w) Y)

with S^T as the left operand, which Hopper's tensor cores take from registers: the state makes no trip through shared
memory, and X and Y are read once. A program has one tile of S^T, of at most 128 x 128, or two side by side: along Z (h
and dv, whose Z is wide) or along X (dq and dk). The bulk copy engine loads the next step's X, Y and Z while this one is
computed; gates are loaded a step ahead too, one value a thread, and pass through shared memory.

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


@gluon.jit
def _load_tiles(x_desc, y_desc, z_desc, x_s, y_s, z_s, bar, t0, z_col, pred, BYTES: gl.constexpr):
    """Start the copies of one step's tiles; ``bar`` completes when they are there."""
    mbarrier.expect(bar, BYTES, pred=pred)
    tma.async_copy_global_to_shared(x_desc, [t0, 0], bar, x_s, pred=pred)
    tma.async_copy_global_to_shared(y_desc, [t0, 0], bar, y_s, pred=pred)
    tma.async_copy_global_to_shared(z_desc, [t0, z_col], bar, z_s, pred=pred)


@gluon.jit
def _load_gates(gates, head, t0, T, log_scale, FUTURE: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr):
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
def _store_gates(gates_s, stage, query, key, row, weight):
    """Put a tile's gates where every warp finds them."""
    gates_s.index(4 * stage).store(query)
    gates_s.index(4 * stage + 1).store(key)
    gates_s.index(4 * stage + 2).store(row)
    gates_s.index(4 * stage + 3).store(weight)


@gluon.jit
def _elements(ptr, start, row, col, DX: gl.constexpr, DZ: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Return pointers to a state's elements (z = row, x = col): states are [DX, DZ], TRANSPOSED [DZ, DX]."""
    if TRANSPOSED:
        offs = row[:, None] * DX + col[None, :]
    else:
        offs = col[None, :] * DZ + row[:, None]
    return ptr + start + offs


@gluon.jit
def _flatten(state, BZ: gl.constexpr, BX: gl.constexpr):
    """Return a state tile's elements in an order in which every thread has 16 bytes side by side, as it holds them."""
    # A thread of the layout has rows lane / 4 and lane / 4 + 8 of its warp's sixteen, and of every eight columns the
    # pair lane % 4: rows are (warp, half, lane / 4), columns (which 32, which 8 of them, lane % 4, which of the pair).
    parts = state.reshape([BZ // 16, 2, 8, BX // 32, 4, 4, 2])
    flat = parts.permute((1, 3, 0, 2, 5, 4, 6)).reshape([BZ * BX])
    return gl.convert_layout(flat, gl.BlockedLayout([8], [32], [BZ // 16], [0]))


@remember_launches
@gluon.jit(do_not_specialize=["T", "L", "N", "BH", "log_scale", "every"])
def whole_state_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    state_ptr,
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
    SHAPE: gl.constexpr,
    ROLE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Process one chunk for block_z columns of the output and the whole contraction.

    Grid: (ceil(DZ / block_z) * N * B * H,).
    Reads and writes what fused_chunk.fused_chunk_kernel does, where the arguments are explained too. ``log_scale`` is
    the scale's logarithm to base 2; the states at the anchors are [B, H, ceil(T / every)] tiles in the order of
    :func:`_flatten`, padded to whole blocks.
    """
    H: gl.constexpr = SHAPE.heads
    DX: gl.constexpr = SHAPE.dim_x
    DZ: gl.constexpr = SHAPE.dim_z
    BT: gl.constexpr = TILE.block_t
    BX: gl.constexpr = min(TILE.block_x, 128)
    BZ: gl.constexpr = min(TILE.block_z, 128)
    NX: gl.constexpr = TILE.block_x // BX
    NZ: gl.constexpr = TILE.block_z // BZ
    WARPS: gl.constexpr = TILE.num_warps
    FUTURE: gl.constexpr = ROLE.future
    PAIR: gl.constexpr = pair_ptr is not None
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    X_ROW: gl.constexpr = (H // SHAPE.group_x) * DX
    Z_ROW: gl.constexpr = (H // SHAPE.group_z) * DZ
    OUT_ROW: gl.constexpr = H * DZ
    gl.static_assert(not PAIR or NZ == 1, "the sums of rows are those of one tile")
    COLUMNS: gl.constexpr = (DZ + TILE.block_z - 1) // TILE.block_z
    STATE: gl.constexpr = COLUMNS * TILE.block_z * TILE.block_x

    pid = gl.program_id(0)
    pid_z = pid % COLUMNS
    pid_n = (pid // COLUMNS) % N
    pid_bh = (pid // (COLUMNS * N)).to(gl.int64)
    batch = pid_bh // H
    head = pid_bh % H
    z_col = pid_z * NZ * BZ
    start = pid_n * L
    end = gl.minimum(start + L, T)
    x_offset = batch * T * X_ROW + (head // SHAPE.group_x) * DX
    z_offset = batch * T * Z_ROW + (head // SHAPE.group_z) * DZ
    out_offset = batch * T * OUT_ROW + head * DZ

    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_desc = tma.make_tensor_descriptor(x_ptr + x_offset, [T, DX], [X_ROW, 1], [BT, NX * BX], layout)
    y_desc = tma.make_tensor_descriptor(y_ptr + x_offset, [T, DX], [X_ROW, 1], [BT, NX * BX], layout)
    z_desc = tma.make_tensor_descriptor(z_ptr + z_offset, [T, DZ], [Z_ROW, 1], [BT, NZ * BZ], layout)
    out_desc = tma.make_tensor_descriptor(out_ptr + out_offset, [T, DZ], [OUT_ROW, 1], [BT, BZ], layout)
    if PAIR:
        pair_desc = tma.make_tensor_descriptor(pair_ptr + z_offset, [T, DZ], [Z_ROW, 1], [BT, BZ], layout)
        pair_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(pair_bar, count=1)
    xs = gl.allocate_shared_memory(DTYPE, [2, BT, NX * BX], layout)
    ys = gl.allocate_shared_memory(DTYPE, [2, BT, NX * BX], layout)
    zs = gl.allocate_shared_memory(DTYPE, [2, BT, NZ * BZ], layout)
    # What enters the state has its weight: Y or Z, whichever is narrower.
    WEIGH_Z: gl.constexpr = NX > NZ
    weighted_s = gl.allocate_shared_memory(DTYPE, [BT, NZ * BZ if WEIGH_Z else NX * BX], layout)
    scores_s = gl.allocate_shared_memory(DTYPE, [BT, BT], layout)
    out_s = gl.allocate_shared_memory(DTYPE, [BT, BZ], layout)
    gates_s = gl.allocate_shared_memory(gl.float32, [8, BT], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(2):
        mbarrier.init(bars.index(each), count=1)
    fence_async_shared()

    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BX, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BT, 16])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BT * 4 // WARPS, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    vector_layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    flat_layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])

    offs_s = gl.arange(0, BT, gl.SliceLayout(1, score_layout))
    offs_t = gl.arange(0, BT, gl.SliceLayout(0, score_layout))
    offs_v = gl.arange(0, BT, vector_layout)
    offs_z = z_col + gl.arange(0, BZ, gl.SliceLayout(1, state_layout))
    offs_x = gl.arange(0, BX, gl.SliceLayout(0, state_layout))

    state = gl.zeros([BZ, BX], gl.float32, state_layout)
    other = gl.zeros([BZ, BX], gl.float32, state_layout)
    other_x: gl.constexpr = BX if NX == 2 else 0
    other_z: gl.constexpr = BZ if NZ == 2 else 0
    TWO: gl.constexpr = NX * NZ == 2
    mask = (offs_z < DZ)[:, None] & (offs_x < DX)[None, :]
    other_mask = (offs_z + other_z < DZ)[:, None] & (offs_x + other_x < DX)[None, :]
    if state_ptr is not None:
        first = (pid_bh * N + pid_n) * DX * DZ
        state += gl.load(_elements(state_ptr, first, offs_z, offs_x, DX, DZ, ROLE.transposed), mask=mask, other=0.0).to(
            gl.float32
        )
        if TWO:
            other += gl.load(
                _elements(state_ptr, first, offs_z + other_z, offs_x + other_x, DX, DZ, ROLE.transposed),
                mask=other_mask, other=0.0,
            ).to(gl.float32)  # fmt: skip

    tiles = gl.cdiv(end - start, BT)
    num_anchors = gl.cdiv(T, every)
    BYTES: gl.constexpr = 2 * BT * (2 * NX * BX + NZ * BZ)
    t0 = start + (tiles - 1) * BT if FUTURE else start
    query, key, row, weight, decay = _load_gates(gates, pid_bh, t0, T, log_scale, FUTURE, BT, WARPS)
    _store_gates(gates_s, 0, query, key, row, weight)
    _load_tiles(x_desc, y_desc, z_desc, xs.index(0), ys.index(0), zs.index(0), bars.index(0), t0, z_col, True, BYTES)
    gl.thread_barrier()
    for tile in range(tiles):
        stage = tile & 1
        following = (tile + 1) & 1
        more = tile + 1 < tiles
        next_t = t0 - BT if FUTURE else t0 + BT
        next_t = gl.where(more, next_t, t0)
        query, key, row, weight, next_decay = _load_gates(gates, pid_bh, next_t, T, log_scale, FUTURE, BT, WARPS)
        gate = 4 * stage

        mbarrier.wait(bars.index(stage), (tile >> 1) & 1)
        _load_tiles(
            x_desc, y_desc, z_desc, xs.index(following), ys.index(following), zs.index(following),
            bars.index(following), next_t, z_col, more, BYTES,
        )  # fmt: skip
        x = xs.index(stage)
        y = ys.index(stage)
        z = zs.index(stage)
        x_t = x.permute((1, 0))
        if PAIR:
            tma.store_wait(0)
            gl.thread_barrier()
            mbarrier.expect(pair_bar, 2 * BT * BZ)
            tma.async_copy_global_to_shared(pair_desc, [t0, z_col], pair_bar, out_s)
            at_anchor = t0 % every == 0
            anchor = (pid_bh * num_anchors + t0 // every) * STATE + pid_z * NZ * NX * BZ * BX
            anchor_offs = gl.arange(0, BZ * BX, layout=flat_layout)
            anchor_mask = (anchor_offs >= 0) & at_anchor

        zeros = gl.zeros([BT, BT], gl.float32, score_layout)
        scores = warpgroup_mma(y, x_t, zeros, is_async=True, use_acc=False)
        rounded = state.to(DTYPE)
        if PAIR and not FUTURE:
            gl.store(anchor_states_ptr + anchor + anchor_offs, _flatten(rounded, BZ, BX), mask=anchor_mask)
        operand = gl.convert_layout(rounded, operand_layout)
        zeros = gl.zeros([BZ, BT], gl.float32, out_layout)
        if NX == 2:
            out = warpgroup_mma(operand, x.slice(0, BX, dim=1).permute((1, 0)), zeros, is_async=True, use_acc=False)
        else:
            out = warpgroup_mma(operand, x_t, zeros, is_async=True, use_acc=False)
        enters = gates_s.index(gate + 3).load(gl.SliceLayout(1, copy_layout))[:, None]
        if WEIGH_Z:
            weighted_s.store((z.load(copy_layout).to(gl.float32) * enters).to(DTYPE))
        else:
            weighted_s.store((y.load(copy_layout).to(gl.float32) * enters).to(DTYPE))
        scores = warpgroup_mma_wait(1, deps=[scores])
        if FUTURE:
            exponent = (
                gates_s.index(gate).load(offs_s.type.layout)[:, None]
                + gates_s.index(gate + 1).load(offs_t.type.layout)[None, :]
            )
            kept = gl.where(offs_s[:, None] >= offs_t[None, :], gl.exp2(exponent), 0.0)
        else:
            exponent = (
                gates_s.index(gate + 1).load(offs_s.type.layout)[:, None]
                + gates_s.index(gate).load(offs_t.type.layout)[None, :]
            )
            kept = gl.where(offs_s[:, None] <= offs_t[None, :], gl.exp2(exponent), 0.0)
        scores_s.store((scores * kept).to(DTYPE))
        if NX == 2:
            out = warpgroup_mma_wait(0, deps=[out])
            rounded = other.to(DTYPE)
            if PAIR and not FUTURE:
                gl.store(
                    anchor_states_ptr + anchor + BZ * BX + anchor_offs, _flatten(rounded, BZ, BX), mask=anchor_mask
                )
            operand = gl.convert_layout(rounded, operand_layout)
            out = warpgroup_mma(operand, x.slice(BX, BX, dim=1).permute((1, 0)), out, is_async=True)
        fence_async_shared()
        gl.thread_barrier()
        out = warpgroup_mma_wait(0, deps=[out])
        row_factor = gates_s.index(gate + 2).load(gl.SliceLayout(0, out_layout))[None, :]
        out = out * row_factor
        if NZ == 2:
            z_t = z.slice(0, BZ, dim=1).permute((1, 0))
        else:
            z_t = z.permute((1, 0))
        out = warpgroup_mma(z_t, scores_s, out, is_async=True)
        if WEIGH_Z:
            weighted_t = weighted_s.permute((1, 0))
            state = warpgroup_mma(weighted_t, y.slice(0, BX, dim=1), state * decay, is_async=True)
            other = warpgroup_mma(weighted_t, y.slice(BX, BX, dim=1), other * decay, is_async=True)
            out = warpgroup_mma_wait(2, deps=[out])
        else:
            state = warpgroup_mma(z_t, weighted_s, state * decay, is_async=True)
            if NZ == 2:
                operand = gl.convert_layout(other.to(DTYPE), operand_layout)
            out = warpgroup_mma_wait(1, deps=[out])
        if PAIR:
            mbarrier.wait(pair_bar, tile & 1)
            pair = out_s.permute((1, 0)).load(out_layout).to(gl.float32)
            sums = gl.convert_layout(gl.sum(out * pair, axis=0), vector_layout)
            gl.store(sums_ptr + (pid_z * BH.to(gl.int64) + pid_bh) * T + t0 + offs_v, sums, mask=offs_v < T - t0)
        else:
            tma.store_wait(0)
        gl.thread_barrier()
        out_s.permute((1, 0)).store(out.to(DTYPE))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [t0, z_col], out_s)
        if NZ == 2:
            out = warpgroup_mma(operand, x_t, zeros, is_async=True, use_acc=False)
            out = warpgroup_mma_wait(0, deps=[out])
            out = out * row_factor
            z_t = z.slice(BZ, BZ, dim=1).permute((1, 0))
            out = warpgroup_mma(z_t, scores_s, out, is_async=True)
            other = warpgroup_mma(z_t, weighted_s, other * decay, is_async=True)
            out = warpgroup_mma_wait(1, deps=[out])
            tma.store_wait(0)
            gl.thread_barrier()
            out_s.permute((1, 0)).store(out.to(DTYPE))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(out_desc, [t0, z_col + BZ], out_s)
        if TWO:
            state, other = warpgroup_mma_wait(0, deps=[state, other])
        else:
            state = warpgroup_mma_wait(0, deps=[state])
        if PAIR and FUTURE:
            if at_anchor:
                before = gl.load(anchor_states_ptr + anchor + anchor_offs).to(gl.float32)
                dot = gl.sum(before * _flatten(state, BZ, BX), axis=0)
                if TWO:
                    before = gl.load(anchor_states_ptr + anchor + BZ * BX + anchor_offs).to(gl.float32)
                    dot += gl.sum(before * _flatten(other, BZ, BX), axis=0)
                gl.store(anchor_ptr + (pid_z * BH.to(gl.int64) + pid_bh) * num_anchors + t0 // every, dot)
        _store_gates(gates_s, following, query, key, row, weight)
        decay = next_decay
        t0 = next_t
        gl.thread_barrier()
    tma.store_wait(0)

    if last_ptr is not None:
        first = pid_bh * DX * DZ
        gl.store(_elements(last_ptr, first, offs_z, offs_x, DX, DZ, ROLE.transposed), state, mask=mask)
        if TWO:
            gl.store(
                _elements(last_ptr, first, offs_z + other_z, offs_x + other_x, DX, DZ, ROLE.transposed), other,
                mask=other_mask,
            )  # fmt: skip
