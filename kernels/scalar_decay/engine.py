"""The Triton engine for scalar-decay linear RNNs: launches, autograd and the two chunkwise schemes built on it.

    C_t = exp(a_t) C_{t-1} + exp(u_t) k_t v_t^T        h_t = scale C_t^T q_t  (/ denominator for mLSTMexp)

Source: "Tiled Flash Linear Attention" (TFLA), sections 2.2 and 3.2, appendices B and C. The forward pass runs the gate
kernels, the recurrent kernel (one state per chunk) and the parallel kernel; the backward pass recomputes the states
rather than storing them, runs the recurrent kernel backward in time and the parallel kernel once for each of dq, dk
and dv, and turns row sums taken there into the gates' gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.device import on_device_of
from .config import (
    ANCHOR_EVERY,
    DEFAULT_ANCHOR_EVERY,
    GATES_BLOCK_T,
    MERGE_BLOCK_E,
    SCAN_BLOCK_N,
    EngineConfig,
    MixConfig,
    NormaliserConfig,
    StatesConfig,
    WalkConfig,
    default_chunk_size,
    fit_chunk,
    next_power_of_two,
    select_config,
)
from .gates import gates_backward_kernel, gates_forward_kernel, stabiliser_finish_kernel, stabiliser_scan_kernel
from .mix import mix_kernel
from .normaliser import denominator_kernel, normaliser_kernel
from .states import merge_kernel, states_kernel
from .walk import walk_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What one call computes, beside its tensors: gate function, scale, chunk length, state dtype, launches."""

    gate: str
    scale: float
    chunk: int
    state_dtype: torch.dtype
    scheme: str = "walk"
    inv_tau: float = 1.0
    config: EngineConfig[Any] | None = None

    @property
    def stabilised(self) -> bool:
        return self.gate == "exp"

    @property
    def has_u(self) -> bool:
        return self.gate in ("sig", "exp", "ssd")


@dataclass(slots=True, kw_only=True)
class Gates:
    """Gate vectors of one call, base 2: [B, H, T] each, g [B, H, NG], edge [B, H, NG + 1]; m_last [B, H] in base e.

    ``chunk`` is the stretch they accumulate over, and NG how many of them cover T.
    """

    chunk: int

    b: Tensor
    u: Tensor | None
    w: Tensor
    g: Tensor
    edge: Tensor | None
    m: Tensor | None
    m_last: Tensor | None = None
    log_denom: Tensor | None = None


GATE_TENSORS = ("b", "u", "w", "g", "edge", "m", "log_denom")


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability that launches are chosen for; the interpreter on the CPU counts as sm_90."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def launches(problem: Problem, q: Tensor, v: Tensor) -> EngineConfig[Any]:
    """Return the problem's launches, chosen for the device when the caller gave none."""
    if problem.config is not None:
        return problem.config
    return select_config(
        scheme=problem.scheme,
        capability=capability(v.device),
        item_bytes=v.element_size(),
        head_dim_qk=q.shape[3],
        head_dim_v=v.shape[3],
        chunk=problem.chunk,
        rows=v.shape[0] * v.shape[2],
    )


def _empty(*shape: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=dtype)


