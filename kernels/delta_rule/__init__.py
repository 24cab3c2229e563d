"""The delta rule: linear attention whose state forgets what it held for a key before it takes the key's new value.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

Declarations, data only. Where to begin:

    operations.py   the public functions delta_net, gated_delta_net and kda, and what runs an implementation
    reference.py    the definition, one step at a time, and inputs
    chunkwise.py    plain torch, chunk by chunk, by the WY form of a product of such factors
    step.py         the decoding step in Triton
    launch.py       whole_state, for Hopper: inverse.py, whole_state.py and gradients.py in order; of KDA
                    channel_chunks.py, channel_walk.py and channel_gradients.py

The operations differ in g alone: 0, a scalar a head (Gated DeltaNet), or a vector a head (Kimi Delta Attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.sizes import bad_head_dim
from ..common.spec import Operation, portable_form, triton_form
from ..scalar_decay.declare import GLUON_TRITON, HOPPER

PACKED = ("torch", "parallel", "recurrent")
"""Values of ``impl`` that take packed documents."""

CHUNK = 64
"""The chunk length of ``torch`` where a call names none, as of every package's kernels."""

MAX_STEP_HEAD_DIM = 256
"""The largest head dim of the decoding step, whose programs hold whole columns of a state."""


WHOLE_STATE = "whole_state"

MAX_KEY_DIM, MAX_VALUE_DIM = 128, 256
"""The largest head dims of whole_state: a walker has a row of the state in registers for each column of V."""

MAX_CHUNKS = 2**22
"""Most chunks of all heads in whole_state: a row of their states is a coordinate of 32 bits."""


def why_not_whole_state(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why whole_state cannot run these sizes, or None."""
    if sizes["head_dim_qk"] > MAX_KEY_DIM:
        return f"head_dim_qk must be at most {MAX_KEY_DIM} for {WHOLE_STATE}, got {sizes['head_dim_qk']}"
    return bad_head_dim(sizes, MAX_VALUE_DIM)


def why_not_step(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the decoding step's kernel cannot run these sizes, or None."""
    return bad_head_dim(sizes, MAX_STEP_HEAD_DIM)


def preferred_chunk(sizes: Mapping[str, int], formulation: str) -> int:
    """Return the chunk length that ``torch`` chooses itself."""
    return CHUNK


WHOLE_STATE_FORM = triton_form(
    name=WHOLE_STATE,
    dtypes=("fp16", "bf16"),
    chunked=False,
    formulation="fused",
    own_chunk=CHUNK,
    full_square=True,
    why_not="kernels.delta_rule:why_not_whole_state",
    architectures=(HOPPER,),
    triton_versions=GLUON_TRITON,
    fallback="torch",
    summary="chunks in order for Hopper: a program holds the whole state of a head, in Gluon",
)


def _operation(name: str, gates: tuple[str, ...], **declared: Any) -> Operation:
    function = f"kernels.delta_rule.operations:{name}"
    arguments = ("q", "k", "v", *gates)
    return Operation(
        name=name,
        kernel="delta",
        arguments=arguments,
        differentiable=arguments,
        inputs=f"kernels.delta_rule.reference:{name}_inputs",
        recurrent=f"{function}:recurrent",
        parallel=f"{function}:parallel",
        optional_sizes=("num_heads_qk",),
        call=function,
        formulations=("chunkwise", "fused", "recurrent"),
        # Qwen3-Next's and Kimi Linear's.
        head_dim=128,
        implementations=(
            WHOLE_STATE_FORM,
            portable_form(
                name="torch",
                modes=("fw", "fwbw", "bw", "step"),
                full_square=True,
                documents=True,
                preferred_chunk="kernels.delta_rule:preferred_chunk",
                summary="portable chunkwise form, any chunk length",
            ),
            triton_form(
                name="step",
                modes=("step",),
                chunked=False,
                why_not="kernels.delta_rule:why_not_step",
                summary="decoding step, the state read once and written once",
            ),
        ),
        **declared,
    )


OPERATIONS = {
    each.name: each
    for each in (
        _operation(
            "delta_net", ("beta",), label="DeltaNet", summary="linear attention by the delta rule, without a decay"
        ),
        _operation(
            "gated_delta_net",
            ("g", "beta"),
            label="Gated DeltaNet",
            summary="the delta rule with a data-dependent decay a head",
        ),
        _operation(
            "kda",
            ("g", "beta"),
            label="KDA",
            summary="Kimi Delta Attention: the delta rule with a data-dependent decay a key channel",
        ),
    )
}
