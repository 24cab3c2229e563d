"""One forward and backward pass of the engine, of which common/differentiable.py makes an autograd function.

plan.py says which kernels run. Source: TFLA paper, sections 2.2, 3.2, appendices B, C.
"""

from __future__ import annotations

from functools import lru_cache, partial
from operator import index
from typing import Any

import torch
from torch import Tensor

from ..common.arguments import score_headroom
from ..common.device import capability, memory_rate, multiprocessors
from ..common.differentiable import Differentiable, Tensors
from ..common.sizes import REMEMBERED
from .choice import backward_after, forward_chunk, sweep_chunk
from .config import fit_chunk, select_config, takes_tiles_in_order
from .launch import (
    EnginePass,
    EngineRequest,
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
from .plan import MEMORY_RATE, MULTIPROCESSORS, Sizes, forward, kept_chunk
from .roles import Denominators, GateVectors


def choose(
    request: EngineRequest, q: Tensor, v: Tensor, *, backward: bool = False, kept: bool = False, ends: bool = False
) -> EnginePass:
    """Return a pass for q [B, T, G, K] and v [B, T, H, V] on their device (a CPU counts as an H200).

    Args:
        kept: of a backward pass, whether it has the forward pass's states.
        ends: whether the last state is wanted; of a backward pass, whether its gradient or the initial one is given.
    """
    return _choose(request, q.shape, v.shape, v.dtype, v.device, capability(v.device), backward, kept, ends)


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
) -> EnginePass:
    (batch, seq_len, heads, head_dim_v), (_, _, groups, head_dim_qk) = size_v, size_q
    sizes = Sizes(
        seq_len=seq_len,
        batch_heads=batch * heads,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        normalised=request.stabilised,
        sums_decay=request.gate == "ssd",
        multiprocessors=multiprocessors(device) if device.type == "cuda" else MULTIPROCESSORS,
        memory_rate=memory_rate(device) or MEMORY_RATE,
    )
    # Denominators grow with the scale, and gradients are divided by them, so mLSTMexp's need no headroom.
    headroom = 1.0 if request.stabilised else score_headroom(request.scale, head_dim_qk, dtype)
    scheme = request.scheme if takes_tiles_in_order(request.scheme, dtype.itemsize) else "sweep"
    chunk = fit_chunk(request.chunk_size or forward_chunk(sizes, scheme), seq_len)
    config = sizes.config(scheme, chunk, capability, dtype.itemsize)
    launched, keeps = forward(sizes, config, chunk, ends=ends), False
    after = partial(backward_after, launched, sizes, scheme, config, named=request.chunk_size is not None)
    if is_backward:
        launched = after(kept=chunk if kept else 0, ends=ends)
    elif launched.several:
        # They are kept if they take little memory and the backward pass has the same chunks.
        bytes_of_state = request.state_dtype.itemsize
        few = kept_chunk(sizes, config, chunk, qk_share=groups / heads, state_bytes=bytes_of_state)
        keeps = few > 0 and "state" not in after(kept=few).launches
    return EnginePass(
        request=request, launched=launched, scale=request.scale / headroom, headroom=headroom, keeps_states=keeps
    )


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
    """Return h and the last C, n and m; and, to keep, the gate vectors and the states or None."""
    task = choose(request, q, v, ends=request.want_last)
    launched, exp = task.launched, request.stabilised
    gates, m_last = run_gates(task, v, decay, input_gate, head, m_initial)
    states, n_states = (None, None) if launched.in_order else (c_initial, n_initial)
    last, n_last, _ = empty_state(q, v, normalised=exp) if request.want_last else (None, None, None)
    if "state" in launched.launches:
        chunks = run_chunk_states(
            task, "state", k, v, gates, c_initial, n_initial=n_initial, last=last, n_last=n_last, want_n=exp
        )
        states, n_states = chunks.states, chunks.n_states
    if launched.in_order:
        # The pass over the chunks has written the last states of the cut heads.
        whole_last, whole_n_last = (last, n_last) if launched.whole else (None, None)
        denominators = Denominators(n_states, n_initial, whole_n_last, gates.log_denom) if exp else None
        if denominators is not None and "normaliser" in launched.launches:
            run_normaliser(task, q, k, gates, denominators)
            denominators = None
        output = run_tiles_in_order(
            task, "h", q, k, v, states, gates, initial=c_initial, last=whole_last, denominators=denominators
        )
    else:
        output = run_tiles_in_parallel(task, "h", q, k, v, states, gates, n_states=n_states)
    kept = states if task.keeps_states else None
    return (output.out, last, n_last, m_last if request.want_last else None), (*gates, kept)


