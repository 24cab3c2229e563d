"""The gated half of an MLP, y = act(x W_gate) * (x W_up): declaration, data only."""

from __future__ import annotations

from functools import partial

from ..spec import Implementation, Operation

_kernel = partial(
    Implementation,
    supports="kernels.gated_mlp.config:supports_kernels",
    state_dtypes=(),
    chunked=False,
    requires=("triton",),
)
_on_interleaved_weights = partial(
    _kernel,
    prepare="kernels.gated_mlp.reference:interleave_inputs",
    restore="kernels.gated_mlp.reference:take_gradients_apart",
)

OPERATION = Operation(
    name="gated_mlp",
    kernel="gated-mlp",
    label="gated MLP",
    summary="both up projections of a gated MLP and the gating (SwiGLU)",
    arguments=("x", "w_up", "w_gate"),
    differentiable=("x", "w_up", "w_gate"),
    inputs="kernels.gated_mlp.reference:make_inputs",
    recurrent="kernels.gated_mlp.reference:gated_mlp",
    parallel="kernels.gated_mlp.reference:joint",
    sizes=("batch", "seq_len", "d_model", "d_ff"),
    implementations=(
        _on_interleaved_weights(
            name="fused",
            formulation="fused",
            call="kernels.gated_mlp.fused:fused",
            default_config="kernels.gated_mlp.config:interleaved_config",
            summary="one kernel on interleaved weights; the backward pass projects again",
        ),
        _on_interleaved_weights(
            name="fused_save",
            formulation="fused_save",
            formulation_in={"fw": "fused"},
            call="kernels.gated_mlp.fused:fused_save",
            default_config="kernels.gated_mlp.config:saving_config",
            summary="as fused, but training keeps the pre-activations",
        ),
        _kernel(
            name="fused_pair",
            formulation="fused",
            call="kernels.gated_mlp.fused:fused_pair",
            prepare="kernels.gated_mlp.reference:k_major_inputs",
            default_config="kernels.gated_mlp.config:pair_config",
            summary="as fused, on the two weights apart, as torch.nn.Linear holds them",
        ),
        Implementation(
            name="torch",
            formulation="eager",
            call="kernels.gated_mlp.reference:portable",
            devices=("cpu", "cuda"),
            dtypes=("fp64", "fp32", "fp16", "bf16"),
            state_dtypes=(),
            summary="two matrix products, gated in place where nothing is differentiated",
            chunked=False,
        ),
    ),
)
