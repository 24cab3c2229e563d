"""Fit the costs by which the engine chooses a chunk length and an implementation, and say what the choices lose.

``python -m lrbench.tests.tools.fit_choice ROWS.parquet ...`` takes rows of whole_state and fused_chunk at several chunk
lengths, as ``lrbench bars default-choice`` measures them, and prints :class:`.choice.Costs` to be written there. The
rows must be of the GPUs in :data:`MEMORY_RATES`. Small problems must be among them: large ones alone do not show what a
launch costs.

Of the rows of a forward and backward pass, those count in which both took the same chunk length. That depends on the
costs with which they were measured. So before new costs are written, ``fit_choice keep ROWS.parquet KEPT.parquet``
writes the rows that count, and KEPT.parquet is what to fit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from lrbench.analysis.check.statistics import median
from lrbench.kernels.scalar_decay.choice import (
    COSTS,
    ONE_CHUNK,
    Costs,
    backward_chunk,
    best_chunk,
    sizes_of_case,
    time_us,
)
from lrbench.kernels.scalar_decay.config import fit_chunk
from lrbench.kernels.scalar_decay.declare import FUSED_CHUNK, SCHEMES, WHOLE_STATE
from lrbench.kernels.scalar_decay.plan import MEMORY_RATE, Sizes, kept_chunk
from lrbench.results import store

FORWARD, BACKWARD = "forward", "backward"
STEPS = 2500
"""Random moves of a fit, which takes a quarter of an hour."""

UNMEASURED = 0.06
"""What a choice counts as losing that was not measured."""

MEMORY_FACTORS = (1.0, 1.02, 0.98)
"""A good choice stays good if memory is a little slower or faster."""

MEMORY_RATES = {"h200_sxm": MEMORY_RATE, "h100_sxm": 3.352e12}
"""By clock and bus width, as :func:`.device.memory_rate` has them; both have :data:`.plan.MULTIPROCESSORS`."""

Cell = tuple[str, int]
"""A scheme and a chunk length."""

Times = Mapping[str, Mapping[Cell, float]]
"""A problem's times in microseconds, forward and backward."""


def keep(source: Path, kept: Path) -> None:
    """Write the rows that count, by the costs as they are."""
    rows = store.read_file(source).to_pylist()
    store.write_parquet([row for row in rows if _counts(row) and _took_one_chunk_length(row)], kept)


def _counts(row: Mapping[str, Any]) -> bool:
    return row["impl"] in (WHOLE_STATE, FUSED_CHUNK) and row["status"] == "ok" and row["dtype"] != "fp32"


def _shape_of(row: Mapping[str, Any]) -> tuple[Sizes, Cell]:
    shape = sizes_of_case(row, normalised=row["op"] == "mlstm_exp")
    shape = dataclasses.replace(shape, memory_rate=MEMORY_RATES[row["device_accelerator"]])
    return shape, (SCHEMES[row["impl"]], fit_chunk(row["chunk_size"], row["seq_len"]))


def _took_one_chunk_length(row: Mapping[str, Any]) -> bool:
    shape, (scheme, chunk) = _shape_of(row)
    return row["mode"] != "fwbw" or chunk <= backward_chunk(shape, scheme, _kept(shape, (scheme, chunk)))


def _kept(shape: Sizes, cell: Cell) -> int:
    return kept_chunk(shape, shape.config(*cell), cell[1])


def read_times(paths: Sequence[Path]) -> dict[tuple[Any, ...], tuple[Sizes, Times]]:
    """Return the least times of every problem in half precision: a backward pass is what both take without one."""
    found: dict[tuple[Any, ...], tuple[Sizes, dict[str, dict[Cell, float]]]] = {}
    for row in filter(_counts, store.read_results(paths).to_pylist()):
        shape, cell = _shape_of(row)
        times = found.setdefault((shape, row["op"], row["dtype"]), (shape, {"fw": {}, "fwbw": {}}))[1]
        if row["mode"] in times:
            times[row["mode"]][cell] = min(1e3 * row["time_ms"], times[row["mode"]].get(cell, math.inf))
    problems = {}
    for key, (shape, times) in found.items():
        backward = {cell: both - times["fw"][cell] for cell, both in times["fwbw"].items() if cell in times["fw"]}
        problems[key] = shape, {FORWARD: times["fw"], BACKWARD: backward}
    return problems


def _sum_us(shape: Sizes, cell: Cell, costs: Costs, kept: int | None) -> float:
    return sum(time_us(shape, shape.config(*cell), cell[1], costs, kept=kept))


def model_us(shape: Sizes, direction: str, cell: Cell, costs: Costs) -> float:
    """Return the modelled time of a pass; a backward pass follows a forward pass with the same chunks."""
    return _sum_us(shape, cell, costs, None if direction == FORWARD else _kept(shape, cell))


