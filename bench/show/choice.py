"""Which implementation to use for a problem: what computes it, ranked, and which one stands for an operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ... import kernels
from ...analysis.accelerators.known import get_accelerator
from ...analysis.counts import FORMULATIONS, count_case
from ...analysis.model.answers import Question, ask, prediction
from ...analysis.model.prediction import Answer, distance, measured_on, stored_sizes
from ...analysis.model.runtime_model import cached, roofline_fraction
from ...kernels import baselines
from ...kernels.baselines import get_implementation, get_operation
from ...kernels.baselines.published import problem_sizes
from ...kernels.baselines.spec import Baseline
from ...kernels.common.spec import Implementation, width_of
from ...results.arguments import one_of
from ...results.schema import Case, Record
from ...results.select import describe_sizes, grouped, short_size

Known = Implementation | Baseline

MARKS = {"measured": "", "fitted": "~", "bound": ">"}
"""Where a time comes from -> what stands before it."""


def runnable(question: Question) -> list[str]:
    """Return the implementations that answer a question on its accelerator, in its mode and dtype, ours first.

    Code for this very chip comes before code for all. Portable code is left out where there is a GPU, as in a sweep,
    unless there is nothing else, or it is another package's and was measured there.
    """
    able = [each for each in _known(question) if not _why_not_on(each, question)]
    able = [each for each in able if not question.why_wrong(each.name)]
    device, measured = (_device(question),), _measured(question)
    only = [x.name for x in able if x.devices == device or (isinstance(x, Baseline) and x.name in measured)]
    return only or [each.name for each in able]


def _measured(question: Question) -> set[str]:
    """Return the implementations of which the accelerator has rows, at whatever size."""
    here = {"op": question.op, "device_accelerator": question.accelerator.key}
    return {row["impl"] for row in question.rows if here.items() <= row.items() and "stands_in" not in row}


def _nearest(question: Question, impl: str) -> str:
    """Return the sizes nearest to a problem at which an implementation was measured on its accelerator."""
    here = {"op": question.op, "impl": impl, "device_accelerator": question.accelerator.key}
    rows = (row for row in question.rows if here.items() <= row.items() and "stands_in" not in row)
    nearest = min(rows, key=lambda row: distance(row, stored_sizes(question.sizes)))
    return describe_sizes({**nearest, "dtype": "", "state_dtype": None, "chunk_size": None})


def not_there(questions: Iterable[Question]) -> list[str]:
    """Return the names of kernels that compute one of the questions, but not on its accelerator."""
    return list(dict.fromkeys(each.name for q in questions for each in _known(q) if _why_not_on(each, q)))


def _known(question: Question) -> list[Known]:
    """Return the implementations with the mode, dtype and device kind asked for, in the order of :func:`runnable`."""

    def place(each: Known) -> int:
        return 2 if isinstance(each, Baseline) else 0 if each.architectures else 1

    known = sorted(_implementations(question.op), key=place)
    device, mode, dtype = _device(question), question.mode, question.dtype
    return [each for each in known if device in each.devices and mode in each.modes and dtype in each.dtypes]


def _implementations(op: str) -> list[Known]:
    """Return the implementations of an operation, ours first."""
    return [*get_operation(op).implementations, *(each for each in baselines.BASELINES if each.op == op)]


def _device(question: Question) -> str:
    return "cpu" if question.accelerator.key == "cpu" else "cuda"


def _why_not_on(known: Known, question: Question) -> str | None:
    """Return why an implementation does not run on the accelerator in any version, or None."""
    capability = question.accelerator.capability
    if isinstance(known, Implementation):
        return known.why_not_on(capability)
    if known.nvidia and capability is None and _device(question) == "cuda":
        return f"{known.name} needs a GPU of NVIDIA's with a known compute capability"
    return _known_bad(known, question, {})


def _known_bad(known: Baseline, question: Question, versions: Mapping[str, str]) -> str | None:
    """Return why a baseline is known to fail on the accelerator with these versions, or None."""
    op, mode, dtype = question.op, question.mode, question.dtype
    case = Case(kernel=op, op=op, impl=known.name, provider=known.provider, mode=mode, dtype=dtype)
    return baselines.known_bad_here(known, case, versions, question.accelerator.capability)


def why_not_here(question: Question, impl: str, versions: Mapping[str, str]) -> str | None:
    """Return why an implementation does not run with what is installed here, whatever device is here, or None."""
    known = get_implementation(question.op, impl)
    if isinstance(known, Implementation):
        return known.why_not_with(versions)
    return baselines.availability(known) or _known_bad(known, question, versions)


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
        impl: its name; None: the best.
        chunked: whether it must have a choice of chunk lengths.

    Raises:
        ValueError: an unknown one, or one written for accelerators of another compute capability.
    """
    op = question.op
    known = [each.name for each in _implementations(op) if each.chunked or not chunked]
    if impl is None:
        able = [name for name in runnable(question) if name in known] or known
        ours = [name for name in able if "." not in name] or able
        if len(ours) == 1 and (len(able) == 1 or not _why_unanswered(question, ours[0])):
            return ours[0]
        best = ranked(question, ours if len(ours) > 1 else able)[0]
        # Lower bounds do not tell which is faster.
        return ours[0] if best.basis == "bound" else best.case[1]
    one_of("impl", impl, known, f" for {op}{' to choose a chunk length' if chunked else ''}")
    found, accelerator = get_implementation(op, impl), question.accelerator
    reason = found.why_not_on(accelerator.capability) if isinstance(found, Implementation) else None
    if reason and accelerator.capability is not None:
        raise ValueError(f"impl must be one for {accelerator.key}: {reason}")
    return impl


