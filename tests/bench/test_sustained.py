"""A call without a pause, on a GPU whose clock, energy counter and time are pretended."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lrbench.analysis.check.regression import check
from lrbench.bench import environment
from lrbench.bench.drive import session
from lrbench.bench.drive.executors import run_group
from lrbench.bench.drive.workers import ReplaceableWorker
from lrbench.bench.plan import Request, in_run_order
from lrbench.bench.request import SweepOptions
from lrbench.bench.show import display
from lrbench.bench.worker import autotuning, clock, sustained, worker
from lrbench.bench.worker.protocol import RunLimits
from lrbench.bench.worker.sustained import NOT_SUSTAINED
from lrbench.results.schema import DeviceState, Record
from lrbench.tests.analysis.rows import THRESHOLDS, measured
from lrbench.tests.bench import faults
from lrbench.tests.bench.runs import H200
from lrbench.tests.command_line import Lrbench

CALL_MS, IDLE_W, LOAD_W = 0.5, 100.0, 700.0
MOVE_S = 0.1
"""How often the energy counter moves."""

ASKED = dataclasses.replace(faults.planned("right"), sustained=True)


class Event:
    """When something was done on a pretended GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at_s = gpu, gpu.busy_until_s

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at_s - self.at_s)

    def synchronize(self) -> None:
        self.gpu.wait(self.at_s)


class Gpu:
    """A GPU of its own time, read while the host waits; a call takes longer the longer the load lasts.

    Its queue holds few calls, so the host waits in the middle of enqueuing.
    """

    flush_ms = 0.1

    def __init__(self) -> None:
        self.settles_s, self.call_ms = 2.0, CALL_MS
        self.now_s = self.busy_until_s = 0.0
        self.queued: list[float] = []
        self.log: list[str] = []
        self.readings: list[sustained.Reading] = []

    def mhz(self, at_s: float) -> float:
        return 1980 - 435 * min(at_s / self.settles_s, 1.0)

    def call(self, _: Any = None) -> None:
        self.log.append("call")
        self.queued = [end_s for end_s in self.queued if end_s > self.now_s]
        if len(self.queued) >= 30:
            self.wait(self.queued[0])
        self.busy_until_s = max(self.busy_until_s, self.now_s)
        self.busy_until_s += self.call_ms / 1e3 * 1980 / self.mhz(self.busy_until_s)
        self.queued.append(self.busy_until_s)

    def flushes(self, call: clock.Call) -> int:
        return 1

    def enqueue(self, call: clock.Call, flushes: int) -> tuple[Any, Any]:
        self.log.append("flush")
        self.busy_until_s += self.flush_ms * flushes / 1e3
        begin = Event(self)
        call.call(call.prepare())
        return begin, Event(self)

    def synchronize(self) -> None:
        self.wait(self.busy_until_s)

    def wait(self, until_s: float) -> None:
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + sustained.READ_EVERY_S)
            throttled = "software power cap" if self.mhz(self.now_s) < 1700 else None
            state = DeviceState(sm_clock_mhz=self.mhz(self.now_s), throttled=throttled)
            energy_j = LOAD_W * MOVE_S * int(self.now_s / MOVE_S)
            self.readings.append(sustained.Reading(self.now_s, energy_j, state))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    here = Gpu()
    monkeypatch.setattr(sustained, "time", SimpleNamespace(perf_counter=lambda: here.now_s))
    monkeypatch.setattr(sustained, "idle_power_w", lambda: IDLE_W)
    monkeypatch.setattr(sustained, "read_meanwhile", lambda: nullcontext(here.readings))
    return here


@pytest.mark.parametrize(("flush_ms", "most"), [(0.1, 60), (10.0, 2000)])
def test_energy_time_and_clock_are_of_the_settled_load(gpu: Gpu, flush_ms: float, most: int) -> None:
    """Also where samples are few, a long launch being hidden, and the host waits for the queue between them."""
    gpu.flush_ms = flush_ms
    found = sustained.sustain(gpu, clock.Call(call=gpu.call))  # type: ignore[arg-type]
    settled_ms = CALL_MS * 1980 / 1545
    assert found.sustained_ms == pytest.approx(settled_ms)
    assert found.sustained_clock_mhz == pytest.approx(1545)
    assert found.sustained_throttled == "software power cap"
    assert found.sustained_power_w == pytest.approx(LOAD_W, rel=0.01)
    # What overwrites the L2 for the samples counts as well.
    assert found.energy_j == pytest.approx(LOAD_W * settled_ms / 1e3, rel=0.02)
    assert found.net_energy_j == pytest.approx((LOAD_W - IDLE_W) * settled_ms / 1e3, rel=0.02)
    assert found.settled_s == pytest.approx(sustained.LEAST_S, abs=0.6)
    # Samples are few: the L2 is not overwritten for most calls.
    assert 20 < gpu.log.count("call") / gpu.log.count("flush") < most


