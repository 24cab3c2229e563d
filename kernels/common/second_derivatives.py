"""Second derivatives of functions with a backward pass of their own: exact, or refused.

torch's ``once_differentiable`` drops them in silence if the incoming gradients are constants, as that of a sum is: it
takes no notice of saved tensors that require gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import without_autocast

Tensors = Sequence[Tensor | None]


def differentiable_gradients(
    form: Callable[..., Sequence[Tensor]], tensors: Tensors, needs: Sequence[bool], gradients: Tensors
) -> tuple[Tensor | None, ...]:
    """Return the gradients of tensors of which ``form`` makes outputs by torch's own functions, differentiable again.

    Args:
        form: tensors -> outputs.
        tensors: what it takes.
        needs: which gradients are asked for; None is returned in place of others.
        gradients: of the outputs.
    """

    @torch.enable_grad()
    def found() -> tuple[Tensor, ...]:
        # Views, since one of the tensors may have been made of another, or be given twice.
        views = [None if x is None else x.view_as(x) for x in tensors]
        wanted = [x for x, need in zip(views, needs, strict=True) if x is not None and need]
        pairs = [(y, dy) for y, dy in zip(form(*views), gradients, strict=True) if dy is not None and y.requires_grad]
        outputs, given = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, wanted, given, create_graph=True, materialize_grads=True)

    first = next(x for x in tensors if x is not None)
    each = iter(without_autocast(found, first))
    return tuple(next(each) if need else None for need in needs)


def gradients_once(message: str, compute: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Return ``compute(*tensors)``, whose own derivatives, where they are asked for, raise RuntimeError(message)."""
    return _Once.apply(message, compute, *tensors) if torch.is_grad_enabled() else compute(*tensors)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, compute: Callable[..., Any], *tensors: Tensor | None) -> Any:
        ctx.message = message
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(ctx.message)
