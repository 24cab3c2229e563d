"""A large store made of the committed rows, to measure what commands take:

    python -m lrbench.tests.results.large_store FOLDER 10_000_000

It is as if every commit had measured every case on four accelerators. Times are those that were measured, times noise.
The rows lie as docs/results.md says that many should.
"""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lrbench.results.select import newest
from lrbench.results.store import committed_results, read_results

DEVICES = {
    "h200_sxm": "NVIDIA H200",
    "h100_sxm": "NVIDIA H100 80GB HBM3",
    "b200": "NVIDIA B200",
    "a100_80_pcie": "NVIDIA A100 80GB PCIe",
}
ROW_GROUP, COMMITS = 8192, 256
"""Rows of a row group, and commits whose rows a file holds."""

START = int(datetime.fromisoformat("2026-01-01T00:00:00+00:00").timestamp())
ORDER = ("kernel", "op", "impl", "mode", "dtype", "seq_len", "case_id")


def make_store(folder: Path, rows: int) -> int:
    """Write at least ``rows`` rows, of two commits at least, and return how many."""
    table = read_results(committed_results())
    last = newest({**row, "n": n} for n, row in enumerate(table.select(["case_id", "measured_at"]).to_pylist()))
    table = table.take([row["n"] for row in last.values()]).sort_by([(name, "ascending") for name in ORDER])
    commits = -(-rows // (len(table) * len(DEVICES)))
    *older, latest = np.split(np.arange(commits), [*range(COMMITS, commits - 1, COMMITS), commits - 1])
    for device, name in DEVICES.items():
        (folder / device).mkdir(parents=True)
        for kernel in pc.unique(table["kernel"]).to_pylist():
            cases = table.filter(pc.equal(table["kernel"], kernel))
            for column, value in (("device_accelerator", device), ("device_name", name)):
                cases = _with(cases, column, pa.array([value] * len(cases)))
            files = {f"{kernel}-{part[0]:05}.history.parquet": part for part in older} | {f"{kernel}.parquet": latest}
            for file, part in files.items():
                many = _over_commits(cases, part, f"{device} {file}")
                pq.write_table(many, folder / device / file, compression="zstd", row_group_size=ROW_GROUP)
    return commits * len(table) * len(DEVICES)


def _over_commits(cases: pa.Table, commits: np.ndarray, seed: str) -> pa.Table:
    """Return each case once for each commit, the oldest first, with times of its own."""
    draw = np.random.default_rng([*seed.encode()])
    runs = pa.array([draw.bytes(16).hex() for _ in commits])
    hashes = pa.array([np.random.default_rng(n).bytes(20).hex() for n in commits])
    many = cases.take(np.repeat(np.arange(len(cases)), len(commits)))
    commit, case = np.tile(np.arange(len(commits)), len(cases)), np.repeat(np.arange(len(cases)), len(commits))
    # A commit each eight hours, and a case each second.
    seconds = START + 8 * 3600 * commits[commit] + case
    dates = pc.strftime(pa.array(seconds, pa.timestamp("s")), "%Y-%m-%dT%H:%M:%S+00:00")
    for name, values in (("run_id", runs.take(commit)), ("git_commit", hashes.take(commit)), ("measured_at", dates)):
        many = _with(many, name, values)
    slower = draw.normal(1, 0.003, len(many))
    for name in ("time_ms", "time_p20_ms", "time_p80_ms", "time_ci_low_ms", "time_ci_high_ms"):
        many = _with(many, name, pc.multiply(many[name], slower))
    samples = many["time_samples_ms"].combine_chunks()
    each = np.repeat(slower, pc.fill_null(pc.list_value_length(samples), 0))
    values = pc.multiply(samples.values, each * draw.normal(1, 0.003, len(each)))
    scaled = pa.ListArray.from_arrays(samples.offsets, values, mask=pc.is_null(samples))
    return _with(many, "time_samples_ms", scaled)


def _with(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), table.schema.field(name), values)


if __name__ == "__main__":
    print(f"{make_store(Path(sys.argv[1]), int(sys.argv[2])):,} rows in {sys.argv[1]}")
