"""Gated Retention (YOCO): linear attention with a tempered sigmoid decay per head: declaration, data only."""

from __future__ import annotations

from ..scalar_decay.declare import scalar_decay_implementations
from ..spec import Operation

OPERATION = Operation(
    name="gated_retention",
    kernel="tfla",
    label="gated Retention",
    summary="linear attention with decay sigmoid(f)^(1/tau) per head",
    arguments=("q", "k", "v", "f"),
    differentiable=("q", "k", "v", "f"),
    inputs="kernels.gated_retention.reference:make_inputs",
    recurrent="kernels.gated_retention.reference:recurrent",
    parallel="kernels.gated_retention.reference:parallel",
    implementations=scalar_decay_implementations("gated_retention"),
)
