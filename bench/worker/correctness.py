"""Correctness before speed: outputs and gradients against the float64 reference.

The reference is the operation's recurrent definition in float64 where that is affordable. Above that, implementations
other than the portable torch one are held against the torch one in float64 (which the tests hold against the
recurrence), with less of the batch where that does not fit in memory; the torch one itself, and operations that have
none, are checked at a smaller shape. The row states the shape. Where channels do not mix, large problems' references
are computed some channels at a time, each with all of batch and time: every element of outputs and gradients is still
checked, those of parameters too, which are sums over both.

The bound of a tensor's relative error ``||x - ref|| / ||ref||`` is not chosen by hand: it is twice the error that a
plain torch form makes on the same rounded inputs in the same dtype, plus the dtype's epsilon. In fp32 and fp64, where
one form's error is the luck of its order of summation, the addition is what an error of epsilon times the largest
magnitude in every element comes to (the rule of the law suite), at least 16 epsilon. States kept in a lower precision
than fp32 add twice their own epsilon. Outside packages are not ours to mend: they are held to :data:`PEER_FACTOR` times
the bound, which still catches a wrong result, and the row's rel_error shows the rest.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ...kernels import resolve
from ...kernels.common.arguments import CASE_DTYPES, compute_dtype
from ...kernels.common.inputs import Draw
from ...kernels.common.spec import Operation
from ...results.documents import count_documents, lengths_of
from ...results.schema import Case

DTYPES = {name: dtype for dtype, name in CASE_DTYPES.items()}

SAME_SHAPE = "same shape"
PEER_FACTOR = 8
"""How far beyond the bound of our own code an outside package's error may lie."""

LARGER_FACTORS = {("mlstm_kernels", "f"): 16}
"""The same of a package's gradient: that of the forget gate, a difference of two bf16 sums, is off by 9 % over 16,384
tokens, 11 times our bound."""

SEED = 0
KEPT = 2

_RECURRENT_STEPS = {"cpu": 4096, "cuda": 1024}
_RECURRENT_BYTES = 2 * 2**30
_SAVED_PER_STEP = 3
_SMALL_SEQ_LEN = 512
_MIN_SEQ_LEN = 64
_SMALL_DOCUMENTS = 8
_FORM_CHUNK = 64
_MAX_SQUARE = 2**25
_MAX_SHARED_BYTES = 2**26
_SLICE_ELEMENTS = 2**28
"""Of one tensor, computed at a time where channels do not mix. A pass of WKV's portable form and back takes 15 times a
float64 tensor: for the 2^30 elements of 65,536 steps of batch 8 and 2048 channels 129 GB, in four slices 71 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a problem's outputs must be.

    Attributes:
        values: "out" and argument name -> reference value (argument: its gradient).
        bounds: the same names -> largest relative error that passes.
        grad_out: the output gradient that the gradients belong to, in the output's shape; None without gradients.
    """

    values: Mapping[str, Tensor]
    bounds: Mapping[str, float]
    grad_out: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a check: the largest relative error, and why it fails (None when it passes)."""

    rel_error: float | None
    failure: str | None


STEP_PREFIX = 16
"""Tokens that a decoding step has behind it when it is checked and timed."""


def state_before_step(operation: Operation, case: Case, device: str) -> Any:
    """Return the state after :data:`STEP_PREFIX` tokens of the case's problem, from the definition in fp32.

    Of an operation with a cache it is the cache of as many tokens as the case's context, in the case's dtype.
    """
    dtype = DTYPES[case.dtype]
    if operation.cache:
        sizes = {**case.sizes, "seq_len": case.context or 1}
        return resolve(operation.cache)(Draw(sizes, dtype=dtype, device=device, seed=SEED + 2))
    sizes = {**case.sizes, "seq_len": STEP_PREFIX}
    inputs = operation.make_inputs(sizes, dtype=compute_dtype(dtype), device=device, seed=SEED + 2)
    with torch.no_grad():
        _, state = resolve(operation.recurrent)(*inputs.values(), return_last_state=True)
    return state


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
    """Return what the inputs of a case depend on: not the implementation, its chunk length or the mode."""
    return operation.name, case.dtype, case.problem_sizes


class Inputs:
    """Makes an operation's inputs, always the same ones, and keeps the tensors of the last :data:`KEPT` problems."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._problems: dict[tuple[object, ...], dict[str, Tensor]] = {}

    def clear(self) -> None:
        """Give the memory back."""
        self._problems.clear()

    def get(self, operation: Operation, case: Case) -> dict[str, Tensor]:
        """Return argument -> tensor: new leaves over memory that cases of the same problem share."""
        key = problem_key(operation, case)
        if key not in self._problems:
            while len(self._problems) >= KEPT:
                del self._problems[next(iter(self._problems))]
            self._problems[key] = operation.make_inputs(
                case.sizes, dtype=DTYPES[case.dtype], device=self.device, seed=SEED
            )
        return {name: tensor.detach() for name, tensor in self._problems[key].items()}


