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
    ChunkOutputsConfig,
    FusedChunkConfig,
    NormaliserConfig,
    StatesConfig,
    WholeStateConfig,
    anchor_every,
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
from .roles import OUTPUT, Anchors, Denominators, GateVectors, Role, Shape
from .step import step_kernel

HAS_WHOLE_STATE = not (WHOLE_STATE_FORM.why_not_with({"triton": triton.__version__}) or is_interpreted())
"""Whether whole_state.py can be imported: Gluon's names change with Triton's versions, and it has no interpreter."""
if HAS_WHOLE_STATE:
    from .chunk_states_hopper import chunk_states_hopper_kernel
    from .whole_state import whole_state_kernel

STEP_BLOCK_K, STEP_BLOCK_V = 32, 64
NO_DENOMINATORS = Denominators()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Everything about one pass but its tensors and their sizes. ``chunk`` is the chunk length; the first
    ``whole_heads`` of the B * H heads are whole; ``scale`` is the caller's divided by ``headroom`` (roles.Shape)."""

    gate: str
    scale: float
    chunk: int
    whole_heads: int
    state_dtype: torch.dtype
    scheme: str
    inv_tau: float = 1.0
    headroom: float = 1.0

    @property
    def stabilised(self) -> bool:
        return self.gate == "exp"

    @property
    def anchor_every(self) -> int:
        """Positions from one anchor to the next where a chunk is processed tile by tile."""
        return anchor_every(self.scheme, self.chunk, sums_decay=self.gate == "ssd")


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


