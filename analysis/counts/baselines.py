"""Derived counts of the baselines' operations: softmax attention, gated linear attention, selective scan. Per head.

They follow the TFLA paper's method (a multiply-accumulate is 2 FLOPs, recomputation apart), so a baseline's FLOP/s and
intensity can stand beside the linear RNNs'.
"""

from __future__ import annotations

from .model import Problem, Scalar, Tally, Work, decoding

STATISTIC_BYTES = 4
"""FlashAttention keeps one fp32 log-sum-exp per query."""


def attention_forward(problem: Problem) -> Tally:
    """Softmax attention over ``length`` tokens as FlashAttention computes it (Dao et al. 2022, algorithm 1).

    scores F_causal 2 T^2 d_qk; softmax F_causal T^2 (scale, running maximum F_max, subtraction, F_exp, row sum) and
    T (1 + F_log) for the log-sum-exp; outputs F_causal 2 T^2 d_v, divided by the row sum T d_v. Masking the tiles on
    the diagonal is not counted. Matrices are never stored: q, k, v read, o and the log-sum-exp written. Key and value
    tiles that are read again for further query tiles are taken to hit the L2.
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

    delta = row sums of do o: 2T d_v; dV = P^T dO and dP = dO V^T: F_causal 4 T^2 d_v; dS = P (dP - delta):
    F_causal 2 T^2; dQ = dS K and dK = dS^T Q: F_causal 4 T^2 d_qk, scaled. With the recomputed scores the matrix work
    is 2.5 times the forward pass where d_qk = d_v, the figure in common use; without, as here, 2 times.
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


def attention_compulsory(problem: Problem, *, backward: bool) -> Scalar:
    """Bytes of q, k, v and o once; backward: q, k, v, o, do, dq, dk, dv once (o is needed for delta)."""
    length, d_qk, d_v, widths = problem.seq_len, problem.head_dim_qk, problem.head_dim_v, problem.widths
    return length * widths.qkv * (4 * d_qk + 4 * d_v if backward else 2 * d_qk + 2 * d_v)


def gla_chunk_forward(problem: Problem) -> Tally:
    """Gated linear attention, log decay per key channel, one chunk (Yang et al. 2024, section 4).

    gates: cumulative sums, at an addition an element, and their exponentials for q, k and the state:
    L d_qk (1 + 3 F_exp + 1) and d_qk F_exp; gated q and k: 3L d_qk, scale L d_qk; state 2D + 2LD; scores and values
    F_causal 2 L^2 (d_qk + d_v), mask F_causal L^2; inter-chunk outputs 2LD; combination L d_v. States are stored once a
    chunk and loaded once.
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
    gates = length * d_qk * widths.gate
    traffic = {
        "recurrent load": length * (d_qk + d_v) * widths.qkv + gates,
        "recurrent store": cells * widths.state,
        "parallel load": length * (2 * d_qk + d_v) * widths.qkv + gates + cells * widths.state,
        "parallel store": length * d_v * widths.qkv,
    }
    return Tally(work=work, traffic=traffic)


def gla_chunk_backward(problem: Problem) -> Tally:
    """Backward of one chunk of gated linear attention: the products of the scalar-decay backward, gates per channel.

    dC: 2D + 2LD; dV: F_causal 2 L^2 d_v + 2LD + L d_v; dS: F_causal (2 L^2 d_v + L^2); dQ and dK: F_causal 2 L^2 d_qk
    + 2LD + 3L d_qk each; dg: reverse cumulative sum of q dq - k dk: 4L d_qk, plus what reaches the chunk's end, through
    exp(b_L) <C, dC> and through k's share in the state: 3L d_qk + 2D + 2 d_qk.
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
    gates = length * d_qk * widths.gate
    traffic = {
        "recurrent load": length * (d_qk + d_v) * widths.qkv + gates,
        "recurrent store": cells * widths.state,
        "parallel load": length * 2 * (d_qk + d_v) * widths.qkv + gates + 2 * cells * widths.state,
        "parallel store": length * (2 * d_qk + d_v) * widths.qkv + gates,
    }
    recomputed_work = {
        "gates": Work(vector=length * d_qk * (6 + 3 * f.exp)),
        "state": Work(matrix=2 * length * cells, vector=2 * cells),
        "scores": Work(matrix=2 * square * d_qk, vector=square * f.mask),
    }
    recomputed_traffic = {
        "recurrent load": length * (d_qk + d_v) * widths.qkv + gates,
        "recurrent store": cells * widths.state,
    }
    return Tally(work=work, traffic=traffic, recomputed_work=recomputed_work, recomputed_traffic=recomputed_traffic)


def gla_step(problem: Problem) -> Tally:
    """One decoding step of gated linear attention, the state loaded and stored: diag(exp(g)) S + k v^T, then S^T q.

    Gates F_exp d_qk; state D + 2D; output 2D + d_qk.
    """
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


def gla_compulsory(problem: Problem, *, backward: bool) -> Scalar:
    """Bytes of q, k, v, g and o once; backward: q, k, v, g, do, dq, dk, dv, dg once."""
    length, d_qk, d_v, widths = problem.seq_len, problem.head_dim_qk, problem.head_dim_v, problem.widths
    if backward:
        return length * ((4 * d_qk + 3 * d_v) * widths.qkv + 2 * d_qk * widths.gate)
    return length * ((2 * d_qk + 2 * d_v) * widths.qkv + d_qk * widths.gate)


def selective_scan_forward(problem: Problem) -> Tally:
    """Mamba's selective scan over ``length`` tokens of all channels (Gu and Dao 2023, algorithm 2), fused.

    Step sizes come positive: their softplus belongs to the layer. Per token and channel dt u 1; per state cell
    exp(dt A) 1 + F_exp, the share of the input 1, the recurrence 2, the output 2. No matrix products.
    Bytes: u, dt read, y written per channel; B, C read once for all channels; not A, which all sequences share.
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

    Per state cell: the recurrence of dx, exp(dt_{t+1} A) dx_{t+1} + C dy: 3; dC 2, dB 2, d(dt u) 2; d(dt A) = dx
    x_{t-1} exp(dt A): 2, and from it dA 2 and d dt 2. Per token and channel: du 1, the share of d dt in d(dt u) 2.
    Reads u, dt, B, C, dy; writes du, d dt, dB, dC; not A and dA, which all sequences share.
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


def attention(problem: Problem, direction: str) -> Tally:
    """Return one pass of a head of softmax attention."""
    return {"forward": attention_forward, "backward": attention_backward, "step": attention_step}[direction](problem)


def selective_scan(problem: Problem, direction: str) -> Tally:
    """Return one pass of a whole problem of the selective scan; A is float32, and read once."""
    cells, backward = problem.channels * problem.head_dim_qk, direction == "backward"
    tally = (selective_scan_backward if backward else selective_scan_forward)(problem)
    if direction == "step":
        tally = decoding(tally, cells * problem.widths.state)
    shared = {"A load": 4 * cells, "dA store": 4 * cells} if backward else {"A load": 4 * cells}
    return tally * problem.batch + Tally(traffic=shared)
