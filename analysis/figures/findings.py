"""The statement that a figure of results makes, and the lines that it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...kernels import FAMILIES
from ...results.select import best_rows, ok_rows, short_size
from .style import OPERATION_LABELS, operation_label

if TYPE_CHECKING:
    import pandas as pd

    from .selection import Chosen

MAX_LINES = 8
"""The most lines of a figure of results, unless all are asked for."""

OURS = "lrbench"
FAMILY = {op: kernel for kernel, ops in FAMILIES.items() for op in ops}
NEEDS = {"peak_memory_bytes": "memory", "energy_j": "energy"}
"""Column of which less is better and that is no time -> what a statement calls it."""

PARTIAL = ("projections",)
"""Operations that do only part of the work: a figure shows them as a floor, no statement compares with them."""

Line = tuple[str, str]
"""Operation and implementation."""


def lines_in_order(rows: pd.DataFrame, x: str) -> list[Line]:
    """Return the lines of a figure, those first that say most beside ours.

    The fastest ones come first: ours and each other author's of the first operation that we have measured; then, of
    other operations, ours before the fastest of the others, an operation of each author in turn, first those that we
    have; other families' operations follow. Lines with less than a third of the points of ours are left out. Over chunk
    size lines are compared at their best.

    Args:
        rows: one measured row for each point, of all panels.
        x: the column along the axis.
    """
    points = ok_rows(rows)
    at, time_ms = ["mode", x], points["time_ms"]
    if x == "chunk_size":
        at, time_ms = ["mode"], points.groupby(["op", "impl", "mode"])["time_ms"].transform("min")
    slowness = time_ms / time_ms.groupby([points[name] for name in at]).transform("min")
    table = points.assign(slowness=slowness).groupby(["op", "impl", "provider"])["slowness"]
    lines = table.agg(["size", "median"]).reset_index().sort_values("median", kind="stable")
    own = lines[lines["provider"] == OURS]
    own = lines if own.empty else own
    lines = lines[3 * lines["size"] >= own["size"].max()]
    ops = [*OPERATION_LABELS, *sorted(set(lines["op"]) - set(OPERATION_LABELS))]
    first = min(own["op"][2 * own["size"] >= own["size"].max()], key=ops.index)
    ours = lines["provider"] == OURS
    author = lines["provider"].where((lines["op"] == first) | ours, "")
    slower = lines.groupby([lines["op"], author]).cumcount() > 0
    rivals = lines.assign(later=lines["op"] != first, alone=~lines["op"].isin(lines["op"][ours]))[~ours & ~slower]
    rivals = rivals.sort_values(["later", "alone"], kind="stable")
    rivals = rivals.assign(turn=rivals.groupby("provider").cumcount()).sort_values("turn", kind="stable")
    place = {op: n for n, op in enumerate(dict.fromkeys([first, *rivals["op"]]))}
    foreign = ~lines["op"].map(FAMILY).isin([FAMILY.get(first), None])
    lines = lines.assign(slower=slower, foreign=foreign, place=lines["op"].map(place), others=~ours)
    lines = lines.sort_values(["slower", "foreign", "place", "others"], kind="stable")
    return [*lines[["op", "impl"]].itertuples(index=False, name=None)]


def main_lines(
    chosen: Chosen, rows: pd.DataFrame, x: str, most: int = MAX_LINES
) -> tuple[Chosen, pd.DataFrame, Line, str]:
    """Leave out all but the first ``most`` lines.

    Returns:
        what is chosen, its points, the line that the figure's statement is about, and a note.
    """
    shown = lines_in_order(rows, x)[:most]
    if chosen.every:
        return chosen, rows, shown[0], ""
    points = in_lines(rows, shown)
    hidden = rows[~points].drop_duplicates(["op", "impl"])
    # What failed everywhere is no line; the note names it where it computes what the first line does.
    failed = chosen.rows["op"].eq(shown[0][0]) & ~in_lines(chosen.rows, zip(hidden["op"], hidden["impl"], strict=True))
    kept = dataclasses.replace(chosen, rows=chosen.rows[in_lines(chosen.rows, shown) | failed])
    note = f"{len(hidden)} more line{'s' * (len(hidden) > 1)} with --all." if len(hidden) else ""
    return kept, rows[points], shown[0], note


def in_lines(rows: pd.DataFrame, lines: Iterable[Line]) -> pd.Series:
    """Return which rows are of one of the lines."""
    import pandas as pd

    wanted = set(lines)
    found = [line in wanted for line in zip(rows["op"].tolist(), rows["impl"].tolist(), strict=True)]
    return pd.Series(found, rows.index, dtype=bool)


def beside_others(rows: pd.DataFrame, first: Line, x: str, over: str, column: str, known: pd.DataFrame) -> str:
    """Return by which factor ours is faster, or needs less of :data:`NEEDS`, than the best of the others; "" if none.

    The others are those that compute the same, else all. Points are left out that the best of them lacks: beside slower
    peers alone ours would seem faster than it is.

    Args:
        rows: of the lines that are drawn.
        first: the one of ours, see :func:`lines_in_order`.
        over: what ``x`` is called.
        known: rows that tell which of the others is the best, of other modes and of lines that are not drawn too.
    """

    op, at = first[0], ["mode", x]

    def usable(rows: pd.DataFrame) -> pd.DataFrame:
        rows = ok_rows(rows)
        return rows[rows["suspect"].isna() & rows["noise"].isna() & rows[column].notna()]

    ours, known = usable(rows[in_lines(rows, [first])]), best_rows(usable(known), ("op", "impl", *at))
    others = known[(known["provider"] != OURS) & ~known["op"].isin(PARTIAL)]
    others = others[others["op"] == op] if (others["op"] == op).any() else others
    if others.empty or set(ours["provider"]) != {OURS}:
        return ""
    beside = known[in_lines(known, [first])].set_index(at)[column].rename("ours")
    others = others.join(beside, on=at)
    others = others.assign(factor=others[column] / others["ours"]).dropna(subset="factor")
    if others.empty:
        return ""
    # What was measured at few points decides at those alone, and what runs forward alone not where there are gradients.
    regular = others[3 * others.groupby(["op", "impl"])[x].transform("nunique") >= ours[x].nunique()]
    differentiated = regular["mode"].isin(("fwbw", "bw"))
    compared = [*_where_best(regular[differentiated], at), *_where_best(regular[~differentiated], at)]
    compared = ours.set_index(at).index.intersection(compared)
    others = others[others.set_index(at).index.isin(compared)]
    if others.empty:
        return ""
    factors = others.groupby(at)["factor"].min()
    everywhere = f" at every {over}" if ours[x].nunique() > 1 and len(factors) == len(ours) else ""
    names = others["provider"].where(others["op"] == op, others["op"].map(operation_label)).unique()
    several = "the best of the others" if (others["op"] == op).all() else "the best of other mathematics"
    name, rival = f"{operation_label(op)}: ours", names[0] if len(names) == 1 else several
    low, high = factors.min(), factors.max()
    needed = NEEDS.get(column)
    if max(high, 1 / low) < 1.02:
        return f"{name} {f'needs as much {needed}' if needed else 'is as fast'} as {rival}{everywhere}"
    if needed:
        return f"{name} needs {_span(1 / high, 1 / low)} times the {needed} of {rival}{everywhere}"
    if high < 1:
        return f"{name} takes {_span(1 / high, 1 / low)} times as long as {rival}{everywhere}"
    return f"{name} is {_span(low, high)} times as fast as {rival}{everywhere}"


def _where_best(others: pd.DataFrame, at: list[str]) -> list[tuple[Any, ...]]:
    """Return the points that the best line has: the one that is fastest where another one has a point too, else the one
    whose median factor is least."""
    if others.empty:
        return []
    table = others.pivot_table("factor", at, ["op", "impl"], aggfunc="min")
    beside = {each: (table[each] / table.drop(columns=[each]).min(axis=1)).median() for each in table}
    slower = {each: factor for each, factor in beside.items() if factor == factor} or dict(table.median())
    return table.index[table[min(slower, key=lambda each: slower[each])].notna()].tolist()


def _span(low: float, high: float) -> str:
    return " to ".join(dict.fromkeys(map(_factor, (low, high))))


def _factor(value: float) -> str:
    """Return a factor in two digits; next to 1 in two decimals, where 1.057 would become 1.1."""
    if 0.995 <= value < 1.1:
        return f"{value:.2f}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def best_chunk(rows: pd.DataFrame, first: Line) -> str:
    """Return at which chunk size the first line is fastest, and how much slower it is at its slowest.

    Args:
        rows: of the lines that are drawn, over chunk size.
    """
    line = ok_rows(rows)
    line = line[in_lines(line, [first])]
    best = line.loc[line.groupby("mode")["time_ms"].idxmin()]
    worst = (line.groupby("mode")["time_ms"].max() / best.set_index("mode")["time_ms"]).max()
    sizes = {short_size(row.chunk_size): row.mode for row in best.itertuples()}
    where = next(iter(sizes)) if len(sizes) == 1 else ", ".join(f"{size} ({mode})" for size, mode in sizes.items())
    cost = f", {_factor(worst)} times as fast as at its worst" if worst >= 1.05 else ""
    return f"{operation_label(first[0])} {first[1]} is fastest at chunk size {where}{cost}"


def share_of_roof(rows: pd.DataFrame, first: Line, modes: Mapping[str, str]) -> str:
    """Return which share of the roof the first line reaches.

    Args:
        rows: of the lines that are shown, one for each mode, with their ``share`` in percent.
        modes: their names.
    """
    shares = rows[in_lines(rows, [first])].set_index("mode")["share"]
    said = ", ".join(f"{shares[mode]:.0f} % of the roof {name}" for mode, name in modes.items() if mode in shares)
    return f"{operation_label(first[0])} {first[1]} reaches {said}"
