"""whole_state's passes: the inverses of the chunks, the walks over them, and the gradients within them.

A program walks over the whole head. Where that leaves multiprocessors without a program, heads are cut into segments:
one walk finds what each segment adds to the state, another what it does to one, a matrix [K, K]; products then give the
states before the segments, with which a third walk makes the output.

KDA's forward pass does the same with kernels of its own.

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
from .channel_walk import channel_walk_kernel
from .gradients import gradients
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
    (heads, N, _), K, V = b.shape, k.shape[3], v.shape[3]
    per = segment_length(heads, N, V, multiprocessors(v.device))
    states = (b.new_empty(heads, cdiv(N, per), K, n) if per < N else None for n in (V, K))
    return _outputs(request, q, k, v, *others)[0], (inverse, b, *states)


def _new_chunks(k: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return what inverse_kernel writes, without its contents."""
    chunks = beta.shape[0] * beta.shape[2], cdiv(beta.shape[1], CHUNK)
    return k.new_empty(*chunks, CHUNK, CHUNK), beta.new_empty(*chunks, CHUNK)


def _backward(
    request: DeltaRequest, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, of_outputs: Tensors
) -> Tensors:
    q, k, v, g, beta, initial = tensors
    do, d_last = of_outputs
    do = v.new_zeros(v.shape) if do is None else do
    (B, _, H, V), K = v.shape, k.shape[3]
    chunks = Chunks(k, beta, saved[0], saved[1], request.scale)
    rows = COLUMNS if V <= COLUMNS else 2 * COLUMNS * cdiv(V, 2 * COLUMNS)
    N = chunks.b.shape[1]
    per = segment_length(B * H, N, V, multiprocessors(v.device))
    cut = Segments(per, initial if saved[2] is None else saved[2], saved[3])
    states, d_states = (k.new_empty(B * H, N, rows, K) for _ in range(2))
    dy, d_before = contiguous_like(v), beta.new_empty(B, H, cdiv(N, per), K, V) if needs[5] else None
    walk(chunks, V, v=v, states=states, initial=cut.before, per=per)
    back = partial(walk, chunks, V, q=q, v=do, per=per, future=True)
    back(out=dy, states=d_states, initial=_gradients_after(back, cut, d_last), last=d_before)
    dq, dk, dv, dg, dbeta = gradients(
        q, k, v, g, beta, chunks.b, chunks.inverse, states, do, dy, d_states, request.scale
    )
    return dq, dk, dv, dg, dbeta, None if d_before is None else d_before[:, :, 0]


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
    decay: Tensor


def prepare_channels(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, scale: float) -> ChannelChunks:
    """Run channel_chunks_kernel."""
    (B, T, HK, K), H = k.shape, beta.shape[2]
    chunks, width = B * H * cdiv(T, CHUNK), max(padded(K), 64)
    made = ChannelChunks(
        k.new_empty(chunks, 3, CHUNK, width), k.new_empty(chunks, 2, CHUNK, CHUNK), g.new_empty(chunks, width)
    )
    channel_chunks_kernel[(chunks,)](
        q, k, g, beta, *made, scale, T, H=H, GROUP=H // HK, K=K, BK=width, L=CHUNK, num_warps=8, maxnreg=128
    )
    return made


def walk_channels(
    chunks: ChannelChunks,
    T: int,
    H: int,
    K: int,
    V: int,
    *,
    v: Tensor | None = None,
    out: Tensor | None = None,
    initial: Tensor | None = None,
    last: Tensor | None = None,
    per: int,
) -> None:
    """Run channel_walk_kernel, whose docstring explains the arguments."""
    rows, width = chunks.decay.shape
    N = cdiv(T, CHUNK)
    walkers = 1 if V <= COLUMNS else 2
    triton.set_allocator(scratch)
    channel_walk_kernel[(cdiv(V, COLUMNS * walkers) * cdiv(N, per) * (rows // N),)](
        *chunks, v, out, initial, last, T, rows, per, H=H, K=K, V=V, BK=width, L=CHUNK, STAGES=2, WALKERS=walkers,
        num_warps=4, **register_options(capability(chunks.decay.device)),
    )  # fmt: skip


def _channel_forward(
    request: DeltaRequest, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None
) -> tuple[Tensors, Tensors]:
    T, H, K = g.shape[1:]
    walk, N = partial(walk_channels, prepare_channels(q, k, g, beta, request.scale), T, H, K), cdiv(T, CHUNK)
    return _walk_segments(walk, v, K, N, _cut(walk, v, K, N, initial), request.want_last), ()


CHANNEL_PASSES = Differentiable(
    "delta_rule_by_channel", request=DeltaRequest, tensors=WHOLE_STATE_PASSES.tensors,
    outputs=("o", "state"), forward=_channel_forward, backward=None, shapes=_outputs,
)  # fmt: skip
"""The same with a decay for each key channel, without gradients."""
