"""The laws of :mod:`.laws` for operations over channels [B, T, C]; tolerances are the same.

The state is h [B, C], or WKV's (num, den, max) [B, C], which is compared on the reference's max: it is every
implementation's own choice. Low-precision forms are the recurrence and the associative scan on inputs rounded to the
dtype, in float32.
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
from lrbench.kernels.common.arguments import compute_dtype
from lrbench.kernels.rglru import LINEAR_SCAN, RGLRU
from lrbench.kernels.wkv import OPERATION as WKV
from lrbench.tests.kernels import laws

Function = Callable[..., Any]
Ranges = Mapping[str, tuple[float, float]]

OPERATIONS = (RGLRU, LINEAR_SCAN, WKV)
EXTREMES: dict[str, dict[str, Ranges]] = {
    "rglru": {
        "extreme gates": {"r": (-60, 60), "i": (-60, 60), "c": (-40, 20)},
        "closed gates": {"r": (-100, -8)},
        "open gates": {"r": (4, 90), "c": (2, 30)},
    },
    "linear_scan": {
        "extreme gates": {"a": (-1, 1)},
        "closed gates": {"a": (1 - 2**-7, 1)},
        "open gates": {"a": (-1e-6, 1e-6)},
    },
    "wkv4": {
        "wild keys": {"k": (-100, 100)},
        "wild keys and rates": {"k": (-100, 100), "w": (1e-3, 50), "u": (-40, 40)},
        "long memory": {"w": (1e-7, 1e-5)},
        "no memory": {"w": (50, 200), "u": (-3, 3)},
        "large bonus": {"u": (5, 25)},
        "small bonus": {"u": (-100, -30)},
    },
}
"""Operation -> ranges of inputs: decays near 0, and so near 1 that 1 - a^2, computed as it stands, has few bits in
float32, or none; exponents that overflow one by one, weights from e^-100 to e^100 side by side or too small to see
beside others."""


def function(operation: Operation, name: str) -> Function:
    """Return what runs an implementation."""
    return operation.function(operation.implementation(name))


def make_problem(
    operation: Operation,
    sizes: Mapping[str, int],
    *,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    initial_state: bool = True,
    ranges: Ranges | None = None,
    num_siblings: int = 3,
) -> laws.Problem:
    """Draw a problem of sizes batch, seq_len, channels; ``ranges`` name inputs to draw uniformly from instead."""
    inputs = resolve(operation.inputs)(sizes, dtype=dtype, device="cpu", seed=seed)
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    for name, (low, high) in (ranges or {}).items():
        unit = torch.rand(inputs[name].shape, generator=generator, dtype=torch.float64)
        inputs[name] = (low + (high - low) * unit).to(dtype).to(inputs[name].dtype)
    is_wkv = operation is WKV
    shape = (sizes["batch"], sizes["channels"])
    normal = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(5 if is_wkv else 2)]
    dh = torch.randn(sizes["batch"], sizes["seq_len"], sizes["channels"], generator=generator, dtype=torch.float64)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    state = (normal[0], normal[1].exp(), normal[2]) if is_wkv else (normal[0],)
    problem = laws.Problem(
        operation=operation,
        inputs={name: x.to(device) for name, x in inputs.items()},
        state=tuple(x.to(device, state_dtype) for x in state) if initial_state else None,
        # Rounded to what reaches an implementation, so that every form gets the same.
        cotangents={
            "h": dh.to(dtype).double().to(device),
            **{n: x.to(state_dtype).double().to(device) for n, x in zip("Cn", normal[len(state) :], strict=False)},
        },
    )
    if not problem.shared_gradients or not num_siblings:
        return problem
    siblings = tuple(
        make_problem(
            operation, sizes, dtype=dtype, device=device, seed=seed + 1000 * index,
            initial_state=initial_state, ranges=ranges, num_siblings=0,
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
    ranges: Ranges | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> None:
    """Outputs, last state and every gradient equal the float64 recurrence's; also where the sequence is cut in parts.

    Args:
        splits: time steps at which it is cut, the state being carried over.
        kwargs: further keywords of fn.
    """
    problem = make_problem(
        operation, sizes, dtype=dtype, device=device, seed=seed, initial_state=initial_state, ranges=ranges
    )
    expected = laws.reference(problem)
    allowed = laws.tolerances(problem, expected, splits=splits)
    if ranges and operation is WKV:
        # An exponent of size K is known to K eps, whoever adds to it, and a weight is the difference of two.
        largest = max(float(problem.inputs[name].abs().max()) for name in ("k", "u"))
        relative = 2 * largest * torch.finfo(compute_dtype(dtype)).eps
        allowed = {name: bound + relative * float(expected[name].abs().max()) for name, bound in allowed.items()}
    results = laws.evaluate(problem, fn, splits=splits, stabilizer=expected.get("m"), **kwargs)
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
    expected = laws.reference(problem)
    bound = dict.fromkeys(expected, 0.0) if exact else laws.tolerances(problem, expected)
    together = laws.evaluate(problem, fn, stabilizer=expected.get("m"), **kwargs)
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
            stabilizer=expected["m"][one] if "m" in expected else None,
            **kwargs,
        )
        mine = {name: x[one] for name, x in together.items() if name not in problem.shared_gradients}
        laws.assert_close(alone, mine, bound, f"{operation.name}, sequence {index} alone")


def check_bad_input(operation: Operation, fn: Function, *, dtype: torch.dtype, device: str, **kwargs: Any) -> None:
    """Input that does not fit raises ValueError that names the argument, what was expected and what came."""
    sizes = {"batch": 2, "seq_len": 20, "channels": 16}
    problem = make_problem(operation, sizes, dtype=dtype, device=device, num_siblings=0)
    inputs, state = dict(problem.inputs), problem.state
    assert state is not None

    def rejects(match: str, *, changed: Mapping[str, Tensor] | None = None, **others: Any) -> None:
        with pytest.raises(ValueError, match=match):
            fn(*{**inputs, **(changed or {})}.values(), **{**kwargs, **others})

    first = operation.arguments[0]
    rejects(f"{first} must have 3 dimensions .* got shape", changed={first: inputs[first][0]})
    rejects(f"{first} must be one of .* got int32", changed={name: x.int() for name, x in inputs.items()})
    for empty in (inputs[first][:0], inputs[first][:, :0]):
        rejects(f"{first} must have no empty dimension, got shape", changed={first: empty})
    for name, x in inputs.items():
        if name != first:
            wrong = torch.float16 if x.dtype != torch.float16 else torch.float32
            rejects(rf"{name} must be \w+, got {str(wrong).removeprefix('torch.')}", changed={name: x.to(wrong)})
            rejects(rf"{name} must have shape .* got \(", changed={name: x[..., :-1].contiguous()})
        if x.dim() == 3:
            strided = x.transpose(1, 2).contiguous().transpose(1, 2)
            rejects(rf"{name} must be contiguous, got strides", changed={name: strided})
    names = [f"initial_state {part}" for part in ("num", "den", "max")] if operation is WKV else ["initial_state"]
    for index, name in enumerate(names):
        for changed, what in ((state[index][:1], r"have shape \(2, 16\), got \(1, 16\)"),
                              (state[index].half(), r"be float\d\d, got float16")):  # fmt: skip
            bad = tuple(changed if n == index else x for n, x in enumerate(state))
            rejects(f"{name} must {what}", initial_state=bad if len(bad) > 1 else bad[0])
    if operation is WKV:
        rejects(r"initial_state must be three tensors \(num, den, max\), got Tensor", initial_state=state[0])
        rejects(r"initial_state must be three tensors \(num, den, max\), got 2 of them", initial_state=state[:2])
    rejects("state_dtype must be .* got int8", state_dtype=torch.int8)
    if "chunk_size" in signature(fn).parameters:
        for value in (0, -16, 1.5):
            rejects(rf"chunk_size must be .* got {value}", chunk_size=value)


def check_steps(
    operation: Operation, step: Function, *, dtype: torch.dtype, device: str, sizes: Mapping[str, int], prefix: int
) -> None:
    """Steps from the last state of a prefix give the recurrence's outputs and last state.

    From half-precision inputs RG-LRU's state is as good as its gates are made: to 2^-15 at every step (elements.py).
    """
    problem = make_problem(operation, sizes, dtype=dtype, device=device, num_siblings=0)
    inputs, recurrent = problem.inputs, resolve(operation.recurrent)

    def part(start: int, stop: int) -> list[Tensor]:
        return [x[:, start:stop].contiguous() if x.dim() > 1 else x for x in inputs.values()]

    expected, last = recurrent(*[x.double() for x in inputs.values()], return_last_state=True)
    _, state = recurrent(*part(0, prefix), return_last_state=True)
    outputs = []
    for t in range(prefix, sizes["seq_len"]):
        before = [x.clone() for x in parts_of(state)]
        y, after = step(*part(t, t + 1), initial_state=state, return_last_state=True)
        assert all(map(torch.equal, parts_of(state), before)), "the state given was written to"
        outputs.append(y)
        state = after
    bound = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
    assert (torch.cat(outputs, 1).double() - expected[:, prefix:]).abs().max() <= bound
    precision = (32 if operation is WKV else 16) * torch.finfo(torch.float32).eps
    if operation is not WKV and dtype != torch.float32:
        precision = 2**-13
    scale = torch.exp(state[2].double() - last[2]) if operation is WKV else 1.0
    for x, exact in zip(parts_of(state)[:2], parts_of(last)[:2], strict=True):
        assert (x.double() * scale - exact).abs().max() <= precision * float(exact.abs().max())


def parts_of(state: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors of a state."""
    return (state,) if isinstance(state, Tensor) else state


