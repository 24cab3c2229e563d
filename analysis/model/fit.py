"""Predicted times: how far kernels are off their physics (:mod:`.terms`), learned from measured rows of their kind.

The logarithm of a measured over the expected time is a Gaussian process over the cases of a kind. Two cases vary
together as far as they are alike: in sizes, in which part of the expected time weighs most, of one implementation, on
one accelerator. So an implementation with many rows is interpolated between them, one with few is a factor away from
others of its kind, and what was measured on another accelerator counts as carried here by its rates, give or take
:data:`CARRIED` for each factor of e between them. The variance says how wide an interval is; how the rows of an
implementation miss, each problem left out in turn, says how far to trust that (:func:`trust`).

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, eq. 2.23 to 2.26; rows left out, 5.12.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any, NamedTuple

from ...results.schema import HIDDEN_HOST_MS, PROBLEM_SIZES, SIZE_COLUMNS
from ...results.select import grouped
from ..accelerators.known import Accelerator, get_accelerator
from ..accelerators.roofs import with_roofs
from ..counts.formulations import formulation_of, is_counted
from ..counts.model import DTYPE_BYTES
from .terms import Kind, Query, carried_ms, expected, gains, kind_of, walks

if TYPE_CHECKING:
    import numpy as np

Row = Mapping[str, Any]

ROW_COLUMNS = (
    "op", "impl", "state_dtype", "suspect", "noise", "device_accelerator", "device_name", "case_id", "measured_at",
    "time_ms", "host_ms", *SIZE_COLUMNS,
)  # fmt: skip
"""Columns of measured rows that a fit reads."""

problem_of = itemgetter(*PROBLEM_SIZES)
"""Return a row's sizes but for the chunk length."""

LENGTHS = {
    ("seq_len",): 8.0, ("batch", "num_heads"): 30.0, ("head_dim_qk",): 6.0, ("head_dim_v",): 3.8, ("chunk_size",): 5.2,
    ("channels",): 4.1, ("d_model",): 59.0, ("d_ff",): 17.0, ("context",): 16.0,
}  # fmt: skip
"""Size -> over how many doublings of it an implementation's times lose their likeness. To a kernel a head is one more
sequence, and in the rows heads are narrow where they are many, so batch and heads count as their product. No time falls
with the first two sizes."""

KIN_LENGTH = 2.3
"""Over how many times as many doublings the times of a kind do."""

KIND, WEIGHTS, OWN, OWN_SIZES = 1.77, 0.9, 0.69, 0.6
"""Standard deviations of the logarithm: of a kind over sizes, of each part of the expected time, of an implementation,
and of that over sizes. ``python -m lrbench.tests.tools.fit_likeness`` fits all of these to committed rows; near its
values those were taken that predict rows left out best, and more sequences than any row has at the same efficiency."""

WALKED = 0.23
"""What these are multiplied by where the expected time is that of walks, which was fitted to these kernels."""

CARRIED = 0.18
"""Standard deviation of an implementation for each factor of e between two accelerators' rates."""

STANDS_IN, OTHER_KERNELS = 0.03, 0.2
"""Standard deviation that an interval has besides if its rows stand in for another mode or dtype (as measured),
and if they are of another compute capability, with tiles and instructions of its own (a guess)."""

NOISE = 0.015
"""Standard deviation of the logarithm of a time that is measured again."""

USELESS = 100.0
"""An interval whose high end is more than this many times its low end says nothing, so bounds are taken."""

ENOUGH = 30
"""Of an implementation with so many rows on the accelerator asked about those of others add nothing but waiting."""

MOST_ROWS = 1500
"""Of more rows than these the other implementations' are left out, oldest first."""

ORDINARY = tuple(NormalDist().inv_cdf((1 + (n + 0.5) / 20) / 2) for n in range(20))
"""How 20 errors that follow the normal distribution lie, in standard deviations."""


class Points(NamedTuple):
    """Cases of a kind as their likeness is reckoned, n of them.

    Attributes:
        names: [n] operation and implementation.
        sizes: [n, sizes] logarithms to the base 2, over :data:`LENGTHS`.
        weights: [n, parts] shares of the parts of the expected time.
        sources: [n] what was measured: the accelerator, and what stands in for what.
        doubts: [n] factors of e between that and what is asked about; 0 where it is the same.
        expected_ms: [n] by the physics.
    """

    names: np.ndarray
    sizes: np.ndarray
    weights: np.ndarray
    sources: np.ndarray
    doubts: np.ndarray
    expected_ms: np.ndarray


