"""The delta rule's adapters, with the definition behind the packages' signatures: layouts, gates, heads and states."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker.worker import Worker
from lrbench.kernels import FAMILIES, resolve
from lrbench.kernels.baselines import BASELINES, get_operation
from lrbench.kernels.baselines.spec import Baseline
from lrbench.kernels.common.inputs import bounds_of
from lrbench.kernels.delta_rule.operations import delta_net, gated_delta_net, kda
from lrbench.tests.kernels.baselines.test_numerics import case_of, relative_errors
from lrbench.tests.kernels.baselines.test_stand_ins import put_modules

PEERS = [baseline for baseline in BASELINES if baseline.op in FAMILIES["delta"]]
CHUNKED = [baseline for baseline in PEERS if "fw" in baseline.modes]
SIZES = {"batch": 2, "seq_len": 19, "num_heads": 4, "head_dim_qk": 8, "head_dim_v": 12}
FEWER = {**SIZES, "num_heads_qk": 2}


def fla(function: Any, *, dispatches: bool = True) -> Any:
    """fla's and FlashQLA's signature: that of the definition, log decays, states [K, V]."""

    def call(*, initial_state: Tensor | None = None, output_final_state: bool = False, **given: Tensor) -> Any:
        assert not dispatches or os.environ["FLA_FLASH_QLA"] == os.environ["FLA_TILELANG"] == "0"
        out = function(**given, impl="recurrent", initial_state=initial_state, return_last_state=True)
        return out if output_final_state else (out[0], None)

    return call


def packed(function: Any) -> Any:
    """cuDNN's signature: tokens packed, bounds in int32 and obligatory."""

    def call(*, cu_seqlens: Tensor, **given: Tensor) -> Any:
        assert cu_seqlens.dtype == torch.int32 and all(x.is_contiguous() for x in given.values())
        return function(**{n: x[None] for n, x in given.items()}, cu_seqlens=cu_seqlens, impl="recurrent")[0], None

    return call


def flashinfer_chunk(*, g: Tensor, max_seqlen: int, cu_seqlens: Tensor, **given: Tensor) -> Tensor:
    """Decays, not their logarithms, and the output alone."""
    assert max_seqlen == int(cu_seqlens.diff().max())
    return packed(gated_delta_net)(g=g.log(), cu_seqlens=cu_seqlens, **given)[0]


def flashinfer_decode(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
    use_qk_l2norm: bool,
) -> Any:  # fmt: skip
    assert not use_qk_l2norm and a.dtype == b.dtype == q.dtype
    g, beta = -A_log.exp() * F.softplus(a.float() + dt_bias), b.float().sigmoid()
    o, last = gated_delta_net(q, k, v, g, beta, impl="recurrent", initial_state=state, return_last_state=True)
    return o, state.copy_(last)


def flashinfer_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, use_qk_l2norm_in_kernel: bool
) -> Any:
    assert not use_qk_l2norm_in_kernel and initial_state.is_contiguous()
    assert {x.dtype for x in (q, g, beta, initial_state)} == {torch.bfloat16}
    gates, state = (g.float(), beta.float()), initial_state.mT.float().contiguous()
    return kda(q, k, v, *gates, impl="recurrent", initial_state=state), None


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLA_FLASH_QLA", "FLA_TILELANG"):
        monkeypatch.setenv(name, "1")
    modules = {
        f"fla.ops.{name}": {f"{kind}_{name}": fla(function) for kind in ("chunk", "fused_recurrent")}
        for name, function in {"delta_rule": delta_net, "gated_delta_rule": gated_delta_net, "kda": kda}.items()
    }
    modules["flash_qla"] = {"chunk_gated_delta_rule": fla(gated_delta_net, dispatches=False)}
    modules["flashinfer.gdn_prefill"] = {"chunk_gated_delta_rule": flashinfer_chunk}
    modules["flashinfer.gdn_decode"] = {"gated_delta_rule_decode": flashinfer_decode}
    modules["flashinfer.kda"] = {"recurrent_kda": flashinfer_kda}
    modules["cudnn.linear_attention"] = {
        "gated_delta_net": packed(gated_delta_net), "kimi_delta_attention": packed(kda)
    }  # fmt: skip
    put_modules(monkeypatch, modules)


@pytest.mark.parametrize("baseline", CHUNKED, ids=lambda baseline: baseline.name)
@pytest.mark.parametrize("documents", [None, "3"])
def test_adapters_agree_with_the_definition(baseline: Baseline, documents: str | None) -> None:
    operation = get_operation(baseline.op)
    sizes = {**(SIZES if baseline.op == "delta_net" else FEWER), "batch": 1 if documents else 2}
    case = case_of(baseline, {**sizes, "documents": documents}, baseline.modes[0], "fp32")  # type: ignore[arg-type]
    inputs = operation.make_inputs(sizes, dtype=torch.float32)
    runnable = resolve(baseline.build)(case, inputs)
    if documents:
        bounds = bounds_of(documents, sizes["seq_len"], "cpu")
        wanted = resolve(operation.call)(**inputs, cu_seqlens=bounds, impl="recurrent")
        torch.testing.assert_close(runnable.to_canonical("out", runnable.forward()), wanted)
        return
    errors = relative_errors(operation, runnable, inputs, gradients="fwbw" in baseline.modes)
    assert set(errors) == {"out", *(operation.differentiable if "fwbw" in baseline.modes else ())}
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("baseline", [b for b in PEERS if "step" in b.modes], ids=lambda b: f"{b.op}-{b.name}")
def test_a_step_agrees_with_the_definition(baseline: Baseline) -> None:
    sizes = SIZES if baseline.op == "delta_net" else FEWER
    case = case_of(baseline, {**sizes, "seq_len": 1}, "step", baseline.dtypes[0])
    assert Worker("cpu").verify(PlannedCase(case=case, target=baseline))["rel_error"] < 1e-2
