"""Triton's autotuners in workers: configurations compile in parallel, none is chosen while processes share the GPU, and
a package that tunes itself is represented by the best of several choices.

An autotuner compiles one configuration after the other, which takes packages with hundreds of them minutes. Here all
configurations of a key (the arguments for which a choice is made) are compiled in threads first, since compilers
release the interpreter's lock, and only then timed, one at a time as ever. While cases are merely compiled ahead, many
processes share the GPU: a choice made there would be a bad one, and packages that keep choices on disk (fla does) would
go on to use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

from ...analysis.accelerators import cpu
from ...analysis.check.statistics import median
from .clock import Call, Clock, Sampling, measure

AnyCall = TypeVar("AnyCall", bound=Call)

MAX_THREADS = 16
TUNINGS = 3
CONTENDERS = 4
"""Configurations of a kernel among which a further tuning chooses: the fastest of the tuning before."""
TUNING_MS = {"warmup": 5, "rep": 20}
ROUNDS = 9


def compile_in_parallel(threads: int | None = None) -> None:
    """Make every Triton autotuner of this process compile its configurations in ``threads`` threads, by default one a
    core, before it times them; a Triton that has no asynchronous compilation is left as it is."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    count = min(MAX_THREADS, cpu.available_cores()) if threads is None else threads
    prune, bench = Autotuner.prune_configs, Autotuner._bench
    if count < 2 or hasattr(prune, "notes"):
        return

    def note_pruned(self: Any, kwargs: Mapping[str, Any]) -> Sequence[Any]:
        configs = prune(self, kwargs)
        # A configuration whose hook prepares something before a launch is left out: compiling here runs no hooks.
        self.uncompiled = [config for config in configs if config.pre_hook is None]
        return configs

    def compile_and_bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        # Only when the first one is to be timed: if the choice is found on disk, none needs to be compiled.
        if len(waiting := self.__dict__.pop("uncompiled", ())) > 1:
            with ThreadPoolExecutor(count) as pool, AsyncCompileMode(pool, ignore_errors=True):
                for each in waiting:
                    # One that does not compile fails again when it is timed, where the autotuner handles it.
                    with contextlib.suppress(Exception):
                        self.fn.run(*args, **{**meta, "warmup": True}, **each.all_kwargs())
        return bench(self, *args, config=config, **meta)

    note_pruned.notes = True  # type: ignore[attr-defined]
    Autotuner.prune_configs, Autotuner._bench = note_pruned, compile_and_bench


@contextlib.contextmanager
def untimed() -> Iterator[None]:
    """In the block, autotuners run every configuration once and take the first that works, and keep nothing on disk."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    replaced: dict[str, Any] = {"do_bench": property(lambda _: _run_once)}
    if hasattr(Autotuner, "check_disk_cache"):
        replaced["check_disk_cache"] = _no_disk_cache
    with mock.patch.multiple(Autotuner, **replaced):
        yield


def _run_once(call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
    call()
    return [0.0] * len(quantiles)


def _no_disk_cache(self: Any, key: Any, configs: Sequence[Any], benchmark: Callable[[], Any]) -> bool:
    benchmark()
    return False


@dataclass(frozen=True, slots=True)
class Tuning:
    """The configurations that the autotuners of a call keep, in the order of the autotuners."""

    tuners: Sequence[Any]
    kept: Sequence[Mapping[Any, Any]]

    def install(self) -> None:
        """Make the autotuners take these."""
        for tuner, kept in zip(self.tuners, self.kept, strict=True):
            tuner.cache = dict(kept)

    def before(self, call: AnyCall) -> AnyCall:
        """Return the call with this choice, whatever the autotuners choose for others meanwhile."""

        def prepare() -> Any:
            self.install()
            return call.prepare()

        return dataclasses.replace(call, prepare=prepare)


def settle(call: Call, clock: Clock) -> tuple[Tuning, str] | None:
    """Return the best of several choices that the autotuners of a call make, and what it is in words.

    An autotuner times each of its kernels alone, once, at the sizes it meets first, so two runs of a package can differ
    by a fifth. Here the autotuners that the call runs choose :data:`TUNINGS` times, after the first time among the
    :data:`CONTENDERS` best, and the call is timed under each choice, in turn.

    Args:
        call: was called before, so that its autotuners have chosen.

    Returns:
        None where the call runs no autotuner that has a choice.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return None
    with _noted(Autotuner) as tuners:
        call.call(call.prepare())
    if not tuners:
        return None
    choices = [first := Tuning(tuners, [tuner.cache for tuner in tuners])]
    used = first.kept
    # A further tuning may find no memory where the first did: then what was chosen so far competes.
    with contextlib.suppress(Exception):
        for _ in range(1, TUNINGS):
            used = _choose_again(Autotuner, first, call)
            merged = Tuning(tuners, [{**old, **new} for old, new in zip(first.kept, used, strict=True)])
            choices += [merged] if merged not in choices else []
    first.install()
    best = first
    if len(choices) > 1:
        timings = measure(clock, [each.before(call) for each in choices], Sampling(in_turn=True, rounds=ROUNDS))
        fastest = min(
            range(len(choices)), key=lambda n: median(timings[n].samples_ms) if not timings[n].failure else math.inf
        )
        best = choices[fastest]
        best.install()
    words = []
    for tuner, kept, keys in zip(tuners, best.kept, used, strict=True):
        for arguments in (kept[key].all_kwargs().items() for key in keys):
            said = ", ".join(f"{name}={value}" for name, value in arguments if value is not None)
            words.append(f"{tuner.base_fn.__name__}: {said}")
    return best, "; ".join(dict.fromkeys(words))


@contextlib.contextmanager
def _noted(autotuner: Any) -> Iterator[list[Any]]:
    """Give a list to which the autotuners that run in the block and have a choice are added, each once."""
    run, tuners = autotuner.run, list[Any]()

    def run_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) > 1 and all(self is not other for other in tuners):
            tuners.append(self)
        return run(self, *args, **kwargs)

    with mock.patch.object(autotuner, "run", run_and_note):
        yield tuners


def _choose_again(autotuner: Any, first: Tuning, call: Call) -> list[dict[Any, Any]]:
    """Return what each autotuner chooses for a call when it knows only how fast its configurations were before.

    Triton keeps how fast they were for the last key alone: an autotuner that has several chooses among all.
    """
    from triton.testing import do_bench

    def bench(kernel: Callable[[], Any], quantiles: Sequence[float]) -> Any:
        return do_bench(kernel, quantiles=quantiles, **TUNING_MS)

    tuners = first.tuners
    before = [(tuner.configs, getattr(tuner, "configs_timings", {})) for tuner in tuners]
    for tuner, kept, (configs, timings) in zip(tuners, first.kept, before, strict=True):
        fastest = sorted(timings, key=timings.__getitem__)[:CONTENDERS] if len(kept) == 1 else []
        tuner.cache, tuner.configs = {}, fastest or configs
    replaced: dict[str, Any] = {"do_bench": property(lambda _: bench)}
    if hasattr(autotuner, "check_disk_cache"):
        replaced["check_disk_cache"] = _no_disk_cache
    try:
        with mock.patch.multiple(autotuner, **replaced):
            call.call(call.prepare())
        return [tuner.cache for tuner in tuners]
    finally:
        for tuner, (configs, timings) in zip(tuners, before, strict=True):
            tuner.configs, tuner.configs_timings = configs, timings
