"""Gate kernels of the engine: from an operation's gates to cumulative log gates, and their gradients.

Every operation is ``C_t = exp(a_t) C_{t-1} + exp(u_t) k_t v_t^T``; only the maps from its gates to the log decay ``a``
and the log input ``u`` differ. The constexpr ``GATE`` chooses the map:

    sig   a = log sigma(f),        u = log sigma(i)      mLSTMsig (TFLA paper, section 4.1)
    exp   a = log sigma(f),        u = i                 mLSTMexp, stabilised by m (paper, equations 1 to 7)
    log   a = g                                          simple GLA
    slope a = -slope[h]                                  Retention, Lightning Attention
    tau   a = log sigma(f) / tau                         Gated Retention
    ssd   a = dt A[h],             u = log dt            Mamba-2 SSD

In each stretch of L positions, a chunk or a tile (paper, appendix B.2), ``b`` is the inclusive cumulative sum of a,
``g`` its last value and ``w_t = g - b_t + u_t`` (the paper's vector a) the log weight with which position t enters the
state after the stretch. All are in base 2. Sums are computed in float64. Over a chunk they are stored in float64 too,
because in float32 differences of b over a long chunk, or of large u and m, would lose the bits that neighbouring
positions need; over a tile of a half-precision problem float32 is enough. The stabiliser m_t is stored in float32: its
value is arbitrary, and rounding it does no harm as long as every kernel uses the rounded value.
"""

import triton
import triton.language as tl

from ..common.marks import document_at
from ..common.remember import remember_launches

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG = tl.constexpr(-1.0e30)
"""In place of minus infinity, whose difference from itself is not a number."""

MIN_STABILISER = tl.constexpr(-1024.0 * LOG2E.value)
"""Lower bound of mLSTMexp's m, in base 2; reference.MIN_STABILISER says why."""

MIN_LOG_DECAY = tl.constexpr(-150.0)
MIN_LOG_DECAY_STABILISED = tl.constexpr(-1000.0)
"""Lower bounds of the log decay, since a gate of -1e30 or minus infinity (at the start of a document) would take all
bits of the cumulative sums. At the bound the decay is zero in float32; at that of mLSTMexp even if it is multiplied by
the exponential of an input gate of a few hundred."""

UNKNOWN_GATE = tl.constexpr("GATE must be sig, exp, log, slope, tau or ssd")


@triton.jit
def start_of(origin, strides, batch, head, T, ROW, D):
    """Return where a head's first position is in a tensor that starts at ``origin``, a pointer or 0: one that is
    contiguous [B, T, ROW / D, D], or has these strides of batch and head (roles.Starts). Of a document ``batch`` is the
    first position, and T is 1."""
    if strides is None:
        start = origin + batch * T * ROW + head * D
    else:
        start = origin + batch * strides[0] + head * strides[1]
    return start


@triton.jit
def document_of(cu_seqlens, number, T):
    """Return the first position of document ``number`` and its length.

    Both are in [0, T] whatever cu_seqlens holds, and the first position is below T, even that of an empty document.
    """
    first = tl.minimum(tl.maximum(tl.load(cu_seqlens + number), 0), T)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + number + 1), first), T)
    return tl.minimum(first, T - 1).to(tl.int64), (end - first).to(tl.int32)


