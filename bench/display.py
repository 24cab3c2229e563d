"""What the commands show: progress, tables, JSON and CSV. Standard output gets the data, standard error all else."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ..results.schema import Case, Record
from .plan import PlannedCase

FORMATS = ("table", "json", "csv")
FAILED = ("oom", "timeout", "crash", "error", "incorrect")
MODE_NAMES = {"fw": "forward", "fwbw": "forward + backward", "bw": "backward", "step": "decoding step"}
PRINT_EVERY_S = 10.0
MAX_REASONS = 30

GAP = 2
"""Blanks between the columns of a table."""

INDENT = 4
"""Blanks before the further lines of a row that is no table's."""

COMMAND = "pip install "
"""What commands in a text begin with."""

Row = Mapping[str, Any]


def note(message: str) -> None:
    """Print a line for people on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(message, markup=False)


def show(rows: Sequence[Row], output_format: str, *, title: str | None = None) -> None:
    """Print rows as a table, JSON or CSV.

    Raises:
        ValueError: an unknown format.
    """
    if output_format == "json":
        print(json.dumps(list(rows), indent=2, allow_nan=False))
    elif output_format == "csv":
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif output_format == "table":
        _print_table(rows, title)
    else:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {output_format!r}")


def check_format(output_format: str, *, more: Sequence[str] = ()) -> None:
    """Refuse a format that is none of :data:`FORMATS` and ``more`` before any work is done."""
    if output_format not in (*FORMATS, *more):
        raise ValueError(f"format must be one of {', '.join((*FORMATS, *more))}, got {output_format!r}")


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Let whoever reads standard output stop before its end, as ``head`` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would fail again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Console(Console):
    """A console that leaves it to the caller what a reader's leaving means, where rich ends the process."""

    def on_broken_pipe(self) -> None:
        """Raise what rich caught."""
        raise BrokenPipeError("nobody reads the output any more")


def _print_table(rows: Sequence[Row], title: str | None) -> None:
    """Print a table; on a terminal that is too narrow for its words, one row after the other.

    Where standard output is no terminal, lines are as long as the table needs.
    """
    console = _Console(highlight=False)
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    if title is not None:
        console.print(Text(title, style="italic"), soft_wrap=True)
    if not names:
        return
    available = console.width if console.is_terminal else None
    widths = _column_widths([names, *cells], available)
    if widths is None:
        _print_values(names, cells, console)
        return
    numeric = [any(isinstance(row.get(name), (int, float)) for row in rows) for name in names]
    for style, texts in [("bold", names), *(("", each) for each in cells)]:
        columns = [_wrapped(text, width) for text, width in zip(texts, widths, strict=True)]
        for parts in itertools.zip_longest(*columns, fillvalue=""):
            blanks = [" " * (width - cell_len(part)) for part, width in zip(parts, widths, strict=True)]
            padded = [b + t if right else t + b for t, b, right in zip(parts, blanks, numeric, strict=True)]
            console.print(Text((" " * GAP).join(padded).rstrip(), style=style), soft_wrap=True)


def _column_widths(lines: Sequence[Sequence[str]], available: int | None) -> list[int] | None:
    """Return the columns' widths, or None where ``available`` does not hold every word and every command whole."""
    columns = list(zip(*lines, strict=True))
    widths = [max(cell_len(text) for text in column) for column in columns]
    gaps = GAP * (len(columns) - 1)
    if available is None or sum(widths) + gaps <= available:
        return widths
    least = [max(cell_len(part.lstrip()) for text in column for part in ["", *_unbroken(text)]) for column in columns]
    if sum(least) + gaps > available:
        return None
    for _ in range(sum(widths) + gaps - available):
        widest = max(range(len(widths)), key=lambda n: (widths[n] > least[n], widths[n]))
        widths[widest] -= 1
    return widths


def _print_values(names: Sequence[str], cells: Sequence[Sequence[str]], console: Console) -> None:
    """Print each row as "name: value  name: value", as many to a line as it holds; further lines are indented."""
    for texts in cells:
        lines = [""]
        for item in (f"{name}: {text}" for name, text in zip(names, texts, strict=True) if text):
            joined = " " * GAP + item if lines[-1].strip() else item
            if cell_len(lines[-1] + joined) <= console.width:
                lines[-1] += joined
            else:
                wrapped = _wrapped(item, console.width - INDENT)
                lines += [" " * INDENT + line for line in wrapped]
        console.print(Text("\n".join(line for line in lines if line)), soft_wrap=True)


