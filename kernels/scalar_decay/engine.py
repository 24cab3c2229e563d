"""The Triton engine for scalar-decay linear RNNs: launches, autograd and the two chunkwise schemes built on it.

    C_t = exp(a_t) C_{t-1} + exp(u_t) k_t v_t^T        h_t = scale C_t^T q_t  (/ denominator for mLSTMexp)

Source: "Tiled Flash Linear Attention" (TFLA), sections 2.2 and 3.2, appendices B and C. The forward pass runs the gate
kernels, the recurrent kernel (one state per chunk) and the parallel kernel; the backward pass recomputes the states
rather than storing them, runs the recurrent kernel backward in time and the parallel kernel once for each of dq, dk
and dv, and turns row sums taken there into the gates' gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .config import EngineConfig, MixConfig, StatesConfig, fit_chunk, select_config
from .gates import gates_backward_kernel, gates_forward_kernel, stabiliser_finish_kernel, stabiliser_scan_kernel
from .mix import mix_kernel
from .states import states_kernel

GATES_BLOCK_T = 256
SCAN_BLOCK_N = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What one call computes, beside its tensors: gate function, scale, chunk length, state dtype, launches."""

    gate: str
    scale: float
    chunk: int
    state_dtype: torch.dtype
    inv_tau: float = 1.0
    config: EngineConfig | None = None

    @property
    def stabilised(self) -> bool:
        return self.gate == "exp"

    @property
    def has_u(self) -> bool:
        return self.gate in ("sig", "exp", "ssd")


@dataclass(slots=True, kw_only=True)
class Gates:
    """Gate vectors of one call, base 2: [B, H, T] each, g [B, H, N], edge [B, H, N + 1]."""

    b_hi: Tensor
    b_lo: Tensor
    u: Tensor | None
    w: Tensor
    g: Tensor
    edge: Tensor | None
    m: Tensor | None
    log_denom: Tensor | None = None

    FIELDS = ("b_hi", "b_lo", "u", "w", "g", "edge", "m", "log_denom")


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability that launches are chosen for; the interpreter on the CPU counts as sm_90."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def launches(problem: Problem, q: Tensor, v: Tensor) -> EngineConfig:
    """Return the problem's launches, chosen for the device when the caller gave none."""
    if problem.config is not None:
        return problem.config
    return select_config(
        capability=capability(v.device),
        item_bytes=v.element_size(),
        head_dim_qk=q.shape[3],
        head_dim_v=v.shape[3],
        chunk=problem.chunk,
        rows=v.shape[0] * v.shape[2],
    )


def _empty(*shape: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=dtype)