@triton.jit
def stretch_of_document(head, first, number, count, T, L):
    """Return the number of the first stretch of document number ``number`` of ``count`` in gate vectors.

    Stretches of L positions start anew in each document, whose first position is ``first``. Its first one is number
    first // L + number of a head's T // L + count, as many as the documents can have. Edges are one more for each
    document. Kernels make the gate vectors themselves, since no function returns None with Triton 3.6.
    """
    return head * (T // L + count - (T + L - 1) // L) + first // L + number


@triton.jit
def stretch_of(cu_seqlens, stretch, T, L, N):
    """Return of stretch number ``stretch``, of the N that a head's documents can have, the document's number, first
    position and length, and the stretch's positions in the document: from, and up to. Those may be none."""
    number = stretch * 0
    last = number + N - T // L - 1
    while number < last:
        middle = (number + last + 1) // 2
        is_later = tl.load(cu_seqlens + middle) // L + middle > stretch
        number = tl.where(is_later, number, middle)
        last = tl.where(is_later, middle - 1, last)
    first, length = document_of(cu_seqlens, number, T)
    start = tl.maximum(stretch - (first // L).to(tl.int32) - number, 0) * L
    return number, first, length, start, tl.minimum(start + L, length)


@triton.jit
def is_first(resets, positions):
    """Return which positions begin a document; ``resets`` as in :func:`document_at`."""
    return tl.load(resets[0] + document_at(resets, positions)) == positions


@triton.jit
def log_sigmoid(x):
    """Return log sigma(x), stable for either sign, to the last bits of x's dtype."""
    e = tl.exp(-tl.abs(x))
    if x.dtype == tl.float64:
        return tl.minimum(x, 0.0) - tl.log(1.0 + e)
    # log(1 + e) = 2 artanh(s) by its series, whose first term left out is below 1e-9: in float32 1 + e would round.
    s = e / (2.0 + e)
    z = s * s
    series = 1.0 / 13.0 + z * (1.0 / 15.0)
    series = 1.0 / 9.0 + z * (1.0 / 11.0 + z * series)
    series = 1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * series)))
    return tl.minimum(x, 0.0) - 2.0 * s * series


