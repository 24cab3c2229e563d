"""The best chunk length of every problem measured at several: by the model, as measured, and what the model costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..chunk_size import CHUNKWISE_OPERATIONS, chunk_size_report
from ..frames import best_rows
from .markup import ABSENT, Html, numeric, size, table
from .subject import Subject, name_cell

if TYPE_CHECKING:
    import pandas as pd

PROBLEM = ("op", "impl", "mode", "dtype", "state_dtype", "batch", "seq_len", "num_heads", "head_dim_qk", "head_dim_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chunk lengths of one problem.

    Attributes:
        row: a row of the problem, at its fastest chunk length.
        measured: chunk length -> its row, for all that were measured.
        report: what :func:`..chunk_size.chunk_size_report` says of the problem, without measurements.
    """

    row: Any
    measured: dict[int, Any]
    report: dict[str, Any]

    @property
    def modelled(self) -> int:
        """The chunk length that the runtime model chooses."""
        return int(self.report["runtime_optimal_feasible"])

    @property
    def regret_ms(self) -> float | None:
        """What the modelled choice takes longer than the fastest; None where it was not measured."""
        chosen = self.measured.get(self.modelled)
        return None if chosen is None else float(chosen.time_ms - self.row.time_ms)

    @property
    def regret(self) -> float | None:
        """The regret as a share of the fastest time."""
        return None if self.regret_ms is None else self.regret_ms / float(self.row.time_ms)


def choices(subject: Subject) -> list[Choice]:
    """Return every problem measured at two chunk lengths or more, with the model of the report's accelerator."""
    rows = subject.trusted
    rows = rows[rows["chunk_size"].notna() & rows["op"].isin(CHUNKWISE_OPERATIONS) & (rows["mode"] != "step")]
    rows = best_rows(rows, (*PROBLEM, "chunk_size"))
    found = []
    for _, group in rows.groupby(list(PROBLEM), dropna=False, sort=True):
        if len(group) > 1:
            choice = _choice(subject, group)
            if choice is not None:
                found.append(choice)
    return found


def _choice(subject: Subject, group: pd.DataFrame) -> Choice | None:
    measured = {int(row.chunk_size): row for row in group.itertuples(index=False)}
    best = min(measured.values(), key=lambda row: row.time_ms)
    try:
        report = chunk_size_report(
            best.op,
            subject.accelerator,
            head_dim_v=int(best.head_dim_v),
            head_dim_qk=int(best.head_dim_qk),
            seq_len=int(best.seq_len),
            batch=int(best.batch),
            num_heads=int(best.num_heads),
            dtype=best.dtype,
            state_dtype=best.state_dtype if isinstance(best.state_dtype, str) else "fp32",
            mode=best.mode,
            impl=best.impl,
        )
    except ValueError:
        # No model of this problem: a dtype that the accelerator does not multiply, a sequence below one chunk.
        return None
    return Choice(row=best, measured=measured, report=report)


def choice_table(subject: Subject, found: list[Choice]) -> Html:
    """Return one row for each problem: optima in closed form, modelled and measured choice, regret and memory."""
    rows = []
    for each in found:
        memory = each.row.peak_memory_bytes
        rows.append(
            [
                name_cell(each.row),
                each.row.mode,
                size(each.row.head_dim_v),
                size(each.row.seq_len),
                numeric(each.report["flop_optimal"]),
                numeric(each.report["runtime_optimal"]),
                size(each.modelled),
                size(each.row.chunk_size),
                numeric(each.row.time_ms),
                numeric(None if memory != memory else memory / 2**30),
                *((numeric(each.regret_ms, 2), _percent(each.regret)) if subject.on_target else ()),
            ]
        )
    header = [
        "implementation",
        "mode",
        "head dim",
        "T",
        "L of least FLOPs",
        "L of least modelled time",
        "modelled choice",
        "measured best",
        "time at it (ms)",
        "peak memory at it (GiB)",
        *(("regret (ms)", "regret (%)") if subject.on_target else ()),
    ]
    where = subject.device_name if subject.on_target else f"{subject.accelerator.name} modelled, {subject.device_name}"
    return table(f"Chunk lengths, {where}", header, rows)


def _percent(share: float | None) -> Any:
    return ABSENT if share is None else numeric(100 * share, 2)
