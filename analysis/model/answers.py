"""What the commands best, predict and chunk-size answer: as measured of the very case, else what a model says."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels.baselines import get_implementation, why_unsupported
from ...kernels.scalar_decay.declare import FUSED_CHUNK
from ...results.arguments import one_of, parse_size
from ...results.schema import CASE_COLUMNS
from ...results.select import describe_sizes
from ...results.store import committed_results
from ..accelerators.accelerator import ACCELERATORS
from ..counts import count, count_case, formulation_of, is_chunked
from ..counts.formulations import MODES, state_dtype_of
from ..counts.model import DTYPE_BYTES
from .chunk_size import check_chunkwise, chunks_taken, coefficients, too_short
from .fit import Fit, Fits, Row
from .prediction import MEASURED_COLUMNS, Answer, best_of, measured_on, rows_by_status, stored_sizes
from .runtime_model import flop_rate, runtime_model
from .terms import Query

if TYPE_CHECKING:
    from ..accelerators.known import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem of an operation on an accelerator, and the measured rows that it is answered from.

    Attributes:
        sizes: those that the operation has, without a chunk length, of a decoding step as its rows have them.
        length: of a decoding step the tokens behind it, with its own; else None will do.
        rows: measured rows of the mode and dtype, as :func:`.prediction.stored_rows` returns them.
        wrong: those whose results were incorrect.
        fits: models fitted to the rows; None: bounds are taken.
    """

    op: str
    mode: str
    dtype: str
    state_dtype: str
    sizes: Mapping[str, Any]
    accelerator: Accelerator
    rows: Sequence[Row]
    wrong: Sequence[Row] = ()
    length: int | None = None
    fits: Fits | None = None

    def fit(self, impl: str) -> tuple[Fit | None, int]:
        """Return the model fitted to an implementation's rows, None where there is none, and the number of rows."""
        own = sum((row["op"], row["impl"]) == (self.op, impl) and not row["noise"] for row in self.rows)
        return (self.fits.of(self.op, impl), own) if self.fits else (None, 0)

    @property
    def in_words(self) -> str:
        """The problem: operation, mode, sizes and dtypes."""
        columns = {"dtype": self.dtype, "state_dtype": self.state_dtype, **self.sizes}
        return f"{self.op} {self.mode} {describe_sizes(dict.fromkeys(CASE_COLUMNS) | columns)}"

    @property
    def stands_in(self) -> str | None:
        """Where the rows are from if none is of this mode and dtype (:func:`.prediction.rows_by_status`), or None."""
        found = [row.get("stands_in") for row in self.rows]
        return None if not found or None in found else ", ".join(sorted(set(map(str, found))))

    @property
    def without_vendor(self) -> str | None:
        """Whose the accelerator is, if no row is of a GPU of theirs, or None. A user's own is nobody's."""
        vendor = self.accelerator.name.partition(" ")[0]
        measured = {ACCELERATORS[key].name for row in self.rows if (key := row["device_accelerator"]) in ACCELERATORS}
        known = self.accelerator.key in ACCELERATORS
        return vendor if known and not any(name.startswith(vendor) for name in measured) else None

    def why_wrong(self, impl: str) -> str | None:
        """Return what was incorrect where an implementation computed the very problem there, and never correctly."""
        there = {"op": self.op, "impl": impl, "device_accelerator": self.accelerator.key, **stored_sizes(self.sizes)}

        def reasons(rows: Sequence[Row]) -> list[str]:
            return [str(row["reason"]) for row in rows if there.items() <= row.items()]

        found = reasons(self.wrong)
        return found[-1] if found and not reasons(self.rows) else None

    def answer(self, impl: str, chunk_size: str | None = None) -> Answer:
        """Return what an implementation takes, at its best chunk length where none is given.

        ValueError for a bad chunk length, or a problem that is not counted or that the implementation cannot run.
        """
        chunks = self._chunks(impl, chunk_size)
        for chunk in chunks:
            if reason := why_unsupported(self.op, impl, self.mode, self.dtype, self._sizes(chunk)):
                raise ValueError(f"{self.op} {impl} cannot run this: {reason}")
        return best_of(self.answers(impl, chunks))

    def answers(self, impl: str, chunks: Sequence[int | None]) -> list[Answer]:
        """Return what an implementation takes at each chunk length, None for one without."""
        state = state_dtype_of(self.op, impl, self.state_dtype)
        rows = [row for row in self.rows if (row["op"], row["impl"]) == (self.op, impl)]
        cases = [Query(self.op, impl, self.mode, self.dtype, state, self._sizes(chunk)) for chunk in chunks]
        # That does not depend on the chunk length.
        if count_case(*cases[0], launches=False) is None:
            raise ValueError(f"mode must be one that is counted for {self.op} {impl}, got {self.mode!r}")
        fit = functools.partial(self.fits.of, self.op, impl) if self.fits else lambda: None
        return [Answer(case=case, accelerator=self.accelerator, rows=rows, fit=fit) for case in cases]

    def _sizes(self, chunk: int | None) -> dict[str, int]:
        return {**self.sizes, **({} if chunk is None else {"chunk_size": chunk})}

    def _chunks(self, impl: str, given: str | None) -> Sequence[int | None]:
        """Return the chunk lengths to choose from, (None,) where the implementation has none."""
        known, seq_len = get_implementation(self.op, impl), self.sizes["seq_len"]
        if not known.chunked or not is_chunked(self.op, formulation_of(self.op, impl, self.mode, self.dtype)):
            if given is not None:
                raise ValueError(f"chunk_size must be left out for {self.op} {impl} {self.mode}, got {given!r}")
            return (None,)
        if given is not None:
            chunk = parse_size(given, "chunk_size")
            if chunk > seq_len:
                raise ValueError(f"chunk_size must be <= seq_len = {seq_len}, got {chunk}")
            return (chunk,)
        taken = chunks_taken(self.op, impl, self.mode, self.dtype, self.sizes)
        whole = {**self.sizes, "chunk_size": seq_len}
        if not taken and why_unsupported(self.op, impl, self.mode, self.dtype, whole):
            raise ValueError(f"{self.op} {impl} cannot run this: {too_short(seq_len)}")
        return taken or (seq_len,)


