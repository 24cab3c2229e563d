"""The fused chunk kernel of the engine: a chunk is processed tile by tile in order, with its state on chip.

It computes the four products of roles.py, for each tile of X, Y and Z

    out = rows(W_in) (X S) + ((X Y^T) * W) Z        S <- decay S + Y^T (rows(w) Z)

and carries S to the next tile, whereas chunk_o.py goes through the chunk's other tiles for each tile. So the work is
linear in the chunk length, and nothing but inputs, outputs and one state per chunk is read from or written to device
memory. Past roles (h, dq) run forward in time, future roles (dk, dv) backward. A program holds BLOCK_Z columns of S,
with all DX rows if these fit in its registers; else there is a launch for each block of rows, and outputs are added.

Gate vectors are cumulative over a tile, not over the chunk (BLOCK_T is their stretch). Z, not Y, is multiplied by the
state's weights w, so that Y's transpose is read from shared memory as it is.
"""

import triton
import triton.language as tl

from ..common.remember import remember_launches
from .gates import NEG, document_of, start_of, stretch_of_document
from .roles import Anchors, GateVectors


@triton.jit
def _load_gates(ptr, offs_t, mask_t, last_row, other, CLAMP: tl.constexpr):
    """Load a tile's gate vector; padding holds ``other`` or, with CLAMP, the value of the last position."""
    if CLAMP:
        gates = tl.load(ptr + tl.minimum(offs_t, last_row))
    else:
        gates = tl.load(ptr + offs_t, mask=mask_t, other=other)
    return gates


