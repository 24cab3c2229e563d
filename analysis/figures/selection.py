"""Choose the rows that a figure shows, and describe them, and the cases that it cannot show, in words."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...results.arguments import unknown
from ...results.select import MODE_NAMES, families, is_ok, latest_rows, of_family, ok_rows, short_size
from ..derive import derive_anew, without_removed
from .style import operation_label, series_label, sizes_in_words

if TYPE_CHECKING:
    import pandas as pd

MODE_TITLES: Mapping[str, str] = {mode: name.capitalize() for mode, name in MODE_NAMES.items()}

REASON_LENGTH = 110
"""Characters of a failure's reason under a figure; the results hold all of it."""

CHOICE_COLUMNS = (
    "op", "impl", "mode", "dtype", "state_dtype", "device_accelerator", "device_name", "batch", "seq_len", "tokens",
    "head_dim_qk", "head_dim_v", "embedding_dim", "d_model", "d_ff", "chunk_size", "context", "layers",
)  # fmt: skip
"""The columns by which :func:`choose` keeps rows, beside whether they were measured."""

WHICH_COLUMNS = ("kernel", "provider", "same_math", "case_id", "measured_at", "status", "time_ms")
"""The columns that say, before those, of which family rows are, which of them is newest, and which were measured."""

DIMS = {"head_dim": "head_dim_v", "head_dim_qk": "head_dim_qk"}
WIDTHS = {"d_model": "d_model", "d_ff": "d_ff", "channels": "embedding_dim"}
"""Field of a selection -> its column."""

