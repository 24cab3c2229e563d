"""One forward and backward pass of the engine, of which common/differentiable.py makes an autograd function.

The forward pass runs the gate kernels, the pass over the chunks if there are several, and the output. The backward pass
computes the states again unless they were kept, runs the pass over the chunks backward in time, computes dq, dk and dv
(roles.py), and turns their row sums into the gates' gradients. Source: TFLA paper, sections 2.2, 3.2, appendices B, C.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.arguments import score_headroom
from ..common.device import capability
from ..common.differentiable import Differentiable, Tensors
from ..common.sizes import REMEMBERED
from . import choice
from .config import EngineConfig, fit_chunk, select_config, takes_tiles_in_order
from .launch import (
    Pass,
    empty_gates,
    empty_state,
    run_chunk_states,
    run_gates,
    run_gates_backward,
    run_normaliser,
    run_step,
    run_sum,
    run_tiles_in_order,
    run_tiles_in_parallel,
)
from .roles import DK, DQ, DV, OUTPUT, Denominators, GateVectors


def backward_problem(problem: Pass, chunk_size: int | None, q: Tensor, v: Tensor, *, kept: bool) -> Pass:
    """Return a problem of scheme "walk" or "whole_state" with the chunk length of its backward pass.

    That may be shorter: dq and dk are as wide as q, often half as wide as the output, and so have fewer programs.

    Args:
        chunk_size: the call's own, or None. If it is given, the backward pass takes no longer chunks than the forward.
        kept: whether the forward pass has kept its states.
    """
    return _backward_problem(problem, chunk_size, choice.shape_of_tensors(q, v, normalised=problem.stabilised), kept)


@lru_cache(REMEMBERED)
def _backward_problem(problem: Pass, chunk_size: int | None, shape: choice.Sizes, kept: bool) -> Pass:
    chunk = choice.backward_chunk(shape, problem.scheme, problem.chunk if kept else 0)
    chunk = chunk if chunk_size is None else min(problem.chunk, chunk)
    return replace(problem, chunk=chunk, whole_heads=shape.whole_heads(problem.scheme, chunk, backward=True))


def keep_states(problem: Pass, chunk_size: int | None, q: Tensor, v: Tensor, states: Tensor | None) -> Tensor | None:
    """Return the states if they are kept for the backward pass: it has the same chunks, and they take little memory."""
    if states is None:
        return None
    shape, shared = choice.shape_of_tensors(q, v, normalised=problem.stabilised), q.shape[2] / v.shape[2]
    few = shape.kept_chunk(problem.scheme, problem.chunk, qk_share=shared, state_bytes=states.element_size())
    return states if few and backward_problem(problem, chunk_size, q, v, kept=True) == problem else None


def needs_states(problem: Pass, v: Tensor) -> bool:
    """Return whether any head is cut into chunks, so that the states between them are needed."""
    return problem.chunk < v.shape[1] and problem.whole_heads < v.shape[0] * v.shape[2]


class EngineRequest(NamedTuple):
    """What a call of the engine asks for; see engine.py."""

    gate: str
    scale: float
    inv_tau: float
    scheme: str
    chunk_size: int | None
    state_dtype: torch.dtype
    want_last: bool


class PassPlan(NamedTuple):
    """The problem that a request is for tensors of some sizes, its launches, and the positions of a gate's stretch."""

    problem: Pass
    config: EngineConfig
    stretch: int


def choose(request: EngineRequest, q: Tensor, v: Tensor) -> PassPlan:
    """Return what a request takes for q [B, T, G, K] and v [B, T, H, V] on their device."""
    shape = choice.shape_of_tensors(q, v, normalised=request.gate == "exp")
    return _choose(request, shape, v.dtype, capability(v.device))


