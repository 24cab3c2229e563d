"""Which rows of the results a figure shows, what it says of them, and what it says of the cases that it cannot show."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .figure_style import OPERATION_LABELS, binary, series_label
from .frames import failed_rows, latest_rows, ok_rows, single

if TYPE_CHECKING:
    import pandas as pd

MODE_TITLES: Mapping[str, str] = MappingProxyType(
    {"fw": "Forward", "fwbw": "Forward + backward", "bw": "Backward", "step": "Decoding step"}
)

REASON_LENGTH = 110
"""Characters of a failure's reason under a figure; the results hold all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows a figure shows; None leaves the choice to the figure, which says in its subtitle what it took.

    Attributes:
        device: the measured device's key (device_accelerator) or name; needed where results hold several.
        dtype: dtype of the inputs; None: the one with most rows.
        state_dtype: dtype of chunk states; None: fp32.
        tokens: batch x seq_len; None: the number with most rows.
        head_dim: value head dim of the family's own operations; None: the one with most rows. A baseline without a row
            at it (FlashAttention at its own 128) is shown at what it has.
        seq_len: of figures at one sequence length; None: 8192, the TFLA paper's, where every mode has it, else the
            longest that every mode has.
        modes, ops, impls: what to keep; None: all.
    """

    device: str | None = None
    dtype: str | None = None
    state_dtype: str | None = None
    tokens: int | None = None
    head_dim: int | None = None
    seq_len: int | None = None
    modes: tuple[str, ...] | None = None
    ops: tuple[str, ...] | None = None
    impls: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Rows after a selection, and what was chosen."""

    rows: pd.DataFrame
    dtype: str
    tokens: int | None
    head_dim: int | None
    seq_len: int | None


def choose(frame: pd.DataFrame, selection: Selection, *, head_dim: bool = True, seq_len: bool = False) -> Chosen:
    """Keep the rows that a figure shows.

    Args:
        head_dim: whether the figure shows one head dim.
        seq_len: whether it shows one sequence length.

    Raises:
        ValueError: nothing is left, or rows of several devices are and none is chosen.
    """
    rows = latest_rows(frame)
    by_key = selection.device is not None and selection.device in set(rows["device_accelerator"].dropna())
    rows = single(rows, "device_accelerator" if by_key else "device_name", selection.device, option="device")
    for column, wanted in (("mode", selection.modes), ("op", selection.ops), ("impl", selection.impls)):
        if wanted is not None:
            rows = rows[rows[column].isin(wanted)]
    measured = ok_rows(rows)
    if measured.empty:
        raise ValueError("results must hold measured rows for this figure, got none that match the selection")
    dtype = selection.dtype or _most_frequent(measured["dtype"])
    rows = rows[rows["dtype"] == dtype]
    rows = rows[rows["state_dtype"].isna() | (rows["state_dtype"] == (selection.state_dtype or "fp32"))]
    tokens = selection.tokens or _most_frequent(ok_rows(rows)["tokens"])
    if tokens is not None:
        rows = rows[rows["tokens"] == tokens]
    chosen_dim = selection.head_dim
    if head_dim:
        tunable = ok_rows(rows)
        tunable = tunable[tunable["chunk_size"].notna()]
        chosen_dim = chosen_dim or _most_frequent(tunable["head_dim_v"])
        if chosen_dim is not None:
            rows = rows[_at_head_dim(rows, chosen_dim)]
    length = selection.seq_len
    if seq_len:
        length = length or _common_length(ok_rows(rows))
        rows = rows[rows["seq_len"] == length]
    if ok_rows(rows).empty:
        raise ValueError("results must hold measured rows for this figure, got none that match the selection")
    return Chosen(rows=rows, dtype=dtype, tokens=_int(tokens), head_dim=_int(chosen_dim), seq_len=_int(length))


def _at_head_dim(rows: pd.DataFrame, head_dim: int) -> pd.Series:
    """Return a mask: rows at ``head_dim``, and all rows of implementations that have none there."""
    at = rows["head_dim_v"] == head_dim
    has = at.groupby([rows["op"], rows["impl"]]).transform("any")
    return at | ~has


