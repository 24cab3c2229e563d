"""Several sets of results side by side, such as versions of Triton: a row for each case, a column for each side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...results.contents import markdown_table
from ...results.select import Row, describe_sizes, device_of, grouped
from ...results.store import HERE
from ...results.toml_tables import AMOUNT, read_toml
from .compare import by_key, ends, is_measured, is_noisy, judge, key_columns, time_interval
from .statistics import UNKNOWN, Interval

PROCESSES = 0.03
"""By how much the times of the same code differ from process to process."""

UNSAID = ("batch", "seq_len", "chunk_size", "dtype")
"""Columns of a case that the page says at its head."""

GUESSED_WITH, SURPRISE = "3.8.0", 0.1
"""Guesses are times over the time with this version; they are wrong if they are off by more than this factor."""

_TEXT = Path(__file__).with_name("triton.txt").read_text(encoding="utf-8")
_VALUES = {"processes": round(100 * PROCESSES), "surprise": round(100 * SURPRISE), "guessed_with": GUESSED_WITH}
HEAD, GUESSES = _TEXT.format(**_VALUES).split("\n---\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCell:
    """A side's row of a case; of a measured one its time over the fastest side's, and what that means."""

    row: Row
    ratio: float | None = None
    interval: Interval = UNKNOWN
    verdict: str | None = None


MatrixLine = Mapping[str, MatrixCell]
"""A case: side -> cell, of the sides that have a row of it."""


def triton_sides(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return version of Triton -> rows, oldest version first; of a case on a device only the rows of its newest run."""
    from packaging.version import Version

    kept: list[Row] = []
    for group in grouped(rows, lambda row: (row["case_id"], device_of(row))).values():
        last = max(group, key=lambda row: str(row["measured_at"]))["run_id"]
        kept += [row for row in group if row["run_id"] == last]
    versions = grouped((row for row in kept if row["triton_version"]), lambda row: str(row["triton_version"]))
    return {version: versions[version] for version in sorted(versions, key=Version)}


def matrix(
    sides: Mapping[str, Sequence[Row]], *, ignore: Sequence[str] = (), margin: float = PROCESSES
) -> tuple[MatrixLine, ...]:
    """Return a line for each case that a side has; sides are matched and judged as :func:`.compare.compare` does."""
    columns = key_columns([*sides.values()], ignore)
    keyed = {side: by_key(own, columns) for side, own in sides.items()}
    keys = dict.fromkeys(key for own in keyed.values() for key in own)
    return tuple(_line({side: own[key] for side, own in keyed.items() if key in own}, margin) for key in keys)


def _line(rows: Mapping[str, Row], margin: float) -> MatrixLine:
    timed = [row for row in rows.values() if is_measured(row)]
    fastest = min(timed, key=lambda row: float(row["time_ms"]), default=None)

    def cell(row: Row) -> MatrixCell:
        if fastest is None or not is_measured(row):
            return MatrixCell(row=row)
        interval = time_interval(row, fastest)
        verdict = judge(interval, margin, noisy=is_noisy(row, fastest))
        return MatrixCell(row=row, ratio=row["time_ms"] / fastest["time_ms"], interval=interval, verdict=verdict)

    return {side: cell(row) for side, row in rows.items()}


def load_guesses() -> Mapping[str, Mapping[str, float]]:
    """Return "op impl" -> version -> its expected time over that with 3.8.0, of the versions expected to run it."""
    form = {"guesses": Mapping[str, Mapping[str, AMOUNT]]}
    found: Mapping[str, Mapping[str, float]] = read_toml(HERE / "triton_guesses.toml", form, "guesses")["guesses"]
    return found