def test_what_does_not_settle_ends_and_says_so(gpu: Gpu) -> None:
    gpu.settles_s = 8.0
    found = sustained.sustain(gpu, clock.Call(call=gpu.call))  # type: ignore[arg-type]
    assert found.settled_s is None
    assert sustained.MOST_S < gpu.now_s < sustained.MOST_S + 0.2


@pytest.mark.parametrize("call_ms", [300.0, 3000.0])
def test_long_calls_are_all_samples(gpu: Gpu, call_ms: float) -> None:
    """One is enqueued ahead, so the load ends soon, and energy is of the calls as far as they were done."""
    gpu.settles_s, gpu.call_ms = 1e-9, call_ms * 1545 / 1980
    found = sustained.sustain(gpu, clock.Call(call=gpu.call))  # type: ignore[arg-type]
    assert found.sustained_ms == pytest.approx(call_ms)
    assert found.energy_j == pytest.approx(LOAD_W * call_ms / 1e3, rel=0.02)
    assert gpu.now_s < sustained.MOST_S + 3 * call_ms / 1e3
    assert gpu.log.count("call") == gpu.log.count("flush")


def readings(*moves: tuple[float, float], mhz: Callable[[float], float] = lambda _: 1500.0) -> list[sustained.Reading]:
    """Return readings of the counter at times (s, J)."""
    return [sustained.Reading(at, energy, DeviceState(sm_clock_mhz=mhz(at))) for at, energy in moves]


def test_energy_is_between_two_moves_of_the_counter() -> None:
    """Readings before its first move and after its last say nothing."""
    moves = (0.0, 5.0), (0.04, 5.0), (0.1, 75.0), (0.15, 75.0), (0.3, 215.0), (0.39, 215.0)
    seen = sustained.window(readings(*moves))
    assert [each.at_s for each in seen] == [0.1, 0.15, 0.3]
    assert sustained.power_and_clock(seen) == (pytest.approx(700.0), 1500.0)
    with pytest.raises(RuntimeError, match="energy counter must move twice in 3 readings, got 1"):
        sustained.window(readings((0.0, 5.0), (0.1, 75.0), (0.2, 75.0)))


@pytest.mark.parametrize(
    ("power_w", "mhz", "settled"),
    [
        (lambda t: 700.0, lambda t: 1545.0, True),
        (lambda t: 700.0, lambda t: 1545.0 if int(10 * t) % 2 else 1530.0, True),
        (lambda t: 700.0, lambda t: 1600.0 if t < 9.0 else 1545.0, False),
        (lambda t: 600.0 if t < 9.0 else 700.0, lambda t: 1980.0, False),
        (lambda t: 600.0 if t < 8.0 else 700.0, lambda t: 1980.0, True),
    ],
)
def test_settled_is_what_does_not_change_from_one_second_to_the_next(
    power_w: Callable[[float], float], mhz: Callable[[float], float], settled: bool
) -> None:
    times = [n / 10 for n in range(101)]
    moves = zip(times, itertools.accumulate(power_w(at) / 10 for at in times), strict=True)
    assert sustained.has_settled(readings(*moves, mhz=mhz)) is settled


