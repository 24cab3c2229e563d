"""Correctness before speed: outputs and gradients against the float64 reference.

The reference is the operation's recurrent definition in float64 where that is affordable. Above that, implementations
other than the portable torch one are held against the torch one in float64 (which the tests hold against the
recurrence); the torch one itself, and operations that have none, are checked at a smaller shape, which the row states.

The bound of a tensor's relative error ``||x - ref|| / ||ref||`` is not chosen by hand: it is twice the error that a
plain torch form makes on the same rounded inputs in the same dtype, plus the dtype's epsilon. States kept in a lower
precision than fp32 add twice their own epsilon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels import resolve
from ..kernels.spec import Operation
from .case import Case

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

SAME_SHAPE = "same shape"
SEED = 0

_RECURRENT_STEPS = {"cpu": 4096, "cuda": 1024}
_RECURRENT_BYTES = 2 * 2**30
_SAVED_PER_STEP = 3
_SMALL_SEQ_LEN = 512
_MIN_SEQ_LEN = 64
_FORM_CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a problem's outputs must be.

    Attributes:
        values: "out" and argument name -> reference value (argument: its gradient).
        bounds: the same names -> largest relative error that passes.
        grad_out: the output gradient that the gradients belong to, [B, T, H, V] as the output.
    """

    values: Mapping[str, Tensor]
    bounds: Mapping[str, float]
    grad_out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a check: the largest relative error, and why it fails (None when it passes)."""

    rel_error: float | None
    failure: str | None


class PoisonEmpty(TorchDispatchMode):
    """Fills what torch.empty and its relatives return with NaN, so that an element nobody writes shows."""

    _UNINITIALISED = frozenset(
        {
            torch.ops.aten.empty.memory_format,
            torch.ops.aten.empty_strided.default,
            torch.ops.aten.empty_like.default,
            torch.ops.aten.new_empty.default,
            torch.ops.aten.new_empty_strided.default,
        }
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._UNINITIALISED and result.is_floating_point():
            result.fill_(float("nan"))
        return result


def problem_key(operation: Operation, case: Case) -> tuple[object, ...]:
    """What the inputs of a case depend on: everything but how they are computed."""
    return operation.name, case.dtype, tuple((n, v) for n, v in case.sizes.items() if n != "chunk_size")


class Inputs:
    """Makes an operation's inputs, the same for everyone who asks, and keeps the last ``kept`` problems' tensors."""

    def __init__(self, device: str, kept: int = 2) -> None:
        self.device, self.kept = device, kept
        self._problems: dict[tuple[object, ...], dict[str, Tensor]] = {}

    def clear(self) -> None:
        """Give the memory back."""
        self._problems.clear()

    def get(self, operation: Operation, case: Case) -> dict[str, Tensor]:
        """Return argument -> tensor: new leaves over memory that cases of the same problem share."""
        key = problem_key(operation, case)
        if key not in self._problems:
            while len(self._problems) >= self.kept:
                del self._problems[next(iter(self._problems))]
            make = resolve(operation.inputs)
            self._problems[key] = make(case.sizes, dtype=DTYPES[case.dtype], device=self.device, seed=SEED)
        return {name: tensor.detach() for name, tensor in self._problems[key].items()}


def differentiate(out: Tensor, leaves: Mapping[str, Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    """Return argument name -> gradient, without accumulating into ``.grad``."""
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad_out), strict=True))


def evaluate(
    operation: Operation,
    function: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    grad_out: Tensor | None,
) -> dict[str, Tensor]:
    """Return "out" and, where ``grad_out`` is given, the gradient of every differentiable argument."""
    wanted = operation.differentiable if grad_out is not None else ()
    tensors = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.items()}
    with torch.set_grad_enabled(grad_out is not None):
        out = function(*tensors.values())
    results = {"out": out.detach()}
    if grad_out is not None:
        results |= differentiate(out, {name: tensors[name] for name in wanted}, grad_out.to(out.dtype))
    return results


class References:
    """Computes what a case must give, and keeps the last problem's answer: cases with the same inputs come in a row."""

    def __init__(self) -> None:
        self._key: object = None
        self._expected: Expected | None = None

    def clear(self) -> None:
        """Give the memory back."""
        self._key = self._expected = None

    def get(
        self, operation: Operation, case: Case, inputs: Mapping[str, Tensor], *, gradients: bool, portable: bool
    ) -> Expected:
        """Return the expected values of the case; see :func:`checked_case` for ``portable``."""
        # The low-precision form that sets the bounds depends on who is checked.
        key = (*problem_key(operation, case), portable, case.impl == "torch")
        if self._expected is None or self._key != key or (gradients and len(self._expected.values) == 1):
            self.clear()
            self._expected = _expect(operation, case, inputs, gradients=gradients, portable=portable)
            self._key = key
        return self._expected


