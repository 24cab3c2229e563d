"""Runtime model: how long a counted problem takes on an accelerator at full rate (TFLA paper, eq. 114 to 119).

    tau_FLOPs = FLOPs / alpha        tau_bytes = bytes / beta
    upper = tau_FLOPs + tau_bytes    (no overlap; the paper's model of TFLA, eq. 118)
    lower = max(tau_FLOPs, tau_bytes)    (full overlap: the roofline)

alpha is the dense matrix rate of the dtype, as in the paper; for work without matrix products (a recurrent step, a
selective scan) it is the vector rate. Neither bounds a kernel strictly: vector work runs far below alpha, and bytes
that hit the L2 cost nothing. The strict bounds are :func:`suspect_reason`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..accelerators.known import Accelerator
from ..counts import Count
from ..counts.problem import PASSES

LAUNCH_MS = 0.0035
"""Time of a launch beside its work: what rows of kernels of one launch (RG-LRU's step; H200) come to where the work
goes to nothing. With some work they take 5 to 8 microseconds (RG-LRU's fused, WKV's scan)."""

_LAUNCHES: Mapping[str, tuple[int, int]] = {
    "walk": (2, 6),
    "whole_state": (2, 4),
    **dict.fromkeys(("chunkwise", "sweep", "chunked"), (3, 4)),
    **dict.fromkeys(("lightning1", "lightning2"), (1, 3)),
}
"""Formulation -> launches of a forward and of a backward pass, one elsewhere: the fewest that hardware counters saw;
those of whole_state are what it launches for one chunk (kernels/scalar_decay/plan.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeModel:
    """Modelled times of one problem on one accelerator, in ms.

    Attributes:
        flops_ms: tau_FLOPs, every FLOP at the matrix rate (vector rate where there are no matrix products).
        bytes_ms: tau_bytes, the bytes that the formulation moves.
    """

    flops_ms: float
    bytes_ms: float

    @property
    def upper_ms(self) -> float:
        """Computation and traffic one after the other (eq. 115, 118)."""
        return self.flops_ms + self.bytes_ms

    @property
    def lower_ms(self) -> float:
        """Computation and traffic fully overlapped (eq. 116): the roofline's time."""
        return max(self.flops_ms, self.bytes_ms)

    @property
    def bound(self) -> str:
        """Which of the two takes longer: compute or memory."""
        return "compute" if self.flops_ms > self.bytes_ms else "memory"


def flop_rate(count: Count, accelerator: Accelerator, dtype: str) -> float:
    """Return alpha in FLOP/s: the matrix rate for ``dtype`` (ValueError where it is not known), or the vector rate for
    work without matrix products."""
    return accelerator.matrix_rate(dtype) if count.tensor_flops else accelerator.vector_flops


def runtime_model(count: Count, accelerator: Accelerator, dtype: str) -> RuntimeModel:
    """Return the modelled times of ``count`` on ``accelerator``; ValueError if it has no rate for ``dtype``."""
    return RuntimeModel(
        flops_ms=1e3 * count.flops / flop_rate(count, accelerator, dtype),
        bytes_ms=1e3 * count.bytes / accelerator.bandwidth_bytes_s,
    )


def launches_ms(count: Count, accelerator: Accelerator) -> float:
    """Return the time of the launches that a call makes at least, however small the problem; a CPU has none."""
    return launches_of(count.formulation, count.mode, accelerator)


def launches_of(formulation: str, mode: str, accelerator: Accelerator) -> float:
    """Return :func:`launches_ms` of what need not be counted for it."""
    forward, backward = (0, 0) if accelerator.key == "cpu" else _LAUNCHES.get(formulation, (1, 1))
    return LAUNCH_MS * sum(backward if name == "backward" else forward for name in PASSES[mode])


def model_time_ms(count: Count, accelerator: Accelerator, dtype: str) -> float:
    """Return the time that rows store as ``model_time_ms``: the upper one, and at least that of the launches.

    It is the paper's model of TFLA (eq. 118): its kernels write all states, then start the parallel part, so that
    computation and traffic hardly overlap.
    """
    return max(runtime_model(count, accelerator, dtype).upper_ms, launches_ms(count, accelerator))


def roofline_fraction(count: Count, accelerator: Accelerator, dtype: str, time_ms: float) -> float | None:
    """Return the achieved share of the roofline min(beta I, alpha), which is the lower time over ``time_ms``.

    None where the accelerator has no rate for ``dtype``. Above 1 means that the formulation's bytes did not all reach
    the device memory (they hit the L2), or an error: :func:`suspect_reason` tells.
    """
    if accelerator.peak_flops(dtype) is None and count.tensor_flops:
        return None
    return runtime_model(count, accelerator, dtype).lower_ms / time_ms


def cached(roof_fraction: float | None) -> str:
    """Return what to say of a share of the roof above 1: bytes came from a cache, the roof is that of the memory."""
    return "(cache)" if roof_fraction is not None and roof_fraction > 1 else ""


def _compulsory_ms(count: Count, accelerator: Accelerator) -> float:
    """Return the time of the compulsory bytes; 0 where they are no more than twice the last cache, which may have held
    them."""
    moved = count.compulsory_bytes if count.compulsory_bytes > 2 * accelerator.l2_bytes else 0.0
    return 1e3 * (moved / accelerator.bandwidth_bytes_s)


def floor_ms(count: Count, accelerator: Accelerator, dtype: str) -> float:
    """Return the time below which no kernel gets: its launches, executed matrix products at full rate, or compulsory
    bytes.

    A CPU has no limits: its rates are what one library reached.
    """
    if accelerator.key == "cpu":
        return 0.0
    rate = accelerator.peak_flops(dtype)
    multiplied = count.executed_tensor_flops or count.tensor_flops
    products_ms = 1e3 * (multiplied / rate) if rate else 0.0
    return max(_compulsory_ms(count, accelerator), products_ms, launches_ms(count, accelerator))


SUSPECT_MARGIN = 1.02
"""A row is suspect beyond a limit by more than this: clocks boost and timers round by a percent or two."""

SUSPECT_CPU_MARGIN = 2.0
"""The same on a CPU, whose rates are what one library reached: another may be faster, but hardly twice as fast."""


def suspect_reason(count: Count, accelerator: Accelerator, dtype: str, time_ms: float) -> str | None:
    """Return why ``time_ms`` cannot be true on ``accelerator``, or None.

    Two limits hold for any code that computes the operation: matrix products no faster than the matrix rate (measured
    where it was, else specified), and no faster than the compulsory bytes at the specified bandwidth. A CPU is asked
    for the first alone, and a row that is far beyond it says that its roofs were measured beside other load.
    """
    measured = accelerator.measured.matrix_flops.get(dtype) if accelerator.measured else None
    peak, roof = (measured, "measured") if measured else (accelerator.peak_flops(dtype), "specified")
    rate = count.tensor_flops / (time_ms * 1e-3)
    if accelerator.key == "cpu":
        if peak is None or rate <= SUSPECT_CPU_MARGIN * peak:
            return None
        anew = "run `lrbench calibrate` when the machine is idle"
        return f"{rate / peak:.1f} times the roof of {dtype} products, which was measured on a busy machine: {anew}"
    if peak is not None and rate > SUSPECT_MARGIN * peak:
        return f"{rate / 1e12:.0f} TFLOP/s is above the {roof} roof of {peak / 1e12:.0f} TFLOP/s for {dtype}"
    compulsory_ms = _compulsory_ms(count, accelerator)
    if time_ms * SUSPECT_MARGIN < compulsory_ms:
        return (
            f"{time_ms:.4g} ms is less than the {compulsory_ms:.4g} ms that the compulsory "
            f"{count.compulsory_bytes / 1e9:.3g} GB take at {accelerator.bandwidth_bytes_s / 1e12:.3g} TB/s"
        )
    return None
