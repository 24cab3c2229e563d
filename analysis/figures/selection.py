"""Which rows of the results a figure shows, what it says of them, and what it says of the cases that it cannot show."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...kernels.baselines import get_implementation
from ...results.arguments import unknown
from ...results.select import MODE_NAMES, failed_rows, is_ok, latest_rows, of_family, ok_rows, short_size
from ..derive import derive_anew, without_removed
from .findings import OURS
from .style import operation_label, series_label, sizes_in_words

if TYPE_CHECKING:
    import pandas as pd

MODE_TITLES: Mapping[str, str] = {mode: name.capitalize() for mode, name in MODE_NAMES.items()}

REASON_LENGTH = 110
"""Characters of a failure's reason under a figure; the results hold all of it."""

CHOICE_COLUMNS = (
    "op", "impl", "provider", "mode", "dtype", "state_dtype", "device_accelerator", "device_name", "batch", "seq_len",
    "tokens", "head_dim_qk", "head_dim_v", "embedding_dim", "d_model", "d_ff", "chunk_size",
    "context", "layers",
)  # fmt: skip
"""The columns by which :func:`choose` keeps rows, beside whether they were measured."""

WIDTHS: Mapping[str, str] = {"d_model": "d_model", "d_ff": "d_ff", "channels": "embedding_dim"}
"""Field of a selection -> the column of a width that a figure holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows a figure shows; None leaves the choice to the figure, which says in its subtitle what it took.

    Attributes:
        kernel: the family of kernels, see :func:`...results.select.of_family`; None: all, in one figure.
        device: the measured device's key (device_accelerator) or name; needed where results hold several.
        dtype: dtype of the inputs; None: the one with most rows.
        state_dtype: dtype of chunk states; None: fp32.
        tokens, batch: batch x seq_len, and batch; with neither, one of them is held constant, at the value at which
            lines over sequence length have most points.
        head_dim: value head dim of the family's own operations; None: the one with most points. An operation that was
            not measured there (attention at its own 128) is shown at what it has; with None so is one whose peers were
            not. Of each operation one pair of head dims, query-key and value, is shown: the one at which ours and a
            peer share most problems, else the one with most points.
        head_dim_qk: query-key head dim, of operations that have one; None: as above.
        channels: channels, of operations with heads num_heads x head_dim_v; None: the number with most rows.
        d_model, d_ff: input and output columns of a gated MLP; None: those with most rows.
        seq_len: of figures at one sequence length; None: 8192, the TFLA paper's, where our own rows have it in every
            mode, else the longest that they have in every mode. Over chunk size that of most points on lines.
        modes, ops, impls: what to keep; None: all.
        every: whether every line is shown, rather than the :data:`MAX_LINES` that make one statement.
    """

    kernel: str | None = None
    device: str | None = None
    dtype: str | None = None
    state_dtype: str | None = None
    tokens: int | None = None
    batch: int | None = None
    head_dim: int | None = None
    head_dim_qk: int | None = None
    channels: int | None = None
    d_model: int | None = None
    d_ff: int | None = None
    seq_len: int | None = None
    modes: tuple[str, ...] | None = None
    ops: tuple[str, ...] | None = None
    impls: tuple[str, ...] | None = None
    every: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen(Selection):
    """Rows after a selection, and the selection with what was chosen: None where nothing was, or no row has it.

    Attributes:
        over: the column along the figure's axis, see :func:`choose`.
        dims: operation -> its head dims, query-key and value, where a figure shows one pair of each.
        other_dims: operation and implementation of what was measured at other head dims alone.
    """

    rows: pd.DataFrame
    over: str
    dtype: str
    dims: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    other_dims: tuple[tuple[str, str], ...] = ()

    @property
    def without_order(self) -> bool:
        """Whether no operation shown mixes along a sequence: their sequence length is a number of tokens."""
        return bool(self.rows["d_model"].notna().all())

    @property
    def axis(self) -> str:
        """What figures call the axis of sequence lengths."""
        return "tokens" if self.without_order else "sequence length"