def _unbroken(text: str) -> list[str]:
    """Return the parts of a text that stay on one line: words (of a list such as fw/fwbw, its members), commands."""
    before, command, rest = text.partition(COMMAND)
    words = r"\s*\S+" if " " in text else r"[^/]*(?:/+|[^/]+)"
    return re.findall(words, before) + ([command + rest] if command else [])


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text; a command that does not fit behind what is before it has a line of its own."""
    if cell_len(text) <= width:
        return [text]
    lines = [""]
    for part in _unbroken(text):
        if cell_len(lines[-1] + part) <= width and not part.startswith(COMMAND):
            lines[-1] += part
        else:
            lines.append(part.lstrip())
    return [line for line in lines if line]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(part) for part in value)
    return " ".join(str(value).splitlines())


def describe(item: PlannedCase) -> str:
    """Return a case in a few words."""
    case = item.case
    chunk = f" chunk {case.chunk_size}" if case.chunk_size else ""
    return " ".join(f"{case.op} {case.impl} {case.mode} T={case.seq_len} {_size(case)}{chunk}".split())


class _Bar(Progress):
    """A progress bar with the failures so far and the case on a line of their own, cut where the terminal ends."""

    failures = case = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """Return the bar and the line below it."""
        yield from super().get_renderables()
        failures = f"{self.failures}; " if self.failures else ""
        yield Text.assemble((failures, "red"), self.case, no_wrap=True, overflow="ellipsis")


class SweepProgress:
    """A progress bar with the case, the time left and the failures so far; without a terminal a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: _Bar | None = None
        self._statuses: Counter[str] = Counter()
        self._total = 0
        self._what = ""
        self._printed = self._began = 0.0

    def begin(self, total: int, what: str) -> None:
        """A pass over ``total`` cases begins."""
        self._total, self._what, self._statuses = total, what, Counter()
        self._began = self._printed = time.monotonic()
        if not self._console.is_terminal:
            return
        self._bar = _Bar(
            TextColumn("{task.fields[what]}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, what=what)
        self._bar.start()

    def started(self, item: PlannedCase) -> None:
        """A case runs now."""
        if self._bar is not None:
            self._bar.case = describe(item)

    def finished(self, item: PlannedCase, status: str) -> None:
        """A case has its outcome."""
        self._statuses[status] += 1
        if self._bar is not None:
            self._bar.failures = self._failures()
            self._bar.advance(self._task)
        elif time.monotonic() - self._printed > PRINT_EVERY_S:
            self._printed = time.monotonic()
            done = self._statuses.total()
            left = (self._printed - self._began) / done * (self._total - done)
            failures = f", {self._failures()}" if self._failures() else ""
            line = f"{self._what}: {done} of {self._total} cases, about {left:.0f} s left{failures}; {describe(item)}"
            self._console.print(line, markup=False, soft_wrap=True)

    def _failures(self) -> str:
        return ", ".join(f"{self._statuses[status]} {status}" for status in FAILED if self._statuses[status])

    def end(self) -> None:
        """The pass is over."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def records_as_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return records as rows for :func:`show`."""
    return [{name: getattr(record, name) for name in Record.__dataclass_fields__} for record in records]


def best_tables(records: Sequence[Record]) -> list[tuple[str, list[Row]]]:
    """Return (title, rows) tables: per operation, mode and dtype, every implementation at its best chunk length.

    A cell holds the median time in ms and the chunk length it was reached with. Where ``--gpu`` named another device
    than the measured one, an operation's last row is the runtime model's time there, at the chunk length best for it.
    """
    ours = [record for record in records if record.time_ms is not None]
    shapes = sorted({record.seq_len or 0 for record in ours})
    tables: list[tuple[str, list[Row]]] = []
    for mode, dtype in dict.fromkeys((r.mode, r.dtype) for r in ours):
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        best: dict[tuple[Any, ...], Record] = {}
        for record in ours:
            if (record.mode, record.dtype) != (mode, dtype) or record.time_ms is None:
                continue
            key = (*_row_key(record), record.seq_len)
            if key not in best or record.time_ms < (best[key].time_ms or float("inf")):
                best[key] = record
        for key in sorted(best, key=lambda k: (k[0] not in {"mlstm_sig", "mlstm_exp"}, k[0], k[2], k[1], k[-1] or 0)):
            record = best[key]
            row = rows.setdefault(key[:-1], {"operation": record.op, "implementation": _labelled(record)})
            row["size"] = _size(record)
            row.update({_short(length): row.get(_short(length)) for length in shapes})
            row[_short(record.seq_len or 0)] = _time_cell(record)
        tokens = {(r.batch or 1) * (r.seq_len or 1) for r in best.values()}
        at = f" at {tokens.pop():,} tokens" if len(tokens) == 1 else ""
        chunked = " @ best chunk" if any(record.chunk_size for record in best.values()) else ""
        axis = "sequence length" if any(record.d_model is None for record in best.values()) else "tokens"
        title = f"{MODE_NAMES[mode]}, {dtype}{'' if axis == 'tokens' else at}: ms{chunked}, by {axis}"
        modelled = _model_rows([r for r in ours if (r.mode, r.dtype) == (mode, dtype)])
        merged: list[Row] = []
        for key, group in itertools.groupby(rows.values(), key=lambda row: (row["operation"], row["size"])):
            merged += [*group, *modelled.get(key, ())]
        tables.append((title, merged))
    return tables


def _model_rows(records: Sequence[Record]) -> dict[tuple[str, str], list[Row]]:
    """Return by operation and heads the row of modelled times on ``--gpu``; none where that is what was measured."""
    best: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        if record.model_time_ms is None or record.accelerator == record.device_accelerator:
            continue
        lengths = best.setdefault((record.op, _size(record)), {})
        before = lengths.get(record.seq_len or 0)
        if before is None or record.model_time_ms < (before.model_time_ms or 0):
            lengths[record.seq_len or 0] = record
    return {
        (op, heads): [
            {
                "operation": op,
                "implementation": f"(model of {next(iter(lengths.values())).accelerator})",
                "size": heads,
                **{_short(length): _cell_at(each.model_time_ms, each) for length, each in lengths.items()},
            }
        ]
        for (op, heads), lengths in best.items()
    }


def _row_key(record: Record) -> tuple[Any, ...]:
    return record.op, record.impl, _size(record), record.state_dtype


def _size(sizes: Case | Record) -> str:
    """Return the sizes other than batch and sequence length: heads x head dims, channels, or an MLP's matrices."""
    if sizes.num_heads is not None:
        return f"{sizes.num_heads} x {_dims(sizes)}"
    if sizes.d_model is not None:
        return f"{sizes.d_model} -> {sizes.d_ff}"
    return f"{sizes.channels} channels" if sizes.channels else ""


def _dims(sizes: Case | Record) -> str:
    """Return the head dims as 128/256, or the values' alone where there are no queries."""
    return "/".join(str(dim) for dim in (sizes.head_dim_qk, sizes.head_dim_v) if dim is not None)


def _labelled(record: Record) -> str:
    states = f" ({record.state_dtype} states)" if record.state_dtype not in (None, "fp32") else ""
    return record.impl + states


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _time_cell(record: Record) -> str:
    return _cell_at(record.time_ms, record) + (" ?" if record.suspect else "")


def _cell_at(time_ms: float | None, record: Record) -> str:
    return f"{time_ms:.4g}" + (f" @{record.chunk_size}" if record.chunk_size else "")


def reasons(records: Sequence[Record]) -> list[Row]:
    """Return one row per distinct (operation, implementation, status, reason) of what is not ok, with the count."""
    counts = Counter((r.op, r.impl, r.status, r.reason) for r in records if r.status != "ok")
    return [
        {"operation": op, "implementation": impl, "status": status, "cases": n, "reason": reason}
        for (op, impl, status, reason), n in counts.most_common()
    ]


def print_summary(records: Sequence[Record]) -> None:
    """Print the tables that follow a sweep: the best times, the statuses, and why cases failed."""
    for title, rows in best_tables(records):
        _print_table(rows, title)
        print()
    if not records:
        return
    statuses = Counter(record.status for record in records)
    print("cases: " + ", ".join(f"{n} {status}" for status, n in statuses.most_common()))
    failures = reasons(records)
    if failures:
        _print_table(failures[:MAX_REASONS], None)
        if len(failures) > MAX_REASONS:
            print(f"and {len(failures) - MAX_REASONS} more reasons in the file")
    for record in records:
        if record.suspect:
            print(f"suspect (? above): {record.op} {record.impl} {record.mode} T={record.seq_len}: {record.suspect}")
