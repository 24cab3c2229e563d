"""RG-LRU, the recurrence of Hawk and Griffin: declaration, data only."""

from __future__ import annotations

from ..diagonal.declare import diagonal_implementations
from ..spec import Operation

OPERATION = Operation(
    name="rglru",
    kernel="rglru",
    label="RG-LRU",
    summary="real-gated linear recurrent unit, on gate pre-activations",
    arguments=("x", "r", "i", "c"),
    differentiable=("x", "r", "i", "c"),
    inputs="kernels.rglru.reference:make_inputs",
    recurrent="kernels.rglru.reference:recurrent",
    parallel="kernels.rglru.reference:parallel",
    sizes=("batch", "seq_len", "channels"),
    channelwise=True,
    implementations=diagonal_implementations("rglru", "fused"),
)
