"""The fused chunk kernel for Hopper: one program holds the whole state of a head, in registers, transposed.

It computes what fused_chunk.py does, the four products of roles.py, for a chunk processed tile by tile. In fused_chunk
a program has 64 columns of the state and the output, so for every 64 columns X and Y are read and X Y^T is computed
anew. In the transposed form

    O^T = S^T X^T * rows(W_in) + Z^T (Y X^T * W^T)        S^T <- decay S^T + (Z^T * w) Y

S^T is a left operand, which Hopper's tensor cores take from registers. So the state makes no trip through shared
memory, and a program can have 256 columns, for which X and Y are read once. Two or three groups of four warps are
specialised. The preparing group, the producer, has the bulk copy engine (TMA) load the tiles of X, Y and Z, evaluates
the gates and makes the weighted scores Y X^T * W^T (and mLSTMexp's denominators). The walkers, one or two consumers,
each hold the state of their share of the columns, take from shared memory what was prepared, and store the output.

    part    at most 128 columns of X and Y, and of S^T [64, width] for a slice. A walker has the parts of its first
            slice, then those of its second, if any. Head dims wider than two parts take several launches: O^T is a sum
            over columns of X and Y, and a launch adds what the one before stored.
    slice   64 of the DZ columns of Z and O, which are rows of S^T.
    share   the columns of a walker: one slice, or two (h and dv). Each share has its own anchors.
    stage   one of the places in shared memory for X, Y, Z, scores and gates of a tile; tiles use them in turn.
    piece   columns of the scores that are made at once: all of them would take too many registers.

Functions return "asynchronous" products before they are complete; wait_for waits for them.

Written in Gluon, Triton's language of explicit layouts; why_no_whole_state in config.py says for which head dims and
chunks, why_not_whole_state in engine.py where it runs. The shared memory is described in whole_state_tiles.py.
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
from ..common.versions import NEW_ASSEMBLER
from .roles import Denominators, GateVectors, PackedDocument
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
    allocate_barriers,
    barrier,
    document_of,
    elements,
    load_async,
    load_first_tiles,
    load_gates,
    load_tiles,
    start_of,
    store_async,
    stretch_of_document,
)


@gluon.constexpr_function
def state_layout(width):
    """Return the layout of a part of the state, [BZ, width]."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, width, 16])


@gluon.jit
def columns_of(buffer, stage, WIDTH: gl.constexpr):
    """Return a part's tile [BT, WIDTH] of X or Y in a stage; in shared memory it has at least 64 columns."""
    return buffer.index(stage).slice(0, WIDTH, dim=1)


@gluon.jit
def elements_of(start, index: gl.constexpr, x_col, z_col, SHAPE: gl.constexpr, ROLE: gl.constexpr, TILE: gl.constexpr):
    """Return pointers to a part of the state in memory and a mask of the elements that exist.

    Args:
        start: the whole state of the head; the walker's begins at columns ``x_col`` and ``z_col``.
        index: number of the part among those of the walker.
    """
    NX: gl.constexpr = len(TILE.widths)
    layout: gl.constexpr = state_layout(TILE.widths[index % NX])
    offs_z = z_col + index // NX * BZ + gl.arange(0, BZ, gl.SliceLayout(1, layout))
    offs_x = x_col + index % NX * 128 + gl.arange(0, TILE.widths[index % NX], gl.SliceLayout(0, layout))
    mask = (offs_z < SHAPE.dim_z)[:, None] & (offs_x < SHAPE.dim_x)[None, :]
    return elements(start, offs_z, offs_x, SHAPE.dim_x, SHAPE.dim_z, ROLE.transposed), mask


@gluon.jit
def _load(
    states, number, index: gl.constexpr, x_col, z_col, SHAPE: gl.constexpr, ROLE: gl.constexpr, TILE: gl.constexpr
):
    """Return a part of state number ``number`` of ``states``, in float32."""
    ptrs, mask = elements_of(states + number * (SHAPE.dim_x * SHAPE.dim_z), index, x_col, z_col, SHAPE, ROLE, TILE)
    return gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def load_part(pointers, chunk, index: gl.constexpr, z_col, SHAPE: gl.constexpr, ROLE: gl.constexpr, TILE: gl.constexpr):
    """Return a part of the state with which a chunk starts; that of a whole head is the initial state."""
    width: gl.constexpr = TILE.widths[index % len(TILE.widths)]
    part = gl.zeros([BZ, width], gl.float32, state_layout(width))
    if pointers.states is not None:
        if chunk.is_whole == 0:
            part = _load(pointers.states, chunk.number, index, chunk.x_col, z_col, SHAPE, ROLE, TILE)
    if pointers.initial is not None:
        if chunk.is_whole:
            part = _load(pointers.initial, chunk.pid_bh, index, chunk.x_col, z_col, SHAPE, ROLE, TILE)
    return part