def choose(frame: pd.DataFrame, selection: Selection, over: str = "seq_len", *, batches: bool = False) -> Chosen:
    """Keep the rows that a figure shows.

    Args:
        over: the column along its axis: seq_len, context (of decoding steps), chunk_size, head_dim_v or embedding_dim;
            "" for none of these. The figure shows one value of each of them except ``over``, and every chunk size.
        batches: whether lengths may differ in their tokens, each at the largest batch; unless some are held.

    Raises:
        ValueError: nothing is left, or rows of several devices are and none is chosen.
    """
    known = frame if selection.impls else without_removed(frame)
    latest = latest_rows(known if selection.kernel is None else of_family(known, selection.kernel))
    # Every step below copies the rows that it keeps: only the columns that decide, numbered by their place in latest.
    rows = latest[[*CHOICE_COLUMNS]].assign(measured=is_ok(latest)).reset_index(drop=True)
    rows = _on_device(rows, selection.device)
    # Raises where nothing was measured at it; which rows are shown is decided below.
    _with(rows, "head_dim_v", selection.head_dim, option="head_dim")
    if selection.modes is None and (calls := rows["mode"].isin(("fw", "fwbw", "bw"))).any():
        # Steps of decoding are of one token, and those of training of whole models.
        rows = rows[calls]
    for column, wanted in (("mode", selection.modes), ("op", selection.ops), ("impl", selection.impls)):
        if wanted is not None:
            known, rows = rows[column][rows["measured"]], rows[rows[column].isin(wanted)]
            if wanted and not rows["measured"].any():
                raise unknown(column, wanted[0], sorted(set(known)), " in these results")
    if not rows["measured"].any():
        raise ValueError("results must hold measured rows for this figure, got none that match the selection")
    dtype = selection.dtype or _most_frequent(rows["dtype"][rows["measured"]])
    rows = _with(rows, "dtype", dtype)
    rows = _with(rows, "state_dtype", selection.state_dtype, or_null=True)
    rows = rows[rows["state_dtype"].isna() | (rows["state_dtype"] == (selection.state_dtype or "fp32"))]
    if rows["layers"].notna().any():
        deepest = rows.groupby(["op", "embedding_dim"], dropna=False)["layers"].transform("max")
        rows = rows[rows["layers"].isna() | (rows["layers"] == deepest)]
    held = {"tokens": selection.tokens, "batch": selection.batch}
    if batches and not any(held.values()):
        rows = rows[rows["batch"] == rows.groupby(["embedding_dim", "seq_len"], dropna=False)["batch"].transform("max")]
    elif not any(held.values()):
        held |= _held(rows[rows["measured"]])
    for name, value in held.items():
        rows = _with(rows, name, value)
    if over != "context":
        rows = rows[rows["context"].isna() | (rows["context"] == rows["context"][rows["measured"]].max())]
    rows = _with(rows, "head_dim_qk", selection.head_dim_qk, or_null=True)
    for name, column in WIDTHS.items():
        if column != over:
            rows = _at_width(rows, column, getattr(selection, name), option=name, head_dim=selection.head_dim)
    length, one_length = selection.seq_len, over not in ("seq_len", "context")
    if one_length:
        rows = _with(rows, "seq_len", length)
    before = _measured_lines(rows)
    chosen_dim, along = selection.head_dim, (over,) if over in ("head_dim_v", "embedding_dim") else ()
    if not along:
        tunable = rows["measured"] & rows["chunk_size"].notna()
        chosen_dim = chosen_dim or _most_frequent(_points(rows[tunable], chunks=one_length)["head_dim_v"])
        if chosen_dim is not None:
            rows = rows[_at_head_dim(rows, chosen_dim, compared=selection.head_dim is None)]
            if not (rows["measured"] & (rows["head_dim_v"] == chosen_dim)).any():
                chosen_dim = None
    dims = _most_shared_dims(_points(rows[rows["measured"]], chunks=one_length), ("op", *along))
    if isinstance(selection, Chosen) and not along:
        dims |= {(op,): pair for op, pair in selection.dims.items()}
    rows = rows[_at_dims(rows, ("op", *along), dims)]
    other_dims = tuple(sorted(before - _measured_lines(rows)))
    if over == "chunk_size":
        rows = rows[rows["chunk_size"].notna()]
        if not rows["measured"].any():
            raise ValueError("results must hold measured rows with a chunk size for this figure, got none")
    if one_length:
        measured = rows[rows["measured"]]
        length = length or (over == "chunk_size" and _length_of_most_points(measured)) or _common_length(measured)
        rows = rows[rows["seq_len"] == length]
    if not rows["measured"].any():
        raise ValueError("results must hold measured rows for this figure, got none that match the selection")
    widths = {name: _only(rows[column]) for name, column in WIDTHS.items()}
    given = {each.name: getattr(selection, each.name) for each in dataclasses.fields(Selection)}
    found = {"every": selection.every or selection.impls is not None, "dtype": dtype, "over": over, **held, **widths}
    found |= {"head_dim": _int(chosen_dim), "seq_len": _int(length), "other_dims": other_dims}
    found["dims"] = {} if along else {key[0]: pair for key, pair in dims.items()}
    return Chosen(rows=derive_anew(latest.take(rows.index)), **(given | found))


