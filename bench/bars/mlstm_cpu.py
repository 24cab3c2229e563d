"""The portable mLSTMexp against mlstm_kernels' native chunkwise forms on this CPU.

Every bar is measured in a process of its own, like the cases of a sweep: memory that other sides left behind would
spare a side the page faults of its own temporaries. A side's page faults stand beside its times: where the allocator
gives memory back to the system between calls, they are a part of what a call costs. Both sides run at each of their
chunk lengths, twice in a row, all of them interleaved in every round; the second time counts, and of each side the best
chunk length.
What two threads do beyond one is measured before and after every bar: two hyperthreads of a core, or cores that others
use, do no more multiply-adds than one, and the sides' ratio is not that of two cores then.
With the normaliser's gradient ours is compared with native_autograd, without it with native_custbw: like for like.
"""

from __future__ import annotations

import importlib
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...analysis.check.statistics import median
from ...kernels import get_operation, resolve
from ..clock import CpuClock
from .model import Bar
from .verdicts import Measured

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {"batch": 1, "seq_len": 4096, "num_heads": 4, "head_dim_qk": 128, "head_dim_v": 256}
CHUNK_SIZES = {"lrbench": (32, 48, 64, 96, 128), "mlstm_kernels": (64, 128, 256)}
PACKAGE = "mlstm_kernels==2.0.6"

BARS = (
    Bar(ours="normalizer_gradient", theirs="native_autograd", mode="fw", ratio=2.0),
    Bar(ours="normalizer_gradient", theirs="native_autograd", mode="fwbw", ratio=2.0),
    Bar(ours="default", theirs="native_custbw", mode="fw", ratio=1.5),
    Bar(ours="default", theirs="native_custbw", mode="fwbw", ratio=1.5),
)

THREADS = 2
"""The cores that the bars are about."""

FREE_CORES_GAIN = 1.6
"""What so many threads reach at least, in rates of one, where each has a core to itself."""

GAIN_ROUNDS, GAIN_SAMPLES, GAIN_SIDE = 5, 3, 1024

SPIN_S = 0.1
"""Longer than threads of a pool that is not used wait awake, some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One timed call: a side at a chunk length in a mode, its samples in milliseconds and its page faults in each."""

    side: str
    chunk_size: int
    mode: str
    call: Callable[[], Any]
    samples_ms: list[float] = field(default_factory=list)
    page_faults: list[float] = field(default_factory=list)

    def measured(self) -> Measured:
        """Return what a bar needs of it."""
        low, high = min(self.page_faults), max(self.page_faults)
        faults = f"{low:,.0f} to {high:,.0f} page faults a call, {median(self.page_faults):,.0f} in the median"
        return Measured(
            side=self.side,
            chunk_size=self.chunk_size,
            mode=self.mode,
            samples_ms=self.samples_ms,
            remark=faults if high else None,
        )


def measure_interleaved(entries: Sequence[Entry], *, rounds: int, warmup: int = 1) -> Iterator[int]:
    """Time every entry once a round, in turn forwards and backwards; yield the number of rounds done.

    A call that is timed follows one of the same entry that is not: what the side before left of the allocator's memory,
    pages given back to the system above all, is no part of a side's time.
    """
    for index in range(-warmup, rounds):
        for entry in entries if index % 2 else reversed(entries):
            if index >= 0:
                entry.call()
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start = time.perf_counter()
            entry.call()
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            if index >= 0:
                entry.samples_ms.append(elapsed_ms)
                entry.page_faults.append(faults)
        if index >= 0:
            yield index + 1


def measure(bar: Bar, *, rounds: int, warmup: int) -> list[Measured]:
    """Return both sides of a bar at every chunk length, measured in this process; say on stderr how far it is.

    Raises:
        ImportError, ValueError: as :func:`build_entries`.
    """
    entries = build_entries(bar)
    for done in measure_interleaved(entries, rounds=rounds, warmup=warmup):
        print(f"{bar.mode}, {bar.ours} beside {bar.theirs}: round {done} of {rounds}", end="\r", file=sys.stderr)
    print(file=sys.stderr)
    return [entry.measured() for entry in entries]