@gluon.jit
def flat_elements(anchor, part: gl.constexpr, TILE: gl.constexpr):
    """Return pointers to a part's elements in the state at an anchor, in the order of :func:`flatten`."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    return anchor + part * BZ * 128 + gl.arange(0, BZ * TILE.widths[part], layout=layout)


@gluon.jit
def flatten(state):
    """Return a part's elements in an order in which each thread's are runs of 16 bytes, for fast loads and stores."""
    # A thread of the layout has rows lane / 4 and lane / 4 + 8 of its warp's sixteen, and of every eight columns the
    # pair lane % 4: rows are (warp, half, lane / 4), columns (which 32, which 8 of them, lane % 4, which of the pair).
    BX: gl.constexpr = state.shape[1]
    parts = state.reshape([WARPS, 2, 8, BX // 32, 4, 4, 2])
    flat = parts.permute((1, 3, 0, 2, 5, 4, 6)).reshape([BZ * BX])
    return gl.convert_layout(flat, gl.BlockedLayout([8], [32], [WARPS], [0]))


@gluon.jit
def _multiply_part(state, x, out, FIRST: gl.constexpr, layout: gl.constexpr):
    """Return ``out + state @ x`` [BZ, BT], asynchronous, for a part of S^T [BZ, width] and of X^T [width, BT].

    The state is rounded and multiplied half by half, so that only half of the rounded state is in registers at a time.
    """
    HALF: gl.constexpr = state.shape[1] // 2
    halves = state.reshape([BZ, 2, HALF]).permute((0, 2, 1)).split()
    for half in gl.static_range(2):
        if not (FIRST and half == 0):
            out = warpgroup_mma_wait(0, deps=[out])
        operand = gl.convert_layout(halves[half].to(x.dtype), gl.DotOperandLayout(0, layout, 2))
        columns = x.slice(half * HALF, HALF)
        out = warpgroup_mma(operand, columns, out, is_async=True, use_acc=not FIRST or half == 1)
    return out


@gluon.jit
def multiply(state, x, stage, layout: gl.constexpr):
    """Return S^T X^T [BZ, BT], asynchronous: the sum over the parts of S^T and X."""
    BT: gl.constexpr = x[0].shape[1]
    out = gl.zeros([BZ, BT], gl.float32, layout)
    for part in gl.static_range(len(state)):
        columns = columns_of(x[part], stage, state[part].shape[1])
        out = _multiply_part(state[part], columns.permute((1, 0)), out, part == 0, layout)
    return out


@gluon.jit
def _enter_part(weighted, y, state, gates, BT: gl.constexpr):
    """Return ``decay state + weighted @ y``, asynchronous, for a part of S^T and of Y."""
    layout: gl.constexpr = state_layout(state.shape[1])
    decay = gates.slice(DECAY * BT, BT).load(gl.SliceLayout(1, layout))[:, None]
    operand = gl.convert_layout(weighted, gl.DotOperandLayout(0, layout, 2))
    return warpgroup_mma(operand, y, state * decay, is_async=True)


@gluon.jit
def enter(z_t, y, stage, state, gates, BT: gl.constexpr):
    """Return the parts of S^T after the tile, asynchronous."""
    layout: gl.constexpr = gl.DotOperandLayout(0, state_layout(state[0].shape[1]), 2)
    weight = gates.slice(WEIGHT * BT, BT).load(gl.SliceLayout(0, layout))[None, :]
    weighted = (z_t.load(layout).to(gl.float32) * weight).to(z_t.dtype)
    new_state = ()
    for part in gl.static_range(len(state)):
        columns = columns_of(y[part], stage, state[part].shape[1])
        new_state += (_enter_part(weighted, columns, state[part], gates, BT),)
    return new_state


@gluon.jit
def wait_for(tiles):
    """Wait for asynchronous products and return them."""
    if len(tiles) == 1:
        return (warpgroup_mma_wait(0, deps=tiles),)
    else:
        return warpgroup_mma_wait(0, deps=tiles)


@gluon.jit
def _split(vector, dtype: gl.constexpr, layout: gl.constexpr):
    """Return a float32 vector [N] as eight columns [N, 8], the fewest that a product on Hopper takes: its rounded value
    and the remainder in turn, so that the columns add up to four times the vector."""
    high = vector.to(dtype)
    low = (vector - high.to(gl.float32)).to(dtype)
    column = gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    return gl.where(column % 2 == 0, high[:, None], low[:, None])


@gluon.jit
def _store_gates(buffers, stage, gates, n, DIVIDED: gl.constexpr):
    """Store a tile's gates, as :func:`load_gates` returns them, in shared memory; DIVIDED: also n and the weights."""
    query, key, log_row, log_weight, log_decay, log_floor = gates
    row, weight, floor = gl.exp2(log_row), gl.exp2(log_weight), gl.exp2(log_floor)
    decay = gl.exp2(log_decay)
    # All vectors in one store, since the compiler puts barriers between stores.
    first = gl.join(gl.join(query, key), gl.join(row, weight))
    second = gl.join(gl.join(gl.zeros_like(row) + decay, floor), gl.join(row, row))
    vectors = gl.join(first, second).permute((3, 2, 1, 0))
    buffers.gates.index(stage).store(vectors.reshape([VECTORS * query.shape[0]]))
    if DIVIDED:
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
        n_layout: gl.constexpr = n.type.layout.parent
        weight = gl.convert_layout(weight, gl.SliceLayout(1, layout))
        buffers.weight.permute((1, 0)).store(_split(weight, buffers.weight.dtype, layout))
        buffers.n.permute((1, 0)).store(_split(n, buffers.n.dtype, n_layout))
        fence_async_shared()
    barrier()
    return decay


