"""One case of a user's own: ``lrbench time`` measures it in a worker, :func:`measure` in this process.

It has the clock, the memory pass and the rule of errors of the suite's cases, and a row among theirs: ``kernel`` and
``provider`` are ``own``, ``op`` is ``own`` with the arguments, such as ``own(bf16[8,8192,1024])``, and ``impl`` the
function, so that two functions are compared on the same arguments. FLOPs and bytes are those of :mod:`.own_function`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...analysis.accelerators.known import get_accelerator
from ...analysis.counts import Count
from ...analysis.counts.operators import DTYPES
from ...results.arguments import one_of, parse_size, parse_sizes
from ...results.documents import parse_documents, positions_of
from ...results.schema import OWN, Case, Environment, Record
from ...results.store import TIME_PREFIX, RunWriter
from ..environment import current_environment
from ..request import TimeOptions
from ..worker.protocol import CaseFailure, Reply, not_measured
from .derived import Run, common_columns, derived_columns
from .executors import hold_gpus
from .own_function import BUDGET_S, Observed, OwnFunction, find, load, observe, sample, tensors
from .run import file_name
from .session import check_folder
from .workers import ReplaceableWorker

if TYPE_CHECKING:
    from torch import Tensor

MODES = ("fw", "fwbw")
FORM = "[NAME=]DTYPE[SIZES], such as x=bf16[8,8192,1024], a number or a text"
"""What an argument is on the command line."""

FLOATS = {short: name.removeprefix("torch.") for name, short in DTYPES.items()}
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True, kw_only=True)
class OwnRow(Record):
    """A row of a user's case. It prints as a line."""

    def __str__(self) -> str:
        """Return the case and what was measured of it."""
        low, high = self.time_ci_low_ms, self.time_ci_high_ms
        forms: dict[str, Callable[[Any], str]] = {
            "reason": lambda x: f"{self.status}: {x}",
            "time_ms": lambda x: f"{x:.4g} ms ({low:.4g} to {high:.4g})",
            "peak_memory_bytes": lambda x: f"{_in_bytes(x)} of memory",
            "flops": lambda x: f"{x / 1e9:.4g} GFLOP",
            "bytes": lambda x: f"{_in_bytes(x)} moved",
            "roofline_fraction": lambda x: f"{x:.1%} of the roof",
            "rel_error": lambda x: f"error {x:.2g}",
            **{name: f"{name}: {{}}".format for name in ("noise", "throttled", "suspect")},
        }
        parts = [form(value) for name, form in forms.items() if (value := getattr(self, name)) is not None]
        return f"{self.impl} {self.op} {self.mode} on {self.device_name}: {', '.join(parts)}"

    def save(self, folder: str | Path = "results/local") -> Path:
        """Write the row as a result file of its own and return the file's path."""
        with RunWriter(Path(folder), file_name(TIME_PREFIX.rstrip("-"), self.run_id), 1) as writer:
            writer.append(self)
        return writer.path


def measure(
    function: Callable[..., Any],
    *arguments: Any,
    reference: Callable[..., Any] | None = None,
    mode: str = "fw",
    name: str | None = None,
    budget_s: float = BUDGET_S,
    rounds: int | None = None,
    **keywords: Any,
) -> OwnRow:
    """Measure a call of a function in this process as the suite measures its cases.

    Args:
        function: called with ``arguments`` and ``keywords``, on the device of its tensors, again and again; mode fw
            calls it as it stands, so that it may itself go backward.
        reference: takes the same arguments. Outputs, and in mode fwbw gradients, are compared with those that it gives
            in float64 where it takes that, else in the arguments' dtypes.
        mode: fw, or fwbw: also the gradients of floating-point arguments and of a module's parameters.
        name: the row's ``impl`` [the function's module and name].
        budget_s: seconds of timing after which sampling stops.
        rounds: samples, in place of as many as a narrow interval needs.

    Returns:
        the row; of status ``incorrect`` and without a time where the results are not the reference's.

    Raises:
        ValueError: arguments that the function does not take, nothing to differentiate or to measure.
        Whatever the function raises.
    """
    one_of("mode", mode, MODES)
    own = OwnFunction(target=name or _name_of(function), function=function).bound(arguments, keywords)
    peer = None if reference is None else dataclasses.replace(own, target=_name_of(reference), function=reference)
    try:
        reply: Reply = {"status": "ok", "reason": None, "columns": _measured(own, peer, mode, budget_s, rounds)}
    except CaseFailure as failure:
        if failure.__cause__ is not None:
            raise failure.__cause__ from None
        reply = not_measured(failure.status, failure.reason)
    device = next((x.device.type for x in tensors((own.arguments, own.keywords))), None)
    return _row(Run.start(current_environment(device)), own.target, _op_of(own), mode, _dtype_of(own), reply)


