"""Calling a function again without repeating the host's work.

Before a kernel runs, the host checks arguments, chooses launches and allocates, and Triton looks up what it compiled.
For a small layer that takes longer than its kernels. All of it depends only on the arguments' *kinds*: everything about
them but tensors' values and addresses. So it is done once for each combination of kinds:

    request  what a call asks for once its arguments are checked, see :class:`.differentiable.Differentiable`. A public
             function remembers it (:func:`remembering`); later calls of the same kinds reuse it without any checks.
    pass     the forward or the backward pass of a request, a function of tensors.
    plan     a recorded pass: what it allocates and launches, and where every pointer comes from. Later passes of the
             same kinds follow the plan: they allocate, fill in addresses and launch.
    source   memory that pointers point into: a tensor that the pass was given, one that it has allocated, or memory
             that exchange.py hands out anew for each call.
    block    one allocation of a plan that holds several of the pass's tensors, its parts.

Of calls of the same kinds the first runs as it is, the second is recorded, and later ones follow the plan (backward
passes from the fourth call on). A pass always runs as it is under torch.compile, on a GPU that is not the current one,
and while a profiler watches; if its call makes several requests, or one of tensors that are not the call's arguments;
and if torch computes in it, or it takes much temporary memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial, wraps
from math import prod
from operator import add, itemgetter
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from ..spec import matches_version
from .sizes import REMEMBERED, cdiv

Kernel = TypeVar("Kernel")
P = ParamSpec("P")
R = TypeVar("R")
Passed = tuple[tuple[Any, ...], Sequence[Any]]
"""What a pass returns: its results, and what a forward pass keeps for the backward pass. Both are tensors or None."""

ALIGNMENT = 16
"""Triton compiles a kernel once for pointers that are multiples of this many bytes, and once for any."""

PART_BYTES = 512
"""Parts of a block take multiples of this many bytes, as torch's own allocations do."""

MAX_SCRATCH_BYTES = 128 * 2**20
"""A pass with more temporary memory gets no plan. A plan allocates all of it at once, while the pass itself may free
some before it needs more, so a plan can raise the peak by this much. A pass that needs more takes the GPU about a
millisecond, longer than it takes the host, so a plan would not help."""

SMALL_BYTES = 2**16
"""Temporary memory of at most this size shares a block with what is kept for the backward pass."""

MAX_PLANS = 32
"""Most plans of one request: backward passes differ in which gradients come in and which are asked for."""

HAS_LAUNCH = matches_version(triton.__version__, ">=3.6,<3.9") and torch.version.hip is None
"""Whether a compiled kernel's launcher has the function ``launch`` that plans call; without it there are no plans."""

ONE_LAUNCHER = not matches_version(triton.__version__, "<3.7")
"""Whether all kernels share one launcher (Triton 3.7 and later), which takes arguments as a tuple, and their types."""

ALLOCATIONS = [
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
]

STREAM, NUMBERS, ADDRESSES, CONSTANTS, TUPLES = range(5)
"""Where a launch's argument comes from. A plan makes one list of all values, in this order."""

_local = threading.local()
_lock = threading.Lock()
_address = Tensor.data_ptr


class Call(Protocol):
    """A request that can be run again on other tensors of the same kinds."""

    def __call__(self, *tensors: Tensor | None) -> tuple[Any, ...]: ...

    def planned(self, *, differentiated: bool) -> Call:
        """Return a copy that follows plans; ``differentiated``: whether there may be a backward pass."""


