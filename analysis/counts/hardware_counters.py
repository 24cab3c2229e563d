"""Hardware counters of a case beside its count, and why the two differ where they do.

A counter is compared with what the kernels run (``executed_tensor_flops``, ``executed_bytes``, which include
recomputation and padding) where the counts know it, else with the formulation's count. Counts have all traffic, the
counter only what reaches the device memory: it misses what the last cache serves, and sees twice what the cache could
not hold until the next program asked for it. So a working set that fits the cache explains fewer bytes, never more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from . import Count

FLOPS_TOLERANCE = 0.01
BYTES_TOLERANCE = 0.15
LARGE = 10
"""A working set this many times as large as the last cache does not stay in it."""


def compare(count: Count, measured: Mapping[str, Any]) -> tuple[float | None, float | None, list[str]]:
    """Compare counters with a count.

    Args:
        measured: columns of :class:`...results.schema.ProfileRow`: dtype, launches, last_cache_bytes, and the sums over
            the kernels of one call, None where the device has no such counter.

    Returns:
        measured over expected tensor FLOPs and bytes of the device memory, None where either is missing or nothing was
        expected; and a sentence on each that is outside the tolerances.
    """
    flops = count.tensor_flops if count.executed_tensor_flops is None else count.executed_tensor_flops
    moved = count.bytes if count.executed_bytes is None else count.executed_bytes
    read, written = measured["dram_read_bytes"], measured["dram_write_bytes"]
    dram: Any = None if None in (read, written) else read + written
    flops_ratio, bytes_ratio = _ratio(measured["measured_tensor_flops"], flops), _ratio(dram, moved)
    explanation = []
    if flops_ratio is not None and abs(flops_ratio - 1) > FLOPS_TOLERANCE:
        why = "; ".join(_why_flops(count, measured, flops_ratio))
        explanation.append(f"tensor FLOPs are {flops_ratio:.3f} of the counted ones: {why}")
    if bytes_ratio is not None and abs(bytes_ratio - 1) > BYTES_TOLERANCE:
        why = "; ".join(_why_bytes(count, measured, dram, moved)) or "not explained by what is counted"
        explanation.append(f"bytes are {bytes_ratio:.2f} of the counted ones: {why}")
    return flops_ratio, bytes_ratio, explanation


def _ratio(measured: float | None, expected: float) -> float | None:
    return None if measured is None or not expected else measured / expected


def _why_flops(count: Count, measured: Mapping[str, Any], ratio: float) -> Iterator[str]:
    flops = measured["measured_tensor_flops"]
    if not flops:
        yield f"no {measured['dtype']} product ran on the matrix units"
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
            f"{flops / (count.tensor_flops + again):.3f}"
        )
    if ratio > 1:
        yield "tiles reach beyond the head dims, the sequence or the causal square, or products are repeated"
    else:
        yield "part of the products ran on the vector units, or tiles without work were left out"


def _why_bytes(count: Count, measured: Mapping[str, Any], dram: float, moved: float) -> Iterator[str]:
    asked, last_cache_bytes = measured["l2_bytes"], measured["last_cache_bytes"]
    if dram < moved:
        if last_cache_bytes and count.compulsory_bytes < LARGE * last_cache_bytes:
            yield (
                f"the working set of {_size(count.compulsory_bytes)} is "
                f"{count.compulsory_bytes / last_cache_bytes:.1f} times the last cache, below {LARGE}, so part of the "
                f"traffic stays in it"
            )
        if last_cache_bytes:
            yield (
                f"what a kernel leaves unwritten in the cache at its end is not counted, up to "
                f"{_size(last_cache_bytes)} for each of {measured['launches']}"
            )
        if asked is not None:
            yield f"the last cache was asked for {_size(asked)}: what it served is no traffic"
        return
    yield from _rereads(count, dram - moved)
    if count.executed_bytes is None and count.recomputed_bytes:
        yield (
            f"the backward pass reads {_size(count.recomputed_bytes)} again to recompute, with which the ratio is "
            f"{dram / (count.bytes + count.recomputed_bytes):.2f}"
        )
    if asked is not None:
        issued = moved + (count.reread_bytes or 0.0)
        merged = f" of the {_size(issued)} that programs read and write: requests that meet on the way are merged"
        yield (
            f"the last cache was asked for {_size(asked)}{merged if count.reread_bytes and asked < issued else ''}, "
            f"and {dram / asked:.0%} of the requests went on to the memory"
        )


def _rereads(count: Count, beyond: float) -> Iterator[str]:
    """Yield what is known of loads that other programs do as well, ``beyond`` being the bytes above those counted.

    A library's programs read again too; where it multiplies as well, nobody can say whose loads missed the cache.
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
