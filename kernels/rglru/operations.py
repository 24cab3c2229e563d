"""RG-LRU, the linear scan and the RG-LRU layer: public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.arguments import (
    check_chunk_size,
    check_dimensions,
    check_tensor,
    compute_dtype,
    refuse_transforms,
    without_autocast,
    without_tokens,
)
from ..common.calls import remember_calls
from ..common.channel_tensors import check_channels, portable_chunk_size, runs_kernels
from . import OPERATIONS, portable
from .config import ScanConfig
from .reference import associative, first_state, linear_scan_elements, rglru_elements, run_documents


@remember_calls
def rglru(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    c: Tensor,
    *,
    impl: str = "fused",
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    config: ScanConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute RG-LRU, its gates' activations included.

        a_t = exp(-8 softplus(c) sigma(r_t))        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigma(i_t) x_t

    Args:
        x, r, i: [B, T, C]; float32, float16 or bfloat16; for ``torch`` and ``associative_scan`` float64 too. r and i
            are pre-activations; r = -inf masks a token. C is a multiple of 8 for the kernels, which read slices of one
            projection as they are: whose last stride is 1, and others multiples of 8. They copy others.
        c: [C], float32 (float64 beside float64 inputs).
        impl: ``fused``, one pass over memory; ``chunked``, which computes the states between chunks first and then all
            chunks in parallel; ``naive``, where one program takes all of time for a block of channels; ``torch``, plain
            torch, chunk by chunk; ``associative_scan``, a scan over whole tensors in plain torch; ``step``, a decoding
            step (T = 1), which is not differentiable.
        chunk_size: steps, for ``chunked`` (a power of two >= 16) and ``torch``; need not divide T; None chooses one.
        state_dtype: must be float32; beside float64 inputs states are float64 all the same.
        initial_state: h_0 [B, C], in c's dtype; None is zero.
        return_last_state: also return h_T.
        cu_seqlens: bounds of N packed documents [N + 1], int32 or int64: document n is positions cu_seqlens[n] to
            cu_seqlens[n + 1], rising from 0 to T, of a batch of 1. Results are those of each document alone, and states
            [N, C]. The kernels read it on the GPU: it may change in a CUDA graph, and its values are not checked; an
            infinite state reaches the next document as nan. ``torch`` and ``associative_scan`` take one document after
            the other; ``step`` takes none.
        config: launches of the kernels; chosen for the device when None.

    Returns:
        h [B, T, C] in x's dtype, or (h, h_T); differentiable in all tensors: kernels once, ``torch`` and
        ``associative_scan`` any number of times.

    Raises:
        ValueError: on an argument that ``impl`` does not take; the message names it, what was expected and what came.

    Source: De et al., Griffin (2024), equations 1 to 4.
    """
    state = {"initial_state": initial_state}
    check_channels({"x": x, "r": r, "i": i}, {"c": c}, state, state_dtype, cu_seqlens, OPERATIONS["rglru"], impl)
    return _run("rglru", (x, r, i, c), impl, chunk_size, initial_state, return_last_state, cu_seqlens, config)


@remember_calls
def linear_scan(
    x: Tensor,
    a: Tensor,
    *,
    impl: str = "scan",
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    config: ScanConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute h_t = a_t h_{t-1} + x_t.

    Args:
        x, a: [B, T, C]; dtypes, strides and sizes as in :func:`rglru`. a is the decay itself, of any sign and size;
            a = 1 with x = 0 masks a token.
        impl: ``scan``, one pass over memory; others as in :func:`rglru`.

    All else, the result and the errors are as in :func:`rglru`. Source: Martin and Cundy (2018), section 2.
    """
    state = {"initial_state": initial_state}
    check_channels({"x": x, "a": a}, {}, state, state_dtype, cu_seqlens, OPERATIONS["linear_scan"], impl)
    return _run("linear_scan", (x, a), impl, chunk_size, initial_state, return_last_state, cu_seqlens, config)


# rglru remembers calls, so this needs no @remember_calls.
def rglru_layer(
    x: Tensor, w_a: Tensor, w_x: Tensor, c: Tensor, *, impl: str = "fused", **keywords: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute r = x W_a and i = x W_x with torch's matrix products, rounded to x's dtype, then RG-LRU.

    Args:
        x: [B, T, C].
        w_a, w_x: [C, C], from x's channels to those of r and i, in x's dtype.
        c: [C].
        impl: RG-LRU's implementation, ``fused`` or ``torch``.
        keywords: see :func:`rglru`.

    Result, errors and source as in :func:`rglru`.
    """
    OPERATIONS["rglru_layer"].implementation(impl)
    check_dimensions("x", x, "[B, T, C]")
    for name, weight in (("w_a", w_a), ("w_x", w_x)):
        check_tensor(name, weight, (x.shape[2], x.shape[2]), x.dtype, x.device)
    r, i = (without_autocast(torch.matmul, x, x, weight) for weight in (w_a, w_x))
    return rglru(x, r, i, c, impl=impl, **keywords)


def _run(
    op: str,
    tensors: tuple[Tensor, ...],
    impl: str,
    chunk_size: int | None,
    initial_state: Tensor | None,
    return_last_state: bool,
    cu_seqlens: Tensor | None,
    config: ScanConfig | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return h, or h and the last state, of checked tensors."""
    x = tensors[0]
    is_kernel = runs_kernels(OPERATIONS[op], impl, "x", x, chunk_size=chunk_size, config=config)
    if 0 in x.shape[:2]:
        h, last = without_tokens(x, tensors[1:], first_state(x.to(compute_dtype(x.dtype)), initial_state, cu_seqlens))
        return (h, last) if return_last_state else h
    if is_kernel:
        if chunk_size is not None:
            check_chunk_size(chunk_size, minimum=16, power_of_two=True)
        # launch imports Triton, which the forms below do without.
        from .launch import DIAGONAL, STEP, ScanRequest

        given = (*tensors, *(None,) * (4 - len(tensors)), initial_state, cu_seqlens)
        save = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
        request = ScanRequest(op, impl, chunk_size, return_last_state, save, config)
        h, last = (STEP if impl == "step" else DIAGONAL)(request, *given)
        return (h, last) if return_last_state else h
    tensors = tuple(tensor.contiguous() for tensor in tensors)
    a, b = rglru_elements(*tensors) if op == "rglru" else linear_scan_elements(*tensors)
    if impl == "torch":
        refuse_transforms("x")

    def form(a: Tensor, b: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        if impl == "torch":
            return portable.scan(a, b, first, portable_chunk_size(a, chunk_size))
        return associative(a, b, first)

    h, last = run_documents(form, a, b, initial_state, cu_seqlens)
    h = h.to(x.dtype)
    return (h, last) if return_last_state else h