def _shapes(request: EngineRequest, q: Tensor, k: Tensor, v: Tensor, *_: Tensor | None) -> tuple[Tensors, Tensors]:
    heads, dim_k, dim_v = index(v.shape[2]), index(q.shape[3]), index(v.shape[3])
    in_order = takes_tiles_in_order(request.scheme, v.element_size())
    # A compiled call serves all sequence lengths, so the length of the gates' stretches must not depend on T here.
    chunk = request.chunk_size or sweep_chunk(dim_k, dim_v)
    config = select_config(
        scheme=request.scheme, capability=capability(v.device), item_bytes=v.element_size(), head_dim_qk=dim_k,
        head_dim_v=dim_v, chunk=chunk, batch_heads=heads,
    )  # fmt: skip
    gates = empty_gates(request.gate, v, config.gate_stretch(chunk), in_order=in_order)
    last = empty_state(q, v, normalised=request.stabilised) if request.want_last else (None, None, None)
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
    ends = c_initial is not None or d_last is not None
    task = choose(request, q, v, backward=True, kept=states is not None, ends=ends)
    launched, in_order = task.launched, task.launched.in_order
    dh = torch.zeros_like(v) if dh is None else dh.contiguous()
    if d_last is not None:
        # Between the kernels dC is divided by the headroom.
        d_last = d_last.float().contiguous()
        d_last = d_last if task.headroom == 1 else d_last / task.headroom
    want_gates = any(needs[3:6])
    q_pair, k_pair = (q, k) if want_gates else (None, None)
    d_initial = empty_state(q, v, normalised=False)[0] if needs[6] else None

    if "state" in launched.launches:
        states = run_chunk_states(task, "state", k, v, gates, c_initial).states
    if in_order:
        dq = run_tiles_in_order(task, "dq", dh, v, k, states, gates, initial=c_initial, pair=q_pair)
    else:
        dq = run_tiles_in_parallel(task, "dq", dh, v, k, states, gates, pair=q_pair)
    d_states = anchors = None
    if "state_gradient" in launched.launches:
        chunks = run_chunk_states(
            task, "state_gradient", q, dh, gates, d_last, last=d_initial,
            forward_states=states if want_gates and not in_order else None,
        )  # fmt: skip
        d_states, anchors = chunks.states, chunks.anchors
    del states
    if in_order:
        dk = run_tiles_in_order(
            task, "dk", v, dh, q, d_states, gates, initial=d_last, pair=k_pair, anchor_states=dq.anchor_states
        )
        dq.anchor_states = dk.anchor_states = None
        anchors = dk.anchors
        last = d_initial if launched.whole else None
        dv = run_tiles_in_order(task, "dv", k, q, dh, d_states, gates, initial=d_last, last=last)
    else:
        dk = run_tiles_in_parallel(task, "dk", v, dh, q, d_states, gates, pair=k_pair)
        dv = run_tiles_in_parallel(task, "dv", k, q, dh, d_states, gates)

    if d_initial is not None and task.headroom != 1:
        d_initial *= task.headroom
    d_decay = d_input = d_head = None
    if dq.row_sums is not None and dk.row_sums is not None:
        d_decay, d_input, d_head = run_gates_backward(
            request, dq.row_sums, dk.row_sums, anchors, launched.anchor_every, decay, input_gate, head,
            end_is_known=d_last is None,
        )  # fmt: skip
    dn_initial = None
    if dn_last is not None and request.stabilised:
        dn_initial = _add_normaliser_gradients(
            dn_last, gates, launched.stretch, k, n_initial, dk.out, decay, d_decay, d_input
        )
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
    return run_step(request, q, k, v, *others), ()


def _step_shapes(request: EngineRequest, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
    return (torch.empty_like(v), *empty_state(q, v, normalised=request.stabilised)), ()


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