def surprises(lines: Sequence[MatrixLine], guesses: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return a row for each cell whose guess was wrong: by more than 10 %, or about whether the kernel runs."""
    versions = {GUESSED_WITH}.union(*guesses.values())
    found = []
    for line in lines:
        if (own := guesses.get(f"{_row(line)['op']} {_row(line)['impl']}")) is None:
            continue
        base = line[GUESSED_WITH].ratio if GUESSED_WITH in line else None
        for side in [side for side in line if side in versions]:
            cell, guess = line[side], {GUESSED_WITH: 1.0, **own}.get(side)
            ratio = cell.ratio / base if cell.ratio and base else None
            off = guess and ratio and abs(ratio / guess - 1) > SURPRISE
            if off or (guess is None) != (cell.ratio is None):
                measured = cell.row["status"] if cell.ratio is None else f"{ratio:.2f}" if ratio else "runs"
                guessed = "does not run" if guess is None else f"{guess:.2f}"
                found.append({**_names(_row(line), UNSAID), "Triton": side, "guessed": guessed, "measured": measured})
    return found


def long_rows(lines: Sequence[MatrixLine]) -> list[dict[str, Any]]:
    """Return a row for each cell, with numbers, for programs."""
    return [
        {
            **_names(_row(line)),
            "device": device_of(cell.row),
            "side": side,
            "status": cell.row["status"],
            "time_ms": cell.row["time_ms"],
            "ratio": cell.ratio,
            **ends(cell.interval),
            "verdict": cell.verdict,
            "reason": cell.row["reason"],
            "run_id": cell.row["run_id"],
        }
        for line in lines
        for side, cell in line.items()
    ]


def wide_rows(lines: Sequence[MatrixLine], sides: Collection[str], unsaid: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row for each case, with a text for each side, for people; ``unsaid`` columns of a case are left out."""
    shown = []
    several = len({device_of(_row(line)) for line in lines}) > 1
    for line in lines:
        texts = {side: _text(line[side]) if side in line else "" for side in sides}
        good = [side for side, cell in line.items() if cell.verdict not in (None, "slower")]
        use = "all" if len(good) == len(sides) else ", ".join(good) or "none"
        device = {"device": device_of(_row(line))} if several else {}
        shown.append({**device, **_names(_row(line), unsaid), **texts, "use": use})
    return shown


def why_not(lines: Sequence[MatrixLine]) -> list[dict[str, Any]]:
    """Return why cells have no time, equal reasons together."""
    found = [(side, cell.row) for line in lines for side, cell in line.items() if cell.ratio is None]
    causes = grouped(found, lambda each: (*(each[1][name] for name in ("op", "impl", "status", "reason")), each[0]))
    return [
        {"op": op, "impl": impl, "with": side, "cases": len(alike), "reason": f"{status}: {reason}"}
        for (op, impl, status, reason, side), alike in causes.items()
    ]


def runs_differ(lines: Sequence[MatrixLine]) -> int:
    """Return how many cases have measured rows of several runs."""
    runs = ({cell.row["run_id"] for cell in line.values() if cell.ratio is not None} for line in lines)
    return sum(len(each) > 1 for each in runs)


def as_page(rows: Sequence[Row]) -> str:
    """Return the page of the rows of sweeps over several Tritons: how to read it, then the tables of every device."""
    parts, guesses = [HEAD], load_guesses()
    for device, here in sorted(grouped(rows, device_of).items()):
        sides = triton_sides(here)
        lines = sorted(matrix(sides), key=lambda line: itemgetter("op", "impl", "mode")(_row(line)))
        first = max(here, key=lambda row: str(row["measured_at"]))
        parts.append(f"## {device}\n\n{first['device_name']}, torch {first['torch_version']}.\n")
        for table in (wide_rows(lines, sides, UNSAID), why_not(lines)):
            parts += markdown_table(table) if table else []
        if wrong := surprises(lines, guesses):
            parts += [GUESSES, *markdown_table(wrong)]
    if not rows:
        parts.append("No rows are committed yet.\n")
    return "\n".join(parts)


def _row(line: MatrixLine) -> Row:
    """Return any of a case's rows."""
    return next(iter(line.values())).row


def _names(row: Row, unsaid: Sequence[str] = ()) -> dict[str, Any]:
    case = describe_sizes({**row, **dict.fromkeys(unsaid)})
    return {**{name: row[name] for name in ("op", "impl", "mode")}, "case": case}


def _text(cell: MatrixCell) -> str:
    if cell.ratio is None:
        return str(cell.row["status"])
    mark = "?" if str(cell.verdict).startswith("unclear") else ""
    return f"{cell.row['time_ms']:.4g} ({cell.ratio:.2f}{mark})"
