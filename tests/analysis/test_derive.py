"""Derived columns: as they are counted today where that is known here, else as they are stored."""

from __future__ import annotations

import pytest

from lrbench.analysis.derive import DERIVED_COLUMNS, derive_anew
from lrbench.results.select import latest_rows, load_results
from lrbench.results.store import committed_results

from ..command_line import full_speed_seconds
from . import rows as made

CASE = made.case("mlstm_sig", "fused_chunk")
STALE = {name: 7.5 for name in DERIVED_COLUMNS if name != "suspect"} | {"suspect": "it was too fast"}


def test_columns_are_derived_anew() -> None:
    now = made.row_of(CASE, gbps=1.0)
    (row,) = derive_anew(made.frame([{**now, **STALE, "accelerator": "h100_sxm"}])).to_dict("records")
    for name in ("flops", "tensor_flops", "bytes", "intensity", "causal_factor", "tflops", "roofline_fraction"):
        assert row[name] == pytest.approx(now[name]), name
    assert row["gbps"] == pytest.approx(made.count_of(CASE).bytes / now["time_ms"] / 1e6)
    assert row["model_time_ms"] > 1e-2
    assert row["suspect"] is None


def test_no_committed_row_is_above_its_roof() -> None:
    """Else a count has FLOPs or bytes that the kernel leaves out."""
    shares = derive_anew(latest_rows(load_results(committed_results())))["roofline_fraction"].dropna()
    assert len(shares) > 3000
    assert shares.max() < 1


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"op": "hyena"}, DERIVED_COLUMNS),
        ({"chunk_size": -1}, DERIVED_COLUMNS),
        ({"device_accelerator": None}, ("roofline_fraction", "suspect")),
        ({"device_accelerator": "h1000"}, ("roofline_fraction", "suspect")),
        ({"device_accelerator": "cpu", "device_kind": "cpu"}, ("roofline_fraction", "suspect")),
        ({"accelerator": None}, ("model_time_ms",)),
        ({"status": "oom", "time_ms": None}, ("tflops", "gbps", "roofline_fraction", "suspect")),
    ],
)
def test_what_is_not_known_here_stays_as_stored(changed: dict, kept: tuple[str, ...]) -> None:
    stored = {**made.row_of(CASE), **STALE, "accelerator": "h100_sxm", **changed}
    (row,) = derive_anew(made.frame([stored, made.row_of(CASE)]).iloc[:1]).to_dict("records")
    assert {name for name in DERIVED_COLUMNS if row[name] == STALE[name]} == set(kept)


def test_columns_that_are_not_loaded_are_not_added() -> None:
    frame = made.frame([made.row_of(CASE)]).drop(columns=["flops", "suspect"])
    assert list(derive_anew(frame).columns) == list(frame.columns)


@pytest.mark.speed
def test_all_committed_rows_are_derived_quickly() -> None:
    frame = latest_rows(load_results(committed_results()))
    assert full_speed_seconds(lambda: derive_anew(frame)) < 2.0
