"""The laws that every implementation of a scalar-decay operation obeys, whoever computes it and wherever.

A law takes an operation, a function with the operation's common signature, and where to run it; it raises
AssertionError where the function breaks the law. One tolerance serves everywhere: an implementation's error against
the float64 recurrence, on inputs rounded to the dtype, is at most twice the larger error of two independent torch
forms on the same inputs, plus eps(dtype) times the largest magnitude of the reference. The forms are the parallel one,
with operands of matrix products in that dtype, and the recurrence; accumulators, gates and states are float32.
States held in bfloat16 add :data:`STATE_BOUND` times bfloat16's eps.

Largest errors of a handful of values differ by luck: give a law of some 50 gate values (B * T * H) or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from lrbench.kernels import FAMILIES, Operation, get_operation, resolve
from lrbench.kernels.scalar_decay.declare import FUSED_CHUNK

Function = Callable[..., Any]

ENGINE_OPERATIONS = tuple(
    op
    for ops in FAMILIES.values()
    for op in ops
    if FUSED_CHUNK in (implementation.name for implementation in get_operation(op).implementations)
)
"""Operations that the engine computes."""

FLOAT64_BOUND = 1e-10
"""Relative to the largest magnitude: float64 forms differ by rounding alone."""

STATE_BOUND = 4.0
"""What states held in a low precision may add, in units of eps(state_dtype) * max|reference|."""

DECAY_GATES = {"mlstm_sig": "f", "mlstm_exp": "f", "simple_gla": "g", "gated_retention": "f"}
"""Operations whose documents can be packed, and the gate that separates them."""

EXTREME_GATES: dict[str, dict[str, tuple[float, float]]] = {
    "mlstm_sig": {"i": (-60, 60), "f": (-60, 60)},
    "mlstm_exp": {"i": (-60, 60), "f": (-60, 60)},
    "simple_gla": {"g": (-60, 0)},
    "retention": {"slope": (0, 60)},
    "lightning": {"slope": (0, 60)},
    "gated_retention": {"f": (-60, 60)},
    "mamba2_ssd": {"dt": (1e-6, 4), "A": (-16, -1e-3)},
}
"""Ranges of extreme gates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs of an operation, rounded to a dtype, and what is differentiated.

    Attributes:
        operation: the declaration.
        inputs: argument name -> tensor, on the device, in the dtype (gates in float32 or float64).
        state: C, or C, n, m; None for no initial state.
        cotangents: "h", "C", "n" -> float64 weights of the scalar that is differentiated.
        kwargs: keywords that every form of the operation takes (scale, normalizer_gradient, tau).
        siblings: other draws of the same problem, where an argument without batch and time has a gradient: its few
            values do not show how large their errors may be.
    """

    operation: Operation
    inputs: Mapping[str, Tensor]
    state: tuple[Tensor, ...] | None
    cotangents: Mapping[str, Tensor]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    siblings: tuple[Problem, ...] = ()

    @property
    def values(self) -> Tensor:
        """The argument [B, T, H, V] whose dtype and shape the output has."""
        return self.inputs["x" if "x" in self.inputs else "v"]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return self.values.dtype

    @property
    def shared_gradients(self) -> list[str]:
        """Names of the gradients that sum over batch and time."""
        return [f"d{name}" for name in self.operation.differentiable if self.inputs[name].dim() == 1]

    def double(self) -> Problem:
        """Return the same numbers in float64."""
        return Problem(
            operation=self.operation,
            inputs={name: x.double() for name, x in self.inputs.items()},
            state=None if self.state is None else tuple(x.double() for x in self.state),
            cotangents=self.cotangents,
            kwargs=self.kwargs,
        )


def make_problem(
    operation: Operation,
    sizes: Mapping[str, int],
    *,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    initial_state: bool = False,
    gates: Mapping[str, tuple[float, float]] | None = None,
    positive: bool = False,
    num_siblings: int = 3,
    **kwargs: Any,
) -> Problem:
    """Draw a problem.

    Args:
        sizes: batch, seq_len, num_heads, head_dim_qk, head_dim_v (and num_groups).
        initial_state: whether there is one.
        gates: gates to draw uniformly from a range instead.
        positive: make q, k and the initial n positive.
        num_siblings: other draws to make where they are of use.
        kwargs: keywords that every form of the operation takes.
    """
    inputs = resolve(operation.inputs)(sizes, dtype=dtype, device="cpu", seed=seed)
    generator = torch.Generator("cpu").manual_seed(seed + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    for name, (low, high) in (gates or {}).items():
        unit = torch.rand(inputs[name].shape, generator=generator, dtype=torch.float64)
        inputs[name] = (low + (high - low) * unit).to(inputs[name].dtype)
    if positive:
        inputs |= {name: inputs[name].abs() for name in ("q", "k")}
    batch, heads = sizes["batch"], sizes["num_heads"]
    dim_qk, dim_v = sizes["head_dim_qk"], sizes["head_dim_v"]
    normalized = operation.name == "mlstm_exp"
    parts = (normal(batch, heads, dim_qk, dim_v), normal(batch, heads, dim_qk), normal(batch, heads))
    if positive:
        parts = (parts[0], parts[1].abs(), parts[2])
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    cotangents = {"h": normal(batch, sizes["seq_len"], heads, dim_v), "C": normal(*parts[0].shape)}
    if normalized:
        cotangents["n"] = normal(*parts[1].shape)
    # Cotangents reach an implementation in its output's dtype; rounding them here gives every form the same ones.
    cotangents["h"] = cotangents["h"].to(dtype).double()
    problem = Problem(
        operation=operation,
        inputs={name: x.to(device) for name, x in inputs.items()},
        state=tuple(x.to(device, state_dtype) for x in parts[: 3 if normalized else 1]) if initial_state else None,
        cotangents={name: x.to(state_dtype).double().to(device) for name, x in cotangents.items()},
        kwargs=kwargs,
    )
    if not problem.shared_gradients or not num_siblings:
        return problem
    siblings = tuple(
        make_problem(
            operation,
            sizes,
            dtype=dtype,
            device=device,
            seed=seed + 1000 * index,
            initial_state=initial_state,
            gates=gates,
            num_siblings=0,
            **kwargs,
        )
        for index in range(1, num_siblings + 1)
    )
    return replace(problem, siblings=siblings)


def _public_state(state: Sequence[Tensor] | None) -> Any:
    if state is None:
        return None
    return state[0] if len(state) == 1 else tuple(state)


def evaluate(
    problem: Problem,
    fn: Function,
    *,
    splits: Sequence[int] = (),
    stabilizer: Tensor | None = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Run ``fn`` forward and backward; return its results in float64.

    Args:
        splits: time steps at which the sequence is cut, the state being carried over.
        stabilizer: m [B, H] on which the last state is put before it is compared and differentiated: implementations
            are free in their choice of m. None is fn's own.
        kwargs: further keywords of fn.

    Returns:
        "h", "C" (and "n", "m") and "d<name>" for every differentiable argument and part of the initial state.
    """
    operation = problem.operation
    inputs = {name: x.clone().requires_grad_(name in operation.differentiable) for name, x in problem.inputs.items()}
    state = None
    if problem.state is not None:
        state = [x.clone().requires_grad_(index < 2) for index, x in enumerate(problem.state)]
    leaves = {f"d{name}": x for name, x in inputs.items() if name in operation.differentiable}
    leaves |= {f"d{name}_initial": x for name, x in zip("Cn", state or (), strict=False)}
    seq_len = problem.values.shape[1]
    outputs, carried = [], _public_state(state)
    for start, stop in zip((0, *splits), (*splits, seq_len), strict=True):
        # Arguments without a time axis ([H]) serve every part.
        part = [x[:, start:stop].contiguous() if x.dim() > 1 else x for x in inputs.values()]
        h, carried = fn(*part, initial_state=carried, return_last_state=True, **problem.kwargs, **kwargs)
        outputs.append(h)
    h = torch.cat(outputs, dim=1)
    last = carried if isinstance(carried, tuple) else (carried,)
    results = {"h": h, **dict(zip("Cnm", last, strict=False))}
    scalar = (h.double() * problem.cotangents["h"]).sum()
    for name in ("C", "n"):
        if name in results:
            value = results[name].double()
            if stabilizer is not None:
                shift = torch.exp(results["m"].double() - stabilizer)
                value = value * shift.view(*shift.shape, *([1] * (value.dim() - 2)))
            results[name] = value
            scalar = scalar + (value * problem.cotangents[name]).sum()
    gradients = torch.autograd.grad(scalar, list(leaves.values()))
    for name, leaf, gradient in zip(leaves, leaves.values(), gradients, strict=True):
        assert gradient.dtype == leaf.dtype, f"{name} must be {leaf.dtype}, got {gradient.dtype}"
        assert gradient.shape == leaf.shape, f"{name} must have shape {leaf.shape}, got {gradient.shape}"
    assert h.dtype == problem.dtype, f"h must be {problem.dtype}, got {h.dtype}"
    return {name: x.detach().double() for name, x in {**results, **dict(zip(leaves, gradients, strict=True))}.items()}


