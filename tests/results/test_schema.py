"""What identifies a case."""

from __future__ import annotations

import dataclasses

from lrbench.results.schema import SIZE_COLUMNS

from ..analysis.rows import case

CASE = case("mlstm_sig", "tfla")


def test_case_id_is_stable() -> None:
    """Results on disk are matched by this value: a change here orphans all of them."""
    assert CASE.case_id == "888c0c1a5dbd0b60"


def test_case_id_depends_on_everything_that_is_run_and_on_nothing_else() -> None:
    changed = {name: dataclasses.replace(CASE, **{name: 999}).case_id for name in SIZE_COLUMNS}
    changed |= {name: dataclasses.replace(CASE, **{name: "other"}).case_id for name in ("op", "impl", "mode", "dtype")}
    changed["state_dtype"] = dataclasses.replace(CASE, state_dtype=None).case_id
    assert len({CASE.case_id, *changed.values()}) == 1 + len(changed)
    same = dataclasses.replace(CASE, kernel="other", provider="other")
    assert same.case_id == CASE.case_id


def test_sizes_leave_out_what_does_not_apply() -> None:
    assert dataclasses.replace(CASE, chunk_size=None).sizes == {
        "batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256,
    }  # fmt: skip
