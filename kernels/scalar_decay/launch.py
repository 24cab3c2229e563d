"""Launchers of the engine's kernels, which allocate outputs and choose grids; autograd.py calls them in order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..common.arguments import is_interpreted
from ..common.device import capability, on_device_of, scratch
from ..common.sizes import REMEMBERED, cdiv, next_power_of_two, padded
from ..common.versions import register_options
from .chunk_o import chunk_o_kernel
from .chunk_states import chunk_states_kernel, merge_chunk_states_kernel
from .config import (
    GATES_BLOCK_T,
    GATES_TILE,
    MERGE_BLOCK_E,
    SCAN_BLOCK_N,
    SUM_BLOCK,
    WholeStateConfig,
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
from .normaliser import denominator_kernel, normaliser_kernel
from .plan import Pass
from .roles import Anchors, Denominators, GateVectors, Shape
from .step import step_kernel

HAS_WHOLE_STATE = not (WHOLE_STATE_FORM.why_not_with({"triton": triton.__version__}) or is_interpreted())
"""Whether whole_state.py can be imported: Gluon's names change with Triton's versions, and it has no interpreter."""
if HAS_WHOLE_STATE:
    from .chunk_states_hopper import chunk_states_hopper_kernel
    from .whole_state import whole_state_kernel

STEP_BLOCK_K, STEP_BLOCK_V = 32, 64
NO_DENOMINATORS = Denominators()


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
    """

    request: EngineRequest
    launched: Pass
    scale: float
    headroom: float
    keeps_states: bool


def _empty(*shape: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=dtype)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@lru_cache(REMEMBERED)
def _shape(size_x: torch.Size, size_z: torch.Size, heads: int, headroom: float) -> Shape:
    (heads_x, dim_x), (heads_z, dim_z) = size_x[2:], size_z[2:]
    return Shape(
        heads, dim_x, dim_z, group_x=heads // heads_x, group_z=heads // heads_z,
        row_x=heads_x * dim_x, row_z=heads_z * dim_z, row_out=heads * dim_z, headroom=headroom,
    )  # fmt: skip


