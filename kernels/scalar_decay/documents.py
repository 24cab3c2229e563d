"""Packed documents in the engine, see common/documents.py. Kernels find the bounds themselves: is_first in gates.py
and, where documents have states, document_of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..common import documents
from .declare import PACKED, PACKED_STATES
from .reference import State, zero_state


def check_documents(cu_seqlens: Tensor, v: Tensor, impl: str, *, states: bool = False) -> None:
    """Raise unless the implementation takes packed documents, and cu_seqlens [N + 1] can be the bounds of N in a batch
    of 1 of ``v`` [1, T, H, V].

    Args:
        states: whether the call has initial or last states.
    """
    packed, given = (PACKED_STATES, "cu_seqlens and states") if states else (PACKED, "cu_seqlens")
    documents.check_documents(cu_seqlens, v, impl, packed, given)


def each_document(
    form: Callable[..., Any],
    cu_seqlens: Tensor,
    *tensors: Tensor | None,
    normalize: bool,
    initial_state: State | None,
    return_last_state: bool,
    **keywords: Any,
) -> Any:
    """Run a form on one packed document after the other.

    Args:
        form: recurrent or parallel of reference.py, or chunkwise.
        cu_seqlens: bounds of the N documents [N + 1], which the host reads.
        tensors: q, k, v, log_decay and log_input of a batch of 1.
        initial_state, return_last_state: states of the N documents.
        normalize, keywords: as the form takes them.
    """
    _, k, v, *_ = tensors
    assert k is not None and v is not None
    state: Any = initial_state
    if initial_state is None:
        state = zero_state(k, v.expand(cu_seqlens.shape[0] - 1, -1, -1, -1), normalize=normalize)

    def run(*parts: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        *inputs, first = parts
        h, after = form(
            *inputs, normalize=normalize, initial_state=first if normalize else first[0], return_last_state=True,
            **keywords,
        )  # fmt: skip
        return h, after if normalize else (after,)

    h, states = documents.each_document(run, cu_seqlens, tensors, state if normalize else (state,))
    return (h, states if normalize else states[0]) if return_last_state else h
