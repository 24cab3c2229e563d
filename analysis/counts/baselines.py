"""Derived counts of the baselines' operations: softmax attention, gated linear attention, selective scan. Per head.

They follow the TFLA paper's method (a multiply-accumulate is 2 FLOPs, recomputation apart), so a baseline's FLOP/s and
intensity can stand beside the linear RNNs'.
"""

from __future__ import annotations

from .model import Problem, Tally, Work, chunk_traffic, chunk_traffic_backward, decoding

STATISTIC_BYTES = 4
"""FlashAttention keeps one fp32 log-sum-exp per query."""


def attention_forward(problem: Problem) -> Tally:
    """Softmax attention over ``length`` tokens as FlashAttention computes it (Dao et al. 2022, algorithm 1).

    The softmax scales, takes a running maximum, subtracts, exponentiates and sums rows; the outputs are divided by the
    row sum. Masking the tiles on the diagonal is not counted. Matrices are never stored: q, k, v read, o and the
    log-sum-exp written. Key and value tiles that are read again for further query tiles are taken to hit the L2.
    """
    length, d_qk, d_v, causal, f, widths = problem.per_head
    square = causal * length * length
    work = {
        "scores": Work(matrix=2 * square * d_qk),
        "softmax": Work(vector=square * (3 + f.max + f.exp) + length * (1 + f.log)),
        "outputs": Work(matrix=2 * square * d_v, vector=length * d_v),
    }
    traffic = {
        "load": length * (2 * d_qk + d_v) * widths.qkv,
        "store": length * d_v * widths.qkv + length * STATISTIC_BYTES,
    }
    return Tally(work=work, traffic=traffic)


def attention_backward(problem: Problem) -> Tally:
    """Backward of softmax attention (Dao et al. 2022, algorithm 4), scores recomputed and not counted.

    delta = row sums of do o; dV = P^T dO, dP = dO V^T; dS = P (dP - delta); dQ = dS K and dK = dS^T Q, scaled. With the
    recomputed scores the matrix work is 2.5 times the forward pass where d_qk = d_v, the figure in common use.
    """
    length, d_qk, d_v, causal, f, widths = problem.per_head
    square = causal * length * length
    work = {
        "delta": Work(vector=2 * length * d_v),
        "value gradient": Work(matrix=2 * square * d_v),
        "score gradient": Work(matrix=2 * square * d_v, vector=2 * square),
        "query gradient": Work(matrix=2 * square * d_qk, vector=length * d_qk),
        "key gradient": Work(matrix=2 * square * d_qk, vector=length * d_qk),
    }
    traffic = {
        "load": length * (2 * d_qk + 3 * d_v) * widths.qkv + 2 * length * STATISTIC_BYTES,
        "store": length * (2 * d_qk + d_v) * widths.qkv + length * STATISTIC_BYTES,
    }
    recomputed = {"scores": Work(matrix=2 * square * d_qk, vector=square * (2 + f.exp))}
    return Tally(work=work, traffic=traffic, recomputed_work=recomputed)


def attention_step(problem: Problem) -> Tally:
    """One decoding step of softmax attention over a cache of ``length`` keys and values, read once.

    The last of them are the step's own, which it reads as its inputs and stores in the cache.
    """
    length, d_qk, d_v, f, widths = problem.seq_len, problem.head_dim_qk, problem.head_dim_v, problem.f, problem.widths
    work = {
        "scores": Work(vector=2 * length * d_qk),
        "softmax": Work(vector=length * (3 + f.max + f.exp)),
        "outputs": Work(vector=2 * length * d_v + d_v),
    }
    traffic = {
        "load": (length * (d_qk + d_v) + d_qk) * widths.qkv,
        "store": d_v * widths.qkv,
        "cache store": (d_qk + d_v) * widths.qkv,
    }
    return Tally(work=work, traffic=traffic)


def gla_chunk_forward(problem: Problem) -> Tally:
    """Gated linear attention, log decay per key channel, one chunk (Yang et al. 2024, section 4).

    Gates are cumulative sums, at an addition an element, and their exponentials for q, k and the state; q is scaled.
    States are stored once a chunk and loaded once.
    """
    length, d_qk, d_v, causal, f, widths = problem.per_head
    square, cells = causal * length * length, d_qk * d_v
    work = {
        "gates": Work(vector=length * d_qk * (2 + 3 * f.exp) + d_qk * f.exp),
        "gated queries and keys": Work(vector=4 * length * d_qk),
        "state": Work(matrix=2 * length * cells, vector=2 * cells),
        "intra-chunk outputs": Work(matrix=2 * square * (d_qk + d_v), vector=square * f.mask),
        "inter-chunk outputs": Work(matrix=2 * length * cells),
        "combination": Work(vector=length * d_v),
    }
    return Tally(work=work, traffic=chunk_traffic(problem, d_qk, length * d_qk * widths.gate))


