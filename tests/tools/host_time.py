"""Print how long calls of small layers take the host and the device, beside a function that only allocates and peers.

``python -m lrbench.tests.tools.host_time`` on a machine with a GPU. All columns are in us, ``fw`` is a forward pass
without gradients, ``both`` a forward and a backward pass:

    host     medians of how long a call keeps the host. torch runs a backward pass in a thread of its own, which it
             wakes once for each backward pass, of a layer or of a whole model. So what a layer adds to a model is the
             column ``thread``, where both passes run in one thread.
    graph    a replay of a CUDA graph of the call, by events around many replays.
    kernels  the sum of the kernels' own times in calls without a graph, as torch.profiler reports them.

A dash stands for what failed; the reason is printed above the table, and so is that for a peer that is left out.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker.worker import prepare
from lrbench.kernels import get_operation
from lrbench.kernels.baselines import availability, get_implementation, installed_versions, known_bad_here, plan_sizes
from lrbench.kernels.baselines.spec import Baseline, Runnable
from lrbench.results.schema import Case

HEADS = {"batch": 1, "seq_len": 512, "num_heads": 4, "head_dim_qk": 64, "head_dim_v": 64}
CHANNELS = {"batch": 1, "seq_len": 512, "channels": 256}
MLP = {"batch": 1, "seq_len": 512, "d_model": 256, "d_ff": 512}
LAYERS: dict[str, tuple[dict[str, int], Sequence[str]]] = {
    "mlstm_sig": (HEADS, ("whole_state", "mlstm_kernels.xl_chunk_siging")),
    "mlstm_exp": (HEADS, ("whole_state", "mlstm_kernels.xl_chunk")),
    "simple_gla": (HEADS, ("whole_state", "fla.chunk_simple_gla")),
    "rglru": (CHANNELS, ("fused", "fla.fused_recurrent_hgrn", "fla.chunk_hgrn")),
    "wkv4": (CHANNELS, ("scan", "fla.fused_recurrent_rwkv4")),
    "gated_mlp": (MLP, ("fused", "torch.eager", "liger_kernel.silu_mul")),
}
"""Operation -> sizes of the layer, our implementation and peers."""

ROUNDS, CALLS = 25, 20
"""Rounds, in which all take turns, and how often each is called in a round before the host waits for the GPU."""

WARM_UPS, REPLAYS = 3, 200

Passes = dict[str, Callable[[], Any]]
Times = dict[tuple[str, str], float]
"""(layer, column) -> us."""


class Allocate(torch.autograd.Function):
    """Allocates a result like its third argument, and gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[2])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def make(op: str, impl: str, sizes: dict[str, int]) -> Runnable | str:
    """Return a layer, or why it is left out."""
    target, operation = get_implementation(op, impl), get_operation(op)
    provider = target.provider if isinstance(target, Baseline) else "lrbench"
    if isinstance(target, Baseline):
        sizes = plan_sizes(target, sizes, op=op)[0]
    case = Case(kernel=operation.kernel, op=op, impl=impl, provider=provider, mode="fwbw", dtype="bf16", **sizes)
    if isinstance(target, Baseline) and (
        reason := availability(target)
        or known_bad_here(target, case, installed_versions(), torch.cuda.get_device_capability())
    ):
        return reason
    inputs = operation.make_inputs(case.sizes, dtype=torch.bfloat16, device="cuda")
    return prepare(PlannedCase(case=case, target=target), inputs).runnable


def passes(layer: Runnable) -> Passes:
    """Return a forward pass without gradients, both passes, and both in one thread, each of which has run."""
    leaves = list(layer.leaves.values())
    gradient = torch.randn_like(layer.forward())

    def forward() -> Any:
        with torch.no_grad():
            return layer.forward()

    def both() -> Any:
        return torch.autograd.grad(layer.forward(), leaves, gradient)

    def one_thread() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return both()

    found = {"fw": forward, "both": both, "thread": one_thread}
    for call in found.values():
        call()
    torch.cuda.synchronize()
    return found


def host_us(calls: dict[str, Passes]) -> Times:
    """Return the medians of how long calls keep the host; all take turns."""
    times: dict[tuple[str, str], list[float]] = {}
    for _, (name, each) in itertools.product(range(ROUNDS), calls.items()):
        for column, call in each.items():
            torch.cuda.synchronize()
            for _ in range(CALLS):
                begin = time.perf_counter()
                call()
                times.setdefault((name, f"host {column}"), []).append(1e6 * (time.perf_counter() - begin))
    return {key: statistics.median(each) for key, each in times.items()}


def kernels_us(call: Callable[[], Any]) -> float:
    """Return the sum of the kernels' times in a call."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    return sum(x.self_device_time_total for x in profiler.key_averages() if x.device_type == DeviceType.CUDA) / CALLS


def graph_us(call: Callable[[], Any]) -> float:
    """Return the time of a replay of the call's CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(WARM_UPS):
        graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    # The graph writes into the result's memory.
    del result
    return 1e3 * begin.elapsed_time(end) / REPLAYS


def attempt(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or None and print the error that it raises."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001, whatever a peer raises must not end the others' measurements
        print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return None


def main() -> None:
    """Print a line for each layer and peer."""
    calls: dict[str, Passes] = {}
    for op, (sizes, impls) in LAYERS.items():
        for impl in impls:
            name = f"{op} {impl}"
            layer = attempt(name, make, op, impl, sizes)
            if isinstance(layer, str):
                print(f"{name} is left out: {layer}")
            elif layer is not None:
                if not calls:
                    leaves = list(layer.leaves.values())
                    allocate = partial(Allocate.apply, *leaves)
                    calls["allocation alone"] = passes(Runnable(forward=allocate, leaves=layer.leaves))
                if found := attempt(name, passes, layer):
                    calls[name] = found
    times: Times = attempt("host", host_us, calls) or {}
    # Peers come last: a failed capture may leave the device unusable.
    for name in sorted(calls, key=lambda name: "." in name):
        for column in ("fw", "both") if name != "allocation alone" else ():
            for kind, measure in (("kernels", kernels_us), ("graph", graph_us)):
                if (found := attempt(f"{name}, {kind} {column}", measure, calls[name][column])) is not None:
                    times[name, f"{kind} {column}"] = found
    columns = ["host fw", "host both", "host thread", "graph fw", "kernels fw", "graph both", "kernels both"]
    print(f"{'us':42}" + "".join(f"{column:>13}" for column in columns))
    for name in calls:
        values = [times.get((name, column)) for column in columns]
        print(f"{name:42}" + "".join(f"{'-' if x is None else f'{x:.0f}':>13}" for x in values))


if __name__ == "__main__":
    main()
