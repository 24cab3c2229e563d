"""Checks of the arguments of operations over channels [B, T, C]; messages say what was expected and what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arguments import check_chunk_size, check_first, check_on_gpu, check_state_dtype, check_tensor, compute_dtype
from .channels import why_not_kernels
from .documents import check_documents

if TYPE_CHECKING:
    from .spec import Operation

ELEMENTS_PER_STEP = 2**13
"""With this many elements a step, arithmetic takes longer than the overhead of a torch call."""


def runs_kernels(operation: Operation, impl: str, name: str, x: Tensor, **options: Any) -> bool:
    """Return whether ``impl``, an implementation's name or "step", is in Triton; raise ValueError for an unknown name,
    an option that it does not take or, if it is in Triton, an x [B, T, C] that it does not take.

    Args:
        name: of x.
        options: chunk_size and config, None where not given.
    """
    known = None if impl == "step" else operation.implementation(impl)
    taken = {"chunk_size": known and known.chunked, "config": known and known.default_config}
    for option, value in options.items():
        if value is not None and not taken[option]:
            raise ValueError(f"{option} must be left out for {impl}, got {value}")
    if known is not None and "triton" not in known.requires:
        return False
    check_kernel_support(name, x)
    if known is None and x.shape[1] != 1:
        raise ValueError(f"a decoding step takes one token: seq_len must be 1, got {x.shape[1]}")
    return True


def check_channels(
    x: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    states: Mapping[str, Tensor | None],
    state_dtype: torch.dtype,
    cu_seqlens: Tensor | None,
    operation: Operation,
    impl: str,
) -> None:
    """Raise unless the arguments agree.

    Args:
        x: name -> [B, T, C], of one floating dtype and shape, C not 0.
        parameters: name -> [C], float32 (float64 beside float64 inputs).
        states: name -> [B, C], of packed documents [N, C], float32 (float64 beside float64 inputs), or None.
        state_dtype: float32.
        cu_seqlens: bounds of N packed documents [N + 1], or None; every implementation takes it, but no decoding step.
    """
    (name, first), *others = x.items()
    check_first(name, first, "[B, T, C]")
    for name, other in others:
        check_tensor(name, other, first.shape, first.dtype, first.device)
    dtype, (batch, _, channels) = compute_dtype(first.dtype), first.shape
    for name, parameter in parameters.items():
        check_tensor(name, parameter, (channels,), dtype, first.device)
    check_state_dtype(state_dtype)
    if cu_seqlens is not None:
        check_documents(cu_seqlens, first, impl, [known.name for known in operation.implementations])
        batch = cu_seqlens.shape[0] - 1
    for name, state in states.items():
        if state is not None:
            check_tensor(name, state, (batch, channels), dtype, first.device)


def check_kernel_support(name: str, x: Tensor) -> None:
    """Raise unless the Triton kernels take x [B, T, C] on its device."""
    check_on_gpu(name, x)
    if reason := why_not_kernels({"channels": x.shape[2]}, "", None):
        raise ValueError(reason)


def portable_chunk_size(x: Tensor, chunk_size: int | None) -> int:
    """Return ``chunk_size``, checked, or for None the chunk length of the portable forms for x [B, T, C].

    These take one step of all chunks at once; with this length it has about ELEMENTS_PER_STEP elements.
    """
    if chunk_size is None:
        chunks = max(1, ELEMENTS_PER_STEP // (x.shape[0] * x.shape[2]))
        return max(16, -(-x.shape[1] // chunks))
    check_chunk_size(chunk_size)
    return chunk_size
