"""Which rows answers and fits lean on where a mode or dtype has few of its own."""

from __future__ import annotations

from pathlib import Path

from lrbench.analysis.model.prediction import stored_rows

from .. import rows as made


def test_rows_stand_in_for_the_cases_that_have_none_of_their_own(tmp_path: Path) -> None:
    """One fp16 row does not keep bf16 rows of other problems from standing in for fp16."""
    cases = [("bf16", 1024), ("bf16", 8192), ("fp16", 1024)]
    made.write(
        (made.row("mlstm_sig", "xl_chunk", dtype=dtype, seq_len=seq_len) for dtype, seq_len in cases),
        tmp_path / "rows.parquet",
    )
    found = {row["seq_len"]: row.get("stands_in") for row in stored_rows([tmp_path], "fw", "fp16")}
    assert found == {1024: None, 8192: "bf16"}
