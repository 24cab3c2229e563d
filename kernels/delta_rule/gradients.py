"""All gradients of the delta rule within chunks, from the states before and after them.

In the words of chunkwise.py, with q scaled, D_ij = exp(b_i - b_j) for j <= i, else 0, w = exp(b_L - b) and dS the
gradient of the state after the chunk,

    X  = v - exp(b) * (k S)         u  = T Y,  Y = beta * X       dY = T^T (P^T do + (w * k) dS)
    dv = beta * dY                  dP = D * (do u^T)             dA = -D * (dY u^T) below the diagonal
    dq = exp(b) * (do S^T) + dP k
    dk = w * (u dS^T) - exp(b) * (dv S^T) + dP^T q + (M + M^T) k,  M = beta * dA
    dbeta = rows(dY * X) + rows(dA * k k^T)

where rows are the sums over them. Every exponential weighs rows of a product with q or k, so the gradient of b is

    db = rows(q * dq) - rows(k * dk) + 2 (rows(M * k k^T) - exp(b) * rows(dv * k S))

and that of g the sum of db over the positions from a token on, and of S' * dS, S' being the state after the chunk. dY
comes from the walk over chunks that makes dS. Source: reverse mode of Gated Delta Networks (2025), section 3.3.

A program has two groups of four warps: one has tiles copied from and to global memory (TMA), the other computes.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.device import capability, multiprocessors, scratch
from ..common.remember import remember_launches
from ..common.sizes import cdiv
from ..common.versions import register_options
from ..scalar_decay.whole_state_tiles import WARPS, allocate_barriers, barrier, load_async, reinterpret, store_async
from . import CHUNK
from .channel_chunks import _add
from .inverse import LOG2E, MIN_LOG_DECAY

SEGMENT = 32
"""Most chunks of a program."""
LENGTH = gl.constexpr(CHUNK)
BV = gl.constexpr(64)
"""Columns of V at a time."""


class Descriptors(NamedTuple):
    """Of the tensors whose tiles are copied."""

    q: Any
    k: Any
    inverse: Any
    state: Any
    dstate: Any
    v: Any
    dy: Any
    do: Any
    dq: Any
    dk: Any
    dv: Any


class Shared(NamedTuple):
    """What is in shared memory.

    Attributes:
        q, k, inverse: of a chunk.
        states: S^T and dS^T [BV, BK] of BV columns. Then S^T of the columns before, in turn; dk; and dk and dq in
            float32.
        of_v: dO, V, dY and Y [L, BV]. Then dv in place of V; dO of the columns before, in turn, in the first two; dA
            and dP in the last two; and there dq.
        vectors: b, beta and g of two chunks.

    The others are barriers. They complete when tiles are there,

        keys, queries, inverted: k and the vectors; q; inverse.
        early, late: S^T, V and dY; dS^T and dO.
        again: S^T and dO of the columns before, one for each place.

    when the threads that compute

        freed, freed_q, freed_again: have read all but q; q; or what is in the places of ``again``.
        made, made_k, made_q: have put dv, dk and dq in place.

    and when dk in float32 is stored.
    """

    q: Any
    k: Any
    inverse: Any
    states: Any
    of_v: Any
    vectors: Any
    keys: Any
    queries: Any
    inverted: Any
    early: Any
    late: Any
    again: Any
    freed: Any
    freed_q: Any
    freed_again: Any
    made: Any
    made_k: Any
    made_q: Any
    stored: Any


class Places(NamedTuple):
    """A chunk's tiles in shared memory, of BV columns of V, and its vectors."""

    q: Any
    k: Any
    inverse: Any
    state: Any
    dstate: Any
    do: Any
    v: Any
    dy: Any
    y: Any
    b: Any
    beta: Any
    g: Any


class Segment(NamedTuple):
    """Where a program works: ``count`` chunks from ``start`` on, of a head of N; and the number of that head and its
    first token in [B, T, H]."""

    start: Any
    count: Any
    N: Any
    pid_bh: Any
    token: Any


@gluon.jit
def _place_of_dq(tiles):
    """Return the tile in shared memory for dq of k's dtype, that of dA and dP."""
    L: gl.constexpr = tiles.k.shape[1]
    BK: gl.constexpr = tiles.k.shape[2]
    places: gl.constexpr = 4 * BV // BK
    return reinterpret(tiles.of_v, tiles.k.dtype, [places, L, BK], tiles.k.layout).index(places - 1)


