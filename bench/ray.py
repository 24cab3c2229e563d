"""Worker processes on a Ray cluster: implementations are spread over its GPUs. Needs the extra ``cluster``."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import Any

from .plan import PlannedCase
from .workers import Limits, Reply, Started, probe_environment, run_group

THREADS = "OMP_NUM_THREADS"


class RayExecutor:
    """Runs each group as a Ray task on one GPU (on one node's CPUs where the cluster has no GPU).

    The nodes need the same lrbench and packages as the driver: rows carry the driver's environment, so a task on a
    device of another name ends with status error instead of a row about the wrong device.

    Args:
        devices: the most tasks at once.

    Raises:
        ValueError: ray is not installed; the message has the pip command.
    """

    def __init__(self, *, devices: int = 1) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError("the ray executor needs ray: pip install 'lrbench[cluster]'") from None
        self._ray = ray
        self.devices = devices

    def run(
        self, groups: Sequence[Sequence[PlannedCase]], limits: Limits, started: Started
    ) -> Generator[tuple[PlannedCase, Reply], None, None]:
        """See :class:`.Executor`. Cases are reported when they end; Ray does not tell when they start."""
        ray = self._ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        device, threads = probe_environment().device_name, os.environ.get(THREADS)
        task = ray.remote(num_gpus=gpus, num_cpus=1, max_retries=0)(_run_remotely)
        waiting = list(groups)
        streams: dict[Any, Any] = {}
        try:
            while waiting or streams:
                while waiting and len(streams) < self.devices:
                    stream = task.options(num_returns="streaming").remote(waiting.pop(0), limits, device, threads)
                    streams[stream] = stream
                ready, _ = ray.wait(list(streams), num_returns=1)
                for stream in ready:
                    try:
                        outcome = ray.get(next(stream))
                    except StopIteration:
                        del streams[stream]
                    else:
                        started(outcome[0])
                        yield outcome
        finally:
            for stream in streams:
                ray.cancel(stream, force=True)


def _run_remotely(
    group: Sequence[PlannedCase], limits: Limits, device: str, threads: str | None
) -> Generator[tuple[PlannedCase, Reply], None, None]:
    # Ray limits a task to the threads of its share of a node's CPUs; a row is about as many as the driver has.
    os.environ.pop(THREADS, None)
    if threads is not None:
        os.environ[THREADS] = threads
    here = probe_environment().device_name
    if here != device:
        reason = f"the task ran on {here}, the sweep is about {device}"
        for item in group:
            yield item, {"status": "error", "reason": reason, "columns": {}}
        return
    yield from run_group(group, limits, lambda _: None)