def time_function(function: str, arguments: Sequence[str], how: TimeOptions) -> tuple[OwnRow, Path]:
    """Measure a case in a worker, where a crash, too long a time or too little memory becomes the row's status.

    Args:
        function: ``module:function``.
        arguments: see :func:`draw`; none are those that :func:`.own_function.load` finds.

    Returns:
        the row, and its file.

    Raises:
        ValueError: no such function or device, or arguments that it does not take.
    """
    one_of("mode", how.mode, MODES)
    one_of("device", how.device or "cpu", ("cpu", "cuda"))
    _ = how.gpu and get_accelerator(how.gpu)
    check_folder(how.output)
    given: dict[str, Any] = {"target": function, "arguments": [*arguments], "folder": os.getcwd()}
    given |= {name: getattr(how, name) for name in ("mode", "reference", "seed")}
    environ = {"CUDA_VISIBLE_DEVICES": ""} if how.device == "cpu" else {}
    with hold_gpus(0 if how.device == "cpu" else 1), ReplaceableWorker(environ) as session:
        looked = session.outcome("bench.drive.own_case:look", how.timeout_s, **given)
        if looked["status"] != "ok":
            raise ValueError(looked["reason"])
        op, dtype, environment = looked["columns"].values()
        run = Run.start(Environment(**environment), how.gpu)
        if how.device not in (None, run.environment.device_kind):
            raise ValueError(f"device must be cpu or left out here, where torch finds no GPU, got {how.device}")
        sampling = {"budget_s": how.budget_s, "rounds": how.rounds}
        reply = session.outcome("bench.drive.own_case:measure_here", how.timeout_s, **given, **sampling)
    row = _row(run, how.name or function, op, how.mode, dtype, reply)
    return row, row.save(how.output)


def look(worker: object, mode: str, **given: Any) -> dict[str, Any]:
    """Return what a worker knows of a case before it calls the function, as JSON holds it."""
    try:
        own, _ = _prepared(**given)
        _ready(own, mode, [])
    except ValueError as error:
        raise CaseFailure("error", str(error)) from error
    environment = dataclasses.asdict(current_environment())
    return {"op": _op_of(own), "dtype": _dtype_of(own), "environment": environment}


def measure_here(worker: object, mode: str, budget_s: float, rounds: int | None, **given: Any) -> dict[str, Any]:
    """Return :func:`_measured` of a case in a worker."""
    return _measured(*_prepared(**given), mode, budget_s, rounds)


def _prepared(
    target: str, arguments: Sequence[str], reference: str | None, seed: int, folder: str
) -> tuple[OwnFunction, OwnFunction | None]:
    """Return the function with its arguments, and the reference; ValueError as :func:`.own_function.load`."""
    import torch

    os.chdir(folder)
    if arguments:
        generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(seed)
        drawn = [draw(text, generator) for text in arguments]
        keywords = {name: value for name, value in drawn if name}
        own = find(target).bound([value for name, value in drawn if not name], keywords)
    else:
        own = load(target)
    return own, None if reference is None else find(reference).bound(own.arguments, own.keywords)


