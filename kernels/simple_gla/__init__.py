"""Simple GLA: linear attention with one data-dependent decay per head: declaration, data only."""

from __future__ import annotations

from ..scalar_decay.declare import scalar_decay_implementations
from ..spec import Operation

OPERATION = Operation(
    name="simple_gla",
    kernel="tfla",
    label="simple GLA",
    summary="linear attention with a data-dependent scalar decay per head",
    arguments=("q", "k", "v", "g"),
    differentiable=("q", "k", "v", "g"),
    inputs="kernels.simple_gla.reference:make_inputs",
    recurrent="kernels.simple_gla.reference:recurrent",
    parallel="kernels.simple_gla.reference:parallel",
    implementations=scalar_decay_implementations("simple_gla"),
)
