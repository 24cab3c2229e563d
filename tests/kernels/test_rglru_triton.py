"""The laws for the diagonal engine's kernels: in the interpreter on small tiles, and on a GPU at real sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.common.channels import TileConfig
from lrbench.kernels.rglru import LINEAR_SCAN, RGLRU, launch
from lrbench.kernels.rglru.config import ScanConfig
from lrbench.kernels.spec import Operation
from lrbench.tests.kernels import channel_laws, laws
from lrbench.tests.kernels.channel_laws import EXTREMES, function
from lrbench.tests.kernels.words import check_shapes_share_words, give_words

interpret = pytest.mark.interpret
gpu = pytest.mark.gpu

SMALL = {"batch": 2, "seq_len": 19, "channels": 24}
LONGER_ROWS_FORWARD = ScanConfig(
    forward=TileConfig(block_i=4, block_o=2, block_c=16, num_warps=1),
    backward=TileConfig(block_i=2, block_o=4, block_c=32, num_warps=1),
)
LONGER_ROWS_BACKWARD = ScanConfig(
    forward=TileConfig(block_i=2, block_o=4, block_c=32, num_warps=1),
    backward=TileConfig(block_i=4, block_o=2, block_c=16, num_warps=1),
)
"""Tiles so small that 19 steps are three of them, the last one ragged; 24 channels leave a block half empty."""
WALKED = ScanConfig(
    forward=TileConfig(block_i=4, block_o=1, block_c=32, num_warps=1),
    backward=TileConfig(block_i=4, block_o=1, block_c=32, num_warps=1),
)
IMPLEMENTATIONS = [
    (RGLRU, "fused", {"config": LONGER_ROWS_FORWARD}),
    (RGLRU, "fused", {"config": LONGER_ROWS_BACKWARD}),
    (RGLRU, "chunked", {"config": LONGER_ROWS_FORWARD, "chunk_size": 16}),
    (RGLRU, "naive", {"config": WALKED}),
    (LINEAR_SCAN, "scan", {"config": LONGER_ROWS_FORWARD}),
    (LINEAR_SCAN, "chunked", {"config": LONGER_ROWS_BACKWARD, "chunk_size": 16}),
    (LINEAR_SCAN, "naive", {"config": WALKED}),
]
each_implementation = pytest.mark.parametrize(
    ("operation", "name", "kwargs"), IMPLEMENTATIONS, ids=lambda value: getattr(value, "name", None) or str(value)[:5]
)


@interpret
@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_matches_reference(operation: Operation, name: str, kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    channel_laws.check_matches_reference(
        operation, function(operation, name), dtype=dtype, device="cpu", sizes=SMALL, **kwargs
    )


@interpret
@each_implementation
def test_lengths_without_a_state(operation: Operation, name: str, kwargs: dict[str, Any]) -> None:
    """In bf16, which the interpreter computes rightly where there are no dots."""
    for seq_len in (1, 8):
        channel_laws.check_matches_reference(
            operation, function(operation, name), dtype=torch.bfloat16, device="cpu",
            sizes={**SMALL, "seq_len": seq_len}, initial_state=False, **kwargs,
        )  # fmt: skip


@interpret
@pytest.mark.parametrize("gates", EXTREMES["rglru"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gates_over_their_range(gates: str, dtype: torch.dtype) -> None:
    channel_laws.check_matches_reference(
        RGLRU, function(RGLRU, "fused"), dtype=dtype, device="cpu", sizes=SMALL, ranges=EXTREMES["rglru"][gates],
        config=LONGER_ROWS_BACKWARD,
    )  # fmt: skip


@interpret
@pytest.mark.parametrize(("operation", "name"), [(RGLRU, "fused"), (LINEAR_SCAN, "scan")], ids=["rglru", "linear_scan"])
def test_split_equals_whole(operation: Operation, name: str) -> None:
    channel_laws.check_matches_reference(
        operation, function(operation, name), dtype=torch.bfloat16, device="cpu", sizes=SMALL, splits=(1, 12),
        config=LONGER_ROWS_FORWARD,
    )  # fmt: skip


@interpret
def test_batch_invariant() -> None:
    channel_laws.check_batch_invariant(
        RGLRU, function(RGLRU, "fused"), dtype=torch.float32, device="cpu", sizes=SMALL, config=LONGER_ROWS_FORWARD
    )


@interpret
@pytest.mark.parametrize(("operation", "name"), [(RGLRU, "fused"), (LINEAR_SCAN, "scan")], ids=["rglru", "linear_scan"])
@pytest.mark.parametrize("seq_len", [9, 16, 27])
def test_words_hold_the_states_behind_their_tiles(
    operation: Operation, name: str, seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward too, where tiles are taken from the end of time; what was left in the words is another call's."""
    fn, config = function(operation, name), LONGER_ROWS_FORWARD
    sizes = {"batch": 2, "seq_len": seq_len, "channels": 24}
    inputs = resolve(operation.inputs)(sizes, dtype=torch.float32, device="cpu", seed=0)
    dh = torch.randn(2, seq_len, 24, generator=torch.Generator().manual_seed(1))

    def run(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last state of part of the sequence, and the gradient of its initial state."""
        part = [x[:, start:stop].contiguous() if x.dim() == 3 else x for x in inputs.values()]
        state = torch.zeros(2, 24, requires_grad=True)
        h, last = fn(*part, initial_state=state, return_last_state=True, config=config)
        return last.detach(), torch.autograd.grad((h * dh[:, start:stop]).sum(), state)[0]

    with monkeypatch.context() as patch:
        given = give_words(launch, 7, patch)
        results = run(0, seq_len)
    assert all(torch.equal(x, y) for x, y in zip(results, run(0, seq_len), strict=True))
    steps = config.forward.steps
    assert steps == config.backward.steps
    starts = range(0, seq_len, steps)
    for (words, others), parts in zip(
        given,
        ([run(0, min(start + steps, seq_len))[0] for start in starts],
         [run(start, seq_len)[1] for start in reversed(starts)]),
        strict=True,
    ):  # fmt: skip
        assert (words[:, 1] == 7).all() and (others[:, 1] == 6).all()
        assert torch.equal(words[:, 0].view(torch.float32).view(len(starts), 2, 24), torch.stack(parts))


@interpret
def test_calls_of_different_shapes_share_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def results(sizes: dict[str, int]) -> list[torch.Tensor]:
        problem = channel_laws.make_problem(RGLRU, sizes, dtype=torch.float32, device="cpu", num_siblings=0)
        return [*laws.evaluate(problem, function(RGLRU, "fused"), config=LONGER_ROWS_FORWARD).values()]

    check_shapes_share_words(launch, results, monkeypatch, launches=2)


@interpret
def test_a_closed_gate_keeps_the_state() -> None:
    check_closed_gate(function(RGLRU, "fused"), dtype=torch.float16, device="cpu", config=LONGER_ROWS_FORWARD)
    check_closed_gate(function(RGLRU, "fused"), dtype=torch.float32, device="cpu", config=LONGER_ROWS_FORWARD)


def check_closed_gate(fn: Any, *, dtype: torch.dtype, device: str, **kwargs: Any) -> None:
    """Pre-activations of minus infinity, a mask, leave state and gradients as they are."""
    x, i = torch.randn(2, 2, 9, 8, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    leaves = [x.clone().requires_grad_(), torch.full_like(x, -math.inf).requires_grad_(), i.clone().requires_grad_()]
    c = torch.zeros(8, device=device, requires_grad=True)
    state = torch.randn(2, 8, device=device, requires_grad=True)
    h, last = fn(*leaves, c, initial_state=state, return_last_state=True, **kwargs)
    assert torch.equal(last, state)
    assert torch.equal(h, state[:, None].expand_as(h).to(dtype))
    gradients = torch.autograd.grad(last.sum(), [*leaves, c, state])
    assert all(not g.any() for g in gradients[:-1])
    assert torch.equal(gradients[-1], torch.ones_like(state))


@interpret
@pytest.mark.parametrize("differentiable", RGLRU.differentiable)
def test_each_argument_alone_gets_its_gradient(differentiable: str) -> None:
    inputs = resolve(RGLRU.inputs)({**SMALL, "seq_len": 9}, dtype=torch.float32, device="cpu", seed=0)
    together = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    alone = {name: x.requires_grad_(name == differentiable) for name, x in inputs.items()}
    fn = function(RGLRU, "fused")
    expected, got = (
        torch.autograd.grad(fn(*each.values(), config=LONGER_ROWS_FORWARD).sum(), each[differentiable])[0]
        for each in (together, alone)
    )
    assert torch.equal(got, expected)


@interpret
def test_second_derivatives_are_refused_in_words() -> None:
    inputs = resolve(RGLRU.inputs)({**SMALL, "seq_len": 3}, dtype=torch.float32, device="cpu", seed=0)
    leaves = [x.requires_grad_() for x in inputs.values()]
    h = function(RGLRU, "fused")(*leaves, config=LONGER_ROWS_FORWARD)
    (dx,) = torch.autograd.grad(h.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        dx.sum().backward()


@interpret
@pytest.mark.parametrize(("operation", "one_pass"), [(RGLRU, "fused"), (LINEAR_SCAN, "scan")])
def test_bad_input(operation: Operation, one_pass: str) -> None:
    for name in (one_pass, "chunked", "naive"):
        channel_laws.check_bad_input(operation, function(operation, name), dtype=torch.float32, device="cpu")
    fn = function(operation, one_pass)
    make_inputs = resolve(operation.inputs)
    odd = make_inputs({**SMALL, "channels": 20}, dtype=torch.float32, device="cpu", seed=0)
    with pytest.raises(ValueError, match="channels must be a multiple of 8, got 20"):
        fn(*odd.values())
    double = make_inputs(SMALL, dtype=torch.float64, device="cpu", seed=0)
    with pytest.raises(ValueError, match="x must be one of float32, float16, bfloat16, got float64"):
        fn(*double.values())
    good = make_inputs(SMALL, dtype=torch.float32, device="cpu", seed=0)
    with pytest.raises(ValueError, match="chunk_size must be a power of two >= 16, got 48"):
        function(operation, "chunked")(*good.values(), chunk_size=48)
    with pytest.raises(ValueError, match="a decoding step takes one token: seq_len must be 1, got 19"):
        resolve(operation.implementation(one_pass).step_call)(*good.values())


@interpret
def test_bad_launches() -> None:
    inputs = resolve(RGLRU.inputs)(SMALL, dtype=torch.float32, device="cpu", seed=0)
    tile = TileConfig(block_i=4, block_o=2, block_c=16, num_warps=1)

    def rejects(match: str, **tiles: TileConfig) -> None:
        with pytest.raises(ValueError, match=match):
            function(RGLRU, "chunked")(
                *inputs.values(), chunk_size=16, config=ScanConfig(**{"forward": tile, "backward": tile, **tiles})
            )

    odd = TileConfig(block_i=4, block_o=3, block_c=16, num_warps=1)
    long = TileConfig(block_i=32, block_o=1, block_c=16, num_warps=1)
    rejects("config: forward.block_o must be a power of two, got 3", forward=odd)
    rejects(r"config: forward tiles must hold whole rows of the backward pass \(32 steps\), got 8 steps", backward=long)
    rejects(
        r"config: chunks must hold whole rows of the backward pass \(32 steps\), got 16 steps",
        forward=long,
        backward=long,
    )


@interpret
@pytest.mark.parametrize(("operation", "name"), [(RGLRU, "fused"), (LINEAR_SCAN, "scan")], ids=["rglru", "linear_scan"])
def test_steps_continue_a_sequence(operation: Operation, name: str) -> None:
    step = resolve(operation.implementation(name).step_call)
    channel_laws.check_steps(operation, step, dtype=torch.float32, device="cpu", sizes=SMALL, prefix=16)


GPU_SIZES = [
    {"batch": 8, "seq_len": 2048, "channels": 1024},
    {"batch": 1, "seq_len": 4099, "channels": 2560},
    {"batch": 3, "seq_len": 1000, "channels": 264},
    {"batch": 2, "seq_len": 129, "channels": 8},
]
ONE_PASS = [(RGLRU, "fused"), (LINEAR_SCAN, "scan")]
OTHERS = [(operation, name) for operation in (RGLRU, LINEAR_SCAN) for name in ("chunked", "naive")]
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def on_gpu(operation: Operation, name: str, sizes: dict[str, int], dtype: torch.dtype) -> Any:
    """The single pass in bf16 at every size, everything else at one; the rest of the product is slow."""
    first = (dtype == torch.bfloat16 and (operation, name) == ONE_PASS[0]) or sizes is GPU_SIZES[2]
    label = f"{operation.name}-{name}-{'x'.join(map(str, sizes.values()))}-{str(dtype).removeprefix('torch.')}"
    return pytest.param(operation, name, sizes, dtype, id=label, marks=() if first else (pytest.mark.slow,))


@gpu
@pytest.mark.parametrize(
    ("operation", "name", "sizes", "dtype"),
    [
        on_gpu(operation, name, sizes, dtype)
        for operation, name in (*ONE_PASS, *OTHERS)
        for sizes in GPU_SIZES
        for dtype in GPU_DTYPES
    ],
)
def test_matches_reference_on_gpu(operation: Operation, name: str, sizes: dict[str, int], dtype: torch.dtype) -> None:
    channel_laws.check_matches_reference(operation, function(operation, name), dtype=dtype, device="cuda", sizes=sizes)


@gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("operation", "name"),
    [*ONE_PASS, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_laws_on_gpu(operation: Operation, name: str, dtype: torch.dtype) -> None:
    fn = function(operation, name)
    sizes = {"batch": 2, "seq_len": 400, "channels": 136}
    channel_laws.check_matches_reference(operation, fn, dtype=dtype, device="cuda", sizes=sizes, splits=(100, 101))
    channel_laws.check_batch_invariant(operation, fn, dtype=dtype, device="cuda", sizes=sizes, exact=False)
    for ranges in EXTREMES[operation.name].values():
        channel_laws.check_matches_reference(operation, fn, dtype=dtype, device="cuda", sizes=sizes, ranges=ranges)
    if operation is RGLRU:
        check_closed_gate(fn, dtype=dtype, device="cuda")
    if dtype == torch.bfloat16:
        channel_laws.check_bad_input(operation, fn, dtype=dtype, device="cuda")
        for length in (1, 2, 63, 65):
            channel_laws.check_matches_reference(
                operation, fn, dtype=dtype, device="cuda", sizes={**sizes, "seq_len": length}, initial_state=False
            )


@gpu
@pytest.mark.parametrize(("operation", "name"), ONE_PASS, ids=["rglru", "linear_scan"])
def test_graphs_replay_on_gpu(operation: Operation, name: str) -> None:
    """A replay finds its words zero again; stale ones would end waits before their states are there."""
    sizes = {"batch": 2, "seq_len": 3000, "channels": 256}
    inputs = resolve(operation.inputs)(sizes, dtype=torch.bfloat16, device="cuda", seed=0)
    fn = function(operation, name)
    with torch.no_grad():
        fn(*inputs.values())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fn(*inputs.values())
        for _ in range(3):
            inputs["x"].normal_()
            graph.replay()
            assert torch.equal(captured, fn(*inputs.values()))


@gpu
@pytest.mark.parametrize(("operation", "name"), ONE_PASS, ids=["rglru", "linear_scan"])
def test_more_programs_than_fit_at_once_on_gpu(operation: Operation, name: str) -> None:
    """Many times the programs that a GPU holds, in one long chain: whoever waits must wait for one that runs."""
    sizes = {"batch": 1, "seq_len": 200_000, "channels": 1032}
    inputs = resolve(operation.inputs)(sizes, dtype=torch.bfloat16, device="cuda", seed=0)
    whole = function(operation, name)(*inputs.values())
    naive = function(operation, "naive")(*inputs.values())
    torch.testing.assert_close(whole.float(), naive.float(), rtol=2**-6, atol=2**-6)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("operation", "name"), [(RGLRU, "fused"), (LINEAR_SCAN, "scan")], ids=["rglru", "linear_scan"])
def test_steps_on_gpu(operation: Operation, name: str, dtype: torch.dtype) -> None:
    step = resolve(operation.implementation(name).step_call)
    channel_laws.check_steps(operation, step, dtype=dtype, device="cuda", sizes={**SMALL, "seq_len": 40}, prefix=8)


@gpu
@pytest.mark.parametrize(("operation", "name"), [(RGLRU, "fused"), (LINEAR_SCAN, "scan")], ids=["rglru", "linear_scan"])
def test_equal_calls_give_equal_bits_on_gpu(operation: Operation, name: str) -> None:
    """Programs wait for each other in an order of their own; the sums they make have one order all the same."""
    sizes = {"batch": 4, "seq_len": 5000, "channels": 512}
    problem = channel_laws.make_problem(operation, sizes, dtype=torch.bfloat16, device="cuda", num_siblings=0)
    first = laws.evaluate(problem, function(operation, name))
    for _ in range(5):
        again = laws.evaluate(problem, function(operation, name))
        assert all(torch.equal(first[key], again[key]) for key in first)
