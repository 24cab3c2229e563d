"""One form, four roles: h, dq, dk and dv are the same product of three inputs X, Y, Z and a state S.

    out = rows(W_in) (X S) + ((X Y^T) * W) Z                                      (TFLA paper, appendix C.3)

    role         X    Y    Z    S                                   row t sums over
    OUTPUT: h    q    k    v    C entering the chunk                positions up to t ("past"; paper, equation 20)
    DQ: dq       dh   v    k    C entering the chunk, transposed    past
    DK: dk       v    dh   q    dC leaving the chunk, transposed    positions from t on ("future")
    DV: dv       k    q    dh   dC leaving the chunk                future

The first term is what the state contributes, the second what the chunk's own positions contribute. rows(w) M scales row
t of M by w_t, and * multiplies elementwise. The gates make W_in[t], the weight of the state in row t, and W[t, s], the
weight of position s, which is zero for positions that row t does not sum over. DX is the head dim of X and Y, DZ that
of Z and out.

The gates' gradients need sum_k q dq and sum_k k dk. So the launches for dq and dk get q or k as a *pair* of the output,
and also write the row sums of out * pair in float32; gates_backward_kernel (gates.py) makes the gradients of these.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..common.sizes import REMEMBERED

if TYPE_CHECKING:
    from torch import Tensor


class Role(NamedTuple):
    """Which of the four products a launch computes.

    Attributes:
        future: whether a row sums over the positions from its own on, rather than up to its own.
        transposed: whether the state is stored as [DZ, DX].
    """

    future: bool
    transposed: bool


OUTPUT = Role(future=False, transposed=False)
DQ = Role(future=False, transposed=True)
DK = Role(future=True, transposed=True)
DV = Role(future=True, transposed=False)


class Shape(NamedTuple):
    """Sizes that a kernel is compiled for. A kernel cannot call properties, so derived sizes are fields too.

    Attributes:
        heads: H.
        dim_x, dim_z: DX and DZ.
        group_x, group_z: how many consecutive heads share one head of X and Y, or one of Z (Mamba-2's B and C).
        row_x, row_y, row_z, row_pair, row_out: stride from a position of X, Y, Z, the pair or the output to the next,
            in elements.
        headroom: what the kernel multiplies its output by, because its scale and dC are divided by it; 1 but in float16
            (common.arguments.score_headroom).
    """

    heads: int
    dim_x: int
    dim_z: int
    group_x: int
    group_z: int
    row_x: int
    row_y: int
    row_z: int
    row_pair: int
    row_out: int
    headroom: float


class Starts(NamedTuple):
    """Strides of batch and head, in elements, of inputs that are not contiguous; None for one that is. With documents,
    strides of position and head.

    These are run-time arguments, whereas kernels are compiled for the strides of positions (:class:`Shape`): loops need
    those, and in a slice of a projection they do not depend on B and T.

    Attributes:
        documents: cu_seqlens [N + 1] of N documents in a batch of 1, or None.
    """

    x: tuple[int, int] | None
    y: tuple[int, int] | None
    z: tuple[int, int] | None
    pair: tuple[int, int] | None
    documents: Tensor | None = None


CONTIGUOUS = Starts(None, None, None, None)


def is_strided(*inputs: Tensor) -> bool:
    """Return whether any of the inputs is not contiguous."""
    return not all(x.is_contiguous() for x in inputs)


def layout(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    pair: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    strided: bool = True,
) -> tuple[tuple[int, ...] | None, Starts]:
    """Return the strides of the positions of X, Y, Z and a pair, and the other strides and the documents.

    Args:
        strided: whether any input is not contiguous; if not, the first result is None.
    """
    if not strided:
        return None, CONTIGUOUS if documents is None else CONTIGUOUS._replace(documents=documents)
    sequence = 0 if documents is None else 1
    inputs = x, y, z, z if pair is None else pair
    # A contiguous tensor's own strides say nothing along dimensions of size 1.
    rows = tuple(t.shape[2] * t.shape[3] if t.is_contiguous() else t.stride(1) for t in inputs)
    starts = (None if t.is_contiguous() else (t.stride(sequence), t.stride(2)) for t in inputs)
    x_start, y_start, z_start, pair_start = starts
    return rows, Starts(x_start, y_start, z_start, pair_start, documents)


@lru_cache(REMEMBERED)
def shape_of(
    size_x: tuple[int, ...], size_z: tuple[int, ...], heads: int, headroom: float, rows: tuple[int, ...] | None
) -> Shape:
    """Return the sizes of kernels on X and Z of these sizes [B, T, heads, dim] and ``heads`` of the output."""
    (heads_x, dim_x), (heads_z, dim_z) = size_x[2:], size_z[2:]
    own_x, own_z = heads_x * dim_x, heads_z * dim_z
    row_x, row_y, row_z, row_pair = rows or (own_x, own_x, own_z, own_z)
    return Shape(
        heads, dim_x, dim_z, group_x=heads // heads_x, group_z=heads // heads_z,
        row_x=row_x, row_y=row_y, row_z=row_z, row_pair=row_pair, row_out=heads * dim_z, headroom=headroom,
    )  # fmt: skip


class GateVectors(NamedTuple):
    """Gate vectors of one call, in base 2, as every kernel takes them; gates.py makes them.

    Attributes:
        b: log decay, cumulative over a stretch, [B, H, T].
        u: log input gate [B, H, T]; None where it is zero.
        w: log weight with which a position enters the state after its stretch, [B, H, T].
        g: log decay of a whole stretch, [B, H, NG] for NG stretches.
        edge: the stabiliser m before each stretch and after the last one, [B, H, NG + 1]; None without a stabiliser.
        m: the stabiliser [B, H, T], or None.
        log_denom: log2 of mLSTMexp's denominators [B, H, T], or None.
    """

    b: Tensor
    u: Tensor | None
    w: Tensor
    g: Tensor
    edge: Tensor | None
    m: Tensor | None
    log_denom: Tensor | None


class PackedDocument(NamedTuple):
    """Of a document, what kernels need beside pointers to its vectors (:func:`.gates.stretch_of_document`).

    Attributes:
        length: its positions, at least 1.
        count: of all documents.
        anchor: number of its first anchor in a head, which has room for T // every + count of them.
    """

    length: Any
    count: Any
    anchor: Any


class Anchors(NamedTuple):
    """What the decay's gradient starts from; both None where it is not wanted.

    Attributes:
        states: C at each anchor, which a kernel that runs forward in time writes and one that runs backward reads.
        products: where the one that runs backward writes <C, dC> at each anchor; None for the other.
    """

    states: Tensor | None = None
    products: Tensor | None = None


class Denominators(NamedTuple):
    """What a kernel that makes mLSTMexp's denominators reads and writes; n as in reference.py.

    Attributes:
        n_states: n before each chunk of the cut heads [heads, N, K]; None if there are none.
        n_initial: n before the first step of the whole heads [B, H, K]; None means zero.
        n_last: where n after the last step of the whole heads is written [B, H, K], or None.
        log_denom: where log2 of the denominators is written [B, H, T]; None if the kernel does not make them.
    """

    n_states: Tensor | None = None
    n_initial: Tensor | None = None
    n_last: Tensor | None = None
    log_denom: Tensor | None = None
