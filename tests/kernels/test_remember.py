"""A remembered call does what the call itself does: the same launches on the same memory, the same results.

No GPU is needed: kernels are not compiled, and a driver stands in for one whose launches are recorded or, for a toy
operation, carried out by the CPU on the addresses that they are given.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from lrbench.kernels.common import remember
from lrbench.kernels.common.calls import remember_calls
from lrbench.kernels.common.differentiable import Differentiable
from lrbench.kernels.common.remember import different_each_call, remember_launches
from lrbench.tests.kernels.cases import BF16, SIZES, UNPLANNED
from lrbench.tests.kernels.compiling import IMPLEMENTATIONS, MODULES, flatten, pretend
from lrbench.tests.kernels.laws import EXTREMES, Case, public_state, shifted, state_shapes

pytestmark = pytest.mark.compile

DEVICE = 77


class Launch(NamedTuple):
    """What a launcher was given; pointers as addresses."""

    binary: str
    grid: tuple[int, int, int]
    stream: int
    scratch: Any
    arguments: tuple[Any, ...]


class Driver:
    """Stands in for the driver of a Hopper GPU: records launches, and carries out those that it is taught."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.work: dict[str, Callable[..., None]] = {}
        self.stream = 100

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """Stands in for a compiled kernel and its launcher, which has either form that Triton's has."""

    num_ctas, global_scratch_size, profile_scratch_size = 1, 64, 0
    launch_cooperative_grid = launch_pdl = False
    function, packed_metadata = "function", "metadata"
    arg_annotations, kernel_signature = "annotations", "signature"

    def __init__(self, kernel: Any, *about: Any) -> None:
        self.name, self.binary = kernel.__name__, f"{kernel.__name__} {about}"
        self.run = self

    def launch_metadata(self, grid: Any, stream: int, *_: Any) -> str:
        return self.name

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        scratch = x * y * z * self.global_scratch_size, None
        if remember.ONE_LAUNCHER:
            rest = *rest[:4], *scratch, self.arg_annotations, self.kernel_signature, rest[4:]
        else:
            rest = *scratch, *rest
        self.launch(x, y, z, stream, function, False, False, *rest)

    def launch(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        if remember.ONE_LAUNCHER:
            _, _, metadata, about, enter, _, scratch, _, *kinds, arguments = rest
            assert kinds == [self.arg_annotations, self.kernel_signature]
        else:
            _, _, scratch, _, metadata, about, enter, _, *arguments = rest
        assert (function, metadata) == (self.function, self.packed_metadata)
        if enter is not None:
            enter(about)
        plain = tuple(map(_address, arguments))
        active = driver.active
        active.launches.append(Launch(self.binary, (x, y, z), stream, scratch, plain))
        if self.name in active.work:
            # What a GPU does, torch does not see.
            with _disable_current_modes():
                active.work[self.name](*plain)


def _address(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_address(member) for member in value)
    if isinstance(value, TensorDescriptor):
        return value.base.data_ptr()
    return value.data_ptr() if isinstance(value, Tensor) else value


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A GPU, the current one, on which all tensors lie."""
    fake = Driver()
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    monkeypatch.setattr(Tensor, "get_device", lambda self: DEVICE)
    monkeypatch.setattr(remember, "HAS_LAUNCH", True)

    def compile_kernel(self: Any, key: Any, signature: Any, device: int, constants: Any, *about: Any) -> Compiled:
        return Compiled(self, sorted(signature.items()), sorted(constants.items(), key=str), *about[:2])

    monkeypatch.setattr(triton.JITFunction, "_do_compile", compile_kernel)
    return fake


class Watched(TorchDispatchMode):
    """Lets a call run as it is, and keeps all memory that it allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.allocated.append(result)
        return result


# A toy operation: y = scale * (x + state) + noise, where noise passes through a scratch buffer.


class Pair(NamedTuple):
    """Two pointers in one argument."""

    first: Tensor | None
    second: Tensor | None


@remember_launches
@triton.jit(do_not_specialize=["call"])
def _add_kernel(pair, out_ptr, words_ptr, call, n, scale, BLOCK: tl.constexpr):
    """Add.

    Grid: (1,). Reads the pair; writes out and words.
    """


@remember_launches
@triton.jit
def _scale_kernel(x_ptr, out_ptr, n, scale):
    """Scale.

    Grid: (1,). Reads x; writes out.
    """


def _floats(address: int, count: int) -> Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


def _add(pair: tuple[int, int | None], out: int, words: int, call: int, n: int, scale: float, _: int) -> None:
    total = _floats(pair[0], n) + (0 if pair[1] is None else _floats(pair[1], n))
    _floats(out, n).copy_(scale * total)
    _floats(words, 1).fill_(call)


def _scale(x: int, out: int, n: int, scale: float) -> None:
    _floats(out, n).copy_(scale * _floats(x, n))


NUMBERS = itertools.count(1)
HANDED_OUT: list[tuple[Tensor, int]] = []


@different_each_call
def _words(x: Tensor, count: int) -> tuple[Tensor, int, Callable[[], None]]:
    words, number = torch.zeros(count), next(NUMBERS)
    return words, number, lambda: HANDED_OUT.append((words, number))


class Request(NamedTuple):
    """What a call asks for."""

    scale: float
    compute: bool
    want_twice: bool


def _forward(request: Request, x: Tensor, state: Tensor | None) -> Any:
    n = x.numel()
    both, kept = torch.empty(2, *x.shape, dtype=x.dtype), torch.empty_like(x)
    words, number, done = _words(x, count=1)
    _add_kernel[(1,)](Pair(x, state), both[1], words, number, n, 1.0, BLOCK=16)
    done()
    y, twice = torch.empty_like(x), torch.empty_like(x) if request.want_twice else None
    _scale_kernel[(1,)](both[1], y, n, request.scale)
    if request.compute:
        y += 1
    _scale_kernel[(1,)](y, kept, n, 2.0)
    if request.want_twice:
        _scale_kernel[(1,)](y, twice, n, 2.0)
    return (y, twice), (kept, None)


def _backward(request: Request, needs: Any, tensors: Any, kept: Any, gradients: Any) -> Any:
    x, _ = tensors
    dy = gradients[0].contiguous()
    dx, total = torch.empty_like(x), torch.empty_like(x)
    words, number, done = _words(x, count=1)
    _add_kernel[(1,)](Pair(dy, kept[0]), total, words, number, x.numel(), 1.0, BLOCK=16)
    done()
    _scale_kernel[(1,)](total, dx, x.numel(), request.scale)
    d_state = torch.empty_like(x) if needs[1] else None
    if needs[1]:
        _scale_kernel[(1,)](total, d_state, x.numel(), 3 * request.scale)
    return dx, d_state


TOY = Differentiable(
    "toy_of_test_remember",
    request=Request,
    tensors=("x", "state?"),
    outputs=("y", "twice"),
    saved=("kept",),
    forward=_forward,
    backward=_backward,
    shapes=lambda request, x, state: ((torch.empty_like(x), None), (torch.empty_like(x),)),
)


def _toy(
    x: Tensor, *, state: Tensor | None = None, scale: float = 2.0, compute: bool = False, want_twice: bool = False
) -> Any:
    """Raise on what the toy does not take; return y, or y and twice y."""
    if scale <= 0 or isinstance(scale, bool):
        raise ValueError(f"scale must be positive, got {scale}")
    y, twice = TOY(Request(scale, compute, want_twice), x, state)
    return (y, (twice,)) if want_twice else y


@pytest.fixture(params=[False, True], ids=["launcher each", "one launcher"])
def toy(gpu: Driver, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The toy, which has not been called, with either form of Triton's launchers."""
    monkeypatch.setattr(remember, "ONE_LAUNCHER", request.param)
    gpu.work = {"_add_kernel": _add, "_scale_kernel": _scale}
    return remember_calls(lambda x, **keywords: _toy(x, **keywords))


def results(function: Callable[..., Any], x: Tensor, gradient: Tensor | None = None, **keywords: Any) -> list[Tensor]:
    """Return outputs and gradients."""
    outputs = flatten(function(x, **keywords))
    leaves = [t for t in (x, *keywords.values()) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs[0].requires_grad:
        return outputs
    weights = [torch.arange(1.0, 1 + x.numel()).view(x.shape) if gradient is None else gradient for _ in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, weights)]


def leaf(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape).requires_grad_(requires_grad)


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"x": leaf(4, 8)},
    "another shape": lambda: {"x": leaf(8, 4)},
    "unaligned": lambda: {"x": shifted(torch.randn(4, 8)).requires_grad_()},
    "no gradients": lambda: {"x": leaf(4, 8, requires_grad=False)},
    "state": lambda: {"x": leaf(4, 8), "state": leaf(4, 8)},
    "constant state": lambda: {"x": leaf(4, 8), "state": leaf(4, 8, requires_grad=False)},
    "unaligned state": lambda: {"x": leaf(4, 8), "state": shifted(torch.randn(4, 8)).requires_grad_()},
    "scale": lambda: {"x": leaf(4, 8), "scale": 3.0},
    "integer scale": lambda: {"x": leaf(4, 8), "scale": 3},
    "two outputs": lambda: {"x": leaf(4, 8), "want_twice": True},
    "gradient with strides": lambda: {"x": leaf(4, 8), "gradient": torch.randn(8, 4).T},
    "unaligned gradient": lambda: {"x": leaf(4, 8), "gradient": shifted(torch.randn(4, 8))},
}
"""Calls of which none may follow another's plan."""


