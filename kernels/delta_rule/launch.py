"""whole_state's passes: the inverses of the chunks, the walks over them, and the gradients within them.

A program walks over the whole head. Where that leaves multiprocessors without a program, heads are cut into segments:
one walk finds what each segment adds to the state, another what it does to one, a matrix [K, K]; products then give the
states before the segments, with which a third walk makes the output.

KDA's passes do the same with kernels of their own.

The backward pass keeps the states between chunks, and their gradients, in the inputs' dtype. dg is less exact for it
than other gradients: it takes the sum of their products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log2
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..common.device import capability, multiprocessors, scratch
from ..common.differentiable import Differentiable, Tensors, contiguous_like
from ..common.sizes import cdiv, padded
from ..common.versions import register_options
from . import CHUNK
from .channel_chunks import channel_chunks_kernel
from .channel_gradients import channel_gradients_kernel, new_values_kernel
from .channel_walk import channel_walk_kernel
from .gradients import SEGMENT, gradients
from .inverse import inverse_kernel
from .whole_state import whole_state_kernel

SEGMENT_CHUNKS = 16
"""Least chunks of a segment, since each costs a product of matrices and the start of a program."""

COLUMNS = 64
"""Columns of V that a walker has."""


class DeltaRequest(NamedTuple):
    """What a call of whole_state asks for beside its tensors."""

    scale: float
    want_last: bool


class Chunks(NamedTuple):
    """What the walks over the chunks of a call read: k, beta, and what inverse_kernel makes of them, see there."""

    k: Tensor
    beta: Tensor
    inverse: Tensor
    b: Tensor
    scale: float


def invert(k: Tensor, g: Tensor | None, beta: Tensor, scale: float) -> Chunks:
    """Run inverse_kernel."""
    (B, T, HK, K), H = k.shape, beta.shape[2]
    chunks = Chunks(k, beta, *_new_chunks(k, beta), scale)
    inverse_kernel[(B * H * cdiv(T, CHUNK),)](
        k, g, beta, chunks.inverse, chunks.b, T, H=H, GROUP=H // HK, K=K, L=CHUNK, num_warps=4
    )
    return chunks


def walk(
    chunks: Chunks,
    V: int,
    *,
    q: Tensor | None = None,
    v: Tensor | None = None,
    out: Tensor | None = None,
    states: Tensor | None = None,
    initial: Tensor | None = None,
    last: Tensor | None = None,
    per: int | None = None,
    future: bool = False,
) -> None:
    """Run whole_state_kernel, whose docstring explains the arguments; ``per`` None: a segment is a whole head."""
    (B, T, HK, K), H = chunks.k.shape, chunks.beta.shape[2]
    N = chunks.b.shape[1]
    walkers = 1 if V <= COLUMNS else 2
    per = per or N
    triton.set_allocator(scratch)
    whole_state_kernel[(cdiv(V, COLUMNS * walkers) * cdiv(N, per) * B * H,)](
        chunks.k, q, v, chunks.inverse, chunks.b, chunks.beta, out, states, initial, last, log2(chunks.scale),
        1 / chunks.scale, T, B * H * N * CHUNK, per, H=H, GROUP=H // HK, K=K, V=V, BK=max(padded(K), 64), L=CHUNK,
        STAGES=2 if future else 3, WALKERS=walkers, FUTURE=future, num_warps=4,
        **register_options(capability(chunks.k.device)),
    )  # fmt: skip


def segment_length(heads: int, chunks: int, V: int, available: int) -> int:
    """Return the chunks of a segment: those of a head, or fewer, for a program on each ``available`` multiprocessor."""
    segments = min(chunks // SEGMENT_CHUNKS, available // (heads * cdiv(V, 2 * COLUMNS)))
    return cdiv(chunks, max(segments, 1))


class Segments(NamedTuple):
    """How heads are cut.

    Attributes:
        per: chunks of a segment.
        before: states before the n segments of each head [B * H, n, K, V], float32; of whole heads None if zero.
        effect: what a segment does to a state [B * H, n, K, K]; None: heads are whole.
    """

    per: int
    before: Tensor | None
    effect: Tensor | None


def _cut(walk: Callable[..., None], v: Tensor, K: int, N: int, initial: Tensor | None) -> Segments:
    """Return how N chunks a head are cut; ``walk`` takes V, and what is read and written by name."""
    B, _, H, V = v.shape
    per = segment_length(B * H, N, V, multiprocessors(v.device))
    first = None if initial is None else initial.flatten(0, 1)[:, None]
    if per >= N:
        return Segments(per, first, None)
    added, effect, before = (v.new_empty(B * H, cdiv(N, per), K, n, dtype=torch.float32) for n in (V, K, V))
    walk(V, v=v, last=added, per=per)
    walk(K, last=effect, per=per)
    before[:, :1] = 0 if first is None else first
    for n in range(1, before.shape[1]):
        torch.baddbmm(added[:, n - 1], effect[:, n - 1], before[:, n - 1], out=before[:, n])
    return Segments(per, before, effect)


def _gradients_after(walk: Callable[..., None], cut: Segments, d_last: Tensor | None) -> Tensor | None:
    """Return the gradients of the states after the segments, like those before; ``walk`` goes back in time."""
    last = None if d_last is None else d_last.flatten(0, 1)[:, None]
    if cut.before is None or cut.effect is None:
        return last
    added, after = torch.empty_like(cut.before), torch.empty_like(cut.before)
    walk(last=added)
    after[:, -1:] = 0 if last is None else last
    for n in reversed(range(1, after.shape[1])):
        torch.baddbmm(added[:, n], cut.effect[:, n].mT, after[:, n], out=after[:, n - 1])
    return after


def _walk_segments(
    walk: Callable[..., None], v: Tensor, K: int, N: int, cut: Segments, want_last: bool, **outputs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return o and the last state; ``outputs`` is what ``walk`` takes beside for the output."""
    B, _, H, V = v.shape
    o, last = contiguous_like(v), None
    if want_last:
        last = v.new_empty(B * H, cdiv(N, cut.per), K, V, dtype=torch.float32)
    walk(V, v=v, out=o, initial=cut.before, last=last, per=cut.per, **outputs)
    return o, None if last is None else last[:, -1].reshape(B, H, K, V)


