"""Which rows a comparison is about: selectors, the newest row of every case, and what differs between environments.

A side of a comparison is written as

* the path of a result file or of a folder with some, or
* terms ``KEY:VALUE`` joined by commas, all of which hold, over the rows of a pool of results: ``run:c0d954a9``,
  ``commit:4a4cb51``, ``impl:tfla,op:mlstm_exp``, ``provider:mlstm_kernels,seq_len:8k``.

A run, a commit or a case is named by how it begins. Rows are plain dicts, not frames: the commands answer at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .arguments import parse_size
from .frames import read_table
from .schema import SIZE_COLUMNS

Row = Mapping[str, Any]

CASE_COLUMNS = ("op", "impl", "mode", "dtype", "state_dtype", *SIZE_COLUMNS)
"""What a case_id is made of."""

SELECTOR_COLUMNS = {
    "run": "run_id",
    "commit": "git_commit",
    "case": "case_id",
    "device": "device_accelerator",
    **{name: name for name in ("kernel", "op", "impl", "provider", "mode", "dtype", "state_dtype", *SIZE_COLUMNS)},
}
"""Key of a term -> column."""

PREFIXES = ("run", "commit", "case")

ENVIRONMENT_COLUMNS = (
    "device_name",
    "driver_version",
    "cuda_version",
    "torch_version",
    "triton_version",
    "python_version",
)

CLOCK_TOLERANCE = 0.02
"""Relative difference of the median SM clocks of two sides from which on it is named."""

ROW_COLUMNS = (
    "run_id",
    "case_id",
    "measured_at",
    "kernel",
    "provider",
    "provider_version",
    *CASE_COLUMNS,
    "status",
    "reason",
    "time_ms",
    "time_ci_low_ms",
    "time_ci_high_ms",
    "time_samples_ms",
    "peak_memory_bytes",
    "rel_error",
    "checked",
    "suspect",
    "flops",
    "tensor_flops",
    "bytes",
    "device_kind",
    "device_accelerator",
    *ENVIRONMENT_COLUMNS,
    "sm_clock_mhz",
    "throttled",
    "lrbench_version",
    "git_commit",
    "git_dirty",
)
"""The columns that comparisons and the check read."""


def load_rows(paths: str | Path | Iterable[str | Path]) -> list[dict[str, Any]]:
    """Load the rows of result files and folders, as dicts of :data:`ROW_COLUMNS`.

    Raises:
        ValueError: no such path, no parquet file in it, a truncated or foreign file, or another schema version.
    """
    return read_table(paths, ROW_COLUMNS).to_pylist()


def parse_terms(text: str) -> dict[str, str]:
    """Return the terms of a selector by their keys; ValueError where ``text`` is none."""
    terms: dict[str, str] = {}
    for part in text.split(","):
        key, colon, value = (piece.strip() for piece in part.partition(":"))
        if not colon or key not in SELECTOR_COLUMNS or not value:
            raise ValueError(
                "a selector must be a file, a folder or KEY:VALUE terms joined by commas, KEY one of "
                f"{', '.join(SELECTOR_COLUMNS)}, got {text!r}"
            )
        if key in terms:
            raise ValueError(f"a selector must name {key} once, got {text!r}")
        terms[key] = value
    return terms


def is_path(text: str) -> bool:
    """Return whether a selector is meant as a path rather than as terms."""
    return bool(text) and (Path(text).exists() or "/" in text or text.endswith(".parquet"))


def select(text: str, pool: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Return the rows that a selector names.

    Args:
        text: a path, or terms over the rows of ``pool``.
        pool: result files and folders.

    Raises:
        ValueError: no such path, a bad term, or no row; several runs or commits begin with what is given.
    """
    if is_path(text):
        return load_rows(text)
    terms = parse_terms(text)
    return matching(load_rows(pool), terms)


