"""From what a worker measured to a row: counted work, rates, the model's time, and what makes a row suspect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from .. import __version__
from ..analysis import counts
from ..analysis.accelerators import known as accelerators
from ..analysis.accelerators.known import Accelerator
from ..analysis.model import runtime_model
from ..kernels import FAMILIES
from ..kernels.baselines.spec import Baseline
from ..results.schema import Case, Record
from .environment import Environment, version_of
from .plan import PlannedCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all rows of a run share.

    Attributes:
        accelerator: the accelerator the analysis is about (``--gpu``), or None.
        device: the measured device's specification, or None where it is not one we know.
    """

    run_id: str
    environment: Environment
    accelerator: Accelerator | None
    device: Accelerator | None

    @classmethod
    def start(cls, run_id: str, environment: Environment, accelerator: str | None) -> Run:
        """Look up the two accelerators; ValueError for an unknown one."""
        device = None
        if environment.device_accelerator is not None:
            device = accelerators.get_accelerator(environment.device_accelerator)
        target = accelerators.get_accelerator(accelerator) if accelerator is not None else None
        return cls(run_id=run_id, environment=environment, accelerator=target, device=device)


def build_record(run: Run, planned: PlannedCase, reply: Mapping[str, Any]) -> Record:
    """Return the row of a case.

    Args:
        reply: "status", "reason" and "columns" as the worker gave them.
    """
    case, target = planned.case, planned.target
    version = version_of(target.distribution) if isinstance(target, Baseline) else __version__
    columns: dict[str, Any] = {
        **case_columns(case),
        **run.environment.columns(),
        "run_id": run.run_id,
        "case_id": case.case_id,
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "provider_version": version,
        "same_math": not isinstance(target, Baseline) or case.op in FAMILIES.get(case.kernel, ()),
        "status": reply["status"],
        "reason": reply["reason"],
        "accelerator": run.accelerator.key if run.accelerator else None,
        **reply["columns"],
    }
    columns |= derive(run.accelerator, run.device, case, columns.get("time_ms"))
    return Record(**{name: _finite(value) for name, value in columns.items()})


def case_columns(case: Case) -> dict[str, Any]:
    """Return the fields of a case as columns."""
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


def derive(
    accelerator: Accelerator | None, device: Accelerator | None, case: Case, time_ms: float | None
) -> dict[str, Any]:
    """Return the columns that follow from the case, its time and the two accelerators of a :class:`Run`.

    The roofline is never that of ``--gpu``: rates are held against the device that was measured.
    """
    count = counts.count_case(case.op, case.impl, case.mode, case.dtype, case.state_dtype, case.sizes)
    if count is None:
        return {}
    columns: dict[str, Any] = {
        "flops": float(count.flops),
        "tensor_flops": float(count.tensor_flops),
        "bytes": float(count.bytes),
        "intensity": count.intensity,
        "causal_factor": count.causal_factor,
    }
    if accelerator is not None and accelerator.peak_flops(case.dtype) is not None:
        columns["model_time_ms"] = runtime_model.model_time_ms(count, accelerator, case.dtype)
    if time_ms is None:
        return columns
    columns["tflops"] = count.flops / (time_ms * 1e9)
    columns["gbps"] = count.bytes / (time_ms * 1e6)
    if device is not None:
        columns["roofline_fraction"] = runtime_model.roofline_fraction(count, device, case.dtype, time_ms)
        columns["suspect"] = runtime_model.suspect_reason(count, device, case.dtype, time_ms)
    return columns


def _finite(value: Any) -> Any:
    """Null in place of NaN and infinity: a failed row carries its reason, not a number that is none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
