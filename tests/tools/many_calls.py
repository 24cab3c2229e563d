"""Run one call many times and compare every result with the first, in a process that may be killed.

Programs of a single pass wait for each other: where one waits for ever, its process can do nothing more with the GPU.
``python -m lrbench.tests.tools.many_calls wkv4 5000`` exits with 0 when all calls ended and gave equal bits.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lrbench.kernels.rglru import RGLRU
from lrbench.kernels.wkv import OPERATION as WKV

ROUND = 25
"""Calls between two looks at the clock: fewer launches than the driver queues before it blocks."""

ROUND_S = 20.0
"""How long they may take; they take about 0.1 s."""


def wkv4() -> Callable[[], tuple[Tensor, ...]]:
    """Return a forward pass without gradients: 128 tiles of time, which pass their states on."""
    sizes = {"batch": 8, "seq_len": 16384, "channels": 768}
    inputs = WKV.make_inputs(sizes, dtype=torch.bfloat16, device="cuda")
    scan = WKV.function(WKV.implementation("scan"))

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (scan(*inputs.values()),)

    return call


def rglru() -> Callable[[], tuple[Tensor, ...]]:
    """Return a forward and backward pass, each of 128 tiles of time."""
    sizes = {"batch": 8, "seq_len": 8192, "channels": 1024}
    inputs = RGLRU.make_inputs(sizes, dtype=torch.bfloat16, device="cuda")
    leaves = [x.requires_grad_() for x in inputs.values()]
    dh = torch.randn_like(leaves[0])
    fused = RGLRU.function(RGLRU.implementation("fused"))

    def call() -> tuple[Tensor, ...]:
        h = fused(*leaves)
        return h.detach(), *torch.autograd.grad(h, leaves, dh)

    return call


def main(name: str, calls: int) -> None:
    """Run the calls; exit with 1 where some do not end, or differ."""
    call = {"wkv4": wkv4, "rglru": rglru}[name]()
    first = call()
    torch.cuda.synchronize()
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for done in range(0, calls, ROUND):
        for _ in range(ROUND):
            for x, expected in zip(call(), first, strict=True):
                different |= (x != expected).any()
        end = torch.cuda.Event()
        end.record()
        deadline = time.monotonic() + ROUND_S
        while not end.query():
            if time.monotonic() > deadline:
                print(f"{name}: one of the calls {done} to {done + ROUND} does not end", flush=True)
                # What usually runs at a process's end would wait for the GPU.
                os._exit(1)
            time.sleep(1e-3)
    if different:
        sys.exit(f"{name}: not all of {calls} calls gave the first one's result")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
