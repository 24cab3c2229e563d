"""Derived counts of the delta rule, S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T. Per head.

Counted is the chunkwise WY form (kernels/delta_rule/chunkwise.py has its equations), a chunk of L tokens at a time: of
Yang et al. (2024), section 3.2, Gated Delta Networks (2025), section 3.3, and Kimi Linear (2025), section 3.2, none of
which prints totals. D = d_qk d_v, F_causal is the share of the L x L squares that is computed, G the decays of a token:
0, 1 or d_qk. One decay a head weighs the squares of scores; one a column weighs their rows and columns instead.
"""

from __future__ import annotations

from .model import Problem, Scalar, Tally, Work

OPERATIONS = ("delta_net", "gated_delta_net", "kda")


def gates(problem: Problem) -> Scalar:
    """Return the elements of beta and g of a token."""
    return 1 + _decaying(problem)[0]


def _decaying(problem: Problem) -> tuple[Scalar, int, Scalar]:
    """Return the decays of a token, 1 where there are some, and how many products weigh a square of scores by them;
    there are as many exponentials."""
    return {
        "delta_net": (0, 0, 0),
        "gated_delta_net": (1, 1, (problem.causal or 0) * problem.seq_len**2),
        "kda": (problem.head_dim_qk, 1, 2 * problem.seq_len * problem.head_dim_qk),
    }[problem.op]


def chunk_forward(problem: Problem) -> Tally:
    """Forward FLOPs and bytes of one chunk.

    - decays: b, an addition an element; exponentials of b, b_L - b and b_L, and those that weigh squares
    - key scores: K K^T, weighed and times beta; inverse: T = (I + A)^-1 of the unit triangular matrix by substitution,
      L (L - 1) (L - 2) / 3 FLOPs
    - new values: u = T (beta (V - (exp(b) K) S))
    - state: S = exp(b_L) S + (exp(b_L - b) K)^T u
    - outputs: (Q K^T, weighed) u, and (exp(b) Q) S, q being scaled

    Bytes are those of two kernels: one makes T and walks over the chunks, loading k, v and the gates and storing u and
    the states; one makes the outputs of them and of q, k and g.
    """
    length, d_qk, d_v, causal, f, widths = problem.per_head
    square, cells, (decays, decayed, weighing) = causal * length * length, d_qk * d_v, _decaying(problem)
    tile = 2 * square
    work = {
        "decays": Work(vector=decays * (length * (2 + 2 * f.exp) + f.exp) + weighing * (1 + f.exp)),
        "key scores": Work(matrix=tile * d_qk, vector=square + weighing),
        "inverse": Work(matrix=length * (length - 1) * (length - 2) / 3),
        "new values": Work(matrix=tile * d_v + 2 * length * cells, vector=2 * length * d_v + decayed * length * d_qk),
        "state": Work(matrix=2 * length * cells, vector=cells + decayed * (cells + length * d_qk)),
        "intra-chunk outputs": Work(matrix=tile * (d_qk + d_v), vector=weighing),
        "inter-chunk outputs": Work(matrix=2 * length * cells, vector=length * d_qk * (1 + decayed)),
        "combination": Work(vector=length * d_v),
    }
    state, token, new = cells * widths.state, widths.gate * length, length * d_v * widths.qkv
    qk = length * problem.d_qk_read * widths.qkv
    traffic = {
        "recurrent load": qk + new + token * (1 + decays),
        "recurrent store": state + new,
        "parallel load": 2 * qk + new + token * decays + state,
        "parallel store": new,
    }
    return Tally(work=work, traffic=traffic)


def chunk_backward(problem: Problem) -> Tally:
    """Backward FLOPs and bytes of one chunk, twice the forward pass's products but for the inverse, of which dA needs
    none: with r = beta (V - (exp(b) K) S) and u = T r, dr = T^T du and dA = -dr u^T.

    - score gradient: dO u^T, weighed; new value gradient: du = P^T dO + (exp(b_L - b) K) dS, dr = T^T du
    - key score gradient: dA, weighed and times beta; value gradient: beta dr
    - query gradient: dO S^T and dP K, scaled and added; key gradient: of the state, of (exp(b) K) S and of dP, dA twice
    - state gradient: dS = exp(b_L) dS + (exp(b) Q)^T dO - (exp(b) K)^T (beta dr)
    - gate gradients: row sums of dr r, dA A, q dq and k dk; <S, dS>; a cumulative sum over the chunk

    Recomputed and not counted: decays, both squares of scores, new values and states; the inverse is kept.
    Bytes: of a walk back over the chunks, which loads q, k, dO and the gates and stores dS and dr, and of a kernel that
    loads q, k, v, u, dO, dr, the gates, S and dS and stores the gradients. Again: those of the forward pass's walk.
    """
    length, d_qk, d_v, causal, _, widths = problem.per_head
    square, cells, (decays, decayed, weighing) = causal * length * length, d_qk * d_v, _decaying(problem)
    tile = 2 * square
    forward = chunk_forward(problem)
    work = {
        "score gradient": Work(matrix=tile * d_v, vector=weighing),
        "new value gradient": Work(matrix=2 * tile * d_v + 2 * length * cells, vector=length * d_v),
        "key score gradient": Work(matrix=tile * d_v, vector=square + weighing),
        "value gradient": Work(vector=length * d_v),
        "query gradient": Work(matrix=tile * d_qk + 2 * length * cells, vector=length * d_qk * (2 + decayed)),
        "key gradient": Work(matrix=3 * tile * d_qk + 4 * length * cells, vector=length * d_qk * (4 + 2 * decayed)),
        "state gradient": Work(matrix=4 * length * cells, vector=cells * (2 + decayed)),
        "gate gradients": Work(
            vector=2 * length * d_v + 2 * square + decayed * (4 * length * d_qk + 2 * cells) + decays * length
        ),
    }
    qk, new = length * problem.d_qk_read * widths.qkv, length * d_v * widths.qkv
    token, state = widths.gate * length * gates(problem), cells * widths.state
    traffic = {
        "recurrent load": 2 * qk + new + token,
        "recurrent store": state + new,
        "parallel load": 2 * qk + 4 * new + token + 2 * state,
        "parallel store": 2 * qk + new + token,
    }
    scores = Work(matrix=tile * d_qk, vector=weighing)
    again = ("decays", "key scores", "new values", "state")
    recomputed = {**{name: forward.work[name] for name in again}, "scores": scores}
    return Tally(work, traffic, recomputed, {name: forward.traffic[name] for name in list(forward.traffic)[:2]})


def step(problem: Problem) -> Tally:
    """FLOPs and bytes of one recurrent step, the state loaded and stored as in decoding.

    State: exp(g) S, u = beta (v - S^T k), S + k u^T; output: S^T q, q being scaled.
    """
    d_qk, d_v, f, widths = problem.head_dim_qk, problem.head_dim_v, problem.f, problem.widths
    cells, (decays, decayed, _) = d_qk * d_v, _decaying(problem)
    work = {
        "gates": Work(vector=decays * f.exp),
        "state": Work(vector=(4 + decayed) * cells + 2 * d_v),
        "output": Work(vector=2 * cells + d_qk),
    }
    load = (2 * problem.d_qk_read + d_v) * widths.qkv + gates(problem) * widths.gate + cells * widths.state
    return Tally(work=work, traffic={"load": load, "store": d_v * widths.qkv + cells * widths.state})
