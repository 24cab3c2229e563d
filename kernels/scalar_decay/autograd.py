"""One forward and backward pass of the engine: which kernel runs on what.

The forward pass runs the gate kernels, the pass over the chunks (one state a chunk) where there are several, and the
output. The backward pass recomputes the states unless they are few enough to be kept, runs the pass over the chunks
backward in time, computes dq, dk and dv (roles.py), and turns row sums taken there into the gates' gradients. Source:
TFLA paper, sections 2.2 and 3.2, appendices B and C.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import choice
from .config import KEPT_STATES, EngineConfig
from .launch import (
    Problem,
    Product,
    choose_config,
    run_chunk_h,
    run_chunk_o,
    run_fused_chunk,
    run_gates,
    run_gates_backward,
    run_normaliser,
)
from .roles import DK, DQ, DV, GateVectors, H


def backward_chunk(problem: Problem, q: Tensor, v: Tensor) -> int:
    """Return the fused kernel's chunk length in a backward pass: shorter than the forward one where that is faster.

    dq and dk are as wide as q, often half of the output, and so have fewer programs.
    """
    return min(problem.chunk, choice.backward_chunk(choice.shape_of_tensors(q, v), problem.scheme))


def keeps_states(problem: Problem, q: Tensor, v: Tensor, states: Tensor) -> bool:
    """Return whether the backward pass gets the forward pass's states: they fit its chunks and take little memory."""
    inputs = (2 * q.numel() + v.numel()) * v.element_size()
    return backward_chunk(problem, q, v) == problem.chunk and KEPT_STATES * states.nbytes <= inputs


class ScalarDecay(torch.autograd.Function):
    """h and the last state, with gradients of q, k, v, the gates and the initial state C and n."""

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
        config = choose_config(problem, q, v)
        heads, fused, exp = v.shape[2], config.is_fused, problem.stabilised
        stretch = config.gate_chunk(problem.chunk)
        gates, m_last = run_gates(
            problem, stretch, v, decay, input_gate, head, m_initial, dtype=torch.float32 if fused else torch.float64
        )
        states, n_states = c_initial, n_initial
        last = n_last = None
        several = problem.chunk < v.shape[1]
        if several or (want_last and not fused):
            chunks = run_chunk_h(
                problem, config.states, k, v, gates, stretch, c_initial,
                n_initial=n_initial, want_last=want_last, want_n=exp,
            )  # fmt: skip
            states, n_states, last, n_last = chunks.states, chunks.n_states, chunks.last, chunks.n_last
        if fused:
            alone = want_last and not several
            if exp:
                n_alone = run_normaliser(
                    problem, config.normaliser, q, k, n_states, gates, stretch, heads=heads, want_last=alone
                )
                n_last = n_alone if alone else n_last
            output = run_fused_chunk(
                problem, config.output, H, q, k, v, states, gates, heads=heads, want_last=alone
            )  # fmt: skip
            last = output.last if alone else last
        else:
            output = run_chunk_o(
                problem, config.output, H, q, k, v, states, gates, heads=heads, n_states=n_states, normalise=exp
            )
        kept = states if fused and several and keeps_states(problem, q, v, states) else None
        ctx.save_for_backward(q, k, v, decay, input_gate, head, c_initial, n_initial, kept, *gates)
        ctx.problem, ctx.config, ctx.stretch = problem, config, stretch
        ctx.set_materialize_grads(False)
        m_last = m_last if want_last else None
        if m_last is not None:
            ctx.mark_non_differentiable(m_last)
        return output.out, last, n_last, m_last

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dh: Tensor | None, d_last: Tensor | None, dn_last: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        q, k, v, decay, input_gate, head, c_initial, n_initial, kept, *vectors = ctx.saved_tensors
        problem, config, stretch, gates = ctx.problem, ctx.config, ctx.stretch, GateVectors(*vectors)
        dh = torch.zeros_like(v) if dh is None else dh.contiguous()
        if d_last is not None:
            d_last = d_last.float().contiguous()
        if config.is_fused:
            problem = replace(problem, chunk=backward_chunk(problem, q, v))
        want_gates = any(ctx.needs_input_grad[3:6])
        dq, dk, dv, d_initial, anchors = _main_gradients(
            problem, config, q, k, v, dh, gates, stretch, c_initial, kept, d_last,
            want_initial=ctx.needs_input_grad[6], want_gates=want_gates,
        )  # fmt: skip
        d_decay = d_input = d_head = None
        if dq.row_sums is not None and dk.row_sums is not None:
            d_decay, d_input, d_head = run_gates_backward(
                problem, dq.row_sums, dk.row_sums, anchors, problem.anchor_every if config.is_fused else problem.chunk,
                decay, input_gate, head, end_is_known=d_last is None,
            )  # fmt: skip
        dn_initial = None
        if dn_last is not None and gates.edge is not None:
            dn_initial = _add_normaliser_gradients(
                dn_last, gates, gates.edge, stretch, k, n_initial, dk.out, decay, d_decay, d_input
            )
        return (
            _sum_groups(dq.out, q), _sum_groups(dk.out, k), dv.out, d_decay, d_input, d_head, d_initial, dn_initial,
            None, None, None,
        )  # fmt: skip