def ask(
    op: str,
    sizes: Mapping[str, int],
    *,
    results: Sequence[Path] = (),
    mode: str = "fw",
    dtype: str = "bf16",
    state_dtype: str = "fp32",
    accelerator: Accelerator,
    fitted: bool = True,
    roofs: str = "spec",
    length: int | None = None,
) -> Question:
    """Return a question with the rows to answer it from.

    Args:
        sizes: as :func:`.kernels.baselines.published.problem_sizes` returns them, or of a row.
        results: result files and folders; none: the committed ones.
        fitted: whether a model is fitted to the rows.
        roofs: which roofs ``accelerator`` has: spec, measured or a path.
        length: of :class:`Question`.

    Raises:
        ValueError: a mode or dtype that no operation has.
    """
    one_of("mode", mode, MODES)
    for name, value in (("dtype", dtype), ("state_dtype", state_dtype)):
        one_of(name, value, tuple(DTYPE_BYTES))
    found = rows_by_status(tuple(results or committed_results()), mode, dtype)
    rows, wrong = (found.get(status, []) for status in ("ok", "incorrect"))
    return Question(
        op=op, mode=mode, dtype=dtype, state_dtype=state_dtype, sizes=sizes, accelerator=accelerator, rows=rows,
        wrong=wrong, length=length, fits=Fits(rows, mode, dtype, accelerator, roofs) if fitted else None,
    )  # fmt: skip


