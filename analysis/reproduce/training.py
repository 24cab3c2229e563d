"""How stable a model's training was, by its loss and its gradient's norm at each step.

A spike is a step whose gradient has more than :data:`SPIKE` times the median norm of the :data:`WINDOW` steps before
it; the TFLA paper plots spikes and defines none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

SPIKE, WINDOW = 2.0, 50
REFERENCE = "parallel"
"""The implementation that others are held against, as in the paper's table 3."""


def relative_norms(norms: Sequence[float]) -> list[float]:
    """Return each norm over the median of those in its window, from the first full window on."""
    return [norm / median(norms[n - WINDOW : n]) for n, norm in enumerate(norms) if n >= WINDOW]


def spikes(norms: Sequence[float]) -> int:
    """Return how many steps are spikes; so is a norm that is not finite."""
    return sum(not norm <= SPIKE for norm in relative_norms(norms))


def gradient_spread(norms: Sequence[float]) -> float:
    """Return how far norms lie from the median of their windows: the root mean square of the relative difference."""
    relative = relative_norms(norms)
    return math.sqrt(fmean((norm - 1) ** 2 for norm in relative)) if relative else math.nan


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return how far the losses of two trainings lie apart: the root mean square of their logarithm's difference."""
    return math.sqrt(fmean(math.log(x / y) ** 2 for x, y in zip(a, b, strict=True)))


def curve_distance(losses: Sequence[float], references: Mapping[int, Sequence[float]], seed: int) -> float:
    """Return how far losses lie from the reference's of their seed, over the least that references of two seeds do.

    Args:
        references: seed -> the losses of :data:`REFERENCE`, of two seeds or more.
    """
    noise = min(distance(a, b) for a, b in itertools.combinations(references.values(), 2))
    return distance(losses, references[seed]) / noise
