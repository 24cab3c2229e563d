"""The key-value-cache analysis is its source's arithmetic, and the command prints it."""

from __future__ import annotations

import pytest

from lrbench.analysis.counts.kv_savings import MODELS, CacheModel, savings

SMALL = CacheModel(name="small", d_model=2, d_ff=6, layers=3, kv_heads=2, head_dim=4)


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("fp8", 1)])
def test_sums_of_footnote_3(dtype: str, width: int) -> None:
    """Of 4 S D + 3 S U + S D two S U are saved, of 3 S D + 2 S U + S D one; a token has 2 layers kv_heads head_dim."""
    plain, in_place = savings(SMALL, 1000, dtype=dtype)
    assert plain.saved_share == 2 * 6 / (5 * 2 + 3 * 6)
    assert in_place.saved_share == 6 / (4 * 2 + 2 * 6)
    saved = [spared * 1000 * 6 * width // (2 * 3 * 2 * 4 * width) for spared in (2, 1)]
    assert [plain.extra_tokens, in_place.extra_tokens] == saved


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be one of fp32, fp16, bf16, fp8, got 'int8'"):
        savings(MODELS[0], 8, dtype="int8")
