"""Triton's autotuners in workers: configurations compile in parallel, and none is chosen while processes share the GPU.

An autotuner compiles one configuration after the other, which takes packages with hundreds of them minutes. Here all
configurations of a key (the arguments for which a choice is made) are compiled in threads first, since compilers
release the interpreter's lock, and only then timed, one at a time as ever. While cases are merely compiled ahead, many
processes share the GPU: a choice made there would be a bad one, and packages that keep choices on disk (fla does) would
go on to use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from ..analysis.accelerators import cpu

MAX_THREADS = 16


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
