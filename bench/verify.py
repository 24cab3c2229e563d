"""Every implementation against its reference at a small ragged shape, in worker processes, without timing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from . import plan
from .environment import Environment
from .plan import PlannedCase, Request, group_by_implementation
from .run import separate
from .workers import Limits, LocalExecutor


def verification_request(kernel: str, ops: tuple[str, ...] | None) -> Request:
    """Return what is checked: every implementation, dtype and state dtype at the preset ``verify``."""
    return Request(kernel=kernel, preset="verify", ops=ops)


def verification_plan(request: Request, device_kind: str) -> list[PlannedCase]:
    """Return the cases of a check: with gradients where there are some, else the forward pass, and decoding steps."""
    planned = plan.plan(request, device_kind=device_kind)
    return [item for item in planned if item.case.mode != "fw" or "fwbw" not in item.target.modes]


def verify(
    planned: Sequence[PlannedCase], environment: Environment, *, timeout_s: float
) -> Iterator[dict[str, object]]:
    """Yield a row per case: status ok, or why not, and the largest relative error over output and gradients."""
    runnable, refused = separate(planned, environment)
    limits = Limits(timeout_s=timeout_s, action="verify", device_kind=environment.device_kind)
    verified = LocalExecutor().run(group_by_implementation(runnable), limits, lambda _: None)
    for item, reply in itertools.chain(refused, verified):
        yield _row(item, reply["status"], reply["reason"], reply["columns"])


def _row(item: PlannedCase, status: str, reason: str | None, columns: dict[str, object]) -> dict[str, object]:
    case = item.case
    return {
        "op": case.op,
        "impl": case.impl,
        "mode": case.mode,
        "dtype": case.dtype,
        "state_dtype": case.state_dtype,
        "status": status,
        "rel_error": columns.get("rel_error"),
        "checked": columns.get("checked"),
        "reason": reason,
    }
