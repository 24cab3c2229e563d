"""Laws of a gated MLP: equal to its definition with every gradient, row by row, and bad input refused.

Bounds are those of the worker's check: twice the error of the portable form on the same rounded inputs in the same
dtype, plus the dtype's epsilon; in float32 and float64, where that error is the luck of one order of summation, plus
epsilon times the largest magnitude in every element.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lrbench.bench.check import relative_error
from lrbench.kernels.gated_mlp.config import ACTIVATIONS
from lrbench.kernels.gated_mlp.reference import definition, k_major_inputs, make_inputs, portable

Function = Callable[..., Tensor]
Prepare = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
HALF = (torch.bfloat16, torch.float16)
NAMES = ("y", "dx", "dw_up", "dw_gate")


def swapped_columns(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs with K-major weights of one tensor, W_gate's before W_up's."""
    both = torch.cat((inputs["w_gate"].detach().T, inputs["w_up"].detach().T))
    gate, up = both.chunk(2)
    return {"x": inputs["x"], "w_up": up.T, "w_gate": gate.T}


LAYOUTS: dict[str, Prepare] = {"columns": k_major_inputs, "swapped_columns": swapped_columns, "rows": dict}
"""Name -> what lays weights out so."""

ORDER = 16
"""Epsilons that the order of summation may cost float32 and float64 at least, whose results are not rounded again."""


def draw(
    tokens: int, d_model: int, d_ff: int, *, dtype: torch.dtype, device: str, seed: int = 0, gate_scale: float = 1.0
) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs, whose gate pre-activations are ~ N(0, gate_scale^2), and an output gradient."""
    sizes = {"batch": 1, "seq_len": tokens, "d_model": d_model, "d_ff": d_ff}
    inputs = make_inputs(sizes, dtype=torch.float64, device="cpu", seed=seed)
    inputs["w_gate"] = inputs["w_gate"] * gate_scale
    dy = torch.randn(tokens, d_ff, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return {name: x.to(device, dtype) for name, x in inputs.items()}, dy.to(device, dtype)


def evaluate(fn: Function, inputs: Mapping[str, Tensor], dy: Tensor | None, **kwargs: Any) -> list[Tensor]:
    """Return y and, with an output gradient, those of x and the weights."""
    leaves = {name: x.detach().requires_grad_(dy is not None) for name, x in inputs.items()}
    y = fn(*leaves.values(), **kwargs)
    if dy is None:
        return [y.detach()]
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), dy)]


def bound(low: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Return the relative error that passes where the portable form in ``dtype`` gives ``low``."""
    eps = torch.finfo(dtype).eps
    if dtype in HALF:
        return 2 * relative_error(low, exact) + eps
    rms = float(exact.norm()) / exact.numel() ** 0.5
    return 2 * relative_error(low, exact) + eps * max(float(exact.abs().max()) / rms if rms else 1.0, ORDER)


def check_matches_reference(
    fn: Function,
    tokens: int,
    d_model: int,
    d_ff: int,
    *,
    dtype: torch.dtype,
    device: str,
    activation: str = "silu",
    prepare: Prepare = dict,
    gradients: bool = True,
    gate_scale: float = 1.0,
    **kwargs: Any,
) -> None:
    """y and the gradients of x and both weights equal the definition's in float64."""
    inputs, dy = draw(tokens, d_model, d_ff, dtype=dtype, device=device, gate_scale=gate_scale)
    check_matches_reference_on(fn, inputs, dy if gradients else None, activation=activation, prepare=prepare, **kwargs)


def check_matches_reference_on(
    fn: Function,
    inputs: Mapping[str, Tensor],
    dy: Tensor | None,
    *,
    activation: str = "silu",
    prepare: Prepare = dict,
    **kwargs: Any,
) -> None:
    """The same on given inputs, with gradients where there is one of the output."""
    dtype = inputs["x"].dtype
    exact = evaluate(
        definition, {n: x.double() for n, x in inputs.items()}, None if dy is None else dy.double(),
        activation=activation,
    )  # fmt: skip
    low = evaluate(portable, inputs, dy, activation=activation)
    found = evaluate(fn, prepare(inputs), dy, activation=activation, **kwargs)
    for name, ours, rough, true in zip(NAMES, found, low, exact, strict=False):
        assert ours.shape == true.shape, name
        assert ours.dtype == dtype, name
        assert bool(torch.isfinite(ours).all()), f"{name} contains non-finite values"
        error, allowed = relative_error(ours, true), bound(rough, true, dtype)
        assert error <= allowed, f"{name}: error {error:.2e}, above {allowed:.2e}"


