"""What a case's row says about the machine: load, other processes on the GPU, lowered clocks, drift."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lrbench.analysis.accelerators import cpu
from lrbench.bench import environment
from lrbench.bench.drive import session
from lrbench.bench.environment import DeviceState
from lrbench.bench.request import Request, SweepOptions
from lrbench.bench.show import display
from lrbench.bench.worker import clock, noise
from lrbench.results.schema import Record
from lrbench.tests.analysis.rows import measured
from lrbench.tests.bench.runs import H200

QUIET = [1.0] * 12
BUSY = "busy CPU: waited 1.31 s per s for a core, load 3.1 on 2 cores"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine of two cores whose counters are what a test says; a watch lasts ten seconds."""
    here = SimpleNamespace(waited_s=5.0, load=1.0, now_s=100.0, yardstick_ms=0.5)
    clocks = SimpleNamespace(
        **dict.fromkeys(("time", "perf_counter", "thread_time", "process_time"), lambda: here.now_s)
    )
    for module in (noise, cpu):
        monkeypatch.setattr(module, "waited_s", lambda: here.waited_s)
        monkeypatch.setattr(module, "time", clocks)
    monkeypatch.setattr(noise.Watch, "_compute_ms", lambda _: here.yardstick_ms)
    monkeypatch.setattr(os, "getloadavg", lambda: (here.load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return here


def watched(machine: SimpleNamespace, *, gpu: bool = False, **after: float) -> str | None:
    watch = noise.Watch(gpu=gpu)
    vars(machine).update({"now_s": 110.0, **after})
    watch.look()
    return watch.noise(QUIET, DeviceState())


@pytest.mark.parametrize(
    ("after", "on_cpu", "on_gpu"),
    [
        ({}, None, None),
        ({"waited_s": 5.9, "load": 9.0}, None, None),
        ({"waited_s": 18.1, "load": 3.1}, BUSY, BUSY),
        ({"yardstick_ms": 0.65}, None, None),
        ({"yardstick_ms": 0.75}, "slow CPU: 1.25x slower than at other times", None),
    ],
)
def test_load_and_a_slow_core_are_noise(
    machine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    after: dict[str, float],
    on_cpu: str | None,
    on_gpu: str | None,
) -> None:
    monkeypatch.setattr(noise.Watch, "_others_on_gpu", lambda _: None)
    before = dict(vars(machine))
    assert watched(machine, **after) == on_cpu
    vars(machine).update(before)
    assert watched(machine, gpu=True, **after) == on_gpu


@pytest.mark.parametrize(("load", "expected"), [(2.4, None), (3.1, "busy CPU: load 3.1 on 2 cores")])
def test_where_the_kernel_tells_nothing_the_load_average_counts(
    machine: SimpleNamespace, load: float, expected: str | None
) -> None:
    machine.waited_s = None
    assert watched(machine, load=load) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system pins no process to a core")
def test_a_loaded_core_is_noticed() -> None:
    """Two processes on one core: each waits for half of the time."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                time.sleep(0.2)
                watch, end = noise.Watch(gpu=False), time.perf_counter() + 0.5
                while time.perf_counter() < end:
                    pass
                found = watch.noise(QUIET, DeviceState())
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, allowed)
    assert found is not None
    assert found.startswith("busy CPU: waited ")


class Nvml:
    """NVML with processes that computed on the GPU, each with its use of it in %."""

    class NVMLError(Exception):
        pass

    def __init__(self, processes: dict[int, int], refused: str | None = None) -> None:
        self.processes, self.refused = processes, refused

    def _answer(self, name: str) -> list[SimpleNamespace]:
        if name == self.refused:
            raise self.NVMLError
        return [SimpleNamespace(pid=pid, smUtil=use) for pid, use in self.processes.items()]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:
        return self._answer("processes")

    def nvmlDeviceGetProcessUtilization(self, handle: object, since_us: int) -> list[SimpleNamespace]:
        # The call wants microseconds; the watch began at 100 s.
        assert since_us == 100_000_000
        return self._answer("use")


HERE = os.getpid()


@pytest.mark.parametrize(
    ("processes", "refused", "expected"),
    [
        ({HERE: 90}, None, None),
        ({HERE: 90, 7: 0}, None, None),
        ({HERE: 90, 7: 3}, None, "busy GPU: 1 other process on it"),
        ({HERE: 90, 7: 3, 8: 40}, None, "busy GPU: 2 other processes on it"),
        # One that compiles for the same sweep.
        ({HERE: 90, 9: 40}, None, None),
        # Ids of the host's name space: nobody knows whose they are.
        ({6: 90, 7: 40}, None, None),
        ({}, None, None),
        ({HERE: 90, 7: 40}, "handle", None),
        ({HERE: 90, 7: 40}, "processes", None),
        ({HERE: 90, 7: 40}, "use", None),
    ],
)
def test_other_processes_on_the_gpu(
    machine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    processes: dict[int, int],
    refused: str | None,
    expected: str | None,
) -> None:
    nvml = Nvml(processes, refused)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(environment, "nvml_handle", lambda: nvml._answer("handle"))
    monkeypatch.setattr(noise, "_parent_of", {9: os.getppid()}.get)
    assert watched(machine, gpu=True) == expected


@pytest.mark.parametrize(
    ("samples", "throttled", "expected"),
    [
        (QUIET, None, None),
        (QUIET, "software power cap", None),
        (QUIET, "software power cap, hardware thermal slowdown", "lowered clocks: hardware thermal slowdown"),
        (QUIET, "hardware slowdown, hardware power brake", "lowered clocks: hardware slowdown, hardware power brake"),
        ([1.0, 3.0] * 6, None, None),
        ([1.0] * 4 + [2.0] * 4 + [1.24] * 4, None, None),
        ([1.0] * 6 + [1.8] * 4, None, "drift: the last samples take 1.8x the first"),
        ([2.0] * 4 + [1.0] * 6, None, "drift: the last samples take 0.5x the first"),
        ([1.0, 9.0], None, None),
        ([0.0] * 10, None, None),
    ],
)
def test_lowered_clocks_and_last_samples_that_differ_from_the_first_are_noise(
    machine: SimpleNamespace, samples: list[float], throttled: str | None, expected: str | None
) -> None:
    assert noise.Watch(gpu=False).noise(samples, DeviceState(throttled=throttled)) == expected


@pytest.mark.parametrize(("rounds", "marked"), [(None, True), (12, False)])
def test_what_is_measured_alone_is_marked(machine: SimpleNamespace, rounds: int | None, marked: bool) -> None:
    """In turn, load falls on all calls alike, and comparing them is what the samples are for."""

    def call(_: Any) -> None:
        machine.waited_s += 1.0
        time.sleep(0.001)

    sampling = clock.Sampling(rounds=rounds)
    (timing,) = clock.measure(clock.CpuClock(), [clock.Call(call=call)], sampling)
    assert timing.failure is None
    assert (timing.noise is not None, timing.yardstick_ms) == ((True, 0.5) if marked else (False, None))


def test_resuming_measures_again_what_a_busy_machine_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """After what has no row, and said; a complete set of results (``retry=False``) takes them as they are."""
    sizes: dict[str, Any] = {"seq_lens": (8192,), "head_dims": (256,), "chunk_sizes": (64, 128, 256)}
    request = Request(ops=("mlstm_sig",), impls=("fused_chunk",), modes=("fw",), **sizes)
    quiet, busy, new = (each.identity for each in session._planned([request], H200))
    rows = {quiet: Record(**measured()), busy: Record(**measured(noise=BUSY))}
    monkeypatch.setattr(session, "finished_cases", lambda *_, **__: dict(rows))
    _, planned, seconds, done = session._begin([request], H200, SweepOptions(output=tmp_path, resume=True))
    assert ([item.identity for item in planned], [*seconds], [*done]) == ([quiet, new, busy], [new, busy], [quiet])
    assert "1 of 3 cases were already there, measured by this code on this device; 1 is there from a busy machine" in (
        capsys.readouterr().err
    )
    *_, done = session._begin([request], H200, SweepOptions(output=tmp_path, resume=True, retry=False))
    assert [*done] == [quiet, busy]


def test_times_of_a_busy_machine_are_marked_where_they_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Record(**measured(seq_len=512 << n, noise=noise)) for n, noise in enumerate((None, BUSY))]
    ((_, table),) = display.best_tables(rows)
    assert [table[0][column].endswith(" (busy)") for column in ("512", "1k")] == [False, True]
    display.print_summary(rows)
    assert f"on a busy machine: 1 of 2 cases, mostly {BUSY}" in capsys.readouterr().out
