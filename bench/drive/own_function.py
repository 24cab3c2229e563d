"""A user's function: found by name, called once to see what it does, timed (:mod:`.own_case`), on the roofline.

FLOPs are what torch's FlopCounterMode counts. Bytes are those of tensors, each once: read are the arguments, and what
was there before the call and an operator takes, of :data:`GATHERS` as much as they return, and nothing of what is only
overwritten; written are what is returned, gradients left in ``.grad``, and what was there before and an operator
changes. What a call makes and drops counts nothing. Other tensors that only kernels which are no operators of torch
take or change are not seen.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import math
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...analysis.accelerators.accelerator import Accelerator
from ...analysis.accelerators.known import match_device
from ...analysis.counts.operators import DTYPES, WITHOUT_PRODUCTS
from ..environment import worker_settings
from ..worker.clock import CI_TARGET, Call, CpuClock, CudaClock, Sampling, Timing, measure
from ..worker.protocol import CaseFailure
from . import ncu
from .profiling import LOG, REPLIES, run_prepared

if TYPE_CHECKING:
    from torch import Tensor

    from ...analysis.figures.layout import Drawing

BUDGET_S = 2.0
INPUTS = "get_inputs"
GATHERS = ("embedding", "gather", "index", "index_select", "take")
"""Operators of torch that read of their first argument as many bytes as they return."""
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_")
"""Operators that only write their first argument, as all do what they take as ``out``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFunction:
    """A user's function with its arguments; calling it raises CaseFailure where the function raises."""

    target: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for an argument with a tensor that is not dense."""
        named = {f"argument {n}": x for n, x in enumerate(self.arguments, 1)} | {**self.keywords}
        for name, value in named.items():
            for x in tensors(value):
                if layout := _no_layout(x):
                    raise ValueError(f"{name} of {self.target} must be dense, got a {layout} tensor")

    def __call__(self) -> Any:
        try:
            return self.function(*self.arguments, **self.keywords)
        except CaseFailure:
            raise
        except (Exception, SystemExit) as error:
            from ..worker.worker import classify

            status, reason = classify(error)
            raise CaseFailure(status, f"{self.target} raised in {_place_of(error)}: {reason}") from error

    def bound(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> OwnFunction:
        """Return the function with these arguments, keywords by position where it takes them so.

        Raises:
            ValueError: it does not take them.
        """
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # of some functions written in C
            return dataclasses.replace(self, arguments=tuple(arguments), keywords=keywords)
        try:
            taken = signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise ValueError(f"{self.target} takes {signature}: {error}") from error
        return dataclasses.replace(self, arguments=taken.args, keywords=taken.kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a call does; ``products``: whether matrix products are counted; dtype and device of its largest tensor;
    ``inputs``: the tensors that were there before it."""

    flops: float
    bytes: float
    products: bool
    dtype: str
    device: str
    inputs: tuple[Tensor, ...] = ()


def find(target: str) -> OwnFunction:
    """Return the function ``my_module:function``, also from the current folder, without arguments.

    Raises:
        ValueError: there is no such module or function, or importing it raises.
    """
    name, _, function_name = target.partition(":")
    if name.endswith(".py"):
        meant = ".".join(Path(name).with_suffix("").parts)
        raise ValueError(f"a function is in a module, not in a file, got {target!r}; type {meant}:{function_name}")
    if not (name and function_name.isidentifier()):
        raise ValueError(f"a function must be named my_module:function, got {target!r}")
    # Last, so that a module here does not hide one that is installed.
    sys.path += [os.getcwd()] if os.getcwd() not in sys.path else []
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"module {name} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        there = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(function_name, there) or there[:3]
        has = f"; type {' or '.join(f'{name}:{each}' for each in near)}" if near else ", nor any other"
        raise ValueError(f"module {name} has no function {function_name}{has}")
    return OwnFunction(target=target, function=function)


