"""The stopping rule and what is inside the timed region, with a clock that does what it is told."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from itertools import cycle, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from lrbench.analysis.check import statistics
from lrbench.bench.environment import DeviceState
from lrbench.bench.worker import clock

IDLE = repeat(DeviceState())


class Scripted:
    """A clock that returns the samples it is given and runs the calls."""

    enqueues = False

    def __init__(self, samples: Iterator[float], states: Iterator[DeviceState] = IDLE) -> None:
        self.samples, self.states = samples, states

    def sample(self, call: clock.Call, count: int, enqueue_ms: float | None = None) -> tuple[list[float], DeviceState]:
        for _ in range(count):
            call.call(call.prepare())
        return [next(self.samples) for _ in range(count)], next(self.states)

    def synchronize(self) -> None:
        pass


def alone(the_clock: clock.Clock, call: clock.Call, budget_s: float, ci_target: float = 0.01) -> clock.Timing:
    (timing,) = clock.measure(the_clock, [call], clock.Sampling(budget_s=budget_s, ci_target=ci_target))
    assert timing.failure is None
    return timing


def measure(samples: Iterator[float], budget_s: float, states: Iterator[DeviceState] = IDLE) -> clock.Timing:
    return alone(Scripted(samples, states), clock.Call(call=lambda _: None), budget_s)


def test_brief_calls_are_called_for_their_samples_alone() -> None:
    """Not to warm up and not for the host's time, and no more often than time allows."""
    log: list[None] = []
    the_clock = Scripted(cycle((60_000.0, 61_000.0)))
    the_clock.enqueues = True
    call = clock.Call(call=lambda _: log.append(None))
    (timing,) = clock.measure(the_clock, [call], clock.Sampling(budget_s=clock.BRIEF_BUDGET_S, brief=True))
    assert len(log) == len(timing.samples_ms) == clock.BRIEF_SAMPLES
    assert timing.host_ms is None


def test_steady_times_stop_at_ten_samples() -> None:
    assert measure(repeat(2.0), budget_s=1e9).samples_ms == [2.0] * 10


def test_noisy_times_go_on_until_the_interval_is_tight() -> None:
    timing = measure(cycle((1.0, 1.015, 1.03)), budget_s=1e9)
    assert 10 < len(timing.samples_ms) < clock.MAX_SAMPLES
    assert statistics.relative_half_width(timing.samples_ms) <= 0.01


def test_hopeless_noise_stops_at_the_maximum_and_keeps_every_sample() -> None:
    timing = measure(cycle((1.0, 2.0)), budget_s=1e9)
    assert len(timing.samples_ms) == clock.MAX_SAMPLES
    assert timing.samples_ms[:4] == [1.0, 2.0, 1.0, 2.0]


def test_a_spent_budget_stops_but_never_below_ten_samples() -> None:
    assert len(measure(cycle((1.0, 2.0)), budget_s=0.0).samples_ms) == clock.MIN_SAMPLES
    # Ten samples of a second each spend any smaller budget, although the test does not wait for them.
    assert len(measure(cycle((1000.0, 2000.0)), budget_s=5.0).samples_ms) == clock.MIN_SAMPLES


def test_columns_are_order_statistics_of_the_samples() -> None:
    columns = measure(iter([float(n) for n in range(1, 11)]), budget_s=0.0).columns()
    assert columns["time_ms"] == 5.5
    assert columns["time_p20_ms"] == pytest.approx(2.8)
    assert columns["time_p80_ms"] == pytest.approx(8.2)
    # Binomial(10, 1/2): ranks 2 and 9 cover the median with probability 0.979.
    assert (columns["time_ci_low_ms"], columns["time_ci_high_ms"]) == (2.0, 9.0)


def test_throttling_in_any_batch_marks_the_case() -> None:
    states = iter(
        [DeviceState(throttled="hardware slowdown", temperature_c=1.0)] + [DeviceState(temperature_c=2.0)] * 100
    )
    timing = measure(cycle((1.0, 1.015, 1.03)), budget_s=1e9, states=states)
    assert timing.state == DeviceState(throttled="hardware slowdown", temperature_c=2.0)


