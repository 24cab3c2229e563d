"""Sustained speed: what a call takes, and what the GPU draws, once clocks and power have settled under it.

After a case was timed, it is called without a pause for :data:`LEAST_S` to :data:`MOST_S` seconds: until over the last
:data:`WINDOW_S` the mean power and SM clock of the second half are within :data:`TOLERANCE` of the first half's. The L2
is not overwritten between these calls, since the energy would be that of overwriting too. Among them is a sample now
and then, taken as those of the usual time are (:meth:`.clock.CudaClock.enqueue`: a cold L2, a hidden launch), so that
both times are of the same thing; overwriting takes about a hundredth of the load at most.

A thread reads NVML. Its energy counter moves every tenth of a second on an H200, so energy is of the calls between two
of its moves.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ...analysis.check.statistics import median
from ...results.schema import DeviceState, Sustained
from ..environment import device_state, total_energy_j

if TYPE_CHECKING:
    from .clock import Call, CudaClock

LIMIT_S = 8.0
"""The most that calling a case until clocks and power settle adds to it."""

NOT_SUSTAINED = "not sustained"
"""Beginning of the reason of a row that was timed, where that failed."""

LEAST_S, MOST_S = 5.0, 7.0
WINDOW_S, TOLERANCE = 2.0, 0.02
IDLE_S = 0.3, 0.6
"""How long the GPU is left idle, and then its power is measured: with its clocks still up, as between two calls."""

READ_EVERY_S = 0.01
CHUNK_MS, PER_FLUSH, LONGEST_CHUNK_MS = 20.0, 200, 500.0
"""Calls between two samples take about so many ms, and so many times as long as overwriting the L2 for a sample."""


class Reading(NamedTuple):
    """What NVML said at a time, in s of :func:`time.perf_counter`."""

    at_s: float
    energy_j: float
    state: DeviceState


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


def window(readings: Sequence[Reading], seconds: float = math.inf) -> list[Reading]:
    """Return the readings of the last seconds between two moves of the energy counter, the first and the last.

    Raises:
        RuntimeError: it moved less than twice.
    """
    recent = [each for each in readings if each.at_s >= readings[-1].at_s - seconds]
    moved = [n for n, (old, new) in enumerate(itertools.pairwise(recent), 1) if new.energy_j != old.energy_j]
    if len(moved) < 2:
        raise RuntimeError(f"NVML's energy counter must move twice in {len(recent)} readings, got {len(moved)}")
    return recent[moved[0] : moved[-1] + 1]


def power_and_clock(seen: Sequence[Reading]) -> tuple[float, float]:
    """Return the mean power in W and SM clock in MHz of a window."""
    clocks = [each.state.sm_clock_mhz or math.nan for each in seen]
    return (seen[-1].energy_j - seen[0].energy_j) / (seen[-1].at_s - seen[0].at_s), sum(clocks) / len(clocks)


def has_settled(readings: Sequence[Reading]) -> bool:
    """Return whether power and clock of the last second are those of the second before, see the module."""
    half_s = WINDOW_S / 2
    before = [each for each in readings if each.at_s < readings[-1].at_s - half_s]
    pairs = zip(*(power_and_clock(window(each, half_s)) for each in (before, readings)), strict=True)
    return all(abs(new / old - 1) <= TOLERANCE for old, new in pairs)


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
    """Return the power of this process's GPU while it does nothing, measured once; errors as of :func:`window`."""
    time.sleep(IDLE_S[0])
    with read_meanwhile() as readings:
        time.sleep(IDLE_S[1])
    return power_and_clock(window(readings))[0]


def load(clock: CudaClock, call: Call, ended: Callable[[], bool]) -> tuple[int, list[tuple[float, float]]]:
    """Call what was called before until ``ended``, the GPU's queue never empty unless the host is slower.

    Returns:
        after how many calls each a sample follows, and the samples: when the GPU was done with it, as
        :func:`time.perf_counter` has it, and its time in ms. The first is from before these calls.
    """
    flushes = clock.flushes(call)
    start, origin = clock.enqueue(call, flushes)
    origin.synchronize()
    begin_s, took_ms = time.perf_counter(), start.elapsed_time(origin)
    # Calls that take longer than that are all samples.
    calls = round(min(max(CHUNK_MS, PER_FLUSH * flushes * clock.flush_ms), LONGEST_CHUNK_MS) / took_ms)
    done = [(begin_s, took_ms)]
    pending: deque[tuple[Any, Any]] = deque()
    ending = False
    while pending or not ending:
        if not (ending := bool(pending) and (ending or ended())):
            for _ in range(calls):
                call.call(call.prepare())
            pending.append(clock.enqueue(call, flushes))
        if len(pending) > 1 or (ending and pending):
            start, end = pending.popleft()
            end.synchronize()
            # The host may see it late: it waits where the queue is full.
            done.append((begin_s + origin.elapsed_time(end) / 1e3, start.elapsed_time(end)))
    return calls, done


def sustain(clock: CudaClock, call: Call) -> Sustained:
    """Load the GPU with a call until it has settled, and return what the last :data:`WINDOW_S` say.

    Raises:
        RuntimeError: as of :func:`window`. Besides what the call and NVML raise.
    """
    import numpy as np

    idle_w, settled_s, begin_s = idle_power_w(), None, time.perf_counter()
    with read_meanwhile() as readings:

        def ended() -> bool:
            nonlocal settled_s
            took = time.perf_counter() - begin_s
            settled_s = took if took >= LEAST_S and readings and has_settled(readings) else None
            return settled_s is not None or took >= MOST_S

        calls, done = load(clock, call, ended)
    times = [at_s for at_s, _ in done]
    seen = window([each for each in readings if each.at_s <= times[-1]], WINDOW_S)
    counts = np.interp([seen[0].at_s, seen[-1].at_s], times, (calls + 1) * np.arange(len(done)))
    power_w, clock_mhz = power_and_clock(seen)
    energy_j = (seen[-1].energy_j - seen[0].energy_j) / float(counts[1] - counts[0])
    reasons = (reason for each in seen for reason in (each.state.throttled or "").split(", "))
    return Sustained(
        sustained_ms=median([time_ms for at_s, time_ms in done if at_s >= seen[0].at_s]),
        settled_s=settled_s,
        sustained_clock_mhz=clock_mhz,
        sustained_throttled=", ".join(filter(None, dict.fromkeys(reasons))) or None,
        sustained_power_w=power_w,
        idle_power_w=idle_w,
        energy_j=energy_j,
        net_energy_j=energy_j * (1 - idle_w / power_w),
    )
