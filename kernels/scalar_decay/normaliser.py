"""The normaliser: mLSTMexp's denominators, computed before the output if the output's kernel does not make them.

    n_t = exp(a_t + m_{t-1} - m_t) n_{t-1} + exp(u_t - m_t) k_t        denom_t = max(|scale n_t^T q_t|, exp(-m_t))

n is a state of one column, computed as fused_chunk.py computes C: a program takes a chunk tile by tile, with n for its
columns of k in registers. In a kernel of its own this needs neither the values nor registers for the output, and is
done once instead of once for every block of value columns. denominator_kernel then adds up the programs' parts of
n^T q. The output's and gradients' kernels take log2 denom_t as one more gate vector. Source: TFLA, equations 4 to 7.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from ..common.remember import remember_launches
from .gates import NEG, document_of, start_of, stretch_of_document
from .roles import GateVectors


@triton.jit
def _load_gates(gates, pid_bh, t0, end, T, BLOCK_T: tl.constexpr):
    """Load the gates of the tile at ``t0``; positions from ``end`` on get weights with which they add nothing.

    Returns:
        Vectors [BLOCK_T] and a scalar: the positions' log weights as queries and as keys; the factors of n^T q, with
        n before the tile; the keys' weights in n; the decay of n.
    """
    offs = t0 + tl.arange(0, BLOCK_T)
    mask = offs < end
    rows = pid_bh * T + offs
    tiles = tl.cdiv(T, BLOCK_T)
    index = t0 // BLOCK_T
    edge = gates.edge + pid_bh * (tiles + 1) + index
    b = tl.load(gates.b + rows, mask=mask, other=0.0)
    u = tl.load(gates.u + rows, mask=mask, other=NEG)
    w = tl.load(gates.w + rows, mask=mask, other=NEG)
    m = tl.load(gates.m + rows, mask=mask, other=0.0)
    g = tl.load(gates.g + pid_bh * tiles + index, mask=t0 < end, other=0.0)
    m_in = tl.load(edge, mask=t0 < end, other=0.0)
    m_out = tl.load(edge + 1, mask=t0 < end, other=0.0)
    return b - m, u - b, tl.math.exp2(b - m + m_in), tl.math.exp2(w - m_out), tl.math.exp2(g + m_in - m_out)


@remember_launches
@triton.jit(do_not_specialize=["T", "L", "N", "BH", "scale"])
def normaliser_kernel(
    q_ptr,
    k_ptr,
    gates,
    n_states_ptr,
    n_q_ptr,
    n_last_ptr,
    starts,
    scale,
    T,
    L,
    N,
    BH,
    H: tl.constexpr,
    K: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute scale n^T q of one chunk for BLOCK_K columns of q and k.

    Grid: (ceil(K / BLOCK_K) * N * B * H,).
    Reads q, k [B, T, H / GROUP, K], n entering the chunk [B, H, N, K] (None: zero) and the gate vectors, cumulative
    over BLOCK_T, which are loaded a tile ahead; writes this block's part of scale n^T q [blocks, B, H, T] and, unless
    None, the last n [B, H, K] (only if N = 1). With ``starts.documents`` a program takes a whole document, as in
    fused_chunk_kernel.
    """
    NK: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    pid_k = pid % NK
    pid_n = (pid // NK) % N
    pid_bh = (pid // (NK * N)).to(tl.int64)
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
        n_q_ptr += batch
    col = pid_k * BLOCK_K
    offs_t = tl.arange(0, BLOCK_T)
    offs_k = col + tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    causal = offs_t[None, :] <= offs_t[:, None]
    q_offset = start_of(0, starts.x, batch, head // GROUP, period, Q_ROW, K)
    k_offset = start_of(0, starts.y, batch, head // GROUP, period, K_ROW, K)
    q_desc = tl.make_tensor_descriptor(q_ptr + q_offset, [length, K], [Q_ROW, 1], [BLOCK_T, BLOCK_K])
    k_desc = tl.make_tensor_descriptor(k_ptr + k_offset, [length, K], [K_ROW, 1], [BLOCK_T, BLOCK_K])
    n = tl.zeros((BLOCK_K,), dtype=tl.float32)
    if n_states_ptr is not None:
        n += tl.load(n_states_ptr + (pid_bh * N + pid_n) * K + offs_k, mask=mask_k, other=0.0)
    n_q_ptr += (pid_k * BH.to(tl.int64) + row) * T
    query, key, past, weight, decay = _load_gates(gates, row, start, end, T, BLOCK_T)
    for t0 in tl.range(start, end, BLOCK_T, num_stages=STAGES):
        q = q_desc.load([t0, col])
        k = k_desc.load([t0, col])
        next_query, next_key, next_past, next_weight, next_decay = _load_gates(
            gates, row, t0 + BLOCK_T, end, T, BLOCK_T
        )
        product = tl.dot(q, tl.trans(k))
        product *= tl.where(causal, tl.math.exp2(query[:, None] + key[None, :]), 0.0)
        n_q = tl.sum(product, axis=1) + tl.sum(q.to(tl.float32) * n[None, :], axis=1) * past
        n = n * decay + tl.sum(k.to(tl.float32) * weight[:, None], axis=0)
        tl.store(n_q_ptr + t0 + offs_t, n_q * scale, mask=t0 + offs_t < end)
        query, key, past, weight, decay = next_query, next_key, next_past, next_weight, next_decay
    if n_last_ptr is not None:
        tl.store(n_last_ptr + pid_bh * K + offs_k, n, mask=mask_k)


@remember_launches
@triton.jit(do_not_specialize=["count", "blocks"])
def denominator_kernel(n_q_ptr, m_ptr, log_denom_ptr, count, blocks, BLOCK: tl.constexpr):
    """Sum the blocks' parts of scale n^T q and write log2 of max(|scale n^T q|, exp2(-m)); m is in base 2.

    Grid: (ceil(count / BLOCK),) for ``count`` = B * H * T.
    Reads the parts [blocks, count] and m [count]; writes log_denom [count].
    """
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    n_q = tl.zeros((BLOCK,), dtype=tl.float32)
    for block in range(0, blocks):
        n_q += tl.load(n_q_ptr + block * tl.full((), count, tl.int64) + offs, mask=mask, other=0.0)
    m = tl.load(m_ptr + offs, mask=mask, other=0.0)
    tl.store(log_denom_ptr + offs, tl.math.log2(tl.maximum(tl.abs(n_q), tl.math.exp2(-m))), mask=mask)


def add_normaliser_gradients(
    dn_last: Tensor,
    gates: GateVectors,
    stretch: int,
    k: Tensor,
    n_initial: Tensor | None,
    dk: Tensor,
    decay: Tensor,
    d_decay: Tensor | None,
    d_input: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor | None:
    """Add, in place, the gradients that come through the last n = sum_t w_t k_t + w_0 n_0; return that of n_0.

    The outputs' denominators are constants for the gradient, so n gets one only where it is returned: no kernel needed.
    """
    edge, seq_len = gates.edge, k.shape[1]
    assert edge is not None
    positions = torch.arange(seq_len, device=k.device)
    if cu_seqlens is None:
        tiles, log_decay = positions // stretch, gates.g.sum(-1)
        after = (gates.g.flip(-1).cumsum(-1).flip(-1) - gates.g)[:, :, tiles]
        m_first, m_last = edge[:, :, 0], edge[:, :, -1]
    else:
        # Each document's first position, first stretch and first edge, as stretch_of_document has them.
        start = cu_seqlens[:-1].long().clamp(0, seq_len)
        length = torch.maximum(cu_seqlens[1:].long().clamp(max=seq_len), start) - start
        start, numbers = start.clamp(max=seq_len - 1), torch.arange(len(start), device=k.device)
        tile, count = start // stretch + numbers, (length + stretch - 1) // stretch
        m_first, m_last = (edge[0, :, at].mT for at in (tile + numbers, tile + numbers + count))
        sums = pad(gates.g[0].double().cumsum(-1), (1, 0))
        log_decay = (sums[:, tile + count] - sums[:, tile]).mT
        number = torch.searchsorted(cu_seqlens[1:].long(), positions, right=True).clamp(max=len(start) - 1)
        tiles = tile[number] + ((positions - start[number]) // stretch).clamp(min=0)
        after = sums[None, :, (tile + count)[number]] - sums[None, :, tiles.clamp(max=sums.shape[1] - 2) + 1]

    def spread(x: Tensor) -> Tensor:
        """Return a value for each position [B, H, T, ...] of one for each state."""
        return x[:, :, None] if cu_seqlens is None else x[number].transpose(0, 1)[None]

    # w is the log weight at the end of the position's stretch, ``after`` the log decay from there to the end.
    weight = torch.exp2(gates.w + after - spread(m_last)).float()
    first = torch.exp2(log_decay + m_first - m_last)
    dn = dn_last.float()
    dn_at = spread(dn).transpose(1, 2)
    contribution = (k.float() * dn_at).sum(-1).transpose(1, 2) * weight
    dk += (weight.transpose(1, 2)[..., None] * dn_at).to(dk.dtype)
    d_log_decay = contribution.cumsum(-1) - contribution
    if cu_seqlens is not None:
        before = pad(contribution.double().cumsum(-1), (1, 0))
        d_log_decay = before[..., :-1] - before[..., start[number]]
    if n_initial is not None:
        d_log_decay += spread((n_initial * dn).sum(-1) * first)
    if d_input is not None and d_decay is not None:
        d_input += contribution.transpose(1, 2)
        d_decay += d_log_decay.transpose(1, 2) * torch.sigmoid(-decay)
    return (dn * first[..., None]).float() if n_initial is not None else None
