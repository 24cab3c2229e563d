"""RG-LRU, the recurrence of Hawk and Griffin, the linear scan inside it and the layer around it: declarations.

Data only: no torch, no triton.
"""

from __future__ import annotations

from typing import Any

from ..common.channels import ALL_DTYPES, EVERYWHERE
from ..spec import Implementation, Operation
from .config import MIN_CHUNK

SIZES = ("batch", "seq_len", "channels")


def _implementations(op: str, one_pass: str) -> tuple[Implementation, ...]:
    """Return the implementations of operation ``op``, whose single-pass kernel is called ``one_pass``."""
    return (
        Implementation(
            name=one_pass,
            supports="kernels.common.channels:supports_kernels",
            summary="one pass over memory: time split over programs that look back for the state before theirs",
            modes=("fw", "fwbw", "bw", "step"),
            chunked=False,
            default_config=f"kernels.rglru.config:{op}_config",
            requires=("triton",),
            step_call=f"kernels.rglru.operations:{op}_step",
        ),
        Implementation(
            name="chunked",
            formulation="chunked",
            own_chunk=MIN_CHUNK,
            supports="kernels.rglru.config:supports_chunked",
            summary="reduce, then scan: chunks in parallel, their states merged, inputs read twice",
            default_config="kernels.rglru.config:chunked_config",
            requires=("triton",),
            preferred_chunk="kernels.rglru.config:preferred_chunk",
        ),
        Implementation(
            name="naive",
            supports="kernels.common.channels:supports_kernels",
            summary="one program takes all of time in order for a block of channels",
            chunked=False,
            default_config="kernels.rglru.config:naive_config",
            requires=("triton",),
        ),
        Implementation(
            name="torch",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            summary="portable chunkwise form, any chunk length",
        ),
        Implementation(
            name="associative_scan",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            chunked=False,
            summary="associative scan over whole tensors, log2 of the sequence length passes",
        ),
    )


def _recurrence(op: str, one_pass: str, **declared: Any) -> Operation:
    """Declare operation ``op``, whose single-pass kernel is called ``one_pass``; all arguments are differentiable."""
    return Operation(
        name=op,
        kernel="rglru",
        differentiable=declared["arguments"],
        inputs=f"kernels.rglru.reference:{op}_inputs",
        recurrent=f"kernels.rglru.reference:{op}_recurrent",
        parallel=f"kernels.rglru.operations:{op}_associative",
        sizes=SIZES,
        call=f"kernels.rglru.operations:{op}",
        channelwise=True,
        implementations=_implementations(op, one_pass),
        **declared,
    )


RGLRU = _recurrence(
    "rglru",
    "fused",
    label="RG-LRU",
    summary="real-gated linear recurrent unit, on gate pre-activations",
    arguments=("x", "r", "i", "c"),
)

LINEAR_SCAN = _recurrence(
    "linear_scan",
    "scan",
    label="linear scan",
    summary="diagonal linear recurrence; a is the decay itself, not its logarithm",
    arguments=("x", "a"),
)

RGLRU_LAYER = Operation(
    name="rglru_layer",
    kernel="rglru",
    label="RG-LRU layer",
    summary="RG-LRU with the two matrix products that make its gates' pre-activations",
    arguments=("x", "w_a", "w_x", "c"),
    differentiable=("x", "w_a", "w_x", "c"),
    inputs="kernels.rglru.reference:rglru_layer_inputs",
    recurrent="kernels.rglru.reference:rglru_layer_recurrent",
    sizes=SIZES,
    call="kernels.rglru.operations:rglru_layer",
    implementations=(
        Implementation(
            name="fused",
            supports="kernels.common.channels:supports_kernels",
            summary="torch's matrix products and the single-pass kernel",
            chunked=False,
            default_config="kernels.rglru.config:rglru_config",
            requires=("triton",),
        ),
        Implementation(
            name="torch",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            summary="torch's matrix products and the portable chunkwise form",
        ),
    ),
)

OPERATIONS = {operation.name: operation for operation in (RGLRU, LINEAR_SCAN, RGLRU_LAYER)}
