"""What the engine offers every scalar-decay operation, and where it can run. Data only: no torch, no triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..common.sizes import bad_chunk_size, bad_head_dim
from ..common.spec import Implementation, Operation, portable_form, triton_form
from .config import WHOLE_STATE_BLOCK_T, why_no_whole_state

FUSED_CHUNK = "fused_chunk"
"""The implementation that takes a chunk's tiles in order, with the state on chip."""

WHOLE_STATE = "whole_state"
"""The same for Hopper, with the whole state of a head in one program."""

HOPPER, GLUON_TRITON = "9.0", ">=3.6,<3.10"
"""Compute capability and Triton of whole_state: an H200 passed its laws with 3.6, 3.8 and 3.9."""

OPTIONS = {"parallel": "gate_dtype", "recurrent": "round_operands"}
"""Implementation -> the one keyword that it alone takes."""

SCHEMES = {WHOLE_STATE: "whole_state", FUSED_CHUNK: "walk", "xl_chunk": "sweep", "limit_chunk": "sweep"}
"""Implementation in Triton -> its scheme."""

CHUNKED = (*SCHEMES, "torch")
IMPLEMENTATIONS = (*CHUNKED, *OPTIONS, "step")
PACKED = (*CHUNKED, *OPTIONS)
PACKED_STATES = (WHOLE_STATE, FUSED_CHUNK, "torch", *OPTIONS)
"""CHUNKED: the implementations that take ``chunk_size``; PACKED: ``cu_seqlens``; PACKED_STATES: ``cu_seqlens`` and
states. IMPLEMENTATIONS: all of ``impl``."""

MAX_HEAD_DIM = 1024
"""The largest that is tested; the kernels, which take head dims in blocks of columns, have no limit of their own."""

FORMULATIONS = ("chunkwise", "walk", "whole_state", "sweep", "fused", "parallel", "recurrent")

LIMIT_CHUNK_SIZES = (16, 32, 64, 128)

_kernel = partial(
    triton_form,
    why_not="kernels.scalar_decay.declare:why_not_engine",
    state_dtypes=("fp32", "bf16"),
    documents=True,
)
_portable = partial(portable_form, full_square=True, documents=True)

WHOLE_STATE_FORM = _kernel(
    name=WHOLE_STATE,
    formulation="whole_state",
    dtypes=("fp16", "bf16"),
    why_not="kernels.scalar_decay.declare:why_not_whole_state_sizes",
    summary="fused_chunk for Hopper: a program holds the whole state of a head, in Gluon",
    architectures=(HOPPER,),
    triton_versions=GLUON_TRITON,
    fallback=FUSED_CHUNK,
)
"""The declaration of whole_state but for the chunk length that it prefers, which differs between operations."""


def scalar_decay_operation(
    name: str,
    *,
    kernel: str = "tfla",
    implementations: tuple[Implementation, ...] = (),
    normalised: bool = False,
    formulations: tuple[str, ...] = (),
    **declared: Any,
) -> Operation:
    """Declare the operation whose function ``name`` and ``make_inputs`` are in the module ``kernels/<name>``.

    Args:
        name: of the operation.
        kernel: the family.
        implementations: its own, beside the engine's.
        formulations: its own, beside the engine's.
        normalised: whether outputs are divided by denominators, which the choice of a chunk length accounts for.
        declared: other attributes of :class:`Operation`.
    """
    function = f"kernels.{name}:{name}"
    return Operation(
        name=name,
        kernel=kernel,
        call=function,
        inputs=f"kernels.{name}:make_inputs",
        recurrent=f"{function}:recurrent",
        parallel=f"{function}:parallel",
        formulations=(*FORMULATIONS, *formulations),
        implementations=(*implementations, *_implementations(normalised)),
        **declared,
    )


def _implementations(normalised: bool) -> tuple[Implementation, ...]:
    preferred = "kernels.scalar_decay.choice:preferred_chunk" + (":normalised" if normalised else "")
    return (
        _kernel(
            name=FUSED_CHUNK,
            formulation="walk",
            formulation_in={"fp32": "sweep"},
            summary="chunks in parallel, the tiles of each in order with its state in registers",
            modes=("fw", "fwbw", "bw", "step"),
            preferred_chunk=preferred,
        ),
        replace(WHOLE_STATE_FORM, preferred_chunk=preferred),
        _kernel(
            name="xl_chunk",
            formulation="sweep",
            summary="TFLA as published: chunks in parallel, and the tiles inside a chunk in parallel",
        ),
        _kernel(
            name="limit_chunk",
            formulation="sweep",
            why_not="kernels.scalar_decay.declare:why_not_limit_chunk",
            summary="one-level sequence parallelism: a chunk is a tile",
        ),
        _portable(
            name="torch",
            modes=("fw", "fwbw", "bw", "step"),
            formulation="chunkwise",
            summary="portable chunkwise form, any chunk length",
        ),
        _portable(
            name="parallel",
            formulation="parallel",
            chunked=False,
            why_not="kernels.scalar_decay.declare:why_not_parallel",
            summary="fully parallel form, quadratic in the sequence length",
        ),
    )


def why_not_engine(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the Triton engine cannot run these sizes, or None."""
    return bad_head_dim(sizes, MAX_HEAD_DIM) or bad_chunk_size(sizes)


def why_not_limit_chunk(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why limit_chunk, whose chunk is one tile, cannot run these sizes, or None."""
    chunk_size = sizes.get("chunk_size")
    if chunk_size is not None and chunk_size not in LIMIT_CHUNK_SIZES:
        return f"chunk_size must be one of {', '.join(map(str, LIMIT_CHUNK_SIZES))} for limit_chunk, got {chunk_size}"
    return why_not_engine(sizes, dtype, state_dtype)


def why_not_whole_state_sizes(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why whole_state cannot run these sizes, or None."""
    chunk = sizes.get("chunk_size") or WHOLE_STATE_BLOCK_T
    return why_not_engine(sizes, dtype, state_dtype) or why_no_whole_state(
        sizes["head_dim_qk"], sizes["head_dim_v"], chunk
    )


def why_not_parallel(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the quadratic form is refused, whose matrices would not fit in memory, or None."""
    elements = sizes["batch"] * sizes["num_heads"] * sizes["seq_len"] ** 2
    if elements > 2**31:
        return f"the parallel form needs batch * num_heads * seq_len^2 <= 2^31 matrix entries, got {elements}"
    return None
