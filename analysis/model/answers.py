"""What the commands predict and chunk-size answer: what was measured of the very case first, else what a model says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels.baselines import get_implementation, why_unsupported
from ...kernels.baselines.spec import Baseline
from ...results.arguments import parse_size
from ...results.store import committed_results
from ..counts import formulation_of, is_chunked
from ..counts.formulations import has_heads, sizes_of, state_dtype_of
from .prediction import MEASURED_COLUMNS, NO_FIT, measured_rows, predict_case, stored_fit

if TYPE_CHECKING:
    from ..accelerators.known import Accelerator


def prediction(
    op: str,
    impl: str,
    *,
    mode: str,
    dtype: str,
    state_dtype: str,
    sizes: Mapping[str, int],
    chunk_size: str | None,
    accelerator: Accelerator,
    results: Sequence[Path],
    fit: bool,
    roofs: str,
) -> dict[str, Any]:
    """Return a predicted time with its interval, the model's bounds, what was fitted, and what was measured.

    Args:
        impl: an implementation of ``op``.
        sizes: batch, seq_len and every size that an operation may have; those of ``op`` are taken.
        chunk_size: as written on the command line; None is what the implementation chooses itself or an outside
            package recommends, else 128.
        results: where to look the case up and what to fit to; empty: the committed results.
        fit: False takes the model's bounds.
        roofs: which roofs ``accelerator`` has: spec, measured or a path.

    Raises:
        ValueError: a problem that is not counted or cannot run, or ``results`` without a row of the implementation.
    """
    heads = ("num_heads",) if has_heads(op) else ()
    own = {name: sizes[name] for name in ("batch", "seq_len", *heads, *sizes_of(op))}
    chunk = _chunk_of(op, impl, mode, dtype, own, chunk_size)
    own |= {} if chunk is None else {"chunk_size": chunk}
    if reason := why_unsupported(op, impl, mode, dtype, own):
        raise ValueError(f"{op} {impl} cannot run this: {reason}")
    state = state_dtype_of(op, impl, state_dtype)
    folders = tuple(results or committed_results())
    found_fit, rows = stored_fit(folders if fit else (), op, impl, mode, dtype, device=accelerator.key, roofs=roofs)
    if results and fit and not rows:
        raise ValueError(f"results must hold measured rows of {op} {impl} {mode} {dtype}, got none")
    found = predict_case((op, impl, mode, dtype, state, own), accelerator, found_fit)
    # The tokens of an MLP are stored as the length of one sequence.
    stored = {"batch": 1, "seq_len": own["batch"] * own["seq_len"]} if "d_model" in own else {}
    key = {"op": op, "impl": impl, "mode": mode, "dtype": dtype, "state_dtype": state, "chunk_size": None}
    measured = measured_rows(folders, {**key, **own, **stored}, accelerator.key)[-1:]
    return {
        "op": op,
        "impl": impl,
        "mode": mode,
        "accelerator": accelerator.key,
        "accelerator_part": accelerator.part,
        "roofs": roofs_in_words(accelerator),
        **own,
        "low_ms": found.low_ms,
        "high_ms": found.high_ms,
        "interval": found.interval,
        "time_ms": found.time_ms,
        "flops_ms": found.model.flops_ms,
        "bytes_ms": found.model.bytes_ms,
        "model_lower_ms": found.model.lower_ms,
        "model_upper_ms": found.model.upper_ms,
        "bound": found.model.bound,
        **(found_fit.in_figures() if found_fit else NO_FIT),
        "stored_rows": rows if fit else None,
        **{
            "measured_" + name.removeprefix("measured_"): measured[0][name] if measured else None
            for name in MEASURED_COLUMNS
            if name != "chunk_size"
        },
    }


def _chunk_of(op: str, impl: str, mode: str, dtype: str, sizes: Mapping[str, int], given: str | None) -> int | None:
    """Return the chunk length of a case, None where the implementation has none to choose.

    Raises:
        ValueError: a bad length, or one for an implementation without a choice.
    """
    known = get_implementation(op, impl)
    if not known.chunked or not is_chunked(op, formulation_of(op, impl, mode, dtype)):
        if given is not None:
            raise ValueError(f"chunk_size must be left out for {op} {impl} {mode}, got {given!r}")
        return None
    seq_len = sizes["seq_len"]
    if given is None:
        if isinstance(known, Baseline):
            return known.chunk_sizes[0]
        return min(known.chosen_chunk(sizes) or 128, seq_len)
    chunk = parse_size(given, "chunk_size")
    if chunk > seq_len:
        raise ValueError(f"chunk_size must be <= seq_len = {seq_len}, got {chunk}")
    return chunk


def prediction_in_words(row: Mapping[str, Any]) -> str:
    """Return a prediction in one line, what was measured first, and in a second one what its interval means."""
    case = f"{row['op']} {row['impl']} {row['mode']}"
    if row.get("chunk_size"):
        case += f", chunks of {row['chunk_size']}"
    if row["time_ms"] is None:
        model = f"at least {row['low_ms']:.4g} ms, no fit"
        model += "" if row["stored_rows"] is None else f": {_rows(row['stored_rows'])}"
        meaning = f"at least: {row['low_ms']:.4g} to {row['high_ms']:.4g} ms is {row['interval']}"
    else:
        model = f"{row['time_ms']:.4g} ms, {row['low_ms']:.4g} to {row['high_ms']:.4g}"
        meaning = f"low to high: {row['interval']}"
    where = row["accelerator"]
    if row["measured_time_ms"] is None:
        return f"{case} on {where}: {model}; not measured there\n{meaning}"
    measured = f"measured {row['measured_time_ms']:.4g} ms on {where}"
    commit = (row["measured_git_commit"] or "unknown")[:10]
    return f"{case}: {measured}, commit {commit}; the model says {model}\n{meaning}"


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"


def roofs_in_words(accelerator: Accelerator) -> str:
    """Return which rates an accelerator stands for: the specification, or which measurement."""
    return accelerator.source if accelerator.is_measured or accelerator.key == "cpu" else "specification"


def chunk_size_answer(report: Mapping[str, Any], rows: int) -> str:
    """Return the chunk length to take in one line.

    Args:
        rows: how many measured rows a fit had to choose from.
    """
    answer, where = report["answer"], report["accelerator"]
    at = {each["chunk_size"]: each for each in report["candidates"]}
    chosen = answer["chunk_size"]
    use = f"use {chosen}{', the only length that ' + report['impl'] + ' takes' if len(at) == 1 else ''}: "
    if answer["basis"] == "fitted":
        interval = f"{answer['low_ms']:.4g} to {answer['high_ms']:.4g}"
        return use + f"{answer['time_ms']:.4g} ms ({interval}) modelled for {where}; not measured there"
    if answer["basis"] == "bound":
        bound = f"at least {answer['low_ms']:.4g} ms on {where}, {answer['high_ms']:.4g} without overlap"
        return use + f"{bound}, no fit: {_rows(rows)}; not measured there"
    text = use + f"{answer['time_ms']:.4g} ms measured on {where}"
    # Beside it the one that the paper's model chooses, which many would take; else the second best.
    others = [each for each in at.values() if each["measured_ms"] is not None and each is not at[chosen]]
    if others:
        paper = min(at.values(), key=lambda each: each["model_upper_ms"])
        other = paper if paper in others else min(others, key=lambda each: each["measured_ms"])
        text += f" ({other['chunk_size']}: {other['measured_ms']:.4g})"
    untried = [each for each in at.values() if each["measured_ms"] is None and each["predicted_ms"] is not None]
    fastest = min(untried, key=lambda each: each["predicted_ms"], default=None)
    if fastest is not None and fastest["predicted_ms"] < answer["time_ms"]:
        text += f"; {fastest['chunk_size']} was not measured, the model says {fastest['predicted_ms']:.4g}"
    return text


def chunk_size_columns(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return of every candidate what a reader looks for: times and memory, measured and modelled."""
    fitted = report["candidates"][0]["predicted_ms"] is not None
    modelled = {"modelled_ms": "predicted_ms"} if fitted else {"at_least_ms": "low_ms", "no_overlap_ms": "high_ms"}
    return [
        {
            "chunk_size": each["chunk_size"],
            "measured_ms": each["measured_ms"],
            **{title: each[name] for title, name in modelled.items()},
            "measured_gib": None if each["peak_memory_bytes"] is None else each["peak_memory_bytes"] / 2**30,
            "modelled_gib": each["model_memory_bytes"] / 2**30,
        }
        for each in report["candidates"]
    ]