def check_heavy_past(
    fn: Function, *, device: str, sizes: Mapping[str, int], rates: tuple[float, float], **kwargs: Any
) -> None:
    """A first key of 100, above all others, keeps its weight: exponents are not rounded again and again on the way.

    Outputs, last state and, where memory is long, gradients lie within twice what a key's own rounding may do.
    """
    problem = make_problem(
        WKV, sizes, dtype=torch.float32, device=device, ranges={"k": (-100, 99), "w": rates}, initial_state=False,
        num_siblings=0,
    )  # fmt: skip
    problem.inputs["k"][:, 0] = 100
    expected = laws.evaluate(problem.double(), function(WKV, "torch"))
    results = laws.evaluate(problem, fn, stabilizer=expected["m"], **kwargs)
    names = ["h", "C", "n"] if rates[1] > 1 else [name for name in expected if name != "m"]
    relative = 200 * torch.finfo(torch.float32).eps
    bound = {name: relative * float(expected[name].abs().max()) for name in names}
    mine, exact = ({name: x[name] for name in names} for x in (results, expected))
    laws.assert_close(mine, exact, bound, "wkv4 behind a heavy key")


def check_state_scale_is_free(fn: Function, *, dtype: torch.dtype, device: str, **kwargs: Any) -> None:
    """States (num, den, max) and (num e^-s, den e^-s, max + s) are the same state, however small den becomes."""
    sizes = {"batch": 2, "seq_len": 9, "channels": 32}
    problem = make_problem(WKV, sizes, dtype=dtype, device=device, num_siblings=0)
    expected = laws.reference(problem)
    assert problem.state is not None
    num, den, top = problem.state
    for shift in (-60.0, 70.0):
        scale = torch.tensor(shift, dtype=torch.float64, device=device).neg().exp().to(num.dtype)
        moved = replace(problem, state=(num * scale, den * scale, top + shift))
        results = laws.evaluate(moved, fn, stabilizer=expected["m"], **kwargs)
        for name in ("dC_initial", "dn_initial"):
            results[name] = results[name] * float(scale)
        bound = {name: 256 * torch.finfo(dtype).eps * float(x.abs().max()) for name, x in expected.items()}
        laws.assert_close(results, expected, bound, f"wkv4 with max moved by {shift}")


