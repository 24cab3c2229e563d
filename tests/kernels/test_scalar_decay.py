"""The portable implementations and the parallel forms obey the laws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from lrbench.kernels import get_operation, resolve
from lrbench.tests.kernels import laws

OPS = laws.ENGINE_OPERATIONS
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def sizes(batch: int, seq_len: int, num_heads: int, head_dim_qk: int, head_dim_v: int, **others: int) -> dict[str, int]:
    return {
        "batch": batch,
        "seq_len": seq_len,
        "num_heads": num_heads,
        "head_dim_qk": head_dim_qk,
        "head_dim_v": head_dim_v,
        **others,
    }


SMALL = sizes(2, 45, 8, 16, 24)


def torch_implementation(op: str) -> Any:
    return get_operation(op).function("torch")


def check(law: Callable[..., None], op: str, impl: str = "torch", **where: Any) -> None:
    """Hold an implementation to a law on the CPU, on small inputs in chunks of 16 where nothing else is said."""
    operation = get_operation(op)
    chunk = {"chunk_size": 16} if impl == "torch" else {}
    law(operation, operation.function(impl), **{"device": "cpu", "sizes": SMALL, **chunk, **where})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
@pytest.mark.parametrize("op", OPS)
def test_chunked_equals_recurrent(op: str, chunk_size: int, dtype: torch.dtype) -> None:
    check(laws.check_matches_reference, op, dtype=dtype, chunk_size=chunk_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [sizes(16, 1, 4, 16, 16), sizes(20, 1, 3, 24, 40), sizes(1, 33, 3, 40, 24), sizes(3, 70, 1, 8, 5)],
    ids=lambda shape: "x".join(map(str, shape.values())),
)
@pytest.mark.parametrize("op", OPS)
def test_any_shape(op: str, shape: Mapping[str, int], dtype: torch.dtype) -> None:
    check(laws.check_matches_reference, op, dtype=dtype, sizes=shape, chunk_size=32)


@pytest.mark.parametrize("impl", ["torch", "parallel"])
@pytest.mark.parametrize("op", OPS)
def test_no_initial_state(op: str, impl: str) -> None:
    check(laws.check_matches_reference, op, impl, dtype=torch.float32, initial_state=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_long_sequence_over_many_groups(op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = resolve("kernels.scalar_decay.chunkwise:chunkwise")
    monkeypatch.setitem(engine.__globals__["ROWS_PER_GROUP"], "cpu", 48)
    check(laws.check_matches_reference, op, dtype=dtype, sizes=sizes(1, 300, 1, 16, 16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_mlstm_exp_normalizer_gradient_over_many_groups(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = resolve("kernels.scalar_decay.chunkwise:chunkwise")
    monkeypatch.setitem(engine.__globals__["ROWS_PER_GROUP"], "cpu", 2 * 48)
    check(
        laws.check_matches_reference,
        "mlstm_exp",
        dtype=dtype,
        sizes=sizes(1, 180, 2, 16, 24),
        gates={"i": (0, 3)},
        normalizer_gradient=True,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("op", "options"),
    [*((op, {}) for op in laws.DECAY_GATES), ("mlstm_exp", {"normalizer_gradient": True})],
    ids=lambda x: "".join(x),
)
def test_groups_of_either_kind(
    op: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document that starts within a group has its weights computed pair by pair; the other groups are factored."""
    engine = resolve("kernels.scalar_decay.chunkwise:chunkwise").__globals__
    plan, kinds = engine["plan"], []

    def recording_plan(*arguments: Any) -> Any:
        segments, m = plan(*arguments)
        kinds.append([(len(group.update), group.pairwise is None) for segment in segments for group in segment.groups])
        return segments, m

    monkeypatch.setitem(engine, "plan", recording_plan)
    monkeypatch.setitem(engine["ROWS_PER_GROUP"], "cpu", 2 * 48)
    check(laws.check_packed_documents, op, dtype=dtype, sizes=sizes(1, 190, 2, 16, 24), starts=(100, 150), **options)
    # Three chunks a group, then the two that are left, then the ragged one; forwards, and again for the gradients.
    assert kinds == [[(3, True), (3, True), (3, False), (2, False), (1, True)]] * 2


