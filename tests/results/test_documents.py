"""Packed documents: lengths that are drawn, written on the command line or read from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrbench.results.arguments import MAX_SIZE
from lrbench.results.documents import (
    count_documents,
    documents_in_words,
    lengths_of,
    parse_documents,
    positions_of,
)


@pytest.mark.parametrize(("count", "seq_len"), [(1, 1), (1, 700), (5, 5), (64, 65536), (2048, 65536), (9999, 10000)])
def test_drawn_lengths_add_up_and_are_the_same_for_everyone(count: int, seq_len: int) -> None:
    lengths = lengths_of(str(count), seq_len)
    assert (len(lengths), sum(lengths), min(lengths) >= 1) == (count, seq_len, True)
    lengths_of.cache_clear()
    assert lengths_of(str(count), seq_len) == lengths


def test_how_lengths_are_distributed() -> None:
    assert lengths_of("4", 100) == (13, 26, 30, 31)
    assert lengths_of("64", 65536)[:4] == (1627, 1622, 634, 1576)
    assert lengths_of("64", 65536)[:4] != lengths_of("64", 65537)[:4]
    shares = sorted(length / 1000 for length in lengths_of("10000", 10**7))
    for quantile in (0.1, 0.5, 0.9):
        assert shares[int(10000 * quantile)] == pytest.approx(0.1 + 1.8 * quantile, abs=0.05)
    assert 0.1 < shares[0] < 0.11
    assert 1.89 < shares[-1] < 1.95


@pytest.mark.parametrize(
    ("given", "written", "lengths", "words"),
    [
        ("2k", "2048", None, "2048 documents"),
        ("1", "1", None, "1 document"),
        ("3x1k", "3x1024", (1024, 1024, 1024), "3 documents of 1024"),
        ("1x300", "1x300", (300,), "1 document of 300"),
        ("300+50+1x50+2x1", "300+2x50+2x1", (300, 50, 50, 1, 1), "5 documents of given lengths"),
    ],
)
def test_forms(given: str, written: str, lengths: tuple[int, ...] | None, words: str) -> None:
    assert parse_documents(given) == parse_documents(written) == written
    assert positions_of(written) == (lengths and sum(lengths))
    assert documents_in_words(written) == words
    if lengths:
        assert lengths_of(written, sum(lengths)) == lengths
        assert count_documents(written) == len(lengths)


def test_a_file_of_lengths(tmp_path: Path) -> None:
    file = tmp_path / "64-lengths.txt"
    file.write_text("300\n50\n50\n\n1k\n")
    assert parse_documents(str(file)) == "300+2x50+1024"
    for content, message in (
        ("300\nmany\n", f"line 2 of {file} must be a positive integer such as 512 or 8k, got 'many'"),
        ("0\n", f"line 1 of {file} must be a positive integer"),
        ("\n", f"documents {file} must have from 1 to {MAX_SIZE} positions, got 0"),
        (f"{MAX_SIZE}\n1\n", f"documents {file} must have from 1 to {MAX_SIZE} positions, got {MAX_SIZE + 1}"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError) as error:
            parse_documents(str(file))
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="documents must be a number of documents"):
        parse_documents(str(file))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "documents must be a number of documents .64., lengths .64x1024, 300.700. or a file .*, got ''"),
        ("0", "documents must be a positive integer"),
        ("missing.txt", "or a file with a length a line, got 'missing.txt'"),
        ("300++4", r"documents 300\+\+4: a length must be a positive integer"),
        ("0x4", "documents 0x4: a length's number must be a positive integer"),
        ("3x", "documents 3x: a length must be a positive integer"),
        ("99999999x99", f"documents 99999999x99 must have from 1 to {MAX_SIZE} positions"),
    ],
)
def test_what_is_refused(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_documents(given)


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"documents must be at most as many as the positions, 63, got 64"):
        lengths_of("64", 63)
    with pytest.raises(ValueError, match=r"seq_len must be the sum of the documents' lengths, 1000, got 999"):
        lengths_of("300+700", 999)