def expected(records: Iterable[Record]) -> list[tuple[Record, str]]:
    """Return what our fastest kernel takes on the accelerator that --gpu named, where another device was measured.

    Returns:
        a record for each problem, whose implementation says which kernel and where, and what stands before its time:
        nothing of a measured one, "~" of a predicted one, ">" of a lower bound.
    """
    found = []
    elsewhere = (
        r for r in records if r.accelerator not in (None, r.device_accelerator) and r.model_time_ms is not None
    )
    for (op, mode, dtype, key), here in grouped(elsewhere, attrgetter("op", "mode", "dtype", "accelerator")).items():
        question = ask(op, {}, mode=mode, dtype=dtype, accelerator=get_accelerator(key))
        for r in {r.problem_sizes: r for r in here}.values():
            try:
                asked = dataclasses.replace(question, sizes=dict(r.problem_sizes))
                answer = asked.answer(implementation(asked, None))
            except ValueError:
                # Nothing computes it there.
                continue
            shown = dataclasses.replace(
                r, impl=f"({answer.case.impl} on {key})", time_ms=answer.time_ms or answer.interval_ms[0],
                chunk_size=answer.chunk_size, state_dtype=None, suspect=None, noise=None,
            )  # fmt: skip
            found.append((shown, MARKS[answer.basis]))
    return found


def beside(question: Question, head_dim_qk: int | None) -> Iterator[Question]:
    """Yield the question for other mathematics: operations of the same family, and of its baselines.

    Batch, tokens and embedding dim are the same, heads and head dims those of its authors: what is asked where these
    are all that is given.

    Args:
        head_dim_qk: query-key head dim of the family's operations; None is each one's own.
    """
    kernel = get_operation(question.op).kernel
    family = kernels.FAMILIES.get(kernel, ())
    length = question.length or question.sizes["seq_len"]
    for op in dict.fromkeys((*family, *(each.op for each in baselines.baselines_for(kernel)))):
        if op != question.op and op in FORMULATIONS:
            qk = head_dim_qk if op in family else None
            sizes = problem_sizes(
                op, mode=question.mode, batch=question.sizes["batch"], seq_len=length,
                embedding=width_of(question.sizes), head_dim_qk=qk, documents=question.sizes.get("documents"),
            )  # fmt: skip
            yield dataclasses.replace(question, op=op, sizes=sizes)


def ranking(question: Question, others: Iterable[Question] = (), *, every: bool = False) -> list[dict[str, Any]]:
    """Return a row per kernel for a problem, first the fastest (:meth:`.prediction.Answer.order`).

    Args:
        others: questions of other mathematics to rank as well.
        every: every kernel of these; else the fastest of each.

    Raises:
        ValueError: nothing computes the operation itself there.
    """
    found = [(each, question) for each in ranked(question)]
    for other in others:
        try:
            found += [(each, other) for each in ranked(other)[: None if every else 1]]
        except ValueError:
            # Nothing computes the other operation on this accelerator, in this mode or at this size.
            continue
    versions = baselines.installed_versions()
    found.sort(key=lambda pair: pair[0].order())
    return [_ranked_row(each, of, of.op == question.op, versions) for each, of in found]


