"""References of the operations that only baselines compute, held against closed forms and the authors' own code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lrbench.kernels import resolve
from lrbench.kernels.baselines import get_operation
from lrbench.kernels.baselines.operations import OPERATIONS

SIZES = {
    "batch": 2, "seq_len": 37, "num_heads": 3, "head_dim_qk": 8, "head_dim_v": 12,
    "channels": 6, "d_model": 10, "d_ff": 14,
}  # fmt: skip


def inputs_of(op: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return get_operation(op).make_inputs(SIZES, dtype=dtype)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def gla_quadratic(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """h_t = sum_{s <= t} (K^-1/2 sum_d q_td k_sd exp(G_td - G_sd)) v_s with G the running sum of g."""
    total = g.cumsum(1)
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(~causal[None, :, :, None, None], -torch.inf).exp()
    scores = torch.einsum("bthd,bshd,btshd->bhts", q, k, decay) * q.shape[-1] ** -0.5
    return torch.einsum("bhts,bshv->bthv", scores, v)


def selective_scan_quadratic(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """y_t = sum_{s <= t} sum_n C_tn exp(A_n sum_{s < r <= t} delta_r) delta_s B_sn u_s, channel by channel."""
    total = delta.cumsum(1)
    causal = torch.ones(u.shape[1], u.shape[1], dtype=torch.bool).tril()
    exponent = (total[:, :, None] - total[:, None, :])[..., None] * A
    decay = exponent.masked_fill(~causal[None, :, :, None, None], -torch.inf).exp()
    return torch.einsum("btn,btsdn,bsn,bsd->btd", C, decay, B, delta * u)


def projections_joined(x: Tensor, w_up: Tensor, w_gate: Tensor) -> Tensor:
    """Both products as one on the weights side by side."""
    return torch.einsum("md,dnf->nmf", x, torch.stack((w_up, w_gate), dim=1))


CLOSED_FORMS: dict[str, Callable[..., Tensor]] = {
    "attention": softmax_attention,
    "gla": gla_quadratic,
    "selective_scan": selective_scan_quadratic,
    "projections": projections_joined,
}


@pytest.mark.parametrize("op", CLOSED_FORMS)
def test_references_are_the_closed_form(op: str) -> None:
    """The recurrence with its gradients, and the parallel form where there is one."""
    inputs = {name: x.requires_grad_() for name, x in inputs_of(op).items()}
    operation = get_operation(op)
    outputs = [resolve(operation.recurrent)(*inputs.values()), CLOSED_FORMS[op](*inputs.values())]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-12)
    if operation.parallel is not None:
        torch.testing.assert_close(resolve(operation.parallel)(*inputs.values()), outputs[0], rtol=1e-10, atol=1e-12)
    grad_out = torch.randn(outputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [inputs[name] for name in operation.differentiable]
    got, expected = (torch.autograd.grad(out, leaves, grad_out) for out in outputs)
    for name, x, y in zip(operation.differentiable, got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"d{name}: {text}")


def test_gates_have_their_sign() -> None:
    assert (inputs_of("gla")["g"] <= 0).all()
    scan = inputs_of("selective_scan")
    assert (scan["A"] < 0).all()
    assert scan["delta"].min() >= 0.001 and scan["delta"].max() <= 0.1


@pytest.mark.parametrize("op", OPERATIONS)
def test_low_precision_inputs_are_computed_in_float32(op: str) -> None:
    inputs = inputs_of(op, torch.bfloat16)
    reference = resolve(get_operation(op).recurrent)
    out = reference(*inputs.values())
    assert out.dtype == torch.bfloat16
    exact = reference(*(x.double() for x in inputs.values()))
    rounding = torch.finfo(torch.bfloat16).eps / 2
    assert ((out.double() - exact).abs() <= 1.01 * rounding * exact.abs() + 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize("op", ["simple_gla", "gla"])
def test_reference_agrees_with_fla(op: str) -> None:
    pytest.importorskip("fla", reason="fla is not installed: pip install fla-core==0.6.0")
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    theirs = {"simple_gla": naive_recurrent_simple_gla, "gla": naive_recurrent_gla}[op]
    inputs = inputs_of(op, torch.float32)
    ours = resolve(get_operation(op).recurrent)(*inputs.values())
    torch.testing.assert_close(ours, theirs(*inputs.values())[0], rtol=1e-4, atol=1e-5)


def test_lightning_reference_agrees_with_lightning_attn() -> None:
    pytest.importorskip("lightning_attn", reason="lightning_attn is not installed: pip install lightning-attn==0.0.5")
    from lightning_attn.ops import linear_attn

    inputs = inputs_of("lightning", torch.float32)
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
    theirs = linear_attn(q, k, v, inputs["slope"]).transpose(1, 2)
    ours = resolve(get_operation("lightning").recurrent)(*inputs.values())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
