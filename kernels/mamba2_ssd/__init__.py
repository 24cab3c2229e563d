"""Mamba-2 state-space duality (SSD) with a scalar A per head: declaration, data only."""

from __future__ import annotations

from ..scalar_decay.declare import scalar_decay_implementations
from ..spec import Operation

OPERATION = Operation(
    name="mamba2_ssd",
    kernel="tfla",
    label="Mamba-2",
    summary="Mamba-2 SSD core: scalar A per head, groups of B and C, without the D skip and the gate",
    arguments=("x", "dt", "A", "B", "C"),
    differentiable=("x", "dt", "A", "B", "C"),
    inputs="kernels.mamba2_ssd.reference:make_inputs",
    recurrent="kernels.mamba2_ssd.reference:recurrent",
    parallel="kernels.mamba2_ssd.reference:parallel",
    implementations=scalar_decay_implementations("mamba2_ssd"),
)
