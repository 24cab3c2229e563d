"""Kernels inside a training loop: compiled, captured in a CUDA graph, recomputed, under autocast, on other streams, in
DDP. In each of these a call gives the same numbers as the call alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lrbench.analysis.counts import count_case
from lrbench.kernels import get_operation
from lrbench.kernels.common import differentiable
from lrbench.kernels.common.arguments import CASE_DTYPES
from lrbench.kernels.scalar_decay.declare import FUSED_CHUNK, WHOLE_STATE
from lrbench.tests.kernels import laws
from lrbench.tests.kernels.cases import (
    BF16,
    CHANNELS,
    F16,
    F32,
    HEADS,
    KERNELS,
    PORTABLE,
    channels,
    each_mlp,
    heads,
    interpreted,
    mlp_sizes,
    on_each,
    on_gpu,
    portable,
)
from lrbench.tests.kernels.laws import Case

SMALL = [
    ("mlstm_sig", FUSED_CHUNK, F16), ("mlstm_exp", FUSED_CHUNK, F16), ("mlstm_exp", "xl_chunk", F32),
    ("lightning", "lightning2", F32), ("lightning", "lightning1", F32), ("rglru", "fused", F32),
    ("rglru", "chunked", F16), ("rglru_layer", "fused", F32), ("linear_scan", "naive", F32), ("wkv4", "scan", F32),
    ("gated_mlp", "fused", F32), ("gated_mlp", "fused_save", F16),
]  # fmt: skip
"""Every kind of call of a registered operator, in the interpreter; a GPU takes every implementation."""
OF_EACH_OPERATOR = {"mlstm_exp-fused_chunk", "lightning-lightning2", "lightning-lightning1", "rglru-fused", "wkv4-scan"}
OF_EACH_OPERATOR |= {"rglru_layer-fused", "gated_mlp-fused_save"}
"""One call of each, and a layer with products of torch: hooks around a call do not see which it is."""

SMALL_SIZES = {
    **dict.fromkeys(HEADS, heads(1, 41, 1, 16, 24)),
    **dict.fromkeys((*CHANNELS, "rglru_layer"), channels(1, 19, 8)),
    "gated_mlp": mlp_sizes(41, 16, 24),
}
"""As long as the laws' in time, else narrower: what surrounds a call does not depend on how many programs it takes."""
INTERPRETED = [interpreted(op, impl, dtype, sizes=SMALL_SIZES[op]) for op, impl, dtype in SMALL]
ON_GPU = [on_gpu(op, impl, BF16) for op, impl in KERNELS]
EVERYWHERE = [*INTERPRETED, *ON_GPU]
AROUND = [each for each in EVERYWHERE if each not in INTERPRETED or any(name in each.id for name in OF_EACH_OPERATOR)]
FORMS = [portable(op, impl, F32) for op, impl in PORTABLE]


@pytest.fixture(autouse=True)
def _skip_elsewhere(case: Case) -> None:
    """Skip an implementation that this GPU cannot run, for the reason that its declaration gives."""
    if case.device == "cuda" and case.impl == WHOLE_STATE:
        from lrbench.kernels.scalar_decay.engine import why_not_whole_state

        dims = (
            torch.empty(1, 1, 1, case.sizes[x], dtype=case.dtype, device="cuda") for x in ("head_dim_qk", "head_dim_v")
        )
        if reason := why_not_whole_state(*dims, None, 1.0):
            pytest.skip(f"{case.impl}: {reason}")


