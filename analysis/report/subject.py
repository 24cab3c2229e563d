"""What a report is about: the rows, the device that they were measured on, and the setting that its figures hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...results.schema import SIZE_COLUMNS
from ...results.select import best_rows, describe_sizes, families, is_ok, latest_rows, load_results, of_family, ok_rows
from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_stored_roofs
from ..derive import derive_anew
from ..figures.selection import MODE_TITLES, Chosen, Selection, choose, length_in_words, widths_in_words
from ..figures.style import binary, series_label
from .markup import Cell

if TYPE_CHECKING:
    import pandas as pd

OURS = "lrbench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The rows of a report.

    Attributes:
        family: the family of kernels that it is of; "" for a subject of several.
        accelerator: what the report is about (``--gpu``), with its newest calibration.
        results: where the rows are from, as the user named it.
        everything: the newest row of every case on every device.
        device: key of the measured device, or its name where it has none.
        rows: those of ``everything`` that were measured on ``device``.
        chosen: what figures show, see :func:`..selection.choose`; None where nothing was measured.
        state_dtype: the dtype of chunk states that figures show; None: fp32.
        seq_len: the sequence length at which single figures are given, the one that figures choose; None as ``chosen``.
        trusted: the measured rows of ``rows`` that are not suspect.
        repeated: the same, but with the older rows of cases measured more than once.
    """

    family: str
    accelerator: Accelerator
    results: tuple[str, ...]
    everything: pd.DataFrame
    device: str
    rows: pd.DataFrame
    chosen: Chosen | None
    state_dtype: str | None
    seq_len: int | None
    trusted: pd.DataFrame
    repeated: pd.DataFrame

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
        present = set(self.rows["mode"][is_ok(self.rows)])
        return [mode for mode in MODE_TITLES if mode in present]

    def selection(self, mode: str) -> Selection:
        """Return the selection of a figure of one mode, in the setting that the whole report shows."""
        return Selection(
            device=self.device,
            modes=(mode,),
            dtype=self.chosen.dtype if self.chosen else None,
            state_dtype=self.state_dtype,
            tokens=self.chosen.tokens if self.chosen else None,
            channels=self.chosen.channels if self.chosen else None,
            d_model=self.chosen.d_model if self.chosen else None,
            d_ff=self.chosen.d_ff if self.chosen else None,
        )

    def setting(self) -> str:
        """Return the setting of the figures in words: tokens, widths, dtype, head dim."""
        if self.chosen is None:
            return ""
        parts = [f"{self.chosen.tokens:,} tokens"] if self.chosen.tokens else []
        parts += widths_in_words(self.chosen)
        parts.append(self.chosen.dtype)
        parts += [f"value head dim {self.chosen.head_dim}"] if self.chosen.head_dim else []
        return ", ".join(parts)

    def best(self, mode: str) -> pd.DataFrame:
        """Return every implementation's fastest trusted row at every sequence length, in the report's setting."""
        if self.chosen is None:
            return self.trusted.iloc[:0]
        rows = self.trusted[self.trusted.index.isin(self.chosen.rows.index) & (self.trusted["mode"] == mode)]
        return best_rows(rows, ("op", "impl", "seq_len"))

    @property
    def without_order(self) -> bool:
        """Whether sequence lengths are numbers of tokens that have no order."""
        return self.chosen is not None and self.chosen.without_order

    @property
    def axis(self) -> str:
        """What figures over sequence length are over."""
        return "tokens" if self.without_order else "sequence length"

    def at(self, seq_len: int) -> str:
        """Return a sequence length in words."""
        return length_in_words(seq_len, tokens=self.without_order)

    def at_all(self, seq_lens: Sequence[float]) -> str:
        """Return sequence lengths in words, see :func:`lengths`."""
        return f"{sizes_in_words(seq_lens)} tokens" if self.without_order else lengths(seq_lens)