def empty_gates(gate: str, v: Tensor, stretch: int, dtype: torch.dtype) -> GateVectors:
    """Allocate the gate vectors of values v [B, T, H, V], cumulative over ``stretch`` positions."""
    B, T, H, _ = v.shape
    N = cdiv(T, stretch)

    positions, exp = (B, H, T), gate == "exp"
    empty = partial(v.new_empty, dtype=dtype)
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
    problem: Pass,
    stretch: int,
    v: Tensor,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
    m_initial: Tensor | None,
    *,
    dtype: torch.dtype,
) -> tuple[GateVectors, Tensor | None]:
    """Launch the gate kernels, which make the gate vectors, cumulative over ``stretch`` positions.

    Returns:
        The gate vectors in ``dtype``, with log_denom not yet filled, and the last m [B, H] in base e.
    """
    B, T, H, _ = v.shape
    N = cdiv(T, stretch)
    gates = empty_gates(problem.gate, v, stretch, dtype)
    b, u, w, g, edge, m, _ = gates
    g_max, m_last = (torch.empty_like(g), _empty(B, H, like=v)) if problem.stabilised else (None, None)
    tile = _gates_tile(H, stretch)
    gates_forward_kernel[(cdiv(H, tile["BLOCK_H"]) * N * B,)](
        decay, input_gate, head, b, u, w, g, m, g_max, problem.inv_tau, T, stretch, N, H=H, GATE=problem.gate, **tile
    )
    if problem.stabilised:
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
    problem: Pass,
    config: StatesConfig,
    y: Tensor,
    z: Tensor,
    gates: GateVectors,
    stretch: int,
    initial: Tensor | None,
    *,
    n_initial: Tensor | None = None,
    last: Tensor | None = None,
    n_last: Tensor | None = None,
    want_n: bool = False,
    future: bool = False,
    forward_states: Tensor | None = None,
) -> ChunkStates:
    """Launch the pass over the chunks; ``future`` runs it backward in time.

    Args:
        y, z: k and v, or q and dh.
        last, n_last: the cut heads' state after the pass's last step is written here [B, H, DX, DZ] and [B, H, DX].
        forward_states: the forward pass's states, from which to compute anchors; None: no anchors.
    """
    B, T, H, DZ = z.shape
    DX = y.shape[3]
    N = cdiv(T, problem.chunk)
    heads = B * H - problem.whole_heads
    result = ChunkStates(states=_empty(heads, N, DX, DZ, like=z, dtype=problem.state_dtype))
    if want_n:
        result.n_states = _empty(heads, N, DX, like=z)
    ends = (initial, n_initial, result.states, result.n_states, last, n_last)
    shape = _shape(y.shape, z.shape, H, problem.headroom)
    tiles = cdiv(DX, config.block_x) * cdiv(DZ, config.block_z)
    local = config.parallel and N > 1 and forward_states is None
    # The pass's last chunk is not computed unless the last state is wanted: no chunk follows it.
    chunks = 1 if not local else N if last is not None else N - 1
    grid = (tiles * heads * chunks,)
    if local and config.whole_state:
        triton.set_allocator(scratch)
        chunk_states_hopper_kernel[grid](
            y, z, gates, result.states, result.n_states, math.log2(problem.scale), T, problem.chunk, N, heads,
            problem.whole_heads, SHAPE=shape, FUTURE=future, TILE=config, num_warps=config.num_warps,
        )  # fmt: skip
    else:
        if forward_states is not None:
            result.anchors = _empty(tiles, B, H, N, like=z)
        # A chunk's contribution is computed from zero; the merge takes the initial state and writes the last one.
        own = (None, None, result.states, result.n_states, None, None) if local else ends
        chunk_states_kernel[grid](
            y, z, gates, *own, Anchors(forward_states, result.anchors), problem.scale, T, problem.chunk, N, stretch,
            B * H, SHAPE=shape, FUTURE=future, LOCAL=local, TILE=config, PRECISION=_precision(z),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    if local:
        # BLOCK_G is rounded up to few values, so that chunks of several lengths share a compiled kernel.
        per_chunk = problem.chunk // stretch
        block_g = next(size for size in (32, 256, next_power_of_two(per_chunk)) if per_chunk <= size)
        merge_chunk_states_kernel[(cdiv(DX * DZ, MERGE_BLOCK_E) * heads,)](
            gates.g, gates.edge, *ends, T, problem.chunk, N, stretch, problem.whole_heads, DX=DX, DZ=DZ, FUTURE=future,
            BLOCK_E=MERGE_BLOCK_E, BLOCK_G=block_g, BLOCK_X=next_power_of_two(DX), num_warps=4,
        )  # fmt: skip
    return result


@on_device_of("q")
def run_normaliser(
    problem: Pass,
    config: NormaliserConfig,
    q: Tensor,
    k: Tensor,
    gates: GateVectors,
    denominators: Denominators,
    stretch: int,
) -> None:
    """Launch the normaliser's kernels, which fill ``denominators.log_denom`` and ``denominators.n_last``."""
    B, T, _, K = q.shape
    H = gates.b.shape[1]
    N = cdiv(T, problem.chunk)
    blocks = cdiv(K, config.block_k)
    n_q = _empty(blocks, B, H, T, like=q)
    n_states = denominators.n_states if N > 1 else denominators.n_initial
    triton.set_allocator(scratch)
    normaliser_kernel[(blocks * N * B * H,)](
        q, k, gates, n_states, n_q, denominators.n_last, problem.scale, T, problem.chunk, N, B * H,
        H=H, K=K, GROUP=H // q.shape[2], BLOCK_T=stretch, BLOCK_K=config.block_k, STAGES=config.num_stages,
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
    problem: Pass,
    config: ChunkOutputsConfig,
    role: Role,
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
    N = cdiv(T, problem.chunk)
    tiles_z = cdiv(DZ, config.block_z)
    result = Product(out=_empty(B, T, H, DZ, like=z, dtype=z.dtype))
    if pair is not None:
        result.row_sums = _empty(tiles_z, B, H, T, like=z)
    chunk_o_kernel[(tiles_z * cdiv(problem.chunk, config.block_t) * N * B * H,)](
        x, y, z, states, result.out, gates, n_states, pair, result.row_sums,
        problem.scale, T, problem.chunk, N, B * H,
        SHAPE=_shape(x.shape, z.shape, H, problem.headroom), ROLE=role,
        NORMALISE=problem.stabilised and role == OUTPUT, TILE=config, PRECISION=_precision(z),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return result


@on_device_of("z")
def run_tiles_in_order(
    problem: Pass,
    config: FusedChunkConfig | WholeStateConfig,
    role: Role,
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
    """Launch fused_chunk_kernel or whole_state_kernel, by ``config``; roles.py has x, y, z, the states and the pair.

    A past role with a ``pair`` (dq) returns the states at the anchors; a future role with a ``pair`` (dk) takes them as
    ``anchor_states`` and returns the anchors.

    Args:
        states: before each chunk of the cut heads [heads, N, ...].
        initial: before the first step of the whole heads [B, H, ...]; None is zero.
        last: to which the state after the last step of the whole heads is written [B, H, ...].
        denominators: what mLSTMexp's denominators start from, if the kernel makes them itself.
    """
    walk = choose_walk(problem, config, role, x.shape, z.shape, gates.b.shape[1], z.dtype, capability(z.device))
    result = Product(out=_empty(*walk.out, like=z, dtype=z.dtype), anchor_states=anchor_states)
    if pair is not None:
        result.row_sums = _empty(*walk.row_sums, like=z)
        if role.future:
            result.anchors = _empty(*walk.anchors, like=z)
        else:
            result.anchor_states = _empty(*walk.anchor_states, like=z, dtype=z.dtype)
    blocks = len(walk.launches)
    unfinished = _empty(*walk.out, like=z, dtype=walk.partial_dtype) if blocks > 1 else None
    if denominators is not None:
        gates = gates._replace(log_denom=None)
    triton.set_allocator(scratch)
    for block, (grid, numbers, keywords) in enumerate(walk.launches):
        parts = (result.anchor_states, result.anchors)
        anchors = Anchors(*parts if blocks == 1 else [None if x is None else x.chunk(blocks)[block] for x in parts])
        if isinstance(config, WholeStateConfig):
            out, *sums = (result.out, pair, result.row_sums) if block == blocks - 1 else (unfinished, None, None)
            whole_state_kernel[grid](
                x, y, z, states, initial, unfinished if block else None, out, gates, *sums, last, anchors,
                denominators or NO_DENOMINATORS, *numbers, **keywords,
            )  # fmt: skip
        else:
            fused_chunk_kernel[grid](
                x, y, z, states if walk.several_chunks else initial, unfinished, result.out, gates, pair,
                result.row_sums, last, anchors, *numbers, **keywords,
            )  # fmt: skip
    return result


class Walk(NamedTuple):
    """What follows from sizes in :func:`run_tiles_in_order`: sizes of results, and each launch's grid and numbers."""

    out: tuple[int, ...]
    row_sums: tuple[int, ...]
    anchors: tuple[int, ...]
    anchor_states: tuple[int, ...]
    partial_dtype: torch.dtype
    several_chunks: bool
    launches: list[tuple[tuple[int], tuple[Any, ...], dict[str, Any]]]


@lru_cache(REMEMBERED)
def choose_walk(
    problem: Pass,
    config: FusedChunkConfig | WholeStateConfig,
    role: Role,
    size_x: torch.Size,
    size_z: torch.Size,
    H: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> Walk:
    """Return what follows from the sizes of x and z; H: heads of the output."""
    (B, T, _, DZ), DX = size_z, size_x[3]
    N = cdiv(T, problem.chunk)
    every = problem.anchor_every
    num_anchors = cdiv(T, every)
    blocks, tiles_z, num_sums = len(config.launches(DX)), cdiv(DZ, config.block_z), config.row_sums(DZ)
    shape = _shape(size_x, size_z, H, problem.headroom)
    launches: list[Any] = []
    options: dict[str, Any]
    if isinstance(config, WholeStateConfig):
        # Each walker writes its own anchors.
        shares, columns = num_sums // 4, tiles_z * config.block_z
        heads, scale = problem.whole_heads + N * (B * H - problem.whole_heads), math.log2(problem.scale)
        for column, tile in config.launches(DX):
            numbers = scale, T, problem.chunk, N, B * H, problem.whole_heads, every, column
            options = {"num_warps": 4, "maxnreg": 128 if tile.resident == 2 else None, **register_options(capability)}
            keywords = {"SHAPE": shape, "ROLE": role, "TILE": tile, **options}
            launches.append(((cdiv(DZ, tile.block_z) * heads,), numbers, keywords))
    else:
        shares, columns = tiles_z, DZ
        if B * H * num_anchors * config.block_x >= 2**31:
            expected = f"below 2^31 / {config.block_x} at anchors every {every} positions"
            raise ValueError(f"batch * num_heads * seq_len / {every} must be {expected}, got {B * H * num_anchors}")
        for block in range(blocks):
            flags = {"FIRST": block == 0, "LAST": block == blocks - 1}
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **register_options(capability)}
            keywords = {"SHAPE": shape, "ROLE": role, **flags, "TILE": config, **options}
            launches.append(
                ((tiles_z * N * B * H,), (problem.scale, T, problem.chunk, N, B * H, every, block), keywords)
            )
    return Walk(
        out=(B, T, H, DZ),
        row_sums=(num_sums, B, H, T),
        anchors=(blocks * shares, B, H, num_anchors),
        anchor_states=(blocks, B, H, num_anchors, config.block_x, columns),
        partial_dtype=dtype if config.partial_bytes(DX, bf16=dtype == torch.bfloat16) == 2 else torch.float32,
        several_chunks=N > 1,
        launches=launches,
    )


@on_device_of("q_dq")
def run_gates_backward(
    problem: Pass,
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
        problem.inv_tau, T, stretch, N, B * H,
        H=H, GATE=problem.gate, NUM_SUMS=NUM_SUMS, NUM_ANCHORS=0 if anchors is None else anchors.shape[0],
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
    problem: Pass,
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
    h, last = torch.empty_like(v), empty_state(q, v, normalised=problem.stabilised)
    block_v = min(STEP_BLOCK_V, padded(V))
    step_kernel[(cdiv(V, block_v) * B * H,)](
        q.detach(), k.detach(), v.detach(), decay, input_gate, head, c, n, m, h, *last,
        problem.scale * problem.headroom, problem.inv_tau, H=H, K=K, V=V, GROUP=H // q.shape[2], GATE=problem.gate,
        BLOCK_K=min(STEP_BLOCK_K, padded(K)), BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return h, *last