def reference(problem: Problem) -> dict[str, Tensor]:
    """Return the float64 recurrence's results."""
    return evaluate(problem.double(), resolve(problem.operation.recurrent))


def tolerances(
    problem: Problem,
    expected: Mapping[str, Tensor],
    state_dtype: torch.dtype = torch.float32,
    splits: Sequence[int] = (),
) -> dict[str, float]:
    """Return the largest absolute error allowed to each result of the reference; the forms run whole and split."""
    if problem.dtype == torch.float64:
        return {name: FLOAT64_BOUND * float(x.abs().max()) for name, x in expected.items()}
    stabilizer = expected.get("m")
    forms = _low_precision_forms(problem, stabilizer)
    if splits:
        forms += _low_precision_forms(problem, stabilizer, splits)
    relative = torch.finfo(problem.dtype).eps
    if state_dtype != torch.float32:
        relative += STATE_BOUND * torch.finfo(state_dtype).eps
    allowed = {
        name: 2 * max(float((form[name] - x).abs().max()) for form in forms) + relative * float(x.abs().max())
        for name, x in expected.items()
    }
    for sibling in problem.siblings:
        exact = reference(sibling)
        for form in _low_precision_forms(sibling, exact.get("m")):
            for name in problem.shared_gradients:
                allowed[name] = max(allowed[name], 2 * float((form[name] - exact[name]).abs().max()))
    return allowed


