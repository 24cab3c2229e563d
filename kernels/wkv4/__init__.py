"""RWKV-4's WKV: declaration, data only."""

from __future__ import annotations

from ..spec import Implementation, Operation

EVERYWHERE = ("cpu", "cuda")
ALL_DTYPES = ("fp64", "fp32", "fp16", "bf16")

OPERATION = Operation(
    name="wkv4",
    kernel="wkv",
    label="WKV-4",
    summary="RWKV-4's WKV: mean of the values so far, weighted by exp(key) that decays over time",
    arguments=("k", "v", "w", "u"),
    differentiable=("k", "v", "w", "u"),
    inputs="kernels.wkv4.reference:make_inputs",
    recurrent="kernels.wkv4.reference:recurrent",
    parallel="kernels.wkv4.reference:parallel",
    sizes=("batch", "seq_len", "channels"),
    channelwise=True,
    implementations=(
        Implementation(
            name="scan",
            formulation="scan",
            call="kernels.wkv4.scan:scan",
            supports="kernels.wkv4.config:supports_kernels",
            summary="one pass over memory: time split over programs that add up the sums of those before them",
            modes=("fw", "fwbw", "bw", "step"),
            chunked=False,
            requires=("triton",),
            step_call="kernels.wkv4.scan:step",
            default_config="kernels.wkv4.config:scan_config",
        ),
        Implementation(
            name="recurrent",
            formulation="recurrent",
            call="kernels.wkv4.scan:walk",
            supports="kernels.wkv4.config:supports_kernels",
            summary="one program walks all of time for a block of channels",
            chunked=False,
            requires=("triton",),
            default_config="kernels.wkv4.config:walk_config",
        ),
        Implementation(
            name="torch",
            formulation="recurrent",
            call="kernels.wkv4.chunkwise:chunkwise",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            summary="portable chunkwise form, any chunk length",
        ),
        Implementation(
            name="associative",
            formulation="scan",
            call="kernels.wkv4.reference:parallel",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            chunked=False,
            summary="associative scan over whole tensors, log2 of the sequence length passes",
        ),
        Implementation(
            name="torch_associative_scan",
            formulation="scan",
            call="kernels.wkv4.higher_order:scan",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            chunked=False,
            supports="kernels.wkv4.higher_order:supports",
            summary="torch's own associative_scan, a prototype higher-order operator",
        ),
    ),
)
