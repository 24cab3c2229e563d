"""Who runs the cases: worker processes on this machine's devices, or on a Ray cluster's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..plan import PlannedCase

EXECUTORS = ("local", "ray")

Reply = dict[str, Any]
"""A case's outcome: "status", "reason" and "columns"."""

Started = Callable[[PlannedCase], None]
"""Called when a case starts, so that the progress display can name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What every case of a sweep is given.

    Attributes:
        timeout_s: seconds after which a case's worker is killed.
        budget_s: seconds of timing after which sampling stops.
        action: "run", "verify" to check without timing, "compile" to only fill the compilers' caches.
        shared: folder in which workers share references, or None.
        device_kind: "cuda" or "cpu", what the cases are to run on; None is whatever the worker finds.
    """

    timeout_s: float
    budget_s: float
    action: str = "run"
    shared: str | None = None
    device_kind: str | None = None


class Executor(Protocol):
    """Runs groups of cases, each group in a worker process of its own, and yields outcomes as they come."""

    def run(
        self, groups: Sequence[Sequence[PlannedCase]], limits: Limits, started: Started
    ) -> Generator[tuple[PlannedCase, Reply], None, None]:
        """Yield every case with its outcome; closing the iterator stops the workers."""
        ...


def get_executor(name: str, *, devices: int = 1) -> Executor:
    """Return the executor called ``name`` over ``devices`` GPUs; ValueError lists the known ones."""
    if name == "local":
        from .local import LocalExecutor

        return LocalExecutor(devices=devices)
    if name == "ray":
        from .ray import RayExecutor

        return RayExecutor(devices=devices)
    raise ValueError(f"executor must be one of {', '.join(EXECUTORS)}, got {name!r}")
