"""What every chunk adds to the state, for whole_state.py: the first half of the pass over the chunks, on Hopper.

    S^T <- decay S^T + (Z^T * w) Y

starts from zero at the chunk's start (backward in time: at its end) and takes the chunk tile by tile with S^T in
registers. Y and Z are k and v, or q and dh backward in time. A program has 128 columns of Z and of Y, so that head dims
up to 128 are read once. merge_chunk_states_kernel then turns the chunks' contributions into states. Source: TFLA paper,
appendices B.2 and B.3; chunk_states.py computes the same on any GPU.
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
    WARPS,
    Buffers,
    Tensors,
    allocate_barriers,
    barrier,
    document_at,
    elements,
    load_first_tiles,
    load_gates,
    load_tiles,
    start_of,
)


@remember_launches
@gluon.jit(do_not_specialize=["T", "L", "N", "heads", "whole_heads", "log_scale"])
def chunk_states_hopper_kernel(
    y_ptr,
    z_ptr,
    gates,
    states_ptr,
    n_states_ptr,
    starts,
    resets,
    log_scale,
    T,
    L,
    N,
    heads,
    whole_heads,
    SHAPE: gl.constexpr,
    FUTURE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Compute the contribution of one chunk to block_x rows and block_z columns of the state.

    Grid: (ceil(DX / block_x) * ceil(DZ / block_z) * chunks * heads,) for the cut heads, those of the B * H from number
    ``whole_heads`` on. ``chunks`` is N, or N - 1 if the last state is not wanted: the pass's last chunk (FUTURE: the
    first in time) is left out, since no chunk follows it.
    Reads Y [B, T, H / group_x, DX], Z [B, T, H / group_z, DZ] and the gate vectors; writes the contributions
    [heads, N, DX, DZ] and, unless None, those to n [heads, N, DX]. With ``resets`` (gates.is_first) only tiles up to
    the nearest first position of a document contribute.
    """
    H: gl.constexpr = SHAPE.heads
    DX: gl.constexpr = SHAPE.dim_x
    DZ: gl.constexpr = SHAPE.dim_z
    BT: gl.constexpr = TILE.block_t
    BX: gl.constexpr = TILE.block_x
    NZ: gl.constexpr = TILE.block_z // BZ
    STAGES: gl.constexpr = TILE.num_stages
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    WITH_N: gl.constexpr = n_states_ptr is not None
    ROWS: gl.constexpr = (DX + BX - 1) // BX
    COLUMNS: gl.constexpr = (DZ + TILE.block_z - 1) // TILE.block_z

    pid = gl.program_id(0)
    chunks = gl.num_programs(0) // (ROWS * COLUMNS * heads)
    z_col = pid % COLUMNS * TILE.block_z
    x_col = pid // COLUMNS % ROWS * BX
    pid_n = pid // (COLUMNS * ROWS) % chunks
    if FUTURE:
        pid_n += N - chunks
    row = (pid // (COLUMNS * ROWS * chunks)).to(gl.int64) * N + pid_n
    pid_bh = (pid // (COLUMNS * ROWS * chunks) + whole_heads).to(gl.int64)
    batch = pid_bh // H
    head = pid_bh % H
    y_offset = start_of(0, starts.y, batch, head // SHAPE.group_x, T, SHAPE.row_y, DX)
    z_offset = start_of(0, starts.z, batch, head // SHAPE.group_z, T, SHAPE.row_z, DZ)

    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    y_desc = tma.make_tensor_descriptor(y_ptr + y_offset, [T, DX], [SHAPE.row_y, 1], [BT, BX], layout)
    z_desc = tma.make_tensor_descriptor(z_ptr + z_offset, [T, DZ], [SHAPE.row_z, 1], [BT, TILE.block_z], layout)
    y_s = gl.allocate_shared_memory(DTYPE, [STAGES, BT, BX], layout)
    z_s = gl.allocate_shared_memory(DTYPE, [STAGES, BT, TILE.block_z], layout)
    weights_s = gl.allocate_shared_memory(gl.float32, [2, BT], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    loaded = allocate_barriers(STAGES)
    tensors = Tensors(y=(y_desc,), z=z_desc)
    buffers = Buffers(y=(y_s,), z=z_s, gates=weights_s, loaded=loaded)
    for step in gl.static_range(STAGES):
        mbarrier.init(loaded.index(step), count=1)
    fence_async_shared()
    barrier()
    start = pid_n * L
    end = gl.minimum(start + L, T)
    if resets is not None:
        nearest = gl.load(resets[0] + document_at(resets, start - 1 if FUTURE else end - 1) + FUTURE).to(gl.int32)
        if FUTURE:
            end = gl.minimum(gl.maximum(nearest, start + 1), end)
        else:
            start += (gl.maximum(gl.minimum(nearest, end - 1), start) - start) // BT * BT
    tiles = gl.cdiv(end - start, BT)
    load_first_tiles(tensors, buffers, start, tiles, x_col, z_col, FUTURE, TILE)

    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BX, 16])
    weighted_layout: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)
    # For n, a thread adds up its RUN positions of eight columns of Y; the threads' sums are added after the loop.
    LANES: gl.constexpr = BX // 8
    RUN: gl.constexpr = BT * LANES // (32 * WARPS)
    y_layout: gl.constexpr = gl.BlockedLayout([RUN, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    n_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    state = gl.zeros([BZ, BX], gl.float32, state_layout)
    second = gl.zeros([BZ, BX], gl.float32, state_layout)
    n = gl.zeros([BT // RUN, BX], gl.float32, n_layout)

    STEP: gl.constexpr = -BT if FUTURE else BT
    t0 = start + (tiles - 1) * BT if FUTURE else start
    _, _, _, weight, decay, _ = load_gates(gates, pid_bh, t0, T, T, log_scale, FUTURE, BT)
    weights_s.index(0).store(gl.exp2(weight))
    barrier()
    for tile in range(tiles):
        stage = tile % STAGES
        ahead = tile + STAGES - 1
        load_tiles(tensors, buffers, ahead % STAGES, t0 + (STAGES - 1) * STEP, x_col, z_col, ahead < tiles)
        next_t = t0 + STEP
        next_t = gl.where(tile + 1 < tiles, next_t, t0)
        _, _, _, weight, next_decay, _ = load_gates(gates, pid_bh, next_t, T, T, log_scale, FUTURE, BT)
        factor = gl.exp2(decay)
        weights = weights_s.index(tile & 1).load(gl.SliceLayout(0, weighted_layout))[None, :]
        mbarrier.wait(loaded.index(stage), (tile // STAGES) & 1)
        y = y_s.index(stage)
        z = z_s.index(stage)
        weighted = (z.slice(0, BZ, dim=1).permute((1, 0)).load(weighted_layout).to(gl.float32) * weights).to(DTYPE)
        state = warpgroup_mma(weighted, y, state * factor, is_async=True)
        if NZ == 2:
            weighted = (z.slice(BZ, BZ, dim=1).permute((1, 0)).load(weighted_layout).to(gl.float32) * weights).to(DTYPE)
            second = warpgroup_mma(weighted, y, second * factor, is_async=True)
        if WITH_N:
            if z_col == 0:
                y_weights = weights_s.index(tile & 1).load(gl.SliceLayout(1, y_layout))[:, None]
                runs = (y.load(y_layout).to(gl.float32) * y_weights).reshape([BT // RUN, RUN, BX])
                n = n * factor + gl.convert_layout(gl.sum(runs, axis=1), n_layout)
        if NZ == 2:
            state, second = warpgroup_mma_wait(0, deps=[state, second])
        else:
            state = warpgroup_mma_wait(0, deps=[state])
        weights_s.index((tile + 1) & 1).store(gl.exp2(weight))
        decay = next_decay
        t0 = next_t
        barrier()

    offs_x = x_col + gl.arange(0, BX, gl.SliceLayout(0, state_layout))
    offs_z = z_col + gl.arange(0, BZ, gl.SliceLayout(1, state_layout))
    second_z = offs_z + BZ
    in_x = (offs_x < DX)[None, :]
    out = states_ptr + row * DX * DZ
    dtype: gl.constexpr = states_ptr.dtype.element_ty
    gl.store(elements(out, offs_z, offs_x, DX, DZ, False), state.to(dtype), mask=(offs_z < DZ)[:, None] & in_x)
    if NZ == 2:
        gl.store(elements(out, second_z, offs_x, DX, DZ, False), second.to(dtype), mask=(second_z < DZ)[:, None] & in_x)
    if WITH_N:
        if z_col == 0:
            offs_n = x_col + gl.arange(0, BX, gl.SliceLayout(0, n_layout))
            gl.store(n_states_ptr + row * DX + offs_n, gl.sum(n, axis=0), mask=offs_n < DX)
