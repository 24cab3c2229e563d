"""Faults of a GPU: each gives one typed row, and the case after it is measured as if nothing had been.

All of it is to take less than a minute on an H200, so workers run side by side, each with one fault. What a CPU
shows too is in test_run.py.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lrbench.bench.drive.executors import Queue, alone, hold_gpus, run_cases
from lrbench.bench.drive.workers import ReplaceableWorker
from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker.protocol import Reply, RunLimits
from lrbench.tests.bench import faults

EXPECTED = {
    "device_assert": ("error", "device-side assert triggered"),
    "illegal_access": ("error", "illegal memory access"),
    "hides_illegal_access": ("error", "illegal memory access"),
    "hangs_in_a_kernel": ("timeout", "no result within 20 s; it was in "),
    "exhausts_memory": ("oom", "out of memory"),
    # Its process waits in the driver, for kernels that do end, and does not always answer in time where it is.
    "tunes_for_minutes": ("timeout", "no result within 20 s"),
}
"""Fault -> the status and what the reason has."""


def planned(fault: str) -> PlannedCase:
    """Return a case of one name, so that it may run in the process of another."""
    return faults.planned(fault, module="faults" if hasattr(faults, fault) else "gpu_faults", impl="faulty")


def run_with_next(fault: str) -> list[Reply]:
    """Return the outcomes of a fault and of the case after it, which the same worker is to run."""
    cases = Queue(alone([planned(fault), planned("right")]))
    limits = RunLimits(timeout_s=20.0, device_kind="cuda")
    with ReplaceableWorker() as session:
        return [reply for _, (reply,) in run_cases(cases, limits, lambda _: None, session)]


@pytest.mark.gpu
def test_a_fault_is_a_typed_row_and_the_next_case_is_clean() -> None:
    with ThreadPoolExecutor(len(EXPECTED)) as pool:
        outcomes = list(pool.map(run_with_next, EXPECTED))
    for (fault, (status, reason)), (faulty, clean) in zip(EXPECTED.items(), outcomes, strict=True):
        assert faulty["status"] == status, (fault, faulty)
        assert reason in faulty["reason"], (fault, faulty)
        assert clean["status"] == "ok", (fault, clean)
        assert clean["columns"]["time_ms"] > 0
        assert clean["columns"]["checked"] == "same shape"


@pytest.fixture
def busy_gpu() -> Iterator[int]:
    """The id of another process that computes on the GPU, and is no child of ours as a sweep's workers are."""
    code = "from lrbench.tests.bench.gpu_faults import compute_until_killed; compute_until_killed()"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} & wait"
    shell = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    # NVML's samples of who computes are of the last second.
    time.sleep(1.5)
    yield pid
    os.kill(pid, signal.SIGKILL)
    shell.wait()


@pytest.mark.gpu
def test_a_gpu_on_which_another_process_computes_is_noisy(busy_gpu: int) -> None:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    if busy_gpu not in {each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}:
        pytest.skip("NVML does not name this container's processes")
    with ReplaceableWorker() as session:
        (reply,) = session.run([planned("right")], RunLimits(timeout_s=60.0, budget_s=0.5))
    assert reply["status"] == "ok"
    assert "busy GPU: 1 other" in reply["columns"]["noise"]


@pytest.mark.gpu
def test_a_second_sweep_on_a_gpu_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lrbench", "sweep", "--impl", "whole_state", "--output", str(tmp_path)]
    with hold_gpus():
        finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    assert f"is in use by another lrbench: process {os.getpid()} " in finished.stderr
    assert "--wait waits until it ends" in finished.stderr
