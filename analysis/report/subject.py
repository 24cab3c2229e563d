"""What a report is about: the rows, the device that they were measured on, and the setting that its figures hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...results.schema import NUMERIC_SIZES, SIZE_COLUMNS
from ...results.select import (
    PROBLEM_COLUMNS,
    best_rows,
    describe_sizes,
    families,
    is_ok,
    latest_rows,
    load_results,
    of_family,
    ok_rows,
)
from ...results.store import committed_results, read_results
from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_stored_roofs
from ..derive import derive_anew, without_removed
from ..figures.selection import Chosen, Selection, choose, length_in_words, modes_of, setting_in_words
from ..figures.style import series_label, sizes_in_words
from .markup import Cell

if TYPE_CHECKING:
    import pandas as pd

SEQ_LEN = 8192
"""Sequence length of figures and tables at a single one, where it was measured: that of the TFLA paper."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """The rows of a report; equal to itself alone.

    Attributes:
        family: the family of kernels that it is of; "" for a subject of several.
        accelerator: what the report is about (``--gpu``), with its newest calibration.
        results: where the rows are from, as the user named it.
        loaded: all rows, of every device, the older ones of cases measured more than once included.
        device: key of the measured device, or its name where it has none.
    """

    family: str
    accelerator: Accelerator
    results: tuple[str, ...]
    loaded: pd.DataFrame
    device: str

    @functools.cached_property
    def everything(self) -> pd.DataFrame:
        """The newest row of every case on every device."""
        return latest_rows(self.loaded).reset_index(drop=True)

    @functools.cached_property
    def rows(self) -> pd.DataFrame:
        """Those of ``everything`` that were measured on ``device``."""
        return self.everything[_devices(self.everything) == self.device]

    @functools.cached_property
    def trusted(self) -> pd.DataFrame:
        """The measured rows of ``rows`` that are not suspect, of implementations that are still there."""
        measured = without_removed(ok_rows(self.rows))
        return measured[measured["suspect"].isna()]

    @functools.cached_property
    def repeated(self) -> pd.DataFrame:
        """The same as ``trusted``, but with the older rows of cases measured more than once."""
        measured = without_removed(ok_rows(self.loaded))
        return measured[(_devices(measured) == self.device) & measured["suspect"].isna()]

    @functools.cached_property
    def committed(self) -> pd.DataFrame:
        """Each implementation's fastest row of every problem among the committed ones, however new others are."""
        folders = committed_results(self.device)
        runs = read_results(folders, ["run_id"])["run_id"].to_pylist() if folders else ()
        return best_rows(latest_rows(self.repeated[self.repeated["run_id"].isin(set(runs))]))

    def beside_committed(self, best: pd.DataFrame) -> pd.DataFrame:
        """Return rows with the committed ones that they replaced; the column ``whose`` says which are which."""
        import pandas as pd

        own = ~best["run_id"].isin(set(self.committed["run_id"]))
        before = best[own][list(PROBLEM_COLUMNS)].merge(self.committed)
        if before.empty:
            return best.assign(whose="")
        both = (best.assign(whose=own.map({True: "yours", False: ""})), before.assign(whose="committed"))
        return pd.concat(both).sort_values("time_ms")

    @functools.cached_property
    def chosen(self) -> Chosen | None:
        """What figures show: of each size and dtype the value with most rows; None where nothing was measured."""
        if ok_rows(self.rows).empty:
            return None
        selection = Selection(kernel=self.family or None, device=self.device)
        return choose(self.rows, selection, most=True)

    @functools.cached_property
    def selection(self) -> Selection:
        """The selection of all other figures: of lengths in every mode :data:`SEQ_LEN`, else the longest."""
        if self.chosen is None:
            return Selection(device=self.device)
        rows = ok_rows(self.chosen.rows)
        # The backward call alone is measured at few problems: it does not decide at which others are shown.
        several = rows[rows["mode"] != "bw"]
        rows = rows if several.empty else several
        common = set.intersection(*(set(lengths) for _, lengths in rows.groupby("mode")["seq_len"]))
        usual = SEQ_LEN if SEQ_LEN in common else max(map(int, common), default=None)
        return choose(self.rows, dataclasses.replace(self.chosen, seq_len=usual), "", most=True)

    @functools.cached_property
    def selection_over_chunks(self) -> Selection:
        """The selection of figures over chunk size, at the sequence length of which they have most rows."""
        return choose(self.rows, dataclasses.replace(self.selection, seq_len=None), "chunk_size", most=True)

    @property
    def seq_len(self) -> int | None:
        """The sequence length at which single figures are given; None where nothing was measured."""
        return self.selection.seq_len

    @property
    def on_target(self) -> bool:
        """Whether the rows were measured on the accelerator that the report is about."""
        return self.device == self.accelerator.key

    @property
    def device_name(self) -> str:
        """The measured device as its driver names it."""
        return " / ".join(sorted({str(name) for name in self.rows["device_name"].dropna()})) or self.device

    @property
    def modes(self) -> list[str]:
        """Modes with measured rows, in the order of figures."""
        return modes_of(ok_rows(self.rows))

    def setting(self) -> str:
        """Return the setting of the figures in words: tokens, widths, dtype, head dim."""
        return "" if self.chosen is None else ", ".join(setting_in_words(self.chosen))

    def best(self, mode: str) -> pd.DataFrame:
        """Return every implementation's fastest trusted row at every sequence length, in the report's setting."""
        if self.chosen is None:
            return self.trusted.iloc[:0]
        rows = self.trusted[self.trusted.index.isin(self.chosen.rows.index) & (self.trusted["mode"] == mode)]
        return best_rows(rows, ("op", "impl", "seq_len"))

    @functools.cached_property
    def axis(self) -> str:
        """What figures call the axis of sequence lengths."""
        return "sequence length" if self.chosen is None else self.chosen.axis

    def at(self, seq_len: int) -> str:
        """Return a sequence length in words."""
        return length_in_words(seq_len, tokens=self.axis == "tokens")

    def at_all(self, seq_lens: Sequence[float]) -> str:
        """Return sequence lengths in words, see :func:`lengths`."""
        return f"{sizes_in_words(seq_lens)} tokens" if self.axis == "tokens" else lengths(seq_lens)


