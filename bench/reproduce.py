"""The cases that claims of documents lack rows of, swept as `lrbench sweep` does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis.reproduce.entries import ERRORS
from ..analysis.reproduce.verdicts import UNMEASURED, Found
from ..kernels import FAMILIES
from ..kernels.baselines import baselines_for
from ..results.select import grouped
from . import mlp_errors, note, session
from .plan import Request, named_family

LISTS = {
    "op": "ops", "impl": "impls", "provider": "baselines", "mode": "modes", "dtype": "dtypes",
    "state_dtype": "state_dtypes", "seq_len": "seq_lens", "head_dim_v": "head_dims", "head_dim_qk": "head_dims_qk",
    "chunk_size": "chunk_sizes", "channels": "channels", "d_model": "d_models", "d_ff": "d_ffs",
}  # fmt: skip
"""Key of a side -> the field of a request that lists its values."""

SWEPT = ("mode", "chunk_size", "seq_len", "batch")
"""Keys in which the cases of one request may differ."""


def missing_requests(found: Sequence[Found]) -> Iterator[Request]:
    """Yield requests for the cases that the claims have no row of."""
    cases = [
        {"kernel": _family(each.asked.document.kernel, terms["op"]), **terms}
        for each in found
        for side, point, why in each.missing
        if why == UNMEASURED and each.asked.claim.metric not in ERRORS
        for terms in [each.asked.terms(side, point)]
    ]

    def shared(terms: Mapping[str, Any]) -> tuple[Any, ...]:
        return "chunk_size" in terms, *sorted((key, value) for key, value in terms.items() if key not in SWEPT)

    for group in grouped(cases, shared).values():
        tokens = {terms["batch"] * terms["seq_len"] for terms in group if "batch" in terms}
        if len(tokens) == 1:
            yield _request(group, tokens=tokens.pop())
        else:
            for same in grouped(group, lambda terms: terms.get("batch")).values():
                batch = same[0].get("batch")
                yield _request(same, batches=None if batch is None else (batch,))


def _family(kernel: str, op: str) -> str:
    """Return the document's family if it has the operation or is compared with it, else the operation's own."""
    beside = (baseline.op for baseline in baselines_for(kernel))
    return kernel if op in (*FAMILIES[kernel], *beside) else named_family(op)[0]


def _request(cases: Sequence[dict[str, Any]], **sizes: Any) -> Request:
    """Return the request of cases that differ in their lists alone."""
    first = cases[0]
    fields: dict[str, Any] = {
        field: tuple(sorted({terms[name] for terms in cases})) for name, field in LISTS.items() if name in first
    }
    # Ours are no baselines.
    if fields.get("baselines") == ("lrbench",):
        fields["baselines"] = ("none",)
    own = {} if "d_model" in first else sizes
    alone: dict[str, Any] = {name: first.get(name) for name in ("num_heads", "layers")}
    return Request(kernel=first["kernel"], **alone, **fields, **own)


def missing_errors(found: Sequence[Found]) -> list[int]:
    """Return the sizes that claims of the table of errors have no row of."""
    of_errors = (each for each in found if each.asked.claim.metric in ERRORS)
    return sorted({int(point["seq_len"]) for each in of_errors for _, point, _ in each.missing})


def run_missing(
    found: Sequence[Found], *, more: Sequence[Request] = (), output: Path, time_limit_s: float | None, **sweep: Any
) -> bool:
    """Sweep what the claims have no row of, but for cases that ``output`` has from this code; errors take 10 draws.

    Args:
        more: what is swept as well.
        time_limit_s: seconds after which no case starts; the same call runs the rest. None: no limit.
        output, sweep: see :func:`.session.run_sweep`.

    Returns:
        whether cases are left, out of time.

    Raises:
        ValueError: as run_sweep.
        KeyboardInterrupt: a sweep was interrupted.
    """
    began = time.monotonic()
    if requests := [*more, *missing_requests(found)]:
        outcome = session.run_sweep(*requests, output=output, resume=True, time_limit_s=time_limit_s, **sweep)
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.remaining:
            return True
    for size in missing_errors(found):
        import torch

        if time_limit_s is not None and time.monotonic() - began > time_limit_s:
            note("out of time: the same command measures the rest")
            return True
        here = {"dtype": "bf16", "device": "cuda" if torch.cuda.is_available() else "cpu"}
        rows = mlp_errors.error_rows(sizes=[size], draws=10, impls=("fused",), against=("eager",), **here)
        mlp_errors.write_rows(list(rows), output)
    return False
