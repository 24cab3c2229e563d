"""The best chunk length of every problem measured at several: by the models, as measured, and what a model costs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ...kernels.scalar_decay.declare import FUSED_CHUNK
from ...results.select import PROBLEM_COLUMNS, best_rows, grouped, records
from ..model.answers import Question, chunk_size_report
from ..model.chunk_size import CHUNKWISE_OPERATIONS
from ..model.fit import ROW_COLUMNS, Fits
from .markup import ABSENT, Cell, Html, numeric, size, table
from .subject import Subject, name_cell, problem_in_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chunk lengths of one problem.

    Attributes:
        row: a row of the problem, at its fastest chunk length.
        measured: chunk length -> its row, for all that were measured.
        report: what :func:`..answers.chunk_size_report` says of the problem, without measurements; None where the
            operation has no model of its chunk length.
    """

    row: Any
    measured: dict[int, Any]
    report: dict[str, Any] | None

    @property
    def modelled(self) -> int | None:
        """The chunk length that the model chooses."""
        return None if self.report is None else int(self.report["runtime_optimal_feasible"])

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
        return Choice(row=best, measured=measured, report=None)
    names = ("batch", "seq_len", "num_heads", "head_dim_qk", "head_dim_v")
    fits = _fits(subject, best.mode, best.dtype) if best.impl == FUSED_CHUNK else None
    question = Question(
        op=best.op, mode=best.mode, dtype=best.dtype, sizes={name: int(getattr(best, name)) for name in names}, rows=(),
        state_dtype=best.state_dtype if isinstance(best.state_dtype, str) else "fp32",
        accelerator=subject.accelerator, fits=fits,
    )  # fmt: skip
    try:
        report = chunk_size_report(question, best.impl)
    except ValueError:
        # No model of this problem: a dtype that the accelerator does not multiply, a sequence below one chunk, or an
        # implementation that is gone.
        return None
    return Choice(row=best, measured=measured, report=report)


def choice_table(subject: Subject, found: list[Choice]) -> Html:
    """Return one row for each problem: optima in closed form, modelled and measured choice, regret and memory."""
    rows = []
    for each in found:
        report = each.report or {}
        row: dict[str, str | Cell] = {
            "implementation": name_cell(each.row), "mode": each.row.mode,
            "sizes": problem_in_words(each.row), "T": size(each.row.seq_len),
            "L of least FLOPs": numeric(report.get("flop_optimal")),
            "L of least modelled time": numeric(report.get("runtime_optimal")),
            "modelled choice": size(each.modelled), "model of it": report.get("model", ABSENT),
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
