"""The delta rule for Hopper: a program walks over chunks of a head with the whole state in registers, transposed.

With S^T [V, K], a chunk's inverse T and its cumulative log decay b, both made by inverse.py, and * weighting positions,
the equations of chunkwise.py become

    U^T = ((V^T - (S^T K^T) * exp(b)) * beta) T^T
    O^T = (S^T Q^T) * scale exp(b) + U^T P^T              S^T <- exp(b_L) S^T + (U^T * exp(b_L - b)) K

and of the gradients, backward in time, with dS^T that of the state after the chunk and dX = beta dY that of what beta
and T multiply,

    dU^T = dO^T P + (dS^T K^T) * exp(b_L - b)             dY^T = dU^T T
    dS^T <- exp(b_L) dS^T + (dO^T * scale exp(b)) Q - (dX^T * exp(b)) K

The left operands come from registers, or are a tile's transpose in shared memory. Groups of four warps are specialised
as in scalar_decay/whole_state.py: the preparing group has the chunks' tiles copied (TMA) and makes the scores P and the
weights; each walker holds the state of 64 of the V columns. Source: chunkwise.py names the papers.
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

LOG, RATE, WEIGHT, ROW, DECAY = (gl.constexpr(n) for n in (0, 1, 2, 4, 6))
"""A chunk's vectors: b, beta, exp(b_L - b), scale exp(b), and exp(b_L) L times."""
VECTORS = gl.constexpr(8)
"""Number of the vectors, padded to a power of two."""


class Tiles(NamedTuple):
    """A chunk's tiles, as descriptors of tensors or as places in shared memory, one for each stage.

    Attributes:
        k, q, v, inverse: what is read; backward in time v is dO. In shared memory q lies behind k; None: not needed.
        out: O or dY; None: not wanted.
        states: S^T before the chunk or dS^T after it; None: not wanted.
    """

    k: Any
    q: Any
    v: Any
    inverse: Any
    out: Any
    states: Any


class Stages(NamedTuple):
    """What else is in shared memory: of each stage the scores P and the vectors; and barriers, which complete when a
    stage's tiles are there, when its scores and vectors are, and when all walkers have read it."""

    scores: Any
    vectors: Any
    loaded: Any
    ready: Any
    freed: Any


class Walk(NamedTuple):
    """Where a program works.

    Attributes:
        head: which of the B * H heads, of N chunks.
        first, count: the chunks of its segment.
        number: index of the segment, for states before and after it, ``initial`` and ``last`` or None.
        row: of the head's first chunk in b.
        column: of V.
    """

    head: Any
    N: Any
    first: Any
    count: Any
    number: Any
    initial: Any
    last: Any
    row: Any
    column: Any


@gluon.constexpr_function
def _registers(walkers):
    """Return a thread's registers in the second walker, if any, and in the preparing group; the first walker gets the
    rest."""
    return [208, 88] if walkers == 2 else [152]


@gluon.jit
def _chunk_of(walk, index, FUTURE: gl.constexpr):
    """Return the number of the chunk that is walked over as number ``index``."""
    return walk.first + (walk.count - 1 - index if FUTURE else index)


@gluon.jit
def _load_tiles(tensors, tiles, stages, stage, chunk, walk, L: gl.constexpr, pred):
    """Start the copies of a chunk's tiles into a stage."""
    loaded = stages.loaded.index(stage)
    # Elements are of 16 bits.
    columns: gl.constexpr = tensors.k.block_shape[1] + L
    of_q: gl.constexpr = 0 if tensors.q is None else tensors.q.block_shape[1]
    of_v: gl.constexpr = 0 if tensors.v is None else tensors.v.block_shape[1]
    mbarrier.expect(loaded, 2 * L * (columns + of_q + of_v), pred=pred)
    load_async(tensors.k, [chunk * L, 0], loaded, tiles.k.index(stage).slice(0, L), pred=pred)
    load_async(tensors.inverse, [walk.row + chunk * L, 0], loaded, tiles.inverse.index(stage), pred=pred)
    if tensors.v is not None:
        load_async(tensors.v, [chunk * L, walk.column], loaded, tiles.v.index(stage), pred=pred)
    if tensors.q is not None:
        load_async(tensors.q, [chunk * L, 0], loaded, tiles.k.index(stage).slice(L, L), pred=pred)