def chunk_size_in_words(report: Mapping[str, Any], accelerator: Accelerator) -> str:
    """Return what the whole table of candidates comes to: the models' optima, and what choosing by them costs."""
    chosen, launches = report["runtime_optimal_feasible"], report["launches"]
    formulation = min(report["candidates"], key=lambda each: each["model_upper_ms"])
    lines = [
        f"best for FLOPs: {report['flop_optimal']:.1f}, of the feasible ones {report['flop_optimal_feasible']}",
        f"for the modelled time on {accelerator.part}: {report['runtime_optimal']:.1f}, of the feasible ones "
        f"{formulation['chunk_size']} ({formulation['model_memory_bytes'] / 2**30:.3g} GiB modelled), by the chunkwise "
        "formulation",
    ]
    if launches is not None:
        lines.append(
            f"of the feasible ones {launches['optimal_feasible']}, by the launches of {report['impl']} (fitted to "
            f"{launches['fitted_rows']} rows on {launches['fitted_on']}; on rows left out off by "
            f"{100 * launches['median_error']:.2g} % in the median, {100 * launches['worst_error']:.2g} % at worst)"
        )
    if report["regret_ms"] is not None:
        whose = "choice by launches" if report["model"] == "launches" else "choice by the formulation"
        lines.append(f"the {whose}, {chosen}, takes {report['regret_ms']:.4g} ms more than the fastest measured")
    return "\n".join(lines)
