"""The laws that every implementation of an operation obeys, whoever computes it and wherever.

A law takes a :class:`Case`, which names an operation, an implementation and where to run it, and raises AssertionError
where the implementation breaks the law. One tolerance serves everywhere: an implementation's error against the float64
definition, on inputs rounded to the dtype, is at most twice the larger error of two independent torch forms on the same
inputs, plus eps(dtype) times the largest magnitude of the reference. The forms are the operation's definition and its
parallel form, with operands of matrix products in that dtype; accumulators, gates and states are float32. Because the
largest error of few values differs by luck, their errors are taken over several draws (:data:`DRAWN_VALUES`). States
held in bfloat16 add :data:`STATE_BOUND` times bfloat16's eps.

Results are called h (the output), C, n, m (the last state) and d<name> (a gradient), whatever the family calls them:
the state of operations over channels is C [B, C], WKV's (num, den, max) is (C, n, m). C and n are compared on the
reference's m, which is every implementation's own choice.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lrbench.kernels import Operation, get_operation, resolve
from lrbench.kernels.common.arguments import compute_dtype
from lrbench.kernels.gated_mlp.reference import k_major_inputs

Function = Callable[..., Any]
Ranges = Mapping[str, tuple[float, float]]

FLOAT64_BOUND = 1e-10
"""Relative to the largest magnitude: float64 forms differ by rounding alone."""

STATE_BOUND = 4.0
"""What states held in a low precision may add, in units of eps(state_dtype) * max|reference|."""

SUM_ORDER = 16
"""Epsilons that the order of a long sum may cost a gated MLP in float32, whose results are not rounded again."""

DRAWN_VALUES, MAX_DRAWS = 512, 8
"""Values of the smallest result over all draws from which a bound is derived, and the most draws."""

DECAY_GATES = {
    "mlstm_sig": "f", "mlstm_exp": "f", "simple_gla": "g", "gated_retention": "f", "gated_delta_net": "g", "kda": "g",
}  # fmt: skip
"""Operations whose documents can be packed, and the gate of which minus infinity separates them."""

MASKS: dict[str, dict[str, float]] = {
    "mlstm_sig": {"i": -math.inf, "f": math.inf},
    "mlstm_exp": {"i": -math.inf, "f": math.inf},
    "simple_gla": {"g": 0.0, "v": 0.0},
    "retention": {"v": 0.0},
    "lightning": {"v": 0.0},
    "gated_retention": {"f": math.inf, "v": 0.0},
    "mamba2_ssd": {"dt": 0.0},
    "rglru": {"r": -math.inf},
    "linear_scan": {"a": 1.0, "x": 0.0},
    "wkv4": {"k": -math.inf},
    "delta_net": {"beta": 0.0},
    "gated_delta_net": {"g": 0.0, "beta": 0.0},
    "kda": {"g": 0.0, "beta": 0.0},
}
"""Operation -> the values that mask a token, as its docstring says."""

FIXED_DECAY = ("retention", "lightning", "wkv4")
"""Operations in which every token decays the past, masked or not: only tokens before all others leave no trace."""

EXTREMES: dict[str, dict[str, Ranges]] = {
    "mlstm_sig": {"extreme gates": {"i": (-60, 60), "f": (-60, 60)}},
    # Of either sign, n^T q may all but cancel, and then a single dominant input gate makes h a quotient of two
    # roundings in any low precision.
    # Below -88 the least denominator, exp(-m), overflows float32.
    "mlstm_exp": {
        "extreme gates": {"i": (-60, 60), "f": (-60, 60), "q": (0, 2), "k": (0, 2)},
        "low gates": {"i": (-120, -60), "q": (0, 2), "k": (0, 2)},
    },
    "simple_gla": {"extreme gates": {"g": (-60, 0)}},
    "retention": {"extreme gates": {"slope": (0, 60)}},
    "lightning": {"extreme gates": {"slope": (0, 60)}},
    "gated_retention": {"extreme gates": {"f": (-60, 60)}},
    "mamba2_ssd": {"extreme gates": {"dt": (1e-6, 4), "A": (-16, -1e-3)}},
    # Beyond 1 a token's old value comes back with the opposite sign.
    "delta_net": {"extreme gates": {"beta": (0, 2)}},
    "gated_delta_net": {"extreme gates": {"g": (-60, 0), "beta": (0, 2)}},
    "kda": {"extreme gates": {"g": (-60, 0), "beta": (0, 2)}},
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
    "rglru_layer": {},
    "gated_mlp": {"large gates": {"w_gate": (-90, 90)}},
}
"""Operations held to the laws -> ranges of inputs: gates over their whole range; decays near 0, and so near 1 that
1 - a^2, computed as it stands, has few bits in float32, or none; exponents that overflow one by one, weights from
e^-100 to e^100 side by side or too small to see beside others."""

LARGE: dict[str, Ranges] = {
    "large keys": {"q": (30, 40), "k": (30, 40), "v": (0.02, 0.05), "dh": (0.02, 0.05)},
    "large values": {"q": (-0.05, 0.05), "k": (-0.05, 0.05), "v": (1000, 2000), "dh": (0.5, 1)},
    "large gradients": {"q": (-0.05, 0.05), "k": (-0.05, 0.05), "v": (0.5, 1), "dh": (1000, 2000)},
}
"""Ranges in which q^T k or v^T dh, for 64 columns, is above 65504 but inputs and results are not."""

HALF_RANGE: dict[str, dict[str, Ranges]] = {
    "mlstm_sig": {what: {**large, "i": (4, 4), "f": (-0.5, -0.5)} for what, large in LARGE.items()},
    "mlstm_exp": {what: {**large, "f": (-0.5, -0.5)} for what, large in LARGE.items()},
    "lightning": {what: {**large, "slope": (1, 1)} for what, large in LARGE.items()},
    "mamba2_ssd": {
        what: {"C": q, "B": k, "x": v, "dh": dh, "dt": (0.5, 1), "A": (-0.5, -0.1)}
        for what, (q, k, v, dh) in ((what, large.values()) for what, large in LARGE.items())
    },
}
"""Operations -> ranges of inputs and of the output's gradient, dh, of which float16 holds inputs and results, but
perhaps not what is computed in between. Operations over channels round nothing in between."""

STATE_PARTS = {"mlstm_exp": ("C", "n", "m"), "wkv4": ("num", "den", "max"), "gated_mlp": (), "projections": ()}
"""Names of the state's parts where it is not one tensor."""


