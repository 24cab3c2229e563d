"""Made-up results: with the runtime model's times, slower for some than for others, for tests of frames and figures;
and with samples around a median, for tests of comparisons."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.accelerators.roofs import RoofRow
from lrbench.analysis.check.thresholds import load_thresholds
from lrbench.analysis.counts import Count, count_case
from lrbench.analysis.derive import derive
from lrbench.analysis.model.answers import Question
from lrbench.analysis.model.runtime_model import model_time_ms
from lrbench.bench.plan import Request, plan
from lrbench.kernels import get_operation
from lrbench.results.schema import CASE_COLUMNS, Case, Record
from lrbench.results.select import load_rows, with_totals
from lrbench.results.store import arrow_schema, committed_results, write_parquet
from lrbench.tests import ROOT

Row = dict[str, Any]

SLOWNESS = {
    "fused_chunk": 1.3,
    "limit_chunk": 2.0,
    "mlstm_kernels.xl_chunk_siging": 3.1,
    "mlstm_kernels.xl_chunk": 4.0,
    "mlstm_kernels.limit_chunk": 3.7,
    "fla.chunk_simple_gla": 1.5,
    "fla.chunk_gla": 2.2,
    "mamba_ssm.chunk_scan": 2.0,
    "mamba_ssm.selective_scan": 1.1,
    "torch.sdpa_cudnn": 2.1,
    "flash_attn.v4": 1.9,
}
"""Time over the runtime model's, roughly as on the H200."""

CHUNKS = (64, 128, 256, 512, 1024)


def row(op: str, impl: str, **columns: Any) -> dict[str, Any]:
    """Return a result row: sizes, mode and dtypes are of its :func:`case`, all else is of :func:`row_of`."""
    fields = {name: columns.pop(name) for name in [*columns] if name in CASE_COLUMNS}
    return row_of(case(op, impl, **fields), **columns)


def row_of(case: Case, **columns: Any) -> dict[str, Any]:
    """Return a result row of ``case``: measured on an H200 unless ``columns`` say otherwise."""
    device = get_accelerator(columns.pop("accelerator", "h200"))
    count = count_of(case)
    slowness = SLOWNESS.get(case.impl, 2.0) * (1.25 if case.op == "mlstm_exp" else 1.0)
    time_ms = columns.pop("time_ms", slowness * model_time_ms(count, device, case.dtype) + 0.02)
    values: dict[str, Any] = {
        **{field.name: getattr(case, field.name) for field in dataclasses.fields(case)},
        "run_id": "run", "case_id": case.case_id, "measured_at": "2026-01-01T00:00:00+00:00", "status": "ok",
        "same_math": case.op != "attention",
        "time_ms": time_ms, "time_ci_low_ms": 0.99 * time_ms, "time_ci_high_ms": 1.01 * time_ms,
        "peak_memory_bytes": int(count.compulsory_bytes * 1.1 + 0.6 * (count.bytes - count.compulsory_bytes)),
        **derive(None, device, count, case.dtype, time_ms),
        "device_kind": "cpu" if device.key == "cpu" else "cuda",
        "device_name": device.name,
        "device_accelerator": device.key,
        **columns,
    }  # fmt: skip
    if values["status"] != "ok":
        values |= dict.fromkeys(("time_ms", "time_ci_low_ms", "time_ci_high_ms", "tflops", "roofline_fraction"))
        values |= {"peak_memory_bytes": None, "suspect": None}
    return dataclasses.asdict(Record(**values))


def count_of(case: Case) -> Count:
    """Return the work of ``case``."""
    return count_case(case.op, case.impl, case.mode, case.dtype, case.state_dtype, case.sizes)


