"""Every adapter that this machine can run computes what its operation's reference says, gradients included."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker.correctness import DTYPES
from lrbench.bench.worker.worker import Worker
from lrbench.kernels import Operation, resolve
from lrbench.kernels.baselines import (
    BASELINES,
    availability,
    get_baseline,
    get_operation,
    installed_versions,
    known_bad_here,
    plan_sizes,
)
from lrbench.kernels.baselines.spec import Baseline, Runnable
from lrbench.results.schema import Case

CPU_SIZES = {"batch": 2, "seq_len": 96, "num_heads": 2, "head_dim_qk": 16, "head_dim_v": 24}
GPU_SIZES = {"batch": 2, "seq_len": 512, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 128}
ON_CPU = [baseline for baseline in BASELINES if "cpu" in baseline.devices]
ON_GPU = [baseline for baseline in BASELINES if "cuda" in baseline.devices and "fw" in baseline.modes]
STEPS_ON_GPU = [baseline for baseline in BASELINES if "cuda" in baseline.devices and "step" in baseline.modes]
EXACT = {"fp64": 1e-9, "fp32": 1e-5}
LOW_PRECISION_TOLERANCE = 3e-2
"""For bf16 matmul operands; a wrong layout, scale or gate is off by far more."""


def case_of(baseline: Baseline, sizes: Mapping[str, int], mode: str, dtype: str) -> Case:
    names = {"kernel": baseline.kernels[0], "op": baseline.op, "impl": baseline.name, "provider": baseline.provider}
    return Case(**names, mode=mode, dtype=dtype, **sizes)


def make_case(baseline: Baseline, family: dict[str, int], dtype: str, chunk_size: int | None = None) -> Case:
    sizes = plan_sizes(baseline, family, (chunk_size,) if chunk_size else ())[0]
    return case_of(baseline, sizes, "fwbw" if "fwbw" in baseline.modes else "fw", dtype)


def make_inputs(operation: Operation, case: Case, device: str) -> dict[str, Tensor]:
    return operation.make_inputs(case.sizes, dtype=DTYPES[case.dtype], device=device)


def relative_errors(
    operation: Operation, runnable: Runnable, inputs: Mapping[str, Tensor], *, gradients: bool = True
) -> dict[str, float]:
    """Return ||x - reference|| / ||reference|| of the output and of every leaf's gradient; the reference in float64."""
    precise = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    expected = resolve(operation.recurrent)(*precise.values())
    out = runnable.forward()
    if runnable.on is not None:
        torch.testing.assert_close(runnable.on(inputs), runnable.to_canonical("out", out))
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    if not gradients:
        return {"out": ((runnable.to_canonical("out", out).double() - expected).norm() / expected.norm()).item()}
    found = torch.autograd.grad(out, list(runnable.leaves.values()), grad_out)
    canonical_grad_out = runnable.to_canonical("out", grad_out).double()
    wanted = torch.autograd.grad(expected, [precise[name] for name in runnable.leaves], canonical_grad_out)
    pairs = {"out": (out, expected)} | dict(zip(runnable.leaves, zip(found, wanted, strict=True), strict=True))
    return {
        name: ((runnable.to_canonical(name, got).double() - want).norm() / want.norm()).item()
        for name, (got, want) in pairs.items()
    }


def skip_unless_here(baseline: Baseline, case: Case, capability: tuple[int, int] | None) -> None:
    reason = (
        availability(baseline)
        or known_bad_here(baseline, case, installed_versions(), capability)
        or baseline.why_unsupported(case.mode, case.dtype, case.state_dtype, case.sizes)
    )
    if reason:
        pytest.skip(reason)


CPU_CASES = [
    pytest.param(baseline, dtype, chunk_size, id=f"{baseline.name}-{dtype}-{chunk_size or 'recommended'}")
    for baseline in ON_CPU
    for dtype in [dtype for dtype in EXACT if dtype in baseline.dtypes]
    for chunk_size in ((None, 32) if baseline.chunk_sizes else (None,))
]


@pytest.mark.parametrize(("baseline", "dtype", "chunk_size"), CPU_CASES)
def test_adapter_agrees_with_the_reference(baseline: Baseline, dtype: str, chunk_size: int | None) -> None:
    family = {**CPU_SIZES, "seq_len": 96 if chunk_size else 128}
    case = make_case(baseline, family, dtype, chunk_size)
    skip_unless_here(baseline, case, None)
    operation = get_operation(baseline.op)
    inputs = make_inputs(operation, case, "cpu")
    errors = relative_errors(operation, resolve(baseline.build)(case, inputs), inputs, gradients=case.mode == "fwbw")
    assert set(errors) == {"out", *(operation.differentiable if case.mode == "fwbw" else ())}
    assert max(errors.values()) < EXACT[dtype], errors


