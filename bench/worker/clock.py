"""Timing: how samples are taken on each device and when there are enough of them.

On a GPU each sample is: overwrite the L2 cache, record an event, call, record an event, all enqueued without a
synchronisation between, so that the device is still overwriting while the host launches the call. When the host takes
longer to enqueue the call than one overwrite lasts, the overwrite is repeated until it covers that, so that launch
latency is not timed. On a CPU a sample is the wall clock around the call.

Where calls are enqueued, the host's own time is measured as well, after all samples so that it cannot disturb them: the
wall clock around each of a few calls, which follow each other without waiting for the device. The queue holds 1024
launches; before it can be full and make the host wait, it is emptied.

:func:`measure` is the one way in which samples are taken, for sweeps, live comparisons, bars and calibrations. Every
sample is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...analysis.check import statistics
from ...results.schema import HIDDEN_HOST_MS
from ..environment import DeviceState, device_state
from .noise import Watch

MIN_SAMPLES = 10
BRIEF_SAMPLES, BRIEF_BUDGET_S = 2, 2.0
"""For a training step: the fewest samples, and the seconds that may be spent on more of them."""

MAX_SAMPLES = 400
BATCH = 5
SAMPLES_A_ROUND = 2
CI_TARGET = {"cuda": 0.005, "cpu": 0.02}
MIN_FLUSH_BYTES = 256 * 2**20
WARMUP_S = 0.025
MAX_WARMUP_CALLS = 20
WARMUP_ROUNDS = 3
HOST_CALLS = 4
"""Calls that are enqueued before the queue is emptied: it holds those of up to 250 launches each."""
HOST_SAMPLES = 32
HOST_BUDGET_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is timed, and what runs before it untimed (for a backward pass alone, the forward pass)."""

    call: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How calls are sampled.

    Attributes:
        in_turn: in rounds, in turn forwards and backwards, so that changes of clocks, temperature and the machine's
            other load affect all calls alike: the n-th samples of all calls are of the same round. Else one call after
            the other.
        rounds: how many, in turn, with a sample of each call. None, as for calls that are timed alone: at least
            :data:`MIN_SAMPLES` samples of each, until half the 95 % confidence interval of every median is within
            ``ci_target`` of the median, ``budget_s`` a call is spent, or :data:`MAX_SAMPLES` are there.
        settle: in rounds, every sample follows an untimed call of the same kind, so that it does not pay for pages that
            the call before gave back to the system.
        brief: calls take up to many seconds and were called before, so none is spent on warming up or on the host's
            time, and :data:`BRIEF_SAMPLES` samples are enough.
    """

    in_turn: bool = False
    rounds: int | None = None
    budget_s: float = 0.0
    ci_target: float = 0.0
    settle: bool = False
    brief: bool = False


@dataclass(slots=True, kw_only=True)
class Timing:
    """The samples of a call, and what was observed with them.

    Attributes:
        samples_ms: in the order they were taken.
        host_ms: median of the host's time for a call; None where the host itself computes. A call that waits for the
            device has its whole duration here.
        state: what the device reported meanwhile.
        noise, yardstick_ms: what :mod:`.noise` noticed meanwhile, and its yardstick; None in a given number of rounds,
            where noise affects all calls alike.
        page_faults: of this process during each sample taken in rounds.
        failure: what the call raised; it is not called again.
    """

    samples_ms: list[float] = field(default_factory=list)
    host_ms: float | None = None
    state: DeviceState = field(default_factory=DeviceState)
    noise: str | None = None
    yardstick_ms: float | None = None
    page_faults: list[int] = field(default_factory=list)
    failure: Exception | None = None

    def add(self, samples_ms: Sequence[float], state: DeviceState) -> None:
        """Keep further samples and the device's state at the time; throttling in any batch marks them all."""
        self.samples_ms += samples_ms
        self.state = dataclasses.replace(state, throttled=state.throttled or self.state.throttled)

    def columns(self) -> dict[str, Any]:
        """Return a record's columns: median, percentiles, 95 % confidence interval of the median, samples, clocks."""
        interval = statistics.median_interval(self.samples_ms)
        return {
            "time_ms": statistics.median(self.samples_ms),
            "time_p20_ms": statistics.percentile(self.samples_ms, 20),
            "time_p80_ms": statistics.percentile(self.samples_ms, 80),
            "time_ci_low_ms": interval.low,
            "time_ci_high_ms": interval.high,
            "time_samples_ms": self.samples_ms,
            **dataclasses.asdict(self.state),
        }