def loss(problems: Sequence[tuple[Sizes, Times]], costs: Costs) -> float:
    """Return the mean square of the relative errors, in which the fastest of a problem's times count most.

    What all of its times share, the gates' kernels for one, is no matter of choice: the fastest is taken as exact.
    """
    total = weight = 0.0
    for shape, times in problems:
        for direction, cells in times.items():
            modelled = {cell: model_us(shape, direction, cell, costs) for cell in cells}
            best = min(cells, key=cells.__getitem__, default=None)
            for cell, measured in cells.items() if best is not None else ():
                error = (modelled[cell] - modelled[best] + cells[best] - measured) / measured
                total += (cells[best] / measured * error) ** 2
                weight += (cells[best] / measured) ** 2
    return total / weight


def aim(problems: Sequence[tuple[Sizes, Times]], costs: Costs) -> float:
    """Return what the fit makes least: what choices lose, the worst most, and the error of the times as a guide."""
    found = []
    for factor in MEMORY_FACTORS:
        moved = dataclasses.replace(costs, memory=costs.memory * factor)
        lost = [regret for direction in (FORWARD, BACKWARD) for regret in regrets(problems, moved, direction)]
        found.append(sum(regret**1.5 for regret in lost) + 8 * max(lost) + 2 * loss(problems, moved))
    return found[0] + sum(found) / len(found)


def fit(problems: Sequence[tuple[Sizes, Times]], costs: Costs) -> Costs:
    """Return the costs of least error: each is moved up and down, in smaller steps where nothing helps."""
    step, least = 0.3, loss(problems, costs)
    while step > 0.004:
        before = least
        for cost in dataclasses.fields(costs):
            for factor in (math.exp(step), math.exp(-step)):
                moved = dataclasses.replace(costs, **{cost.name: getattr(costs, cost.name) * factor})
                if (found := loss(problems, moved)) < least:
                    costs, least = moved, found
        if least == before:
            step /= 2
    return costs


def search(problems: Sequence[tuple[Sizes, Times]], costs: Costs, steps: int) -> Costs:
    """Return costs of a smaller aim: of random moves of a few costs at once, those that help are kept."""
    random, least, spread = Random(0), aim(problems, costs), 0.12
    names = [cost.name for cost in dataclasses.fields(costs)]
    for _ in range(steps):
        some = random.sample(names, random.randint(1, 4))
        moved = {name: getattr(costs, name) * math.exp(random.gauss(0, spread)) for name in some}
        found = aim(problems, candidate := dataclasses.replace(costs, **moved))
        if found < least:
            costs, least, spread = candidate, found, min(0.3, 1.5 * spread)
        else:
            spread = max(0.015, 0.98 * spread)
    return costs


def regrets(problems: Sequence[tuple[Sizes, Times]], costs: Costs, direction: str) -> Iterator[float]:
    """Yield what the choice of a chunk length by costs loses against the best measured, where it was measured.

    Measured are passes with the same chunks. After a forward pass with others, a backward pass must compute the states
    that it would have been given; what that takes is added by the model.
    """
    for shape, times in problems:
        cells = times[direction]
        for scheme in {scheme for scheme, _ in cells}:
            measured = {chunk: time for (other, chunk), time in cells.items() if other == scheme}
            chosen = best_chunk(shape, scheme, costs)
            if direction == BACKWARD:
                kept = _kept(shape, (scheme, chosen))
                chosen = best_chunk(shape, scheme, costs, kept=kept)
                for chunk in measured:
                    measured[chunk] += _sum_us(shape, (scheme, chunk), costs, kept)
                    measured[chunk] -= model_us(shape, direction, (scheme, chunk), costs)
            if shape.seq_len > ONE_CHUNK and len(measured) > 1:
                yield measured[chosen] / min(measured.values()) - 1 if chosen in measured else UNMEASURED


def main(arguments: Sequence[str]) -> None:
    """Write the rows that count, or print the costs as they are and those fitted, with what they lose."""
    match arguments:
        case []:
            raise SystemExit("give files of rows, got none")
        case ["keep", *files]:
            if len(files) != 2:
                raise SystemExit(f"keep takes the file to read and the file to write, got {len(files)} names")
            keep(*map(Path, files))
            return
    problems = list(read_times([Path(name) for name in arguments]).values())
    start = min(COSTS, fit(problems, COSTS), key=functools.partial(aim, problems))
    for name, costs in (("now", COSTS), ("fitted", search(problems, start, STEPS))):
        print(f"{name}: {costs}, error {math.sqrt(loss(problems, costs)):.3f}")
        for direction in (FORWARD, BACKWARD):
            lost = list(regrets(problems, costs, direction))
            print(f"  {direction}: {len(lost)} choices lose {median(lost):.3f} in the median, {max(lost):.3f} at most")


if __name__ == "__main__":
    main(sys.argv[1:])
