"""Several sides next to one another: which is fastest, what the noise does not settle, and what did not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lrbench.analysis.check import matrix
from lrbench.analysis.check.compare import compare
from lrbench.bench.show.inventory import kernel_rows
from lrbench.results.contents import triton_rows
from lrbench.results.select import select
from lrbench.results.store import committed_results
from lrbench.tests import ROOT
from lrbench.tests.command_line import Lrbench

from ..rows import failed, timed, write


def of(version: str, time_ms: float, **columns: Any) -> dict[str, Any]:
    return timed(time_ms, triton_version=version, **{"run_id": "one", **columns})


ROWS = [
    of("3.10.0", 2.0),
    of("3.8.0", 2.5),
    of("3.9.0", 2.01),
    of("3.8.0", 1.0, op="mlstm_exp"),
    of("3.9.0", 1.1, scatter=0.3, op="mlstm_exp"),
    failed("unsupported", "too | new", op="mlstm_exp", triton_version="3.10.0", run_id="one"),
]


def test_a_line_has_the_ratio_to_the_fastest_and_what_it_means() -> None:
    sides = matrix.triton_sides(ROWS)
    assert list(sides) == ["3.8.0", "3.9.0", "3.10.0"]
    lines = matrix.matrix(sides)
    first, second = matrix.wide_rows(lines, sides)
    assert first["3.8.0"] == f"{lines[0]['3.8.0'].row['time_ms']:.4g} (1.25)"
    assert first["3.10.0"].endswith(" (1.00)") and first["use"] == "3.9.0, 3.10.0"
    assert second["3.9.0"].endswith("?)") and second["3.10.0"] == "unsupported" and second["use"] == "3.8.0, 3.9.0"
    (why,) = matrix.why_not(lines)
    assert (why["with"], why["cases"], why["reason"]) == ("3.10.0", 1, "unsupported: too | new")
    slow = next(row for row in matrix.long_rows(lines) if row["side"] == "3.8.0")
    assert slow["verdict"] == "slower" and 1.2 < slow["low"] < slow["ratio"] < slow["high"] < 1.3
    page = matrix.as_page(ROWS)
    assert "| op | impl | mode | case | 3.8.0 | 3.9.0 | 3.10.0 | use |" in page and "too \\| new" in page


def test_a_wrong_guess_is_listed() -> None:
    """Where it is off by more than a tenth, and where a kernel runs against expectation or does not."""
    guesses = {
        "mlstm_sig fused_chunk": {"3.9.0": 0.86, "3.10.0": 0.95},
        "mlstm_exp fused_chunk": {"3.9.0": 1.05, "3.10.0": 1.0},
        "mlstm_exp whole_state": {"3.10.0": 1.0},
    }
    rows = [
        *ROWS,
        of("3.7.1", 9.0),
        *(of(version, 1.0, op="mlstm_exp", impl="whole_state") for version in ("3.8.0", "3.9.0", "3.10.0")),
        failed("error", "none", triton_version="3.8.0", run_id="one"),
    ]
    sides = matrix.triton_sides(rows[:-1])
    found = matrix.surprises(matrix.matrix(sides), guesses)
    of_row = [tuple(row[name] for name in ("op", "impl", "Triton", "guessed", "measured")) for row in found]
    assert of_row == [
        ("mlstm_sig", "fused_chunk", "3.10.0", "0.95", "0.80"),
        ("mlstm_exp", "fused_chunk", "3.10.0", "1.00", "unsupported"),
        ("mlstm_exp", "whole_state", "3.9.0", "does not run", "1.00"),
    ]
    sides["3.8.0"] = [rows[-1]]
    first = matrix.surprises(matrix.matrix(sides), guesses | {"mlstm_sig fused_chunk": {"3.10.0": 1.0}})
    assert [(row["Triton"], row["guessed"], row["measured"]) for row in first[:2]] == [
        ("3.8.0", "1.00", "error"),
        ("3.9.0", "does not run", "runs"),
    ]


def test_guesses_are_of_what_is_declared() -> None:
    declared = {f"{row['op']} {row['impl']}" for row in kernel_rows()}
    assert matrix.load_guesses().keys() <= declared


def test_sides_of_one_run_come_first(tmp_path: Path, lrbench: Lrbench) -> None:
    """Also where a version has newer rows of another run, of another sweep or of this Triton alone."""
    at = {"measured_at": "2027-01-01T00:00:00+00:00"}
    write(ROWS, tmp_path / "a.triton.parquet")
    write([of("3.8.0", 9.0, **at, run_id="two")], tmp_path / "later.parquet")
    write([of("3.8.0", 8.0, **at, run_id="three")], tmp_path / "b.triton.parquet")
    old, new = (select(f"triton:{version},op:mlstm_sig", [tmp_path]) for version in ("3.8", "3.9"))
    (pair,) = compare(old, new).pairs
    assert (pair.a["run_id"], pair.b["run_id"], pair.ratio) == ("one", "one", pytest.approx(2.01 / 2.5, rel=0.02))
    assert select("run:two", [tmp_path])[0]["time_ms"] == pytest.approx(9.0, rel=0.02)
    assert len(select("run:one", [tmp_path])) == len(ROWS)
    three = select("run:three,triton:3.8", [tmp_path])
    assert compare(three, new).environment[-1] == "run: the sides of 1 of 1 cases are of different runs"
    with pytest.raises(ValueError, match=r"triton:3 must name one triton, got 3\.10\.0, 3\.8\.0, 3\.9\.0"):
        select("triton:3", [tmp_path])
    with pytest.raises(ValueError, match=r"triton:3\.7 selects no row"):
        select("triton:3.7", [tmp_path])
    code, out, err = lrbench("compare run:three,triton:3.8 triton:3.9 triton:3.10 --results", tmp_path)
    header, line = out.splitlines()[1:3]
    assert (code, header.split()[-4:]) == (0, ["run:three,triton:3.8", "triton:3.9", "triton:3.10", "use"])
    assert line.endswith("triton:3.9, triton:3.10")
    assert "1 of 2 cases are of different runs" in err


def test_the_page_is_as_it_is_written() -> None:
    rows = triton_rows(committed_results())
    assert {(row["batch"] * row["seq_len"], row["dtype"]) for row in rows} <= {(65536, "bf16")}, "the head says so"
    written = matrix.as_page(rows)
    page = (ROOT / "docs" / "triton.md").read_text(encoding="utf-8")
    assert written == page, "write it anew: lrbench results --triton --format markdown > docs/triton.md"
