"""Derived counts of Lightning Attention-1 and -2, o_t = q_t sum_{s<=t} lambda^(t-s) k_s^T v_s. Per head.

Source: Qin et al., Lightning Attention-2 (2024). It prints algorithms and complexities, no totals. L is the block
length (its B), of lightning1 the sequence length.

- lightning2: its algorithms 1 and 2. Blocks in order, the state KV on the chip, the decays of a block made once.
- lightning1: what it says of its predecessor: quadratic, tiled as FlashAttention, the tiles' decays made on the chip.

The general forms of :mod:`.scalar_decay` count this operation as well, as any engine computes it.
"""

from __future__ import annotations

import dataclasses

from .model import Formula, Problem, Tally

# M_ij = exp(-s (i - j)) masked; Lambda = exp(-s i); lambda^L Lambda^-1 = exp(-s (L - i)); lambda^L. (The source writes
# Lambda with two ranges of exponents; this is the one that makes KV the state.)
DECAYS = Formula(work={"decays": ("", "L*L*(2 + exp + mask) + L*(3 + 2*exp) + 1 + exp")}, bytes={})
"""Of lightning2, once per head and pass."""

_STATE = ("2*L*K*V", "2*K*V + L*K")
_ENDS = "L*(K + V)"

BLOCK = {
    "forward": Formula(
        work={
            # [(Q K^T) * M] V; (Lambda Q) KV; their sum; KV = lambda^L KV + (lambda^L Lambda^-1 K)^T V
            "intra-chunk outputs": ("2*S*(K + V)", "S"),
            "inter-chunk outputs": ("2*L*K*V", "L*K"),
            "combination": ("", "L*V"),
            "state": _STATE,
        },
        bytes={"load": "L*(2*R + V)*w", "store": "L*V*w"},
    ),
    # A loop forward for dQ, one backward for dK and dV; the first makes KV again, the second scores and their gradient.
    # (Both loops load O in the source, and neither uses it.)
    "backward": Formula(
        work={
            # (dO V^T) * M; its product with K, (Lambda dO) KV^T, their sum; with Q, (lambda^L Lambda^-1 V) dKV^T, their
            # sum; [(Q K^T) * M]^T dO, (lambda^L Lambda^-1 K) dKV, their sum; dKV = lambda^L dKV + (Lambda Q)^T dO,
            # where the source updates KV: a slip
            "score gradient": ("2*S*V", "S"),
            "query gradient": ("2*S*K + 2*L*K*V", _ENDS),
            "key gradient": ("2*S*K + 2*L*K*V", _ENDS),
            "value gradient": ("2*S*V + 2*L*K*V", _ENDS),
            "state gradient": _STATE,
        },
        bytes={
            "first loop load": "L*(R + 2*V)*w",
            "first loop store": "L*R*w",
            "second loop load": "2*L*(R + V)*w",
            "second loop store": "L*(R + V)*w",
        },
        recomputed={"state": _STATE, "scores": ("2*S*K", "S"), "score gradient": ("2*S*V", "S")},
    ),
}
"""One block of lightning2."""

QUADRATIC = {
    # [(Q K^T) * M] V, tile by tile; tiles read again are taken to hit the L2.
    "forward": Formula(
        work={"scores": ("2*S*K", "S"), "decays": ("", "S*(2 + exp + mask)"), "outputs": ("2*S*V", "")},
        bytes={"load": "L*(2*R + V)*w", "store": "L*V*w"},
    ),
    # dV = [(Q K^T) * M]^T dO, dS = (dO V^T) * M, dQ = dS K, dK = dS^T Q; scores and decays are made again.
    "backward": Formula(
        work={
            "value gradient": ("2*S*V", ""),
            "score gradient": ("2*S*V", "S"),
            "query gradient": ("2*S*K", ""),
            "key gradient": ("2*S*K", ""),
        },
        bytes={"load": "2*L*(R + V)*w", "store": "L*(2*R + V)*w"},
        recomputed={"scores": ("2*S*K", "S"), "decays": ("", "S*(2 + exp + mask)")},
    ),
}
"""A sequence of lightning1."""


def passed(problem: Problem, direction: str) -> Tally:
    """Return one pass of a head as lightning1 or lightning2 computes it."""
    if problem.formulation == "lightning1":
        return QUADRATIC[direction].of(problem.head.names)
    one_block = dataclasses.replace(problem.head, length=min(problem.chunk_size, problem.seq_len))
    return problem.chunks(lambda block: BLOCK[direction].of(block.names)) + DECAYS.of(one_block.names)