def checked_case(operation: Operation, case: Case, device: str) -> tuple[Case, bool]:
    """Return the case at the shape at which it is checked, and whether the portable form is its reference there.

    The portable float64 form serves where the recurrence is out of reach, except for the portable form itself.
    """
    if _recurrence_affordable(case, device):
        return case, False
    if _portable(operation) is not None and case.impl != "torch":
        return case, True
    small = replace(case, batch=1, num_heads=min(case.num_heads, 2) if case.num_heads else None)
    if case.seq_len is not None:
        # Two chunks at least, so that the state passed between chunks is part of the check.
        small = replace(small, seq_len=min(case.seq_len, max(_SMALL_SEQ_LEN, 2 * (case.chunk_size or 0))))
        while not _recurrence_affordable(small, device) and small.seq_len > _MIN_SEQ_LEN:
            small = replace(small, seq_len=small.seq_len // 2)
    return small, False


def describe_check(case: Case, checked: Case) -> str:
    """Return the ``checked`` column: the same shape, or the sizes that differ."""
    changed = [f"{name}={value}" for name, value in checked.sizes.items() if case.sizes.get(name) != value]
    return ", ".join(changed) or SAME_SHAPE


def compare(results: Mapping[str, Tensor], expected: Expected, state_dtype: str | None) -> Verdict:
    """Compare outputs and gradients with what they must be.

    Returns:
        The largest relative error and, where a tensor misses its bound, which one and by how much.
    """
    allowance = 2 * torch.finfo(DTYPES[state_dtype]).eps if state_dtype in ("bf16", "fp16") else 0.0
    worst, failures = 0.0, []
    for name, value in results.items():
        reference = expected.values[name]
        what = "output" if name == "out" else f"gradient of {name}"
        if value.shape != reference.shape:
            failures.append(f"{what} has shape {tuple(value.shape)}, expected {tuple(reference.shape)}")
            continue
        if not bool(torch.isfinite(value).all()):
            failures.append(f"{what} contains non-finite values")
            continue
        error = relative_error(value, reference)
        worst = max(worst, error)
        bound = expected.bounds[name] + allowance
        if not error <= bound:
            failures.append(f"{what} has relative error {error:.2e}, above {bound:.2e}")
    return Verdict(rel_error=worst, failure="; ".join(failures) or None)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Return ||value - reference|| / ||reference||, the absolute error where the reference is zero."""
    difference = torch.linalg.vector_norm((value.to(reference.dtype) - reference).double())
    scale = torch.linalg.vector_norm(reference.double())
    return float(difference / scale if scale > 0 else difference)


def _recurrence_affordable(case: Case, device: str) -> bool:
    sizes = case.sizes
    steps = sizes.get("seq_len", 1)
    if "head_dim_v" in sizes:
        state = sizes["num_heads"] * sizes.get("head_dim_qk", sizes["head_dim_v"]) * sizes["head_dim_v"]
    else:
        state = sizes.get("channels", 1) * sizes.get("head_dim_qk", 1)
    saved = _SAVED_PER_STEP * steps * sizes.get("batch", 1) * state * 8
    return steps <= _RECURRENT_STEPS[device] and saved <= _RECURRENT_BYTES


def _portable(operation: Operation) -> Callable[..., Tensor] | None:
    for implementation in operation.implementations:
        if implementation.name == "torch":
            function = resolve(implementation.call)
            return lambda *tensors: function(*tensors, chunk_size=_FORM_CHUNK)
    return None


def _low_precision_form(operation: Operation, case: Case) -> Callable[..., Tensor]:
    """A torch form other than the one that is checked, to say what error the dtype itself makes."""
    parallel = resolve(operation.parallel) if operation.parallel else None
    portable = _portable(operation)
    forms = (parallel, portable) if case.impl == "torch" else (portable, parallel)
    return next((form for form in forms if form is not None), resolve(operation.recurrent))


def _expect(
    operation: Operation, case: Case, inputs: Mapping[str, Tensor], *, gradients: bool, portable: bool
) -> Expected:
    definition = _portable(operation) if portable else resolve(operation.recurrent)
    assert definition is not None, "checked_case asks for the portable form only where there is one"
    form = _low_precision_form(operation, case)
    out = form(*(x.detach() for x in inputs.values()))
    generator = torch.Generator(device=out.device).manual_seed(SEED + 1)
    grad_out = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32).to(out.dtype)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    reference = evaluate(operation, definition, exact, grad_out if gradients else None)
    low = evaluate(operation, form, inputs, grad_out if gradients else None)
    dtype = DTYPES[case.dtype]
    eps = torch.finfo(dtype).eps
    bounds = {name: 2 * relative_error(low[name], value) + eps for name, value in reference.items()}
    # For half-precision inputs fp32 holds the reference exactly enough, at half the memory.
    kept = torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
    return Expected(
        values={name: value.to(kept) for name, value in reference.items()}, bounds=bounds, grad_out=grad_out
    )
