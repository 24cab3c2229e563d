"""Fit what :mod:`lrbench.analysis.model.fit` assumes of how alike times are: lengths and standard deviations.

``python -m lrbench.tests.tools.fit_likeness [SECONDS]`` takes the committed rows of forward, forward and backward, and
decoding, at most :data:`MOST` a kind, and prints the constants of greatest likelihood.
"""

from __future__ import annotations

import math
import random
import sys
import time
from operator import itemgetter

import numpy as np

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.model import fit
from lrbench.analysis.model.prediction import stored_rows
from lrbench.results.select import grouped
from lrbench.results.store import committed_results

MOST = 200
NAMES = ("KIN_LENGTH", "KIND", "WEIGHTS", "OWN", "OWN_SIZES", "WALKED", "CARRIED", "NOISE")
GUESS = 1.5
"""Standard deviation of the logarithm of a constant around today's, so that what rows do not tell stays."""


def surfaces() -> list[fit.Surface]:
    """Return the rows of each kind, of as many problems as :data:`MOST` rows have."""
    generator, found = random.Random(0), []
    for mode in ("fw", "fwbw", "step"):
        rows = fit.newest_cases(row for row in stored_rows(committed_results(), mode, "bf16") if not row["noise"])
        for kind in fit.kinds(grouped(rows, itemgetter("op", "impl")), mode, "bf16").values():
            problems = list(grouped(kind, fit.problem_of).values())
            generator.shuffle(problems)
            taken = [row for problem in problems for row in problem][:MOST]
            found.append(fit.surface(taken, mode, "bf16", get_accelerator("h100")))
    return found


def unlikeliness(known: fit.Surface, lengths: np.ndarray) -> float:
    """Return minus the logarithm of the likelihood of a kind's times, but for a constant."""
    sizes = known.points.sizes / np.append(lengths, 1.0)
    points = known.points._replace(sizes=sizes)
    noise = fit.NOISE**2 * np.eye(len(sizes))
    factor = np.linalg.cholesky(fit.covariance(points, points, walked=known.walked) + noise)
    scaled = np.linalg.solve(factor, known.logs)
    return float(scaled @ scaled / 2 + np.log(np.diag(factor)).sum())


def main() -> None:
    """Try steps of one constant at a time, smaller ones where none helps, and print the best."""
    until, found = time.monotonic() + float([*sys.argv[1:], "600"][0]), surfaces()
    before = [getattr(fit, name) for name in NAMES]

    def cost(logs: np.ndarray) -> float:
        for name, value, log in zip(NAMES, before, logs, strict=False):
            setattr(fit, name, value * math.exp(log))
        lengths = np.exp(logs[len(NAMES) :])
        return sum(unlikeliness(each, lengths) for each in found) + float(logs @ logs) / (2 * GUESS**2)

    logs = np.zeros(len(NAMES) + len(fit.LENGTHS))
    steps, least = np.full(len(logs), 0.4), cost(logs)
    while steps.max() > 0.03 and time.monotonic() < until:
        for n in range(len(logs)):
            for step in (steps[n], -steps[n]):
                tried = logs.copy()
                tried[n] += step
                if (value := cost(tried)) < least:
                    logs, least, steps[n] = tried, value, 1.3 * steps[n]
                    break
            else:
                steps[n] /= 2
    print(dict(zip(NAMES, (f"{v * math.exp(x):.3g}" for v, x in zip(before, logs, strict=False)), strict=True)))
    pairs = zip(fit.LENGTHS.items(), logs[len(NAMES) :], strict=True)
    print({name: float(f"{length * math.exp(x):.2g}") for (name, length), x in pairs})


if __name__ == "__main__":
    main()
