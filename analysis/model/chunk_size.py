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

from ...kernels.baselines import why_unsupported
from ...results.arguments import one_of
from ..counts import Problem, Widths, scalar_decay
from ..counts.executed import MIN_CHUNK
from ..counts.model import DTYPE_BYTES
from ..counts.problem import PASSES, chunk_formula

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


@functools.cache
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
        # That a chunk length is none of its own says less than what is wrong at one that is.
        reason = next((each for each in reasons.values() if each and not each.startswith("chunk_size ")), None)
        raise ValueError(f"{op} {impl} cannot run this: {reason or reasons[feasible[-1]]}")
    return taken
