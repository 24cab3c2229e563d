"""The gated half of an MLP, y = act(x W_gate) * (x W_up): declarations and public function; imports no torch.

reference.py has the definition, project.py the kernels, fused.py their launches and gradients, config.py tile sizes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..common.calls import remember_calls
from ..common.spec import Operation, portable_form, triton_form

if TYPE_CHECKING:
    from torch import Tensor

    from .config import GatedMlpConfig

_kernel = partial(
    triton_form,
    prepare="kernels.gated_mlp.reference:k_major_inputs",
    why_not="kernels.gated_mlp.config:why_not_kernels",
    state_dtypes=(),
    chunked=False,
)

_operation = partial(
    Operation,
    kernel="gated-mlp",
    arguments=("x", "w_up", "w_gate"),
    differentiable=("x", "w_up", "w_gate"),
    inputs="kernels.gated_mlp.reference:make_inputs",
    sizes=("batch", "seq_len", "d_model", "d_ff"),
    counts="analysis.counts.gated_mlp:passed",
)

GATED_MLP = _operation(
    name="gated_mlp",
    label="gated MLP",
    summary="both up projections of a gated MLP and the gating (SwiGLU)",
    recurrent="kernels.gated_mlp.reference:definition",
    parallel="kernels.gated_mlp.reference:joint",
    call="kernels.gated_mlp:gated_mlp",
    formulations=("fused", "fused_save", "cublas_activation", "gemms_activation", "eager"),
    implementations=(
        _kernel(
            name="fused",
            formulation="fused",
            default_config="kernels.gated_mlp.config:case_config:fused",
            summary="one kernel; the backward pass projects again",
        ),
        _kernel(
            name="fused_save",
            formulation="fused_save",
            formulation_in={"fw": "fused"},
            default_config="kernels.gated_mlp.config:case_config:fused_save",
            summary="as fused, but training keeps the pre-activations",
        ),
        portable_form(
            name="torch",
            formulation="eager",
            state_dtypes=(),
            summary="two matrix products, gated in place where nothing is differentiated",
            chunked=False,
        ),
    ),
)

PROJECTIONS = _operation(
    name="projections",
    label="products alone",
    summary="the two products of a gated MLP without activation and gating: x W_up and x W_gate, [2, M, F]",
    recurrent="kernels.gated_mlp.reference:projections",
    call="kernels.gated_mlp.fused:products",
    formulations=("gemms",),
    implementations=(
        _kernel(
            name="gemms",
            modes=("fw",),
            default_config="kernels.gated_mlp.config:case_config:fused",
            summary="the kernel of the gated MLP, which writes the projections alone",
        ),
    ),
)

OPERATIONS = {operation.name: operation for operation in (GATED_MLP, PROJECTIONS)}


@remember_calls
def gated_mlp(
    x: Tensor,
    w_up: Tensor,
    w_gate: Tensor,
    *,
    impl: str = "fused",
    activation: str = "silu",
    config: GatedMlpConfig | None = None,
) -> Tensor:
    """Compute the gated half of an MLP, both projections and the gating.

        y = act(x W_gate) * (x W_up)

    Args:
        x: [M, D]; float32, float16 or bfloat16. D and F are multiples of 8. Kernels that load by descriptors take any
            rows that are a multiple of 8 apart, and copy others.
        w_up, w_gate: [D, F] in x's dtype, either both K-major, which is what ``linear.weight.T`` of a torch.nn.Linear
            is (they may be views of one tensor), or both contiguous, which is slower.
        impl: "fused", one kernel that writes y alone, so that the backward pass projects again; "fused_save", which
            also keeps two pre-activations [M, F] for a backward pass; "torch", for any device, D and F, and float64.
        activation: silu, gelu (exact), gelu_tanh, relu or sigmoid.
        config: launches of the kernels; chosen for the device and the sizes when None.

    Returns:
        y [M, F] in x's dtype; differentiable once (torch: any number of times). Weights' gradients have their layout.
        docs/kernels/gated-mlp.md says what float16 must hold besides.

    Raises:
        ValueError: on an argument that ``impl`` does not take; the message names it, what was expected and what came.

    Source: Shazeer, GLU Variants Improve Transformer (2020), equations 5 and 6.
    """
    GATED_MLP.implementation(impl)
    if impl == "torch":
        from ..common.arguments import without_autocast
        from .reference import portable
        from .validate import check_projections

        check_projections(x, w_up, w_gate)
        if config is not None:
            raise ValueError(f"config must be None for impl torch, got {config}")
        return without_autocast(portable, x, x, w_up, w_gate, activation=activation)
    from .fused import fused

    return fused(x, w_up, w_gate, save=impl == "fused_save", activation=activation, config=config)
