"""What the commands show: tables, JSON, CSV and progress. Standard output gets the data, standard error all else."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.measure import measure_renderables
from rich.table import Table
from rich.text import Text

from ...analysis.model.runtime_model import cached
from ...results.schema import Record
from ...results.select import (
    MODE_NAMES,
    describe,
    describe_axes,
    describe_sizes,
    device_of,
    grouped,
    marked,
    short_size,
)
from ..worker.noise import commonest
from ..worker.sustained import NOT_SUSTAINED

MAX_REASONS = 30

GAP = 2
"""Blanks between the columns of a table."""

LONG_WORD = 20
"""Characters of a word beyond which a column may be too narrow for it."""

Row = Mapping[str, Any]


def say(text: str, end: str = "\n") -> None:
    """Print a sentence in lines as wide as the terminal; in a pipe, as ``COLUMNS`` says, else 80 characters."""
    width = shutil.get_terminal_size().columns
    print(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False), end=end)


def show(rows: Row | Sequence[Row], output_format: str, *, title: str | None = None, fold: bool = False) -> None:
    """Print rows as a table, JSON or CSV; an object as JSON alone. ``fold``: a table's lines too, as :func:`say`."""
    if output_format == "json":
        print(json.dumps(rows if isinstance(rows, Mapping) else list(rows), indent=2, allow_nan=False))
        return
    assert not isinstance(rows, Mapping)
    if output_format == "csv":
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: json.dumps(x) if isinstance(x, list | tuple) else x for name, x in row.items()})
    else:
        _print_table(rows, title, fold)


