"""What the chunks of channel_walk.py need beforehand, where each key channel has a decay of its own (KDA).

With b the cumulative log decay and x . y as in chunkwise.py, where exp(b_i - b_j) weighs each column of x_i and y_j,
these are the decayed queries and keys, the scores P and the inverse T. The weight is a factor of i times one of j:

- exp(b_i - m) exp(m - b_j), m being b in the middle of the chunk, where no channel decays beyond what the dtype holds:
  P and A = beta k . k are then a product each.
- Elsewhere as in chunkwise.py: squares on the diagonal double in size, and below it m is the end of a square's first
  half, so that both factors are at most 1.

The inverse of I + A doubles too: with T on the diagonal of a square and A below it, it is T - T A T.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.remember import remember_launches
from ..scalar_decay.whole_state_tiles import barrier
from .inverse import LOG2E, MIN_LOG_DECAY


@gluon.jit
def _add(x, y):
    """Combine a scan's sums."""
    return x + y


@gluon.jit
def _sums(x):
    """Return the sums of groups of rows [R, S, BK] until each row, and those of all rows and of the first half [BK]."""
    layout: gl.constexpr = x.type.layout
    R: gl.constexpr = x.shape[0]
    # The groups' sums, those of all groups in each thread.
    groups: gl.constexpr = gl.BlockedLayout([1, R, 2], [1, 1, 32], [R, 1, x.shape[2] // 64], [2, 1, 0])
    total = gl.convert_layout(gl.sum(x, 1), gl.SliceLayout(0, groups))
    other = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, groups)))[None, :, None]
    this = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, groups)))[:, None, None]
    before = gl.sum(gl.where(other < this, total[None, :, :], 0.0), 1)
    first_half = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(0, groups)))[:, None] < R // 2
    middle = gl.sum(gl.where(first_half, total, 0.0), 0)
    until = gl.associative_scan(x, 1, _add) + gl.convert_layout(before, gl.SliceLayout(1, layout)).expand_dims(1)
    of_columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    return until, gl.convert_layout(gl.sum(total, 0), of_columns), gl.convert_layout(middle, of_columns)


