"""The gradients of KDA within chunks, from the states before and after them.

In the words of chunkwise.py, with dS the gradient of the state after the chunk,

    X  = v - (exp(b) * k) S  u  = T Y,  Y = beta * X           dv = beta * dY
    dP = do u^T for j <= i   N  = dY u^T,  M = -beta * N, both for j < i
    dq = scale (exp(b) * (do S^T) + [dP] k)
    dk = R + C               R  = [M] k - exp(b) * beta * (dY S^T)
                             C  = exp(b_L - b) * (u dS^T) + scale [dP]^T q + [M]^T k
    dbeta = rows(dY * X) - rows(N * k . k)

where rows are the sums over them, and [x] y weighs x_ij y_jc with exp(b_ic - b_jc), as k . k does. The gradient of b is
q * dq + k * (R - C), of b_L beside it the sum of C's first term times k over tokens and of exp(b_L) S * dS over the
columns of V, and that of g the sum over the positions from a token on. dY comes from the walk over chunks that makes
dS. As in channel_chunks.py weights are a factor of i times one of j. Source: reverse mode of Kimi Linear (2025),
section 3.2.

One kernel makes u, dP and N, another the rest, 64 key channels at a time.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
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
from ..scalar_decay.whole_state_tiles import allocate_barriers, barrier, load_async, reinterpret, store_async
from .channel_chunks import _add, _any
from .inverse import LOG2E, MIN_LOG_DECAY

BD = gl.constexpr(64)
"""Columns of K, and of V, at a time."""


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Return x in ``dtype``, divided by a power of two that makes the largest |x| at most 1; and that power in float32:
    products with weights stay in its range, whatever the size of gradients."""
    exponent = (tl.max(tl.max(tl.abs(x), 1), 0).to(tl.int32, bitcast=True) >> 23) - 126
    exponent = tl.minimum(tl.maximum(exponent, -126), 126).to(tl.float32)
    return (x * tl.exp2(-exponent)).to(dtype), tl.exp2(exponent)


@triton.jit
def _load_tile(ptr, STRIDE: tl.constexpr, exists, column, D: tl.constexpr):
    """Return the tile [L, BD] from ``column`` on of rows of D elements, which are STRIDE apart."""
    rows = tl.arange(0, exists.shape[0])[:, None]
    columns = column + tl.arange(0, BD)[None, :]
    return tl.load(ptr + (rows * STRIDE + columns), mask=exists[:, None] & (columns < D), other=0.0)


@triton.jit
def _store_tile(ptr, x, STRIDE: tl.constexpr, exists, column, D: tl.constexpr):
    """Store what :func:`_load_tile` reads."""
    rows = tl.arange(0, exists.shape[0])[:, None]
    columns = column + tl.arange(0, BD)[None, :]
    tl.store(ptr + (rows * STRIDE + columns), x.to(ptr.dtype.element_ty), mask=exists[:, None] & (columns < D))


@triton.jit
def _place(number, T, H: tl.constexpr, L: tl.constexpr):
    """Return of a chunk's number the first token in [B, T], the head, and which positions exist."""
    N = tl.cdiv(T, L)
    start = (number % N).to(tl.int32) * L
    return number // N // H * T + start, number // N % H, tl.arange(0, L) < T - start


