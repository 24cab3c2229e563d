"""Speed bars that the project holds itself to, measured side by side with whom they name.

``python -m lrbench.bench.bars cpu``: the portable mLSTMexp against mlstm_kernels' native chunkwise forms on this CPU.
Every side runs at each of its chunk lengths, all of them interleaved in every round, so that what else the machine does
falls on all alike; the best chunk length of each side counts. Exit 0 if every bar is held, 1 if one is missed, 2 if the
other side is not installed or disagrees in the numbers.

``python -m lrbench.bench.bars gpu``: the Triton mLSTMsig against mlstm_kernels' xl_chunk_siging on this GPU, 65,536
tokens, 16 heads, dqk 128, dv 256, bf16, with peak memory.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..analysis.statistics import Interval, bootstrap_ratio_interval, median, median_interval
from ..kernels import get_operation, resolve
from .clock import CudaClock

if TYPE_CHECKING:
    from torch import Tensor

CPU_SIZES = {"batch": 1, "seq_len": 4096, "num_heads": 4, "head_dim_qk": 128, "head_dim_v": 256}
CPU_CHUNK_SIZES = {"lrbench": (32, 48, 64, 96, 128), "mlstm_kernels": (64, 128, 256)}
PACKAGE = "mlstm_kernels==2.0.6"

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What one side must be ahead of the other, at each side's best chunk length."""

    ours: str
    theirs: str
    mode: str
    ratio: float


CPU_BARS = (
    Bar(ours="normalizer_gradient", theirs="native_autograd", mode="fw", ratio=2.0),
    Bar(ours="normalizer_gradient", theirs="native_autograd", mode="fwbw", ratio=2.0),
    Bar(ours="default", theirs="native_custbw", mode="fw", ratio=1.5),
    Bar(ours="default", theirs="native_custbw", mode="fwbw", ratio=1.5),
)
"""Like for like: native_autograd differentiates through the normaliser, native_custbw does not."""


GPU_BARS = {
    8192: (
        Bar(ours="tfla", theirs="xl_chunk_siging", mode="fw", ratio=2.5),
        Bar(ours="tfla", theirs="xl_chunk_siging", mode="fwbw", ratio=2.0),
    ),
    65536: (
        Bar(ours="tfla", theirs="xl_chunk_siging", mode="fw", ratio=2.0),
        Bar(ours="tfla", theirs="xl_chunk_siging", mode="fwbw", ratio=1.7),
    ),
}
"""Sequence length -> bars; the batch makes 65,536 tokens of it."""

