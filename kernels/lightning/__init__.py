"""Lightning Attention: linear attention with one fixed decay per head and no scale: declaration, data only."""

from __future__ import annotations

from ..scalar_decay.declare import scalar_decay_implementations
from ..spec import Implementation, Operation

OPERATION = Operation(
    name="lightning",
    kernel="lightning",
    label="Lightning",
    summary="linear attention with a fixed decay per head and no scale",
    arguments=("q", "k", "v", "slope"),
    differentiable=("q", "k", "v"),
    inputs="kernels.lightning.reference:make_inputs",
    recurrent="kernels.lightning.reference:recurrent",
    parallel="kernels.lightning.reference:parallel",
    implementations=(
        Implementation(
            name="lightning2",
            formulation="lightning2",
            call="kernels.lightning.lightning2:lightning2",
            supports="kernels.lightning.config:supports",
            summary="Lightning Attention-2: blocks in order, the state on the chip",
            chunked=False,
            default_config="kernels.lightning.config:lightning2_config",
            requires=("triton",),
        ),
        Implementation(
            name="lightning1",
            formulation="lightning1",
            call="kernels.lightning.lightning1:lightning1",
            supports="kernels.lightning.config:supports",
            summary="Lightning Attention-1: the whole causal square in tiles, quadratic in the sequence length",
            chunked=False,
            default_config="kernels.lightning.config:lightning1_config",
            requires=("triton",),
        ),
        *scalar_decay_implementations("lightning"),
    ),
)
