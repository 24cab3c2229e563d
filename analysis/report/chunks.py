"""The best chunk length of every problem measured at several: by the models, as measured, and what a model costs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ...kernels.scalar_decay.declare import FUSED_CHUNK
from ...results.select import PROBLEM_COLUMNS, best_rows, grouped, records
from ..counts import count
from ..counts.formulations import state_dtype_of
from ..model.chunk_size import CHUNKWISE_OPERATIONS, check_chunkwise, chunks_taken, coefficients
from ..model.fit import ROW_COLUMNS, Fits
from ..model.prediction import predict_cases
from ..model.runtime_model import runtime_model
from ..model.terms import Query
from .markup import ABSENT, Cell, Html, numeric, size, table
from .subject import Subject, name_cell, problem_in_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is best by the models, without measurements of the problem itself.

    Attributes:
        flop_optimal, runtime_optimal: the closed forms.
        name: of the modelled time: walks or formulation as fitted, else the formulation's upper time.
        time_ms: chunk length that the implementation takes -> modelled time.
    """

    flop_optimal: float
    runtime_optimal: float
    name: str
    time_ms: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chunk lengths of one problem.

    Attributes:
        row: a row of the problem, at its fastest chunk length.
        measured: chunk length -> its row, for all that were measured.
        model: None where the operation has no model of its chunk length.
    """

    row: Any
    measured: dict[int, Any]
    model: Model | None

    @property
    def modelled(self) -> int | None:
        """The chunk length that the model chooses."""
        return None if self.model is None else min(self.model.time_ms, key=self.model.time_ms.__getitem__)

    @property
    def slowest(self) -> Any:
        """The row of the slowest chunk length measured."""
        return max(self.measured.values(), key=lambda row: row.time_ms)

    @property
    def regret_ms(self) -> float | None:
        """What the modelled choice takes longer than the fastest; None where it was not measured."""
        chosen = None if self.modelled is None else self.measured.get(self.modelled)
        return None if chosen is None else float(chosen.time_ms - self.row.time_ms)


def choices(subject: Subject) -> list[Choice]:
    """Return every problem measured at two chunk lengths or more, with the model of the report's accelerator if any."""
    rows = subject.trusted
    rows = rows[rows["chunk_size"].notna() & (rows["mode"] != "step")]
    rows = best_rows(rows, (*PROBLEM_COLUMNS, "chunk_size"))
    # Tuples are made of all rows at once: for each problem's few it would cost as much again.
    number = rows.groupby(list(PROBLEM_COLUMNS), dropna=False, sort=True).ngroup()
    problems = grouped(zip(number, rows.itertuples(index=False), strict=True), itemgetter(0))
    found = (_choice(subject, [row for _, row in problems[n]]) for n in sorted(problems) if len(problems[n]) > 1)
    return [choice for choice in found if choice is not None]


@functools.lru_cache(maxsize=64)
def _fits(subject: Subject, mode: str, dtype: str) -> Fits:
    """Return the fits to fused_chunk's rows of a mode and dtype."""
    rows = subject.trusted
    rows = rows[(rows["impl"] == FUSED_CHUNK) & (rows["mode"] == mode) & (rows["dtype"] == dtype)]
    rows = records(rows[rows["chunk_size"].notna()], ROW_COLUMNS)
    return Fits(rows, mode, dtype, subject.accelerator)


def _choice(subject: Subject, problem: list[Any]) -> Choice | None:
    measured = {int(row.chunk_size): row for row in problem}
    best = min(measured.values(), key=lambda row: row.time_ms)
    if best.op not in CHUNKWISE_OPERATIONS:
        return Choice(row=best, measured=measured, model=None)
    try:
        return Choice(row=best, measured=measured, model=_model(subject, best))
    except ValueError:
        # No model of this problem: a dtype that the accelerator does not multiply, a sequence below one chunk, or an
        # implementation that is gone.
        return None


def _model(subject: Subject, row: Any) -> Model:
    """Return what is best for the problem of a row; ValueError where no model can say."""
    op, impl, mode, dtype, accelerator = row.op, row.impl, row.mode, row.dtype, subject.accelerator
    dims: dict[str, Any] = {name: int(getattr(row, name)) for name in ("head_dim_qk", "head_dim_v")}
    sizes = {name: int(getattr(row, name)) for name in ("batch", "seq_len", "num_heads")} | dims
    check_chunkwise(op, mode, sizes["seq_len"])
    chunks = chunks_taken(op, impl, mode, dtype, sizes)
    state = row.state_dtype if isinstance(row.state_dtype, str) else "fp32"
    dtypes: dict[str, Any] = {"dtype": dtype, "state_dtype": state}
    chunkwise = functools.partial(count, op, formulation="chunkwise", mode=mode, **dtypes, **sizes)
    intensity = accelerator.matrix_rate(dtype) / accelerator.bandwidth_bytes_s
    closed = coefficients(op, mode=mode, causal_factor=0.5, **dtypes, **dims)
    said = functools.partial(
        Model, flop_optimal=closed.flop_optimal(), runtime_optimal=closed.runtime_optimal(intensity)
    )
    if impl == FUSED_CHUNK and (fit := _fits(subject, mode, dtype).of(op, impl)):
        case = Query(op, impl, mode, dtype, state_dtype_of(op, impl, state), sizes)
        at = [case._replace(sizes={**sizes, "chunk_size": chunk}) for chunk in chunks]
        predicted = zip(chunks, predict_cases(at, accelerator, fit), strict=True)
        times = {chunk: each.time_ms for chunk, each in predicted if each.time_ms is not None}
        if len(times) == len(chunks):
            return said(name=fit.model, time_ms=times)
    upper = {chunk: runtime_model(chunkwise(chunk_size=chunk), accelerator, dtype).upper_ms for chunk in chunks}
    return said(name="formulation", time_ms=upper)


def choice_table(subject: Subject, found: list[Choice]) -> Html:
    """Return one row for each problem: optima in closed form, modelled and measured choice, regret and memory."""
    rows = []
    for each in found:
        model = each.model
        row: dict[str, str | Cell] = {
            "implementation": name_cell(each.row), "mode": each.row.mode,
            "sizes": problem_in_words(each.row), "T": size(each.row.seq_len),
            "L of least FLOPs": numeric(model.flop_optimal if model else None),
            "L of least modelled time": numeric(model.runtime_optimal if model else None),
            "modelled choice": size(each.modelled), "model of it": model.name if model else ABSENT,
            "measured best": size(each.row.chunk_size), "time at it (ms)": numeric(each.row.time_ms),
            "peak memory at it (GiB)": numeric(each.row.peak_memory_bytes / 2**30),
            "measured slowest": size(each.slowest.chunk_size),
            "takes more by (%)": numeric(100 * (each.slowest.time_ms / each.row.time_ms - 1), 2),
        }  # fmt: skip
        if subject.on_target:
            share = None if each.regret_ms is None else 100 * (each.regret_ms / each.row.time_ms)
            row |= {"regret (ms)": numeric(each.regret_ms, 2), "regret (%)": numeric(share, 2)}
        rows.append(row)
    where = subject.device_name if subject.on_target else f"{subject.accelerator.name} modelled, {subject.device_name}"
    return table(f"Chunk lengths, {where}", rows)
