"""Baselines of the gated MLP compute what their operations define; packages that are not here are stood in for."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lrbench.bench import check
from lrbench.bench.derived import Run, build_record
from lrbench.bench.plan import PlannedCase
from lrbench.kernels import baselines, resolve
from lrbench.results.schema import Case
from lrbench.tests.bench.test_derived import H200

SIZES = {"batch": 1, "seq_len": 5, "d_model": 16, "d_ff": 24}


def case(impl: str, op: str = "gated_mlp", mode: str = "fwbw") -> Case:
    return Case(kernel="gated-mlp", op=op, impl=impl, provider=impl.partition(".")[0], mode=mode, dtype="fp32", **SIZES)


def check_baseline(impl: str, op: str = "gated_mlp", *, gradients: bool = True) -> None:
    """The prepared call gives the operation's output, and its leaves get the operation's gradients."""
    operation, baseline = baselines.get_operation(op), baselines.get_baseline(op, impl)
    assert gradients == ("fwbw" in baseline.modes)
    inputs = resolve(operation.inputs)(SIZES, dtype=torch.float32, device="cpu", seed=0)
    expected = check.References().get(
        operation, case(impl, op), inputs, gradients=gradients, portable=False
    )  # fmt: skip
    runnable = resolve(baseline.build)(case(impl, op), inputs)
    out = runnable.forward()
    results = {"out": out.detach()}
    if gradients:
        assert expected.grad_out is not None
        results |= check.differentiate(out, runnable.leaves, expected.grad_out.to(out.dtype))
    verdict = check.compare(results, expected, None)
    assert verdict.failure is None


def test_torchs_own() -> None:
    check_baseline("torch.eager")
    check_baseline("torch.gemms", "projections", gradients=False)


def test_compiled_form_compiles_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_(fn: Any, *, dynamic: bool) -> Any:
        compiled.append((fn.__name__, dynamic))
        return fn

    monkeypatch.setattr(torch, "compile", compile_)
    check_baseline("torch.compile")
    assert compiled == [("eager", False)]


def module(name: str, monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    """Stand in for a package's module, and for the packages above it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    for member, value in members.items():
        monkeypatch.setattr(sys.modules[name], member, value, raising=False)


class SiLUMul:
    """liger-kernel's signature: the activated argument comes first."""

    @staticmethod
    def apply(a: Tensor, b: Tensor) -> Tensor:
        assert a.is_contiguous()
        assert b.is_contiguous()
        return F.silu(a) * b


class GateUp:
    """liger-kernel's signature: gate and up side by side."""

    @staticmethod
    def apply(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up


def gemm_swiglu(x: Tensor, gate: Tensor, up: Tensor, multiplier: float, store_preact: bool) -> tuple[Tensor, None]:
    """liger-kernel's signature: x [B, S, D], weights [F, D]."""
    assert (multiplier, store_preact) == (1.0, False)
    assert gate.is_contiguous()
    assert up.is_contiguous()
    return F.silu(x @ gate.T) * (x @ up.T), None


def test_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    module(
        "liger_kernel.ops.swiglu", monkeypatch,
        LigerSiLUMulFunction=SiLUMul, LigerFusedGateUpSiLUMulFunction=GateUp,
    )  # fmt: skip
    module("liger_kernel.ops.mlp", monkeypatch, gemm_swiglu=gemm_swiglu)
    check_baseline("liger_kernel.silu_mul")
    check_baseline("liger_kernel.silu_mul_joint", gradients=False)
    check_baseline("liger_kernel.fused", gradients=False)


def test_xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module("xformers.ops", monkeypatch)
    module("xformers", monkeypatch, __version__="0.0.99")
    namespace = types.SimpleNamespace()
    monkeypatch.setattr(torch.ops, "xformers", namespace, raising=False)
    with pytest.raises(ImportError, match=r"xformers 0.0.99 has no operator dual_gemm_silu_identity_mul"):
        check_baseline("xformers.swiglu", gradients=False)

    def dual_gemm(x: Tensor, w1: Tensor, b1: None, w2: Tensor, b2: None) -> tuple[Tensor, Tensor, Tensor]:
        assert w1.is_contiguous()
        first, second = F.linear(x, w1, b1), F.linear(x, w2, b2)
        return first, second, F.silu(first) * second

    namespace.dual_gemm_silu_identity_mul = dual_gemm
    check_baseline("xformers.swiglu", gradients=False)


def test_sizes_beside_another_family_are_an_mlp_of_its_embedding() -> None:
    family = {"batch": 2, "seq_len": 1024, "num_heads": 4, "head_dim_qk": 128, "head_dim_v": 256}
    for baseline in baselines.baselines_for("gated-mlp"):
        assert baselines.plan_sizes(baseline, SIZES) == [SIZES]
        assert baselines.plan_sizes(baseline, family) == [{"batch": 1, "seq_len": 2048, "d_model": 1024, "d_ff": 3584}]


def test_products_alone_are_labelled_as_another_result() -> None:
    run, labels = Run.start("run", H200, None), {}
    for baseline in baselines.baselines_for("gated-mlp"):
        item = PlannedCase(case=case(baseline.name, baseline.op, "fw"), target=baseline)
        labels[baseline.name] = build_record(run, item, {"status": "ok", "reason": None, "columns": {}}).same_math
    assert {name for name, same in labels.items() if not same} == {"torch.gemms"}