def _ranked_row(found: Answer, question: Question, same: bool, versions: Mapping[str, str]) -> dict[str, Any]:
    _, impl, _, dtype, *_ = found.case
    count, time_ms = count_case(*found.case, launches=False), found.time_ms
    assert count is not None, "what is not counted has no answer"
    missing = why_not_here(question, impl, versions)
    return {
        **dict(zip(("op", "impl", "mode", "dtype"), found.case, strict=False)),
        "accelerator": question.accelerator.key,
        **question.sizes,
        **{name: getattr(found, name) for name in ("chunk_size", "basis", "time_ms")},
        **dict(zip(("low_ms", "high_ms"), found.interval_ms, strict=True)),
        **{name: getattr(found, name) for name in ("memory_bytes", "noisy", "does_not_fit")},
        "roof_fraction": time_ms and roofline_fraction(count, question.accelerator, dtype, time_ms),
        "same_math": same,
        "installed": missing is None,
        "missing": missing,
        **found.versions,
    }


def ranking_answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which kernel to take, in one line."""
    best = next(row for row in rows if row["same_math"])
    chunks = f", chunks of {best['chunk_size']}" if best["chunk_size"] else ""
    where = best["accelerator"]
    if best["does_not_fit"]:
        least = min((row for row in rows if row["same_math"]), key=lambda row: row["memory_bytes"])
        return f"nothing to use on {where}: {least['impl']}, which needs least memory, {least['does_not_fit']}"
    if best["basis"] == "bound":
        return f"no rows to choose by: {best['impl']}{chunks} takes at least {best['low_ms']:.4g} ms on {where}"
    chosen = f"use {best['impl']}{chunks}: {best['time_ms']:.4g} ms"
    if best["basis"] == "measured":
        return f"{chosen} {measured_on(where, best['noisy'])}"
    faster = {
        row["impl"]: f"at least {row['low_ms']:.4g} ms" if row["time_ms"] is None else f"~{row['time_ms']:.4g} ms"
        for row in rows
        if row["same_math"] and (row["time_ms"] or row["low_ms"]) < best["time_ms"]
    }
    said = ", ".join(f"{impl} ({time})" for impl, time in faster.items())
    doubt = f"; perhaps faster, too few rows tell: {said}" if faster else ""
    return f"{chosen} ({best['low_ms']:.4g} to {best['high_ms']:.4g}) predicted for {where}{doubt}"


def predicted(question: Question, impl: str, chunk_size: str | None) -> dict[str, Any]:
    """Return :func:`.answers.prediction`, and as ``missing`` why the implementation does not run here, or None."""
    missing = why_not_here(question, impl, baselines.installed_versions())
    return prediction(question, impl, chunk_size) | {"missing": missing}


def versions_answer(row: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """Return in one line which versions an answer's rows are of and, where others are here, what runs with these.

    Args:
        row: of :func:`ranking`, or a prediction with what is ``missing``.
        ranked: the rows of :func:`ranking`, to name the first kernel that runs here.

    Returns:
        None where no row says its versions, or there is nothing to run.
    """
    here = baselines.installed_versions()
    there = {name: row[f"{name}_version"] for name in ("torch", "triton") if row[f"{name}_version"]}
    if not there or row["does_not_fit"]:
        return None
    measured = row.get("basis") == "measured" or row.get("measured_time_ms") is not None
    text = f"{'measured' if measured else 'predicted from rows'} with {_listed(there)}"
    others = {name: here[name] for name, known in there.items() if name in here and not _same(here[name], known)}
    if others:
        text += f"; here is {_listed(others)}"
    # Without any Triton this is no machine to run it on, and the answer is about the accelerator alone.
    if row["missing"] and "." not in row["impl"] and "triton" in here:
        able = next((each for each in ranked if each["same_math"] and each["installed"] and each["time_ms"]), None)
        first = f", with which {able['impl']} takes {able['time_ms']:.4g} ms" if able else ""
        text += f"{first}: {row['missing']}"
    return text


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _same(here: str, known: str) -> bool:
    """Return whether a version is one of those listed; its build, "+cu130", does not count."""
    return here.partition("+")[0] in {each.partition("+")[0] for each in known.split(" and ")}


def ranking_columns(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the ranking of the kernels that fit, as people see it; where predicted, with the longest likely time.

    A kernel of other mathematics is named with its operation, and with its heads and head dims where they differ. What
    was measured on a busy machine says so.
    """
    asked, shown = _heads(next(row for row in rows if row["same_math"])), []
    for row in rows:
        if row["does_not_fit"]:
            continue
        measured, bound, heads = row["basis"] == "measured", row["basis"] == "bound", _heads(row)
        time = MARKS[row["basis"]] + _short(row["low_ms"] if bound else row["time_ms"])
        shown.append(
            {
                "kernel": _name(row) + ("" if row["installed"] else " *"),
                "same": "yes" if row["same_math"] else "no",
                "heads": None if heads == asked else heads,
                "chunk": row["chunk_size"] and short_size(row["chunk_size"]),
                "ms": time + " (busy)" * row["noisy"],
                "up to": None if measured or bound else _short(row["high_ms"]),
                "GiB": f"{row['memory_bytes'] / 2**30:.3g}",
                "roof": row["roof_fraction"] and f"{row['roof_fraction']:.0%} {cached(row['roof_fraction'])}".rstrip(),
            }
        )
    empty = [name for name in ("heads", "chunk") if all(each[name] is None for each in shown)]
    empty += ["same"] if all(row["same_math"] for row in rows) else []
    return [{name: value for name, value in each.items() if name not in empty} for each in shown]