@lru_cache(REMEMBERED)
def _choose(request: EngineRequest, shape: choice.Sizes, dtype: torch.dtype, capability: tuple[int, int]) -> PassPlan:
    fused = takes_tiles_in_order(request.scheme, dtype.itemsize)
    # Denominators grow with the scale, and gradients are divided by them, so mLSTMexp's need no headroom.
    headroom = 1.0 if request.gate == "exp" else score_headroom(request.scale, shape.head_dim_qk, dtype)
    scheme = request.scheme if fused else "sweep"
    chunk = fit_chunk(request.chunk_size or choice.forward_chunk(shape, scheme), shape.seq_len)
    problem = Pass(
        gate=request.gate,
        scale=request.scale / headroom,
        chunk=chunk,
        whole_heads=shape.whole_heads(scheme, chunk) if fused else 0,
        state_dtype=request.state_dtype,
        inv_tau=request.inv_tau,
        scheme=request.scheme,
        headroom=headroom,
    )
    config = select_config(
        scheme=request.scheme, capability=capability, item_bytes=dtype.itemsize, head_dim_qk=shape.head_dim_qk,
        head_dim_v=shape.head_dim_v, chunk=chunk, batch_heads=shape.batch_heads,
    )  # fmt: skip
    return PassPlan(problem, config, config.gate_stretch(chunk))


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
) -> tuple[Tensors, Tensors]:
    """Return h and the last C, n and m; and, to keep, the gate vectors and the states or None (:func:`keep_states`)."""
    (problem, config, stretch), want_last = choose(request, q, v), request.want_last
    fused, exp = config.takes_tiles_in_order, problem.stabilised
    gates, m_last = run_gates(
        problem, stretch, v, decay, input_gate, head, m_initial, dtype=torch.float32 if fused else torch.float64
    )
    states, n_states = (None, None) if fused else (c_initial, n_initial)
    last, n_last, _ = empty_state(q, v, normalised=exp) if want_last else (None, None, None)
    over_chunks = needs_states(problem, v) or (want_last and not fused)
    if over_chunks:
        chunks = run_chunk_states(
            problem, config.states, k, v, gates, stretch, c_initial, n_initial=n_initial, last=last, n_last=n_last,
            want_n=exp,
        )  # fmt: skip
        states, n_states = chunks.states, chunks.n_states
    if fused:
        # The pass over the chunks has written the last states of the cut heads.
        whole_last, whole_n_last = (last, n_last) if problem.whole_heads else (None, None)
        denominators = Denominators(n_states, n_initial, whole_n_last, gates.log_denom) if exp else None
        if denominators is not None and config.normaliser is not None:
            run_normaliser(problem, config.normaliser, q, k, gates, denominators, stretch)
            denominators = None
        output = run_tiles_in_order(
            problem, config.output, OUTPUT, q, k, v, states, gates, initial=c_initial, last=whole_last,
            denominators=denominators,
        )  # fmt: skip
    else:
        output = run_tiles_in_parallel(problem, config.output, OUTPUT, q, k, v, states, gates, n_states=n_states)
    kept = keep_states(problem, request.chunk_size, q, v, states) if fused and over_chunks else None
    return (output.out, last, n_last, m_last if want_last else None), (*gates, kept)


def _shapes(request: EngineRequest, q: Tensor, k: Tensor, v: Tensor, *_: Tensor | None) -> tuple[Tensors, Tensors]:
    heads, dim_k, dim_v = index(v.shape[2]), index(q.shape[3]), index(v.shape[3])
    fused = takes_tiles_in_order(request.scheme, v.element_size())
    # A compiled call serves all sequence lengths, so the length of the gates' stretches must not depend on T here.
    chunk = request.chunk_size or choice.sweep_chunk(dim_k, dim_v)
    config = select_config(
        scheme=request.scheme, capability=capability(v.device), item_bytes=v.element_size(), head_dim_qk=dim_k,
        head_dim_v=dim_v, chunk=chunk, batch_heads=heads,
    )  # fmt: skip
    gates = empty_gates(request.gate, v, config.gate_stretch(chunk), torch.float32 if fused else torch.float64)
    last = empty_state(q, v, normalised=request.gate == "exp") if request.want_last else (None, None, None)
    return (torch.empty_like(v), *last), gates