def gla_chunk_backward(problem: Problem) -> Tally:
    """Backward of one chunk of gated linear attention: the products of the scalar-decay backward, gates per channel.

    dg is the reverse cumulative sum of q dq - k dk (4L d_qk), plus what reaches the chunk's end, through
    exp(b_L) <C, dC> and through k's share in the state (3L d_qk + 2D + 2 d_qk).
    """
    length, d_qk, d_v, causal, f, widths = problem.per_head
    square, cells = causal * length * length, d_qk * d_v
    work = {
        "state gradient": Work(matrix=2 * length * cells, vector=2 * cells),
        "value gradient": Work(matrix=2 * square * d_v + 2 * length * cells, vector=length * d_v),
        "score gradient": Work(matrix=2 * square * d_v, vector=square * f.mask),
        "query gradient": Work(matrix=2 * square * d_qk + 2 * length * cells, vector=3 * length * d_qk),
        "key gradient": Work(matrix=2 * square * d_qk + 2 * length * cells, vector=3 * length * d_qk),
        "gate gradients": Work(vector=7 * length * d_qk + 2 * cells + 2 * d_qk),
    }
    recomputed = {
        "gates": Work(vector=length * d_qk * (6 + 3 * f.exp)),
        "state": Work(matrix=2 * length * cells, vector=2 * cells),
        "scores": Work(matrix=2 * square * d_qk, vector=square * f.mask),
    }
    moved = chunk_traffic_backward(problem, d_qk, length * d_qk * widths.gate)
    return Tally(work, moved[0], recomputed, moved[1])


def gla_step(problem: Problem) -> Tally:
    """One decoding step of gated linear attention, the state loaded and stored: diag(exp(g)) S + k v^T, then S^T q."""
    d_qk, d_v, f, widths = problem.head_dim_qk, problem.head_dim_v, problem.f, problem.widths
    cells = d_qk * d_v
    work = {
        "gates": Work(vector=f.exp * d_qk),
        "state": Work(vector=3 * cells),
        "output": Work(vector=2 * cells + d_qk),
    }
    traffic = {
        "load": (2 * d_qk + d_v) * widths.qkv + d_qk * widths.gate + cells * widths.state,
        "store": d_v * widths.qkv + cells * widths.state,
    }
    return Tally(work=work, traffic=traffic)


def selective_scan_forward(problem: Problem) -> Tally:
    """Mamba's selective scan over ``length`` tokens of all channels (Gu and Dao 2023, algorithm 2), fused.

    Step sizes come positive: their softplus belongs to the layer. No matrix products. Bytes: u, dt read, y written per
    channel; B, C read once for all channels; not A, which all sequences share.
    """
    length, channels, state = problem.seq_len, problem.channels, problem.head_dim_qk
    f, widths = problem.f, problem.widths
    cells = length * channels * state
    work = {
        "discretisation": Work(vector=cells * (2 + f.exp) + length * channels),
        "recurrence": Work(vector=2 * cells),
        "outputs": Work(vector=2 * cells),
    }
    traffic = {
        "load": length * (2 * channels + 2 * state) * widths.qkv,
        "store": length * channels * widths.qkv,
    }
    return Tally(work=work, traffic=traffic)


def selective_scan_backward(problem: Problem) -> Tally:
    """Backward of the selective scan, hidden states recomputed and not counted.

    Per state cell: the recurrence of dx, exp(dt_{t+1} A) dx_{t+1} + C dy; dC, dB and d(dt u), 2 each; d(dt A) = dx
    x_{t-1} exp(dt A), and from it dA and d dt, 2 each. Reads u, dt, B, C, dy; writes du, d dt, dB, dC; not A and dA.
    """
    length, channels, state = problem.seq_len, problem.channels, problem.head_dim_qk
    f, widths = problem.f, problem.widths
    cells = length * channels * state
    work = {
        "recurrence gradient": Work(vector=3 * cells),
        "input and output map gradients": Work(vector=6 * cells),
        "decay gradients": Work(vector=6 * cells),
        "token gradients": Work(vector=3 * length * channels),
    }
    traffic = {
        "load": length * (3 * channels + 2 * state) * widths.qkv,
        "store": length * (2 * channels + 2 * state) * widths.qkv,
    }
    recomputed = {
        "discretisation": Work(vector=cells * (2 + f.exp) + length * channels),
        "recurrence": Work(vector=2 * cells),
    }
    return Tally(work=work, traffic=traffic, recomputed_work=recomputed)


ATTENTION = {"forward": attention_forward, "backward": attention_backward, "step": attention_step}
"""Pass of a head of softmax attention -> its tally."""


def selective_scan(problem: Problem, direction: str) -> Tally:
    """Return one pass of a whole problem of the selective scan; A is float32, and read once."""
    cells, backward = problem.channels * problem.head_dim_qk, direction == "backward"
    tally = (selective_scan_backward if backward else selective_scan_forward)(problem)
    if direction == "step":
        tally = decoding(tally, cells * problem.widths.state)
    shared = {"A load": 4 * cells, "dA store": 4 * cells} if backward else {"A load": 4 * cells}
    return tally * problem.batch + Tally(traffic=shared)
