"""The error table of the gated MLP: its figures, its references, and the source's own numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lrbench.analysis.reproduce import entries
from lrbench.bench import mlp_errors
from lrbench.bench.mlp_errors import DEFINITION, difference, error_rows
from lrbench.results import store
from lrbench.results.schema import ErrorsRow

PUBLISHED = {claim.claim.metric: claim.claim.states[:2] for claim in entries.load() if claim.id == "gated-mlp-errors"}
"""Metric -> the source's figures for N = 1024 and 2048."""


def test_difference_by_hand() -> None:
    result, expected = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    largest, average, relative = difference(result, expected)
    assert (largest, average) == (3.0, 1.0)
    assert relative == pytest.approx((10 / 21) ** 0.5)
    assert difference(result, result) == (0.0, 0.0, 0.0)
    assert difference(torch.ones(2), torch.zeros(2)) == (1.0, 1.0, pytest.approx(2**0.5))


def rows(**changes: object) -> list[dict[str, object]]:
    arguments = {
        "sizes": (64,), "draws": 3, "impls": ("torch", DEFINITION), "against": ("eager", "exact"), "dtype": "bf16",
        "device": "cpu",
    }  # fmt: skip
    return list(error_rows(**{**arguments, **changes}))  # type: ignore[arg-type]


def test_a_row_for_every_size_implementation_and_reference() -> None:
    found = rows(sizes=(32, 64))
    assert [(row["size"], row["impl"], row["against"]) for row in found] == [
        (size, impl, ref) for size in (32, 64) for impl in ("torch", DEFINITION) for ref in ("eager", "exact")
    ]
    by_name = {(row["impl"], row["against"]): row for row in found if row["size"] == 64}
    # The portable form is the eager one in place; rounding once is nearer to the truth than rounding four times.
    assert by_name["torch", "eager"]["max_abs_mean"] == 0
    exact = {impl: by_name[impl, "exact"]["relative_mean"] for impl in ("torch", DEFINITION)}
    assert 0 < exact[DEFINITION] < 0.7 * exact["torch"]
    assert by_name[DEFINITION, "exact"]["relative_std"] > 0


def test_draws_are_the_same_every_time() -> None:
    assert rows() == rows()
    assert rows(draws=1) != rows(draws=2)


def test_large_sizes_have_no_exact_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_errors, "MAX_EXACT", 32)
    assert [row["against"] for row in rows(impls=(DEFINITION,))] == ["eager"]


def test_errors_are_those_that_the_source_prints() -> None:
    """One rounding against torch's four, at N = 1024: the figures that the source prints, the largest within half."""
    (row,) = rows(sizes=(1024,), draws=1, impls=(DEFINITION,), against=("eager",))
    for name, tolerance in (("max_abs", 0.5), ("mean_abs", 0.02), ("relative", 0.02)):
        assert row[f"{name}_mean"] == pytest.approx(PUBLISHED[name][0], rel=tolerance)


def test_what_does_not_run_here_is_said() -> None:
    with pytest.raises(ValueError, match="impl must run on a cpu device, got 'fused'"):
        rows(impls=("fused",))


def test_rows_are_kept(tmp_path: Path) -> None:
    found = rows(sizes=(32,), draws=2, impls=(DEFINITION,))
    kept = store.read_file(mlp_errors.write_rows(found, tmp_path), ErrorsRow).to_pylist()
    assert [(row["d_ff"], row["against"]) for row in kept] == [(32, "eager"), (32, "exact")]
    assert [row["relative_mean"] for row in kept] == [row["relative_mean"] for row in found]


@pytest.mark.gpu
def test_kernels_are_as_exact_as_rounding_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels' figures are those of the definition rounded once, and the source's."""
    # Products split along D would round their parts too, and the eager reference more than four times.
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
    found = rows(
        sizes=(1024, 2048), draws=4, impls=("fused", "fused_save", DEFINITION), against=("eager", "exact"),
        device="cuda",
    )  # fmt: skip
    named = {(row["size"], row["impl"], row["against"]): row for row in found}
    for n, size in enumerate((1024, 2048)):
        for impl in ("fused", "fused_save"):
            for against in ("eager", "exact"):
                ours, rounded = named[size, impl, against], named[size, DEFINITION, against]
                assert ours["relative_mean"] == pytest.approx(rounded["relative_mean"], rel=0.02)
            assert named[size, impl, "eager"]["relative_mean"] == pytest.approx(PUBLISHED["relative"][n], rel=0.05)
