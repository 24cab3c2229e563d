"""The delta rule for Hopper: one program walks a head's chunks with the whole state in registers, transposed.

With S^T [V, K] and the chunk's T Diag(beta), which inverse.py has made, the equations of chunkwise.py become

    U^T = (V^T - (S^T K^T) * exp(b)) (T Diag(beta))^T
    O^T = (S^T Q^T) * exp(b) + U^T P^T                     S^T <- exp(b_L) S^T + (U^T * exp(b_L - b)) K

in which every left operand is in registers but V^T, which is in shared memory. Groups of four warps are specialised as
in scalar_decay/whole_state.py: the preparing group has the chunks' tiles copied (TMA) and makes the scores P and the
weights; each walker holds the state of 64 of the V columns.
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
from ..scalar_decay.whole_state_tiles import BZ, WARPS, allocate_barriers, barrier, elements, load_async, store_async

LOG, ROW, WEIGHT, DECAY = (gl.constexpr(n) for n in range(4))
"""A chunk's vectors: b, exp(b) scale, exp(b_L - b) and exp(b_L), L times."""
VECTORS = gl.constexpr(4)


class Tiles(NamedTuple):
    """A chunk's tiles, as descriptors of tensors or as places in shared memory, a stage for each chunk under way; there
    k is followed by q."""

    k: Any
    v: Any
    inverse: Any
    q: Any = None


class Stages(NamedTuple):
    """What else is in shared memory: of each stage the scores P and the vectors, of each walker its output; and
    barriers, which complete when a stage's tiles are there, when its scores and vectors are, and when all walkers have
    read it."""

    scores: Any
    vectors: Any
    out: Any
    loaded: Any
    ready: Any
    freed: Any


@gluon.constexpr_function
def _registers(registers):
    return list(registers)


@gluon.jit
def _load_tiles(tensors, tiles, stages, stage, chunk, v_col, first_row, L: gl.constexpr, pred):
    """Start the copies of a chunk's tiles into a stage."""
    loaded = stages.loaded.index(stage)
    # Elements are of 16 bits.
    columns: gl.constexpr = 2 * tensors.q.block_shape[1] + tensors.v.block_shape[1] + L
    mbarrier.expect(loaded, 2 * L * columns, pred=pred)
    load_async(tensors.k, [chunk * L, 0], loaded, tiles.k.index(stage).slice(0, L), pred=pred)
    load_async(tensors.inverse, [first_row + chunk * L, 0], loaded, tiles.inverse.index(stage), pred=pred)
    load_async(tensors.v, [chunk * L, v_col], loaded, tiles.v.index(stage), pred=pred)
    load_async(tensors.q, [chunk * L, 0], loaded, tiles.k.index(stage).slice(L, L), pred=pred)