def measure_apart(bar: Bar, *, rounds: int, warmup: int) -> list[Measured]:
    """Return what :func:`measure` does, run in a process of its own."""
    with _new_process() as pool:
        return pool.submit(measure, bar, rounds=rounds, warmup=warmup).result()


def thread_gain() -> float:
    """Return how many times one thread's rate of float32 matrix products :data:`THREADS` threads reach.

    Measured in a process of its own: setting the number of threads changes MKL's choices for good.
    """
    with _new_process() as pool:
        return pool.submit(measure_thread_gain).result()


def _new_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def measure_thread_gain(side: int = GAIN_SIDE) -> float:
    """Return :func:`thread_gain`, measured in this process; leaves torch's number of threads as it was."""
    import torch

    a, b = torch.randn(2, side, side, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(a)
    before, timer = torch.get_num_threads(), CpuClock()
    samples_ms: dict[int, list[float]] = {1: [], THREADS: []}
    try:
        for _ in range(GAIN_ROUNDS):
            for threads, samples in samples_ms.items():
                torch.set_num_threads(threads)
                time.sleep(SPIN_S)
                torch.mm(a, b, out=out)
                samples += timer.sample(lambda _: torch.mm(a, b, out=out), lambda: None, GAIN_SAMPLES)[0]
    finally:
        torch.set_num_threads(before)
    return median(samples_ms[1]) / median(samples_ms[THREADS])


def build_entries(bar: Bar) -> list[Entry]:
    """Build the calls of a bar's sides on the same inputs, each in its own layout, and check that their outputs agree.

    Raises:
        ImportError: mlstm_kernels is not installed.
        ValueError: a side that is none of them, or outputs that differ by more than 1e-3 of the largest.
    """
    if unknown := {bar.ours, bar.theirs} - {side for each in BARS for side in (each.ours, each.theirs)}:
        raise ValueError(f"sides must be those of the bars, got {', '.join(sorted(unknown))}")
    import torch

    native = importlib.import_module("mlstm_kernels.torch.chunkwise.native")
    operation = get_operation("mlstm_exp")
    ours = operation.function(operation.implementation("torch"))
    inputs = resolve(operation.inputs)(SIZES, dtype=torch.float32, device="cpu", seed=0)
    leaves = [x.requires_grad_() for x in inputs.values()]
    # Their layout is [B, H, T, D].
    their_leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves]
    grad = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(1))
    their_grad = grad.transpose(1, 2).contiguous()

    expected = ours(*leaves, chunk_size=64).detach()
    found = native.mlstm_chunkwise__native_autograd(*their_leaves, chunk_size=64).detach().transpose(1, 2)
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < 1e-3:
        raise ValueError(f"outputs of mlstm_kernels and lrbench must agree within 1e-3 of the largest, got {error:.2g}")

    def forward(fn: Callable[..., Tensor], arguments: list[Tensor], kwargs: dict[str, Any]) -> Callable[[], Any]:
        def call() -> Tensor:
            with torch.no_grad():
                return fn(*arguments, **kwargs)

        return call

    def both(
        fn: Callable[..., Tensor], arguments: list[Tensor], kwargs: dict[str, Any], cotangent: Tensor
    ) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(fn(*arguments, **kwargs), arguments, cotangent)

    sides: dict[str, tuple[str, Callable[..., Tensor], list[Tensor], Tensor, dict[str, Any]]] = {
        "default": ("lrbench", ours, leaves, grad, {}),
        "normalizer_gradient": ("lrbench", ours, leaves, grad, {"normalizer_gradient": True}),
        "native_autograd": (
            "mlstm_kernels", native.mlstm_chunkwise__native_autograd, their_leaves, their_grad, {},
        ),
        "native_custbw": ("mlstm_kernels", native.mlstm_chunkwise__native_custbw, their_leaves, their_grad, {}),
    }  # fmt: skip
    entries = []
    for side in (bar.ours, bar.theirs):
        provider, fn, arguments, cotangent, options = sides[side]
        for chunk_size in CHUNK_SIZES[provider]:
            kwargs = {"chunk_size": chunk_size, **options}
            call = forward(fn, arguments, kwargs) if bar.mode == "fw" else both(fn, arguments, kwargs, cotangent)
            entries.append(Entry(side=side, chunk_size=chunk_size, mode=bar.mode, call=call))
    return entries