def _on_device(rows: pd.DataFrame, wanted: str | None) -> pd.DataFrame:
    """Keep the rows of the device with this key or name; where none is wanted there must be one device only.

    ValueError lists the devices.
    """
    by_key = wanted is not None and wanted in set(rows["device_accelerator"])
    column = "device_accelerator" if by_key else "device_name"
    known = set(rows[column].dropna())
    listed = ", ".join(sorted(known)) or "none"
    if wanted is None and len(known) > 1:
        raise ValueError(f"device must be chosen where results hold several: {listed}")
    if wanted is not None and wanted not in known:
        raise ValueError(f"device must be one of {listed} in these results, got {wanted!r}")
    return rows if wanted is None else rows[rows[column] == wanted]


def _held(measured: pd.DataFrame) -> dict[str, int]:
    """Return whether tokens or batch is held over sequence length, and where lines have most points."""
    points = []
    for name in ("tokens", "batch"):
        line = ["op", "impl", "mode", "head_dim_qk", "head_dim_v", "embedding_dim", "d_model", name]
        at = measured[[*line, "seq_len"]].drop_duplicates()
        drawn = at.groupby(line, dropna=False)["seq_len"].transform("size") > 1
        points += [(on.sum(), on.size, name == "tokens", int(value)) for value, on in drawn.groupby(at[name])]
    *_, tokens, value = max(points)
    return {"tokens" if tokens else "batch": value}


def _at_width(
    rows: pd.DataFrame, column: str, wanted: int | None, *, option: str, head_dim: int | None
) -> pd.DataFrame:
    """Keep the rows at one width, the one with most rows unless one is ``wanted``, and those that have no such width.

    Where rows have ``head_dim``, the width is one of theirs. Errors as :func:`_with`.
    """
    if wanted is None:
        at_dim = rows["measured"] & (rows["head_dim_v"] == head_dim) & rows["chunk_size"].notna()
        wanted = _most_frequent(rows[column][at_dim if at_dim.any() else rows["measured"]])
    return _with(rows, column, wanted, or_null=True, option=option)


def _with(
    rows: pd.DataFrame, column: str, wanted: int | str | None, *, or_null: bool = False, option: str = ""
) -> pd.DataFrame:
    """Keep the rows with the wanted value, and with ``or_null`` those without a value; all where none is wanted.

    ValueError lists the values that were measured where the wanted one was not.
    """
    if wanted is None:
        return rows
    known, option = sorted({type(wanted)(value) for value in rows[column][rows["measured"]].dropna()}), option or column
    if not known:
        raise ValueError(f"{option} must be left out for these results, which have none, got {wanted}")
    if wanted not in known:
        raise ValueError(f"{option} must be one of {', '.join(map(str, known))} in these results, got {wanted}")
    return rows[rows[column].eq(wanted) | (rows[column].isna() & or_null)]


def _only(values: pd.Series) -> int | None:
    """Return the one value that there is, or None."""
    found = set(values.dropna())
    return int(found.pop()) if len(found) == 1 else None


def _at_head_dim(rows: pd.DataFrame, head_dim: int, *, compared: bool) -> pd.Series:
    """Return a mask: rows at ``head_dim``, and all rows of operations that were not measured there.

    Args:
        compared: whether, of an operation with measured peers, only the peers' rows tell if it was measured there.
    """
    at, measured = rows["head_dim_v"] == head_dim, rows["measured"]
    if compared:
        peers = measured & (rows["provider"] != OURS)
        measured &= peers | ~peers.groupby(rows["op"]).transform("any")
    return at | ~(at & measured).groupby(rows["op"]).transform("any")


Dims = dict[tuple[Any, ...], tuple[float, float]]
"""Operation, with the width along the axis where there is one -> its query-key and value head dim, 0 for none."""


def _points(rows: pd.DataFrame, *, chunks: bool) -> pd.DataFrame:
    """Keep one row of each point of a figure; with ``chunks`` every chunk size is a point, else they are one."""
    point = ["op", "impl", "mode", "seq_len", "embedding_dim", "head_dim_qk", "head_dim_v"]
    return rows.drop_duplicates([*point, "chunk_size"] if chunks else point)


