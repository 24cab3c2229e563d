"""The error table of the gated MLP: its figures, its references, and the source's own numbers."""

from __future__ import annotations

import pytest
import torch

from lrbench.analysis.reproduce import entries
from lrbench.bench.drive.mlp_errors import difference, error_row, figures_of
from lrbench.kernels import get_operation, resolve
from lrbench.kernels.baselines import pytorch
from lrbench.kernels.baselines.pytorch import eager

PUBLISHED = {claim.claim.metric: claim.claim.states[:2] for claim in entries.load() if claim.id == "gated-mlp-errors"}
"""Metric -> the source's figures for N = 1024 and 2048."""


def test_difference_by_hand() -> None:
    result, expected = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    largest, average, relative = difference(result, expected)
    assert (largest, average) == (3.0, 1.0)
    assert relative == pytest.approx((10 / 21) ** 0.5)
    assert difference(result, result) == (0.0, 0.0, 0.0)
    assert difference(torch.ones(2), torch.zeros(2)) == (1.0, 1.0, pytest.approx(2**0.5))


definition = resolve(get_operation("gated_mlp").recurrent)
"""In float32 inside and rounded once, as the fused kernel does it."""


def exact(*inputs: torch.Tensor) -> torch.Tensor:
    """Return what float64 makes of the same inputs."""
    return definition(*(x.double() for x in inputs))


def test_a_row_has_the_mean_of_its_draws_which_are_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "eager", definition)
    row = error_row(32, "torch", "cpu")
    assert row.relative_mean == error_row(32, "torch", "cpu").relative_mean
    draws = [figures_of(eager, definition, 32, seed, "cpu")[2] for seed in range(row.draws)]
    assert len({*draws}) == len(draws)
    assert row.relative_mean == pytest.approx(sum(draws) / len(draws))
    assert row.relative_std > 0


def test_errors_are_those_that_the_source_prints() -> None:
    """One rounding against torch's four, at N = 1024: the figures that the source prints, the largest within half."""
    figures = dict(zip(("max_abs", "mean_abs", "relative"), figures_of(definition, eager, 1024, 0, "cpu"), strict=True))
    for name, tolerance in (("max_abs", 0.5), ("mean_abs", 0.02), ("relative", 0.02)):
        assert figures[name] == pytest.approx(PUBLISHED[name][0], rel=tolerance)


def test_what_does_not_run_here_is_said() -> None:
    with pytest.raises(ValueError, match="impl must run on a cpu device, got 'fused'"):
        error_row(64, "fused", "cpu")


@pytest.mark.gpu
def test_kernels_are_as_exact_as_rounding_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels' figures are those of the definition rounded once, and the source's."""
    # Products split along D would round their parts too, and the eager reference more than four times.
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
    for n, size in enumerate((1024, 2048)):
        for impl in ("fused", "fused_save"):
            assert error_row(size, impl, "cuda").relative_mean == pytest.approx(PUBLISHED["relative"][n], rel=0.05)
            ours = get_operation("gated_mlp").function(impl)
            for reference in (eager, exact):
                kernel, rounded = (figures_of(each, reference, size, 0, "cuda")[2] for each in (ours, definition))
                assert kernel == pytest.approx(rounded, rel=0.02)
