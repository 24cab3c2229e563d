"""What the commands predict and chunk-size answer: a predicted time as one row, and an optimum in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...results.arguments import parse_size
from ...results.store import committed_results
from ..counts import count_case, formulation_of, is_chunked
from ..counts.formulations import has_heads, sizes_of
from .prediction import NO_FIT, predict_case

if TYPE_CHECKING:
    from ..accelerators.known import Accelerator

WhyUnsupported = Callable[[str, str, str, str, Mapping[str, int]], "str | None"]
"""(operation, implementation, mode, dtype, sizes) -> why it cannot run anywhere, or None."""


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
    why_unsupported: WhyUnsupported,
) -> dict[str, Any]:
    """Return a predicted time with its interval, the model's bounds and what was fitted.

    Args:
        impl: an implementation of ``op``; "" where it has none but what the counts say.
        sizes: batch, seq_len and every size that an operation may have; those of ``op`` are taken.
        chunk_size: as written on the command line; None is 128, or an outside package's own.
        results: what to fit to; empty: the committed results.
        fit: False takes the model's bounds.
        roofs: which roofs ``accelerator`` has: spec, measured or a path.

    Raises:
        ValueError: a problem that is not counted or cannot run, or ``results`` with too few rows.
    """
    what, length = f"{op} {impl}".strip(), sizes["seq_len"]
    heads = ("num_heads",) if has_heads(op) else ()
    own = {name: sizes[name] for name in ("batch", "seq_len", *heads, *sizes_of(op))}
    if is_chunked(op, formulation_of(op, impl, mode, dtype)):
        chunk = None if chunk_size is None else parse_size(chunk_size, "chunk_size")
        if chunk is not None and chunk > length:
            raise ValueError(f"chunk_size must be <= seq_len = {length}, got {chunk}")
        # An outside package's own chunk length is known to the counts.
        default = {} if "." in impl else {"chunk_size": min(128, length)}
        own |= default if chunk is None else {"chunk_size": chunk}
    elif chunk_size is not None:
        raise ValueError(f"chunk_size must be left out for {what} {mode}, got {chunk_size!r}")
    if impl and (reason := why_unsupported(op, impl, mode, dtype, own)):
        raise ValueError(f"{what} cannot run this: {reason}")
    counted = count_case(op, impl, mode, dtype, state_dtype, own)
    if counted is None:
        raise ValueError(f"mode must be one that is counted for {what}, got {mode!r}")
    folders = tuple(results or committed_results()) if fit else ()
    case = (op, impl, mode, dtype, state_dtype, own)
    found = predict_case(case, counted, accelerator, folders, roofs=roofs)
    if results and fit and found.fit is None:
        raise ValueError(f"results must hold enough measured rows of {what} {mode} {dtype}, got fewer")
    return {
        "op": op,
        "impl": impl or None,
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
        **(found.fit.in_figures() if found.fit else NO_FIT),
    }


def roofs_in_words(accelerator: Accelerator) -> str:
    """Return which rates an accelerator stands for: the specification, or which measurement."""
    return accelerator.source if accelerator.is_measured or accelerator.key == "cpu" else "specification"


def chunk_size_in_words(report: Mapping[str, Any], accelerator: Accelerator) -> str:
    """Return what the table of candidates comes to: the optima, what choosing wrongly costs, and memory at each."""
    at = {each["chunk_size"]: each for each in report["candidates"]}
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
    if report["measured_best"] is None:
        lines.append(f"not measured for {report['impl']} on {accelerator.key}")
        return "\n".join(lines)
    best = at[report["measured_best"]]
    held = best["peak_memory_bytes"]
    memory = "" if held is None else f" ({held / 2**30:.3g} GiB measured)"
    lost = f"{chosen} was not measured"
    if report["regret_ms"] is not None:
        whose = "choice by launches" if report["model"] == "launches" else "modelled choice"
        lost = f"the {whose} takes {report['regret_ms']:.4g} ms more"
    lines.append(f"measured best: {report['measured_best']}{memory}; {lost}")
    return "\n".join(lines)