def _forward(
    request: DeltaRequest, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, initial: Tensor | None
) -> tuple[Tensors, Tensors]:
    chunks, K = invert(k, g, beta, request.scale), k.shape[3]
    N = chunks.b.shape[1]
    cut = _cut(partial(walk, chunks), v, K, N, initial)
    outputs = _walk_segments(partial(walk, chunks), v, K, N, cut, request.want_last, q=q)
    return outputs, (chunks.inverse, chunks.b, *_kept(cut))


def _kept(cut: Segments) -> tuple[Tensor | None, Tensor | None]:
    """Return what of heads in several segments is kept for the backward pass."""
    return (None, None) if cut.effect is None else (cut.before, cut.effect)


def _outputs(request: DeltaRequest, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    last = others[1].new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if request.want_last else None
    return (contiguous_like(v), last), ()


def _shapes(request: DeltaRequest, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    inverse, b = _new_chunks(k, others[1])
    return _outputs(request, q, k, v, *others)[0], (inverse, b, *_new_states(k, v))


def _new_states(k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what :func:`_kept` does, without its contents."""
    (B, T, H, V), K = v.shape, k.shape[3]
    N = cdiv(T, CHUNK)
    per = segment_length(B * H, N, V, multiprocessors(v.device))
    if per >= N:
        return None, None
    before, effect = (v.new_empty(B * H, cdiv(N, per), K, n, dtype=torch.float32) for n in (V, K))
    return before, effect


def _new_chunks(k: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return what inverse_kernel writes, without its contents."""
    chunks = beta.shape[0] * beta.shape[2], cdiv(beta.shape[1], CHUNK)
    return k.new_empty(*chunks, CHUNK, CHUNK), beta.new_empty(*chunks, CHUNK)


def _walk_both_ways(
    walk: Callable[..., None],
    tensors: Tensors,
    of_outputs: Tensors,
    N: int,
    kept: Tensors,
    needs_initial: bool,
    **queries: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the states before the chunks, dO, dY, the gradients of the states after them, and of the initial one.

    ``kept``: of :func:`_kept`; ``queries``: what ``walk`` takes beside backward in time.
    """
    (_, k, v, *_, initial), (do, d_last) = tensors, of_outputs
    (B, _, H, V), K = v.shape, k.shape[3]
    per = segment_length(B * H, N, V, multiprocessors(v.device))
    cut = Segments(per, initial if kept[0] is None else kept[0], kept[1])
    rows = COLUMNS if V <= COLUMNS else 2 * COLUMNS * cdiv(V, 2 * COLUMNS)
    states, d_states = (v.new_empty(B * H, N, rows, K) for _ in range(2))
    dy = contiguous_like(v)
    d_before = v.new_empty(B, H, cdiv(N, per), K, V, dtype=torch.float32) if needs_initial else None
    do = v.new_zeros(v.shape) if do is None else do
    walk(V, v=v, states=states, initial=cut.before, per=per)
    back = partial(walk, V, v=do, per=per, future=True, **queries)
    back(out=dy, states=d_states, initial=_gradients_after(back, cut, d_last), last=d_before)
    return states, do, dy, d_states, None if d_before is None else d_before[:, :, 0]


def _backward(
    request: DeltaRequest, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, of_outputs: Tensors
) -> Tensors:
    q, k, v, g, beta, _ = tensors
    chunks = Chunks(k, beta, saved[0], saved[1], request.scale)
    states, do, dy, d_states, d_initial = _walk_both_ways(
        partial(walk, chunks), tensors, of_outputs, chunks.b.shape[1], saved[2:], needs[5], q=q
    )
    of_tensors = gradients(q, k, v, g, beta, chunks.b, chunks.inverse, states, do, dy, d_states, request.scale)
    return *of_tensors, d_initial


WHOLE_STATE_PASSES = Differentiable(
    "delta_rule", request=DeltaRequest, tensors=("q", "k", "v", "g?", "beta", "initial_state?"),
    outputs=("o", "state"), saved=("inverse", "b", "before", "effect"),
    forward=_forward, backward=_backward, shapes=_shapes,
)  # fmt: skip
"""o and the last state, with gradients of all tensors; the backward pass makes the states anew."""


class ChannelChunks(NamedTuple):
    """What channel_chunks_kernel writes, see there."""

    decayed: Tensor
    squares: Tensor
    vectors: Tensor


def prepare_channels(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, scale: float, made: Tensors = (None, None)
) -> ChannelChunks:
    """Run channel_chunks_kernel; ``made``: the squares and the vectors, if these are there already."""
    (_, T, HK, K), H = k.shape, beta.shape[2]
    decayed, *others = _new_channels(k, beta)
    is_made = made[0] is not None
    channel_chunks_kernel[(decayed.shape[0],)](
        q, k, g, beta, decayed, *((None, None) if is_made else others), scale, T, H=H, GROUP=H // HK, K=K,
        BK=decayed.shape[3], L=CHUNK, num_warps=8, maxnreg=128,
    )  # fmt: skip
    return ChannelChunks(decayed, *(made if is_made else others))


def _new_channels(k: Tensor, beta: Tensor) -> ChannelChunks:
    """Return what channel_chunks_kernel writes, without its contents."""
    (B, T, _, K), H = k.shape, beta.shape[2]
    chunks, width = B * H * cdiv(T, CHUNK), max(padded(K), 64)
    return ChannelChunks(
        k.new_empty(chunks, 3, CHUNK, width),
        k.new_empty(chunks, 2, CHUNK, CHUNK),
        beta.new_empty(chunks, width + CHUNK),
    )


def walk_channels(
    chunks: ChannelChunks,
    T: int,
    H: int,
    K: int,
    V: int,
    *,
    v: Tensor | None = None,
    out: Tensor | None = None,
    states: Tensor | None = None,
    initial: Tensor | None = None,
    last: Tensor | None = None,
    per: int,
    future: bool = False,
) -> None:
    """Run channel_walk_kernel, whose docstring explains the arguments."""
    rows, width = chunks.vectors.shape[0], chunks.decayed.shape[3]
    N = cdiv(T, CHUNK)
    walkers = 1 if V <= COLUMNS else 2
    triton.set_allocator(scratch)
    channel_walk_kernel[(cdiv(V, COLUMNS * walkers) * cdiv(N, per) * (rows // N),)](
        *chunks, v, out, states, initial, last, T, rows, per, H=H, K=K, V=V, BK=width, L=CHUNK, STAGES=2,
        WALKERS=walkers, FUTURE=future, num_warps=4, **register_options(capability(chunks.vectors.device)),
    )  # fmt: skip


def _channel_forward(
    request: DeltaRequest, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None
) -> tuple[Tensors, Tensors]:
    T, H, K = g.shape[1:]
    chunks, N = prepare_channels(q, k, g, beta, request.scale), cdiv(T, CHUNK)
    walk = partial(walk_channels, chunks, T, H, K)
    cut = _cut(walk, v, K, N, initial)
    return _walk_segments(walk, v, K, N, cut, request.want_last), (chunks.squares, chunks.vectors, *_kept(cut))


def _channel_shapes(request: DeltaRequest, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    _, squares, vectors = _new_channels(k, others[1])
    return _outputs(request, q, k, v, *others)[0], (squares, vectors, *_new_states(k, v))


def channel_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: ChannelChunks,
    states: Tensor,
    do: Tensor,
    dy: Tensor,
    d_states: Tensor,
    scale: float,
) -> Tensors:
    """Compute dq, dk, dv, dg and dbeta by the kernels of channel_gradients.py, see there; all are contiguous."""
    (B, T, H, V), (HK, K) = v.shape, k.shape[2:]
    dq, dk = (v.new_empty(B, T, H, K, dtype=v.dtype if HK == H else torch.float32) for _ in range(2))
    new, dv, dg = torch.empty_like(v), torch.empty_like(v), torch.empty_like(g)
    # The second kernel's programs have COLUMNS of K each.
    shares = cdiv(K, COLUMNS)
    dbeta = beta.new_empty(1 + shares, B, T, H)
    numbers, rows, width = B * H * cdiv(T, CHUNK), states.shape[2], chunks.decayed.shape[3]
    dsquares, vectors = torch.empty_like(chunks.squares), beta.new_empty(numbers, CHUNK + 2)
    new_values_kernel[(numbers,)](
        v, beta, chunks.decayed, chunks.squares, states, do, dy, new, dv, dsquares, vectors, dbeta, T,
        H=H, K=K, V=V, ROWS=rows, BK=width, L=CHUNK, num_warps=4,
    )  # fmt: skip
    N = states.shape[1]
    per = min(SEGMENT, cdiv(B * H * N, 2 * multiprocessors(v.device)))
    triton.set_allocator(scratch)
    channel_gradients_kernel[(B * H * cdiv(N, per),)](
        q, k, g, beta, states, do, dy, d_states, new, dsquares, vectors, dq, dk, dg, dbeta, scale, T, per,
        H=H, GROUP=H // HK, K=K, V=V, ROWS=rows, L=CHUNK, num_warps=8, maxnreg=128,
    )  # fmt: skip
    if HK != H:
        dq, dk = (x.unflatten(2, (HK, -1)).sum(3).to(v.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta.sum(0)


def _channel_backward(
    request: DeltaRequest, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, of_outputs: Tensors
) -> Tensors:
    q, k, v, g, beta, _ = tensors
    T, H, K = g.shape[1:]
    chunks = prepare_channels(q, k, g, beta, request.scale, saved[:2])
    states, do, dy, d_states, d_initial = _walk_both_ways(
        partial(walk_channels, chunks, T, H, K), tensors, of_outputs, cdiv(T, CHUNK), saved[2:], needs[5]
    )
    return *channel_gradients(q, k, v, g, beta, chunks, states, do, dy, d_states, request.scale), d_initial


CHANNEL_PASSES = Differentiable(
    "delta_rule_by_channel", request=DeltaRequest, tensors=WHOLE_STATE_PASSES.tensors,
    outputs=("o", "state"), saved=("squares", "vectors", "before", "effect"),
    forward=_channel_forward, backward=_channel_backward, shapes=_channel_shapes,
)  # fmt: skip
"""The same with a decay for each key channel."""