def _short(time_ms: float) -> str:
    return f"{time_ms:.3g}" if time_ms < 1000 else f"{time_ms:.0f}"


def _name(row: Mapping[str, Any]) -> str:
    """Return a kernel's name, for other mathematics with its operation, unless that is the name already."""
    own = str(row["impl"])
    return own if row["same_math"] or own.endswith(f".{row['op']}") else f"{row['op']} {own}"


def _heads(row: Mapping[str, Any]) -> str | None:
    """Return heads and head dim, or both head dims where they differ, "64/128": the embedding dim is the same."""
    if row.get("num_heads") is None:
        return None
    dims = dict.fromkeys(str(row[name]) for name in ("head_dim_qk", "head_dim_v") if name in row)
    return "/".join(dims) if len(dims) > 1 else f"{row['num_heads']}x{row['head_dim_v']}"


def _why_unanswered(question: Question, impl: str) -> str | None:
    try:
        question.answer(impl)
    except ValueError as error:
        return str(error).removeprefix(f"{question.op} ")
    return None


def ranking_notes(question: Question, rows: Sequence[Mapping[str, Any]], elsewhere: Sequence[str]) -> list[str]:
    """Return what a ranking leaves out and what its marks mean, a line each.

    Args:
        question: what was asked.
        rows: of :func:`ranking`.
        elsewhere: kernels that do not run on such an accelerator.
    """
    where, large = rows[0]["accelerator"], [row for row in rows if row["does_not_fit"]]
    shown = [row for row in rows if not row["does_not_fit"]]
    lines = []
    if large:
        capacity = str(large[0]["does_not_fit"]).partition(" (")[0]
        names = (f"{_name(row)} {row['memory_bytes'] / 1e9:.3g}" for row in large)
        lines.append(f"{capacity}: {', '.join(names)}")
    basis = {row["impl"]: row["basis"] for row in rows if row["same_math"]}
    able, measured = runnable(question), _measured(question)
    if others := [impl for impl in able if impl in measured and basis.get(impl) != "measured"]:
        nearest = grouped(others, lambda impl: _nearest(question, impl)).items()
        said = "; ".join(f"{', '.join(names)} at {sizes}" for sizes, names in nearest)
        lines.append(f"measured on {where} at other sizes only: {said}")
    if refused := [why for impl in able if impl not in basis and (why := _why_unanswered(question, impl))]:
        lines.append("left out: " + "; ".join(refused))
    reasons = {each.name: question.why_wrong(each.name) for each in _known(question)}
    if wrong := [f"{name} ({why.partition(';')[0]})" for name, why in reasons.items() if why]:
        lines.append("incorrect there: " + "; ".join(wrong))
    if elsewhere:
        number = f"{len(elsewhere)} kernel{'s' if len(elsewhere) > 1 else ''}"
        lines.append(f"not known to run on {where}: {number} ({', '.join(elsewhere)})")
    if any(not row["installed"] for row in shown):
        lines.append("*: not installed here, or known not to run with the versions here")
    return lines
