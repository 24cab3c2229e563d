"""What is written on the command line: sizes (8k), lists (a,b), names, and files to write."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection, Iterable
from pathlib import Path

MAX_SIZE = 2**31 - 1
"""The largest size taken: kernels hold sizes in 32 bits, and products of two fit a column of the results."""

_SIZE = re.compile(r"([0-9]+)([kKmM]?)")
_MULTIPLIER = {"": 1, "k": 1024, "m": 1024**2}


def parse_size(text: str, what: str = "a size") -> int:
    """Return "8k" as 8192, "1m" as 2^20, "300" as 300; ``what`` is the option's name, for the message.

    Raises:
        ValueError: not an integer from 1 to :data:`MAX_SIZE` with an optional k or m.
    """
    match = _SIZE.fullmatch(text.strip())
    digits = match[1].lstrip("0") if match else ""
    if match is None or not digits:
        meant = ""
        with contextlib.suppress(ValueError, OverflowError):
            if (number := float(re.sub(r",(?=\d{3}\b)", "", text))) == int(number) > 0:
                thousands = f"{number / 1000:g}k ({1.024 * number:.0f}) or " if number % 1000 == 0 else ""
                meant = f"; did you mean {thousands}{int(number)}?"
        raise ValueError(f"{what} must be a positive integer such as 512 or 8k, got {text!r}{meant}")
    value = int(digits) * _MULTIPLIER[match[2].lower()] if len(digits) <= len(str(MAX_SIZE)) else MAX_SIZE + 1
    if value > MAX_SIZE:
        raise ValueError(f"{what} must be at most {MAX_SIZE}, got {text!r}")
    return value


def parse_sizes(text: str, what: str = "a size") -> tuple[int, ...]:
    """Return a comma-separated list of sizes, "1k,8k" as (1024, 8192)."""
    return tuple(parse_size(part, what) for part in text.split(","))


def parse_shard(text: str) -> tuple[int, int]:
    """Return "2/8" as (2, 8); ValueError where it is no part of a whole."""
    part, _, parts = text.partition("/")
    with contextlib.suppress(ValueError):
        if 1 <= int(part) <= int(parts):
            return int(part), int(parts)
    raise ValueError(f"--shard must be I/N with I from 1 to N, such as 2/8, got {text!r}")


def parse_names(text: str, what: str = "a list of names") -> tuple[str, ...]:
    """Return "a, b" as ("a", "b"); ValueError where there is no name."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError(f"{what} must have at least one name, got {text!r}")
    return names


LISTED = 120
"""Longest list of known names that an error shows beside those that are near."""


OTHER_NAMES = {
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "float64": "fp64",
    "double": "fp64", "forward": "fw", "backward": "bw", "decode": "step", "training": "train",
}  # fmt: skip
"""What other programs call the dtypes and modes."""


def nearest(given: str, known: Iterable[str]) -> str:
    """Return "did you mean a or b?" of names that mean the same or are written almost alike, or nothing."""
    names, other = dict.fromkeys(map(str, known)), OTHER_NAMES.get(given.lower())
    near = [other] if other in names else difflib.get_close_matches(given.lower(), names, n=3)
    return f"did you mean {' or '.join(near)}?" if near else ""


def unknown(what: str, given: str, known: Iterable[str], where: str = "", *, also: Iterable[str] = ()) -> ValueError:
    """Return the error for a name that is not known.

    Args:
        known: names, of which the message lists all, or where these are many and some are near, the near ones.
        where: what follows the list, such as " for kernel tfla".
        also: names that may have been meant as well.
    """
    names = list(known)
    meant, listed = nearest(given, (*names, *also)), ", ".join(names) or "none"
    if meant and len(listed) > LISTED:
        listed = f"{len(names)} names"
    return ValueError(f"{what} must be one of {listed}{where}, got {given!r}{meant and '; '}{meant}")


def one_of(what: str, given: str, known: Collection[str], where: str = "") -> None:
    """Raise what :func:`unknown` returns unless a name is known."""
    if given not in known:
        raise unknown(what, given, known, where)


def check_file(output: Path, what: str) -> None:
    """Check that the file an option names can be written, and leave it as it is; ValueError where it cannot."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        new = not (output.exists() or output.is_symlink())
        output.open("a").close()
        if new:
            output.unlink()
    except OSError as error:
        raise not_written(output, what, error) from error


def not_written(output: Path, what: str, error: OSError) -> ValueError:
    """Return the error that says which file cannot be written and why."""
    return ValueError(f"{what} must be a file that can be written, got {output}: {error.strerror}")
