"""Hardware counters of a case beside its count, and why the two differ where they do.

A counter is compared with what the kernels run (``executed_tensor_flops``, ``executed_bytes``, which include
recomputation and padding) where the counts know it, else with the formulation's count. Counts have all traffic, the
counter only what reaches the device memory: it misses what the last cache serves, and sees twice what the cache could
not hold until the next program asked for it. So a working set that fits the cache explains fewer bytes, never more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from . import Count

FLOPS_TOLERANCE = 0.01
BYTES_TOLERANCE = 0.15
LARGE = 10
"""A working set this many times as large as the last cache does not stay in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Sums over the kernels of one call; None where the device has no such counter.

    Attributes:
        tensor_flops: operations of the matrix units, a multiply-accumulate being 2.
        dram_read_bytes, dram_write_bytes: device memory.
        l2_bytes: what the last cache was asked for.
        launches: number of kernels.
    """

    tensor_flops: float | None
    dram_read_bytes: float | None
    dram_write_bytes: float | None
    l2_bytes: float | None
    launches: int

    @property
    def dram_bytes(self) -> float | None:
        """Bytes read from and written to device memory."""
        if self.dram_read_bytes is None or self.dram_write_bytes is None:
            return None
        return self.dram_read_bytes + self.dram_write_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Measured over counted, and the reasons where that is outside the tolerances.

    Attributes:
        tensor_flops_ratio, bytes_ratio: measured / expected; None where either is missing or nothing was expected.
        explanation: sentences; empty where all is within the tolerances.
    """

    tensor_flops_ratio: float | None
    bytes_ratio: float | None
    explanation: tuple[str, ...]


def compare(count: Count, counters: Counters, *, dtype: str, last_cache_bytes: int | None) -> Comparison:
    """Compare counters with a count.

    Args:
        dtype: of the inputs.
        last_cache_bytes: size of the device's last cache, None where it is not known.
    """
    executed = count.executed_tensor_flops
    flops = count.tensor_flops if executed is None else executed
    moved = count.bytes if count.executed_bytes is None else count.executed_bytes
    flops_ratio, bytes_ratio = _ratio(counters.tensor_flops, flops), _ratio(counters.dram_bytes, moved)
    explanation = []
    if flops_ratio is not None and abs(flops_ratio - 1) > FLOPS_TOLERANCE:
        why = "; ".join(_why_flops(count, counters, flops_ratio, dtype))
        explanation.append(f"tensor FLOPs are {flops_ratio:.3f} of the counted ones: {why}")
    if bytes_ratio is not None and abs(bytes_ratio - 1) > BYTES_TOLERANCE:
        why = "; ".join(_why_bytes(count, counters, moved, bytes_ratio, last_cache_bytes))
        why = why or "not explained by what is counted"
        explanation.append(f"bytes are {bytes_ratio:.2f} of the counted ones: {why}")
    return Comparison(tensor_flops_ratio=flops_ratio, bytes_ratio=bytes_ratio, explanation=tuple(explanation))


def _ratio(measured: float | None, expected: float) -> float | None:
    return None if measured is None or not expected else measured / expected


def _why_flops(count: Count, counters: Counters, ratio: float, dtype: str) -> Iterator[str]:
    measured = counters.tensor_flops
    if not measured:
        yield f"no {dtype} product ran on the matrix units"
        return
    if count.executed_tensor_flops is not None:
        yield (
            "the kernels of this case run in other tiles or passes than those counted, which are the ones selected on "
            "compute capability 9.0"
        )
        if count.library_tensor_flops:
            yield f"{_library(count)} are counted without the padding of their tiles"
        return
    if again := count.recomputed_tensor_flops:
        yield (
            f"the backward pass recomputes {again / 1e9:.4g} GFLOP on top, with which the ratio is "
            f"{measured / (count.tensor_flops + again):.3f}"
        )
    if ratio > 1:
        yield "tiles reach beyond the head dims, the sequence or the causal square, or products are repeated"
    else:
        yield "part of the products ran on the vector units, or tiles without work were left out"


def _why_bytes(
    count: Count, counters: Counters, moved: float, ratio: float, last_cache_bytes: int | None
) -> Iterator[str]:
    measured, asked = counters.dram_bytes or 0.0, counters.l2_bytes
    if ratio < 1:
        if last_cache_bytes and count.compulsory_bytes < LARGE * last_cache_bytes:
            yield (
                f"the working set of {_size(count.compulsory_bytes)} is "
                f"{count.compulsory_bytes / last_cache_bytes:.1f} times the last cache, below {LARGE}, so part of the "
                f"traffic stays in it"
            )
        if last_cache_bytes:
            yield (
                f"what a kernel leaves unwritten in the cache at its end is not counted, up to "
                f"{_size(last_cache_bytes)} for each of {counters.launches}"
            )
        if asked is not None:
            yield f"the last cache was asked for {_size(asked)}: what it served is no traffic"
        return
    yield from _rereads(count, measured - moved)
    if count.executed_bytes is None and count.recomputed_bytes:
        yield (
            f"the backward pass reads {_size(count.recomputed_bytes)} again to recompute, with which the ratio is "
            f"{measured / (count.bytes + count.recomputed_bytes):.2f}"
        )
    if asked is not None:
        issued = moved + (count.reread_bytes or 0.0)
        merged = f" of the {_size(issued)} that programs read and write: requests that meet on the way are merged"
        yield (
            f"the last cache was asked for {_size(asked)}{merged if count.reread_bytes and asked < issued else ''}, "
            f"and {measured / asked:.0%} of the requests went on to the memory"
        )


def _rereads(count: Count, beyond: float) -> Iterator[str]:
    """Yield what is known of loads that other programs do as well, ``beyond`` being the bytes above those counted.

    Where a library multiplies too, whose programs also read again, nothing tells apart whose loads missed the cache.
    """
    again = f"programs read {_size(count.reread_bytes)} again that others have read" if count.reread_bytes else ""
    if count.library_tensor_flops:
        library = f"{_library(count)} read again too, in tiles that are not counted"
        yield f"{again}{again and ', and '}{library}: {_size(beyond)} in all missed the cache"
    elif count.reread_bytes:
        yield f"{again}, and {min(beyond / count.reread_bytes, 1):.0%} of that missed the cache"


def _library(count: Count) -> str:
    share = (count.library_tensor_flops or 0.0) / (count.executed_tensor_flops or 1.0)
    return f"a library's products ({share:.0%} of the tensor FLOPs)"


def _size(value: float) -> str:
    """Return so many bytes in words."""
    return f"{value / 1e9:.4g} GB" if value >= 1e9 else f"{value / 1e6:.4g} MB"
