"""Measures the settings of a subject: checked as in a sweep, timed in turn, and kept as rows, copies too."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...analysis import counts
from ...analysis.accelerators.roofs import RoofRow
from ...kernels import baselines, resolve
from ...results.schema import SIZE_COLUMNS, Case, Record
from .. import live
from ..calibrate import roof_row
from ..clock import Clock, Timing
from ..derived import Run
from ..environment import current_environment
from ..plan import PlannedCase
from .model import COPY, Setting, Side, Subject
from .verdicts import Measured

COPIED_BYTES = 2 * 2**30
"""Read and written by one sample of the copy: far above any cache."""

COPY_SAMPLES = 10


def planned_cases(subject: Subject, setting: Setting, mode: str) -> list[PlannedCase]:
    """Return the cases of a setting in one mode, one per side and chunk length.

    Raises:
        ValueError: a side names an implementation that is not declared.
    """
    planned = []
    for side in setting.sides:
        if mode not in (side.modes or setting.modes):
            continue
        for chunk_size in side.chunk_sizes:
            planned.append(_planned(subject.kernel, setting, side, mode, chunk_size))
    return planned


def measure(
    subject: Subject,
    settings: Sequence[Setting],
    *,
    rounds: int,
    measured_case: Callable[[Record], None] = lambda _: None,
    measured_copy: Callable[[RoofRow], None] = lambda _: None,
    started: Callable[[PlannedCase], None] = lambda _: None,
    device: str = "cuda",
) -> Iterator[tuple[Setting, list[Measured]]]:
    """Yield every setting with what its bars are judged by.

    Args:
        rounds: samples of every case.
        measured_case: called with every case's row as it ends.
        measured_copy: called with the row of the device's copy, before and after a setting with a share of it.
        started: called with every case that is prepared.
        device: "cuda", or "cpu" to try a subject out.
    """
    from ..worker import Worker

    run = Run.start(uuid.uuid4().hex, current_environment(), None)
    worker, versions = Worker(device), baselines.installed_versions()

    def copy(beside: str) -> list[float]:
        timing = _time_copy(worker.clock, device)
        row = roof_row(
            run.run_id,
            run.environment,
            timing,
            work=COPIED_BYTES,
            quantity="copy",
            size=COPIED_BYTES // 2,
            spec_rate=None if run.device is None else run.device.bandwidth_bytes_s,
            short=True,
            beside=beside,
        )
        measured_copy(row)
        return timing.samples_ms

    for setting in settings:
        measured: list[Measured] = []
        copies = copy(setting.label) if any(bar.theirs == COPY for bar in setting.bars) else []
        for mode in setting.modes:
            for record in live.measure_group(
                worker,
                run,
                planned_cases(subject, setting, mode),
                versions,
                rounds=rounds,
                started=started,
                time_incorrect_peers=True,
            ):
                measured_case(record)
                measured.append(as_measured(record))
            worker.release(everything=False)
        if copies:
            copies = copies + copy(setting.label)
            measured.append(Measured(side=COPY, mode="", samples_ms=copies, moved_bytes=COPIED_BYTES))
        worker.release(everything=True)
        yield setting, measured


def as_measured(record: Record) -> Measured:
    """Return what a bar needs of a row."""
    memory = None
    if record.peak_memory_bytes is not None and record.input_bytes is not None:
        memory = record.peak_memory_bytes - record.input_bytes
    sizes = {name: size for name in SIZE_COLUMNS if (size := getattr(record, name)) is not None}
    count = counts.count_case(record.op, record.impl, record.mode, record.dtype, record.state_dtype, sizes)
    return Measured(
        side=record.impl,
        chunk_size=record.chunk_size,
        mode=record.mode,
        samples_ms=record.time_samples_ms or [],
        memory_bytes=memory,
        moved_bytes=None if count is None else count.compulsory_bytes,
        remark=None if record.status == "ok" else f"{record.status}: {record.reason}",
    )


def _planned(kernel: str, setting: Setting, side: Side, mode: str, chunk_size: int | None) -> PlannedCase:
    name = side.op or setting.op
    operation = baselines.get_operation(name)
    ours = {implementation.name: implementation for implementation in operation.implementations}
    target: Any = ours.get(side.impl) or baselines.get_baseline(name, side.impl)
    state_dtype = "fp32" if side.impl in ours and target.state_dtypes else None
    sizes = dict(side.sizes or setting.sizes)
    if chunk_size is None and side.impl in ours and target.preferred_chunk is not None:
        # What the implementation chooses, in the row as in a sweep: counts depend on it.
        chunk_size = resolve(target.preferred_chunk)(sizes)
    case = Case(
        kernel=kernel,
        op=name,
        impl=side.impl,
        provider="lrbench" if side.impl in ours else target.provider,
        mode=mode,
        dtype=setting.dtype,
        state_dtype=state_dtype,
        chunk_size=chunk_size,
        **sizes,
    )
    return PlannedCase(case=case, target=target)


def _time_copy(timer: Clock, device: str) -> Timing:
    import torch

    source = torch.empty(COPIED_BYTES // 2, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    samples, state = timer.sample(lambda _: target.copy_(source), lambda: None, COPY_SAMPLES)
    return Timing(samples_ms=samples, state=state)
