"""The delta rule: linear attention whose state forgets what it held for a key before it takes the key's new value.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

Declarations, data only. Where to begin:

    operations.py   the public functions delta_net, gated_delta_net and kda, and what runs an implementation
    reference.py    the definition, one step at a time, and inputs
    chunkwise.py    plain torch, chunk by chunk, by the WY form of a product of such factors
    step.py         the decoding step in Triton

The operations differ in g alone: 0, a scalar a head (Gated DeltaNet), or a vector a head (Kimi Delta Attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.sizes import bad_head_dim
from ..common.spec import Operation, portable_form, triton_form

PACKED = ("torch", "parallel", "recurrent")
"""Values of ``impl`` that take packed documents."""

CHUNK = 64
"""The chunk length of ``torch`` where a call names none, as of every package's kernels."""

MAX_STEP_HEAD_DIM = 256
"""The largest head dim of the decoding step, whose programs hold whole columns of a state."""


def why_not_step(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the decoding step's kernel cannot run these sizes, or None."""
    return bad_head_dim(sizes, MAX_STEP_HEAD_DIM)


def preferred_chunk(sizes: Mapping[str, int], formulation: str) -> int:
    """Return the chunk length that ``torch`` chooses itself."""
    return CHUNK


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