def remembering(function: Callable[P, R]) -> Callable[P, R]:
    """Return the public function with a memory of its calls, by the kinds of their arguments; see calls.py."""
    known: dict[Hashable, tuple[Call, Callable[[Any], Any], Any] | None] = {}

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        tensors: list[Any] = []
        kinds: list[Any] = [torch.is_grad_enabled(), len(args)]
        values = (*args, *keywords, *keywords.values())
        if is_watched() or not describe(values, kinds, tensors) or not on_current_device(tensors):
            return function(*args, **keywords)
        key = tuple(kinds)
        tensors.append(None)
        found: Any = known.get(key, False)
        if found:
            request, order, structure = found
            return cast(R, _rebuilt(structure, request(*order(tensors))))
        if found is None:
            return function(*args, **keywords)
        before, _local.calls = getattr(_local, "calls", None), []
        try:
            result = function(*args, **keywords)
            calls = _local.calls
        finally:
            _local.calls = before
        positions = {id(x): position for position, x in enumerate(tensors)}
        # If a tensor is given twice, there is no telling which of the two arguments the request was made of.
        if len(positions) == len(tensors):
            found = None
            if len(calls) == 1:
                request, given, outputs = calls[0]
                structure = _structure(result, {id(x): n for n, x in enumerate(outputs) if x is not None})
                if structure is not None and all(id(x) in positions for x in given):
                    differentiated = any(x is not None and x.requires_grad for x in outputs)
                    request = request.planned(differentiated=differentiated)
                    found = request, _pick([positions[id(x)] for x in given]), structure
            with _lock:
                known[key] = found
                if len(known) > REMEMBERED:
                    del known[next(iter(known))]
        return result

    return call