def load_subject(results: Sequence[str | Path], gpu: str) -> Subject:
    """Load results and decide what the report shows.

    The device is ``gpu`` where something was measured on it, else the device with most measured rows.

    Raises:
        ValueError: an unknown accelerator, or bad results, see :func:`.select.load_results`.
    """
    return load_subjects(results, gpu)[0]


def load_subjects(results: Sequence[str | Path], gpu: str) -> list[Subject]:
    """Return the subject of all results, as :func:`load_subject` does, and after it one for each family of kernels.

    The family with most rows comes first. Results of one family make one subject.
    """
    accelerator = with_stored_roofs(get_accelerator(gpu))
    loaded = derive_anew(load_results(results, samples=True).reset_index(drop=True))
    if loaded.empty:
        raise ValueError(f"results must hold at least one row, got none in {', '.join(map(str, results))}")
    device = _device(latest_rows(loaded), accelerator.key)
    whole = _subject(loaded, "", accelerator, results, device)
    found = families(whole.rows)
    if len(found) < 2:
        return [whole]
    return [
        whole,
        *(_subject(of_family(loaded, each), each, accelerator, results, device) for each in found),
    ]


def _subject(
    loaded: pd.DataFrame, family: str, accelerator: Accelerator, results: Sequence[str | Path], device: str
) -> Subject:
    everything = latest_rows(loaded).reset_index(drop=True)
    named = everything["device_accelerator"].fillna(everything["device_name"])
    rows = everything[named == device]
    measured = ok_rows(rows)
    chosen = state_dtype = seq_len = None
    if len(measured):
        dtype = str(measured["dtype"].mode()[0])
        state_dtype = _state_dtype(measured[measured["dtype"] == dtype]["state_dtype"])
        selection = Selection(device=device, dtype=dtype, state_dtype=state_dtype)
        chosen = choose(rows, selection)
        seq_len = choose(rows, selection, seq_len=True).seq_len
    return Subject(
        family=family,
        accelerator=accelerator,
        results=tuple(str(path) for path in results),
        everything=everything,
        device=device,
        rows=rows,
        chosen=chosen,
        state_dtype=state_dtype,
        seq_len=seq_len,
        trusted=measured[measured["suspect"].isna()],
        repeated=_trusted(loaded, device),
    )


def _trusted(loaded: pd.DataFrame, device: str) -> pd.DataFrame:
    measured = ok_rows(loaded)
    named = measured["device_accelerator"].fillna(measured["device_name"])
    return measured[(named == device) & measured["suspect"].isna()]


def _state_dtype(found: pd.Series) -> str | None:
    """Return the most frequent dtype of states where none are fp32 and every row has some; else None, for fp32."""
    return None if found.isna().any() or (found == "fp32").any() else str(found.mode()[0])


def _device(frame: pd.DataFrame, wanted: str) -> str:
    named = frame["device_accelerator"].fillna(frame["device_name"])
    if named.isna().all():
        raise ValueError("results must name the device that they were measured on in device_name, got none")
    measured = named[frame.index.isin(ok_rows(frame).index)].dropna()
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


def sizes_in_words(values: Sequence[float]) -> str:
    """Return sizes in words: 8k; 1k, 2k; 1k to 64k."""
    ordered = sorted({int(value) for value in values})
    if len(ordered) > 3:
        return f"{binary(ordered[0])} to {binary(ordered[-1])}"
    return ", ".join(binary(value) for value in ordered)


def problem_in_words(row: Any) -> str:
    """Return the sizes of a row's problem and its dtypes in a few words, without batch, sequence and chunk length."""
    columns = (*SIZE_COLUMNS, "dtype", "state_dtype")
    values: dict[str, Any] = {name: known(getattr(row, name)) for name in columns}
    values |= {name: int(values[name]) for name in SIZE_COLUMNS if values[name] is not None}
    return describe_sizes(values | dict.fromkeys(("batch", "seq_len", "chunk_size")))
