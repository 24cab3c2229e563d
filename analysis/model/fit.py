"""Fits of a model of a time (:mod:`.terms`) to measured rows, and how far off they are on rows that they have not seen.

The constants of one implementation and mode are fitted in relative error. Each problem is then left out in turn and
predicted by a fit to the others; how these predictions miss is the interval of the next one. Where rows are few, all
implementations of a kind are fitted together, each with a factor of its own (:func:`_pooled`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...results.schema import HIDDEN_HOST_MS, PROBLEM_SIZES, SIZE_COLUMNS
from ...results.select import grouped
from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_roofs
from ..counts import count_case
from .runtime_model import LAUNCH_MS, flop_rate
from .terms import FORMULATION, MODELS, Model, Query

if TYPE_CHECKING:
    import numpy as np

Row = Mapping[str, Any]

ROW_COLUMNS = (
    "op", "impl", "state_dtype", "suspect", "noise", "device_accelerator", "device_name", "case_id", "measured_at",
    "time_ms", "host_ms", *SIZE_COLUMNS,
)  # fmt: skip
"""Columns of measured rows that a fit reads."""

MIN_PROBLEMS, FEWEST_PROBLEMS = 5, 3
"""An implementation with rows of fewer than MIN_PROBLEMS problems is fitted together with others of its kind; where
there are none, FEWEST_PROBLEMS will do to fit it alone."""

problem_of = itemgetter(*PROBLEM_SIZES)
"""Return a row's sizes but for the chunk length."""

USELESS = 100.0
"""An interval whose high end is more than this many times its low end says nothing, so there is no fit."""

BETWEEN, LEAST_BETWEEN = 0.25, 0.01
"""Variance of the logarithms of the factors of a kind's implementations: what is assumed where only one other is known,
and the least that is taken."""

EXTRAPOLATION = 0.1
"""By how much, in logarithms, an interval is wider on either side for each factor of e beyond the sizes measured."""

AS_SPECIFIED = 1.05
"""Two devices' rates are taken to be to one another as specified, give or take 5 %. The matrix rates of an H100 and an
H200 are the same by specification, and Lightning-1, which they limit, takes 0.95 to 1.02 times as long on the H100."""

PROPORTIONAL = 0.98
"""Rows tell products from memory traffic if the cosine between the two terms, each over the row's time, is less."""

KIND_COUNTS = 2
"""The scatter of the other implementations of a kind weighs as much as that of so many own rows."""

FAR_APART, WORSE = 10.0, 1.2
"""The time of a launch is fitted only where the longest time is FAR_APART times the shortest, and the usual time of a
launch makes the squared error WORSE times as large as a fitted one: other rows do not tell a launch from its work."""

SPILLS = 1.5
"""Work grows at most in proportion to the chunk length. Where a longer chunk takes more than this many times longer,
something else is the cause, such as spilled registers, and the row is left out of fits."""