def test_readings_are_taken_in_a_thread_and_its_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.get_ident()
    monkeypatch.setattr(sustained, "device_state", DeviceState)
    monkeypatch.setattr(sustained, "total_energy_j", lambda: float(threading.get_ident() != main))
    with sustained.read_meanwhile() as found:
        time.sleep(0.1)
    assert 1 < len(found) < 20
    assert all(reading.energy_j == 1.0 for reading in found)
    monkeypatch.setattr(sustained, "total_energy_j", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), sustained.read_meanwhile():
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("device", "millijoules", "lacking"),
    [("cuda", 5e6, None), ("cuda", None, "counter of energy, .*: Not Supported"), ("cpu", 1.0, "NVIDIA GPU")],
)
def test_what_a_device_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, device: str, millijoules: float | None, lacking: str | None
) -> None:
    def counter(_: object) -> float:
        if millijoules is None:
            raise OSError("Not Supported")
        return millijoules

    nvml = SimpleNamespace(NVMLError=OSError, nvmlDeviceGetTotalEnergyConsumption=counter)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(environment, "nvml_handle", lambda: None)
    here: Any = SimpleNamespace(device=device)
    if lacking is None:
        assert (sustained.why_not_here(here), environment.total_energy_j()) == ({"reason": None}, 5000.0)
    else:
        with pytest.raises(RuntimeError, match=f"it needs .*{lacking}"):
            worker.Worker.sustain(here, faults.planned("right"))


def test_without_a_gpu_nothing_is_measured(lrbench: Lrbench, tmp_path: Path) -> None:
    code, out, err = lrbench("sweep mlstm_sig --preset quick --sustained --output", tmp_path)
    assert (code, out) == (2, "")
    assert "--sustained needs an NVIDIA GPU" in err
    assert not list(tmp_path.glob("*.parquet"))


@pytest.mark.parametrize("mode", ["fw", "bw"])
def test_a_backward_pass_alone_has_no_energy(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """And what tunes itself is loaded as it was timed, whatever its autotuner chose for others since."""
    here, item, tuner = worker.Worker("cpu"), faults.planned("right", mode=mode), SimpleNamespace(cache={"other": 1})
    here._tunings[item.case.case_id] = autotuning.Tuning([tuner], [{"best": 2}])
    seen = sustained.Sustained(sustained_ms=1.0, sustained_power_w=500.0, energy_j=2.0, net_energy_j=1.5)
    monkeypatch.setattr(sustained, "why_not_here", lambda _: {"reason": None})
    monkeypatch.setattr(sustained, "sustain", lambda _, call: (call.call(call.prepare()), seen)[1])
    found = here.sustain(item)
    assert tuner.cache == {"best": 2}
    assert (found["sustained_ms"], found["sustained_power_w"]) == (1.0, 500.0)
    assert (found["energy_j"], found["net_energy_j"]) == ((2.0, 1.5) if mode == "fw" else (None, None))


@pytest.mark.parametrize(
    ("loaded", "columns", "reason"),
    [
        ({"status": "ok", "columns": {"sustained_ms": 1.1}}, {"time_ms": 1.0, "sustained_ms": 1.1}, None),
        ({"status": "crash", "reason": "it died"}, {"time_ms": 1.0}, f"{NOT_SUSTAINED}, crash: it died"),
    ],
)
def test_a_case_that_dies_under_load_keeps_its_time(
    loaded: dict[str, Any], columns: dict[str, Any], reason: str | None
) -> None:
    asked: list[tuple[str, float]] = []

    def run(items: Any, limits: RunLimits) -> list[Any]:
        asked.append((limits.action, limits.timeout_s))
        if limits.action == "sustain":
            return [{"seconds": {"a": 5.0, "b": 1.0}, "columns": {}, "reason": None, **loaded}]
        return [{"status": "ok", "reason": None, "columns": {"time_ms": 1.0}, "seconds": {"timed": 2.0}} for _ in items]

    times: Any = SimpleNamespace(run=run)
    first, second = run_group(times, (ASKED, faults.planned("right")), RunLimits(timeout_s=120.0))
    assert (first["status"], first["columns"], first["reason"]) == ("ok", columns, reason)
    assert first["seconds"] == {"timed": 2.0, "sustained load": 6.0}
    assert second["columns"] == {"time_ms": 1.0}
    assert asked == [("run", 120.0), ("sustain", 128.0)]


def test_a_worker_refuses_the_load_and_goes_on() -> None:
    with ReplaceableWorker() as here:
        for _ in range(2):
            (reply,) = run_group(here, (ASKED,), RunLimits(timeout_s=60.0, device_kind="cpu"))
            assert (reply["status"], reply["columns"]["time_ms"] > 0) == ("ok", True)
            assert reply["reason"] == f"{NOT_SUSTAINED}, error: RuntimeError: it needs an NVIDIA GPU, and none is here"


def test_a_case_of_two_requests_is_sustained_if_one_asks_for_it() -> None:
    plain = faults.planned("right")
    assert in_run_order([plain, ASKED]) == in_run_order([ASKED, plain]) == [ASKED]


@pytest.mark.parametrize("sustained_ms", [None, 1.0])
def test_resuming_runs_again_what_was_only_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sustained_ms: float | None
) -> None:
    """And a dry run counts the seconds of the load."""
    sizes: dict[str, Any] = {"seq_lens": (8192,), "head_dims": (256,), "chunk_sizes": (8192,)}
    request = Request(ops=("mlstm_sig",), impls=("whole_state",), modes=("fw",), sustained=True, **sizes)
    (item,) = session._planned([request], H200)
    row = Record(**measured(sustained_ms=sustained_ms))
    monkeypatch.setattr(session, "finished_cases", lambda *_, **__: {item.identity: row})
    _, _, seconds, done = session._begin([request], H200, SweepOptions(output=tmp_path, resume=True))
    assert (len(seconds), len(done)) == ((1, 0) if sustained_ms is None else (0, 1))
    assert all(each > sustained.LIMIT_S for each in seconds.values())


