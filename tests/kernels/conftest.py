"""For tests of kernels: memory that torch leaves uninitialised is NaN, and repeated launches are recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.compiler import CompiledKernel


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``allocate`` with every floating-point element set to NaN, and every byte to what is NaN in any of their
    dtypes, so that an element never written shows. What records allocations does not see it."""

    @wraps(allocate)
    def allocate_nan(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if number or tensor.dtype == torch.uint8:
            with _disable_current_modes() if type(tensor) is torch.Tensor else nullcontext():
                tensor.detach().fill_(float("nan") if number else 255)
        return tensor

    return allocate_nan


@pytest.fixture(autouse=True)
def poison_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what torch leaves uninitialised NaN."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[CompiledKernel]:
    """The compiled kernels that passes have launched once more, in order: Triton itself does not ask for this item."""
    launched: list[CompiledKernel] = []
    launch = CompiledKernel.__getitem__

    def note(self: CompiledKernel, grid: Any) -> Any:
        launched.append(self)
        return launch(self, grid)

    monkeypatch.setattr(CompiledKernel, "__getitem__", note)
    return launched
