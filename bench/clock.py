"""Timing: how samples are taken on each device and when there are enough of them.

On a GPU each sample is: overwrite the L2 cache, record an event, call, record an event, all enqueued without a
synchronisation between, so the time of the overwrite hides the cost of launching. When the host takes longer to enqueue
the call than one overwrite lasts, the overwrite is repeated until it covers that, so that launch latency is not timed.
On a CPU it is the wall clock around the call.

Sampling stops after at least :data:`MIN_SAMPLES` samples as soon as half the 95 % confidence interval of the median is
within ``ci_target`` of the median, or the time budget is spent, or :data:`MAX_SAMPLES` are there. Every sample is kept.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..analysis.check import statistics
from .environment import DeviceState, device_state

MIN_SAMPLES = 10
MAX_SAMPLES = 400
BATCH = 5
CI_TARGET = {"cuda": 0.005, "cpu": 0.02}
MIN_FLUSH_BYTES = 256 * 2**20
WARMUP_S = 0.025
MAX_WARMUP_CALLS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Samples in milliseconds, in the order they were taken, and what the device reported meanwhile."""

    samples_ms: list[float]
    state: DeviceState

    def columns(self) -> dict[str, Any]:
        """The columns of a record: median, percentiles, 95 % confidence interval of the median, samples, clocks."""
        interval = statistics.median_interval(self.samples_ms)
        return {
            "time_ms": statistics.median(self.samples_ms),
            "time_p20_ms": statistics.percentile(self.samples_ms, 20),
            "time_p80_ms": statistics.percentile(self.samples_ms, 80),
            "time_ci_low_ms": interval.low,
            "time_ci_high_ms": interval.high,
            "time_samples_ms": self.samples_ms,
            "sm_clock_mhz": self.state.sm_clock_mhz,
            "power_w": self.state.power_w,
            "temperature_c": self.state.temperature_c,
            "throttled": self.state.throttled,
        }


class Clock(Protocol):
    """Takes samples of a call on one kind of device."""

    def sample(
        self, call: Callable[[Any], Any], prepare: Callable[[], Any], count: int
    ) -> tuple[list[float], DeviceState]:
        """Return ``count`` times of ``call(prepare())`` in ms, with ``prepare`` outside the timed region."""
        ...

    def synchronize(self) -> None:
        """Wait until the device is done."""
        ...


class CpuClock:
    """Wall clock."""

    def sample(
        self, call: Callable[[Any], Any], prepare: Callable[[], Any], count: int
    ) -> tuple[list[float], DeviceState]:
        """See :class:`Clock`."""
        samples = []
        for _ in range(count):
            prepared = prepare()
            start = time.perf_counter()
            result = call(prepared)
            samples.append((time.perf_counter() - start) * 1e3)
            del result, prepared
        return samples, DeviceState()

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CudaClock:
    """CUDA events on the current stream, with a cold L2 cache."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.flush_bytes = max(MIN_FLUSH_BYTES, 2 * l2_bytes)
        self._buffer = torch.empty(self.flush_bytes, dtype=torch.int8, device="cuda")
        self._flush_ms = self._time_flush()

    def _time_flush(self) -> float:
        for _ in range(3):
            self._buffer.zero_()
        start, end = self._events()
        start.record()
        for _ in range(10):
            self._buffer.zero_()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 10

    def _events(self) -> tuple[Any, Any]:
        event = self._torch.cuda.Event
        return event(enable_timing=True), event(enable_timing=True)

    def sample(
        self, call: Callable[[Any], Any], prepare: Callable[[], Any], count: int
    ) -> tuple[list[float], DeviceState]:
        """See :class:`Clock`."""
        prepared = prepare()
        self.synchronize()
        before = time.perf_counter()
        result = call(prepared)
        enqueue_ms = (time.perf_counter() - before) * 1e3
        del result, prepared
        self.synchronize()
        # A call that waits for the device itself takes its whole duration to enqueue; 10 ms covers any real launch.
        flushes = math.ceil(min(max(1.5 * enqueue_ms, self._flush_ms), 10.0) / self._flush_ms)
        events = []
        for _ in range(count):
            prepared = prepare()
            start, end = self._events()
            for _ in range(flushes):
                self._buffer.zero_()
            start.record()
            result = call(prepared)
            end.record()
            events.append((start, end))
            del result, prepared
        state = device_state()
        self.synchronize()
        return [start.elapsed_time(end) for start, end in events], state

    def synchronize(self) -> None:
        """Wait until the device is done."""
        self._torch.cuda.synchronize()


def measure(
    clock: Clock,
    call: Callable[[Any], Any],
    *,
    prepare: Callable[[], Any] = lambda: None,
    budget_s: float,
    ci_target: float,
) -> Timing:
    """Warm up, then take samples of ``call(prepare())`` by the rule of this module.

    Args:
        clock: how a sample is taken.
        call: what is timed; its result is dropped.
        prepare: runs before each sample outside the timed region (the forward pass of a backward timing).
        budget_s: seconds after which no further batch starts, once there are :data:`MIN_SAMPLES` samples.
        ci_target: relative half-width of the median's confidence interval at which to stop.
    """
    begin = time.perf_counter()
    for _ in range(MAX_WARMUP_CALLS):
        call(prepare())
        clock.synchronize()
        if time.perf_counter() - begin > WARMUP_S:
            break
    samples, state = clock.sample(call, prepare, MIN_SAMPLES)
    begin = time.perf_counter() - sum(samples) / 1e3
    while (
        len(samples) < MAX_SAMPLES
        and time.perf_counter() - begin < budget_s
        and statistics.relative_half_width(samples) > ci_target
    ):
        more, latest = clock.sample(call, prepare, BATCH)
        samples += more
        # Throttling in any batch marks the case; a later batch without it does not take the mark away.
        state = dataclasses.replace(latest, throttled=latest.throttled or state.throttled)
    return Timing(samples_ms=samples, state=state)
