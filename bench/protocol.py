"""What the parent and its worker processes say to each other: JSON objects, one per line. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..kernels import baselines
from ..kernels.baselines.spec import Baseline
from ..kernels.spec import Implementation
from ..results.schema import Case
from .plan import PlannedCase


def encode_request(
    item: PlannedCase, *, action: str, budget_s: float, shared: str | None, device_kind: str | None = None
) -> dict[str, Any]:
    """Return a request to check and measure a case ("run"), only check it ("verify"), call it once ("compile"), or call
    it under a profiler ("profile"); a worker on another device than ``device_kind``, where that is given, refuses."""
    return {
        "action": action,
        "case": dataclasses.asdict(item.case),
        "target": _encode_target(item.target),
        "config_of": None if item.config_of is None else dataclasses.asdict(item.config_of),
        "budget_s": budget_s,
        "shared": shared,
        "device_kind": device_kind,
    }


def decode_request(request: Mapping[str, Any]) -> PlannedCase:
    """Return the case and its target of a request."""
    other = request["config_of"]
    return PlannedCase(
        case=Case(**request["case"]),
        target=_decode_target(request["target"]),
        config_of=None if other is None else Case(**other),
    )


def _encode_target(target: Implementation | Baseline) -> dict[str, Any]:
    """One of ours travels as its declaration, so that one which nothing declares can be run; a baseline by name."""
    if isinstance(target, Baseline):
        return {"baseline": target.name, "op": target.op}
    return {"implementation": dataclasses.asdict(target)}


def _decode_target(data: Mapping[str, Any]) -> Implementation | Baseline:
    if "baseline" in data:
        return baselines.get_baseline(data["op"], data["baseline"])
    fields: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in data["implementation"].items()
    }
    return Implementation(**fields)