def brief_rows(rows: Sequence[Row]) -> list[Row]:
    """Return what people see of stored rows: the case, on which device if there are several, what was measured, and
    what speaks against it."""
    shown = ("status", "time_ms", "host_ms", "peak_memory_bytes", "tflops", "gbps", "roofline_fraction")
    several = len(set(map(device_of, rows))) > 1
    return [
        {
            **{name: row[name] for name in ("op", "impl", "mode")},
            "case": describe_sizes(row),
            "device": device_of(row) if several else None,
            **{name: row[name] for name in shown},
            "roof": cached(row["roofline_fraction"]) or None,
            **{name: row[name] for name in ("noise", "suspect")},
            "run": row["run_id"][:8],
        }
        for row in rows
    ]


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Let whoever reads standard output stop before its end, as ``head`` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would fail again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_table(rows: Sequence[Row], title: str | None, fold: bool = False) -> None:
    """Print a table, on a terminal wrapped to its width; elsewhere, without ``fold``, lines are as long as it needs.

    Where the terminal is too narrow for all but long words, columns with one value are printed above the table instead,
    and where that is not enough, each row as "name: value" pairs. A single column is never wrapped: its lines may be
    commands to copy.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    screen, console.width = console.width, 10**6  # in which no table is wrapped
    if title is not None:
        _print(console, Text(title, "italic"))
    columns = {name: [_cell(row.get(name)) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)}
    # Columns that are empty in every row are left out.
    columns = {name: texts for name, texts in columns.items() if any(texts)}
    words = ([Text(text) for text in (name, *texts)] for name, texts in columns.items())
    measured = [measure_renderables(console, console.options, each) for each in words]
    widths, least = [each.maximum for each in measured], [min(each.minimum, LONG_WORD) for each in measured]
    if (fold or console.is_terminal) and len(columns) > 1:
        available = screen - GAP * (len(columns) - 1)
        if sum(least) > available:
            shared = {name: texts[0] for name, texts in columns.items() if len(rows) > 1 and len(set(texts)) == 1}
            if 0 < len(shared) < len(columns):
                said = ", ".join(f"{name} {text}" for name, text in shared.items())
                _print_table([{n: row.get(n) for n in columns if n not in shared} for row in rows], said, fold)
                return
            for line in zip(*columns.values(), strict=True):
                broken = [""]
                for pair in (f"{name}: {text}" for name, text in zip(columns, line, strict=True) if text):
                    # A pair that fits on a line is not broken.
                    for n, word in enumerate([pair] if cell_len(pair) <= screen - 4 else pair.split()):
                        longer = f"{broken[-1]}{' ' if n else GAP * ' '}{word}".strip()
                        broken[-1:] = [longer] if cell_len(longer) <= screen - 4 else [*filter(None, broken[-1:]), word]
                print("\n    ".join(broken))
            return
        for _ in range(sum(widths) - available):
            spare = [(w > of.minimum, w > low, w) for w, of, low in zip(widths, measured, least, strict=True)]
            widths[spare.index(max(spare))] -= 1
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="none")
    for name, width in zip(columns, widths, strict=True):
        right = any(isinstance(row.get(name), (int, float)) for row in rows)
        how: dict[str, Any] = {"justify": "right" if right else "left", "overflow": "fold"}
        table.add_column(Text.assemble((name, "bold")), width=width, **how)
    for line in zip(*columns.values(), strict=True):
        table.add_row(*line)
    if columns:
        _print(console, table)


def _print(console: Console, what: RenderableType) -> None:
    """Print without blanks at the ends of lines, and leave to the caller what a closed pipe means."""
    with console.capture() as printed:
        console.print(what)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(part) for part in value)
    return " ".join(str(value).splitlines())


def show_planned(rows: Sequence[Row]) -> None:
    """Print a row for each implementation and mode of a planned sweep, and what will not run."""
    left = (row for row in rows if not row["not run"])
    table = [
        {
            **{name: cases[0][name] for name in ("op", "impl", "mode")},
            "cases": len(cases),
            "over": describe_axes(cases),
            "seconds": round(sum(case["seconds"] for case in cases)),
        }
        for cases in grouped(left, itemgetter("op", "impl", "mode")).values()
    ]
    _print_table(table, None)
    if refused := Counter((row["impl"], row["not run"]) for row in rows if row["not run"]):
        print()
        _print_table([{"impl": i, "cases": n, "reason": why} for (i, why), n in refused.items()], "not run")


def best_tables(records: Sequence[Record]) -> list[tuple[str, list[Row]]]:
    """Return (title, rows) tables: per operation, mode and dtype, every implementation at its best chunk length.

    Columns are sequence lengths, of decoding steps contexts; rows name the batch where a column has several.
    A cell holds the median time in ms and the chunk length it was reached with, marked ``?`` where it is suspect and
    ``(busy)`` where the machine was. Where ``--gpu`` named another device than the measured one, an operation's last
    row is what `lrbench predict` answers for it (:func:`.choice.expected`).
    """
    from .choice import expected

    timed = [record for record in records if record.time_ms is not None]
    tables: list[tuple[str, list[Row]]] = []
    marked = [*((record, "") for record in timed), *expected(timed)]
    for (mode, dtype), pairs in grouped(marked, lambda pair: (pair[0].mode, pair[0].dtype)).items():
        here = [record for record, _ in pairs]
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        several = len({(r.seq_len, r.batch) for r in here}) > len({r.seq_len for r in here})
        best: dict[tuple[Any, ...], tuple[Record, str]] = {}
        for r, mark in sorted(pairs, key=lambda pair: pair[0].time_ms or 0.0):
            # Without a context the column of a step is 0.
            column = (r.context if mode == "step" else r.seq_len) or 0
            best.setdefault((r.op, r.impl, several and r.batch, _size(r), r.state_dtype, column), (r, mark))
        columns = dict.fromkeys(map(_column_title, sorted({key[-1] for key in best})))
        for key in sorted(best, key=_place):
            record, mark = best[key]
            states = f" ({record.state_dtype} states)" if record.state_dtype not in (None, "fp32") else ""
            named = {"operation": record.op, "implementation": record.impl + states}
            row = rows.setdefault(key[:-1], {**named, "size": _size(record, batch=several), **columns})
            chunk = f" @{record.chunk_size}" if record.chunk_size else ""
            marks = " ?" * bool(record.suspect) + " (busy)" * bool(record.noise)
            row[_column_title(key[-1])] = f"{mark}{record.time_ms:.4g}{chunk}{marks}"
        tokens = {(r.batch or 1) * (r.seq_len or 1) for r, _ in best.values()}
        at = f" at {tokens.pop():,} tokens" if len(tokens) == 1 else ""
        chunked = " @ best chunk" if any(record.chunk_size for record, _ in best.values()) else ""
        axis = "sequence length" if any(record.d_model is None for record in here) else "tokens"
        if mode == "step":
            axis, at = "context", at.replace("tokens", "sequences")
        title = f"{MODE_NAMES[mode]}, {dtype}{'' if axis == 'tokens' else at}: ms{chunked}, by {axis}"
        tables.append((title, list(rows.values())))
    return tables


def sustained_rows(records: Sequence[Record]) -> list[Row]:
    """Return what cases do that were called until clocks and power settled, beside their usual (burst) time."""
    return [
        {
            "case": describe(asdict(r)),
            **{"burst_ms": r.time_ms, "sustained_ms": r.sustained_ms},
            "clock_mhz": r.sm_clock_mhz and f"{r.sm_clock_mhz:.0f} -> {r.sustained_clock_mhz or 0:.0f}",
            "power_w": r.sustained_power_w,
            **{name: getattr(r, name) for name in ("energy_j", "net_energy_j")},
            "uj_per_token": r.energy_j and 1e6 * r.energy_j / ((r.batch or 1) * (r.seq_len or 1)),
            "lowered by": r.sustained_throttled,
            "remark": r.reason or r.noise or ("" if r.settled_s else "still changing"),
        }
        for r in records
        if r.sustained_ms is not None or (r.reason or "").startswith(NOT_SUSTAINED)
    ]


def _place(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return where the row of (op, impl, batch, size, state dtype, column) comes: mLSTM first, other devices last."""
    op, impl, *sizes, _, column = key
    return op not in {"mlstm_sig", "mlstm_exp"}, op, sizes, impl.startswith("("), impl, column