GPU_TOKENS = 65536
GPU_SIZES = {"num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}
GPU_CHUNK_SIZES: dict[str, tuple[int | None, ...]] = {"tfla": (None, 1024), "xl_chunk_siging": (64, 128, 256)}
"""None: the chunk length the implementation chooses itself."""

GPU_MEMORY_CHUNK = 256
"""Their chunk length whose forward and backward memory ours may not exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One timed call: a side at a chunk length in a mode, and its samples in milliseconds."""

    side: str
    chunk_size: int | None
    mode: str
    call: Callable[[], Any]
    samples_ms: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A bar and what was measured: the best entries of both sides and theirs / ours with its 95 % interval."""

    bar: Bar
    ours: Entry
    theirs: Entry
    ratio: float
    interval: Interval

    @property
    def held(self) -> bool:
        """Whether the ratio of the medians reaches the bar."""
        return self.ratio >= self.bar.ratio


def measure_interleaved(entries: Sequence[Entry], *, rounds: int, warmup: int = 1) -> Iterator[int]:
    """Time every entry once a round, in turn forwards and backwards; yield the number of rounds done."""
    for index in range(-warmup, rounds):
        for entry in entries if index % 2 else reversed(entries):
            start = time.perf_counter()
            entry.call()
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            if index >= 0:
                entry.samples_ms.append(elapsed_ms)
        if index >= 0:
            yield index + 1


def judge(bars: Sequence[Bar], entries: Sequence[Entry]) -> list[Verdict]:
    """Compare the best entries (by median) of both sides of every bar."""

    def best(side: str, mode: str) -> Entry:
        candidates = [entry for entry in entries if (entry.side, entry.mode) == (side, mode)]
        return min(candidates, key=lambda entry: median(entry.samples_ms))

    verdicts = []
    for bar in bars:
        ours, theirs = best(bar.ours, bar.mode), best(bar.theirs, bar.mode)
        verdicts.append(
            Verdict(
                bar=bar,
                ours=ours,
                theirs=theirs,
                ratio=median(theirs.samples_ms) / median(ours.samples_ms),
                interval=bootstrap_ratio_interval(theirs.samples_ms, ours.samples_ms),
            )
        )
    return verdicts


def cpu_entries() -> list[Entry]:
    """Build the calls of both sides on the same inputs, each in its own layout, and check that their outputs agree.

    Raises:
        ImportError: mlstm_kernels is not installed.
        ValueError: the outputs differ by more than 1e-3 of the largest.
    """
    import torch

    native = importlib.import_module("mlstm_kernels.torch.chunkwise.native")
    operation = get_operation("mlstm_exp")
    ours = resolve(operation.implementation("torch").call)
    inputs = resolve(operation.inputs)(CPU_SIZES, dtype=torch.float32, device="cpu", seed=0)
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
    for side, (provider, fn, arguments, cotangent, options) in sides.items():
        for chunk_size in CPU_CHUNK_SIZES[provider]:
            kwargs = {"chunk_size": chunk_size, **options}
            entries.append(Entry(side=side, chunk_size=chunk_size, mode="fw", call=forward(fn, arguments, kwargs)))
            entries.append(
                Entry(side=side, chunk_size=chunk_size, mode="fwbw", call=both(fn, arguments, kwargs, cotangent))
            )
    return entries


def gpu_entries(seq_len: int) -> list[Entry]:
    """Build the calls of both sides on the same inputs on the GPU: our gates in float32, theirs in the dtype of q.

    Raises:
        ImportError: mlstm_kernels is not installed.
        ValueError: the outputs differ by more than 2 % of the largest.
    """
    import torch

    module = importlib.import_module("mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging")
    theirs = module.mlstm_siging_chunkwise__xl_chunk
    operation = get_operation("mlstm_sig")
    ours = resolve(operation.implementation("tfla").call)
    sizes = {"batch": GPU_TOKENS // seq_len, "seq_len": seq_len, **GPU_SIZES}
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = resolve(operation.inputs)(sizes, dtype=torch.bfloat16, device=device, seed=0)
    leaves = [x.requires_grad_() for x in inputs.values()]
    # Their layout is [B, H, T, D]; all their inputs come in one dtype, which holds the gates' values exactly.
    their_leaves = [x.detach().to(torch.bfloat16).transpose(1, 2).contiguous().requires_grad_() for x in leaves]
    grad = torch.randn_like(inputs["v"])
    their_grad = grad.transpose(1, 2).contiguous()
    fixed = {"tfla": {}, "xl_chunk_siging": {"normalize": False, "eps": 0.0}}

    expected = ours(*leaves).detach()
    found = theirs(*their_leaves, chunk_size=128, **fixed["xl_chunk_siging"]).detach().transpose(1, 2)
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < 2e-2:
        raise ValueError(f"outputs of mlstm_kernels and lrbench must agree within 2e-2 of the largest, got {error:.2g}")
    del expected, found

    entries = []
    for side, fn, arguments, cotangent in (
        ("tfla", ours, leaves, grad),
        ("xl_chunk_siging", theirs, their_leaves, their_grad),
    ):
        for chunk_size in GPU_CHUNK_SIZES[side]:
            kwargs = fixed[side] | ({} if chunk_size is None else {"chunk_size": chunk_size})

            def forward(fn: Any = fn, arguments: Any = arguments, kwargs: Any = kwargs) -> Any:
                with torch.no_grad():
                    return fn(*arguments, **kwargs)

            def both(fn: Any = fn, arguments: Any = arguments, kwargs: Any = kwargs, cotangent: Any = cotangent) -> Any:
                return torch.autograd.grad(fn(*arguments, **kwargs), arguments, cotangent)

            entries.append(Entry(side=side, chunk_size=chunk_size, mode="fw", call=forward))
            entries.append(Entry(side=side, chunk_size=chunk_size, mode="fwbw", call=both))
    return entries


def _time_once(clock: CudaClock, call: Callable[[], Any]) -> list[float]:
    samples, _ = clock.sample(lambda _: call(), lambda: None, 1)
    return samples


def measure_on_gpu(entries: Sequence[Entry], *, rounds: int) -> None:
    """Time every entry once a round with CUDA events, the L2 flushed before each; then take its peak memory.

    The memory is what a call allocates above what was there before it; both sides' inputs are equally large.
    """
    import torch

    clock = CudaClock()
    for entry in entries:
        for _ in range(3):
            entry.call()
    for index in range(rounds):
        for entry in entries if index % 2 else reversed(entries):
            entry.samples_ms.extend(_time_once(clock, entry.call))
    for entry in entries:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        entry.call()
        torch.cuda.synchronize()
        entry.peak_bytes.append(torch.cuda.max_memory_allocated() - before)


def _chunk(entry: Entry) -> str:
    return "own choice" if entry.chunk_size is None else str(entry.chunk_size)


def _entry_table(entries: Sequence[Entry]) -> Table:
    table = Table("side", "chunk", "mode", "median ms", "95 % interval", "fastest ms")
    for entry in sorted(entries, key=lambda entry: (entry.mode, entry.side, entry.chunk_size or 0)):
        interval = median_interval(entry.samples_ms)
        table.add_row(
            entry.side,
            _chunk(entry),
            entry.mode,
            f"{median(entry.samples_ms):.4g}",
            f"{interval.low:.4g} - {interval.high:.4g}",
            f"{min(entry.samples_ms):.4g}",
        )
    return table


def _verdict_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table("mode", "ours (chunk)", "theirs (chunk)", "ratio", "95 % interval", "bar", "")
    for verdict in verdicts:
        ours, theirs = verdict.ours, verdict.theirs
        table.add_row(
            verdict.bar.mode,
            f"{ours.side} ({_chunk(ours)}) {median(ours.samples_ms):.3g} ms",
            f"{theirs.side} ({_chunk(theirs)}) {median(theirs.samples_ms):.3g} ms",
            f"{verdict.ratio:.2f}",
            f"{verdict.interval.low:.2f} - {verdict.interval.high:.2f}",
            f"{verdict.bar.ratio:.2f}",
            "held" if verdict.held else "missed",
        )
    return table


@app.callback()
def bars() -> None:
    """Measure the project's speed bars."""


@app.command()
def cpu(
    rounds: Annotated[int, typer.Option(min=3, help="Samples of every case.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds that are not counted.")] = 2,
) -> None:
    """Portable mLSTMexp against mlstm_kernels' native forms: fp32, B=1, 4 heads, T=4096, dqk 128, dv 256."""
    errors = Console(stderr=True)
    try:
        entries = cpu_entries()
    except ImportError as error:
        errors.print(f"mlstm_kernels cannot be imported ({error}): pip install --no-deps {PACKAGE} einops")
        raise typer.Exit(2) from None
    except ValueError as error:
        errors.print(str(error))
        raise typer.Exit(2) from None
    for done in measure_interleaved(entries, rounds=rounds, warmup=warmup):
        errors.print(f"round {done} of {rounds}", end="\r")
    verdicts = judge(CPU_BARS, entries)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_entry_table(entries))
    console.print(_verdict_table(verdicts))
    raise typer.Exit(0 if all(verdict.held for verdict in verdicts) else 1)