@pytest.mark.parametrize("has_launch", [True, False])
def test_repeats_give_what_the_call_itself_gives(
    toy: Callable[..., Any], plans: list[Any], has_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of all kinds in turn, with other values each time; in the fourth round nearly all passes have plans."""
    monkeypatch.setattr(remember, "HAS_LAUNCH", has_launch)
    for turn in range(5):
        plans.clear()
        for name, draw in VARIANTS.items():
            torch.manual_seed(turn)
            given = draw()
            with Watched():
                expected = results(toy, **given)
            found = results(toy, **given)
            assert len(found) == len(expected), name
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0, msg=f"{name}, turn {turn}")
            # A caller may keep any one result without keeping others, or more memory than it needs.
            storages = [x.untyped_storage() for x in (*found, *(v for v in given.values() if isinstance(v, Tensor)))]
            assert len({storage.data_ptr() for storage in storages}) == len(storages)
            assert all(x.untyped_storage().nbytes() == x.nbytes for x in found)
        if turn >= 3:
            # Copies of what is not contiguous or aligned are torch's.
            assert len(plans) == (2 * len(VARIANTS) - 7 if has_launch else 0)


def test_each_call_has_its_own_stream_words_and_number(toy: Callable[..., Any], gpu: Driver, plans: list[Any]) -> None:
    x = leaf(4, 8)
    for _ in range(3):
        results(toy, x)
    gpu.launches.clear(), HANDED_OUT.clear(), plans.clear()
    for gpu.stream in (1, 2):
        results(toy, x)
    assert len(plans) == 4
    assert [launch.stream for launch in gpu.launches] == [1] * 5 + [2] * 5
    numbers = [number for _, number in HANDED_OUT]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert [float(words[0]) for words, _ in HANDED_OUT] == numbers


def test_one_tensor_given_twice_is_not_taken_for_two(toy: Callable[..., Any]) -> None:
    for turn in range(4):
        x, other = leaf(4, 8), leaf(4, 8)
        torch.testing.assert_close(toy(x, state=x), 4 * x)
        if turn:
            torch.testing.assert_close(toy(x, state=other), 2 * (x + other))
        gradient = x.detach()
        torch.testing.assert_close(results(toy, x, gradient)[1], 10 * gradient)
        torch.testing.assert_close(results(toy, x, other.detach())[1], 2 * (other + 4 * x).detach())


def test_what_torch_computes_has_no_plan(toy: Callable[..., Any], plans: list[Any]) -> None:
    """Even in place, in memory that a plan would allocate."""
    x = leaf(4, 8)
    for _ in range(4):
        torch.testing.assert_close(toy(x, compute=True), 2 * x + 1)
    assert not plans


def test_what_takes_much_scratch_has_no_plan(
    toy: Callable[..., Any], plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remember, "MAX_SCRATCH_BYTES", 64)
    for _ in range(4):
        toy(leaf(4, 8))
    assert not plans


@pytest.mark.parametrize("kind", ["hook", "pre-run hook", "mode", "another device"])
def test_watched_launches_are_tritons(
    toy: Callable[..., Any], gpu: Driver, plans: list[Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profilers are told of every launch."""
    x = leaf(4, 8)
    for _ in range(3):
        expected = results(toy, x)
    told: list[Any] = []
    plans.clear()
    if kind == "hook":
        monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [told.append])
    elif kind == "pre-run hook":
        monkeypatch.setattr(_scale_kernel, "pre_run_hooks", _scale_kernel.pre_run_hooks)
        _scale_kernel.pre_run_hooks.append(lambda *_, **__: told.append(1))
    elif kind == "another device":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE + 1)
    try:
        if kind == "mode":
            with Watched():
                found = results(toy, x)
        else:
            found = results(toy, x)
    finally:
        _scale_kernel.pre_run_hooks.clear()
    assert not plans
    assert all(map(torch.equal, found, expected))
    assert len(told) == {"hook": 5, "pre-run hook": 3}.get(kind, 0)


