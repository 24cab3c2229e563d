"""Exponential moving sum per head: declaration, data only."""

from __future__ import annotations

from typing import Any

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
    formulations=("scan",),
    counts="kernels.ema:passed",
    implementations=(
        triton_form(name="scan", call="kernels.ema.scan:scan", chunked=False),
        portable_form(name="recurrent", call="kernels.ema.reference:recurrent", chunked=False),
    ),
)


def passed(problem: Any, direction: str) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Return what a pass computes and moves; the gradient is the same sum backwards, so that both are alike."""
    cells = problem.rows * problem.seq_len * problem.head_dim_v
    return {"decay and add": (0, 2 * cells)}, {"load": cells, "store": cells}
