"""Compiling ahead: which cases fill the compilers' caches on disk, called once in several processes, untimed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import kernels
from ...analysis.accelerators import cpu
from ...kernels.baselines.spec import Baseline
from ...kernels.common.spec import Implementation
from ...results.schema import Case
from ...results.select import grouped
from ..environment import Environment, version_of
from ..plan import PlannedCase
from ..request import SweepOptions
from ..worker.protocol import RunLimits
from .executors import Group, LocalExecutor, Queue, alone, as_taken

MAX_COMPILE_JOBS = 16
BATCH = 8
"""Cases of a batch for each process. With fewer, processes compile the same kernels at the same time; with more, the
next rows come later, and a sweep that is stopped has compiled more than it measured."""

MAX_COMPILE_ELEMENTS = 2**26
"""A case longer than the shortest is called only to compile if its widest tensor has no more elements than this: many
processes share the GPU."""


def default_jobs(device_kind: str, how: SweepOptions) -> int:
    """Return how many processes compile ahead, if not as asked as many as there are cores, at most 16 a GPU; none on a
    CPU. Nothing is timed while they are at work."""
    most = min(MAX_COMPILE_JOBS * how.devices, cpu.available_cores()) if device_kind == "cuda" else 0
    return most if how.jobs is None else how.jobs


def compile_cases(planned: Sequence[PlannedCase], capability: str | None = None) -> list[PlannedCase]:
    """Return the cases worth compiling ahead; what needs no compiler is left out.

    Our kernels take batch and sequence length at run time, but launches differ between one tile of time and many, and
    between few sequences and many. So of the cases that share compiled code these are called:

    - the shortest, and the longest that is not too large to be called only to compile. The longest come after all of
      the shortest, with which they share most kernels. Where all longer ones are too large, one is cut short.
    - one for each further choice of launches, where an implementation says what it chooses (``default_config``); where
      that case is too large, the shortest with its launches.

    Args:
        capability: compute capability such as "9.0" for which launches are chosen; None does not ask for choices.
    """

    def length(item: PlannedCase) -> int:
        return item.case.seq_len or 0

    alike = grouped(sorted(planned, key=length), _key)
    alike.pop(None, None)
    shortest, longest, others = [], [], []
    for first, *more in alike.values():
        longer = [item for item in more if length(item) > length(first)]
        called = [item for item in longer if _may_be_called(item, first)]
        cut = filter(None, (_cut(item, longer_than=length(first)) for item in longer))
        last = max(called, key=length) if called else next(cut, first)
        shortest.append(first)
        longest += [last] if last is not first else []
        choices = {_choice(first, capability), _choice(last, capability)}
        for item in more:
            if (choice := _choice(item, capability)) not in choices:
                choices.add(choice)
                others.append(item if _may_be_called(item, first) else replace(first, config_of=item.case))
    return [*shortest, *longest, *others]


def _key(item: PlannedCase) -> tuple[Any, ...] | None:
    """Return what is the same for cases of the same compiled code; None where nothing is compiled."""
    case, target = item.case, item.target
    # Models in several processes would fill the GPU.
    if case.mode == "train":
        return None
    if isinstance(target, Implementation):
        if "triton" not in target.requires:
            return None
        sizes = tuple((name, size) for name, size in case.sizes.items() if name not in ("batch", "seq_len"))
    elif case.provider == "torch" or case.context is not None:
        # Decoding steps of attention compile nothing either, and caches in several processes would fill the GPU.
        return None
    else:
        sizes = tuple(case.sizes.items())
    # A forward-backward pass compiles the forward kernels too.
    mode = "fwbw" if case.mode == "bw" else case.mode
    return item.triton, case.op, case.impl, case.dtype, case.state_dtype, mode, sizes


def _kind(item: PlannedCase) -> Case:
    """Return a case without its lengths and the dtype of its states."""
    return replace(item.case, batch=None, seq_len=None, chunk_size=None, state_dtype=None)


def _choice(item: PlannedCase, capability: str | None) -> Any:
    """Return the launches that an implementation chooses for a case, None where it does not say."""
    if capability is None or not isinstance(item.target, Implementation):
        return None
    major, minor = capability.split(".")
    return item.target.launches(item.case.mode, item.case.dtype, item.case.sizes, (int(major), int(minor)))


def _may_be_called(item: PlannedCase, shortest: PlannedCase) -> bool:
    """Return whether a case is small enough to be called only to compile, or no larger than the shortest."""
    return widest(item) <= max(MAX_COMPILE_ELEMENTS, widest(shortest))


def _cut(item: PlannedCase, *, longer_than: int) -> PlannedCase | None:
    """Return a case with as many of its steps as may be called only to compile, None if these are too few."""
    seq_len = (item.case.seq_len or 0) * MAX_COMPILE_ELEMENTS // widest(item)
    return replace(item, case=replace(item.case, seq_len=seq_len)) if seq_len > longer_than else None


def widest(item: PlannedCase) -> int:
    """Return how many elements the widest tensor of a case's tokens has."""
    sizes = item.case.sizes
    heads = sizes.get("num_heads", 1) * max(sizes.get("head_dim_v", 1), sizes.get("head_dim_qk", 1))
    width = max(heads, sizes.get("channels", 1), sizes.get("d_ff", 1))
    return sizes.get("batch", 1) * sizes.get("seq_len", 1) * width


