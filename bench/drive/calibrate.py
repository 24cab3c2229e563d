"""Calibration: the rates this device reaches, beside its specification (:mod:`..analysis.accelerators.roofs`).

Measured as cases are, with the suite's clock: a copy much larger than the last cache, a square matrix product of each
dtype on random data, and on a GPU chains of fp32 fused multiply-adds. Matrices are 8192 a side where a product of that
size takes a fraction of a second, else smaller.

A worker process measures, so that the command line neither imports torch nor holds a CUDA context.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ...analysis.accelerators import cpu
from ...analysis.accelerators import known as accelerators
from ...analysis.accelerators.roofs import RoofRow, as_roofs
from ...analysis.check import statistics
from ..environment import Environment, current_environment
from ..worker import clock
from ..worker.noise import commonest
from .workers import ReplaceableWorker, ask_machine

if TYPE_CHECKING:
    from ..worker.worker import Worker

SIDES = (8192, 4096, 2048, 1024, 512)
PILOT_SIDES = {"cuda": 2048, "cpu": 512}
"""Side of the product that is timed first, to tell how large one may be; on a GPU it must outlast its launch."""

MIN_COPY_BYTES = {"cuda": 2 * 2**30, "cpu": 256 * 2**20}
CACHES = {"cuda": 20, "cpu": 4}
"""The buffer that is copied is at least this many times as large as the last cache."""

MEMORY_SHARE = 8
"""That buffer takes at most an eighth of the device's free memory."""

COPY_SAMPLES = 10
"""Samples of the copy that bars are compared with."""

GAIN_ROUNDS, GAIN_SAMPLES, GAIN_SIDE = 5, 3, 1024
"""For measuring what a second thread gains: rounds, samples per thread count in each, and the matrices' side."""

SPIN_S = 0.1
"""Longer than idle threads of a pool spin before they sleep, some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How much a calibration measures.

    Attributes:
        dtypes: of the matrix products; tf32 is fp32 operands rounded to tf32.
        fma: whether the vector units are measured too.
        budget_s: seconds of samples for each rate.
        ci_target: relative half-width of the median's confidence interval at which sampling may stop sooner.
        max_sample_s: matrices get smaller until one product takes no longer.
    """

    dtypes: tuple[str, ...]
    fma: bool
    budget_s: float
    ci_target: float
    max_sample_s: float


_GPU = ("bf16", "fp16", "tf32", "fp32")
FORMS = {
    ("cuda", False): Form(dtypes=(*_GPU, "fp64"), fma=True, budget_s=1.0, ci_target=0, max_sample_s=0.1),
    ("cuda", True): Form(dtypes=_GPU, fma=False, budget_s=0.1, ci_target=0.005, max_sample_s=0.03),
    ("cpu", False): Form(
        dtypes=("fp32", "fp64", "bf16", "fp16"), fma=False, budget_s=1.5, ci_target=0, max_sample_s=0.25
    ),
    ("cpu", True): Form(dtypes=("fp32", "fp64"), fma=False, budget_s=0.1, ci_target=0.02, max_sample_s=0.02),
}
"""(device kind, short) -> form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration found.

    Attributes:
        rows: the rates; empty where none were to be measured here.
        failure: why there are none although there should be, or None.
        noise: what disturbed the measurement most often, as in rows' ``noise``; None where nothing was noticed.
    """

    environment: Environment
    rows: list[RoofRow]
    failure: str | None
    noise: str | None = None


def calibrate(*, short: bool, gpu_only: bool = False, session: ReplaceableWorker | None = None) -> Calibration:
    """Measure the rates of this machine's device in a worker.

    Args:
        short: the form that a sweep takes, about a second on a GPU.
        gpu_only: measure nothing where there is no GPU; the environment is found out all the same.
        session: as of :func:`.workers.ask_machine`, whose exceptions it raises.
    """
    data = ask_machine("bench.drive.calibrate:measure_here", session, short=short, gpu_only=gpu_only)
    found = {"environment": Environment(**data["environment"]), "rows": [RoofRow(**row) for row in data["rows"]]}
    return Calibration(**{**data, **found})


