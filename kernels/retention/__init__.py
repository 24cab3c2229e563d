"""Retention (RetNet): linear attention with one fixed decay per head: declaration, data only."""

from __future__ import annotations

from ..scalar_decay.declare import scalar_decay_implementations
from ..spec import Operation

OPERATION = Operation(
    name="retention",
    kernel="tfla",
    label="Retention",
    summary="linear attention with a fixed decay per head",
    arguments=("q", "k", "v", "slope"),
    differentiable=("q", "k", "v"),
    inputs="kernels.retention.reference:make_inputs",
    recurrent="kernels.retention.reference:recurrent",
    parallel="kernels.retention.reference:parallel",
    implementations=scalar_decay_implementations("retention"),
)
