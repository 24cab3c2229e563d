"""Predicted times: an interval from the runtime model's bounds, or from a model fitted to measurements."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...results.schema import NUMERIC_SIZES, PROBLEM_SIZES, SIZE_COLUMNS
from ...results.select import grouped, load_rows
from ...results.store import current_files
from ..accelerators.known import Accelerator
from ..counts import count_case
from .fit import ROW_COLUMNS, USELESS, Fit, Row, newest_cases
from .runtime_model import RuntimeModel, floor_ms, launches_ms, runtime_model
from .terms import Query, walks

SAME_PROBLEM = ("op", "impl", "state_dtype", "device_name", *SIZE_COLUMNS)
"""Rows of two modes or dtypes that agree in these columns are of one problem."""

MEASURED_COLUMNS = (
    "chunk_size", "time_ms", "time_ci_low_ms", "time_ci_high_ms", "peak_memory_bytes", "git_commit", "run_id",
    "measured_at", "reason", "noise",
)  # fmt: skip
"""Columns of a measured row that answers show."""


VERSION_COLUMNS = ("torch_version", "triton_version")
"""Columns of a measured row that answers tell beside those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A time with the interval it lies in.

    Attributes:
        low_ms, high_ms: without a fit the model's bounds (roofline, and no overlap), between which an ideal kernel
            lies; with one, between which 90 % of such cases lie, never below what the accelerator allows.
        time_ms: the fitted time, with the rows' software; None without a fit.
        model: the runtime model's times.
        interval: what the interval means, in words.
    """

    low_ms: float
    high_ms: float
    time_ms: float | None
    model: RuntimeModel
    interval: str


def stored_rows(results: Sequence[Path], mode: str, dtype: str) -> list[dict[str, Any]]:
    """Return the measured rows of a mode and dtype in result files or folders: what fits and answers read of them."""
    return rows_by_status(results, mode, dtype).get("ok", [])


def rows_by_status(results: Sequence[Path], mode: str, dtype: str) -> dict[str, list[dict[str, Any]]]:
    """Return status -> the rows of a mode and dtype, those that stand in for others (:func:`_stand_ins`) included.

    Reads few columns and no pandas, so that the command line answers at once.
    """
    columns = tuple(dict.fromkeys((*ROW_COLUMNS, *MEASURED_COLUMNS, *VERSION_COLUMNS, "status")))
    files = current_files(results) if results else ()
    rows = load_rows(files, columns, {"mode": mode, "dtype": dtype}, newest=True) if files else ()
    found = grouped(rows, itemgetter("status"))
    case = itemgetter(*SAME_PROBLEM)
    measured = set(map(case, found.get("ok", [])))
    added = [row for row in _stand_ins(results, mode, dtype) if case(row) not in measured]
    return found | {"ok": [*found.get("ok", []), *added]} if added else found


def _stand_ins(results: Sequence[Path], mode: str, dtype: str) -> list[dict[str, Any]]:
    """Return rows of other modes and dtypes for cases without one of their own; ``stands_in`` says how each came about.

    A backward call takes what a forward and backward call takes longer than a forward one; fp16 as long as bf16, whose
    elements are as large and multiply at the same rate.
    """
    if mode == "bw":
        fw, both = (
            {itemgetter(*SAME_PROBLEM)(row): row for row in newest_cases(stored_rows(results, each, dtype))}
            for each in ("fw", "fwbw")
        )
        found = []
        for problem, row in both.items():
            if problem in fw and row["time_ms"] > fw[problem]["time_ms"]:
                how = ", ".join(["fwbw minus fw", *([row["stands_in"]] if "stands_in" in row else [])])
                found.append({**row, "time_ms": row["time_ms"] - fw[problem]["time_ms"], "stands_in": how})
        return found
    if dtype == "fp16":
        return [{**row, "stands_in": "bf16"} for row in stored_rows(results, mode, "bf16")]
    return []


def stored_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes as rows have them: an MLP's tokens are the length of one sequence."""
    return {**sizes, "batch": 1, "seq_len": sizes["batch"] * sizes["seq_len"]} if "d_model" in sizes else {**sizes}


