"""The portable forms of the operations over channels obey the laws, and their definitions are what their papers say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.rglru import LINEAR_SCAN, RGLRU
from lrbench.kernels.spec import Operation
from lrbench.kernels.wkv import OPERATION as WKV
from lrbench.tests.kernels import channel_laws, laws
from lrbench.tests.kernels.channel_laws import EXTREMES, OPERATIONS, function

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FORMS = [
    (operation, implementation.name)
    for operation in OPERATIONS
    for implementation in operation.implementations
    if "cpu" in implementation.devices
]


def name_of(value: Any) -> str:
    return getattr(value, "name", None) or str(value)


each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=name_of)
each_form = pytest.mark.parametrize(("operation", "name"), FORMS, ids=name_of)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sizes(batch: int, seq_len: int, channels: int) -> dict[str, int]:
    return {"batch": batch, "seq_len": seq_len, "channels": channels}


SMALL = sizes(2, 45, 12)


@each_operation
@each_dtype
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
def test_chunked_equals_recurrent(operation: Operation, chunk_size: int, dtype: torch.dtype) -> None:
    channel_laws.check_matches_reference(
        operation, function(operation, "torch"), dtype=dtype, device="cpu", sizes=SMALL, chunk_size=chunk_size
    )


@each_form
@each_dtype
def test_form_equals_recurrent(operation: Operation, name: str, dtype: torch.dtype) -> None:
    channel_laws.check_matches_reference(operation, function(operation, name), dtype=dtype, device="cpu", sizes=SMALL)


@each_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [sizes(3, 1, 40), sizes(1, 2, 50), sizes(1, 300, 5)], ids=str)
def test_any_shape(operation: Operation, name: str, shape: Mapping[str, int], dtype: torch.dtype) -> None:
    for initial_state in (False, True):
        channel_laws.check_matches_reference(
            operation, function(operation, name), dtype=dtype, device="cpu", sizes=shape, initial_state=initial_state
        )


@each_dtype
@pytest.mark.parametrize(
    ("operation", "name", "extreme"),
    [(operation, name, extreme) for operation, name in FORMS for extreme in EXTREMES[operation.name]],
    ids=name_of,
)
def test_extremes(operation: Operation, name: str, extreme: str, dtype: torch.dtype) -> None:
    channel_laws.check_matches_reference(
        operation, function(operation, name), dtype=dtype, device="cpu", sizes=SMALL,
        ranges=EXTREMES[operation.name][extreme],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "extreme"),
    [
        *((operation, extreme) for operation in (RGLRU, LINEAR_SCAN) for extreme in ("extreme gates", "closed gates")),
        *((WKV, extreme) for extreme in ("wild keys", "wild keys and rates", "long memory")),
        *((operation, None) for operation in OPERATIONS),
    ],
    ids=name_of,
)
def test_what_long_checks_rest_on(operation: Operation, extreme: str | None) -> None:
    """Over many chunks too the float64 form that stands for the recurrence is as exact as the recurrence."""
    channel_laws.check_matches_reference(
        operation, function(operation, "torch"), dtype=torch.float64, device="cpu", sizes=sizes(1, 1030, 8),
        chunk_size=64, ranges=EXTREMES[operation.name][extreme] if extreme else None,
    )  # fmt: skip


@each_operation
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_split_equals_whole(operation: Operation, dtype: torch.dtype) -> None:
    channel_laws.check_matches_reference(
        operation, function(operation, "torch"), dtype=dtype, device="cpu", sizes=SMALL, splits=(1, 20), chunk_size=8
    )


@each_form
def test_batch_invariant(operation: Operation, name: str) -> None:
    channel_laws.check_batch_invariant(
        operation, function(operation, name), dtype=torch.float32, device="cpu", sizes=SMALL, exact=False
    )


@each_form
def test_bad_input_fails_clearly(operation: Operation, name: str) -> None:
    channel_laws.check_bad_input(operation, function(operation, name), dtype=torch.float32, device="cpu")


@each_operation
def test_what_an_implementation_does_not_take_is_refused(operation: Operation) -> None:
    inputs = resolve(operation.inputs)(SMALL, dtype=torch.float32, device="cpu", seed=0).values()
    run = resolve(operation.call)
    with pytest.raises(ValueError, match=f"impl must be one of .* for {operation.name}, got 'chunkwise'"):
        run(*inputs, impl="chunkwise")
    with pytest.raises(ValueError, match="chunk_size must be left out for associative_scan, got 16"):
        run(*inputs, impl="associative_scan", chunk_size=16)
    with pytest.raises(ValueError, match="config must be left out for torch, got 1"):
        run(*inputs, impl="torch", config=1)


@each_operation
def test_laws_reject_a_wrong_implementation(operation: Operation) -> None:
    fn = function(operation, "torch")

    def leaks(*inputs: torch.Tensor, **kwargs: Any) -> Any:
        h, last = fn(*inputs, **kwargs)
        return h, (last[0], last[1] * 1.02, last[2]) if operation is WKV else last * 1.02

    wrong = "n" if operation is WKV else "C"
    with pytest.raises(AssertionError, match=rf"{operation.name} against the recurrence: {wrong}: error"):
        channel_laws.check_matches_reference(operation, leaks, dtype=torch.bfloat16, device="cpu", sizes=SMALL)


@each_operation
def test_inputs_are_the_declared_arguments(operation: Operation) -> None:
    first, again, other = (
        resolve(operation.inputs)(SMALL, dtype=torch.bfloat16, device="cpu", seed=seed) for seed in (3, 3, 4)
    )
    assert tuple(first) == operation.arguments
    assert set(operation.differentiable) <= set(first)
    for name, x in first.items():
        assert x.is_contiguous()
        assert x.dtype == (torch.bfloat16 if x.dim() == 3 else torch.float32), name
        assert torch.equal(x, again[name])
        assert not torch.equal(x, other[name])
    assert operation is not WKV or first["w"].min() > 0


@pytest.mark.parametrize(
    ("operation", "problem", "forward", "training"),
    [
        (RGLRU, sizes(8, 8192, 1024), 128, 128),
        (LINEAR_SCAN, sizes(8, 8192, 1024), 256, 256),
        (RGLRU, sizes(1, 65536, 2560), 128, 0),
        (LINEAR_SCAN, sizes(1, 65536, 2560), 256, 0),
        (RGLRU, sizes(1, 65536, 1024), 0, 0),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_how_far_ahead_inputs_are_fetched(
    operation: Operation, problem: dict[str, int], forward: int, training: int
) -> None:
    """In programs, as was fastest on an H200; none where states, not memory, are what a tile waits for."""
    config_of = resolve(operation.implementations[0].default_config or "")
    assert [config_of(problem, "bf16", (9, 0), each).ahead for each in (False, True)] == [forward, training]


def test_rglru_is_griffins_recurrence() -> None:
    """Equations 1 to 4 of De et al. written out for numbers, with a = sigma(Lambda) and c = -Lambda."""
    x, r, i, lam = 0.7, -0.3, 1.1, 2.5
    h = 0.4
    for _ in range(3):
        gate_r, gate_i, base = (1 / (1 + math.exp(-z)) for z in (r, i, lam))
        a = base ** (8 * gate_r)
        h = a * h + math.sqrt(1 - a * a) * gate_i * x
    full = [torch.full((1, 3, 1), value, dtype=torch.float64) for value in (x, r, i)]
    c = torch.tensor([-lam], dtype=torch.float64)
    state = torch.full((1, 1), 0.4, dtype=torch.float64)
    out = resolve(RGLRU.recurrent)(*full, c, initial_state=state)
    assert out[0, -1, 0].item() == pytest.approx(h, rel=1e-12)


def test_a_closed_gate_keeps_the_state() -> None:
    """Pre-activations of minus infinity, a mask, leave state and gradients as they are."""
    x, r, i = (torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    leaves = [x.requires_grad_(), torch.full_like(r, -math.inf).requires_grad_(), i.requires_grad_()]
    c, state = torch.zeros(8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    h, last = function(RGLRU, "torch")(*leaves, c, initial_state=state, return_last_state=True)
    assert torch.equal(h, state[:, None].expand_as(h))
    gradients = torch.autograd.grad(last.sum(), [*leaves, c, state])
    assert all(not g.any() for g in gradients[:-1])
    assert torch.equal(gradients[-1], torch.ones_like(state))


def test_one_minus_square_keeps_its_bits() -> None:
    """A sequence of barely open gates: sqrt(1 - a^2) as it stands would be 0 in float32, and h with it."""
    rows = torch.full((1, 5, 4), -18.0)
    c = torch.full((4,), -9.0)
    x = torch.ones_like(rows)
    h = function(RGLRU, "torch")(x, rows, x, c)
    exact = resolve(RGLRU.recurrent)(x.double(), rows.double(), x.double(), c.double())
    assert exact.min() > 0
    assert (h - exact).abs().max() <= 1e-6 * exact.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("c", [-60.0, 100.0, 900.0, 5000.0])
def test_a_decay_rate_of_any_size_stays_right(c: float, dtype: torch.dtype) -> None:
    """softplus(c) is c for large c and exp(c) for c far below 0; a gate that is nearly shut keeps a inside (0, 1)."""
    x, r, i = (torch.full((1, 1, 2), value, dtype=dtype) for value in (1.0, -30.0, 0.0))
    rate = torch.full((2,), c, dtype=dtype, requires_grad=True)
    h = function(RGLRU, "torch")(x, r, i, rate)
    exponent = 8.0 * (max(c, 0.0) + math.log1p(math.exp(-abs(c)))) * math.exp(-30.0) / (1.0 + math.exp(-30.0))
    expected = 0.5 * math.sqrt(-math.expm1(-2.0 * exponent))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(h, torch.full_like(h, expected), rtol=tolerance, atol=0.0)
    (gradient,) = torch.autograd.grad(h.sum(), rate)
    # d h / d c = h / 2 of d log(exponent) / d c, to the first order in the exponent, which is below 1e-8.
    slope = math.exp(min(c, 0.0)) / (1.0 + math.exp(-abs(c))) / (max(c, 0.0) + math.log1p(math.exp(-abs(c))))
    torch.testing.assert_close(gradient, torch.full_like(gradient, 0.5 * expected * slope), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("name", [name for operation, name in FORMS if operation is WKV])
def test_what_holds_of_every_form_of_wkv(name: str) -> None:
    fn = function(WKV, name)
    channel_laws.check_first_output_is_first_value(fn, dtype=torch.float32, device="cpu")
    channel_laws.check_left_out_tokens(fn, dtype=torch.float32, device="cpu")
    channel_laws.check_state_scale_is_free(fn, dtype=torch.float32, device="cpu")


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

    inputs = resolve(WKV.inputs)(sizes(1, 4096, 8), dtype=torch.float32, device="cpu", seed=0)
    inputs["w"] = torch.full((8,), 10.0)
    exact = function(WKV, "torch")(*(x.double() for x in inputs.values()))
    ours = (function(WKV, "torch")(*inputs.values()) - exact).abs().max()
    theirs = (absolute(*inputs.values()) - exact).abs().max()
    assert ours < 2e-6
    assert theirs > 100 * ours


def test_wkv_is_equation_16() -> None:
    """Peng et al., equation 16, written out for numbers; a token's own weight does not decay before its successor."""
    k, v, w, u = [0.3, -1.2, 0.8, 0.1], [1.0, -2.0, 0.5, 3.0], 0.7, 0.4
    expected = []
    for t in range(4):
        weights = [math.exp(-(t - 1 - i) * w + k[i]) for i in range(t)] + [math.exp(u + k[t])]
        expected.append(sum(a * b for a, b in zip(weights, v[: t + 1], strict=True)) / sum(weights))
    full = [torch.tensor(x, dtype=torch.float64).view(1, 4, 1) for x in (k, v)]
    y = resolve(WKV.recurrent)(*full, *(torch.tensor([x], dtype=torch.float64) for x in (w, u)))
    assert y.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_a_gradient_of_one_argument_alone() -> None:
    """Every subset of arguments can be differentiated, an unused output too, and second derivatives are refused."""
    fn = function(WKV, "torch")
    problem = channel_laws.make_problem(WKV, SMALL, dtype=torch.float64, device="cpu", num_siblings=0)
    assert problem.state is not None
    everything = laws.evaluate(problem, fn)
    names = [*WKV.arguments, "num", "den"]
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
    fn, recurrent = function(WKV, "torch"), resolve(WKV.recurrent)
    problem = channel_laws.make_problem(WKV, SMALL, dtype=torch.float64, device="cpu", num_siblings=0)
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
