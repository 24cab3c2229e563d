"""What a report is about: the rows, the device that they were measured on, and the setting that its figures hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...results.schema import SIZE_COLUMNS
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
from ..figures.selection import (
    Chosen,
    Selection,
    choose,
    dims_in_words,
    held_in_words,
    length_in_words,
    modes_of,
    widths_in_words,
)
from ..figures.style import series_label, sizes_in_words
from .markup import Cell

if TYPE_CHECKING:
    import pandas as pd


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
        """Return rows, and the committed ones that some of them replaced; the column ``whose`` tells them apart."""
        import pandas as pd

        own = ~best["run_id"].isin(set(self.committed["run_id"]))
        before = best[own][list(PROBLEM_COLUMNS)].merge(self.committed)
        if before.empty:
            return best.assign(whose="")
        both = (best.assign(whose=own.map({True: "yours", False: ""})), before.assign(whose="committed"))
        return pd.concat(both).sort_values("time_ms")

    @functools.cached_property
    def setting_shown(self) -> Selection | None:
        """Device, dtype and dtype of states that all figures show; None where nothing was measured."""
        measured = ok_rows(self.rows)
        if measured.empty:
            return None
        dtype = str(measured["dtype"].mode()[0])
        states = measured["state_dtype"][measured["dtype"] == dtype]
        # fp32 (None) unless there are others only.
        other = None if states.isna().any() or (states == "fp32").any() else str(states.mode()[0])
        return Selection(device=self.device, dtype=dtype, state_dtype=other)

    @functools.cached_property
    def chosen(self) -> Chosen | None:
        """What figures show, see :func:`..selection.choose`; None where nothing was measured."""
        return None if self.setting_shown is None else choose(self.rows, self.setting_shown)

    @functools.cached_property
    def seq_len(self) -> int | None:
        """The sequence length at which single figures are given, the one that figures choose; None as ``chosen``."""
        return None if self.setting_shown is None else choose(self.rows, self.setting_shown, over="").seq_len

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

    @property
    def selection(self) -> Selection:
        """The selection of every figure: the setting that the whole report shows."""
        if self.setting_shown is None or self.chosen is None:
            return Selection(device=self.device)
        held = {name: getattr(self.chosen, name) for name in ("tokens", "batch", "channels", "d_model", "d_ff")}
        return dataclasses.replace(self.setting_shown, **held)

    def setting(self) -> str:
        """Return the setting of the figures in words: tokens, widths, dtype, head dim."""
        if self.chosen is None:
            return ""
        parts = [*held_in_words(self.chosen), *widths_in_words(self.chosen)]
        parts += [self.chosen.dtype, *dims_in_words(self.chosen)]
        return ", ".join(parts)

    def best(self, mode: str) -> pd.DataFrame:
        """Return every implementation's fastest trusted row at every sequence length, in the report's setting."""
        if self.chosen is None:
            return self.trusted.iloc[:0]
        rows = self.trusted[self.trusted.index.isin(self.chosen.rows.index) & (self.trusted["mode"] == mode)]
        return best_rows(rows, ("op", "impl", "seq_len"))

    @property
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
    if loaded.empty:
        raise ValueError(f"results must hold at least one row, got none in {', '.join(map(str, results))}")
    whole = Subject(
        family="",
        accelerator=accelerator,
        results=tuple(map(str, results)),
        loaded=loaded,
        device=_device(latest_rows(loaded), accelerator.key),
    )
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
    if wanted in set(measured) or measured.empty:
        return wanted if wanted in set(named) else str(named.mode()[0])
    return str(measured.mode()[0])


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
    values |= {name: int(values[name]) for name in SIZE_COLUMNS if values[name] is not None}
    return describe_sizes(values | dict.fromkeys(("batch", "seq_len", "chunk_size")))
