"""How long a sweep will take, roughly, before it begins: so that nobody starts a day's work unawares."""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis import counts
from ..analysis.accelerators import known as accelerators
from ..analysis.model import runtime_model
from ..kernels import baselines
from .environment import Environment
from .plan import PlannedCase
from .run import refuse

SECONDS_PER_CASE = 0.25
"""What a case takes beyond its calls, as seen on an H200: inputs, the check's own part, memory given back."""

CALLS_PER_CASE = 30
"""Calls at the runtime model's speed that a case stands for: check, warm-up, memory and samples."""

MAX_CASES_LOOKED_AT = 500


def estimate_s(planned: Sequence[PlannedCase], environment: Environment) -> float:
    """Return the seconds that the cases will take one after the other, compilation and refused cases aside."""
    versions = baselines.installed_versions()
    device = environment.device_accelerator and accelerators.get_accelerator(environment.device_accelerator)
    looked_at = planned[:: -(-len(planned) // MAX_CASES_LOOKED_AT) or 1]
    seconds = 0.0
    for item in looked_at:
        if refuse(item, environment, versions) is not None:
            continue
        seconds += SECONDS_PER_CASE
        case = item.case
        count = counts.count_case(case.op, case.impl, case.mode, case.dtype, case.state_dtype, case.sizes)
        if device and count is not None and device.peak_flops(case.dtype) is not None:
            seconds += CALLS_PER_CASE * runtime_model.model_time_ms(count, device, case.dtype) / 1e3
    return seconds * len(planned) / max(1, len(looked_at))


def describe_s(seconds: float) -> str:
    """Return a duration in the unit that suits it, "about 3 h"."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:.0f} {unit}"
    return f"about {max(1, round(seconds))} s"