def points(cases: Sequence[Query], sources: Sequence[str], doubts: Sequence[float], here: Accelerator) -> Points:
    """Return cases as points; ``sources`` and ``doubts`` as in :class:`Points`."""
    import numpy as np

    sizes = [
        [math.log2(math.prod(case.sizes.get(name) or 1 for name in names)) / over for names, over in LENGTHS.items()]
        + [math.log2(DTYPE_BYTES[case.state_dtype]) if case.state_dtype else 0.0]
        for case in cases
    ]
    named, parts = [f"{case.op} {case.impl}" for case in cases], np.array([expected(case, here) for case in cases])
    totals = parts.sum(axis=1)
    return Points(*map(np.array, (named, sizes, parts / totals[:, None], sources, doubts, totals)))


def covariance(a: Points, b: Points, *, walked: bool) -> np.ndarray:
    """Return the covariance [len(a), len(b)] of the logarithms of measured over expected time."""
    import numpy as np

    squares = (a.sizes**2).sum(1)[:, None] + (b.sizes**2).sum(1)[None, :] - 2 * a.sizes @ b.sizes.T
    distance = np.sqrt(np.maximum(squares, 0.0))
    near, kin = _likeness(distance), _likeness(distance / KIN_LENGTH)
    own = a.names[:, None] == b.names[None, :]
    doubt = np.outer(a.doubts, b.doubts) * (a.sources[:, None] == b.sources[None, :])
    scale = WALKED**2 if walked else 1.0
    alike = scale * (KIND**2 * kin + WEIGHTS**2 * a.weights @ b.weights.T)
    return alike + own * (scale * OWN**2 + (scale * OWN_SIZES**2 + CARRIED**2 * doubt) * near)


