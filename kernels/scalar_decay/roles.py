"""One form, four roles: the output and its three main gradients are the same product of X, Y, Z and a state S.

With a gate matrix W (TFLA paper, appendix C.3),

    out = rows(W_in) (X S) + ((X Y^T) * W) Z

    h    X = q   Y = k   Z = v    S = C_{k-1}      past        (paper, equation 20)
    dq   X = dh  Y = v   Z = k    S = C_{k-1}^T    past
    dk   X = v   Y = dh  Z = q    S = dC_k^T       future
    dv   X = k   Y = q   Z = dh   S = dC_k         future

"past" sums over positions up to the row's own, "future" from it on. chunk_o.py computes it with the tiles of a chunk in
parallel, fused_chunk.py and, on Hopper, whole_state.py with the tiles in order and the state on chip.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Role(NamedTuple):
    """Which of the four products a launch computes.

    Attributes:
        future: whether rows sum over the positions from their own on, else up to it.
        transposed: whether the state is stored as [DZ, DX].
    """

    future: bool
    transposed: bool


H = Role(future=False, transposed=False)
DQ = Role(future=False, transposed=True)
DK = Role(future=True, transposed=True)
DV = Role(future=True, transposed=False)


class Shape(NamedTuple):
    """Sizes that a kernel is compiled for: heads, head dims of X and Z, heads that share one of X (Y) and of Z."""

    heads: int
    dim_x: int
    dim_z: int
    group_x: int
    group_z: int


class GateVectors(NamedTuple):
    """Gate vectors of one call in base 2, as every kernel takes them; see gates.py.

    Attributes:
        b: log decay, cumulative over a stretch (a chunk, or a tile of the fused kernel), [B, H, T].
        u: log input gate [B, H, T]; None where it is zero.
        w: log weight with which a position enters the stretch's last state, [B, H, T].
        g: log decay of a whole stretch, [B, H, NG].
        edge: stabiliser at the edges of the stretches, [B, H, NG + 1]; None without one.
        m: stabiliser [B, H, T], None without one.
        log_denom: log2 of the denominator [B, H, T], None without one.
    """

    b: Tensor
    u: Tensor | None
    w: Tensor
    g: Tensor
    edge: Tensor | None
    m: Tensor | None
    log_denom: Tensor | None


class Denominators(NamedTuple):
    """What is taken and left where mLSTMexp's denominators are made.

    Attributes:
        n_states: n before each chunk of the heads that are cut [heads, N, K]; None where there are none.
        n_initial: n before the first step of the others [B, H, K]; None means zero.
        n_last: n after their last step [B, H, K]; None if nobody asks.
        log_denom: log2 of the denominators [B, H, T]; None where a kernel does not make them.
    """

    n_states: Tensor | None = None
    n_initial: Tensor | None = None
    n_last: Tensor | None = None
    log_denom: Tensor | None = None