def draw(text: str, generator: Any) -> tuple[str | None, Any]:
    """Return an argument that is typed as :data:`FORM` says: its name, None without one, and its value.

    Floating-point tensors are normal, from the generator and on its device; integers count from 0 along the last axis.
    documents[64,8192] are the bounds of 64 documents packed into 8192 positions, as cu_seqlens in int32.

    Raises:
        ValueError: another form, dtype or size.
    """
    import torch

    before, equals, value = text.partition("=")
    name = before if equals and before.isidentifier() else None
    value = text if name is None else value
    if not value:
        raise ValueError(f"--arg must be {FORM}, got {text!r}")
    shape = re.fullmatch(r"(\w+)\[(.*)\]", value)
    if shape is None:
        words = {"true": True, "false": False, "none": None}
        try:
            return name, words[value.lower()] if value.lower() in words else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            if "[" in value:
                raise ValueError(f"--arg must be {FORM}, got {text!r}") from None
            return name, value
    if shape[1] == "documents":
        from ...kernels.common.inputs import bounds_of

        documents, comma, positions = shape[2].partition(",")
        documents = parse_documents(documents)
        seq_len = parse_size(positions, f"--arg {text}: the positions") if comma else positions_of(documents)
        return name, bounds_of(documents, seq_len or 0, generator.device)
    one_of("dtype of --arg", shape[1], (*FLOATS, *INTEGERS, "documents"), f", as in {FORM}")
    sizes = parse_sizes(shape[2], f"--arg {text}: a size") if shape[2].strip() else ()
    device, dtype = generator.device, getattr(torch, FLOATS.get(shape[1], shape[1]))
    if dtype.is_floating_point:
        return name, torch.randn(sizes, generator=generator, device=device, dtype=dtype)
    most = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    counted = torch.arange(sizes[-1] if sizes else 1, device=device) % min(most + 1, 2**62)
    return name, counted.to(dtype).expand(sizes).contiguous() if sizes else counted.to(dtype)[0]


def _measured(
    own: OwnFunction, peer: OwnFunction | None, mode: str, budget_s: float, rounds: int | None
) -> dict[str, Any]:
    """Return columns on time, memory, error and device, and ``seen``, what a call does; CaseFailure if it fails."""
    import torch

    from ..worker.memory import measure_memory

    gradients: list[Tensor] = []
    # What changes its arguments is compared on copies.
    first = _ready(own if peer is None else _converted(own, torch.Tensor.clone), mode, gradients)
    began = time.perf_counter()
    result = first()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    columns: dict[str, Any] = {"compile_s": time.perf_counter() - began}
    if peer is not None:
        columns |= _compared(_named(result, mode), peer, mode, gradients)
    del first, result
    call = _ready(own, mode, [])
    seen = observe(call)
    # Under a mode, as on a CPU, torch would run a compiled function uncompiled for good (see observe).
    with torch.compiler.set_stance("force_eager") if seen.device == "cpu" else contextlib.nullcontext():
        inputs = [x for x in seen.inputs if x.device.type == seen.device] or [torch.empty(0, device=seen.device)]
        columns |= dataclasses.asdict(measure_memory(lambda _: call(), inputs=inputs))
    timing = sample(call, seen.device, budget_s, rounds)
    columns |= timing.columns() | {name: getattr(timing, name) for name in ("host_ms", "noise", "yardstick_ms")}
    found = dataclasses.asdict(dataclasses.replace(seen, inputs=()))
    return columns | current_environment(seen.device).columns() | {"seen": found}


def _ready(own: OwnFunction, mode: str, gradients: list[Tensor]) -> OwnFunction:
    """Return the function as its mode calls it: in mode fwbw it also returns the gradients of floating-point inputs.

    Args:
        gradients: of the outputs; where there are none, the first call draws them.
    """
    import torch

    from ..worker.correctness import output_gradient

    if mode == "fw":
        return own
    own = _converted(own, lambda x: x.detach().requires_grad_(x.is_floating_point()))
    parameters = own.function.parameters() if isinstance(own.function, torch.nn.Module) else ()
    leaves = [x for x in (*tensors((own.arguments, own.keywords)), *parameters) if x.requires_grad]
    if not leaves:
        raise ValueError(f"mode fwbw needs floating-point tensors among the arguments of {own.target}, got none")

    def both(*arguments: Any, **keywords: Any) -> Any:
        result = own.function(*arguments, **keywords)
        outputs = [x for x in tensors(result) if x.requires_grad]
        if not outputs:
            reason = f"mode fwbw needs a result with a gradient, {own.target} returns none: type --mode fw"
            raise CaseFailure("error", reason)
        gradients[:] = gradients or [output_gradient(x, x.dtype) for x in outputs]
        given = [x.to(out.dtype) for x, out in zip(gradients, outputs, strict=True)]
        return result, torch.autograd.grad(outputs, leaves, given, allow_unused=True)

    return dataclasses.replace(own, function=both)


def _converted(own: OwnFunction, convert: Callable[[Tensor], Tensor]) -> OwnFunction:
    """Return the function with other tensors among its arguments."""
    import torch
    from torch.utils._pytree import tree_map

    given = tree_map(lambda x: convert(x) if isinstance(x, torch.Tensor) else x, (own.arguments, dict(own.keywords)))
    return dataclasses.replace(own, arguments=given[0], keywords=given[1])