@gluon.jit
def _load_gates(b_ptr, beta_ptr, chunk, walk, T, H: gl.constexpr, L: gl.constexpr):
    """Return b and beta of a chunk [L], and b_L."""
    offs = chunk * L + gl.arange(0, L, gl.BlockedLayout([1], [32], [WARPS], [0]))
    at = (walk.head // H * T + offs) * H + walk.head % H
    beta = gl.load(beta_ptr + at, mask=offs < T, other=0.0)
    return gl.load(b_ptr + walk.row + offs), beta, gl.load(b_ptr + walk.row + chunk * L + L - 1)


@gluon.jit
def _store_vectors(stages, stage, gates, log_scale):
    """Store a chunk's vectors, of what :func:`_load_gates` returned, in shared memory."""
    b, beta, last = gates
    row, weight, decay = gl.exp2(b + log_scale), gl.exp2(last - b), gl.zeros_like(b) + gl.exp2(last)
    # All in one store, since the compiler puts barriers between stores.
    vectors = gl.join(
        gl.join(gl.join(b, beta), gl.join(weight, beta)), gl.join(gl.join(row, beta), gl.join(decay, beta))
    )
    stages.vectors.index(stage).store(vectors.permute((3, 2, 1, 0)).reshape([VECTORS * b.shape[0]]))
    barrier()


@gluon.jit
def _prepare(
    tensors,
    tiles,
    stages,
    b_ptr,
    beta_ptr,
    walk,
    T,
    log_scale,
    H: gl.constexpr,
    FUTURE: gl.constexpr,
):
    """Prepare a segment chunk by chunk for the walkers. The copies of the first are under way already."""
    STAGES: gl.constexpr = tiles.inverse.shape[0]
    L: gl.constexpr = tiles.inverse.shape[1]
    # Half of the scores at a time, since this group has few registers.
    HALF: gl.constexpr = L // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    query_layout: gl.constexpr = gl.SliceLayout(1, layout)
    key_layout: gl.constexpr = gl.SliceLayout(0, layout)
    offs_q = gl.arange(0, L, query_layout)[:, None]
    offs_k = gl.arange(0, HALF, key_layout)[None, :]
    gates = _load_gates(b_ptr, beta_ptr, _chunk_of(walk, 0, FUTURE), walk, T, H, L)
    _store_vectors(stages, 0, gates, log_scale)
    for index in range(walk.count):
        stage = index % STAGES
        following = _chunk_of(walk, gl.minimum(index + 1, walk.count - 1), FUTURE)
        gates = _load_gates(b_ptr, beta_ptr, following, walk, T, H, L)
        if tensors.q is not None:
            b = stages.vectors.index(stage).slice(LOG * L, L)
            rows = b.load(query_layout)[:, None] + log_scale
            mbarrier.wait(stages.loaded.index(stage), (index // STAGES) & 1)
            queries = tiles.k.index(stage).slice(L, L)
            for half in gl.static_range(2):
                keys = tiles.k.index(stage).slice(half * HALF, HALF).permute((1, 0))
                scores = gl.zeros([L, HALF], gl.float32, layout)
                scores = warpgroup_mma(queries, keys, scores, is_async=True, use_acc=False)
                columns = b.slice(half * HALF, HALF).load(key_layout)[None, :]
                scores = warpgroup_mma_wait(0, deps=[scores])
                scores = gl.where(offs_q >= offs_k + half * HALF, scores * gl.exp2(rows - columns), 0.0)
                stages.scores.index(stage).slice(half * HALF, HALF, dim=1).store(scores.to(tiles.k.dtype))
            fence_async_shared()
            barrier()
        mbarrier.arrive(stages.ready.index(stage), count=1)
        ahead = index + STAGES - 1
        mbarrier.wait(stages.freed.index(ahead % STAGES), (ahead // STAGES + 1) & 1, pred=index > 0)
        chunk = _chunk_of(walk, ahead, FUTURE)
        _load_tiles(tensors, tiles, stages, ahead % STAGES, chunk, walk, L, ahead < walk.count)
        _store_vectors(stages, (index + 1) % STAGES, gates, log_scale)


@gluon.jit
def _store_tile(desc, place, start, column, tile, TRANSPOSED: gl.constexpr):
    """Start the copy of a tile in registers to global memory, through ``place`` in shared memory."""
    if TRANSPOSED:
        place.permute((1, 0)).store(tile)
    else:
        place.store(tile)
    fence_async_shared()
    barrier()
    store_async(desc, [start, column], place)


@gluon.jit
def _output(rounded, new, stages, stage, tiles, layout: gl.constexpr, L: gl.constexpr):
    """Return O^T of a chunk, asynchronous."""
    of_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    queries = tiles.k.index(stage).slice(L, L).permute((1, 0))
    out = gl.zeros([BZ, L], gl.float32, layout)
    out = warpgroup_mma(rounded, queries, out, is_async=True, use_acc=False)
    out = warpgroup_mma_wait(0, deps=[out])
    scores_t = stages.scores.index(stage).permute((1, 0))
    new = gl.convert_layout(new.to(tiles.k.dtype), of_layout)
    row = stages.vectors.index(stage).slice(ROW * L, L).load(gl.SliceLayout(0, layout))[None, :]
    return warpgroup_mma(new, scores_t, out * row, is_async=True)


@gluon.jit
def _walk(
    tensors,
    tiles,
    stages,
    walk,
    inverse_scale,
    walker: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    ROWS: gl.constexpr,
    FUTURE: gl.constexpr,
):
    """Walk over a segment with the state of 64 columns of V; without V, of the identity."""
    STAGES: gl.constexpr = tiles.inverse.shape[0]
    L: gl.constexpr = tiles.inverse.shape[1]
    BK: gl.constexpr = tiles.k.shape[2]
    DTYPE: gl.constexpr = tiles.k.dtype
    WANT: gl.constexpr = tensors.out is not None
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BK, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, L, 16])
    of_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_state: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)
    token_layout: gl.constexpr = gl.SliceLayout(0, layout)
    of_token: gl.constexpr = gl.SliceLayout(0, of_state)

    column = walk.column + walker * BZ
    offs_v = column + gl.arange(0, BZ, gl.SliceLayout(1, state_layout))
    offs_k = gl.arange(0, BK, gl.SliceLayout(0, state_layout))
    mask = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    state = gl.zeros([BZ, BK], gl.float32, state_layout)
    if tensors.v is None:
        state += gl.where(offs_v[:, None] == offs_k[None, :], 1.0, 0.0)
    if walk.initial is not None:
        ptrs = elements(walk.initial + walk.number * (K * V), offs_v, offs_k, K, V, False)
        state += gl.load(ptrs, mask=mask, other=0.0)
    for index in range(walk.count):
        stage = index % STAGES
        chunk = _chunk_of(walk, index, FUTURE)
        vectors = stages.vectors.index(stage)
        keys = tiles.k.index(stage).slice(0, L)
        inverse = tiles.inverse.index(stage)
        rounded = gl.convert_layout(state.to(DTYPE), of_layout)
        mbarrier.wait(stages.loaded.index(stage), (index // STAGES) & 1)
        held = gl.zeros([BZ, L], gl.float32, layout)
        held = warpgroup_mma(rounded, keys.permute((1, 0)), held, is_async=True, use_acc=False)
        if tensors.states is not None:
            place = tiles.states.index(walker)
            tma.store_wait(0)
            barrier()
            start = (walk.head.to(gl.int32) * walk.N + chunk) * ROWS + column
            _store_tile(tensors.states, place, start, 0, state.to(DTYPE), False)
        mbarrier.wait(stages.ready.index(stage), (index // STAGES) & 1)
        factor = vectors.slice(ROW * L, L).load(token_layout) * vectors.slice(RATE * L, L).load(token_layout)
        factor = (factor * -inverse_scale)[None, :]
        if tensors.v is not None:
            v_t = tiles.v.index(stage).slice(walker * BZ, BZ, dim=1).permute((1, 0))
        if FUTURE:
            held = warpgroup_mma_wait(0, deps=[held])
            weight = vectors.slice(WEIGHT * L, L).load(token_layout)[None, :]
            new = warpgroup_mma(v_t, stages.scores.index(stage), held * weight, is_async=True)
            new = warpgroup_mma_wait(0, deps=[new])
            new = gl.convert_layout(new.to(DTYPE), of_layout)
            held = warpgroup_mma(new, inverse, held, is_async=True, use_acc=False)
            rows = vectors.slice(ROW * L, L).load(of_token)[None, :]
            weighted = (v_t.load(of_state).to(gl.float32) * rows).to(DTYPE)
            decay = vectors.slice(DECAY * L, BZ).load(gl.SliceLayout(1, state_layout))[:, None]
            state = warpgroup_mma(weighted, tiles.k.index(stage).slice(L, L), state * decay, is_async=True)
            held = warpgroup_mma_wait(1, deps=[held])
            weighted = gl.convert_layout((held * factor).to(DTYPE), of_state)
            state = warpgroup_mma_wait(0, deps=[state])
            state = warpgroup_mma(weighted, keys, state, is_async=True)
            out = held
        else:
            if tensors.v is not None:
                v = v_t.load(layout)
                held = warpgroup_mma_wait(0, deps=[held])
                beta = vectors.slice(RATE * L, L).load(token_layout)[None, :]
                new = v.to(gl.float32) * beta + held * factor
            else:
                held = warpgroup_mma_wait(0, deps=[held])
                new = held * factor
            new = gl.convert_layout(new.to(DTYPE), of_layout)
            new = warpgroup_mma(new, inverse.permute((1, 0)), held, is_async=True, use_acc=False)
            new = warpgroup_mma_wait(0, deps=[new])
            if WANT:
                out = _output(rounded, new, stages, stage, tiles, layout, L)
            weight = vectors.slice(WEIGHT * L, L).load(token_layout)[None, :]
            weighted = gl.convert_layout((new * weight).to(DTYPE), of_state)
            decay = vectors.slice(DECAY * L, BZ).load(gl.SliceLayout(1, state_layout))[:, None]
            state = warpgroup_mma(weighted, keys, state * decay, is_async=True)
            if WANT:
                out = warpgroup_mma_wait(1, deps=[out])
        if WANT:
            place = tiles.out.index(walker)
            tma.store_wait(0)
            barrier()
            _store_tile(tensors.out, place, chunk * L, column, out.to(DTYPE), True)
        state = warpgroup_mma_wait(0, deps=[state])
        barrier()
        mbarrier.arrive(stages.freed.index(stage), count=1)
    tma.store_wait(0)
    if walk.last is not None:
        gl.store(elements(walk.last + walk.number * (K * V), offs_v, offs_k, K, V, False), state, mask=mask)


@remember_launches
@gluon.jit(do_not_specialize=["T", "rows", "per", "log_scale", "inverse_scale"])
def whole_state_kernel(
    k_ptr,
    q_ptr,
    v_ptr,
    inverse_ptr,
    b_ptr,
    beta_ptr,
    out_ptr,
    states_ptr,
    initial_ptr,
    last_ptr,
    log_scale,
    inverse_scale,
    T,
    rows,
    per,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    L: gl.constexpr,
    STAGES: gl.constexpr,
    WALKERS: gl.constexpr,
    FUTURE: gl.constexpr,
):
    """Walk over ``per`` chunks of a head for 64 ``WALKERS`` columns of V.

    Grid: (ceil(V / (64 WALKERS)) * ceil(N / per) * B * H,), N = ceil(T / L). Reads k and q [B, T, H / GROUP, K], v
    [B, T, H, V] (FUTURE: dO), beta [B, T, H], what inverse_kernel wrote (``rows``: B * H * N * L), and the states
    before the segments [B * H, ceil(N / per), K, V] in float32 (FUTURE: the gradients of those after; None: zero). What
    is asked for is written: o (FUTURE: dY) like v, S^T before (FUTURE: dS^T after) each chunk [B * H, N, V, K] in k's
    dtype, V padded to a program's columns, and the states after the segments (FUTURE: the gradients of those before).
    Without v states start from the identity [K, K], and V is K: what a segment does to a state.
    """
    COLUMNS: gl.constexpr = (V + BZ * WALKERS - 1) // (BZ * WALKERS)
    ROWS: gl.constexpr = COLUMNS * BZ * WALKERS
    OF_K: gl.constexpr = H // GROUP * K
    DTYPE: gl.constexpr = k_ptr.dtype.element_ty
    pid = gl.program_id(0)
    N = gl.cdiv(T, L)
    segments = gl.cdiv(N, per)
    number = pid // COLUMNS
    first = number % segments * per
    pid_bh = (number // segments).to(gl.int64)
    column = pid % COLUMNS * (BZ * WALKERS)
    walk = Walk(
        head=pid_bh, N=N, first=first, count=gl.minimum(per, N - first), number=number.to(gl.int64),
        initial=initial_ptr, last=last_ptr, row=pid_bh.to(gl.int32) * N * L, column=column,
    )  # fmt: skip
    k_start = pid_bh // H * T * OF_K + pid_bh % H // GROUP * K
    v_start = (pid_bh // H * T * H + pid_bh % H) * V

    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    k_desc = tma.make_tensor_descriptor(k_ptr + k_start, [T, K], [OF_K, 1], [L, BK], layout)
    inverse_desc = tma.make_tensor_descriptor(inverse_ptr, [rows, L], [L, 1], [L, L], layout)
    q_desc, v_desc, out_desc, states_desc = None, None, None, None
    v_s, scores_s, out_s, states_s = None, None, None, None
    if q_ptr is not None:
        q_desc = tma.make_tensor_descriptor(q_ptr + k_start, [T, K], [OF_K, 1], [L, BK], layout)
        scores_s = gl.allocate_shared_memory(DTYPE, [STAGES, L, L], layout)
    if v_ptr is not None:
        v_desc = tma.make_tensor_descriptor(v_ptr + v_start, [T, V], [H * V, 1], [L, BZ * WALKERS], layout)
        v_s = gl.allocate_shared_memory(DTYPE, [STAGES, L, BZ * WALKERS], layout)
    if out_ptr is not None:
        out_desc = tma.make_tensor_descriptor(out_ptr + v_start, [T, V], [H * V, 1], [L, BZ], layout)
        out_s = gl.allocate_shared_memory(DTYPE, [WALKERS, L, BZ], layout)
    if states_ptr is not None:
        states_desc = tma.make_tensor_descriptor(states_ptr, [rows // L * ROWS, K], [K, 1], [BZ, BK], layout)
        states_s = gl.allocate_shared_memory(DTYPE, [WALKERS, BZ, BK], layout)
    tensors = Tiles(k=k_desc, q=q_desc, v=v_desc, inverse=inverse_desc, out=out_desc, states=states_desc)
    tiles = Tiles(
        k=gl.allocate_shared_memory(DTYPE, [STAGES, L if q_ptr is None else 2 * L, BK], layout),
        q=None,
        v=v_s,
        inverse=gl.allocate_shared_memory(DTYPE, [STAGES, L, L], layout),
        out=out_s,
        states=states_s,
    )
    stages = Stages(
        scores=scores_s,
        vectors=gl.allocate_shared_memory(
            gl.float32, [STAGES, VECTORS * L], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        ),
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
    for index in gl.static_range(STAGES - 1):
        _load_tiles(tensors, tiles, stages, index, _chunk_of(walk, index, FUTURE), walk, L, index < walk.count)
    if WALKERS == 1:
        gl.warp_specialize(
            [
                (_walk, (tensors, tiles, stages, walk, inverse_scale, 0, K, V, ROWS, FUTURE)),
                (_prepare, (tensors, tiles, stages, b_ptr, beta_ptr, walk, T, log_scale, H, FUTURE)),
            ],
            [WARPS],
            _registers(WALKERS),
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (tensors, tiles, stages, walk, inverse_scale, 0, K, V, ROWS, FUTURE)),
                (_walk, (tensors, tiles, stages, walk, inverse_scale, 1, K, V, ROWS, FUTURE)),
                (_prepare, (tensors, tiles, stages, b_ptr, beta_ptr, walk, T, log_scale, H, FUTURE)),
            ],
            [WARPS, WARPS],
            _registers(WALKERS),
        )
