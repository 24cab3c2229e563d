"""Every implementation against its reference at a small ragged shape, in worker processes, without timing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import baselines, plan
from .environment import Environment
from .executors import Limits
from .executors.local import LocalExecutor
from .plan import PlannedCase, Request
from .sweep import group_by_implementation, refuse

SEQ_LEN = 320
BATCH = 2
NUM_HEADS = 2
HEAD_DIM_V = 64
CHUNK_SIZE = 64


def verification_plan(kernel: str, ops: tuple[str, ...] | None, device_kind: str) -> list[PlannedCase]:
    """Return one case per implementation, dtype and state dtype: gradients included, five chunks of 64."""
    request = Request(
        kernel=kernel,
        preset="full",
        ops=ops,
        modes=("fwbw",),
        dtypes=("fp32", "fp16", "bf16"),
        seq_lens=(SEQ_LEN,),
        head_dims=(HEAD_DIM_V,),
        num_heads=NUM_HEADS,
        chunk_sizes=(CHUNK_SIZE,),
        batch=BATCH,
    )
    return plan.plan(request, device_kind=device_kind)


def verify(
    planned: Sequence[PlannedCase], environment: Environment, *, timeout_s: float
) -> Iterator[dict[str, object]]:
    """Yield a row per case: status ok, or why not, and the largest relative error over output and gradients."""
    versions = baselines.installed_versions()
    runnable = []
    for item in planned:
        if refusal := refuse(item, environment, versions):
            yield _row(item, refusal["status"], refusal["reason"], {})
        else:
            runnable.append(item)
    limits = Limits(timeout_s=timeout_s, budget_s=0.0, action="verify", device_kind=environment.device_kind)
    for item, reply in LocalExecutor().run(group_by_implementation(runnable), limits, lambda _: None):
        yield _row(item, reply["status"], reply["reason"], reply["columns"])


def _row(item: PlannedCase, status: str, reason: str | None, columns: dict[str, object]) -> dict[str, object]:
    case = item.case
    return {
        "op": case.op,
        "impl": case.impl,
        "dtype": case.dtype,
        "state_dtype": case.state_dtype,
        "status": status,
        "rel_error": columns.get("rel_error"),
        "checked": columns.get("checked"),
        "reason": reason,
    }