@gluon.jit
def _zero(segment, index, part):
    """Return 0, which the compiler cannot know, and not that it is the same in each ``part`` of the kernel."""
    return (segment.start + index + part) >> 31


@gluon.jit
def _places(tiles, segment, index, part):
    """Return where tiles of a chunk are, for use in a part of the kernel: behind _zero the compiler makes addresses and
    descriptors there, and does not keep those of all parts for all chunks, for which registers have no room."""
    L: gl.constexpr = tiles.k.shape[1]
    zero = _zero(segment, index, part)
    of_v = tiles.of_v.index(zero)
    vectors = tiles.vectors.index(zero + index % 2)
    return Places(
        q=tiles.q.index(zero), k=tiles.k.index(zero), inverse=tiles.inverse.index(zero),
        state=tiles.states.index(zero), dstate=tiles.states.index(zero + 1),
        do=of_v.slice(0, L), v=of_v.slice(L, L), dy=of_v.slice(2 * L, L), y=of_v.slice(3 * L, L),
        b=vectors.slice(0, L), beta=vectors.slice(L, L), g=vectors.slice(2 * L, L),
    )  # fmt: skip


@gluon.jit
def _load_vectors(tiles, b_ptr, beta_ptr, g_ptr, segment, index, T, H: gl.constexpr):
    """Put the vectors of a chunk into shared memory."""
    L: gl.constexpr = tiles.k.shape[1]
    offs = gl.arange(0, L, gl.BlockedLayout([L // 32], [32], [WARPS], [0]))
    chunk = segment.start + index
    at = segment.token + (chunk * L + offs).to(gl.int64) * H
    exists = offs < T - chunk * L
    place = tiles.vectors.index(index % 2)
    place.slice(0, L).store(gl.load(b_ptr + (segment.pid_bh * segment.N + chunk) * L + offs))
    place.slice(L, L).store(gl.load(beta_ptr + at, mask=exists, other=0.0))
    if g_ptr is not None:
        place.slice(2 * L, L).store(gl.load(g_ptr + at, mask=exists, other=0.0))


@gluon.jit
def _copy(
    tensors, tiles, b_ptr, beta_ptr, g_ptr, segment, T,
    H: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Have all tiles copied, chunk by chunk."""
    L: gl.constexpr = tiles.k.shape[1]
    of_v = tiles.of_v.index(0)
    OF_TOKENS: gl.constexpr = 2 * L * BV
    OF_STATE: gl.constexpr = 2 * BV * tiles.k.shape[2]
    OF_KEYS: gl.constexpr = 2 * L * tiles.k.shape[2]
    for index in range(segment.count):
        first = (segment.start + index) * L
        number = segment.pid_bh.to(gl.int32) * segment.N + segment.start + index
        for block in range(BLOCKS):
            column = block * BV
            many = index * BLOCKS + block
            row = number * ROWS + column
            if block == 0:
                _load_vectors(tiles, b_ptr, beta_ptr, g_ptr, segment, index, T, H)
                barrier()
            mbarrier.wait(tiles.freed, (many + 1) & 1, pred=many > 0)
            if block == 0:
                mbarrier.expect(tiles.keys, OF_KEYS)
                load_async(tensors.k, [first, 0], tiles.keys, tiles.k.index(0))
            else:
                tma.store_wait(0)
            mbarrier.expect(tiles.early, OF_STATE + 2 * OF_TOKENS)
            load_async(tensors.state, [row, 0], tiles.early, tiles.states.index(0))
            load_async(tensors.v, [first, column], tiles.early, of_v.slice(L, L))
            if block == 0:
                mbarrier.expect(tiles.inverted, 2 * L * L)
                load_async(tensors.inverse, [number * L, 0], tiles.inverted, tiles.inverse.index(0))
                tma.store_wait(0)
            load_async(tensors.dy, [first, column], tiles.early, of_v.slice(2 * L, L))
            mbarrier.expect(tiles.late, OF_STATE + OF_TOKENS)
            load_async(tensors.dstate, [row, 0], tiles.late, tiles.states.index(1))
            load_async(tensors.do, [first, column], tiles.late, of_v.slice(0, L))
            if block == 0:
                mbarrier.wait(tiles.freed_q, (index + 1) & 1, pred=index > 0)
                mbarrier.expect(tiles.queries, OF_KEYS)
                load_async(tensors.q, [first, 0], tiles.queries, tiles.q.index(0))
            mbarrier.wait(tiles.made, many & 1)
            store_async(tensors.dv, [first, column], of_v.slice(L, L))
        tma.store_wait(0)
        for block in gl.static_range(1, BLOCKS):
            column = (BLOCKS - 1 - block) * BV
            mbarrier.wait(tiles.freed_again, (index * (BLOCKS - 1) + block - 1) & 1)
            again = tiles.again.index(block % 2)
            mbarrier.expect(again, OF_STATE + OF_TOKENS)
            load_async(tensors.state, [number * ROWS + column, 0], again, tiles.states.index(block % 2))
            load_async(tensors.do, [first, column], again, of_v.slice(block % 2 * L, L))
        mbarrier.wait(tiles.made_k, index & 1)
        if tensors.dk.dtype == tiles.k.dtype:
            store_async(tensors.dk, [first, 0], tiles.states.index(0))
            tma.store_wait(0)
            mbarrier.wait(tiles.made_q, index & 1)
            store_async(tensors.dq, [first, 0], _place_of_dq(tiles))
        else:
            place = reinterpret(tiles.states, gl.float32, [L, tiles.k.shape[2]], tensors.dk.layout)
            store_async(tensors.dk, [first, 0], place)
            tma.store_wait(0)
            mbarrier.arrive(tiles.stored, count=1)
            mbarrier.wait(tiles.made_q, index & 1)
            store_async(tensors.dq, [first, 0], place)
            tma.store_wait(0)
    tma.store_wait(0)


@gluon.jit
def _compute(
    tensors, tiles, g_ptr, dg_ptr, dbeta_ptr, segment, scale, T,
    H: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients, chunk by chunk."""
    L: gl.constexpr = tiles.k.shape[1]
    BK: gl.constexpr = tiles.k.shape[2]
    DTYPE: gl.constexpr = tiles.k.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BK, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, L, 16])
    of_wide: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    of_square: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, square)
    column_layout: gl.constexpr = gl.SliceLayout(0, square)
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([L // 32], [32], [WARPS], [0])
    offs_j = gl.arange(0, L, row_layout)
    offs_i = gl.arange(0, L, column_layout)
    for index in range(segment.count):
        dk = gl.zeros([L, BK], gl.float32, wide)
        da = gl.zeros([L, L], gl.float32, square)
        dp = gl.zeros([L, L], gl.float32, square)
        dbeta = gl.zeros([L], gl.float32, row_layout)
        of_held = gl.zeros([L], gl.float32, row_layout)
        of_states = gl.zeros([16], gl.float32, gl.SliceLayout(1, lines))
        mbarrier.wait(tiles.keys, index & 1)
        # Unrolled, a loop of one block takes more registers.
        for block in range(BLOCKS + _zero(segment, index, 0)):
            now = _places(tiles, segment, index, block)
            phase = (index * BLOCKS + block) & 1
            mbarrier.wait(tiles.early, phase)
            held = gl.zeros([L, BV], gl.float32, square)
            held = warpgroup_mma(now.k, now.state.permute((1, 0)), held, is_async=True, use_acc=False)
            beta = now.beta.load(gl.SliceLayout(1, of_wide))
            taken = (-gl.exp2(now.b.load(gl.SliceLayout(1, of_wide))) * beta)[:, None]
            weighted = (now.dy.load(of_wide).to(gl.float32) * taken).to(DTYPE)
            beta = now.beta.load(row_layout)
            held = warpgroup_mma_wait(0, deps=[held])
            held = held * gl.exp2(now.b.load(row_layout))[:, None]
            dy = now.dy.load(square).to(gl.float32)
            of_held += gl.sum(dy * held, 1)
            x = now.v.load(square).to(gl.float32) - held
            dbeta += gl.sum(dy * x, 1)
            now.y.store((x * beta[:, None]).to(DTYPE))
            now.v.store((dy * beta[:, None]).to(DTYPE))
            fence_async_shared()
            barrier()
            mbarrier.arrive(tiles.made, count=1)
            mbarrier.wait(tiles.inverted, index & 1)
            u = warpgroup_mma(now.inverse, now.y, held, is_async=True, use_acc=False)
            dk = warpgroup_mma(weighted, now.state, dk, is_async=True)
            u = warpgroup_mma_wait(1, deps=[u])
            mbarrier.wait(tiles.late, phase)
            left = gl.convert_layout(u.to(DTYPE), of_square)
            da = warpgroup_mma(left, now.dy.permute((1, 0)), da, is_async=True)
            dp = warpgroup_mma(left, now.do.permute((1, 0)), dp, is_async=True)
            b = now.b.load(row_layout)
            last = now.b.slice(L - 1, 1).load(row_layout)
            left = gl.convert_layout((u * gl.exp2(last - b)[:, None]).to(DTYPE), of_wide)
            dk = warpgroup_mma(left, now.dstate, dk, is_async=True)
            if g_ptr is not None:
                product = gl.zeros([16, BK], gl.float32, lines)
                for part in gl.static_range(BV // 16):
                    state = now.state.slice(part * 16, 16).load(lines).to(gl.float32)
                    product += state * now.dstate.slice(part * 16, 16).load(lines).to(gl.float32)
                of_states += gl.sum(product, 1)
            da, dp, dk = warpgroup_mma_wait(0, deps=[da, dp, dk])
            barrier()
            if block < BLOCKS - 1:
                mbarrier.arrive(tiles.freed, count=1)
        if BLOCKS > 1:
            mbarrier.arrive(tiles.freed_again, count=1)

        now = _places(tiles, segment, index, BLOCKS)
        b = now.b.load(row_layout)[:, None]
        b_i = now.b.load(column_layout)[None, :]
        decay = gl.exp2(gl.where(offs_i[None, :] >= offs_j[:, None], b_i - b, float("-inf")))
        dp = (dp * (decay * scale)).to(DTYPE)
        now.y.store(dp)
        dp = gl.convert_layout(dp, of_wide)
        da *= -gl.where(offs_i[None, :] > offs_j[:, None], decay, 0.0)
        now.dy.store(da.to(DTYPE))
        m = gl.convert_layout((da * now.beta.load(column_layout)[None, :]).to(DTYPE), of_wide)
        of_keys = gl.sum(dk * now.k.load(wide).to(gl.float32), 1)
        fence_async_shared()
        barrier()
        within = gl.zeros([L, BK], gl.float32, wide)
        within = warpgroup_mma(now.dy.permute((1, 0)), now.k, within, is_async=True, use_acc=False)
        dk = warpgroup_mma(m, now.k, dk, is_async=True)
        mbarrier.wait(tiles.queries, index & 1)
        dk = warpgroup_mma(dp, now.q, dk, is_async=True)
        within = warpgroup_mma_wait(2, deps=[within])
        of_rate = gl.convert_layout(gl.sum(within * now.k.load(wide).to(gl.float32), 1), row_layout)
        now = _places(tiles, segment, index, BLOCKS + 1)
        beta = now.beta.load(row_layout)
        exists = offs_j < T - (segment.start + index) * L
        at = segment.token + ((segment.start + index) * L + offs_j).to(gl.int64) * H
        gl.store(dbeta_ptr + at, dbeta + of_rate, mask=exists)
        rate = now.beta.load(gl.SliceLayout(1, wide))
        dk = warpgroup_mma_wait(0, deps=[dk])
        dk += within * rate[:, None]
        db = -gl.convert_layout(gl.sum(dk * now.k.load(wide).to(gl.float32), 1), row_layout)
        db += 2 * (of_rate - of_held) * beta
        of_keys = gl.convert_layout(of_keys, row_layout) + of_held * beta

        now = _places(tiles, segment, index, BLOCKS + 2)
        dq = warpgroup_mma(now.do, now.state, gl.zeros([L, BK], gl.float32, wide), is_async=True, use_acc=False)
        dq = warpgroup_mma_wait(0, deps=[dq])
        for block in gl.static_range(1, BLOCKS):
            if block < BLOCKS - 1:
                barrier()
                mbarrier.arrive(tiles.freed_again, count=1)
            phase = (index * ((BLOCKS - 1 + block % 2) // 2) + (block - 1) // 2) & 1
            mbarrier.wait(tiles.again.index(block % 2), phase)
            dq = warpgroup_mma(
                tiles.of_v.index(0).slice(block % 2 * L, L), tiles.states.index(block % 2), dq, is_async=True
            )
            dq = warpgroup_mma_wait(0, deps=[dq])
        now = _places(tiles, segment, index, BLOCKS + 3)
        dq *= (gl.exp2(now.b.load(gl.SliceLayout(1, wide))) * scale)[:, None]
        dq = warpgroup_mma(now.y.permute((1, 0)), now.k, dq, is_async=True)
        barrier()
        if tensors.dk.dtype == DTYPE:
            now.state.store(dk.to(DTYPE))
            fence_async_shared()
            barrier()
            mbarrier.arrive(tiles.made_k, count=1)
            dq = warpgroup_mma_wait(0, deps=[dq])
            barrier()
            _place_of_dq(tiles).store(dq.to(DTYPE))
        else:
            place = reinterpret(tiles.states, gl.float32, [L, BK], tensors.dk.layout)
            place.store(dk)
            fence_async_shared()
            barrier()
            mbarrier.arrive(tiles.made_k, count=1)
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.wait(tiles.stored, index & 1)
            place.store(dq)
        fence_async_shared()
        barrier()
        mbarrier.arrive(tiles.made_q, count=1)
        mbarrier.arrive(tiles.freed, count=1)
        if g_ptr is not None:
            db += gl.convert_layout(gl.sum(dq * now.q.load(wide).to(gl.float32), 1), row_layout)
            last = now.b.slice(L - 1, 1).load(flat)
            dg = gl.associative_scan(gl.convert_layout(db, flat), 0, _add, reverse=True) + gl.sum(of_keys, 0)
            dg += gl.exp2(last) * gl.sum(of_states, 0)
            offs = gl.arange(0, L, flat)
            at = segment.token + ((segment.start + index) * L + offs).to(gl.int64) * H
            exists = offs < T - (segment.start + index) * L
            g = now.g.load(flat) * LOG2E
            gl.store(dg_ptr + at, gl.where(g >= MIN_LOG_DECAY, dg, 0.0), mask=exists)
            barrier()
        mbarrier.arrive(tiles.freed_q, count=1)


@remember_launches
@gluon.jit(do_not_specialize=["scale", "T", "per"])
def gradients_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, b_ptr, inverse_ptr, state_ptr, do_ptr, dy_ptr, dstate_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, scale, T, per,
    H: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of ``per`` chunks of a head.

    Grid: (B * H * ceil(N / per),), N = ceil(T / L). Reads q, k [B, T, H / GROUP, K], v, do, dY [B, T, H, V], g (None:
    0) and beta [B, T, H], b [B * H, N, L] in base 2, T [B * H, N, L, L], and S^T and dS^T [B * H, N, ROWS, K]; writes
    dq, dk [B, T, H, K], dv [B, T, H, V], and dg (if g is given) and dbeta [B, T, H].
    """
    DTYPE: gl.constexpr = k_ptr.dtype.element_ty
    L: gl.constexpr = LENGTH
    BK: gl.constexpr = 64 if K <= 64 else 128
    OF_QK: gl.constexpr = H // GROUP * K
    BLOCKS: gl.constexpr = (V + BV - 1) // BV
    N = gl.cdiv(T, L)
    segments = gl.cdiv(N, per)
    start = gl.program_id(0) % segments * per
    pid_bh = (gl.program_id(0) // segments).to(gl.int64)
    chunks = gl.num_programs(0) // segments * N
    token = pid_bh // H * T * H + pid_bh % H
    of_qk = pid_bh // H * T * OF_QK + pid_bh % H // GROUP * K
    segment = Segment(start=start, count=gl.minimum(per, N - start), N=N, pid_bh=pid_bh, token=token)

    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    of_made: gl.constexpr = gl.NVMMASharedLayout(128, dq_ptr.dtype.element_ty.primitive_bitwidth, rank=2)
    tensors = Descriptors(
        q=tma.make_tensor_descriptor(q_ptr + of_qk, [T, K], [OF_QK, 1], [L, BK], layout),
        k=tma.make_tensor_descriptor(k_ptr + of_qk, [T, K], [OF_QK, 1], [L, BK], layout),
        inverse=tma.make_tensor_descriptor(inverse_ptr, [chunks * L, L], [L, 1], [L, L], layout),
        state=tma.make_tensor_descriptor(state_ptr, [chunks * ROWS, K], [K, 1], [BV, BK], layout),
        dstate=tma.make_tensor_descriptor(dstate_ptr, [chunks * ROWS, K], [K, 1], [BV, BK], layout),
        v=tma.make_tensor_descriptor(v_ptr + token * V, [T, V], [H * V, 1], [L, BV], layout),
        dy=tma.make_tensor_descriptor(dy_ptr + token * V, [T, V], [H * V, 1], [L, BV], layout),
        do=tma.make_tensor_descriptor(do_ptr + token * V, [T, V], [H * V, 1], [L, BV], layout),
        dq=tma.make_tensor_descriptor(dq_ptr + token * K, [T, K], [H * K, 1], [L, BK], of_made),
        dk=tma.make_tensor_descriptor(dk_ptr + token * K, [T, K], [H * K, 1], [L, BK], of_made),
        dv=tma.make_tensor_descriptor(dv_ptr + token * V, [T, V], [H * V, 1], [L, BV], layout),
    )
    again = allocate_barriers(2)
    for n in gl.static_range(2):
        mbarrier.init(again.index(n), count=1)
    barriers = allocate_barriers(12)
    for n in gl.static_range(12):
        mbarrier.init(barriers.index(n), count=1)
    tiles = Shared(
        q=gl.allocate_shared_memory(DTYPE, [1, L, BK], layout),
        k=gl.allocate_shared_memory(DTYPE, [1, L, BK], layout),
        inverse=gl.allocate_shared_memory(DTYPE, [1, L, L], layout),
        states=gl.allocate_shared_memory(DTYPE, [2, BV, BK], layout),
        of_v=gl.allocate_shared_memory(DTYPE, [1, 4 * L, BV], layout),
        vectors=gl.allocate_shared_memory(gl.float32, [2, 4 * L], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        keys=barriers.index(0),
        queries=barriers.index(1),
        inverted=barriers.index(2),
        early=barriers.index(3),
        late=barriers.index(4),
        again=again,
        freed=barriers.index(5),
        freed_q=barriers.index(6),
        freed_again=barriers.index(7),
        made=barriers.index(8),
        made_k=barriers.index(9),
        made_q=barriers.index(10),
        stored=barriers.index(11),
    )
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_compute, (tensors, tiles, g_ptr, dg_ptr, dbeta_ptr, segment, scale, T, H, BLOCKS)),
            (_copy, (tensors, tiles, b_ptr, beta_ptr, g_ptr, segment, T, H, ROWS, BLOCKS)),
        ],
        [WARPS],
        [24],
    )


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    b: Tensor,
    inverse: Tensor,
    state: Tensor,
    do: Tensor,
    dy: Tensor,
    dstate: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Compute the gradients of q, k, v, g and beta.

    Args: see :func:`gradients_kernel`; g, beta and b are float32, all others of k's dtype, of 16 bits. All are
        contiguous.

    Returns:
        dq, dk [B, T, HK, K], dv [B, T, H, V] in the inputs' dtype, dg [B, T, H] (None without g) and dbeta, float32.
    """
    B, T, H, V = v.shape
    HK, K = k.shape[2:]
    N = b.shape[1]
    dq, dk = (v.new_empty(B, T, H, K, dtype=v.dtype if HK == H else torch.float32) for _ in range(2))
    dv, dg, dbeta = torch.empty_like(v), None if g is None else torch.empty_like(g), torch.empty_like(beta)
    per = min(SEGMENT, cdiv(B * H * N, 2 * multiprocessors(v.device)))
    triton.set_allocator(scratch)
    gradients_kernel[(B * H * cdiv(N, per),)](
        q, k, v, g, beta, b, inverse, state, do, dy, dstate, dq, dk, dv, dg, dbeta, scale, T, per,
        H=H, GROUP=H // HK, K=K, V=V, ROWS=state.shape[2], num_warps=4, maxnreg=128,
        **register_options(capability(v.device)),
    )  # fmt: skip
    if HK != H:
        dq, dk = (x.unflatten(2, (HK, -1)).sum(3).to(v.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta
