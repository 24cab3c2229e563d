"""Exponential moving sum per head: declaration, data only."""

from __future__ import annotations

from ..common.spec import Operation, portable_form, triton_form

OPERATION = Operation(
    name="ema",
    kernel="ema",
    summary="exponential moving sum per head",
    arguments=("v", "slope"),
    differentiable=("v",),
    inputs="kernels.ema.reference:make_inputs",
    recurrent="kernels.ema.reference:recurrent",
    sizes=("batch", "seq_len", "num_heads", "head_dim_v"),
    implementations=(
        triton_form(name="scan", call="kernels.ema.scan:scan", chunked=False),
        portable_form(name="recurrent", call="kernels.ema.reference:recurrent", chunked=False),
    ),
)