class Clock(Protocol):
    """Takes samples of a call on one kind of device; ``enqueues``: whether a call returns before the device is done."""

    enqueues: bool

    def sample(self, call: Call, count: int, enqueue_ms: float | None = None) -> tuple[list[float], DeviceState]:
        """Return ``count`` times of a call in ms; ``call.prepare`` is not timed.

        Args:
            enqueue_ms: part of the host's time for a call that must not be timed; None: all of it, by one more call.
        """
        ...

    def synchronize(self) -> None:
        """Wait until the device is done."""
        ...


def _wall_clock(call: Call, count: int) -> list[float]:
    """Return how long a call took to return, ``count`` times, in ms; ``call.prepare`` is not timed."""
    samples = []
    for _ in range(count):
        prepared = call.prepare()
        start = time.perf_counter()
        result = call.call(prepared)
        samples.append((time.perf_counter() - start) * 1e3)
        del result, prepared
    return samples


class CpuClock:
    """Wall clock."""

    enqueues = False

    def sample(self, call: Call, count: int, enqueue_ms: float | None = None) -> tuple[list[float], DeviceState]:
        """See :class:`Clock`."""
        return _wall_clock(call, count), DeviceState()

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CudaClock:
    """CUDA events on the current stream, with a cold L2 cache."""

    enqueues = True

    def __init__(self) -> None:
        import torch

        self._torch = torch
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.flush_bytes = max(MIN_FLUSH_BYTES, 2 * l2_bytes)
        self._buffer = torch.empty(self.flush_bytes, dtype=torch.int8, device="cuda")
        self.flush_ms = self._time_flush()

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

    def sample(self, call: Call, count: int, enqueue_ms: float | None = None) -> tuple[list[float], DeviceState]:
        """See :class:`Clock`."""
        flushes = self.flushes(call, enqueue_ms)
        events = [self.enqueue(call, flushes) for _ in range(count)]
        state = device_state()
        self.synchronize()
        return [start.elapsed_time(end) for start, end in events], state

    def flushes(self, call: Call, enqueue_ms: float | None = None) -> int:
        """Return how many overwrites of the L2 hide the launch of a call; ``enqueue_ms`` as of :meth:`sample`."""
        self.synchronize()
        if enqueue_ms is None:
            (enqueue_ms,) = _wall_clock(call, 1)
            self.synchronize()
        return math.ceil(min(max(1.5 * enqueue_ms, self.flush_ms), HIDDEN_HOST_MS) / self.flush_ms)

    def enqueue(self, call: Call, flushes: int) -> tuple[Any, Any]:
        """Enqueue a sample; return the events between which the call runs."""
        prepared = call.prepare()
        start, end = self._events()
        for _ in range(flushes):
            self._buffer.zero_()
        start.record()
        # Kept until the end is recorded: freeing it takes the host time.
        _ = call.call(prepared)
        end.record()
        return start, end

    def synchronize(self) -> None:
        """Wait until the device is done."""
        self._torch.cuda.synchronize()


def measure(clock: Clock, calls: Sequence[Call], sampling: Sampling) -> list[Timing]:
    """Warm calls up and sample them; a call that raises gets a failure, and the others go on."""
    timings = [Timing() for _ in calls]
    pairs = list(zip(calls, timings, strict=True))
    if sampling.in_turn or sampling.rounds is not None:
        _sample_in_turn(clock, pairs, sampling)
    else:
        for call, timing in pairs:
            with _failure_kept(timing):
                _sample_alone(clock, call, timing, sampling)
    for call, timing in pairs:
        if clock.enqueues and timing.failure is None and not sampling.brief:
            with _failure_kept(timing):
                timing.host_ms = _host_ms(clock, call)
    return timings