def prediction(question: Question, impl: str, chunk_size: str | None) -> dict[str, Any]:
    """Return a time with its interval, what the model says with its bounds, what was fitted, and what was measured.

    ``time_ms``, ``low_ms`` and ``high_ms`` are those of `lrbench best`: measured where it was (``basis``).

    Args:
        impl: an implementation of the operation.
        chunk_size: as written on the command line; None is the one that `lrbench chunk-size` answers.

    Errors as :meth:`Question.answer`.
    """
    found = question.answer(impl, chunk_size)
    (fit, rows), predicted, measured = question.fit(impl), found.predicted, found.measured
    return {
        "op": question.op,
        "impl": impl,
        "mode": question.mode,
        "dtype": question.dtype,
        "accelerator": question.accelerator.key,
        "accelerator_part": question.accelerator.part,
        "roofs": roofs_in_words(question.accelerator),
        **found.case.sizes,
        "basis": found.basis,
        "time_ms": found.time_ms,
        **dict(zip(("low_ms", "high_ms"), found.interval_ms, strict=True)),
        "predicted_ms": predicted.time_ms,
        "predicted_low_ms": predicted.low_ms,
        "predicted_high_ms": predicted.high_ms,
        "interval": predicted.interval,
        "flops_ms": predicted.model.flops_ms,
        "bytes_ms": predicted.model.bytes_ms,
        "model_lower_ms": predicted.model.lower_ms,
        "model_upper_ms": predicted.model.upper_ms,
        "bound": predicted.model.bound,
        **(fit.in_figures() if fit else {"model": "formulation"}),
        "stored_rows": rows if question.fits else None,
        "incorrect": question.why_wrong(impl),
        "memory_bytes": found.memory_bytes,
        "does_not_fit": found.does_not_fit,
        **found.versions,
        **{
            "measured_" + name.removeprefix("measured_"): measured[name] if measured else None
            for name in MEASURED_COLUMNS
            if name != "chunk_size"
        },
    }


def prediction_in_words(row: Mapping[str, Any]) -> str:
    """Return a prediction in one line, what was measured first, and in a second one what its interval means."""
    case = f"{row['op']} {row['impl']} {row['mode']}"
    if row.get("chunk_size"):
        case += f", chunks of {row['chunk_size']}"
    time_ms, low_ms, high_ms = (row[f"predicted_{name}ms"] for name in ("", "low_", "high_"))
    if time_ms is None:
        model = f"at least {low_ms:.4g} ms, no fit"
        model += "" if row["stored_rows"] is None else f": {_rows(row['stored_rows'])}"
        meaning = f"at least: {low_ms:.4g} to {high_ms:.4g} ms is {row['interval']}"
    else:
        model = f"{time_ms:.4g} ms, {low_ms:.4g} to {high_ms:.4g}"
        meaning = f"low to high: {row['interval']}"
    where = row["accelerator"]
    if row["does_not_fit"]:
        return f"{case} {row['does_not_fit']} on {where}; in time it would be {model}\n{meaning}"
    if row["measured_time_ms"] is None:
        there = f"incorrect there: {row['incorrect']}" if row["incorrect"] else "not measured there"
        return f"{case} on {where}: {model}; {there}\n{meaning}"
    measured = (
        f"measured {row['measured_time_ms']:.4g} ms on {where}{' while it was busy' * bool(row['measured_noise'])}"
    )
    commit = (row["measured_git_commit"] or "unknown")[:10]
    return f"{case}: {measured}, commit {commit}; the model says {model}\n{meaning}"


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"


def roofs_in_words(accelerator: Accelerator) -> str:
    """Return which rates an accelerator stands for: the specification, or which measurement."""
    return accelerator.source if accelerator.is_measured or accelerator.key == "cpu" else "specification"


