"""What follows from a row: counted work, rates, the share of the roof, what makes it suspect, the model's time.

A row stores these columns as they were counted when it was measured, or when :func:`derive_file` last ran. Figures,
tables and reports derive them anew for the rows that they show, and keep what is stored where the operation or the
accelerator is not known here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels import FAMILIES, get_operation
from ..results.lock import LOCK_FILE, hold
from ..results.schema import CASE_COLUMNS, SIZE_COLUMNS
from ..results.select import Row, device_of, grouped, load_results, newest, records
from ..results.store import replace_columns
from .accelerators.known import Accelerator, get_accelerator, known_accelerators
from .counts import Count, count_case
from .model.runtime_model import model_time_ms, roofline_fraction, suspect_reason

if TYPE_CHECKING:
    import pandas as pd

DERIVED_COLUMNS = (
    "flops", "tensor_flops", "bytes", "intensity", "causal_factor", "tflops", "gbps", "roofline_fraction", "suspect",
    "model_time_ms",
)  # fmt: skip

DERIVED = "derived"
"""Column of frames whose columns are derived today: pandas would copy an attribute whenever it takes rows."""

ONCE_SINCE = "2026-11-21T15:00"
"""Since then rows count the output's gradient once in the memory of a forward and backward call; older ones, twice."""


def without_removed(frame: pd.DataFrame) -> pd.DataFrame:
    """Leave out the rows of our implementations that the code no longer has: only comparisons and histories use them.

    Rows of operations that are not known here are kept.
    """
    pairs = frame[["op", "impl", "provider"]].drop_duplicates()
    ours = {(op, impl) for op, impl, provider in pairs.itertuples(index=False) if provider == "lrbench"}
    kept = {(op, each.name) for ops in FAMILIES.values() for op in ops for each in get_operation(op).implementations}
    gone = {(op, impl) for op, impl in ours - kept if any(op in ops for ops in FAMILIES.values())}
    there = zip(frame["op"].tolist(), frame["impl"].tolist(), strict=True)
    return frame[[pair not in gone for pair in there]] if gone else frame


def derive(
    accelerator: Accelerator | None, device: Accelerator | None, count: Count | None, dtype: str, time_ms: float | None
) -> dict[str, Any]:
    """Return the derived columns that are known of a case.

    The roofline is never that of ``--gpu``: rates are held against the device that was measured.

    Args:
        accelerator: what ``--gpu`` named, for the model's time.
        device: the measured device.
        count: the case's work; None where it is not counted.
        dtype: of the case's inputs.
        time_ms: the measured time.
    """
    if count is None:
        return {}
    columns: dict[str, Any] = {
        "flops": float(count.flops),
        "tensor_flops": float(count.tensor_flops),
        "bytes": float(count.bytes),
        "intensity": count.intensity,
        "causal_factor": count.causal_factor,
    }
    if accelerator is not None and accelerator.peak_flops(dtype) is not None:
        columns["model_time_ms"] = model_time_ms(count, accelerator, dtype)
    if time_ms is None:
        return columns
    columns["tflops"] = count.flops / (time_ms * 1e9)
    columns["gbps"] = count.bytes / (time_ms * 1e6)
    if device is not None:
        columns["roofline_fraction"] = roofline_fraction(count, device, dtype, time_ms)
        columns["suspect"] = suspect_reason(count, device, dtype, time_ms)
    return columns


def derive_anew(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the derived columns that they have, as they are counted today; once is enough.

    Only the machine that measured a CPU knows its roof, so what depends on that roof stays as stored.
    """
    if DERIVED in frame.columns:
        return frame
    named = {*frame["accelerator"].dropna(), *frame["device_accelerator"].dropna()} & {*known_accelerators()} - {"cpu"}
    known = {key: get_accelerator(key) for key in named}
    derived = {name: frame[name].tolist() for name in DERIVED_COLUMNS if name in frame.columns}
    for n, row in enumerate(records(frame, (*CASE_COLUMNS, "time_ms", "accelerator", "device_accelerator"))):
        target, device = known.get(row["accelerator"]), known.get(row["device_accelerator"])
        count = _count(*(row[name] for name in CASE_COLUMNS))
        columns = derive(target, device, count, row["dtype"], row["time_ms"])
        for name in derived.keys() & columns.keys():
            derived[name][n] = columns[name]
    return frame.assign(**derived, **{DERIVED: True})


def derived_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the newest row of every case on every device, with the derived columns as they are counted today."""
    import pandas as pd

    latest = [row for group in grouped(rows, device_of).values() for row in newest(group).values()]
    today = records(derive_anew(pd.DataFrame(latest)), DERIVED_COLUMNS)
    return [{**row, **derived} for row, derived in zip(latest, today, strict=True)]


def derive_file(path: Path) -> int:
    """Bring the derived columns that a result file stores up to date, and return in how many rows one was not.

    Raises:
        ValueError: the file is no result, or another lrbench is at work in its folder.
    """
    with hold(path.parent / LOCK_FILE, f"the folder {path.parent}"):
        stored = load_results(path, own=True)
        today = derive_anew(stored)[[*DERIVED_COLUMNS]]
        # Null equals null here.
        if changed := len(today.compare(stored[[*DERIVED_COLUMNS]])):
            replace_columns(path, {name: today[name].tolist() for name in DERIVED_COLUMNS})
    return changed


def gradient_twice(frame: pd.DataFrame) -> pd.Series:
    """Return which rows' memory, inputs included, holds the output's gradient twice, as that of older rows does."""
    return (frame["mode"] == "fwbw") & (frame["measured_at"].fillna(ONCE_SINCE) < ONCE_SINCE)


@functools.cache
def _count(op: str, impl: str, mode: str, dtype: str, state_dtype: str | None, *sizes: int | None) -> Count | None:
    """Return the work of a case; None for an operation, an implementation or sizes that cannot be counted here."""
    known = {name: size for name, size in zip(SIZE_COLUMNS, sizes, strict=True) if size is not None}
    try:
        return count_case(op, impl, mode, dtype, state_dtype, known, launches=False)
    except ValueError:
        return None
