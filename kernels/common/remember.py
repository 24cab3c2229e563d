"""Calling a function again without repeating what its arguments' kinds alone decide.

An argument's *kind* is all about it but a tensor's values and address. Two things follow from kinds:

    request  what a call asks for once its arguments are checked, see :class:`.differentiable.Differentiable`. A public
             function remembers it (:func:`remembering`); later calls of the same kinds make it without any checks.
    pass     the forward or the backward pass of a request. The n-th launch of a pass takes what Triton compiled for the
             n-th launch of an earlier one (:func:`run_pass`), for Triton takes longer to examine the arguments of a
             launch, in order to look that up, than to launch it. This holds only if all tensors are aligned alike:
             those that a pass is given and those that it allocates begin at multiples of ALIGNMENT bytes.

A pass runs in full each time, so graphs, profilers, hooks and modes see what they see of any other code. But Triton's
knobs ``runtime.debug`` and ``compilation.instrumentation_mode`` are as they were at a pass's first launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import triton
from torch import Tensor
from torch.nn import Parameter

from .arguments import is_interpreted, refuse_transforms
from .sizes import REMEMBERED

P = ParamSpec("P")
R = TypeVar("R")

ALIGNMENT = 16
"""Triton compiles a kernel once for pointers that are multiples of this many bytes, and once for any."""

_local = threading.local()


class _Remembered(NamedTuple):
    """What calls of the same kinds do: run a request on the tensors that ``order`` lists, and return its outputs in the
    form of ``structure``: nested tuples of their indices."""

    run: Callable[..., Sequence[Any]]
    order: list[int]
    structure: Any


def remembering(function: Callable[P, R]) -> Callable[P, R]:
    """Return the public function with a memory of its calls; see calls.py."""
    known: dict[Hashable, _Remembered] = {}

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        tensors: list[Any] = []
        kinds: list[Any] = [torch.is_grad_enabled(), len(args)]
        if not _describe((*args, *keywords, *keywords.values()), kinds, tensors):
            return function(*args, **keywords)
        key = tuple(kinds)
        tensors.append(None)
        if found := known.get(key):
            refuse_transforms(function.__name__)
            outputs = found.run(*[tensors[n] for n in found.order])
            return cast(R, _rebuilt(found.structure, outputs))
        before, _local.calls = getattr(_local, "calls", None), []
        try:
            result = function(*args, **keywords)
            found = _remembered(_local.calls, tensors, result)
        finally:
            _local.calls = before
        if found:
            known[key] = found
            while len(known) > REMEMBERED:
                known.pop(next(iter(known)), None)
        return result

    return call


def record_call(run: Callable[..., Sequence[Any]], tensors: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Tell :func:`remembering`, if it is at work, that a call has run a request on these tensors."""
    if (calls := getattr(_local, "calls", None)) is not None:
        calls.append((run, tensors, outputs))


def _remembered(calls: Sequence[Any], tensors: Sequence[Any], result: Any) -> _Remembered | None:
    """Return what to repeat of a call, or None if it did not make one request, of its arguments' tensors on a GPU, and
    return nothing but its outputs."""
    positions = {id(x): position for position, x in enumerate(tensors)}
    # If a tensor is given twice, there is no telling which of the two arguments the request was made of.
    if len(calls) != 1 or len(positions) < len(tensors) or not (tensors[0].is_cuda or is_interpreted()):
        return None
    run, given, outputs = calls[0]
    structure = _structure(result, {id(x): n for n, x in enumerate(outputs) if x is not None})
    if structure is None or not all(id(x) in positions for x in given):
        return None
    return _Remembered(run, [positions[id(x)] for x in given], structure)


