"""GPU limits and sizes of caches; imports neither torch nor triton, like the configurations that use it."""

from __future__ import annotations

from collections.abc import Mapping

MIN_PROGRAMS = 256
"""With fewer programs a launch leaves much of an H200 (132 SMs, two programs each) idle."""

REMEMBERED = 1024
"""Most entries of each cache of problems, choices and checks, which the host looks up faster than it makes them."""

INTERPRETED_DTYPES = ("fp32", "fp16")
"""Dtypes of inputs that Triton's interpreter computes with: of bf16 it multiplies and adds the bits as integers
(findings/triton_interpreter_bf16.sh). States it can hold in bf16, which it only converts, though by truncation."""

MIN_HEAD_DIM, HEAD_DIM_MULTIPLE = 16, 8
"""Head dims are at least the smallest side of a tensor core's product, and multiples of 16 bytes in half precision."""


def bad_head_dim(sizes: Mapping[str, int], largest: int) -> str | None:
    """Return why kernels over heads of at most ``largest`` cannot run head_dim_qk and head_dim_v, or None."""
    for name in ("head_dim_qk", "head_dim_v"):
        dim = sizes[name]
        if not MIN_HEAD_DIM <= dim <= largest or dim % HEAD_DIM_MULTIPLE:
            return f"{name} must be a multiple of {HEAD_DIM_MULTIPLE} from {MIN_HEAD_DIM} to {largest}, got {dim}"
    return None


def bad_chunk_size(sizes: Mapping[str, int]) -> str | None:
    """Return why kernels cannot run the chunk_size among the sizes, or None."""
    chunk_size = sizes.get("chunk_size")
    if chunk_size is not None and (chunk_size < 16 or chunk_size & (chunk_size - 1)):
        return f"chunk_size must be a power of two >= 16, got {chunk_size}"
    return None


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


def padded(dim: int) -> int:
    """Return the width of a tile that holds a whole dim: the next power of two, at least 16, which products take."""
    return max(16, next_power_of_two(dim))


def cdiv(n: int, d: int) -> int:
    """Return n / d, rounded up. (``triton.cdiv``, made for kernels too, takes the host microseconds.)"""
    return -(-n // d)