def _column_title(column: int) -> str:
    return short_size(column) if column else "any"


def _size(record: Record, *, batch: bool = False) -> str:
    """Return the sizes other than the sequence length and what has a place of its own: widths, layers, the batch."""
    elsewhere = ("seq_len", "context", "chunk_size", "dtype", "state_dtype", *(() if batch else ("batch",)))
    return describe_sizes({**vars(record), **dict.fromkeys(elsewhere)})


def print_summary(records: Sequence[Record]) -> None:
    """Print the tables that follow a sweep: the best times, the statuses, and why cases failed."""
    records = marked(records)
    for title, rows in best_tables(records):
        _print_table(rows, title)
        print()
    if sustained := sustained_rows(records):
        _print_table(sustained, "called without a pause until clocks and power settled; energy of a call")
        print()
    if not records:
        return
    statuses = Counter(record.status for record in records)
    print("cases: " + ", ".join(f"{n} {status}" for status, n in statuses.most_common()))
    reasons = Counter((r.op, r.impl, r.status, r.reason) for r in records if r.status != "ok")
    failures = [
        {"operation": op, "implementation": impl, "status": status, "cases": n, "reason": reason}
        for (op, impl, status, reason), n in reasons.most_common(MAX_REASONS)
    ]
    if failures:
        _print_table(failures, None)
    if len(reasons) > MAX_REASONS:
        print(f"and {len(reasons) - MAX_REASONS} more reasons in the file")
    if noisy := [record.noise for record in records if record.noise]:
        print(f"on a busy machine: {len(noisy)} of {len(records)} cases, mostly {commonest(noisy)}")
    for record in records:
        if record.suspect:
            print(f"suspect (? above): {record.op} {record.impl} {record.mode} T={record.seq_len}: {record.suspect}")
