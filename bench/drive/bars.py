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
import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from ...analysis.accelerators.known import get_accelerator
from ...analysis.accelerators.roofs import write_roofs
from ...analysis.check.compare import time_interval
from ...analysis.check.statistics import Interval, median
from ...analysis.counts import count_case
from ...analysis.model.fit import case_of
from ...analysis.reproduce.entries import COPY, Asked, Document, claims_of
from ...analysis.reproduce.verdicts import ClaimLine, Store, evaluate, judged, memory_bytes
from ...kernels import baselines
from ...kernels.common.sizes import next_power_of_two
from ...kernels.common.spec import MODES, Implementation
from ...results import store
from ...results.arguments import one_of
from ...results.schema import Case, Environment, Record
from ...results.select import Row, grouped
from ...results.toml_tables import Refused, read_toml
from .. import note
from ..environment import without_gpu
from ..plan import PlannedCase, package_of
from ..request import SweepOptions
from ..worker.protocol import RunLimits
from .calibrate import roof_row
from .compile_ahead import Compiler, default_jobs
from .derived import Run
from .executors import LocalExecutor, alone, hold_gpus
from .progress import SweepProgress
from .run import file_name, measure, separate, target_of
from .workers import probe_environment

FILE = store.HERE / "bars.toml"
BEST = "best"
"""What a side is called that names no implementation: the fastest of all sides, ours included."""

SHORTEST_CHUNK = 64
"""The shortest of every chunk length: one tile of the kernels."""

COMPILE_TIMEOUT_S = 120.0
"""Time limit of a case that is called to compile."""

COPIED_BYTES = 2 * 2**30
"""Read and written by one sample of the copy: far above any cache."""

FREE_CORES_GAIN = 1.6
"""The least that two threads reach, in multiples of one thread's rate, where each has a core to itself."""


class Bar(NamedTuple):
    """A claim on one problem: theirs / ours, in time or memory, is at least so much. Or sides to measure beside those.

    Attributes:
        family: its table in the file, whose bars are measured together.
        label: its problem, in words.
        point: where ``asked``, a ratio or beside, has its only line.
    """

    family: str
    label: str
    point: Mapping[str, Any]
    asked: Asked

    @property
    def problem(self) -> str:
        """Its problem's name. Bars of one problem are measured in turn."""
        return f"{self.family}/{self.label}"

    @property
    def shared(self) -> dict[str, Any]:
        """What all its sides have: operation, mode, dtype and sizes, but where a side has its own."""
        return self.asked.shared(self.point)

    @property
    def mode(self) -> str:
        """Its mode."""
        return str(self.shared["mode"])

    @property
    def sides(self) -> list[dict[str, Any]]:
        """What selects the rows of its sides, ours first."""
        return [self.asked.terms(side, self.point) for side in reversed(self.asked.claim.sides)]

    @property
    def impls(self) -> list[str]:
        """Implementations of its sides, ours first, or default, :data:`COPY` or :data:`BEST`."""
        return [terms.get("impl", BEST).partition("+")[0] for terms in self.sides]

    @property
    def name(self) -> str:
        """Its name within the problem."""
        memory = ["memory"] if self.asked.claim.metric == "allocated" else []
        return "/".join((self.mode, *self.impls, *memory))

    @property
    def device_kind(self) -> str:
        """Where it is measured: cuda or cpu."""
        return "cpu" if self.asked.document.device == "cpu" else "cuda"

    @property
    def is_beside(self) -> bool:
        """Whether it only says what is measured."""
        return self.asked.claim.beside is not None


Entry = tuple[Record, str]
"""A measured row and a remark on it."""


Verdict = dict[str, Any]
"""A bar and what was measured, as people see it: theirs / ours with its 95 % interval; where a side is missing, no
ratio and why."""


