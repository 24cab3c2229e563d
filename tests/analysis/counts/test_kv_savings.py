"""The key-value-cache analysis is its source's arithmetic, and the command prints it."""

from __future__ import annotations

import pytest

from lrbench.analysis.counts.kv_savings import MODELS, CacheModel, savings

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


def test_bytes_follow_the_dtype() -> None:
    plain, _ = savings(MODELS[0], 512)
    narrow, _ = savings(MODELS[0], 512, dtype="fp8")
    assert (plain.saved_bytes, plain.token_bytes) == (2 * narrow.saved_bytes, 2 * narrow.token_bytes)
    with pytest.raises(ValueError, match="dtype must be one of fp32, fp16, bf16, fp8, got 'int8'"):
        savings(MODELS[0], 8, dtype="int8")
