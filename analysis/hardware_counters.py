"""What hardware counters saw of a case beside what was counted, and why the two differ where they do.

Held against the counter is what the kernels run (``executed_tensor_flops``, ``executed_bytes``: recomputation and
padding included) where the counts know it, else what the formulation counts. The counts mean all traffic of the
formulation; the counter sees what reaches the device memory, so bytes that the last cache serves are missing there.
"""

from __future__ import annotations

from dataclasses import dataclass

from .counts import Count

PROFILE_VERSION = 1

FLOPS_TOLERANCE = 0.01
BYTES_TOLERANCE = 0.15
LARGE = 10
"""A working set of so many last caches cannot be kept there."""


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
        expected_tensor_flops, expected_bytes: what the counter was held against.
        tensor_flops_ratio, bytes_ratio: measured / expected; None where either is missing or nothing was expected.
        explanation: sentences; empty where all is within the tolerances.
    """

    expected_tensor_flops: float
    expected_bytes: float
    tensor_flops_ratio: float | None
    bytes_ratio: float | None
    explanation: tuple[str, ...]


def compare(count: Count, counters: Counters, *, dtype: str, last_cache_bytes: int | None) -> Comparison:
    """Hold counters against a count.

    Args:
        dtype: of the inputs.
        last_cache_bytes: size of the device's last cache, None where it is not known.
    """
    executed = count.executed_tensor_flops
    flops = count.tensor_flops if executed is None else executed
    moved = count.bytes if count.executed_bytes is None else count.executed_bytes
    flops_ratio, bytes_ratio = _ratio(counters.tensor_flops, flops), _ratio(counters.dram_bytes, moved)
    reasons: list[str] = []
    if flops_ratio is not None and abs(flops_ratio - 1) > FLOPS_TOLERANCE:
        reasons += _why_flops(count, counters, flops_ratio, dtype)
    if bytes_ratio is not None and abs(bytes_ratio - 1) > BYTES_TOLERANCE:
        reasons += _why_bytes(count, counters, moved, bytes_ratio, last_cache_bytes)
    return Comparison(
        expected_tensor_flops=flops,
        expected_bytes=moved,
        tensor_flops_ratio=flops_ratio,
        bytes_ratio=bytes_ratio,
        explanation=tuple(reasons),
    )


def _ratio(measured: float | None, expected: float) -> float | None:
    return None if measured is None or not expected else measured / expected


def _why_flops(count: Count, counters: Counters, ratio: float, dtype: str) -> list[str]:
    measured = counters.tensor_flops or 0.0
    start = f"tensor FLOPs are {ratio:.3f} of the counted ones"
    if not measured:
        return [f"{start}: no {dtype} product ran on the matrix units"]
    if count.executed_tensor_flops is not None:
        return [
            f"{start}: the kernels of this case run in other tiles or passes than those counted, which are the ones "
            f"selected on compute capability 9.0 (lrbench count --formulation {count.formulation} --tile)"
        ]
    reasons = []
    if count.recomputed_tensor_flops:
        whole = count.tensor_flops + count.recomputed_tensor_flops
        reasons.append(
            f"the backward pass recomputes {_giga(count.recomputed_tensor_flops)} GFLOP on top, with which the ratio "
            f"is {measured / whole:.3f}"
        )
    if ratio > 1:
        reasons.append("tiles reach beyond the head dims, the sequence or the causal square, or products are repeated")
    else:
        reasons.append("part of the products ran on the vector units, or tiles without work were left out")
    return [f"{start}: {'; '.join(reasons)}"]


def _why_bytes(count: Count, counters: Counters, moved: float, ratio: float, last_cache_bytes: int | None) -> list[str]:
    measured = counters.dram_bytes or 0.0
    reasons = []
    if last_cache_bytes and count.compulsory_bytes < LARGE * last_cache_bytes:
        reasons.append(
            f"the working set of {_mega(count.compulsory_bytes)} MB is {count.compulsory_bytes / last_cache_bytes:.1f} "
            f"times the last cache, below {LARGE}, so part of the traffic stays in it"
        )
    if ratio < 1:
        if last_cache_bytes:
            reasons.append(
                f"what a kernel leaves unwritten in the cache at its end is not counted, up to "
                f"{_mega(last_cache_bytes)} MB for each of {counters.launches}"
            )
        if counters.l2_bytes is not None:
            reasons.append(f"the last cache was asked for {_mega(counters.l2_bytes)} MB: what it served is no traffic")
    else:
        if count.reread_bytes:
            missed = (measured - moved) / count.reread_bytes
            reasons.append(
                f"programs read {_mega(count.reread_bytes)} MB again that others have read, and {min(missed, 1):.0%} "
                f"of that missed the cache"
            )
        if count.executed_bytes is None and count.recomputed_bytes:
            whole = count.bytes + count.recomputed_bytes
            reasons.append(
                f"the backward pass reads {_mega(count.recomputed_bytes)} MB again to recompute, with which the ratio "
                f"is {measured / whole:.2f}"
            )
        if counters.l2_bytes is not None:
            reasons.append(
                f"the last cache was asked for {_mega(counters.l2_bytes)} MB, so {measured / counters.l2_bytes:.0%} of "
                f"the requests went on to the memory"
            )
    said = "; ".join(reasons) or "not explained by what is counted"
    return [f"bytes are {ratio:.2f} of the counted ones: {said}"]


def _giga(value: float) -> str:
    return f"{value / 1e9:.4g}"


def _mega(value: float) -> str:
    return f"{value / 1e6:.4g}"