@triton.jit
def log_decay(x, head_value, inv_tau, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the log decay a, in DTYPE, of decay gates ``x``; ``head_value`` is the head's slope or A."""
    if GATE == "slope":
        a = -head_value
    elif GATE == "log":
        a = x.to(DTYPE)
    elif GATE == "ssd":
        a = x.to(DTYPE) * head_value
    elif GATE == "tau":
        a = log_sigmoid(x).to(DTYPE) * inv_tau
    else:
        tl.static_assert(GATE == "sig" or GATE == "exp", UNKNOWN_GATE)
        a = log_sigmoid(x).to(DTYPE)
    return a


@triton.jit
def log_input(x, GATE: tl.constexpr):
    """Return the log input u of input gates ``x`` (for ssd: of dt)."""
    if GATE == "sig":
        u = log_sigmoid(x)
    elif GATE == "ssd":
        u = tl.log(x)
    else:
        tl.static_assert(GATE == "exp", "GATE must be sig, exp or ssd to have a log input")
        u = x
    return u


@triton.jit
def _load_decay(decay_ptr, offs, mask, head_value, inv_tau, resets, positions, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the log decay a in float64 for gate elements ``offs``, computed in DTYPE; 0 in the padding, and the lower
    bound where a document begins."""
    LEAST: tl.constexpr = MIN_LOG_DECAY_STABILISED if GATE == "exp" else MIN_LOG_DECAY
    x = 0.0
    if GATE != "slope":
        x = tl.load(decay_ptr + offs, mask=mask, other=0.0).to(DTYPE)
    a = log_decay(x, head_value, inv_tau, GATE, tl.float64)
    a = tl.maximum(a, LEAST)
    if resets is not None:
        a = tl.where(is_first(resets, positions), LEAST, a)
    return tl.where(mask, a, 0.0)


@triton.jit
def _max(x, y):
    """Return the larger of x and y; associative_scan needs it as a function."""
    return tl.maximum(x, y)


@triton.jit
def _max_plus(shift_x, max_x, shift_y, max_y):
    """Compose two maps m -> max(m + shift, max), x first."""
    return shift_x + shift_y, tl.maximum(max_x + shift_y, max_y)


@remember_launches
@triton.jit(do_not_specialize=["T", "L", "N", "inv_tau"])
def gates_forward_kernel(
    decay_ptr,
    input_ptr,
    head_ptr,
    b_ptr,
    u_ptr,
    w_ptr,
    g_ptr,
    m_ptr,
    g_max_ptr,
    cu_seqlens,
    resets,
    inv_tau,
    T,
    L,
    N,
    H: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Turn gates into cumulative log gates for one stretch of BLOCK_H heads, whose gates lie side by side in memory.

    Grid: (ceil(H / BLOCK_H) * N stretches * B,). ONCE: a stretch has no more than BLOCK_T positions.
    Reads the gates [B, T, H] and the constants of heads [H]; writes b, u and w [B, H, T], g [B, H, N] and, for exp,
    max_s w_s [B, H, N] and the stabiliser of the stretch alone, m_t = max_{s <= t} (b_t - b_s + u_s) [B, H, T].
    Stretches are those of the documents if there is a cu_seqlens (:func:`stretch_of`); B is then 1. With ``resets``
    (:func:`is_first`) the state instead decays to nothing where a document begins.
    """
    DTYPE: tl.constexpr = b_ptr.dtype.element_ty
    blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    stretch = pid // blocks % N
    batch = (pid // (blocks * N)).to(tl.int64)
    head = pid % blocks * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    mask_h = head < H
    start = stretch * L
    end = tl.minimum(start + L, T)
    gates = batch * T * H + head
    rows = (batch * H + head) * T
    at_stretch = (batch * H + head) * N + stretch
    if cu_seqlens is not None:
        _, first, _, start, end = stretch_of(cu_seqlens, stretch, T, L, N)
        gates += first * H
        rows += first
    head_value = 0.0
    if head_ptr is not None:
        head_value = tl.load(head_ptr + head, mask=mask_h, other=0.0).to(tl.float64)
    g = tl.zeros((BLOCK_H, 1), dtype=tl.float64)
    if not ONCE:
        for t0 in range(start, end, BLOCK_T):
            offs_t = t0 + tl.arange(0, BLOCK_T)[None, :]
            mask = mask_h & (offs_t < end)
            a = LOG2E * _load_decay(
                decay_ptr, gates + offs_t.to(tl.int64) * H, mask, head_value, inv_tau, resets, offs_t, GATE, DTYPE
            )
            g += tl.sum(a, axis=1, keep_dims=True)

    carry = tl.zeros((BLOCK_H, 1), dtype=tl.float64)
    best = tl.zeros((BLOCK_H, 1), dtype=tl.float64) + NEG
    for t0 in range(start, end, BLOCK_T):
        offs_t = t0 + tl.arange(0, BLOCK_T)[None, :]
        mask = mask_h & (offs_t < end)
        offs_gate = gates + offs_t.to(tl.int64) * H
        a = LOG2E * _load_decay(decay_ptr, offs_gate, mask, head_value, inv_tau, resets, offs_t, GATE, DTYPE)
        b = tl.cumsum(a, axis=1) + carry
        carry += tl.sum(a, axis=1, keep_dims=True)
        if ONCE:
            g = carry
        tl.store(b_ptr + rows + offs_t, b.to(b_ptr.dtype.element_ty), mask=mask)
        w = g - b
        if u_ptr is not None:
            if GATE == "ssd":
                x = tl.load(decay_ptr + offs_gate, mask=mask, other=1.0)
            else:
                x = tl.load(input_ptr + offs_gate, mask=mask, other=0.0)
            u = log_input(x.to(DTYPE), GATE)
            u = tl.where(mask, tl.maximum(u.to(tl.float64) * LOG2E, NEG), NEG)
            tl.store(u_ptr + rows + offs_t, u.to(u_ptr.dtype.element_ty), mask=mask)
            w += u
            if GATE == "exp":
                relative = tl.maximum(tl.associative_scan(u - b, 1, _max), best)
                best = tl.maximum(best, tl.max(u - b, axis=1, keep_dims=True))
                tl.store(m_ptr + rows + offs_t, (b + relative).to(m_ptr.dtype.element_ty), mask=mask)
        tl.store(w_ptr + rows + offs_t, w.to(w_ptr.dtype.element_ty), mask=mask)
    tl.store(g_ptr + at_stretch, g.to(g_ptr.dtype.element_ty), mask=mask_h)
    if GATE == "exp":
        tl.store(g_max_ptr + at_stretch, (g + best).to(g_max_ptr.dtype.element_ty), mask=mask_h)


@remember_launches
@triton.jit(do_not_specialize=["N"])
def stabiliser_scan_kernel(g_ptr, g_max_ptr, m_initial_ptr, edge_ptr, m_last_ptr, documents, N, BLOCK_N: tl.constexpr):
    """Scan m_k = max(g_k + m_{k-1}, max_s w_{k,s}) over the stretches k (paper, appendix B.2; base 2).

    Grid: (B * H,).
    Reads g and the stretches' maxima of w [B, H, N] and the initial m [B, H] (base e); writes m before each stretch and
    after the last, [B, H, N + 1], and the last m for the caller, in base e and float32 [B, H]. The last edge is this
    rounded value, converted back to base 2. At its lower bound m is minus infinity for the caller.
    ``documents``: cu_seqlens, T, L and H; N is then T // L + B, g is [H, N] and edges are [H, N + B].
    """
    pid_bh = tl.program_id(0).to(tl.int64)
    if documents is not None:
        cu_seqlens, T, L, H = documents
        number = pid_bh // H
        first, length = document_of(cu_seqlens, number, T)
        at_stretch = pid_bh % H * N + first // L + number
        at_edge = at_stretch + pid_bh % H * (N - T // L) + number
        N = tl.cdiv(length, L)
        g_ptr += at_stretch - pid_bh * N
        g_max_ptr += at_stretch - pid_bh * N
        edge_ptr += at_edge - pid_bh * (N + 1)
    dtype = edge_ptr.dtype.element_ty
    carry = tl.full((), MIN_STABILISER, dtype=dtype)
    if m_initial_ptr is not None:
        carry = tl.maximum(tl.load(m_initial_ptr + pid_bh).to(tl.float64) * LOG2E, MIN_STABILISER).to(dtype)
    edge = edge_ptr + pid_bh * (N + 1)
    tl.store(edge, carry)
    for n0 in range(0, N, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        g = tl.load(g_ptr + pid_bh * N + offs_n, mask=mask_n, other=0.0)
        g_max = tl.load(g_max_ptr + pid_bh * N + offs_n, mask=mask_n, other=NEG)
        shift, best = tl.associative_scan((g, g_max), 0, _max_plus)
        m = tl.maximum(tl.maximum(carry + shift, best), MIN_STABILISER)
        tl.store(edge + 1 + offs_n, m, mask=offs_n < N - 1)
        last = tl.minimum(N - n0, BLOCK_N) - 1
        carry = tl.max(tl.where(tl.arange(0, BLOCK_N) == last, m, NEG), axis=0)
    m_last = (carry.to(tl.float64) * LN2).to(tl.float32)
    tl.store(m_last_ptr + pid_bh, tl.where(carry > MIN_STABILISER, m_last, -float("inf")))
    tl.store(edge + N, (m_last.to(tl.float64) * LOG2E).to(dtype))


@remember_launches
@triton.jit(do_not_specialize=["T", "L", "N"])
def stabiliser_finish_kernel(b_ptr, edge_ptr, m_ptr, cu_seqlens, T, L, N, BLOCK_T: tl.constexpr):
    """Add what comes before the stretch to its own stabiliser, in place: m_t = max(b_t + m_{k-1}, m_t, least m).

    Grid: (ceil(T / BLOCK_T), B * H) flattened; of documents (N, H), and BLOCK_T is at least L.
    Reads b [B, H, T] and m at the stretches' edges [B, H, N + 1]; reads and writes m [B, H, T].
    """
    pid = tl.program_id(0)
    if cu_seqlens is not None:
        pid_bh = (pid // N).to(tl.int64)
        number, first, _, start, end = stretch_of(cu_seqlens, pid % N, T, L, N)
        offs_t = start + tl.arange(0, BLOCK_T)
        mask_t = offs_t < end
        rows = pid_bh * T + first + offs_t
        edge = edge_ptr + pid_bh * (N + N - T // L) + pid % N + number + offs_t * 0
    else:
        blocks = tl.cdiv(T, BLOCK_T)
        pid_bh = (pid // blocks).to(tl.int64)
        offs_t = (pid % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
        mask_t = offs_t < T
        rows = pid_bh * T + offs_t
        edge = edge_ptr + pid_bh * (N + 1) + offs_t // L
    m_in = tl.load(edge, mask=mask_t, other=NEG)
    b = tl.load(b_ptr + rows, mask=mask_t, other=0.0)
    m = tl.load(m_ptr + rows, mask=mask_t, other=NEG)
    m = tl.maximum(tl.maximum((b + m_in).to(tl.float32), m), MIN_STABILISER)
    tl.store(m_ptr + rows, m, mask=mask_t)


@triton.jit
def _row_sums(q_dq_ptr, k_dk_ptr, offs, mask, plane, NUM_SUMS: tl.constexpr):
    """Return p = sum_k q dq and c = sum_k k dk: NUM_SUMS float32 parts of each, added in float64."""
    p = tl.zeros(offs.shape, dtype=tl.float64)
    c = tl.zeros(offs.shape, dtype=tl.float64)
    for n in tl.static_range(NUM_SUMS):
        p += tl.load(q_dq_ptr + n * plane + offs, mask=mask, other=0.0).to(tl.float64)
        c += tl.load(k_dk_ptr + n * plane + offs, mask=mask, other=0.0).to(tl.float64)
    return p, c


@remember_launches
@triton.jit(do_not_specialize=["T", "L", "N", "inv_tau", "BH"])
def gates_backward_kernel(
    q_dq_ptr,
    k_dk_ptr,
    anchor_ptr,
    decay_ptr,
    input_ptr,
    head_ptr,
    d_decay_ptr,
    d_input_ptr,
    d_head_ptr,
    cu_seqlens,
    resets,
    inv_tau,
    T,
    L,
    N,
    BH,
    H: tl.constexpr,
    GATE: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    NUM_ANCHORS: tl.constexpr,
    END_IS_KNOWN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Turn the row sums of dq and dk into gate gradients, adding in float64.

    With p = sum_k q dq, c = sum_k k dk and da_t = <exp(a_t) C_{t-1}, dC_t>, the recurrence of C gives <C_t, dC_t> =
    da_t + c_t, and that of dC gives <C_t, dC_t> = da_{t+1} + p_t. A stretch of L positions starts at an anchor, where
    <C, dC> is known, so

        du_t = c_t        da_t = <C, dC>_start - sum_{start <= j < t} (p_j - c_j)

    which is appendix B.3 of the TFLA paper with its sums collected. Anchors keep rounding errors from accumulating over
    T. At the end of a stretch the sum differs from the next anchor by the rounding errors in the stretch, ``drift``.
    (END_IS_KNOWN: the last state gets no gradient, so at the end of T the sum should be zero.) The drift is distributed
    over the positions in proportion to p^2 + c^2, which estimates the variance of each position's error.

    Grid: (ceil(H / BLOCK_H) * N stretches * B,). ONCE: a stretch has no more than BLOCK_T positions.
    Reads the row sums [NUM_SUMS, B, H, T], the anchors [NUM_ANCHORS, B, H, N] and the gates [B, T, H]; writes the
    gradients of the gates [B, T, H] and, for slope and ssd, a stretch's part of the heads' constants' [B, N, H].
    Stretches are those of the documents if there is a cu_seqlens, and ``resets`` begin one, as in gates_forward_kernel.
    """
    blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    pid_n = pid // blocks % N
    batch = (pid // (blocks * N)).to(tl.int64)
    head = pid % blocks * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    mask_h = head < H
    gates = batch * T * H + head
    start = pid_n * L
    end = tl.minimum(start + L, T)
    rows = (batch * H + head) * T
    at_stretch = (batch * H + head) * N + pid_n
    if cu_seqlens is not None:
        _, first, length, start, end = stretch_of(cu_seqlens, pid_n, T, L, N)
        gates += first * H
        rows += first
    plane = BH.to(tl.int64) * T
    head_value = 0.0
    if GATE == "ssd":
        head_value = tl.load(head_ptr + head, mask=mask_h, other=0.0).to(tl.float64)

    carry = tl.zeros((BLOCK_H, 1), dtype=tl.float64)
    drift = tl.zeros((BLOCK_H, 1), dtype=tl.float64)
    weight = tl.zeros((BLOCK_H, 1), dtype=tl.float64)
    for n in tl.static_range(NUM_ANCHORS):
        anchor = anchor_ptr + n * BH.to(tl.int64) * N + at_stretch
        carry += tl.load(anchor, mask=mask_h, other=0.0).to(tl.float64)
        if cu_seqlens is None:
            mask_next = mask_h & (tl.full((1, 1), pid_n + 1, tl.int32) < N)
        else:
            mask_next = mask_h & (tl.full((1, 1), start + L, tl.int32) < length)
        drift -= tl.load(anchor + 1, mask=mask_next, other=0.0).to(tl.float64)
    offs_t = start + tl.arange(0, BLOCK_T)[None, :]
    mask = mask_h & (offs_t < end)
    if ONCE:
        p, c = _row_sums(q_dq_ptr, k_dk_ptr, rows + offs_t, mask, plane, NUM_SUMS)
    if ((pid_n + 1 < N) if cu_seqlens is None else (start + L < length)) | END_IS_KNOWN:
        drift += carry
        for t0 in range(start, end, BLOCK_T):
            if not ONCE:
                offs_t = t0 + tl.arange(0, BLOCK_T)[None, :]
                mask = mask_h & (offs_t < end)
                p, c = _row_sums(q_dq_ptr, k_dk_ptr, rows + offs_t, mask, plane, NUM_SUMS)
            drift -= tl.sum(p - c, axis=1, keep_dims=True)
            weight += tl.sum(p * p + c * c, axis=1, keep_dims=True)
        drift /= tl.maximum(weight, 1e-300)
    else:
        drift *= 0.0
    d_head = tl.zeros((BLOCK_H, 1), dtype=tl.float64)
    for t0 in range(start, end, BLOCK_T):
        if not ONCE:
            offs_t = t0 + tl.arange(0, BLOCK_T)[None, :]
            mask = mask_h & (offs_t < end)
            p, c = _row_sums(q_dq_ptr, k_dk_ptr, rows + offs_t, mask, plane, NUM_SUMS)
        step = p - c + (p * p + c * c) * drift
        da = carry - tl.cumsum(step, axis=1) + step
        carry -= tl.sum(step, axis=1, keep_dims=True)
        offs_gate = gates + offs_t.to(tl.int64) * H
        if resets is not None:
            da = tl.where(is_first(resets, offs_t), 0.0, da)
        if GATE == "slope":
            d_head -= tl.sum(tl.where(mask, da, 0.0), axis=1, keep_dims=True)
        else:
            x = tl.load(decay_ptr + offs_gate, mask=mask, other=1.0).to(tl.float32)
            # No state survives a decay this small (at the start of a document), so da would be rounding errors alone.
            # The bound for mLSTMexp is lower, since its input gates may outweigh a decay by exp(2 * 60).
            if GATE == "exp":
                da = tl.where(x < -200.0, 0.0, da)
            elif GATE == "ssd":
                da = tl.where(x * head_value < -40.0, 0.0, da)
            elif GATE == "tau":
                da = tl.where(x * inv_tau < -40.0, 0.0, da)
            else:
                tl.static_assert(GATE == "sig" or GATE == "log", UNKNOWN_GATE)
                da = tl.where(x < -40.0, 0.0, da)
            if GATE == "log":
                dx = da
            elif GATE == "ssd":
                # The input's weight is dt itself. Where dt is zero, c is zero too, and c / dt is undefined.
                dx = da * head_value + tl.where(x > 0.0, c / x, 0.0)
                d_head += tl.sum(tl.where(mask, da * x, 0.0), axis=1, keep_dims=True)
            else:
                dx = da.to(tl.float32) / (1.0 + tl.exp(x))
                if GATE == "tau":
                    dx *= inv_tau
            tl.store(d_decay_ptr + offs_gate, dx.to(d_decay_ptr.dtype.element_ty), mask=mask)
            if GATE == "exp":
                tl.store(d_input_ptr + offs_gate, c.to(d_input_ptr.dtype.element_ty), mask=mask)
            elif GATE == "sig":
                x = tl.load(input_ptr + offs_gate, mask=mask, other=0.0).to(tl.float32)
                du = c.to(tl.float32) / (1.0 + tl.exp(x))
                tl.store(d_input_ptr + offs_gate, du.to(d_input_ptr.dtype.element_ty), mask=mask)
    if d_head_ptr is not None:
        tl.store(d_head_ptr + (batch * N + pid_n) * H + head, d_head.to(tl.float32), mask=mask_h)


@remember_launches
@triton.jit(do_not_specialize=["rows", "M"])
def sum_kernel(x_ptr, out_ptr, rows, M, INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sum over the middle one of three axes, in float32.

    Grid: (ceil(rows / ROWS),). COLS: INNER or the next power of two.
    Reads x [rows, M, INNER]; writes [rows, INNER].
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    # The mask of a row is that of all 16 bytes which a thread loads at once.
    mask = (row < rows)[:, None] & (col < INNER)[None, :]
    row = row.to(tl.int64)
    at = x_ptr + (row * M * INNER)[:, None] + col[None, :]
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for step in tl.range(0, M, loop_unroll_factor=8):
        total += tl.load(at + step * INNER, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + (row * INNER)[:, None] + col[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)