@on_device_of("v")
def run_gates(
    problem: Problem,
    config: EngineConfig[Any],
    v: Tensor,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
    m_initial: Tensor | None,
) -> Gates:
    """Launch the gate kernels: log gates cumulative over a chunk or tile and, for mLSTMexp, the stabiliser."""
    B, T, H, _ = v.shape
    L = config.gate_chunk(problem.chunk)
    N = triton.cdiv(T, L)
    dtype = torch.float32 if config.walks else torch.float64

    def vector(*shape: int) -> Tensor:
        return _empty(B, H, *shape, like=v, dtype=dtype)

    b, w, g = vector(T), vector(T), vector(N)
    u = vector(T) if problem.has_u else None
    m = g_max = edge = m_last = None
    if problem.stabilised:
        g_max, edge = vector(N), vector(N + 1)
        m, m_last = _empty(B, H, T, like=v), _empty(B, H, like=v)
    block_t = min(L, GATES_BLOCK_T)
    gates_forward_kernel[(N * B * H,)](
        decay, input_gate, head, b, u, w, g, m, g_max, problem.inv_tau, T, L, N,
        H=H, GATE=problem.gate, BLOCK_T=block_t, num_warps=4 if block_t >= 128 else 1,
    )  # fmt: skip
    if problem.stabilised:
        stabiliser_scan_kernel[(B * H,)](
            g, g_max, m_initial, edge, m_last, N, HAS_INITIAL=m_initial is not None, BLOCK_N=SCAN_BLOCK_N
        )
        stabiliser_finish_kernel[(triton.cdiv(T, SCAN_BLOCK_N) * B * H,)](b, edge, m, T, L, N, BLOCK_T=SCAN_BLOCK_N)
    return Gates(chunk=L, b=b, u=u, w=w, g=g, edge=edge, m=m, m_last=m_last)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@on_device_of("values")
