"""Public functions that remember their calls; imports neither torch nor triton, like the declarations beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def remember_calls(function: Callable[P, R]) -> Callable[P, R]:
    """Make a public function repeat its earlier calls by their plans; see remember.py."""

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        import torch

        if torch.compiler.is_compiling():
            return function(*args, **keywords)
        return _remembering(function)(*args, **keywords)

    return call


@cache
def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        from .remember import remembering
    except ModuleNotFoundError:  # without Triton there are no kernels, but the forms in torch
        return function
    return remembering(function)