def _likeness(distance: np.ndarray) -> np.ndarray:
    """Return Matern's covariance of order 3/2, 1 at distance 0."""
    import numpy as np

    scaled = math.sqrt(3) * distance
    return (1 + scaled) * np.exp(-scaled)


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """What the rows of a kind say of an accelerator.

    Attributes:
        rows: as measured, newest of each case; ``cases`` and ``points`` are of the same.
        logs: [n] logarithm of measured time, carried here, over expected time.
        covariance: [n, n] with the noise.
    """

    rows: Sequence[Row]
    cases: Sequence[Query]
    points: Points
    logs: np.ndarray
    covariance: np.ndarray
    walked: bool

    def left_out(self, groups: np.ndarray, seen: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of the logarithm of each row, by the rows of other groups.

        Args:
            groups: [n].
            seen: [n] False where no row is to see a row; None: all are seen.
        """
        import numpy as np

        seen = np.ones(len(groups), dtype=bool) if seen is None else seen
        known = np.flatnonzero(seen)
        precision = np.linalg.inv(self.covariance[np.ix_(known, known)])
        between = self.covariance[np.ix_(known, np.flatnonzero(~seen))]
        weighted, explained = precision @ self.logs[known], precision @ between
        means, variances = np.empty(len(groups)), np.diag(self.covariance).copy()
        means[~seen] = between.T @ weighted
        variances[~seen] -= (between * explained).sum(axis=0)
        for group in np.unique(groups[seen]):
            left = np.flatnonzero(groups[known] == group)
            inverse = np.linalg.inv(precision[np.ix_(left, left)])
            means[known[left]] = self.logs[known[left]] - inverse @ weighted[left]
            variances[known[left]] = np.diag(inverse)
            there = groups[~seen] == group
            if there.any():
                missing = inverse @ explained[np.ix_(left, there)]
                means[~seen & (groups == group)] -= missing.T @ weighted[left]
                variances[~seen & (groups == group)] += (explained[np.ix_(left, there)] * missing).sum(axis=0)
        return means, np.maximum(variances, NOISE**2)

    def least_ms(self, sizes: np.ndarray, among: np.ndarray) -> float:
        """Return the longest time of a smaller case, of those rows, than one of such sizes: it takes no less."""
        import numpy as np

        rows = np.flatnonzero(among & (self.points.doubts == 0))
        more = sizes - self.points.sizes[rows]
        smaller = rows[(more[:, :2] >= 0).all(axis=1) & (more[:, 2:] == 0).all(axis=1)]
        return float((self.points.expected_ms[smaller] * np.exp(self.logs[smaller])).max(initial=0.0))


def surface(rows: Sequence[Row], mode: str, dtype: str, here: Accelerator, roofs: str = "spec") -> Surface | None:
    """Return what rows of a kind say of an accelerator, None where none of them are counted."""
    import numpy as np

    kept, cases, there = [], [], []
    for row in rows:
        case, key = case_of(row, mode, dtype), row["device_accelerator"]
        if is_counted(row["op"], formulation_of(row["op"], row["impl"], mode, dtype), mode):
            kept.append(row)
            cases.append(case)
            there.append(here if key == here.key else accelerator_of(key, roofs))
    if not kept:
        return None
    apart = [
        0.0 if each is here else max(abs(math.log(gain)) for gain in gains(case, each, here))
        for case, each in zip(cases, there, strict=True)
    ]
    sources = [f"{row['device_accelerator']} {row.get('stands_in', '')}" for row in kept]
    found = points(cases, sources, apart, here)
    carried = [carried_ms(row["time_ms"], case, each, here) for row, case, each in zip(kept, cases, there, strict=True)]
    logs, walked = np.log(carried) - np.log(found.expected_ms), walks(cases[0])
    likeness = covariance(found, found, walked=walked) + NOISE**2 * np.eye(len(kept))
    return Surface(kept, cases, found, logs, likeness, walked)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """What the measured rows of an implementation's kind say of its times on an accelerator.

    Attributes:
        accelerator: key of the device that most of its own rows were measured on: the one asked about if it has any.
        here: the accelerator asked about.
        rows: number of its own rows there, ``elsewhere`` that of those on other devices.
        others: number of other implementations with rows of its kind.
        median_error, worst_error: absolute relative errors on its own rows, each problem left out in turn; 0.1 is 10 %.
        trust: how many times as wide intervals are as the variance says.
        stands_in: how the rows came about where they were not measured in this mode and dtype, else None.
        surface, precision: the rows of the kind, and the inverse of their covariance.
    """

    accelerator: str
    here: Accelerator
    rows: int
    elsewhere: int
    others: int
    median_error: float
    worst_error: float
    trust: float
    stands_in: str | None
    roofs: str
    surface: Surface = field(repr=False)
    precision: np.ndarray = field(repr=False)

    @property
    def model(self) -> str:
        """Where the expected time comes from: walks or formulation."""
        return "walks" if self.surface.walked else "formulation"

    def intervals_ms(self, cases: Sequence[Query]) -> list[tuple[float, float, float]]:
        """Return the least, the likely and the greatest time of each case, by all rows but its own: 90 % of such cases
        lie between the ends."""
        import numpy as np

        names, known, walked = [f"{self.here.key} "] * len(cases), self.surface.points, self.surface.walked
        asked = points(cases, names, [0.0] * len(cases), self.here)
        alike, priors = covariance(asked, known, walked=walked), covariance(asked, asked, walked=walked).diagonal()
        own = asked.names[:, None] == known.names
        same = own & (known.doubts == 0) & (known.sizes == asked.sizes[:, None]).all(axis=2)
        itself = same & (known.sources == asked.sources[:, None])
        # What the rows say of the mean, and what they explain of the variance.
        weighted, explained = self.surface.logs @ self.precision, alike @ self.precision
        other = accelerator_of(self.accelerator, self.roofs).capability != self.here.capability
        doubt = NOISE**2 + STANDS_IN**2 * (self.stands_in is not None) + OTHER_KERNELS**2 * other
        found = []
        for n, at in enumerate(itself):
            mean, variance = alike[n] @ weighted, priors[n] - explained[n] @ alike[n]
            if at.any():
                # Without the case's own row.
                solved = np.linalg.solve(self.precision[np.ix_(at, at)], explained[n, at])
                mean, variance = mean - weighted[at] @ solved, variance + explained[n, at] @ solved
            if (stands_in := same[n] & ~at).any():
                mean, variance = self.surface.logs[stands_in][0], 0.0
            likely = float(asked.expected_ms[n]) * math.exp(mean)
            half = math.exp(self.trust * Z90 * math.sqrt(max(variance, 0.0) + doubt))
            least = self.surface.least_ms(asked.sizes[n], own[n] & ~at)
            found.append((likely / half, max(likely, least), max(likely * half, least)))
        return found

    def time_ms(self, case: Query) -> float:
        """Return the likely time of a case."""
        return self.intervals_ms([case])[0][1]

    def basis(self, case: Query) -> str:
        """Return what the interval of a prediction rests on, in words."""
        how = f" ({self.stands_in})" if self.stands_in else ""
        rows = f"{self.rows} row{'' if self.rows == 1 else 's'} of its own" if self.rows else "no row of its own"
        text = f"90 %, from {rows} on {self.accelerator}{how}"
        more = [f"{self.elsewhere} elsewhere"] if self.elsewhere else []
        more += [f"those of {self.others} like it"] if self.others else []
        text += f" and {', '.join(more)}" if more else ""
        if self.accelerator == self.here.key:
            return text
        rates = gains(case, accelerator_of(self.accelerator, self.roofs), self.here)
        return f"{text}, carried to {self.here.key}: its rates are {min(rates):.2f} to {max(rates):.2f} times as high"

    def in_figures(self) -> dict[str, Any]:
        """Return what a table says of the fit."""
        return {
            "model": self.model,
            "fitted_on": self.accelerator,
            "fitted_rows": self.rows,
            "fitted_others": self.others,
            "median_error": self.median_error,
            "worst_error": self.worst_error,
        }


Z90 = NormalDist().inv_cdf(0.95)
"""Half of an interval that holds 90 % of the normal distribution, in standard deviations."""


def trust(errors: Sequence[float]) -> float:
    """Return how many times as wide as the normal distribution's an interval must be to hold 90 % of such errors.

    Args:
        errors: absolute ones of rows left out, in standard deviations. They count beside :data:`ORDINARY`, so that few
            change little.
    """
    ordered = sorted((*errors, *ORDINARY))
    return max(1.0, ordered[min(len(ordered), math.ceil(0.9 * (len(ordered) + 1))) - 1] / Z90)


class Fits:
    """The fits to rows of a mode and dtype on an accelerator, each made when it is first asked for.

    Of several rows of one case the newest counts; suspect and noisy ones are left out.

    Args:
        rows: measured rows of this mode and dtype, of any implementation, with :data:`ROW_COLUMNS`.
        here: the accelerator asked about.
        roofs: spec, measured or a path, see :func:`.roofs.with_roofs`, of the accelerators that were measured.
    """

    def __init__(self, rows: Iterable[Row], mode: str, dtype: str, here: Accelerator, roofs: str = "spec") -> None:
        newest = newest_cases(row for row in rows if not row["noise"])
        by_name = grouped(newest, itemgetter("op", "impl"))
        self.mode, self.dtype, self.here, self.roofs = mode, dtype, here, roofs
        self.kinds = kinds({name: _enough(rows, here.key) for name, rows in by_name.items()}, mode, dtype)
        self._fits: dict[tuple[str, str], Fit | None] = {}
        self._made: dict[Any, tuple[Surface, np.ndarray, np.ndarray] | None] = {}

    def of(self, op: str, impl: str) -> Fit | None:
        """Return the fit of an implementation, None where there are no rows of its kind."""
        if (op, impl) not in self._fits:
            self._fits[op, impl] = self._of(op, impl)
        return self._fits[op, impl]

    def _of(self, op: str, impl: str) -> Fit | None:
        import numpy as np

        found = self._surface(op, impl)
        if found is None:
            return None
        known, precision, errors = found
        own = np.flatnonzero(known.points.names == f"{op} {impl}")
        rows = [row for row in known.rows if (row["op"], row["impl"]) == (op, impl)] or known.rows
        by_device = grouped(rows, itemgetter("device_accelerator"))
        most = max(by_device, key=lambda key: (key == self.here.key, len(by_device[key])))
        misses = [*map(float, np.abs(np.expm1(errors[0][own if len(own) else slice(None)])))]
        number, measured_there = len(own), len(by_device[most])
        return Fit(
            accelerator=most,
            here=self.here,
            rows=measured_there if number else 0,
            elsewhere=number - measured_there if number else 0,
            others=len({*known.points.names}) - bool(number),
            median_error=median(misses),
            worst_error=max(misses),
            trust=max(trust([*map(float, np.abs(each[own]))]) for each in errors[1:]),
            stands_in=next((row["stands_in"] for row in by_device[most] if "stands_in" in row), None),
            roofs=self.roofs,
            surface=known,
            precision=precision,
        )

    def _surface(self, op: str, impl: str) -> tuple[Surface, np.ndarray, np.ndarray] | None:
        """Return the surface of a kind, the inverse of its covariance, and how rows miss that are left out: errors of
        logarithms, these in standard deviations, and those of rows left out alone, not with their problem."""
        import numpy as np

        alike = kind_of(op, impl, self.mode, self.dtype)
        kind = (alike, f"{op} {impl}") if (alike, f"{op} {impl}") in self.kinds else (alike, "")
        rows = self.kinds.get(kind, [])
        key = (kind, (op, impl) if len(rows) > MOST_ROWS else None)
        if key not in self._made:
            rows = sorted(rows, key=lambda row: (row["op"], row["impl"]) == (op, impl))[-MOST_ROWS:]
            made = None
            if known := surface(rows, self.mode, self.dtype, self.here, self.roofs):
                means, variances = known.left_out(problems(known.rows))
                misses = known.logs - means
                precision = np.linalg.inv(known.covariance)
                alone = precision @ known.logs / np.sqrt(np.diag(precision))
                made = known, precision, np.array([misses, misses / np.sqrt(variances), alone])
            self._made[key] = made
        return self._made[key]


def kinds(
    by_name: Mapping[tuple[str, str], Sequence[Row]], mode: str, dtype: str
) -> dict[tuple[Kind | None, str], list[Row]]:
    """Return the rows of each kind that a model is fitted to. An implementation whose kernels wait for the host, as an
    eager loop's do, is a kind of its own: its times say nothing of kernels."""
    found: dict[tuple[Kind | None, str], list[Row]] = {}
    for (op, impl), rows in by_name.items():
        if (kind := kind_of(op, impl, mode, dtype)) is not None:
            alone = f"{op} {impl}" if all(map(_times_host, rows)) else ""
            found.setdefault((kind, alone), []).extend(rows)
    return found


def _enough(rows: Sequence[Row], key: str) -> Sequence[Row]:
    """Return an implementation's rows on an accelerator if they are :data:`ENOUGH`, else all."""
    here = [row for row in rows if row["device_accelerator"] == key]
    return here if len(here) >= ENOUGH else rows


def problems(rows: Sequence[Row]) -> np.ndarray:
    """Return a number for each row, the same for rows of one problem."""
    import numpy as np

    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(problem_of(row), len(numbers)) for row in rows])


def _times_host(row: Row) -> bool:
    """Whether the kernels waited for the host for most of the time, as those of an eager loop do."""
    host_ms = row.get("host_ms") or 0.0
    return bool(host_ms > HIDDEN_HOST_MS and 2 / 3 < row["time_ms"] / host_ms < 3 / 2)


def case_of(row: Row, mode: str, dtype: str) -> Query:
    """Return the case of a row of a mode and dtype."""
    sizes = {name: row[name] for name in SIZE_COLUMNS if row[name] is not None}
    return Query(row["op"], row["impl"], mode, dtype, row["state_dtype"], sizes)


@functools.cache
def accelerator_of(key: str, roofs: str) -> Accelerator:
    """Return an accelerator with its roofs, which are read once."""
    return with_roofs(get_accelerator(key), roofs)


def newest_cases(rows: Iterable[Row]) -> list[Row]:
    """Return the newest row of every case on every known accelerator, without suspect ones and packed documents."""
    known = (r for r in rows if r["device_accelerator"] and not r["suspect"] and r["documents"] is None)
    ordered = sorted(known, key=lambda row: row["measured_at"])
    return list({(row["case_id"], row["device_name"]): row for row in ordered}.values())