def _backward(
    request: EngineRequest, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, gradients: Tensors
) -> Tensors:
    """Return the gradients of q, k, v, the gates and the initial state C and n.

    Kernels that take tiles in order need the states of cut heads only, and compute the anchors of the decay's gradient
    on their way. chunk_o.py needs the states of every chunk; its anchors are at the chunks' edges.
    """
    q, k, v, decay, input_gate, head, c_initial, n_initial, _ = tensors
    dh, d_last, dn_last, _ = gradients
    number = len(GateVectors._fields)
    # A compiled call's operator does not save the states.
    gates, states = GateVectors(*saved[:number]), saved[number] if len(saved) > number else None
    problem, config, stretch = choose(request, q, v)
    fused = config.takes_tiles_in_order
    if fused:
        problem = backward_problem(problem, request.chunk_size, q, v, kept=states is not None)
    dh = torch.zeros_like(v) if dh is None else dh.contiguous()
    if d_last is not None:
        # Between the kernels dC is divided by the headroom.
        d_last = d_last.float().contiguous()
        d_last = d_last if problem.headroom == 1 else d_last / problem.headroom
    want_gates = any(needs[3:6])
    q_pair, k_pair = (q, k) if want_gates else (None, None)
    d_initial = empty_state(q, v, normalised=False)[0] if needs[6] else None

    over_chunks = needs_states(problem, v) or (not fused and (c_initial is not None or d_last is not None))
    if over_chunks and states is None:
        states = run_chunk_states(problem, config.states, k, v, gates, stretch, c_initial).states
    if fused:
        dq = run_tiles_in_order(problem, config.dq, DQ, dh, v, k, states, gates, initial=c_initial, pair=q_pair)
    else:
        dq = run_tiles_in_parallel(problem, config.dq, DQ, dh, v, k, states, gates, pair=q_pair)
    d_states = anchors = None
    if over_chunks:
        chunks = run_chunk_states(
            problem, config.states, q, dh, gates, stretch, d_last, last=d_initial, future=True,
            forward_states=states if want_gates and not fused else None,
        )  # fmt: skip
        d_states, anchors = chunks.states, chunks.anchors
    del states
    if fused:
        dk = run_tiles_in_order(
            problem, config.dk, DK, v, dh, q, d_states, gates, initial=d_last, pair=k_pair,
            anchor_states=dq.anchor_states,
        )  # fmt: skip
        dq.anchor_states = dk.anchor_states = None
        anchors = dk.anchors
        last = d_initial if problem.whole_heads else None
        dv = run_tiles_in_order(problem, config.dv, DV, k, q, dh, d_states, gates, initial=d_last, last=last)
    else:
        dk = run_tiles_in_parallel(problem, config.dk, DK, v, dh, q, d_states, gates, pair=k_pair)
        dv = run_tiles_in_parallel(problem, config.dv, DV, k, q, dh, d_states, gates)

    if d_initial is not None and problem.headroom != 1:
        d_initial *= problem.headroom
    d_decay = d_input = d_head = None
    if dq.row_sums is not None and dk.row_sums is not None:
        d_decay, d_input, d_head = run_gates_backward(
            problem, dq.row_sums, dk.row_sums, anchors, problem.anchor_every if fused else problem.chunk, decay,
            input_gate, head, end_is_known=d_last is None,
        )  # fmt: skip
    dn_initial = None
    if dn_last is not None and problem.stabilised:
        dn_initial = _add_normaliser_gradients(dn_last, gates, stretch, k, n_initial, dk.out, decay, d_decay, d_input)
    # dq and dk have been computed for every head; those of heads that share q and k (Mamba-2's C and B) are added up.
    return (
        *(x if x.shape == like.shape else run_sum(x, like) for x, like in ((dq.out, q), (dk.out, k))),
        dv.out, d_decay, d_input, d_head, d_initial, dn_initial, None,
    )  # fmt: skip


SCALAR_DECAY = Differentiable(
    "scalar_decay",
    request=EngineRequest,
    tensors=("q", "k", "v", "decay?", "input_gate?", "head?", "c_initial?", "n_initial?", "m_initial?"),
    outputs=("h", "c", "n", "m"),
    saved=GateVectors._fields,
    constant=("m",),
    forward=_forward,
    backward=_backward,
    shapes=_shapes,
)
"""h and the last state, with gradients of q, k, v, the gates and the initial state C and n."""


def _step(request: EngineRequest, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    """Return h and C, n and m after one token."""
    return run_step(choose(request, q, v).problem, q, k, v, *others), ()


def _step_shapes(request: EngineRequest, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    return (torch.empty_like(v), *empty_state(q, v, normalised=request.gate == "exp")), ()


STEP = SCALAR_DECAY.step(_step, _step_shapes)


def _add_normaliser_gradients(
    dn_last: Tensor,
    gates: GateVectors,
    stretch: int,
    k: Tensor,
    n_initial: Tensor | None,
    dk: Tensor,
    decay: Tensor,
    d_decay: Tensor | None,
    d_input: Tensor | None,
) -> Tensor | None:
    """Add, in place, the gradients that come through the last n = sum_t w_t k_t + w_0 n_0; return that of n_0.

    The outputs' denominators are constants for the gradient, so n gets one only where it is returned: no kernel needed.
    """
    edge = gates.edge
    assert edge is not None
    tiles = torch.arange(k.shape[1], device=k.device) // stretch
    after = gates.g.flip(-1).cumsum(-1).flip(-1) - gates.g
    m_last = edge[:, :, -1]
    # w is the log weight at the end of the position's stretch, ``after`` the log decay from there to the end.
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