def assert_same(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise unless both hold the same bits."""
    assert results.keys() == expected.keys()
    different = [name for name, x in expected.items() if not torch.equal(results[name], x)]
    assert not different


def run(case: Case, fn: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Return outputs, last state and gradients of the case's function, or of one around it."""
    return laws.evaluate(case.draw(), fn or case.function)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@on_each(*EVERYWHERE)
def test_compiled(case: Case, dynamic: bool) -> None:
    """A function around it compiles in one piece and gives the same numbers; with a dynamic length once for all."""
    backend = torch._dynamo.testing.CompileCounterWithBackend("inductor" if case.device == "cuda" else "aot_eager")
    around = case.function
    compiled = torch.compile(lambda *args, **keywords: around(*args, **keywords), fullgraph=True, backend=backend)
    seq_len = case.sizes["seq_len"]
    # Of several tiles both, and of one power of two: what is of size 1, or a default chunk, is compiled for.
    lengths = (seq_len * 7 // 4, seq_len * 5 // 2) if dynamic else (seq_len,)

    def function(*args: Tensor, **keywords: Any) -> Any:
        if dynamic:
            for x in args:
                if x.dim() > 2 or (case.op == "gated_mlp" and x is args[0]):
                    torch._dynamo.mark_dynamic(x, 1 if x.dim() > 2 else 0)
        return compiled(*args, **keywords)

    for seq_len in lengths:
        batch = {"batch": 2} if "batch" in case.sizes else {}
        here = replace(case, sizes={**case.sizes, **batch, "seq_len": seq_len})
        expected, results = run(here), run(here, function)
        assert results.keys() == expected.keys()
        for name, x in expected.items():
            # The compiler may put torch's own operations in another order; kernels give the same bits.
            bound = 4 * torch.finfo(case.dtype).eps * float(x.abs().max())
            assert results[name].shape == x.shape, name
            assert float((results[name] - x).abs().max()) <= bound, name
    with pytest.raises(RuntimeError, match=r"create_graph=False|double backward"):
        laws.evaluate(replace(here.draw(), twice=True), function)
    assert backend.frame_count == 1


ONE_TOKEN = {op: {**sizes, "seq_len": 1} for op, sizes in SMALL_SIZES.items() if op in (*HEADS, *CHANNELS)}


@on_each(
    *EVERYWHERE,
    *(on_gpu(op, impl, dtype) for op, impl, dtype in SMALL),
    *(make(op, "step", F16, sizes=sizes) for make in (interpreted, on_gpu) for op, sizes in ONE_TOKEN.items()),
    *(make("projections", "gemms", F16, sizes=SMALL_SIZES["gated_mlp"]) for make in (interpreted, on_gpu)),
    *(each for make in (interpreted, on_gpu) for each in each_mlp(make, F16, sizes=SMALL_SIZES["gated_mlp"])),
)
def test_unaligned_tensors(case: Case) -> None:
    laws.check_unaligned(case)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("law", [laws.check_unaligned, laws.check_strided])
@on_each(*INTERPRETED[:1], *INTERPRETED[-2:], *ON_GPU)
def test_unaligned_and_strided_tensors_of_compiled_calls(case: Case, law: Callable[[Case], None]) -> None:
    backend = "inductor" if case.device == "cuda" else "aot_eager"
    law(replace(case, wrap=lambda fn: torch.compile(lambda *x, **y: fn(*x, **y), fullgraph=True, backend=backend)))


class _Calls(TorchDispatchMode):
    """Records calls of registered operators of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "lrbench":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@on_each(*EVERYWHERE)
def test_operators_pass_torchs_own_checks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators of a compiled call pass torch's own checks: schema, shapes without running, autograd, tracing."""
    problem = case.draw()
    with monkeypatch.context() as patch, _Calls() as seen:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        laws.evaluate(problem, case.function)
        with pytest.raises(RuntimeError, match="no second derivative"):
            laws.evaluate(replace(problem, twice=True), case.function)
    names = {func.name() for func, _ in seen.calls}
    assert len(names) == 2
    for func, args in seen.calls:
        # Gradients have no gradients of their own.
        differentiable = not func.name().endswith("_backward")

        def leaf(x: Tensor, differentiable: bool = differentiable) -> Tensor:
            return x.detach().clone().requires_grad_(differentiable)

        torch.library.opcheck(func, tree_map_only(Tensor, leaf, args))


def flops(counter: FlopCounterMode) -> list[int]:
    """Return what was counted of our operators: of the forward and, if it ran, the backward pass."""
    return [n for operator, n in counter.get_flop_counts()["Global"].items() if "lrbench" in str(operator)]


def flops_of(case: Case, *modes: str) -> list[float]:
    """Return what counts say of the operator that the case calls."""
    op, dtype, sizes = case.op.removesuffix("_layer"), str(CASE_DTYPES[case.dtype]), dict(case.sizes)
    if case.impl != "step":
        own = get_operation(op).implementation(case.impl).chosen_chunk(sizes, dtype)
        sizes |= {"chunk_size": chunk} if (chunk := case.kwargs.get("chunk_size", own)) else {}
    found = [count_case(op, case.impl, mode, dtype, None, sizes) for mode in modes]
    return [round(each.flops) for each in found if each]


@on_each(*EVERYWHERE)
def test_flops_are_counted(case: Case) -> None:
    """torch's counter has the FLOPs that ours has, and the results are the same bits, gradients included."""
    expected = run(case)
    with FlopCounterMode(display=False) as counter:
        results = run(case)
    assert_same(results, expected)
    assert flops(counter) == flops_of(case, "fw", "bw") != []


@on_each(*(make(op, "step", F16, sizes=sizes) for make in (interpreted, on_gpu) for op, sizes in ONE_TOKEN.items()))
def test_flops_of_steps_are_counted(case: Case) -> None:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        case.function(*case.draw().inputs.values())
    assert flops(counter) == flops_of(case, "step") != []


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("how", ["compiled", "fake"])
@on_each(INTERPRETED[0], INTERPRETED[-1], ON_GPU[0], ON_GPU[-1])
def test_flops_are_counted_of_calls_that_are(case: Case, how: str) -> None:
    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(case.function, backend=backend) if how == "compiled" else case.function
    with FakeTensorMode() if how == "fake" else nullcontext() as fake:
        inputs = [x if fake is None else fake.from_tensor(x) for x in case.draw().inputs.values()]
        with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
            function(*(x.requires_grad_() for x in inputs)).sum().backward()
    if how == "compiled":
        function(*inputs)
        assert backend.frame_count == 1
    assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs)
    assert flops(counter) == flops_of(case, "fw", "bw")


@on_each(*AROUND, *FORMS)
def test_autocast_changes_nothing(case: Case) -> None:
    """Gates and states keep their dtype, and so do products within."""
    lower = BF16 if case.dtype != BF16 else F16

    def function(*args: Any, **keywords: Any) -> Any:
        with torch.autocast(case.device, dtype=lower):
            return case.function(*args, **keywords)

    assert_same(run(case, function), run(case))


@on_each(
    *(portable(op, impl, F32, chunk_size=16) for op, impl in PORTABLE if op in ("mlstm_exp", "simple_gla", "rglru"))
)
def test_autocast_around_a_backward_pass_changes_nothing(case: Case) -> None:
    inputs = dict(case.draw().inputs)
    wanted = list(case.operation.leaves(inputs).values())
    scalar = case.function(*inputs.values()).square().sum()
    for twice in (False, True):
        gradients = partial(torch.autograd.grad, scalar, wanted, retain_graph=True, create_graph=twice)
        expected = gradients()
        with torch.autocast(case.device, dtype=BF16):
            assert all(map(torch.equal, gradients(), expected))


@on_each(*AROUND, *FORMS)
def test_checkpointed(case: Case) -> None:
    """A forward pass that is run again for the backward pass gives the same bits."""
    assert_same(run(case, partial(checkpoint, case.function, use_reentrant=False)), run(case))


@on_each(*AROUND, *(each for each in FORMS if each.values[0].impl in ("torch", "parallel") and "mlp" not in each.id))
def test_transforms_are_refused(case: Case) -> None:
    """A kernel would be handed tensors without memory, and autograd functions have no rule for them."""
    inputs = list(case.draw().inputs.values())

    def loss(x: Tensor) -> Tensor:
        return case.function(x, *inputs[1:]).float().sum()

    expected = (
        r"\w+ must not be inside a transform of torch\.func .* use a batch dimension instead of vmap, and torch\.aut"
    )
    with pytest.raises(RuntimeError, match=expected):
        torch.func.grad(loss)(inputs[0])
    with pytest.raises(RuntimeError, match=expected):
        torch.func.vmap(lambda x: case.function(x, *inputs[1:]))(inputs[0][None])


@pytest.fixture
def _process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class _Layer(torch.nn.Module):
    """A module whose parameters are a case's differentiable inputs."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.function = case.function
        self.names = list(case.draw().inputs)
        for name, x in case.draw().inputs.items():
            if name in case.operation.differentiable:
                self.register_parameter(f"in_{name}", torch.nn.Parameter(x.clone()))
            else:
                self.register_buffer(f"in_{name}", x)

    def forward(self) -> Tensor:
        return self.function(*(getattr(self, f"in_{name}") for name in self.names))


@pytest.mark.usefixtures("_process_group")
@on_each(*AROUND)
def test_distributed_hooks(case: Case) -> None:
    """DDP's hooks see every gradient once, as it is without them."""
    alone, layer = _Layer(case), _Layer(case)
    alone().float().square().sum().backward()
    DistributedDataParallel(layer)().float().square().sum().backward()
    expected = {name: x.grad for name, x in alone.named_parameters()}
    assert_same({name: x.grad for name, x in layer.named_parameters()}, expected)
    assert all(x is not None for x in expected.values())


@on_each(
    *ON_GPU,
    on_gpu("rglru", "fused", BF16, sizes=channels(4, 5000, 512)),
    on_gpu("linear_scan", "scan", BF16, sizes=channels(4, 5000, 512)),
    on_gpu("wkv4", "scan", BF16, sizes=channels(8, 5000, 256)),
    on_gpu("wkv4", "scan", BF16, sizes=channels(1, 65536, 256)),
)
def test_same_bits_every_time(case: Case) -> None:
    """Also where many programs wait for each other: they may run in any order, but add up in a fixed one."""
    expected = run(case)
    for _ in range(20):
        assert_same(run(case), expected)


@on_each(*ON_GPU)
def test_two_streams(case: Case) -> None:
    """Calls on two streams at once, forward and backward, each with inputs of its own."""
    problems = [replace(case, seed=seed).draw() for seed in (1, 2)]
    expected = [laws.evaluate(problem, case.function) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[dict[str, Tensor]]] = [[], []]
    for _ in range(20):
        for problem, stream, done in zip(problems, streams, results, strict=True):
            with torch.cuda.stream(stream):
                done.append(laws.evaluate(problem, case.function))
    torch.cuda.synchronize()
    for done, wanted in zip(results, expected, strict=True):
        for result in done:
            assert_same(result, wanted)


@on_each(*ON_GPU)
def test_repeated_calls(case: Case, repeated: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that repeat launches, with other values, on other streams, with other gradients asked for, have the bits of
    a call whose launches are all Triton's."""

    def evaluate(seed: int, names: Sequence[str], carry: bool) -> dict[str, Tensor]:
        problem = replace(case, seed=seed).draw()
        inputs = {name: x.requires_grad_(name in names) for name, x in problem.inputs.items()}
        keywords = {"initial_state": laws.public_state(problem.state), "return_last_state": True} if carry else {}
        outputs = tree_leaves(case.function(*inputs.values(), **case.options, **keywords))
        results = {str(n): y.detach() for n, y in enumerate(outputs)}
        wanted = [y for y in outputs if y.requires_grad]
        if wanted:
            torch.manual_seed(seed)
            weights = [torch.randn_like(y) for y in wanted]
            results |= dict(zip(names, torch.autograd.grad(wanted, [inputs[n] for n in names], weights), strict=True))
        return results

    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    differentiable_inputs = case.operation.differentiable
    for carry in (False, True) if case.draw().has_state else (False,):
        for turn in range(15):
            names = [differentiable_inputs, differentiable_inputs[:1], ()][turn % 3]
            with monkeypatch.context() as patch:
                patch.setattr(differentiable, "run_pass", lambda memory, key, run: run())
                repeated.clear()
                expected = evaluate(turn, names, carry)
                assert not repeated
            with torch.cuda.stream(streams[turn % 2]):
                torch.cuda.synchronize()
                results = evaluate(turn, names, carry)
                torch.cuda.synchronize()
            assert_same(results, expected)
        # torch computes lightning1's states, outside of the request: such a call is not remembered.
        assert bool(repeated) != (carry and case.impl == "lightning1")


def results_of(function: Callable[..., Tensor], case: Case, seed: int) -> list[Tensor]:
    """Return copies of the output and the gradients, of inputs and an output's gradient that the seed draws."""
    inputs = replace(case, seed=seed).draw().inputs
    leaves = [x.requires_grad_() for name, x in inputs.items() if name in case.operation.differentiable]
    y = function(*inputs.values())
    torch.manual_seed(seed)
    return [x.detach().clone() for x in (y, *torch.autograd.grad(y, leaves, torch.randn_like(y)))]


@on_each(*ON_GPU)
def test_graphed_callables(case: Case) -> None:
    """torch.cuda.make_graphed_callables captures both passes: replays with other inputs have an eager call's bits."""
    inputs = case.draw().inputs
    samples = tuple(x.requires_grad_(name in case.operation.differentiable) for name, x in inputs.items())
    graphed = torch.cuda.make_graphed_callables(lambda *x: case.function(*x), samples)
    for seed in (1, 2, 3, 1):
        assert all(map(torch.equal, results_of(graphed, case, seed), results_of(case.function, case, seed)))


@pytest.mark.usefixtures("_fresh_compiler")
@on_each(*ON_GPU)
def test_reduced_overhead(case: Case) -> None:
    """torch.compile captures both passes: replays with other inputs give an eager call's numbers."""
    function = case.function
    compiled = torch.compile(lambda *x: function(*x), fullgraph=True, mode="reduce-overhead")
    skipped = counters["inductor"]["cudagraph_skips"]
    for seed in (1, 2, 3, 1, 2, 3):
        torch.compiler.cudagraph_mark_step_begin()
        for x, y in zip(results_of(compiled, case, seed), results_of(function, case, seed), strict=True):
            assert float((x - y).abs().max()) <= 4 * torch.finfo(case.dtype).eps * float(y.abs().max())
    assert counters["inductor"]["cudagraph_skips"] == skipped


REPLAYS = 2000


@on_each(*ON_GPU)
def test_graph_replays(case: Case) -> None:
    """A captured forward and backward pass, replayed thousands of times with new inputs, beside eager calls that use
    the same kept memory: each result has an eager call's bits."""
    differentiable = case.operation.differentiable
    draws = [list(replace(case, seed=seed).draw().inputs.values()) for seed in range(4)]
    static = [x.clone() for x in draws[0]]
    leaves = [x.requires_grad_() for name, x in zip(case.draw().inputs, static, strict=True) if name in differentiable]
    grad = torch.randn_like(case.function(*static).detach())

    def step() -> tuple[Tensor, ...]:
        y = case.function(*static)
        return y, *torch.autograd.grad(y, leaves, grad)

    def fill(draw: list[Tensor]) -> None:
        with torch.no_grad():
            for x, new in zip(static, draw, strict=True):
                x.copy_(new)

    expected = []
    for draw in draws:
        fill(draw)
        expected.append([x.detach().clone() for x in step()])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for index, (draw, wanted) in zip(range(REPLAYS), itertools.cycle(zip(draws, expected, strict=True)), strict=False):
        fill(draw)
        graph.replay()
        if index % 100 == 0:
            case.function(*draws[0])
        for x, y in zip(captured, wanted, strict=True):
            wrong += (x.detach() != y).any()
    assert int(wrong) == 0
