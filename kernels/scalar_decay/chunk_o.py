"""The output kernel of TFLA as published: a causal gated product inside a chunk plus the state's contribution.

It computes the four products of roles.py, out = rows(W_in) (X S) + ((X Y^T) * W) Z. A program makes one tile of out: it
starts from X S, then goes through the tiles of the chunk that its rows sum over, and for each makes a tile of X Y^T and
multiplies it by Z. All tiles of a chunk run in parallel (TFLA's second level of sequence parallelism), so the chunk
length is independent of the tile size. Transposed products are made from loaded tiles: no accumulator is transposed.

The weight of a key position s <= t for a query position t is exp2(b_t - m_t - log2 denom_t - b_s + u_s). Let R be b - m
at the first row of a tile (past roles) or at its last row (future roles). Because m_t - b_t never decreases with t, the
row factor exp2(b_t - m_t - R) and the column factor exp2(u_s - b_s + R) are both at most one for tiles off the
diagonal. So there two vectors replace a matrix of exponentials, and nothing overflows. On the diagonal tile the
exponents are added first.
"""

import triton
import triton.language as tl

from ..common.remember import remember_launches
from .gates import NEG, start_of


@triton.jit
def _load_tile(ptr, offs_row, offs_col, mask_row, ROW: tl.constexpr, D: tl.constexpr, MASK_D: tl.constexpr):
    """Load ptr[offs_row * ROW + offs_col] with zeros outside."""
    mask = mask_row[:, None]
    if MASK_D:
        mask = mask & (offs_col < D)[None, :]
    return tl.load(ptr + offs_row[:, None] * ROW + offs_col[None, :], mask=mask, other=0.0)


@triton.jit
def _load_tile_transposed(ptr, offs_row, offs_col, mask_row, ROW: tl.constexpr, D: tl.constexpr, MASK_D: tl.constexpr):
    """Load the same tile with its columns first, [columns, rows]."""
    mask = mask_row[None, :]
    if MASK_D:
        mask = mask & (offs_col < D)[:, None]
    return tl.load(ptr + offs_row[None, :] * ROW + offs_col[:, None], mask=mask, other=0.0)


@triton.jit
def _add_product(total, x, y, unit, PRECISION: tl.constexpr):
    """Return total + x y.

    In float32 the product is computed on its own and then added, which rounds less than one long sum. The factor
    ``unit`` (1, unknown to the compiler) keeps the compiler from merging the sums again.
    """
    if PRECISION == "ieee":
        total += tl.dot(x, y, input_precision=PRECISION) * unit
    else:
        total = tl.dot(x, y, total, input_precision=PRECISION)
    return total


