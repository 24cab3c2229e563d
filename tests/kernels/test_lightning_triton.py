"""The law suite for Lightning's Triton kernels: in the interpreter on small shapes, and on a GPU on real ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.lightning import OPERATION
from lrbench.kernels.lightning.config import LightningConfig, LoopConfig, SweepConfig
from lrbench.tests.kernels import laws

PAPERS = ("lightning1", "lightning2")
ENGINE = ("fused_chunk",)
SMALL = {"batch": 1, "seq_len": 70, "num_heads": 2, "head_dim_qk": 24, "head_dim_v": 40}
interpret = pytest.mark.interpret
gpu = pytest.mark.gpu


def function(implementation: str) -> Callable[..., Any]:
    """Return our code."""
    return OPERATION.function(implementation)


@interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", PAPERS)
def test_matches_reference(implementation: str, dtype: torch.dtype) -> None:
    laws.check_matches_reference(OPERATION, function(implementation), dtype=dtype, device="cpu", sizes=SMALL)


@interpret
@pytest.mark.parametrize("implementation", PAPERS)
@pytest.mark.parametrize(
    "sizes",
    [
        {**SMALL, "batch": 30, "seq_len": 1, "head_dim_qk": 16, "head_dim_v": 16},
        {**SMALL, "seq_len": 64, "head_dim_qk": 128, "head_dim_v": 16},
        {**SMALL, "seq_len": 33, "head_dim_qk": 40, "head_dim_v": 200},
    ],
    ids=lambda sizes: "x".join(map(str, sizes.values())),
)
def test_any_shape(sizes: dict[str, int], implementation: str) -> None:
    laws.check_matches_reference(
        OPERATION, function(implementation), dtype=torch.float16, device="cpu", sizes=sizes, scale=-0.3
    )


@interpret
@pytest.mark.parametrize("implementation", PAPERS)
def test_no_state(implementation: str) -> None:
    laws.check_matches_reference(
        OPERATION, function(implementation), dtype=torch.float16, device="cpu", sizes=SMALL, initial_state=False
    )


@interpret
@pytest.mark.parametrize("implementation", PAPERS)
def test_carried_state_and_batch(implementation: str) -> None:
    sizes = {**SMALL, "seq_len": 35, "batch": 2}
    where: dict[str, Any] = {"dtype": torch.float16, "device": "cpu", "sizes": sizes}
    laws.check_split_equals_whole(OPERATION, function(implementation), splits=[17], **where)
    laws.check_batch_invariant(OPERATION, function(implementation), **where)


@interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", PAPERS)
def test_extreme_decays(implementation: str, dtype: torch.dtype) -> None:
    laws.check_extreme_gates(OPERATION, function(implementation), dtype=dtype, device="cpu", sizes=SMALL)


@interpret
@pytest.mark.parametrize("slope", [0.0, 1e30, float("inf")])
@pytest.mark.parametrize("implementation", PAPERS)
def test_no_decay_and_total_decay(implementation: str, slope: float) -> None:
    """Without decay the sum is cumulative; with total decay only the position itself is left."""
    inputs = resolve(OPERATION.inputs)(SMALL, dtype=torch.float32, device="cpu", seed=0)
    inputs["slope"] = torch.full_like(inputs["slope"], slope)
    q, k, v, _ = leaves = [x.requires_grad_(name != "slope") for name, x in inputs.items()]
    state = torch.ones(1, 2, 24, 40)
    _, last = function(implementation)(*leaves, initial_state=state, return_last_state=True)
    expected = torch.einsum("bthk,bthv->bhkv", k, v) + state if slope == 0 else k[:, -1, :, :, None] * v[:, -1, :, None]
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-4)
    o = function(implementation)(*leaves)
    scores = torch.einsum("bthk,bshk->bhts", q, k)
    kept = scores.tril() if slope == 0 else scores * torch.eye(scores.shape[-1])
    expected = torch.einsum("bhts,bshv->bthv", kept, v)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(
        torch.autograd.grad(o.square().sum(), [q, k, v]),
        torch.autograd.grad(expected.square().sum(), [q, k, v]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@interpret
@pytest.mark.parametrize("implementation", PAPERS)
def test_one_gradient_alone(implementation: str) -> None:
    """Whatever else has a gradient, each is the same."""
    inputs = resolve(OPERATION.inputs)(SMALL, dtype=torch.float32, device="cpu", seed=0)
    state = torch.randn(1, 2, 24, 40, generator=torch.Generator().manual_seed(1))

    def gradients(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        tensors = {name: x.clone().requires_grad_(name in names) for name, x in (*inputs.items(), ("state", state))}
        o, last = function(implementation)(
            *list(tensors.values())[:4], initial_state=tensors["state"], return_last_state=True
        )
        scalar = o.square().sum() + last.square().sum()
        return dict(zip(names, torch.autograd.grad(scalar, [tensors[name] for name in names]), strict=True))

    together = gradients(("q", "k", "v", "state"))
    for name, gradient in together.items():
        assert torch.equal(gradients((name,))[name], gradient), name


@interpret
@pytest.mark.parametrize("implementation", PAPERS)
def test_only_the_last_state_is_used(implementation: str) -> None:
    """Outputs may get no gradient at all."""
    inputs = resolve(OPERATION.inputs)(SMALL, dtype=torch.float32, device="cpu", seed=0)
    leaves = [x.requires_grad_(name != "slope") for name, x in inputs.items()]

    def gradients(fn: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        _, last = fn(*leaves, return_last_state=True)
        return torch.autograd.grad(last.square().sum(), leaves[1:3])

    for ours, theirs in zip(gradients(function(implementation)), gradients(function("torch")), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@interpret
@pytest.mark.parametrize("implementation", PAPERS)
def test_bad_input(implementation: str) -> None:
    fn = function(implementation)
    laws.check_bad_input(OPERATION, fn, dtype=torch.float32, device="cpu", chunk_size=None)
    inputs = resolve(OPERATION.inputs)
    for name, dim in (("head_dim_v", 20), ("head_dim_qk", 8), ("head_dim_v", 264)):
        bad = inputs({**SMALL, name: dim}, dtype=torch.float32, device="cpu", seed=0)
        with pytest.raises(ValueError, match=f"{name} must be a multiple of 8 from 16 to 256, got {dim}"):
            fn(*bad.values())
    double = inputs(SMALL, dtype=torch.float64, device="cpu", seed=0)
    with pytest.raises(ValueError, match="v must be one of float32, float16, bfloat16, got float64"):
        fn(*double.values())
    good = inputs(SMALL, dtype=torch.float32, device="cpu", seed=0)
    q, k, v, slope = (x.requires_grad_() for x in good.values())
    with pytest.raises(ValueError, match=f"slope must not require a gradient for {implementation}"):
        fn(q, k, v, slope)
    with torch.no_grad():
        assert fn(q, k, v, slope).isfinite().all()
    first = torch.autograd.grad(fn(q, k, v, slope.detach()).square().sum(), [q], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_differentiable"):
        first[0].sum().backward()


@interpret
@pytest.mark.parametrize("implementation", PAPERS)
def test_tensors_that_descriptors_cannot_take(implementation: str) -> None:
    """Tensors that begin off a multiple of 16 bytes are read by pointers, with the same results to the bit."""
    inputs = resolve(OPERATION.inputs)({**SMALL, "batch": 2}, dtype=torch.float16, device="cpu", seed=0)
    do = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(1)).half()

    def shifted(x: torch.Tensor) -> torch.Tensor:
        moved = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
        assert moved.data_ptr() % 16
        return moved

    def results(move: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [move(inputs[name]).requires_grad_() for name in ("q", "k", "v")]
        o = function(implementation)(*leaves, inputs["slope"])
        return o, *torch.autograd.grad(o, leaves, move(do))

    for aligned, moved in zip(results(lambda x: x), results(shifted), strict=True):
        assert torch.equal(moved, aligned)


@interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["fused_chunk", "xl_chunk"])
def test_engine_gives_slopes_a_gradient_where_they_want_one(implementation: str, dtype: torch.dtype) -> None:
    """And the other gradients are the same with it as without."""
    inputs = resolve(OPERATION.inputs)({**SMALL, "seq_len": 41}, dtype=dtype, device="cpu", seed=0)
    exact = [x.double().requires_grad_() for x in inputs.values()]
    expected = torch.autograd.grad(resolve(OPERATION.recurrent)(*exact).square().sum(), exact)

    def gradients(names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        leaves = {name: x.clone().requires_grad_(name in names) for name, x in inputs.items()}
        o = function(implementation)(*leaves.values(), chunk_size=16)
        return torch.autograd.grad(o.float().square().sum(), [leaves[name] for name in names])

    results = gradients(OPERATION.arguments)
    for ours, without in zip(results, gradients(OPERATION.differentiable), strict=False):
        assert torch.equal(ours, without)
    error = (results[-1].double() - expected[-1]).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps * expected[-1].abs().max()


@interpret
def test_steps_continue_a_sequence() -> None:
    inputs = resolve(OPERATION.inputs)({**SMALL, "seq_len": 20}, dtype=torch.float32, device="cpu", seed=3)
    expected, end = resolve(OPERATION.recurrent)(*(x.double() for x in inputs.values()), return_last_state=True)
    tensors = list(inputs.values())
    outputs, state = function("lightning2")(
        *(x[:, :17].contiguous() for x in tensors[:3]), tensors[3], return_last_state=True
    )
    parts = [outputs]
    step = resolve(OPERATION.implementation("fused_chunk").step_call or "")
    for t in range(17, 20):
        o, state = step(
            *(x[:, t : t + 1].contiguous() for x in tensors[:3]), tensors[3],
            initial_state=state, return_last_state=True,
        )  # fmt: skip
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1).double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), end, rtol=1e-4, atol=1e-4)


GPU_SIZES = [
    {"batch": 2, "seq_len": 1000, "num_heads": 3, "head_dim_qk": 128, "head_dim_v": 128},
    {"batch": 1, "seq_len": 700, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 64},
    {"batch": 2, "seq_len": 513, "num_heads": 2, "head_dim_qk": 24, "head_dim_v": 40},
    {"batch": 1, "seq_len": 512, "num_heads": 2, "head_dim_qk": 256, "head_dim_v": 256},
    {"batch": 1, "seq_len": 400, "num_heads": 2, "head_dim_qk": 16, "head_dim_v": 136},
    {"batch": 1, "seq_len": 200, "num_heads": 1, "head_dim_qk": 200, "head_dim_v": 72},
]


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=lambda sizes: "x".join(map(str, list(sizes.values())[1:])))
@pytest.mark.parametrize("implementation", [*PAPERS, "fused_chunk"])
def test_matches_reference_on_gpu(implementation: str, sizes: dict[str, int], dtype: torch.dtype) -> None:
    chunk_size = 256 if implementation in ENGINE else None
    laws.check_matches_reference(
        OPERATION, function(implementation), dtype=dtype, device="cuda", sizes=sizes, chunk_size=chunk_size
    )


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", [*PAPERS, "fused_chunk"])
def test_laws_on_gpu(implementation: str, dtype: torch.dtype) -> None:
    fn = function(implementation)
    chunk_size = 128 if implementation in ENGINE else None
    sizes = {"batch": 2, "seq_len": 300, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 128}
    where: dict[str, Any] = {"dtype": dtype, "device": "cuda", "chunk_size": chunk_size}
    laws.check_split_equals_whole(OPERATION, fn, sizes=sizes, splits=[100, 101], **where)
    laws.check_batch_invariant(OPERATION, fn, sizes=sizes, **where)
    laws.check_extreme_gates(OPERATION, fn, sizes=sizes, **where)
    laws.check_bad_input(OPERATION, fn, **where)


@gpu
@pytest.mark.parametrize("seq_len", [1, 2, 63, 65, 129])
@pytest.mark.parametrize("implementation", [*PAPERS, "fused_chunk"])
def test_short_sequences_on_gpu(implementation: str, seq_len: int) -> None:
    laws.check_matches_reference(
        OPERATION, function(implementation), dtype=torch.bfloat16, device="cuda",
        chunk_size=128 if implementation in ENGINE else None,
        sizes={"batch": 30, "seq_len": seq_len, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 128},
    )  # fmt: skip


LOOPS = [
    LoopConfig(block_t=block_t, block_z=block_z, num_warps=num_warps, num_stages=num_stages)
    for block_t, block_z, num_warps, num_stages in (
        (32, 32, 4, 2), (64, 16, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 64, 8, 2), (128, 32, 8, 2), (128, 64, 8, 2),
    )
]  # fmt: skip
SWEEPS = [
    SweepConfig(block_t=block_t, block_s=block_s, block_z=block_z, num_warps=num_warps, num_stages=num_stages)
    for block_t, block_s, block_z, num_warps, num_stages in (
        (64, 64, 64, 4, 2), (64, 64, 128, 4, 2), (128, 32, 64, 8, 2), (128, 64, 64, 4, 2), (128, 64, 128, 8, 2),
        (128, 64, 128, 8, 3), (128, 128, 128, 8, 2),
    )
]  # fmt: skip


@gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("launch", [*LOOPS, *SWEEPS], ids=str)
def test_every_launch_worth_timing_is_right_on_gpu(launch: LoopConfig | SweepConfig, head_dim: int) -> None:
    """Miscompilations depend on tile sizes and warps: neither the interpreter nor the selected launches show all."""
    name = "lightning1" if isinstance(launch, SweepConfig) else "lightning2"
    config = LightningConfig(output=launch, dq=launch, dk=launch, dv=launch)
    sizes = {"batch": 2, "seq_len": 600, "num_heads": 2, "head_dim_qk": head_dim, "head_dim_v": head_dim}
    laws.check_matches_reference(
        OPERATION, partial(function(name), config=config), dtype=torch.bfloat16, device="cuda", sizes=sizes
    )