def test_bad_input_is_refused_as_before(toy: Callable[..., Any]) -> None:
    """Also where it equals an input that is remembered, as True equals 1."""
    for _ in range(3):
        toy(leaf(4, 8), scale=1)
    for scale in (True, -1.0):
        with pytest.raises(ValueError, match=f"scale must be positive, got {scale}"):
            toy(leaf(4, 8), scale=scale)
    with pytest.raises(TypeError):
        toy(leaf(4, 8), wrong=1)


def test_second_gradients_are_refused(toy: Callable[..., Any]) -> None:
    for _ in range(4):
        x = leaf(4, 8)
        (dx,) = torch.autograd.grad(toy(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            dx.sum().backward()


def test_hooks_see_the_same_saved_tensors_each_time(toy: Callable[..., Any], plans: list[Any]) -> None:
    """Offloading and checkpointing replace them by copies, and compare calls by them."""
    seen = []
    for _ in range(4):
        x = leaf(4, 8)
        packed: list[tuple[torch.Size, torch.dtype]] = []

        def pack(x: Tensor, packed: list[Any] = packed) -> Tensor:
            packed.append((x.shape, x.dtype))
            return x.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
            found = results(toy, x)
        torch.testing.assert_close(found[1], 2 * (torch.arange(1.0, 33).view(4, 8) + 4 * x.detach()))
        seen.append(packed)
        again = results(lambda x: checkpoint(toy, x, use_reentrant=False), x)
        assert all(map(torch.equal, again, found))
    assert seen == [[(x.shape, x.dtype)] * 2] * 4
    assert plans


def test_threads_that_call_at_once_get_right_results(toy: Callable[..., Any], plans: list[Any]) -> None:
    """Threads that come at once may each record; all are right."""

    def work(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        size = 8 * (1 + seed % 3)
        for _ in range(20):
            x = torch.randn(4, size, generator=generator).requires_grad_()
            y, dx = results(toy, x)
            right = torch.equal(y, 2 * x) and torch.equal(dx, 2 * (torch.arange(1.0, 1 + 4 * size).view(4, -1) + 2 * y))
            if not right:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert plans


def test_only_so_many_kinds_of_calls_are_remembered(
    toy: Callable[..., Any], plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remember, "REMEMBERED", 2)
    for _ in range(3):
        for size in (1, 2, 3):
            toy(leaf(4, size))
    assert not plans
    for _ in range(3):
        toy(leaf(4, 3))
    assert plans


# Real operations.


def test_plans_see_every_kernel() -> None:
    """A plan would leave out the launches of a kernel that is not decorated."""
    kernels = [x for module in MODULES for x in vars(module).values() if isinstance(x, triton.JITFunction)]
    unseen = {
        kernel.__name__ for kernel in kernels if kernel.__name__.endswith("_kernel") and "run" not in vars(kernel)
    }
    assert unseen == set()


CASES = [
    pytest.param(
        Case(op=operation.name, impl=implementation.name, dtype=BF16, sizes=sizes), carry,
        id=f"{operation.name}-{implementation.name}{'-state' * carry}",
    )
    for operation, implementation in IMPLEMENTATIONS
    for sizes in SIZES["gpu"]
    for carry in ((False, True) if implementation.state_dtypes else (False,))
    if operation.name in EXTREMES and set(operation.sizes) <= set(sizes)
]  # fmt: skip
Span = tuple[int, int]
COMPUTED = {"forward": [("wkv4", True)], "backward": [("wkv4", True), ("mlstm_exp", True)]}
"""Passes in which torch computes something: of which operation, and whether a state is carried."""


def compare(expected: list[Launch], found: list[Launch], memory: list[Span], given: list[Span]) -> dict[int, int]:
    """Raise unless a pass launched the same on memory that is laid out alike.

    Args:
        expected, found: launches of the call itself and of its plan.
        memory: all that the call itself allocated, none of it freed.
        given: what both were given.

    Returns:
        Where the plan has what the call itself has elsewhere.
    """
    places: dict[int, int] = {}
    spans = [*given]
    for one, other in zip(expected, found, strict=True):
        assert (one.binary, one.grid, one.stream) == (other.binary, other.grid, other.stream)
        spans.append((other.scratch, one.scratch))
        for a, b in zip(members(one.arguments), members(other.arguments), strict=True):
            if a is not b and a != b:
                (start,) = [start for start, size in memory if start <= a < start + size]
                assert places.setdefault(start, b - (a - start)) == b - (a - start)
    spans += [(places[start], size) for start, size in memory if start in places]
    for (start, size), (following, _) in itertools.pairwise(sorted(spans)):
        assert start + size <= following
    return places


def members(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the arguments with tuples taken apart."""
    return [y for x in arguments for y in (members(x) if isinstance(x, tuple) else [x])]


def span(x: Tensor) -> Span:
    """Return the address and the bytes of a tensor's storage."""
    return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()


@pytest.mark.parametrize(("case", "carry"), CASES)
def test_plans_launch_what_the_call_itself_launches(
    case: Case, carry: bool, gpu: Driver, plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same binaries, grids and numbers, and pointers into memory of which no two parts overlap."""
    pretend(monkeypatch)
    inputs = dict(case.draw().inputs)
    leaves = case.operation.leaves(inputs, gradients=True).values()
    shapes = state_shapes(case.op, case.sizes) if carry else []
    state = [torch.zeros(shape, requires_grad=n < 2) for n, shape in enumerate(shapes)]
    keywords = {"initial_state": public_state(tuple(state)), "return_last_state": True} if carry else {}
    weights: list[Tensor] = []

    def call() -> tuple[list[list[Launch]], list[Tensor], list[int]]:
        plans.clear()
        gpu.launches = []
        outputs = flatten(case.function(*inputs.values(), **case.options, **keywords))
        launches, gpu.launches, planned = gpu.launches, [], len(plans)
        wanted = [y for y in outputs if y.requires_grad]
        weights[:] = weights or [torch.zeros_like(y) for y in wanted]
        found = torch.autograd.grad(wanted, [*leaves, *state[:2]], weights)
        return [launches, gpu.launches], [*outputs, *found], [planned, len(plans) - planned]

    with Watched() as watched:
        expected, expected_results, _ = call()
    for _ in range(4):
        found, found_results, planned = call()
    given = list({span(x) for x in (*inputs.values(), *state, *weights)})
    memory = list({span(x) for x in watched.allocated} - {*given})
    places: dict[int, int] = {}
    for one, other, follows in zip(expected, found, planned, strict=True):
        if follows:
            here = compare(one, other, memory, given)
            assert all(places[start] == here[start] for start in places.keys() & here.keys())
            places |= here
    for x, y in zip(expected_results, found_results, strict=True):
        assert places.get(x.data_ptr(), y.data_ptr()) == y.data_ptr()
    if all(planned):
        assert len({span(x) for x in found_results}) == len(found_results)
        assert all(span(x) == (x.data_ptr(), x.nbytes) for x in found_results)
    for passed, follows in zip(COMPUTED.values(), planned, strict=True):
        assert bool(follows) == (not {case.op, case.impl} & {*UNPLANNED} and (case.op, carry) not in passed)