def _describe(values: Iterable[Any], kinds: list[Any], tensors: list[Any]) -> bool:
    """Append the arguments' kinds and the tensors among them; return False if the kinds cannot be told: an argument is
    not hashable, or of a subclass of Tensor, tuple or list."""
    for x in values:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            tensors.append(x)
            kinds += (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device(), x.requires_grad)
        elif kind is tuple or kind is list:
            kinds += (kind, len(x))
            if not _describe(x, kinds, tensors):
                return False
        elif isinstance(x, Tensor | tuple | list) or kind.__hash__ is None:
            return False
        else:
            kinds += (kind, x)
    return True


class _Launch(NamedTuple):
    """A launch: its constexprs and options by name, its constexprs in order, and what Triton compiled for it."""

    function: Any
    keywords: dict[str, Any]
    constexprs: tuple[Any, ...]
    compiled: Any


class _Pass:
    """A pass that runs in this thread; ``known``: the launches of an earlier one, as long as this one has the same."""

    def __init__(self, known: Sequence[_Launch | None]) -> None:
        self.known = known
        self.launches: list[_Launch | None] = []
        self.counts = True

    def launch(self, function: Any, grid: tuple[int, ...], /, *args: Any, **keywords: Any) -> None:
        """Launch a jit function by what was compiled for it, or else as Triton does."""
        n = len(self.launches)
        found = self.known[n] if n < len(self.known) else None
        if found and found.function is function and found.keywords == keywords and not function.pre_run_hooks:
            self.launches.append(found)
            found.compiled[(*grid, 1, 1)[:3]](*args, *found.constexprs)
            return
        self.known = ()
        compiled = function[grid](*args, **keywords)
        others = function.params[len(args) :]
        fits = type(grid) is tuple and all(x.is_constexpr for x in others) and hasattr(compiled, "__getitem__")
        constexprs = tuple(keywords.get(x.name, x.default) for x in others)
        self.launches.append(_Launch(function, keywords, constexprs, compiled) if fits else None)


def run_pass(memory: dict[Hashable, Sequence[Any]], key: Hashable, run: Callable[[], R]) -> R:
    """Run a pass with what was compiled for an earlier one of this ``key``: which pass it is, and kinds of its tensors.

    ``memory``: key -> launches, for the passes of one request.
    """
    before = getattr(_local, "launching", None)
    _local.launching = now = _Pass(memory.get(key, ()))
    try:
        result = run()
    finally:
        _local.launching = before
    if now.counts and len(now.launches) != len(now.known):
        memory[key] = now.launches
    return result


def launch_anew() -> None:
    """Have the pass that runs in this thread launch as Triton does, and remember none of its launches: its arguments'
    kinds do not say how its tensors are laid out."""
    if (now := getattr(_local, "launching", None)) is not None:
        now.known, now.counts = (), False


class RememberedKernel:
    """Launches ``kernel``, in the pass that runs in this thread if one does.

    Products and sums are fused: Triton did so unless told otherwise; 3.9 warns that 3.10 will not.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        now = getattr(_local, "launching", None)
        launch = self.kernel[grid] if now is None else partial(now.launch, self.kernel, grid)
        return partial(launch, enable_fp_fusion=True)


def remember_launches(kernel: R) -> R:
    """Let passes repeat the launches ``kernel[grid](...)`` of a function decorated with triton.jit or gluon.jit.

    Run-time arguments must be given by position, constexprs and options by keyword, and the grid as a tuple; other
    launches are Triton's own each time. In the interpreter the kernel stays as it is.
    """
    return cast(R, RememberedKernel(kernel)) if isinstance(kernel, triton.JITFunction) else kernel


def _structure(result: Any, outputs: dict[int, int]) -> Any:
    """Return a result with its outputs replaced by their indices, or None if it holds anything else; outputs: by id."""
    if isinstance(result, tuple):
        parts = [_structure(x, outputs) for x in result]
        return None if None in parts else tuple(parts)
    return outputs.get(id(result))


def _rebuilt(structure: Any, outputs: Sequence[Any]) -> Any:
    """Undo :func:`_structure`: put outputs in the place of their indices."""
    if isinstance(structure, tuple):
        return tuple(_rebuilt(part, outputs) for part in structure)
    return outputs[structure]
