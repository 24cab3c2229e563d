"""The engine's pass over the chunks: computes the state C at every chunk edge, forward in time or backward.

Forward (paper, appendix B.2):
    C_k = exp2(g_k + m_{k-1} - m_k) C_{k-1} + sum_t exp2(w_t - m_k) k_t v_t^T
Backward (paper, appendix B.3):
    dC_{k-1} = exp2(g_k + m_{k-1} - m_k) dC_k + sum_t s exp2(b_t + m_{k-1} - m_t) / denom_t q_t dh_t^T

The sums run over the positions t of chunk k, s is the scale, gate vectors are those of roles.GateVectors, and m = 0 for
operations without a stabiliser. A program holds a tile of one head's state in registers and goes through the sequence
tile by tile. It writes one state per chunk, so longer chunks move fewer bytes.
"""

import triton
import triton.language as tl

from ..common.remember import remember_launches
from .gates import NEG, start_of


@remember_launches
@triton.jit(do_not_specialize=["T", "L", "N", "LG", "BH", "scale"])
def chunk_states_kernel(
    y_ptr,
    z_ptr,
    gates,
    initial_ptr,
    n_initial_ptr,
    states_ptr,
    n_states_ptr,
    last_ptr,
    n_last_ptr,
    anchors,
    starts,
    scale,
    T,
    L,
    N,
    LG,
    BH,
    SHAPE: tl.constexpr,
    FUTURE: tl.constexpr,
    LOCAL: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Process the chunks in order with one [BLOCK_X, BLOCK_Z] tile of the state in registers.

    Grid: (ceil(DX / BLOCK_X) * ceil(DZ / BLOCK_Z) * B * H,). LOCAL: times the number of chunks, since a program then
    computes one chunk's contribution to the state, from zero, and merge_chunk_states_kernel combines them. The pass's
    last chunk (FUTURE: the first in time) is left out unless the last state is wanted, since no chunk follows it.
    Forward in time: reads k as Y [B, T, H / group_x, DX], v as Z [B, T, H, DZ] and the gate vectors; writes the state
    before each chunk [B, H, N, DX, DZ] and, unless None, n [B, H, N, DX] and the last state. FUTURE, backward in time:
    reads q as Y, dh as Z, the gate vectors and the forward states; writes the gradient of the state after each chunk
    and, unless None, that of the initial state and the anchors: <C, dC> at each chunk's start [tiles of the state, B,
    H, N]. Gate vectors are cumulative over LG positions, states are written every L.
    """
    H: tl.constexpr = SHAPE.heads
    DX: tl.constexpr = SHAPE.dim_x
    DZ: tl.constexpr = SHAPE.dim_z
    BLOCK_T: tl.constexpr = TILE.block_t
    BLOCK_X: tl.constexpr = TILE.block_x
    BLOCK_Z: tl.constexpr = TILE.block_z
    STABILISED: tl.constexpr = gates.m is not None
    WITH_N: tl.constexpr = n_states_ptr is not None
    NX: tl.constexpr = (DX + BLOCK_X - 1) // BLOCK_X
    NZ: tl.constexpr = (DZ + BLOCK_Z - 1) // BLOCK_Z
    pid = tl.program_id(0)
    pid_z = pid % NZ
    pid_x = (pid // NZ) % NX
    pid_n = 0
    if LOCAL:
        chunks = tl.num_programs(0) // (NZ * NX * BH)
        pid_n = (pid // (NZ * NX)) % chunks
        if FUTURE:
            pid_n += N - chunks
        pid_bh = (pid // (NZ * NX * chunks)).to(tl.int64)
    else:
        pid_bh = (pid // (NZ * NX)).to(tl.int64)
    batch = pid_bh // H
    head = pid_bh % H
    offs_x = pid_x * BLOCK_X + tl.arange(0, BLOCK_X)
    offs_z = pid_z * BLOCK_Z + tl.arange(0, BLOCK_Z)
    offs_t = tl.arange(0, BLOCK_T)
    mask_x = offs_x < DX
    mask_z = offs_z < DZ
    y_stride = tl.full((), SHAPE.row_y, tl.int64)
    z_stride = tl.full((), SHAPE.row_z, tl.int64)
    y_base = start_of(y_ptr, starts.y, batch, head // SHAPE.group_x, T, SHAPE.row_y, DX)
    z_base = start_of(z_ptr, starts.z, batch, head, T, SHAPE.row_z, DZ)
    rows = pid_bh * T
    state_offs = offs_x[:, None] * DZ + offs_z[None, :]
    state_mask = mask_x[:, None] & mask_z[None, :]

    state = tl.zeros((BLOCK_X, BLOCK_Z), dtype=tl.float32)
    n_state = tl.zeros((BLOCK_X,), dtype=tl.float32)
    if initial_ptr is not None:
        state += tl.load(initial_ptr + pid_bh * DX * DZ + state_offs, mask=state_mask, other=0.0)
        if WITH_N:
            n_state += tl.load(n_initial_ptr + pid_bh * DX + offs_x, mask=mask_x, other=0.0)

    first_tile = pid_n * (L // BLOCK_T)
    num_tiles = tl.cdiv(T, BLOCK_T)
    if LOCAL:
        num_tiles = tl.minimum(num_tiles - first_tile, L // BLOCK_T)
    NG = tl.cdiv(T, LG)
    for tile in range(0, num_tiles):
        if FUTURE:
            t0 = (first_tile + num_tiles - 1 - tile) * BLOCK_T
            at_edge = (tile == 0) | ((t0 + BLOCK_T) % L == 0)
            at_gate = (tile == 0) | ((t0 + BLOCK_T) % LG == 0)
        else:
            t0 = (first_tile + tile) * BLOCK_T
            at_edge = t0 % L == 0
            at_gate = t0 % LG == 0
        chunk = t0 // L
        index = t0 // LG
        mask_t = t0 + offs_t < T
        y_t = tl.load(
            y_base + t0 * y_stride + offs_x[:, None] + offs_t[None, :] * SHAPE.row_y,
            mask=mask_x[:, None] & mask_t[None, :],
            other=0.0,
        )  # [BLOCK_X, BLOCK_T]
        z = tl.load(
            z_base + t0 * z_stride + offs_t[:, None] * SHAPE.row_z + offs_z[None, :],
            mask=mask_t[:, None] & mask_z[None, :],
            other=0.0,
        )  # [BLOCK_T, BLOCK_Z]
        log_weight = tl.load((gates.b if FUTURE else gates.w) + rows + t0 + offs_t, mask=mask_t, other=NEG)
        log_decay = tl.load(gates.g + pid_bh * NG + index)
        if STABILISED:
            m_in = tl.load(gates.edge + pid_bh * (NG + 1) + index)
            m_out = tl.load(gates.edge + pid_bh * (NG + 1) + index + 1)
            log_decay += m_in - m_out
        if FUTURE:
            if STABILISED:
                log_weight += m_in - tl.load(gates.m + rows + t0 + offs_t, mask=mask_t, other=0.0)
                log_weight -= tl.load(gates.log_denom + rows + t0 + offs_t, mask=mask_t, other=0.0)
            weight = tl.math.exp2(log_weight.to(tl.float32)) * scale
        else:
            if STABILISED:
                log_weight -= m_out
            weight = tl.math.exp2(log_weight.to(tl.float32))
        weight = tl.where(mask_t, weight, 0.0)

        if at_edge and not LOCAL:
            out = (pid_bh * N + chunk) * DX * DZ + state_offs
            tl.store(states_ptr + out, state.to(states_ptr.dtype.element_ty), mask=state_mask)
            if WITH_N and pid_z == 0:
                tl.store(n_states_ptr + (pid_bh * N + chunk) * DX + offs_x, n_state, mask=mask_x)
        if at_gate:
            decay = tl.math.exp2(log_decay.to(tl.float32))
            state *= decay
            if WITH_N:
                n_state *= decay
        weighted = (z * weight[:, None]).to(y_t.dtype)
        state = tl.dot(y_t, weighted, state, input_precision=PRECISION)
        if WITH_N and pid_z == 0:
            n_state += tl.sum(y_t.to(tl.float32) * weight[None, :], axis=1)
        if anchors.products is not None:
            if t0 % L == 0:
                before = tl.load(
                    anchors.states + (pid_bh * N + chunk) * DX * DZ + state_offs, mask=state_mask, other=0.0
                ).to(tl.float32)
                dot = tl.sum(before * state) * SHAPE.headroom
                tl.store(anchors.products + ((pid_x * NZ + pid_z) * BH.to(tl.int64) + pid_bh) * N + chunk, dot)

    if LOCAL:
        out = (pid_bh * N + pid_n) * DX * DZ + state_offs
        tl.store(states_ptr + out, state.to(states_ptr.dtype.element_ty), mask=state_mask)
        if WITH_N and pid_z == 0:
            tl.store(n_states_ptr + (pid_bh * N + pid_n) * DX + offs_x, n_state, mask=mask_x)
    if last_ptr is not None:
        tl.store(last_ptr + pid_bh * DX * DZ + state_offs, state, mask=state_mask)
        if WITH_N and pid_z == 0:
            tl.store(n_last_ptr + pid_bh * DX + offs_x, n_state, mask=mask_x)


@remember_launches
@triton.jit(do_not_specialize=["T", "L", "N", "LG", "whole_heads"])
def merge_chunk_states_kernel(
    g_ptr,
    edge_ptr,
    initial_ptr,
    n_initial_ptr,
    states_ptr,
    n_states_ptr,
    last_ptr,
    n_last_ptr,
    T,
    L,
    N,
    LG,
    whole_heads,
    DX: tl.constexpr,
    DZ: tl.constexpr,
    FUTURE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Replace every chunk's contribution by the state that enters the chunk: C_k = decay_k C_{k-1} + contribution_k.

    decay_k is a scalar, so the merge costs little and is exact. FUTURE: backward in time.

    Grid: (ceil(DX DZ / BLOCK_E) * heads,) for the cut heads, those of the B * H from number ``whole_heads`` on.
    Reads g [B, H, ceil(T / LG)] and m at the stretches' edges; reads and writes the states [heads, N, DX, DZ] and n
    [heads, N, DX].
    """
    WITH_N: tl.constexpr = n_states_ptr is not None
    blocks: tl.constexpr = (DX * DZ + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    pid_e = pid % blocks
    row = (pid // blocks).to(tl.int64) * N
    pid_bh = (pid // blocks + whole_heads).to(tl.int64)
    offs = pid_e * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = offs < DX * DZ
    offs_x = tl.arange(0, BLOCK_X)
    mask_x = offs_x < DX
    offs_g = tl.arange(0, BLOCK_G)
    NG = tl.cdiv(T, LG)
    per_chunk = L // LG
    state = tl.zeros((BLOCK_E,), dtype=tl.float32)
    n_state = tl.zeros((BLOCK_X,), dtype=tl.float32)
    if initial_ptr is not None:
        state += tl.load(initial_ptr + pid_bh * DX * DZ + offs, mask=mask, other=0.0)
        if WITH_N:
            n_state += tl.load(n_initial_ptr + pid_bh * DX + offs_x, mask=mask_x, other=0.0)
    # Where the last state is not wanted, the contribution of the pass's last chunk has not been computed.
    contributing = N if last_ptr is not None else N - 1
    # Loads of several chunks are in flight at once: none depends on the chunk before.
    for step in tl.range(0, N, num_stages=4):
        chunk = N - 1 - step if FUTURE else step
        first = chunk * per_chunk
        count = tl.minimum(NG - first, per_chunk)
        log_decay = tl.sum(tl.load(g_ptr + pid_bh * NG + first + offs_g, mask=offs_g < count, other=0.0), axis=0)
        if edge_ptr is not None:
            log_decay += tl.load(edge_ptr + pid_bh * (NG + 1) + first)
            log_decay -= tl.load(edge_ptr + pid_bh * (NG + 1) + first + count)
        decay = tl.math.exp2(log_decay.to(tl.float32))
        here = states_ptr + (row + chunk) * DX * DZ + offs
        contributes = tl.full((1,), step, tl.int32) < contributing
        local = tl.load(here, mask=mask & contributes, other=0.0).to(tl.float32)
        tl.store(here, state.to(states_ptr.dtype.element_ty), mask=mask)
        state = state * decay + local
        if WITH_N:
            mask_n = mask_x & (tl.full((1,), pid_e, tl.int32) == 0)
            n_here = n_states_ptr + (row + chunk) * DX + offs_x
            n_local = tl.load(n_here, mask=mask_n & contributes, other=0.0)
            tl.store(n_here, n_state, mask=mask_n)
            n_state = n_state * decay + n_local
    if last_ptr is not None:
        tl.store(last_ptr + pid_bh * DX * DZ + offs, state, mask=mask)
        if WITH_N:
            tl.store(n_last_ptr + pid_bh * DX + offs_x, n_state, mask=mask_x & (tl.full((1,), pid_e, tl.int32) == 0))
