"""A remembered launch runs what Triton itself would have launched, on the same arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lrbench.kernels.common.remember import remember_launches

pytestmark = pytest.mark.compile


class Pair(NamedTuple):
    """Two pointers in one argument."""

    first: Tensor | None
    second: Tensor | None


@triton.jit(do_not_specialize=["free"])
def _copy(x_ptr, pair, n, free, scale, BLOCK: tl.constexpr):
    """Use every argument.

    Grid: (1,). Reads x and the pair, writes x.
    """
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs * n, mask=offs < free, other=0.0)
    if pair.first is not None:
        x += tl.load(pair.first + offs)
    if pair.second is not None:
        x += tl.load(pair.second + offs)
    tl.store(x_ptr + offs, x * scale)


class Driver:
    """Stands in for the driver of a Hopper GPU whose launches are only recorded."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.device = 0
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
            about, enter, _, *args = rest
            if enter is not None:
                enter(about)
            self.seen.append(((x, y, z), stream, packed, [_address(value) for value in args]))

        return launch

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**17}

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return object(), object(), 32, 0, 1024


def _address(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_address(member) for member in value)
    return value.data_ptr() if isinstance(value, Tensor) else value


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(driver, "_active", fake)
    return fake


def variants() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield arguments of which no two neighbours may run the same binary without being equal in kind."""
    x, half = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    both, none = Pair(x, x), Pair(None, None)
    for n in (1, 3, 16, 2**33, 2**33 + 1):
        yield (x, both, n, 7, 1.0), {"BLOCK": 16}
    for free in (1, 16, 2**33):
        yield (x, both, 3, free, 1.0), {"BLOCK": 16}
    for pair in (Pair(x, None), Pair(None, x), none, Pair(x[1:], x), Pair(x, x[1:]), Pair(half, x)):
        yield (x, pair, 3, 7, 1.0), {"BLOCK": 16}
    for first in (x[1:], x[4:], half, half[4:], half[8:], torch.nn.Parameter(x)):
        yield (first, none, 3, 7, 1.0), {"BLOCK": 16}
    yield (x, none, 3, 7, 2), {"BLOCK": 16}
    yield (x, none, 3, 7, 1.0), {"BLOCK": 32}
    yield (x, none, 3, 7, 1.0), {"BLOCK": 16, "num_warps": 8}


def test_runs_what_triton_would(fake_driver: Driver) -> None:
    """Once launched anew, once remembered: the binary, the grid, the stream and every argument are Triton's."""
    anew = triton.jit(_copy.fn, do_not_specialize=["free"])
    remembered = remember_launches(triton.jit(_copy.fn, do_not_specialize=["free"]))
    cases = list(variants())
    for device in (0, 1):
        fake_driver.device = device
        # All are launched before any is repeated, so that each could be mistaken for every other.
        for args, keywords in cases:
            remembered[(2, 3)](*args, **keywords)
        for args, keywords in cases:
            fake_driver.seen.clear()
            expected = anew[(2, 3)](*args, **keywords)
            compiled = remembered[(2, 3)](*args, **keywords)
            assert compiled.hash == expected.hash
            assert fake_driver.seen[0] == fake_driver.seen[1]
            assert fake_driver.seen[0][:2] == ((2, 3, 1), 100 + device)


def test_repeats_ask_triton_nothing(fake_driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = remember_launches(triton.jit(_copy.fn, do_not_specialize=["free"]))
    args = (torch.zeros(64), Pair(None, None), 3)
    remembered[(1,)](*args, 5, 1.0, BLOCK=16)
    monkeypatch.setattr(remembered, "device_caches", None)
    remembered[(9,)](*args, 6, 2.0, BLOCK=16)
    assert [seen[0] for seen in fake_driver.seen] == [(1, 1, 1), (9, 1, 1)]
    assert fake_driver.seen[1][3][3:5] == [6, 2.0]


@pytest.mark.parametrize("kind", ["hook", "pre-run hook", "callable grid", "constexpr by position"])
def test_other_launches_are_tritons(fake_driver: Driver, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profilers are told of every launch, and what is not understood is left alone."""
    remembered = remember_launches(triton.jit(_copy.fn, do_not_specialize=["free"]))
    args: tuple[Any, ...] = (torch.zeros(64), Pair(None, None), 3, 5, 1.0)
    remembered[(1,)](*args, BLOCK=16)
    told: list[Any] = []
    grid: Any = (1,)
    if kind == "hook":
        monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [told.append])
    elif kind == "pre-run hook":
        remembered.add_pre_run_hook(lambda *_, **__: told.append(1))
    elif kind == "callable grid":

        def grid(bound: dict[str, Any]) -> tuple[int]:
            told.append(bound)
            return (1,)

    for _ in range(2):
        if kind == "constexpr by position":
            remembered[grid](*args, 16)
        else:
            remembered[grid](*args, BLOCK=16)
    assert len(told) == (0 if kind == "constexpr by position" else 2)
    assert fake_driver.seen == [fake_driver.seen[0]] * 3