def loaded(time_ms: float = 2.0, energy_j: float = 1.4, **columns: Any) -> dict[str, Any]:
    """Return a row of a sustained sweep."""
    columns = {"sustained_ms": time_ms, "energy_j": energy_j, "net_energy_j": 0.8 * energy_j, **columns}
    return measured(sustained_power_w=700.0, sustained_clock_mhz=1545.0, settled_s=5.0, **columns)


@pytest.mark.parametrize(
    ("new", "verdict", "named"),
    [
        (loaded(), "ok", ""),
        (loaded(2.06, 1.45), "ok", ""),
        (loaded(2.2), "regression", "sustained_ms"),
        (loaded(energy_j=1.6), "regression", "energy_j"),
        (loaded(1.5, 1.0), "improved", "sustained_ms"),
        (measured(), "ok", ""),
    ],
)
def test_the_check_compares_sustained_time_and_energy(new: dict[str, Any], verdict: str, named: str) -> None:
    (case,) = check([new], [loaded()], THRESHOLDS).cases
    assert case.verdict == verdict
    assert named in case.reason


def test_a_sweep_s_tables_show_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    died = Record(**measured(chunk_size=64, reason=f"{NOT_SUSTAINED}, crash: it died"))
    display.print_summary([Record(**loaded()), Record(**measured(chunk_size=256)), died])
    lines = capsys.readouterr().out.splitlines()
    (first,) = (line for line in lines if "1980 -> 1545" in line)
    assert all(text in first for text in ("700", "1.4", "1.12", "21.36"))
    assert sum("died" in line for line in lines) == 1
    assert not any("chunk 256" in line for line in lines)


@pytest.mark.gpu
def test_energy_is_that_of_zeus() -> None:
    """Of the same load on the same GPU, right after, by another package's window over the same counter."""
    import torch

    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    the_clock, call = clock.CudaClock(), clock.Call(call=lambda _: x @ x)
    call.call(None)
    begin = time.perf_counter()
    found = sustained.sustain(the_clock, call)
    assert sustained.LEAST_S < time.perf_counter() - begin < sustained.LIMIT_S
    assert found.sustained_clock_mhz and 0 < found.idle_power_w < found.sustained_power_w / 2
    assert 0 < found.net_energy_j < found.energy_j
    # The queue was never empty: from call to call passes what one takes.
    assert 1e3 * found.energy_j / found.sustained_power_w == pytest.approx(found.sustained_ms, rel=0.05)
    monitoring = pytest.importorskip("zeus.monitor", reason="zeus is not installed: pip install zeus")
    monitor = monitoring.ZeusMonitor(gpu_indices=[torch.cuda.current_device()], cpu_indices=[])
    calls = round(5e3 / found.sustained_ms)
    monitor.begin_window("load")
    for _ in range(calls):
        call.call(None)
    theirs = monitor.end_window("load").total_energy / calls
    assert found.energy_j == pytest.approx(theirs, rel=0.05)