def load_bars(path: Path = FILE) -> list[Bar]:
    """Read a file of bars, documents (:mod:`..analysis.reproduce.entries`) by family; those of a problem side by side.

    Raises:
        ValueError: a claim is no ratio with at_least, cannot be evaluated, or is of an entry whose label names no size.
    """
    bars = []
    for family, document in read_toml(path, Mapping[str, Document], "bars").items():
        try:
            if document.device != "cpu":
                get_accelerator(document.device)
            for key, asked in claims_of(document):
                claim = asked.claim
                if not claim.beside and (claim.at_least is None or len(claim.ratio or ()) != 2):
                    raise Refused(asked.id, "a ratio of two sides with at_least, or beside", claim.kind)
                one_of(f"{asked.id}.metric", claim.metric, ("time", "allocated"))
                for each in asked.apart():
                    (point,) = each.points()
                    shared = each.shared(point)
                    try:
                        label = f"{asked.entry.where.format(**shared)}, {shared['dtype']}"
                    except LookupError as error:
                        where = f"entries.{key}.where must name sizes of the problem in braces"
                        raise ValueError(f"{where}, got {error}") from None
                    bars.append(Bar(family, label, point, each))
        except ValueError as error:
            raise ValueError(f"{path}: {family}.{error}") from None
    return list(itertools.chain(*grouped(bars, attrgetter("problem")).values()))


def select(bars: Sequence[Bar], name: str | None, only: str | None = None) -> list[Bar]:
    """Return the bars that a name means, with what is measured beside them; without a name all.

    A name is a family's, a problem's or a bar's (``family/label/bar``), or an operation's or an implementation's.

    Args:
        only: text that labels of problems must contain.

    Raises:
        ValueError: nothing is left.
    """
    chosen: list[Bar] = []
    for problem, group in grouped((bar for bar in bars if (only or "") in bar.label), attrgetter("problem")).items():
        if name in (None, group[0].family, problem, group[0].shared["op"]):
            chosen += group
            continue
        named = [bar for bar in group if not bar.is_beside and name in (f"{problem}/{bar.name}", *bar.impls)]
        modes = {bar.mode for bar in named if BEST in bar.impls}
        chosen += [*named, *(bar for bar in group if bar.is_beside and bar.mode in modes)]
    if not chosen:
        words = "" if only is None else f" with {only!r} in a label"
        known = ", ".join(grouped(bars, attrgetter("family")))
        listed = "an operation, an implementation, or a name that --list prints"
        raise ValueError(f"NAME must be {known}, {listed}, got {name!r}{words}")
    return chosen


