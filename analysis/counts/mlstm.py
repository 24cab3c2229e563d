"""mLSTM forward counts as the TFLA paper tabulates them (appendix F, tables 8 to 17), with every factor kept.

T is the sequence length, L the chunk length, d_qk and d_v the head dims, F_x the cost of one x, F_causal the share of
a causal square that is computed. All functions count one head, per chunk or per step (recurrent); the parallel form is
:func:`.scalar_decay.parallel_forward`. Cumulative sums are counted as the paper counts them, L(L + 1)/2.
"""

from __future__ import annotations

from .model import Problem, Tally, Work, chunk_traffic

OPERATIONS = ("mlstm_exp", "mlstm_sig")
PUBLISHED = (("chunkwise", "fw"), ("parallel", "fw"), ("recurrent", "fw"), ("recurrent", "step"))
"""Formulations and modes that the paper prints."""


def chunk(problem: Problem) -> Tally:
    """Forward FLOPs (tables 8 and 14) and bytes (table 9) of one chunk.

    ``published`` reproduces the paper's printed total for mLSTMsig (eq. 118), which carries mLSTMexp's gate row: with
    every F at 1 the operation's own parts are that total + L - 4.
    """
    length, d_qk, d_v, causal, f, widths = problem.per_head
    square, cells, exp = length * length, d_qk * d_v, problem.stabilised
    gates = 2 * length + length * (length + 1) / 2
    if exp or problem.published:
        gates += length * (1 + f.exp + f.log + f.sig) + 3 + f.max + f.exp
    else:
        gates += length * f.exp + f.exp + 2 * length * (f.log + f.sig)
    cumulative = length * (length + 1) / 2 + (1 if exp else 2) * length * (f.log + f.sig)
    gate_matrix = (
        causal * (square * (3 + f.exp + f.max) + length * (1 + f.max)) if exp else causal * square * (2 + f.exp)
    )
    combination = 2 * length * d_v + length * (1 + f.max + f.abs + f.exp) if exp else length * d_v
    work = {
        "inter-chunk gates": Work(vector=gates),
        "state": Work(matrix=2 * length * cells, vector=2 * cells + length * d_qk),
        "intra-chunk forget gates": Work(vector=cumulative),
        "gate matrix": Work(vector=gate_matrix),
        "intra-chunk outputs": Work(matrix=causal * 2 * square * (d_qk + d_v), vector=causal * 3 * square),
        "inter-chunk outputs": Work(matrix=2 * length * cells, vector=(3 if exp else 1) * length * d_qk),
        "combination": Work(vector=combination),
    }
    if exp:
        work["normaliser state"] = Work(vector=2 * d_qk + 2 * length * d_qk)
    return Tally(work=work, traffic=chunk_traffic(problem, d_qk, 2 * length * widths.gate))


def step(problem: Problem) -> Tally:
    """FLOPs (table 12) and bytes (table 13) of one recurrent step, the state loaded and stored as in decoding.

    Nothing runs on matrix units: every product is a rank-one update or a matrix-vector product.
    """
    d_qk, d_v, f, widths = problem.head_dim_qk, problem.head_dim_v, problem.f, problem.widths
    cells, exp = d_qk * d_v, problem.stabilised
    gates = 4 + 2 * f.exp + f.log + f.sig + f.max if exp else 2 * f.sig
    work = {
        "gates": Work(vector=gates),
        "state": Work(vector=4 * cells),
        "output": Work(vector=2 * cells + d_qk),
    }
    if exp:
        work["normaliser"] = Work(vector=6 * d_qk + d_v + 1 + f.abs + f.max)
    traffic = {
        "load": (2 * d_qk + d_v) * widths.qkv + 2 * widths.gate + problem.state_bytes,
        "store": d_v * widths.qkv + problem.state_bytes,
    }
    return Tally(work=work, traffic=traffic)