def load_subjects(results: Sequence[str | Path], gpu: str) -> list[Subject]:
    """Load results: return a subject of all rows, and after it one for each family of kernels if there are several.

    The device is ``gpu`` where something was measured on it, else the device with most measured rows. The family with
    most rows comes first.

    Raises:
        ValueError: an unknown accelerator, or bad results, see :func:`.select.load_results`.
    """
    accelerator = with_stored_roofs(get_accelerator(gpu))
    loaded = derive_anew(load_results(results, samples=True).reset_index(drop=True))
    # Rows are taken from it a thousand times, each time of every block: objects share one, once they are copied.
    loaded = loaded.astype(dict.fromkeys(loaded.select_dtypes("str").columns, object)).copy()
    if loaded.empty:
        raise ValueError(f"results must hold at least one row, got none in {', '.join(map(str, results))}")
    device = _device(latest_rows(loaded), accelerator.key)
    named = tuple(map(str, results))
    whole = Subject(family="", accelerator=accelerator, results=named, loaded=loaded, device=device)
    found = families(whole.rows)
    if len(found) < 2:
        return [whole]
    return [whole, *(dataclasses.replace(whole, family=each, loaded=of_family(loaded, each)) for each in found)]


def other_subjects(subject: Subject) -> list[Subject]:
    """Return a subject of each other device that something was measured on."""
    devices = sorted(set(_devices(ok_rows(subject.everything)).dropna()) - {subject.device})
    return [dataclasses.replace(subject, device=device) for device in devices]


def _devices(frame: pd.DataFrame) -> pd.Series:
    """Return the devices of rows: their keys, or the names of those that have none."""
    return frame["device_accelerator"].fillna(frame["device_name"])


def _device(frame: pd.DataFrame, wanted: str) -> str:
    named = _devices(frame)
    if named.isna().all():
        raise ValueError("results must name the device that they were measured on in device_name, got none")
    measured = named[is_ok(frame)].dropna()
    measured = named if measured.empty else measured
    return wanted if wanted in set(measured) else str(measured.mode()[0])


def known(value: Any) -> Any:
    """Return a value of a frame, None for one that is null."""
    return None if value != value else value


def name_of(row: Any) -> str:
    """Return how an implementation is called, from anything with ``op`` and ``impl``."""
    return series_label(str(row.op), str(row.impl))


def name_cell(row: Any) -> Cell:
    """Return a table's cell that names an implementation in two lines: the operation, and who computes it."""
    operation, _, by = name_of(row).partition(" · ")
    return Cell(text=operation, detail=by)


def lengths(values: Sequence[float]) -> str:
    """Return sequence lengths in words: T = 8k; T = 1k, 2k; T = 1k to 64k."""
    return f"T = {sizes_in_words(values)}"


def problem_in_words(row: Any) -> str:
    """Return the sizes of a row's problem and its dtypes in a few words, without batch, sequence and chunk length."""
    columns = (*SIZE_COLUMNS, "dtype", "state_dtype")
    values: dict[str, Any] = {name: known(getattr(row, name)) for name in columns}
    values |= {name: int(values[name]) for name in NUMERIC_SIZES if values[name] is not None}
    return describe_sizes(values | dict.fromkeys(("batch", "seq_len", "chunk_size")))