def summary_rows(rows: Sequence[RoofRow]) -> list[dict[str, Any]]:
    """Return what people see of a calibration: rates in TFLOP/s and TB/s, and their share of the specification."""
    names = {"copy": "copy of {1:.3g} GiB, read + written", "matmul": "{0.size}^3 {0.dtype} matrix product"}
    return [
        {
            "what": names.get(row.quantity, "{0.dtype} multiply-adds").format(row, row.size / 2**30),
            "unit": "TB/s" if row.quantity == "copy" else "TFLOP/s",
            "measured": row.rate / 1e12,
            "best": row.best_rate / 1e12,
            "spec": None if row.spec_rate is None else row.spec_rate / 1e12,
            "share_of_spec": None if row.spec_rate is None else row.rate / row.spec_rate,
            "time_ms": row.time_ms,
            "samples": len(row.time_samples_ms),
            **{name: getattr(row, name) for name in ("sm_clock_mhz", "temperature_c", "throttled")},
        }
        for row in rows
    ]


def remember_cpu(rows: list[RoofRow]) -> None:
    """Make the rates measured on a CPU those of the accelerator ``cpu`` on this machine.

    The best ones: a CPU is shared, and load only lengthens a time.
    """
    best = [{**dataclasses.asdict(row), "rate": row.best_rate} for row in rows]
    cpu.remember(as_roofs(best, where="by lrbench calibrate, best of all samples"))
    cpu.local_cpu.cache_clear()


def measure_roofs(environment: Environment, form: Form, *, short: bool) -> tuple[list[RoofRow], list[str]]:
    """Return the rates of this process's device, and what disturbed them; imports torch."""
    device = environment.device_kind
    spec = None
    if device == "cuda" and environment.device_accelerator is not None:
        spec = accelerators.get_accelerator(environment.device_accelerator)
    run_id, rows, noises = uuid.uuid4().hex, list[RoofRow](), list[str]()
    the_clock: clock.Clock = clock.CudaClock() if device == "cuda" else clock.CpuClock()
    sampling = clock.Sampling(budget_s=form.budget_s, ci_target=form.ci_target)
    for call, what in _workloads(the_clock, device, form):
        waiting = cpu.Waiting()
        (timing,) = clock.measure(the_clock, [clock.Call(call=call)], sampling)
        if timing.failure is not None:
            raise timing.failure
        noises += filter(None, [timing.noise or waiting.busy(alone=device == "cpu")])
        rate = None
        if spec is not None:
            rates = {"copy": spec.bandwidth_bytes_s, "fma": spec.vector_flops}
            rate = rates.get(what["quantity"], spec.matrix_flops.get(what["dtype"]))
        rows.append(roof_row(run_id, environment, timing.columns(), **what, spec_rate=rate, short=short))
    return rows, noises


def roof_row(
    run_id: str, environment: Environment, times: Mapping[str, Any], *, work: float, quantity: str, **columns: Any
) -> RoofRow:
    """Return the row of a rate that was just measured.

    Args:
        times: as :meth:`.clock.Timing.columns` returns them.
        work: FLOPs or, of a copy, bytes read and written by a sample.
        columns: the row's size, short and what else it has.
    """
    where: dict[str, Any] = environment.columns()
    return RoofRow(
        run_id=run_id,
        measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        quantity=quantity,
        unit="bytes/s" if quantity == "copy" else "FLOP/s",
        rate=1e3 * work / times["time_ms"],
        best_rate=1e3 * work / min(times["time_samples_ms"]),
        **columns,
        **times,
        **where,
    )


Workload = tuple[Callable[[Any], Any], dict[str, Any]]
"""What is timed, and of its row quantity, dtype and size, with the ``work``, FLOPs or bytes per call."""


def _workloads(the_clock: clock.Clock, device: str, form: Form) -> Iterator[Workload]:
    """Make one workload after the other; the tensors of one are gone when the next is made."""
    import torch

    yield _copy(device)
    # Matrix units multiply bf16 and tf32 from compute capability 8.0 on.
    old = device == "cuda" and torch.cuda.get_device_capability()[0] < 8
    for dtype in form.dtypes:
        if not (old and dtype in ("bf16", "tf32")):
            yield from _matmul(the_clock, device, dtype, form.max_sample_s)
    if form.fma:
        yield _fma()


