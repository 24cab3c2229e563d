"""The key-value-cache analysis is its source's arithmetic, and the command prints it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lrbench.analysis.counts.kv_savings import MODELS, CacheModel, savings
from lrbench.tests.command_line import Run

SMALL = CacheModel(name="small", d_model=2, d_ff=6, layers=3, kv_heads=2, head_dim=4)


def test_sums_of_footnote_3() -> None:
    """4 S D + 3 S U + S D against 4 S D + S U + S D, and 3 S D + 2 S U + S D against 3 S D + S U + S D."""
    plain, in_place = savings(SMALL, 10, dtype="bf16")
    assert (plain.activation_bytes, plain.fused_bytes) == (2 * 10 * (5 * 2 + 3 * 6), 2 * 10 * (5 * 2 + 6))
    assert (in_place.activation_bytes, in_place.fused_bytes) == (2 * 10 * (4 * 2 + 2 * 6), 2 * 10 * (4 * 2 + 6))
    for saving, spared in ((plain, 2), (in_place, 1)):
        assert saving.saved_bytes == saving.activation_bytes - saving.fused_bytes == spared * 2 * 10 * 6
        assert saving.token_bytes == 2 * 3 * 2 * 4 * 2
        assert saving.extra_tokens == saving.saved_bytes // saving.token_bytes


def test_a_cache_in_another_dtype() -> None:
    plain, _ = savings(MODELS[0], 512)
    cached = savings(MODELS[0], 512, kv_dtype="fp8")[0]
    assert (cached.saved_bytes, 2 * cached.token_bytes) == (plain.saved_bytes, plain.token_bytes)


@pytest.mark.parametrize(
    ("change", "kwargs", "match"),
    [
        ({"layers": 0}, {}, "layers must be at least 1, got 0"),
        ({}, {"tokens": 0}, "tokens must be at least 1, got 0"),
        ({}, {"dtype": "int8"}, "dtype must be one of fp32, fp16, bf16, fp8, got 'int8'"),
        ({}, {"kv_dtype": "x"}, "kv_dtype must be one of fp32, fp16, bf16, fp8, got 'x'"),
    ],
)
def test_bad_input(change: dict[str, int], kwargs: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        savings(replace(SMALL, **change), **{"tokens": 8, **kwargs})  # type: ignore[arg-type]


def test_command_prints_every_model_or_the_one_that_is_given(run: Run) -> None:
    assert len(run.json("kv-savings --tokens 256,512")) == 2 * 2 * len(MODELS)
    own = "--d-model 2 --d-ff 6 --layers 3 --kv-heads 2 --head-dim 4 --tokens 10"
    plain, _ = run.json(f"kv-savings {own}")
    assert plain["saved_bytes"] == savings(SMALL, 10)[0].saved_bytes
