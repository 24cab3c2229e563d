"""From what a worker measured to a row: its case, its run, and what is derived."""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ... import __version__
from ...analysis import counts
from ...analysis.accelerators import known as accelerators
from ...analysis.accelerators.known import Accelerator
from ...analysis.derive import derive
from ...kernels import FAMILIES
from ...kernels.baselines import get_operation
from ...kernels.baselines.spec import Baseline
from ...kernels.common.spec import Implementation
from ...results.schema import Case, Environment, Record
from ..environment import version_of
from ..plan import PlannedCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all rows of a run share.

    Attributes:
        environment: of the rows, unless a reply has columns of its own (on a cluster, its node's).
        accelerator: the accelerator the analysis is about (``--gpu``), or None.
    """

    run_id: str
    environment: Environment
    accelerator: Accelerator | None

    @classmethod
    def start(cls, environment: Environment, accelerator: str | None = None) -> Run:
        """Return a run with a new id; ValueError for an unknown accelerator."""
        return cls(run_id=uuid.uuid4().hex, environment=environment, accelerator=_specification(accelerator))

    @property
    def device(self) -> Accelerator | None:
        """The measured device's specification, or None where it is not one we know."""
        return _specification(self.environment.device_accelerator)


def _specification(accelerator: str | None) -> Accelerator | None:
    return None if accelerator is None else accelerators.get_accelerator(accelerator)


def common_columns(
    run: Run, case: Case, environment: Environment, reply: Mapping[str, Any], version: str | None = None
) -> dict[str, Any]:
    """Return the columns that all rows of cases share: case, run, where it ran, its package's version, outcome."""
    return {
        **dataclasses.asdict(case),
        **environment.columns(),
        "run_id": run.run_id,
        "case_id": case.case_id,
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "provider_version": version,
        "status": reply["status"],
        "reason": reply["reason"],
    }


def planned_columns(run: Run, planned: PlannedCase, reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return :func:`common_columns` of a planned case."""
    target = planned.target
    version = version_of(target.distribution) if isinstance(target, Baseline) else __version__
    return common_columns(run, planned.case, planned.within(run.environment), reply, version)


def _why_slower(run: Run, planned: PlannedCase, columns: Mapping[str, Any]) -> str | None:
    """Return which slower implementation a case ran that names none, because of versions, or None."""
    case = planned.case.of_operation
    operation = get_operation(case.op)
    if not isinstance(planned.target, Implementation) or planned.target.call != operation.call or not operation.call:
        return None
    versions = {"triton": columns["triton_version"]}
    return operation.why_slower(case.mode, case.dtype, case.sizes, run.environment.capability, versions)


def build_record(run: Run, planned: PlannedCase, reply: Mapping[str, Any], pair_id: str | None = None) -> Record:
    """Return the row of a case, given its worker's reply; ``pair_id``: of those that it was timed in turn with."""
    case, target = planned.case, planned.target
    columns = {
        **planned_columns(run, planned, reply),
        "same_math": not isinstance(target, Baseline) or case.op in FAMILIES.get(case.kernel, ()),
        "pair_id": pair_id,
        **reply["columns"],
    }
    columns["reason"] = columns["reason"] or _why_slower(run, planned, columns)
    count = counts.count_case(case.op, case.impl, case.mode, case.dtype, case.state_dtype, case.sizes)
    return Record(**derived_columns(run, columns, count))


def derived_columns(run: Run, columns: Mapping[str, Any], count: counts.Count | None) -> dict[str, Any]:
    """Return the columns of a row with what follows from a case's work and time."""
    device = _specification(columns["device_accelerator"])
    found = {**columns, "accelerator": run.accelerator.key if run.accelerator else None}
    found |= derive(run.accelerator, device, count, columns["dtype"], columns.get("time_ms"))
    # Infinities and NaN become null.
    infinite = {name: None for name, value in found.items() if isinstance(value, float) and not math.isfinite(value)}
    return found | infinite