def _main_gradients(
    problem: Problem,
    config: EngineConfig[Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dh: Tensor,
    gates: GateVectors,
    stretch: int,
    c_initial: Tensor | None,
    kept: Tensor | None,
    d_last: Tensor | None,
    *,
    want_initial: bool,
    want_gates: bool,
) -> tuple[Product, Product, Product, Tensor | None, Tensor | None]:
    """Return dq, dk and dv, the gradient of the initial state and the anchors of the decay's.

    The fused kernel materialises states only where there is more than one chunk, and takes anchors on its way; the
    parallel one starts from the states of every chunk, and takes its anchors there. ``kept`` are the forward pass's
    states, or None.
    """
    fused, several = config.is_fused, problem.chunk < v.shape[1]
    run = partial(run_fused_chunk if fused else run_chunk_o, problem, heads=v.shape[2])
    over_chunks = several or (not fused and (c_initial is not None or d_last is not None))
    q_pair, k_pair = (q, k) if want_gates else (None, None)
    states, d_states = (c_initial, d_last) if fused else (None, None)
    d_initial = anchors = None
    if over_chunks:
        states = run_chunk_h(problem, config.states, k, v, gates, stretch, c_initial).states if kept is None else kept
    dq = run(config.dq, DQ, dh, v, k, states, gates, pair=q_pair)
    if over_chunks:
        chunks = run_chunk_h(
            problem, config.d_states, q, dh, gates, stretch, d_last, want_last=want_initial, reverse=True,
            forward_states=states if want_gates and not fused else None,
        )  # fmt: skip
        d_states, d_initial, anchors = chunks.states, chunks.last, chunks.anchors
    del states
    if fused:
        alone = want_initial and not several
        dk = run(config.dk, DK, v, dh, q, d_states, gates, pair=k_pair, anchor_states=dq.anchor_states)
        dq.anchor_states = dk.anchor_states = None
        dv = run(config.dv, DV, k, q, dh, d_states, gates, want_last=alone)
        return dq, dk, dv, dv.last if alone else d_initial, dk.anchors
    dk = run(config.dk, DK, v, dh, q, d_states, gates, pair=k_pair)
    dv = run(config.dv, DV, k, q, dh, d_states, gates)
    return dq, dk, dv, d_initial, anchors


def _sum_groups(gradient: Tensor, like: Tensor) -> Tensor:
    """Add the per-head gradients of heads that share a key or query head."""
    if gradient.shape == like.shape:
        return gradient
    B, T, G, D = like.shape
    return gradient.view(B, T, G, -1, D).sum(3)


def _add_normaliser_gradients(
    dn_last: Tensor,
    gates: GateVectors,
    edge: Tensor,
    stretch: int,
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
    tiles = torch.arange(k.shape[1], device=k.device) // stretch
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