TINY_MS = 1e-9
"""Stands for a predicted time of 0, which rows get whose only terms are in no row that was fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model of a time fitted to measured rows of one implementation and mode.

    Attributes:
        model: FORMULATION or WALKS of :mod:`.terms`.
        accelerator: key of the device that was measured.
        roofs: which roofs the rates were taken with: spec, measured or a path.
        constants: name -> value, in ms or, of a rate, full rate over the rate reached; 0 where others explain it all.
        rows: number of the implementation's own rows that were fitted.
        others: how many implementations of its kind were fitted as well, because its own rows are few.
        median_error, worst_error: absolute relative errors on what was left out in turn; 0.1 is 10 %.
        low_ratio, high_ratio: between which the measured over the predicted time lies with 90 % chance, as
            :func:`likely_ratios` takes it from problems left out of the fit.
        best_share: the largest share of the roof that a row reached, that of the formulation.
        told_apart: whether the rows tell what products take from what memory takes; False but by the formulation.
        measured: size -> the least and greatest one among the rows; ``tokens`` are batch times sequence length.
        stands_in: how the rows came about where they were not measured in this mode and dtype, else None.
    """

    model: Model
    accelerator: str
    roofs: str
    constants: Mapping[str, float]
    rows: int
    others: int
    median_error: float
    worst_error: float
    low_ratio: float
    high_ratio: float
    best_share: float
    told_apart: bool
    measured: Mapping[str, tuple[int, int]]
    stands_in: str | None = None

    def time_ms(self, case: Query, accelerator: Accelerator) -> float:
        """Return the fitted time of a case on an accelerator, its latencies as on the one that was measured."""
        return sum(self._parts(case, accelerator))

    def carried_ms(self, case: Query, accelerator: Accelerator) -> tuple[float, float, str]:
        """Return the least and the greatest time to expect on an accelerator, and why they differ, in words.

        On the one that was measured both are the fitted time. Elsewhere it is not known which rate counts (matrix,
        vector, bandwidth), so all but latencies changes as the rate that gains least or as the one that gains most, and
        both ends are :data:`AS_SPECIFIED` times further out.
        """
        latency_ms, rates_ms = self._parts(case, accelerator)
        if self.accelerator == accelerator.key:
            return latency_ms + rates_ms, latency_ms + rates_ms, ""
        measured, count = accelerator_of(self.accelerator, self.roofs), count_case(*case)
        assert count is not None, "its terms are known"
        sides = accelerator, measured
        rates = [(flop_rate(count, each, case.dtype), each.vector_flops, each.bandwidth_bytes_s) for each in sides]
        gains = [here / there for here, there in zip(*rates, strict=True)]
        there_ms = self._parts(case, measured)[1]
        low_ms, high_ms = latency_ms + there_ms / max(gains), latency_ms + there_ms / min(gains)
        low_ms, high_ms = low_ms / AS_SPECIFIED, high_ms * AS_SPECIFIED
        times = f"{min(gains):.2f} to {max(gains):.2f} times as high, and which counts is not known there"
        return low_ms, high_ms, f", carried to {accelerator.key}: its rates are {times}"

    def ratios(self, case: Query) -> tuple[float, float]:
        """Return the interval of measured over predicted time; it is wider outside the measured sizes."""
        spans = [(value, *self.measured.get(name, (value, value))) for name, value in _extent(case.sizes).items()]
        beyond = math.prod(max(value / most, least / value, 1.0) for value, least, most in spans) ** EXTRAPOLATION
        return self.low_ratio / beyond, self.high_ratio * beyond

    def basis(self) -> str:
        """Return what the interval of a prediction rests on, in words."""
        how = f" ({self.stands_in})" if self.stands_in else ""
        if not self.others:
            return f"90 % of rows left out of the fit on {self.accelerator}{how}"
        rows = f"{self.rows} row{'' if self.rows == 1 else 's'} of its own" if self.rows else "no row of its own"
        return f"90 %, from {rows} and those of {self.others} like it on {self.accelerator}{how}"

    def in_figures(self) -> dict[str, Any]:
        """Return what a table says of the fit, constants of rates as efficiencies."""
        factors = {name: self.constants[name] for name in self.model.factors}
        return {
            "model": self.model.name,
            "fitted_on": self.accelerator,
            "fitted_rows": self.rows,
            "fitted_others": self.others,
            **{name: self.constants[name] for name in self.model.latencies},
            **{name.replace("factor", "efficiency"): 1 / each if each else None for name, each in factors.items()},
            "median_error": self.median_error,
            "worst_error": self.worst_error,
        }

    def _parts(self, case: Query, accelerator: Accelerator) -> tuple[float, float]:
        """Return the part of the time that no rate of a device shortens, and the one that rates do, in ms."""
        found = self.model.terms(case, accelerator)
        assert found is not None, "a case of another mode or kind is not predicted by this fit"
        times = [self.constants[name] * value for name, value in zip(self.model.constants, found, strict=True)]
        split = len(self.model.latencies)
        return sum(times[:split]), sum(times[split:])