def swapped_columns(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a gated MLP's inputs with K-major weights of one tensor, W_gate's before W_up's."""
    gate, up = torch.cat((inputs["w_gate"].detach().T, inputs["w_up"].detach().T)).chunk(2)
    return {"x": inputs["x"], "w_up": up.T, "w_gate": gate.T}


LAYOUTS: dict[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "columns": k_major_inputs,
    "swapped_columns": swapped_columns,
    "rows": dict,
}
"""Name -> what lays a gated MLP's weights out so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs of an operation, rounded to a dtype, and what is differentiated.

    Attributes:
        operation: the declaration.
        inputs: argument name -> tensor, on the device, in the dtype (gates in float32 or float64).
        state: the initial state's parts; None for no initial state.
        cotangents: "h", "C", "n" -> float64 weights of the scalar that is differentiated.
        options: keywords that every form of the operation takes (scale, normalizer_gradient, tau, activation).
        twice: whether the scalar is the sum of the squares of that one's gradients instead.
        states: whether initial and last states are taken, where the operation has any.
    """

    operation: Operation
    inputs: Mapping[str, Tensor]
    state: tuple[Tensor, ...] | None
    cotangents: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    twice: bool = False
    states: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs and of the output."""
        return next(iter(self.inputs.values())).dtype

    @property
    def has_state(self) -> bool:
        """Whether the operation carries a state over time."""
        return STATE_PARTS.get(self.operation.name) != ()

    @property
    def shared(self) -> list[str]:
        """Names of the arguments that the batch and all of time share."""
        return [name for name in list(self.inputs)[1:] if self.inputs[name].dim() <= 2]

    @property
    def shared_gradients(self) -> list[str]:
        """Names of the gradients that sum over batch and time."""
        return [f"d{name}" for name in self.shared if name in self.operation.differentiable]

    def double(self) -> Problem:
        """Return the same numbers in float64."""
        return replace(
            self,
            inputs={name: x.double() for name, x in self.inputs.items()},
            state=None if self.state is None else tuple(x.double() for x in self.state),
        )

    def part(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the inputs at some steps of time; arguments without a time axis serve every part."""
        return {n: x if n in self.shared else x[:, start:stop].contiguous() for n, x in self.inputs.items()}


def state_shapes(op: str, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the shapes of the state's parts; mLSTMexp's n has no axis V, and m none of K either."""
    full = tuple(sizes[n] for n in ("batch", "num_heads", "head_dim_qk", "head_dim_v", "channels") if n in sizes)
    parts = STATE_PARTS.get(op, ("",))
    return [full[: len(full) - index] if "num_heads" in sizes else full for index in range(len(parts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An implementation, and what it is held to a law on.

    Attributes:
        op: the operation's name.
        impl: the implementation's, or "step" for the decoding step.
        dtype: of the inputs.
        sizes: those of the operation (and num_groups).
        device: where to run.
        kwargs: keywords of the implementation alone (chunk_size, config, state_dtype).
        options: keywords that every form of the operation takes (scale, normalizer_gradient, tau, activation).
        initial_state: whether there is one, where the operation has a state.
        ranges: inputs, and "dh", to draw uniformly from a range instead of as the operation draws them.
        layout: of a gated MLP's weights, see :data:`LAYOUTS`.
        seed: of the draw.
        law: keywords of the law that it is held to.
        wrap: makes another function of the implementation.
    """

    op: str
    impl: str
    dtype: torch.dtype
    sizes: Mapping[str, int]
    device: str = "cpu"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    initial_state: bool = True
    ranges: Ranges | None = None
    layout: str | None = None
    seed: int = 0
    law: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[Function], Function] = lambda fn: fn

    @property
    def operation(self) -> Operation:
        """The declaration."""
        return get_operation(self.op)

    @property
    def plain(self) -> bool:
        """Whether the implementation is in plain torch."""
        return "triton" not in self.operation.implementation(self.impl).requires

    @property
    def function(self) -> Function:
        """What runs the implementation, with its own keywords."""
        run = self.operation.step if self.impl == "step" else self.operation.function(self.impl)
        return self.wrap(partial(run, **self.kwargs))

    def others(self, expected: Mapping[str, Tensor]) -> list[Problem]:
        """Draw the further problems that a bound on the results ``expected`` of the problem needs."""
        fewest = min(x.numel() for name, x in expected.items() if name != "m")
        draws = min(MAX_DRAWS, -(-DRAWN_VALUES // fewest))
        return [replace(self, seed=self.seed + 1000 * n).draw() for n in range(1, draws)]

    def draw(self) -> Problem:
        """Draw the problem."""
        sizes, dtype = self.sizes, self.dtype
        inputs = self.operation.make_inputs(sizes, dtype=dtype, seed=self.seed)
        generator = torch.Generator("cpu").manual_seed(self.seed + 1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            unit = torch.rand(shape, generator=generator, dtype=torch.float64)
            return low + (high - low) * unit if low < high else torch.full_like(unit, low)

        ranges = dict(self.ranges or {})
        dh = ranges.pop("dh", None)
        for name, bounds in ranges.items():
            # What is float32 beside half-precision inputs has values that these hold too.
            inputs[name] = uniform(*bounds, *inputs[name].shape).to(dtype).to(inputs[name].dtype)
        state = [normal(*shape) for shape in state_shapes(self.op, sizes)]
        # mLSTMexp's n and WKV's den are sums of weights, so positive.
        state[1:2] = [n.exp() for n in state[1:2]]
        if "d_ff" in sizes:
            output = [sizes["batch"] * sizes["seq_len"], sizes["d_ff"]]
        else:
            output = [sizes[n] for n in ("batch", "seq_len", "num_heads", "head_dim_v", "channels") if n in sizes]
        state_dtype = compute_dtype(dtype)
        # Cotangents reach an implementation in its output's dtype; rounding them here gives every form the same ones.
        cotangents = {"h": (uniform(*dh, *output) if dh else normal(*output)).to(dtype)}
        cotangents |= {name: normal(*x.shape).to(state_dtype) for name, x in zip("Cn", state, strict=False)}
        given = {name: x.to(self.device) for name, x in inputs.items()}
        return Problem(
            operation=self.operation,
            inputs=LAYOUTS[self.layout](given) if self.layout else given,
            state=tuple(x.to(self.device, state_dtype) for x in state) if self.initial_state and state else None,
            cotangents={name: x.double().to(self.device) for name, x in cotangents.items()},
            options=self.options,
        )


def shifted(x: Tensor, by: int = 1) -> Tensor:
    """Return a copy, laid out alike, that begins ``by`` elements past a multiple of 16 bytes."""
    moved = x.new_zeros(x.numel() + by).as_strided(x.shape, x.stride(), by).copy_(x)
    assert moved.data_ptr() % 16 == by * x.element_size() % 16
    return moved


def strided(x: Tensor, kind: str) -> Tensor:
    """Return a copy of x [B, T, ...] or [M, D] that is laid out as fused projections make it, NaN around it.

    ``kind``: "projection", the middle of [B, T, 3 H D]; "head", that of [B, T, H, 3 D]; "transposed" from [B, H, T, D],
    or time before batch where there are no heads.
    """
    if kind == "transposed" and x.dim() > 2:
        axes = (1, 2) if x.dim() == 4 else (0, 1)
        return x.transpose(*axes).contiguous().transpose(*axes)
    flat = x.flatten(2) if kind == "projection" and x.dim() > 2 else x
    around = torch.full_like(flat, math.nan)
    return torch.cat((around, flat, around), -1).chunk(3, -1)[1].view(x.shape)


def public_state(parts: Sequence[Tensor] | None) -> Any:
    """Return a state as operations take it: one tensor, or a tuple of several."""
    return parts if parts is None or len(parts) > 1 else parts[0]


def parts_of(state: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors of a state."""
    return (state,) if isinstance(state, Tensor) else state


def on_stabilizer(x: Tensor, m: Tensor, stabilizer: Tensor) -> Tensor:
    """Return a part of a state that is divided by e^m divided by e^stabilizer instead, in float64. The m of a state
    that holds nothing may be minus infinity."""
    shift = torch.exp(m.double().clamp(min=-1e4) - stabilizer.clamp(min=-1e4))
    return x.double() * shift.view(*shift.shape, *([1] * (x.dim() - shift.dim())))


def evaluate(
    problem: Problem,
    fn: Function,
    *,
    splits: Sequence[int] = (),
    stabilizer: Tensor | None = None,
    gradients: bool | Sequence[str] = True,
) -> dict[str, Tensor]:
    """Run ``fn`` forward and backward; return its results in float64.

    Args:
        splits: time steps at which the sequence is cut, the state being carried over.
        stabilizer: m on which the last state is put before it is compared and differentiated: implementations are free
            in their choice of m. None is fn's own.
        gradients: names of those to compute, of all if True; False runs under no_grad.

    Returns:
        "h", "C" (and "n", "m") and "d<name>" for the arguments and, as dC_initial and dn_initial, the initial state.
    """
    tensors = dict(problem.inputs)
    state = dict(zip(("C_initial", "n_initial", "m_initial"), problem.state or (), strict=False))
    wanted = [*problem.operation.differentiable, *list(state)[:2]]
    if gradients is not True:
        wanted = [name for name in wanted if gradients and name in gradients]
    tensors, state = (
        {name: x.detach().requires_grad_(name in wanted) for name, x in each.items()} for each in (tensors, state)
    )
    leaves = {name: x for name, x in (*tensors.items(), *state.items()) if name in wanted}
    results: dict[str, Tensor] = {}
    with torch.set_grad_enabled(bool(leaves)):
        if problem.has_state and problem.states:
            outputs, carried = [], public_state(tuple(state.values()) or None)
            seq_len = next(iter(tensors.values())).shape[1]
            for start, stop in zip((0, *splits), (*splits, seq_len), strict=True):
                part = replace(problem, inputs=tensors).part(start, stop) if splits else tensors
                h, carried = fn(*part.values(), initial_state=carried, return_last_state=True, **problem.options)
                outputs.append(h)
            results = {"h": torch.cat(outputs, dim=1), **dict(zip("Cnm", parts_of(carried), strict=False))}
        else:
            results = {"h": fn(*tensors.values(), **problem.options)}
        assert results["h"].dtype == problem.dtype, f"h must be {problem.dtype}, got {results['h'].dtype}"
        for name in results.keys() & {"C", "n"}:
            if stabilizer is not None:
                results[name] = on_stabilizer(results[name], results["m"], stabilizer)
        scalar: Any = sum((results[name].double() * x).sum() for name, x in problem.cotangents.items())
        if problem.twice:
            first = torch.autograd.grad(scalar, list(leaves.values()), create_graph=True)
            scalar = sum(x.double().square().sum() for x in first)
    if leaves:
        # Inputs that only outputs depend on get no gradient of the last state: zero, as the definition's.
        unused = "h" not in problem.cotangents
        found = torch.autograd.grad(scalar, list(leaves.values()), materialize_grads=unused)
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
            assert gradient.dtype == leaf.dtype, f"d{name} must be {leaf.dtype}, got {gradient.dtype}"
            assert gradient.shape == leaf.shape, f"d{name} must have shape {leaf.shape}, got {gradient.shape}"
            results[f"d{name}"] = gradient
    return {name: x.detach().double() for name, x in results.items()}


def reference(problem: Problem) -> dict[str, Tensor]:
    """Return the float64 definition's results."""
    return evaluate(problem.double(), resolve(problem.operation.recurrent))


def tolerances(
    problem: Problem,
    expected: Mapping[str, Tensor],
    others: Sequence[Problem] = (),
    *,
    state_dtype: torch.dtype = torch.float32,
    splits: Sequence[int] = (),
) -> dict[str, float]:
    """Return the largest absolute error allowed to each result of the reference.

    Args:
        expected: the float64 definition's results.
        others: further draws, whose errors count as well; as a share of the largest value where theirs is larger.
        splits: time steps; the forms run whole and split there.
    """
    largest = {name: float(x.abs().max()) for name, x in expected.items()}
    if problem.dtype == torch.float64:
        return {name: FLOAT64_BOUND * value for name, value in largest.items()}
    errors = _form_errors(problem, expected)
    if splits:
        errors = {name: max(errors[name], error) for name, error in _form_errors(problem, expected, splits).items()}
    for other in others:
        exact = reference(other)
        for name, error in _form_errors(other, exact).items():
            theirs = float(exact[name].abs().max())
            errors[name] = max(errors[name], error * min(1.0, largest[name] / theirs) if theirs else 0.0)
    relative = torch.finfo(problem.dtype).eps
    if problem.dtype == torch.float32 and not problem.has_state:
        relative *= SUM_ORDER
    if state_dtype != torch.float32:
        relative += STATE_BOUND * torch.finfo(state_dtype).eps
    return {name: 2 * errors[name] + relative * value for name, value in largest.items()}


def _form_errors(problem: Problem, expected: Mapping[str, Tensor], splits: Sequence[int] = ()) -> dict[str, float]:
    """Return the largest error of the low-precision forms in each result."""
    forms = _low_precision_forms(problem, expected.get("m"), splits)
    return {name: max(float((form[name] - x).abs().max()) for form in forms) for name, x in expected.items()}


def _low_precision_forms(
    problem: Problem, stabilizer: Tensor | None, splits: Sequence[int] = ()
) -> list[dict[str, Tensor]]:
    operation = problem.operation
    rounded = problem.dtype in (torch.float16, torch.bfloat16)
    forms = [(resolve(operation.recurrent), {"round_operands": True})]
    if operation.parallel is not None:
        forms.append((resolve(operation.parallel), {"gate_dtype": torch.float32}))
    elif rounded:
        # The RG-LRU layer's definition does not round the pre-activations that its products make.
        forms.append((operation.function("torch"), {}))
    results = []
    for fn, kwargs in forms:
        # Forms without matrix products have no operands to round, and forms without sums of gates no dtype of these.
        parameters = signature(fn).parameters
        taken = {name: value for name, value in kwargs.items() if name in parameters or "options" in parameters}
        results.append(evaluate(problem, partial(fn, **taken), splits=splits, stabilizer=stabilizer))
    return results


def assert_close(
    results: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: Mapping[str, float], what: str
) -> None:
    """Raise AssertionError naming every result that is not finite or too far from the expected one.

    m is left out: it is the implementation's choice. So is what there is no result of.
    """
    failures = []
    for name in results:
        if name == "m":
            continue
        x = expected[name]
        error = float((results[name] - x).abs().max())
        if not error <= allowed[name] < math.inf:
            failures.append(
                f"{name}: error {error:.3g}, allowed {allowed[name]:.3g}, largest {float(x.abs().max()):.3g}"
            )
    assert not failures, f"{what}: " + "; ".join(failures)


_kept: dict[str, tuple[dict[str, Tensor], dict[str, float]]] = {}


def expectations(
    case: Case, problem: Problem, *, splits: Sequence[int] = ()
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the definition's results for a case's problem and the largest error allowed to each.

    They take longer than most implementations, so those of problems on the CPU are kept for the other implementations.
    """
    state_dtype = case.kwargs.get("state_dtype", torch.float32)
    drawn = (case.op, case.dtype, case.sizes, case.ranges, case.initial_state, case.layout, case.seed, case.options)
    key = repr((*drawn, problem.states, state_dtype, splits))
    if key in _kept:
        return _kept[key]
    expected = reference(problem)
    allowed = tolerances(problem, expected, case.others(expected), state_dtype=state_dtype, splits=splits)
    if case.device == "cpu":
        _kept[key] = expected, allowed
    return expected, allowed


def check_matches_reference(case: Case, *, splits: Sequence[int] = (), gradients: bool | Sequence[str] = True) -> None:
    """Outputs, last state and every gradient equal the float64 definition's, also where the sequence is cut in parts.

    The gradients include the initial state's, and flow in through the output and the last state.

    Args:
        splits: time steps at which it is cut, the state being carried over.
        gradients: names of those that are checked, all if True; False checks the path without a backward pass.
    """
    problem = case.draw()
    expected, allowed = expectations(case, problem, splits=splits)
    if case.ranges and case.op == "wkv4":
        # An exponent of size K is known to K eps, whoever adds to it, and a weight is the difference of two.
        largest = max(float(problem.inputs[name].abs().max()) for name in ("k", "u"))
        relative = 2 * largest * torch.finfo(compute_dtype(case.dtype)).eps
        allowed = {name: bound + relative * float(expected[name].abs().max()) for name, bound in allowed.items()}
    results = evaluate(problem, case.function, splits=splits, stabilizer=expected.get("m"), gradients=gradients)
    assert results.keys() == expected.keys() or gradients is not True
    assert_close(results, expected, allowed, f"{case.op} against its definition")


def check_batch_invariant(case: Case, *, exact: bool = False) -> None:
    """The results of a sequence (of a token of an MLP) do not depend on what else is in the batch.

    Args:
        exact: require equal bits; else the common tolerance, for matrix libraries choose their kernels by shape.
    """
    problem = case.draw()
    expected, allowed = expectations(case, problem)
    if exact:
        allowed = dict.fromkeys(expected, 0.0)
    stabilizer = expected.get("m")
    together = evaluate(problem, case.function, stabilizer=stabilizer)
    batch = len(problem.cotangents["h"])
    assert batch > 1, "the law needs a batch"
    for index in (0, batch - 1):
        one = slice(index, index + 1)
        alone = replace(
            problem,
            inputs={name: x if name in problem.shared else x[one] for name, x in problem.inputs.items()},
            state=None if problem.state is None else tuple(x[one] for x in problem.state),
            cotangents={name: x[one] for name, x in problem.cotangents.items()},
        )
        results = evaluate(alone, case.function, stabilizer=None if stabilizer is None else stabilizer[one])
        # The gradient of an argument that the batch shares sums over it.
        results = {name: x for name, x in results.items() if name not in problem.shared_gradients}
        mine = {name: together[name][one] for name in results}
        assert_close(results, mine, allowed, f"{case.op}, sequence {index} alone")


def check_last_state_alone(case: Case) -> None:
    """Gradients of one part of the last state are the definition's, where outputs get none at all."""

    def alone(problem: Problem, part: str) -> Problem:
        return replace(problem, cotangents={part: problem.cotangents[part]})

    drawn = case.draw()
    for part in drawn.cotangents.keys() - {"h"}:
        problem = alone(drawn, part)
        expected = reference(problem)
        allowed = tolerances(problem, expected, [alone(other, part) for other in case.others(expected)])
        results = evaluate(problem, case.function, stabilizer=expected.get("m"))
        assert_close(results, expected, allowed, f"{case.op}, gradients of {part} alone")


def check_packed_documents(case: Case, *, starts: Sequence[int], separator: float = -1e4) -> None:
    """Documents packed in one sequence by a forget gate of ``separator`` give what they give apart.

    Args:
        starts: first step of every document but the first.
        separator: a large negative number, or minus infinity.
    """
    drawn = replace(case, initial_state=False).draw()
    drawn.inputs[DECAY_GATES[case.op]][:, list(starts)] = separator
    cotangents = {name: x if name == "h" else torch.zeros_like(x) for name, x in drawn.cotangents.items()}
    problem = replace(drawn, cotangents=cotangents)
    documents = []
    for start, stop in zip((0, *starts), (*starts, case.sizes["seq_len"]), strict=True):
        mine = {**cotangents, "h": cotangents["h"][:, start:stop]}
        documents.append(reference(replace(problem, inputs=problem.part(start, stop), cotangents=mine)))
    # Outputs and gradients lie behind each other in time; the state is the last document's.
    expected = {
        name: x if name in "Cnm" else torch.cat([document[name] for document in documents], dim=1)
        for name, x in documents[-1].items()
    }
    results = evaluate(problem, case.function, stabilizer=expected.get("m"))
    assert_close(results, expected, tolerances(problem, expected), f"{case.op}, documents at {tuple(starts)}")


def check_masked_tokens(
    case: Case, *, start: int, stop: int, mask: Mapping[str, float] | None = None, splits: Sequence[int] = ()
) -> None:
    """Masked tokens leave no trace: all else is as in the sequence without them, and nothing is infinite or NaN.

    Args:
        start, stop: first masked token and the one after the last.
        mask: argument -> value that masks; None as :data:`MASKS` says.
        splits: time steps at which the sequence is cut, so that a part may be all masked.
    """
    kept = [t for t in range(case.sizes["seq_len"]) if not start <= t < stop]

    def without(problem: Problem) -> Problem:
        inputs = {n: x if n in problem.shared else x[:, kept].contiguous() for n, x in problem.inputs.items()}
        return replace(problem, inputs=inputs, cotangents={**problem.cotangents, "h": problem.cotangents["h"][:, kept]})

    masked = case.draw()
    problem = without(masked)
    expected = reference(problem)
    allowed = tolerances(problem, expected, [without(other) for other in case.others(expected)[:2]])
    for name, value in (mask or MASKS[case.op]).items():
        masked.inputs[name][:, start:stop] = value
    masked.cotangents["h"][:, start:stop] = 0.0
    in_time = {"h", *(f"d{name}" for name in masked.inputs if name not in masked.shared)}
    # The definition, which all else is held to, obeys this law too.
    definition = [resolve(case.operation.recurrent)] if case.dtype == torch.float64 else []
    for fn in (case.function, *definition):
        results = evaluate(masked, fn, splits=splits, stabilizer=expected.get("m"), gradients=case.impl != "step")
        infinite = [name for name, x in results.items() if not x.isfinite().all()]
        assert not infinite, f"{case.op}: {infinite} not finite"
        results = {name: x[:, kept] if name in in_time else x for name, x in results.items()}
        assert_close(results, expected, allowed, f"{case.op} without tokens {start} to {stop}")


def check_state_scale_is_free(case: Case) -> None:
    """States (C, n, m) and (C e^-s, n e^-s, m + s) are the same state, however small n becomes."""
    problem = case.draw()
    expected, allowed = expectations(case, problem)
    relative = 256 * torch.finfo(case.dtype).eps
    bound = {name: max(allowed[name], relative * float(x.abs().max())) for name, x in expected.items()}
    assert problem.state is not None
    c, n, m = problem.state
    for shift in (-60.0, 3.0, 70.0):
        scale = math.exp(-shift)
        moved = replace(problem, state=(c * scale, n * scale, m + shift))
        results = evaluate(moved, case.function, stabilizer=expected["m"])
        for name in ("dC_initial", "dn_initial"):
            results[name] = results[name] * scale
        assert_close(results, expected, bound, f"{case.op} with m moved by {shift}")


def check_steps(case: Case, *, prefix: int) -> None:
    """Decoding steps from the last state of a prefix give the definition's outputs and last state.

    From half-precision inputs RG-LRU's state is as good as its gates are made: to 2^-15 at every step (elements.py).
    """
    problem, recurrent = case.draw(), resolve(case.operation.recurrent)
    expected, last = recurrent(*problem.double().inputs.values(), return_last_state=True)
    _, state = recurrent(*problem.part(0, prefix).values(), return_last_state=True)
    outputs = []
    for t in range(prefix, case.sizes["seq_len"]):
        before = [x.clone() for x in parts_of(state)]
        y, after = case.function(*problem.part(t, t + 1).values(), initial_state=state, return_last_state=True)
        assert all(map(torch.equal, parts_of(state), before)), "the state given was written to"
        outputs.append(y)
        state = after
    bound = 4 * torch.finfo(case.dtype).eps * float(expected.abs().max()) + 1e-6
    assert (torch.cat(outputs, 1).double() - expected[:, prefix:]).abs().max() <= bound
    precise = case.op == "wkv4" or (case.operation.channelwise and case.dtype == torch.float32)
    precision = 32 * torch.finfo(torch.float32).eps if precise else 2**-13
    found, exact = parts_of(state), parts_of(last)
    for x, wanted in zip(found[:2], exact[:2], strict=True):
        moved = on_stabilizer(x, found[2], exact[2]) if len(exact) == 3 else x.double()
        assert (moved - wanted).abs().max() <= precision * float(wanted.abs().max())


def check_gradients_alone(case: Case) -> None:
    """A gradient is the same whichever others are asked for, again, and with a graph of its own; no_grad keeps nothing.

    Kernels and the portable form lay it out as the argument.
    """
    problem, fn = case.draw(), case.function
    everything = evaluate(problem, fn)
    names = [name.removeprefix("d") for name in everything if name.startswith("d")]
    relative = 1e-12 if case.dtype == torch.float64 else 0.0
    bound = {name: relative * float(x.abs().max()) for name, x in everything.items()}
    for some in {*itertools.combinations(names, 1), *itertools.combinations(names, len(names) - 1), tuple(names)}:
        assert_close(evaluate(problem, fn, gradients=some), everything, bound, f"{case.op}, gradients of {some}")
    inputs = {name: x.detach() for name, x in problem.inputs.items()}
    leaves = list(case.operation.leaves(inputs).values())
    with torch.no_grad():
        assert not fn(*inputs.values()).requires_grad
    scalar = fn(*inputs.values()).square().sum()
    first = torch.autograd.grad(scalar, leaves, create_graph=True)
    again = torch.autograd.grad(scalar, leaves, retain_graph=True)
    for name, x, y, leaf in zip(case.operation.differentiable, first, again, leaves, strict=True):
        assert (x - y).abs().max() <= relative * y.abs().max(), name
        if case.impl == "torch" or not case.plain:
            assert y.stride() == leaf.stride(), f"the gradient of {name} must be laid out as {name}"


def check_second_derivatives(case: Case) -> None:
    """Second derivatives are the definition's; a kernel, which has none, refuses them, also when it follows a plan.

    The gradients that come in are constants, so only what was saved tells that there is anything to refuse.
    """

    def twice(problem: Problem) -> Problem:
        return replace(problem, twice=True)

    problem = twice(case.draw())
    if not case.plain:
        for _ in range(6 if case.device == "cuda" else 1):
            with pytest.raises(RuntimeError, match='have no second derivative: use impl="torch"'):
                evaluate(problem, case.function)
        return
    expected = reference(problem)
    allowed = tolerances(problem, expected, [twice(other) for other in case.others(expected)])
    results = evaluate(problem, case.function, stabilizer=expected.get("m"))
    assert_close(results, expected, allowed, f"{case.op}, second derivatives")


def check_leaves_inputs_alone(case: Case) -> None:
    """Inputs are not written to, and the path without a backward pass gives the same."""
    problem = case.draw()
    before = {name: x.clone() for name, x in problem.inputs.items()}
    tracked = evaluate(problem, case.function)
    plain = evaluate(problem, case.function, gradients=False)
    assert all(torch.equal(x, tracked[name]) for name, x in plain.items())
    assert all(torch.equal(x, problem.inputs[name]) for name, x in before.items()), "inputs were written to"


def check_unaligned(case: Case) -> None:
    """Tensors, gradients among them, that do not begin at a multiple of 16 bytes give the bits of those that do.

    On a GPU calls of each kind take turns, and come to repeat launches. The RG-LRU layer's products are torch's, which
    has other kernels for such tensors.
    """
    problem, fn = case.draw(), case.function
    gradients = case.impl != "step" and "fwbw" in case.operation.implementation(case.impl).modes

    def results(*elements: int) -> dict[str, Tensor]:
        by = itertools.cycle(elements)

        def moved(*inputs: Tensor, **keywords: Any) -> Any:
            outputs = fn(*inputs, **keywords)
            for y in tree_leaves(outputs):
                if y.requires_grad:
                    y.register_hook(lambda gradient: shifted(gradient, next(by)))
            return outputs

        inputs = {name: shifted(x, next(by)) for name, x in problem.inputs.items()}
        state = problem.state and tuple(shifted(x, next(by)) for x in problem.state)
        return evaluate(replace(problem, inputs=inputs, state=state), moved, gradients=gradients)

    expected = evaluate(problem, fn, gradients=gradients)
    allowed = expectations(case, problem)[1] if case.op == "rglru_layer" else dict.fromkeys(expected, 0.0)
    for elements in [(1, 2, 4)] if case.device == "cpu" else [(1,), (0,), (2,), (4,), (1, 2, 4)] * 5:
        assert_close(results(*elements), expected, allowed, f"{case.op}, {elements} elements on")


class _Copies(TorchDispatchMode):
    """Records the shapes of copied tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


def check_strided(case: Case) -> None:
    """Slices of one projection, and transposed tensors, give kernels the bits of contiguous ones; but for the delta
    rule's, none is copied.

    Layouts go round among the arguments, so that these differ in theirs. In the interpreter, which is slow, gradients
    are computed for the first round only, and "projection" is left out, of which only the heads' stride is not that of
    "head". Torch, whose sums and products depend on the layout, gets the common tolerance: the forms in plain torch and
    the products of the RG-LRU layer.
    """
    problem, fn = case.draw(), case.function
    plain = case.impl != "step" and case.plain
    differentiable = case.impl != "step" and "fwbw" in case.operation.implementation(case.impl).modes
    expected = evaluate(problem, fn, gradients=differentiable)
    exact = not plain and case.op != "rglru_layer"
    allowed = dict.fromkeys(expected, 0.0) if exact else expectations(case, problem)[1]
    first, kinds = next(iter(problem.inputs)), ("head", "transposed", "projection")
    if slow := case.device == "cpu" and not plain:
        kinds = kinds[:2]
    for turn in range(len(kinds) if case.device == "cpu" else 6):
        around = itertools.islice(itertools.cycle(kinds), turn, None)
        inputs = {n: strided(x, next(around)) if x.dim() > 2 or n == first else x for n, x in problem.inputs.items()}
        state = problem.state and tuple(strided(x, "transposed") if x.dim() > 2 else x for x in problem.state)
        given = replace(problem, inputs=inputs, state=state)
        results = evaluate(given, fn, gradients=differentiable and not (slow and turn))
        assert_close(results, expected, allowed, f"{case.op}, {kinds[turn % len(kinds)]} first")
        if turn == 0:
            # torch.compile knows no such mode.
            alone = replace(case, wrap=lambda fn: fn).function
            with torch.no_grad(), _Copies() as copies:
                assert alone(*inputs.values(), **problem.options).is_contiguous()
            large = {x.shape for x in inputs.values() if x.dim() == inputs[first].dim() and not x.is_contiguous()}
            # Kernels of the delta rule read contiguous tensors alone.
            reads_any = exact and problem.has_state and case.operation.kernel != "delta"
            assert not reads_any or (large and not large & set(copies.shapes)), f"{case.op}: copied"


def check_no_tokens(case: Case) -> None:
    """Of a batch or time of 0 the output is empty, the last state the initial one, and gradients pass through."""
    drawn, fn = case.draw(), case.function
    cuts: list[Callable[[Tensor], Tensor]] = [lambda x: x[:0], lambda x: x[:, :0]]
    for cut in cuts[: 2 if drawn.has_state and case.impl != "step" else 1]:
        inputs = {n: x if n in drawn.shared else cut(x) for n, x in drawn.inputs.items()}
        batch = len(next(iter(inputs.values())))
        state = drawn.state and tuple(x[:batch] for x in drawn.state)
        cotangents = {n: cut(x) if n == "h" else x[:batch] for n, x in drawn.cotangents.items()}
        results = evaluate(
            replace(drawn, inputs=inputs, state=state, cotangents=cotangents), fn, gradients=case.impl != "step"
        )
        assert results["h"].shape == cotangents["h"].shape
        for name, x in zip("Cnm", state or (), strict=False):
            assert torch.equal(results[name], x.double())
            if name != "m" and case.impl != "step":
                assert torch.equal(results[f"d{name}_initial"], cotangents[name])
        assert all(not results[f"d{name}"].any() for name in drawn.operation.differentiable if case.impl != "step")
        if drawn.has_state:
            _, last = fn(*inputs.values(), return_last_state=True, **drawn.options)
            for x, like in zip(parts_of(last)[:2], drawn.state or (), strict=False):
                assert x.shape == like[:batch].shape and not x.any()


def check_bad_input(case: Case) -> None:
    """Input that does not fit raises ValueError that names the argument, what was expected and what came."""
    problem, fn = case.draw(), case.function
    inputs, state = dict(problem.inputs), problem.state

    def rejects(match: str, *, changed: Mapping[str, Tensor] | None = None, **keywords: Any) -> None:
        with pytest.raises(ValueError, match=match):
            fn(*{**inputs, **(changed or {})}.values(), **keywords)

    first = next(iter(inputs))
    rejects(rf"{first} must have \d dimensions .* got shape", changed={first: inputs[first][0]})
    rejects(f"{first} must be one of .* got int32", changed={name: x.int() for name, x in inputs.items()})
    with pytest.raises(TypeError, match=f"{first} must be a tensor, got list"):
        fn([1.0], *list(inputs.values())[1:])
    # The layer's weights are held to the channels of x.
    empty = (
        "w_a must have shape" if case.op == "rglru_layer" else f"{first} must have no empty dimension but .* got shape"
    )
    rejects(empty, changed={first: inputs[first][..., :0]})
    for name, x in inputs.items():
        if problem.has_state is False and name != first:
            slice_of = torch.cat((x, x), 1).chunk(2, 1)[0]
            rejects(rf"{name} must be contiguous, or .* got strides", changed={name: slice_of})
        if name != first:
            wrong = torch.float16 if x.dtype != torch.float16 else torch.float32
            rejects(rf"{name} must be \w+, got {str(wrong).removeprefix('torch.')}", changed={name: x.to(wrong)})
            # Of an MLP's two weights, the second one is held to the first.
            held = name if problem.has_state else "w_gate"
            short = x.narrow(-1 if x.dim() < 4 else 1, 0, 1).contiguous()
            rejects(rf"{held} must have shape .* got \(", changed={name: short})
    with pytest.raises(ValueError, match=r"impl must be one of .* got 'nothing'"):
        resolve(case.operation.call)(*inputs.values(), impl="nothing")
    if state is None:
        return
    for value in (0, -16, 1.5):
        rejects(rf"chunk_size must be .* got {value}", chunk_size=value)
    rejects("state_dtype must be .* got int8", state_dtype=torch.int8)
    if case.operation.channelwise and case.operation.implementation(case.impl).default_config is None:
        rejects(f"config must be left out for {case.impl}, got 1", config=1)
    if "scale" in signature(resolve(case.operation.call)).parameters:
        rejects("scale must be a finite number or None, got nan", scale=math.nan)
    names = STATE_PARTS.get(case.op, ("",))
    for index, name in enumerate(names):
        bad = [
            [bad if n == index else x for n, x in enumerate(state)] for bad in (state[index][:1], state[index].half())
        ]
        rejects(rf"initial_state ?{name} must have shape .* got \(1,", initial_state=public_state(bad[0]))
        rejects(rf"initial_state ?{name} must be float\d\d, got float16", initial_state=public_state(bad[1]))
    if len(names) > 1:
        expected = rf"initial_state must be three tensors \({', '.join(names)}\), got"
        rejects(rf"{expected} Tensor", initial_state=state[0])
        rejects(rf"{expected} 2 of them", initial_state=state[:2])


def check_unsupported(case: Case) -> None:
    """What a declaration says that an implementation does not take is refused with the same words.

    Sizes that are declared so, dtypes that no kernel takes, nor a decoding step, and a decoding step of several tokens.
    """
    implementation = case.operation.implementation(case.impl)
    bad = {"head_dim_v": (20, 1032), "head_dim_qk": (8,), "channels": (20,), "d_model": (12,), "d_ff": (20,)}
    for name, values in bad.items():
        for value in values if name in case.sizes else ():
            sizes = {**case.sizes, name: value}
            reason = implementation.why_unsupported("fw", "fp32", None, sizes)
            assert reason is not None and f"got {value}" in reason
            # The function itself calls an MLP's sizes D and F.
            reason = reason.replace("d_model", "D").replace("d_ff", "F")
            with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
                case.function(*replace(case, sizes=sizes).draw().inputs.values())
    for fn in (case.function, *([case.operation.step] if "step" in implementation.modes else [])):
        for dtype, reason in (
            (torch.float64, "must be one of float32, float16, bfloat16, got float64"),
            (torch.bfloat16, "must be float32 or float16 under TRITON_INTERPRET=1, got bfloat16"),
        ):
            with pytest.raises(ValueError, match=rf"^\w {reason}$"):
                fn(*replace(case, dtype=dtype).draw().inputs.values())
    good = case.draw().inputs.values()
    for chunk_size in ((256,) if case.impl == "limit_chunk" else (48, 8)) if implementation.chunked else ():
        reason = implementation.why_unsupported("fw", "fp32", None, {**case.sizes, "chunk_size": chunk_size})
        assert reason is not None
        with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
            case.function(*good, chunk_size=chunk_size)
    if "step" in implementation.modes and implementation.requires:
        with pytest.raises(
            ValueError, match=f"a decoding step takes one token: seq_len must be 1, got {case.sizes['seq_len']}"
        ):
            case.operation.step(*good)