def check_rows_alone(
    fn: Function, tokens: int, d_model: int, d_ff: int, rows: Sequence[int], *, dtype: torch.dtype, device: str,
    prepare: Prepare = dict, exact: bool = True, **kwargs: Any,
) -> None:  # fmt: skip
    """A token's y and dx do not depend on the other tokens.

    Args:
        exact: require equal bits; else, where other sizes take other tiles and other products of the library, twice
            the dtype's epsilon, in float32 and float64 twice :data:`ORDER` of them.
    """
    allowed = 0.0 if exact else 2 * torch.finfo(dtype).eps * (1 if dtype in HALF else ORDER)
    inputs, dy = draw(tokens, d_model, d_ff, dtype=dtype, device=device)
    given = prepare(inputs)
    together = evaluate(fn, given, dy, **kwargs)
    for row in rows:
        one = slice(row, row + 1)
        alone = evaluate(fn, {**given, "x": given["x"][one]}, dy[one], **kwargs)
        for ours, whole in zip(alone[:2], together[:2], strict=True):
            assert relative_error(ours, whole[one].double()) <= allowed


def check_gradients_of_some(
    fn: Function, *, dtype: torch.dtype, device: str, prepare: Prepare = dict, **kwargs: Any
) -> None:
    """Gradients are laid out as what they are of, the same whichever others are asked for; none are under no_grad."""
    plain, dy = draw(5, 16, 24, dtype=dtype, device=device)
    inputs = prepare(plain)
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    y = fn(*leaves, **kwargs)
    expected, second = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    for a, b, leaf in zip(expected, second, leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.stride() == leaf.stride()
    with torch.no_grad():
        assert not fn(*leaves, **kwargs).requires_grad
    for count in range(1, len(inputs)):
        for wanted in itertools.combinations(range(len(inputs)), count):
            leaves = [x.detach().requires_grad_(n in wanted) for n, x in enumerate(inputs.values())]
            found = torch.autograd.grad(fn(*leaves, **kwargs), [leaves[n] for n in wanted], dy)
            for n, gradient in zip(wanted, found, strict=True):
                torch.testing.assert_close(gradient, expected[n], rtol=0, atol=0)


def check_bad_input(fn: Function, *, dtype: torch.dtype, device: str) -> None:
    """What does not fit raises ValueError that names the argument, what was expected and what came."""
    inputs, _ = draw(6, 16, 24, dtype=dtype, device=device)
    wrong = torch.float16 if dtype != torch.float16 else torch.float32

    def rejects(match: str, *, activation: str = "silu", error: type[Exception] = ValueError, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            fn(*{**inputs, **changed}.values(), activation=activation)

    x, w_up, w_gate = inputs.values()
    rejects("x must be a tensor, got list", error=TypeError, x=[1.0])
    rejects(r"x must have 2 dimensions \[M, D\], got shape \(1, 6, 16\)", x=x[None])
    rejects(r"w_gate must have 2 dimensions \[D, F\], got shape \(24,\)", w_gate=w_gate[0])
    rejects("x must be one of .* got int32", x=x.int(), w_up=w_up.int(), w_gate=w_gate.int())
    rejects(r"x must have no empty dimension, got shape \(0, 16\)", x=x[:0])
    rejects(r"w_up must have no empty dimension, got shape \(16, 0\)", w_up=w_up[:, :0], w_gate=w_gate[:, :0])
    rejects(r"w_up must have 16 rows, one a column of x, got shape \(8, 24\)", w_up=w_up[:8])
    rejects(r"w_gate must have shape \(16, 24\), got \(16, 16\)", w_gate=w_gate[:, :16])
    for name, weight in (("w_up", w_up), ("w_gate", w_gate)):
        rejects(rf"{name} must be \w+, got {str(wrong).removeprefix('torch.')}", **{name: weight.to(wrong)})
        for strided in (weight.T.contiguous().T, torch.cat((weight, weight))[::2]):
            strides = re.escape(str(strided.stride()))
            rejects(rf"{name} must be contiguous, or both .* got strides {strides}", **{name: strided})
        rejects(rf"{name} must be on \w+.*, got meta", **{name: weight.to("meta")})
    rejects(r"x must be contiguous, got strides \(1, 6\)", x=x.T.contiguous().T)
    rejects(f"activation must be one of {', '.join(ACTIVATIONS)}, got 'swish'", activation="swish")
