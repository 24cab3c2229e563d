"""RWKV-4's WKV: declaration, data only."""

from __future__ import annotations

from ..common.channels import ALL_DTYPES, EVERYWHERE
from ..spec import Implementation, Operation

OPERATION = Operation(
    name="wkv4",
    kernel="wkv",
    label="WKV-4",
    summary="RWKV-4's WKV: mean of the values so far, weighted by exp(key) that decays over time",
    arguments=("k", "v", "w", "u"),
    differentiable=("k", "v", "w", "u"),
    inputs="kernels.wkv.reference:wkv4_inputs",
    recurrent="kernels.wkv.reference:recurrent",
    parallel="kernels.wkv.operations:wkv4_associative",
    sizes=("batch", "seq_len", "channels"),
    call="kernels.wkv.operations:wkv4",
    channelwise=True,
    implementations=(
        Implementation(
            name="scan",
            formulation="scan",
            supports="kernels.common.channels:supports_kernels",
            summary="one pass over memory: time split over programs that add up earlier sums, or pass states on",
            modes=("fw", "fwbw", "bw", "step"),
            chunked=False,
            requires=("triton",),
            step_call="kernels.wkv.operations:wkv4_step",
            default_config="kernels.wkv.config:scan_config",
        ),
        Implementation(
            name="naive",
            formulation="recurrent",
            supports="kernels.common.channels:supports_kernels",
            summary="one program takes all of time in order for a block of channels",
            chunked=False,
            requires=("triton",),
            default_config="kernels.wkv.config:walk_config",
        ),
        Implementation(
            name="torch",
            formulation="recurrent",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            summary="portable chunkwise form, any chunk length",
        ),
        Implementation(
            name="associative_scan",
            formulation="scan",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            chunked=False,
            summary="associative scan over whole tensors, log2 of the sequence length passes",
        ),
        Implementation(
            name="torch_associative_scan",
            formulation="scan",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            chunked=False,
            supports="kernels.wkv.config:supports_torch_associative_scan",
            summary="torch's own associative_scan, a prototype higher-order operator",
        ),
    ),
)
