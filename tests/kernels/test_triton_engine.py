"""The law suite for the Triton engine: in the interpreter on small shapes, and on a GPU on real ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lrbench.kernels import get_operation, resolve
from lrbench.tests.kernels import laws

OPERATIONS = laws.ENGINE_OPERATIONS
IMPLEMENTATIONS = ("fused_chunk", "xl_chunk", "limit_chunk")
SMALL = {"batch": 1, "seq_len": 41, "num_heads": 2, "head_dim_qk": 24, "head_dim_v": 40}
interpret = pytest.mark.interpret
gpu = pytest.mark.gpu


def function(op: str, implementation: str) -> Callable[..., Any]:
    """Return our code for an operation."""
    return get_operation(op).function(implementation)


@interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_matches_reference(op: str, implementation: str, dtype: torch.dtype) -> None:
    laws.check_matches_reference(
        get_operation(op), function(op, implementation), dtype=dtype, device="cpu", sizes=SMALL, chunk_size=16
    )


@interpret
@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp", "mamba2_ssd"])
@pytest.mark.parametrize(("seq_len", "chunk_size"), [(64, 16), (1, 16), (33, 64)])
def test_lengths(op: str, seq_len: int, chunk_size: int) -> None:
    sizes = {**SMALL, "seq_len": seq_len, "batch": 1 if seq_len > 1 else 30}
    laws.check_matches_reference(
        get_operation(op),
        function(op, "fused_chunk"),
        dtype=torch.float16,
        device="cpu",
        sizes=sizes,
        chunk_size=chunk_size,
    )


@interpret
def test_heads_share_groups() -> None:
    sizes = {**SMALL, "num_heads": 4, "num_groups": 2}
    for implementation in IMPLEMENTATIONS:
        laws.check_matches_reference(
            get_operation("mamba2_ssd"), function("mamba2_ssd", implementation),
            dtype=torch.float32, device="cpu", sizes=sizes, chunk_size=16,
        )  # fmt: skip


@interpret
@pytest.mark.parametrize("separator", [torch.finfo(torch.float32).min, -math.inf])
@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp", "simple_gla"])
def test_packed_documents(op: str, separator: float) -> None:
    for implementation, dtype in (("fused_chunk", torch.float16), ("xl_chunk", torch.float32)):
        laws.check_packed_documents(
            get_operation(op), function(op, implementation), dtype=dtype, device="cpu",
            sizes={**SMALL, "seq_len": 64}, starts=(1, 20, 40), chunk_size=32, separator=separator,
        )  # fmt: skip


@interpret
def test_a_step_of_no_length_is_no_step() -> None:
    """Mamba-2's dt = 0 (padding) leaves the state as it is and poisons no gradient."""
    operation = get_operation("mamba2_ssd")
    inputs = resolve(operation.inputs)(SMALL, dtype=torch.float32, device="cpu", seed=0)
    inputs["dt"][:, 10:20] = 0.0
    leaves = [x.requires_grad_() for x in inputs.values()]
    for implementation in ("fused_chunk", "xl_chunk", "torch"):
        y = function("mamba2_ssd", implementation)(*leaves, chunk_size=16)
        assert all(torch.isfinite(x).all() for x in (y, *torch.autograd.grad(y.sum(), leaves)))
        torch.testing.assert_close(
            y.double(), resolve(operation.recurrent)(*(x.double() for x in leaves)), rtol=1e-4, atol=1e-4
        )


@interpret
@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp"])
def test_backward_splits_a_chunk(op: str) -> None:
    """One chunk forward, two backward: so few programs would idle a device."""
    sizes = {**SMALL, "seq_len": 270, "num_heads": 1}
    laws.check_matches_reference(
        get_operation(op), function(op, "fused_chunk"), dtype=torch.float16, device="cpu", sizes=sizes, chunk_size=512
    )


@interpret
@pytest.mark.parametrize("implementation", ["fused_chunk", "xl_chunk"])
@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp"])
def test_carried_state(op: str, implementation: str) -> None:
    laws.check_split_equals_whole(
        get_operation(op), function(op, implementation), dtype=torch.float16, device="cpu",
        sizes=SMALL, splits=[17], chunk_size=16,
    )  # fmt: skip


@interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp"])
def test_extreme_gates(op: str, dtype: torch.dtype) -> None:
    sizes = {**SMALL, "seq_len": 64}
    for implementation in ("fused_chunk", "xl_chunk"):
        laws.check_extreme_gates(
            get_operation(op), function(op, implementation), dtype=dtype, device="cpu", sizes=sizes, chunk_size=32
        )


@interpret
def test_implementations_and_their_options() -> None:
    """Every operation takes the same names; what an implementation does not have is refused."""
    fn, inputs = function("simple_gla", "fused_chunk").func, resolve(get_operation("simple_gla").inputs)
    tensors = inputs(SMALL, dtype=torch.float32, device="cpu", seed=0).values()
    known = "fused_chunk, xl_chunk, limit_chunk, torch, parallel, recurrent, step"
    with pytest.raises(ValueError, match=f"impl must be one of {known}, got 'walk'"):
        fn(*tensors, impl="walk")
    with pytest.raises(ValueError, match="chunk_size must be None for parallel, got 16"):
        fn(*tensors, impl="parallel", chunk_size=16)
    with pytest.raises(TypeError, match="round_operands is no option of fused_chunk"):
        fn(*tensors, round_operands=True)
    with pytest.raises(ValueError, match="a decoding step takes one token: seq_len must be 1, got 41"):
        fn(*tensors, impl="step")
    assert torch.equal(fn(*tensors), function("simple_gla", "fused_chunk")(*tensors))


@interpret
@pytest.mark.parametrize("op", OPERATIONS)
def test_bad_input(op: str) -> None:
    for implementation in IMPLEMENTATIONS:
        laws.check_bad_input(
            get_operation(op), function(op, implementation), dtype=torch.float32, device="cpu", chunk_size=16
        )


@interpret
def test_unsupported_arguments() -> None:
    fused_chunk = function("mlstm_exp", "fused_chunk")
    inputs = resolve(get_operation("mlstm_exp").inputs)
    good = inputs({**SMALL, "head_dim_v": 16}, dtype=torch.float32, device="cpu", seed=0)
    with pytest.raises(ValueError, match="normalizer_gradient must be False for fused_chunk, got True"):
        fused_chunk(*good.values(), normalizer_gradient=True)
    with pytest.raises(ValueError, match="chunk_size must be a power of two >= 16, got 48"):
        fused_chunk(*good.values(), chunk_size=48)
    with pytest.raises(ValueError, match="chunk_size must be one of 16, 32, 64, 128 for limit_chunk, got 256"):
        function("mlstm_exp", "limit_chunk")(*good.values(), chunk_size=256)
    for name, dim in (("head_dim_v", 20), ("head_dim_qk", 8), ("head_dim_v", 1032)):
        bad = inputs({**SMALL, name: dim}, dtype=torch.float32, device="cpu", seed=0)
        with pytest.raises(ValueError, match=f"{name} must be a multiple of 8 from 16 to 1024, got {dim}"):
            fused_chunk(*bad.values())
    double = inputs(SMALL, dtype=torch.float64, device="cpu", seed=0)
    with pytest.raises(ValueError, match="v must be one of float32, float16, bfloat16, got float64"):
        fused_chunk(*double.values())


@interpret
@pytest.mark.parametrize("op", OPERATIONS)
def test_steps_continue_a_sequence(op: str) -> None:
    check_steps(op, dtype=torch.float32, device="cpu", steps=3)


@gpu
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_steps_on_gpu(op: str, dtype: torch.dtype) -> None:
    check_steps(op, dtype=dtype, device="cuda", steps=20)


