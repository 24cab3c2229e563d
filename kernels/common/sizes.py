"""GPU limits and sizes of caches; imports neither torch nor triton, like the configurations that use it."""

from __future__ import annotations

SHARED_MEMORY_BYTES = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
}
"""Shared memory a block may use, by compute capability."""

MIN_PROGRAMS = 256
"""With fewer programs a launch leaves much of an H200 (132 SMs, two programs each) idle."""

REMEMBERED = 1024
"""Problems, choices and checks kept for calls to come; making one takes the host longer than looking it up."""


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, d: int) -> int:
    """Return n / d, rounded up; ``triton.cdiv`` takes microseconds, since kernels can call it too."""
    return -(-n // d)