@dataclass(frozen=True, slots=True)
class _Sample:
    """What was measured of one implementation: the terms of each row, its time and its problem."""

    rows: Sequence[Row]
    terms: np.ndarray
    times: np.ndarray
    problems: list[Any]

    @property
    def share(self) -> float:
        """The largest share of the roof of the formulation's rows: of its rates the slower one, over the time."""
        return float((self.terms[:, -2:].max(axis=1) / self.times).max())

    @property
    def told_apart(self) -> bool:
        """Whether the two rates' terms are not proportional over the rows, so that a fit tells one from the other."""
        products, memory = self.terms[:, -2] / self.times, self.terms[:, -1] / self.times
        return float(products @ memory) < PROPORTIONAL * math.sqrt(float(products @ products) * float(memory @ memory))


def fit_rows(
    rows: Iterable[Row],
    op: str,
    impl: str,
    mode: str,
    dtype: str,
    *,
    device: str | None = None,
    roofs: str = "spec",
    models: Sequence[Model] = MODELS,
) -> Fit | None:
    """Fit an implementation's measured rows, where they are few together with those of others of its kind.

    Of several rows of one case the newest counts; suspect and noisy ones are left out, and those of a chunk length at
    which the kernel :data:`SPILLS`. None where there are too few rows, or where these say too little: an interval
    beyond :data:`USELESS` times the prediction.

    Args:
        rows: measured rows of this mode and dtype, of any implementation, with :data:`ROW_COLUMNS`.
        device: key of the device whose rows are preferred; without enough of them the device with most is taken.
        roofs: spec, measured or a path, see :func:`.roofs.with_roofs`.
        models: to take the first of that there are rows for.
    """
    newest = newest_cases(row for row in rows if not row["noise"])
    by_name = grouped(newest, itemgetter("op", "impl"))
    fits = (_fit(by_name, model, (op, impl, mode, dtype), device, roofs) for model in models)
    return next((fit for fit in fits if fit is not None), None)


def _fit(
    by_name: Mapping[tuple[str, str], Sequence[Row]],
    model: Model,
    names: tuple[str, str, str, str],
    device: str | None,
    roofs: str,
) -> Fit | None:
    op, impl, mode, dtype = names
    kind = model.kind(*names)
    if kind is None:
        return None
    alike = {name: rows for name, rows in by_name.items() if model.kind(*name, mode, dtype) == kind}
    taken = of_device(alike.get((op, impl), []), device, model.min_rows)
    taken = taken or of_device([row for rows in alike.values() for row in rows], device, 1)
    if not taken:
        return None
    key = str(taken[0]["device_accelerator"])
    there = {name: [row for row in rows if row["device_accelerator"] == key] for name, rows in alike.items()}
    own = _sample(there.pop((op, impl), []), model, mode, dtype, key, roofs)
    number, problems = len(own.times), len(set(own.problems))
    alone = number >= model.min_rows and problems >= MIN_PROBLEMS
    # Rows whose time is the host's say nothing of kernels, so the two are not fitted together.
    shared = not alone and not (own.rows and all(map(_times_host, own.rows)))
    kin = [[row for row in rows if not _times_host(row)] for rows in there.values()] if shared else []
    others = [_sample(each, model, mode, dtype, key, roofs) for each in kin]
    others = [each for each in others if len(each.times)]
    few = not others and (number >= MIN_PROBLEMS or problems >= FEWEST_PROBLEMS)
    if alone or few:
        constants = fitted(own.terms, own.times)
        ratios = left_out_ratios(own.terms, own.times, own.problems)
        low_ratio, high_ratio = likely_ratios(ratios, problems)
    elif others and number + sum(len(each.times) for each in others) > len(model.constants):
        constants, half, ratios = _pooled(own, others, model.min_rows)
        low_ratio, high_ratio = math.exp(-half), math.exp(half)
    else:
        return None
    if high_ratio > USELESS * low_ratio:
        return None
    median_error, worst_error = errors_of(ratios)
    fitted_rows = [row for each in (own, *others) for row in each.rows]
    extents = [_extent(row) for row in fitted_rows]
    return Fit(
        model=model,
        accelerator=key,
        roofs=roofs,
        constants=MappingProxyType(dict(zip(model.constants, map(float, constants), strict=True))),
        rows=number,
        others=len(others),
        median_error=median_error,
        worst_error=worst_error,
        low_ratio=low_ratio,
        high_ratio=high_ratio,
        best_share=max(each.share for each in ([own] if number else others)),
        told_apart=model is FORMULATION and (alone or few) and own.told_apart,
        stands_in=next((row["stands_in"] for row in fitted_rows if "stands_in" in row), None),
        measured={name: (min(e[name] for e in extents), max(e[name] for e in extents)) for name in extents[0]},
    )