def test_backward_pass_can_be_repeated_but_not_differentiated() -> None:
    operation = get_operation("mlstm_exp")
    inputs = resolve(operation.inputs)(SMALL, dtype=torch.float32, device="cpu", seed=0)
    leaves = [x.requires_grad_() for x in inputs.values()]
    h = torch_implementation("mlstm_exp")(*leaves, chunk_size=16, normalizer_gradient=True)
    first = torch.autograd.grad(h.square().sum(), leaves, create_graph=True)
    again = torch.autograd.grad(h.square().sum(), leaves)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_differentiable"):
        first[0].sum().backward()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_outputs_leave_inference_mode(op: str, dtype: torch.dtype, requires_grad: bool) -> None:
    """Autograd refuses to save inference tensors, and to have them written."""
    inputs = resolve(get_operation(op).inputs)(SMALL, dtype=dtype, device="cpu", seed=0)
    leaves = [x.requires_grad_(requires_grad) for x in inputs.values()]
    h, last = torch_implementation(op)(*leaves, chunk_size=16, return_last_state=True)
    outputs = (h, last) if isinstance(last, torch.Tensor) else (h, *last)
    assert not any(x.is_inference() for x in outputs)
    for x in outputs:
        weight = torch.ones_like(x, requires_grad=True)
        (weight * x).sum().backward(retain_graph=True)
        assert weight.grad is not None and torch.equal(weight.grad, x.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_forward_mode_is_refused(op: str, dtype: torch.dtype) -> None:
    """Inference mode would return outputs without a tangent, which reads as a derivative of zero."""
    first, *others = resolve(get_operation(op).inputs)(SMALL, dtype=dtype, device="cpu", seed=0).values()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(first, torch.ones_like(first))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch_implementation(op)(dual, *others, chunk_size=16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_parallel_form_equals_recurrence(op: str, dtype: torch.dtype) -> None:
    check(laws.check_matches_reference, op, "parallel", dtype=dtype)


@pytest.mark.parametrize("normalizer_gradient", [False, True])
@pytest.mark.parametrize("gates", [None, {"i": (-6, 0)}, {"i": (3, 6)}], ids=["mixed", "floor", "normalised"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_mlstm_exp_normalizer_gradient(
    dtype: torch.dtype, gates: Mapping[str, tuple[float, float]] | None, normalizer_gradient: bool
) -> None:
    check(laws.check_matches_reference, "mlstm_exp", dtype=dtype, gates=gates, normalizer_gradient=normalizer_gradient)


def test_mlstm_exp_normalizer_gradient_is_exact() -> None:
    """Finite differences see through the denominator; the default gradient does not."""
    operation = get_operation("mlstm_exp")
    inputs = resolve(operation.inputs)(sizes(1, 9, 1, 4, 3), dtype=torch.float64, device="cpu", seed=0)
    inputs["i"] = inputs["i"] + 4
    arguments = [x.requires_grad_() for x in inputs.values()]
    for fn, kwargs in ((resolve(operation.recurrent), {}), (torch_implementation("mlstm_exp"), {"chunk_size": 4})):
        torch.autograd.gradcheck(lambda *x, f=fn, kw=kwargs: f(*x, normalizer_gradient=True, **kw), arguments)
        with pytest.raises(GradcheckError):
            torch.autograd.gradcheck(lambda *x, f=fn, kw=kwargs: f(*x, **kw), arguments)


@pytest.mark.parametrize("impl", ["torch", "parallel"])
@pytest.mark.parametrize("scale", [-0.3, 2.0])
@pytest.mark.parametrize("op", OPS)
def test_any_scale(op: str, scale: float, impl: str) -> None:
    kwargs: dict[str, Any] = {"normalizer_gradient": True} if op == "mlstm_exp" else {}
    check(laws.check_matches_reference, op, impl, dtype=torch.float64, scale=scale, **kwargs)


@pytest.mark.parametrize("tau", [1.0, 64.0])
def test_any_temperature(tau: float) -> None:
    check(laws.check_matches_reference, "gated_retention", dtype=torch.float64, tau=tau)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_mamba2_groups(num_groups: int) -> None:
    check(
        laws.check_matches_reference,
        "mamba2_ssd",
        dtype=torch.float64,
        sizes=sizes(2, 37, 4, 16, 8, num_groups=num_groups),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [(20,), (1, 16, 44)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_split_equals_whole(op: str, splits: tuple[int, ...], dtype: torch.dtype) -> None:
    check(laws.check_split_equals_whole, op, dtype=dtype, splits=splits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_batch_invariant(op: str, dtype: torch.dtype) -> None:
    check(laws.check_batch_invariant, op, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_size", [5, 64])
@pytest.mark.parametrize("op", OPS)
def test_extreme_gates(op: str, chunk_size: int, dtype: torch.dtype) -> None:
    check(laws.check_extreme_gates, op, dtype=dtype, sizes=sizes(2, 90, 8, 16, 16), chunk_size=chunk_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_size", [8, 64])
@pytest.mark.parametrize("op", laws.DECAY_GATES)
def test_packed_documents(op: str, chunk_size: int, dtype: torch.dtype) -> None:
    check(
        laws.check_packed_documents,
        op,
        dtype=dtype,
        sizes=sizes(2, 50, 2, 16, 24),
        starts=(1, 16, 29),
        chunk_size=chunk_size,
    )


@pytest.mark.parametrize("separator", [torch.finfo(torch.float32).min, -math.inf])
@pytest.mark.parametrize("op", laws.DECAY_GATES)
def test_any_separator(op: str, separator: float) -> None:
    check(
        laws.check_packed_documents,
        op,
        dtype=torch.float32,
        sizes=sizes(2, 50, 1, 16, 24),
        starts=(1, 29),
        separator=separator,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_stabilizer_is_free(dtype: torch.dtype) -> None:
    check(laws.check_stabilizer_is_free, "mlstm_exp", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_bad_input_fails_clearly(op: str, dtype: torch.dtype) -> None:
    laws.check_bad_input(get_operation(op), torch_implementation(op), dtype=dtype, device="cpu", chunk_size=16)


def test_laws_reject_a_wrong_implementation() -> None:
    operation, fn = get_operation("mlstm_sig"), torch_implementation("mlstm_sig")

    def off_by_two_percent(*inputs: torch.Tensor, **kwargs: Any) -> Any:
        h, last = fn(*inputs, **kwargs)
        return h * 1.02, last

    with pytest.raises(AssertionError, match=r"mlstm_sig against the recurrence: h: error"):
        laws.check_matches_reference(
            operation, off_by_two_percent, dtype=torch.bfloat16, device="cpu", sizes=SMALL, chunk_size=16
        )


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_the_declared_arguments(op: str) -> None:
    operation = get_operation(op)
    first, again, other = (
        resolve(operation.inputs)(SMALL, dtype=torch.bfloat16, device="cpu", seed=seed) for seed in (3, 3, 4)
    )
    assert tuple(first) == operation.arguments
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[operation.arguments[0]], other[operation.arguments[0]])
    for name, x in first.items():
        assert x.dtype == (torch.bfloat16 if x.dim() == 4 else torch.float32), name
        assert x.is_contiguous()


@pytest.mark.parametrize("op", OPS)
def test_no_gradient_path_gives_the_same(op: str) -> None:
    operation, fn = get_operation(op), torch_implementation(op)
    inputs = resolve(operation.inputs)(SMALL, dtype=torch.float32, device="cpu", seed=0)
    before = {name: x.clone() for name, x in inputs.items()}
    plain = fn(*inputs.values(), chunk_size=16)
    tracked = fn(*(x.clone().requires_grad_(x.dim() == 4) for x in inputs.values()), chunk_size=16)
    assert torch.equal(plain, tracked)
    assert all(torch.equal(x, inputs[name]) for name, x in before.items()), "inputs were written to"