def _low_precision_forms(
    problem: Problem, stabilizer: Tensor | None, splits: Sequence[int] = ()
) -> list[dict[str, Tensor]]:
    def run(form: str, **kwargs: Any) -> dict[str, Tensor]:
        function = resolve(form)
        # Forms without matrix products have no operands to round, and forms without sums of gates no dtype of these.
        parameters = signature(function).parameters
        taken = {name: value for name, value in kwargs.items() if name in parameters or "options" in parameters}
        return evaluate(problem, function, splits=splits, stabilizer=stabilizer, **taken)

    operation = problem.operation
    forms = [run(operation.recurrent, round_operands=True)]
    if operation.parallel is not None:
        forms.append(run(operation.parallel, gate_dtype=torch.float32))
    return forms


def assert_close(
    results: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: Mapping[str, float], what: str
) -> None:
    """Raise AssertionError naming every result that is not finite or too far from the expected one.

    m is left out: it is the implementation's choice.
    """
    failures = []
    for name, x in expected.items():
        if name == "m":
            continue
        error = float((results[name] - x).abs().max())
        if not error <= allowed[name]:
            failures.append(
                f"{name}: error {error:.3g}, allowed {allowed[name]:.3g}, largest {float(x.abs().max()):.3g}"
            )
    assert not failures, f"{what}: " + "; ".join(failures)


def check_matches_reference(
    operation: Operation,
    fn: Function,
    *,
    dtype: torch.dtype,
    device: str,
    sizes: Mapping[str, int],
    chunk_size: int | None = None,
    initial_state: bool = True,
    gates: Mapping[str, tuple[float, float]] | None = None,
    positive: bool = False,
    state_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **kwargs: Any,
) -> None:
    """Outputs, last state and every gradient equal the float64 recurrence's.

    The gradients include the initial state's, and flow in through the output and the last state.
    """
    problem = make_problem(
        operation,
        sizes,
        dtype=dtype,
        device=device,
        seed=seed,
        initial_state=initial_state,
        gates=gates,
        positive=positive,
        **kwargs,
    )
    expected = reference(problem)
    allowed = tolerances(problem, expected, state_dtype)
    results = evaluate(problem, fn, stabilizer=expected.get("m"), **_implementation_kwargs(chunk_size, state_dtype))
    assert_close(results, expected, allowed, f"{operation.name} against the recurrence")


