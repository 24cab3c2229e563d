"""Counted work against what running code does: two independent counters of what torch dispatches.

torch's FlopCounterMode counts the matrix products of the suite's own implementations. :class:`OperationCounter` counts
elementwise work by kind of function, and traffic, of the references and of plain forms that follow the equations; the
forms are checked against autograd on the way. Costs of functions are large primes, so that equal FLOPs mean equal
numbers of every kind. The square is computed whole, so the causal factor is 1. What code does beyond or short of the
count is named and added by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lrbench.analysis.counts import (
    Count,
    Factors,
    Head,
    Layer,
    Widths,
    Work,
    count,
    count_case,
    gated_mlp,
    lightning,
    mlstm,
    rglru,
    scalar_decay,
    wkv,
)
from lrbench.analysis.counts import baselines as formulas
from lrbench.kernels import FAMILIES, baselines, get_operation, resolve

from . import plain_forms as plain
from .operation_counter import OperationCounter

OPERATIONS = FAMILIES["tfla"]
SIZES = {"batch": 1, "seq_len": 256, "num_heads": 2, "head_dim_qk": 16, "head_dim_v": 32}
HEADS, CELLS = 2, 16 * 32


def matrix_flops(call: Callable[[], object]) -> int:
    """Return the FLOPs of the matrix products that ``call`` dispatches, in-place ones included."""

    def baddbmm(_: object, a: torch.Size, b: torch.Size, *__: object, **___: object) -> int:
        return 2 * a[0] * a[1] * a[2] * b[2]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: baddbmm}) as counter:
        call()
    return counter.get_total_flops()


def run(op: str, impl: str, chunk_size: int | None) -> tuple[int, int]:
    """Return the matrix FLOPs of an implementation's forward and backward pass."""
    operation = get_operation(op)
    tensors = resolve(operation.inputs)(SIZES, dtype=torch.float32, device="cpu", seed=0)
    leaves = [tensors[name].requires_grad_(name in operation.differentiable) for name in operation.arguments]
    keywords = {"chunk_size": chunk_size} if chunk_size else {}
    outputs: list[torch.Tensor] = []
    call = operation.function(impl)
    forward = matrix_flops(lambda: outputs.append(call(*leaves, **keywords)))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    backward = matrix_flops(lambda: torch.autograd.grad(outputs[0].sum(), wanted))
    return forward, backward


def counted(op: str, impl: str, mode: str, chunk_size: int | None) -> Count:
    sizes = SIZES | ({"chunk_size": chunk_size} if chunk_size else {})
    result = count_case(op, impl, mode, "fp32", None, sizes)
    assert result is not None
    assert result.causal_factor == 1
    return result


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("chunk_size", [64, 100, 256])
def test_chunkwise_matrix_work_is_exact(op: str, chunk_size: int) -> None:
    forward, backward = run(op, "torch", chunk_size)
    # mLSTMexp's n^T q is a product to torch; the paper, and so the count, has it among the vector work.
    normaliser = 2 * SIZES["seq_len"] * 16 * HEADS if op == "mlstm_exp" else 0
    assert forward == counted(op, "torch", "fw", chunk_size).tensor_flops + normaliser
    expected = counted(op, "torch", "bw", chunk_size)
    # The last chunk's state is the only one that no gradient needs, so it is not recomputed.
    ragged = SIZES["seq_len"] % chunk_size
    last_chunk = ragged or chunk_size
    # A ragged last chunk is a group of its own, and the state that enters a group is kept from the forward pass.
    kept = chunk_size if ragged else 0
    unneeded = 2 * (last_chunk + kept) * CELLS * HEADS
    recomputed = expected.recomputed_tensor_flops + normaliser - unneeded
    assert backward == expected.tensor_flops + recomputed


@pytest.mark.parametrize("op", OPERATIONS)
def test_parallel_matrix_work_is_exact(op: str) -> None:
    forward, backward = run(op, "parallel", None)
    # The reference also multiplies q with its initial state of zeros.
    initial_state = 2 * SIZES["seq_len"] * CELLS * HEADS
    assert forward == counted(op, "parallel", "fw", None).tensor_flops + initial_state
    # Autograd stores the scores: nothing is recomputed.
    assert backward == counted(op, "parallel", "bw", None).tensor_flops


def test_attention_matrix_work_is_exact() -> None:
    operation = baselines.get_operation("attention")
    sizes = {"batch": 2, "seq_len": 128, "num_heads": 3, "head_dim_qk": 16, "head_dim_v": 16}
    tensors = resolve(operation.inputs)(sizes, dtype=torch.float64, device="cpu", seed=0)
    leaves = [tensors[name].requires_grad_() for name in operation.arguments]
    outputs: list[torch.Tensor] = []
    forward = matrix_flops(lambda: outputs.append(resolve(operation.parallel)(*leaves)))
    backward = matrix_flops(lambda: torch.autograd.grad(outputs[0].sum(), leaves))
    assert forward == count("attention", mode="fw", causal_factor=1, **sizes).tensor_flops
    assert backward == count("attention", mode="bw", causal_factor=1, **sizes).tensor_flops


