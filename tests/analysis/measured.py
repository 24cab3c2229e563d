"""Made-up measurements for the tests of comparisons: rows with samples, and result files of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lrbench.analysis.check.thresholds import load_thresholds
from lrbench.tests import ROOT

from .rows import row

Row = dict[str, Any]

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


def run_of(
    count: int, *, slower: float = 1.0, noise: float = 0.002, seed: int = 0, **columns: Any
) -> list[dict[str, Any]]:
    """Return a run of ``count`` cases at different chunk lengths, all ``slower`` times their base."""
    return [
        measured(
            chunk_size=16 * (n + 1),
            times=samples(slower * BASE_MS, noise=noise, seed=seed * 1000 + n),
            run_id=f"run{seed}",
            **columns,
        )
        for n in range(count)
    ]
