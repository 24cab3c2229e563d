"""Adapters for recurrences over channels, gated MLPs and decoding, with plain torch in place of packages not here."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from lrbench.bench.drive.derived import Run, build_record
from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker.correctness import state_before_step
from lrbench.bench.worker.worker import Worker
from lrbench.kernels import FAMILIES, resolve
from lrbench.kernels.baselines import BASELINES, baselines_for, get_baseline, get_operation, plan_sizes
from lrbench.kernels.baselines.pytorch import gate_in_place
from lrbench.kernels.baselines.references import gla_recurrent
from lrbench.kernels.baselines.spec import Baseline
from lrbench.kernels.mlstm_exp import mlstm_exp
from lrbench.kernels.rglru.reference import recurrent
from lrbench.kernels.wkv.reference import recurrent as wkv
from lrbench.results.schema import Case
from lrbench.tests.bench.runs import H200
from lrbench.tests.kernels.baselines.test_numerics import case_of, relative_errors

SIZES = {"batch": 2, "seq_len": 37, "channels": 24}
MLP_SIZES = {"batch": 1, "seq_len": 5, "d_model": 16, "d_ff": 24}
CHANNELS = [b for b in BASELINES if b.op in ("rglru", "rglru_layer", "linear_scan", "wkv4") and b.provider != "jax"]
MLPS = list(baselines_for("gated-mlp"))


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


def recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: Tensor,
    output_final_state: bool,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """fla's fused_recurrent: log decays a head and token, a key channel, or a head."""
    assert output_final_state
    (decay,) = (x for x in (g, gk, g_gamma) if x is not None)
    decay = decay if decay is gk else decay[..., None]
    return gla_recurrent(q, k, v, decay.expand_as(k), scale=scale, initial_state=initial_state, return_last_state=True)


def state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
) -> Tensor:
    """mamba-ssm's: state [B, D, N] or [B, H, P, N], overwritten; B and C [B, N], or a group of heads each [B, G, N]."""
    assert dt.shape == x.shape
    assert A.shape == state.shape[1:]
    assert D.shape == dt_bias.shape == x.shape[1:]
    if state.dim() == 4:
        # So it knows that a head has one decay.
        assert A.stride()[1:] == (0, 0)
        assert dt.stride(-1) == dt_bias.stride(-1) == 0
        B, C = (each.repeat_interleave(x.shape[1] // each.shape[1], dim=1) for each in (B, C))
    dt, B, C = (dt + dt_bias)[..., None], B[..., None, :], C[..., None, :]
    state.copy_(state * torch.exp(dt * A) + dt * B * x[..., None])
    return ((state * C).sum(-1) + D * x).to(x.dtype)


def with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, causal: bool
) -> Tensor:
    """flash-attn's: the new token goes where the cache ends."""
    assert causal
    assert cache_seqlens.dtype == torch.int32
    (before,) = set(cache_seqlens.tolist())
    k_cache[:, before : before + 1], v_cache[:, before : before + 1] = k, v
    ours = (x[:, : before + 1].transpose(1, 2) for x in (q, k_cache, v_cache))
    return F.scaled_dot_product_attention(*ours).transpose(1, 2)


def mlstm_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor, eps: float
) -> Any:
    """mlstm_kernels': no time axis; gates and m [B, H, 1]."""
    assert eps == 0.0
    gates = (x.float().transpose(1, 2).contiguous() for x in (i, f))
    tensors = (x[:, None] for x in (q, k, v))
    return mlstm_exp(*tensors, *gates, impl="recurrent", initial_state=(c, n, m[..., 0]))[:, 0], None


def silu_mul(a: Tensor, b: Tensor) -> Tensor:
    """liger-kernel's signature: the activated argument comes first."""
    assert a.is_contiguous() and b.is_contiguous()
    return F.silu(a) * b


def gate_up(y: Tensor) -> Tensor:
    """liger-kernel's signature: gate and up side by side."""
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def gemm_swiglu(x: Tensor, gate: Tensor, up: Tensor, multiplier: float, store_preact: bool) -> tuple[Tensor, None]:
    """liger-kernel's signature: x [B, S, D], weights [F, D]."""
    assert (multiplier, store_preact) == (1.0, False)
    assert gate.is_contiguous() and up.is_contiguous()
    return F.silu(x @ gate.T) * (x @ up.T), None


def dual_gemm(x: Tensor, w1: Tensor, b1: None, w2: Tensor, b2: None) -> tuple[Tensor, Tensor, Tensor]:
    """xformers' operator: weights [F, D], packed."""
    assert w1.is_contiguous()
    first, second = F.linear(x, w1, b1), F.linear(x, w2, b2)
    return first, second, F.silu(first) * second