def load(target: str) -> OwnFunction:
    """Return :func:`find` of a function with its arguments, if it takes any: those that ``get_inputs()`` of its module
    returns in a list; ValueError also where they are missing."""
    own, name = find(target), target.partition(":")[0]
    places = [
        p for p in inspect.signature(own.function).parameters.values() if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
    ]
    make = getattr(sys.modules[name], INPUTS, None) if places else None
    if not callable(make) and not any(p.default is p.empty and p.kind != p.VAR_POSITIONAL for p in places):
        return own
    arguments = OwnFunction(target=f"{name}:{INPUTS}", function=make)() if callable(make) else None
    if not isinstance(arguments, (list, tuple)):
        raise ValueError(
            f"{target} takes arguments: module {name} must have {INPUTS}(), which returns a list of them; "
            "`lrbench time` also takes them as --arg"
        )
    return dataclasses.replace(own, arguments=tuple(arguments))


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a nest of tuples, lists and mappings."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def observe(function: OwnFunction) -> Observed:
    """Call a function once and return what it does; ValueError if it raises or has no tensors."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    before: dict[int, Tensor] = {}
    read: list[Tensor] = []
    written: list[Tensor] = []
    made: set[int] = set()
    gathered: list[tuple[Tensor, int]] = []
    partly: set[int] = set()

    class Traffic(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
            result = func(*args, **kwargs)
            given = [x for x in tensors((args, kwargs)) if _place(x) not in made]
            # The first is no view, so it has the gradient.
            before.update((_place(x), x) for x in given if _place(x) not in before)
            if not func.is_view:
                outs = [x.name for x in func._schema.arguments if x.kwarg_only and x.is_out]
                first = tensors(args[:1]) if name in (*GATHERS, *OVERWRITES) else []
                targets = [*map(id, (*first, *tensors([kwargs.get(x) for x in outs])))]
                read.extend(x for x in given if id(x) not in targets)
                partly.update(_place(x) for x in given if id(x) in targets)
                gathered.extend((x, result.nbytes) for x in first if name in GATHERS and _place(x) not in made)
                written.extend(x for x in tensors(result) if _place(x) in before)
                made.update(_place(x) for x in tensors(result) if _place(x) not in before)
            return result

    arguments = tensors((function.arguments, function.keywords))
    before |= {_place(x): x for x in arguments}
    counter = FlopCounterMode(display=False)
    # Its tracker of modules refuses gradients of their parameters by torch.autograd.grad; what all do is counted alike.
    no_modules = SimpleNamespace(parents={"Global"}, __enter__=lambda: None, __exit__=lambda *_: None)
    counter.mod_tracker = no_modules  # type: ignore[assignment]
    # Without it torch runs a compiled function uncompiled for good, once it was called in a mode.
    with torch.compiler.set_stance("force_eager"), counter, Traffic():
        results = function()
    partly -= {_place(x) for x in read}
    read += [x for x in arguments if _place(x) not in partly]
    gradients = [x.grad for x in before.values() if x.is_leaf]
    written += [x for x in tensors((results, gradients)) if _place(x) not in before]
    if not (seen := [x for x in (*read, *written, *(table for table, _ in gathered)) if x.nbytes]):
        raise ValueError(f"{function.target} must read or return tensors, got none")
    largest = max(seen, key=lambda x: x.nbytes)
    if largest.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{function.target} must have tensors on a CPU or a GPU of NVIDIA's, got {largest.device}")
    counted, vector = counter.get_flop_counts().get("Global", ()), tuple(f"lrbench.{x}" for x in WITHOUT_PRODUCTS)
    return Observed(
        flops=counter.get_total_flops(),
        bytes=_bytes(read, gathered) + _bytes(written),
        products=any(not str(op).startswith(vector) for op in counted),
        dtype=DTYPES.get(str(largest.dtype), "fp32"),
        device=largest.device.type,
        inputs=tuple(before.values()),
    )


def sample(function: OwnFunction, device: str, budget_s: float = BUDGET_S, rounds: int | None = None) -> Timing:
    """Time a function as the suite times kernels; CaseFailure if it raises."""
    sampling = Sampling(budget_s=budget_s, ci_target=CI_TARGET[device], rounds=rounds)
    clock = CudaClock() if device == "cuda" else CpuClock()
    (timing,) = measure(clock, [Call(call=lambda _: function())], sampling)
    if timing.failure is not None:
        raise timing.failure
    return timing


def count_on_device(target: str, seen: Observed, timeout_s: float = 900.0) -> Observed:
    """Return FLOPs of tensor cores and bytes of device memory, as Nsight Compute counts them, in place of those seen.

    Raises:
        ValueError: no GPU, or no ncu.
        RuntimeError: ncu failed.
    """
    program = ncu.find_ncu()
    if seen.device != "cuda" or program is None:
        raise ValueError(f"--counters needs a GPU and ncu (Nsight Compute), got {seen.device} and {program}")
    with tempfile.TemporaryDirectory(prefix="lrbench-profile-") as name:
        folder = Path(name)
        process = (sys.executable, "-m", __name__, target, os.getcwd(), str(folder / REPLIES))
        command = ncu.command(program, ncu.available_metrics(program), folder / LOG, process)
        _, kernels = run_prepared(folder, command, worker_settings({"LC_ALL": "C"}), timeout_s)
    flops, moved = ncu.total(kernels, *ncu.TENSOR_METRICS) or 0.0, ncu.total(kernels, ncu.DRAM_READ, ncu.DRAM_WRITE)
    return dataclasses.replace(seen, flops=flops, bytes=moved or 0.0, products=flops > 0)


def roofline_of(target: str, roofs_of: Callable[[str], Accelerator], *, counters: bool) -> tuple[Drawing | None, str]:
    """Return the roofline of a function, None where no FLOPs are counted, and a line that says its work and time.

    Args:
        roofs_of: key -> the accelerator with the roofs to hold it to.
        counters: whether FLOPs and bytes are those of :func:`count_on_device`.

    Errors as :func:`load`, :func:`observe`, :func:`count_on_device`; ValueError for a device or rate that is unknown.
    """
    import torch

    from ...analysis.figures.roofline import roofline_point

    function = load(target)
    seen = observe(function)
    on_gpu = seen.device == "cuda"
    key = match_device(name := torch.cuda.get_device_name()) if on_gpu else "cpu"
    if key is None:
        raise ValueError(f"the device must be an accelerator that lrbench knows (docs/accelerators.md), got {name}")
    seen = count_on_device(target, seen) if counters else seen
    roofs = roofs_of(key)
    peak = roofs.peak_flops(seen.dtype) if seen.products else roofs.vector_flops
    if peak is None:
        raise ValueError(f"{key} must have a rate of {seen.dtype} products, got none: run `lrbench calibrate`")
    bound_ms, by = max((seen.flops / peak * 1e3, "compute"), (seen.bytes / roofs.bandwidth_bytes_s * 1e3, "memory"))
    time_ms, intensity = sample(function, seen.device).columns()["time_ms"], seen.flops / seen.bytes
    line = (
        f"{target}: {seen.flops / 1e9:.4g} GFLOP, {seen.bytes / 1e9:.4g} GB, {intensity:.3g} FLOP/B, {time_ms:.4g} ms, "
        f"{bound_ms / time_ms:.1%} of the bound ({by}, {bound_ms:.3g} ms)"
    )
    if bound_ms > 1.1 * time_ms:
        line += "; more than the device is known to reach: `lrbench calibrate` measures its rates"
    if not seen.flops:
        return None, f"{line}; no FLOPs are counted: the bound is memory's alone, and there is no figure"
    return roofline_point(target, roofs, seen.dtype, intensity, seen.flops / time_ms / 1e9), line


def _place_of(error: BaseException) -> str:
    """Return the line of the user's code from which an exception came; where all is others' code, the last line."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = (str(Path(__file__).parents[1]), sys.prefix, os.path.dirname(os.__file__), "<")
    at = next((frame for frame in reversed(frames) if not frame.filename.startswith(theirs)), frames[-1])
    return f"{Path(at.filename).name}, line {at.lineno}"


