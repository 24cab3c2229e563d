"""KDA for Hopper: whole_state.py's walk where each key channel has a decay of its own.

With S^T [V, K] in registers and what channel_chunks.py makes of a chunk, k^ = exp(b_L - b) * k, k~ = exp(b) * k,
q~ = scale exp(b) * q, T and scale P,

    U^T = ((V^T - S^T k~^T) * beta) T^T            O^T = S^T q~^T + U^T (scale P)^T
    S^T <- S^T * exp(b_L) + U^T k^

and of the gradients, backward in time, with dS^T that of the state after the chunk,

    dU^T = dO^T (scale P) + dS^T k^^T              dY^T = dU^T T
    dS^T <- dS^T * exp(b_L) + dO^T q~ - (dY^T * beta) k~

Nothing is left to prepare, so the group beside the walkers has one warp, which starts copies (TMA).
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
from ..scalar_decay.whole_state_tiles import BZ, WARPS, allocate_barriers, barrier, elements, load_async
from .whole_state import Walk, _chunk_of, _store_tile


class ChannelTiles(NamedTuple):
    """A chunk's tiles, as descriptors of tensors or as places in shared memory, one for each stage.

    Attributes:
        keys: k^ and k~, one behind the other.
        queries, scores: None if not needed.
        v: backward in time dO; None if states start from the identity.
        out: O or dY; None: not wanted.
        states: S^T before the chunk or dS^T after it; None: not wanted.
    """

    keys: Any
    queries: Any
    inverse: Any
    scores: Any
    v: Any
    out: Any
    states: Any


@gluon.jit
def _load(tensors, tiles, loaded, freed, walk, L: gl.constexpr, FUTURE: gl.constexpr):
    """Start the copies of a segment's chunks, each as soon as the walkers have freed its stage."""
    STAGES: gl.constexpr = tiles.inverse.shape[0]
    # Elements are of 16 bits.
    of_keys: gl.constexpr = 2 * tensors.keys.block_shape[1]
    of_v: gl.constexpr = 0 if tensors.v is None else tensors.v.block_shape[1]
    of_q: gl.constexpr = 0 if tensors.queries is None else tensors.queries.block_shape[1] + L
    for index in range(walk.count):
        stage = index % STAGES
        chunk = _chunk_of(walk, index, FUTURE)
        row = walk.row + chunk
        bar = loaded.index(stage)
        mbarrier.wait(freed.index(stage), (index // STAGES + 1) & 1)
        mbarrier.expect(bar, 2 * L * (of_keys + of_v + of_q + L))
        load_async(tensors.keys, [row * (3 * L), 0], bar, tiles.keys.index(stage))
        load_async(tensors.inverse, [row * (2 * L), 0], bar, tiles.inverse.index(stage))
        if tensors.v is not None:
            load_async(tensors.v, [chunk * L, walk.column], bar, tiles.v.index(stage))
        if tensors.queries is not None:
            load_async(tensors.queries, [row * (3 * L) + 2 * L, 0], bar, tiles.queries.index(stage))
            load_async(tensors.scores, [row * (2 * L) + L, 0], bar, tiles.scores.index(stage))


@gluon.jit
def _walk(
    tensors,
    tiles,
    loaded,
    freed,
    vectors_ptr,
    walk,
    walker: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    ROWS: gl.constexpr,
    L: gl.constexpr,
    FUTURE: gl.constexpr,
):
    """Walk over a segment with the state of 64 columns of V; without V, of the identity."""
    STAGES: gl.constexpr = tiles.inverse.shape[0]
    BK: gl.constexpr = tiles.keys.shape[2]
    DTYPE: gl.constexpr = tiles.keys.dtype
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BK, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, L, 16])
    of_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_state: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)

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
        after = tiles.keys.index(stage).slice(0, L)
        before = tiles.keys.index(stage).slice(L, L)
        vectors = vectors_ptr + (walk.row + chunk) * (BK + L)
        decay = gl.load(vectors + offs_k)[None, :]
        rate = gl.load(vectors + BK + gl.arange(0, L, gl.SliceLayout(0, layout)))[None, :]
        rounded = gl.convert_layout(state.to(DTYPE), of_layout)
        mbarrier.wait(loaded.index(stage), (index // STAGES) & 1)
        if tensors.v is not None:
            v_t = tiles.v.index(stage).slice(walker * BZ, BZ, dim=1).permute((1, 0))
        new = gl.zeros([BZ, L], gl.float32, layout)
        new = warpgroup_mma(rounded, (after if FUTURE else before).permute((1, 0)), new, is_async=True, use_acc=False)
        if tensors.states is not None:
            place = tiles.states.index(walker)
            tma.store_wait(0)
            barrier()
            start = (walk.row + chunk) * ROWS + column
            _store_tile(tensors.states, place, start, 0, state.to(DTYPE), False)
        if FUTURE:
            new = warpgroup_mma(v_t, tiles.scores.index(stage), new, is_async=True)
            state = warpgroup_mma(v_t, tiles.queries.index(stage), state * decay, is_async=True)
            new = warpgroup_mma_wait(1, deps=[new])
            new = gl.convert_layout(new.to(DTYPE), of_layout)
            out = gl.zeros([BZ, L], gl.float32, layout)
            out = warpgroup_mma(new, tiles.inverse.index(stage), out, is_async=True, use_acc=False)
            out = warpgroup_mma_wait(0, deps=[out])
            new = gl.convert_layout((out * -rate).to(DTYPE), of_state)
            state = warpgroup_mma(new, before, state, is_async=True)
        else:
            if tensors.out is not None:
                out = gl.zeros([BZ, L], gl.float32, layout)
                queries = tiles.queries.index(stage).permute((1, 0))
                out = warpgroup_mma(rounded, queries, out, is_async=True, use_acc=False)
            new = warpgroup_mma_wait(0 if tensors.out is None else 1, deps=[new])
            new = -new if tensors.v is None else v_t.load(layout).to(gl.float32) - new
            new = gl.convert_layout((new * rate).to(DTYPE), of_layout)
            zeros = gl.zeros([BZ, L], gl.float32, layout)
            new = warpgroup_mma(new, tiles.inverse.index(stage).permute((1, 0)), zeros, is_async=True, use_acc=False)
            new = warpgroup_mma_wait(0, deps=[new])
            rounded = gl.convert_layout(new.to(DTYPE), of_layout)
            if tensors.out is not None:
                out = warpgroup_mma_wait(0, deps=[out])
                out = warpgroup_mma(rounded, tiles.scores.index(stage).permute((1, 0)), out, is_async=True)
            new = gl.convert_layout(new.to(DTYPE), of_state)
            state = warpgroup_mma(new, after, state * decay, is_async=True)
            if tensors.out is not None:
                out = warpgroup_mma_wait(1, deps=[out])
        if tensors.out is not None:
            place = tiles.out.index(walker)
            tma.store_wait(0)
            barrier()
            _store_tile(tensors.out, place, chunk * L, column, out.to(DTYPE), True)
        state = warpgroup_mma_wait(0, deps=[state])
        barrier()
        mbarrier.arrive(freed.index(stage), count=1)
    tma.store_wait(0)
    if walk.last is not None:
        gl.store(elements(walk.last + walk.number * (K * V), offs_v, offs_k, K, V, False), state, mask=mask)


@remember_launches
@gluon.jit(do_not_specialize=["T", "rows", "per"])
def channel_walk_kernel(
    decayed_ptr,
    squares_ptr,
    vectors_ptr,
    v_ptr,
    out_ptr,
    states_ptr,
    initial_ptr,
    last_ptr,
    T,
    rows,
    per,
    H: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    L: gl.constexpr,
    STAGES: gl.constexpr,
    WALKERS: gl.constexpr,
    FUTURE: gl.constexpr,
):
    """Walk over ``per`` chunks of a head for 64 ``WALKERS`` columns of V.

    Grid: (ceil(V / (64 WALKERS)) * ceil(N / per) * B * H,), N = ceil(T / L). Reads what channel_chunks_kernel wrote
    (``rows``: B * H * N), and reads and writes v, out, states, initial and last as whole_state_kernel does.
    """
    COLUMNS: gl.constexpr = (V + BZ * WALKERS - 1) // (BZ * WALKERS)
    ROWS: gl.constexpr = COLUMNS * BZ * WALKERS
    DTYPE: gl.constexpr = decayed_ptr.dtype.element_ty
    pid = gl.program_id(0)
    N = gl.cdiv(T, L)
    segments = gl.cdiv(N, per)
    number = pid // COLUMNS
    first = number % segments * per
    pid_bh = (number // segments).to(gl.int64)
    column = pid % COLUMNS * (BZ * WALKERS)
    walk = Walk(
        head=pid_bh, N=N, first=first, count=gl.minimum(per, N - first), number=number.to(gl.int64),
        initial=initial_ptr, last=last_ptr, row=pid_bh.to(gl.int32) * N, column=column,
    )  # fmt: skip
    v_start = (pid_bh // H * T * H + pid_bh % H) * V

    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    keys_desc = tma.make_tensor_descriptor(decayed_ptr, [rows * (3 * L), BK], [BK, 1], [2 * L, BK], layout)
    inverse_desc = tma.make_tensor_descriptor(squares_ptr, [rows * (2 * L), L], [L, 1], [L, L], layout)
    queries_desc, scores_desc, v_desc, out_desc, states_desc = None, None, None, None, None
    queries_s, scores_s, v_s, out_s, states_s = None, None, None, None, None
    if v_ptr is not None:
        v_desc = tma.make_tensor_descriptor(v_ptr + v_start, [T, V], [H * V, 1], [L, BZ * WALKERS], layout)
        v_s = gl.allocate_shared_memory(DTYPE, [STAGES, L, BZ * WALKERS], layout)
    if FUTURE or out_ptr is not None:
        queries_desc = tma.make_tensor_descriptor(decayed_ptr, [rows * (3 * L), BK], [BK, 1], [L, BK], layout)
        queries_s = gl.allocate_shared_memory(DTYPE, [STAGES, L, BK], layout)
        scores_desc = inverse_desc
        scores_s = gl.allocate_shared_memory(DTYPE, [STAGES, L, L], layout)
    if out_ptr is not None:
        out_desc = tma.make_tensor_descriptor(out_ptr + v_start, [T, V], [H * V, 1], [L, BZ], layout)
        out_s = gl.allocate_shared_memory(DTYPE, [WALKERS, L, BZ], layout)
    if states_ptr is not None:
        states_desc = tma.make_tensor_descriptor(states_ptr, [rows * ROWS, K], [K, 1], [BZ, BK], layout)
        states_s = gl.allocate_shared_memory(DTYPE, [WALKERS, BZ, BK], layout)
    tensors = ChannelTiles(keys_desc, queries_desc, inverse_desc, scores_desc, v_desc, out_desc, states_desc)
    tiles = ChannelTiles(
        gl.allocate_shared_memory(DTYPE, [STAGES, 2 * L, BK], layout),
        queries_s,
        gl.allocate_shared_memory(DTYPE, [STAGES, L, L], layout),
        scores_s,
        v_s,
        out_s,
        states_s,
    )
    loaded = allocate_barriers(STAGES)
    freed = allocate_barriers(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=WALKERS)
    fence_async_shared()
    barrier()
    if WALKERS == 1:
        gl.warp_specialize(
            [
                (_walk, (tensors, tiles, loaded, freed, vectors_ptr, walk, 0, K, V, ROWS, L, FUTURE)),
                (_load, (tensors, tiles, loaded, freed, walk, L, FUTURE)),
            ],
            [1],
            [40],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (tensors, tiles, loaded, freed, vectors_ptr, walk, 0, K, V, ROWS, L, FUTURE)),
                (_walk, (tensors, tiles, loaded, freed, vectors_ptr, walk, 1, K, V, ROWS, L, FUTURE)),
                (_load, (tensors, tiles, loaded, freed, walk, L, FUTURE)),
            ],
            [WARPS, 1],
            [232, 40],
        )