def chunk_size_report(
    question: Question, impl: str = FUSED_CHUNK, causal_factor: float | None = None
) -> dict[str, Any]:
    """Return the chunk lengths that are best in theory and in measurement, and what choosing wrongly costs.

    ``answer`` is the choice to take: the fastest measured one, else the one of least time by the fit, else by the model
    of the implementation's formulation. Beside it stand the optima of the chunkwise formulation, the paper's.

    Args:
        question: of a chunkwise operation.
        impl: the implementation whose measurements are looked up, and which says what chunk lengths there are.
        causal_factor: share of the intra-chunk square that is computed, in [0.5, 1]. None: 0.5 in the closed forms and
            rounded up to whole tiles for each candidate.

    Returns:
        answer: chunk_size, basis (measured, fitted or bound) and time_ms of the choice to take, and the interval
            low_ms to high_ms; of a bound only the interval. does_not_fit says why no length fits in the memory, None
            where one does; noisy, whether the machine was busy when it was measured.
        flop_optimal, runtime_optimal: the real-valued closed forms.
        model: of the modelled time: walks or formulation, as fitted, else the formulation's upper time (eq. 118).
        flop_optimal_feasible, runtime_optimal_feasible: the candidates of least FLOPs and of least modelled time.
        measured_best, regret_ms: the fastest measured candidate, and what the modelled choice takes longer than that;
            None where it was not measured.
        fitted: what was fitted, and how well it predicts (:meth:`.fit.Fit.in_figures`); None without a fit.
        candidates: one mapping per chunk length, modelled and measured. chunkwise_upper_ms, chunkwise_lower_ms and
            chunkwise_bound are those of the paper's formulation; predicted_ms (None without a fit), low_ms and high_ms
            those of the implementation.

    Raises:
        ValueError: bad sizes or names, as :func:`.counts.count`, or a sequence shorter than the least chunk.
    """
    op, mode, dtype, accelerator = question.op, question.mode, question.dtype, question.accelerator
    sizes: Mapping[str, Any] = question.sizes
    fit, _ = question.fit(impl)
    check_chunkwise(op, mode, sizes["seq_len"])
    chunks = chunks_taken(op, impl, mode, dtype, sizes)
    dtypes: dict[str, Any] = {"dtype": dtype, "state_dtype": question.state_dtype}
    chunkwise = functools.partial(count, op, **sizes, formulation="chunkwise", **dtypes, causal_factor=causal_factor)
    counted = [chunkwise(mode=mode, chunk_size=chunk) for chunk in chunks]
    dims: dict[str, Any] = {name: sizes[name] for name in ("head_dim_qk", "head_dim_v")}
    closed = coefficients(op, **dims, causal_factor=causal_factor or 0.5, **dtypes, mode=mode)
    intensity = flop_rate(counted[0], accelerator, dtype) / accelerator.bandwidth_bytes_s
    answers = question.answers(impl, chunks)
    candidates: list[dict[str, Any]] = []
    for found, each in zip(answers, counted, strict=True):
        model = runtime_model(each, accelerator, dtype)
        row, predicted = found.measured or {}, found.predicted
        candidates.append(
            {
                "chunk_size": found.chunk_size,
                "chunkwise_upper_ms": model.upper_ms,
                "chunkwise_lower_ms": model.lower_ms,
                "chunkwise_bound": model.bound,
                "predicted_ms": predicted.time_ms,
                "low_ms": predicted.low_ms,
                "high_ms": predicted.high_ms,
                "flops": each.flops,
                "bytes": each.bytes,
                "intensity": each.intensity,
                "causal_factor": each.causal_factor,
                "memory_bytes": found.memory_bytes,
                "measured_ms": row.get("time_ms"),
                **{name: row.get(name) for name in ("time_ci_low_ms", "time_ci_high_ms")},
            }
        )
    best = best_of(answers)
    least_flops = min(candidates, key=lambda each: each["flops"])
    fit = fit if all(each["predicted_ms"] is not None for each in candidates) else None
    chosen = min(candidates, key=lambda each: each["predicted_ms" if fit else "chunkwise_upper_ms"])
    timed = [each for each in candidates if each["measured_ms"] is not None]
    fastest = min(timed, key=lambda each: each["measured_ms"], default=None)
    return {
        "op": op,
        "impl": impl,
        "mode": mode,
        "dtype": dtype,
        "accelerator": accelerator.key,
        "accelerator_intensity": intensity,
        **sizes,
        "answer": {
            "chunk_size": best.chunk_size,
            "basis": best.basis,
            "time_ms": best.time_ms,
            "low_ms": best.interval_ms[0],
            "high_ms": best.interval_ms[1],
            "does_not_fit": best.does_not_fit,
            "noisy": best.noisy,
        },
        "flop_optimal": closed.flop_optimal(),
        "runtime_optimal": closed.runtime_optimal(intensity),
        "flop_optimal_feasible": least_flops["chunk_size"],
        "model": fit.model if fit else "formulation",
        "runtime_optimal_feasible": chosen["chunk_size"],
        "measured_best": fastest["chunk_size"] if fastest else None,
        "regret_ms": chosen["measured_ms"] - fastest["measured_ms"] if fastest and chosen in timed else None,
        "fitted": fit.in_figures() if fit else None,
        "candidates": candidates,
    }