def check_steps(op: str, *, dtype: torch.dtype, device: str, steps: int) -> None:
    """Steps from a prefix's last state give the recurrence's outputs and last state."""
    operation = get_operation(op)
    inputs = resolve(operation.inputs)({**SMALL, "seq_len": 8 + steps}, dtype=dtype, device=device, seed=3)
    step = resolve(operation.implementation("fused_chunk").step_call)
    recurrent = resolve(operation.recurrent)

    def part(start: int, stop: int) -> list[torch.Tensor]:
        return [x[:, start:stop].contiguous() if x.dim() > 1 else x for x in inputs.values()]

    exact = [x.double() for x in inputs.values()]
    expected, _ = recurrent(*exact, return_last_state=True)
    _, state = recurrent(*[x.float() for x in part(0, 8)], return_last_state=True)
    outputs = []
    for t in range(8, 8 + steps):
        h, state = step(*part(t, t + 1), initial_state=state, return_last_state=True)
        outputs.append(h)
    out = torch.cat(outputs, 1).double()
    error = (out - expected[:, 8:]).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps * expected.abs().max() + 1e-6


GPU_SIZES = [
    {"batch": 2, "seq_len": 1000, "num_heads": 3, "head_dim_qk": 128, "head_dim_v": 256},
    {"batch": 1, "seq_len": 700, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 64},
    {"batch": 2, "seq_len": 513, "num_heads": 2, "head_dim_qk": 24, "head_dim_v": 40},
    {"batch": 1, "seq_len": 512, "num_heads": 2, "head_dim_qk": 256, "head_dim_v": 512},
    {"batch": 1, "seq_len": 400, "num_heads": 2, "head_dim_qk": 16, "head_dim_v": 136},
    {"batch": 1, "seq_len": 200, "num_heads": 1, "head_dim_qk": 1024, "head_dim_v": 72},
]


def shape_id(sizes: dict[str, int]) -> str:
    """Return "Tx K x V"."""
    return "x".join(str(sizes[name]) for name in ("seq_len", "head_dim_qk", "head_dim_v"))


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=shape_id)
@pytest.mark.parametrize(
    ("op", "implementation", "chunk_size"),
    [
        *(
            (op, i, c)
            for op in ("mlstm_sig", "mlstm_exp")
            for i, c in (("fused_chunk", 64), ("fused_chunk", 256), ("fused_chunk", 1024))
        ),
        *((op, i, c) for op in ("mlstm_sig", "mlstm_exp") for i, c in (("xl_chunk", 256), ("limit_chunk", 64))),
        *((op, "fused_chunk", 256) for op in ("simple_gla", "retention", "gated_retention", "mamba2_ssd")),
    ],
)
def test_matches_reference_on_gpu(
    op: str, implementation: str, chunk_size: int, sizes: dict[str, int], dtype: torch.dtype
) -> None:
    laws.check_matches_reference(
        get_operation(op), function(op, implementation), dtype=dtype, device="cuda", sizes=sizes, chunk_size=chunk_size
    )


@gpu
@pytest.mark.parametrize("implementation", ["fused_chunk", "xl_chunk"])
@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp"])
def test_laws_on_gpu(op: str, implementation: str) -> None:
    operation, fn = get_operation(op), function(op, implementation)
    sizes = {"batch": 2, "seq_len": 300, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 128}
    run = partial(dict, device="cuda", sizes=sizes, chunk_size=128)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        laws.check_split_equals_whole(operation, fn, dtype=dtype, splits=[100, 101], **run())
        laws.check_batch_invariant(operation, fn, dtype=dtype, **run())
        laws.check_extreme_gates(operation, fn, dtype=dtype, **run())
    for separator in (-1e4, torch.finfo(torch.float32).min, -math.inf):
        laws.check_packed_documents(
            operation, fn, dtype=torch.bfloat16, starts=(1, 64, 200), separator=separator, **run()
        )
    laws.check_bad_input(operation, fn, dtype=torch.bfloat16, device="cuda", chunk_size=128)
    for length in (1, 2, 63, 65):
        laws.check_matches_reference(
            operation,
            fn,
            dtype=torch.bfloat16,
            device="cuda",
            chunk_size=64,
            sizes={**sizes, "seq_len": length, "batch": 30},
        )
    laws.check_matches_reference(operation, fn, dtype=torch.bfloat16, state_dtype=torch.bfloat16, **run())
