"""The portable forms of RG-LRU and the linear scan obey the laws, and their definitions are what their papers say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.rglru import LINEAR_SCAN, RGLRU
from lrbench.kernels.spec import Operation
from lrbench.tests.kernels import diagonal_laws as laws

OPERATIONS = (RGLRU, LINEAR_SCAN)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sizes(batch: int, seq_len: int, channels: int) -> dict[str, int]:
    return {"batch": batch, "seq_len": seq_len, "channels": channels}


SMALL = sizes(2, 45, 12)


def portable(operation: Operation) -> Any:
    return operation.function(operation.implementation("torch"))


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


@each_operation
@each_dtype
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64, None])
def test_chunked_equals_recurrent(operation: Operation, chunk_size: int | None, dtype: torch.dtype) -> None:
    laws.check_matches_reference(
        operation, portable(operation), dtype=dtype, device="cpu", sizes=SMALL, chunk_size=chunk_size
    )


@each_operation
@each_dtype
def test_associative_equals_recurrent(operation: Operation, dtype: torch.dtype) -> None:
    assert operation.parallel is not None
    laws.check_matches_reference(operation, resolve(operation.parallel), dtype=dtype, device="cpu", sizes=SMALL)


@each_operation
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [sizes(3, 1, 40), sizes(1, 2, 50), sizes(1, 300, 5)], ids=str)
def test_any_shape(operation: Operation, shape: Mapping[str, int], dtype: torch.dtype) -> None:
    for initial_state in (False, True):
        laws.check_matches_reference(
            operation, portable(operation), dtype=dtype, device="cpu", sizes=shape, initial_state=initial_state
        )


@each_operation
@each_dtype
@pytest.mark.parametrize("gates", ["EXTREME_GATES", "CLOSED_GATES", "OPEN_GATES"])
def test_gates_over_their_range(operation: Operation, gates: str, dtype: torch.dtype) -> None:
    laws.check_matches_reference(
        operation, portable(operation), dtype=dtype, device="cpu", sizes=SMALL,
        gates=getattr(laws, gates)[operation.name],
    )  # fmt: skip


@each_operation
@pytest.mark.parametrize("gates", [None, "EXTREME_GATES", "CLOSED_GATES"])
def test_what_long_checks_rest_on(operation: Operation, gates: str | None) -> None:
    """Over many chunks too the float64 form that stands for the recurrence is as exact as the recurrence."""
    laws.check_matches_reference(
        operation, portable(operation), dtype=torch.float64, device="cpu", sizes=sizes(1, 1030, 8), chunk_size=64,
        gates=getattr(laws, gates)[operation.name] if gates else None,
    )  # fmt: skip


@each_operation
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_split_equals_whole(operation: Operation, dtype: torch.dtype) -> None:
    laws.check_matches_reference(
        operation, portable(operation), dtype=dtype, device="cpu", sizes=SMALL, splits=(1, 20), chunk_size=8
    )


@each_operation
def test_batch_invariant(operation: Operation) -> None:
    laws.check_batch_invariant(
        operation, portable(operation), dtype=torch.float32, device="cpu", sizes=SMALL, exact=False
    )


@each_operation
def test_bad_input_fails_clearly(operation: Operation) -> None:
    laws.check_bad_input(operation, portable(operation), dtype=torch.float32, device="cpu")


@each_operation
def test_laws_reject_a_wrong_implementation(operation: Operation) -> None:
    fn = portable(operation)

    def leaks(*inputs: torch.Tensor, **kwargs: Any) -> Any:
        h, last = fn(*inputs, **kwargs)
        return h, last * 1.02

    with pytest.raises(AssertionError, match=rf"{operation.name} against the recurrence: C: error"):
        laws.check_matches_reference(operation, leaks, dtype=torch.bfloat16, device="cpu", sizes=SMALL)


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
    h, last = portable(RGLRU)(*leaves, c, initial_state=state, return_last_state=True)
    assert torch.equal(h, state[:, None].expand_as(h))
    gradients = torch.autograd.grad(last.sum(), [*leaves, c, state])
    assert all(not g.any() for g in gradients[:-1])
    assert torch.equal(gradients[-1], torch.ones_like(state))


def test_one_minus_square_keeps_its_bits() -> None:
    """A sequence of barely open gates: sqrt(1 - a^2) as it stands would be 0 in float32, and h with it."""
    rows = torch.full((1, 5, 4), -18.0)
    c = torch.full((4,), -9.0)
    x = torch.ones_like(rows)
    h = portable(RGLRU)(x, rows, x, c)
    exact = resolve(RGLRU.recurrent)(x.double(), rows.double(), x.double(), c.double())
    assert exact.min() > 0
    assert (h - exact).abs().max() <= 1e-6 * exact.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("c", [-60.0, 100.0, 900.0, 5000.0])
def test_a_decay_rate_of_any_size_stays_right(c: float, dtype: torch.dtype) -> None:
    """softplus(c) is c for large c and exp(c) for c far below 0; a gate that is nearly shut keeps a inside (0, 1)."""
    x, r, i = (torch.full((1, 1, 2), value, dtype=dtype) for value in (1.0, -30.0, 0.0))
    rate = torch.full((2,), c, dtype=dtype, requires_grad=True)
    h = portable(RGLRU)(x, r, i, rate)
    exponent = 8.0 * (max(c, 0.0) + math.log1p(math.exp(-abs(c)))) * math.exp(-30.0) / (1.0 + math.exp(-30.0))
    expected = 0.5 * math.sqrt(-math.expm1(-2.0 * exponent))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(h, torch.full_like(h, expected), rtol=tolerance, atol=0.0)
    (gradient,) = torch.autograd.grad(h.sum(), rate)
    # d h / d c = h / 2 of d log(exponent) / d c, to the first order in the exponent, which is below 1e-8.
    slope = math.exp(min(c, 0.0)) / (1.0 + math.exp(-abs(c))) / (max(c, 0.0) + math.log1p(math.exp(-abs(c))))
    torch.testing.assert_close(gradient, torch.full_like(gradient, 0.5 * expected * slope), rtol=1e-4, atol=0.0)