@remember_launches
@triton.jit(do_not_specialize=["T"])
def new_values_kernel(
    v_ptr, beta_ptr, decayed_ptr, squares_ptr, states_ptr, do_ptr, dy_ptr,
    new_ptr, dv_ptr, dsquares_ptr, vectors_ptr, dbeta_ptr, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Compute u, dv, dP and N of a chunk of a head, and rows(dY * X) of dbeta.

    Grid: (B * H * N,), N = ceil(T / L). Reads v, do, dY [B, T, H, V], beta [B, T, H], what channel_chunks_kernel wrote,
    and S^T [B * H, N, ROWS, K]; writes u and dv like v, dP and N below the diagonal [B * H, N, 2, L, L], divided
    by powers of two, dP's diagonal and these powers [B * H, N, L + 2], and dbeta [B, T, H].
    """
    DTYPE: tl.constexpr = v_ptr.dtype.element_ty
    number = tl.program_id(0).to(tl.int64)
    token, head, exists = _place(number, T, H, L)
    of_v = (token * H + head) * V
    of_beta = token * H + head + tl.arange(0, L) * H
    beta = tl.load(beta_ptr + of_beta, mask=exists, other=0.0)
    rows = tl.arange(0, L)[:, None]
    columns = tl.arange(0, L)[None, :]
    every = tl.arange(0, L) >= 0
    inverse = _load_tile(squares_ptr + number * (2 * L * L), L, every, 0, L)
    dp = tl.zeros([L, L], tl.float32)
    n = tl.zeros([L, L], tl.float32)
    dbeta = tl.zeros([L], tl.float32)
    for block in tl.range(0, V, BD, num_stages=1):
        held = tl.zeros([L, BD], tl.float32)
        for column in tl.static_range(0, BK, BD):
            keys = _load_tile(decayed_ptr + (number * 3 + 1) * (L * BK), BK, every, column, BK)
            state = _load_tile(states_ptr + (number * ROWS + block) * K, K, every, column, K)
            held = tl.dot(keys, tl.trans(state), held)
        x = _load_tile(v_ptr + of_v, H * V, exists, block, V) - held
        dy = _load_tile(dy_ptr + of_v, H * V, exists, block, V)
        _store_tile(dv_ptr + of_v, dy * beta[:, None], H * V, exists, block, V)
        dbeta += tl.sum(dy * x, 1)
        new = tl.dot(inverse, (x * beta[:, None]).to(DTYPE)).to(DTYPE)
        _store_tile(new_ptr + of_v, new, H * V, exists, block, V)
        n = tl.dot(dy, tl.trans(new), n)
        dp = tl.dot(_load_tile(do_ptr + of_v, H * V, exists, block, V), tl.trans(new), dp)
    vectors = vectors_ptr + number * (L + 2)
    tl.store(vectors + tl.arange(0, L), tl.sum(tl.where(rows == columns, dp, 0.0), 1))
    dp, of_dp = _rounded(tl.where(rows > columns, dp, 0.0), DTYPE)
    n, of_n = _rounded(tl.where(rows > columns, n, 0.0), DTYPE)
    dsquares = dsquares_ptr + number * (2 * L * L)
    _store_tile(dsquares, dp, L, every, 0, L)
    _store_tile(dsquares + L * L, n, L, every, 0, L)
    tl.store(vectors + L, of_dp)
    tl.store(vectors + L + 1, of_n)
    tl.store(dbeta_ptr + of_beta, dbeta, mask=exists)


class ChannelDescriptors(NamedTuple):
    """Of the tensors whose tiles are copied; ``squares``: dP and N, one behind the other."""

    q: Any
    k: Any
    squares: Any
    do: Any
    dy: Any
    new: Any
    state: Any
    dstate: Any
    dq: Any
    dk: Any


class ChannelMemory(NamedTuple):
    """What is in shared memory.

    Attributes:
        tiles: q, k, dP and N of a chunk; then dO, dY and u of BD columns of V, in two places in turn. Later decayed
            keys and queries in the first; masked dP and N, and dk, in the second.
        states: S^T and dS^T of BD columns of V, in two places in turn. Then b, and the gradient of b; weights; dq.
        loaded: barrier, which completes when q, k, dP and N are there.
        places: barriers, when what is in the places is.
    """

    tiles: Any
    states: Any
    loaded: Any
    places: Any


@gluon.jit
def _zero(number, part):
    """Return 0, as gradients._zero does, see gradients._places; ``number`` is of the chunk."""
    return (number + part) >> 31


@gluon.jit
def _load_block(tensors, memory, block: gl.constexpr, number, start, column, ROWS: gl.constexpr):
    """Start the copies of BD columns of V."""
    place: gl.constexpr = block % 2
    bar = memory.places.index(place)
    size: gl.constexpr = 2 * BD * (2 * BD + 3 * tensors.do.block_shape[0])
    mbarrier.expect(bar, size)
    load_async(tensors.state, [number * ROWS + block * BD, column], bar, memory.states.index(2 * place))
    load_async(tensors.do, [start, block * BD], bar, memory.tiles.index(4 + 3 * place))
    load_async(tensors.dy, [start, block * BD], bar, memory.tiles.index(5 + 3 * place))
    load_async(tensors.dstate, [number * ROWS + block * BD, column], bar, memory.states.index(2 * place + 1))
    load_async(tensors.new, [start, block * BD], bar, memory.tiles.index(6 + 3 * place))


@gluon.jit
def _load_gates(ptr, STRIDE: gl.constexpr, row, column, rows, columns):
    """Return log decays in base 2, 0 from ``rows`` and ``columns`` on."""
    return gl.load(ptr + (row * STRIDE + column), mask=(row < rows) & (column < columns), other=0.0) * LOG2E


@gluon.jit
def _add_block(memory, zero, block: gl.constexpr, BLOCKS: gl.constexpr, index, dq, r, c):
    """Add the products with BD columns of the states to dq, R and C, asynchronously; return the columns too."""
    place: gl.constexpr = block % 2
    uses: gl.constexpr = (BLOCKS + 1 - place) // 2
    mbarrier.wait(memory.places.index(place), (index * uses + block // 2) & 1)
    state = memory.states.index(zero + 2 * place)
    dstate = memory.states.index(zero + 2 * place + 1)
    dq = warpgroup_mma(memory.tiles.index(zero + 4 + 3 * place), state, dq, is_async=True)
    r = warpgroup_mma(memory.tiles.index(zero + 5 + 3 * place), state, r, is_async=True)
    c = warpgroup_mma(memory.tiles.index(zero + 6 + 3 * place), dstate, c, is_async=True)
    return dq, r, c, state, dstate


@gluon.jit
def _first_level(last, middle, b, row, LIMIT: gl.constexpr):
    """Return at which level the weights of a chunk begin: 5 if no half of it decays beyond the limit, 4 if no quarter
    does, else 0."""
    far = gl.max(gl.maximum(-middle, middle - last), 0) > LIMIT
    first = gl.sum(gl.where(row == b.shape[0] // 4 - 1, b, 0.0), 0)
    third = gl.sum(gl.where(row == b.shape[0] * 3 // 4 - 1, b, 0.0), 0)
    early = gl.maximum(-first, first - middle)
    farther = gl.max(gl.maximum(early, gl.maximum(middle - third, third - last)), 0) > LIMIT
    return 5 - _any(far) - 4 * _any(farther)


@gluon.jit
def _add_weighted(memory, weight_s, middle, number, level, first, beta, scale, of_dp, of_n, dq, r, c, dbeta):
    """Add what dP and N make of keys and queries, where rows of the second half of a square of 2^(level + 1) rows meet
    columns of the first; at the ``first`` level, unless it is 0, all of the square."""
    L: gl.constexpr = dq.shape[0]
    DTYPE: gl.constexpr = memory.tiles.dtype
    mma: gl.constexpr = dq.type.layout
    rows = gl.arange(0, L, gl.SliceLayout(1, mma))[:, None] >> level
    near = (first > 0) & (level == first)
    is_late = near | (rows % 2 == 1)
    is_early = near | (rows % 2 == 0)
    zero = _zero(number, level)
    if first == 5:
        weight = weight_s.index(zero).load(mma) - middle
        weight_s.index(zero + 1).store(weight)
    else:
        layout: gl.constexpr = gl.BlockedLayout([L // 8, 2], [8, 4], [1, BD // 8], [1, 0])
        edge = gl.arange(0, L, gl.SliceLayout(1, layout)) >> (level + 1) << (level + 1)
        edge = gl.zeros([L, BD], gl.int32, layout) + (edge + (1 << level) - 1)[:, None]
        b = weight_s.index(zero).load(layout)
        weight_s.index(zero + 1).store(b - gl.gather(b, edge, 0))
        barrier()
        columns = gl.arange(0, L, gl.SliceLayout(0, mma))[None, :] >> level
        below = (rows >> 1 == columns >> 1) & (near | (rows > columns))
        for square in gl.static_range(2):
            x = memory.tiles.index(zero + 2 + square).load(mma)
            memory.tiles.index(zero + 7 + square).store(gl.where(below, x, 0.0))
        weight = weight_s.index(zero + 1).load(mma)
    late = gl.exp2(gl.where(is_late, weight, float("-inf")))
    q = memory.tiles.index(zero).load(mma).to(gl.float32)
    k = memory.tiles.index(zero + 1).load(mma).to(gl.float32)
    memory.tiles.index(zero + 4).store((k * gl.exp2(gl.where(is_early, -weight, float("-inf")))).to(DTYPE))
    memory.tiles.index(zero + 5).store((q * (late * scale)).to(DTYPE))
    memory.tiles.index(zero + 6).store((k * (late * -beta)).to(DTYPE))
    fence_async_shared()
    barrier()
    zero = _zero(number, level + 1)
    squares = zero + gl.where(first == 5, 2, 7)
    dp_s = memory.tiles.index(squares)
    n_s = memory.tiles.index(squares + 1)
    zeros = gl.zeros([L, BD], gl.float32, mma)
    of_dp_k = warpgroup_mma(dp_s, memory.tiles.index(zero + 4), zeros, is_async=True, use_acc=False)
    of_n_k = warpgroup_mma(n_s, memory.tiles.index(zero + 4), zeros, is_async=True, use_acc=False)
    of_dp_k, of_n_k = warpgroup_mma_wait(0, deps=[of_dp_k, of_n_k])
    late = gl.exp2(gl.where(is_late, weight_s.index(zero + 1).load(mma), float("-inf")))
    dq += late * of_dp_k * of_dp
    of_n_k *= late * of_n
    dbeta -= gl.sum(of_n_k * memory.tiles.index(zero + 1).load(mma).to(gl.float32), 1)
    r -= of_n_k * beta
    of_dp_q = warpgroup_mma(dp_s.permute((1, 0)), memory.tiles.index(zero + 5), zeros, is_async=True, use_acc=False)
    of_n_k = warpgroup_mma(n_s.permute((1, 0)), memory.tiles.index(zero + 6), zeros, is_async=True, use_acc=False)
    of_dp_q, of_n_k = warpgroup_mma_wait(0, deps=[of_dp_q, of_n_k])
    early = gl.exp2(gl.where(is_early, -weight_s.index(zero + 1).load(mma), float("-inf")))
    barrier()
    return dq, r, c + early * (of_dp_q * of_dp + of_n_k * of_n), dbeta


@remember_launches
@gluon.jit(do_not_specialize=["scale", "T", "per"])
def channel_gradients_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, states_ptr, do_ptr, dy_ptr, dstates_ptr, new_ptr, dsquares_ptr, vectors_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, scale, T, per,
    H: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dg of ``per`` chunks of a head, and the rest of dbeta.

    Grid: (B * H * ceil(N / per),), N = ceil(T / L). Reads q, k [B, T, H / GROUP, K], do, dY [B, T, H, V], g
    [B, T, H, K] and beta [B, T, H], S^T and dS^T [B * H, N, ROWS, K], and what new_values_kernel wrote; writes dq, dk
    and dg [B, T, H, K], and shares of dbeta [1 + ceil(K / 64), B, T, H], from the second on.
    """
    DTYPE: gl.constexpr = k_ptr.dtype.element_ty
    # Log decay, in base 2, of half a chunk, as in channel_chunks.py.
    LIMIT: gl.constexpr = 6 if DTYPE.is_fp16() else 110
    PARTS: gl.constexpr = (K + BD - 1) // BD
    BLOCKS: gl.constexpr = (V + BD - 1) // BD
    OF_QK: gl.constexpr = H // GROUP * K
    SIZE: gl.constexpr = dq_ptr.dtype.element_ty.primitive_bitwidth // 8
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BD // 2, 16])
    # A warp has all rows of 8 columns: sums over rows need no shared memory. flat: of tiles of 16 bits.
    layout: gl.constexpr = gl.BlockedLayout([L // 8, 2], [8, 4], [1, BD // 8], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [1, BD // 8], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, mma)
    of_columns: gl.constexpr = gl.SliceLayout(0, mma)

    N = gl.cdiv(T, L)
    segments = gl.cdiv(N, per)
    first = gl.program_id(0) % segments * per
    pid_bh = (gl.program_id(0) // segments).to(gl.int64)
    heads = gl.num_programs(0) // segments
    chunks = heads * N
    token = pid_bh // H * T * H + pid_bh % H
    of_qk = pid_bh // H * T * OF_QK + pid_bh % H // GROUP * K
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    # Eight rows in a row begin in different banks, and so do eight rows that are eight apart: the accesses of every
    # layout here take all banks.
    wide: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32], [8, 8], [16, 16], [32, 32]]
    )
    of_made: gl.constexpr = gl.NVMMASharedLayout(128, dq_ptr.dtype.element_ty.primitive_bitwidth, rank=2)
    tensors = ChannelDescriptors(
        q=tma.make_tensor_descriptor(q_ptr + of_qk, [T, K], [OF_QK, 1], [L, BD], shared),
        k=tma.make_tensor_descriptor(k_ptr + of_qk, [T, K], [OF_QK, 1], [L, BD], shared),
        squares=tma.make_tensor_descriptor(dsquares_ptr, [chunks * 2 * L, L], [L, 1], [L, L], shared),
        do=tma.make_tensor_descriptor(do_ptr + token * V, [T, V], [H * V, 1], [L, BD], shared),
        dy=tma.make_tensor_descriptor(dy_ptr + token * V, [T, V], [H * V, 1], [L, BD], shared),
        new=tma.make_tensor_descriptor(new_ptr + token * V, [T, V], [H * V, 1], [L, BD], shared),
        state=tma.make_tensor_descriptor(states_ptr, [chunks * ROWS, K], [K, 1], [BD, BD], shared),
        dstate=tma.make_tensor_descriptor(dstates_ptr, [chunks * ROWS, K], [K, 1], [BD, BD], shared),
        dq=tma.make_tensor_descriptor(dq_ptr + token * K, [T, K], [H * K, 1], [L, BD], of_made),
        dk=tma.make_tensor_descriptor(dk_ptr + token * K, [T, K], [H * K, 1], [L, BD], of_made),
    )
    memory = ChannelMemory(
        tiles=gl.allocate_shared_memory(DTYPE, [10, L, BD], shared),
        states=gl.allocate_shared_memory(DTYPE, [4, BD, BD], shared),
        loaded=allocate_barriers(1),
        places=allocate_barriers(2),
    )
    mbarrier.init(memory.loaded.index(0), count=1)
    for place in gl.static_range(2):
        mbarrier.init(memory.places.index(place), count=1)
    fence_async_shared()
    barrier()
    weight_s = reinterpret(memory.states, gl.float32, [2, L, BD], wide)

    row = gl.arange(0, L, gl.SliceLayout(1, layout))[:, None]
    offs_k = gl.arange(0, BD, gl.SliceLayout(0, layout))[None, :]
    offs_l = gl.arange(0, L, of_rows)
    for index in range(gl.minimum(per, N - first) * PARTS):
        start = (first + index // PARTS) * L
        column = index % PARTS * BD
        number = pid_bh.to(gl.int32) * N + first + index // PARTS
        loaded = memory.loaded.index(0)
        mbarrier.expect(loaded, 2 * L * (2 * BD + 2 * L))
        load_async(tensors.q, [start, column], loaded, memory.tiles.index(0))
        load_async(tensors.k, [start, column], loaded, memory.tiles.index(1))
        load_async(tensors.squares, [number * (2 * L), 0], loaded, memory.tiles.index(2))
        load_async(tensors.squares, [number * (2 * L) + L, 0], loaded, memory.tiles.index(3))
        # dq and dk of the chunk before are still on their way.
        tma.store_wait(0)
        barrier()
        for block in gl.static_range(min(BLOCKS, 2)):
            _load_block(tensors, memory, block, number, start, column, ROWS)
        of_gates = (token + start.to(gl.int64) * H) * K + column
        g = _load_gates(g_ptr + of_gates, H * K, row, offs_k, T - start, K - column)
        b = gl.associative_scan(gl.maximum(g, MIN_LOG_DECAY), 0, _add)
        last = gl.sum(gl.where(row == L - 1, b, 0.0), 0)
        middle = gl.sum(gl.where(row == L // 2 - 1, b, 0.0), 0)
        first_level = _first_level(last, middle, b, row, LIMIT)
        at = token + (start + offs_l).to(gl.int64) * H
        exists = offs_l < T - start
        beta = gl.load(beta_ptr + at, mask=exists, other=0.0)[:, None]
        vectors = vectors_ptr + number.to(gl.int64) * (L + 2)
        of_self = gl.load(vectors + offs_l)[:, None]
        of_dp = gl.load(vectors + L)
        of_n = gl.load(vectors + L + 1)

        dq = gl.zeros([L, BD], gl.float32, mma)
        r = gl.zeros([L, BD], gl.float32, mma)
        c = gl.zeros([L, BD], gl.float32, mma)
        of_states = gl.zeros([BD, BD], gl.float32, flat)
        for block in gl.static_range(BLOCKS):
            dq, r, c, state, dstate = _add_block(memory, _zero(number, block), block, BLOCKS, index, dq, r, c)
            of_states += state.load(flat).to(gl.float32) * dstate.load(flat).to(gl.float32)
            dq, r, c = warpgroup_mma_wait(0, deps=[dq, r, c])
            if block + 2 < BLOCKS:
                barrier()
                _load_block(tensors, memory, block + 2, number, start, column, ROWS)
        barrier()
        zero = _zero(number, BLOCKS)
        weight_s.index(zero).store(b)
        mbarrier.wait(loaded, index & 1)
        barrier()
        b_m = weight_s.index(zero).load(mma)
        q = memory.tiles.index(zero).load(mma).to(gl.float32)
        k = memory.tiles.index(zero + 1).load(mma).to(gl.float32)
        entering = gl.exp2(b_m)
        dq = dq * entering + of_self * k
        r *= -entering * beta
        c *= gl.exp2(gl.convert_layout(last, of_columns)[None, :] - b_m)
        weight_s.index(zero + 1).store(c * k)
        c += of_self * q * scale
        dbeta = gl.zeros([L], gl.float32, of_rows)
        middle = gl.convert_layout(middle, of_columns)[None, :]
        barrier()
        of_last = gl.convert_layout(gl.sum(of_states, 0), gl.SliceLayout(0, layout)) * gl.exp2(last)
        of_last += gl.sum(weight_s.index(zero + 1).load(layout), 0)
        barrier()
        for level in range(first_level, 6):
            dq, r, c, dbeta = _add_weighted(
                memory, weight_s, middle, number, level, first_level, beta, scale, of_dp, of_n, dq, r, c, dbeta
            )
        gl.store(dbeta_ptr + (index % PARTS + 1) * (heads.to(gl.int64) * T) + at, dbeta, mask=exists)
        dq *= scale
        barrier()
        zero = _zero(number, BLOCKS + 1)
        q = memory.tiles.index(zero).load(mma).to(gl.float32)
        k = memory.tiles.index(zero + 1).load(mma).to(gl.float32)
        weight_s.index(zero).store(q * dq + k * (r - c))
        dq_s = reinterpret(memory.states, tensors.dq.dtype, [8 // SIZE, L, BD], of_made).index(zero + 4 // SIZE)
        dk_s = reinterpret(memory.tiles, tensors.dk.dtype, [20 // SIZE, L, BD], of_made).index(zero + 16 // SIZE)
        dq_s.store(dq.to(tensors.dq.dtype))
        dk_s.store((r + c).to(tensors.dk.dtype))
        fence_async_shared()
        barrier()
        store_async(tensors.dq, [start, column], dq_s)
        store_async(tensors.dk, [start, column], dk_s)
        # A scan backward would exchange all rows twice.
        db = weight_s.index(zero).load(layout)
        dg = db - gl.associative_scan(db, 0, _add) + (of_last + gl.sum(db, 0))[None, :]
        rows = row + zero
        g = _load_gates(g_ptr + of_gates, H * K, rows, offs_k, T - start, K - column)
        dg = gl.where(g >= MIN_LOG_DECAY, dg, 0.0)
        mask = (rows < T - start) & (offs_k < K - column)
        gl.store(dg_ptr + of_gates + (rows * (H * K) + offs_k), dg, mask=mask)
        barrier()
    tma.store_wait(0)