def run_gates(
    problem: Problem,
    v: Tensor,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
    m_initial: Tensor | None,
) -> Gates:
    """Launch the gate kernels: cumulative log gates of every chunk and, for mLSTMexp, the stabiliser."""
    B, T, H, _ = v.shape
    L = problem.chunk
    N = triton.cdiv(T, L)
    b_hi, b_lo, w = (_empty(B, H, T, like=v) for _ in range(3))
    g = _empty(B, H, N, like=v)
    u = _empty(B, H, T, like=v) if problem.has_u else None
    m = g_max = edge = None
    if problem.stabilised:
        m, g_max, edge = _empty(B, H, T, like=v), _empty(B, H, N, like=v), _empty(B, H, N + 1, like=v)
    block_t = min(L, GATES_BLOCK_T)
    gates_forward_kernel[(N * B * H,)](
        decay, input_gate, head, b_hi, b_lo, u, w, g, m, g_max, problem.inv_tau, T, L, N,
        H=H, GATE=problem.gate, BLOCK_T=block_t, num_warps=4 if block_t >= 128 else 1,
    )  # fmt: skip
    if problem.stabilised:
        stabiliser_scan_kernel[(B * H,)](
            g, g_max, m_initial, edge, N, HAS_INITIAL=m_initial is not None, BLOCK_N=SCAN_BLOCK_N
        )
        stabiliser_finish_kernel[(triton.cdiv(T, SCAN_BLOCK_N) * B * H,)](
            b_hi, b_lo, edge, m, T, L, N, BLOCK_T=SCAN_BLOCK_N
        )
    return Gates(b_hi=b_hi, b_lo=b_lo, u=u, w=w, g=g, edge=edge, m=m)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


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
    forward_states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Launch the recurrent kernel; with ``forward_states`` it runs backward in time on (q, dh).

    Returns:
        states [B, H, N, K, V] (before each chunk; backward: after it), n states [B, H, N, K], last state [B, H, K, V],
        last n [B, H, K], dg [tiles, B, H, N]; None where not asked for.
    """
    B, T, H, V = values.shape
    K = keys.shape[3]
    N = triton.cdiv(T, problem.chunk)
    reverse = forward_states is not None
    states = _empty(B, H, N, K, V, like=values, dtype=problem.state_dtype)
    n_states = _empty(B, H, N, K, like=values) if want_n else None
    last = _empty(B, H, K, V, like=values) if want_last else None
    n_last = _empty(B, H, K, like=values) if want_last and want_n else None
    tiles = triton.cdiv(K, config.block_k) * triton.cdiv(V, config.block_v)
    dg = _empty(tiles, B, H, N, like=values) if reverse else None
    states_kernel[(tiles * B * H,)](
        keys, values, gates.b_hi if reverse else gates.w, gates.b_lo, gates.g, gates.edge, gates.m, gates.log_denom,
        initial, n_initial, states, n_states, last, n_last, forward_states, dg,
        problem.scale, T, problem.chunk, N, B * H,
        H=H, K=K, V=V, GROUP=H // keys.shape[2], REVERSE=reverse, STABILISED=problem.stabilised,
        HAS_INITIAL=initial is not None, HAS_LAST=want_last, WITH_N=want_n,
        BLOCK_T=config.block_t, BLOCK_K=config.block_k, BLOCK_V=config.block_v, PRECISION=_precision(values),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return states, n_states, last, n_last, dg


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
    sums: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the parallel kernel; see mix.py for the four roles of x, y, z and the states.

    Returns:
        out [B, T, H, DZ] in z's dtype, and the row sums of out * pair (all; through the state), [tiles, B, H, T].
    """
    B, T, _, DZ = z.shape
    H = heads
    N = triton.cdiv(T, problem.chunk)
    out = _empty(B, T, H, DZ, like=z, dtype=z.dtype)
    tiles_z = triton.cdiv(DZ, config.block_z)
    row_sums = _empty(tiles_z, B, H, T, like=z) if sums >= 1 else None
    inter_sums = _empty(tiles_z, B, H, T, like=z) if sums == 2 else None
    grid = (tiles_z * triton.cdiv(problem.chunk, config.block_t) * N * B * H,)
    mix_kernel[grid](
        x, y, z, states, out, gates.b_hi, gates.b_lo, gates.u, gates.g, gates.edge, gates.m, gates.log_denom, n_states,
        pair, row_sums, inter_sums, problem.scale, T, problem.chunk, N, B * H,
        H=H, DX=x.shape[3], DZ=DZ, GROUP_X=H // x.shape[2], GROUP_Z=H // z.shape[2], FUTURE=future,
        TRANSPOSED=transposed, HAS_STATE=states is not None, HAS_U=problem.has_u, STABILISED=problem.stabilised,
        NORMALISE=normalise, SUMS=sums, BLOCK_T=config.block_t, BLOCK_S=config.block_s, BLOCK_X=config.block_x,
        BLOCK_Z=config.block_z, PRECISION=_precision(z), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, row_sums, inter_sums


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
        gates = run_gates(problem, v, decay, input_gate, head, m_initial)
        states = n_states = last = n_last = m_last = None
        if T > problem.chunk or c_initial is not None or want_last:
            states, n_states, last, n_last, _ = run_states(
                problem, config.states, k, v, gates, c_initial, n_initial=n_initial, want_last=want_last, want_n=exp
            )
        if exp:
            gates.log_denom = torch.empty_like(gates.m)
            if want_last:
                m_last = gates.edge[:, :, -1] / 1.4426950408889634
        h, _, _ = run_mix(
            problem, config.output, q, k, v, states, gates,
            heads=H, future=False, transposed=False, n_states=n_states, normalise=exp,
        )  # fmt: skip
        ctx.save_for_backward(
            q, k, v, decay, input_gate, head, c_initial, *(getattr(gates, name) for name in Gates.FIELDS)
        )
        ctx.problem, ctx.config = problem, config
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (n_last, m_last) if t is not None))
        return h, last, n_last, m_last

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, d_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, decay, input_gate, head, c_initial, *vectors = ctx.saved_tensors
        problem, config = ctx.problem, ctx.config
        gates = Gates(**dict(zip(Gates.FIELDS, vectors, strict=True)))
        B, T, H, _ = v.shape
        N = triton.cdiv(T, problem.chunk)
        dh = torch.zeros_like(v) if dh is None else dh.contiguous()
        if d_last is not None:
            d_last = d_last.float().contiguous()
        states = d_states = d_initial = dg = None
        if N > 1 or c_initial is not None or d_last is not None:
            states, *_ = run_states(problem, config.states, k, v, gates, c_initial)
            d_states, _, d_initial, _, dg = run_states(
                problem, config.d_states, q, dh, gates, d_last,
                want_last=c_initial is not None, forward_states=states,
            )  # fmt: skip
        dq, q_dq, _ = run_mix(
            problem, config.dq, dh, v, k, states, gates,
            heads=H, future=False, transposed=True, pair=q, sums=1,
        )  # fmt: skip
        del states
        dk, k_dk, k_dk_inter = run_mix(
            problem, config.dk, v, dh, q, d_states, gates,
            heads=H, future=True, transposed=True, pair=k, sums=2 if d_states is not None else 1,
        )  # fmt: skip
        dv, _, _ = run_mix(problem, config.dv, k, q, dh, d_states, gates, heads=H, future=True, transposed=False)
        del d_states
        d_decay, d_input, d_head = run_gates_backward(problem, q_dq, k_dk, k_dk_inter, dg, decay, input_gate, head)
        return (
            _sum_groups(dq, q), _sum_groups(dk, k), dv, d_decay, d_input, d_head, d_initial, None, None, None, None
        )  # fmt: skip