@remember_launches
@triton.jit(do_not_specialize=["T", "L", "N", "BH", "scale", "every", "block"])
def fused_chunk_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    state_ptr,
    partial_ptr,
    out_ptr,
    gates,
    pair_ptr,
    sums_ptr,
    last_state_ptr,
    anchors,
    starts,
    scale,
    T,
    L,
    N,
    BH,
    every,
    block,
    SHAPE: tl.constexpr,
    ROLE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Process one chunk for BLOCK_Z columns of the output and one block of BLOCK_X columns of X and Y.

    A DX above BLOCK_X takes a launch for each block. The launches' outputs add up in a partial result [B, T, H, DZ],
    which every launch but the FIRST reads and every one but the LAST writes.

    Grid: (ceil(DZ / BLOCK_Z) * N * B * H,).
    Reads X, Y [B, T, H / group_x, DX], Z [B, T, H / group_z, DZ], the state entering the chunk [B, H, N, DX, DZ]
    (transposed: [B, H, N, DZ, DX]; None: zero) and the gate vectors; writes out [B, T, H, DZ] and, unless None, the
    state that leaves the sequence (only if N = 1). Given a pair, of Z's shape, it writes sum_z out * pair [blocks of Z,
    B, H, T]. A past role then also writes S at the A = ceil(T / every) anchors, one every ``every`` positions,
    [B, H, A, BLOCK_X, DZ]; a future role reads it and writes <C, dC> there [blocks of Z, B, H, A].
    With ``starts.documents`` a program takes a whole document. B is then their number in the grid, in BH and in states;
    in all else it is 1, T is the sum of their lengths, and A is T // every + their number.
    """
    H: tl.constexpr = SHAPE.heads
    DX: tl.constexpr = SHAPE.dim_x
    DZ: tl.constexpr = SHAPE.dim_z
    BLOCK_T: tl.constexpr = TILE.block_t
    BLOCK_X: tl.constexpr = TILE.block_x
    BLOCK_Z: tl.constexpr = TILE.block_z
    FUTURE: tl.constexpr = ROLE.future
    TRANSPOSED: tl.constexpr = ROLE.transposed
    STABILISED: tl.constexpr = gates.m is not None
    ANCHORS: tl.constexpr = pair_ptr is not None
    NZ: tl.constexpr = (DZ + BLOCK_Z - 1) // BLOCK_Z
    pid = tl.program_id(0)
    pid_z = pid % NZ
    pid_n = (pid // NZ) % N
    pid_bh = (pid // (NZ * N)).to(tl.int64)
    batch = pid_bh // H
    head = pid_bh % H
    start = pid_n * L
    end = tl.minimum(start + L, T)
    row = pid_bh
    length = T
    period = T
    if starts.documents is not None:
        count = BH // H
        number = batch
        batch, end = document_of(starts.documents, number, T)
        # As of a sequence that begins with the document.
        stretch = stretch_of_document(head, batch, number, count, T, BLOCK_T)
        gates = GateVectors(
            u=None if gates.u is None else gates.u + batch,
            edge=None if gates.edge is None else gates.edge + (stretch + head * (count - 1) + number),
            m=gates.m if gates.edge is None else gates.m + batch,
            log_denom=None if gates.log_denom is None else gates.log_denom + batch,
            b=gates.b + batch, w=gates.w + batch, g=gates.g + stretch,
        )  # fmt: skip
        row = head
        length = tl.maximum(end, 1)
        period = 1
        BH = BH // count
    offs_t = tl.arange(0, BLOCK_T)
    x_col = block * BLOCK_X
    offs_x = x_col + tl.arange(0, BLOCK_X)
    offs_z = pid_z * BLOCK_Z + tl.arange(0, BLOCK_Z)
    mask_x = offs_x < DX
    mask_z = offs_z < DZ
    z_col = pid_z * BLOCK_Z
    # Clamping takes registers for addresses. Masking takes registers for the masks, from an iteration's loads to the
    # next iteration's products. Which takes fewer depends on the role.
    CLAMP: tl.constexpr = FUTURE and (FIRST or LAST)
    num_anchors = tl.cdiv(T, every)
    if starts.documents is not None and ANCHORS:
        num_anchors = T // every + count
        anchor = batch // every + number
        products = anchors.products
        if products is not None:
            products += anchor
        anchors = Anchors(anchors.states + anchor * (BLOCK_X * DZ), products)
        sums_ptr += batch
    # A descriptor describes one head: beyond T and the head dim loads return zeros and nothing is stored.
    x_offset = start_of(0, starts.x, batch, head // SHAPE.group_x, period, SHAPE.row_x, DX)
    y_offset = start_of(0, starts.y, batch, head // SHAPE.group_x, period, SHAPE.row_y, DX)
    z_offset = start_of(0, starts.z, batch, head // SHAPE.group_z, period, SHAPE.row_z, DZ)
    x_desc = tl.make_tensor_descriptor(x_ptr + x_offset, [length, DX], [SHAPE.row_x, 1], [BLOCK_T, BLOCK_X])
    y_desc = tl.make_tensor_descriptor(y_ptr + y_offset, [length, DX], [SHAPE.row_y, 1], [BLOCK_T, BLOCK_X])
    z_desc = tl.make_tensor_descriptor(z_ptr + z_offset, [length, DZ], [SHAPE.row_z, 1], [BLOCK_T, BLOCK_Z])
    out_stride = tl.full((), SHAPE.row_out, tl.int64)
    pair_stride = tl.full((), SHAPE.row_pair, tl.int64)
    out_offs = offs_t[:, None] * SHAPE.row_out + offs_z[None, :]
    pair_offs = offs_t[:, None] * SHAPE.row_pair + offs_z[None, :]
    pair_offset = start_of(0, starts.pair, batch, head // SHAPE.group_z, period, SHAPE.row_pair, DZ)
    out_offset = batch * period * SHAPE.row_out + head * DZ
    if LAST:
        out_desc = tl.make_tensor_descriptor(out_ptr + out_offset, [length, DZ], [SHAPE.row_out, 1], [BLOCK_T, BLOCK_Z])
    PIPELINE_PARTIAL: tl.constexpr = not FIRST and partial_ptr.dtype.element_ty.primitive_bitwidth == 16
    if PIPELINE_PARTIAL or not LAST:
        partial_desc = tl.make_tensor_descriptor(
            partial_ptr + out_offset, [length, DZ], [SHAPE.row_out, 1], [BLOCK_T, BLOCK_Z]
        )
    if ANCHORS and FUTURE:
        anchor_desc = tl.make_tensor_descriptor(
            anchors.states, [(BH * num_anchors * BLOCK_X).to(tl.int32), DZ], [DZ, 1], [BLOCK_X, BLOCK_Z]
        )
    rows = row * T
    tiles_in_sequence = tl.cdiv(T, BLOCK_T)
    if TRANSPOSED:
        state_offs = offs_z[None, :] * DX + offs_x[:, None]
    else:
        state_offs = offs_x[:, None] * DZ + offs_z[None, :]
    state_mask = mask_x[:, None] & mask_z[None, :]

    state = tl.zeros((BLOCK_X, BLOCK_Z), dtype=tl.float32)
    if state_ptr is not None:
        state += tl.load(state_ptr + (pid_bh * N + pid_n) * DX * DZ + state_offs, mask=state_mask, other=0.0).to(
            tl.float32
        )

    tiles = tl.cdiv(end - start, BLOCK_T)
    for tile in tl.range(0, tiles, num_stages=TILE.num_stages):
        t0 = start + (tiles - 1 - tile if FUTURE else tile) * BLOCK_T
        mask_t = t0 + offs_t < end
        last_row = end - 1 - t0
        x = x_desc.load([t0, x_col])
        y = y_desc.load([t0, x_col])
        z = z_desc.load([t0, z_col])
        index = t0 // BLOCK_T
        b = _load_gates(gates.b + rows + t0, offs_t, mask_t, last_row, 0.0, CLAMP)
        w = _load_gates(gates.w + rows + t0, offs_t, mask_t, last_row, NEG, CLAMP)
        log_decay = tl.load(gates.g + row * tiles_in_sequence + index)
        query_gate = b
        key_gate = -b
        if gates.u is not None:
            key_gate += _load_gates(gates.u + rows + t0, offs_t, mask_t, last_row, 0.0, CLAMP)
        if STABILISED:
            m_in = tl.load(gates.edge + row * (tiles_in_sequence + 1) + index)
            m_out = tl.load(gates.edge + row * (tiles_in_sequence + 1) + index + 1)
            m = _load_gates(gates.m + rows + t0, offs_t, mask_t, last_row, 0.0, CLAMP)
            query_gate -= m + _load_gates(gates.log_denom + rows + t0, offs_t, mask_t, last_row, 0.0, CLAMP)
            w -= m_out
            log_decay += m_in - m_out
        # Rows of X, Y and Z in the padding are zero, and so are products with them unless a weight is infinite.
        if not CLAMP:
            query_gate = tl.where(mask_t, query_gate, NEG)
            key_gate = tl.where(mask_t, key_gate, NEG)
        log_query_factor = query_gate
        if STABILISED:
            log_query_factor = query_gate + m_in
        query_factor = tl.math.exp2(log_query_factor) * scale
        key_factor = tl.math.exp2(w)
        if not CLAMP:
            key_factor = tl.where(mask_t, key_factor, 0.0)
        decay = tl.math.exp2(log_decay)
        if FUTURE:
            causal = offs_t[None, :] >= offs_t[:, None]
            exponent = key_gate[:, None] + query_gate[None, :]
            row_factor = key_factor
            state_factor = query_factor
        else:
            causal = offs_t[None, :] <= offs_t[:, None]
            exponent = query_gate[:, None] + key_gate[None, :]
            row_factor = query_factor
            state_factor = key_factor

        if ANCHORS and not FUTURE:
            if t0 % every == 0:
                anchor_row = ((row * num_anchors + t0 // every) * BLOCK_X).to(tl.int32)
                anchor_tile = (
                    anchors.states + anchor_row.to(tl.int64) * DZ
                    + tl.arange(0, BLOCK_X)[:, None] * DZ + offs_z[None, :]
                )  # fmt: skip
                kept = state.to(anchors.states.dtype.element_ty)
                if DZ % BLOCK_Z == 0:
                    tl.store(anchor_tile, kept)
                else:
                    tl.store(anchor_tile, kept, mask=mask_z[None, :])
        out = tl.dot(x, state.to(x.dtype)) * row_factor[:, None]
        product = tl.dot(x, tl.trans(y))
        product *= tl.where(causal, tl.math.exp2(exponent) * scale, 0.0)
        out = tl.dot(product.to(z.dtype), z, out) * SHAPE.headroom
        state *= decay
        state = tl.dot(tl.trans(y), (z * state_factor[:, None]).to(y.dtype), state)
        if ANCHORS and FUTURE:
            if (t0 & (every - 1)) == 0:
                anchor_row = ((row * num_anchors + t0 // every) * BLOCK_X).to(tl.int32)
                before = anchor_desc.load([anchor_row, z_col]).to(tl.float32)
                dot = tl.sum(before * state) * SHAPE.headroom
                tl.store(anchors.products + (pid_z * BH.to(tl.int64) + row) * num_anchors + t0 // every, dot)
        out_mask = mask_t[:, None]
        if DZ % BLOCK_Z != 0:
            out_mask = out_mask & mask_z[None, :]
        if not FIRST:
            if PIPELINE_PARTIAL:
                out += partial_desc.load([t0, z_col]).to(tl.float32)
            # Always true: inside a branch the load is not pipelined, for which shared memory would need two more tiles.
            elif t0 < T:
                out += tl.load(partial_ptr + out_offset + t0 * out_stride + out_offs, mask=out_mask, other=0.0)
        if LAST:
            if pair_ptr is not None:
                pair = out
                if t0 < T:
                    pair = tl.load(pair_ptr + pair_offset + t0 * pair_stride + pair_offs, mask=out_mask, other=0.0)
                    pair = pair.to(tl.float32)
                sums = tl.sum(out * pair, axis=1)
                tl.store(sums_ptr + pid_z * BH.to(tl.int64) * T + rows + t0 + offs_t, sums, mask=mask_t)
            out_desc.store([t0, z_col], out.to(out_desc.dtype))
        else:
            partial_desc.store([t0, z_col], out.to(partial_desc.dtype))

    if last_state_ptr is not None:
        tl.store(last_state_ptr + pid_bh * DX * DZ + state_offs, state, mask=state_mask)
