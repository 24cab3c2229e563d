"""This project under its own check: what is stored in tests/data has not moved; stored_values renews it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lrbench.analysis.check.findings import noteworthy
from lrbench.analysis.check.regression import check
from lrbench.analysis.check.thresholds import load_thresholds
from lrbench.results.select import load_rows

from . import stored_values

THRESHOLDS = load_thresholds(stored_values.DATA / "portable.toml")
RENEW = "where that is meant: python -m lrbench.tests.analysis.check.stored_values"


@pytest.fixture(scope="module")
def stored() -> list[dict[str, Any]]:
    return load_rows(stored_values.PORTABLE)


def test_counts_memory_and_errors_have_not_moved(stored: list[dict[str, Any]], tmp_path: Path) -> None:
    found = check(load_rows(stored_values.measure(tmp_path)), stored, THRESHOLDS)
    assert found.passed, [f"{case.row['op']} {case.row['impl']}: {case.reason}" for case in noteworthy(found)] + [RENEW]
    assert len(found.cases) == len(stored) == 12
    assert all(len(case.metrics) == 5 for case in found.cases), "memory, error, flops, tensor_flops, bytes"


@pytest.mark.parametrize(
    ("column", "factor"), [("flops", 1.001), ("bytes", 0.99), ("tensor_flops", 2.0), ("peak_memory_bytes", 1.02)]
)
def test_a_value_that_moves_fails_the_check(stored: list[dict[str, Any]], column: str, factor: float) -> None:
    moved = [{**row, column: factor * row[column]} if n == 3 else row for n, row in enumerate(stored)]
    (case,) = check(moved, stored, THRESHOLDS).failures
    assert (case.row["case_id"], case.verdict) == (stored[3]["case_id"], "regression")
    assert case.reason.startswith(column)


def test_optimal_chunk_sizes_have_not_moved() -> None:
    before = json.loads(stored_values.CHUNK_SIZES.read_text(encoding="utf-8"))
    # Texts and integers exactly, the closed forms' numbers to rounding.
    for row in before:
        row |= {name: pytest.approx(value, rel=1e-9) for name, value in row.items() if isinstance(value, float)}
    assert stored_values.chunk_sizes() == before, RENEW
