"""RG-LRU, the recurrence of Hawk and Griffin, the linear scan inside it and the layer around it: declarations.

Data only: no torch, no triton. Where to begin:

    reference.py          the definitions and associative forms in plain torch, and inputs
    operations.py         the public functions
    elements.py           device functions: a_t and b_t from the inputs, scanning a tile, passing a state to the next
    forward.py            the kernels: "fused" and "scan" (look-back scan), "naive" and the end of "chunked" (walk)
    backward.py           their gradients, a recurrence of w backwards in time
    reduce.py             the first part of "chunked": the states between chunks
    launch.py, config.py  autograd and grids; tile sizes
    portable.py           the portable form, chunk by chunk

common/time_tiles.py defines rows and tiles, common/exchange.py words and hops. In a look-back scan every tile has its
own program, which waits for the state before the tile. In a walk, one program takes tile after tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..common.channels import associative_form, kernel_form, naive_form, torch_form
from ..common.spec import LanguageModel, Operation, triton_form
from .config import MIN_CHUNK

CONFIG = "kernels.rglru.config:select_config"

_operation = partial(
    Operation,
    kernel="rglru",
    sizes=("batch", "seq_len", "channels"),
    width=1024,
    counts="analysis.counts.rglru:passed",
)


def _recurrence(op: str, one_pass: str, **declared: Any) -> Operation:
    """Declare ``op``; ``one_pass``: the name of its look-back scan as an ``impl``. All arguments are differentiable."""
    return _operation(
        name=op,
        differentiable=declared["arguments"],
        inputs=f"kernels.rglru.reference:{op}_inputs",
        recurrent=f"kernels.rglru.reference:{op}_recurrent",
        parallel=f"kernels.rglru.operations:{op}:associative_scan",
        call=f"kernels.rglru.operations:{op}",
        channelwise=True,
        implementations=(
            kernel_form(
                name=one_pass,
                summary="one pass over memory: time split over programs that look back for the state before theirs",
                modes=("fw", "fwbw", "bw", "step"),
                default_config=f"{CONFIG}:{one_pass}",
            ),
            triton_form(
                name="chunked",
                formulation="chunked",
                own_chunk=MIN_CHUNK,
                documents=True,
                why_not="kernels.rglru.config:why_not_chunked",
                summary="reduce, then scan: chunks in parallel, their states merged, inputs read twice",
                default_config=f"{CONFIG}:chunked",
                preferred_chunk="kernels.rglru.config:preferred_chunk",
            ),
            naive_form(default_config=f"{CONFIG}:naive"),
            torch_form(),
            associative_form(),
        ),
        **declared,
    )


RGLRU = _recurrence(
    "rglru",
    "fused",
    label="RG-LRU",
    summary="real-gated linear recurrent unit, on gate pre-activations",
    arguments=("x", "r", "i", "c"),
    formulations=("fused", "chunked", "unfused", "layer", "lines", "recurrent"),
    # Hawk of 12 layers and model dim 768, 3/4 of the channels, with GPT-2's vocabulary.
    models={1024: LanguageModel(12, 50257)},
)

LINEAR_SCAN = _recurrence(
    "linear_scan",
    "scan",
    label="linear scan",
    summary="diagonal linear recurrence; a is the decay itself, not its logarithm",
    arguments=("x", "a"),
    formulations=("scan", "chunked", "recurrent"),
)

RGLRU_LAYER = _operation(
    name="rglru_layer",
    label="RG-LRU layer",
    summary="RG-LRU with the two matrix products that make its gates' pre-activations",
    arguments=("x", "w_a", "w_x", "c"),
    differentiable=("x", "w_a", "w_x", "c"),
    inputs="kernels.rglru.reference:rglru_layer_inputs",
    recurrent="kernels.rglru.reference:rglru_layer_recurrent",
    call="kernels.rglru.operations:rglru_layer",
    formulations=("layer", "unfused"),
    implementations=(
        kernel_form(
            name="fused",
            summary="torch's matrix products and the single-pass kernel",
            default_config=f"{CONFIG}:fused",
        ),
        torch_form(summary="torch's matrix products and the portable chunkwise form"),
    ),
)

OPERATIONS = {operation.name: operation for operation in (RGLRU, LINEAR_SCAN, RGLRU_LAYER)}