def chunk_size_answer(report: Mapping[str, Any], rows: int) -> str:
    """Return the chunk length to take in one line.

    Args:
        rows: how many measured rows a fit had to choose from.
    """
    answer, where = report["answer"], report["accelerator"]
    at = {each["chunk_size"]: each for each in report["candidates"]}
    chosen = answer["chunk_size"]
    use = f"use {chosen} with {report['impl']}{', the only length that it takes' if len(at) == 1 else ''}: "
    if answer["does_not_fit"]:
        return f"{report['impl']} {answer['does_not_fit']} with any chunk length; {chosen} needs least"
    if answer["basis"] == "fitted":
        interval = f"{answer['low_ms']:.4g} to {answer['high_ms']:.4g}"
        return use + f"{answer['time_ms']:.4g} ms ({interval}) predicted for {where}"
    if answer["basis"] == "bound":
        bound = f"at least {answer['low_ms']:.4g} ms on {where}, {answer['high_ms']:.4g} without overlap"
        return use + f"{bound}, no fit: {_rows(rows)}; not measured there"
    text = use + f"{answer['time_ms']:.4g} ms {measured_on(where, answer['noisy'])}"
    # Beside it the one that the paper's model chooses, which many would take; else the second best.
    others = [each for each in at.values() if each["measured_ms"] is not None and each is not at[chosen]]
    if others:
        paper = min(at.values(), key=lambda each: each["chunkwise_upper_ms"])
        other = paper if paper in others else min(others, key=lambda each: each["measured_ms"])
        whose = ", which the paper's model chooses" if other is paper else ""
        text += f" ({other['chunk_size']}{whose}: {other['measured_ms']:.4g})"
    untried = [each for each in at.values() if each["measured_ms"] is None and each["predicted_ms"] is not None]
    fastest = min(untried, key=lambda each: each["predicted_ms"], default=None)
    # The model may be off for them all: it must expect this one to be faster than the chosen one as well.
    expected_ms = min(answer["time_ms"], at[chosen]["predicted_ms"] or 0.0)
    if fastest is not None and fastest["predicted_ms"] < expected_ms:
        text += f"; {fastest['chunk_size']} was not measured, the model says {fastest['predicted_ms']:.4g}"
    return text


def chunk_size_columns(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each candidate: times, measured and modelled, and memory as :func:`ask` answers it."""
    modelled = (
        {"modelled_ms": "predicted_ms"} if report["fitted"] else {"at_least_ms": "low_ms", "no_overlap_ms": "high_ms"}
    )
    return [
        {
            "chunk_size": each["chunk_size"],
            "measured_ms": each["measured_ms"],
            **{title: each[name] for title, name in modelled.items()},
            "gib": each["memory_bytes"] / 2**30,
        }
        for each in report["candidates"]
    ]


def chunk_size_in_words(report: Mapping[str, Any], accelerator: Accelerator) -> str:
    """Return what the whole table of candidates comes to: the models' optima, and what choosing by them costs."""
    chosen, fitted = report["runtime_optimal_feasible"], report["fitted"]
    formulation = min(report["candidates"], key=lambda each: each["chunkwise_upper_ms"])
    lines = [
        f"best for FLOPs: {report['flop_optimal']:.1f}, of the feasible ones {report['flop_optimal_feasible']}",
        f"for the modelled time on {accelerator.part}: {report['runtime_optimal']:.1f}, of the feasible ones "
        f"{formulation['chunk_size']} ({formulation['memory_bytes'] / 2**30:.3g} GiB), by the chunkwise "
        "formulation",
    ]
    if fitted is not None:
        lines.append(
            f"of the feasible ones {chosen}, by the {report['model']} of {report['impl']} (fitted to "
            f"{fitted['fitted_rows']} rows on {fitted['fitted_on']}; on rows left out off by "
            f"{100 * fitted['median_error']:.2g} % in the median, {100 * fitted['worst_error']:.2g} % at worst)"
        )
    if report["regret_ms"] is not None:
        lines.append(f"the model's choice, {chosen}, takes {report['regret_ms']:.4g} ms more than the fastest measured")
    return "\n".join(lines)