@app.command()
def gpu(rounds: Annotated[int, typer.Option(min=3, help="Samples of every case.")] = 20) -> None:
    """Triton mLSTMsig against mlstm_kernels' xl_chunk_siging: 65,536 tokens, 16 heads, dqk 128, dv 256, bf16."""
    import torch

    errors = Console(stderr=True)
    if not torch.cuda.is_available():
        errors.print("this bar needs an NVIDIA GPU, and none is here")
        raise typer.Exit(2)
    console = Console(width=None if sys.stdout.isatty() else 120)
    held = True
    for seq_len, bars_here in GPU_BARS.items():
        try:
            entries = gpu_entries(seq_len)
        except ImportError as error:
            errors.print(f"mlstm_kernels cannot be imported ({error}): pip install --no-deps {PACKAGE} einops")
            raise typer.Exit(2) from None
        except ValueError as error:
            errors.print(str(error))
            raise typer.Exit(2) from None
        measure_on_gpu(entries, rounds=rounds)
        verdicts = judge(bars_here, entries)
        console.print(f"T = {seq_len}, batch {GPU_TOKENS // seq_len}, {torch.cuda.get_device_name()}")
        console.print(_entry_table(entries))
        console.print(_verdict_table(verdicts))
        training = next(v for v in verdicts if v.bar.mode == "fwbw").ours
        limit = next(e for e in entries if (e.chunk_size, e.mode) == (GPU_MEMORY_CHUNK, "fwbw"))
        frugal = training.peak_bytes[0] <= limit.peak_bytes[0]
        console.print(
            f"memory above the inputs, forward + backward: ours {training.peak_bytes[0] / 2**30:.2f} GiB, theirs at "
            f"chunk {GPU_MEMORY_CHUNK} {limit.peak_bytes[0] / 2**30:.2f} GiB: {'held' if frugal else 'missed'}"
        )
        held = held and frugal and all(verdict.held for verdict in verdicts)
    raise typer.Exit(0 if held else 1)


if __name__ == "__main__":
    app()