def _most_shared_dims(measured: pd.DataFrame, by: Sequence[str]) -> Dims:
    """Return the head dims of most points of a problem that ours and a peer were measured on, else of most points."""
    dims, where = ["head_dim_qk", "head_dim_v"], [*dict.fromkeys((*by, "head_dim_qk", "head_dim_v"))]
    problem = [*dict.fromkeys((*where, "mode", "seq_len", "tokens", "embedding_dim"))]
    measured = measured[problem].fillna(0).assign(ours=measured["provider"] == OURS)
    ours = measured.groupby(problem)["ours"]
    measured["shared"] = ours.transform("any") & ~ours.transform("all")
    found: dict[tuple[Any, ...], list[Any]] = {}
    for key, group in measured.groupby(where):
        at = dict(zip(where, key, strict=True))
        pair = tuple(float(at[name]) for name in dims)
        found.setdefault(tuple(at[name] for name in by), []).append((int(group["shared"].sum()), len(group), pair))
    return {key: max(pairs)[-1] for key, pairs in found.items()}


def _at_dims(rows: pd.DataFrame, by: Sequence[str], dims: Dims) -> list[bool]:
    """Return which rows have the head dims that are shown of their operation."""
    keys = zip(*(rows[name].fillna(0) for name in by), strict=True)
    pairs = zip(rows["head_dim_qk"].fillna(0), rows["head_dim_v"].fillna(0), strict=True)
    return [dims.get(key, pair) == pair for key, pair in zip(keys, pairs, strict=True)]


def _measured_lines(rows: pd.DataFrame) -> set[tuple[str, str]]:
    """Return the operations and implementations with a measured row."""
    measured = rows[rows["measured"]]
    return set(zip(measured["op"], measured["impl"], strict=True))


def choose_over_width(frame: pd.DataFrame, selection: Selection) -> Chosen:
    """Keep the rows of a figure over value head dim at one embedding dim, or over channels, if that was measured alone.

    Implementations measured at one width only are left out; ValueError where no other is left, or see :func:`choose`.
    """
    for column in ("head_dim_v", "embedding_dim"):
        chosen = choose(frame, selection, column)
        rows = chosen.rows
        several = rows[rows.groupby(["op", "impl"])[column].transform("nunique") > 1]
        ours = ok_rows(several)
        if column == "embedding_dim":
            ours = ours[ours["channels"].notna()]
        if not ours.empty:
            return dataclasses.replace(chosen, rows=several, head_dim=None)
    measured = ok_rows(rows)
    lacking = "results must hold more than one head dim, or number of channels, of an implementation for this figure"
    if measured["embedding_dim"].isna().all():
        names = sorted({operation_label(op) for op in measured["op"]})
        raise ValueError(f"{lacking}, got {', '.join(names)}, which has neither")
    raise ValueError(f"{lacking}, got one")


def _most_frequent(values: pd.Series) -> Any:
    """Return the most frequent value, the largest of equally frequent ones; None without values."""
    modes = values.mode()
    return None if modes.empty else modes.max()


PAPER_SEQ_LEN = 8192


def _common_length(rows: pd.DataFrame) -> int:
    """Return the sequence length to show where one is shown, see :class:`Selection`."""
    own = rows[rows["provider"] == OURS]
    sets = [set(group["seq_len"]) for _, group in (rows if own.empty else own).groupby("mode")]
    common = set.intersection(*sets) or set.union(*sets)
    return PAPER_SEQ_LEN if PAPER_SEQ_LEN in common else int(max(common))


def _length_of_most_points(rows: pd.DataFrame) -> int | None:
    """Return at which sequence length lines over chunk size have most points, None where there are no lines."""
    points = rows[["op", "impl", "mode", "seq_len", "chunk_size"]].drop_duplicates()
    on_line = points.groupby(["op", "impl", "mode", "seq_len"])["chunk_size"].transform("size") > 1
    most = set(points["seq_len"][on_line].mode())
    return PAPER_SEQ_LEN if PAPER_SEQ_LEN in most else max(map(int, most), default=None)


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def modes_of(rows: pd.DataFrame) -> list[str]:
    """Return the modes that ``rows`` have, in the order of the panels."""
    return [mode for mode in MODE_TITLES if mode in set(rows["mode"])]


