"""The RG-LRU layer with its two gate projections: declaration, data only."""

from __future__ import annotations

from ..spec import Implementation, Operation

OPERATION = Operation(
    name="rglru_layer",
    kernel="rglru",
    label="RG-LRU layer",
    summary="RG-LRU with the two matrix products that make its gates' pre-activations",
    arguments=("x", "w_a", "w_x", "c"),
    differentiable=("x", "w_a", "w_x", "c"),
    inputs="kernels.rglru_layer.layer:make_inputs",
    recurrent="kernels.rglru_layer.layer:recurrent",
    sizes=("batch", "seq_len", "channels"),
    implementations=(
        Implementation(
            name="fused",
            call="kernels.rglru_layer.layer:fused",
            supports="kernels.diagonal.declare:supports_kernels",
            summary="torch's matrix products and the single-pass kernel",
            chunked=False,
            default_config="kernels.diagonal.config:rglru_config",
            requires=("triton",),
        ),
        Implementation(
            name="torch",
            call="kernels.rglru_layer.layer:chunkwise",
            devices=("cpu", "cuda"),
            dtypes=("fp64", "fp32", "fp16", "bf16"),
            summary="torch's matrix products and the portable chunkwise form",
        ),
    ),
)
