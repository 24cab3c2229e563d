"""Derived counts of Lightning Attention-1 and -2, o_t = q_t sum_{s<=t} lambda^(t-s) k_s^T v_s. Per head.

Source: Qin et al., Lightning Attention-2 (2024). It prints algorithms and complexities, no totals. D = d_qk d_v, L is
the block length (its B), T the sequence length, F_causal the share of a causal square that is computed.

- lightning2: its algorithms 1 and 2. Blocks in order, the state KV on the chip, the decays of a block made once.
- lightning1: what it says of its predecessor: quadratic, tiled as FlashAttention, the tiles' decays made on the chip.

The general forms of :mod:`.scalar_decay` count this operation as well, as any engine computes it.
"""

from __future__ import annotations

import dataclasses

from . import scalar_decay
from .model import Problem, Tally, Work


def decays(problem: Problem) -> Tally:
    """FLOPs of lightning2's decays, once per head and pass, of a problem of L tokens.

    M_ij = exp(-s (i - j)) masked: L^2 (2 + F_exp + F_mask); Lambda = exp(-s i): L (1 + F_exp); lambda^L Lambda^-1 =
    exp(-s (L - i)): L (2 + F_exp); lambda^L: 1 + F_exp. (The source writes Lambda with two ranges of exponents; this
    is the one that makes KV the state.)
    """
    length, f = problem.seq_len, problem.f
    flops = length * length * (2 + f.exp + f.mask) + length * (3 + 2 * f.exp) + 1 + f.exp
    return Tally(work={"decays": Work(vector=flops)})


def block_forward(problem: Problem) -> Tally:
    """FLOPs and bytes of one block of lightning2's algorithm 1.

    Intra-chunk outputs: [(Q K^T) * M] V; inter-chunk outputs: (Lambda Q) KV; state: KV = lambda^L KV + (lambda^L
    Lambda^-1 K)^T V. Q, K, V loaded, O stored.
    """
    made = scalar_decay.chunk_forward(problem).work
    work = {name: made[name] for name in ("intra-chunk outputs", "inter-chunk outputs", "combination", "state")}
    length, d_v, width = problem.seq_len, problem.head_dim_v, problem.widths.qkv
    traffic = {"load": length * (2 * problem.d_qk_read + d_v) * width, "store": length * d_v * width}
    return Tally(work=work, traffic=traffic)


def block_backward(problem: Problem) -> Tally:
    """FLOPs and bytes of one block of lightning2's algorithm 2: a loop forward for dQ, one backward for dK and dV.

    - score gradient: (dO V^T) * M
    - query gradient: its product with K, (Lambda dO) KV^T, their sum
    - key gradient: the product with Q, (lambda^L Lambda^-1 V) dKV^T, their sum
    - value gradient: [(Q K^T) * M]^T dO, (lambda^L Lambda^-1 K) dKV, their sum
    - state gradient: dKV = lambda^L dKV + (Lambda Q)^T dO (the source updates KV there: a slip)

    Recomputed and not counted: the first loop's KV, the second loop's scores and its score gradient.
    Bytes: K, V, dO loaded and dQ stored; Q, K, V, dO loaded and dK, dV stored. (Both loops load O in the source, and
    neither uses it.)
    """
    length, d_qk, d_v, causal = problem.seq_len, problem.head_dim_qk, problem.head_dim_v, problem.causal
    square, cells = causal * length * length, d_qk * d_v
    qk, width = problem.d_qk_read, problem.widths.qkv
    ends = length * (d_qk + d_v)
    state = Work(matrix=2 * length * cells, vector=2 * cells + length * d_qk)
    score_gradient = Work(matrix=2 * square * d_v, vector=square)
    work = {
        "score gradient": score_gradient,
        "query gradient": Work(matrix=2 * square * d_qk + 2 * length * cells, vector=ends),
        "key gradient": Work(matrix=2 * square * d_qk + 2 * length * cells, vector=ends),
        "value gradient": Work(matrix=2 * square * d_v + 2 * length * cells, vector=ends),
        "state gradient": state,
    }
    traffic = {
        "first loop load": length * (qk + 2 * d_v) * width,
        "first loop store": length * qk * width,
        "second loop load": length * 2 * (qk + d_v) * width,
        "second loop store": length * (qk + d_v) * width,
    }
    recomputed = {
        "state": state,
        "scores": Work(matrix=2 * square * d_qk, vector=square),
        "score gradient": score_gradient,
    }
    return Tally(work=work, traffic=traffic, recomputed_work=recomputed)


def quadratic(problem: Problem, *, backward: bool) -> Tally:
    """FLOPs and bytes of lightning1 over a sequence: the parallel form, with M = exp(-s (i - j)) masked tile by tile.

    Tiles that are read again are taken to hit the L2. Scores and decays are recomputed going backward.
    """
    f = problem.f
    tally = (scalar_decay.parallel_backward if backward else scalar_decay.parallel_forward)(problem)
    tiles = Work(vector=problem.causal * problem.seq_len**2 * (2 + f.exp + f.mask))
    if backward:
        return dataclasses.replace(tally, recomputed_work={"scores": tally.recomputed_work["scores"], "decays": tiles})
    return dataclasses.replace(
        tally, work={"scores": tally.work["scores"], "decays": tiles, "outputs": tally.work["outputs"]}
    )


def passed(problem: Problem, direction: str) -> Tally:
    """Return one pass of a head as lightning1 or lightning2 computes it."""
    backward = direction == "backward"
    if problem.formulation == "lightning1":
        return quadratic(problem, backward=backward)
    one_block = dataclasses.replace(problem, seq_len=min(problem.chunk_size, problem.seq_len))
    blocks = problem.over_chunks(block_backward if backward else block_forward, problem.chunk_size)
    return blocks + decays(one_block)