def list_rows(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """Return a row per bar: its name and the ratio asked for."""
    return [
        {"name": f"{bar.problem}/{bar.name}", "ratio": bar.asked.claim.at_least, "device": bar.device_kind}
        for bar in bars
        if not bar.is_beside
    ]


def brief_rows(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """Return a row per family, or per problem of one family; of one problem, per bar."""
    if len({bar.problem for bar in bars}) == 1:
        return list_rows(bars)
    several = len({bar.family for bar in bars}) > 1
    rows = []
    for name, group in grouped(bars, attrgetter("family" if several else "problem")).items():
        claimed = [bar for bar in group if not bar.is_beside]
        about = {"device": group[0].device_kind, "problems": len({bar.problem for bar in group})}
        beside = list(dict.fromkeys(bar.impls[1] for bar in claimed))
        rows.append({"name": name, **(about if several else {}), "bars": len(claimed), "beside": beside})
    return rows


def planned_cases(bars: Sequence[Bar], mode: str | None = None) -> list[PlannedCase]:
    """Return the cases of bars' sides, of one mode or all, each once; ValueError where a side is not declared."""
    asked = [bar for bar in bars if mode in (None, bar.mode)]
    cases = (item for bar in asked for terms in bar.sides for item in _cases(bar.asked.document.kernel, terms))
    return list({item.case.case_id: item for item in cases}.values())


def _cases(kernel: str, terms: Mapping[str, Any]) -> Iterator[PlannedCase]:
    """Yield the cases of a side, one per chunk length; none of a copy or of the best of the others."""
    impl = terms.get("impl", COPY)
    if impl == COPY:
        return
    op, mode, dtype = terms["op"], terms["mode"], terms["dtype"]
    operation = baselines.get_operation(op)
    sizes = {
        name: terms[name] for name in (*operation.sizes, *({"documents", *operation.optional_sizes} & terms.keys()))
    }
    target = target_of(op, impl)
    options = dict.fromkeys(terms["options"].split(), True) if "options" in terms else {}
    columns: dict[str, Any] = {"impl": impl, "provider": package_of(target)}
    if isinstance(target, Implementation):
        columns["state_dtype"] = "fp32" if target.state_dtypes else None
        # What the implementation chooses, in the row as in a sweep: counts depend on it.
        own = target.chosen_chunk(sizes, dtype)
    else:
        own = next(iter(target.chunk_sizes), None)
        if options:
            # A baseline whose gradients are right only with an option declares fw alone.
            target = dataclasses.replace(target, modes=MODES)
    lengths = (terms["chunk_size"],) if "chunk_size" in terms else terms.get("chunk_sizes", ("own",))
    if lengths == "every":
        longest = max(SHORTEST_CHUNK, next_power_of_two(sizes["seq_len"]))
        powers = [1 << n for n in range(SHORTEST_CHUNK.bit_length() - 1, longest.bit_length())]
        lengths = [n for n in powers if target.why_unsupported(mode, dtype, None, {**sizes, "chunk_size": n}) is None]
    for length in lengths:
        chunk_size = own if length == "own" else length
        case = Case(kernel=kernel, op=op, mode=mode, dtype=dtype, chunk_size=chunk_size, **columns, **sizes)
        yield PlannedCase(case=case, target=target, options=options)


def compile_first(problems: Iterable[Sequence[Bar]], environment: Environment) -> None:
    """Compile problems in several processes, which end before anything is timed: their contexts hold memory.

    A problem's last mode is called: with the backward pass, kernels of the forward pass are compiled too.
    """
    cases = (item for bars in problems for item in planned_cases(bars, [*dict.fromkeys(x.mode for x in bars)][-1]))
    tried, _ = separate([*cases], environment)

    def tell(count: int, _left: int) -> None:
        note(f"compiling {count} cases")

    jobs = default_jobs("cuda", SweepOptions())
    with Compiler(alone(tried), environment, jobs, 1, COMPILE_TIMEOUT_S, tell) as compiler:
        compiler.compile_all()


def measure_bars(
    bars: Sequence[Bar], *, rounds: int | None, output: Path, time_limit_s: float = math.inf
) -> Iterator[tuple[list[Entry], list[Verdict]]]:
    """Measure bars, keep their rows and the copies, and yield what came of each problem.

    What is asked of a mean is judged where every bar of the family is there.

    Args:
        rounds: samples of every case; None is what each family says.
        time_limit_s: no problem starts after this many seconds.

    Raises:
        ValueError: there is no GPU, and a problem needs one.
        RuntimeError: the device could not be found out, or its copy not be measured.
    """
    began = time.monotonic()
    on_gpu = {bar.family: get_accelerator(bar.asked.document.device).key for bar in bars if bar.device_kind == "cuda"}
    if on_gpu and (here := without_gpu() or probe_environment()).device_kind != "cuda":
        raise ValueError(f"the bars {', '.join(on_gpu)} need an NVIDIA GPU, and none is here")
    note(*store.recovered_notes(output))
    for device in sorted({*on_gpu.values()} - {here.device_accelerator} if on_gpu else ()):
        note(f"these bars were set on {device}: on {here.device_name} other rates limit both sides, and ratios differ")
    for name, family in grouped(bars, attrgetter("family")).items():
        verdicts: list[tuple[Bar, Verdict]] = []
        problems = grouped(family, attrgetter("problem"))
        with contextlib.ExitStack() as stack:
            stack.enter_context(hold_gpus(int(name in on_gpu)))
            if name in on_gpu:
                compile_first(problems.values(), here)
            executor = stack.enter_context(_executor(family[0].device_kind))
            run = Run.start(executor.environment())
            with store.RunWriter(output, file_name(f"{store.BARS_PREFIX}{name}", run.run_id)) as writer:
                measuring = _Measuring(executor, run, writer, rounds or family[0].asked.document.rounds)
                for number, problem in enumerate(problems.values()):
                    if time.monotonic() - began > time_limit_s:
                        note(f"out of time: {len(problems) - number} problems of {name} are left")
                        return
                    entries, found = measuring.measure(problem)
                    verdicts += found
                    yield entries, [verdict for _, verdict in found]
        note(f"{len(writer.records)} rows in {writer.path}")
        means = grouped((each for each in verdicts if each[0].asked.claim.overall), lambda each: each[0].name)
        if means and len(family) == sum(len(each.points()) for _, each in claims_of(family[0].asked.document)):
            yield [], [judge_overall(each[0][0], [verdict for _, verdict in each]) for each in means.values()]


@dataclass(frozen=True, slots=True)
class _Measuring:
    """A run of a family's problems."""

    executor: LocalExecutor
    run: Run
    writer: store.RunWriter
    rounds: int

    def measure(self, bars: Sequence[Bar]) -> tuple[list[Entry], list[tuple[Bar, Verdict]]]:
        """Return the rows of a problem, and its bars with the verdicts on them."""
        claimed = [bar for bar in bars if not bar.is_beside]
        shares = any(COPY in bar.impls for bar in claimed)
        copies_ms = self._copy(bars[0].label) if shares else []
        entries: list[Entry] = []
        # For each bar what it is judged on, and what a miss is called.
        raced: list[tuple[list[Entry], str]] = []
        if bars[0].device_kind == "cpu":
            gain = _thread_gain()
            for bar in claimed:
                with _executor("cpu") as own:
                    found = [*self._race(own, planned_cases([bar]))]
                before, gain = gain, _thread_gain()
                note(f"two threads reached {before:.3g} and {gain:.3g} times one before and after {bar.name}")
                free = min(before, gain) >= FREE_CORES_GAIN
                raced.append((found, "missed" if free else "missed, not decidable here"))
                entries += found
        else:
            for mode in dict.fromkeys(bar.mode for bar in bars):
                entries += self._race(self.executor, planned_cases(bars, mode))
            raced = [(entries, "missed")] * len(claimed)
        if shares:
            copies_ms += self._copy(bars[0].label)
        pairs = zip(claimed, raced, strict=True)
        return entries, [(bar, judge(bar, own, copies_ms, missed=word)) for bar, (own, word) in pairs]

    def _race(self, executor: LocalExecutor, planned: Sequence[PlannedCase]) -> Iterator[Entry]:
        """Time cases in turn, keep their rows and yield them."""
        on_cpu = self.run.environment.device_kind == "cpu"
        limits = RunLimits(timeout_s=math.inf, rounds=self.rounds, time_incorrect_peers=True)
        how: dict[str, Any] = {"executor": executor, "group_by": lambda _: None, "progress": SweepProgress()}
        for _, record, reply in measure(planned, self.run, limits, **how):
            self.writer.append(record)
            remark = "" if record.status == "ok" else f"{record.status}: {record.reason}"
            faults = reply.get("page_faults") or [0]
            if on_cpu and max(faults) and not remark:
                remark = f"{min(faults):,} to {max(faults):,} page faults a call, {median(faults):,.0f} in the median"
            yield record, remark

    def _copy(self, label: str) -> list[float]:
        """Time the device's copy, keep its row and return its samples in ms."""
        times = self.executor.call("bench.drive.calibrate:copy_here", moved_bytes=COPIED_BYTES)
        what: dict[str, Any] = {"work": COPIED_BYTES, "quantity": "copy", "size": COPIED_BYTES // 2, "short": True}
        rate = None if self.run.device is None else self.run.device.bandwidth_bytes_s
        row = roof_row(self.run.run_id, self.run.environment, times, **what, spec_rate=rate, beside=label)
        path = self.writer.path
        write_roofs([row], path.parent / store.OTHER / f"{path.stem}.copies.parquet")
        return row.time_samples_ms


def _executor(device: str) -> LocalExecutor:
    return LocalExecutor(environ={"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def _thread_gain() -> float:
    """Return the gain measured in a process of its own: setting torch's threads changes MKL's choices for good."""
    with _executor("cpu") as own:
        return own.call("bench.drive.calibrate:thread_gain_here")["gain"]


def judge(bar: Bar, entries: Sequence[Entry], copies_ms: Sequence[float] = (), *, missed: str = "missed") -> Verdict:
    """Compare the fastest (by median) of both sides of a bar.

    Args:
        copies_ms: samples of the device's copy of :data:`COPIED_BYTES`.
        missed: what to say of a bar that is not held: a miss says nothing where the machine had no two free cores.

    Raises:
        ValueError: the bar is a share of the copy rate, and the compulsory bytes of ours are not counted.
    """
    rows: list[Row] = [
        {**dataclasses.asdict(record), "status": "ok" if record.time_samples_ms else remark}
        for record, remark in entries
    ]
    ours, theirs = (Store.of(rows).row(terms) for terms in bar.sides)
    if COPY in bar.impls and not isinstance(ours, str):
        count = count_case(*case_of(ours, ours["mode"], ours["dtype"]))
        if count is None:
            raise ValueError(f"compulsory bytes of {bar.name} must be counted to compare it with a copy")
        samples = [count.compulsory_bytes / COPIED_BYTES * sample for sample in copies_ms]
        copied = {"impl": COPY, "chunk_size": None, "time_samples_ms": samples, "time_ms": median(samples)}
        theirs = {**ours, **copied, "case_id": COPY, "pair_id": None}
        rows.append(theirs)
    (line,) = evaluate(bar.asked, Store.of(rows)).lines
    interval = None
    if bar.asked.claim.metric == "time" and not isinstance(ours, str) and not isinstance(theirs, str):
        interval = time_interval(theirs, ours)
    our_words, their_words = (_words(impl, side, bar) for impl, side in zip(bar.impls, (ours, theirs), strict=True))
    return _verdict(bar, bar.label, our_words, their_words, line, interval, missed)


def judge_overall(bar: Bar, verdicts: Sequence[Verdict]) -> Verdict:
    """Judge what a bar asks of the geometric mean of its ratios on all problems.

    The interval is the geometric mean of the intervals' ends: no narrower than that of independent problems. A bar on
    the best of all sides is judged on the median, which has no interval.
    """
    ratios = [each["ratio"] for each in verdicts if each["ratio"] is not None]
    mean = interval = None
    if len(ratios) < len(verdicts):
        words = f"{len(verdicts) - len(ratios)} of {len(verdicts)} problems could not be compared"
    elif BEST in bar.impls:
        mean, worst = median(ratios), min(verdicts, key=itemgetter("ratio"))
        words = f"median of {len(ratios)} problems; worst {min(ratios):.3g} at {worst['problem']}"
    else:
        mean, words = geometric_mean(ratios), f"geometric mean of {len(ratios)} problems"
        if all(each["ci_low"] is not None for each in verdicts):
            low, high = (geometric_mean(each[end] for each in verdicts) for end in ("ci_low", "ci_high"))
            interval = Interval(low=low, high=high)
    claim = dataclasses.replace(bar.asked.claim, at_least=bar.asked.claim.overall)
    asked = bar._replace(asked=bar.asked._replace(claim=claim))
    line = judged(claim, ClaimLine(point={}, ours=mean), 0)
    return _verdict(asked, f"{bar.family}, overall", words, bar.impls[1], line, interval)


def _verdict(
    bar: Bar, problem: str, ours: str, theirs: str, line: ClaimLine, interval: Interval | None, missed: str = "missed"
) -> Verdict:
    # Too few samples leave the interval open: from 0 to infinity.
    closed = interval if interval and math.isfinite(interval.high) else None
    return {
        "problem": problem,
        "mode": bar.mode,
        "ours": ours,
        "theirs": theirs,
        "ratio": line.ours,
        "ci_low": closed and closed.low,
        "ci_high": closed and closed.high,
        "bar": bar.asked.claim.at_least,
        "outcome": {None: "not measured", 1.0: "held", 0.0: missed}[line.holds],
        **({"regret": line.ours and 1 / line.ours - 1} if BEST in bar.impls else {}),
    }


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
            "memory_gib": None if (used := memory_bytes(dataclasses.asdict(record))) is None else used / 2**30,
            "remark": remark,
        }
        for record, remark in sorted(entries, key=lambda e: (e[0].mode, e[0].impl, e[0].chunk_size or 0))
    ]


def _words(impl: str, side: Row | str, bar: Bar) -> str:
    """Return the fastest row of a side in words, or why there is none."""
    if isinstance(side, str):
        return f"{impl}: {side}"
    value = f"{side['time_ms']:.3g} ms"
    if bar.asked.claim.metric == "allocated":
        used = memory_bytes(side)
        value = "no memory figure" if used is None else f"{used / 2**30:.3g} GiB"
    chunk = f" ({side['chunk_size']})" if side["chunk_size"] else ""
    return f"{side['impl']}{chunk} {value}"