def _times_host(row: Row) -> bool:
    """Whether the kernels waited for the host for most of the time, as those of an eager loop do."""
    host_ms = row.get("host_ms") or 0.0
    return bool(host_ms > HIDDEN_HOST_MS and 2 / 3 < row["time_ms"] / host_ms < 3 / 2)


def _spills(row: Row, others: Sequence[Row]) -> bool:
    """Whether a row takes :data:`SPILLS` times longer than a shorter chunk of the problem explains."""
    chunk = row["chunk_size"]
    if chunk is None:
        return False
    per_step = [each["time_ms"] / each["chunk_size"] for each in others if each["chunk_size"] < chunk]
    return bool(per_step) and row["time_ms"] / chunk > SPILLS * min(per_step)


def _extent(sizes: Row) -> dict[str, int]:
    """Return the sizes that a fit is extrapolated in."""
    names = ("seq_len", "context", "head_dim_qk", "head_dim_v", "channels", "d_model", "d_ff")
    found = {name: sizes[name] for name in names if sizes.get(name) is not None}
    return found | {"tokens": sizes["batch"] * sizes["seq_len"]}


def _sample(rows: Sequence[Row], model: Model, mode: str, dtype: str, key: str, roofs: str) -> _Sample:
    """Return the terms and times of an implementation's rows on an accelerator, without those where it spills."""
    import numpy as np

    same = grouped(rows, problem_of)
    rows = [row for row in rows if not _spills(row, same[problem_of(row)])]
    cases: list[Any] = [case_of(row, mode, dtype) for row in rows]
    terms = [_terms_of_row(model, case._replace(sizes=tuple(case.sizes.items())), key, roofs) for case in cases]
    counted = [(found, row) for found, row in zip(terms, rows, strict=True) if found is not None]
    problems = [problem_of(row) for _, row in counted]
    times = np.array([float(row["time_ms"]) for _, row in counted])
    matrix = np.array([found for found, _ in counted]).reshape(-1, len(model.constants))
    return _Sample([row for _, row in counted], matrix, times, problems)


@functools.cache
def _terms_of_row(model: Model, case: Any, key: str, roofs: str) -> tuple[float, ...] | None:
    """Return the terms of a measured case, its sizes in a tuple: every fit asks for them again."""
    return model.terms(case._replace(sizes=dict(case.sizes)), accelerator_of(key, roofs))


