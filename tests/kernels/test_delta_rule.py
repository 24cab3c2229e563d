"""The delta rule, beside the laws: what its operations share, grouped heads, strong decays, normalised keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lrbench.kernels import FAMILIES, get_operation, resolve
from lrbench.kernels.delta_rule.operations import delta_net, gated_delta_net, kda
from lrbench.tests.kernels import laws
from lrbench.tests.kernels.cases import BF16, DTYPES, F16, F32, F64, heads, interpreted, on_each, on_gpu, portable
from lrbench.tests.kernels.laws import Case

OPERATIONS = FAMILIES["delta"]
SIZES = heads(2, 45, 4, 16, 24)


def inputs_of(op: str, dtype: torch.dtype = F64, **changes: int) -> dict[str, Tensor]:
    return get_operation(op).make_inputs({**SIZES, **changes}, dtype=dtype)


def close(given: Any, expected: Any) -> None:
    torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-10)


GROUPED = heads(2, 45, 8, 16, 24, num_heads_qk=2)


@on_each(
    *(portable(op, "torch", dtype, sizes=GROUPED, chunk_size=16) for op in OPERATIONS for dtype in (F64, F32, BF16)),
    *(
        on_gpu(op, "torch", dtype, sizes=heads(2, 300, 8, 64, 128, num_heads_qk=4))
        for op in OPERATIONS
        for dtype in DTYPES
    ),
)
def test_grouped_heads(case: Case) -> None:
    """The gradients of q and k are sums over the heads that share them."""
    laws.check_matches_reference(case)


@on_each(
    *(
        make(op, "step", dtype, sizes=heads(3, 1, 4, 40, 24, num_heads_qk=2), initial_state=state)
        for op in OPERATIONS
        for make, dtype in ((interpreted, F32), (interpreted, F16), (on_gpu, BF16))
        for state in (True, False)
    )
)
def test_steps_of_grouped_heads(case: Case) -> None:
    laws.check_matches_reference(case, gradients=False)


WHOLE_STATE_SIZES = (
    heads(2, 300, 3, 128, 128),
    heads(1, 77, 2, 64, 64),
    heads(1, 1, 1, 128, 128),
    heads(1, 200, 4, 96, 192, num_heads_qk=2),
    # Cut into segments, the last of which is shorter.
    heads(1, 2500, 2, 128, 128, num_heads_qk=1),
    heads(1, 4100, 3, 64, 256),
)


@on_each(
    *(
        on_gpu(op, "whole_state", dtype, sizes=sizes, initial_state=state)
        for op in OPERATIONS
        for dtype in (F16, BF16)
        for sizes, state in zip(WHOLE_STATE_SIZES, (True, False, False, False, True, False), strict=True)
    )
)
def test_whole_state_on_gpu(case: Case) -> None:
    gradients: bool | tuple[str, ...] = True
    if case.sizes["seq_len"] == 1:
        # dg of a first token is a difference of equal terms.
        gradients = ("q", "k", "v", "beta")
    laws.check_matches_reference(case, gradients=gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("decay", [0.0, 0.05, 1.0, 5.0, 50.0, math.inf])
def test_decays_of_channels_on_gpu(dtype: torch.dtype, decay: float) -> None:
    """Chunks with little decay are made in one product, others in squares; heads are cut into segments."""
    inputs = {name: x.cuda() for name, x in inputs_of("kda", dtype, batch=1, seq_len=2500, head_dim_qk=96).items()}
    inputs["g"] = -decay * torch.rand_like(inputs["g"]).clamp(min=0.01)
    do = torch.randn_like(inputs["v"])

    def run(impl: str, to: torch.dtype | None = None) -> list[Tensor]:
        leaves = [x.to(to or x.dtype).requires_grad_() for x in inputs.values()]
        o, state = kda(*leaves, impl=impl, return_last_state=True)
        return [o, state, *torch.autograd.grad(o, leaves, do.to(o.dtype))]

    found, exact = run("whole_state"), run("torch", F64)
    # Of g, what is left of products that decays take away.
    of_gates = (exact[2] * inputs["q"]).sum(-1).norm()
    for n, (x, y) in enumerate(zip(found, exact, strict=True)):
        size = max(y.norm(), of_gates) if n == 5 else y.norm()
        assert (x - y).norm() <= 2 * torch.finfo(dtype).eps * size, n


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [-50.0, -1e4, -math.inf])
def test_strong_decays_on_gpu(decay: float) -> None:
    inputs = {name: x.cuda().requires_grad_() for name, x in inputs_of("gated_delta_net", BF16, seq_len=150).items()}
    inputs["g"].data[:, ::3] = decay
    o = gated_delta_net(*inputs.values(), impl="whole_state")
    assert all(x.isfinite().all() for x in (o, *torch.autograd.grad(o.square().sum(), list(inputs.values()))))


FORMS = ("torch", "parallel", "recurrent")


@pytest.mark.parametrize("impl", FORMS)
def test_operations_that_are_special_cases(impl: str) -> None:
    """KDA with one decay for all columns is Gated DeltaNet, and that without decays DeltaNet."""
    q, k, v, g, beta = inputs_of("gated_delta_net").values()
    how: dict[str, Any] = {"impl": impl, "return_last_state": True}
    by_channel = g[..., None].expand(*g.shape, q.shape[3]).contiguous()
    close(kda(q, k, v, by_channel, beta, **how), gated_delta_net(q, k, v, g, beta, **how))
    close(gated_delta_net(q, k, v, 0 * g, beta, **how), delta_net(q, k, v, beta, **how))


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_without_new_values_states_decay(op: str, impl: str) -> None:
    inputs = inputs_of(op)
    inputs["beta"].zero_()
    state = torch.randn(2, 4, 16, 24, dtype=F64)
    call = resolve(get_operation(op).call)
    _, last = call(*inputs.values(), impl=impl, initial_state=state, return_last_state=True)
    g = inputs.get("g", torch.zeros_like(inputs["beta"])).sum(1)
    close(last, g.view(2, 4, -1, 1).exp() * state)


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("op", ["gated_delta_net", "kda"])
@pytest.mark.parametrize("decay", [-50.0, -1e4, -math.inf])
def test_strong_decays_leave_one_token(op: str, decay: float, impl: str) -> None:
    """All else is gone, so o = scale beta (q . k) v; gradients are finite, in float32 and across chunks too."""
    for dtype in (F64, F32):
        inputs = {name: x.requires_grad_() for name, x in inputs_of(op, dtype, seq_len=150).items()}
        inputs["g"].data.fill_(decay)
        o = resolve(get_operation(op).call)(*inputs.values(), impl=impl)
        q, k, v, beta = (inputs[name] for name in ("q", "k", "v", "beta"))
        alone = 0.25 * (beta * (q * k).sum(-1))[..., None] * v
        torch.testing.assert_close(o, alone, rtol=1e-5, atol=1e-6)
        assert all(x.isfinite().all() for x in torch.autograd.grad(o.square().sum(), list(inputs.values())))


@pytest.mark.parametrize("op", OPERATIONS)
def test_normalised_keys(op: str) -> None:
    inputs = inputs_of(op)
    inputs["q"] *= 3
    inputs["k"] *= torch.rand(45, 1, 1, dtype=F64) * 5
    call = resolve(get_operation(op).call)
    before = {name: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for name, x in inputs.items() if name in "qk"}
    close(call(*inputs.values(), normalise=True), call(*{**inputs, **before}.values()))


@pytest.mark.parametrize("op", OPERATIONS)
def test_inputs_are_those_of_a_layer_as_it_begins(op: str) -> None:
    inputs = inputs_of(op, F32, num_heads_qk=2)
    assert inputs["q"].shape == inputs["k"].shape == (2, 45, 2, 16)
    for name in ("q", "k"):
        torch.testing.assert_close(inputs[name].norm(dim=-1), torch.ones(2, 45, 2))
    assert ((inputs["beta"] > 0) & (inputs["beta"] < 1)).all()
    assert "g" not in inputs or (inputs["g"] <= 0).all()


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k, v, g, beta = inputs_of("gated_delta_net").values()
    with pytest.raises(ValueError, match="v must have a multiple of the 3 heads of q and k, got 4"):
        gated_delta_net(q[:, :, :3], k[:, :, :3], v, g, beta)
    with pytest.raises(ValueError, match="num_heads_qk must divide the 32 heads, got 12"):
        get_operation("kda").sizes_at(num_heads_qk=12)
    with pytest.raises(ValueError, match="impl must be one of torch, parallel, recurrent with cu_seqlens, got step"):
        gated_delta_net(q, k, v, g, beta, impl="step", cu_seqlens=torch.tensor([0, 45]))
