"""A million rows load and reduce in seconds: run with `pytest -m slow tests/results/test_select_speed.py -s`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrbench.results.store import arrow_schema

from ..analysis import rows as made

ROWS = 1_000_000
SECONDS, GIB = 5.0, 2.0

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
    finished = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    rows, seconds, gib = (float(value) for value in finished.stdout.split())
    print(f"{rows:,.0f} rows: {seconds:.2f} s of processor time, {gib:.2f} GiB")
    assert rows == ROWS
    assert seconds < SECONDS
    assert gib < GIB