@gluon.jit
def _load_b(b_ptr, row, L: gl.constexpr):
    """Return b of a chunk, whose first value is number ``row``, and b_L."""
    offs = gl.arange(0, L, gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.load(b_ptr + row + offs), gl.load(b_ptr + row + L - 1)


@gluon.jit
def _store_vectors(stages, stage, b, last, log_scale):
    row, weight, decay = gl.exp2(b + log_scale), gl.exp2(last - b), gl.exp2(last)
    vectors = gl.join(gl.join(b, row), gl.join(weight, gl.zeros_like(b) + decay)).permute((2, 1, 0))
    stages.vectors.index(stage).store(vectors.reshape([VECTORS * b.shape[0]]))
    barrier()


@gluon.jit
def _prepare(tensors, tiles, stages, b_ptr, pid_bh, N, v_col, log_scale, L: gl.constexpr, STAGES: gl.constexpr, SKIP: gl.constexpr = 0):
    """Prepare the chunks for the walkers, one by one. The copies of the first are under way already."""
    # Half of the scores at a time, since this group has few registers.
    HALF: gl.constexpr = L // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    query_layout: gl.constexpr = gl.SliceLayout(1, layout)
    key_layout: gl.constexpr = gl.SliceLayout(0, layout)
    offs_q = gl.arange(0, L, query_layout)[:, None]
    offs_k = gl.arange(0, HALF, key_layout)[None, :]
    row = pid_bh.to(gl.int32) * N * L
    b, last = _load_b(b_ptr, row, L)
    _store_vectors(stages, 0, b, last, log_scale)
    for chunk in range(N):
        stage = chunk % STAGES
        following = gl.minimum(chunk + 1, N - 1)
        b, last = _load_b(b_ptr, row + following * L, L)
        log = stages.vectors.index(stage)
        rows = log.slice(LOG * L, L).load(query_layout)[:, None] + log_scale
        mbarrier.wait(stages.loaded.index(stage), (chunk // STAGES) & 1)
        for half in gl.static_range(0 if SKIP == 1 else 2):
            keys = tiles.k.index(stage).slice(half * HALF, HALF).permute((1, 0))
            queries = tiles.k.index(stage).slice(L, L)
            scores = gl.zeros([L, HALF], gl.float32, layout)
            scores = warpgroup_mma(queries, keys, scores, is_async=True, use_acc=False)
            columns = log.slice(LOG * L + half * HALF, HALF).load(key_layout)[None, :]
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores = gl.where(offs_q >= offs_k + half * HALF, scores * gl.exp2(rows - columns), 0.0)
            stages.scores.index(stage).slice(half * HALF, HALF, dim=1).store(scores.to(tiles.k.dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(stages.ready.index(stage), count=1)
        ahead = chunk + STAGES - 1
        mbarrier.wait(stages.freed.index(ahead % STAGES), (ahead // STAGES + 1) & 1, pred=chunk > 0)
        _load_tiles(tensors, tiles, stages, ahead % STAGES, ahead, v_col, row, L, ahead < N)
        _store_vectors(stages, (chunk + 1) % STAGES, b, last, log_scale)


@gluon.jit
def _walk(
    out_desc,
    tiles,
    stages,
    initial_ptr,
    last_ptr,
    pid_bh,
    N,
    v_col,
    inverse_scale,
    walker: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    L: gl.constexpr,
    STAGES: gl.constexpr,
    MERGED: gl.constexpr,
    LATE: gl.constexpr,
    EARLY: gl.constexpr,
    SKIP: gl.constexpr,
):
    """Walk the chunks with the state of 64 columns of V."""
    BK: gl.constexpr = tiles.k.shape[2]
    DTYPE: gl.constexpr = tiles.k.dtype
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BK, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, L, 16])
    of_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    both_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * L, 16])
    of_both: gl.constexpr = gl.DotOperandLayout(0, both_layout, 2)
    token_layout: gl.constexpr = gl.SliceLayout(0, layout)
    of_state: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)

    offs_v = v_col + walker * BZ + gl.arange(0, BZ, gl.SliceLayout(1, state_layout))
    offs_k = gl.arange(0, BK, gl.SliceLayout(0, state_layout))
    mask = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    state = gl.zeros([BZ, BK], gl.float32, state_layout)
    if initial_ptr is not None:
        state += gl.load(elements(initial_ptr + pid_bh * (K * V), offs_v, offs_k, K, V, False), mask=mask, other=0.0)
    out_s = stages.out.index(walker)
    pending = gl.zeros([BZ, L], DTYPE, layout)
    zeros = gl.zeros([BZ, L], gl.float32, layout)
    for chunk in range(N):
        stage = chunk % STAGES
        vectors = stages.vectors.index(stage)
        keys = tiles.k.index(stage).slice(0, L)
        mbarrier.wait(stages.loaded.index(stage), (chunk // STAGES) & 1)
        inverse_t = tiles.inverse.index(stage).permute((1, 0))
        v_t = tiles.v.index(stage).slice(walker * BZ, BZ, dim=1).permute((1, 0))
        if MERGED:
            rounded = gl.convert_layout(state.to(DTYPE), of_both)
            both = gl.zeros([BZ, 2 * L], gl.float32, both_layout)
            both = warpgroup_mma(rounded, tiles.k.index(stage).permute((1, 0)), both, is_async=True, use_acc=False)
        else:
            rounded = gl.convert_layout(state.to(DTYPE), of_layout)
            queries = tiles.k.index(stage).slice(L, L)
            held = warpgroup_mma(rounded, keys.permute((1, 0)), zeros, is_async=True, use_acc=False)
        if EARLY:
            new = warpgroup_mma(v_t, inverse_t, zeros, is_async=True, use_acc=False)
        if LATE:
            tma.store_wait(0)
            barrier()
            out_s.permute((1, 0)).store(pending)
            fence_async_shared()
            barrier()
            store_async(out_desc, [gl.where(chunk > 0, chunk - 1, N) * L, v_col + walker * BZ], out_s)
        mbarrier.wait(stages.ready.index(stage), (chunk // STAGES) & 1)
        row = vectors.slice(ROW * L, L).load(token_layout)
        if MERGED:
            if EARLY:
                both, new = warpgroup_mma_wait(0, deps=[both, new])
            else:
                both = warpgroup_mma_wait(0, deps=[both])
            held, out = both.reshape([BZ, 2, L]).permute((0, 2, 1)).split()
            held = gl.convert_layout(held, layout)
            out = gl.convert_layout(out, layout)
        else:
            if EARLY:
                held, new = warpgroup_mma_wait(0, deps=[held, new])
            else:
                held = warpgroup_mma_wait(0, deps=[held])
        if not EARLY:
            new = warpgroup_mma(v_t, inverse_t, zeros, is_async=True, use_acc=False)
        held = gl.convert_layout((held * (row * -inverse_scale)[None, :]).to(DTYPE), of_layout)
        if not EARLY:
            new = warpgroup_mma_wait(0, deps=[new])
        if SKIP != 3:
            new = warpgroup_mma(held, inverse_t, new, is_async=True)
        if MERGED:
            new = warpgroup_mma_wait(0, deps=[new])
        else:
            out = warpgroup_mma(rounded, queries.permute((1, 0)), zeros, is_async=True, use_acc=False)
            new, out = warpgroup_mma_wait(0, deps=[new, out])
        scores_t = stages.scores.index(stage).permute((1, 0))
        out = warpgroup_mma(gl.convert_layout(new.to(DTYPE), of_layout), scores_t, out * row[None, :], is_async=True)
        weight = vectors.slice(WEIGHT * L, L).load(token_layout)[None, :]
        decay = vectors.slice(DECAY * L, BZ).load(gl.SliceLayout(1, state_layout))[:, None]
        weighted = gl.convert_layout((new * weight).to(DTYPE), of_state)
        state = warpgroup_mma(weighted, keys, state * decay, is_async=True)
        if LATE:
            out, state = warpgroup_mma_wait(0, deps=[out, state])
            pending = out.to(DTYPE)
            barrier()
        else:
            out = warpgroup_mma_wait(1, deps=[out])
            if SKIP != 2:
                tma.store_wait(0)
                barrier()
                out_s.permute((1, 0)).store(out.to(DTYPE))
                fence_async_shared()
                barrier()
                store_async(out_desc, [chunk * L, v_col + walker * BZ], out_s)
            state = warpgroup_mma_wait(0, deps=[state])
            barrier()
        mbarrier.arrive(stages.freed.index(stage), count=1)
    if LATE:
        tma.store_wait(0)
        barrier()
        out_s.permute((1, 0)).store(pending)
        fence_async_shared()
        barrier()
        store_async(out_desc, [(N - 1) * L, v_col + walker * BZ], out_s)
    tma.store_wait(0)
    if last_ptr is not None:
        gl.store(elements(last_ptr + pid_bh * (K * V), offs_v, offs_k, K, V, False), state, mask=mask)


@remember_launches
@gluon.jit(do_not_specialize=["T", "scale", "log_scale"])
def whole_state_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    inverse_ptr,
    b_ptr,
    out_ptr,
    initial_ptr,
    last_ptr,
    scale,
    log_scale,
    T,
    rows,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    L: gl.constexpr,
    STAGES: gl.constexpr,
    WALKERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    MERGED: gl.constexpr = 0,
    LATE: gl.constexpr = 0,
    EARLY: gl.constexpr = 1,
    SKIP: gl.constexpr = 0,
):
    """Compute 64 ``WALKERS`` columns of one head's output.

    Grid: (ceil(V / (64 WALKERS)) * B * H,). Reads q, k [B, T, H / GROUP, K], v [B, T, H, V], what inverse_kernel
    wrote (``rows``: of all its chunks, B * H * N * L) and S before the first chunk, [B, H, K, V] or None; writes o like
    v and S after the last.
    """
    COLUMNS: gl.constexpr = (V + BZ * WALKERS - 1) // (BZ * WALKERS)
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    pid = gl.program_id(0)
    v_col = pid % COLUMNS * (BZ * WALKERS)
    pid_bh = (pid // COLUMNS).to(gl.int64)
    batch = pid_bh // H
    head = pid_bh % H
    N = gl.cdiv(T, L)
    ROW: gl.constexpr = H // GROUP * K
    of_k = batch * T * ROW + head // GROUP * K
    of_v = (batch * T * H + head) * V

    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    tensors = Tiles(
        q=tma.make_tensor_descriptor(q_ptr + of_k, [T, K], [ROW, 1], [L, BK], layout),
        k=tma.make_tensor_descriptor(k_ptr + of_k, [T, K], [ROW, 1], [L, BK], layout),
        v=tma.make_tensor_descriptor(v_ptr + of_v, [T, V], [H * V, 1], [L, BZ * WALKERS], layout),
        inverse=tma.make_tensor_descriptor(inverse_ptr, [rows, L], [L, 1], [L, L], layout),
    )
    tiles = Tiles(
        k=gl.allocate_shared_memory(DTYPE, [STAGES, 2 * L, BK], layout),
        v=gl.allocate_shared_memory(DTYPE, [STAGES, L, BZ * WALKERS], layout),
        inverse=gl.allocate_shared_memory(DTYPE, [STAGES, L, L], layout),
    )
    stages = Stages(
        scores=gl.allocate_shared_memory(DTYPE, [STAGES, L, L], layout),
        vectors=gl.allocate_shared_memory(
            gl.float32, [STAGES, VECTORS * L], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        ),
        out=gl.allocate_shared_memory(DTYPE, [WALKERS, L, BZ], layout),
        loaded=allocate_barriers(STAGES),
        ready=allocate_barriers(STAGES),
        freed=allocate_barriers(STAGES),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(stages.loaded.index(stage), count=1)
        mbarrier.init(stages.ready.index(stage), count=1)
        mbarrier.init(stages.freed.index(stage), count=WALKERS)
    fence_async_shared()
    barrier()
    for step in gl.static_range(STAGES - 1):
        _load_tiles(tensors, tiles, stages, step, step, v_col, pid_bh.to(gl.int32) * N * L, L, step < N)
    out_desc = tma.make_tensor_descriptor(out_ptr + of_v, [T, V], [H * V, 1], [L, BZ], layout)
    if WALKERS == 1:
        gl.warp_specialize(
            [
                (_walk, (out_desc, tiles, stages, initial_ptr, last_ptr, pid_bh, N, v_col, 1 / scale, 0, K, V, L, STAGES, MERGED, LATE, EARLY, SKIP)),
                (_prepare, (tensors, tiles, stages, b_ptr, pid_bh, N, v_col, log_scale, L, STAGES, SKIP)),
            ],
            [WARPS],
            _registers(REGISTERS),
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (out_desc, tiles, stages, initial_ptr, last_ptr, pid_bh, N, v_col, 1 / scale, 0, K, V, L, STAGES, MERGED, LATE, EARLY, SKIP)),
                (_walk, (out_desc, tiles, stages, initial_ptr, last_ptr, pid_bh, N, v_col, 1 / scale, 1, K, V, L, STAGES, MERGED, LATE, EARLY, SKIP)),
                (_prepare, (tensors, tiles, stages, b_ptr, pid_bh, N, v_col, log_scale, L, STAGES, SKIP)),
            ],
            [WARPS, WARPS],
            _registers(REGISTERS),
        )
