"""Linear scan, the recurrence inside RG-LRU with its coefficients given: declaration, data only."""

from __future__ import annotations

from ..diagonal.declare import diagonal_implementations
from ..spec import Operation

OPERATION = Operation(
    name="linear_scan",
    kernel="rglru",
    label="linear scan",
    summary="diagonal linear recurrence; a is the decay itself, not its logarithm",
    arguments=("x", "a"),
    differentiable=("x", "a"),
    inputs="kernels.linear_scan.reference:make_inputs",
    recurrent="kernels.linear_scan.reference:recurrent",
    parallel="kernels.linear_scan.reference:parallel",
    sizes=("batch", "seq_len", "channels"),
    channelwise=True,
    implementations=diagonal_implementations("linear_scan", "scan"),
)
