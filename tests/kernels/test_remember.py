"""A remembered call does what the call itself does. A function stands in for Triton's compiler and the GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lrbench.kernels.common import remember
from lrbench.kernels.common.calls import remember_calls
from lrbench.kernels.common.differentiable import Differentiable, readable
from lrbench.kernels.scalar_decay.roles import Role
from lrbench.tests.kernels.laws import shifted

pytestmark = pytest.mark.compile
OPTIONS = {"num_warps": 4}


@remember.remember_launches
@triton.jit
def add_kernel(pair_ptrs, out_ptr, scale, BLOCK: tl.constexpr, TIMES: tl.constexpr = 1):
    """Grid: (1,). Writes scale * TIMES times the sum of a pair, of which the second may be None."""


def launch(scale: float, x: Tensor, other: Tensor | None, **constexprs: int) -> Tensor:
    add_kernel[(1,)]((x, other), out := torch.empty_like(x), scale, BLOCK=16, **OPTIONS, **constexprs)
    return out


def forward(request: Role, x: Tensor, state: Tensor | None) -> Any:
    y = launch(2.0, x, state)
    return (y, launch(2.0, x, state, TIMES=2) if request.future else None), (launch(2.0, y, None),)


def backward(request: Role, needs: Any, tensors: Any, kept: Any, gradients: Any) -> Any:
    dx = launch(2.0, gradients[0].contiguous(), kept[0])  # no derivative, but it shows which tensor was kept
    return dx, launch(3.0, dx, None) if needs[1] else None


ADD = Differentiable(
    "add_of_test_remember", request=Role, tensors=("x", "state?"), outputs=("y", "twice"), saved=("kept",),
    forward=forward, backward=backward, shapes=forward,
)  # fmt: skip


class Toy:
    """A function with counts of launches and of Triton's own, which ``returns`` what it has compiled."""

    launches, tritons, returns, call = 0, 0, True, None

    def plain(self, x: Tensor, state: Tensor | None = None, want_twice: bool = False) -> Any:
        assert type(want_twice) is bool
        y, twice = ADD(Role(want_twice, False), x, state)
        return (y, (twice,)) if want_twice else y

    def run(
        self, *args: Any, grid: Any, warmup: bool, BLOCK: int, TIMES: int = 1, num_warps: int, enable_fp_fusion: bool
    ) -> Any:
        assert enable_fp_fusion, "Triton 3.10 no longer fuses unless it is asked to"
        compiled_for: list[Any] = []

        def work(pair: Any, out: Tensor, scale: float, *constexprs: int) -> None:
            found = [None if x is None else (x.dtype, x.data_ptr() % 16) for x in (*pair, out)]
            assert (constexprs, compiled_for or found) == ((BLOCK, TIMES), found)
            compiled_for[:] = found
            self.launches += 1
            out.copy_(scale * TIMES * sum(x for x in pair if x is not None))

        self.tritons += 1
        work(*args, BLOCK, TIMES)
        return {(1, 1, 1): work} if self.returns else None

    def check(self, x: Tensor, state: Tensor | None = None, gradient: Tensor | None = None, **options: bool) -> int:
        """Raise unless a call and its gradients are right; return how many of its launches were Triton's."""
        before, y, expected = self.tritons, self.call(x, state, **options), 2 * (x if state is None else x + state)
        y, (twice,) = y if isinstance(y, tuple) else (y, (2 * y,))
        assert torch.equal(y, expected) and torch.equal(twice, 2 * expected)
        if leaves := [t for t in (x, state) if t is not None and t.requires_grad]:
            gradient = torch.randn_like(x) if gradient is None else gradient
            dx = 2 * (gradient + 2 * expected)
            assert all(map(torch.equal, torch.autograd.grad(y, leaves, gradient), (dx, 3 * dx)))
        return self.tritons - before


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    monkeypatch.setattr(add_kernel.kernel, "run", (toy := Toy()).run)
    monkeypatch.setattr(remember, "is_interpreted", lambda: True)
    toy.call = remember_calls(toy.plain)
    return toy


def leaf(requires_grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 8, dtype=dtype, requires_grad=requires_grad)


VARIANTS: list[Callable[[], dict[str, Any]]] = [
    lambda: {"x": leaf()}, lambda: {"x": shifted(leaf(False)).requires_grad_(), "gradient": shifted(leaf(False))},
    lambda: {"x": leaf(), "gradient": torch.randn(8, 4).T}, lambda: {"x": leaf(dtype=torch.float64)},
    lambda: {"x": leaf(False)}, lambda: {"x": leaf(), "state": leaf()}, lambda: {"x": leaf(), "state": leaf(False)},
    lambda: {"x": leaf(), "want_twice": True}]  # fmt: skip


def test_repeats_give_what_the_call_itself_gives(toy: Toy) -> None:
    """Unaligned tensors and gradients with strides, the second and third variant, are no other kinds."""
    assert [toy.check(**draw()) for draw in VARIANTS] == [3, 0, 0, 3, 2, 4, 3, 4]
    assert [toy.check(**draw()) for draw in VARIANTS] == [0] * 8
    assert toy.launches == 50


def test_other_launches_are_tritons(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other options, after a hook, where Triton returns nothing, and of what is unpacked in another dtype."""
    assert [toy.check(leaf()), toy.check(leaf())] == [3, 0]
    monkeypatch.setitem(OPTIONS, "num_warps", 8)
    assert [toy.check(leaf()), toy.check(leaf())] == [3, 0]
    monkeypatch.setattr(add_kernel.kernel, "pre_run_hooks", [print])
    assert toy.check(leaf()) == 3
    monkeypatch.setattr(add_kernel.kernel, "pre_run_hooks", [])
    toy.returns = False
    assert [toy.check(leaf(dtype=torch.float64)) for _ in range(2)] == [3, 3]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, Tensor.double):
        y = toy.call(x := leaf())
    torch.autograd.grad(y, x, torch.ones_like(y))


def test_calls_that_look_alike_are_told_apart(toy: Toy) -> None:
    """One tensor given twice, an argument that equals a right one as 0 equals False, and a call inside a transform."""
    for _ in range(3):
        x = leaf(False)
        toy.check(x, x)
        toy.check(x, leaf(False), want_twice=False)
        with pytest.raises(AssertionError):
            toy.call(x, leaf(False), want_twice=0)
    toy.check(x)
    with pytest.raises(RuntimeError, match="must not be inside a transform"):
        torch.func.vmap(lambda x: toy.call(x, None))(x[None])


def test_what_is_copied_for_its_address_alone_is_not_remembered(toy: Toy) -> None:
    """A strided tensor that begins at a multiple of 16 bytes, and one that does not and is copied, are of one kind."""
    memory: dict[Any, Any] = {}
    for first, remembered in ((1, False), (8, True), (1, True)):
        (x,) = given = (torch.randn(4, 64)[:, first : first + 8],)
        remember.run_pass(memory, None, lambda given=given: launch(2.0, *readable(given, 1), None))
        assert bool(memory) == remembered and x.stride() == (64, 1)
    assert toy.tritons == 3


def test_threads_that_call_at_once_get_right_results(toy: Toy) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: [toy.check(**draw()) for draw in VARIANTS[n % 3 :] * 5], range(8)))
    assert toy.launches > toy.tritons


def test_only_so_many_kinds_of_calls_are_remembered(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "REMEMBERED", 2)
    assert [toy.check(torch.randn(4, size)) for size in (1, 2, 3, 1, 3)] == [2, 2, 2, 2, 0]
