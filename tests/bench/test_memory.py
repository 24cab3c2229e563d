"""The CPU memory tracker against calls whose allocations are known by construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lrbench.bench.worker.memory import MemoryUse, measure_memory, storage_bytes

UNIT = 64 * 64 * 4


def unit(**options: Any) -> torch.Tensor:
    return torch.randn(64, 64, **options)


def in_units(use: MemoryUse) -> tuple[float, float, float]:
    return use.peak_memory_bytes / UNIT, use.input_bytes / UNIT, use.workspace_bytes / UNIT


@pytest.mark.parametrize(
    ("call", "peak", "workspace"),
    [
        pytest.param(lambda x: x * 2, 2, 0, id="output only"),
        pytest.param(lambda x: (x * 2) * 3, 3, 1, id="one temporary"),
        pytest.param(lambda x: ((x * 2) * 3) * 4, 3, 1, id="a temporary freed in time"),
        pytest.param(lambda x: (x * 2, x * 3), 3, 0, id="two outputs"),
        pytest.param(lambda x: x.view(-1)[: 64 * 32], 1, 0, id="a view of the input"),
        pytest.param(lambda x: x.mul_(2), 1, 0, id="in place"),
        pytest.param(lambda x: (x * 2)[:1], 2, 0, id="a slice keeps its storage"),
        pytest.param(lambda x: torch.cat([x, x]), 3, 0, id="twice the size"),
    ],
)
def test_known_allocations(call: Callable[[torch.Tensor], Any], peak: float, workspace: float) -> None:
    x = unit()
    assert in_units(measure_memory(lambda _: call(x), inputs=[x])) == (peak, 1, workspace)


def test_a_shared_input_counts_once() -> None:
    x = unit()
    assert storage_bytes([x, x.t(), x[0]]) == UNIT
    assert in_units(measure_memory(lambda _: x + x.t(), inputs=[x, x.t()]))[1] == 1


def test_saved_tensors_live_until_the_backward_pass() -> None:
    x = unit(requires_grad=True)

    def forward() -> torch.Tensor:
        return x.exp().sin()

    # Alive beforehand: x, its exponential (saved by both functions) and the output.
    grad = unit()
    use = measure_memory(lambda out: torch.autograd.grad(out, x, grad), prepare=forward, inputs=[x, grad])
    assert use.input_bytes == 4 * UNIT
    # During it at least the cosine and the gradient are new; the gradient is a result, not workspace.
    assert use.peak_memory_bytes >= 6 * UNIT
    assert use.workspace_bytes == use.peak_memory_bytes - use.input_bytes - UNIT


def test_a_peak_inside_a_custom_backward_is_seen() -> None:
    class Hungry(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            scratch = torch.zeros(10, 64, 64)
            return grad + scratch.sum(0)

    x = unit(requires_grad=True)
    grad = unit()

    def call(_: None) -> Any:
        out = Hungry.apply(x)
        return out, torch.autograd.grad(out, x, grad)

    use = measure_memory(call, inputs=[x, grad])
    # Inputs 2, output 1, scratch 10, its sum 1, the gradient 1.
    assert in_units(use)[0] == pytest.approx(15, abs=1)
    assert use.workspace_bytes >= 10 * UNIT