F = Factors(exp=101, log=1009, sig=10007, max=100003, mask=1000003, abs=10000019)
WIDTH = 2
"""Bytes of an element in Layer and Head; the forms run in float64."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(*shape: int) -> Tensor:
    """Return a float64 leaf from N(0, 1)."""
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def positive(*shape: int) -> Tensor:
    """Return a float64 leaf from U(0, 1)."""
    return torch.rand(shape, dtype=torch.float64).requires_grad_()


def watch(function: Callable[..., Any], *arguments: Any) -> tuple[OperationCounter, Any]:
    """Run a form on detached arguments and return what it did and its result."""
    with torch.no_grad(), OperationCounter() as counter:
        return counter, function(*arguments)


def flops(work: Iterable[Work]) -> float:
    return sum(w.flops for w in work)


def moved(counter: OperationCounter) -> float:
    """Return the counted bytes as if every element were WIDTH wide."""
    return counter.bytes * WIDTH / 8


def close(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_rglru_fused_work_is_exact() -> None:
    length, channels = 9, 3
    layer = Layer(batch=1, length=length, channels=channels, f=F)
    x, r, i, c = draw(length, channels), draw(length, channels), draw(length, channels), draw(channels)
    forward, _ = watch(plain.rglru_forward, x, r, i, c)
    assert forward.flops(F) == rglru.forward(layer, "fused").flops
    h = plain.rglru_forward(x, r, i, c)
    dh = torch.randn_like(h)
    recomputed, again = watch(plain.rglru_recompute, x, r, i, c)
    backward, gradients = watch(plain.rglru_backward, x, c, h, dh, again)
    close(gradients, torch.autograd.grad(h, (x, r, i, c), dh))
    counted = rglru.backward(layer, "fused")
    assert backward.flops(F) == counted.flops
    assert recomputed.flops(F) == flops(counted.recomputed_work.values())


def test_reduce_then_scan_is_exact() -> None:
    """The kernel that makes each chunk's map and the one that runs through the maps, beside the fused pass."""
    length, channels, size = 12, 3, 4
    chunks = length // size
    layer = Layer(batch=1, length=length, channels=channels, f=F, widths=Widths(qkv=WIDTH, state=WIDTH))
    x, r, i, c = draw(length, channels), draw(length, channels), draw(length, channels), draw(channels)

    def elements(x: Tensor, r: Tensor, i: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        gate_a, gate_x = plain.rglru_gates(r, i)
        _, log_a = plain.rglru_decay(gate_a, c)
        _, y, s = plain.rglru_input(x, gate_x, log_a)
        return log_a.exp(), s * y

    def decays(r: Tensor, c: Tensor) -> Tensor:
        return plain.rglru_decay(r.sigmoid(), c)[1].exp()

    h = plain.rglru_forward(x, r, i, c)
    dh = torch.randn_like(h)
    with torch.no_grad(), OperationCounter() as forward:
        maps = forward.kernel(lambda *given: plain.maps_of_chunks(*elements(*given), size), x, r, i, c)
        states = forward.kernel(plain.states_between, *maps)
    close(states, torch.cat((torch.zeros(1, channels, dtype=torch.float64), h[size - 1 : -1 : size])))
    with torch.no_grad(), OperationCounter() as backward:
        maps = backward.kernel(lambda r, c, dh: plain.gradient_maps_of_chunks(decays(r, c), dh, size), r, c, dh)
        backward.kernel(plain.states_between, *maps)
    a, b = positive(length, channels), draw(length, channels)
    with torch.no_grad(), OperationCounter() as scan:
        maps = scan.kernel(lambda a, b: plain.maps_of_chunks(a, b, size), a, b)
        scan.kernel(plain.states_between, *maps)
    with torch.no_grad(), OperationCounter() as scan_backward:
        maps = scan_backward.kernel(lambda a, dh: plain.gradient_maps_of_chunks(a, dh, size), a, dh)
        scan_backward.kernel(plain.states_between, *maps)
    for counter, one, gated, back in (
        (forward, rglru.forward(layer, "fused"), True, False),
        (backward, rglru.backward(layer, "fused"), True, True),
        (scan, rglru.scan_forward(layer), False, False),
        (scan_backward, rglru.scan_backward(layer), False, True),
    ):
        counted = rglru.chunked(one, layer, chunks, gated=gated, backward=back)
        assert counted.flops == one.flops
        more = flops(counted.recomputed_work.values()) - flops(one.recomputed_work.values())
        assert counter.flops(F) == more
        # The fused kernel loads the states beside what it loads anyhow.
        assert moved(counter) + chunks * channels * WIDTH == counted.bytes - one.bytes
        assert rglru.chunked(one, layer, 1, gated=gated, backward=back) == one


def test_rglru_layer_one_kernel_a_line_is_exact() -> None:
    """Work and traffic of the source's listing and of its backward pass, line by line."""
    tokens, size = 12, 5
    layer = Layer(batch=1, length=tokens, channels=size, f=F)
    x, w_a, w_x, c = draw(tokens, size), draw(size, size), draw(size, size), draw(size)
    dh = torch.randn(tokens, size, dtype=torch.float64)
    with torch.no_grad(), OperationCounter() as forward:
        r, i = forward.kernel(torch.mm, x, w_a), forward.kernel(torch.mm, x, w_x)
        gate_a, gate_x = forward.kernel(torch.sigmoid, r), forward.kernel(torch.sigmoid, i)
        log_a = forward.kernel(lambda gate, c: plain.rglru_decay(gate, c)[1], gate_a, c)
        a = forward.kernel(torch.exp, log_a)
        squared = forward.kernel(lambda log_a: (2 * log_a).exp(), log_a)
        y = forward.kernel(torch.mul, x, gate_x)
        b = forward.kernel(lambda y, squared: y * (1 - squared).sqrt(), y, squared)
        h = forward.kernel(plain.accumulate, a, b)
    counted = rglru.forward(layer, "unfused")
    assert (forward.flops(F), forward.products) == (counted.flops, counted.matrix_flops)
    assert moved(forward) == counted.bytes == (26 + 20) * tokens * size + 4 * size * size + 2 * size

    def recurrence_gradient(dh: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        db = plain.accumulate_gradient(a, dh)
        return db, db * plain.shifted(h)

    def normalised_gradient(db: Tensor, y: Tensor, squared: Tensor) -> tuple[Tensor, Tensor]:
        s = (1 - squared).sqrt()
        return db * s, db * y * -0.5 / s

    def log_decay_gradient(d_log_a: Tensor, gate: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        eighth = -8.0 * d_log_a
        return eighth * (1 + c.exp()).log(), (eighth * gate).sum(0) * c.sigmoid()

    def sigmoid_gradient(d: Tensor, gate: Tensor) -> Tensor:
        return d * (gate * (1 - gate))

    with torch.no_grad(), OperationCounter() as backward:
        db, da = backward.kernel(recurrence_gradient, dh, a, h)
        dy, d_squared = backward.kernel(normalised_gradient, db, y, squared)
        dx, d_gate_x = backward.kernel(lambda dy, x, gate: (dy * gate, dy * x), dy, x, gate_x)
        d_log_a = backward.kernel(lambda d, squared: d * squared * 2, d_squared, squared)
        d_log_a = backward.kernel(lambda da, a, d: da * a + d, da, a, d_log_a)
        d_gate_a, dc = backward.kernel(log_decay_gradient, d_log_a, gate_a, c)
        dr = backward.kernel(sigmoid_gradient, d_gate_a, gate_a)
        di = backward.kernel(sigmoid_gradient, d_gate_x, gate_x)
        for d, w in ((dr, w_a), (di, w_x)):
            dx = backward.kernel(lambda dx, d, w: torch.addmm(dx, d, w.T), dx, d, w)
        dw_a, dw_x = (backward.kernel(lambda x, d: torch.mm(x.T, d), x, d) for d in (dr, di))
    expected = torch.autograd.grad(plain.rglru_forward(x, x @ w_a, x @ w_x, c), (x, w_a, w_x, c), dh)
    close((dx, dw_a, dw_x, dc), expected)
    counted = rglru.backward(layer, "unfused")
    assert backward.flops(F) == counted.flops + flops(counted.recomputed_work.values())
    assert backward.products == counted.matrix_flops
    assert moved(backward) == counted.bytes

    fused, gemms = OperationCounter(), OperationCounter()
    with torch.no_grad():
        with fused:
            fused.kernel(plain.rglru_forward, x, r, i, c)
        with gemms:
            gemms.kernel(torch.mm, x, w_a)
            gemms.kernel(torch.mm, x, w_x)
    assert moved(fused) == rglru.forward(layer, "fused").bytes == 8 * tokens * size + 2 * size
    whole = rglru.forward(layer, "layer")
    assert moved(fused) + moved(gemms) == whole.bytes == 16 * tokens * size + 4 * size * size + 2 * size
    assert (fused.flops(F) + gemms.flops(F), gemms.products) == (whole.flops, whole.matrix_flops)


def test_rglru_layer_backward_traffic() -> None:
    """The fused kernel's own tensors, and the four GEMMs around it."""
    tokens, size = 12, 5
    layer = Layer(batch=1, length=tokens, channels=size, f=F)
    x, dr, di, w_a, w_x = draw(tokens, size), draw(tokens, size), draw(tokens, size), draw(size, size), draw(size, size)
    dx = torch.zeros(tokens, size, dtype=torch.float64)
    c, h, dh = draw(size), draw(tokens, size), draw(tokens, size)

    def operation(x: Tensor, r: Tensor, i: Tensor, c: Tensor, h: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
        return plain.rglru_backward(x, c, h, dh, plain.rglru_recompute(x, r, i, c))

    with torch.no_grad(), OperationCounter() as alone:
        alone.kernel(operation, x, dr, di, c, h, dh)
    assert moved(alone) == rglru.backward(layer, "fused").bytes
    with torch.no_grad(), OperationCounter() as gemms:
        for d, w in ((dr, w_a), (di, w_x)):
            dx = gemms.kernel(lambda dx, d, w: torch.addmm(dx, d, w.T), dx, d, w)
            gemms.kernel(lambda x, d: torch.mm(x.T, d), x, d)
    counted = rglru.backward(layer, "layer")
    assert moved(alone) + moved(gemms) == counted.bytes
    assert gemms.products == counted.matrix_flops


def test_linear_scan_is_exact() -> None:
    layer = Layer(batch=1, length=7, channels=4, f=F)
    a, b, dh = positive(7, 4), draw(7, 4), draw(7, 4)

    def gradients(a: Tensor, h: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        db = plain.accumulate_gradient(a, dh)
        return db * plain.shifted(h), db

    with torch.no_grad(), OperationCounter() as forward:
        h = forward.kernel(plain.accumulate, a, b)
    with torch.no_grad(), OperationCounter() as backward:
        got = backward.kernel(gradients, a, h, dh)
    close(got, torch.autograd.grad(plain.accumulate(a, b), (a, b), dh))
    for counter, counted in ((forward, rglru.scan_forward(layer)), (backward, rglru.scan_backward(layer))):
        assert counter.flops(F) == counted.flops
        assert moved(counter) == counted.bytes


def wkv_problem(length: int) -> tuple[Layer, tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]:
    """Return the layer, (k, v, w, u), the gradient of y and the expected gradients."""
    channels = 3
    inputs = (draw(length, channels), draw(length, channels), positive(channels), draw(channels))
    y = plain.wkv_forward(*inputs)[0]
    dy = torch.randn_like(y)
    return Layer(batch=1, length=length, channels=channels, f=F), inputs, dy, torch.autograd.grad(y, inputs, dy)


def test_wkv_recurrent_is_exact() -> None:
    layer, (k, v, w, u), dy, expected = wkv_problem(9)
    forward, out = watch(plain.wkv_forward, k, v, w, u)
    assert forward.flops(F) == wkv.recurrent_forward(layer).flops
    with torch.no_grad():
        kept = plain.wkv_kept(k, w, u, out)
    first, (dw, du, ps) = watch(plain.wkv_parameter_sweep, k, v, w, u, dy, kept)
    second, (dk, dv) = watch(plain.wkv_input_sweep, k, v, w, u, out[0], ps, out[1])
    close((dk, dv, dw, du), expected)
    counted = wkv.recurrent_backward(layer)
    assert first.flops(F) == counted.work["parameter gradients"].flops
    assert first.flops(F) + second.flops(F) == counted.flops


@pytest.mark.parametrize("length", [2, 9, 13, 16])
def test_wkv_scan_is_exact(length: int) -> None:
    layer, (k, v, w, u), dy, expected = wkv_problem(length)
    scan, (log_weight, value) = watch(plain.wkv_scan, k, v, w)
    outputs, (log_den, rest) = watch(plain.wkv_scan_outputs, k, v, u, log_weight, value)
    counted = wkv.scan_forward(layer)
    assert scan.flops(F) == counted.work["scan"].flops
    assert outputs.flops(F) == counted.work["outputs"].flops
    y = torch.cat((v[:1], rest))
    close([y], [plain.wkv_forward(k, v, w, u)[0]])

    log_den = torch.cat((u + k[:1], log_den))
    prefix = (shift_in(log_weight, -1e30, 1), shift_in(value, 0.0, 1))
    signs, r = watch(lambda dy, y: -dy * y, dy, y)
    back, (o, s, d) = watch(plain.wkv_scan_back, dy, r, log_den, w)
    suffix = (shift_in(o, -1e30, -1), shift_in(s, 0.0, -1), shift_in(d, 0.0, -1))
    tokens, gradients = watch(plain.wkv_token_gradients, k, v, u, w, dy, r, log_den, prefix, suffix)
    close(gradients, expected)
    counted = wkv.scan_backward(layer)
    assert back.flops(F) == counted.work["scan"].flops
    assert signs.flops(F) + tokens.flops(F) + back.flops(F) == counted.flops


def shift_in(x: Tensor, fill: float, by: int) -> Tensor:
    """Return x moved along the first dim, ``fill`` where nothing comes from."""
    edge = torch.full_like(x[:1], fill)
    return torch.cat((edge, x[:-1]) if by > 0 else (x[1:], edge))


def test_wkv_traffic() -> None:
    """Tensors of the sweeps; statistics of a token are 4 bytes wide."""
    length, channels = 9, 3
    layer = Layer(batch=1, length=length, channels=channels)
    n, parameters = length * channels, 2 * channels
    statistics = 2 * 2 * n * 4
    once = (3 * n + (2 + 1 + 2) * n + 2 * parameters) * WIDTH
    assert wkv.recurrent_backward(layer).bytes == once + statistics
    assert wkv.recurrent_forward(layer).bytes == wkv.scan_forward(layer).bytes == (3 * n + parameters) * WIDTH
    assert wkv.compulsory(layer, backward=False) == wkv.recurrent_forward(layer).bytes


def test_gated_mlp_eager_is_exactly_torch() -> None:
    """Forward and backward pass as torch's autograd dispatches them, work and traffic."""
    tokens, d_model, d_ff = 7, 4, 6
    layer = Layer(batch=1, length=tokens, channels=d_ff, d_model=d_model, f=F)
    x, w_up, w_gate = draw(tokens, d_model), draw(d_model, d_ff), draw(d_model, d_ff)
    with OperationCounter() as forward:
        y = torch.nn.functional.silu(x @ w_gate) * (x @ w_up)
    dy = torch.randn_like(y)
    with OperationCounter() as backward:
        torch.autograd.grad(y, (x, w_up, w_gate), dy)
    for counter, counted in (
        (forward, gated_mlp.forward(layer, "eager")),
        (backward, gated_mlp.backward(layer, "eager")),
    ):
        assert counter.products == counted.matrix_flops
        assert counter.flops(F) == counted.flops + flops(counted.recomputed_work.values())
        assert moved(counter) == counted.bytes


def test_gated_mlp_with_one_gemm_is_exact() -> None:
    """Both weights side by side: one GEMM, one kernel; backward one kernel, two GEMMs. And all of it in one kernel.

    And a GEMM for each weight, with one kernel after them or none.
    """
    tokens, d_model, d_ff = 7, 4, 6
    layer = Layer(batch=1, length=tokens, channels=d_ff, d_model=d_model, f=F)
    x, w, dy = draw(tokens, d_model), draw(d_model, 2 * d_ff), draw(tokens, d_ff)

    def activation(both: Tensor) -> Tensor:
        up, gate = both[:, :d_ff], both[:, d_ff:]
        return gate * gate.sigmoid() * up

    def gradient(dy: Tensor, both: Tensor) -> Tensor:
        up, gate = both[:, :d_ff], both[:, d_ff:]
        sigma = gate.sigmoid()
        return torch.cat(plain.activation_gradient(dy, up, gate, sigma, gate * sigma), dim=1)

    with torch.no_grad(), OperationCounter() as forward:
        both = forward.kernel(torch.mm, x, w)
        forward.kernel(activation, both)
    with torch.no_grad(), OperationCounter() as backward:
        d_both = backward.kernel(gradient, dy, both)
        dx = backward.kernel(lambda d, w: torch.mm(d, w.T), d_both, w)
        dw = backward.kernel(lambda x, d: torch.mm(x.T, d), x, d_both)
    close((dx, dw), torch.autograd.grad(activation(x @ w), (x, w), dy))
    with torch.no_grad(), OperationCounter() as fused:
        fused.kernel(lambda x, w: activation(x @ w), x, w)
    with torch.no_grad(), OperationCounter() as fused_backward:
        d_both = fused_backward.kernel(lambda x, w, dy: gradient(dy, x @ w), x, w, dy)
        fused_backward.kernel(lambda d, w: torch.mm(d, w.T), d_both, w)
        fused_backward.kernel(lambda x, d: torch.mm(x.T, d), x, d_both)
    for counter, counted in (
        (forward, gated_mlp.forward(layer, "cublas_activation")),
        (backward, gated_mlp.backward(layer, "cublas_activation")),
        (fused, gated_mlp.forward(layer, "fused")),
        (fused_backward, gated_mlp.backward(layer, "fused")),
    ):
        assert counter.products == counted.matrix_flops + sum(w.matrix for w in counted.recomputed_work.values())
        assert counter.flops(F) == counted.flops + flops(counted.recomputed_work.values())
        assert moved(counter) == counted.bytes + sum(counted.recomputed_traffic.values())
    with torch.no_grad(), OperationCounter() as saved:
        saved.kernel(lambda x, w: (both := x @ w, activation(both)), x, w)
    w_up, w_gate = w[:, :d_ff].clone(), w[:, d_ff:].clone()
    with torch.no_grad(), OperationCounter() as products:
        up, gate = products.kernel(torch.mm, x, w_up), products.kernel(torch.mm, x, w_gate)
    with torch.no_grad(), OperationCounter() as apart:
        apart.kernel(lambda u, g: g * g.sigmoid() * u, up, gate)

    def gradients(dy: Tensor, up: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        sigma = gate.sigmoid()
        return plain.activation_gradient(dy, up, gate, sigma, gate * sigma)

    with torch.no_grad(), OperationCounter() as apart_gradients:
        d_up, d_gate = apart_gradients.kernel(gradients, dy, up, gate)
    with torch.no_grad(), OperationCounter() as products_backward:
        parts = [products_backward.kernel(lambda d, w: d @ w.T, d, w) for d, w in ((d_up, w_up), (d_gate, w_gate))]
        products_backward.kernel(torch.add, *parts)
        for d in (d_up, d_gate):
            products_backward.kernel(lambda x, d: x.T @ d, x, d)
    for counters, counted in (
        ((products,), gated_mlp.forward(layer, "gemms")),
        ((products_backward,), gated_mlp.backward(layer, "gemms")),
        ((products, apart), gated_mlp.forward(layer, "gemms_activation")),
        ((products_backward, apart_gradients), gated_mlp.backward(layer, "gemms_activation")),
        ((saved,), gated_mlp.forward(layer, "fused_save")),
        ((backward,), gated_mlp.backward(layer, "fused_save")),
    ):
        assert sum(counter.products for counter in counters) == counted.matrix_flops
        again = flops(counted.recomputed_work.values())
        assert sum(counter.flops(F) for counter in counters) == counted.flops + again
        assert sum(moved(counter) for counter in counters) == counted.bytes


HEAD = Head(length=4, d_qk=3, d_v=5, f=F)
"""A chunk or block; sequences below have three."""


def qkv(length: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw(length, HEAD.d_qk), draw(length, HEAD.d_qk), draw(length, HEAD.d_v)


def test_lightning2_is_exact() -> None:
    q, k, v = qkv(3 * HEAD.length)
    slope = torch.tensor(0.3, dtype=torch.float64)
    made, decays = watch(plain.lightning_decays, slope, HEAD.length)
    assert made.flops(F) == lightning.decays(HEAD).flops

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain.lightning_forward(q, k, v, decays, HEAD.length)

    with torch.no_grad(), OperationCounter() as counter:
        o = counter.kernel(forward, q, k, v)
    counted = lightning.block_forward(HEAD) * 3
    assert (counter.flops(F), counter.products, moved(counter)) == (counted.flops, counted.matrix_flops, counted.bytes)
    whole, _, _, _ = plain.lightning_decays(slope, len(q))
    expected = plain.lightning_quadratic(q, k, v, whole)
    close([o], [expected])

    do = torch.randn_like(o)
    with torch.no_grad(), OperationCounter() as counter:
        dq = counter.kernel(lambda k, v, do: plain.lightning_dq(k, v, do, decays, HEAD.length), k, v, do)
        dk, dv = counter.kernel(
            lambda q, k, v, do: plain.lightning_dkv(q, k, v, do, decays, HEAD.length), q, k, v, do
        )  # fmt: skip
    close((dq, dk, dv), torch.autograd.grad(expected, (q, k, v), do))
    counted = lightning.block_backward(HEAD) * 3
    assert counter.flops(F) == counted.flops + flops(counted.recomputed_work.values())
    assert moved(counter) == counted.bytes


def test_lightning1_is_exact() -> None:
    q, k, v = qkv(HEAD.length)
    slope = torch.tensor(0.3, dtype=torch.float64)
    time = torch.arange(HEAD.length, dtype=torch.float64)

    def decay() -> Tensor:
        return (-slope * (time[:, None] - time[None, :])).exp().tril()

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain.lightning_quadratic(q, k, v, decay())

    def backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        made = decay()
        return plain.lightning_quadratic_backward(q, k, v, do, made, (q @ k.T) * made)

    with torch.no_grad(), OperationCounter() as counter:
        o = counter.kernel(forward, q, k, v)
    counted = lightning.quadratic_forward(HEAD)
    assert (counter.flops(F), counter.products, moved(counter)) == (counted.flops, counted.matrix_flops, counted.bytes)
    do = torch.randn_like(o)
    with torch.no_grad(), OperationCounter() as counter:
        gradients = counter.kernel(backward, q, k, v, do)
    close(gradients, torch.autograd.grad(forward(q, k, v), (q, k, v), do))
    counted = lightning.quadratic_backward(HEAD)
    assert counter.flops(F) == counted.flops + flops(counted.recomputed_work.values())
    assert moved(counter) == counted.bytes


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_exact(masked: bool) -> None:
    q, k, v = qkv(HEAD.length)
    scale = 0.5
    counter, (o, _) = watch(plain.attention_forward, q, k, v, scale, masked)
    # A mask on a tile of the diagonal is not counted.
    mask = HEAD.length**2 * F.mask if masked else 0
    assert counter.flops(F) == formulas.attention_forward(HEAD).flops + mask
    scores = q @ k.T * scale
    if masked:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
    weights = scores.softmax(-1)
    close([o], [weights @ v])
    do = torch.randn_like(o)
    counter, gradients = watch(plain.attention_backward, q, k, v, o, do, weights, scale)
    close(gradients, torch.autograd.grad(weights @ v, (q, k, v), do))
    assert counter.flops(F) == formulas.attention_backward(HEAD).flops


def test_selective_scan_is_exact() -> None:
    length, channels, state = 7, 5, 3
    head = Head(length=length, d_qk=state, d_v=channels, f=F)
    u, dt, b, c = draw(length, channels), positive(length, channels), draw(length, state), draw(length, state)
    rates = (-positive(channels, state)).detach().requires_grad_()

    def forward(u: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (plain.selective_states(u, dt, rates, b)[1] * c[:, None, :]).sum(2)

    counter, y = watch(forward, u, dt, rates, b, c)
    assert counter.flops(F) == formulas.selective_scan_forward(head).flops
    reference = resolve(baselines.get_operation("selective_scan").recurrent)
    close([y], [reference(u[None], dt[None], rates, b[None], c[None])[0]])
    dy = torch.randn_like(y)
    counted = formulas.selective_scan_backward(head)
    recomputed, made = watch(plain.selective_states, u, dt, rates, b)
    assert recomputed.flops(F) == flops(counted.recomputed_work.values())
    counter, gradients = watch(plain.selective_backward, u, dt, rates, b, c, dy, *made)
    close(gradients, torch.autograd.grad(forward(u, dt, rates, b, c), (u, dt, rates, b, c), dy))
    assert counter.flops(F) == counted.flops


def test_gated_linear_attention_is_exact() -> None:
    q, k, v = qkv(HEAD.length)
    g, state, scale = (-positive(HEAD.length, HEAD.d_qk)).detach().requires_grad_(), draw(HEAD.d_qk, HEAD.d_v), 0.4

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gates = plain.gla_gates(g)
        return plain.gla_forward(v, state, plain.gla_operands(q, k, gates, scale), gates[3])

    counter, _ = watch(forward, q, k, v, g, state)
    counted = formulas.gla_chunk_forward(HEAD)
    assert (counter.flops(F), counter.products) == (counted.flops, counted.matrix_flops)
    h, last = forward(q, k, v, g, state)
    zero = torch.zeros_like(state)
    reference = resolve(baselines.get_operation("gla").recurrent)
    close(
        [forward(q, k, v, g, zero)[0]],
        [reference(*(x[None, :, None] for x in (q, k, v, g)), scale=scale)[0, :, 0]],
    )
    dh, d_last = torch.randn_like(h), torch.randn_like(last)
    expected = torch.autograd.grad((h, last), (q, k, v, state, g), (dh, d_last))
    with torch.no_grad():
        gates = plain.gla_gates(g)
        operands = plain.gla_operands(q, k, gates, scale)
        scores = (operands[0] @ operands[1].T).tril()
    counter, got = watch(plain.gla_backward, q, k, v, dh, state, d_last, operands, gates, scores, scale)
    close(got, expected)
    counted = formulas.gla_chunk_backward(HEAD)
    assert (counter.flops(F), counter.products) == (counted.flops, counted.matrix_flops)


NO_MASK = dataclasses.replace(F, mask=0)
"""The chunkwise tables count no masking."""


def triangle(length: int) -> int:
    """What the paper's L(L + 1)/2 for a cumulative sum has beyond its L additions."""
    return length * (length + 1) // 2 - length


@pytest.mark.parametrize("op", sorted(scalar_decay.GATE_MODELS))
def test_scalar_decay_chunk_is_exact(op: str) -> None:
    """One chunk of every operation, from log gates on, forward and backward."""
    gate = scalar_decay.GATE_MODELS[op]
    head = dataclasses.replace(HEAD, f=NO_MASK)
    length = head.length
    q, k, v = qkv(length)
    state, a = draw(head.d_qk, head.d_v), (-positive(length)).detach().requires_grad_()
    u = draw(length) if gate.has_input else None
    scale = 0.5 if gate.scaled else None

    def forward(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, state, a, u = inputs
        assert q is not None and k is not None and v is not None and state is not None and a is not None
        b = a.cumsum(0)
        b_bar, a_bar, g_bar = plain.decay_gates(b, u)
        scores = plain.decay_scores(q, k, plain.decay_matrix(b, u), scale)
        h = plain.decay_outputs(q, v, state, scores, b_bar, scale)
        return h, plain.decay_state(state, k, v, a_bar, g_bar)

    inputs = (q, k, v, state, a, u)
    counter, _ = watch(forward, *inputs)
    counted = scalar_decay.chunk_forward(op, head)
    activation = length * gate.activation(NO_MASK) + (triangle(length) if gate.cumulative else 0)
    assert counter.flops(NO_MASK) + activation == counted.flops
    assert counter.products == counted.matrix_flops

    h, last = forward(*inputs)
    dh, d_last = torch.randn_like(h), torch.randn_like(last)
    leaves = [x for x in inputs if x is not None]
    expected = torch.autograd.grad((h, last), leaves, (dh, d_last))
    with torch.no_grad():
        b = a.cumsum(0)
        b_bar, a_bar, g_bar = plain.decay_gates(b, u)
        d = plain.decay_matrix(b, u).tril()
        scores = plain.decay_scores(q, k, d, scale)
        gated_k, gated_q = a_bar[:, None] * k, b_bar[:, None] * q * (scale or 1)

    def backward() -> tuple[Tensor, ...]:
        d_state = plain.decay_state_gradient(d_last, gated_q, dh, g_bar)
        dq, dk, dv, within, through = plain.decay_input_gradients(
            q, k, v, dh, state, d_last, scores, d, gated_k, b_bar, a_bar, scale
        )  # fmt: skip
        if not gate.gates:
            return dq, dk, dv, d_state
        return dq, dk, dv, d_state, *plain.decay_gate_gradients(q, k, dq, within, through, state, d_last, g_bar)

    counter, gradients = watch(backward)
    close(gradients[: len(expected)], expected[: len(gradients)])
    counted = scalar_decay.chunk_backward(op, head)
    named = length * gate.activation_gradient(NO_MASK) + 2 * triangle(length) if gate.gates else 0
    if op == "mlstm_exp":
        named += length * head.d_v  # dH is divided by the denominator first
    assert counter.flops(NO_MASK) + named == counted.flops
    assert counter.products == counted.matrix_flops


def test_mlstm_exp_chunk_is_the_papers_table_but_for_what_is_named() -> None:
    """Tables 8 and 14 against a chunk of mLSTMexp written line by line from appendix B.2."""
    head = dataclasses.replace(HEAD, f=NO_MASK)
    length, d_qk, d_v, f = head.length, head.d_qk, head.d_v, NO_MASK
    q, k, v = qkv(length)
    i, g, c, n = draw(length), draw(length), draw(d_qk, d_v), draw(d_qk)
    m = torch.zeros(1, dtype=torch.float64)
    scale = 0.5

    def chunk(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        b = torch.nn.functional.logsigmoid(g).cumsum(0)
        a = b[-1:] - b + i
        m_next = torch.maximum(b[-1:] + m, a.amax(0, keepdim=True))
        a_bar, g_bar = (a - m_next).exp(), (b[-1:] + m - m_next).exp()
        gated_k = a_bar[:, None] * k
        c_next, n_next = g_bar * c + gated_k.T @ v, g_bar * n + gated_k.sum(0)
        log_d = b[:, None] - b[None, :] + i[None, :]
        log_inter = b + m
        top = torch.maximum(log_inter, log_d.tril().amax(1))
        d = (log_d - top[:, None]).exp().tril()
        scores = (q @ k.T) * scale * d
        gated_q = q * (log_inter - top).exp()[:, None] * scale
        denominator = torch.maximum(((gated_q * n).sum(1) + scores.sum(1)).abs(), (-top).exp())
        return (scores @ v + gated_q @ c) / denominator[:, None], c_next, n_next, m_next

    counter, (h, *_) = watch(chunk, q, k, v)
    reference = resolve(get_operation("mlstm_exp").recurrent)
    state = tuple(x[None, None] for x in (c, n, m[0]))
    inputs = (x[None, :, None] for x in (q, k, v, i, g))
    close([h], [reference(*inputs, scale=scale, initial_state=state)[0, :, 0]])
    counted = mlstm.chunk("mlstm_exp", head)
    once_more = length + triangle(length) + length * (f.log + f.sig)  # the parallel part makes its own forget gates
    in_the_paper_alone = once_more + triangle(length) + length * d_qk  # and K^T 1 is a product with ones
    in_code_alone = length * f.max  # the largest of a; the paper has one F_max a chunk
    in_code_alone += length * (1 + f.exp) + length * d_qk  # exp(b + m - top) and K^-1/2, which scale the queries
    assert counter.flops(f) - in_code_alone == counted.flops - in_the_paper_alone
    assert counter.products == counted.matrix_flops


@pytest.mark.parametrize("op", OPERATIONS)
def test_recurrent_references_do_the_counted_work(op: str) -> None:
    """A step of every operation against its definition."""
    operation = get_operation(op)
    gate, d_qk, cells = scalar_decay.GATE_MODELS[op], SIZES["head_dim_qk"], CELLS
    tensors = resolve(operation.inputs)({**SIZES, "seq_len": 3}, dtype=torch.float64, device="cpu", seed=0)
    counter, _ = watch(resolve(operation.recurrent), *(tensors[name] for name in operation.arguments))
    head = Head(length=1, d_qk=d_qk, d_v=SIZES["head_dim_v"], f=F)
    if op == "mlstm_sig":
        # Gates go through their logarithms; sigma(i) scales k, where the paper's table scales k v^T.
        named = 2 * F.log + 2 * F.exp + d_qk - cells
    elif op == "mlstm_exp":
        # The same; the table has exp(-m) at 1, and one product by d_qk more for each of n and n^T q.
        named = d_qk - cells - 2 * d_qk + F.exp - 1
    else:
        # The definition scales every k and q, by one where the operation has no gate or scale.
        named = (0 if gate.has_input else F.exp + d_qk) + (0 if gate.scaled else d_qk)
    step = mlstm.step(op, head) if op in mlstm.OPERATIONS else scalar_decay.step(op, head)
    per_head_and_step = counter.flops(F) / (3 * HEADS)
    # A slope is negated once a head; Mamba-2's dt A and log dt are activations.
    assert per_head_and_step == step.flops + named


@pytest.mark.parametrize("op", OPERATIONS)
def test_parallel_references_do_the_counted_work(op: str) -> None:
    """The quadratic form of every operation against the reference's."""
    operation, length = get_operation(op), 5
    gate, d_qk, d_v = scalar_decay.GATE_MODELS[op], SIZES["head_dim_qk"], SIZES["head_dim_v"]
    tensors = resolve(operation.inputs)({**SIZES, "seq_len": length}, dtype=torch.float64, device="cpu", seed=0)
    assert operation.parallel is not None
    counter, _ = watch(resolve(operation.parallel), *(tensors[name] for name in operation.arguments))
    head = Head(length=length, d_qk=d_qk, d_v=d_v, f=F)
    paper = op in mlstm.OPERATIONS
    counted = mlstm.parallel(op, head) if paper else scalar_decay.parallel_forward(op, head)
    square = length * length
    # The reference also makes the last state, and a weight for a state before the first token.
    named = 2 * length * d_qk * d_v + 2 * length * d_qk + length * F.exp
    # It adds an input gate and applies a scale whether the operation has one or not.
    named += square * ((0 if gate.has_input else 1) + (0 if gate.scaled else 1))
    # A constant decay is summed over time as any other; the paper's triangle is no work that code does.
    named -= triangle(length) if gate.cumulative else 0
    if op == "mlstm_exp":
        # It divides the outputs, where the table divides (and takes the magnitude of) every score; n is made as well.
        named += length * (F.abs + d_v + d_qk) - square * (2 + F.abs)
    assert counter.flops(F) / HEADS == counted.flops + named
