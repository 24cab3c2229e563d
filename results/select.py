"""Which rows: selectors, the newest row of every case, the best chunk length, and what differs between environments.

A selector is the path of a result file or of a folder with some, or terms ``KEY:VALUE`` joined by commas over the rows
of a pool of results ("Naming results" in docs/ci.md). Commands that answer at once work on rows as dicts; figures,
tables and reports on pandas frames. pandas is imported where a frame is made.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any, TypeVar

from .arguments import nearest, parse_size, unknown
from .documents import documents_in_words
from .schema import CASE_COLUMNS, NUMERIC_SIZES, OWN, RECORD_COLUMNS, SIZE_COLUMNS, Record, TritonRow
from .store import Where, read_results, result_files

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

SELECTOR_COLUMNS = {
    "run": ("run_id",),
    "commit": ("git_commit",),
    "case": ("case_id",),
    "triton": ("triton_version",),
    "device": ("device_accelerator",),
    "kernel": ("kernel", "op"),
    **{name: (name,) for name in ("op", "impl", "provider", "mode", "dtype", "state_dtype", *SIZE_COLUMNS)},
}
"""Key of a term -> columns, one of which must have its value: an operation's name does as well as a family's."""

NAMED_SIZES = ("channels", "d_model", "d_ff", "layers")
"""Sizes that a description of a case calls by their column."""

PREFIXES = ("run", "commit", "case", "triton")
LAST = chr(0x10FFFF)
"""The last of all characters."""

COMPARED_COLUMNS = (
    "device_name", "driver_version", "cuda_version", "torch_version", "triton_version", "python_version",
)  # fmt: skip
"""What of an environment two sides of a comparison should have in common."""

COMPILER_COLUMNS = ("ptxas_version", "fp_fusion")
"""The same of Triton's compiler; early rows do not say it."""

MODE_NAMES = {
    "fw": "forward", "fwbw": "forward + backward", "bw": "backward", "step": "decoding step", "train": "training step",
}  # fmt: skip
"""What tables and figures call the modes, in the order of a figure's panels."""

CLOCK_TOLERANCE = 0.02
"""Largest relative difference of the median SM clocks of two sides that goes unmentioned."""

MAX_SLOWDOWN = 1.2
"""Factor between times of the yardstick beyond which a CPU counts as slower in one measurement than in another."""

PROBLEM_COLUMNS = tuple(name for name in CASE_COLUMNS if name != "chunk_size")
"""What identifies a problem and who computes it; the chunk size is a setting to choose."""


def load_rows(
    paths: str | Path | Iterable[str | Path],
    columns: Sequence[str] = RECORD_COLUMNS,
    where: Mapping[str, Any] | None = None,
    *,
    passing: Where = (),
    newest: bool = False,
) -> list[dict[str, Any]]:
    """Load the rows of result files and folders as dicts.

    Args:
        where: column -> the value that it must have, None for null; without ``where`` all rows.
        passing, newest: which other rows need not be loaded, see :func:`.store.read_results`.

    Raises:
        ValueError: as :func:`.store.read_results`.
    """
    wanted = where or {}
    stored = [[(name, "==", value)] for name, value in wanted.items() if value is not None]
    table = read_results(paths, [*dict.fromkeys((*columns, *wanted))], [*passing, *stored], newest=newest)
    # Compared in Python: pyarrow imports pandas to compare with a Python value.
    found = {name: table[name].to_pylist() for name in table.column_names}
    rows = [n for n in range(len(table)) if all(found[name][n] == value for name, value in wanted.items())]
    return [{name: found[name][n] for name in columns} for n in rows]


