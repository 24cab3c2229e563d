"""Files that people and crashes damage: readers return what is there, or say in a line what is wrong with which file.

``LRBENCH_FUZZ_EXAMPLES=1000000 pytest tests/test_fuzz.py`` looks longer than CI does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrbench.analysis.accelerators import known
from lrbench.analysis.accelerators.known import VARIABLE, user_accelerators
from lrbench.analysis.check.thresholds import load_thresholds
from lrbench.results import store
from lrbench.tests import ROOT
from lrbench.tests.results.test_store import RECORD

ROWS = [
    dataclasses.replace(RECORD, case_id=f"{n:016x}", seq_len=2**n, time_ms=0.1 * (n + 1), reason="a text: ä")
    for n in range(20)
]
LINES = [json.dumps(dataclasses.asdict(row)).encode() + b"\n" for row in ROWS]
THRESHOLDS = (ROOT / "tests/data/thresholds.toml").read_text()
# One of the specified accelerators under a name of the user's.
SPECIFIED = Path(known.__file__).with_name("specified.toml").read_text(encoding="utf-8")
ACCELERATORS = "[mine]\n" + SPECIFIED.partition("[v100]\n")[2].partition("\n[")[0]
FRAGMENTS = [
    "[" * 5000, "{a=" * 5000, "9" * 400, "9" * 5000, "-1", "0", "1e400", "nan", "inf", "true", '""', '"\\u0000"', "[]",
    "{}", "[[rule]]", "=", "\n", "1979-05-27", "[1, [2]]", "é", "\x00", "#",
]  # fmt: skip
fuzz = settings(
    max_examples=int(os.environ.get("LRBENCH_FUZZ_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def read(reader: Callable[[Path], Any], path: Path) -> None:
    """Read a file; whatever is wrong is one line that names it."""
    try:
        reader(path)
    except ValueError as error:
        text = str(error)
        assert path.name in text
        assert "\n" not in text.strip().replace("\\n", "")


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a file with bytes changed, cut out, put in or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        end = at + draw(st.integers(0, 40))
        data[at:end] = draw(
            st.one_of(st.binary(max_size=40), st.sampled_from([data[end : end + 40], b"", b"\xff" * 8]))
        )
    return bytes(data[: draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))])


@st.composite
def edited(draw: st.DrawFn, content: str) -> bytes:
    """Draw a text with values and lines replaced by what people and programs put there."""
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(content)))
        end = draw(
            st.sampled_from([begin, begin + 1, *(n + 1 for n, c in enumerate(content) if c in "=,\n]}" and n > begin)])
        )
        content = content[:begin] + draw(st.sampled_from(FRAGMENTS) | st.text(max_size=10)) + content[end:]
    return content.encode(errors="replace")


@cache
def good_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.parquet"
        store.write_parquet(map(dataclasses.asdict, ROWS), path)
        return path.read_bytes()


@fuzz
@given(st.deferred(lambda: damaged(good_file())))
def test_a_damaged_parquet_file_is_read_or_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.parquet"
    path.write_bytes(content)
    read(store.read_results, path)
    read(store.planned_rows, path)


@fuzz
@given(st.lists(st.sampled_from(LINES) | st.binary(max_size=60) | damaged(LINES[3]), max_size=8))
def test_a_journal_keeps_its_whole_rows(tmp_path: Path, lines: list[bytes]) -> None:
    """Each line that was written whole, and is not glued to a damaged one before it, is a row of the file."""
    lines = [b"", *(line for line in lines if line)]
    whole = [line for before, line in pairwise(lines) if line in LINES and before[-1:] in (b"", b"\n")]
    journal = tmp_path / "sweep-dead.jsonl"
    journal.write_bytes(b"".join(lines))
    try:
        made = store.recover(tmp_path)
        if whole and not _begins_otherwise(b"".join(lines)):
            kept = [row["case_id"] for row in store.read_results(made[0]).to_pylist()]
            remaining = iter(kept)
            assert all(json.loads(line)["case_id"] in remaining for line in whole)
    finally:
        for path in tmp_path.iterdir():
            path.unlink()


def _begins_otherwise(content: bytes) -> bool:
    """Whether the first line is JSON that is no object: such a file is not a journal."""
    try:
        return not isinstance(json.loads(content.splitlines()[0]), dict)
    except (ValueError, RecursionError):
        return False


@fuzz
@given(edited(THRESHOLDS))
def test_edited_thresholds_are_read_or_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thresholds.toml"
    path.write_bytes(content)
    read(load_thresholds, path)


@fuzz
@given(edited(ACCELERATORS))
def test_edited_accelerators_are_read_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    path = tmp_path / "accelerators.toml"
    monkeypatch.setenv(VARIABLE, str(path))
    path.write_bytes(content)
    read(lambda _: user_accelerators(), path)
