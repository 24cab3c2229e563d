"""Sizes and lists of the command line: what is taken, and what is refused by name."""

from __future__ import annotations

import pytest

from lrbench.analysis.arguments import MAX_SIZE, check_size, parse_names, parse_size, parse_sizes


def test_sizes() -> None:
    assert [parse_size(text) for text in ("8k", " 1M", "300")] == [8192, 2**20, 300]
    assert parse_sizes("1k,8k,300") == (1024, 8192, 300)
    assert check_size(MAX_SIZE, "batch") == parse_size(str(MAX_SIZE)) == MAX_SIZE


@pytest.mark.parametrize("text", ["", "k", "0", "1.5k", "-2", "8kb", "\u0663"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="seq_len must be a positive integer such as 512 or 8k, got '"):
        parse_size(text, "seq_len")


def test_what_is_out_of_range() -> None:
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"batch must be a positive integer, got {value}"):
            check_size(value, "batch")
    with pytest.raises(ValueError, match="batch must be at most 2147483647, got 1000"):
        check_size(10**400, "batch")
    with pytest.raises(ValueError, match="seq_len must be at most 2147483647, got '1000"):
        parse_size("1" + "0" * 5000 + "m", "seq_len")


def test_lists() -> None:
    assert parse_names("a, b,") == ("a", "b")
    for text in ("", " , "):
        with pytest.raises(ValueError, match=f"op must have at least one name, got '{text}'"):
            parse_names(text, "op")