def differentiate(out: Tensor, leaves: Mapping[str, Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    """Return argument name -> gradient, without accumulating into ``.grad``."""
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad_out), strict=True))


def evaluate(
    operation: Operation,
    function: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    grad_out: Callable[[Tensor], Tensor] | None,
    *,
    exact: bool = False,
) -> dict[str, Tensor]:
    """Return "out" and, where ``grad_out`` gives the output's gradient, that of every differentiable argument.

    Args:
        grad_out: takes a tensor of the output's shape and device.
        exact: compute in float64.
    """
    first = next(iter(inputs.values()))
    channels = first.shape[-1]
    slices = min(channels, -(-first.numel() // _SLICE_ELEMENTS)) if operation.channelwise else 1
    results: dict[str, Tensor] = {}
    if slices > 1:
        whole, step = None if grad_out is None else grad_out(first), -(-channels // slices)
        for start in range(0, channels, step):
            part = slice(start, start + step)
            given = {name: x[..., part].contiguous() for name, x in inputs.items()}
            some = None if whole is None else lambda _, whole=whole, part=part: whole[..., part].contiguous()
            for name, value in evaluate(operation, function, given, some, exact=exact).items():
                if start == 0:
                    results[name] = value.new_empty(*value.shape[:-1], channels)
                results[name][..., part] = value
        return results
    wanted = operation.differentiable if grad_out is not None else ()
    widened = {name: x.double() if exact and x.is_floating_point() else x for name, x in inputs.items()}
    tensors = {name: x.detach().requires_grad_(name in wanted) for name, x in widened.items()}
    with torch.set_grad_enabled(grad_out is not None):
        out = function(*tensors.values())
    results["out"] = out.detach()
    if grad_out is not None:
        results |= differentiate(out, {name: tensors[name] for name in wanted}, grad_out(out).to(out.dtype))
    return results


def each_document(function: Callable[..., Tensor], lengths: Sequence[int], *tensors: Tensor, **options: Any) -> Tensor:
    """Return the outputs of documents that are packed into a batch of 1, each alone; equal neighbours are a batch."""
    runs = [(length, len([*same])) for length, same in itertools.groupby(lengths)]
    sizes = [length * n for length, n in runs]

    def parts(x: Tensor) -> Iterable[Tensor]:
        if x.ndim < 3:  # a constant of heads or channels
            return itertools.repeat(x, len(runs))
        pieces = zip(x.split(sizes, dim=1), runs, strict=True)
        return (piece.unflatten(1, (n, length)).squeeze(0) for piece, (length, n) in pieces)

    outputs = (function(*each, **options) for each in zip(*map(parts, tensors), strict=True))
    return torch.cat([out.flatten(0, 1) for out in outputs])[None]


class References:
    """Computes what a case must give, and keeps the last answer: cases with the same inputs follow one another.

    Args:
        folder: where results are shared with the sweep's other workers, which check against the same ones; None for
            nowhere.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._key: tuple[object, ...] | None = None
        self._expected: Expected | None = None

    def clear(self) -> None:
        """Give the memory back."""
        self._key = self._expected = None

    def get(
        self,
        operation: Operation,
        case: Case,
        inputs: Mapping[str, Tensor],
        *,
        portable: bool,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Expected:
        """Return the expected values of the case.

        Args:
            portable: see :func:`checked_cases`.
        """
        # The low-precision form that sets the bounds depends on who is checked.
        key = (*problem_key(operation, case), portable, _is_portable(case), *sorted(options.items()))
        known = self._expected if self._key == key else None
        if known is not None and (known.grad_out is not None or not case.gradients):
            return known
        self.clear()
        dtype = DTYPES[case.dtype]
        # For half-precision inputs fp32 holds the reference exactly enough, at half the memory.
        kept = torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
        grad_out = partial(output_gradient, dtype=dtype) if case.gradients else None
        definition = _portable(operation) if portable else resolve(operation.recurrent)
        assert definition is not None, "checked_cases asks for the portable form only where there is one"
        form, formed_by = _low_precision_form(operation, case)
        if case.documents is not None:
            lengths = lengths_of(case.documents, case.seq_len or 0)
            definition, form = (partial(each_document, each, lengths) for each in (definition, form))

        problem = (*problem_key(operation, case), case.gradients, *sorted(options.items()))
        values = self._shared(
            (*problem, "float64", "portable" if portable else "recurrent"),
            lambda: evaluate(operation, partial(definition, **options), inputs, grad_out, exact=True),
        )
        low = self._shared(
            (*problem, formed_by), lambda: evaluate(operation, partial(form, **options), inputs, grad_out)
        )
        self._expected = Expected(
            values={name: value.to(kept) for name, value in values.items()},
            bounds={
                name: error_bound(relative_error(low[name], value), value, dtype) for name, value in values.items()
            },
            grad_out=grad_out(values["out"]) if grad_out is not None else None,
        )
        self._key = key
        return self._expected

    def _shared(self, key: tuple[object, ...], compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what another worker stored in the folder under this key, or compute and store it."""
        if self.folder is None or not self.folder.is_dir():
            return compute()
        path = self.folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.pt"
        if path.exists():
            return torch.load(path, weights_only=True)
        values = compute()
        if sum(value.nbytes for value in values.values()) <= _MAX_SHARED_BYTES and values["out"].device.type == "cpu":
            unfinished = path.with_suffix(f".{os.getpid()}")
            torch.save(values, unfinished)
            unfinished.replace(path)
        return values


def output_gradient(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw an output's gradient: always the same for the same shape and device, rounded to the dtype."""
    generator = torch.Generator(device=out.device).manual_seed(SEED + 1)
    return torch.randn(out.shape, generator=generator, device=out.device).to(dtype)


def expect_step(operation: Operation, case: Case, inputs: Mapping[str, Tensor], state: Any) -> Expected:
    """Return what one decoding step from ``state`` must give; the bound is the error of the definition in fp32."""
    definition = resolve(operation.recurrent)
    exact = [x.double() if x.is_floating_point() else x for x in inputs.values()]
    # A cache may fill the memory: its definition widens it piece by piece.
    widened = state if operation.cache else tree_map(torch.Tensor.double, state)
    with torch.no_grad():
        value = definition(*exact, initial_state=widened)
        low = definition(*inputs.values(), initial_state=state)
    bound = error_bound(relative_error(low, value), value, DTYPES[case.dtype])
    return Expected(values={"out": value}, bounds={"out": bound}, grad_out=None)


def error_bound(form_error: float, reference: Tensor, dtype: torch.dtype) -> float:
    """Return the largest relative error that passes, given that of a plain form in the same dtype."""
    eps = torch.finfo(dtype).eps
    if dtype in (torch.bfloat16, torch.float16):
        return 2 * form_error + eps
    rms = float(torch.linalg.vector_norm(reference.double())) / max(reference.numel(), 1) ** 0.5
    crest = float(reference.abs().max()) / rms if rms > 0 else 1.0
    return 2 * form_error + eps * max(crest, 16)


def checked_cases(operation: Operation, case: Case, device: str) -> list[tuple[Case, bool]]:
    """Return the shapes at which a case can be checked, and for each whether the portable form is its reference there.

    The first is the one to take; if its reference does not fit in memory, the next. Where the recurrence is out of
    reach, all but the portable form itself are held against the portable form in float64, at the case's shape or with
    half of its batch, again and again. What remains is the recurrence at a shape that it can afford.
    """
    if _recurrence_affordable(case, device):
        shapes = [(case, False)]
    elif _portable(operation) is not None and not _is_portable(case):
        batches = [(case.batch or 1) >> halvings for halvings in range((case.batch or 1).bit_length())]
        shapes = [(replace(case, batch=batch), True) for batch in batches]
    else:
        shapes = []
    return [*shapes, (_small(case, device), False)]


def _small(case: Case, device: str) -> Case:
    """Return the case at a shape at which the recurrence is affordable."""
    num_heads = min(case.num_heads, 2) if case.num_heads else None
    if num_heads and case.num_heads_qk:
        case = replace(case, num_heads_qk=max(1, num_heads * case.num_heads_qk // (case.num_heads or 1)))
    if case.seq_len is None:
        return replace(case, batch=1, num_heads=num_heads)
    documents = case.documents and str(min(count_documents(case.documents), _SMALL_DOCUMENTS))
    # Two chunks at least, so that the state passed between chunks is part of the check.
    seq_len = min(case.seq_len, max(_SMALL_SEQ_LEN, 2 * (case.chunk_size or 0)))
    while True:
        reduced = replace(case, batch=1, num_heads=num_heads, seq_len=seq_len, documents=documents)
        if seq_len <= _MIN_SEQ_LEN or _recurrence_affordable(reduced, device):
            return reduced
        seq_len //= 2


def describe_check(case: Case, checked: Case) -> str:
    """Return the ``checked`` column: the same shape, or the sizes that differ."""
    changed = [f"{name}={value}" for name, value in checked.sizes.items() if case.sizes.get(name) != value]
    return ", ".join(changed) or SAME_SHAPE


def compare(
    results: Mapping[str, Tensor], expected: Expected, state_dtype: str | None, *, provider: str = "lrbench"
) -> Verdict:
    """Compare outputs and gradients with what they must be, allowing outside packages a multiple of the bounds.

    Returns:
        The largest relative error and, where a tensor misses its bound, which one and by how much.
    """
    allowance = 2 * torch.finfo(DTYPES[state_dtype]).eps if state_dtype in ("bf16", "fp16") else 0.0
    worst, failures = 0.0, []
    for name, value in results.items():
        reference = expected.values[name]
        what = name.replace("out", "output", 1) if name.partition(" ")[0] == "out" else f"gradient of {name}"
        if value.shape != reference.shape:
            failures.append(f"{what} has shape {tuple(value.shape)}, expected {tuple(reference.shape)}")
            continue
        if not bool(torch.isfinite(value).all()):
            failures.append(f"{what} contains non-finite values")
            continue
        error = relative_error(value, reference)
        worst = max(worst, error)
        factor = 1 if provider == "lrbench" else LARGER_FACTORS.get((provider, name), PEER_FACTOR)
        bound = factor * (expected.bounds[name] + allowance)
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
            options = {"chunk_size": _FORM_CHUNK} if implementation.chunked else {}
            return partial(operation.function(implementation), **options)
    return None


def _is_portable(case: Case) -> bool:
    """Return whether a case is the portable form's, with further options or without."""
    return case.impl.partition("+")[0] == "torch"


def _low_precision_form(operation: Operation, case: Case) -> tuple[Callable[..., Tensor], str]:
    """A torch form other than the one that is checked, to say what error the dtype itself makes, and its name."""
    sizes = case.sizes
    square = sizes.get("batch", 1) * sizes.get("num_heads", 1) * sizes.get("seq_len", 1) ** 2
    portable = _portable(operation)
    if operation.parallel and (portable is None or (_is_portable(case) and square <= _MAX_SQUARE)):
        return resolve(operation.parallel), "parallel"
    if portable is not None:
        return portable, "portable"
    return resolve(operation.recurrent), "recurrent"
