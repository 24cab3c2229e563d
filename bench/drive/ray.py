"""Cases on a Ray cluster: an actor on each GPU that is used; all take from one queue. Needs the extra ``cluster``."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...results.lock import temporary_folder
from .. import note
from ..environment import Environment
from ..plan import Identity
from ..worker.protocol import Reply, RunLimits, not_measured
from .executors import Group, Outcomes, Queue, queue_key, run_group
from .workers import ReplaceableWorker, Started, probe_environment

THREADS = "OMP_NUM_THREADS"
ADDRESS = "RAY_ADDRESS"
ANSWER_S = 10.0
"""Seconds in which a cluster must answer at its address."""

WAIT_S = 30.0
"""Seconds after which the user is told that no node is free; a free one needs a few to import torch."""

POLL_S = 1.0
LOST_S = 10.0
"""Seconds without a node that could run a case after which there is no more to wait for."""

MAX_LOSSES = 3
"""Lost workers after which a case is not tried again and gets a row."""


class RayExecutor(contextlib.AbstractContextManager["RayExecutor"]):
    """Runs cases on the cluster of RAY_ADDRESS, else on the one that runs on this machine, else on one that it starts.

    Each case runs on one GPU, or where no node has one, on the nodes' CPUs. A case whose worker or node is lost runs
    elsewhere; where no node is left, the rest is not run. The nodes need the same lrbench and packages as the driver; a
    row has the environment of its node.

    Args:
        devices: how many GPUs, or nodes without one, take cases.

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
        self._idle: list[Any] = []
        self._connected = False

    def __exit__(self, *_: object) -> None:
        for node in self._idle:
            self._ray.kill(node)
        if self._connected:
            # Ray ends a process whose cluster has been gone for a minute.
            self._ray.shutdown()

    def environment(self) -> Environment:
        """Return the environment of one of the nodes.

        Raises:
            ValueError: RAY_ADDRESS names a cluster that does not answer.
            RuntimeError: lrbench does not run on the node.
        """
        self._connect()
        self._idle = [self._start_node()]
        try:
            future = self._idle[0].environment.remote()
            if not self._ray.wait([future], timeout=WAIT_S)[0]:
                note("waiting for a node of the cluster that is free")
            return Environment(**self._ray.get(future))
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(f"cannot find out what a node of the cluster is: {_one_line(error)}") from None

    def run(self, queued: Queue, limits: RunLimits, started: Started = lambda _: None) -> Outcomes:
        """See :meth:`.LocalExecutor.run`."""
        ray = self._ray
        self._connect()
        losses: Counter[Identity] = Counter()
        seen_s = time.monotonic()
        running: dict[Any, tuple[Any, Group]] = {}
        nodes, self._idle = self._idle, []
        nodes += [self._start_node() for _ in range(self.devices - len(nodes))]
        idle: list[tuple[Any, Group | None]] = [(node, None) for node in nodes]
        try:
            while True:
                waiting, idle = idle, []
                for node, before in waiting:
                    group = queued.take(before)
                    if group is None:
                        idle.append((node, before))
                        continue
                    for item in group:
                        started(item)
                    running[node.run.remote(group, limits)] = node, group
                if not running:
                    return
                ready, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
                if ready or any(each["Alive"] and each["Resources"].get("CPU") for each in ray.nodes()):
                    seen_s = time.monotonic()
                elif time.monotonic() - seen_s > LOST_S:
                    note("no node of the cluster is left to run a case")
                    return
                for future in ready:
                    node, group = running.pop(future)
                    try:
                        replies = ray.get(future, timeout=0)
                    except (ray.exceptions.RayError, TimeoutError) as error:
                        ray.kill(node)
                        idle.append((self._start_node(), None))
                        # Not where Ray could not start it: no case has caused that.
                        losses[group[0].identity] += "never ran" not in str(error)
                        if isinstance(error, ray.exceptions.RayTaskError) or losses[group[0].identity] == MAX_LOSSES:
                            yield group, [not_measured("crash", _one_line(error)) for _ in group]
                        else:
                            queued.put_back(group)
                    else:
                        idle.append((node, group))
                        yield group, replies
        finally:
            for node, _ in [*idle, *running.values()]:
                ray.kill(node)

    def _start_node(self) -> Any:
        """Return an actor that runs cases, on a GPU if the cluster has one."""
        gpus = 1 if self._ray.cluster_resources().get("GPU") else 0
        actor = self._ray.remote(num_gpus=gpus, num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(_Node)
        return actor.remote(os.environ.get(THREADS))

    def _connect(self) -> None:
        """Connect to a cluster, or start one."""
        if self._ray.is_initialized():
            return
        address = os.environ.get(ADDRESS)
        if address and not _answers(address):
            raise ValueError(f"{ADDRESS} must be a cluster that answers, got {address}, which does not")
        if not address:
            # Ray keeps the address of the last cluster that was started here, also when it is gone.
            last = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
            address = last.read_text().strip() if last.exists() else "local"
            if not _answers(address):
                note(f"starting a cluster here: the one at {address}, named in {last}, does not answer")
                address = "local"
        options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        self._connected = True


def _answers(address: str) -> bool:
    """Return whether something listens at a cluster's address; True where it is no "host:port": Ray checks it."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return True
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=ANSWER_S):
        return True
    return False


def _one_line(error: BaseException) -> str:
    """Return the last line of Ray's message, which names the error that a task raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


class _Node:
    """What runs on a node: one case after the other, each package's in a process of their own."""

    def __init__(self, threads: str | None) -> None:
        # Ray limits an actor's threads to its share of the CPUs; rows are measured with as many as the driver has.
        os.environ.pop(THREADS, None)
        if threads is not None:
            os.environ[THREADS] = threads
        self._session = ReplaceableWorker()
        self._process: Hashable = None
        self._environment = probe_environment(self._session)
        self._references = tempfile.mkdtemp(dir=temporary_folder(), prefix="references-")

    def environment(self) -> dict[str, Any]:
        """Return the node's environment."""
        return asdict(self._environment)

    def run(self, group: Group, limits: RunLimits) -> list[Reply]:
        """Return the outcomes of a group's cases, with the node's environment."""
        process, _ = queue_key(group)
        if self._process not in (None, process):
            self._session.close()
        self._process = process
        replies = run_group(self._session, group, replace(limits, shared=self._references))
        return [{**reply, "columns": {**self._environment.columns(), **reply["columns"]}} for reply in replies]
