"""Speed bars that the project holds itself to: those of results/bars.toml, measured beside whom they name.

Sides take turns in every round, so that other load on the machine slows all of them alike. Of a side with several
chunk lengths the fastest counts. Ours must be right to be timed; an outside package whose numbers are off is timed too,
with a remark. On a GPU the sides of a problem are compiled beforehand and run in one process. On a CPU every bar has a
process of its own, because a side would reuse memory that others left and so have fewer page faults, and every sample
follows an untimed call of the same side. A CPU on which two threads do not reach :data:`FREE_CORES_GAIN` times the
matrix products of one does not have two free cores: a bar that is missed there is marked as not decidable.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..analysis import counts
from ..analysis.accelerators.roofs import write_roofs
from ..analysis.check.statistics import Interval, median, ratio_interval
from ..kernels import baselines
from ..kernels.baselines.spec import Baseline
from ..kernels.common.sizes import next_power_of_two
from ..kernels.common.spec import MODES, Implementation
from ..results import store
from ..results.schema import Case, Environment, Record
from ..results.select import grouped
from ..results.toml_tables import read_toml
from . import note
from .calibrate import roof_row
from .compile_ahead import Compiler, default_jobs
from .derived import Run, build_record
from .executors import hold_gpus
from .plan import PlannedCase, package_of
from .run import file_name, run_in_turn, separate
from .workers import Limits, ReplaceableWorker, probe_environment

FILE = store.HERE / "bars.toml"
COPY, BEST = "copy", "best"
"""``theirs`` may also be the device's copy, or the fastest of all sides, ours included."""

DEFAULT = "default"
"""``ours`` may also be the operation called as users do, without an implementation or a chunk length."""

SET_ON = "h200_sxm"
"""The accelerator that bars on a GPU were set on. On another its rates, not only our kernels, decide what is held."""

SHORTEST_CHUNK = 64
"""The shortest of every chunk length: one tile of the kernels."""

COMPILE_TIMEOUT_S = 120.0
"""Time limit of a case that is called to compile."""

COPIED_BYTES = 2 * 2**30
"""Read and written by one sample of the copy: far above any cache."""

