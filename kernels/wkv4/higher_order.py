"""WKV on torch's own associative scan, a prototype higher-order operator: what torch.compile has for such recurrences.

Eager mode runs it in log2(T) passes of whole tensors, forward and backward. Source: torch's documentation of
``torch._higher_order_ops.associative_scan``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..scalar_decay.reference import compute_dtype
from .reference import State, add, finish, first_state, tokens

MODULE = "torch._higher_order_ops.associative_scan"


def scan(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    initial_state: State | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, State]:
    """Compute WKV by torch's associative scan; arguments and result as in :func:`.reference.recurrent`."""
    associative_scan = importlib.import_module(MODULE).associative_scan
    dtype = compute_dtype(v.dtype)
    keys, values, rate, bonus = (x.to(dtype) for x in (k, v, w, u))

    def combine(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (decay1, num1, den1, top1), (decay2, num2, den2, top2) = earlier, later
        return decay1 + decay2, *add(num1, den1, top1 - decay2, num2, den2, top2)

    elements = (rate.expand_as(keys).contiguous(), *tokens(keys, values))
    _, *sums = associative_scan(combine, elements, dim=1, combine_mode="generic")
    y, last = finish(first_state(k, initial_state), tuple(sums), keys, values, rate, bonus)
    return (y.to(v.dtype), last) if return_last_state else y.to(v.dtype)


def supports(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why torch's associative scan cannot run here, or None; imports nothing."""
    torch_spec = importlib.util.find_spec("torch")
    folders = (torch_spec.submodule_search_locations if torch_spec else None) or ()
    if any(Path(folder, "_higher_order_ops", "associative_scan.py").is_file() for folder in folders):
        return None
    return f"this torch has no {MODULE}"
