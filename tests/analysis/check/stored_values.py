"""What must not move unnoticed: counts, chunk sizes, memory and errors of the portable implementations.

``python -m lrbench.tests.analysis.check.stored_values`` measures on this CPU and writes tests/data anew. A change
that moves them on purpose does that in the same commit; the difference then shows in review.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lrbench.analysis.model.answers import chunk_size_report
from lrbench.bench import plan
from lrbench.bench.drive.executors import LocalExecutor
from lrbench.bench.drive.run import sweep
from lrbench.bench.drive.workers import probe_environment
from lrbench.bench.worker.protocol import RunLimits
from lrbench.kernels import FAMILIES
from lrbench.tests.analysis.rows import question

DATA = Path(__file__).resolve().parents[2] / "data"
PORTABLE = DATA / "portable.parquet"
CHUNK_SIZES = DATA / "chunk_sizes.json"

REQUEST = plan.Request(
    kernel="tfla", ops=FAMILIES["tfla"], impls=("torch",), modes=("fw", "fwbw"), dtypes=("fp32",), seq_lens=(150,),
    head_dims=(64,), chunk_sizes=(32,), num_heads=2, batches=(1,),
)  # fmt: skip
"""Four whole chunks and a ragged one, small: the figures do not depend on the size, and CI has little time."""

CHUNK_SIZE_CASES: list[dict[str, Any]] = [
    {"op": op, "gpu": gpu, "mode": mode, "head_dim_v": head_dim}
    for op in ("mlstm_sig", "mlstm_exp", "simple_gla", "retention", "mamba2_ssd")
    for gpu in ("a100", "h100", "h200", "b200")
    for mode in ("fw", "fwbw")
    for head_dim in (128, 256, 512)
]


def measure(folder: Path) -> Path:
    """Measure the portable implementations on this CPU into ``folder`` and return the file."""
    # One thread: times do not matter here, and threads that wait for a busy machine's cores do.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        environment = probe_environment()
        planned = plan.plan(REQUEST, device_kind="cpu")
        limits = RunLimits(timeout_s=120.0)
        outcome = sweep(planned, environment, limits, mock.Mock(), executor=LocalExecutor(), output=folder)
    assert outcome.path is not None
    return outcome.path


def chunk_sizes() -> list[dict[str, Any]]:
    """Return the FLOP-optimal and runtime-optimal chunk lengths of :data:`CHUNK_SIZE_CASES`."""
    rows = []
    for case in CHUNK_SIZE_CASES:
        report = chunk_size_report(question(case["op"], case["gpu"], head_dim=case["head_dim_v"], mode=case["mode"]))
        names = ("flop_optimal", "runtime_optimal", "flop_optimal_feasible", "runtime_optimal_feasible")
        rows.append({**case, **{name: report[name] for name in names}})
    return rows


def main() -> None:
    """Write tests/data anew."""
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        PORTABLE.write_bytes(measure(Path(folder)).read_bytes())
    lines = ",\n".join(json.dumps(row) for row in chunk_sizes())
    CHUNK_SIZES.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{PORTABLE}\n{CHUNK_SIZES}")


if __name__ == "__main__":
    main()
