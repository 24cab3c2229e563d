"""What a worker process is asked and answers, as JSON holds it."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels import baselines
from ...kernels.baselines.spec import Baseline
from ...kernels.common.spec import Implementation
from ...results.schema import Case
from ..plan import PlannedCase, Triton

SERVE = f"{__package__}.serve"
"""The module that a worker process runs."""

STACK_FILE = "stack"
"""File in a worker's folder to which it writes its Python stack when it gets STACK_SIGNAL."""

STACK_SIGNAL = signal.SIGUSR1

Reply = dict[str, Any]
"""A case's outcome: "status", "reason" and "columns"; "seconds", what for, and "kernels", see :class:`RunLimits`."""


def not_measured(status: str, reason: str) -> Reply:
    """Return the outcome of a case without a measurement."""
    return {"status": status, "reason": reason, "columns": {}}


class CaseFailure(ValueError):
    """Ends a case with this status and reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What every case of a run is given.

    Attributes:
        timeout_s: seconds after which a request's worker is killed, for each of its cases.
        budget_s: seconds of timing after which sampling stops.
        action: method of :class:`.worker.Worker`: "run", "verify" to check without timing, "compile" to only fill the
            compilers' caches, "profile" to call once under a profiler, "sustain" to load the GPU with it.
        rounds, settle: as in :class:`.clock.Sampling`; several cases of a request are timed in turn.
        time_incorrect_peers: time outside packages also where their numbers are off: the outcome is still
            ``incorrect``, and says by how much.
        shared: folder in which workers share references, or None.
        device_kind: "cuda" or "cpu", what the cases are to run on; None is whatever the worker finds.
        note_kernels: whether replies have the Triton kernels that a case launched when it was checked, hash -> cubin's.
    """

    timeout_s: float
    budget_s: float = 0.0
    action: str = "run"
    rounds: int | None = None
    settle: bool = False
    time_incorrect_peers: bool = False
    shared: str | None = None
    device_kind: str | None = None
    note_kernels: bool = False


def encode_request(items: Sequence[PlannedCase], limits: RunLimits) -> dict[str, Any]:
    """Return the request to treat cases as ``limits`` says."""
    return {"limits": dataclasses.asdict(limits), "items": list(map(dataclasses.asdict, items))}


def decode_request(request: Mapping[str, Any]) -> tuple[list[PlannedCase], RunLimits]:
    """Return the cases, with what runs them, and the limits of a request."""
    items = [
        PlannedCase(
            case=Case(**item["case"]),
            target=_decode_target(item["target"]),
            config_of=None if item["config_of"] is None else Case(**item["config_of"]),
            options=item["options"],
            triton=None if item["triton"] is None else Triton(**item["triton"]),
        )
        for item in request["items"]
    ]
    return items, RunLimits(**request["limits"])


def _decode_target(fields: Mapping[str, Any]) -> Implementation | Baseline:
    """Return one of ours as it was declared, which may be nowhere here, and a baseline by its name."""
    if "provider" in fields:
        return baselines.get_baseline(fields["op"], fields["name"])
    declared: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Implementation(**declared)
