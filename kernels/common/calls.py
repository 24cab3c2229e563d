"""The decorator of functions that remember their calls; declarations use it, so it imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def remember_calls(function: Callable[P, R]) -> Callable[P, R]:
    """Make a public function's later calls take the host less time (remember.py); torch.compile traces it as it is."""

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
    except ModuleNotFoundError:  # without Triton only the torch implementations run, which launch nothing
        return function
    return remembering(function)
