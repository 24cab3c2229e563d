"""A forward and a backward pass of the engine, of which common/differentiable.py makes an autograd function.

plan.py says what a pass launches. Launchers allocate outputs, and stand in the order in which they are called; the
passes follow them. Source: TFLA paper, sections 2.2, 3.2, appendices B, C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import index
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..common.arguments import is_interpreted, score_headroom
from ..common.device import capability, memory_rate, multiprocessors, scratch
from ..common.differentiable import Differentiable, Tensors, contiguous_like
from ..common.sizes import REMEMBERED, cdiv, next_power_of_two, padded
from ..common.versions import register_options
from .choice import backward_after, forward_chunk, sweep_chunk
from .chunk_o import chunk_o_kernel
from .chunk_states import chunk_states_kernel, merge_chunk_states_kernel
from .config import (
    GATES_BLOCK_T,
    GATES_TILE,
    MERGE_BLOCK_E,
    SCAN_BLOCK_N,
    SUM_BLOCK,
    WHOLE_STATE_BLOCK_T,
    fit_chunk,
    select_config,
    takes_tiles_in_order,
)
from .declare import WHOLE_STATE_FORM
from .fused_chunk import fused_chunk_kernel
from .gates import (
    gates_backward_kernel,
    gates_forward_kernel,
    stabiliser_finish_kernel,
    stabiliser_scan_kernel,
    sum_kernel,
)
from .normaliser import add_normaliser_gradients, denominator_kernel, normaliser_kernel
from .plan import MEMORY_RATE, MULTIPROCESSORS, Pass, Sizes, backward, forward, kept_chunk
from .roles import Anchors, Denominators, GateVectors, is_strided, layout, shape_of

HAS_WHOLE_STATE = not (WHOLE_STATE_FORM.why_not_with({"triton": triton.__version__}) or is_interpreted())
"""Whether whole_state.py can be imported: Gluon's names change with Triton's versions, and it has no interpreter."""
if HAS_WHOLE_STATE:
    from .chunk_states_hopper import chunk_states_hopper_kernel
    from .whole_state import whole_state_kernel

NO_DENOMINATORS = Denominators()
Resets = tuple[Tensor, int]
"""cu_seqlens [N + 1] and N."""


class EngineRequest(NamedTuple):
    """What a call of the engine asks for; see engine.py."""

    gate: str
    scale: float
    inv_tau: float
    scheme: str
    chunk_size: int | None
    state_dtype: torch.dtype
    want_last: bool

    @property
    def stabilised(self) -> bool:
        return self.gate == "exp"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnginePass:
    """Everything about one pass of a request but its tensors.

    Attributes:
        launched: what it launches.
        scale: the request's divided by ``headroom`` (roles.Shape).
        keeps_states: of a forward pass, whether it keeps the states between chunks for the backward pass.
        strided: whether any of q, k and v is not contiguous.
        documents: number of documents, 0 where sequences are the batch.
        precision: of Triton's products.
    """

    request: EngineRequest
    launched: Pass
    scale: float
    headroom: float
    keeps_states: bool
    strided: bool
    documents: int
    precision: str

    def stretches(self, seq_len: int, length: int) -> int:
        """Return the stretches of ``length`` positions that a head of seq_len positions has room for."""
        return stretches(seq_len, length, self.documents)


def stretches(seq_len: int, length: int, documents: int) -> int:
    """Return the most stretches of ``length`` positions in a sequence, or in documents of this length in all."""
    return seq_len // length + documents if documents else cdiv(seq_len, length)


def choose(
    request: EngineRequest,
    q: Tensor,
    v: Tensor,
    *,
    backward: bool = False,
    kept: bool = False,
    ends: bool = False,
    strided: bool = False,
    documents: int = 0,
) -> EnginePass:
    """Return a pass for q [B, T, G, K] and v [B, T, H, V] on their device (a CPU counts as an H200).

    Args:
        kept: of a backward pass, whether it has the forward pass's states.
        ends: whether the last state is wanted; of a backward pass, whether its gradient or the initial one is given.
        strided: whether any of q, k and v is not contiguous.
        documents: number of documents, 0 where sequences are the batch.
    """
    return _choose(
        request, q.shape, v.shape, v.dtype, v.device, capability(v.device), backward, kept, ends, strided, documents,
        precision_of(v),
    )  # fmt: skip


@lru_cache(REMEMBERED)
def _choose(
    request: EngineRequest,
    size_q: torch.Size,
    size_v: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    capability: tuple[int, int],
    is_backward: bool,
    kept: bool,
    ends: bool,
    strided: bool,
    documents: int,
    precision: str,
) -> EnginePass:
    (batch, seq_len, heads, head_dim_v), (_, _, groups, head_dim_qk) = size_v, size_q
    sizes = Sizes(
        seq_len=seq_len, batch_heads=(documents or batch) * heads, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v,
        normalised=request.stabilised, sums_decay=request.gate == "ssd",
        multiprocessors=multiprocessors(device) if device.type == "cuda" else MULTIPROCESSORS,
        memory_rate=memory_rate(device) or MEMORY_RATE,
    )  # fmt: skip
    # Denominators grow with the scale, and gradients are divided by them, so mLSTMexp's need no headroom.
    headroom = 1.0 if request.stabilised else score_headroom(request.scale, head_dim_qk, dtype)
    scheme = request.scheme if takes_tiles_in_order(request.scheme, dtype.itemsize) else "sweep"
    chunk = fit_chunk(request.chunk_size or forward_chunk(sizes, scheme), seq_len)
    if documents:
        # A document is one chunk, whose gates have the stretches that _shapes says.
        chunk = max(WHOLE_STATE_BLOCK_T, padded(seq_len))
    config = sizes.config(scheme, chunk, capability, dtype.itemsize, precision)
    launched, keeps = forward(sizes, config, chunk, ends=ends), False
    after = partial(backward_after, launched, sizes, scheme, config, named=request.chunk_size is not None)
    if is_backward and documents:
        launched = backward(sizes, config, chunk, ends=ends)
    elif is_backward:
        launched = after(kept=chunk if kept else 0, ends=ends)
    elif launched.several:
        # They are kept if they take little memory and the backward pass has the same chunks.
        bytes_of_state = request.state_dtype.itemsize
        few = kept_chunk(sizes, config, chunk, qk_share=groups / heads, state_bytes=bytes_of_state)
        keeps = few > 0 and "state" not in after(kept=few).launches
    return EnginePass(
        request=request, launched=launched, scale=request.scale / headroom, headroom=headroom, keeps_states=keeps,
        strided=strided, documents=documents, precision=precision,
    )  # fmt: skip


def _empty(*shape: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=dtype)


def precision_of(x: Tensor) -> str:
    """Return how Triton multiplies tensors of x's dtype: of float32 with three TF32 products where torch's own setting
    lets its products take one."""
    if x.dtype != torch.float32:
        return "tf32"
    matmul = torch.backends.cuda.matmul
    # Before torch 2.9 there is but the older name, which later ones raise on after the newer one has been set.
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32x3" if allowed else "ieee"


@lru_cache(REMEMBERED)
def _gates_tile(heads: int, stretch: int) -> dict[str, Any]:
    """Return a gate kernel's tile and warps. The float32 gates of eight heads fill a sector of memory, 32 bytes."""
    block_t = min(GATES_BLOCK_T, padded(stretch))
    block_h = min(8, GATES_TILE // block_t, next_power_of_two(heads))
    num_warps = max(1, block_h * block_t // 128)
    return {"BLOCK_H": block_h, "BLOCK_T": block_t, "ONCE": stretch <= block_t, "num_warps": num_warps}


def empty_gates(gate: str, v: Tensor, stretch: int, *, in_order: bool, documents: int = 0) -> GateVectors:
    """Allocate the gate vectors of values v [B, T, H, V], cumulative over ``stretch`` positions.

    With documents, B is 1, and a head has the stretches of :func:`stretches` and an edge more for each document.
    """
    B, T, H, _ = v.shape
    N = stretches(T, stretch, documents)

    positions, exp = (B, H, T), gate == "exp"
    # Where a chunk's tiles are taken in parallel, differences over a whole chunk are taken.
    empty = partial(v.new_empty, dtype=torch.float32 if in_order else torch.float64)
    return GateVectors(
        b=empty(positions),
        u=empty(positions) if gate in ("sig", "exp", "ssd") else None,
        w=empty(positions),
        g=empty((B, H, N)),
        edge=empty((B, H, N + (documents or 1))) if exp else None,
        m=v.new_empty(positions, dtype=torch.float32) if exp else None,
        log_denom=empty(positions) if exp else None,
    )


def empty_state(q: Tensor, v: Tensor, *, normalised: bool, documents: int = 0) -> tuple[Any, ...]:
    """Allocate a state: C [B, H, K, V], and n [B, H, K] and m [B, H] of mLSTMexp or None; B: documents, if any."""
    shape = (documents or v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    n, m = (v.new_empty(shape[:dims], dtype=torch.float32) if normalised else None for dims in (3, 2))
    return v.new_empty(shape, dtype=torch.float32), n, m


def run_gates(
    task: EnginePass,
    v: Tensor,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
    m_initial: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Resets | None,
) -> tuple[GateVectors, Tensor | None]:
    """Launch the gate kernels; return the gate vectors, log_denom not yet filled, and the last m [B, H] in base e."""
    B, T, H, _ = v.shape
    request, stretch, documents = task.request, task.launched.stretch, task.documents
    N = task.stretches(T, stretch)
    gates = empty_gates(request.gate, v, stretch, in_order=task.launched.in_order, documents=documents)
    b, u, w, g, edge, m, _ = gates
    g_max, m_last = (torch.empty_like(g), _empty(documents or B, H, like=v)) if request.stabilised else (None, None)
    tile = _gates_tile(H, stretch)
    gates_forward_kernel[(cdiv(H, tile["BLOCK_H"]) * N * B,)](
        decay, input_gate, head, b, u, w, g, m, g_max, cu_seqlens, resets, request.inv_tau, T, stretch, N,
        H=H, GATE=request.gate, **tile,
    )  # fmt: skip
    if request.stabilised:
        scanned = None if cu_seqlens is None else (cu_seqlens, T, stretch, H)
        block_n, block_t, blocks = SCAN_BLOCK_N, SCAN_BLOCK_N, cdiv(T, SCAN_BLOCK_N)
        if documents:
            # Most documents have few stretches; a program finishes one of them.
            block_n, block_t, blocks = 64, padded(stretch), N
        stabiliser_scan_kernel[((documents or B) * H,)](g, g_max, m_initial, edge, m_last, scanned, N, BLOCK_N=block_n)
        stabiliser_finish_kernel[(blocks * B * H,)](b, edge, m, cu_seqlens, T, stretch, N, BLOCK_T=block_t)
    return gates, m_last


def run_chunk_states(
    task: EnginePass,
    name: str,
    y: Tensor,
    z: Tensor,
    gates: GateVectors,
    initial: Tensor | None,
    *,
    n_initial: Tensor | None = None,
    last: Tensor | None = None,
    n_last: Tensor | None = None,
    want_n: bool = False,
    forward_states: Tensor | None = None,
    resets: Resets | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the pass over the chunks of the cut heads, backward in time where ``name`` is state_gradient.

    Args:
        y, z: k and v, or q and dh.
        last, n_last: the cut heads' state after the pass's last step is written here [B, H, DX, DZ] and [B, H, DX].
        forward_states: the forward pass's states, from which to compute anchors; None: no anchors.

    Returns:
        The states before each chunk or, backward in time, the gradients of the states after it [heads, N, K, V]; with
        ``want_n`` n before each chunk [heads, N, K]; and anchors, <C, dC> at its start [tiles of the state, B, H, N].
    """
    B, T, H, DZ = z.shape
    DX = y.shape[3]
    launched, states, future = task.launched, task.launched.launches[name], name == "state_gradient"
    config, heads, N, chunk, stretch = states.tile, states.heads, states.chunks, launched.chunk, launched.stretch
    made = _empty(heads, N, DX, DZ, like=z, dtype=task.request.state_dtype)
    n_states = _empty(heads, N, DX, like=z) if want_n else None
    anchors = None if forward_states is None else _empty(math.prod(states.blocks), B, H, N, like=z)
    ends = (initial, n_initial, made, n_states, last, n_last)
    rows, starts = layout(y, y, z, strided=task.strided)
    shape = shape_of(y.shape, z.shape, H, task.headroom, rows)
    grid = (states.programs(want_last=last is not None),)
    if config.whole_state:
        triton.set_allocator(scratch)
        chunk_states_hopper_kernel[grid](
            y, z, gates, made, n_states, starts, resets, math.log2(task.scale), T, chunk, N, heads, launched.whole,
            SHAPE=shape, FUTURE=future, TILE=config, num_warps=config.num_warps,
        )  # fmt: skip
    else:
        # A chunk's contribution is computed from zero; the merge takes the initial state and writes the last one.
        own = (None, None, made, n_states, None, None) if config.parallel else ends
        chunk_states_kernel[grid](
            y, z, gates, *own, Anchors(forward_states, anchors), starts, task.scale, T, chunk, N, stretch, B * H,
            SHAPE=shape, FUTURE=future, LOCAL=config.parallel, TILE=config, PRECISION=task.precision,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    if config.parallel:
        # BLOCK_G is rounded up to few values, so that chunks of several lengths share a compiled kernel.
        per_chunk = chunk // stretch
        block_g = next(size for size in (32, 256, next_power_of_two(per_chunk)) if per_chunk <= size)
        merge_chunk_states_kernel[(cdiv(DX * DZ, MERGE_BLOCK_E) * heads,)](
            gates.g, gates.edge, *ends, T, chunk, N, stretch, launched.whole, DX=DX, DZ=DZ, FUTURE=future,
            BLOCK_E=MERGE_BLOCK_E, BLOCK_G=block_g, BLOCK_X=next_power_of_two(DX), num_warps=4,
        )  # fmt: skip
    return made, n_states, anchors


def run_normaliser(
    task: EnginePass,
    q: Tensor,
    k: Tensor,
    gates: GateVectors,
    denominators: Denominators,
    cu_seqlens: Tensor | None,
) -> None:
    """Launch the normaliser's kernels, which fill ``denominators.log_denom`` and ``denominators.n_last``."""
    B, T, _, K = q.shape
    H = gates.b.shape[1]
    launched = task.launched
    config, blocks, block_t = launched.launches["normaliser"]
    n_q = _empty(blocks, B, H, T, like=q)
    n_states = denominators.n_states if launched.several else denominators.n_initial
    rows, starts = layout(q, k, q, documents=cu_seqlens, strided=task.strided)
    q_row, k_row = rows[:2] if rows else (q.shape[2] * K,) * 2
    triton.set_allocator(scratch)
    normaliser_kernel[(blocks * launched.head_chunks,)](
        q, k, gates, n_states, n_q, denominators.n_last, starts,
        task.scale, T, launched.chunk, launched.chunks, launched.heads,
        H=H, K=K, Q_ROW=q_row, K_ROW=k_row, GROUP=H // q.shape[2], BLOCK_T=block_t, BLOCK_K=config.block_k,
        STAGES=config.num_stages, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    count = B * H * T
    grid = (cdiv(count, SCAN_BLOCK_N),)
    denominator_kernel[grid](n_q, gates.m, denominators.log_denom, count, blocks, BLOCK=SCAN_BLOCK_N)


@dataclass(slots=True, kw_only=True)
class Product:
    """The results of one of the four products.

    Attributes:
        out: [B, T, H, DZ] in z's dtype.
        row_sums: if a pair was given, sums of out * pair over the columns of a part of DZ [parts, B, H, T].
        anchor_states: states at the anchors, from a past role with a pair.
        anchors: <C, dC> at the anchors [parts of the state, B, H, ceil(T / every)], from a future role with a pair.
    """

    out: Tensor
    row_sums: Tensor | None = None
    anchor_states: Tensor | None = None
    anchors: Tensor | None = None


def run_product(
    task: EnginePass,
    name: str,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    states: Tensor | None,
    gates: GateVectors,
    *,
    initial: Tensor | None = None,
    last: Tensor | None = None,
    pair: Tensor | None = None,
    anchor_states: Tensor | None = None,
    denominators: Denominators = NO_DENOMINATORS,
    cu_seqlens: Tensor | None = None,
) -> Product:
    """Launch one of the four products; see roles.py for x, y, z, the states and the pair.

    Where a chunk's tiles are taken in order, a past role with a ``pair`` (dq) returns the states at the anchors; a
    future role with a ``pair`` (dk) takes them as ``anchor_states`` and returns the anchors.

    Args:
        states: before each chunk of the cut heads [heads, N, ...].
        initial: before the first step of the whole heads [B, H, ...]; None is zero.
        last: to which the state after the last step of the whole heads is written [B, H, ...].
        denominators: what mLSTMexp's denominators start from, if the kernel makes them itself.
    """
    B, T, _, DZ = z.shape
    H = gates.b.shape[1]
    launched, product = task.launched, task.launched.launches[name]
    config, sums, blocks = product.tile, product.tile.row_sums(DZ), len(product.launches)
    result = Product(out=_empty(B, T, H, DZ, like=z, dtype=z.dtype), anchor_states=anchor_states)
    if pair is not None:
        result.row_sums = _empty(sums, B, H, T, like=z)
    rows, starts = layout(x, y, z, pair, documents=cu_seqlens, strided=task.strided)
    if not launched.in_order:
        grid = (product.launches[0].blocks * cdiv(launched.chunk, config.block_t) * launched.head_chunks,)
        chunk_o_kernel[grid](
            x, y, z, states, result.out, gates, denominators.n_states, pair, result.row_sums,
            starts, task.scale, T, launched.chunk, launched.chunks, B * H,
            SHAPE=shape_of(x.shape, z.shape, H, task.headroom, rows), ROLE=product.role,
            NORMALISE=task.request.stabilised and name == "h", TILE=config, PRECISION=task.precision,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return result
    if pair is not None:
        num_anchors = task.stretches(T, launched.anchor_every)
        if product.role.future:
            # Each walker of whole_state writes its own anchors.
            shares = sums // 4 if launched.whole_state else sums
            result.anchors = _empty(blocks * shares, B, H, num_anchors, like=z)
        else:
            columns = product.launches[-1].blocks * config.block_z if launched.whole_state else DZ
            size = (blocks, B, H, num_anchors, config.block_x, columns)
            result.anchor_states = _empty(*size, like=z, dtype=z.dtype)
    unfinished = None
    if blocks > 1:
        half = config.partial_bytes(product.dim_x, bf16=z.dtype == torch.bfloat16) == 2
        unfinished = _empty(B, T, H, DZ, like=z, dtype=z.dtype if half else torch.float32)
    if denominators.log_denom is not None:
        gates = gates._replace(log_denom=None)
    triton.set_allocator(scratch)
    launches = _launches(task, name, x.shape, z.shape, H, rows, capability(z.device))
    for block, (grid, numbers, keywords) in enumerate(launches):
        found = (result.anchor_states, result.anchors)
        anchors = Anchors(*found if blocks == 1 else [None if x is None else x.chunk(blocks)[block] for x in found])
        if launched.whole_state:
            out, *paired = (result.out, pair, result.row_sums) if block == blocks - 1 else (unfinished, None, None)
            whole_state_kernel[grid](
                x, y, z, states, (initial, last), unfinished if block else None, out, gates, *paired, anchors,
                denominators, starts, *numbers, **keywords,
            )  # fmt: skip
        else:
            fused_chunk_kernel[grid](
                x, y, z, states if launched.several else initial, unfinished, result.out, gates, pair,
                result.row_sums, last, anchors, starts, *numbers, **keywords,
            )  # fmt: skip
    return result


@lru_cache(REMEMBERED)
def _launches(
    task: EnginePass,
    name: str,
    size_x: torch.Size,
    size_z: torch.Size,
    H: int,
    rows: tuple[int, ...] | None,
    capability: tuple[int, int],
) -> list[tuple[tuple[int], tuple[Any, ...], dict[str, Any]]]:
    """Return each launch's grid, numbers and keywords in :func:`run_product`; H: heads of the output."""
    launched, T = task.launched, size_z[1]
    product = launched.launches[name]
    config, parts, every = product.tile, product.launches, launched.anchor_every
    shape = shape_of(size_x, size_z, H, task.headroom, rows)
    launches: list[Any] = []
    for block, part in enumerate(parts):
        numbers: tuple[Any, ...] = T, launched.chunk, launched.chunks, launched.heads
        options: dict[str, Any] = {"SHAPE": shape, "ROLE": product.role}
        if launched.whole_state:
            numbers = math.log2(task.scale), *numbers, launched.whole, every, part.first
            options |= {"TILE": part.tile, "num_warps": 4, "maxnreg": 128 if part.tile.resident == 2 else None}
        else:
            sequences = H if task.documents else launched.heads
            if (anchors := sequences * task.stretches(T, every)) * config.block_x >= 2**31:
                expected = f"below 2^31 / {config.block_x} at anchors every {every} positions"
                raise ValueError(f"batch * num_heads * seq_len / {every} must be {expected}, got {anchors}")
            numbers = task.scale, *numbers, every, block
            options |= {"FIRST": block == 0, "LAST": block == len(parts) - 1, "TILE": config}
            options |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
        grid = (part.blocks * launched.head_chunks,)
        launches.append((grid, numbers, {**options, **register_options(capability)}))
    return launches


def run_gates_backward(
    request: EngineRequest,
    q_dq: Tensor,
    k_dk: Tensor,
    anchors: Tensor | None,
    every: int,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Resets | None,
    *,
    end_is_known: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Launch gates_backward_kernel; return the gradients of the decay gate, the input gate and the heads' constants.

    ``every`` is the distance between anchors; without anchors one stretch covers T.
    """
    NUM_SUMS, B, H, T = q_dq.shape
    N = 1 if anchors is None else anchors.shape[3]
    d_decay = None if decay is None else torch.empty_like(decay)
    d_input = None if input_gate is None else torch.empty_like(input_gate)
    d_head = None if head is None else _empty(B, N, H, like=q_dq)
    stretch = T if anchors is None else every
    tile = _gates_tile(H, stretch)
    gates_backward_kernel[(cdiv(H, tile["BLOCK_H"]) * N * B,)](
        q_dq, k_dk, anchors, decay, input_gate, head, d_decay, d_input, d_head, cu_seqlens, resets,
        request.inv_tau, T, stretch, N, B * H,
        H=H, GATE=request.gate, NUM_SUMS=NUM_SUMS, NUM_ANCHORS=0 if anchors is None else anchors.shape[0],
        END_IS_KNOWN=end_is_known, **tile,
    )  # fmt: skip
    return d_decay, d_input, None if d_head is None or head is None else run_sum(d_head, head)


def run_sum(x: Tensor, like: Tensor) -> Tensor:
    """Launch sum_kernel to sum x to the shape of ``like``: [B, N, H] to [H], or [B, T, H, D] to [B, T, G, D]."""
    result = contiguous_like(like)
    inner, count = x.shape[-1], like.numel()
    columns = next_power_of_two(inner)
    rows, tile = count // inner, max(1, SUM_BLOCK // columns)
    sum_kernel[(cdiv(rows, tile),)](x, result, rows, x.numel() // count, INNER=inner, ROWS=tile, COLS=columns)
    return result


def _forward(
    request: EngineRequest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
    c_initial: Tensor | None,
    n_initial: Tensor | None,
    m_initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensors, Tensors]:
    """Return h and the last C, n and m; and, to keep, the gate vectors and the states or None."""
    documents, cu_seqlens, resets = split_documents(request, c_initial, cu_seqlens)
    task = choose(request, q, v, ends=request.want_last, strided=is_strided(q, k, v), documents=documents)
    launched, exp = task.launched, request.stabilised
    gates, m_last = run_gates(task, v, decay, input_gate, head, m_initial, cu_seqlens, resets)
    states, n_states = (None, None) if launched.in_order else (c_initial, n_initial)
    last = n_last = None
    if request.want_last:
        last, n_last, _ = empty_state(q, v, normalised=exp, documents=documents)
    if "state" in launched.launches:
        states, n_states, _ = run_chunk_states(
            task, "state", k, v, gates, c_initial, n_initial=n_initial, last=last, n_last=n_last, want_n=exp,
            resets=resets,
        )  # fmt: skip
    # The pass over the chunks has written the last states of the cut heads.
    whole_last, whole_n_last = (last, n_last) if launched.whole else (None, None)
    denominators = Denominators(n_states, n_initial, whole_n_last, gates.log_denom)
    if "normaliser" in launched.launches:
        run_normaliser(task, q, k, gates, denominators, cu_seqlens)
        denominators = NO_DENOMINATORS
    output = run_product(
        task, "h", q, k, v, states, gates, initial=c_initial, last=whole_last, denominators=denominators,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    kept = states if task.keeps_states else None
    return (output.out, last, n_last, m_last if request.want_last else None), (*gates, kept)


def split_documents(
    request: EngineRequest, c_initial: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[int, Tensor | None, Resets | None]:
    """Return how many documents are a chunk each, and their cu_seqlens; or 0, and the resets of documents that are one
    sequence. Only the former have initial and last states; the time of the latter hardly depends on the lengths.
    """
    documents = 0 if cu_seqlens is None else index(cu_seqlens.shape[0]) - 1
    if cu_seqlens is None or documents == 1:
        return 0, None, None
    if request.want_last or c_initial is not None:
        return documents, cu_seqlens, None
    return 0, None, (cu_seqlens, documents)


def _shapes(request: EngineRequest, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensors, Tensors]:
    documents, _, _ = split_documents(request, others[3], others[-1])
    heads, dim_k, dim_v = index(v.shape[2]), index(q.shape[3]), index(v.shape[3])
    in_order = takes_tiles_in_order(request.scheme, v.element_size())
    # A compiled call serves all sequence lengths, so the length of the gates' stretches must not depend on T here.
    chunk = request.chunk_size or sweep_chunk(dim_k, dim_v)
    config = select_config(
        scheme=request.scheme, capability=capability(v.device), item_bytes=v.element_size(), head_dim_qk=dim_k,
        head_dim_v=dim_v, chunk=chunk, batch_heads=heads,
    )  # fmt: skip
    gates = empty_gates(request.gate, v, config.gate_stretch(chunk), in_order=in_order, documents=documents)
    last: tuple[Any, ...] = None, None, None
    if request.want_last:
        last = empty_state(q, v, normalised=request.stabilised, documents=documents)
    return (contiguous_like(v), *last), gates


def _backward(
    request: EngineRequest, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, gradients: Tensors
) -> Tensors:
    """Return the gradients of q, k, v, the gates and the initial state C and n.

    Kernels that take tiles in order need the states of cut heads only, and compute the anchors of the decay's gradient
    on their way. chunk_o.py needs the states of every chunk; its anchors are at the chunks' edges.
    """
    q, k, v, decay, input_gate, head, c_initial, n_initial, _, cu_seqlens = tensors
    dh, d_last, dn_last, _ = gradients
    number = len(GateVectors._fields)
    # A compiled call's operator does not save the states.
    gates, states = GateVectors(*saved[:number]), saved[number] if len(saved) > number else None
    ends = c_initial is not None or d_last is not None
    strided = is_strided(q, k, v)
    documents, cu_seqlens, resets = split_documents(request, c_initial, cu_seqlens)
    task = choose(
        request, q, v, backward=True, kept=states is not None, ends=ends, strided=strided, documents=documents
    )
    launched = task.launched
    dh = v.new_zeros(v.shape) if dh is None else dh
    if d_last is not None:
        # Between the kernels dC is divided by the headroom.
        d_last = d_last.float()
        d_last = d_last if task.headroom == 1 else d_last / task.headroom
    want_gates = any(needs[3:6])
    q_pair, k_pair = (q, k) if want_gates else (None, None)
    d_initial = empty_state(q, v, normalised=False, documents=documents)[0] if needs[6] else None
    run = partial(run_product, task, cu_seqlens=cu_seqlens)

    if "state" in launched.launches:
        states, _, _ = run_chunk_states(task, "state", k, v, gates, c_initial, resets=resets)
    dq = run("dq", dh, v, k, states, gates, initial=c_initial, pair=q_pair)
    d_states = anchors = None
    if "state_gradient" in launched.launches:
        d_states, _, anchors = run_chunk_states(
            task, "state_gradient", q, dh, gates, d_last, last=d_initial,
            forward_states=states if want_gates and not launched.in_order else None, resets=resets,
        )  # fmt: skip
    del states
    dk = run("dk", v, dh, q, d_states, gates, initial=d_last, pair=k_pair, anchor_states=dq.anchor_states)
    dq.anchor_states = dk.anchor_states = None
    last = d_initial if launched.whole else None
    dv = run("dv", k, q, dh, d_states, gates, initial=d_last, last=last)

    if d_initial is not None and task.headroom != 1:
        d_initial *= task.headroom
    d_decay = d_input = d_head = None
    if dq.row_sums is not None and dk.row_sums is not None:
        d_decay, d_input, d_head = run_gates_backward(
            request, dq.row_sums, dk.row_sums, dk.anchors if launched.in_order else anchors, launched.anchor_every,
            decay, input_gate, head, cu_seqlens, resets, end_is_known=d_last is None,
        )  # fmt: skip
    dn_initial = None
    if dn_last is not None and request.stabilised:
        dn_initial = add_normaliser_gradients(
            dn_last, gates, launched.stretch, k, n_initial, dk.out, decay, d_decay, d_input, cu_seqlens
        )
    # dq and dk have been computed for every head; those of heads that share q and k (Mamba-2's C and B) are added up.
    return (
        *(x if x.shape == like.shape else run_sum(x, like) for x, like in ((dq.out, q), (dk.out, k))),
        dv.out, d_decay, d_input, d_head, d_initial, dn_initial, None, None,
    )  # fmt: skip


SCALAR_DECAY = Differentiable(
    "scalar_decay",
    request=EngineRequest,
    tensors=("q", "k", "v", "decay?", "input_gate?", "head?", "c_initial?", "n_initial?", "m_initial?", "cu_seqlens?"),
    outputs=("h", "c", "n", "m"),
    saved=GateVectors._fields,
    constant=("m",),
    strided=3,
    forward=_forward,
    backward=_backward,
    shapes=_shapes,
)
"""h and the last state, with gradients of q, k, v, the gates and the initial state C and n."""
