"""The diagonal recurrence h_t = a_t h_{t-1} + b_t in plain torch: step by step, and as an associative scan."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent(a: Tensor, b: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the recurrence on a, b [B, T, C] from first [B, C] (None: zero); return all h [B, T, C] and the last."""
    h = torch.zeros_like(b[:, 0]) if first is None else first.to(b.dtype)
    states = []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
        h = a_t * h + b_t
        states.append(h)
    return torch.stack(states, dim=1), h


def associative(a: Tensor, b: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the same in ceil(log2 T) steps: maps h -> a h + b of runs of 1, 2, 4, ... steps, composed with the run
    before.

    Source: Hillis and Steele, "Data parallel algorithms" (1986); Martin and Cundy (2018), section 2.
    """
    first = torch.zeros_like(b[:, 0]) if first is None else first.to(b.dtype)
    b = torch.cat((b[:, :1] + a[:, :1] * first[:, None], b[:, 1:]), dim=1)
    distance = 1
    while distance < b.shape[1]:
        head_a, head_b = a[:, :distance], b[:, :distance]
        later = a[:, distance:]
        b = torch.cat((head_b, b[:, distance:] + later * b[:, :-distance]), dim=1)
        a = torch.cat((head_a, later * a[:, :-distance]), dim=1)
        distance *= 2
    return b, b[:, -1].contiguous()
