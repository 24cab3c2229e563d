"""Which chunk length is best: in FLOPs, in the runtime model, and in what was measured.

Per chunk, FLOPs are a L^2 + b L + c and bytes p L + q, so per token the runtime model is
(a L + b + c / L) / alpha + (p + q / L) / beta. It is least at

    L_opt,FLOP = sqrt(c / a)    (TFLA paper, eq. 113)
    L_opt,Runtime = sqrt((c + I_acc q) / a)    (eq. 123), I_acc = alpha / beta

which for mLSTMsig, with the paper's printed total, are the paper's closed forms; every other chunkwise operation goes
the same way with its own parts. The coefficients are read off the count formulas themselves.

This is the optimum of the formulation. fused_chunk and whole_state have others, which :mod:`.terms` models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...kernels.baselines import why_unsupported
from ...kernels.scalar_decay.declare import FUSED_CHUNK
from ...results.arguments import one_of
from ..counts import Problem, Widths, count, scalar_decay
from ..counts.executed import MIN_CHUNK
from ..counts.model import DTYPE_BYTES
from ..counts.problem import PASSES, chunk_formula
from .prediction import best_of
from .runtime_model import flop_rate, runtime_model

if TYPE_CHECKING:
    from .answers import Question

CHUNKWISE_OPERATIONS = (*scalar_decay.GATE_MODELS, "gla")
_MODES = ("fw", "bw", "fwbw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """FLOPs a L^2 + b L + c and bytes p L + q of one chunk and head."""

    a: float
    b: float
    c: float
    p: float
    q: float

    def flop_optimal(self) -> float:
        """Return the chunk length of least FLOPs (eq. 113)."""
        return math.sqrt(self.c / self.a)

    def runtime_optimal(self, intensity: float) -> float:
        """Return the chunk length of least tau_FLOPs + tau_bytes (eq. 123) for an accelerator of ``intensity``."""
        return math.sqrt((self.c + intensity * self.q) / self.a)


def coefficients(
    op: str,
    *,
    head_dim_qk: int,
    head_dim_v: int,
    causal_factor: float,
    dtype: str = "bf16",
    state_dtype: str = "fp32",
    mode: str = "fw",
) -> Coefficients:
    """Return the coefficients of one chunk; for mLSTMsig forward those of the paper's printed total.

    Errors as :func:`check_chunkwise`.
    """
    check_chunkwise(op, mode)
    width = DTYPE_BYTES[dtype]
    chunks = [
        Problem(
            op=op,
            formulation="chunkwise",
            published=op == "mlstm_sig",
            seq_len=length,
            head_dim_qk=head_dim_qk,
            head_dim_v=head_dim_v,
            causal=causal_factor,
            widths=Widths(qkv=width, gate=width, state=DTYPE_BYTES[state_dtype]),
        )
        for length in (0, 1, 2)
    ]
    at = [[chunk_formula(op, direction)(chunk) for direction in PASSES[mode]] for chunk in chunks]
    flops = [float(sum(tally.flops for tally in tallies)) for tallies in at]
    moved = [float(sum(tally.bytes for tally in tallies)) for tallies in at]
    a = (flops[2] - 2 * flops[1] + flops[0]) / 2
    return Coefficients(a=a, b=flops[1] - flops[0] - a, c=flops[0], p=moved[1] - moved[0], q=moved[0])


def check_chunkwise(op: str, mode: str, seq_len: int = MIN_CHUNK) -> None:
    """Raise ValueError for an operation or a mode without a chunk length, or a sequence shorter than the least."""
    one_of("op", op, CHUNKWISE_OPERATIONS, " to have a modelled chunk size")
    one_of("mode", mode, _MODES, " for a chunk size")
    if seq_len < MIN_CHUNK:
        raise ValueError(too_short(seq_len))


def too_short(seq_len: int) -> str:
    """Return in words that a sequence is shorter than the least chunk."""
    return f"seq_len must be >= {MIN_CHUNK} to have a feasible chunk size, got {seq_len}"


def feasible_chunks(seq_len: int) -> tuple[int, ...]:
    """Return the chunk lengths that kernels run for a sequence: powers of two from 16, no longer than it."""
    return tuple(2**n for n in range(MIN_CHUNK.bit_length() - 1, max(seq_len, 0).bit_length()))


def chunks_taken(op: str, impl: str, mode: str, dtype: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the feasible chunk lengths that an implementation takes, by what it declares.

    Args:
        sizes: of the problem, without a chunk length.

    Raises:
        ValueError: it takes none of them, with its reason; or bad sizes and names.
    """
    feasible = feasible_chunks(sizes["seq_len"])
    reasons = {chunk: why_unsupported(op, impl, mode, dtype, {**sizes, "chunk_size": chunk}) for chunk in feasible}
    taken = tuple(chunk for chunk, reason in reasons.items() if reason is None)
    if feasible and not taken:
        raise ValueError(f"{op} {impl} cannot run this: {reasons[feasible[-1]]}")
    return taken


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
                "model_memory_bytes": found.modelled_memory_bytes,
                "measured_ms": row.get("time_ms"),
                **{name: row.get(name) for name in ("time_ci_low_ms", "time_ci_high_ms", "peak_memory_bytes")},
            }
        )
    best = best_of(answers)
    least_flops = min(candidates, key=lambda each: each["flops"])
    chosen = min(candidates, key=lambda each: each["predicted_ms" if fit else "chunkwise_upper_ms"])
    timed = [each for each in candidates if each["measured_ms"] is not None]
    fastest = min(timed, key=lambda each: each["measured_ms"], default=None)
    return {
        "op": op,
        "impl": impl,
        "mode": mode,
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
        "model": fit.model.name if fit else "formulation",
        "runtime_optimal_feasible": chosen["chunk_size"],
        "measured_best": fastest["chunk_size"] if fastest else None,
        "regret_ms": chosen["measured_ms"] - fastest["measured_ms"] if fastest and chosen in timed else None,
        "fitted": fit.in_figures() if fit else None,
        "candidates": candidates,
    }