@lru_cache(REMEMBERED)
def _gates_tile(heads: int, stretch: int) -> dict[str, Any]:
    """Return a gate kernel's tile and warps. The float32 gates of eight heads fill a sector of memory, 32 bytes."""
    block_t = min(GATES_BLOCK_T, padded(stretch))
    block_h = min(8, GATES_TILE // block_t, next_power_of_two(heads))
    num_warps = max(1, block_h * block_t // 128)
    return {"BLOCK_H": block_h, "BLOCK_T": block_t, "ONCE": stretch <= block_t, "num_warps": num_warps}


def empty_gates(gate: str, v: Tensor, stretch: int, *, in_order: bool) -> GateVectors:
    """Allocate the gate vectors of values v [B, T, H, V], cumulative over ``stretch`` positions."""
    B, T, H, _ = v.shape
    N = cdiv(T, stretch)

    positions, exp = (B, H, T), gate == "exp"
    # Where a chunk's tiles are taken in parallel, differences over a whole chunk are taken.
    empty = partial(v.new_empty, dtype=torch.float32 if in_order else torch.float64)
    return GateVectors(
        b=empty(positions),
        u=empty(positions) if gate in ("sig", "exp", "ssd") else None,
        w=empty(positions),
        g=empty((B, H, N)),
        edge=empty((B, H, N + 1)) if exp else None,
        m=v.new_empty(positions, dtype=torch.float32) if exp else None,
        log_denom=empty(positions) if exp else None,
    )


def empty_state(q: Tensor, v: Tensor, *, normalised: bool) -> tuple[Any, ...]:
    """Allocate a state: C [B, H, K, V], and n [B, H, K] and m [B, H] of mLSTMexp or None."""
    shape = (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    n, m = (v.new_empty(shape[:dims], dtype=torch.float32) if normalised else None for dims in (3, 2))
    return v.new_empty(shape, dtype=torch.float32), n, m


@on_device_of("v")
def run_gates(
    task: EnginePass,
    v: Tensor,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
    m_initial: Tensor | None,
) -> tuple[GateVectors, Tensor | None]:
    """Launch the gate kernels.

    Returns:
        The gate vectors, with log_denom not yet filled, and the last m [B, H] in base e.
    """
    B, T, H, _ = v.shape
    request, stretch = task.request, task.launched.stretch
    N = cdiv(T, stretch)
    gates = empty_gates(request.gate, v, stretch, in_order=task.launched.in_order)
    b, u, w, g, edge, m, _ = gates
    g_max, m_last = (torch.empty_like(g), _empty(B, H, like=v)) if request.stabilised else (None, None)
    tile = _gates_tile(H, stretch)
    gates_forward_kernel[(cdiv(H, tile["BLOCK_H"]) * N * B,)](
        decay, input_gate, head, b, u, w, g, m, g_max, request.inv_tau, T, stretch, N, H=H, GATE=request.gate, **tile
    )
    if request.stabilised:
        stabiliser_scan_kernel[(B * H,)](g, g_max, m_initial, edge, m_last, N, BLOCK_N=SCAN_BLOCK_N)
        grid = (cdiv(T, SCAN_BLOCK_N) * B * H,)
        stabiliser_finish_kernel[grid](b, edge, m, T, stretch, N, BLOCK_T=SCAN_BLOCK_N)
    return gates, m_last


@dataclass(slots=True, kw_only=True)
class ChunkStates:
    """The results of a pass over the chunks of the cut heads.

    Attributes:
        states: the state before each chunk or, of a pass backward in time, the gradient of the state after each chunk,
            [heads, N, K, V].
        n_states: n before each chunk [heads, N, K].
        anchors: <C, dC> at each chunk's start [tiles of the state, B, H, N].
    """

    states: Tensor
    n_states: Tensor | None = None
    anchors: Tensor | None = None


@on_device_of("z")
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
) -> ChunkStates:
    """Launch the pass over the chunks, backward in time where ``name`` is state_gradient.

    Args:
        y, z: k and v, or q and dh.
        last, n_last: the cut heads' state after the pass's last step is written here [B, H, DX, DZ] and [B, H, DX].
        forward_states: the forward pass's states, from which to compute anchors; None: no anchors.
    """
    B, T, H, DZ = z.shape
    DX = y.shape[3]
    launched, states, future = task.launched, task.launched.launches[name], name == "state_gradient"
    config, heads, N, chunk, stretch = states.tile, states.heads, states.chunks, launched.chunk, launched.stretch
    result = ChunkStates(states=_empty(heads, N, DX, DZ, like=z, dtype=task.request.state_dtype))
    if want_n:
        result.n_states = _empty(heads, N, DX, like=z)
    ends = (initial, n_initial, result.states, result.n_states, last, n_last)
    shape = _shape(y.shape, z.shape, H, task.headroom)
    grid = (states.programs(want_last=last is not None),)
    if config.whole_state:
        triton.set_allocator(scratch)
        chunk_states_hopper_kernel[grid](
            y, z, gates, result.states, result.n_states, math.log2(task.scale), T, chunk, N, heads, launched.whole,
            SHAPE=shape, FUTURE=future, TILE=config, num_warps=config.num_warps,
        )  # fmt: skip
    else:
        if forward_states is not None:
            result.anchors = _empty(math.prod(states.blocks), B, H, N, like=z)
        # A chunk's contribution is computed from zero; the merge takes the initial state and writes the last one.
        own = (None, None, result.states, result.n_states, None, None) if config.parallel else ends
        chunk_states_kernel[grid](
            y, z, gates, *own, Anchors(forward_states, result.anchors), task.scale, T, chunk, N, stretch, B * H,
            SHAPE=shape, FUTURE=future, LOCAL=config.parallel, TILE=config, PRECISION=_precision(z),
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
    return result


@on_device_of("q")
def run_normaliser(task: EnginePass, q: Tensor, k: Tensor, gates: GateVectors, denominators: Denominators) -> None:
    """Launch the normaliser's kernels, which fill ``denominators.log_denom`` and ``denominators.n_last``."""
    B, T, _, K = q.shape
    H = gates.b.shape[1]
    launched = task.launched
    config, blocks, block_t = launched.launches["normaliser"]
    n_q = _empty(blocks, B, H, T, like=q)
    n_states = denominators.n_states if launched.several else denominators.n_initial
    triton.set_allocator(scratch)
    normaliser_kernel[(blocks * launched.head_chunks,)](
        q, k, gates, n_states, n_q, denominators.n_last, task.scale, T, launched.chunk, launched.chunks, B * H,
        H=H, K=K, GROUP=H // q.shape[2], BLOCK_T=block_t, BLOCK_K=config.block_k, STAGES=config.num_stages,
        num_warps=config.num_warps, num_stages=config.num_stages,
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


@on_device_of("z")
def run_tiles_in_parallel(
    task: EnginePass,
    name: str,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    states: Tensor | None,
    gates: GateVectors,
    *,
    n_states: Tensor | None = None,
    pair: Tensor | None = None,
) -> Product:
    """Launch the kernel that takes a chunk's tiles in parallel; see roles.py for x, y, z, the states and the pair."""
    B, T, _, DZ = z.shape
    H = gates.b.shape[1]
    launched, product = task.launched, task.launched.launches[name]
    config, blocks = product.tile, product.launches[0].blocks
    result = Product(out=_empty(B, T, H, DZ, like=z, dtype=z.dtype))
    if pair is not None:
        result.row_sums = _empty(blocks, B, H, T, like=z)
    chunk_o_kernel[(blocks * cdiv(launched.chunk, config.block_t) * launched.head_chunks,)](
        x, y, z, states, result.out, gates, n_states, pair, result.row_sums,
        task.scale, T, launched.chunk, launched.chunks, B * H,
        SHAPE=_shape(x.shape, z.shape, H, task.headroom), ROLE=product.role,
        NORMALISE=task.request.stabilised and name == "h", TILE=config, PRECISION=_precision(z),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return result


@on_device_of("z")
def run_tiles_in_order(
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
    denominators: Denominators | None = None,
) -> Product:
    """Launch fused_chunk_kernel or whole_state_kernel; see roles.py for x, y, z, the states and the pair.

    A past role with a ``pair`` (dq) returns the states at the anchors; a future role with a ``pair`` (dk) takes them as
    ``anchor_states`` and returns the anchors.

    Args:
        states: before each chunk of the cut heads [heads, N, ...].
        initial: before the first step of the whole heads [B, H, ...]; None is zero.
        last: to which the state after the last step of the whole heads is written [B, H, ...].
        denominators: what mLSTMexp's denominators start from, if the kernel makes them itself.
    """
    B, T, _, DZ = z.shape
    H = gates.b.shape[1]
    product = task.launched.launches[name]
    config = product.tile
    launches = _launches(task, name, x.shape, z.shape, H, capability(z.device))
    num_sums, blocks, whole_state = config.row_sums(DZ), len(launches), isinstance(config, WholeStateConfig)
    result = Product(out=_empty(B, T, H, DZ, like=z, dtype=z.dtype), anchor_states=anchor_states)
    if pair is not None:
        result.row_sums = _empty(num_sums, B, H, T, like=z)
        num_anchors = cdiv(T, task.launched.anchor_every)
        if product.role.future:
            # Each walker of whole_state writes its own anchors.
            shares = num_sums // 4 if whole_state else num_sums
            result.anchors = _empty(blocks * shares, B, H, num_anchors, like=z)
        else:
            columns = product.launches[-1].blocks * config.block_z if whole_state else DZ
            size = (blocks, B, H, num_anchors, config.block_x, columns)
            result.anchor_states = _empty(*size, like=z, dtype=z.dtype)
    unfinished = None
    if blocks > 1:
        half = config.partial_bytes(product.dim_x, bf16=z.dtype == torch.bfloat16) == 2
        unfinished = _empty(B, T, H, DZ, like=z, dtype=z.dtype if half else torch.float32)
    if denominators is not None:
        gates = gates._replace(log_denom=None)
    triton.set_allocator(scratch)
    for block, (grid, numbers, keywords) in enumerate(launches):
        found = (result.anchor_states, result.anchors)
        anchors = Anchors(*found if blocks == 1 else [None if x is None else x.chunk(blocks)[block] for x in found])
        if whole_state:
            out, *sums = (result.out, pair, result.row_sums) if block == blocks - 1 else (unfinished, None, None)
            whole_state_kernel[grid](
                x, y, z, states, initial, unfinished if block else None, out, gates, *sums, last, anchors,
                denominators or NO_DENOMINATORS, *numbers, **keywords,
            )  # fmt: skip
        else:
            fused_chunk_kernel[grid](
                x, y, z, states if task.launched.several else initial, unfinished, result.out, gates, pair,
                result.row_sums, last, anchors, *numbers, **keywords,
            )  # fmt: skip
    return result


@lru_cache(REMEMBERED)
def _launches(
    task: EnginePass, name: str, size_x: torch.Size, size_z: torch.Size, H: int, capability: tuple[int, int]
) -> list[tuple[tuple[int], tuple[Any, ...], dict[str, Any]]]:
    """Return each launch's grid, numbers and keywords in :func:`run_tiles_in_order`; H: heads of the output."""
    launched, T = task.launched, size_z[1]
    product = launched.launches[name]
    config, parts, every = product.tile, product.launches, launched.anchor_every
    shape = _shape(size_x, size_z, H, task.headroom)
    launches: list[Any] = []
    for block, part in enumerate(parts):
        numbers: tuple[Any, ...] = T, launched.chunk, launched.chunks, launched.heads
        options: dict[str, Any] = {"SHAPE": shape, "ROLE": product.role}
        if isinstance(config, WholeStateConfig):
            numbers = math.log2(task.scale), *numbers, launched.whole, every, part.first
            options |= {"TILE": part.tile, "num_warps": 4, "maxnreg": 128 if part.tile.resident == 2 else None}
        else:
            if (anchors := launched.heads * cdiv(T, every)) * config.block_x >= 2**31:
                expected = f"below 2^31 / {config.block_x} at anchors every {every} positions"
                raise ValueError(f"batch * num_heads * seq_len / {every} must be {expected}, got {anchors}")
            numbers = task.scale, *numbers, every, block
            options |= {"FIRST": block == 0, "LAST": block == len(parts) - 1, "TILE": config}
            options |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
        grid = (part.blocks * launched.head_chunks,)
        launches.append((grid, numbers, {**options, **register_options(capability)}))
    return launches


@on_device_of("q_dq")
def run_gates_backward(
    request: EngineRequest,
    q_dq: Tensor,
    k_dk: Tensor,
    anchors: Tensor | None,
    every: int,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
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
        q_dq, k_dk, anchors, decay, input_gate, head, d_decay, d_input, d_head,
        request.inv_tau, T, stretch, N, B * H,
        H=H, GATE=request.gate, NUM_SUMS=NUM_SUMS, NUM_ANCHORS=0 if anchors is None else anchors.shape[0],
        END_IS_KNOWN=end_is_known, **tile,
    )  # fmt: skip
    return d_decay, d_input, None if d_head is None or head is None else run_sum(d_head, head)


@on_device_of("x")
def run_sum(x: Tensor, like: Tensor) -> Tensor:
    """Launch sum_kernel to sum x to the shape of ``like``: [B, N, H] to [H], or [B, T, H, D] to [B, T, G, D]."""
    result = torch.empty_like(like)
    inner, count = x.shape[-1], like.numel()
    columns = next_power_of_two(inner)
    rows, tile = count // inner, max(1, SUM_BLOCK // columns)
    sum_kernel[(cdiv(rows, tile),)](x, result, rows, x.numel() // count, INNER=inner, ROWS=tile, COLS=columns)
    return result


@on_device_of("v")
def run_step(
    request: EngineRequest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
    c: Tensor | None,
    n: Tensor | None,
    m: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Launch the decoding step; return h [B, 1, H, V] and the new C, n and m. The given state is not overwritten."""
    B, _, H, V = v.shape
    K = q.shape[3]
    h, last = torch.empty_like(v), empty_state(q, v, normalised=request.stabilised)
    block_v = min(STEP_BLOCK_V, padded(V))
    step_kernel[(cdiv(V, block_v) * B * H,)](
        q.detach(), k.detach(), v.detach(), decay, input_gate, head, c, n, m, h, *last,
        request.scale, request.inv_tau, H=H, K=K, V=V, GROUP=H // q.shape[2], GATE=request.gate,
        BLOCK_K=min(STEP_BLOCK_K, padded(K)), BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return h, *last
