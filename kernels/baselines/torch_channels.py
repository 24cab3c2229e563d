"""Plain torch for the recurrences over channels: eager, a kernel a line, and what torch.compile makes of a scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

LEAVES: Mapping[str, tuple[str, ...]] = {
    "rglru": ("x", "r", "i", "c"),
    "rglru_layer": ("x", "w_a", "w_x", "c"),
    "linear_scan": ("x", "a"),
}
"""Operation -> its arguments, all of which get a gradient."""

LINE_BY_LINE: Mapping[str, str] = {"rglru": "lines", "rglru_layer": "unfused", "linear_scan": "scan"}
"""Operation -> the formulation of eager gates, a kernel a line."""

_torch = partial(
    Baseline,
    provider="torch",
    distribution="torch",
    tested="2.11.0",
    kernels=("rglru",),
    plan="kernels.baselines.plans:channel_sizes",
    dtypes=("bf16", "fp16", "fp32"),
    licence="BSD-3-Clause",
)

BASELINES = (
    *(
        _torch(
            name="torch.eager",
            op=op,
            formulation=formulation,
            build="kernels.baselines.torch_channels:build_eager",
            settings=(
                "the listing of the layer in eager torch, a loop over time for the recurrence; decays and states in "
                "float32, all else in the activations' dtype, as in RecurrentGemma's torch code"
            ),
        )
        for op, formulation in LINE_BY_LINE.items()
    ),
    *(
        _torch(
            name="torch.compile",
            op=op,
            build="kernels.baselines.torch_channels:build_compiled",
            settings="torch.compile, static shapes, one graph, of the gates and the associative scan in log2(T) passes",
        )
        for op in LEAVES
    ),
)


def elements(op: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return log a (of a scan: a) in float32 and b [B, T, C] in x's dtype, each line of the layer's listing a kernel.

    1 - a^2 is taken by expm1, since autograd divides by its root.
    """
    import torch
    from torch.nn.functional import softplus

    if op == "linear_scan":
        return tensors["a"].float(), tensors["x"]
    x = tensors["x"]
    r, i = (x @ tensors["w_a"], x @ tensors["w_x"]) if op == "rglru_layer" else (tensors["r"], tensors["i"])
    log_a = -8.0 * torch.sigmoid(r) * softplus(tensors["c"])
    root = torch.sqrt(-torch.expm1(2.0 * log_a))
    return log_a, (x * torch.sigmoid(i)) * root.to(x.dtype)


def build_eager(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare eager gates and the recurrence as a loop over time."""
    from ..rglru.reference import recurrent

    return _build(case, inputs, recurrent, compiled=False)


def build_compiled(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare compiled gates and associative scan."""
    from ..rglru.reference import associative

    return _build(case, inputs, associative, compiled=True)


def _build(
    case: Case,
    inputs: Mapping[str, Tensor],
    scan: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]],
    *,
    compiled: bool,
) -> Runnable:
    import torch

    from ._tensors import on_leaves

    def run(**tensors: Tensor) -> Tensor:
        decay, b = elements(case.op, tensors)
        a = decay if case.op == "linear_scan" else decay.exp()
        return scan(a, b.float(), None)[0].to(b.dtype)

    function: Callable[..., Tensor] = run
    if compiled:
        # What an earlier case compiled counts towards the limit of this one's code, beyond which it would run eagerly.
        torch._dynamo.reset()
        function = torch.compile(run, dynamic=False, fullgraph=True)
    return on_leaves(function, inputs, *LEAVES[case.op])