def failure_note(failures: pd.DataFrame) -> str:
    """Return one sentence on every case that was not measured, grouped by implementation, mode, status and reason."""
    if failures.empty:
        return ""
    absent = failures[failures["status"] == "unavailable"]
    parts = []
    rest = failures[failures["status"] != "unavailable"]
    keys = ["op", "impl", "status"]
    for (op, impl, status), group in rest.groupby(keys, sort=True):
        contexts = sizes_in_words(group["context"].dropna()) if "context" in group else ""
        lengths = sizes_in_words(group["seq_len"].dropna())
        where = f" at context {contexts}" if contexts else f" at T = {lengths}" if lengths else ""
        reasons = sorted({str(reason) for reason in group["reason"].dropna()})
        first = textwrap.shorten(reasons[0], REASON_LENGTH, placeholder=" ...") if reasons else ""
        why = f" ({first}{'; and others' if len(reasons) > 1 else ''})" if reasons else ""
        parts.append(f"{series_label(str(op), str(impl))} {', '.join(modes_of(group))}{where}: {status}{why}")
    if not absent.empty:
        parts.append(f"Not installed: {', '.join(sorted(set(absent['impl'])))}")
    return f"Not shown. {'. '.join(parts)}."


def describe(chosen: Chosen, *extra: str) -> str:
    """Return the setting that a figure holds constant: device, dtype, tokens, widths, ``extra`` if not empty."""
    rows = ok_rows(chosen.rows)
    device = " / ".join(sorted(set(rows["device_name"].dropna())))
    parts = [device, chosen.dtype]
    if chosen.seq_len is not None:
        parts.append(length_in_words(chosen.seq_len, tokens=chosen.without_order))
    parts += held_in_words(chosen)
    parts += widths_in_words(chosen)
    parts += dims_in_words(chosen)
    if (context := _only(rows["context"])) is not None:
        parts.append(f"context {context:,}")
    if (layers := _only(rows["layers"])) is not None:
        parts.append(f"{layers} layers")
    return " · ".join([*parts, *filter(None, extra)])


def dims_in_words(chosen: Chosen) -> list[str]:
    """Return the head dims that a figure holds constant, the query-key head dim of each operation where they differ."""
    if chosen.head_dim is None:
        return []
    rows = ok_rows(chosen.rows)
    rows = rows[(rows["head_dim_v"] == chosen.head_dim) & rows["head_dim_qk"].notna()]
    by_dim = {int(dim): sorted(set(map(operation_label, group["op"]))) for dim, group in rows.groupby("head_dim_qk")}
    if not by_dim:
        return [f"head dim {chosen.head_dim}"]
    most = int(_most_frequent(rows["head_dim_qk"]))
    others = "".join(f"; {', '.join(ops)}: {dim}" for dim, ops in by_dim.items() if dim != most)
    return [f"head dim {most} (qk{others}), {chosen.head_dim} (v)"]


def length_in_words(seq_len: int, *, tokens: bool) -> str:
    """Return a sequence length in words; ``tokens``: of operations that mix nothing along it."""
    return f"{seq_len:,} tokens" if tokens else f"T = {seq_len:,}"


def held_in_words(chosen: Chosen) -> list[str]:
    """Return the tokens or the batch that a figure holds constant; a gated MLP has neither."""
    parts = [f"{chosen.tokens:,} tokens"] if chosen.tokens is not None else []
    return parts + ([f"batch {chosen.batch:,}"] if chosen.batch is not None and not chosen.without_order else [])


def widths_in_words(chosen: Chosen) -> list[str]:
    """Return the widths that a figure holds constant: channels or embedding dim, columns of a gated MLP."""
    parts = []
    if chosen.channels is not None:
        parts.append(f"{chosen.channels:,} channels" if _has_channels(chosen) else f"embedding dim {chosen.channels:,}")
    for name, width in (("d_model", chosen.d_model), ("d_ff", chosen.d_ff)):
        parts += [] if width is None else [f"{name} {width:,}"]
    return parts


def _has_channels(chosen: Chosen) -> bool:
    """Whether what is shown has channels; beside operations at a head dim, embedding dim is the word for both."""
    return chosen.head_dim is None and bool(ok_rows(chosen.rows)["channels"].notna().any())


def at_best_chunk(chosen: Chosen, which: str = "best") -> str:
    """Return that every implementation is shown at its best chunk size, or "" where none has any."""
    return f"{which} chunk size each" if ok_rows(chosen.rows)["chunk_size"].notna().any() else ""