def _no_layout(x: Tensor) -> str:
    """Return what a tensor is that has no storage of its elements: nested, sparse_coo, ...; or ""."""
    layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
    return "" if layout == "strided" else layout


def _place(x: Tensor) -> int:
    if layout := _no_layout(x):
        raise ValueError(f"tensors of a call must be dense to be counted, got a {layout} one")
    return x.untyped_storage()._cdata


def _bytes(tensors: Iterable[Tensor], parts_of: Iterable[tuple[Tensor, int]] = ()) -> int:
    """Return the bytes of tensors without their broadcast elements; parts of one storage have no more than it has.

    Args:
        parts_of: tensors, and how many bytes of them count.
    """
    parts: Counter[int] = Counter()
    whole: dict[int, int] = {}
    for x, number in parts_of:
        parts[_place(x)] += number
        whole[_place(x)] = x.untyped_storage().nbytes()
    for x in {(_place(x), x.storage_offset(), x.shape, x.stride()): x for x in tensors}.values():
        own = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
        parts[_place(x)] += own * x.element_size()
        whole[_place(x)] = x.untyped_storage().nbytes()
    return sum(min(part, whole[place]) for place, part in parts.items())


if __name__ == "__main__":
    import torch

    named, here, replies = sys.argv[1:]
    os.chdir(here)
    profiled = load(named)
    for _ in range(2):  # what compiles or tunes itself does so here
        profiled()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    profiled()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    Path(replies).write_text('{"outcomes": [{"status": "ok"}]}')