def check_first_output_is_first_value(fn: Function, *, dtype: torch.dtype, device: str, **kwargs: Any) -> None:
    """Nothing lies before the first token, so its output is its value, however small its weight is."""
    for ranges in (None, *EXTREMES["wkv4"].values()):
        problem = make_problem(
            WKV, {"batch": 2, "seq_len": 3, "channels": 16}, dtype=dtype, device=device, ranges=ranges, num_siblings=0
        )
        y = fn(*problem.inputs.values(), **kwargs)
        v = problem.inputs["v"]
        assert (y[:, 0] - v[:, 0]).abs().max() <= 4 * torch.finfo(dtype).eps * v.abs().max()


def check_left_out_tokens(fn: Function, *, dtype: torch.dtype, device: str, **kwargs: Any) -> None:
    """Keys of minus infinity leave tokens out: later tokens see what they would with a weight too small to count.

    Tokens of the middle, behind a state, and the first ones, behind nothing, as padding on the left is.
    """
    for some, initial_state in ((slice(3, 14), True), (slice(0, 3), False)):
        problem = make_problem(
            WKV, {"batch": 2, "seq_len": 21, "channels": 16}, dtype=dtype, device=device, initial_state=initial_state,
            num_siblings=0,
        )  # fmt: skip
        small, none = ({**problem.inputs, "k": problem.inputs["k"].clone()} for _ in range(2))
        small["k"][:, some], none["k"][:, some] = -1e4, -torch.inf
        if not initial_state:
            # What lies before the first token that counts sees others left out alone.
            problem.cotangents["h"][:, some] = 0
        expected = laws.reference(replace(problem, inputs=small))
        results = laws.evaluate(replace(problem, inputs=none), fn, stabilizer=expected["m"], **kwargs)
        if not initial_state:
            expected["h"][:, some], results["h"][:, some] = 0, 0
        bound = {name: 64 * torch.finfo(dtype).eps * float(x.abs().max()) for name, x in expected.items()}
        laws.assert_close(results, expected, bound, "wkv4 with tokens left out")
