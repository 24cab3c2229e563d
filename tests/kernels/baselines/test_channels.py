"""Adapters for recurrences over channels, run here with plain scans in the place of their packages' kernels."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from lrbench.kernels import resolve
from lrbench.kernels.baselines import BASELINES, get_baseline, get_operation, plan_sizes
from lrbench.kernels.rglru.reference import recurrent
from lrbench.kernels.wkv.reference import recurrent as wkv
from lrbench.results.schema import Case
from lrbench.tests.kernels.baselines.test_numerics import relative_errors

SIZES = {"batch": 2, "seq_len": 37, "channels": 24}
ADAPTERS = [(b.op, b.name) for b in BASELINES if b.op in ("rglru", "rglru_layer", "linear_scan")]
ADAPTERS += [("wkv4", "fla.fused_recurrent_rwkv4")]


def hgrn(x: Tensor, g: Tensor) -> tuple[Tensor, None]:
    """fla's scan: g is the log decay."""
    return recurrent(g.double().exp(), x.double(), None)[0].to(x.dtype), None


def rwkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """fla's WKV: w is the logarithm of the rate, the state [B, 3, 1, C]."""
    num, den, top = state[:, :, 0].unbind(1)
    y, last = wkv(k, v, w.exp(), u, initial_state=(num, den, top), return_last_state=True)
    return y, torch.stack(last, dim=1)[:, :, None]


def channels_first(forget: Tensor, inputs: Tensor) -> Tensor:
    """accelerated-scan's: [B, C, T], contiguous."""
    assert forget.is_contiguous() and inputs.is_contiguous()
    return recurrent(forget.transpose(1, 2), inputs.transpose(1, 2), None)[0].transpose(1, 2)


@pytest.fixture
def plain_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.rwkv4": {"fused_recurrent_rwkv4": rwkv4},
        "fla.ops.hgrn": {"fused_recurrent_hgrn": hgrn, "chunk_hgrn": hgrn},
        "accelerated_scan": {},
        "accelerated_scan.scalar": {"scan": channels_first},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.usefixtures("plain_packages")
@pytest.mark.parametrize(("op", "name"), ADAPTERS, ids="-".join)
def test_adapter_agrees_with_the_reference(op: str, name: str) -> None:
    baseline, operation = get_baseline(op, name), get_operation(op)
    case = Case(kernel="rglru", op=op, impl=name, provider=baseline.provider, mode="fwbw", dtype="fp32", **SIZES)
    inputs = resolve(operation.inputs)(SIZES, dtype=torch.float32, device="cpu", seed=0)
    errors = relative_errors(operation, resolve(baseline.build)(case, inputs), inputs)
    assert set(errors) == {"out", *operation.differentiable}
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed: pip install jax")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_jax_agrees_with_the_reference(dtype: torch.dtype) -> None:
    baseline, operation = get_baseline("wkv4", "jax.associative_scan"), get_operation("wkv4")
    case = Case(kernel="wkv", op="wkv4", impl=baseline.name, provider="jax", mode="fwbw", dtype="fp32", **SIZES)
    inputs = resolve(operation.inputs)(SIZES, dtype=dtype, device="cpu", seed=0)
    errors = relative_errors(operation, resolve(baseline.build)(case, inputs), inputs)
    assert max(errors.values()) < 2 * torch.finfo(dtype).eps + 1e-6, errors


@pytest.mark.parametrize("name", ["torch.eager", "fla.chunk_hgrn"])
def test_closed_gates_have_finite_gradients(name: str, plain_packages: None) -> None:
    """Decays so near 1 that 1 - a^2 as it stands would be 0, and its root's gradient infinite."""
    inputs = resolve(get_operation("rglru").inputs)(SIZES, dtype=torch.float32, device="cpu", seed=0)
    inputs["r"] = torch.full_like(inputs["r"], -20.0)
    case = Case(kernel="rglru", op="rglru", impl=name, provider="torch", mode="fwbw", dtype="fp32", **SIZES)
    runnable = resolve(get_baseline("rglru", name).build)(case, inputs)
    gradients = torch.autograd.grad(runnable.forward().sum(), list(runnable.leaves.values()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_beside_heads_a_channel_stands_for_an_embedding_dim() -> None:
    heads = {"batch": 8, "seq_len": 64, "num_heads": 4, "head_dim_qk": 64, "head_dim_v": 128}
    for op, name in ADAPTERS:
        assert plan_sizes(get_baseline(op, name), heads) == [{"batch": 8, "seq_len": 64, "channels": 512}]
        assert plan_sizes(get_baseline(op, name), SIZES) == [SIZES]
