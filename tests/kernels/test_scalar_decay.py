"""The engine of scalar-decay operations, beside the laws: its blocks of chunks, autograd, and options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from lrbench.bench.worker.memory import measure_memory
from lrbench.kernels import get_operation, resolve
from lrbench.kernels.mlstm_exp import mlstm_exp
from lrbench.kernels.scalar_decay import chunkwise
from lrbench.kernels.scalar_decay.engine import why_not_whole_state
from lrbench.tests.kernels import laws
from lrbench.tests.kernels.cases import (
    BF16,
    F32,
    F64,
    HEADS,
    SCALAR_DECAY,
    SIZES,
    float32_products,
    heads,
    on_each,
    portable,
)
from lrbench.tests.kernels.compiling import record
from lrbench.tests.kernels.laws import Case

SMALL = SIZES["interpret"][0]
CHUNKED: dict[str, Any] = {"impl": "torch", "kwargs": {"chunk_size": 16}}


LONG = {op: heads(1 if op == "mamba2_ssd" else 16, 150, 2, 16, 24) for op in HEADS}


@on_each(
    *(portable(op, "torch", dtype, sizes=LONG[op], chunk_size=16) for op in HEADS for dtype in (F64, F32)),
    *(
        portable(
            "mlstm_exp", "torch", dtype, sizes=LONG["mlstm_exp"], chunk_size=16, ranges={"i": (0, 3)},
            options={"normalizer_gradient": True},
        )
        for dtype in (F64, F32, BF16)
    ),
)  # fmt: skip
def test_long_sequence_over_many_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three chunks of all heads; mLSTMexp also with gradients through its denominators."""
    monkeypatch.setitem(chunkwise.ROWS_PER_BLOCK, "cpu", 2 * 48 * case.sizes["batch"])
    laws.check_matches_reference(case)


