"""A million rows load, reduce and answer in seconds: pytest -m "slow or speed" tests/results/test_select_speed.py -s"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrbench.results.store import arrow_schema

from ..analysis import rows as made
from ..command_line import run_python, slowness
from .large_store import make_store

ROWS = 1_000_000
SECONDS, GIB = 5.0, 2.0
ANSWER_SECONDS, ANSWER_GIB = 4.0, 0.5
"""Twice what was measured."""

MEASURE = """
import resource, sys, time
from lrbench.results.select import best_rows, latest_rows, load_results
start = time.process_time()
frame = load_results(sys.argv[1])
best = best_rows(frame)
latest = latest_rows(frame)
print(len(frame), time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_a_million_rows(tmp_path: Path) -> None:
    """Processor time rather than the wall clock: what else the machine does must not decide."""
    sweep = pa.Table.from_pylist([dict(row) for row in made.default_sweep()], schema=arrow_schema())
    repeats = -(-ROWS // len(sweep))
    path = tmp_path / "million.parquet"
    pq.write_table(pa.concat_tables([sweep] * repeats).slice(0, ROWS), path, compression="zstd")
    rows, seconds, gib = map(float, run_python(MEASURE, path).split())
    print(f"{rows:,.0f} rows: {seconds:.2f} s of processor time, {gib:.2f} GiB")
    assert rows == ROWS
    assert seconds < SECONDS
    assert gib < GIB


ANSWER = """
import resource, sys
from lrbench.cli import app
assert not app(sys.argv[1:], standalone_mode=False)
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss, which is at least what the process that started this one had.
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(used.ru_utime + used.ru_stime, int(peak) / 2**20)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    assert make_store(folder, ROWS) >= ROWS
    return folder


@pytest.mark.speed
@pytest.mark.parametrize(
    "command",
    [
        "check run:{new} --baseline kernel:wkv,device:h200_sxm",
        "check run:{old},kernel:wkv --baseline run:{older},kernel:wkv",
        "history op:wkv4,impl:scan,mode:fw,seq_len:16k,channels:2k",
        "best tfla --gpu h200",
    ],
)
def test_answers_from_a_million_rows(command: str, store: Path) -> None:
    """Rows are chosen while they are read: all of them took a check 16 s and 6 GB."""
    new, past = (pq.read_table(store / "h200_sxm" / f"wkv{name}.parquet")["run_id"] for name in ("", "-00000.history"))
    arguments = command.format(new=new[0], old=past[40], older=past[41]).split()
    slow = slowness()
    *printed, used = run_python(ANSWER, *arguments, "--results", store).splitlines()
    seconds, gib = map(float, used.split())
    seconds /= min(slow, slowness())
    print(f"{command}: {seconds:.2f} s of processor time at full speed, {gib:.2f} GiB")
    assert len(printed) > 3
    assert seconds < ANSWER_SECONDS
    assert gib < ANSWER_GIB