def record_call(request: Call, tensors: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Tell :func:`remembering`, if it is at work, that a call has run this request on these tensors."""
    if (calls := getattr(_local, "calls", None)) is not None:
        calls.append((request, tensors, outputs))


def describe(values: Iterable[Any], kinds: list[Any], tensors: list[Any]) -> bool:
    """Append the arguments' kinds to ``kinds`` and the tensors among them to ``tensors``; return False if the kinds
    cannot be told: an argument is not hashable, or of a subclass of Tensor, tuple or list."""
    for x in values:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            tensors.append(x)
            kinds += (
                x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device(), x.requires_grad,
                x.data_ptr() % ALIGNMENT == 0,
            )  # fmt: skip
        elif kind is tuple or kind is list:
            kinds += (kind, len(x))
            if not describe(x, kinds, tensors):
                return False
        elif isinstance(x, Tensor | tuple | list) or kind.__hash__ is None:
            return False
        else:
            kinds += (kind, x)
    return True


def is_watched() -> bool:
    """Return whether a profiler, or a mode or transform of torch, must see what a pass does: no plan may run then."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def on_current_device(tensors: Sequence[Any]) -> bool:
    """Return whether the first tensor, if any, is on the current GPU; the caller knows that all are on one device."""
    device = tensors[0].get_device() if tensors else -1
    return bool(device >= 0 and device == torch.cuda.current_device())


def run_planned(
    plans: dict[Hashable, Plan | None], key: Hashable, tensors: Sequence[Any], run: Callable[[], Passed], *, keep: bool
) -> tuple[tuple[Any, ...], Sequence[Any], Plan | None]:
    """Run a pass by its plan if there is one, else as it is; the first time, record it.

    Args:
        plans: key -> plan, for the passes of one request; None for a pass that cannot have one.
        key: which pass, and the kinds of its tensors.
        tensors: what the pass is given; the first is not None.
        run: the pass itself.
        keep: whether the caller wants what the pass keeps for the backward pass.

    Returns:
        The results, what is kept, and the plan that was followed, whose one block holds all that is kept, or None.
    """
    plan = plans.get(key)
    if plan is not None and not any(plan.hooks):
        return *plan(tensors), plan
    if not HAS_LAUNCH or key in plans or len(plans) >= MAX_PLANS:
        return *run(), None
    # If tensors overlap, there is no telling into which of them a pointer points.
    given = sorted(_source(GIVEN, x) for x in tensors if x is not None)
    if any(x.start + x.num_bytes > y.start for x, y in itertools.pairwise(given)):
        return *run(), None
    with _Recorder(tensors) as recorder:
        results, kept = run()
    plans[key] = recorder.plan(results, kept if keep else ())
    return results, kept, None


def remember_launches(kernel: Kernel) -> Kernel:
    """Let plans record the launches ``kernel[grid](...)`` of a function decorated with ``triton.jit`` or ``gluon.jit``.

    Run-time arguments must be given by position, constexprs and options by keyword, and the grid as a tuple, or else
    the pass gets no plan. In the interpreter the kernel stays as it is.
    """
    if not isinstance(kernel, triton.JITFunction):
        return kernel
    launch = kernel.run

    def run(*args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        recorder = getattr(_local, "recorder", None)
        if recorder is None or warmup:
            return launch(*args, grid=grid, warmup=warmup, **keywords)
        plain = [int(x) if type(x) is _Number else x for x in args]
        compiled = launch(*plain, grid=grid, warmup=False, **keywords)
        recorder.record_launch(kernel, compiled, args, grid, keywords)
        return compiled

    kernel.run = run
    return kernel


def different_each_call(function: Callable[P, R]) -> Callable[P, R]:
    """Let plans record a function that hands out other memory in each call: following a plan calls it again.

    It takes (x, ...), x one of the pass's tensors, and returns tensors, numbers, and functions to call after launching.
    """

    @wraps(function)
    def ask(*args: P.args, **keywords: P.kwargs) -> R:
        recorder = getattr(_local, "recorder", None)
        if recorder is None:
            return function(*args, **keywords)
        return cast(R, recorder.record_exchange(partial(function, **keywords), *args))

    return ask


class Plan:
    """A recorded pass, in which addresses, the stream and what exchange.py hands out are filled in for each call.

    Calling it with the pass's tensors returns the results, and a list of the one block of all that is kept, if any.
    """

    def __init__(self, recorder: _Recorder, results: Sequence[_Part | None], kept: Sequence[_Part | None]) -> None:
        self.device, self.exchanges, self.hooks = recorder.device, recorder.exchanges, recorder.hooks
        sources = recorder.sources
        used = {source for source, _ in recorder.addresses}
        begins = self._place(sources, used, results, kept)
        given = [n for n in used if sources[n].kind == GIVEN]
        self.given = _pick(given)
        exchanged = [n for n, source in enumerate(sources) if source.kind == EXCHANGED]
        begins |= {n: (at, 0) for at, n in enumerate((*given, *exchanged), len(self.memory))}
        self.bases = _pick([begins[source][0] for source, _ in recorder.addresses])
        self.offsets = [begins[source][1] + offset for source, offset in recorder.addresses]
        self.constants = recorder.constants
        # Values are listed kind after kind: the stream, numbers, addresses, constants and tuples.
        counts = (1, recorder.num_numbers, len(recorder.addresses), len(self.constants))
        first = [sum(counts[:kind]) for kind in range(len(counts) + 1)]

        def places(entries: Sequence[_Entry]) -> Callable[[Any], Any]:
            return _pick([first[kind] + index for kind, index in entries])

        self.tuples = [places(entries) for entries in recorder.tuples]
        self.launches = [(launch, places(entries)) for launch, entries in recorder.launches]

    def _place(
        self, sources: Sequence[_Source], used: set[int], results: Sequence[_Part | None], kept: Sequence[_Part | None]
    ) -> dict[int, tuple[int, int]]:
        """Decide what to allocate; return source -> (number of its allocation, byte at which it begins there).

        Each result is an allocation of its own, since a caller may keep only one of them. All that is kept is one
        block, and all that is temporary another, or part of the same block if it is small.
        """
        returned = [x for x in results if x is not None]
        saved = [x.source for x in kept if x is not None]
        # Shapes are tuples, and strides are given: torch parses these faster than torch.Size and missing strides.
        self.memory = [(tuple(x.shape), x.stride, x.dtype) for x in returned]
        begins = {x.source: (at, 0) for at, x in enumerate(returned)}
        rest = [n for n in used if sources[n].kind == ALLOCATED and n not in begins and n not in saved]
        sizes = {n: cdiv(sources[n].num_bytes, PART_BYTES) * PART_BYTES for n in (*saved, *rest)}
        self.scratch_bytes = sum(sizes[n] for n in rest)
        for block in [[*saved, *rest]] if self.scratch_bytes <= SMALL_BYTES else [saved, rest]:
            for index, n in enumerate(block):
                begins[n] = len(self.memory), sum(sizes[m] for m in block[:index])
            if block:
                self.memory.append(((sum(sizes[n] for n in block),), (1,), torch.uint8))
        self.kept = slice(len(returned), len(returned) + (len(saved) > 0))
        self.parts = [None if x is None else (begins[x.source][1], x.shape, x.dtype) for x in kept]
        self.results = _pick([-1 if x is None else begins[x.source][0] for x in results])
        return begins

    def __call__(self, tensors: Sequence[Any]) -> Passed:
        device = self.device
        memory: list[Any] = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in self.memory
        ]
        bases = [*map(_address, memory), *map(_address, self.given(tensors))]
        values = [driver.active.get_current_stream(device.index)]
        exchanged = [x for ask, which, args in self.exchanges for x in ask(tensors[which], *args)]
        for x in exchanged:
            if isinstance(x, Tensor):
                bases.append(_address(x))
            elif isinstance(x, int):
                values.append(x)
        values += map(add, self.bases(bases), self.offsets)
        values += self.constants
        for members in self.tuples:
            values.append(members(values))
        for launch, arguments in self.launches:
            launch(*arguments(values))
        for x in exchanged:
            if callable(x):
                x()
        kept = memory[self.kept]
        memory.append(None)
        return self.results(memory), kept

    def unpack(self, kept: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the tensors that the pass itself keeps, as views of the plan's block."""
        return [None if part is None else _view(kept[0], *part) for part in self.parts]


GIVEN, ALLOCATED, EXCHANGED = range(3)
"""Kinds of sources: a tensor given to the pass, one allocated by it, or one handed out for this call."""

_Entry = tuple[int, int]


class _Source(NamedTuple):
    """Memory that pointers point into."""

    kind: int
    start: int
    num_bytes: int


class _Part(NamedTuple):
    """A result or a tensor that is kept: the whole of a source that the pass has allocated."""

    source: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Number(int):
    """A number that is different in each call; ``index``: its place among the pass's numbers."""

    index: int


class _Recorder(TorchDispatchMode):
    """Records what a pass allocates and launches, and finds out where each pointer comes from.

    A pass that does more than allocate uninitialised memory, take views of it and launch (``fits``) gets no plan.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        self.device = tensors[0].device
        self.fits = True
        self.paused = False
        self.sources = [_Source(GIVEN, 0, 0) if x is None else _source(GIVEN, x) for x in tensors]
        self.addresses: dict[tuple[int, int], int] = {}
        self.constants: list[Any] = []
        self.tuples: list[list[_Entry]] = []
        self.launches: list[tuple[Callable[..., None], list[_Entry]]] = []
        self.exchanges: list[tuple[Callable[..., Any], int, tuple[Any, ...]]] = []
        self.hooks: list[Any] = []
        self.num_numbers = 0

    def __enter__(self) -> Any:
        _local.recorder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _local.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            if func.overloadpacket in ALLOCATIONS and result.device == self.device:
                self.sources.append(_source(ALLOCATED, result))
            else:
                aliases = [x.alias_info for x in func._schema.returns]
                self.fits &= all(alias is not None and not alias.is_write for alias in aliases)
        return result

    def plan(self, results: Sequence[Any], kept: Sequence[Any]) -> Plan | None:
        """Return the plan, or None if the pass does not fit one or takes too much temporary memory."""
        parts = [None if x is None else self._part(x) for x in (*results, *kept)]
        found = [x.source for x in parts if x is not None]
        if not self.fits or not self.launches or len(set(found)) < len(found):
            return None
        plan = Plan(self, parts[: len(results)], parts[len(results) :])
        return plan if plan.scratch_bytes <= MAX_SCRATCH_BYTES else None

    def record_launch(
        self, kernel: Any, compiled: Any, args: Sequence[Any], grid: Any, keywords: dict[str, Any]
    ) -> None:
        """Add a launch to the plan."""
        others = kernel.params[len(args) :]
        launcher = compiled.run
        if type(grid) is not tuple or kernel.pre_run_hooks or not all(x.is_constexpr for x in others):
            self.fits = False
            return
        x, y, z = (*grid, 1, 1)[:3]
        constants = [self._constant(keywords.get(x.name, x.default)) for x in others]
        nothing = self._constant(None)
        self.fits &= not launcher.profile_scratch_size
        size, memory = x * y * z * launcher.num_ctas * launcher.global_scratch_size, nothing
        if size:
            # Triton's own scratch memory. No tensor has a negative address, so no pointer will be found in it.
            self.sources.append(_Source(ALLOCATED, -size, size))
            memory = self._at(len(self.sources) - 1, 0)
        flags = map(self._constant, (launcher.launch_cooperative_grid, launcher.launch_pdl))
        begin = [*map(self._constant, (x, y, z)), (STREAM, 0), self._constant(compiled.function), *flags]
        scratch, about = [memory, nothing], [self._constant(compiled.packed_metadata), nothing, nothing, nothing]
        given = [*map(self._entry, args), *constants]
        if ONE_LAUNCHER:
            kinds = map(self._constant, (launcher.arg_annotations, launcher.kernel_signature))
            entries = [*begin, *about, *scratch, *kinds, self._tuple(given)]
        else:
            entries = [*begin, *scratch, *about, *given]
        self.launches.append((launcher.launch, entries))
        self.hooks.append(kernel.pre_run_hooks)

    def record_exchange(self, function: Callable[..., Any], x: Tensor, *args: Any) -> tuple[Any, ...]:
        """Return what exchange.py's function hands out for this call, and add the function to the plan."""
        self.paused = True
        try:
            found = function(x, *args)
        finally:
            self.paused = False
        which = self._find(x)
        if which is None or self.sources[which].kind != GIVEN:
            self.fits = False
            return found
        self.exchanges.append((function, which, args))
        results = []
        for value in found:
            if isinstance(value, Tensor):
                self.sources.append(_source(EXCHANGED, value))
            elif isinstance(value, int):
                value = _Number(value)
                value.index = self.num_numbers
                self.num_numbers += 1
            results.append(value)
        return tuple(results)

    def _entry(self, value: Any) -> _Entry:
        """Return where the plan finds an argument: STREAM, NUMBERS, ... and its index among the values of that kind."""
        if isinstance(value, Tensor):
            source = self._find(value)
            if source is not None:
                return self._at(source, value.data_ptr() - self.sources[source].start)
        elif isinstance(value, _Number):
            return NUMBERS, value.index
        elif value is None or type(value) in (bool, int, float):
            return self._constant(value)
        elif hasattr(value, "_fields"):
            return self._tuple([*map(self._entry, value)])
        self.fits = False
        return STREAM, 0

    def _tuple(self, members: list[_Entry]) -> _Entry:
        self.tuples.append(members)
        return TUPLES, len(self.tuples) - 1

    def _constant(self, value: Any) -> _Entry:
        self.constants.append(value)
        return CONSTANTS, len(self.constants) - 1

    def _at(self, source: int, offset: int) -> _Entry:
        return ADDRESSES, self.addresses.setdefault((source, offset), len(self.addresses))

    def _find(self, x: Tensor) -> int | None:
        """Return the source into which a tensor points: the latest, since memory may be freed and allocated again."""
        address = x.data_ptr()
        found = (n for n, (_, start, size) in enumerate(self.sources) if start <= address < start + size)
        return max(found, default=None)

    def _part(self, x: Tensor) -> _Part:
        """Return a tensor as a part; the pass fits a plan only if it is a whole allocation of the pass."""
        source = self._find(x)
        if source is None or self.sources[source] != _source(ALLOCATED, x) or not x.is_contiguous():
            self.fits = False
        return _Part(source or 0, x.shape, x.stride(), x.dtype)


def _source(kind: int, x: Tensor) -> _Source:
    """Return the memory from a tensor's first element to its last."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return _Source(kind, x.data_ptr(), elements * x.element_size() if x.numel() else 0)


def _view(block: Tensor, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return block[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _pick(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values at these places of a sequence as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


def _structure(result: Any, outputs: dict[int, int]) -> Any:
    """Return a result with each output replaced by its index, or None if the result holds anything but outputs.

    Args:
        outputs: id of an output -> its index.
    """
    if isinstance(result, tuple):
        parts = [_structure(x, outputs) for x in result]
        return None if None in parts else tuple(parts)
    return outputs.get(id(result))


def _rebuilt(structure: Any, outputs: Sequence[Any]) -> Any:
    """Undo :func:`_structure`: put outputs in the place of their indices."""
    if isinstance(structure, tuple):
        return tuple(_rebuilt(part, outputs) for part in structure)
    return outputs[structure]
