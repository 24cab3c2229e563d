"""The accelerator ``cpu``: this machine, as it was last calibrated, else measured with numpy.

What was measured is kept in the user's cache folder and never committed: a file for each processor, number of cores and
OMP_NUM_THREADS in the folder that LRBENCH_CACHE names, by default ``$XDG_CACHE_HOME/lrbench`` or ``~/.cache/lrbench``.
``lrbench calibrate`` measures anew with torch, which the portable implementations run on; a measurement with numpy
never replaces that one. What was measured beside other load is not kept: two busy loops on two cores make a matrix
product take ten times as long, since each of its threads waits for the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import time
import timeit
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...kernels.common.cache import cache_folder
from ...results.store import replacing
from .accelerator import Accelerator, Roofs

_KIB, _MIB = 1024, 1024**2

MAX_WAITING = 0.1
"""Seconds per second that threads may wait for a core."""

MAX_OTHERS = 0.25
"""Share of the cores that others may use beside a calibration: also without any waiting they slow a core whose units
they share."""


class Waiting:
    """For how long threads of this process wait for a core, and what others use, from when it is made."""

    def __init__(self) -> None:
        self._begin, self._waited, self._used_s = time.perf_counter(), waited_s(), _used_s()
        self._ran_s = time.thread_time(), time.process_time()

    def busy(self, *, alone: bool) -> str | None:
        """Return in words how long they waited if that is too long, else None.

        Args:
            alone: whether this process should have all cores, and this thread computed all the time. Then what others
                used counts too, and where the kernel does not tell how long threads waited, they did while this one did
                not run.
        """
        elapsed = max(time.perf_counter() - self._begin, 1e-9)
        waited, used_s = waited_s(), _used_s()
        this_s, all_s = time.thread_time() - self._ran_s[0], time.process_time() - self._ran_s[1]
        waiting = 1 - this_s / elapsed if alone else 0.0
        if waited is not None and self._waited is not None:
            waiting = (waited - self._waited) / elapsed
        if waiting > MAX_WAITING:
            return f"busy CPU: waited {waiting:.2f} s per s for a core"
        others = (used_s - self._used_s - all_s) / elapsed / available_cores()
        return f"busy CPU: others used {others:.0%} of the cores" if alone and others > MAX_OTHERS else None


def _used_s() -> float:
    """Return for how long this process's cores were used, by whomever, or taken by a hypervisor; 0 where it is not
    known."""
    cores = {f"cpu{n}" for n in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
        times = [[*map(int, words[1:9])] for words in lines if words and words[0] in cores]
        # The fourth and fifth are idle.
        return sum(sum(each) - sum(each[3:5]) for each in times) / os.sysconf("SC_CLK_TCK")
    return 0.0


def waited_s() -> float | None:
    """Return for how long threads of this process were ready and did not run; None where the kernel does not tell."""
    waits = []
    for path in Path("/proc/self/task").glob("*/schedstat"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            waits.append(int(path.read_text().split()[1]))
    return sum(waits) / 1e9 if waits else None


@functools.lru_cache(maxsize=1)
def local_cpu() -> Accelerator:
    """Return this machine's CPU; where nothing is remembered it is measured, about a second, and remembered if idle."""
    roofs = recall()
    if roofs is None:
        waiting = Waiting()
        measured = _measure()
        busy = waiting.busy(alone=True)
        # A calibration may have ended meanwhile, in another process.
        roofs = recall() or (dataclasses.replace(measured, source=f"{measured.source} ({busy})") if busy else measured)
        if roofs is measured:
            remember(roofs)
    return Accelerator(
        key="cpu",
        name=model_name(),
        part="this machine",
        matrix_flops=roofs.matrix_flops,
        # The same units do both.
        vector_flops=roofs.matrix_flops["fp32"],
        bandwidth_bytes_s=roofs.bandwidth_bytes_s,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        l2_bytes=cache_bytes(level=3) or 32 * _MIB,
        smem_bytes=cache_bytes(level=1) or 32 * _KIB,
        sms=available_cores(),
        source=roofs.source,
    )


def remember(roofs: Roofs) -> None:
    """Write rates measured on this CPU into the cache folder, if it can be written."""
    data: dict[str, Any] = {"machine": _machine(), "matrix_flops": dict(roofs.matrix_flops)}
    data |= {"bandwidth_bytes_s": roofs.bandwidth_bytes_s, "source": roofs.source}
    with contextlib.suppress(OSError), replacing(cache_file()) as file:
        file.write(json.dumps(data, indent=2).encode())


def recall() -> Roofs | None:
    """Return the remembered rates of this CPU, or None where there are none for this machine."""
    try:
        data = json.loads(cache_file().read_text(encoding="utf-8"))
        if data["machine"] != _machine() or "fp32" not in data["matrix_flops"]:
            return None
        return Roofs(
            matrix_flops=MappingProxyType({str(name): float(rate) for name, rate in data["matrix_flops"].items()}),
            bandwidth_bytes_s=float(data["bandwidth_bytes_s"]),
            source=str(data["source"]),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        # Whatever is wrong with the file, measuring anew mends it.
        return None


def cache_file() -> Path:
    """Return the path of the file that remembers this CPU: one for each machine, home folders being shared."""
    return cache_folder() / f"cpu-{hashlib.sha256(json.dumps(_machine()).encode()).hexdigest()[:12]}.json"


def _measure() -> Roofs:
    """Measure fp32 and fp64 matrix products and a copy out of the caches' reach, with the threads of numpy's BLAS.

    16-bit rates are missing: numpy has no such product.
    """
    import numpy as np

    rates = {}
    for dtype, size in (("fp32", 1024), ("fp64", 768)):
        operand = np.random.default_rng(0).standard_normal((size, size)).astype(f"f{4 if dtype == 'fp32' else 8}")
        out = np.empty_like(operand)
        rates[dtype] = _rate(2 * size**3, functools.partial(np.matmul, operand, operand, out=out))
    source = np.ones(16 * _MIB, dtype=np.float64)
    target = np.empty_like(source)
    copied = _rate(2 * source.nbytes, functools.partial(np.copyto, target, source))
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Roofs(
        matrix_flops=MappingProxyType(rates),
        bandwidth_bytes_s=copied,
        source=f"measured {when} with numpy: 1024^3 fp32 and 768^3 fp64 matrix product, 128 MiB copy, best of a few "
        "runs; lrbench calibrate measures it with torch",
    )


def _rate(work: int, call: Callable[[], object]) -> float:
    """Return the work over the shortest time of ten calls, to three digits; load only lengthens a call."""
    return float(f"{work / min(timeit.repeat(call, number=1, repeat=10)):.3g}")


def _machine() -> dict[str, Any]:
    """Return what remembered rates are of: the processor, its cores and the threads that were used."""
    return {"model": model_name(), "cores": available_cores(), "omp_num_threads": os.environ.get("OMP_NUM_THREADS")}


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def model_name() -> str:
    """Return the processor's model."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if match := re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE):
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def cache_bytes(level: int) -> int | None:
    """Return the size of the first core's data or unified cache of ``level`` as Linux states it, or None."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if int((index / "level").read_text()) != level or (index / "type").read_text().strip() == "Instruction":
                continue
            size = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if match:
            return int(match.group(1)) * {"": 1, "K": _KIB, "M": _MIB, "G": 1024 * _MIB}[match.group(2)]
    return None


def free_memory_bytes() -> int:
    """Return the memory that can be taken without swapping, as Linux states it, else half of all."""
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), flags=re.MULTILINE)
        if match:
            return int(match.group(1)) * _KIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