FREE_CORES_GAIN = 1.6
"""The least that two threads reach, in multiples of one thread's rate, where each has a core to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """How many times faster, or smaller in memory, ``ours`` must be than ``theirs``, each at its fastest chunk length.

    Attributes:
        ours, theirs: implementations. Ours may be :data:`DEFAULT`; theirs :data:`COPY`, the device's copy of ours'
            compulsory bytes, or :data:`BEST`, of which the ratio is 1 / (1 + regret).
        ratio: theirs / ours that is asked for.
        quantity: what is compared: the median time, or the peak memory of one call above its inputs.
        their_chunk_size: the chunk length theirs is taken at, where not at its fastest.
    """

    ours: str
    theirs: str
    mode: Literal[MODES]  # type: ignore[valid-type]
    ratio: float
    quantity: Literal["time", "memory"] = "time"
    their_chunk_size: int | None = None

    @property
    def name(self) -> str:
        """Its name within the problem."""
        return "/".join((self.mode, self.ours, self.theirs, *(["memory"] if self.quantity == "memory" else [])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Where a side differs from its problem: operation, further sizes, and chunk lengths to try.

    "own" is the implementation's choice, "every" all powers of two from :data:`SHORTEST_CHUNK` to the one that holds
    the sequence, where the implementation takes them.
    """

    op: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    chunk_sizes: tuple[int | Literal["own"], ...] | Literal["every"] = ("own",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem and its bars. Where sizes or dtypes are lists, it stands for a problem of each combination of values.

    Attributes:
        label: may name sizes in braces.
        shapes: problems in place of ``sizes``, each the operation's sizes in their order.
        modes: in which every side is timed, with a bar or without.
        sides: where sides differ from the problem; also those that no bar names.
        options: further keywords of the operation's functions, its reference's too.
    """

    label: str
    op: str
    sizes: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str | tuple[str, ...] = "bf16"
    modes: tuple[str, ...] = ("fw", "fwbw")
    sides: Mapping[str, Side] = field(default_factory=dict)
    options: Mapping[str, bool] = field(default_factory=dict)
    bars: tuple[Bar, ...] = ()

    def expand(self) -> Iterator[Problem]:
        """Yield a problem for every combination of sizes, or every shape, and dtypes.

        Raises:
            ValueError: a shape does not have as many sizes as the operation.
        """
        listed = [[(n, v) for v in (s if isinstance(s, tuple) else (s,))] for n, s in self.sizes.items()]
        combinations: list[Mapping[str, int]] = [dict(each) for each in itertools.product(*listed)]
        if self.shapes:
            names = baselines.get_operation(self.op).sizes
            combinations = [dict(zip(names, shape, strict=True)) for shape in self.shapes]
        for dtype in (self.dtype,) if isinstance(self.dtype, str) else self.dtype:
            for sizes in combinations:
                label = f"{self.label.format(**sizes)}, {dtype}"
                yield replace(self, label=label, sizes=sizes, shapes=(), dtype=dtype)

    def alone(self, *bars: Bar) -> Problem:
        """Return the problem with these of its bars alone, and their sides."""
        named = {impl for bar in bars for impl in (bar.ours, bar.theirs)}
        sides = {impl: side for impl, side in self.sides.items() if impl in named or BEST in named}
        modes = tuple(mode for mode in self.modes if mode in {bar.mode for bar in bars})
        return replace(self, bars=bars, modes=modes, sides=sides)

    @property
    def impls(self) -> list[str]:
        """The sides, those of bars first."""
        of_bars = (impl for bar in self.bars for impl in (bar.ours, bar.theirs) if impl not in (COPY, BEST))
        return list(dict.fromkeys((*of_bars, *self.sides)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Problems that are measured together, on one kind of device.

    Attributes:
        kernel: the kernel family of their rows.
        overall: bars on the geometric mean of the ratios of all problems; of those of :data:`BEST`, on their median.
        rounds: samples of every case.
        complete: whether its rows are part of a complete set of results, see complete.py.
    """

    kernel: str
    problems: tuple[Problem, ...]
    rounds: int = 20
    device: Literal["cuda", "cpu"] = "cuda"
    overall: tuple[Bar, ...] = ()
    complete: bool = True


Families = Mapping[str, Family]

Entry = tuple[Record, str]
"""A measured row and a remark on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A bar and what was measured: theirs / ours with its 95 % interval; where a side is missing, no ratio and why.

    Attributes:
        undecidable: whether a miss says nothing, because the machine did not have two free cores.
    """

    problem: str
    bar: Bar
    ours: str
    theirs: str
    ratio: float | None = None
    interval: Interval | None = None
    undecidable: bool = False

    @property
    def held(self) -> bool:
        """Whether both sides are there and their ratio reaches the bar."""
        return self.ratio is not None and self.ratio >= self.bar.ratio

    def row(self) -> dict[str, Any]:
        """Return what people see of it."""
        missed = "missed, not decidable here" if self.undecidable else "missed"
        # Too few samples leave the interval open: from 0 to infinity.
        interval = self.interval if self.interval and math.isfinite(self.interval.high) else None
        return {
            "problem": self.problem,
            "mode": self.bar.mode,
            "ours": self.ours,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "ci_low": interval and interval.low,
            "ci_high": interval and interval.high,
            "bar": self.bar.ratio,
            "outcome": "held" if self.held else "not measured" if self.ratio is None else missed,
            **({"regret": self.ratio and 1 / self.ratio - 1} if self.bar.theirs == BEST else {}),
        }


def load_bars(path: Path = FILE) -> Families:
    """Read a file of bars: its families by name, with their problems expanded.

    Raises:
        ValueError: the file does not hold tables of :class:`Family`, or a problem has no side or a label that names no
            size.
    """
    found: Families = read_toml(path, Mapping[str, Family], "bars")
    expanded = {}
    for name, family in found.items():
        problems: list[Problem] = []
        for number, problem in enumerate(family.problems, start=1):
            where = f"{path}: {name}.problems {number}"
            if not problem.impls:
                raise ValueError(f"{where}: bars or sides must name an implementation, got none")
            try:
                problems += problem.expand()
            except KeyError as error:
                raise ValueError(f"{where}: label must name sizes of the problem in braces, got {error}") from None
            except ValueError as error:
                raise ValueError(f"{where}: shapes must have a number for each size of {problem.op}: {error}") from None
        expanded[name] = replace(family, problems=tuple(problems))
    return expanded


def select(families: Families, name: str | None, only: str | None = None) -> Families:
    """Return the families with only the problems and bars that a name means; without a name all.

    A name is a family's, a problem's or a bar's (``family/label/bar``), or an operation's or an implementation's. A
    family keeps its overall bars only where all of its problems are chosen.

    Args:
        only: text that labels of problems must contain.

    Raises:
        ValueError: nothing is left.
    """
    chosen = {}
    for key, family in families.items():
        kept = []
        for problem in family.problems:
            whole = f"{key}/{problem.label}"
            if only is not None and only not in problem.label:
                continue
            named = tuple(bar for bar in problem.bars if name in (f"{whole}/{bar.name}", bar.ours, bar.theirs))
            if name in (None, key, whole, problem.op):
                kept.append(problem)
            elif named:
                kept.append(problem.alone(*named))
        if kept:
            overall = family.overall if tuple(kept) == family.problems else ()
            chosen[key] = replace(family, problems=tuple(kept), overall=overall)
    if not chosen:
        words = "" if only is None else f" with {only!r} in a label"
        raise ValueError(
            f"NAME must be {', '.join(families)}, an operation, an implementation, or a name that --list prints, "
            f"got {name!r}{words}"
        )
    return chosen


def list_rows(families: Families) -> list[dict[str, Any]]:
    """Return a row per bar: its name and the ratio asked for."""
    return [
        {"name": f"{name}/{problem.label}/{bar.name}", "ratio": bar.ratio, "device": family.device}
        for name, family in families.items()
        for problem in family.problems
        for bar in problem.bars
    ]


def brief_rows(families: Families) -> list[dict[str, Any]]:
    """Return a row per family, or per problem of one family; of one problem, per bar."""
    problems = [(name, problem) for name, family in families.items() for problem in family.problems]
    if len(problems) == 1:
        return list_rows(families)
    several = len(families) > 1
    groups = grouped(problems, lambda each: each[0] if several else f"{each[0]}/{each[1].label}")
    return [
        {
            "name": name,
            **({"device": families[name].device, "problems": len(group)} if several else {}),
            "bars": sum(len(problem.bars) for _, problem in group),
            "beside": list(dict.fromkeys(bar.theirs for _, problem in group for bar in problem.bars)),
        }
        for name, group in groups.items()
    ]


def planned_cases(kernel: str, problem: Problem, mode: str, impls: Sequence[str]) -> list[PlannedCase]:
    """Return the cases of sides in a mode, one per chunk length; ValueError where a side is not declared."""
    planned, dtype = [], str(problem.dtype)
    for impl in impls:
        side = problem.sides.get(impl, Side())
        op = side.op or problem.op
        operation = baselines.get_operation(op)
        given: dict[str, Any] = {**problem.sizes, **side.sizes}
        sizes = {name: size for name, size in given.items() if name in operation.sizes}
        target: Implementation | Baseline
        if impl == DEFAULT:
            target = Implementation(name=DEFAULT, call=operation.call, chunked=False, requires=("triton",))
        else:
            target = baselines.get_implementation(op, impl)
        columns: dict[str, Any] = {"impl": impl, "provider": package_of(target)}
        if isinstance(target, Implementation):
            columns["impl"] = "+".join((impl, *problem.options))
            columns["state_dtype"] = "fp32" if target.state_dtypes else None
            # What the implementation chooses, in the row as in a sweep: counts depend on it.
            preferred = target.chosen_chunk(sizes, dtype)
        else:
            preferred = next(iter(target.chunk_sizes), None)
            if problem.options:
                # A baseline whose gradients are right only with an option declares fw alone.
                target = replace(target, modes=MODES)
        if side.chunk_sizes == "every":
            longest = max(SHORTEST_CHUNK, next_power_of_two(sizes["seq_len"]))
            lengths = [1 << n for n in range(SHORTEST_CHUNK.bit_length() - 1, longest.bit_length())]
            refused = {n: target.why_unsupported(mode, dtype, None, {**sizes, "chunk_size": n}) for n in lengths}
            chunks: Sequence[int | None] = [n for n, reason in refused.items() if reason is None]
        else:
            chunks = [preferred if size == "own" else size for size in side.chunk_sizes]
        for chunk_size in chunks:
            case = Case(kernel=kernel, op=op, mode=mode, dtype=dtype, chunk_size=chunk_size, **columns, **sizes)
            planned.append(PlannedCase(case=case, target=target, options=problem.options))
    return planned


def compile_first(family: Family, environment: Environment) -> None:
    """Compile a family's problems in several processes, which end before anything is timed: their contexts hold memory.

    A problem's last mode is called: with the backward pass, kernels of the forward pass are compiled too.
    """
    sides = (planned_cases(family.kernel, each, each.modes[-1], each.impls) for each in family.problems)
    tried, _ = separate([*itertools.chain.from_iterable(sides)], environment)

    def tell(count: int, _left: int) -> None:
        note(f"compiling {count} cases")

    with Compiler(tried, environment, default_jobs("cuda"), 1, COMPILE_TIMEOUT_S, tell) as compiler:
        compiler.compile_all()


def measure_bars(
    families: Families, *, rounds: int | None, output: Path, time_limit_s: float = math.inf
) -> Iterator[tuple[list[Entry], list[Verdict]]]:
    """Measure families of bars, keep their rows and the copies, and yield what came of each problem.

    Args:
        rounds: samples of every case; None is what each family says.
        time_limit_s: no problem starts after this many seconds.

    Raises:
        ValueError: there is no GPU, and a problem needs one.
        RuntimeError: the device could not be found out, or its copy not be measured.
    """
    began = time.monotonic()
    on_gpu = [name for name, family in families.items() if family.device == "cuda"]
    if on_gpu and (here := probe_environment()).device_kind != "cuda":
        raise ValueError(f"the bars {', '.join(on_gpu)} need an NVIDIA GPU, and none is here")
    note(*store.recovered_notes(output))
    if on_gpu and here.device_accelerator != SET_ON:
        note(f"these bars were set on {SET_ON}: on {here.device_name} other rates limit both sides, and ratios differ")
    for name, family in families.items():
        verdicts: list[Verdict] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(hold_gpus(int(family.device == "cuda")))
            if family.device == "cuda":
                compile_first(family, here)
            session = stack.enter_context(_worker(family.device))
            environment = Environment(**session.call("bench.environment:environment_here"))
            run = Run.start(environment)
            with store.RunWriter(output, file_name(f"{store.BARS_PREFIX}{name}", run.run_id)) as writer:
                measuring = _Measuring(family, session, run, writer, rounds or family.rounds)
                for number, problem in enumerate(family.problems):
                    if time.monotonic() - began > time_limit_s:
                        note(f"out of time: {len(family.problems) - number} problems of {name} are left")
                        return
                    entries, found = measuring.measure(problem)
                    verdicts += found
                    yield entries, found
        note(f"{len(writer.records)} rows in {writer.path}")
        if family.overall:
            yield [], [judge_overall(name, bar, verdicts) for bar in family.overall]


@dataclass(frozen=True, slots=True)
class _Measuring:
    """A run of a family's problems."""

    family: Family
    session: ReplaceableWorker
    run: Run
    writer: store.RunWriter
    rounds: int

    def measure(self, problem: Problem) -> tuple[list[Entry], list[Verdict]]:
        """Return the rows of a problem and the verdicts on its bars."""
        shares = any(bar.theirs == COPY for bar in problem.bars)
        copies_ms = self._copy(problem) if shares else []
        entries: list[Entry] = []
        undecidable = set()
        if self.family.device == "cpu":
            gain = _thread_gain()
            for bar in problem.bars:
                with _worker("cpu") as own:
                    sides = problem.alone(bar).impls
                    entries += self._race(own, problem, bar.mode, sides)
                before, gain = gain, _thread_gain()
                note(f"two threads reached {before:.3g} and {gain:.3g} times one before and after {bar.name}")
                if min(before, gain) < FREE_CORES_GAIN:
                    undecidable.add(bar)
        else:
            for mode in problem.modes:
                entries += self._race(self.session, problem, mode, problem.impls)
        if shares:
            copies_ms += self._copy(problem)
        verdicts = [judge(problem.label, bar, entries, copies_ms) for bar in problem.bars]
        return entries, [replace(verdict, undecidable=verdict.bar in undecidable) for verdict in verdicts]

    def _race(self, session: ReplaceableWorker, problem: Problem, mode: str, impls: Sequence[str]) -> Iterator[Entry]:
        """Time sides in turn, keep their rows and yield them."""
        device = self.family.device
        limits = Limits(
            timeout_s=math.inf,
            rounds=self.rounds,
            settle=device == "cpu",
            time_incorrect_peers=True,
            device_kind=device,
        )
        planned = planned_cases(self.family.kernel, problem, mode, impls)
        for item, reply in run_in_turn(session, planned, self.run.environment, limits, lambda item: note(str(item))):
            record = build_record(self.run, item, reply)
            self.writer.append(record)
            remark = "" if record.status == "ok" else f"{record.status}: {record.reason}"
            faults = reply.get("page_faults") or [0]
            if device == "cpu" and max(faults) and not remark:
                remark = f"{min(faults):,} to {max(faults):,} page faults a call, {median(faults):,.0f} in the median"
            yield record, remark

    def _copy(self, problem: Problem) -> list[float]:
        """Time the device's copy, keep its row and return its samples in ms."""
        times = self.session.call("bench.calibrate:copy_here", moved_bytes=COPIED_BYTES)
        what: dict[str, Any] = {"work": COPIED_BYTES, "quantity": "copy", "size": COPIED_BYTES // 2, "short": True}
        rate = None if self.run.device is None else self.run.device.bandwidth_bytes_s
        row = roof_row(self.run.run_id, self.run.environment, times, **what, spec_rate=rate, beside=problem.label)
        write_roofs([row], self.writer.path.with_suffix(".copies.parquet"))
        return row.time_samples_ms


def _worker(device: str) -> ReplaceableWorker:
    return ReplaceableWorker({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else None)


def _thread_gain() -> float:
    """Return the gain measured in a process of its own: setting torch's threads changes MKL's choices for good."""
    with _worker("cpu") as session:
        return session.call("bench.calibrate:thread_gain_here")["gain"]


def judge(problem: str, bar: Bar, entries: Sequence[Entry], copies_ms: Sequence[float] = ()) -> Verdict:
    """Compare the fastest (by median) of both sides of a bar.

    Args:
        copies_ms: samples of the device's copy of :data:`COPIED_BYTES`.

    Raises:
        ValueError: the bar is a share of the copy rate, and the compulsory bytes of ours are not counted.
    """
    ours = _fastest(entries, bar.ours, bar.mode)
    theirs = _fastest(entries, None if bar.theirs == BEST else bar.theirs, bar.mode, bar.their_chunk_size)
    if bar.theirs == COPY and isinstance(ours, Record):
        count = counts.count_case(ours.op, ours.impl, ours.mode, ours.dtype, ours.state_dtype, ours.sizes)
        if count is None:
            raise ValueError(f"compulsory bytes of {ours.impl}, {ours.mode}, must be counted to compare it with a copy")
        share = count.compulsory_bytes / COPIED_BYTES
        samples = [share * sample for sample in copies_ms]
        theirs = replace(ours, impl=COPY, chunk_size=None, time_samples_ms=samples, time_ms=median(samples))
    verdict = Verdict(problem=problem, bar=bar, ours=_words(ours, bar), theirs=_words(theirs, bar))
    if isinstance(ours, str) or isinstance(theirs, str):
        return verdict
    if bar.quantity == "memory":
        our_bytes, their_bytes = memory_bytes(ours), memory_bytes(theirs)
        return replace(verdict, ratio=their_bytes / our_bytes if our_bytes and their_bytes is not None else None)
    pair = theirs.time_samples_ms or [], ours.time_samples_ms or []
    return replace(verdict, ratio=median(pair[0]) / median(pair[1]), interval=ratio_interval(*pair))


def judge_overall(family: str, bar: Bar, verdicts: Sequence[Verdict]) -> Verdict:
    """Judge a bar on the geometric mean of the ratios of all problems.

    The interval is the geometric mean of the intervals' ends: no narrower than that of independent problems. A bar on
    the best of all sides is judged on the median, which has no interval.
    """
    parts = [verdict for verdict in verdicts if verdict.bar.name == bar.name]
    ratios = [verdict.ratio for verdict in parts if verdict.ratio is not None]
    intervals = [verdict.interval for verdict in parts if verdict.interval is not None]
    found = Verdict(problem=f"{family}, overall", bar=bar, ours="", theirs=bar.theirs)
    if not parts or len(ratios) < len(parts):
        return replace(found, ours=f"{len(parts) - len(ratios)} of {len(parts)} problems could not be compared")
    if bar.theirs == BEST:
        worst = min(parts, key=lambda verdict: verdict.ratio or 0.0)
        words = f"median of {len(ratios)} problems; worst {min(ratios):.3g} at {worst.problem}"
        return replace(found, ours=words, ratio=median(ratios))
    interval = None
    if intervals:
        low, high = (_geometric_mean([getattr(each, end) for each in intervals]) for end in ("low", "high"))
        interval = Interval(low=low, high=high)
    words = f"geometric mean of {len(ratios)} problems"
    return replace(found, ours=words, ratio=_geometric_mean(ratios), interval=interval)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.prod(values) ** (1 / len(values))


def entry_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return what people see of a problem's rows: every side's times and memory."""
    return [
        {
            "side": record.impl,
            "chunk": record.chunk_size,
            "mode": record.mode,
            "median_ms": record.time_ms,
            "ci_low_ms": record.time_ci_low_ms,
            "ci_high_ms": record.time_ci_high_ms,
            "fastest_ms": min(record.time_samples_ms) if record.time_samples_ms else None,
            "memory_gib": None if (used := memory_bytes(record)) is None else used / 2**30,
            "remark": remark,
        }
        for record, remark in sorted(entries, key=lambda e: (e[0].mode, e[0].impl, e[0].chunk_size or 0))
    ]


def memory_bytes(record: Record) -> int | None:
    """Return the peak of one call above its inputs, None where it was not measured."""
    if record.peak_memory_bytes is None or record.input_bytes is None:
        return None
    return record.peak_memory_bytes - record.input_bytes


def _fastest(entries: Sequence[Entry], impl: str | None, mode: str, chunk_size: int | None = None) -> Record | str:
    """Return the fastest row of a side, or of all sides where ``impl`` is None; a text says why there is none."""
    found = [
        (record, remark)
        for record, remark in entries
        if impl in (None, record.impl.partition("+")[0])
        and record.mode == mode
        and chunk_size in (None, record.chunk_size)
    ]
    if timed := [record for record, _ in found if record.time_samples_ms]:
        return min(timed, key=lambda record: median(record.time_samples_ms or ()))
    return f"{impl or BEST}: {'; '.join(dict.fromkeys(remark for _, remark in found)) or 'was not measured'}"


def _words(side: Record | str, bar: Bar) -> str:
    """Return the fastest row of a side in words, or why there is none."""
    if isinstance(side, str):
        return side
    value = f"{side.time_ms:.3g} ms"
    if bar.quantity == "memory":
        used = memory_bytes(side)
        value = "no memory figure" if used is None else f"{used / 2**30:.3g} GiB"
    return f"{side.impl}{f' ({side.chunk_size})' if side.chunk_size else ''} {value}"