@gluon.constexpr_function
def _pieces(tile, role, divided):
    """Return in how many pieces a tile's scores are made: more if the preparing group has fewer registers."""
    if tile.state_registers <= 64:
        return 1
    if divided:
        return 8 if NEW_ASSEMBLER else 4
    return 2 if role.future or role.transposed or len(tile.widths) == 1 else 1


@gluon.constexpr_function
def _registers(tile, divided):
    """Return a thread's registers in the second walker, if any, and in the preparing group; the first walker gets the
    rest. For a large state the preparing group gets the fewest with which it does not spill (found by trial)."""
    if tile.walkers == 1:
        return [112 if tile.block_x == 64 else 88]
    if tile.state_registers <= 64:
        return [176, 152]
    return [208, 88] if divided else [216, 72]


@gluon.jit
def _first_n(denominators, chunk, offs_x, DX: gl.constexpr):
    """Return n [BX] before a chunk."""
    layout: gl.constexpr = offs_x.type.layout
    n = gl.zeros([offs_x.shape[0]], gl.float32, layout)
    if denominators.n_states is not None:
        n_states = denominators.n_states + chunk.number * DX
        n += gl.load(n_states + offs_x, mask=(offs_x < DX) & (chunk.is_whole == 0), other=0.0)
    if denominators.n_initial is not None:
        n += gl.load(
            denominators.n_initial + chunk.pid_bh * DX + offs_x, mask=(offs_x < DX) & chunk.is_whole, other=0.0
        )
    return n