def unit_of(item: PlannedCase) -> Hashable:
    """Return what the cases that one process compiles have in common: their Triton, and no more unless they autotune.

    An autotuner compiles the same configurations for cases that differ in their lengths or in whether they take
    gradients, and compiles them side by side within a process.
    """
    return item.triton, replace(_kind(item), mode="") if item.autotunes else item.case


def uncompiled(planned: Sequence[PlannedCase], environment: Environment) -> list[PlannedCase]:
    """Return the cases worth compiling ahead, but for those that were compiled before into Triton's cache on disk."""
    return [i for i in compile_cases(planned, environment.capability) if not _mark(i, environment).exists()]


def _mark(item: PlannedCase, environment: Environment) -> Path:
    """Return the file that marks a case as compiled. It lies in Triton's cache, so it goes when that is cleared."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    of_package = version_of(item.target.distribution) if isinstance(item.target, Baseline) else _source_digest()
    environment = item.within(environment)
    versions = environment.capability, environment.triton_version, environment.torch_version, of_package
    digest = hashlib.sha256(repr((versions, item.case, item.config_of)).encode()).hexdigest()[:32]
    return Path(os.environ.get("TRITON_CACHE_DIR") or home) / "lrbench" / digest


@functools.cache
def _source_digest() -> str:
    """Return a digest of the source of our kernels."""
    sources = sorted(Path(kernels.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def compile_ahead(
    cases: Sequence[PlannedCase], executor: LocalExecutor, environment: Environment, timeout_s: float
) -> None:
    """Call cases once in an executor's processes, so that the timed pass finds the compilers' caches on disk filled.

    A case that worked leaves a mark, so that later sweeps leave it out. One for which the others left too little memory
    is called again after them. One that failed fails again, and gets its row, when it is measured. Autotuners choose in
    the timed pass (:func:`.autotuning.untimed`), because processes that share the GPU would make them choose badly.
    """
    # Cases that differ in lengths alone share most kernels: side by side, each process would compile them all.
    rounds = itertools.zip_longest(*grouped(cases, lambda item: (item.triton, _kind(item))).values())
    cases = [item for each in rounds for item in each if item is not None]
    limits = RunLimits(timeout_s=timeout_s, action="compile", device_kind="cuda")
    while cases:
        too_large = []
        queue = Queue(alone(cases), lambda group: (group[0].triton, unit_of(group[0])))
        for (item,), (reply,) in executor.run(queue, limits):
            if reply["status"] == "oom":
                too_large.append(item)
            # Where a mark cannot be written, the next sweep compiles again.
            with contextlib.suppress(OSError):
                if reply["status"] == "ok":
                    mark = _mark(item, environment)
                    mark.parent.mkdir(parents=True, exist_ok=True)
                    mark.touch()
        cases = too_large if len(too_large) < len(cases) else []


class Compiler(contextlib.AbstractContextManager["Compiler"]):
    """Compiles what a sweep is about to measure in batches, while nothing is timed.

    The first case is compiled by the worker that measures it. The processes here start after it, since importing torch
    beside it would delay the first row.

    Args:
        jobs: processes that compile, on ``devices`` GPUs.
        tell: told of each batch how many cases it has, and how many are left for later ones.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        environment: Environment,
        jobs: int,
        devices: int,
        timeout_s: float,
        tell: Callable[[int, int], None],
    ) -> None:
        self._environment, self._timeout_s, self._tell = environment, timeout_s, tell
        order = {key: n for n, key in enumerate(dict.fromkeys(map(_key, as_taken(groups))))}
        self._cases = sorted(uncompiled([*itertools.chain(*groups)], environment), key=lambda x: order[_key(x)])
        self._ends = {_key(item): n for n, item in enumerate(self._cases, start=1)}
        self._done, self._batch, self._first = 0, BATCH * jobs, True
        processes = min(jobs // devices, -(-len(self._cases) // devices))
        self._executor = LocalExecutor(devices=devices, workers_per_device=max(1, processes))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._executor.__exit__(kind, *rest)

    def compile_for(self, item: PlannedCase) -> float:
        """Compile what a case needs, and what others will need with it, unless that is done or it is the first one.

        Returns:
            The seconds that it took.
        """
        first, self._first = self._first, False
        end = 0 if first else self._ends.get(_key(item), 0)
        if end <= self._done:
            return 0.0
        # An autotuner's configurations may take minutes: they wait until what autotunes is measured.
        further = itertools.takewhile(
            lambda other: not other.autotunes or (other.case.op, other.case.impl) == (item.case.op, item.case.impl),
            self._cases[end : self._done + self._batch],
        )
        return self._compile(end + len(list(further)))

    def compile_all(self) -> float:
        """Compile what all cases need, and return the seconds that it took."""
        return self._compile(len(self._cases))

    def _compile(self, end: int) -> float:
        began = time.monotonic()
        if end > self._done:
            batch = self._cases[self._done : end]
            self._tell(len(batch), len(self._cases) - end)
            compile_ahead(batch, self._executor, self._environment, self._timeout_s)
            self._done += len(batch)
            if self._done == len(self._cases):
                # Their contexts hold memory of the GPU.
                self._executor.__exit__(None)
        return time.monotonic() - began
