"""Packed documents: sequences one after the other in a batch of 1, as a problem names them.

A problem's documents are one text. "64" is 64 documents whose lengths are drawn (:func:`lengths_of`), whatever the
number of positions; "64x1024" or "300+2x50" are the lengths themselves, equal neighbours written as one run.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

from .arguments import MAX_SIZE, parse_size

SHORTEST, LONGEST = 0.1, 1.9
"""The numbers between which the shares are drawn that documents have of the positions, in multiples of the mean."""

_NUMBER, _LENGTHS = re.compile(r"[0-9]+[kKmM]?"), re.compile(r"[0-9][0-9x+kKmM]*")


def parse_documents(text: str) -> str:
    """Return the documents that a text or a file of lengths, one a line, stands for, always in the same form.

    Raises:
        ValueError: it is none of these; the message says which part or line is wrong.
    """
    if _NUMBER.fullmatch(text):
        return str(parse_size(text, "documents"))
    if _LENGTHS.fullmatch(text):
        what = f"documents {text}: a length"
        parts = [part.rpartition("x") for part in text.split("+")]
        runs = ((parse_size(n if x else "1", f"{what}'s number"), parse_size(each, what)) for n, x, each in parts)
        return _written(runs, text)
    try:
        lines = Path(text).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        forms = "a number of documents (64), lengths (64x1024, 300+700) or a file with a length a line"
        raise ValueError(f"documents must be {forms}, got {text!r}") from error
    lengths = ((1, parse_size(line, f"line {n} of {text}")) for n, line in enumerate(lines, start=1) if line.strip())
    return _written(lengths, text)


def _written(runs: Iterable[tuple[int, int]], what: str) -> str:
    """Return (how many, length) as text."""
    joined = [(sum(n for n, _ in same), each) for each, same in itertools.groupby(runs, key=itemgetter(1))]
    total = sum(n * each for n, each in joined)
    if not 1 <= total <= MAX_SIZE:
        raise ValueError(f"documents {what} must have from 1 to {MAX_SIZE} positions, got {total}")
    return "+".join(f"{n}x{each}" if n > 1 or len(joined) == 1 else str(each) for n, each in joined)


def _runs(documents: str) -> list[tuple[int, int]]:
    """Return (how many, length) of the lengths that a text says, none if they are to be drawn."""
    parts = [] if documents.isdigit() else [part.rpartition("x") for part in documents.split("+")]
    return [(int(n or 1), int(each)) for n, _, each in parts]


def positions_of(documents: str) -> int | None:
    """Return how many positions documents have together, None where their lengths are to be drawn."""
    return sum(n * each for n, each in _runs(documents)) or None


def count_documents(documents: str) -> int:
    """Return how many documents there are."""
    return sum(n for n, _ in _runs(documents)) or int(documents)


@functools.lru_cache(maxsize=64)
def lengths_of(documents: str, seq_len: int) -> tuple[int, ...]:
    """Return the lengths of documents, in their order, which add up to ``seq_len``.

    Of N documents each has one position, and of the others a share in proportion to a number that is drawn uniformly
    from 0.1 to 1.9: by Python's Mersenne Twister, from a seed that names N and ``seq_len``, so everyone draws the same.

    Raises:
        ValueError: there are more documents than positions, or their lengths add up to another number.
    """
    if (given := positions_of(documents)) not in (None, seq_len):
        raise ValueError(f"seq_len must be the sum of the documents' lengths, {given}, got {seq_len}")
    if given:
        return tuple(each for n, each in _runs(documents) for _ in range(n))
    count = int(documents)
    if count > seq_len:
        raise ValueError(f"documents must be at most as many as the positions, {seq_len}, got {count}")
    draw = random.Random(f"{count} documents of {seq_len} positions").random
    sums = [*itertools.accumulate(SHORTEST + (LONGEST - SHORTEST) * draw() for _ in range(count))]
    ends = [n + int((seq_len - count) * (each / sums[-1])) for n, each in enumerate(sums, start=1)]
    return tuple(end - start for start, end in itertools.pairwise([0, *ends]))


def documents_in_words(documents: str) -> str:
    """Return documents in a few words: 64 documents, 64 documents of 1024, 17 documents of given lengths."""
    count, lengths = count_documents(documents), {each for _, each in _runs(documents)}
    how = f" of {lengths.pop()}" if len(lengths) == 1 else " of given lengths" if lengths else ""
    return f"{count} document{'' if count == 1 else 's'}{how}"