def check_split_equals_whole(
    operation: Operation,
    fn: Function,
    *,
    dtype: torch.dtype,
    device: str,
    sizes: Mapping[str, int],
    splits: Sequence[int],
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> None:
    """A sequence cut in parts with the state carried over gives what the whole gives, gradients included."""
    problem = make_problem(operation, sizes, dtype=dtype, device=device, initial_state=True, **kwargs)
    expected = reference(problem)
    allowed = tolerances(problem, expected, state_dtype, splits)
    keywords = _implementation_kwargs(chunk_size, state_dtype)
    results = evaluate(problem, fn, splits=splits, stabilizer=expected.get("m"), **keywords)
    assert_close(results, expected, allowed, f"{operation.name} split at {tuple(splits)}")


def check_batch_invariant(
    operation: Operation,
    fn: Function,
    *,
    dtype: torch.dtype,
    device: str,
    sizes: Mapping[str, int],
    chunk_size: int | None = None,
    exact: bool = False,
    **kwargs: Any,
) -> None:
    """A sequence's results do not depend on what else is in the batch.

    Args:
        exact: require equal bits; else the common tolerance, for matrix libraries choose their kernels by shape.
    """
    problem = make_problem(operation, sizes, dtype=dtype, device=device, initial_state=True, **kwargs)
    expected = reference(problem)
    allowed = tolerances(problem, expected)
    stabilizer = expected.get("m")
    keywords = _implementation_kwargs(chunk_size)
    together = evaluate(problem, fn, stabilizer=stabilizer, **keywords)
    batch = problem.values.shape[0]
    assert batch > 1, "the law needs a batch"
    for index in range(batch):
        one = slice(index, index + 1)
        alone = evaluate(
            Problem(
                operation=operation,
                inputs={name: x[one] if x.dim() > 1 else x for name, x in problem.inputs.items()},
                state=None if problem.state is None else tuple(x[one] for x in problem.state),
                cotangents={name: x[one] for name, x in problem.cotangents.items()},
                kwargs=problem.kwargs,
            ),
            fn,
            stabilizer=None if stabilizer is None else stabilizer[one],
            **keywords,
        )
        # The gradient of an argument that the batch shares sums over it.
        mine = {name: x[one] for name, x in together.items() if name not in problem.shared_gradients}
        bound = dict.fromkeys(mine, 0.0) if exact else allowed
        assert_close(alone, mine, bound, f"{operation.name}, sequence {index} alone")


def check_extreme_gates(
    operation: Operation,
    fn: Function,
    *,
    dtype: torch.dtype,
    device: str,
    sizes: Mapping[str, int],
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> None:
    """Gates over their whole range leave results finite and right.

    mLSTMexp gets positive q, k and n: of either sign, n^T q may all but cancel, and then a single dominant input gate
    makes h a quotient of two roundings in any low precision.
    """
    check_matches_reference(
        operation,
        fn,
        dtype=dtype,
        device=device,
        sizes=sizes,
        chunk_size=chunk_size,
        gates=EXTREME_GATES[operation.name],
        positive=operation.name == "mlstm_exp",
        state_dtype=state_dtype,
        **kwargs,
    )


def check_packed_documents(
    operation: Operation,
    fn: Function,
    *,
    dtype: torch.dtype,
    device: str,
    sizes: Mapping[str, int],
    starts: Sequence[int],
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    separator: float = -1e4,
    **kwargs: Any,
) -> None:
    """Documents packed in one sequence by a forget gate of ``separator`` give what they give apart.

    Args:
        starts: first step of every document but the first.
        separator: a large negative number, or minus infinity.
    """
    gate = DECAY_GATES[operation.name]
    problem = make_problem(operation, sizes, dtype=dtype, device=device, **kwargs)
    inputs = dict(problem.inputs)
    inputs[gate] = inputs[gate].clone()
    inputs[gate][:, list(starts)] = separator
    cotangents = {name: torch.zeros_like(x) if name != "h" else x for name, x in problem.cotangents.items()}
    problem = Problem(operation=operation, inputs=inputs, state=None, cotangents=cotangents, kwargs=problem.kwargs)
    seq_len = problem.values.shape[1]
    documents = []
    for start, stop in zip((0, *starts), (*starts, seq_len), strict=True):
        documents.append(
            reference(
                Problem(
                    operation=operation,
                    inputs={name: x[:, start:stop] for name, x in inputs.items()},
                    state=None,
                    cotangents={name: x[:, start:stop] if name == "h" else x for name, x in cotangents.items()},
                    kwargs=problem.kwargs,
                )
            )
        )
    names = ["h", *(f"d{name}" for name in operation.differentiable)]
    expected = {name: torch.cat([document[name] for document in documents], dim=1) for name in names}
    last = {name: documents[-1][name] for name in ("C", "n", "m") if name in documents[-1]}
    expected |= last
    results = evaluate(problem, fn, stabilizer=last.get("m"), **_implementation_kwargs(chunk_size, state_dtype))
    allowed = tolerances(problem, expected, state_dtype)
    assert_close(results, expected, allowed, f"{operation.name}, documents at {tuple(starts)}")


def check_stabilizer_is_free(
    operation: Operation,
    fn: Function,
    *,
    dtype: torch.dtype,
    device: str,
    sizes: Mapping[str, int],
    chunk_size: int | None = None,
    shift: float = 3.0,
    **kwargs: Any,
) -> None:
    """Initial states (C, n, m) and (C / e^shift, n / e^shift, m + shift) are the same state."""
    problem = make_problem(operation, sizes, dtype=dtype, device=device, initial_state=True, **kwargs)
    expected = reference(problem)
    allowed = tolerances(problem, expected)
    assert problem.state is not None
    c, n, m = problem.state
    moved = Problem(
        operation=operation,
        inputs=problem.inputs,
        state=(c * math.exp(-shift), n * math.exp(-shift), m + shift),
        cotangents=problem.cotangents,
        kwargs=problem.kwargs,
    )
    results = evaluate(moved, fn, stabilizer=expected["m"], **_implementation_kwargs(chunk_size))
    for name in ("dC_initial", "dn_initial"):
        results[name] = results[name] * math.exp(-shift)
    assert_close(results, expected, allowed, f"{operation.name} with m moved by {shift}")


def check_bad_input(
    operation: Operation, fn: Function, *, dtype: torch.dtype, device: str, chunk_size: int | None
) -> None:
    """Input that does not fit raises ValueError that names the argument, what was expected and what came.

    Args:
        chunk_size: a good one; None for a function without a chunk axis.
    """
    sizes = {"batch": 2, "seq_len": 20, "num_heads": 2, "head_dim_qk": 16, "head_dim_v": 32}
    problem = make_problem(operation, sizes, dtype=dtype, device=device, initial_state=True)
    inputs = dict(problem.inputs)
    state = problem.state
    assert state is not None

    def rejects(match: str, *, changed: Mapping[str, Tensor] | None = None, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=match):
            fn(*{**inputs, **(changed or {})}.values(), **{**_implementation_kwargs(chunk_size), **kwargs})

    values = next(name for name, x in inputs.items() if x.dim() == 4)
    gate = next(name for name, x in inputs.items() if x.dim() < 4)
    matrices = [name for name, x in inputs.items() if x.dim() == 4]
    wrong = torch.float16 if dtype != torch.float16 else torch.float32
    rejects(rf"{values} must have 4 dimensions .* got shape", changed={values: inputs[values][0]})
    for name in matrices[1:]:
        rejects(rf"{name} must be \w+, got {str(wrong).removeprefix('torch.')}", changed={name: inputs[name].to(wrong)})
        short = inputs[name][:, :-1].contiguous()
        rejects(rf"{name} must have shape .* got \(2, 19", changed={name: short})
        strided = inputs[name].transpose(1, 3).contiguous().transpose(1, 3)
        rejects(rf"{name} must be contiguous, got strides", changed={name: strided})
    rejects(rf"{gate} must have shape .* got", changed={gate: inputs[gate][..., :-1].contiguous()})
    rejects(rf"{gate} must be float\d\d, got bfloat16", changed={gate: inputs[gate].bfloat16()})
    rejects(rf"{values} must be one of .* got int32", changed={name: inputs[name].int() for name in matrices})
    for bad in () if chunk_size is None else (0, -16):
        rejects(rf"chunk_size must be .* got {bad}", chunk_size=bad)
    rejects("scale must be a finite number or None, got nan", scale=math.nan)
    rejects("state_dtype must be .* got int8", state_dtype=torch.int8)
    parts = list(state)
    for index, name in enumerate("Cnm"[: len(parts)] if len(parts) > 1 else [""]):
        bad_parts = [x[:1] if i == index else x for i, x in enumerate(parts)]
        rejects(rf"initial_state ?{name} must have shape .* got \(1,", initial_state=_public_state(bad_parts))
        bad_parts = [x.half() if i == index else x for i, x in enumerate(parts)]
        rejects(rf"initial_state ?{name} must be float\d\d, got float16", initial_state=_public_state(bad_parts))
    if len(parts) > 1:
        rejects(r"initial_state must be three tensors \(C, n, m\), got Tensor", initial_state=parts[0])


def _implementation_kwargs(chunk_size: int | None, state_dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    keywords: dict[str, Any] = {} if chunk_size is None else {"chunk_size": chunk_size}
    return keywords if state_dtype == torch.float32 else {**keywords, "state_dtype": state_dtype}