def case(op: str, impl: str, **fields: Any) -> Case:
    """Return a case of 65,536 tokens, of an operation with heads 16 heads, K = 128 and V = 256, bf16, forward."""
    provider = impl.rpartition(".")[0] or "lrbench"
    seq_len = fields.get("seq_len", 8192)
    defaults: dict[str, Any] = {"mode": "fw", "dtype": "bf16", "seq_len": seq_len, "batch": 65536 // seq_len}
    if op == "selective_scan":
        defaults |= {"channels": 4096, "head_dim_qk": 16}
    elif op == "rglru":
        defaults |= {"kernel": "rglru", "channels": 4096}
    elif op == "gated_mlp":
        defaults |= {"kernel": "gated-mlp", "batch": 1, "d_model": 4096, "d_ff": 14336}
    elif op == "attention":
        defaults |= {"num_heads": 32, "head_dim_qk": 128, "head_dim_v": 128}
    elif op == "mamba2_ssd":
        defaults |= {"num_heads": 64, "head_dim_qk": 64, "head_dim_v": 64}
    else:
        defaults |= {"num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}
    if provider in ("lrbench", "mlstm_kernels") and "num_heads" in defaults:
        defaults |= {"chunk_size": 128, "state_dtype": "fp32"}
    return Case(op=op, impl=impl, provider=provider, **{"kernel": "tfla", **defaults, **fields})


def question(
    op: str = "mlstm_sig", gpu: str = "h200", seq_len: int = 8192, head_dim: int = 256, **more: Any
) -> Question:
    """Return a question of 65,536 tokens in bf16, answered from no rows unless they are given."""
    heads = get_operation(op).sizes_at(num_heads=4096 // head_dim, head_dim_v=head_dim)
    sizes = {"batch": 65536 // seq_len, "seq_len": seq_len, **heads}
    asked = {"mode": "fw", "rows": (), **more}
    return Question(op=op, dtype="bf16", state_dtype="fp32", sizes=sizes, accelerator=get_accelerator(gpu), **asked)


def default_sweep() -> list[dict[str, Any]]:
    """Return rows shaped like the default sweep on an H200, with the failures that the peers show there."""
    rows = []
    ours_and_peers = [
        *itertools.product(("mlstm_sig", "mlstm_exp"), ("fused_chunk", "limit_chunk")),
        ("mlstm_sig", "mlstm_kernels.xl_chunk_siging"),
        ("mlstm_exp", "mlstm_kernels.xl_chunk"),
        ("mlstm_exp", "mlstm_kernels.limit_chunk"),
    ]
    others = [
        ("simple_gla", "fla.chunk_simple_gla"),
        ("gla", "fla.chunk_gla"),
        ("mamba2_ssd", "mamba_ssm.chunk_scan"),
        ("selective_scan", "mamba_ssm.selective_scan"),
        ("attention", "torch.sdpa_cudnn"),
        ("attention", "flash_attn.v4"),
    ]
    for mode, seq_len in itertools.product(("fw", "fwbw"), (1024, 2048, 4096, 8192, 16384, 32768, 65536)):
        of = {"mode": mode, "seq_len": seq_len}
        for (op, impl), head_dim, chunk in itertools.product(ours_and_peers, (64, 128, 256, 512), CHUNKS):
            dims = {"num_heads": 4096 // head_dim, "head_dim_qk": head_dim // 2, "head_dim_v": head_dim}
            failed = impl == "mlstm_kernels.xl_chunk"
            failure = {"status": "crash", "reason": "the compiler aborted the process"} if failed else {}
            if chunk <= 128 or "limit" not in impl:
                rows.append(row(op, impl, chunk_size=chunk, **of, **dims, **failure))
        for op, impl in others:
            failure = {}
            if op == "mamba2_ssd" and seq_len == 65536:
                failure = {"status": "timeout", "reason": "autotuning exceeded the limit of a case"}
            if op == "simple_gla" and mode == "fwbw":
                failure = {"status": "unsupported", "reason": "backward refused on Hopper with triton 3.4 to 3.7.0"}
            rows.append(row(op, impl, **of, **failure))
    # Since then a gradient is counted once.
    return [{**each, "measured_at": "2026-12-01T00:00:00+00:00"} for each in rows]


def decoding() -> list[dict[str, Any]]:
    """Return rows of the preset ``decode`` on an H200, whose memory the largest caches do not fit in."""
    planned = [item.case for item in plan(Request(preset="decode"), device_kind="cuda")]
    oom = {"status": "oom", "reason": "CUDA out of memory"}
    return [row_of(each, **(oom if (each.context or 0) * (each.batch or 0) > 16 * 131072 else {})) for each in planned]


def calibration(run_id: str = "a", when: str = "2026-11-20T10:00:00+00:00", **columns: Any) -> list[RoofRow]:
    """Return the rows of a calibration of an H200: copy 4 TB/s, bf16 700 TFLOP/s, fp32 50 TFLOP/s, fma 60 TFLOP/s."""
    rates = (("copy", None, 4e12), ("matmul", "bf16", 700e12), ("matmul", "fp32", 50e12), ("fma", "fp32", 60e12))
    defaults: dict[str, Any] = {
        "device_kind": "cuda",
        "device_name": "NVIDIA H200",
        "device_accelerator": "h200_sxm",
        "torch_version": "2.11.0",
        "driver_version": "580.159",
        "short": False,
    }
    times = {"ms": 1.0, "p20_ms": 0.9, "p80_ms": 1.1, "ci_low_ms": 0.95, "ci_high_ms": 1.05}
    defaults |= {f"time_{name}": ms for name, ms in times.items()} | {"time_samples_ms": [0.9, 1.0, 1.1]}
    return [
        RoofRow(
            run_id=run_id, measured_at=when, quantity=quantity, dtype=dtype, size=8192, rate=rate, best_rate=1.1 * rate,
            unit="bytes/s" if quantity == "copy" else "FLOP/s", **{**defaults, **columns},
        )
        for quantity, dtype, rate in rates
    ]  # fmt: skip


def stored(op: str, impl: str, **sizes: object) -> dict[str, Any]:
    """Return the committed row of an H200 that answers state, forward in bf16: the newest right one of an idle machine.

    What a test expects of it changes with every new measurement, and so does what is shown.
    """
    where = {"op": op, "impl": impl, "mode": "fw", "dtype": "bf16", "status": "ok"}
    rows = load_rows(committed_results("h200_sxm"), where=where)
    found = [row for row in rows if sizes.items() <= row.items() and row["noise"] is row["suspect"] is None]
    return max(found, key=lambda row: row["measured_at"])


def frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as ``load_results`` would, without a file."""
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=arrow_schema())
    return with_totals(table.to_pandas())


def write(rows: Iterable[Mapping[str, Any]], path: Path) -> Path:
    """Write rows as a results file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(rows, path)
    return path


BASE_MS = 2.0
THRESHOLDS = load_thresholds(ROOT / "results" / "thresholds.toml")
"""Those of the committed results."""


def samples(median_ms: float, *, noise: float = 0.01, count: int = 10, seed: int = 0) -> list[float]:
    """Return normal samples around a median, ``noise`` relative to it."""
    return list(map(float, median_ms * (1 + noise * np.random.default_rng(seed).standard_normal(count))))


def measured(
    op: str = "mlstm_sig", impl: str = "fused_chunk", *, times: Sequence[float] | None = None, **columns: Any
) -> dict[str, Any]:
    """Return a row with samples."""
    drawn = list(times) if times is not None else samples(BASE_MS)
    defaults: dict[str, Any] = {
        "time_ms": float(np.median(drawn)),
        "time_samples_ms": drawn,
        "rel_error": 2e-3, "checked": "same shape", "peak_memory_bytes": 2**30, "git_commit": "a" * 40,
        "git_dirty": False, "driver_version": "580", "torch_version": "2.11", "triton_version": "3.6.0",
        "sm_clock_mhz": 1980.0,
    }  # fmt: skip
    return row(op, impl, **{**defaults, **columns})


def timed(median_ms: float, scatter: float = 0.002, **columns: Any) -> dict[str, Any]:
    """Return a row with samples that scatter around a median."""
    return measured(times=samples(median_ms, noise=scatter), **columns)


def slower(row: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return a row whose every time is ``factor`` times as long."""
    times = [factor * ms for ms in row["time_samples_ms"]]
    return {**row, "time_ms": factor * row["time_ms"], "time_samples_ms": times}


def failed(status: str, reason: str, **columns: Any) -> dict[str, Any]:
    """Return the row of a case that was not measured."""
    return {**measured(**columns, status=status, reason=reason), "time_samples_ms": None, "rel_error": None}


def three_commits() -> list[dict[str, Any]]:
    """Return the rows of one case at three commits: 2 ms, a crash, 3 ms with another Triton."""
    rows = []
    for day, (commit, time_ms) in enumerate({"c": 2.0, "b": None, "a": 3.0}.items(), start=1):
        at = {"git_commit": commit * 40, "run_id": f"run-{commit}", "measured_at": f"2026-01-0{day}T00:00:00+00:00"}
        if time_ms is None:
            rows.append(failed("crash", "died", **at))
        else:
            triton = {"triton_version": "3.7.1" if commit == "a" else "3.6.0"}
            rows.append(timed(time_ms, **triton, **at))
    return rows


def run_of(count: int, *, slower: float = 1.0, seed: int = 0, **columns: Any) -> list[dict[str, Any]]:
    """Return a run of ``count`` cases at different chunk lengths, all ``slower`` times their base."""
    return [
        measured(
            chunk_size=16 * (n + 1),
            times=samples(slower * BASE_MS, noise=0.002, seed=seed * 1000 + n),
            run_id=f"run{seed}",
            **columns,
        )
        for n in range(count)
    ]