def build_here(
    op: str, name: str, family: dict[str, int], dtype: str, chunk_size: int | None = None
) -> tuple[Operation, dict[str, Tensor], Runnable]:
    """Return a baseline's operation, inputs on the CPU and what it builds of them."""
    baseline = get_baseline(op, name)
    case = make_case(baseline, family, dtype, chunk_size)
    skip_unless_here(baseline, case, None)
    operation = get_operation(op)
    inputs = make_inputs(operation, case, "cpu")
    return operation, inputs, resolve(baseline.build)(case, inputs)


def test_native_autograd_has_the_gradients_of_a_differentiated_normaliser() -> None:
    family = {**CPU_SIZES, "seq_len": 64}
    operation, inputs, runnable = build_here("mlstm_exp", "mlstm_kernels.native_autograd", family, "fp64", 32)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    grad_out = torch.randn(inputs["v"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = {
        gradient: torch.autograd.grad(
            resolve(operation.recurrent)(*leaves.values(), normalizer_gradient=gradient),
            list(leaves.values()),
            grad_out,
        )
        for gradient in (True, False)
    }
    own_grad = grad_out.transpose(1, 2).contiguous()
    got = torch.autograd.grad(runnable.forward(), list(runnable.leaves.values()), own_grad)
    for name, gradient, through, constant in zip(runnable.leaves, got, expected[True], expected[False], strict=True):
        torch.testing.assert_close(runnable.to_canonical(name, gradient), through, rtol=1e-8, atol=1e-10)
        if name in ("q", "k", "i", "f"):
            assert not torch.allclose(through, constant, rtol=1e-3)


def test_a_wrong_result_is_seen() -> None:
    """The comparison itself can fail: a scaled output and a gradient of another argument are off by their size."""
    operation, inputs, runnable = build_here("attention", "torch.sdpa_cpu", CPU_SIZES, "fp32")
    scaled = dataclasses.replace(runnable, forward=lambda: 1.01 * runnable.forward(), on=None)
    assert relative_errors(operation, scaled, inputs)["out"] == pytest.approx(0.01, rel=1e-2)
    q, k, v = runnable.leaves.values()
    swapped = dataclasses.replace(runnable, leaves={"q": k, "k": q, "v": v})
    errors = relative_errors(operation, swapped, inputs)
    assert errors["q"] > 0.1 and errors["k"] > 0.1 and errors["v"] < EXACT["fp32"]


def test_inputs_keep_the_canonical_memory_where_the_layout_is_the_same() -> None:
    _, inputs, runnable = build_here("attention", "torch.sdpa_cpu", CPU_SIZES, "fp32")
    leaves = runnable.leaves
    assert all(leaves[name].data_ptr() == inputs[name].data_ptr() and leaves[name].is_leaf for name in leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("baseline", ON_GPU, ids=lambda baseline: baseline.name)
def test_adapter_agrees_with_the_reference_on_the_gpu(baseline: Baseline) -> None:
    case = make_case(baseline, GPU_SIZES, baseline.dtypes[0])
    skip_unless_here(baseline, case, torch.cuda.get_device_capability())
    operation = get_operation(baseline.op)
    inputs = make_inputs(operation, case, "cuda")
    runnable = resolve(baseline.build)(case, inputs)
    errors = relative_errors(operation, runnable, inputs, gradients=case.mode != "fw")
    assert max(errors.values()) < LOW_PRECISION_TOLERANCE, errors


@pytest.mark.gpu
@pytest.mark.parametrize("baseline", STEPS_ON_GPU, ids=lambda baseline: f"{baseline.op}-{baseline.name}")
def test_a_step_agrees_with_the_definition_on_the_gpu(baseline: Baseline) -> None:
    context = 1000 if get_operation(baseline.op).cache else None
    case = make_case(baseline, {**GPU_SIZES, "seq_len": 1}, baseline.dtypes[0])
    case = dataclasses.replace(case, mode="step", context=context)
    skip_unless_here(baseline, case, torch.cuda.get_device_capability())
    found = Worker("cuda").verify(PlannedCase(case=case, target=baseline))
    assert found["rel_error"] < LOW_PRECISION_TOLERANCE