def parse_terms(text: str) -> dict[str, str]:
    """Return the terms of a selector by their keys; ValueError where ``text`` is none."""
    terms: dict[str, str] = {}
    for part in text.split(","):
        key, colon, value = (piece.strip() for piece in part.partition(":"))
        if not colon or key not in SELECTOR_COLUMNS or not value:
            near = nearest(key, SELECTOR_COLUMNS) if colon and key not in SELECTOR_COLUMNS else ""
            raise ValueError(
                "a selector must be a file, a folder or KEY:VALUE terms joined by commas, KEY one of "
                f"{', '.join(SELECTOR_COLUMNS)}, got {text!r}{near and '; '}{near}"
            )
        if key in terms:
            raise ValueError(f"a selector must name {key} once, got {text!r}")
        terms[key] = value
    return terms


def is_path(text: str) -> bool:
    """Return whether a selector is meant as a path rather than as terms."""
    return bool(text) and (Path(text).exists() or "/" in text or text.endswith(".parquet"))


def select(
    text: str, pool: Sequence[str | Path], *, newest: bool = False, without: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows that a selector names.

    Args:
        text: a path, or terms over the rows of the files and folders of ``pool``. Those of sweeps over several Tritons
            are among them where the terms name a run or a Triton.
        newest: whether the newest row of every case will do: of many rows, no others are loaded.
        without: runs whose rows are left out if there are others.

    Raises:
        ValueError: no such path, a bad term, or no row; several runs or commits begin with what is given.
    """
    terms = {} if is_path(text) else parse_terms(text)
    # Only all rows show whether several runs, commits or cases begin alike.
    newest = newest and terms.keys().isdisjoint(PREFIXES)
    where = _where(terms)
    if terms.keys() & {"run", "triton"}:
        pool = result_files(pool, (Record, TritonRow))
    for others in ([[("run_id", "not in", list(without))]] if without else [], []):
        rows = load_rows(pool if terms else text, passing=[*where, *others], newest=newest)
        if rows:
            found = matching(rows, terms)
            return [row for row in found if row["run_id"] not in without] or found
    # Of many rows none was loaded: the columns of the terms say which fits none.
    matching(load_rows(pool, sorted({name for key in terms for name in SELECTOR_COLUMNS[key]})) if terms else [], terms)
    raise ValueError(f"{text} selects no row")


def _where(terms: Mapping[str, str]) -> Where:
    """Return terms as conditions on stored rows."""
    where: list[list[tuple[str, str, Any]]] = []
    for key, wanted in terms.items():
        columns = SELECTOR_COLUMNS[key]
        if key in PREFIXES:
            where += [[(columns[0], ">=", wanted)], [(columns[0], "<=", f"{wanted}{LAST}")]]
        else:
            value = parse_size(wanted) if key in NUMERIC_SIZES else wanted
            where.append([(name, "==", value) for name in columns])
    return where


def matching(rows: Sequence[dict[str, Any]], terms: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows for which every term holds.

    Raises:
        ValueError: no row is left, a size is no size, or the beginning of a run, commit or case fits several.
    """
    for key, wanted in terms.items():
        columns = SELECTOR_COLUMNS[key]
        if key in PREFIXES:
            (column,) = columns
            found = sorted({row[column] for row in rows if (row[column] or "").startswith(wanted)})
            # A commit may stand in full in some rows and abbreviated in others.
            if any(not longer.startswith(found[0]) for longer in found):
                raise ValueError(f"{key}:{wanted} must name one {key}, got {', '.join(found)}")
            kept = [row for row in rows if row[column] in found]
        else:
            value = parse_size(wanted) if key in NUMERIC_SIZES else wanted
            kept = [row for row in rows if any(row[name] == value for name in columns)]
        if not kept:
            raise ValueError(f"{key}:{wanted} selects no row; {_near(key, wanted, rows)}")
        rows = kept
    return list(rows)


def _near(key: str, wanted: str, rows: Sequence[Row]) -> str:
    """Return what a term that fits no row could have meant: near values, and those that there are."""
    columns = SELECTOR_COLUMNS[key]
    length = max(8, len(wanted)) if key in PREFIXES else None
    known = [value for name in columns for value in sorted({row[name] for row in rows if row[name] is not None})]
    names = list(dict.fromkeys(str(value)[:length] for value in known))
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    meant = nearest(wanted, names)
    elsewhere = "; runs of another folder are found with --results FOLDER" if key == "run" else ""
    return f"{meant}{meant and ' '}{' or '.join(columns)} is one of {listed or 'none'} here{elsewhere}"


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return key -> items with that key; groups and their items stay in order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def case_key(row: Row, columns: Sequence[str]) -> tuple[Any, ...]:
    """Return a row's values by which cases of two sides match.

    Where implementations need not agree, a null state_dtype is fp32: packages without a choice of it leave it null.
    """
    unnamed = {"state_dtype": "fp32"} if "impl" not in columns else {}
    return tuple(row[name] or unnamed.get(name, row[name]) for name in columns)


def newest(rows: Iterable[Row]) -> dict[str, Row]:
    """Return case id -> newest row, by ``measured_at``; of equally old rows the last."""
    chosen: dict[str, Row] = {}
    for row in rows:
        known = chosen.get(row["case_id"])
        if known is None or row["measured_at"] >= known["measured_at"]:
            chosen[row["case_id"]] = row
    return chosen


def with_slowness(*sides: Sequence[Row]) -> list[list[Row]]:
    """Return rows with ``noise`` set in those whose CPU was slower than for other rows of the same machine: where the
    yardstick took longer than :data:`MAX_SLOWDOWN` times its shortest time."""
    machine = itemgetter(*COMPARED_COLUMNS)
    fastest: dict[tuple[Any, ...], float] = {}
    for row in itertools.chain(*sides):
        if row["yardstick_ms"] is not None:
            fastest[machine(row)] = min(row["yardstick_ms"], fastest.get(machine(row), math.inf))

    def marked(row: Row) -> Row:
        if row["noise"] or row["yardstick_ms"] is None:
            return row
        ratio = row["yardstick_ms"] / fastest[machine(row)]
        return {**row, "noise": f"slow CPU: {ratio:.2f}x slower than at other times"} if ratio > MAX_SLOWDOWN else row

    return [[marked(row) for row in side] for side in sides]


def marked(records: Iterable[Record]) -> list[Record]:
    """Return records with ``noise`` set as :func:`with_slowness` sets it."""
    (rows,) = with_slowness([dataclasses.asdict(record) for record in records])
    return [Record(**row) for row in rows]


def device_of(row: Row) -> str:
    """Return what a row was measured on: the accelerator's key, or the device's name where it has none."""
    return row["device_accelerator"] or row["device_name"] or "unknown"


def short_size(value: float) -> str:
    """Return a size as people write it: 300, 512, 1k, 64k, 2M."""
    for factor, suffix in ((1024**2, "M"), (1024, "k")):
        if value >= factor and value % factor == 0:
            return f"{int(value // factor)}{suffix}"
    return f"{value:.15g}"


def describe_sizes(row: Row) -> str:
    """Return the sizes of a case, and its dtypes, in a few words."""
    dims = "/".join(str(row[name]) for name in ("head_dim_qk", "head_dim_v") if row[name] is not None)
    heads = "/".join(str(row[name]) for name in ("num_heads_qk", "num_heads") if row[name] is not None)
    parts = [
        f"B={row['batch']}" if row["batch"] is not None else "",
        f"T={short_size(row['seq_len'])}" if row["seq_len"] is not None else "",
        documents_in_words(row["documents"]) if row["documents"] is not None else "",
        f"context {short_size(row['context'])}" if row["context"] is not None else "",
        f"H={heads} dim {dims}" if row["head_dim_v"] else "",
        *(f"{name} {short_size(row[name])}" for name in NAMED_SIZES if row[name] is not None),
        f"chunk {short_size(row['chunk_size'])}" if row["chunk_size"] is not None else "",
        row["dtype"],
        f"{row['state_dtype']} states" if row["state_dtype"] not in (None, "fp32") else "",
    ]
    return " ".join(part for part in parts if part)


def describe_axes(rows: Sequence[Row]) -> str:
    """Return the values that the sizes and dtypes of cases take, in a few words."""
    shown = {
        "T": [short_size(row["seq_len"]) for row in rows if row["seq_len"] is not None],
        "dim": [f"{row['head_dim_qk'] or row['head_dim_v']}/{row['head_dim_v']}" for row in rows if row["head_dim_v"]],
        **{
            name.removesuffix("_size"): [short_size(row[name]) for row in rows if row[name] is not None]
            for name in ("context", *NAMED_SIZES, "chunk_size")
        },
        "packed": [documents_in_words(row["documents"]) for row in rows if row["documents"] is not None],
        "": [row["dtype"] for row in rows],
        "states": [row["state_dtype"] for row in rows if row["state_dtype"] not in (None, "fp32")],
    }
    listed = {name: list(dict.fromkeys(values)) for name, values in shown.items() if values}
    return "; ".join(
        f"{name} {', '.join(values) if len(values) < 3 or not name else f'{values[0]}..{values[-1]}'}".strip()
        for name, values in listed.items()
    )


def describe(row: Row) -> str:
    """Return a case in a few words."""
    return f"{row['op']} {row['impl']} {row['mode']} {describe_sizes(row)}"


def environment_differences(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """Return what differs between the environments of the two sides of matched rows, a line each.

    An outside package's version is named where both sides have rows of it, clocks where the medians are more than
    :data:`CLOCK_TOLERANCE` apart.
    """
    lines = []
    for column in ("device_accelerator", *COMPARED_COLUMNS, *COMPILER_COLUMNS):
        first, second = (_values(pair[side].get(column) for pair in pairs) for side in (0, 1))
        if first != second and not (column in COMPILER_COLUMNS and "none" in (first, second)):
            lines.append(f"{column}: {first} | {second}")
    # torch is named already, among the columns.
    same = (pair for pair in pairs if pair[0]["provider"] == pair[1]["provider"] != "torch")
    for provider, group in sorted(grouped(same, lambda pair: pair[0]["provider"]).items()):
        old, new = (_values(str(pair[side]["provider_version"]) for pair in group) for side in (0, 1))
        if old != new:
            lines.append(f"{provider} version: {old} | {new}")
    known = ([clock for pair in pairs if (clock := pair[side]["sm_clock_mhz"])] for side in (0, 1))
    old_mhz, new_mhz = (median_high(clocks) if clocks else 0.0 for clocks in known)
    if old_mhz and new_mhz and abs(new_mhz / old_mhz - 1) > CLOCK_TOLERANCE:
        lines.append(f"sm_clock_mhz (median): {old_mhz:.0f} | {new_mhz:.0f}")
    for name, what in (("throttled", "throttled rows"), ("noise", "rows measured on a busy machine")):
        marked = [sum(pair[side][name] is not None for pair in pairs) for side in (0, 1)]
        if marked[0] != marked[1]:
            lines.append(f"{what}: {marked[0]} | {marked[1]} of {len(pairs)}")
    dirty = [sum(bool(pair[side]["git_dirty"]) for pair in pairs) for side in (0, 1)]
    if any(dirty):
        lines.append(f"rows of a working tree with uncommitted changes: {dirty[0]} | {dirty[1]} of {len(pairs)}")
    return lines


def _values(values: Iterable[Any]) -> str:
    return ", ".join(sorted({"none" if value is None else str(value) for value in values}))


def load_results(paths: str | Path | Iterable[str | Path], *, samples: bool = False, own: bool = False) -> pd.DataFrame:
    """Load result files, and every parquet file under result folders, into one frame.

    Args:
        own: also rows of a user's functions, which have no sizes that figures and reports could show, and of packed
            documents, which these would show as sequences.

    Returns:
        a frame in the record's column order, with two columns more: ``tokens`` (batch x seq_len) and ``embedding_dim``
        (num_heads x head_dim_v, or channels).

    Raises:
        ValueError: as :func:`.store.read_results`; or all rows are left out.
    """
    columns = [name for name in RECORD_COLUMNS if samples or name != "time_samples_ms"]
    frame = read_results(paths, columns).to_pandas(split_blocks=True, self_destruct=True)
    shown = frame["kernel"].ne(OWN) & frame["documents"].isna()
    if len(frame) and not (own or shown.any()):
        raise ValueError("results must hold rows of operations here, got functions of yours or packed documents alone")
    return with_totals(frame if own or shown.all() else frame[shown].copy())


def records(frame: pd.DataFrame, columns: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a frame as :func:`load_rows` has them: None for null, and sizes as integers.

    Args:
        columns: None is all but the samples of the times.
    """
    columns = [name for name in RECORD_COLUMNS if name != "time_samples_ms"] if columns is None else columns
    values: dict[str, list[Any]] = {}
    for name in columns:
        values[name] = [None if value != value else value for value in frame[name].tolist()]
        if name in NUMERIC_SIZES:
            values[name] = [value and int(value) for value in values[name]]
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def with_totals(frame: pd.DataFrame) -> pd.DataFrame:
    """Add ``tokens`` and ``embedding_dim``."""
    frame["tokens"] = frame["batch"] * frame["seq_len"]
    frame["embedding_dim"] = (frame["num_heads"] * frame["head_dim_v"]).fillna(frame["channels"])
    return frame


def families(frame: pd.DataFrame) -> list[str]:
    """Return the kernel families that rows are of, the one with most measured rows first."""
    counts = ok_rows(frame)["kernel"].value_counts()
    return sorted(set(frame["kernel"].dropna()), key=lambda name: (-counts.get(name, 0), name))


def of_family(frame: pd.DataFrame, kernel: str) -> pd.DataFrame:
    """Keep the rows of a kernel family: those measured for it, and all rows of its operations.

    Outside packages' rows of other operations (attention beside Lightning) are those measured beside it.

    Raises:
        ValueError: no row is of that family; the message lists those that are there.
    """
    here = frame["kernel"] == kernel
    if not here.any():
        raise unknown("kernel", kernel, families(frame), " in these results")
    own = set(frame["op"][here & (frame["provider"] == "lrbench")])
    rows = frame[here | frame["op"].isin(own)]
    # What was other mathematics beside another family computes an operation of this one.
    return rows.assign(same_math=rows["same_math"].where(~rows["op"].isin(own), True))


def latest_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the newest row of every case on every device, by ``measured_at``; the order of rows is kept."""
    # Only the keys are put in order, not the whole frame.
    keys = frame[["case_id", "device_name", "measured_at"]].reset_index(drop=True)
    newest = keys.sort_values("measured_at", kind="stable").drop_duplicates(["case_id", "device_name"], keep="last")
    return frame.take(sorted(newest.index))


def ok_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows that were measured."""
    return frame[is_ok(frame)]


def is_ok(frame: pd.DataFrame) -> pd.Series:
    """Return which rows were measured."""
    return (frame["status"] == "ok") & frame["time_ms"].notna()


def best_rows(frame: pd.DataFrame, by: Sequence[str] = PROBLEM_COLUMNS) -> pd.DataFrame:
    """Keep one measured row per value of ``by``, the fastest.

    With the default ``by`` that is every implementation at its best chunk size for every problem. Null is a value.
    """
    positions = is_ok(frame).to_numpy().nonzero()[0]
    # Only the keys are put in order, not the whole frame: a million rows are loaded and reduced in seconds.
    order = positions[frame["time_ms"].to_numpy()[positions].argsort(kind="stable")]
    repeated = frame[[name for name in by if name in frame.columns]].take(order).duplicated(keep="first")
    return frame.take(sorted(order[~repeated.to_numpy()]))