@pytest.mark.parametrize(("gradients", "most", "of_mamba2"), [(False, 1.1, 2.5), (True, 7, 9)])
@pytest.mark.parametrize("op", SCALAR_DECAY)
def test_blocks_bound_the_memory_of_a_pass(
    op: str, gradients: bool, most: float, of_mamba2: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the length takes as much more as a few outputs, for what is there of all blocks, and no more scores."""
    monkeypatch.setitem(chunkwise.ROWS_PER_BLOCK, "cpu", 128)
    operation, used = get_operation(op), []
    for seq_len in (512, 1024):
        inputs = operation.make_inputs(heads(1, seq_len, 2, 16, 24), dtype=torch.float32)
        leaves = [*operation.leaves(inputs, gradients=gradients).values()]

        def call(_: Any, given: Any = inputs, wanted: Any = leaves) -> Any:
            h = operation.function("torch")(*given.values(), chunk_size=16)
            return (h, *(torch.autograd.grad(h.sum(), wanted) if gradients else ()))

        used.append(measure_memory(call, inputs=[*inputs.values()]).workspace_bytes)
    assert used[1] - used[0] <= (of_mamba2 if op == "mamba2_ssd" else most) * 512 * 2 * 24 * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("op", "options"),
    [*((op, {}) for op in laws.DECAY_GATES), ("mlstm_exp", {"normalizer_gradient": True})],
    ids=lambda x: "".join(x),
)
def test_documents_over_many_blocks(
    op: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks a block, then the two that are left, then the ragged one; documents start within two of them."""
    monkeypatch.setitem(chunkwise.ROWS_PER_BLOCK, "cpu", 2 * 48)
    case = Case(op=op, dtype=dtype, sizes=heads(1, 190, 2, 16, 24), options=options, **CHUNKED)
    laws.check_packed_documents(case, starts=(100, 150))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", HEADS)
def test_outputs_leave_inference_mode(op: str, dtype: torch.dtype, requires_grad: bool) -> None:
    """Autograd refuses to save inference tensors, and to have them written."""
    inputs = get_operation(op).make_inputs(SIZES["portable"][0], dtype=dtype)
    leaves = [x.requires_grad_(requires_grad) for x in inputs.values()]
    h, last = get_operation(op).function("torch")(*leaves, chunk_size=16, return_last_state=True)
    outputs = (h, last) if isinstance(last, torch.Tensor) else (h, *last)
    assert not any(x.is_inference() for x in outputs)
    for x in outputs:
        weight = torch.ones_like(x, requires_grad=True)
        (weight * x).sum().backward(retain_graph=True)
        assert weight.grad is not None and torch.equal(weight.grad, x.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", HEADS)
def test_forward_mode_is_refused(op: str, dtype: torch.dtype) -> None:
    """Inference mode would return outputs without a tangent, which reads as a derivative of zero."""
    first, *others = get_operation(op).make_inputs(SIZES["portable"][0], dtype=dtype).values()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(first, torch.ones_like(first))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            get_operation(op).function("torch")(dual, *others, chunk_size=16)


def test_mlstm_exp_normalizer_gradient_is_exact() -> None:
    """Finite differences see through the denominator; the default gradient does not."""
    operation = get_operation("mlstm_exp")
    inputs = operation.make_inputs(heads(1, 9, 1, 4, 3), dtype=torch.float64)
    inputs["i"] = inputs["i"] + 4
    arguments = [x.requires_grad_() for x in inputs.values()]
    for fn, kwargs in ((resolve(operation.recurrent), {}), (operation.function("torch"), {"chunk_size": 4})):
        torch.autograd.gradcheck(lambda *x, f=fn, kw=kwargs: f(*x, normalizer_gradient=True, **kw), arguments)
        with pytest.raises(GradcheckError):
            torch.autograd.gradcheck(lambda *x, f=fn, kw=kwargs: f(*x, **kw), arguments)


@pytest.mark.interpret
def test_implementations_and_their_options() -> None:
    """What an implementation does not have is refused."""
    operation = get_operation("simple_gla")
    fn, tensors = resolve(operation.call), list(operation.make_inputs(SMALL, dtype=torch.float32).values())
    with pytest.raises(ValueError, match="chunk_size must be None for parallel, got 16"):
        fn(*tensors, impl="parallel", chunk_size=16)
    with pytest.raises(TypeError, match="round_operands is no option of fused_chunk"):
        fn(*tensors, round_operands=True)
    with pytest.raises(ValueError, match="normalizer_gradient must be False for fused_chunk, got True"):
        mlstm_exp(*tensors, tensors[-1], normalizer_gradient=True)
    assert torch.equal(fn(*tensors), operation.function("fused_chunk")(*tensors))


@pytest.mark.parametrize(
    ("dtype", "dims", "chunk_size", "scale", "reason"),
    [
        (torch.float32, (128, 256), None, 1.0, "dtype must be float16 or bfloat16 for whole_state, got float32"),
        (torch.bfloat16, (128, 256), None, -0.3, "scale must be positive for whole_state, got -0.3"),
        (torch.bfloat16, (128, 256), 32, 1.0, "chunk_size must be at least 64 for whole_state, got 32"),
        (torch.bfloat16, (32, 64), None, 1.0, "head dims must be above 32 for whole_state, got 32"),
        (torch.float16, (256, 1024), 64, 1.0, "whole_state is written for compute capability 9.0, got cpu"),
    ],
)
def test_why_whole_state_is_not_chosen(
    dtype: torch.dtype, dims: tuple[int, int], chunk_size: int | None, scale: float, reason: str
) -> None:
    q, v = (torch.empty(1, 8, 2, dim, dtype=dtype) for dim in dims)
    assert reason in str(why_not_whole_state(q, v, chunk_size, scale))


@pytest.mark.parametrize("chunk_size", [0, 1.5, 48])
def test_a_bad_chunk_size_is_refused_before_an_implementation_is_chosen(chunk_size: Any) -> None:
    inputs = Case(op="mlstm_exp", dtype=torch.bfloat16, sizes=SMALL, **CHUNKED).draw().inputs
    with pytest.raises(ValueError, match=f"chunk_size .* got {chunk_size}"):
        mlstm_exp(*inputs.values(), chunk_size=chunk_size)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 128), (32, 64)])
def test_the_default_is_whole_state_where_it_runs(dims: tuple[int, int]) -> None:
    case = Case(op="mlstm_exp", impl="fused_chunk", dtype=torch.bfloat16, sizes=heads(1, 300, 2, *dims), device="cuda")
    q, _, v, *_ = inputs = [*case.draw().inputs.values()]
    runs = why_not_whole_state(q, v, None, 1.0) is None
    assert torch.cuda.get_device_capability() != (9, 0) or runs == (min(dims) > 32)
    assert torch.equal(mlstm_exp(*inputs), mlstm_exp(*inputs, impl="whole_state" if runs else "fused_chunk"))


@pytest.mark.parametrize(("allowed", "precision"), [("tf32", "tf32x3"), ("ieee", "ieee")])
def test_float32_products_follow_torchs_setting(allowed: str, precision: str) -> None:
    """Forward and backward, also in calls that were made before with the other setting; half precision has one."""
    case = Case(op="mamba2_ssd", impl="fused_chunk", dtype=F32, sizes=heads(1, 64, 2, 64, 64))
    record(case)
    with float32_products(allowed):
        used, half = (
            {each.arguments["PRECISION"] for each in record(made) if "PRECISION" in each.arguments}
            for made in (case, replace(case, impl="xl_chunk", dtype=BF16))
        )
    assert used == {precision} and half == {"tf32"}