def test_the_cpu_clock_times_the_call_and_not_its_preparation() -> None:
    call = clock.Call(call=lambda _: time.sleep(0.002), prepare=lambda: time.sleep(0.05))
    samples, _ = clock.CpuClock().sample(call, 3)
    assert all(2.0 <= sample < 40.0 for sample in samples)


def test_calls_take_turns_forwards_and_backwards() -> None:
    """Neither call always follows the other; throttling in any counted round marks the call."""
    log: list[str] = []
    calls = [clock.Call(call=lambda _, name=name: log.append(name)) for name in "ab"]
    states = (DeviceState(throttled="power" if len(log) == 9 else None) for _ in itertools.count())
    timings = clock.measure(Scripted(repeat(1.0), states), calls, clock.Sampling(rounds=4))
    rounds = ["".join(log[n : n + 2]) for n in range(0, len(log), 2)]
    assert len(rounds) == clock.WARMUP_ROUNDS + 4
    assert set(rounds[clock.WARMUP_ROUNDS :]) == {"ab", "ba"}
    assert all(first != second for first, second in itertools.pairwise(rounds))
    assert [(len(timing.samples_ms), len(timing.page_faults)) for timing in timings] == [(4, 4), (4, 4)]
    assert sorted(str(timing.state.throttled) for timing in timings) == ["None", "power"]