def _copy(device: str) -> Workload:
    import torch

    if device == "cuda":
        last_cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        free = torch.cuda.mem_get_info()[0]
    else:
        last_cache, free = cpu.cache_bytes(level=3) or 0, cpu.free_memory_bytes()
    size = min(max(MIN_COPY_BYTES[device], CACHES[device] * last_cache), free // MEMORY_SHARE)
    # A block of 2^20 bytes again and again: to draw gigabytes takes seconds.
    source = torch.empty(2**17, dtype=torch.int64, device=device).random_().repeat(size // 2**20)
    target = torch.empty_like(source)
    what = {"quantity": "copy", "dtype": None, "size": source.nbytes, "work": 2 * source.nbytes}
    return lambda _: target.copy_(source, non_blocking=True), what


def _matmul(the_clock: clock.Clock, device: str, dtype: str, max_sample_s: float) -> Iterator[Workload]:
    import torch

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    kind = kinds.get(dtype, torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")

    def product(side: int) -> Callable[[Any], Any]:
        a, b = (torch.randn(side, side, dtype=kind, device=device) for _ in range(2))
        out = torch.empty_like(a)
        return lambda _: torch.matmul(a, b, out=out)

    try:
        pilot = PILOT_SIDES[device]
        pilot_s = min(the_clock.sample(clock.Call(call=product(pilot)), 3)[0]) / 1e3
        side = next((each for each in SIDES if pilot_s * (each / pilot) ** 3 <= max_sample_s), SIDES[-1])
        yield product(side), {"quantity": "matmul", "dtype": dtype, "size": side, "work": 2 * side**3}
    finally:
        torch.set_float32_matmul_precision(before)


def _fma() -> Workload:
    import torch

    from ..worker import vector_rate

    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    out = torch.empty(sms * vector_rate.PROGRAMS_PER_SM, vector_rate.BLOCK, dtype=torch.float32, device="cuda")
    flops = vector_rate.run_chains(out)
    what = {"quantity": "fma", "dtype": "fp32", "size": flops // 2, "work": flops}
    return lambda _: vector_rate.run_chains(out), what


def measure_here(worker: object, *, short: bool, gpu_only: bool) -> dict[str, Any]:
    """Return the fields of a :class:`Calibration` as JSON holds them; what a worker runs for :func:`calibrate`."""
    environment = current_environment()
    rows, noises = list[RoofRow](), list[str]()
    failure = None
    if environment.device_kind == "cuda" or not gpu_only:
        try:
            rows, noises = measure_roofs(environment, FORMS[environment.device_kind, short], short=short)
        except RuntimeError as error:
            # The caller decides what this means: a sweep starts even where others fill the device.
            failure = " ".join(str(error).split())[:300]
    noise = commonest(noises) if noises else None
    return dataclasses.asdict(Calibration(environment=environment, rows=rows, failure=failure, noise=noise))


def copy_here(worker: Worker, *, moved_bytes: int) -> dict[str, Any]:
    """Return the columns of a timing of the device's copy, which reads and writes ``moved_bytes``."""
    import torch

    source = torch.empty(moved_bytes // 2, dtype=torch.int8, device=worker.device).random_()
    target = torch.empty_like(source)
    timing = clock.Timing()
    timing.add(*worker.clock.sample(clock.Call(call=lambda _: target.copy_(source)), COPY_SAMPLES))
    return timing.columns()


def thread_gain_here(worker: object) -> dict[str, float]:
    """Return as "gain" how many times one thread's rate of float32 matrix products two threads reach.

    Two hyperthreads of a core, or cores that others use, do no more multiply-adds than one. Leaves torch's number of
    threads as it was.
    """
    import torch

    a, b = torch.randn(2, GAIN_SIDE, GAIN_SIDE, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(a)
    before, timer = torch.get_num_threads(), clock.CpuClock()
    product = clock.Call(call=lambda _: torch.mm(a, b, out=out))
    samples_ms: dict[int, list[float]] = {1: [], 2: []}
    try:
        for _ in range(GAIN_ROUNDS):
            for number, samples in samples_ms.items():
                torch.set_num_threads(number)
                time.sleep(SPIN_S)
                torch.mm(a, b, out=out)
                samples += timer.sample(product, GAIN_SAMPLES)[0]
    finally:
        torch.set_num_threads(before)
    return {"gain": statistics.median(samples_ms[1]) / statistics.median(samples_ms[2])}