@contextlib.contextmanager
def _failure_kept(timing: Timing) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001, whatever an implementation raises becomes a row
        timing.failure = error


def _sample_alone(clock: Clock, call: Call, timing: Timing, sampling: Sampling) -> None:
    begin = time.perf_counter()
    for _ in range(0 if sampling.brief else MAX_WARMUP_CALLS):
        call.call(call.prepare())
        clock.synchronize()
        if time.perf_counter() - begin > WARMUP_S:
            break
    enqueue_ms = 0.0 if sampling.brief else None
    watch = Watch(gpu=clock.enqueues)
    timing.add(*clock.sample(call, BRIEF_SAMPLES if sampling.brief else MIN_SAMPLES, enqueue_ms))
    watch.look()
    begin = time.perf_counter() - sum(timing.samples_ms) / 1e3
    while (
        len(timing.samples_ms) < MAX_SAMPLES
        and time.perf_counter() - begin < sampling.budget_s
        and statistics.relative_half_width(timing.samples_ms) > sampling.ci_target
    ):
        timing.add(*clock.sample(call, BATCH, enqueue_ms))
        watch.look()
    timing.noise, timing.yardstick_ms = watch.noise(timing.samples_ms, timing.state), watch.yardstick_ms


def _sample_in_turn(clock: Clock, pairs: Sequence[tuple[Call, Timing]], sampling: Sampling) -> None:
    watch = Watch(gpu=clock.enqueues) if sampling.rounds is None else None
    each = 1 if sampling.rounds is not None or sampling.brief else SAMPLES_A_ROUND
    # After others a call takes longer to be enqueued than after itself, so each turn on a GPU begins with one untimed.
    enqueue_ms = 0.0 if sampling.brief else None
    begin, left = time.perf_counter(), pairs
    for index in itertools.count(0 if sampling.brief else -WARMUP_ROUNDS):
        left = [(call, timing) for call, timing in left if timing.failure is None]
        if index == 0:
            begin = time.perf_counter()
        elif index > 0 and _enough([timing for _, timing in left], index, time.perf_counter() - begin, sampling):
            break
        for call, timing in left if index % 2 else reversed(left):
            with _failure_kept(timing):
                if sampling.settle and index >= 0:
                    call.call(call.prepare())
                faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                samples, state = clock.sample(call, each if index >= 0 else 1, enqueue_ms)
                if index >= 0:
                    timing.page_faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
                    timing.add(samples, state)
        if watch is not None:
            watch.look()
    for _, timing in pairs:
        if watch is not None and timing.failure is None:
            timing.noise, timing.yardstick_ms = watch.noise(timing.samples_ms, timing.state), watch.yardstick_ms


def _enough(timings: Sequence[Timing], rounds: int, seconds: float, sampling: Sampling) -> bool:
    """Return whether calls have been in turn often enough, after so many rounds and seconds."""
    if not timings or rounds == sampling.rounds:
        return True
    taken = len(timings[0].samples_ms)
    if sampling.rounds is not None or taken < (BRIEF_SAMPLES if sampling.brief else MIN_SAMPLES):
        return False
    if taken >= MAX_SAMPLES or seconds > sampling.budget_s * len(timings):
        return True
    return all(statistics.relative_half_width(timing.samples_ms) <= sampling.ci_target for timing in timings)


def _host_ms(clock: Clock, call: Call) -> float:
    begin = time.perf_counter()
    samples: list[float] = []
    while not samples or (len(samples) < HOST_SAMPLES and time.perf_counter() - begin < HOST_BUDGET_S):
        samples += _wall_clock(call, HOST_CALLS)
        clock.synchronize()
    return statistics.median(samples)