def run_gates_backward(
    problem: Problem,
    q_dq: Tensor,
    k_dk: Tensor,
    k_dk_inter: Tensor | None,
    dg: Tensor | None,
    decay: Tensor | None,
    input_gate: Tensor | None,
    head: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Launch the gate gradient kernel: gradients of the decay gate, the input gate and the per-head constant."""
    sums, B, H, T = q_dq.shape
    N = triton.cdiv(T, problem.chunk)
    if k_dk_inter is None:
        k_dk_inter = torch.zeros_like(k_dk)
    d_decay = None if decay is None else torch.empty_like(decay)
    d_input = None if input_gate is None else torch.empty_like(input_gate)
    d_head = None if head is None else _empty(B, H, N, like=q_dq)
    block_t = min(problem.chunk, GATES_BLOCK_T)
    gates_backward_kernel[(N * B * H,)](
        q_dq, k_dk, k_dk_inter, dg, decay, input_gate, head, d_decay, d_input, d_head,
        problem.inv_tau, T, problem.chunk, N, B * H,
        H=H, GATE=problem.gate, NUM_SUMS=sums, NUM_DG=0 if dg is None else dg.shape[0], BLOCK_T=block_t,
        num_warps=4 if block_t >= 128 else 1,
    )  # fmt: skip
    if d_head is not None:
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
    config: EngineConfig | None = None,
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
        config=config,
    )
    return _ScalarDecay.apply(q, k, v, decay, input_gate, head, *initial_state, problem, return_last_state)