def without_lone_chunks(chosen: Chosen) -> tuple[Chosen, pd.DataFrame]:
    """Leave out points at which one chunk size was measured, of lines that have two points with several.

    Returns:
        what is left, and the rows for which one chunk size was measured.
    """
    rows = ok_rows(chosen.rows)
    rows = rows[rows["chunk_size"].notna()]
    line, x = ["op", "impl", "mode"], chosen.over
    count = rows.groupby([*line, x])["chunk_size"].transform("nunique")
    lone = rows[count == 1]
    several = rows[x].where(count > 1).groupby([rows[name] for name in line]).transform("nunique")
    elsewhere = lone[several[lone.index] > 1]
    return dataclasses.replace(chosen, rows=chosen.rows.drop(index=elsewhere.index)), lone


def lone_chunks(lone: pd.DataFrame, shown: pd.DataFrame, x: str) -> str:
    """Return a sentence on the points of lines for which one chunk size was measured: left out, or the one there is."""
    out, alone = [], []
    for (op, impl), rows in lone.groupby(["op", "impl"]):
        name, there = series_label(str(op), str(impl)), shown[(shown["op"] == op) & (shown["impl"] == impl)]
        left = rows[~rows.index.isin(there.index)]
        if len(there) and len(left):
            out.append(f"{name} at {sizes_in_words(left[x])}")
        elif len(there) and _takes_several(str(op), str(impl)):
            alone.append(name if set(there[x]) == set(rows[x]) else f"{name} at {sizes_in_words(rows[x])}")
    said = f"Left out, since one chunk size was measured: {', '.join(out)}. " if out else ""
    return said + (f"At the one chunk size that was measured: {', '.join(alone)}." if alone else "")


def _takes_several(op: str, impl: str) -> bool:
    """Return whether an implementation has a choice of chunk sizes; an unknown one may have."""
    try:
        declared = get_implementation(op, impl)
    except ValueError:
        return True
    return declared.chunked and len(getattr(declared, "chunk_sizes", ())) != 1


def unmeasured(chosen: Chosen) -> pd.DataFrame:
    """Return failed points that no other setting (chunk size) of the same implementation stands in for."""
    keys = ["op", "impl", "mode", chosen.over or "seq_len"]
    said = dict.fromkeys((*keys, "seq_len", "context", "status", "reason"))
    failed = failed_rows(chosen.rows)[[*said]]
    shown = chosen.rows[keys][is_ok(chosen.rows)].drop_duplicates()
    merged = failed.merge(shown, on=keys, how="left", indicator="found")
    return merged[merged["found"] == "left_only"]


def other_head_dims(chosen: Chosen) -> str:
    """Return what is shown at another value head dim than the figure's, and what is left out for its own; or ""."""
    rows = ok_rows(chosen.rows)
    ops = set(rows["op"])
    out = ", ".join(series_label(op, impl) for op, impl in chosen.other_dims if op in ops)
    left = f"Left out, measured at other head dims: {out}." if out else ""
    if chosen.head_dim is None and not (_has_channels(chosen) and chosen.channels):
        return left
    rows = rows[rows["head_dim_v"].notna() & (rows["head_dim_v"] != chosen.head_dim)]
    at = [
        f"{', '.join(sorted({operation_label(op) for op in group['op']}))} at {int(dim)}"
        for dim, group in rows.groupby("head_dim_v", sort=True)
    ]
    shown = f"Shown at the value head dim they were measured at: {'; '.join(at)}." if at else ""
    return " ".join(filter(None, [shown, left]))


def suspect_notes(rows: pd.DataFrame) -> list[str]:
    """Return what is wrong with each suspect row, which figures ring."""
    notes = []
    for row in rows[rows["suspect"].notna()].itertuples():
        chunk = "" if row.chunk_size != row.chunk_size else f" L = {short_size(row.chunk_size)}"
        notes.append(f"Ringed, suspect: {row.impl} {row.mode}{chunk}: {row.suspect}.")
    return notes


def busy_note(rows: pd.DataFrame) -> str:
    """Return what hollow points are, and how many of those in ``rows``; or ""."""
    noisy = int(rows["noise"].notna().sum())
    return f"Hollow: measured on a busy machine, {noisy} of {len(rows)} points." if noisy else ""


def lowered_runs(rows: pd.DataFrame) -> int:
    """Return how many runs measured the rows, where that are several and most clocks were lowered; else 0."""
    runs = rows["run_id"].nunique()
    return int(runs) if runs > 1 and 2 * rows["throttled"].notna().sum() > len(rows) else 0