def run_states(
    problem: Problem,
    config: StatesConfig,
    keys: Tensor,
    values: Tensor,
    gates: Gates,
    initial: Tensor | None,
    *,
    n_initial: Tensor | None = None,
    want_last: bool = False,
    want_n: bool = False,
    reverse: bool = False,
    forward_states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Launch the recurrent kernel; ``reverse`` runs it backward in time on (q, dh).

    Returns:
        states [B, H, N, K, V] (before each chunk; backward: after it), n states [B, H, N, K], last state [B, H, K, V],
        last n [B, H, K] and, given the forward states, the anchors [tiles, B, H, N]; None where not asked for.
    """
    B, T, H, V = values.shape
    K = keys.shape[3]
    N = triton.cdiv(T, problem.chunk)
    want_anchors = forward_states is not None
    states = _empty(B, H, N, K, V, like=values, dtype=problem.state_dtype)
    n_states = _empty(B, H, N, K, like=values) if want_n else None
    last = _empty(B, H, K, V, like=values) if want_last else None
    n_last = _empty(B, H, K, like=values) if want_last and want_n else None
    tiles = triton.cdiv(K, config.block_k) * triton.cdiv(V, config.block_v)
    anchors = _empty(tiles, B, H, N, like=values) if want_anchors else None
    local = config.parallel and N > 1 and not want_anchors
    states_kernel[(tiles * B * H * (N if local else 1),)](
        keys, values, gates.b if reverse else gates.w, gates.g, gates.edge, gates.m, gates.log_denom,
        None if local else initial, None if local else n_initial, states, n_states,
        None if local else last, None if local else n_last, forward_states, anchors,
        problem.scale, T, problem.chunk, N, gates.chunk, B * H,
        H=H, K=K, V=V, GROUP=H // keys.shape[2], REVERSE=reverse, STABILISED=problem.stabilised,
        HAS_INITIAL=initial is not None and not local, HAS_LAST=want_last and not local, WITH_N=want_n,
        ANCHORS=want_anchors, LOCAL=local, BLOCK_T=config.block_t, BLOCK_K=config.block_k, BLOCK_V=config.block_v,
        PRECISION=_precision(values), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if local:
        merge_kernel[(triton.cdiv(K * V, MERGE_BLOCK_E) * B * H,)](
            gates.g, gates.edge, initial, n_initial, states, n_states, last, n_last,
            T, problem.chunk, N, gates.chunk,
            K=K, V=V, REVERSE=reverse, STABILISED=problem.stabilised, HAS_INITIAL=initial is not None,
            HAS_LAST=want_last, WITH_N=want_n, BLOCK_E=MERGE_BLOCK_E,
            BLOCK_G=next_power_of_two(problem.chunk // gates.chunk), BLOCK_K=next_power_of_two(K), num_warps=4,
        )  # fmt: skip
    return states, n_states, last, n_last, anchors


@on_device_of("q")
def run_normaliser(
    problem: Problem,
    config: NormaliserConfig,
    q: Tensor,
    k: Tensor,
    n_states: Tensor | None,
    gates: Gates,
    *,
    heads: int,
    want_last: bool,
) -> Tensor | None:
    """Launch the normaliser's kernels: fill ``gates.log_denom``; return the last n [B, H, K] of a single chunk."""
    B, T, _, K = q.shape
    N = triton.cdiv(T, problem.chunk)
    blocks = triton.cdiv(K, config.block_k)
    n_q = _empty(blocks, B, heads, T, like=q)
    n_last = _empty(B, heads, K, like=q) if want_last else None
    triton.set_allocator(scratch)
    normaliser_kernel[(blocks * N * B * heads,)](
        q, k, gates.b, gates.u, gates.w, gates.g, gates.edge, gates.m, n_states, n_q, n_last,
        problem.scale, T, problem.chunk, N, B * heads,
        H=heads, K=K, GROUP=heads // q.shape[2], HAS_STATE=n_states is not None, HAS_LAST=want_last,
        BLOCK_T=gates.chunk, BLOCK_K=config.block_k, STAGES=config.num_stages,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    count = B * heads * T
    denominator_kernel[(triton.cdiv(count, SCAN_BLOCK_N),)](
        n_q, gates.m, gates.log_denom, count, blocks, BLOCK=SCAN_BLOCK_N
    )
    return n_last


@on_device_of("z")
def run_mix(
    problem: Problem,
    config: MixConfig,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    states: Tensor | None,
    gates: Gates,
    *,
    heads: int,
    future: bool,
    transposed: bool,
    n_states: Tensor | None = None,
    normalise: bool = False,
    pair: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch the sweeping kernel; see mix.py for the four roles of x, y, z and the states.

    Returns:
        out [B, T, H, DZ] in z's dtype, and the row sums of out * pair [tiles, B, H, T] where a pair is given.
    """
    B, T, _, DZ = z.shape
    H = heads
    N = triton.cdiv(T, problem.chunk)
    out = _empty(B, T, H, DZ, like=z, dtype=z.dtype)
    tiles_z = triton.cdiv(DZ, config.block_z)
    row_sums = None if pair is None else _empty(tiles_z, B, H, T, like=z)
    grid = (tiles_z * triton.cdiv(problem.chunk, config.block_t) * N * B * H,)
    mix_kernel[grid](
        x, y, z, states, out, gates.b, gates.u, gates.g, gates.edge, gates.m, gates.log_denom, n_states, pair,
        row_sums, problem.scale, T, problem.chunk, N, B * H,
        H=H, DX=x.shape[3], DZ=DZ, GROUP_X=H // x.shape[2], GROUP_Z=H // z.shape[2], FUTURE=future,
        TRANSPOSED=transposed, HAS_STATE=states is not None, HAS_U=problem.has_u, STABILISED=problem.stabilised,
        NORMALISE=normalise, SUMS=pair is not None, BLOCK_T=config.block_t, BLOCK_S=config.block_s,
        BLOCK_X=config.block_x, BLOCK_Z=config.block_z, PRECISION=_precision(z),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, row_sums


@dataclass(slots=True, kw_only=True)
class Walk:
    """What a walk leaves beside its output."""

    out: Tensor
    row_sums: Tensor | None = None
    last: Tensor | None = None
    anchor_states: Tensor | None = None
    anchors: Tensor | None = None


@on_device_of("z")
def run_walk(
    problem: Problem,
    config: WalkConfig,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    states: Tensor | None,
    gates: Gates,
    *,
    heads: int,
    future: bool,
    transposed: bool,
    pair: Tensor | None = None,
    want_last: bool = False,
    anchor_states: Tensor | None = None,
) -> Walk:
    """Launch the walking kernel; see mix.py for the four roles of x, y, z and the states.

    A past role with a ``pair`` (dq) leaves the states at the anchors, the future role that gets them (dk) the anchors
    [tiles, B, H, ceil(T / every)]. ``want_last`` needs a single chunk and writes the state in the layout of ``states``.
    """
    B, T, _, DZ = z.shape
    DX = x.shape[3]
    H = heads
    N = triton.cdiv(T, problem.chunk)
    every = anchor_every(problem)
    anchors = triton.cdiv(T, every)
    blocks = triton.cdiv(DX, config.block_x)
    tiles_z = triton.cdiv(DZ, config.block_z)
    result = Walk(out=_empty(B, T, H, DZ, like=z, dtype=z.dtype), anchor_states=anchor_states)
    if pair is not None:
        result.row_sums = _empty(tiles_z, B, H, T, like=z)
        if future:
            result.anchors = _empty(blocks, tiles_z, B, H, anchors, like=z)
        else:
            result.anchor_states = _empty(blocks, B, H, anchors, config.block_x, DZ, like=z, dtype=z.dtype)
    if want_last:
        result.last = _empty(B, H, *((DZ, DX) if transposed else (DX, DZ)), like=z)
    # One extra bf16 rounding costs less accuracy than the traffic of a float32 partial costs time; more would not.
    partial_dtype = torch.bfloat16 if z.dtype == torch.bfloat16 and blocks == 2 else torch.float32
    partial = _empty(B, T, H, DZ, like=z, dtype=partial_dtype) if blocks > 1 else None
    if B * H * anchors * config.block_x >= 2**31:
        expected = f"below 2^31 / {config.block_x} at anchors every {every} positions"
        raise ValueError(f"batch * num_heads * seq_len / {every} must be {expected}, got {B * H * anchors}")
    triton.set_allocator(scratch)
    for block in range(blocks):
        walk_kernel[(tiles_z * N * B * H,)](
            x, y, z, states, partial, result.out,
            gates.b, gates.u, gates.w, gates.g, gates.edge, gates.m, gates.log_denom,
            pair, result.row_sums, result.last,
            None if result.anchor_states is None else result.anchor_states[block],
            None if result.anchors is None else result.anchors[block],
            problem.scale, T, problem.chunk, N, B * H, every, block,
            H=H, DX=DX, DZ=DZ, GROUP_X=H // x.shape[2], GROUP_Z=H // z.shape[2],
            FIRST=block == 0, LAST=block == blocks - 1, FUTURE=future, TRANSPOSED=transposed,
            HAS_STATE=states is not None, HAS_LAST=want_last, HAS_U=problem.has_u, STABILISED=problem.stabilised,
            SUMS=pair is not None, ANCHORS=pair is not None, BLOCK_T=config.block_t,
            BLOCK_X=config.block_x, BLOCK_Z=config.block_z, STAGES=config.num_stages,
            PRECISION=_precision(z), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    if result.anchors is not None:
        result.anchors = result.anchors.flatten(0, 1)
    return result


def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the few bytes in which a kernel builds its tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device=torch.cuda.current_device())


def backward_chunk(chunk: int, q: Tensor, v: Tensor) -> int:
    """Return the chunk length of a walk's backward pass: shorter than ``chunk`` where that would idle the device.

    dq and dk are as wide as q, often half of the output, and so have fewer programs.
    """
    B, T, H, V = v.shape
    return min(chunk, default_chunk_size(seq_len=T, rows=B * H, head_dim=min(q.shape[3], V)))


def anchor_every(problem: Problem) -> int:
    """Return the positions between anchors of the decay gradient: never across a chunk's edge."""
    return min(problem.chunk, ANCHOR_EVERY.get(problem.gate, DEFAULT_ANCHOR_EVERY))


def _sum_groups(gradient: Tensor, like: Tensor) -> Tensor:
    """Add the per-head gradients of heads that share a key or query head."""
    if gradient.shape == like.shape:
        return gradient
    B, T, G, D = like.shape
    return gradient.view(B, T, G, -1, D).sum(3)


class _ScalarDecay(torch.autograd.Function):
    """h and the last state, with gradients of q, k, v, the gates and the initial state C."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        input_gate: Tensor | None,
        head: Tensor | None,
        c_initial: Tensor | None,
        n_initial: Tensor | None,
        m_initial: Tensor | None,
        problem: Problem,
        want_last: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        config = launches(problem, q, v)
        T, H = v.shape[1], v.shape[2]
        exp = problem.stabilised
        walking = config.walks
        gates = run_gates(problem, config, v, decay, input_gate, head, m_initial)
        states, n_states = c_initial, n_initial
        last = n_last = None
        m_last = gates.m_last if want_last else None
        if problem.chunk < T or (want_last and not walking):
            states, n_states, last, n_last, _ = run_states(
                problem, config.states, k, v, gates, c_initial, n_initial=n_initial, want_last=want_last, want_n=exp
            )
        if gates.m is not None:
            gates.log_denom = torch.empty_like(gates.m, dtype=gates.b.dtype)
        roles: dict[str, Any] = {"heads": H, "future": False, "transposed": False}
        if walking:
            walk_last = want_last and last is None
            if exp:
                n_walked = run_normaliser(
                    problem, config.normaliser, q, k, n_states, gates, heads=H, want_last=walk_last
                )  # fmt: skip
                n_last = n_walked if walk_last else n_last
            walk = run_walk(problem, config.output, q, k, v, states, gates, want_last=walk_last, **roles)
            h = walk.out
            last = walk.last if walk_last else last
        else:
            h, _ = run_mix(
                problem, config.output, q, k, v, states, gates, n_states=n_states, normalise=exp, **roles
            )  # fmt: skip
        ctx.save_for_backward(
            q, k, v, decay, input_gate, head, c_initial, n_initial, *(getattr(gates, name) for name in GATE_TENSORS)
        )
        ctx.problem, ctx.config, ctx.gate_chunk = problem, config, gates.chunk
        ctx.set_materialize_grads(False)
        if m_last is not None:
            ctx.mark_non_differentiable(m_last)
        return h, last, n_last, m_last

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dh: Tensor | None, d_last: Tensor | None, dn_last: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        q, k, v, decay, input_gate, head, c_initial, n_initial, *vectors = ctx.saved_tensors
        problem, config = ctx.problem, ctx.config
        gates = Gates(chunk=ctx.gate_chunk, **dict(zip(GATE_TENSORS, vectors, strict=True)))
        dh = torch.zeros_like(v) if dh is None else dh.contiguous()
        if d_last is not None:
            d_last = d_last.float().contiguous()
        walking = config.walks
        backward = _walk_backward if walking else _sweep_backward
        if walking:
            problem = replace(problem, chunk=backward_chunk(problem.chunk, q, v))
        want_gates = any(ctx.needs_input_grad[3:6])
        dq, dk, dv, d_initial, q_dq, k_dk, anchors = backward(
            problem, config, q, k, v, dh, gates, c_initial, d_last,
            want_initial=ctx.needs_input_grad[6], want_gates=want_gates,
        )  # fmt: skip
        d_decay = d_input = d_head = None
        if q_dq is not None and k_dk is not None:
            d_decay, d_input, d_head = run_gates_backward(
                problem, q_dq, k_dk, anchors, anchor_every(problem) if walking else problem.chunk,
                decay, input_gate, head, end_is_known=d_last is None,
            )  # fmt: skip
        dn_initial = None
        if dn_last is not None and gates.edge is not None:
            dn_initial = _add_normaliser_gradients(
                dn_last, gates, gates.edge, k, n_initial, dk, decay, d_decay, d_input
            )
        return (
            _sum_groups(dq, q), _sum_groups(dk, k), dv, d_decay, d_input, d_head, d_initial, dn_initial,
            None, None, None,
        )  # fmt: skip


def _add_normaliser_gradients(
    dn_last: Tensor,
    gates: Gates,
    edge: Tensor,
    k: Tensor,
    n_initial: Tensor | None,
    dk: Tensor,
    decay: Tensor,
    d_decay: Tensor | None,
    d_input: Tensor | None,
) -> Tensor | None:
    """Add what flows in through the last n = sum_t w_t k_t + w_0 n_0, in place; return the gradient of n_0.

    The outputs' denominators are constants, so this is the only path through n and needs no kernel of its own.
    """
    tiles = torch.arange(k.shape[1], device=k.device) // gates.chunk
    after = gates.g.flip(-1).cumsum(-1).flip(-1) - gates.g
    m_last = edge[:, :, -1]
    # w accumulates to the end of its tile, unstabilised.
    weight = torch.exp2(gates.w + after[:, :, tiles] - m_last[..., None])
    first = torch.exp2(gates.g.sum(-1) + edge[:, :, 0] - m_last)
    dn = dn_last.float()
    contribution = torch.einsum("bthk,bhk->bht", k.float(), dn) * weight
    dk += (weight.transpose(1, 2)[..., None] * dn[:, None]).to(dk.dtype)
    d_log_decay = contribution.cumsum(-1) - contribution
    if n_initial is not None:
        d_log_decay += ((n_initial * dn).sum(-1) * first)[..., None]
    if d_input is not None and d_decay is not None:
        d_input += contribution.transpose(1, 2)
        d_decay += d_log_decay.transpose(1, 2) * torch.sigmoid(-decay)
    return (dn * first[..., None]).float() if n_initial is not None else None


MainGradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""dq, dk, dv, the gradient of the initial state; for the gates' the row sums of q dq and k dk, and the anchors."""


def _sweep_backward(
    problem: Problem,
    config: EngineConfig[MixConfig],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dh: Tensor,
    gates: Gates,
    c_initial: Tensor | None,
    d_last: Tensor | None,
    *,
    want_initial: bool,
    want_gates: bool,
) -> MainGradients:
    """Recompute the states, run the recurrent kernel backward in time, then one sweep for each gradient."""
    T, H = v.shape[1], v.shape[2]
    states = d_states = d_initial = anchors = None
    if problem.chunk < T or c_initial is not None or d_last is not None:
        states, *_ = run_states(problem, config.states, k, v, gates, c_initial)
        d_states, _, d_initial, _, anchors = run_states(
            problem, config.d_states, q, dh, gates, d_last,
            want_last=want_initial, reverse=True, forward_states=states if want_gates else None,
        )  # fmt: skip
    dq, q_dq = run_mix(
        problem, config.dq, dh, v, k, states, gates,
        heads=H, future=False, transposed=True, pair=q if want_gates else None,
    )  # fmt: skip
    del states
    dk, k_dk = run_mix(
        problem, config.dk, v, dh, q, d_states, gates,
        heads=H, future=True, transposed=True, pair=k if want_gates else None,
    )  # fmt: skip
    dv, _ = run_mix(problem, config.dv, k, q, dh, d_states, gates, heads=H, future=True, transposed=False)
    return dq, dk, dv, d_initial, q_dq, k_dk, anchors


def _walk_backward(
    problem: Problem,
    config: EngineConfig[WalkConfig],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dh: Tensor,
    gates: Gates,
    c_initial: Tensor | None,
    d_last: Tensor | None,
    *,
    want_initial: bool,
    want_gates: bool,
) -> MainGradients:
    """Walk once for each gradient; states are materialised only where there is more than one chunk."""
    T, H = v.shape[1], v.shape[2]
    states, d_states = c_initial, d_last
    d_initial = None
    several = problem.chunk < T
    if several:
        states, *_ = run_states(problem, config.states, k, v, gates, c_initial)
    dq = run_walk(
        problem, config.dq, dh, v, k, states, gates,
        heads=H, future=False, transposed=True, pair=q if want_gates else None,
    )  # fmt: skip
    del states
    if several:
        d_states, _, d_initial, _, _ = run_states(
            problem, config.d_states, q, dh, gates, d_last, want_last=want_initial, reverse=True
        )
    dk = run_walk(
        problem, config.dk, v, dh, q, d_states, gates,
        heads=H, future=True, transposed=True, pair=k if want_gates else None, anchor_states=dq.anchor_states,
    )  # fmt: skip
    dq.anchor_states = None
    dv = run_walk(
        problem, config.dv, k, q, dh, d_states, gates,
        heads=H, future=True, transposed=False, want_last=want_initial and not several,
    )  # fmt: skip
    if not several:
        d_initial = dv.last
    return dq.out, dk.out, dv.out, d_initial, dq.row_sums, dk.row_sums, dk.anchors


@on_device_of("q_dq")
def run_gates_backward(
    problem: Problem,
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
    """Launch the gate gradient kernel: gradients of the decay gate, the input gate and the per-head constant.

    ``every`` is the distance of the anchors; without anchors one stretch covers T.
    """
    NUM_SUMS, B, H, T = q_dq.shape
    N = 1 if anchors is None else anchors.shape[3]
    d_decay = None if decay is None else torch.empty_like(decay)
    d_input = None if input_gate is None else torch.empty_like(input_gate)
    d_head = None if head is None else _empty(B, H, N, like=q_dq)
    block_t = min(problem.chunk, GATES_BLOCK_T)
    gates_backward_kernel[(N * B * H,)](
        q_dq, k_dk, anchors, decay, input_gate, head, d_decay, d_input, d_head,
        problem.inv_tau, T, T if anchors is None else every, N, B * H,
        H=H, GATE=problem.gate, NUM_SUMS=NUM_SUMS, NUM_ANCHORS=0 if anchors is None else anchors.shape[0],
        END_IS_KNOWN=end_is_known,
        BLOCK_T=block_t, num_warps=4 if block_t >= 128 else 1,
    )  # fmt: skip
    if d_head is not None and head is not None:
        d_head = d_head.sum((0, 2)).to(head.dtype)
    return d_decay, d_input, d_head


def scalar_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gate: str,
    decay: Tensor | None = None,
    input_gate: Tensor | None = None,
    head: Tensor | None = None,
    inv_tau: float = 1.0,
    scale: float,
    chunk_size: int,
    state_dtype: torch.dtype,
    initial_state: tuple[Tensor | None, ...] = (None, None, None),
    return_last_state: bool = False,
    scheme: str = "walk",
    config: EngineConfig[Any] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Run the engine on validated tensors; the operations' public functions are its callers.

    Args:
        q, k: [B, T, G, K] with G dividing H.
        v: [B, T, H, V].
        gate: the gate function, see gates.py.
        decay, input_gate: pre-activations [B, T, H] as the gate function needs them.
        head: per-head constant [H] (slope, A).
        inv_tau: 1 / tau of Gated Retention.
        scale: factor of q.
        chunk_size: power of two >= 16.
        state_dtype: dtype of the states between chunks, float32 or bfloat16.
        initial_state: (C, n, m), n and m for gate "exp" only.
        return_last_state: whether the last state is computed.
        scheme: "walk" or "sweep", how a chunk is processed.
        config: launches; chosen for the device when None.

    Returns:
        h [B, T, H, V] and the last C, n and m (None where not asked for).
    """
    problem = Problem(
        gate=gate,
        scale=float(scale),
        chunk=fit_chunk(chunk_size, q.shape[1]),
        state_dtype=state_dtype,
        inv_tau=inv_tau,
        scheme=scheme,
        config=config,
    )
    return _ScalarDecay.apply(q, k, v, decay, input_gate, head, *initial_state, problem, return_last_state)
