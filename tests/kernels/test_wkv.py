"""The portable forms of WKV obey the laws, and its definition is what the paper says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.wkv import OPERATION
from lrbench.tests.kernels import laws, wkv_laws

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_associative = pytest.mark.parametrize("name", ["associative", "torch_associative_scan"])


def sizes(batch: int, seq_len: int, channels: int) -> dict[str, int]:
    return {"batch": batch, "seq_len": seq_len, "channels": channels}


SMALL = sizes(2, 45, 24)


def function(name: str) -> Any:
    return OPERATION.function(OPERATION.implementation(name))


@each_dtype
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64, None])
def test_chunked_equals_recurrent(chunk_size: int | None, dtype: torch.dtype) -> None:
    wkv_laws.check_matches_reference(function("torch"), dtype=dtype, device="cpu", sizes=SMALL, chunk_size=chunk_size)


@each_dtype
@each_associative
def test_associative_equals_recurrent(name: str, dtype: torch.dtype) -> None:
    wkv_laws.check_matches_reference(function(name), dtype=dtype, device="cpu", sizes=SMALL)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [sizes(3, 1, 40), sizes(1, 2, 50), sizes(1, 300, 5)], ids=str)
@pytest.mark.parametrize("name", ["torch", "associative"])
def test_any_shape(name: str, shape: Mapping[str, int], dtype: torch.dtype) -> None:
    for initial_state in (False, True):
        wkv_laws.check_matches_reference(
            function(name), dtype=dtype, device="cpu", sizes=shape, initial_state=initial_state
        )


@each_dtype
@pytest.mark.parametrize("extreme", wkv_laws.EXTREMES)
@pytest.mark.parametrize("name", ["torch", "associative", "torch_associative_scan"])
def test_extremes(name: str, extreme: str, dtype: torch.dtype) -> None:
    wkv_laws.check_matches_reference(
        function(name), dtype=dtype, device="cpu", sizes=SMALL, ranges=wkv_laws.EXTREMES[extreme]
    )


@pytest.mark.parametrize("extreme", [None, "wild keys", "wild keys and rates", "long memory"])
def test_what_long_checks_rest_on(extreme: str | None) -> None:
    """Over many chunks too the float64 form that stands for the recurrence is as exact as the recurrence."""
    wkv_laws.check_matches_reference(
        function("torch"), dtype=torch.float64, device="cpu", sizes=sizes(1, 1030, 8), chunk_size=64,
        ranges=wkv_laws.EXTREMES[extreme] if extreme else None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_split_equals_whole(dtype: torch.dtype) -> None:
    wkv_laws.check_matches_reference(
        function("torch"), dtype=dtype, device="cpu", sizes=SMALL, splits=(1, 20), chunk_size=8
    )


@pytest.mark.parametrize("name", ["torch", "associative", "torch_associative_scan"])
def test_what_holds_of_every_form(name: str) -> None:
    fn = function(name)
    wkv_laws.check_first_output_is_first_value(fn, dtype=torch.float32, device="cpu")
    wkv_laws.check_left_out_tokens(fn, dtype=torch.float32, device="cpu")
    wkv_laws.check_state_scale_is_free(fn, dtype=torch.float32, device="cpu")
    wkv_laws.check_batch_invariant(fn, dtype=torch.float32, device="cpu", sizes=SMALL, exact=False)


def test_bad_input_fails_clearly() -> None:
    wkv_laws.check_bad_input(function("torch"), dtype=torch.float32, device="cpu")


def test_laws_reject_a_wrong_implementation() -> None:
    def leaks(*inputs: torch.Tensor, **kwargs: Any) -> Any:
        y, (num, den, top) = function("torch")(*inputs, **kwargs)
        return y, (num, den * 1.02, top)

    with pytest.raises(AssertionError, match="wkv4 against the recurrence: n: error"):
        wkv_laws.check_matches_reference(leaks, dtype=torch.bfloat16, device="cpu", sizes=SMALL)


def test_exponents_relative_to_the_start_are_rejected() -> None:
    """Adding t w to k, as the source of the associative form does, loses the weights of late tokens in float32."""

    def absolute(k: Any, v: Any, w: Any, u: Any, **_: Any) -> Any:
        exponent = k + torch.arange(k.shape[1])[:, None] * w
        before = torch.logcumsumexp(exponent, dim=1)[:, :-1]
        now = u - w + exponent[:, 1:]
        share = torch.sigmoid(now - before)
        mean = torch.zeros_like(v)
        mean[:, 0] = v[:, 0]
        for t in range(1, k.shape[1]):
            mean[:, t] = mean[:, t - 1] + torch.sigmoid(exponent[:, t] - before[:, t - 1]) * (v[:, t] - mean[:, t - 1])
        y = torch.cat((v[:, :1], mean[:, :-1] + share * (v[:, 1:] - mean[:, :-1])), dim=1)
        return y

    inputs = resolve(OPERATION.inputs)(sizes(1, 4096, 8), dtype=torch.float32, device="cpu", seed=0)
    inputs["w"] = torch.full((8,), 10.0)
    exact = function("torch")(*(x.double() for x in inputs.values()))
    ours = (function("torch")(*inputs.values()) - exact).abs().max()
    theirs = (absolute(*inputs.values()) - exact).abs().max()
    assert ours < 2e-6
    assert theirs > 100 * ours


def test_inputs_are_the_declared_arguments() -> None:
    first, again, other = (
        resolve(OPERATION.inputs)(SMALL, dtype=torch.bfloat16, device="cpu", seed=seed) for seed in (3, 3, 4)
    )
    assert tuple(first) == OPERATION.arguments == OPERATION.differentiable
    for name, x in first.items():
        assert x.is_contiguous()
        assert x.dtype == (torch.bfloat16 if x.dim() == 3 else torch.float32), name
        assert torch.equal(x, again[name])
        assert not torch.equal(x, other[name])
    assert first["w"].min() > 0


def test_wkv_is_equation_16() -> None:
    """Peng et al., equation 16, written out for numbers; a token's own weight does not decay before its successor."""
    k, v, w, u = [0.3, -1.2, 0.8, 0.1], [1.0, -2.0, 0.5, 3.0], 0.7, 0.4
    expected = []
    for t in range(4):
        weights = [math.exp(-(t - 1 - i) * w + k[i]) for i in range(t)] + [math.exp(u + k[t])]
        expected.append(sum(a * b for a, b in zip(weights, v[: t + 1], strict=True)) / sum(weights))
    full = [torch.tensor(x, dtype=torch.float64).view(1, 4, 1) for x in (k, v)]
    y = resolve(OPERATION.recurrent)(*full, *(torch.tensor([x], dtype=torch.float64) for x in (w, u)))
    assert y.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_a_gradient_of_one_argument_alone() -> None:
    """Every subset of arguments can be differentiated, an unused output too, and second derivatives are refused."""
    fn = function("torch")
    problem = wkv_laws.make_problem(SMALL, dtype=torch.float64, device="cpu", num_siblings=0)
    assert problem.state is not None
    everything = laws.evaluate(problem, fn)
    names = [*OPERATION.arguments, "num", "den"]
    for index, name in enumerate(names):
        tensors = [*problem.inputs.values(), *problem.state]
        tensors[index] = tensors[index].clone().requires_grad_()
        y, last = fn(*tensors[:4], initial_state=tuple(tensors[4:]), return_last_state=True)
        scalar = (y * problem.cotangents["h"]).sum()
        scalar = scalar + (last[0] * problem.cotangents["C"]).sum() + (last[1] * problem.cotangents["n"]).sum()
        (gradient,) = torch.autograd.grad(scalar, tensors[index], retain_graph=True)
        key = f"d{name}" if index < 4 else f"d{'Cn'[index - 4]}_initial"
        assert torch.allclose(gradient.detach(), everything[key], rtol=1e-12, atol=1e-12), name
        (gradient,) = torch.autograd.grad(y.square().sum(), tensors[index], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def test_gradients_of_the_last_state_alone() -> None:
    fn, recurrent = function("torch"), resolve(OPERATION.recurrent)
    problem = wkv_laws.make_problem(SMALL, dtype=torch.float64, device="cpu", num_siblings=0)
    for part in range(2):
        gradients = []
        for form in (fn, recurrent):
            leaves = [x.clone().requires_grad_() for x in problem.inputs.values()]
            _, last = form(*leaves, return_last_state=True)
            scalar = (last[part] * last[2].exp()).sum()
            gradients.append(torch.autograd.grad(scalar, leaves[:3], allow_unused=True))
        for ours, exact in zip(*gradients, strict=True):
            exact = torch.zeros_like(ours) if exact is None else exact
            assert torch.allclose(ours, exact, rtol=1e-10, atol=1e-12)
