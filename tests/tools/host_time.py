"""Print how long calls of a small layer keep the host, beside a function that only allocates what it returns.

``python -m lrbench.tests.tools.host_time`` on a machine with a GPU; medians in us. torch runs a backward pass in a
thread of its own, which it wakes once for each backward pass, of a layer or of a whole model. So what a layer adds to a
model is the last column, where both passes run in one thread.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lrbench.kernels import get_operation

HEADS = {"batch": 1, "seq_len": 512, "num_heads": 4, "head_dim_qk": 64, "head_dim_v": 64}
CHANNELS = {"batch": 1, "seq_len": 512, "channels": 256}
LAYERS: dict[tuple[str, str], dict[str, int]] = {
    ("mlstm_sig", "whole_state"): HEADS,
    ("mlstm_exp", "whole_state"): HEADS,
    ("rglru", "fused"): CHANNELS,
    ("wkv4", "scan"): CHANNELS,
    ("gated_mlp", "fused"): {"batch": 1, "seq_len": 512, "d_model": 256, "d_ff": 512},
}
"""Operation, implementation -> sizes of the layer."""

ROUNDS, CALLS = 25, 20
"""Rounds, in which all take turns, and how often each is called in a round before the host waits for the GPU."""


class Allocate(torch.autograd.Function):
    """Allocates a result like its third argument, and gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[2])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def passes(function: Callable[..., Any], leaves: list[Tensor]) -> tuple[Callable[[], Any], ...]:
    """Return a forward pass without gradients, both passes, and both in one thread."""
    dh = torch.randn_like(function(*leaves))

    def forward() -> None:
        with torch.no_grad():
            function(*leaves)

    def both() -> None:
        torch.autograd.grad(function(*leaves), leaves, dh)

    def one_thread() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            both()

    return forward, both, one_thread


def main() -> None:
    """Print a line for each layer."""
    calls = {}
    for (name, impl), sizes in LAYERS.items():
        operation = get_operation(name)
        inputs = operation.make_inputs(sizes, dtype=torch.bfloat16, device="cuda")
        leaves = [x.requires_grad_() for x in inputs.values()]
        if not calls:
            calls["allocation alone"] = passes(Allocate.apply, leaves)
        calls[name] = passes(operation.function(operation.implementation(impl)), leaves)
    times: dict[Callable[[], Any], list[float]] = {call: [] for each in calls.values() for call in each}
    for _, call in itertools.product(range(ROUNDS), times):
        torch.cuda.synchronize()
        for _ in range(CALLS):
            begin = time.perf_counter()
            call()
            times[call].append(1e6 * (time.perf_counter() - begin))
    print(f"{'':20}{'forward':>10}{'both':>10}{'one thread':>12}")
    for name, each in calls.items():
        forward, both, one_thread = (statistics.median(times[call]) for call in each)
        print(f"{name:20}{forward:10.0f}{both:10.0f}{one_thread:12.0f}")


if __name__ == "__main__":
    main()