@gluon.jit
def _halves(g, S: gl.constexpr):
    """Return exp2 of the log decays from the end of the first half, of S rows, of a square to positions behind it, else
    0, and of those from positions until there, else 0; like g, groups of rows of a chunk."""
    halves = g.reshape([g.shape[0] * g.shape[1] // S, S, g.shape[2]])
    layout: gl.constexpr = halves.type.layout
    number = gl.arange(0, halves.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    until = gl.associative_scan(halves, 1, _add)
    after = gl.minimum(gl.sum(halves, 1).expand_dims(1) - until, 0.0)
    late = number % 2 == 1
    weights = gl.exp2(gl.where(late, until, after))
    return gl.where(late, weights, 0.0).reshape(g.shape), gl.where(late, 0.0, weights).reshape(g.shape)


@gluon.jit
def _within(x, S: gl.constexpr):
    """Return x [L, L], 0 outside squares of S on the diagonal."""
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    return gl.where(rows // S == columns // S, x, 0.0)


@gluon.jit
def _below(x, S: gl.constexpr):
    """Return x [L, L] where rows of the second half of a square of 2 S meet columns of the first, else 0."""
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    return gl.where((rows // (2 * S) == columns // (2 * S)) & (rows // S > columns // S), x, 0.0)


@gluon.jit
def _put(place, x):
    """Store groups of rows [R, S, BK] in shared memory [R * S, BK]."""
    place.store(x.to(place.dtype).reshape(place.shape))


@gluon.jit
def _load(ptr, STRIDE: gl.constexpr, mask):
    """Return groups of rows of ``STRIDE`` elements, from ``ptr`` [R, 1, BK] at their first ones on."""
    rows = gl.arange(0, mask.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, mask.type.layout)))[None, :, None]
    return gl.load(ptr + rows * STRIDE, mask=mask, other=0.0)


@gluon.jit
def _load_gates(ptr, STRIDE: gl.constexpr, mask):
    """Return log decays in base 2, as :func:`_load`."""
    return gl.maximum(_load(ptr, STRIDE, mask) * LOG2E, MIN_LOG_DECAY)


@gluon.jit
def _store(ptr, x):
    """Store groups of rows, from ``ptr`` [R, 1, BK] at their first ones on."""
    rows = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))[None, :, None]
    gl.store(ptr + rows * x.shape[2], x.to(ptr.dtype.element_ty))


@gluon.jit
def _in_squares(
    q_ptr, k_ptr, g_ptr, scale, OF_QK: gl.constexpr, OF_G: gl.constexpr, mask, q_s, k_s, early_s, square: gl.constexpr
):  # fmt: skip
    """Return scale P and A [L, L] of any log decays; ``q_s`` and others are places in shared memory."""
    L: gl.constexpr = q_s.shape[0]
    zeros = gl.zeros([L, L], gl.float32, square)
    q = _load(q_ptr, OF_QK, mask)
    k = _load(k_ptr, OF_QK, mask)
    _put(q_s, q)
    _put(early_s, k)
    g_s = gl.allocate_shared_memory(gl.float32, q_s.shape, gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    _put(g_s, _load_gates(g_ptr, OF_G, mask))
    fence_async_shared()
    barrier()
    scores = warpgroup_mma(q_s, early_s.permute((1, 0)), zeros, is_async=True, use_acc=False)
    scores = _within(warpgroup_mma_wait(0, deps=[scores]), 1)
    a = zeros
    for level in gl.static_range(6):
        g = g_s.reshape(mask.shape).load(mask.type.layout)
        late, early = _halves(g, 1 << level)
        _put(q_s, q * late)
        _put(k_s, k * late)
        _put(early_s, k * early)
        fence_async_shared()
        barrier()
        scores = warpgroup_mma(q_s, early_s.permute((1, 0)), _within(scores, 1 << level), is_async=True)
        a = warpgroup_mma(k_s, early_s.permute((1, 0)), _within(a, 1 << level), is_async=True)
        scores, a = warpgroup_mma_wait(0, deps=[scores, a])
    return scores * scale, a


@gluon.jit
def _any(condition):
    """Return whether it holds in any thread of the warp: all know the answer, and so does the assembler, which makes
    products behind a branch wait for one another (wgmma) if threads might take different ways."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, r; setp.ne.b32 p, $1, 0; vote.sync.any.pred r, p, 0xffffffff; selp.b32 $0, 1, 0, r; }",
        "=r,r",
        [condition.to(gl.int32)],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def _store_square(ptr, x, L: gl.constexpr):
    """Store [L, L], in whole lines."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, L, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, L, gl.SliceLayout(0, layout))[None, :]
    gl.store(ptr + rows * L + columns, gl.convert_layout(x.to(ptr.dtype.element_ty), layout))


@gluon.jit
def _invert(a, a_s, left_s, right_s, layout: gl.constexpr):
    """Return (I + a)^-1 for a strictly lower triangular ``a`` [L, L]; the others are places in shared memory."""
    L: gl.constexpr = a.shape[0]
    DTYPE: gl.constexpr = a_s.dtype
    rows = gl.arange(0, L, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, L, gl.SliceLayout(0, layout))[None, :]
    inverse = gl.where(rows == columns, 1.0, gl.where(rows // 2 == columns // 2, -a, 0.0))
    a_s.store(a.to(DTYPE))
    for level in gl.static_range(1, 6):
        right_s.store(inverse.to(DTYPE))
        fence_async_shared()
        barrier()
        product = warpgroup_mma(right_s, a_s, gl.zeros([L, L], gl.float32, layout), is_async=True, use_acc=False)
        product = warpgroup_mma_wait(0, deps=[product])
        left_s.store(_below(product, 1 << level).to(DTYPE))
        fence_async_shared()
        barrier()
        product = warpgroup_mma(left_s, right_s, gl.zeros([L, L], gl.float32, layout), is_async=True, use_acc=False)
        inverse -= warpgroup_mma_wait(0, deps=[product])
    return inverse


@remember_launches
@gluon.jit(do_not_specialize=["scale", "T"])
def channel_chunks_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    decayed_ptr,
    squares_ptr,
    vectors_ptr,
    scale,
    T,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    BK: gl.constexpr,
    L: gl.constexpr,
):
    """Compute what the walk over a chunk of a head reads.

    Grid: (B * H * N,), N = ceil(T / L). Reads q, k [B, T, H / GROUP, K], g [B, T, H, K] and beta [B, T, H]; writes
    exp(b_L - b) * k, exp(b) * k and exp(b) * scale q [B * H, N, 3, L, BK] and T and scale P [B * H, N, 2, L, L] in k's
    dtype, and exp(b_L) and beta, one behind the other, [B * H, N, BK + L]; without squares_ptr the first alone. Columns
    beyond K, and positions beyond T, are 0 in the first and in beta.
    """
    DTYPE: gl.constexpr = k_ptr.dtype.element_ty
    # Log decay, in base 2, of half a chunk. The rest of the dtype's range is for the numbers that factors multiply.
    LIMIT: gl.constexpr = 6 if DTYPE.is_fp16() else 110
    # R groups of S rows, two columns of one of which a thread has: a warp reads and writes whole lines, offsets of rows
    # are constants, and sums over a group stay within a thread.
    WARPS: gl.constexpr = gl.num_warps()
    R: gl.constexpr = 64 * WARPS // BK
    S: gl.constexpr = L // R
    layout: gl.constexpr = gl.BlockedLayout([1, S, 2], [1, 1, 32], [R, 1, BK // 64], [2, 1, 0])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, L * 4 // WARPS, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    OF_QK: gl.constexpr = H // GROUP * K
    number = gl.program_id(0).to(gl.int64)
    N = gl.cdiv(T, L)
    pid_n = (number % N).to(gl.int32)
    pid_bh = number // N
    first = pid_bh // H * T + pid_n * L
    head = pid_bh % H
    end = T - pid_n * L

    group = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    column = gl.arange(0, BK, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    mask = (row < end - group * S) & (column < K)
    of_qk = (first * (H // GROUP) + head // GROUP) * K + group * (S * OF_QK) + column
    of_g = (first * H + head) * K + group * (S * H * K) + column
    g = _load_gates(g_ptr + of_g, H * K, mask)
    k = _load(k_ptr + of_qk, OF_QK, mask)
    q = _load(q_ptr + of_qk, OF_QK, mask)
    q_s = gl.allocate_shared_memory(DTYPE, [L, BK], shared)
    k_s = gl.allocate_shared_memory(DTYPE, [L, BK], shared)
    early_s = gl.allocate_shared_memory(DTYPE, [L, BK], shared)
    a_s = gl.allocate_shared_memory(DTYPE, [L, L], shared)
    zeros = gl.zeros([L, L], gl.float32, square)
    offs_r = gl.arange(0, L, gl.SliceLayout(1, square))
    offs_c = gl.arange(0, L, gl.SliceLayout(0, square))
    rate = gl.load(beta_ptr + first * H + head + offs_r * H, mask=offs_r < end, other=0.0)

    b, last, middle = _sums(g)
    of_columns: gl.constexpr = last.type.layout
    decayed = decayed_ptr + number * (3 * L * BK) + group * (S * BK) + column
    if squares_ptr is not None:
        vectors = vectors_ptr + number * (BK + L)
        gl.store(vectors + gl.arange(0, BK, of_columns), gl.exp2(last))
        gl.store(vectors + BK + offs_r, rate)
        far = gl.max(gl.maximum(-middle, middle - last), 0) > LIMIT
        weights = b - middle[None, None, :]
        # Where they lie beyond the limit, _in_squares overwrites these, which may be infinite or NaN.
        _put(q_s, q * (gl.exp2(weights) * scale))
        _put(k_s, k * gl.exp2(weights))
        _put(early_s, k * gl.exp2(-weights))
    _store(decayed, k * gl.exp2(gl.minimum(last[None, None, :] - b, 0.0)))
    entering = gl.exp2(b)
    _store(decayed + L * BK, k * entering)
    _store(decayed + 2 * L * BK, q * (entering * scale))
    if squares_ptr is not None:
        if _any(far) == 0:
            fence_async_shared()
            barrier()
            scores = warpgroup_mma(q_s, early_s.permute((1, 0)), zeros, is_async=True, use_acc=False)
            a = warpgroup_mma(k_s, early_s.permute((1, 0)), zeros, is_async=True, use_acc=False)
            scores, a = warpgroup_mma_wait(0, deps=[scores, a])
            scores = gl.where(offs_r[:, None] >= offs_c[None, :], scores, 0.0)
            a = gl.where(offs_r[:, None] > offs_c[None, :], a, 0.0)
        else:
            scores, a = _in_squares(
                q_ptr + of_qk, k_ptr + of_qk, g_ptr + of_g, scale, OF_QK, H * K, mask, q_s, k_s, early_s, square
            )
        squares = squares_ptr + number * (2 * L * L)
        _store_square(squares + L * L, scores, L)
        left_s = gl.allocate_shared_memory(DTYPE, [L, L], shared)
        right_s = gl.allocate_shared_memory(DTYPE, [L, L], shared)
        _store_square(squares, _invert(a * rate[:, None], a_s, left_s, right_s, square), L)
