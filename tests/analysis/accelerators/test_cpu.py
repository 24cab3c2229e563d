"""The local CPU as an accelerator: measured once, remembered for this machine, measured anew where that is another."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lrbench.analysis.accelerators import cpu
from lrbench.analysis.accelerators.known import Roofs
from lrbench.analysis.counts import count
from lrbench.analysis.model.runtime_model import flop_rate
from lrbench.kernels.common.cache import CACHE_VARIABLE

ROOFS = Roofs(matrix_flops={"fp32": 2e11, "fp64": 1e11, "bf16": 4e11}, bandwidth_bytes_s=3e10, source="a calibration")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    cpu.local_cpu.cache_clear()
    yield tmp_path / "cache"
    cpu.local_cpu.cache_clear()


def test_what_was_measured_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_WAITING", "MAX_OTHERS"):
        monkeypatch.setattr(cpu, name, 1e3)  # The tests themselves are the load.
    assert cpu.recall() is None
    measured = cpu.local_cpu()
    assert measured.matrix_flops["fp32"] > measured.matrix_flops["fp64"] > 1e8
    assert "numpy" in measured.source
    monkeypatch.setattr(cpu, "_measure", lambda: pytest.fail("measured again"))
    cpu.local_cpu.cache_clear()
    assert cpu.local_cpu() == measured


def test_a_calibration_takes_its_place() -> None:
    cpu.remember(ROOFS)
    local = cpu.local_cpu()
    assert (local.peak_flops("bf16"), local.vector_flops, local.source) == (4e11, 2e11, "a calibration")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data | {"machine": data["machine"] | {"cores": 10**6}},
        lambda data: data | {"matrix_flops": {"fp32": "fast"}},
        lambda data: data | {"matrix_flops": {"bf16": 4e11}},
        lambda data: {name: value for name, value in data.items() if name != "bandwidth_bytes_s"},
        lambda data: [data],
        lambda data: None,
    ],
)
def test_a_bad_cache_file_is_passed_over(spoil: Callable[[Any], Any]) -> None:
    cpu.remember(ROOFS)
    path = cpu.cache_file()
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    assert cpu.recall() is None


def test_other_threads_are_another_machine_and_forget_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    cpu.remember(ROOFS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cpu.recall() is None
    assert "numpy" in cpu.local_cpu().source
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert cpu.recall() == ROOFS


def test_what_numpy_cannot_measure_is_said_to_need_a_calibration() -> None:
    cpu.remember(dataclasses.replace(ROOFS, matrix_flops={"fp32": 2e11}))
    product = count("mlstm_sig", seq_len=64, head_dim_qk=16, head_dim_v=16, chunk_size=64)
    with pytest.raises(ValueError, match=r"fp32 on cpu \(lrbench calibrate measures the others\), got 'bf16'"):
        flop_rate(product, cpu.local_cpu(), "bf16")


def test_a_calibration_that_ends_meanwhile_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_while_another_process_calibrates() -> Roofs:
        cpu.remember(ROOFS)
        return dataclasses.replace(ROOFS, matrix_flops={"fp32": 1e11}, source="numpy")

    monkeypatch.setattr(cpu, "_measure", measure_while_another_process_calibrates)
    assert cpu.local_cpu().source == "a calibration"
    assert cpu.recall() == ROOFS


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "folder"))
    cpu.remember(ROOFS)
    assert cpu.local_cpu().matrix_flops["fp32"] > 1e8


@pytest.mark.parametrize("told", [True, False])
def test_what_was_measured_beside_other_load_is_used_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """A busy loop for each core; also where the kernel does not tell for how long threads waited."""
    if not told:
        monkeypatch.setattr(cpu, "waited_s", lambda: None)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cpu.available_cores())]
    try:
        local = cpu.local_cpu()
    finally:
        for each in loops:
            each.kill()
            each.wait()
    assert cpu.recall() is None
    assert "busy CPU: waited" in local.source
    cpu.local_cpu.cache_clear()
    for name in ("MAX_WAITING", "MAX_OTHERS"):
        monkeypatch.setattr(cpu, name, 1e3)
    assert cpu.local_cpu().source == cpu.recall().source


@pytest.mark.parametrize(
    ("used_s", "said"), [(9.0, None), (15.0, "busy CPU: others used 50% of the cores"), (0.0, None)]
)
def test_what_others_use_without_being_waited_for_disturbs_a_calibration_alone(
    monkeypatch: pytest.MonkeyPatch, used_s: float, said: str | None
) -> None:
    """Two cores for ten seconds, of one this process used half; the kernel may not tell what the cores did."""
    now = dict.fromkeys(("perf_counter", "thread_time", "process_time", "used"), 0.0)
    clocks = {name: functools.partial(now.get, name) for name in ("perf_counter", "thread_time", "process_time")}
    monkeypatch.setattr(cpu, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(cpu, "waited_s", lambda: 1.0)
    monkeypatch.setattr(cpu, "_used_s", lambda: now["used"])
    monkeypatch.setattr(cpu, "available_cores", lambda: 2)
    waiting = cpu.Waiting()
    now |= {"perf_counter": 10.0, "thread_time": 5.0, "process_time": 5.0, "used": used_s}
    assert (waiting.busy(alone=True), waiting.busy(alone=False)) == (said, None)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell what its cores did")
def test_what_the_cores_were_used_for_includes_this_process() -> None:
    before, end = cpu._used_s(), time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert cpu._used_s() - before > 0.2


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cpu.cache_file().parent == Path("/elsewhere/lrbench")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cpu.cache_file().parent == Path("/home/someone/.cache/lrbench")
