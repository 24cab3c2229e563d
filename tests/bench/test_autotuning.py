"""Autotuners of workers: configurations compile side by side before any is timed, and none is chosen untimed."""

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", exc_type=ImportError)

import triton
from triton.runtime._async_compile import active_mode
from triton.runtime.autotuner import Autotuner, OutOfResources

from lrbench.bench.worker import autotuning
from lrbench.bench.worker.clock import Call, CpuClock
from lrbench.results.schema import DeviceState

TOO_LARGE = 64


class Kernel:
    """What an autotuner sees of a jitted function: runs, and compiles what it has not met."""

    def __init__(self, at_once: int) -> None:
        self.fn = lambda x: None
        self.barrier = threading.Barrier(at_once, timeout=20)
        self.compiled: list[int] = []
        self.ran: list[int] = []
        self.threads: set[int] = set()

    def compile(self, block: int) -> int:
        """Compile one configuration, together with as many others as the barrier wants."""
        self.barrier.wait()
        self.threads.add(threading.get_ident())
        return block

    def run(self, *args: Any, BLOCK: int, warmup: bool, **_: Any) -> None:
        if BLOCK not in self.compiled:
            mode = active_mode.get()
            if mode is None:
                self.compiled.append(self.compile(BLOCK))
            else:
                after = [self.compiled.append, str][: mode.submit.__code__.co_argcount - 3]  # 3.9 takes both
                mode.submit(BLOCK, lambda: self.compile(BLOCK), *after)
        if not warmup:
            if BLOCK == TOO_LARGE:
                raise OutOfResources(BLOCK, 1, "shared memory")
            self.ran.append(BLOCK)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave Triton as it was."""
    for name in ("prune_configs", "_bench"):
        monkeypatch.setattr(Autotuner, name, getattr(Autotuner, name))
    yield
    assert active_mode.get() is None


def make_tuner(kernel: Kernel, blocks: tuple[int, ...], **kwargs: Any) -> Autotuner:
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    return Autotuner(kernel, ["x"], configs, ["x"], None, None, **kwargs)


def time_by_block(kernel: Kernel) -> Any:
    """Return a timer that says the last configuration of all is the fastest."""

    def do_bench(call: Any, quantiles: Any) -> list[float]:
        # Nothing is timed while compilers are still at work.
        assert sorted(kernel.compiled) == [16, 32]
        call()
        return [1.0 / kernel.ran[-1]] * len(quantiles)

    return do_bench


def test_configurations_compile_side_by_side_before_any_is_timed() -> None:
    autotuning.compile_in_parallel(2)
    kernel = Kernel(at_once=2)
    tuner = make_tuner(kernel, (16, 32), do_bench=time_by_block(kernel))
    tuner.run(7, grid=(1,), warmup=False)
    assert len(kernel.threads) == 2
    assert threading.get_ident() not in kernel.threads
    assert tuner.best_config.kwargs == {"BLOCK": 32}
    assert kernel.ran[-1] == 32


def test_a_choice_found_on_disk_compiles_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(self: Autotuner, key: object, configs: list[triton.Config], benchmark: object) -> bool:
        self.cache[key] = configs[1]
        return True

    monkeypatch.setattr(Autotuner, "check_disk_cache", found)
    autotuning.compile_in_parallel(2)
    kernel = Kernel(at_once=1)
    tuner = make_tuner(kernel, (16, 32), cache_results=True)
    tuner.run(7, grid=(1,), warmup=False)
    assert kernel.compiled == kernel.ran == [32]


def test_asked_twice_it_compiles_once() -> None:
    autotuning.compile_in_parallel(2)
    patched = Autotuner.prune_configs
    autotuning.compile_in_parallel(2)
    assert Autotuner.prune_configs is patched


def test_what_does_not_compile_fails_when_it_is_timed() -> None:
    class Broken(Kernel):
        def compile(self, block: int) -> int:
            raise ValueError("does not compile")

    autotuning.compile_in_parallel(2)
    tuner = make_tuner(Broken(at_once=1), (16, 32), do_bench=lambda call, quantiles: call())
    with pytest.raises(ValueError, match="does not compile"):
        tuner.run(7, grid=(1,), warmup=False)


def test_untimed_takes_the_first_that_works_and_keeps_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("timed, or looked up on disk")

    kernel = Kernel(at_once=1)
    tuner = make_tuner(kernel, (TOO_LARGE, 16, 32), do_bench=never, cache_results=True)
    monkeypatch.setattr(Autotuner, "check_disk_cache", never)
    with autotuning.untimed():
        tuner.run(7, grid=(1,), warmup=False)
    assert tuner.best_config.kwargs == {"BLOCK": 16}
    assert kernel.ran == [16, 32, 16]
    # Afterwards a new key is timed again.
    with pytest.raises(AssertionError, match="timed, or looked up"):
        tuner.run(8, grid=(1,), warmup=False)


def test_the_best_of_several_choices_is_kept_and_said() -> None:
    """One that was made while something disturbed it does not stay; a call without autotuners has no choice."""
    speed = {8: 2.0, 16: 3.0, 32: 1.0, 128: 4.0, 256: 5.0}
    kernel = Kernel(at_once=1)
    disturbed = [32]

    def do_bench(call: Any, quantiles: Any, **_: Any) -> list[float]:
        call()
        block = kernel.ran[-1]
        return [speed[block] + (1.5 if block in disturbed else 0.0)] * len(quantiles)

    class Timed(CpuClock):
        def sample(self, call: Call, count: int, enqueue_ms: float | None = None) -> tuple[list[float], DeviceState]:
            call.call(call.prepare())
            return [speed[kernel.ran[-1]]] * count, DeviceState()

    tuner = make_tuner(kernel, tuple(speed), do_bench=do_bench)
    call = Call(call=lambda _: tuner.run(7, grid=(1,), warmup=False))
    call.call(None)
    assert tuner.best_config.kwargs == {"BLOCK": 8}
    disturbed.clear()
    with mock.patch("triton.testing.do_bench", do_bench):
        settled = autotuning.settle(call, Timed())
    assert settled is not None
    assert settled[1] == "<lambda>: BLOCK=32, num_warps=4, num_ctas=1, num_stages=3"
    assert set(kernel.ran[len(speed) + 1 :]) == {8, 16, 32, 128}  # the slowest does not compete again
    assert len(tuner.configs) == len(tuner.configs_timings) == len(speed)
    tuner.cache = {}
    settled[0].before(call).prepare()
    assert [config.kwargs["BLOCK"] for config in tuner.cache.values()] == [32]
    assert autotuning.settle(Call(call=lambda _: None), Timed()) is None
    with mock.patch("triton.testing.do_bench", side_effect=MemoryError):
        assert autotuning.settle(call, Timed()) is not None
    assert [config.kwargs["BLOCK"] for config in tuner.cache.values()] == [32]