def matching(rows: Sequence[dict[str, Any]], terms: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows for which every term holds.

    Raises:
        ValueError: no row is left, a size is no size, or the beginning of a run, commit or case fits several.
    """
    for key, wanted in terms.items():
        column = SELECTOR_COLUMNS[key]
        if key in PREFIXES:
            found = sorted({row[column] for row in rows if (row[column] or "").startswith(wanted)})
            # A commit may stand in full in some rows and abbreviated in others.
            if any(not longer.startswith(found[0]) for longer in found):
                raise ValueError(f"{key}:{wanted} must name one {key}, got {', '.join(found)}")
            kept = [row for row in rows if row[column] in found]
        else:
            value = parse_size(wanted) if column in SIZE_COLUMNS else wanted
            kept = [row for row in rows if row[column] == value]
        if not kept:
            known = sorted({row[column] for row in rows if row[column] is not None})
            listed = ", ".join(map(str, known[:12])) + (", ..." if len(known) > 12 else "")
            raise ValueError(f"{key}:{wanted} selects no row; {column} is one of {listed or 'none'} here")
        rows = kept
    return list(rows)


def newest(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the newest row of every case by its id, by ``measured_at``; of equally old ones the last."""
    chosen: dict[str, Row] = {}
    for row in rows:
        known = chosen.get(row["case_id"])
        if known is None or row["measured_at"] >= known["measured_at"]:
            chosen[row["case_id"]] = row
    return chosen


def device_of(row: Row) -> str:
    """Return what a row was measured on: the accelerator's key, or the device's name where it has none."""
    return row["device_accelerator"] or row["device_name"] or "unknown"


def short_size(value: int) -> str:
    """Return 8192 as 8k and 300 as 300."""
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value)


def describe_sizes(row: Row) -> str:
    """Return the sizes of a case, and its dtypes, in a few words."""
    parts = [
        f"B={row['batch']}" if row["batch"] is not None else "",
        f"T={short_size(row['seq_len'])}" if row["seq_len"] is not None else "",
        f"H={row['num_heads']} dim {row['head_dim_qk']}/{row['head_dim_v']}" if row["head_dim_v"] else "",
        *(f"{name} {short_size(row[name])}" for name in ("channels", "d_model", "d_ff") if row[name] is not None),
        f"chunk {short_size(row['chunk_size'])}" if row["chunk_size"] is not None else "",
        row["dtype"],
        f"{row['state_dtype']} states" if row["state_dtype"] not in (None, "fp32") else "",
    ]
    return " ".join(part for part in parts if part)


def describe(row: Row) -> str:
    """Return a case in a few words."""
    return f"{row['op']} {row['impl']} {row['mode']} {describe_sizes(row)}"


def environment_differences(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """Return what differs between the environments of the two sides of matched rows, a line each.

    An outside package's version is named where both sides have rows of it, clocks where the medians are more than
    :data:`CLOCK_TOLERANCE` apart.
    """
    lines = []
    for column in ("device_accelerator", *ENVIRONMENT_COLUMNS):
        first, second = (_values(pair[side][column] for pair in pairs) for side in (0, 1))
        if first != second:
            lines.append(f"{column}: {first} | {second}")
    lines += _provider_differences(pairs)
    clocks = [_median([pair[side]["sm_clock_mhz"] for pair in pairs]) for side in (0, 1)]
    if clocks[0] and clocks[1] and abs(clocks[1] / clocks[0] - 1) > CLOCK_TOLERANCE:
        lines.append(f"sm_clock_mhz (median): {clocks[0]:.0f} | {clocks[1]:.0f}")
    throttled = [sum(pair[side]["throttled"] is not None for pair in pairs) for side in (0, 1)]
    if throttled[0] != throttled[1]:
        lines.append(f"throttled rows: {throttled[0]} | {throttled[1]} of {len(pairs)}")
    dirty = [sum(bool(pair[side]["git_dirty"]) for pair in pairs) for side in (0, 1)]
    if any(dirty):
        lines.append(f"rows of a working tree with uncommitted changes: {dirty[0]} | {dirty[1]} of {len(pairs)}")
    return lines


def _provider_differences(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    versions: dict[str, tuple[set[str], set[str]]] = {}
    for first, second in pairs:
        # torch is named already, among the columns.
        if first["provider"] == second["provider"] != "torch":
            known = versions.setdefault(first["provider"], (set(), set()))
            known[0].add(str(first["provider_version"]))
            known[1].add(str(second["provider_version"]))
    return [
        f"{provider} version: {_values(old)} | {_values(new)}"
        for provider, (old, new) in sorted(versions.items())
        if old != new
    ]


def _values(values: Iterable[Any]) -> str:
    return ", ".join(sorted({"none" if value is None else str(value) for value in values}))


def _median(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None
