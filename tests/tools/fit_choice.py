"""Fit the costs by which the engine chooses a chunk length and an implementation, and say what the choices lose.

``python -m lrbench.tests.tools.fit_choice ROWS.parquet ...`` takes rows of whole_state and fused_chunk at several chunk
lengths, as ``lrbench bars default-choice`` measures them, and prints :class:`.choice.Costs` to be written there. The
rows must be of the GPUs in :data:`MEMORY_RATES`. Small problems must be among them: large ones alone do not show what a
launch costs.

A row of a forward and backward pass counts only if the backward pass took the same chunk length, which the present
costs decide. So before new costs are written, remove the rows in which it took a shorter one.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lrbench.analysis.check.statistics import median
from lrbench.kernels.scalar_decay.choice import COSTS, MEMORY_RATE, ONE_CHUNK, Costs, Shape, backward_chunk, shape_of
from lrbench.kernels.scalar_decay.config import fit_chunk
from lrbench.kernels.scalar_decay.declare import FUSED_CHUNK, SCHEMES, WHOLE_STATE
from lrbench.results import store

FORWARD, BACKWARD = "forward_us", "backward_us"
FIRST_STEP, LAST_STEP = 0.3, 0.004
"""Logarithms of the factors by which a cost is moved."""

MEMORY_RATES = {"h200_sxm": MEMORY_RATE, "h100_sxm": 3.352e12}
"""By clock and bus width, as :func:`.device.memory_rate` has them; both have :data:`.choice.MULTIPROCESSORS`."""

Cell = tuple[str, int]
"""A scheme and a chunk length."""

Times = Mapping[str, Mapping[Cell, float]]
"""A problem's times in microseconds, forward and backward."""


def read_times(paths: Sequence[Path]) -> dict[tuple[Any, ...], tuple[Shape, Times]]:
    """Return the least times of every problem in half precision: a backward pass is what both take without one."""
    found: dict[tuple[Any, ...], tuple[Shape, dict[str, dict[Cell, float]]]] = {}
    for row in store.read_results(paths).to_pylist():
        if row["impl"] not in (WHOLE_STATE, FUSED_CHUNK) or row["status"] != "ok" or row["dtype"] == "fp32":
            continue
        sizes = {name: row[name] for name in ("batch", "seq_len", "num_heads", "head_dim_qk", "head_dim_v")}
        rate = MEMORY_RATES[row["device_accelerator"]]
        key = (rate, row["op"], row["dtype"], *sizes.values())
        shape = dataclasses.replace(shape_of(sizes, normalised=row["op"] == "mlstm_exp"), memory_rate=rate)
        times = found.setdefault(key, (shape, {"fw": {}, "fwbw": {}}))[1]
        cell = SCHEMES[row["impl"]], fit_chunk(row["chunk_size"], row["seq_len"])
        if row["mode"] in times:
            times[row["mode"]][cell] = min(1e3 * row["time_ms"], times[row["mode"]].get(cell, math.inf))
    problems = {}
    for key, (shape, times) in found.items():
        backward = {
            cell: both - times["fw"][cell]
            for cell, both in times["fwbw"].items()
            if cell in times["fw"] and cell[1] <= backward_chunk(shape, cell[0], shape.kept_chunk(*cell))
        }
        problems[key] = shape, {FORWARD: times["fw"], BACKWARD: backward}
    return problems


def model_us(shape: Shape, direction: str, cell: Cell, costs: Costs) -> float:
    """Return the modelled time of a pass; a backward pass follows a forward pass with the same chunks."""
    if direction == FORWARD:
        return shape.forward_us(*cell, costs)
    return shape.backward_us(*cell, costs, kept=shape.kept_chunk(*cell))


def loss(problems: Sequence[tuple[Shape, Times]], costs: Costs) -> float:
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


def aim(problems: Sequence[tuple[Shape, Times]], costs: Costs) -> float:
    """Return what the fit makes least: what choices lose and, as a guide between them, the error of the times."""
    lost = (regret for direction in (FORWARD, BACKWARD) for regret in regrets(problems, costs, direction))
    return sum(regret**1.5 for regret in lost) + 2 * loss(problems, costs)


def fit(problems: Sequence[tuple[Shape, Times]], costs: Costs) -> Costs:
    """Return the costs of least error, and from there those of least aim."""
    return descend(problems, descend(problems, costs, loss), aim)


def descend(problems: Sequence[tuple[Shape, Times]], costs: Costs, goal: Callable[..., float]) -> Costs:
    """Return costs that make a goal least: each is moved up and down, in smaller steps where nothing helps."""
    step, least = FIRST_STEP, goal(problems, costs)
    while step > LAST_STEP:
        before = least
        for cost in dataclasses.fields(costs):
            for factor in (math.exp(step), math.exp(-step)):
                moved = dataclasses.replace(costs, **{cost.name: getattr(costs, cost.name) * factor})
                if (found := goal(problems, moved)) < least:
                    costs, least = moved, found
        if least == before:
            step /= 2
    return costs


def regrets(problems: Sequence[tuple[Shape, Times]], costs: Costs, direction: str) -> Iterator[float]:
    """Yield what the choice of a chunk length by costs loses against the best measured, where it was measured.

    Measured are passes with the same chunks. After a forward pass with others, a backward pass must compute the states
    that it would have been given; what that takes is added by the model.
    """
    for shape, times in problems:
        cells = times[direction]
        for scheme in {scheme for scheme, _ in cells}:
            measured = {chunk: time for (other, chunk), time in cells.items() if other == scheme}
            chosen = shape.best_chunk(scheme, costs)
            if direction == BACKWARD:
                kept = shape.kept_chunk(scheme, chosen)
                chosen = shape.best_chunk(scheme, costs, kept=kept)
                for chunk in measured:
                    measured[chunk] += shape.backward_us(scheme, chunk, costs, kept=kept)
                    measured[chunk] -= model_us(shape, direction, (scheme, chunk), costs)
            if shape.seq_len > ONE_CHUNK and chosen in measured and len(measured) > 1:
                yield measured[chosen] / min(measured.values()) - 1


def main(arguments: Sequence[str]) -> None:
    """Print the costs as they are, those of least aim near them, and those fitted anew, with what they lose."""
    if not arguments:
        raise SystemExit("give files of rows, got none")
    problems = list(read_times([Path(name) for name in arguments]).values())
    for name, costs in (("now", COSTS), ("near", descend(problems, COSTS, aim)), ("fitted", fit(problems, COSTS))):
        print(f"{name}: {costs}, error {math.sqrt(loss(problems, costs)):.3f}")
        for direction in (FORWARD, BACKWARD):
            lost = list(regrets(problems, costs, direction))
            print(f"  {direction}: {len(lost)} choices lose {median(lost):.3f} in the median, {max(lost):.3f} at most")


if __name__ == "__main__":
    main(sys.argv[1:])
