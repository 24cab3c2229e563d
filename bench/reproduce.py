"""The cases that claims of documents lack rows of, swept as `lrbench sweep` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis.reproduce.entries import ERRORS
from ..analysis.reproduce.verdicts import UNMEASURED, Found
from ..results.select import grouped
from . import mlp_errors, session
from .plan import Request

LISTS = {
    "op": "ops", "impl": "impls", "provider": "baselines", "mode": "modes", "dtype": "dtypes",
    "state_dtype": "state_dtypes", "seq_len": "seq_lens", "head_dim_v": "head_dims", "head_dim_qk": "head_dims_qk",
    "chunk_size": "chunk_sizes", "channels": "channels", "d_model": "d_models", "d_ff": "d_ffs",
}  # fmt: skip
"""Key of a side -> the field of a request that lists its values."""

SWEPT = ("mode", "chunk_size", "seq_len", "batch")
"""What the cases of one request differ in."""


def missing_requests(found: Sequence[Found]) -> Iterator[Request]:
    """Yield requests for the cases that the claims have no row of."""
    cases = [
        {"kernel": each.asked.document.kernel, **each.asked.terms(side, point)}
        for each in found
        for side, point, why in each.missing
        if why == UNMEASURED and each.asked.claim.metric not in ERRORS
    ]

    def shared(terms: Mapping[str, Any]) -> tuple[Any, ...]:
        return "chunk_size" in terms, *sorted((key, value) for key, value in terms.items() if key not in SWEPT)

    for group in grouped(cases, shared).values():
        tokens = {terms["batch"] * terms["seq_len"] for terms in group if "batch" in terms}
        if len(tokens) == 1:
            yield _request(group, tokens=tokens.pop())
        else:
            for same in grouped(group, lambda terms: terms.get("batch")).values():
                yield _request(same, batch=same[0].get("batch"))


def _request(cases: Sequence[dict[str, Any]], **sizes: Any) -> Request:
    """Return the request of cases that differ in their lists alone."""
    first = cases[0]
    fields: dict[str, Any] = {
        field: tuple(sorted({terms[name] for terms in cases})) for name, field in LISTS.items() if name in first
    }
    # No package brings what is ours.
    if fields.get("baselines") == ("lrbench",):
        fields["baselines"] = ("none",)
    own = {} if "d_model" in first else sizes
    return Request(kernel=first["kernel"], num_heads=first.get("num_heads"), **fields, **own)


def missing_errors(found: Sequence[Found]) -> list[int]:
    """Return the sizes that claims of the table of errors have no row of."""
    of_errors = (each for each in found if each.asked.claim.metric in ERRORS)
    return sorted({int(point["seq_len"]) for each in of_errors for _, point, _ in each.missing})


def run_missing(found: Sequence[Found], *, gpu: str | None, output: Path, **settings: Any) -> None:
    """Sweep what the claims have no row of, see :func:`.session.run_sweep`; missing errors are those of 10 draws."""
    for n, request in enumerate(missing_requests(found)):
        session.run_sweep(
            request, gpu=gpu, output=output, executor="local", devices=1, wait=False, budget_s=None, jobs=None,
            calibrate=None if n == 0 else False, resume=True, profile_harness=False, **settings,
        )  # fmt: skip
    if sizes := missing_errors(found):
        rows = mlp_errors.error_rows(
            sizes=sizes, draws=10, impls=("fused",), against=("eager",), dtype="bf16", device="cuda"
        )
        mlp_errors.write_rows(list(rows), output)
