"""Derived counts of the baselines' operations: softmax attention, gated linear attention, selective scan. Per head.

They follow the TFLA paper's method (a multiply-accumulate is 2 FLOPs, recomputation apart), so a baseline's FLOP/s and
intensity can stand beside the linear RNNs'.
"""

from __future__ import annotations

from .model import Formula, Passed, Problem, one_pass, value_of

ATTENTION = {
    # As FlashAttention computes it (Dao et al. 2022, algorithm 1): scale, running maximum, subtraction, exponential and
    # row sum; masking the tiles on the diagonal is not counted. Matrices are never stored. Key and value tiles that are
    # read again for further query tiles are taken to hit the L2. One fp32 log-sum-exp a query is kept.
    "forward": Formula(
        work={
            "scores": ("2*S*K", ""),
            "softmax": ("", "S*(3 + max + exp) + L*(1 + log)"),
            "outputs": ("2*S*V", "L*V"),
        },
        bytes={"load": "L*(2*K + V)*w", "store": "L*V*w + 4*L"},
    ),
    # Algorithm 4, scores made again. With these the matrix work is 2.5 times the forward pass where K = V, the figure
    # in common use; without, as here, 2 times.
    "backward": Formula(
        work={
            "delta": ("", "2*L*V"),
            "value gradient": ("2*S*V", ""),
            "score gradient": ("2*S*V", "2*S"),
            "query gradient": ("2*S*K", "L*K"),
            "key gradient": ("2*S*K", "L*K"),
        },
        bytes={"load": "L*(2*K + 3*V)*w + 8*L", "store": "L*(2*K + V)*w + 4*L"},
        recomputed={"scores": ("2*S*K", "S*(2 + exp)")},
    ),
    # Over a cache of L keys and values, read once.
    "step": Formula(
        work={
            "scores": ("", "2*L*K"),
            "softmax": ("", "L*(3 + max + exp)"),
            "outputs": ("", "2*L*V + V"),
        },
        bytes={"load": "(L*(K + V) + K)*w", "store": "V*w"},
    ),
}
ATTENTION_COMPULSORY = {"forward": "L*(2*K + 2*V)*w", "backward": "L*(4*K + 4*V)*w"}
"""q, k, v and o; backward: q, k, v, o (needed for delta), do, dq, dk, dv."""

_GLA_AGAIN = {"recurrent load": "L*(K + V)*w + L*K*g", "recurrent store": "K*V*s"}

GLA_CHUNK = {
    # Log decay per key channel (Yang et al. 2024, section 4): cumulative sums, at an addition an element, and their
    # exponentials for q, k and the state. States are stored once a chunk and loaded once.
    "forward": Formula(
        work={
            "gates": ("", "L*K*(2 + 3*exp) + K*exp"),
            "gated queries and keys": ("", "4*L*K"),
            "state": ("2*L*K*V", "2*K*V"),
            "intra-chunk outputs": ("2*S*(K + V)", "S*mask"),
            "inter-chunk outputs": ("2*L*K*V", ""),
            "combination": ("", "L*V"),
        },
        bytes={
            **_GLA_AGAIN,
            "parallel load": "L*(2*K + V)*w + L*K*g + K*V*s",
            "parallel store": "L*V*w",
        },
    ),
    # The products of the scalar-decay backward, gates per channel: dg is the reverse cumulative sum of q dq - k dk,
    # plus what reaches the chunk's end, through exp(b_L) <C, dC> and through k's share in the state.
    "backward": Formula(
        work={
            "state gradient": ("2*L*K*V", "2*K*V"),
            "value gradient": ("2*S*V + 2*L*K*V", "L*V"),
            "score gradient": ("2*S*V", "S*mask"),
            "query gradient": ("2*S*K + 2*L*K*V", "3*L*K"),
            "key gradient": ("2*S*K + 2*L*K*V", "3*L*K"),
            "gate gradients": ("", "7*L*K + 2*K*V + 2*K"),
        },
        bytes={
            **_GLA_AGAIN,
            "parallel load": "2*L*(K + V)*w + L*K*g + 2*K*V*s",
            "parallel store": "L*(2*K + V)*w + L*K*g",
        },
        recomputed={
            "gates": ("", "L*K*(6 + 3*exp)"),
            "state": ("2*L*K*V", "2*K*V"),
            "scores": ("2*S*K", "S*mask"),
        },
        reread=_GLA_AGAIN,
    ),
}
GLA_COMPULSORY = {"forward": "L*((2*K + 2*V)*w + K*g)", "backward": "L*((4*K + 3*V)*w + 2*K*g)"}
"""q, k, v, g and o; backward: q, k, v, g, do, dq, dk, dv, dg."""

_DISCRETISATION = ("", "L*V*K*(2 + exp) + L*V")

SELECTIVE_SCAN = {
    # Mamba's, V being all channels and K the state size (Gu and Dao 2023, algorithm 2), fused. Step sizes come
    # positive: their softplus belongs to the layer. Per token and channel dt u; per state cell exp(dt A) and the share
    # of the input. u, dt read, y written per channel; B, C read once for all channels; A, fp32, once a sequence.
    "forward": Formula(
        work={"discretisation": _DISCRETISATION, "recurrence": ("", "2*L*V*K"), "outputs": ("", "2*L*V*K")},
        bytes={"load": "L*(2*V + 2*K)*w + 4*V*K", "store": "L*V*w"},
    ),
    # Per state cell: the recurrence of dx, exp(dt_{t+1} A) dx_{t+1} + C dy: 3; dC, dB, d(dt u) 2 each; d(dt A) = dx
    # x_{t-1} exp(dt A): 2, and from it dA and d dt 2 each. Per token and channel: du 1, the share of d dt in d(dt u) 2.
    "backward": Formula(
        work={
            "recurrence gradient": ("", "3*L*V*K"),
            "input and output map gradients": ("", "6*L*V*K"),
            "decay gradients": ("", "6*L*V*K"),
            "token gradients": ("", "3*L*V"),
        },
        bytes={"load": "L*(3*V + 2*K)*w + 4*V*K", "store": "L*(2*V + 2*K)*w + 4*V*K"},
        recomputed={"discretisation": _DISCRETISATION, "recurrence": ("", "2*L*V*K")},
    ),
}


def attention_passed(problem: Problem, direction: str) -> Passed:
    """Return one pass of a head of softmax attention."""
    names = problem.head.names
    tally = ATTENTION[direction].of(names)
    return tally, tally.bytes if direction == "step" else value_of(ATTENTION_COMPULSORY[direction], names)


def gla_passed(problem: Problem, direction: str) -> Passed:
    """Return one pass of a head of gated linear attention."""
    tally = problem.chunks(lambda chunk: GLA_CHUNK[direction].of(chunk.names))
    least = value_of(GLA_COMPULSORY[direction], problem.head.names)
    return (one_pass(tally, least) if problem.formulation == "fused" else tally), least


def selective_scan_passed(problem: Problem, direction: str) -> Passed:
    """Return one pass of a whole problem of the selective scan."""
    tally = SELECTIVE_SCAN[direction].of(problem.head.names) * problem.batch
    return tally, tally.bytes
