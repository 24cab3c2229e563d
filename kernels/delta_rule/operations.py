"""The delta rule's public functions.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

They take ``impl``, which is one of

    whole_state  for Hopper, in float16 and bfloat16, K up to 128 and V up to 256 (launch.py); None chooses it where it
                 runs, and torch elsewhere
    torch        portable chunkwise form, any device and chunk length (chunkwise.py)
    parallel     the same with the whole sequence as one chunk; operands of products in the inputs' dtype and sums of
                 decays in float32, as kernels have them
    recurrent    the definition, one step at a time (reference.py)
    step         one decoding step (T = 1) on the GPU, K and V up to 256; not differentiable (step.py)

and these arguments:

    q, k               [B, T, HK, K]: H / HK consecutive heads of v share one. float32, float16 or bfloat16; in torch,
                       parallel and recurrent float64 too, beside which gates and states are float64.
    v                  [B, T, H, V], the same dtype.
    beta               rates [B, T, H], float32: in [0, 1], or up to 2, where a factor has a negative eigenvalue. 0
                       leaves a token's key and value out.
    chunk_size         of torch; need not divide T and may exceed it. None is 64, which whole_state takes too.
    state_dtype        torch.float32 or None.
    initial_state      S [B, H, K, V] before the first step, float32; None is zero.
    return_last_state  also return S after the last step.
    cu_seqlens         bounds of packed documents [N + 1], int32 or int64: document n is positions cu_seqlens[n] to
                       cu_seqlens[n + 1], rising from 0 to T, of a batch of 1. Results are those of each document alone,
                       and states are of the N documents. torch, parallel and recurrent take it, one document after the
                       other.
    scale              factor of q; None is K^-1/2.
    normalise          first divide q and k by their norms over K: x / sqrt(sum x^2 + 1e-6), in their dtype. Models do
                       so before they call; with longer keys the recurrence may grow without bound.

They return o [B, T, H, V], contiguous and in v's dtype, or (o, S); differentiable in all tensors, once by
whole_state.
They raise ValueError on an argument that does not fit, which names it, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor

from ...results.arguments import one_of
from ..common.arguments import (
    check_chunk_size,
    check_dimensions,
    check_first,
    check_not_empty,
    check_on_gpu,
    check_state_dtype,
    check_tensor,
    constant,
    refuse_transforms,
    resolve_scale,
    without_autocast,
    without_tokens,
)
from ..common.calls import remember_calls
from ..common.device import why_not_here
from ..common.documents import check_documents, each_document
from ..common.sizes import cdiv
from ..scalar_decay.reference import zero_state
from ..scalar_decay.validate import check_gates, check_initial_state
from . import CHUNK, MAX_CHUNKS, PACKED, WHOLE_STATE, WHOLE_STATE_FORM, why_not_step
from .chunkwise import chunkwise
from .reference import normalised, recurrent


@remember_calls
def delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    impl: str | None = None,
    chunk_size: int | None = None,
    state_dtype: torch.dtype | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    normalise: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute DeltaNet: S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = scale S_t^T q_t.

    Args, Returns, Raises: see the module. beta = 0 masks a token.

    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length (2024), equation 5.
    """
    return _delta_rule(
        impl, q, k, v, None, beta, chunk_size, state_dtype, initial_state, return_last_state, cu_seqlens, scale,
        normalise,
    )  # fmt: skip


@remember_calls
def gated_delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    impl: str | None = None,
    chunk_size: int | None = None,
    state_dtype: torch.dtype | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    normalise: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Gated DeltaNet: S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = scale S_t^T q_t.

    Args, Returns, Raises: see the module; g: log decays [B, T, H], <= 0, float32. g = 0 with beta = 0 masks a token.

    Source: Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule (2025), equation 10.
    """
    return _delta_rule(
        impl, q, k, v, g, beta, chunk_size, state_dtype, initial_state, return_last_state, cu_seqlens, scale,
        normalise,
    )  # fmt: skip


@remember_calls
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    impl: str | None = None,
    chunk_size: int | None = None,
    state_dtype: torch.dtype | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    normalise: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Kimi Delta Attention, o_t = scale S_t^T q_t.

        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T

    Args, Returns, Raises: see the module; g: log decays [B, T, H, K] of the key channels, <= 0, float32. g = 0 with
    beta = 0 masks a token.

    Source: Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture (2025), equation 1.
    """
    return _delta_rule(
        impl, q, k, v, g, beta, chunk_size, state_dtype, initial_state, return_last_state, cu_seqlens, scale,
        normalise, by_channel=True,
    )  # fmt: skip


