"""Measure how long a call keeps the host: calls are enqueued without waiting for the GPU.

``python -m lrbench.tests.tools.host_time`` prints, for a small layer and each operation, the median time of a forward
pass and of a forward and backward pass in microseconds, and what the parts of any call cost by themselves. Names of
operations as arguments choose among them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from lrbench.kernels import FAMILIES, get_operation, resolve

SIZES = {
    "batch": 1, "seq_len": 512, "num_heads": 4, "head_dim_qk": 64, "head_dim_v": 64, "channels": 256,
    "d_model": 256, "d_ff": 512,
}  # fmt: skip
"""A layer so small that a model of such layers waits for the host."""

ROUND = 10
"""Calls between two waits: fewer launches than the driver queues before it blocks."""


def host_us(call: Callable[[], object], rounds: int = 30) -> float:
    """Return the median time of a call in microseconds, from entering it to leaving it."""
    for _ in range(2 * ROUND):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        for _ in range(ROUND):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


@triton.jit
def _nothing_kernel(x_ptr):
    """Do nothing.

    Grid: (1,). Reads and writes nothing.
    """
    tl.device_assert(True)


class _Nothing(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, dx: torch.Tensor) -> torch.Tensor:
        return dx


def main(names: list[str]) -> None:
    """Print the table."""
    x = torch.zeros(16, device="cuda", requires_grad=True)
    compiled = _nothing_kernel[(1,)](x)
    stream = torch.cuda.current_stream().cuda_stream

    def launch(argument: object) -> None:
        compiled.run(1, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, argument)

    address = x.data_ptr()
    parts: dict[str, Callable[[], object]] = {
        "torch.empty": lambda: torch.empty(16, device="cuda"),
        "a launch by Triton": lambda: _nothing_kernel[(1,)](x),
        "a compiled kernel on a tensor": lambda: launch(x),
        "a compiled kernel on an address": lambda: launch(address),
        "an autograd function": lambda: _Nothing.apply(x),
        "the same and its gradient": lambda: torch.autograd.grad(_Nothing.apply(x), x, x),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for name, part in parts.items():
        print(f"{name:32} {host_us(part):8.1f} us")
    print(f"{'operation':32} {'forward':>8} {'both':>8} us")
    for name in names or [name for family in FAMILIES.values() for name in family]:
        operation = get_operation(name)
        inputs = operation.make_inputs(SIZES, dtype=torch.bfloat16, device="cuda")
        tensors = {n: x.requires_grad_(n in operation.differentiable) for n, x in inputs.items()}
        leaves = [tensors[n] for n in operation.differentiable]
        function = resolve(operation.call)

        def forward(function=function, tensors=tensors):  # type: ignore[no-untyped-def]
            return function(*tensors.values())

        grad = torch.ones_like(forward())

        def both(forward=forward, leaves=leaves, grad=grad):  # type: ignore[no-untyped-def]
            return torch.autograd.grad(forward(), leaves, grad)

        print(f"{name:32} {host_us(forward):8.1f} {host_us(both):8.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