def _pooled(own: _Sample, others: Sequence[_Sample], few: int) -> tuple[np.ndarray, float, list[float]]:
    """Return the constants of an implementation with few rows, the half width of its interval in logarithms, and the
    measured over the predicted times of rows by a fit to the other implementations, their own factor taken out.

    Implementations of a kind follow one model, each slower by a factor of its own. How far these factors lie apart, and
    how well the model of all others fits each, says what to expect of this one. Its own rows, and their scatter, are
    weighed against that by their number (James and Stein).
    """
    import numpy as np

    everyone = [*others, *([own] if len(own.times) else [])]
    residuals = []
    for left_out in everyone:
        constants = _common([each for each in everyone if each is not left_out] or everyone)
        residuals.append(np.log(left_out.times / np.maximum(left_out.terms @ constants, TINY_MS)))
    scatter = [float(np.var(each, ddof=1)) for each in residuals if len(each) > 1]
    within = float(np.median(scatter)) if scatter else LEAST_BETWEEN
    means = [float(each.mean()) for each in residuals[: len(others)]]
    between = max(float(np.var(means, ddof=1)), LEAST_BETWEEN) if len(means) > 1 else BETWEEN
    constants, shift, variance = _common(everyone), 0.0, within + between
    if number := len(set(own.problems)):
        off = np.log(own.times / np.maximum(own.terms @ constants, TINY_MS))
        within = (KIND_COUNTS * within + float(((off - off.mean()) ** 2).sum())) / (KIND_COUNTS + len(off) - 1)
        share = between / (between + within / number)
        shift = share * float(off.mean())
        variance = within + between * (1 - share)
    half = student(len(others) - 1 + number) * math.sqrt(variance)
    # Implementations of many rows decide the model: without them it is another one.
    apart = [each for each in residuals if 1 < len(each) < few] or [each for each in residuals if len(each) > 1]
    ratios = [float(ratio) for each in apart for ratio in np.exp(each - each.mean())]
    return constants * math.exp(shift), half, ratios or [float(np.exp(each[0])) for each in residuals]


def _common(samples: Sequence[_Sample]) -> np.ndarray:
    """Return the constants that fit several implementations, each of which counts alike and has a factor of its own."""
    import numpy as np

    terms = np.vstack([each.terms for each in samples])
    weights = np.concatenate([np.full(len(each.times), len(each.times) ** -0.5) for each in samples])
    factors = np.zeros(len(samples))
    for _ in range(3):
        times = np.concatenate([each.times / math.exp(f) for each, f in zip(samples, factors, strict=True)])
        constants = fitted(terms, times, weights)
        apart = [np.log(each.times / np.maximum(each.terms @ constants, TINY_MS)).mean() for each in samples]
        factors = np.array(apart) - np.mean(apart)
    return np.asarray(constants * math.exp(np.mean(apart)))


def case_of(row: Row, mode: str, dtype: str) -> Query:
    """Return the case of a row of a mode and dtype."""
    sizes = {name: row[name] for name in SIZE_COLUMNS if row[name] is not None}
    return Query(row["op"], row["impl"], mode, dtype, row["state_dtype"], sizes)


@functools.cache
def accelerator_of(key: str, roofs: str) -> Accelerator:
    """Return an accelerator with its roofs, which are read once."""
    return with_roofs(get_accelerator(key), roofs)


def of_device(rows: Sequence[Row], device: str | None, least: int) -> list[Row]:
    """Return the rows of the preferred device where there are ``least``, else of the one with most."""
    by_device = grouped(rows, itemgetter("device_accelerator"))
    preferred = by_device.get(device, [])
    return preferred if len(preferred) >= least else max(by_device.values(), key=len, default=[])


