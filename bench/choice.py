"""Which implementation to use for a problem: what computes it, ranked, and which one stands for an operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import kernels
from ..analysis.counts import FORMULATIONS, count_case
from ..analysis.model.answers import Question
from ..analysis.model.prediction import Answer
from ..analysis.model.runtime_model import roofline_fraction
from ..kernels import baselines
from ..kernels.baselines import get_implementation, get_operation
from ..kernels.baselines.spec import Baseline
from ..kernels.spec import MODES, Implementation
from ..results.arguments import one_of
from ..results.names import current_name
from ..results.schema import Case
from .inventory import implementation_names

Known = Implementation | Baseline


def runnable(question: Question) -> list[str]:
    """Return what computes a question's operation on such an accelerator in its mode and dtype, ours first.

    Code for this very chip comes before code for all. Portable code is left out where there is a GPU, as in a sweep,
    unless there is nothing else.
    """
    one_of("mode", question.mode, MODES)
    device = "cpu" if question.accelerator.key == "cpu" else "cuda"
    known: list[Known] = [get_implementation(question.op, name) for name in implementation_names(question.op)]
    known.sort(key=lambda each: isinstance(each, Baseline) or (not each.architectures and 0.5))
    able = [each for each in known if device in each.devices and _runs(each, question)]
    return [each.name for each in able if each.devices == (device,)] or [each.name for each in able]


def _runs(known: Known, question: Question) -> bool:
    """Whether an implementation has the mode and the dtype, and runs on the accelerator in some version, correctly."""
    if question.mode not in known.modes or question.dtype not in known.dtypes or question.why_wrong(known.name):
        return False
    capability = question.accelerator.capability
    if isinstance(known, Implementation):
        return known.why_not_on(capability) is None
    columns: dict[str, Any] = {**question.sizes, "mode": question.mode, "dtype": question.dtype}
    case = Case(kernel=question.op, op=question.op, impl=known.name, provider=known.provider, **columns)
    return baselines.known_bad_here(known, case, {}, capability) is None


def ranked(question: Question, impls: Sequence[str] | None = None) -> list[Answer]:
    """Return every implementation that can run the problem at its best chunk length, in order.

    Args:
        impls: those to rank; None: all that are runnable.

    Raises:
        ValueError: there is none.
    """
    answers, reasons = [], []
    for impl in runnable(question) if impls is None else impls:
        try:
            answers.append(question.answer(impl))
        except ValueError as error:
            reasons.append(str(error))
    if not answers:
        what = f"{question.op} {question.mode} {question.dtype}"
        raise ValueError(f"nothing runs {what} on {question.accelerator.key}: {(reasons or ['no such code'])[0]}")
    return sorted(answers, key=Answer.order)


def implementation(question: Question, impl: str | None, *, chunked: bool = False) -> str:
    """Return the implementation asked for, else the best of ours, or of all where none is ours.

    Args:
        impl: its name, or an earlier one.
        chunked: whether it must have a choice of chunk lengths.

    Raises:
        ValueError: an unknown one, or one written for accelerators of another compute capability.
    """
    op = question.op
    known = [name for name in implementation_names(op) if get_implementation(op, name).chunked or not chunked]
    if impl is None:
        able = [name for name in runnable(question) if name in known] or known
        ours = [name for name in able if "." not in name] or able
        if len(ours) == 1:
            return ours[0]
        best = ranked(question, ours)[0]
        # Bounds say nothing of which is faster.
        return ours[0] if best.basis == "bound" else best.case[1]
    impl = current_name(op, impl)
    one_of("impl", impl, known, f" for {op}{' to choose a chunk length' if chunked else ''}")
    found, accelerator = get_implementation(op, impl), question.accelerator
    reason = found.why_not_on(accelerator.capability) if isinstance(found, Implementation) else None
    if reason and accelerator.capability is not None:
        raise ValueError(f"impl must be one for {accelerator.key}: {reason}")
    return impl


def beside(question: Question, head_dim_qk: int | None = None) -> Iterator[Question]:
    """Yield the question for other mathematics: operations of the same family, and of its baselines.

    Batch, tokens and embedding dim are the same; heads and head dims are those of the baseline's authors, if it has a
    plan of its own.

    Args:
        head_dim_qk: query-key head dim of the family's operations; None is each one's own.
    """
    kernel = get_operation(question.op).kernel
    family, compared = kernels.FAMILIES.get(kernel, ()), baselines.baselines_for(kernel)
    planned = {each.op: each for each in reversed(compared) if each.plan or each.op not in family}
    for op in dict.fromkeys((*family, *planned)):
        if op == question.op or op not in FORMULATIONS:
            continue
        sizes = dict(baselines.plan_sizes(planned[op], question.sizes)[0] if op in planned else question.sizes)
        sizes.pop("chunk_size", None)
        if op not in planned and "head_dim_v" in sizes:
            sizes["head_dim_qk"] = head_dim_qk or get_operation(op).default_head_dim_qk(sizes["head_dim_v"])
        yield dataclasses.replace(question, op=op, sizes=sizes)


def ranking(question: Question, *, every: bool, head_dim_qk: int | None = None) -> list[dict[str, Any]]:
    """Return a row per kernel for a problem, first the one that is fastest for sure (:meth:`.prediction.Answer.order`).

    Args:
        every: every kernel of other mathematics; else the fastest of each operation.
        head_dim_qk: as :func:`beside`.

    Raises:
        ValueError: nothing computes the operation itself there.
    """
    found = [(each, question) for each in ranked(question)]
    for other in beside(question, head_dim_qk):
        try:
            found += [(each, other) for each in ranked(other)[: None if every else 1]]
        except ValueError:
            # The other operation has nothing for this accelerator, mode or size: it is no choice.
            continue
    versions = baselines.installed_versions()
    found.sort(key=lambda pair: pair[0].order())
    return [_ranked_row(each, of, of.op == question.op, versions) for each, of in found]


def _ranked_row(found: Answer, question: Question, same: bool, versions: Mapping[str, str]) -> dict[str, Any]:
    op, impl, mode, dtype, *_ = found.case
    count, time_ms = count_case(*found.case), found.time_ms
    assert count is not None, "what is not counted has no answer"
    missing = _why_not_here(get_implementation(op, impl), versions)
    low_ms, high_ms = found.interval_ms
    return {
        "op": op,
        "impl": impl,
        "mode": mode,
        "dtype": dtype,
        "accelerator": question.accelerator.key,
        **question.sizes,
        "chunk_size": found.chunk_size,
        "basis": found.basis,
        "time_ms": time_ms,
        "low_ms": low_ms,
        "high_ms": high_ms,
        "memory_bytes": found.memory_bytes,
        "roof_fraction": time_ms and roofline_fraction(count, question.accelerator, dtype, time_ms),
        "same_math": same,
        "installed": missing is None,
        "missing": missing,
    }


def ranking_answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which kernel to take, in one line."""
    best = next(row for row in rows if row["same_math"])
    chunks = f", chunks of {best['chunk_size']}" if best["chunk_size"] else ""
    interval, where = f"{best['low_ms']:.4g} to {best['high_ms']:.4g}", best["accelerator"]
    if best["basis"] == "bound":
        return f"no rows to choose by: {best['impl']}{chunks} takes at least {best['low_ms']:.4g} ms on {where}"
    how = f"measured on {where}" if best["basis"] == "measured" else f"({interval}) predicted for {where}"
    return f"use {best['impl']}{chunks}: {best['time_ms']:.4g} ms {how}"


def ranking_columns(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return of every kernel what a reader looks for; a time that was not measured has the most that is likely too."""
    shown = []
    for row in rows:
        measured, bound = row["basis"] == "measured", row["basis"] == "bound"
        time = f">{row['low_ms']:.3g}" if bound else f"{'' if measured else '~'}{row['time_ms']:.3g}"
        shown.append(
            {
                "kernel": row["impl"] if row["same_math"] else f"{row['op']} {row['impl']}",
                "math": "same" if row["same_math"] else "other",
                "chunk": row["chunk_size"],
                "ms": time,
                "up to": None if measured or bound else f"{row['high_ms']:.3g}",
                "GiB": f"{row['memory_bytes'] / 2**30:.3g}",
                "roof": row["roof_fraction"] and f"{row['roof_fraction']:.0%}",
                "here": "yes" if row["installed"] else "no",
            }
        )
    return shown


def _why_not_here(known: Known, versions: Mapping[str, str]) -> str | None:
    """Return what is missing on this machine to run an implementation, or None."""
    if isinstance(known, Baseline):
        return baselines.availability(known)
    lacking = [name for name in known.requires if name not in versions]
    return f"pip install {' '.join(lacking)}" if lacking else known.why_not_with(versions.get("triton"))