ALONG = ("head_dim_v", "embedding_dim")
"""Columns of sizes along the axis of figures over width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows a figure shows. What they have several values of must be chosen: :class:`Several` lists them.

    Attributes:
        kernel: the family of kernels, see :func:`...results.select.of_family`; may be left out where ``ops`` are named.
        device: the measured device's key (device_accelerator), or its name where it has none.
        dtype, state_dtype: dtype of the inputs, and of chunk states.
        tokens, batch: batch x seq_len, and batch; over sequence length one of them is held constant.
        head_dim, head_dim_qk: value and query-key head dim. An operation that was not measured there, such as attention
            at its own 128, is shown at the pair of which it has most rows.
        channels: channels; of operations with heads num_heads x head_dim_v.
        d_model, d_ff: input and output columns of a gated MLP.
        seq_len: of figures at one sequence length.
        modes: what to keep; None: all calls or, where there are none, steps of decoding and training.
        ops, impls: what to keep; None: all.
        every: whether every line is shown, rather than the :data:`.findings.MAX_LINES` that make one statement.
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
    """Rows after a selection, and the selection with the sizes that they all have.

    Attributes:
        over: the column along the figure's axis.
        known: the same rows and those of the calls' other modes.
    """

    rows: pd.DataFrame
    over: str
    known: pd.DataFrame

    @property
    def without_order(self) -> bool:
        """Whether no operation shown mixes along a sequence: their sequence length is a number of tokens."""
        return bool(self.rows["d_model"].notna().all())

    @property
    def axis(self) -> str:
        """What figures call the axis of sequence lengths."""
        return "tokens" if self.without_order else "sequence length"


class Several(ValueError):
    """Rows have several values of what a selection leaves open; the message lists them.

    Attributes:
        counts: field of the selection, and a value -> how many measured rows have it.
    """

    def __init__(self, counts: Mapping[tuple[str, str | int], int], example: Mapping[str, str | int] = {}) -> None:
        self.counts = counts
        names = dict.fromkeys(name for name, _ in counts)
        values = {name: ", ".join(map(str, sorted(value for of, value in counts if of == name))) for name in names}
        options = " or ".join(f"{_option(name)}: {values[name]}" for name in names)
        most = " ".join(f"{_option(name)} {value}" for name, value in example.items())
        said = f"results hold several values of {' and '.join(names)}: choose one with {options}"
        super().__init__(f"{said}; most rows are of {most}" if most else said)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def choose(
    frame: pd.DataFrame,
    selection: Selection,
    over: str = "seq_len",
    *,
    batches: bool = False,
    devices: bool = False,
    most: bool = False,
) -> Chosen:
    """Keep the rows that a figure shows; what is already chosen over the column stays as it is.

    Args:
        over: the column along its axis: seq_len, context (of decoding steps), chunk_size, or width, which is head_dim_v
            or, where most rows have no heads, embedding_dim; "" for none of these. The figure shows one value of each
            of them except ``over``, and every chunk size.
        batches: whether lengths may differ in their tokens, each at the largest batch; unless some are held.
        devices: whether rows of several devices are shown.
        most: whether the value of most rows is taken of what the selection leaves open, each time.

    Raises:
        Several: rows have several values of what the selection leaves open.
        ValueError: nothing is left, or a value was not measured; the message lists those that were.
    """
    if isinstance(selection, Chosen) and selection.over == over:
        return selection
    # Every step copies the rows that it keeps: only the columns that decide, numbered by their place in the frame.
    keys = frame[[*CHOICE_COLUMNS, *WHICH_COLUMNS]].reset_index(drop=True)
    candidates = functools.cache(lambda kernel: _candidates(keys, dataclasses.replace(selection, kernel=kernel), over))
    several: Several | None = None
    found: dict[str, Any] = {}
    while True:
        asked = dataclasses.replace(selection, **found)
        try:
            chosen = _narrow(candidates(asked.kernel), asked, over, batches, devices)
            break
        except Several as open_still:
            several = several or open_still
            _, (name, value) = max((count, each) for each, count in open_still.counts.items())
            found[name] = value
        except ValueError:
            if several is None or most:
                raise
            break
    if several is not None and not most:
        raise Several(several.counts, found)
    rows = known = derive_anew(frame.take(chosen.rows.index))
    if chosen.modes is not None:
        asked = dataclasses.replace(asked, modes=None)
        with contextlib.suppress(ValueError):
            known = choose(frame, asked, over, batches=batches, devices=devices, most=True).rows
    return dataclasses.replace(chosen, rows=rows, known=known)


def _candidates(keys: pd.DataFrame, selection: Selection, over: str) -> pd.DataFrame:
    """Return the newest rows of the family, modes, operations and implementations of a selection."""
    known = keys if selection.impls else without_removed(keys)
    if selection.kernel is not None:
        known = of_family(known, selection.kernel)
    elif selection.ops is None:
        named = known if selection.impls is None else known[known["impl"].isin(selection.impls)]
        check_one({("kernel", family): int((named["kernel"] == family).sum()) for family in families(named)})
    latest = latest_rows(known)
    rows = latest[[*CHOICE_COLUMNS]].assign(measured=is_ok(latest))
    rows["device"] = rows["device_accelerator"].fillna(rows["device_name"])
    if selection.modes is None and (calls := rows["mode"].isin(("fw", "fwbw", "bw"))).any():
        # Steps of decoding are of one token, and those of training of whole models.
        rows = rows[calls]
    for column, wanted in (("mode", selection.modes), ("op", selection.ops), ("impl", selection.impls)):
        if wanted is not None:
            measured, rows = rows[column][rows["measured"]], rows[rows[column].isin(wanted)]
            if wanted and not rows["measured"].any():
                raise unknown(column, wanted[0], sorted(set(measured)), " in these results")
    if over == "chunk_size":
        rows = rows[rows["chunk_size"].notna()]
    if not rows["measured"].any():
        having = "a chunk size" if over == "chunk_size" else "times"
        raise ValueError(f"results must hold rows with {having} for this figure, got none that match the selection")
    return rows


def _narrow(rows: pd.DataFrame, selection: Selection, over: str, batches: bool, devices: bool) -> Chosen:
    """Keep the candidates of one value of all that a selection holds; arguments and errors as :func:`choose`."""
    without_heads = rows["head_dim_v"][rows["measured"]].isna().mean() > 0.5
    if over == "width":
        over = ALONG[int(without_heads)]
    first = [*([] if devices else ["device"]), "dtype", "state_dtype"]
    first += [] if over in ("seq_len", "context") else ["seq_len"]
    columns = {name: name for name in (*first, "tokens", "batch")} | DIMS | WIDTHS
    for name, column in columns.items():
        if column != over and (wanted := getattr(selection, name)) is not None:
            at = _at(rows, name, column, wanted)
            rows = rows if name in DIMS else at
    rows = rows[_is_most(rows, "layers", ["op", "embedding_dim"])]
    if over != "context":
        rows = rows[rows["context"].isna() | (rows["context"] == rows["context"][rows["measured"]].max())]
    if over not in ALONG:
        # An operation that was not measured at these head dims is shown at its own.
        at_dims = _has_dims(rows, selection)
        rows = rows[at_dims | ~(at_dims & rows["measured"]).groupby(rows["op"]).transform("any")]
    for name in first:
        rows = _at(rows, name, name)
    if selection.tokens is selection.batch is None and batches:
        rows = rows[_is_most(rows, "batch", ["embedding_dim", "seq_len"])]
    elif selection.tokens is selection.batch is None:
        tokens, batch = (_counts(rows, name, name) for name in ("tokens", "batch"))
        if min(len(tokens), len(batch)) > 1:
            raise Several(tokens | batch)
        rows = _at(rows, "tokens", "tokens") if len(tokens) == 1 else _at(rows, "batch", "batch")
    if not without_heads:
        rows = _at_one_pair(rows, selection, over)
    for name, column in WIDTHS.items():
        rows = rows if column == over else _at(rows, name, column)
    rows = _at_one_pair(rows, selection, over)
    found: dict[str, Any] = {each.name: getattr(selection, each.name) for each in dataclasses.fields(Selection)}
    found |= {name: _only(rows[column]) for name, column in WIDTHS.items()}
    found |= {"seq_len": None} | {name: _only(rows[name]) for name in first}
    if selection.batch is None and (held := _only(rows["tokens"])) is not None:
        found["tokens"] = held
    elif selection.tokens is None:
        found["batch"] = _only(rows["batch"])
    found["every"] = selection.every or selection.impls is not None
    return Chosen(rows=rows, known=rows, over=over, **found)


def check_one(counts: Mapping[tuple[str, Any], int]) -> None:
    """Raise :class:`Several` where a field has more than one value; ``counts`` as its."""
    if len(counts) > 1:
        raise Several(counts)


def _counts(rows: pd.DataFrame, name: str, column: str) -> dict[tuple[str, Any], int]:
    """Return how many measured rows have each value of a column, see :class:`Several`."""
    counts = rows[column][rows["measured"]].value_counts()
    return {(name, value if isinstance(value, str) else int(value)): int(n) for value, n in counts.items()}


def _at(rows: pd.DataFrame, name: str, column: str, wanted: int | str | None = None) -> pd.DataFrame:
    """Keep the rows with the wanted value of a column, else with the only one that there is; and those without any.

    Errors as :func:`choose`.
    """
    counts = _counts(rows, name, column)
    known = sorted(value for _, value in counts)
    if wanted is None:
        check_one(counts)
        if not known:
            return rows
        (wanted,) = known
    elif not known:
        raise ValueError(f"{name} must be left out for these results, which have none, got {wanted}")
    elif wanted not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))} in these results, got {wanted}")
    return rows[rows[column].eq(wanted) | rows[column].isna()]


def _is_most(rows: pd.DataFrame, column: str, by: list[str]) -> pd.Series:
    """Return which rows have the most of what a column counts among those that agree in ``by``, or none of it."""
    return rows[column].isna() | (rows[column] == rows.groupby(by, dropna=False)[column].transform("max"))


def _has_dims(rows: pd.DataFrame, selection: Selection) -> pd.Series:
    """Return which rows have the head dims of the selection; all if it names none."""
    wanted = {column: value for name, column in DIMS.items() if (value := getattr(selection, name)) is not None}
    return rows[[*wanted]].eq([*wanted.values()]).all(axis=1)


def _at_one_pair(rows: pd.DataFrame, selection: Selection, over: str) -> pd.DataFrame:
    """Keep the rows of one pair of head dims of each operation, along widths of each width: that of most rows.

    Several where an operation has more than one pair of those that the selection leaves open.
    """
    by = ["op", over] if over in ALONG else ["op"]
    if over not in ALONG:
        asked = rows[_has_dims(rows, selection)]
        for name, column in DIMS.items():
            several = asked[asked[column].where(asked["measured"]).groupby(asked["op"]).transform("nunique") > 1]
            check_one(_counts(several, name, column))
    pairs = rows[[*dict.fromkeys((*by, *DIMS.values()))]].fillna(0)
    size = rows["measured"].groupby([pairs[name] for name in pairs]).transform("sum")
    # Of pairs with equally many rows, the one with the larger head dims.
    rank = size + (pairs["head_dim_v"] + pairs["head_dim_qk"] / 1e6) / 1e6
    return rows[rank == rank.groupby([pairs[name] for name in by]).transform("max")]


def _only(values: pd.Series) -> Any:
    """Return the one value that there is, or None."""
    found = set(values.dropna())
    value = found.pop() if len(found) == 1 else None
    return value if value is None or isinstance(value, str) else int(value)


def modes_of(rows: pd.DataFrame) -> list[str]:
    """Return the modes that ``rows`` have, in the order of the panels."""
    return [mode for mode in MODE_TITLES if mode in set(rows["mode"])]


def failure_note(failures: pd.DataFrame) -> str:
    """Return one sentence on every case that was not measured, grouped by implementation, mode, status and reason."""
    if failures.empty:
        return ""
    absent, parts = failures["status"] == "unavailable", []
    for (op, impl, status), group in failures[~absent].groupby(["op", "impl", "status"], sort=True):
        contexts = sizes_in_words(group["context"].dropna()) if "context" in group else ""
        lengths = sizes_in_words(group["seq_len"].dropna())
        where = f" at context {contexts}" if contexts else f" at T = {lengths}" if lengths else ""
        reasons = sorted({str(reason) for reason in group["reason"].dropna()})
        first = textwrap.shorten(reasons[0], REASON_LENGTH, placeholder=" ...") if reasons else ""
        why = f" ({first}{'; and others' if len(reasons) > 1 else ''})" if reasons else ""
        parts.append(f"{series_label(str(op), str(impl))} {', '.join(modes_of(group))}{where}: {status}{why}")
    if absent.any():
        parts.append(f"Not installed: {', '.join(sorted(set(failures['impl'][absent])))}")
    return f"Not shown. {'. '.join(parts)}."


def describe(chosen: Chosen, *extra: str) -> str:
    """Return the setting that a figure holds constant: device, sizes, ``extra`` if not empty."""
    return " · ".join([describe_devices(chosen), *sizes_held(chosen), *filter(None, extra)])


def describe_devices(chosen: Chosen) -> str:
    """Return what the rows were measured on, as its driver names it."""
    return " / ".join(sorted(set(ok_rows(chosen.rows)["device_name"].dropna())))


def sizes_held(chosen: Chosen) -> list[str]:
    """Return the sequence length, tokens or batch, widths, dtype, head dims, context and layers, as far as constant."""
    rows, parts = ok_rows(chosen.rows), []
    if chosen.seq_len is not None:
        parts.append(length_in_words(chosen.seq_len, tokens=chosen.without_order))
    parts += setting_in_words(chosen)
    for name, said in (("context", "context {:,}"), ("layers", "{} layers")):
        if (size := _only(rows[name])) is not None:
            parts.append(said.format(size))
    # Of an operation that mixes nothing along a sequence, tokens are its length.
    return [*dict.fromkeys(parts)]


def setting_in_words(chosen: Chosen) -> list[str]:
    """Return tokens or batch, widths, dtype and head dims that a figure holds constant."""
    rows = ok_rows(chosen.rows)
    sizes = {
        "{} tokens": chosen.tokens,
        # A gated MLP's tokens are stored as one sequence.
        "batch {}": None if chosen.without_order else chosen.batch,
        "{} channels" if rows["head_dim_v"].isna().mean() > 0.5 else "embedding dim {}": chosen.channels,
        "d_model {}": chosen.d_model,
        "d_ff {}": chosen.d_ff,
    }
    parts = [said.format(f"{size:,}") for said, size in sizes.items() if size is not None]
    parts += filter(None, [chosen.dtype])
    return parts if chosen.over in ALONG else [*parts, *_dims_in_words(rows)]


def _dims_in_words(rows: pd.DataFrame) -> Iterator[str]:
    """Yield the pairs of head dims, that of most rows first; the others with the operations that have them."""
    dims = rows[["head_dim_qk", "head_dim_v"]].fillna(0).astype(int)
    for n, (key, value) in enumerate(dims.value_counts().index):
        here = (dims["head_dim_qk"] == key) & (dims["head_dim_v"] == value)
        ops = sorted(set(map(operation_label, rows["op"][here])))
        if value:
            said = f"{key} (qk), {value} (v)" if key else f"{value}"
            yield f"{', '.join(ops)}: {said}" if n else f"head dim {said}"


def length_in_words(seq_len: int, *, tokens: bool) -> str:
    """Return a sequence length in words; ``tokens``: of operations that mix nothing along it."""
    return f"{seq_len:,} tokens" if tokens else f"T = {seq_len:,}"


def at_best_chunk(chosen: Chosen, which: str = "best") -> str:
    """Return that every implementation is shown at its best chunk size, or "" where none has any."""
    return f"{which} chunk size each" if ok_rows(chosen.rows)["chunk_size"].notna().any() else ""


def unmeasured(chosen: Chosen) -> pd.DataFrame:
    """Return failed points that no other setting (chunk size) of the same implementation stands in for."""
    keys = ["op", "impl", "mode", chosen.over or "seq_len"]
    said = dict.fromkeys((*keys, "seq_len", "context", "status", "reason"))
    failed = chosen.rows[chosen.rows["status"] != "ok"][[*said]]
    shown = chosen.rows[keys][is_ok(chosen.rows)].drop_duplicates()
    merged = failed.merge(shown, on=keys, how="left", indicator="found")
    return merged[merged["found"] == "left_only"]


def suspect_notes(rows: pd.DataFrame) -> list[str]:
    """Return what is wrong with each suspect row, which figures ring."""
    notes = []
    for row in rows[["impl", "mode", "chunk_size", "suspect"]].dropna(subset="suspect").itertuples():
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
