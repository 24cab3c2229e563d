"""RWKV-4's WKV: declaration, data only. Where to begin:

    reference.py          the definition, the associative forms and inputs
    operations.py         the public function
    forward.py            the kernels: "scan" (serial_kernel or look_back_kernel), "naive" (walk_kernel) and "step"
    elements.py           device functions that both passes share: sums with an exponent of their own
    exchange.py           adding up a tile's rows, and passing sums and states from tile to tile
    backward.py           the gradients
    launch.py, config.py  autograd and grids; tile sizes
    portable.py           plain torch, chunk by chunk

common/time_tiles.py defines rows and tiles, common/exchange.py words and the number of a call.
"""

from __future__ import annotations

from ..common.channels import associative_form, kernel_form, naive_form, torch_form
from ..common.spec import LanguageModel, Operation, portable_form

CONFIG = "kernels.wkv.config:select_config"

OPERATION = Operation(
    name="wkv4",
    kernel="wkv",
    label="WKV-4",
    summary="RWKV-4's WKV: mean of the values so far, weighted by exp(key) that decays over time",
    arguments=("k", "v", "w", "u"),
    differentiable=("k", "v", "w", "u"),
    inputs="kernels.wkv.reference:wkv4_inputs",
    recurrent="kernels.wkv.reference:recurrent",
    parallel="kernels.wkv.operations:wkv4:associative_scan",
    sizes=("batch", "seq_len", "channels"),
    call="kernels.wkv.operations:wkv4",
    channelwise=True,
    # RWKV-4 1.5B.
    width=2048,
    formulations=("recurrent", "scan"),
    counts="analysis.counts.wkv:passed",
    # The smallest RWKV-4, with GPT-NeoX's vocabulary.
    models={768: LanguageModel(12, 50277)},
    implementations=(
        kernel_form(
            name="scan",
            formulation="scan",
            summary="one pass over memory: time split over programs that add up earlier sums, or pass states on",
            modes=("fw", "fwbw", "bw", "step"),
            default_config=f"{CONFIG}:scan",
        ),
        naive_form(formulation="recurrent", default_config=f"{CONFIG}:naive"),
        torch_form(formulation="recurrent"),
        associative_form(formulation="scan"),
        portable_form(
            name="torch_associative_scan",
            formulation="scan",
            chunked=False,
            documents=True,
            why_not="kernels.wkv.config:why_not_torch_associative_scan",
            summary="torch's own associative_scan, a prototype higher-order operator",
        ),
    ),
)