@gluon.jit
def _multiply_by_keys(buffers, stage, start: gl.constexpr, layout: gl.constexpr, TILE: gl.constexpr):
    """Return the asynchronous scores of a tile's rows of X with BS rows of Y from ``start`` on (``layout`` sets BS)."""
    BS: gl.constexpr = layout.instr_shape[1]
    BT: gl.constexpr = TILE.block_t
    scores = gl.zeros([BT, BS], gl.float32, layout)
    for part in gl.static_range(len(TILE.widths)):
        x = columns_of(buffers.x[part], stage, TILE.widths[part])
        y = columns_of(buffers.y[part], stage, TILE.widths[part])
        scores = warpgroup_mma(x, y.slice(start, BS).permute((1, 0)), scores, is_async=True, use_acc=part > 0)
    return scores


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
    """Prepare a chunk tile by tile for the walkers. The copies of its first tiles are under way already.

    With ``denominators`` also compute those of mLSTMexp, as normaliser.py does:

        n_t = exp(a_t + m_{t-1} - m_t) n_{t-1} + exp(u_t - m_t) k_t      denom_t = max(|scale n_t^T q_t|, exp(-m_t))
    """
    DX: gl.constexpr = SHAPE.dim_x
    BT: gl.constexpr = TILE.block_t
    # Used only with denominators, and then there is one part.
    BX: gl.constexpr = TILE.widths[0]
    STAGES: gl.constexpr = TILE.num_stages
    FUTURE: gl.constexpr = ROLE.future
    DIVIDED: gl.constexpr = denominators.log_denom is not None
    DTYPE: gl.constexpr = buffers.x[0].dtype
    # With a large state and denominators too few registers are left to load the next gates early.
    LATE: gl.constexpr = DIVIDED and TILE.state_registers > 64
    BS: gl.constexpr = BT // _pieces(TILE, ROLE, DIVIDED)
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BS, 16])
    query_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    key_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    vector_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 16])
    n_layout: gl.constexpr = gl.SliceLayout(1, vector_layout)
    start, end, pid_bh = chunk.start, chunk.end, chunk.pid_bh

    offs_t = gl.arange(0, BT, query_layout)
    offs_s = gl.arange(0, BS, key_layout)
    offs_x = gl.arange(0, BX, n_layout)
    n = _first_n(denominators, chunk, offs_x, DX)
    tiles = gl.cdiv(end - start, BT)
    STEP: gl.constexpr = -BT if FUTURE else BT
    t0 = start + (tiles - 1) * BT if FUTURE else start
    length = T
    if chunk.document is not None:
        length = chunk.document.length
        # An empty document has no tile, but gates are loaded before the loop.
        t0 = gl.maximum(t0, 0)
    gates = load_gates(pointers.gates, pid_bh, t0, T, length, log_scale, FUTURE, BT)
    decay = _store_gates(buffers, 0, gates, n, DIVIDED)
    for tile in range(tiles):
        stage = tile % STAGES
        vectors = buffers.gates.index(stage)
        next_t = t0 + STEP
        next_t = gl.where(tile + 1 < tiles, next_t, t0)
        if not LATE:
            gates = load_gates(pointers.gates, pid_bh, next_t, T, length, log_scale, FUTURE, BT)
        mbarrier.wait(buffers.loaded.index(stage), (tile // STAGES) & 1)
        if DIVIDED:
            zeros = gl.zeros([BT, 8], gl.float32, vector_layout)
            past = warpgroup_mma(
                buffers.x[0].index(stage), buffers.n.permute((1, 0)), zeros, is_async=True, use_acc=False
            )
            n_q = gl.zeros([BT], gl.float32, query_layout)
        rows = vectors.slice((KEY if FUTURE else QUERY) * BT, BT).load(query_layout)
        for piece in gl.static_range(BT // BS):
            scores = _multiply_by_keys(buffers, stage, piece * BS, scores_layout, TILE)
            columns = vectors.slice((QUERY if FUTURE else KEY) * BT + piece * BS, BS).load(key_layout)
            if DIVIDED and piece == 0:
                scores, past = warpgroup_mma_wait(0, deps=[scores, past])
            else:
                scores = warpgroup_mma_wait(0, deps=[scores])
            offs_key = piece * BS + offs_s
            causal = (offs_t[:, None] <= offs_key[None, :]) if FUTURE else (offs_t[:, None] >= offs_key[None, :])
            scores = gl.where(causal, scores * gl.exp2(rows[:, None] + columns[None, :]), 0.0)
            buffers.scores.index(stage).slice(piece * BS, BS, dim=1).store(scores.to(DTYPE))
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
        ahead_t = t0 + (STAGES - 1) * STEP
        mbarrier.wait(buffers.freed.index(ahead % STAGES), (ahead // STAGES + 1) & 1, pred=tile > 0)
        load_tiles(tensors, buffers, ahead % STAGES, ahead_t, chunk.x_col, chunk.z_col, ahead < tiles)
        if LATE:
            gates = load_gates(pointers.gates, pid_bh, next_t, T, length, log_scale, FUTURE, BT)
        if DIVIDED:
            offs = pid_bh * T + t0 + offs_t
            gl.store(denominators.log_denom + offs, gl.log2(denominator), mask=(t0 + offs_t < end) & (chunk.z_col == 0))
            zeros = gl.zeros([BX, 8], gl.float32, vector_layout)
            weight = buffers.weight.permute((1, 0))
            keys = buffers.y[0].index(stage).permute((1, 0))
            weighted = warpgroup_mma(keys, weight, zeros, is_async=True, use_acc=False)
            weighted = warpgroup_mma_wait(0, deps=[weighted])
            n = n * decay + gl.sum(weighted, axis=1) * 0.25
        t0 = next_t
        decay = _store_gates(buffers, (tile + 1) % STAGES, gates, n, DIVIDED)
    if DIVIDED and denominators.n_last is not None:
        gl.store(
            denominators.n_last + pid_bh * DX + offs_x, n, mask=(offs_x < DX) & (chunk.z_col == 0) & chunk.is_whole
        )


@gluon.jit
def _store_row_sums(sums_ptr, product, T, length, planes, pid_bh, t0, share):
    """Store a tile's sums over a slice [BZ, BT], those of each warp apart: adding them up would take a barrier."""
    BT: gl.constexpr = product.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
    sums = gl.sum(product.reshape([WARPS, BZ // WARPS, BT]), axis=1)
    sums = gl.convert_layout(sums, layout)
    warp = share * WARPS + gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    offs = t0 + gl.arange(0, BT, gl.SliceLayout(0, layout))[None, :]
    gl.store(sums_ptr + warp * planes + pid_bh * T + offs, sums, mask=offs < length)


@gluon.jit
def _walk(
    tensors,
    buffers,
    pointers,
    chunk,
    T,
    BH,
    every,
    walker: gl.constexpr,
    DIVIDED: gl.constexpr,
    SHAPE: gl.constexpr,
    ROLE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Process a chunk tile by tile for the share of walker number ``walker``."""
    DX: gl.constexpr = SHAPE.dim_x
    DZ: gl.constexpr = SHAPE.dim_z
    BT: gl.constexpr = TILE.block_t
    NX: gl.constexpr = len(TILE.widths)
    SLICES: gl.constexpr = TILE.block_z // (BZ * TILE.walkers)
    Z: gl.constexpr = walker * SLICES * BZ
    # If one program has all of DZ, its walkers leave out a second slice that lies beyond DZ.
    NZ: gl.constexpr = 1 if min(TILE.block_z, Z + BZ) >= DZ else SLICES
    STAGES: gl.constexpr = TILE.num_stages
    FUTURE: gl.constexpr = ROLE.future
    SUMS: gl.constexpr = pointers.sums is not None
    ANCHORS: gl.constexpr = pointers.anchors.states is not None
    PARTIAL: gl.constexpr = tensors.partial is not None
    DTYPE: gl.constexpr = buffers.x[0].dtype
    start, end, pid_bh = chunk.start, chunk.end, chunk.pid_bh
    z_col = chunk.z_col
    gl.static_assert(not (SUMS or PARTIAL) or NZ == 1, "row sums and partial results are those of one slice")
    SHARES: gl.constexpr = (DZ + TILE.block_z - 1) // TILE.block_z * TILE.walkers

    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BT, 16])

    # S^T as tensors [BZ, width]: the parts of the walker's first slice, then those of its second.
    state = ()
    for n in gl.static_range(NZ * NX):
        state += (load_part(pointers, chunk, n, z_col + Z, SHAPE, ROLE, TILE),)

    share = z_col // (SLICES * BZ) + walker
    planes = BH.to(gl.int64) * T
    num_anchors = gl.cdiv(T, every)
    length = T
    if chunk.document is not None:
        num_anchors = T // every + chunk.document.count
        length = chunk.document.length
    tiles = gl.cdiv(end - start, BT)
    # A stretch goes from one anchor to the next; the last stretch may be shorter.
    per_stretch = every // BT if ANCHORS else tiles
    if chunk.document is not None:
        # An empty document has no tile.
        per_stretch = gl.maximum(per_stretch, 1)
    stretches = gl.cdiv(tiles, per_stretch)
    if walker == 1:
        # In the last program of a chunk the second walker may have no columns, and then does nothing.
        stretches = gl.where(chunk.two_walkers, stretches, 0)
    t0 = start + (tiles - 1) * BT if FUTURE else start
    tile = 0
    for stretch in range(stretches):
        is_last = stretch == (0 if FUTURE else stretches - 1)
        count = gl.where(is_last, tiles - (stretches - 1) * per_stretch, per_stretch)
        if ANCHORS:
            index = pid_bh * num_anchors + start // every + (stretches - 1 - stretch if FUTURE else stretch)
            if chunk.document is not None:
                index += chunk.document.anchor
            anchor = pointers.anchors.states + (index * SHARES + share) * (BZ * TILE.block_x)
            if not FUTURE:
                for part in gl.static_range(NX):
                    gl.store(flat_elements(anchor, part, TILE), flatten(state[part].to(DTYPE)))
        for _ in range(count):
            stage = tile % STAGES
            gates = buffers.gates.index(stage)
            if SUMS or PARTIAL:
                extra = buffers.extra_loaded.index(walker)
                mbarrier.expect(extra, 2 * BT * BZ * (SUMS + PARTIAL))
                # The copies overwrite the output of the tile before, which must have been stored.
                tma.store_wait(0)
                barrier()
            if SUMS:
                load_async(tensors.pair, [t0, z_col + Z], extra, buffers.pair.index(walker))
            if PARTIAL:
                load_async(tensors.partial, [t0, z_col + Z], extra, buffers.out.index(walker))
            mbarrier.wait(buffers.loaded.index(stage), (tile // STAGES) & 1)
            z = buffers.z.index(stage)
            scores_t = buffers.scores.index(stage).permute((1, 0))

            out = multiply(state[:NX], buffers.x, stage, out_layout)
            mbarrier.wait(buffers.ready.index(stage), (tile // STAGES) & 1)
            mbarrier.wait(buffers.loaded_z.index(stage), (tile // STAGES) & 1)
            new_state = ()
            for half in gl.static_range(NZ):
                if half == 1:
                    out = multiply(state[NX:], buffers.x, stage, out_layout)
                z_t = z.slice(Z + half * BZ, BZ, dim=1).permute((1, 0))
                row_factor = gates.slice(ROW * BT, BT).load(gl.SliceLayout(0, out_layout))[None, :]
                out = warpgroup_mma_wait(0, deps=[out])
                out = warpgroup_mma(z_t, scores_t, out * row_factor, is_async=True)
                parts = enter(z_t, buffers.y, stage, state[half * NX : half * NX + NX], gates, BT)
                if NX == 2 or half == 1:
                    # The state's products continue while the output is stored.
                    out = warpgroup_mma_wait(NX, deps=[out])
                    new_state += parts
                else:
                    out, only = warpgroup_mma_wait(0, deps=[out, parts[0]])
                    new_state += (only,)
                out_s = buffers.out.index(walker * SLICES + half)
                if SUMS or PARTIAL:
                    mbarrier.wait(extra, tile & 1)
                tma.store_wait(NZ - 1)
                barrier()
                out *= SHAPE.headroom
                if PARTIAL:
                    out += out_s.permute((1, 0)).load(out_layout).to(gl.float32)
                if DIVIDED:
                    out *= gates.slice(DIVISOR * BT, BT).load(gl.SliceLayout(0, out_layout))[None, :]
                if SUMS:
                    pair = buffers.pair.index(walker).permute((1, 0)).load(out_layout).to(gl.float32)
                    _store_row_sums(pointers.sums, out * pair, T, length, planes, pid_bh, t0, share)
                out_s.permute((1, 0)).store(out.to(DTYPE))
                fence_async_shared()
                barrier()
                store_async(tensors.out, [t0, z_col + Z + half * BZ], out_s)
            state = wait_for(new_state)
            barrier()
            mbarrier.arrive(buffers.freed.index(stage), count=1)
            if walker == 0 and TILE.walkers == 2:
                mbarrier.arrive(buffers.freed.index(stage), count=1, pred=chunk.two_walkers == 0)
            t0 += -BT if FUTURE else BT
            tile += 1
        if ANCHORS and FUTURE:
            dot = 0.0
            for part in gl.static_range(NX):
                kept = gl.load(flat_elements(anchor, part, TILE)).to(gl.float32)
                dot += gl.sum(kept * flatten(state[part]), axis=0)
            dot *= SHAPE.headroom
            gl.store(pointers.anchors.products + share * BH.to(gl.int64) * num_anchors + index, dot)
    tma.store_wait(0)

    if pointers.last is not None:
        if chunk.is_whole:
            # This is chunk.x_col, because tile == tiles. The compiler does not know that, and so computes addresses
            # here instead of keeping those of the initial state in registers that the loop needs.
            x_col = chunk.x_col + tile - tiles
            for n in gl.static_range(NZ * NX):
                ptrs, mask = elements_of(pointers.last + pid_bh * DX * DZ, n, x_col, z_col + Z, SHAPE, ROLE, TILE)
                gl.store(ptrs, state[n], mask=mask)


@remember_launches
@gluon.jit(do_not_specialize=["T", "L", "N", "BH", "whole_heads", "log_scale", "every", "x_col"])
def whole_state_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    states_ptr,
    ends,
    partial_ptr,
    out_ptr,
    gates,
    pair_ptr,
    sums_ptr,
    anchors,
    denominators,
    starts,
    log_scale,
    T,
    L,
    N,
    BH,
    whole_heads,
    every,
    x_col,
    SHAPE: gl.constexpr,
    ROLE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Process one chunk for block_z columns of the output and block_x columns of X and Y, from column ``x_col`` on.

    Grid: (ceil(DZ / block_z) * (whole_heads + N * (B * H - whole_heads)),): the first ``whole_heads`` of the B * H
    heads are whole.
    Reads and writes what fused_chunk.fused_chunk_kernel does, whose docstring explains the arguments, except that
    - states before chunks are those of cut heads [B * H - whole_heads, N, ...]; whole heads start from the initial
      state [B, H, ...], and only their last state is written: ``ends`` are both;
    - ``partial_ptr`` is the ``out_ptr`` of the launch for the first columns of X and Y; ``log_scale`` is log2 scale;
    - every warp writes its own row sums [shares * 4, B, H, T];
    - the states at the anchors are [B, H, ceil(T / every)] tiles in the order of :func:`flatten`, padded to whole
      blocks;
    - with ``denominators`` (roles.Denominators) the program makes those of mLSTMexp, divides by them and writes them;
      one part then holds all of DX;
    - with ``starts.documents`` the states at the anchors are [H, T // every + the documents]; all heads are whole.
    """
    H: gl.constexpr = SHAPE.heads
    DX: gl.constexpr = SHAPE.dim_x
    DZ: gl.constexpr = SHAPE.dim_z
    BT: gl.constexpr = TILE.block_t
    STAGES: gl.constexpr = TILE.num_stages
    WALKERS: gl.constexpr = TILE.walkers
    DIVIDED: gl.constexpr = denominators.log_denom is not None
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    COLUMNS: gl.constexpr = (DZ + TILE.block_z - 1) // TILE.block_z

    pid = gl.program_id(0)
    z_col = pid % COLUMNS * TILE.block_z
    index = pid // COLUMNS
    number = index - whole_heads
    is_whole = number < 0
    pid_bh = gl.where(is_whole, index, whole_heads + number // N).to(gl.int64)
    batch = pid_bh // H
    head = pid_bh % H
    start = gl.where(is_whole, 0, number % N * L)
    initial_ptr, last_ptr = ends
    document = None
    length = T
    period = T
    if starts.documents is not None:
        count = BH // H
        BH = BH // count
        of_states = batch * H
        at = batch
        batch, end = document_of(starts.documents, at, T)
        length = gl.maximum(end, 1)
        period = 1
        document = PackedDocument(length, count, batch // every + at)
        # From here on all is that of head number ``head`` in tensors that begin with the document.
        pid_bh = head
        # As of a sequence that begins with the document.
        stretch = stretch_of_document(head, batch, at, count, T, BT)
        gates = GateVectors(
            u=None if gates.u is None else gates.u + batch,
            edge=None if gates.edge is None else gates.edge + (stretch + head * (count - 1) + at),
            m=gates.m if gates.edge is None else gates.m + batch,
            log_denom=None if gates.log_denom is None else gates.log_denom + batch,
            b=gates.b + batch, w=gates.w + batch, g=gates.g + stretch,
        )  # fmt: skip
        if initial_ptr is not None:
            initial_ptr += of_states * (DX * DZ)
        if last_ptr is not None:
            last_ptr += of_states * (DX * DZ)
        if sums_ptr is not None:
            sums_ptr += batch
        if DIVIDED:
            n_initial, n_last = denominators.n_initial, denominators.n_last
            if n_initial is not None:
                n_initial += of_states * DX
            if n_last is not None:
                n_last += of_states * DX
            denominators = Denominators(None, n_initial, n_last, denominators.log_denom + batch)
    x_offset = start_of(0, starts.x, batch, head // SHAPE.group_x, period, SHAPE.row_x, DX)
    y_offset = start_of(0, starts.y, batch, head // SHAPE.group_x, period, SHAPE.row_y, DX)
    z_offset = start_of(0, starts.z, batch, head // SHAPE.group_z, period, SHAPE.row_z, DZ)
    out_offset = batch * period * SHAPE.row_out + head * DZ

    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_desc, y_desc, x_s, y_s = (), (), (), ()
    for part in gl.static_range(len(TILE.widths)):
        if part == 1 and TILE.widths[1] == TILE.widths[0]:
            x_desc += x_desc
            y_desc += y_desc
        else:
            x_desc += (
                tma.make_tensor_descriptor(
                    x_ptr + x_offset, [length, DX], [SHAPE.row_x, 1], [BT, TILE.copied_widths[part]], layout
                ),
            )
            y_desc += (
                tma.make_tensor_descriptor(
                    y_ptr + y_offset, [length, DX], [SHAPE.row_y, 1], [BT, TILE.copied_widths[part]], layout
                ),
            )
        x_s += (gl.allocate_shared_memory(DTYPE, [STAGES, BT, TILE.copied_widths[part]], layout),)
        y_s += (gl.allocate_shared_memory(DTYPE, [STAGES, BT, TILE.copied_widths[part]], layout),)
    z_desc = tma.make_tensor_descriptor(z_ptr + z_offset, [length, DZ], [SHAPE.row_z, 1], [BT, TILE.block_z], layout)
    out_s = gl.allocate_shared_memory(DTYPE, [TILE.block_z // BZ, BT, BZ], layout)
    pair_s = out_s
    if pair_ptr is not None and partial_ptr is not None:
        pair_s = gl.allocate_shared_memory(DTYPE, [WALKERS, BT, BZ], layout)
    n_s = None
    weight_s = None
    if DIVIDED:
        n_s = gl.allocate_shared_memory(DTYPE, [8, TILE.block_x], layout)
        weight_s = gl.allocate_shared_memory(DTYPE, [8, BT], layout)
    buffers = Buffers(
        x=x_s,
        y=y_s,
        z=gl.allocate_shared_memory(DTYPE, [STAGES, BT, TILE.block_z], layout),
        scores=gl.allocate_shared_memory(DTYPE, [STAGES, BT, BT], layout),
        gates=gl.allocate_shared_memory(
            gl.float32, [STAGES, VECTORS * BT], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        ),
        out=out_s,
        pair=pair_s,
        n=n_s,
        weight=weight_s,
        loaded=allocate_barriers(STAGES),
        loaded_z=allocate_barriers(STAGES),
        ready=allocate_barriers(STAGES),
        freed=allocate_barriers(STAGES),
        extra_loaded=allocate_barriers(WALKERS),
    )
    # Only barriers that something waits for: the compiler reuses the memory of others, to which the hardware writes.
    for stage in gl.static_range(STAGES):
        mbarrier.init(buffers.loaded.index(stage), count=1)
        mbarrier.init(buffers.loaded_z.index(stage), count=1)
        mbarrier.init(buffers.ready.index(stage), count=1)
        mbarrier.init(buffers.freed.index(stage), count=WALKERS)
    if pair_ptr is not None or partial_ptr is not None:
        for walker in gl.static_range(WALKERS):
            mbarrier.init(buffers.extra_loaded.index(walker), count=1)
    fence_async_shared()
    barrier()
    if document is None:
        end = gl.where(is_whole, T, gl.minimum(start + L, T))
    tensors = Tensors(x=x_desc, y=y_desc, z=z_desc)
    load_first_tiles(tensors, buffers, start, gl.cdiv(end - start, BT), x_col, z_col, ROLE.future, TILE)
    # The other descriptors are made meanwhile.
    out_desc = tma.make_tensor_descriptor(out_ptr + out_offset, [length, DZ], [SHAPE.row_out, 1], [BT, BZ], layout)
    partial_desc = None
    if partial_ptr is not None:
        partial_desc = tma.make_tensor_descriptor(
            partial_ptr + out_offset, [length, DZ], [SHAPE.row_out, 1], [BT, BZ], layout
        )
    pair_desc = None
    if pair_ptr is not None:
        pair_offset = start_of(0, starts.pair, batch, head // SHAPE.group_z, period, SHAPE.row_pair, DZ)
        pair_desc = tma.make_tensor_descriptor(
            pair_ptr + pair_offset, [length, DZ], [SHAPE.row_pair, 1], [BT, BZ], layout
        )
    tensors = Tensors(x=x_desc, y=y_desc, z=z_desc, out=out_desc, partial=partial_desc, pair=pair_desc)

    pointers = Pointers(gates, states_ptr, initial_ptr, sums_ptr, last_ptr, anchors)
    chunk = Chunk(
        start=start, end=end, pid_bh=pid_bh, is_whole=is_whole, number=number.to(gl.int64), x_col=x_col, z_col=z_col,
        two_walkers=z_col + TILE.block_z // WALKERS < DZ, document=document,
    )  # fmt: skip
    if WALKERS == 1:
        gl.warp_specialize(
            [
                (_walk, (tensors, buffers, pointers, chunk, T, BH, every, 0, DIVIDED, SHAPE, ROLE, TILE)),
                (_prepare, (tensors, buffers, pointers, denominators, chunk, log_scale, T, SHAPE, ROLE, TILE)),
            ],
            [WARPS],
            _registers(TILE, DIVIDED),
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (tensors, buffers, pointers, chunk, T, BH, every, 0, DIVIDED, SHAPE, ROLE, TILE)),
                (_walk, (tensors, buffers, pointers, chunk, T, BH, every, 1, DIVIDED, SHAPE, ROLE, TILE)),
                (_prepare, (tensors, buffers, pointers, denominators, chunk, log_scale, T, SHAPE, ROLE, TILE)),
            ],
            [WARPS, WARPS],
            _registers(TILE, DIVIDED),
        )