@pytest.mark.parametrize(("times", "taken"), [(repeat(1.0), clock.MIN_SAMPLES), (cycle((1.0, 2.0)), clock.MAX_SAMPLES)])
def test_in_turn_each_has_as_many_samples_and_each_turn_begins_untimed(times: Iterator[float], taken: int) -> None:
    """Until all medians are known well enough: after others, a call's first enqueuing takes longer than a later one."""
    asked: list[float | None] = []

    class Turns(Scripted):
        def sample(self, call: clock.Call, count: int, enqueue_ms: float | None = None) -> Any:
            asked.append(enqueue_ms)
            return super().sample(call, count)

    calls = [clock.Call(call=lambda _: None)] * 2
    timings = clock.measure(Turns(times), calls, clock.Sampling(in_turn=True, budget_s=1e9, ci_target=0.01))
    assert [len(timing.samples_ms) for timing in timings] == [taken, taken]
    assert asked == [None] * 2 * (clock.WARMUP_ROUNDS + taken // clock.SAMPLES_A_ROUND)


@pytest.mark.parametrize("rounds", [None, 3])
def test_a_call_that_fails_while_timed_drops_out(rounds: int | None) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    calls = [clock.Call(call=fail), clock.Call(call=lambda _: "b")]
    failed, timed = clock.measure(clock.CpuClock(), calls, clock.Sampling(rounds=rounds))
    assert (str(failed.failure), failed.samples_ms) == ("CUDA out of memory", [])
    assert (timed.failure, len(timed.samples_ms)) == (None, rounds or clock.MIN_SAMPLES)


def test_a_settled_sample_follows_a_call_of_its_own() -> None:
    """In every round that counts; rounds of warming up have one call each."""
    log: list[str] = []
    calls = [clock.Call(call=lambda _, name=name: log.append(name)) for name in "ab"]
    clock.measure(clock.CpuClock(), calls, clock.Sampling(rounds=2, settle=True))
    warmup = 2 * clock.WARMUP_ROUNDS
    assert ("".join(log[:warmup]), "".join(log[warmup:])) == ("abbaab", "bbaaaabb")


class Queue(Scripted):
    """A device on which calls are enqueued; ``log`` has what happens, in order."""

    enqueues = True

    def __init__(self) -> None:
        super().__init__(repeat(1.0))
        self.log: list[str] = []

    def sample(self, call: clock.Call, count: int, enqueue_ms: float | None = None) -> tuple[list[float], DeviceState]:
        self.log.append("sample")
        return super().sample(call, count)

    def synchronize(self) -> None:
        self.log.append("wait")


@pytest.mark.parametrize("rounds", [None, 3])
def test_the_host_s_time_is_the_call_s_alone_and_measured_after_all_samples(
    rounds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of calls that follow each other without waiting, as few as fit into the queue, and without their preparation."""
    queue, late = Queue(), 0.0
    durations = cycle((0.002, 0.007, 0.007))

    def call(_: Any) -> None:
        nonlocal late
        late += next(durations)
        queue.log.append("call")

    def prepare() -> None:
        nonlocal late
        late += 100.0
        queue.log.append("prepare")

    monkeypatch.setattr(clock, "HOST_BUDGET_S", 1e9)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: late))
    (timing,) = clock.measure(queue, [clock.Call(call=call, prepare=prepare)], clock.Sampling(rounds=rounds))
    assert timing.failure is None
    assert timing.host_ms == pytest.approx(7.0)
    assert timing.samples_ms == [1.0] * (rounds or clock.MIN_SAMPLES)
    last = len(queue.log) - queue.log[::-1].index("sample")
    after = " ".join(queue.log[last:]).split(" wait")
    before = clock.MIN_SAMPLES if rounds is None else 1
    assert after[0] == " ".join(["prepare call"] * (before + clock.HOST_CALLS))
    assert {*after[1:-1]} == {" prepare call" * clock.HOST_CALLS}
    assert len(after) - 1 == clock.HOST_SAMPLES // clock.HOST_CALLS


def test_long_calls_are_enqueued_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "HOST_BUDGET_S", 0.0)
    calls = 0

    def call(_: Any) -> None:
        nonlocal calls
        calls += 1

    (timing,) = clock.measure(Queue(), [clock.Call(call=call)], clock.Sampling(rounds=1))
    assert calls == clock.WARMUP_ROUNDS + 1 + clock.HOST_CALLS
    assert timing.host_ms is not None


@pytest.mark.gpu
def test_the_cuda_clock_agrees_with_a_kernel_of_known_traffic() -> None:
    """Copying a GiB takes as long as its traffic at 50 to 100 % of the device's bandwidth, cold cache included."""
    import torch

    from lrbench.analysis.accelerators.known import get_accelerator, match_device

    key = match_device(torch.cuda.get_device_name())
    if key is None:
        pytest.skip("the device has no known bandwidth")
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    timing = alone(clock.CudaClock(), clock.Call(call=lambda _: target.copy_(source)), 0.5, ci_target=0.005)
    share = 2 * 2**30 / (timing.columns()["time_ms"] * 1e-3) / get_accelerator(key).bandwidth_bytes_s
    assert 0.5 < share < 1.0
    assert timing.state.sm_clock_mhz


@pytest.mark.gpu
def test_the_cuda_clock_does_not_time_the_launch() -> None:
    """A kernel that does next to nothing takes microseconds, however long the host takes to enqueue it."""
    import torch

    x = torch.zeros(1, device="cuda")

    def slowly_enqueued(_: Any) -> Any:
        time.sleep(0.001)
        return x.add_(1)

    timing = alone(clock.CudaClock(), clock.Call(call=slowly_enqueued), 0.2, ci_target=0.05)
    assert timing.columns()["time_ms"] < 0.1
    assert timing.host_ms is not None
    assert 1.0 < timing.host_ms < 2.0


@pytest.mark.gpu
def test_large_calls_return_long_before_the_device_is_done() -> None:
    """Four products of some milliseconds each: their launches take microseconds, and are not nothing."""
    import torch

    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    timing = alone(clock.CudaClock(), clock.Call(call=lambda _: x @ x @ x @ x @ x), 0.2, ci_target=0.01)
    assert timing.host_ms is not None
    assert 0.005 < timing.host_ms < timing.columns()["time_ms"] / 4