def predict_cases(cases: Sequence[Query], accelerator: Accelerator, fit: Fit | None) -> list[Prediction]:
    """Return the predicted time of each case by a fit for the accelerator, or the model's bounds.

    These are also taken where the fit says too little: an interval beyond :data:`.fit.USELESS` times its low end.
    ValueError where the operation is not counted in that mode.
    """
    counts = []
    for case in cases:
        if (count := count_case(*case)) is None:
            raise ValueError(f"mode must be one that is counted for {case.op} {case.impl}, got {case.mode!r}")
        counts.append(count)
    fitted = fit.intervals_ms(cases) if fit else [(0.0, 0.0, math.inf)] * len(cases)
    found = []
    for case, count, ends in zip(cases, counts, fitted, strict=True):
        model, (low_ms, _, high_ms) = runtime_model(count, accelerator, case.dtype), ends
        if fit is None or high_ms > USELESS * low_ms:
            launches = launches_ms(count, accelerator)
            low_ms, high_ms = max(model.lower_ms, launches), max(model.upper_ms, launches)
            interval = "full overlap to no overlap at full rate, which is what an ideal kernel takes"
            found.append(Prediction(low_ms=low_ms, high_ms=high_ms, time_ms=None, model=model, interval=interval))
            continue
        least = floor_ms(count, accelerator, case.dtype)
        low_ms, time_ms, high_ms = (max(each, least) for each in ends)
        interval = fit.basis(case)
        found.append(Prediction(low_ms=low_ms, high_ms=high_ms, time_ms=time_ms, model=model, interval=interval))
    return found


def predict_case(case: Query, accelerator: Accelerator, fit: Fit | None) -> Prediction:
    """Return :func:`predict_cases` of one case."""
    return predict_cases([case], accelerator, fit)[0]


def measured_on(where: str, noisy: bool) -> str:
    """Return in words where a time was measured, and whether the machine was busy."""
    return f"measured on {where}{' while it was busy' if noisy else ''}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer:
    """What a case takes: as measured where it was, else as fitted, else between the model's bounds.

    The model's part is computed when it is first read: a measured time needs none.

    Attributes:
        case: what is asked about; ``predicted`` raises ValueError where its mode is not counted.
        accelerator: where.
        rows: of its implementation in this mode and dtype, as :func:`stored_rows` returns them.
        fit: returns the model fitted to them, None where there is none.
    """

    case: Query
    accelerator: Accelerator
    rows: Sequence[Row]
    fit: Callable[[], Fit | None]

    @functools.cached_property
    def _newest(self) -> dict[str, Row]:
        """By device the newest row of the very case, one of an idle machine if there is any; without a chunk length, at
        the fastest one."""
        sizes = {**dict.fromkeys(PROBLEM_SIZES), **stored_sizes(self.case.sizes)}
        wanted = {"state_dtype": self.case.state_dtype, "suspect": None, **sizes}
        found = [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]
        order = sorted(found, key=lambda row: (not row["noise"], row["measured_at"] or ""))
        by_chunk = {(row["device_accelerator"], row["chunk_size"]): row for row in order}.values()
        return {row["device_accelerator"]: row for row in sorted(by_chunk, key=lambda row: -row["time_ms"])}

    @property
    def measured(self) -> Row | None:
        """The newest row of the very case on the accelerator, or None."""
        here = self._newest.get(self.accelerator.key)
        return None if here is None or "stands_in" in here else here

    @functools.cached_property
    def predicted(self) -> Prediction:
        """What the model says."""
        return predict_case(self.case, self.accelerator, self.fit())

    @property
    def may_be_chosen(self) -> bool:
        """Whether a model may choose the chunk length. That of walks may choose any. That of the formulation does not
        see that few chunks leave a device idle, so it chooses among those that were fastest somewhere."""
        fastest = set() if walks(self.case) else _fastest_chunks(self.rows)
        return not fastest or self.case.sizes.get("chunk_size") in fastest

    @property
    def versions(self) -> dict[str, str | None]:
        """Of torch and Triton: the measured row's; where fitted those of all its rows, such as "3.6.0 and 3.8.0"."""
        rows = [self.measured] if self.measured else self.rows if self.basis == "fitted" else []
        found = {name: {row[name] for row in rows if row.get(name)} for name in VERSION_COLUMNS}
        oldest_first = functools.partial(sorted, key=lambda version: [*map(int, re.findall(r"\d+", version))])
        return {name: " and ".join(oldest_first(each)) or None for name, each in found.items()}

    @property
    def noisy(self) -> bool:
        """Whether the machine was busy when the case was measured."""
        return bool(self.measured and self.measured["noise"])

    @property
    def basis(self) -> str:
        """Where the time comes from: measured, fitted or bound."""
        return "measured" if self.measured else "fitted" if self.predicted.time_ms is not None else "bound"

    @property
    def chunk_size(self) -> int | None:
        """The chunk length, None where there is none, or none that counts and none was measured."""
        return self.case.sizes.get("chunk_size") or (self.measured["chunk_size"] if self.measured else None)

    @property
    def time_ms(self) -> float | None:
        """The time, None where only bounds are known."""
        return self.measured["time_ms"] if self.measured else self.predicted.time_ms

    @property
    def interval_ms(self) -> tuple[float, float]:
        """Where the time lies: 95 % of the median as measured, 90 % of a prediction, or the bounds."""
        if self.measured:
            return self.measured["time_ci_low_ms"], self.measured["time_ci_high_ms"]
        return self.predicted.low_ms, self.predicted.high_ms

    @functools.cached_property
    def memory_bytes(self) -> float:
        """Peak memory, as measured, else as modelled, and as much more as the nearest measured problem took."""
        measured = self.measured["peak_memory_bytes"] if self.measured else None
        if measured is not None:
            return float(measured)
        return _memory_ratio(self.case, self.rows) * _modelled_memory(self.case)

    @property
    def does_not_fit(self) -> str | None:
        """Why the memory of the accelerator is too small, None where it is not: what was measured there did fit."""
        capacity = self.accelerator.memory_bytes
        if self.measured or capacity is None or self.memory_bytes <= capacity:
            return None
        return f"does not fit in {capacity / 1e9:.4g} GB (needs {self.memory_bytes / 1e9:.3g} at least)"

    def order(self) -> tuple[bool, bool, float]:
        """Return the key that ranks implementations: those with a time, then those with bounds alone, last those that
        do not fit in memory; each by the measured time, else by the upper end of its interval.

        By the upper end, so that an uncertain prediction is not preferred to a measurement.
        """
        most_ms = self.measured["time_ms"] if self.measured else self.interval_ms[1]
        return self.does_not_fit is not None, self.basis == "bound", most_ms


