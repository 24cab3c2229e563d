"""The laws of :mod:`.laws` for operations on channels [B, T, C], whose state is h [B, C]; tolerances are the same.

Low-precision forms are the recurrence and the associative scan on inputs rounded to the dtype, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from lrbench.kernels import Operation, resolve
from lrbench.tests.kernels import laws

Function = Callable[..., Any]
Gates = Mapping[str, tuple[float, float]]

EXTREME_GATES: dict[str, Gates] = {
    "rglru": {"r": (-60, 60), "i": (-60, 60), "c": (-40, 20)},
    "linear_scan": {"a": (-1, 1)},
}
"""Ranges of extreme gates."""

CLOSED_GATES: dict[str, Gates] = {"rglru": {"r": (-100, -8)}, "linear_scan": {"a": (1 - 2**-7, 1)}}
"""Decays so near 1 that 1 - a^2, computed as it stands, has few bits in float32, or none."""

OPEN_GATES: dict[str, Gates] = {"rglru": {"r": (4, 90), "c": (2, 30)}, "linear_scan": {"a": (-1e-6, 1e-6)}}
"""Decays near 0."""


def make_problem(
    operation: Operation,
    sizes: Mapping[str, int],
    *,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    initial_state: bool = True,
    gates: Gates | None = None,
    num_siblings: int = 3,
) -> laws.Problem:
    """Draw a problem of sizes batch, seq_len, channels; ``gates`` are drawn uniformly from the ranges given instead."""
    inputs = resolve(operation.inputs)(sizes, dtype=dtype, device="cpu", seed=seed)
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    for name, (low, high) in (gates or {}).items():
        unit = torch.rand(inputs[name].shape, generator=generator, dtype=torch.float64)
        inputs[name] = (low + (high - low) * unit).to(dtype).to(inputs[name].dtype)
    shape = (sizes["batch"], sizes["channels"])
    state, dlast = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    dh = torch.randn(sizes["batch"], sizes["seq_len"], sizes["channels"], generator=generator, dtype=torch.float64)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    problem = laws.Problem(
        operation=operation,
        inputs={name: x.to(device) for name, x in inputs.items()},
        state=(state.to(device, state_dtype),) if initial_state else None,
        # Rounded to what reaches an implementation, so that every form gets the same.
        cotangents={"h": dh.to(dtype).double().to(device), "C": dlast.to(state_dtype).double().to(device)},
    )
    if not problem.shared_gradients or not num_siblings:
        return problem
    siblings = tuple(
        make_problem(
            operation, sizes, dtype=dtype, device=device, seed=seed + 1000 * index,
            initial_state=initial_state, gates=gates, num_siblings=0,
        )
        for index in range(1, num_siblings + 1)
    )  # fmt: skip
    return replace(problem, siblings=siblings)


def check_matches_reference(
    operation: Operation,
    fn: Function,
    *,
    dtype: torch.dtype,
    device: str,
    sizes: Mapping[str, int],
    splits: Sequence[int] = (),
    initial_state: bool = True,
    gates: Gates | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> None:
    """Outputs, last state and every gradient equal the float64 recurrence's; also where the sequence is cut in parts.

    Args:
        splits: time steps at which it is cut, the state being carried over.
        kwargs: further keywords of fn.
    """
    problem = make_problem(
        operation, sizes, dtype=dtype, device=device, seed=seed, initial_state=initial_state, gates=gates
    )
    expected = laws.reference(problem)
    allowed = laws.tolerances(problem, expected, splits=splits)
    results = laws.evaluate(problem, fn, splits=splits, **kwargs)
    laws.assert_close(results, expected, allowed, f"{operation.name} against the recurrence")


def check_batch_invariant(
    operation: Operation,
    fn: Function,
    *,
    dtype: torch.dtype,
    device: str,
    sizes: Mapping[str, int],
    exact: bool = True,
    **kwargs: Any,
) -> None:
    """A sequence's results do not depend on what else is in the batch.

    Args:
        exact: require equal bits; else the common tolerance, for torch computes the ends of a tensor by other code.
    """
    problem = make_problem(operation, sizes, dtype=dtype, device=device, num_siblings=0)
    bound = dict.fromkeys(laws.reference(problem), 0.0)
    if not exact:
        bound = laws.tolerances(problem, laws.reference(problem))
    together = laws.evaluate(problem, fn, **kwargs)
    assert problem.state is not None
    assert sizes["batch"] > 1, "the law needs a batch"
    for index in range(sizes["batch"]):
        one = slice(index, index + 1)
        alone = laws.evaluate(
            replace(
                problem,
                inputs={name: x[one] if x.dim() > 1 else x for name, x in problem.inputs.items()},
                state=tuple(x[one] for x in problem.state),
                cotangents={name: x[one] for name, x in problem.cotangents.items()},
            ),
            fn,
            **kwargs,
        )
        mine = {name: x[one] for name, x in together.items() if name not in problem.shared_gradients}
        laws.assert_close(alone, mine, bound, f"{operation.name}, sequence {index} alone")


def check_bad_input(operation: Operation, fn: Function, *, dtype: torch.dtype, device: str, **kwargs: Any) -> None:
    """Input that does not fit raises ValueError that names the argument, what was expected and what came."""
    sizes = {"batch": 2, "seq_len": 20, "channels": 16}
    problem = make_problem(operation, sizes, dtype=dtype, device=device, num_siblings=0)
    inputs = dict(problem.inputs)
    assert problem.state is not None
    state = problem.state[0]

    def rejects(match: str, *, changed: Mapping[str, Tensor] | None = None, **others: Any) -> None:
        with pytest.raises(ValueError, match=match):
            fn(*{**inputs, **(changed or {})}.values(), **{**kwargs, **others})

    wrong = torch.float16 if dtype != torch.float16 else torch.float32
    rejects("x must have 3 dimensions .* got shape", changed={"x": inputs["x"][0]})
    rejects("x must be one of .* got int32", changed={name: x.int() for name, x in inputs.items()})
    rejects("x must have no empty dimension, got shape", changed={"x": inputs["x"][:, :0]})
    for name, x in inputs.items():
        if name != "x":
            rejects(rf"{name} must be \w+, got {str(wrong).removeprefix('torch.')}", changed={name: x.to(wrong)})
            rejects(rf"{name} must have shape .* got \(", changed={name: x[..., :-1].contiguous()})
        if x.dim() == 3:
            strided = x.transpose(1, 2).contiguous().transpose(1, 2)
            rejects(rf"{name} must be contiguous, got strides", changed={name: strided})
    rejects(r"initial_state must have shape \(2, 16\), got \(1, 16\)", initial_state=state[:1])
    rejects(r"initial_state must be float\d\d, got float16", initial_state=state.half())
    rejects("state_dtype must be .* got int8", state_dtype=torch.int8)
    if "chunk_size" in signature(fn).parameters:
        for bad in (0, -16, 1.5):
            rejects(rf"chunk_size must be .* got {bad}", chunk_size=bad)


def check_steps(
    operation: Operation, step: Function, *, dtype: torch.dtype, device: str, sizes: Mapping[str, int], prefix: int
) -> None:
    """Steps from the last state of a prefix give the recurrence's outputs and last state.

    From half-precision inputs a state is as good as the gates are made of them: to 2^-15 at every step (elements.py).
    """
    problem = make_problem(operation, sizes, dtype=dtype, device=device, num_siblings=0)
    inputs, recurrent = problem.inputs, resolve(operation.recurrent)

    def part(start: int, stop: int) -> list[Tensor]:
        return [x[:, start:stop].contiguous() if x.dim() > 1 else x for x in inputs.values()]

    expected, last = recurrent(*[x.double() for x in inputs.values()], return_last_state=True)
    _, state = recurrent(*part(0, prefix), return_last_state=True)
    outputs = []
    for t in range(prefix, sizes["seq_len"]):
        before = state.clone()
        h, after = step(*part(t, t + 1), initial_state=state, return_last_state=True)
        assert torch.equal(state, before), "the state given was written to"
        outputs.append(h)
        state = after
    bound = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
    assert (torch.cat(outputs, 1).double() - expected[:, prefix:]).abs().max() <= bound
    precision = 16 * torch.finfo(torch.float32).eps if dtype == torch.float32 else 2**-13
    assert (state.double() - last).abs().max() <= precision * float(last.abs().max())