@triton.jit
def _multiply(
    x, x_rows, y_rows, offs_t, offs_s, offs_x, mask_t, mask_s, unit,
    D: tl.constexpr, X_ROW: tl.constexpr, Y_ROW: tl.constexpr, BLOCK_X: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return X Y^T for a pair of tiles, BLOCK_X columns at a time; ``x`` is the tile of X if these are all."""
    NX: tl.constexpr = (D + BLOCK_X - 1) // BLOCK_X
    MASK_X: tl.constexpr = D % BLOCK_X != 0
    product = tl.zeros((offs_t.shape[0], offs_s.shape[0]), dtype=tl.float32)
    if NX == 1:
        y = _load_tile_transposed(y_rows, offs_s, offs_x, mask_s, Y_ROW, D, MASK_X)
        product = _add_product(product, x, y, unit, PRECISION)
    elif NX == 2:
        for block in tl.static_range(NX):
            x = _load_tile(x_rows, offs_t, block * BLOCK_X + offs_x, mask_t, X_ROW, D, MASK_X)
            y = _load_tile_transposed(y_rows, offs_s, block * BLOCK_X + offs_x, mask_s, Y_ROW, D, MASK_X)
            product = _add_product(product, x, y, unit, PRECISION)
    else:
        for block in range(0, NX):
            x = _load_tile(x_rows, offs_t, block * BLOCK_X + offs_x, mask_t, X_ROW, D, MASK_X)
            y = _load_tile_transposed(y_rows, offs_s, block * BLOCK_X + offs_x, mask_s, Y_ROW, D, MASK_X)
            product = _add_product(product, x, y, unit, PRECISION)
    return product


@triton.jit
def _query_gate(gates, offs, mask, DENOM: tl.constexpr):
    """Return b_t - m_t - log2 denom_t in the dtype of the gates, NEG in the padding."""
    gate = tl.load(gates.b + offs, mask=mask, other=0.0)
    if gates.m is not None:
        gate -= tl.load(gates.m + offs, mask=mask, other=0.0)
        if DENOM:
            gate -= tl.load(gates.log_denom + offs, mask=mask, other=0.0)
    return tl.where(mask, gate, NEG)


@triton.jit
def _key_gate(gates, offs, mask):
    """Return u_s - b_s in the dtype of the gates, NEG in the padding."""
    gate = -tl.load(gates.b + offs, mask=mask, other=0.0)
    if gates.u is not None:
        gate += tl.load(gates.u + offs, mask=mask, other=0.0)
    return tl.where(mask, gate, NEG)


@triton.jit
def _split(gate):
    """Split a float64 vector into its value rounded to float32 and the remainder in float32."""
    high = gate.to(tl.float32)
    return high, (gate - high).to(tl.float32)


@remember_launches
@triton.jit(do_not_specialize=["T", "L", "N", "BH", "scale"])
def chunk_o_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    state_ptr,
    out_ptr,
    gates,
    n_states_ptr,
    pair_ptr,
    sums_ptr,
    starts,
    scale,
    T,
    L,
    N,
    BH,
    SHAPE: tl.constexpr,
    ROLE: tl.constexpr,
    NORMALISE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one [BLOCK_T, BLOCK_Z] tile of out.

    Grid: (ceil(DZ / BLOCK_Z) * ceil(L / BLOCK_T) * N * B * H,).
    Reads X, Y [B, T, H / group_x, DX], Z [B, T, H / group_z, DZ], the state [B, H, N, DX, DZ] (transposed:
    [B, H, N, DZ, DX]; None: zero) and the gate vectors; writes out [B, T, H, DZ]. NORMALISE (mLSTMexp's output) divides
    by max(|n^T q|, exp2(-m)) and writes log2 of it [B, H, T]. Given a pair, of Z's shape, it writes sum_z out * pair
    [ceil(DZ / BLOCK_Z), B, H, T].
    """
    H: tl.constexpr = SHAPE.heads
    DX: tl.constexpr = SHAPE.dim_x
    DZ: tl.constexpr = SHAPE.dim_z
    BLOCK_T: tl.constexpr = TILE.block_t
    BLOCK_S: tl.constexpr = TILE.block_s
    BLOCK_X: tl.constexpr = TILE.block_x
    BLOCK_Z: tl.constexpr = TILE.block_z
    FUTURE: tl.constexpr = ROLE.future
    TRANSPOSED: tl.constexpr = ROLE.transposed
    STABILISED: tl.constexpr = gates.m is not None
    NX: tl.constexpr = (DX + BLOCK_X - 1) // BLOCK_X
    NZ: tl.constexpr = (DZ + BLOCK_Z - 1) // BLOCK_Z
    MASK_X: tl.constexpr = DX % BLOCK_X != 0
    MASK_Z: tl.constexpr = DZ % BLOCK_Z != 0
    DENOM: tl.constexpr = STABILISED and not NORMALISE
    X_ROW: tl.constexpr = SHAPE.row_x
    Y_ROW: tl.constexpr = SHAPE.row_y
    Z_ROW: tl.constexpr = SHAPE.row_z
    pid = tl.program_id(0)
    pid_z = pid % NZ
    tiles = tl.cdiv(L, BLOCK_T)
    pid_t = (pid // NZ) % tiles
    pid_n = (pid // (NZ * tiles)) % N
    pid_bh = (pid // (NZ * tiles * N)).to(tl.int64)
    batch = pid_bh // H
    head = pid_bh % H
    start = pid_n * L
    end = tl.minimum(start + L, T)
    row0 = start + pid_t * BLOCK_T
    if row0 >= end:
        return

    x_base = start_of(x_ptr, starts.x, batch, head // SHAPE.group_x, T, X_ROW, DX)
    y_base = start_of(y_ptr, starts.y, batch, head // SHAPE.group_x, T, Y_ROW, DX)
    z_base = start_of(z_ptr, starts.z, batch, head // SHAPE.group_z, T, Z_ROW, DZ)
    gate = pid_bh * T
    offs_t = tl.arange(0, BLOCK_T)
    offs_s = tl.arange(0, BLOCK_S)
    offs_x = tl.arange(0, BLOCK_X)
    offs_z = pid_z * BLOCK_Z + tl.arange(0, BLOCK_Z)
    mask_t = row0 + offs_t < end
    x_stride = tl.full((), X_ROW, tl.int64)
    y_stride = tl.full((), Y_ROW, tl.int64)
    z_stride = tl.full((), Z_ROW, tl.int64)
    x_rows = x_base + row0 * x_stride

    ref = gate + (tl.minimum(row0 + BLOCK_T, end) - 1 if FUTURE else row0)
    reference = tl.load(gates.b + ref)
    if STABILISED:
        reference -= tl.load(gates.m + ref)
    if FUTURE:
        row = _key_gate(gates, gate + row0 + offs_t, mask_t)
        row_factor = tl.math.exp2((row + reference).to(tl.float32))
    else:
        row = _query_gate(gates, gate + row0 + offs_t, mask_t, DENOM)
        row_factor = tl.math.exp2((row - reference).to(tl.float32))

    unit = scale * 0.0 + 1.0
    acc = tl.zeros((BLOCK_T, BLOCK_Z), dtype=tl.float32)
    denom = tl.zeros((BLOCK_T,), dtype=tl.float32)
    x = _load_tile(x_rows, offs_t, offs_x, mask_t, X_ROW, DX, MASK_X)  # [BLOCK_T, BLOCK_X]
    if state_ptr is not None:
        state_base = state_ptr + (pid_bh * N + pid_n) * DX * DZ
        for block in range(0, NX):
            offs_d = block * BLOCK_X + offs_x
            if TRANSPOSED:
                state_offs = offs_z[None, :] * DX + offs_d[:, None]
            else:
                state_offs = offs_d[:, None] * DZ + offs_z[None, :]
            state = tl.load(state_base + state_offs, mask=(offs_d < DX)[:, None] & (offs_z < DZ)[None, :], other=0.0)
            x_block = x
            if NX > 1:
                x_block = _load_tile(x_rows, offs_t, offs_d, mask_t, X_ROW, DX, MASK_X)
            acc = _add_product(acc, x_block, state.to(x.dtype), unit, PRECISION)
            if NORMALISE:
                n_state = tl.load(n_states_ptr + (pid_bh * N + pid_n) * DX + offs_d, mask=offs_d < DX, other=0.0)
                denom += tl.sum(x_block.to(tl.float32) * n_state[None, :], axis=1)
        if FUTURE:
            inter = tl.load(gates.g + pid_bh * N + pid_n) - reference
            if STABILISED:
                inter -= tl.load(gates.edge + pid_bh * (N + 1) + pid_n + 1)
            inter_factor = tl.math.exp2(inter.to(tl.float32))
        else:
            inter = reference
            if STABILISED:
                inter += tl.load(gates.edge + pid_bh * (N + 1) + pid_n)
            inter_factor = tl.math.exp2(inter.to(tl.float32)) * scale
        acc *= inter_factor
        denom *= inter_factor

    # Tiles off the diagonal: column factors are applied to the product, row factors once, after the loop.
    if FUTURE:
        first = row0 + BLOCK_T
        last = end
    else:
        first = start
        last = row0
    for col0 in range(first, last, BLOCK_S):
        mask_s = col0 + offs_s < end
        product = _multiply(
            x, x_rows, y_base + col0 * y_stride, offs_t, offs_s, offs_x, mask_t, mask_s, unit,
            DX, X_ROW, Y_ROW, BLOCK_X, PRECISION,
        )  # fmt: skip
        z = _load_tile(z_base + col0 * z_stride, offs_s, offs_z, mask_s, Z_ROW, DZ, MASK_Z)  # [BLOCK_S, BLOCK_Z]
        offs_col = gate + col0 + offs_s
        if FUTURE:
            col = _query_gate(gates, offs_col, mask_s, DENOM) - reference
        else:
            col = _key_gate(gates, offs_col, mask_s) + reference
        col_factor = tl.math.exp2(col.to(tl.float32))
        product *= (col_factor * scale)[None, :]
        if NORMALISE:
            denom += tl.sum(product, axis=1)
        acc = _add_product(acc, product.to(z.dtype), z, unit, PRECISION)
    acc *= row_factor[:, None]
    denom *= row_factor

    row_high, row_low = _split(row)
    for col0 in range(row0, tl.minimum(row0 + BLOCK_T, end), BLOCK_S):
        mask_s = col0 + offs_s < end
        product = _multiply(
            x, x_rows, y_base + col0 * y_stride, offs_t, offs_s, offs_x, mask_t, mask_s, unit,
            DX, X_ROW, Y_ROW, BLOCK_X, PRECISION,
        )  # fmt: skip
        z = _load_tile(z_base + col0 * z_stride, offs_s, offs_z, mask_s, Z_ROW, DZ, MASK_Z)
        offs_col = gate + col0 + offs_s
        if FUTURE:
            col = _query_gate(gates, offs_col, mask_s, DENOM)
            causal = (col0 + offs_s)[None, :] >= (row0 + offs_t)[:, None]
        else:
            col = _key_gate(gates, offs_col, mask_s)
            causal = (col0 + offs_s)[None, :] <= (row0 + offs_t)[:, None]
        col_high, col_low = _split(col)
        # High parts are added first: where the weight is not negligible, their sum is small and exact.
        exponent = (row_high[:, None] + col_high[None, :]) + (row_low[:, None] + col_low[None, :])
        weights = tl.where(causal, tl.math.exp2(exponent), 0.0)
        product *= weights * scale
        if NORMALISE:
            denom += tl.sum(product, axis=1)
        acc = _add_product(acc, product.to(z.dtype), z, unit, PRECISION)

    acc *= SHAPE.headroom
    if NORMALISE:
        m = tl.load(gates.m + gate + row0 + offs_t, mask=mask_t, other=0.0)
        floor = tl.maximum(tl.abs(denom), tl.math.exp2(-m))
        acc /= floor[:, None]
        if pid_z == 0:
            # The least denominator overflows float32 where m is below -128, its logarithm does not.
            log_denom = tl.math.log2(tl.maximum(tl.abs(denom).to(gates.log_denom.dtype.element_ty), 1e-300))
            log_denom = tl.maximum(log_denom, -m)
            tl.store(gates.log_denom + gate + row0 + offs_t, log_denom, mask=mask_t)
    if pair_ptr is not None:
        PAIR_ROW: tl.constexpr = SHAPE.row_pair
        pair_base = start_of(pair_ptr, starts.pair, batch, head // SHAPE.group_z, T, PAIR_ROW, DZ)
        pair_rows = pair_base + row0 * tl.full((), PAIR_ROW, tl.int64)
        pair = _load_tile(pair_rows, offs_t, offs_z, mask_t, PAIR_ROW, DZ, MASK_Z).to(tl.float32)
        sums = tl.sum(acc * pair, axis=1)
        tl.store(sums_ptr + pid_z * BH.to(tl.int64) * T + gate + row0 + offs_t, sums, mask=mask_t)
    out_rows = out_ptr + (batch * T + row0) * SHAPE.row_out + head * DZ
    mask_out = mask_t[:, None] & (offs_z < DZ)[None, :]
    out_offs = offs_t[:, None] * SHAPE.row_out + offs_z[None, :]
    tl.store(out_rows + out_offs, acc.to(out_ptr.dtype.element_ty), mask=mask_out)