def _compared(results: Mapping[str, Tensor], peer: OwnFunction, mode: str, gradients: list[Tensor]) -> dict[str, Any]:
    """Return the columns checked and rel_error; CaseFailure where results are not the reference's."""
    import torch

    from ..worker.correctness import SAME_SHAPE, Expected, compare, error_bound, relative_error

    low = exact = _named(_ready(_converted(peer, torch.Tensor.clone), mode, gradients)(), mode)
    with contextlib.suppress(CaseFailure):  # it may not take float64
        wide = _converted(peer, lambda x: x.double() if x.is_floating_point() else x.clone())
        exact = _named(_ready(wide, mode, gradients)(), mode)
    if results.keys() != low.keys():
        raise CaseFailure("incorrect", f"it returns {', '.join(results)}, the reference {', '.join(low)}")
    given = {x.dtype for x in tensors((peer.arguments, peer.keywords)) if x.is_floating_point()}
    bounds = {}
    for name, value in exact.items():
        dtype = max({*given, low[name].dtype}, key=lambda x: torch.finfo(x).eps)
        bounds[name] = error_bound(relative_error(low[name], value), value, dtype)
    verdict = compare(results, Expected(values=exact, bounds=bounds, grad_out=None), None)
    if verdict.failure:
        raise CaseFailure("incorrect", verdict.failure)
    return {"checked": SAME_SHAPE, "rel_error": verdict.rel_error}


def _named(result: Any, mode: str) -> dict[str, Tensor]:
    """Return outputs and gradients of a call by their names."""
    outputs, gradients = result if mode == "fwbw" else (result, ())
    found = tensors(outputs)
    if not found:
        raise ValueError("a function and its reference must return tensors to be compared, got none")
    named = {f"out {n}" if len(found) > 1 else "out": x.detach() for n, x in enumerate(found, 1)}
    named |= {f"input {n}": x for n, x in enumerate(gradients, 1) if x is not None}
    return {name: x if x.is_floating_point() else x.double() for name, x in named.items()}


def _row(run: Run, name: str, op: str, mode: str, dtype: str | None, reply: Reply) -> OwnRow:
    """Return the row of a case."""
    found = dict(reply["columns"])
    seen = Observed(**found.pop("seen")) if found else None
    case = Case(kernel=OWN, op=op, impl=name, provider=OWN, mode=mode, dtype=dtype or (seen.dtype if seen else "fp32"))
    columns = common_columns(run, case, run.environment, reply) | found
    if seen is None:
        return OwnRow(**derived_columns(run, columns, None))
    # Bytes of arguments that a call need not read in whole, as a table's, are no limit.
    count = Count(
        op=op, formulation="", mode=mode, counting="observed", flops=seen.flops,
        tensor_flops=seen.flops if seen.products else 0.0, bytes=seen.bytes, compulsory_bytes=0.0,
    )  # fmt: skip
    columns = derived_columns(run, columns, count)
    uncounted = () if seen.flops else ("flops", "tensor_flops", "tflops", "intensity")
    return OwnRow(**columns | dict.fromkeys(uncounted))


def _in_bytes(number: float) -> str:
    unit, prefix = next((each for each in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if number >= each[0]), (1, ""))
    return f"{number / unit:.3g} {prefix}B"


def _name_of(function: Callable[..., Any]) -> str:
    of = function if hasattr(function, "__name__") else type(function)
    return f"{of.__module__}:{of.__name__}"


def _op_of(own: OwnFunction) -> str:
    """Return the arguments of a case as its ``op`` names them."""
    given = [*map(_describe, own.arguments), *(f"{name}={_describe(x)}" for name, x in own.keywords.items())]
    return f"{OWN}({', '.join(given)})" if given else OWN


def _describe(argument: Any) -> str:
    import torch

    if isinstance(argument, torch.Tensor):
        name = str(argument.dtype)
        return f"{DTYPES.get(name, name.removeprefix('torch.'))}[{','.join(map(str, argument.shape))}]"
    if isinstance(argument, list | tuple):
        return f"({', '.join(map(_describe, argument))})"
    return repr(argument) if isinstance(argument, str | int | float | None) else type(argument).__name__


def _dtype_of(own: OwnFunction) -> str | None:
    """Return the dtype of the largest floating-point argument, None without one."""
    known = [x for x in tensors((own.arguments, own.keywords)) if str(x.dtype) in DTYPES]
    return DTYPES[str(max(known, key=lambda x: x.nbytes).dtype)] if known else None