def _most_frequent(values: pd.Series) -> Any:
    """Return the most frequent value, the largest of equally frequent ones; None without values."""
    counts = values.dropna().value_counts()
    return None if counts.empty else max(counts[counts == counts.max()].index)


PAPER_SEQ_LEN = 8192


def _common_length(rows: pd.DataFrame) -> int:
    """Return the sequence length to show where one is shown, see :class:`Selection`."""
    sets = [set(group["seq_len"]) for _, group in rows.groupby("mode")]
    common = set.intersection(*sets) or set.union(*sets)
    return PAPER_SEQ_LEN if PAPER_SEQ_LEN in common else int(max(common))


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def failure_note(failures: pd.DataFrame) -> str:
    """Return one sentence on every case that was not measured, grouped by implementation, mode, status and reason."""
    if failures.empty:
        return ""
    absent = failures[failures["status"] == "unavailable"]
    parts = []
    rest = failures[failures["status"] != "unavailable"]
    keys = ["op", "impl", "status"]
    for (op, impl, status), group in rest.groupby(keys, sort=True):
        modes = [mode for mode in MODE_TITLES if mode in set(group["mode"])]
        lengths = sorted({int(value) for value in group["seq_len"].dropna()})
        where = f" at T = {_sizes(lengths)}" if lengths else ""
        reasons = sorted({str(reason) for reason in group["reason"].dropna()})
        first = textwrap.shorten(reasons[0], REASON_LENGTH, placeholder=" ...") if reasons else ""
        why = f" ({first}{'; and others' if len(reasons) > 1 else ''})" if reasons else ""
        parts.append(f"{series_label(str(op), str(impl))} {', '.join(modes)}{where}: {status}{why}")
    if not absent.empty:
        parts.append(f"Not installed: {', '.join(sorted(set(absent['impl'])))}")
    return f"Not shown. {'. '.join(parts)}."


def _sizes(values: Sequence[int]) -> str:
    if len(values) > 3:
        return f"{binary(values[0])} to {binary(values[-1])}"
    return ", ".join(binary(value) for value in values)


def describe(chosen: Chosen, *extra: str) -> str:
    """Return the setting that a figure holds constant: device, dtype, tokens, head dims."""
    rows = ok_rows(chosen.rows)
    device = " / ".join(sorted(set(rows["device_name"].dropna())))
    parts = [device, chosen.dtype]
    if chosen.seq_len is not None:
        parts.append(f"T = {chosen.seq_len:,}")
    if chosen.tokens is not None:
        parts.append(f"{chosen.tokens:,} tokens")
    widths = {int(value) for value in rows["embedding_dim"].dropna()}
    if len(widths) == 1:
        parts.append(f"embedding dim {widths.pop():,}")
    if chosen.head_dim is not None:
        at = rows[(rows["head_dim_v"] == chosen.head_dim) & rows["chunk_size"].notna()]
        dims = sorted({int(value) for value in at["head_dim_qk"].dropna()})
        keys = "/".join(str(dim) for dim in dims)
        parts.append(f"head dim {keys} (qk), {chosen.head_dim} (v)" if keys else f"head dim {chosen.head_dim}")
    return " · ".join([*parts, *extra])


def unmeasured(chosen: Chosen, x: str) -> pd.DataFrame:
    """Return failed rows of points that no other setting (chunk size) of the same implementation stands in for."""
    failed = failed_rows(chosen.rows)
    keys = ["op", "impl", "mode", x]
    shown = ok_rows(chosen.rows)[keys].drop_duplicates()
    merged = failed.merge(shown, on=keys, how="left", indicator="found")
    return merged[merged["found"] == "left_only"]


def other_head_dims(chosen: Chosen) -> str:
    """Return one sentence on the operations that stand in a figure at another value head dim than its own, or ""."""
    if chosen.head_dim is None:
        return ""
    rows = ok_rows(chosen.rows)
    rows = rows[rows["head_dim_v"].notna() & (rows["head_dim_v"] != chosen.head_dim)]
    at = [
        f"{', '.join(sorted({OPERATION_LABELS.get(op, op) for op in group['op']}))} at {int(dim)}"
        for dim, group in rows.groupby("head_dim_v", sort=True)
    ]
    return f"Shown at the value head dim they were measured at: {'; '.join(at)}." if at else ""