def _delta_rule(
    impl: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    chunk_size: int | None,
    state_dtype: torch.dtype | None,
    initial_state: Tensor | None,
    return_last_state: bool,
    cu_seqlens: Tensor | None,
    scale: float | None,
    normalise: bool,
    by_channel: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Check the arguments and run an implementation; g is [B, T, H, K] where ``by_channel``, None stands for 0."""
    if impl is not None:
        one_of("impl", impl, (WHOLE_STATE, *PACKED, "step"))
    _check_tensors(q, k, v, beta)
    scale = resolve_scale(scale, q.shape[3])
    if impl is None:
        is_torch = chunk_size not in (None, CHUNK) or cu_seqlens is not None
        impl = "torch" if is_torch or _why_not_whole_state(q, v, scale, chosen=False) else WHOLE_STATE
    if g is not None:
        check_tensor("g", g, (*v.shape[:3], *q.shape[3 : 3 + by_channel]), beta.dtype, v.device)
    if chunk_size is not None:
        check_chunk_size(chunk_size)
        if impl != "torch" and (impl, chunk_size) != (WHOLE_STATE, CHUNK):
            allowed = f"{CHUNK} or None" if impl == WHOLE_STATE else "None"
            raise ValueError(f"chunk_size must be {allowed} for {impl}, got {chunk_size}")
    check_state_dtype(torch.float32 if state_dtype is None else state_dtype)
    if cu_seqlens is not None:
        check_documents(cu_seqlens, v, impl, PACKED)
    check_initial_state(initial_state, k, v, normalize=False, cu_seqlens=cu_seqlens)
    if impl in (WHOLE_STATE, "step"):
        check_kernel_support(impl, q, v, scale)
    if impl == "step" and v.shape[1] != 1:
        raise ValueError(f"a decoding step takes one token: seq_len must be 1, got {v.shape[1]}")
    first: Any = initial_state
    if first is None and (impl in PACKED or 0 in v.shape[:2]):
        states = v if cu_seqlens is None else v.expand(cu_seqlens.shape[0] - 1, -1, -1, -1)
        first = zero_state(k, states, normalize=False)
    if 0 in v.shape[:2]:
        o, last = without_tokens(v, (q, k, g, beta), first)
        return (o, last) if return_last_state else o
    if normalise:
        q, k = normalised(q), normalised(k)
    if impl == "step":
        # Imports Triton, which the forms below do without.
        from .step import STEP, StepRequest

        o, last = STEP(StepRequest(scale), q, k, v, g, beta, first)
        return (o, last) if return_last_state else o
    if impl == WHOLE_STATE:
        from .launch import CHANNEL_PASSES, WHOLE_STATE_PASSES, DeltaRequest

        passes = CHANNEL_PASSES if by_channel else WHOLE_STATE_PASSES
        o, last = passes(DeltaRequest(scale, return_last_state), q, k, v, g, beta, first)
        return (o, last) if return_last_state else o
    refuse_transforms("v")
    groups = v.shape[2] // q.shape[2]
    q, k = (x if groups == 1 else x.repeat_interleave(groups, dim=2) for x in (q, k))
    g = torch.zeros_like(beta) if g is None else g
    g = g if by_channel else g[..., None]
    form: Callable[..., tuple[Tensor, Tensor]] = partial(recurrent, scale=scale)
    if impl == "torch":
        form = partial(chunkwise, scale=scale, chunk_size=chunk_size or CHUNK)
    elif impl == "parallel":
        form = partial(chunkwise, scale=scale, chunk_size=v.shape[1], operand_dtype=v.dtype, gate_dtype=torch.float32)
    run: Callable[..., tuple[Tensor, Tensor]] = form if cu_seqlens is None else partial(_packed, form, cu_seqlens)
    # torch.compile would unroll loops, anew for every length. disable imports the compiler.
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(run)
    o, last = without_autocast(run, v, q, k, v, g, beta, first)
    return (o, last) if return_last_state else o


def check_kernel_support(impl: str, q: Tensor, v: Tensor, scale: float) -> None:
    """Raise ValueError on a dtype, device, size or scale that a kernel does not take."""
    check_on_gpu("v", v)
    sizes = {"head_dim_qk": q.shape[3], "head_dim_v": v.shape[3]}
    if reason := _why_not_whole_state(q, v, scale) if impl == WHOLE_STATE else why_not_step(sizes, "", None):
        raise ValueError(reason)


def _why_not_whole_state(q: Tensor, v: Tensor, scale: float, *, chosen: bool = True) -> str | None:
    """Return why whole_state does not run here on these tensors, or None."""
    if scale <= 0:
        return f"scale must be positive for {WHOLE_STATE}, got {scale}"
    if (chunks := v.shape[0] * v.shape[2] * cdiv(v.shape[1], CHUNK)) > MAX_CHUNKS:
        return f"chunks of {CHUNK} tokens of all heads must be at most {MAX_CHUNKS} for {WHOLE_STATE}, got {chunks}"
    return _why_not_here(v.dtype, v.device, index(q.shape[3]), index(v.shape[3]), chosen)


@constant
def _why_not_here(
    dtype: torch.dtype, device: torch.device, head_dim_qk: int, head_dim_v: int, chosen: bool
) -> str | None:
    sizes = {"head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v}
    return why_not_here(WHOLE_STATE_FORM, dtype, device, sizes, chosen=chosen)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> None:
    """Raise unless q, k [B, T, HK, K], v [B, T, H, V] and beta [B, T, H] agree, K and V are not 0 and HK divides H."""
    check_first("q", q, "[B, T, H, D]")
    check_tensor("k", k, q.shape, q.dtype, q.device)
    check_dimensions("v", v, "[B, T, H, D]")
    check_not_empty("v", v)
    check_tensor("v", v, (*q.shape[:2], *v.shape[2:]), q.dtype, q.device)
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"v must have a multiple of the {q.shape[2]} heads of q and k, got {v.shape[2]}")
    check_gates({"beta": beta}, v)


def _packed(form: Callable[..., tuple[Tensor, Tensor]], cu_seqlens: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Run a form on one packed document after the other; the last of the tensors are the states before them."""

    def run(*parts: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        *inputs, (state,) = parts
        o, after = form(*inputs, state)
        return o, (after,)

    o, (last,) = each_document(run, cu_seqlens, tensors[:-1], tensors[-1:])
    return o, last