def _modelled_memory(case: Query) -> float:
    """Return the bytes alive at the peak of a pass: its inputs and outputs once, and every chunk's state.

    A backward pass holds the gradients of the states as well and, where a chunk is walked tile by tile, the states at
    the anchors. What the states take falls with the chunk length (TFLA paper, figure 6).
    """
    last = count_case(*case._replace(mode="bw" if case.mode == "fwbw" else case.mode))
    assert last is not None, "a case of another mode would not have been predicted"
    states = last.byte_parts.get("recurrent store", 0.0)
    if last.mode == "bw":
        states = 2 * states + last.executed_byte_parts.get("dq: anchors", 0.0)
    return last.compulsory_bytes + states


def distance(row: Row, sizes: Mapping[str, Any]) -> float:
    """Return how far a row's sizes are from others: the factors of e between them, added up."""
    return sum(abs(math.log(row[name] / sizes[name])) for name in NUMERIC_SIZES if sizes.get(name) and row[name])


def _memory_ratio(case: Query, rows: Sequence[Row]) -> float:
    """Return measured over modelled peak memory of the row of most similar sizes; 1 where no row has any."""
    there = [row for row in rows if row["peak_memory_bytes"]]
    if not there:
        return 1.0
    stored = stored_sizes(case.sizes)
    nearest = min(there, key=lambda row: distance(row, stored))
    own = {name: nearest[name] for name in case.sizes if nearest[name]}
    return max(1.0, nearest["peak_memory_bytes"] / _modelled_memory(case._replace(sizes=own)))


def best_of(answers: Sequence[Answer]) -> Answer:
    """Return the chunk length to take: the fastest measured one. Else, among those that fit in memory (and of these
    the ones that a model may choose, if any), the one of least time by the model. If none fits, the one that needs
    least memory.
    """
    timed = [(each.measured["time_ms"], each) for each in answers if each.measured]
    if timed:
        return min(timed, key=itemgetter(0))[1]

    def order(each: Answer) -> tuple[bool, float]:
        return not each.may_be_chosen, each.interval_ms[1] if each.time_ms is None else each.time_ms

    # What each needs is asked about in this order, since it takes longest to find out.
    fitting = (each for each in sorted(answers, key=order) if not each.does_not_fit)
    return next(fitting, None) or min(answers, key=lambda each: each.memory_bytes)


def _fastest_chunks(rows: Sequence[Row]) -> set[int]:
    """Return the fastest chunk lengths of the problems that were measured at several."""
    problem = itemgetter("device_accelerator", "state_dtype", *PROBLEM_SIZES)
    times: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        if row["chunk_size"] is not None and not row["noise"]:
            times.setdefault(problem(row), {})[row["chunk_size"]] = row["time_ms"]
    return {min(chunks, key=lambda chunk: chunks[chunk]) for chunks in times.values() if len(chunks) > 1}