def errors_of(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the median and worst absolute relative error of predictions, given measured over predicted times."""
    errors = [abs(1 / ratio - 1) for ratio in ratios]
    return median(errors), max(errors)


def newest_cases(rows: Iterable[Row]) -> list[Row]:
    """Return the newest row of every case on every known accelerator, without suspect ones."""
    known = (row for row in rows if row["device_accelerator"] and not row["suspect"])
    ordered = sorted(known, key=lambda row: row["measured_at"])
    return list({(row["case_id"], row["device_name"]): row for row in ordered}.values())


def likely_ratios(ratios: Sequence[float], problems: int) -> tuple[float, float]:
    """Return the interval in which the next ratio of measured to predicted time lies with 90 % chance.

    Of n ratios that is between those of rank 0.05 (n + 1) from either end. Fewer than 19 have no such rank: then it
    is the widest of them all and of Student's interval of their logarithms.

    Args:
        ratios: on rows left out of the fit.
        problems: how many of them are independent: rows of one problem err alike.
    """
    ordered, n = sorted(ratios), len(ratios)
    rank = int(0.05 * (n + 1))
    if rank:
        return ordered[rank - 1], ordered[n - rank]
    logs = [math.log(ratio) for ratio in ordered]
    mean = sum(logs) / n
    variance = sum((value - mean) ** 2 for value in logs) / max(1, n - 1)
    half = student(problems - 1) * math.sqrt(variance * (1 + 1 / problems))
    return min(ordered[0], math.exp(mean - half)), max(ordered[-1], math.exp(mean + half))


def student(freedom: int) -> float:
    """Return the 95th percentile of Student's t, by its expansion in 1 / freedom; of 2 degrees where there are fewer.

    Off by 1 % at 2 degrees. Source: Abramowitz and Stegun, 26.7.5.
    """
    z, d = 1.6449, max(2, freedom)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / d**n for n, term in enumerate(terms))


def fitted(matrix: np.ndarray, times: np.ndarray, weights: np.ndarray | float = 1.0) -> np.ndarray:
    """Return the constants of least relative error, that of a launch (the first) :data:`.runtime_model.LAUNCH_MS`.

    It is fitted like the others only where the times are :data:`FAR_APART` and the squared error is :data:`WORSE`
    without. In rows of much the same work any share of the time might as well be that of a launch, and other work would
    take no longer.
    """
    import numpy as np

    def error(constants: np.ndarray) -> float:
        return float((((matrix @ constants / times - 1) * weights) ** 2).sum())

    usual = np.append(LAUNCH_MS, relative_fit(matrix[:, 1:], times, weights, times - LAUNCH_MS * matrix[:, 0]))
    if times.max() < FAR_APART * times.min():
        return usual
    free = relative_fit(matrix, times, weights)
    return free if error(usual) > WORSE * error(free) else usual


def relative_fit(
    matrix: np.ndarray, times: np.ndarray, weights: np.ndarray | float = 1.0, left: np.ndarray | None = None
) -> np.ndarray:
    """Return x >= 0 of least sum of (w (matrix x - t) / t)^2.

    Args:
        matrix: one row an observation, one column a term, all >= 0.
        times: the observations, > 0.
        weights: of each observation.
        left: what of each observation the terms are to explain, in place of t in the difference.
    """
    import numpy as np

    scale = np.ones(len(times)) * weights / times
    scaled = matrix * scale[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1
    # The normal equations: a few terms of many rows. So few that every set of terms can be tried, all of them first.
    scaled, columns = scaled / norms, scaled.shape[1]
    gram, aim = scaled.T @ scaled, scaled.T @ ((times if left is None else left) * scale)
    best, least = np.zeros(columns), 0.0
    for chosen in (list(some) for n in range(columns, 0, -1) for some in itertools.combinations(range(columns), n)):
        x = np.zeros(columns)
        x[chosen] = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], aim[chosen], rcond=None)[0]
        error = float(x @ gram @ x - 2 * aim @ x)
        if (x >= 0).all() and error < least:
            best, least = x, error
            # Where the error grows with each term that is left out, no other set of terms has a smaller one.
            if (gram @ x >= aim - 1e-13 * np.abs(aim)).all():
                break
    return best / norms


def left_out_ratios(matrix: np.ndarray, times: np.ndarray, groups: Sequence[Hashable]) -> list[float]:
    """Return measured over predicted time of every row, predicted by a fit without any row of its group.

    Where all rows are of one group, single rows are left out.
    """
    import numpy as np

    names = list(groups) if len(set(groups)) > 1 else list(range(len(times)))
    ratios: list[float] = []
    for name in dict.fromkeys(names):
        held = np.array([each == name for each in names])
        predicted = np.maximum(matrix[held] @ fitted(matrix[~held], times[~held]), TINY_MS)
        ratios += [float(ratio) for ratio in times[held] / predicted]
    return ratios