def put_modules(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Put modules with these contents, and empty ones that they are in, in the place of packages."""
    for name in [*modules]:
        while name := name.rpartition(".")[0]:
            modules.setdefault(name, {})
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put plain functions in the place of packages; return what is compiled, which runs as it is."""
    seen: list[Any] = []
    modules: dict[str, dict[str, Any]] = {
        "fla.ops.rwkv4": {"fused_recurrent_rwkv4": rwkv4},
        "fla.ops.gla": {"fused_recurrent_gla": recurrent_gla},
        "fla.ops.simple_gla": {"fused_recurrent_simple_gla": recurrent_gla},
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": state_update},
        "flash_attn.flash_attn_interface": {"flash_attn_with_kvcache": with_kvcache},
        "flash_attn_interface": {"flash_attn_with_kvcache": with_kvcache},
        "mlstm_kernels.torch.recurrent.triton_step": {"mlstm_recurrent_step__triton": mlstm_step},
        "fla.ops.hgrn": {"fused_recurrent_hgrn": hgrn, "chunk_hgrn": hgrn},
        "accelerated_scan.scalar": {"scan": channels_first},
        "liger_kernel.ops.swiglu": {
            "LigerSiLUMulFunction": types.SimpleNamespace(apply=silu_mul),
            "LigerFusedGateUpSiLUMulFunction": types.SimpleNamespace(apply=gate_up),
        },
        "liger_kernel.ops.mlp": {"gemm_swiglu": gemm_swiglu},
        "xformers": {"__version__": "0.0.99"},
        "xformers.ops": {},
    }
    put_modules(monkeypatch, modules)
    operators = types.SimpleNamespace(dual_gemm_silu_identity_mul=dual_gemm)
    monkeypatch.setattr(torch.ops, "xformers", operators, raising=False)

    def compile_(function: Any, **options: Any) -> Any:
        seen.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    return seen


def small_case(baseline: Baseline, mode: str = "fwbw") -> Case:
    return case_of(baseline, MLP_SIZES if baseline in MLPS else SIZES, mode, "fp32")


def errors_of(baseline: Baseline, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Return the errors of the output and of the gradients, where there are any, against the definition."""
    operation, case = get_operation(baseline.op), small_case(baseline)
    inputs = operation.make_inputs(case.sizes, dtype=dtype)
    runnable, gradients = resolve(baseline.build)(case, inputs), "fwbw" in baseline.modes
    errors = relative_errors(operation, runnable, inputs, gradients=gradients)
    assert set(errors) == {"out", *(operation.differentiable if gradients else ())}
    return errors


@pytest.mark.parametrize("baseline", [*CHANNELS, *MLPS], ids=lambda baseline: f"{baseline.op}-{baseline.name}")
def test_adapter_agrees_with_the_reference(baseline: Baseline, stand_ins: list[Any]) -> None:
    errors = errors_of(baseline)
    assert max(errors.values()) < (1e-6 if baseline in MLPS else 1e-5), errors
    if baseline.name == "torch.compile":
        whole = ("eager", {"dynamic": False}) if baseline in MLPS else ("run", {"dynamic": False, "fullgraph": True})
        assert stand_ins == [whole]


STEPS = [b for b in BASELINES if "step" in b.modes and b.name != "torch.sdpa_cudnn" and b.op not in FAMILIES["delta"]]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("baseline", STEPS, ids=lambda baseline: f"{baseline.op}-{baseline.name}")
def test_a_step_agrees_with_the_definition(baseline: Baseline) -> None:
    family = {"batch": 2, "seq_len": 1, "num_heads": 3, "head_dim_qk": 16, "head_dim_v": 32}
    (sizes,) = plan_sizes(baseline, family)
    context = 9 if get_operation(baseline.op).cache else None
    case = case_of(baseline, {**sizes, "context": context}, "step", baseline.dtypes[-1])
    item = PlannedCase(case=case, target=baseline)
    worker = Worker("cpu")
    assert worker.verify(item)["rel_error"] < (1e-5 if case.dtype == "fp32" else 1e-2)
    ready = worker.make_ready(item)
    state = state_before_step(get_operation(case.op), case, "cpu")
    assert {x.shape for x in tree_leaves(state)} <= {x.shape for x in ready.inputs}


def test_gating_in_place_allocates_two_tensors(stand_ins: list[Any]) -> None:
    baseline = get_baseline("gated_mlp", "torch.inplace")
    inputs = get_operation("gated_mlp").make_inputs(MLP_SIZES, dtype=torch.float32)
    up, gate = (inputs["x"] @ inputs[name] for name in ("w_up", "w_gate"))
    assert gate_in_place(up, gate) is up
    resolve(baseline.build)(small_case(baseline, "fw"), inputs)
    assert stand_ins == [("gate_in_place", {"dynamic": False})]


@pytest.mark.usefixtures("stand_ins")
def test_xformers_without_its_operator() -> None:
    del torch.ops.xformers.dual_gemm_silu_identity_mul
    with pytest.raises(ImportError, match=r"xformers 0.0.99 has no operator dual_gemm_silu_identity_mul"):
        errors_of(get_baseline("gated_mlp", "xformers.swiglu"))


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed: pip install jax")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_jax_agrees_with_the_reference(dtype: torch.dtype) -> None:
    errors = errors_of(get_baseline("wkv4", "jax.associative_scan"), dtype)
    assert max(errors.values()) < 2 * torch.finfo(dtype).eps + 1e-6, errors


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["torch.eager", "fla.chunk_hgrn"])
def test_closed_gates_have_finite_gradients(name: str) -> None:
    """Decays so near 1 that 1 - a^2 as it stands would be 0, and its root's gradient infinite."""
    baseline = get_baseline("rglru", name)
    inputs = get_operation("rglru").make_inputs(SIZES, dtype=torch.float32)
    inputs["r"] = torch.full_like(inputs["r"], -20.0)
    runnable = resolve(baseline.build)(small_case(baseline), inputs)
    gradients = torch.autograd.grad(runnable.forward().sum(), list(runnable.leaves.values()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_sizes_beside_their_own_family() -> None:
    for baselines, own in ((CHANNELS, SIZES), (MLPS, MLP_SIZES)):
        assert all(plan_sizes(baseline, own) == [own] for baseline in baselines)


def test_products_alone_are_an_operation_of_their_own() -> None:
    run = Run.start(H200)
    for baseline in MLPS:
        item = PlannedCase(case=small_case(baseline, "fw"), target=baseline)
        record = build_record(run, item, {"status": "ok", "reason": None, "columns": {}})
        assert record.same_math and (record.op == "projections") == (baseline.name == "torch.gemms")
