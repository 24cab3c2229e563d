"""Sustained speed: what a call takes, and what the GPU draws, once clocks and power have settled under it.

After a case was timed, it is called without a pause for :data:`LEAST_S` to :data:`MOST_S` seconds: until over the last
:data:`WINDOW_S` the mean power and SM clock of the second half are within :data:`TOLERANCE` of the first half's. The L2
is not overwritten between these calls, since the energy would be that of overwriting too. Among them is a sample now
and then, taken as those of the usual time are (:meth:`.clock.CudaClock.enqueue`: a cold L2, a hidden launch), so that
both times are of the same thing; overwriting takes about a hundredth of the load at most.

Meanwhile a thread reads NVML. Its energy counter moves every tenth of a second on an H200, so energy is that between
two of its moves, and the calls are those done between them.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..analysis.check.statistics import median
from ..results.schema import DeviceState, Sustained
from .environment import device_state, total_energy_j

if TYPE_CHECKING:
    from .clock import Call, CudaClock

LEAST_S, MOST_S = 5.0, 7.0
WINDOW_S = 2.0
TOLERANCE = 0.02
IDLE_S = 0.3, 0.6
"""How long the GPU is left idle, and then its power is measured: with its clocks still up, as between two calls."""

READ_EVERY_S = 0.01
CHUNK_MS, PER_FLUSH = 20.0, 200
"""Calls between two samples take about so many ms, and so many times as long as overwriting the L2 for a sample."""


class Reading(NamedTuple):
    """What NVML said at a time, in s of :func:`time.perf_counter`."""

    at_s: float
    energy_j: float
    state: DeviceState


class Window(NamedTuple):
    """What readings say from the first to the last at which the energy counter had moved."""

    begin_s: float
    end_s: float
    energy_j: float
    clock_mhz: float | None
    throttled: str | None

    @property
    def power_w(self) -> float:
        """Mean power."""
        return self.energy_j / (self.end_s - self.begin_s)


class Done(NamedTuple):
    """When a sample, and all calls enqueued before it, were done, and what the sample took."""

    at_s: float
    calls: int
    time_ms: float


def why_not_here(worker: Any) -> dict[str, str | None]:
    """Return as "reason" what this worker's device lacks to be measured so, or None."""
    import pynvml

    if worker.device != "cuda":
        return {"reason": "an NVIDIA GPU, and none is here"}
    try:
        total_energy_j()
    except pynvml.NVMLError as error:
        return {"reason": f"NVML's counter of energy, as whole GPUs since Volta have it, and it says: {error}"}
    return {"reason": None}


def observe(readings: Sequence[Reading]) -> Window:
    """Return the window of readings; RuntimeError where the energy counter moved less than twice."""
    moved = [n for n, (old, new) in enumerate(itertools.pairwise(readings), 1) if new.energy_j != old.energy_j]
    if len(moved) < 2:
        raise RuntimeError(f"NVML's energy counter must move twice in {len(readings)} readings, got {len(moved)}")
    first, last = readings[moved[0]], readings[moved[-1]]
    states = [each.state for each in readings[moved[0] : moved[-1]]]
    clocks = [state.sm_clock_mhz for state in states if state.sm_clock_mhz is not None]
    reasons = dict.fromkeys(reason for state in states if state.throttled for reason in state.throttled.split(", "))
    return Window(
        begin_s=first.at_s,
        end_s=last.at_s,
        energy_j=last.energy_j - first.energy_j,
        clock_mhz=sum(clocks) / len(clocks) if clocks else None,
        throttled=", ".join(reasons) or None,
    )


def since(readings: Sequence[Reading], seconds: float) -> list[Reading]:
    """Return the readings of the last seconds."""
    return [each for each in readings if each.at_s >= readings[-1].at_s - seconds]


