"""Sweeps that are ended by signals at random moments: no row that was told of is lost, none is there twice."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from lrbench.bench.drive.run import Outcome
from lrbench.bench.plan import PlannedCase, Request, plan
from lrbench.results import lock, store
from lrbench.tests.bench.runs import Instant, Silent, run
from lrbench.tests.command_line import start_python

PLANNED = plan(
    Request(ops=("mlstm_sig",), impls=("torch",), modes=("fw",), dtypes=("fp32",), seq_lens=tuple(range(16, 3216, 16))),
    device_kind="cpu",
)
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Telling(Silent):
    """Progress that says on standard output, unbuffered, which rows are safe."""

    def begin(self, total: int, what: str) -> None:
        os.write(1, b"begin\n")

    def finished(self, item: PlannedCase, status: str) -> None:
        os.write(1, f"{item.case.case_id}\n".encode())


def sweep(folder: Path) -> Outcome:
    """Sweep as a user does who gives --resume."""
    lock.temporary_folder()
    folder.mkdir(parents=True, exist_ok=True)
    store.recover(folder)
    return run(folder, PLANNED, Telling(), resume=True, executor=Instant())


def end_sweep(folder: Path, number: signal.Signals, after_s: float) -> list[str]:
    """Start a sweep, send it a signal so long after its begin, and return the cases that it had told of."""
    code = "import sys, pathlib; from lrbench.tests.bench.test_signals import sweep; sweep(pathlib.Path(sys.argv[1]))"
    process = start_python(code, folder, TMPDIR=str(folder.parent))
    assert process.stdout is not None
    assert process.stdout.readline() == "begin\n"
    time.sleep(after_s)
    process.send_signal(number)
    told = process.stdout.read().splitlines()
    process.wait()
    return told


@pytest.mark.parametrize("times", [4, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_sweeps_ended_at_random_moments(tmp_path: Path, times: int) -> None:
    draw = random.Random(0)
    for n in range(times):
        folder = tmp_path / str(n) / "out"
        told = end_sweep(folder, SIGNALS[n % len(SIGNALS)], draw.uniform(0, 0.6))
        assert len(set(told)) == len(told)
        outcome = sweep(folder)
        assert (outcome.interrupted, outcome.remaining) == (False, 0)
        assert set(told) <= {record.case_id for record in outcome.resumed}
        cases = store.read_results(folder, ("case_id",))["case_id"].to_pylist()
        assert sorted(cases) == sorted(item.case.case_id for item in PLANNED)
        assert {path.suffix for path in folder.iterdir()} == {".parquet"}
        # What a killed sweep left behind, the next one here removes.
        left = [path for path in folder.parent.iterdir() if path != folder]
        assert len(left) <= (SIGNALS[n % len(SIGNALS)] == signal.SIGKILL)
