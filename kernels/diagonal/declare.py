"""What the engine offers every diagonal recurrence, and where it can run. Data only: no torch, no triton."""

from __future__ import annotations

from collections.abc import Mapping

from ..spec import Implementation
from .config import CHANNEL_MULTIPLE, MIN_CHUNK

EVERYWHERE = ("cpu", "cuda")
ALL_DTYPES = ("fp64", "fp32", "fp16", "bf16")


def diagonal_implementations(op: str, one_pass: str) -> tuple[Implementation, ...]:
    """Return the implementations of operation ``op``, whose single-pass kernel is called ``one_pass``."""
    return (
        Implementation(
            name=one_pass,
            call=f"kernels.{op}.{one_pass}:{one_pass}",
            supports="kernels.diagonal.declare:supports_kernels",
            summary="one pass over memory: time split over programs that look back for the state before theirs",
            modes=("fw", "fwbw", "bw", "step"),
            chunked=False,
            default_config=f"kernels.diagonal.config:{op}_config",
            requires=("triton",),
            step_call=f"kernels.{op}.{one_pass}:step",
        ),
        Implementation(
            name="chunked",
            formulation="chunked",
            own_chunk=MIN_CHUNK,
            call=f"kernels.{op}.{one_pass}:chunked",
            supports="kernels.diagonal.declare:supports_chunked",
            summary="reduce, then scan: chunks in parallel, their states merged, inputs read twice",
            default_config="kernels.diagonal.config:chunked_config",
            requires=("triton",),
            preferred_chunk="kernels.diagonal.config:preferred_chunk",
        ),
        Implementation(
            name="naive",
            call=f"kernels.{op}.{one_pass}:naive",
            supports="kernels.diagonal.declare:supports_kernels",
            summary="one program walks all of time for a block of channels",
            chunked=False,
            default_config="kernels.diagonal.config:naive_config",
            requires=("triton",),
        ),
        Implementation(
            name="torch",
            call=f"kernels.{op}.chunkwise:chunkwise",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            summary="portable chunkwise form, any chunk length",
        ),
        Implementation(
            name="associative",
            call=f"kernels.{op}.reference:parallel",
            devices=EVERYWHERE,
            dtypes=ALL_DTYPES,
            chunked=False,
            summary="associative scan over whole tensors, log2 of the sequence length passes",
        ),
    )


def supports_kernels(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the Triton kernels cannot run these sizes, or None."""
    if sizes["channels"] % CHANNEL_MULTIPLE:
        return f"channels must be a multiple of {CHANNEL_MULTIPLE}, got {sizes['channels']}"
    return None


def supports_chunked(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why reduce-then-scan cannot run these sizes, or None."""
    chunk_size = sizes.get("chunk_size")
    if chunk_size is not None and (chunk_size < 16 or chunk_size & (chunk_size - 1)):
        return f"chunk_size must be a power of two >= 16, got {chunk_size}"
    return supports_kernels(sizes, dtype, state_dtype)
