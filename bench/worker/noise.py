"""What else the machine did while a case was sampled: reasons not to trust its time.

Load may lengthen all samples of a case alike, which no interval of the samples shows. So this module looks at

* how long threads of this process were ready to run and waited for a core (``/proc/self/task/*/schedstat``, to the
  nanosecond); where the kernel does not tell, the load average of the last minute;
* on a CPU a yardstick: the time of the same short computation on all of torch's threads, before the samples and after
  every few. Only it shows that a hypervisor, or another virtual machine on the same hyperthreads, slows the cores, or
  that clocks are lowered. The row keeps it, so that rows measured at different speeds can be told apart
  (:func:`.select.with_slowness`);
* on a GPU, by NVML, other processes that computed on it, and clocks lowered for heat or for the power supply. Clocks
  lowered by the power cap are not named: most of an H200's large products run at it;
* the samples of the last third beside those of the first.

The limits are such that of two quiet sweeps on two cores (``tests/analysis/check/test_noise.py``) one case of 32 is
marked, and of three sweeps beside two busy loops all 48.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ...analysis.accelerators.cpu import Waiting, waited_s
from ...analysis.check.statistics import MIN_SAMPLES, median
from ...results.schema import DeviceState
from ...results.select import MAX_SLOWDOWN

MAX_DRIFT = 1.25
"""Factor between the medians of the first and the last third of the samples."""

YARDSTICK_ELEMENTS = 32768
"""Elements per thread; torch does not split a computation into smaller parts."""

RECENT_S = 1.0
"""NVML is asked for the use of the GPU over at least this long: it samples that several times a second."""

POWER_CAP = "software power cap"


class Watch:
    """Watches the machine from when it is made until :meth:`noise` is called; ``gpu``: torch computes on a GPU."""

    def __init__(self, *, gpu: bool) -> None:
        import torch

        self.gpu, self._yardsticks_ms = gpu, list[float]()
        self._numbers = torch.linspace(0, 4, 1 if gpu else YARDSTICK_ELEMENTS * torch.get_num_threads())
        self._result = torch.empty_like(self._numbers)
        self.look()
        self._begin, self._waiting = time.time(), Waiting()

    def look(self) -> None:
        """Take the yardstick, between samples; not on a GPU."""
        if not self.gpu:
            # The first may have to wake threads.
            self._yardsticks_ms.append(min(self._compute_ms() for _ in range(2)))

    def _compute_ms(self) -> float:
        from torch.special import i0e

        start = time.perf_counter()
        # Its scalar arithmetic keeps a core's units busy: beside another hyperthread it takes half as long again.
        i0e(self._numbers, out=self._result)
        return (time.perf_counter() - start) * 1e3

    @property
    def yardstick_ms(self) -> float | None:
        """The median of the yardstick's times; None on a GPU."""
        return median(self._yardsticks_ms) if self._yardsticks_ms else None

    def noise(self, samples_ms: Sequence[float], state: DeviceState) -> str | None:
        """Return what was noticed, each as "kind: numbers", joined by "; "; None where nothing was."""
        slower = 1.0 if self.gpu else median(self._yardsticks_ms) / min(self._yardsticks_ms)
        slow = f"slow CPU: {slower:.2f}x slower than at other times" if slower > MAX_SLOWDOWN else None
        device = self._others_on_gpu() if self.gpu else slow
        lowered = ", ".join(each for each in (state.throttled or "").split(", ") if each not in ("", POWER_CAP))
        clocks = lowered and f"lowered clocks: {lowered}"
        return "; ".join(filter(None, (self._load(), device, clocks, _drifted(samples_ms)))) or None

    def _load(self) -> str | None:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        machine = f"load {load:.1f} on {cores} core{'s' * (cores > 1)}"
        if waited_s() is None:
            return f"busy CPU: {machine}" if load > cores + 0.5 else None
        busy = self._waiting.busy(alone=False)
        return busy and f"{busy}, {machine}"

    def _others_on_gpu(self) -> str | None:
        import pynvml

        from ..environment import nvml_handle

        since = int(1e6 * min(self._begin, time.time() - RECENT_S))
        try:
            handle = nvml_handle()
            computing = {each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            used = pynvml.nvmlDeviceGetProcessUtilization(handle, since)
        except pynvml.NVMLError:
            return None
        # A process that only holds memory does no harm. In a container without the host's process ids we do not find
        # our own, and so cannot tell others'. Our siblings only compile, and never while a case is timed.
        others = {each.pid for each in used if each.smUtil} & computing - {os.getpid()}
        count = sum(_parent_of(pid) != os.getppid() for pid in others) if os.getpid() in computing else 0
        return f"busy GPU: {count} other process{'es' * (count > 1)} on it" if count else None


def commonest(noises: Sequence[str]) -> str:
    """Return the first reason of the most frequent kind in rows' ``noise``."""
    reasons = [reason for noise in noises for reason in noise.split("; ")]
    ((kind, _),) = Counter(reason.partition(":")[0] for reason in reasons).most_common(1)
    return next(reason for reason in reasons if reason.startswith(kind))


def _parent_of(pid: int) -> int | None:
    """Return the id of a process's parent; None where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _drifted(samples_ms: Sequence[float]) -> str | None:
    third = len(samples_ms) // 3 if len(samples_ms) >= MIN_SAMPLES else len(samples_ms)
    first, last = median(samples_ms[:third]), median(samples_ms[-third:])
    drifted = max(first, last) > MAX_DRIFT * min(first, last) > 0
    return f"drift: the last samples take {last / first:.2g}x the first" if drifted else None
