"""Sizes and lists of the command line: what is taken, and what is refused by name."""

from __future__ import annotations

import pytest

from lrbench.results.arguments import MAX_SIZE, one_of, parse_names, parse_shard, parse_size, parse_sizes, unknown


def test_parse_size() -> None:
    sizes = {"1k": 1024, "64K": 65536, "300": 300, "2m": 2 * 1024**2, " 8k ": 8192, "0512": 512}
    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5k", "k", "1kb", "1e3", "8 k", "\u0666\u0664"])
def test_parse_size_rejects(text: str) -> None:
    with pytest.raises(ValueError, match="--seq-len must be a positive integer such as 512 or 8k, got"):
        parse_size(text, "--seq-len")


def test_parse_sizes_have_an_upper_bound() -> None:
    assert parse_sizes("1k,8k,2147483647") == (1024, 8192, MAX_SIZE)
    for text in ("9" * 23, "2147483648", "2048m", "9" * 5000):
        with pytest.raises(ValueError, match="--seq-len must be at most 2147483647, got '"):
            parse_size(text, "--seq-len")


def test_parse_shard() -> None:
    assert parse_shard("2/8") == (2, 8)
    for text in ("0/8", "9/8", "2", "2/", "a/b", "-1/8", "1/2/3", "9" * 5000 + "/1"):
        with pytest.raises(ValueError, match="--shard must be I/N with I from 1 to N, such as 2/8, got"):
            parse_shard(text)


def test_names_are_separated_by_commas() -> None:
    assert parse_names("a, b,") == ("a", "b")
    for text in ("", " , "):
        with pytest.raises(ValueError, match=f"op must have at least one name, got '{text}'"):
            parse_names(text, "op")


def test_an_unknown_name_is_told_the_near_ones_and_the_known_ones_where_they_are_few() -> None:
    few, many = ("local", "ray"), [f"implementation_{n}" for n in range(20)]
    assert str(unknown("executor", "slurm", few)) == "executor must be one of local, ray, got 'slurm'"
    assert str(unknown("executor", "Rey", few)) == "executor must be one of local, ray, got 'Rey'; did you mean ray?"
    assert str(unknown("op", "x", few, " here", also=("xy",))).endswith("ray here, got 'x'; did you mean xy?")
    assert str(unknown("impl", "implementation_03", many)).startswith(
        "impl must be one of 20 names, got 'implementation_03'; did you mean implementation_3 or "
    )
    assert ", ".join(many) in str(unknown("impl", "nothing alike", many))
    one_of("executor", "ray", few)
    with pytest.raises(ValueError, match="got 'raz'; did you mean ray"):
        one_of("executor", "raz", few)