def has_settled(readings: Sequence[Reading]) -> bool:
    """Return whether power and clock of the last second are those of the second before, see the module."""
    recent = since(readings, WINDOW_S)
    middle_s = readings[-1].at_s - WINDOW_S / 2
    early, late = (observe([r for r in recent if (r.at_s >= middle_s) is after]) for after in (False, True))
    pairs = (late.power_w, early.power_w), (late.clock_mhz or 1.0, early.clock_mhz or 1.0)
    return all(abs(new / old - 1) <= TOLERANCE for new, old in pairs)


@contextmanager
def read_meanwhile() -> Iterator[list[Reading]]:
    """Read NVML in a thread during the block; raises what reading raised."""
    readings: list[Reading] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(READ_EVERY_S):
            state, energy_j = device_state(), total_energy_j()
            readings.append(Reading(at_s=time.perf_counter(), energy_j=energy_j, state=state))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            yield readings
        finally:
            ended.set()
        reading.result()


@functools.cache
def idle_power_w() -> float:
    """Return the power of this process's GPU while it does nothing, measured once; errors as of :func:`observe`."""
    settle_s, seconds = IDLE_S
    time.sleep(settle_s)
    with read_meanwhile() as readings:
        time.sleep(seconds)
    return observe(readings).power_w


def load(clock: CudaClock, call: Call, ended: Callable[[], bool]) -> list[Done]:
    """Call until ``ended``, the queue never empty unless the host is slower; return the samples among the calls."""
    flushes = clock.flushes(call)
    begin = time.perf_counter()
    call.call(call.prepare())
    clock.synchronize()
    # Of calls that take longer than that, each is a sample.
    calls = round(max(CHUNK_MS, PER_FLUSH * flushes * clock.flush_ms) / 1e3 / (time.perf_counter() - begin))
    done: list[Done] = []
    pending: deque[tuple[Any, Any]] = deque()
    ending = False
    while pending or not ending:
        if not (ending := ending or ended()):
            for _ in range(calls):
                call.call(call.prepare())
            pending.append(clock.enqueue(call, flushes))
        if len(pending) > 1 or (ending and pending):
            start, end = pending.popleft()
            end.synchronize()
            done.append(Done(time.perf_counter(), (len(done) + 1) * (calls + 1), start.elapsed_time(end)))
    return done


def sustain(clock: CudaClock, call: Call) -> Sustained:
    """Load the GPU with a call until it has settled, and return what came of it.

    Raises:
        RuntimeError: as of :func:`observe`. Besides what the call raises.
    """
    idle_w = idle_power_w()
    settled_s = None
    with read_meanwhile() as readings:
        begin_s = time.perf_counter()

        def ended() -> bool:
            nonlocal settled_s
            took = time.perf_counter() - begin_s
            if settled_s is None and took >= LEAST_S and has_settled(readings):
                settled_s = took
            return settled_s is not None or took >= MOST_S

        done = load(clock, call, ended)
    return evaluate(readings, [Done(begin_s, 0, 0.0), *done], idle_w, settled_s)


def evaluate(readings: Sequence[Reading], done: Sequence[Done], idle_w: float, settled_s: float | None) -> Sustained:
    """Return what readings and samples say of the last :data:`WINDOW_S`.

    Args:
        done: first the moment at which the load began.
    """
    import numpy as np

    window = observe(since([each for each in readings if each.at_s <= done[-1].at_s], WINDOW_S))
    first, last = np.interp([window.begin_s, window.end_s], [d.at_s for d in done], [d.calls for d in done])
    samples = [each.time_ms for each in done[1:] if each.at_s >= window.begin_s]
    energy_j = window.energy_j / float(last - first)
    return Sustained(
        sustained_ms=median(samples),
        settled_s=settled_s,
        sustained_clock_mhz=window.clock_mhz,
        sustained_throttled=window.throttled,
        sustained_power_w=window.power_w,
        idle_power_w=idle_w,
        energy_j=energy_j,
        net_energy_j=energy_j * (1 - idle_w / window.power_w),
    )
