"""A function of tensors with a backward pass of its own, for eager calls and for torch.compile.

A family declares what it computes once, as a :class:`Differentiable`: plain functions of tensors for the forward and
the backward pass. An eager call runs them in an autograd function, which costs the host least. In a compiled call each
is an operator registered with torch, which the compiler does not trace; ``shapes`` tells it the results' shapes.

A pass copies tensors that its kernels cannot read (:func:`readable`): those that do not begin at a multiple of 16
bytes, as descriptors and repeated launches (remember.py) must, and those with other strides. It launches on the device
of its first tensor; all must be there.

While a FlopCounterMode counts, an eager call's passes run inside these operators, which it sees; all else is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from .exchange import keeping_nothing
from .remember import ALIGNMENT, launch_anew, record_call, run_pass
from .second_derivatives import gradients_once
from .spec import resolve

Tensors = tuple[Any, ...]
"""Tensors, or None in place of some."""

SCHEMA_TYPES = {
    bool: "bool", float: "float", int: "int", str: "str", torch.dtype: "ScalarType", int | None: "int?",
}  # fmt: skip
"""Type of a request's field -> its name in an operator's schema; operators do not take fields of other types."""

FLOPS = "analysis.counts.operators:flops"
"""(name, fw or bw, request, tensors) -> the FLOPs of a call. Only a FlopCounterMode makes kernels import it."""

STRIDE_MULTIPLE = 8
"""Elements: 16 bytes in half precision, which descriptors and vector loads take."""

MAX_ROW = 2**20
"""Strides from a position to the next are below this many elements, so that a tile's offsets are within 32 bits."""

_local = threading.local()


class Differentiable:
    """A forward and a backward pass; calling it with a request and the tensors returns the outputs.

    Args:
        name: of the forward pass as a registered operator; the backward pass is ``<name>_backward``.
        request: a NamedTuple of everything but the tensors. Fields of types that operators do not take, such as
            configurations of launches, must be None in compiled calls.
        tensors: names of the arguments, with a "?" behind those that may be None; the first may not.
        outputs: names of the results; all are always returned, None for one that was not asked for.
        saved: names of what the forward pass keeps for the backward pass beside its arguments. If ``forward`` returns
            more than these, an eager call keeps the rest too, and a compiled call drops it.
        constant: names of the outputs that have no gradient.
        strided: how many of the first tensors kernels read with strides of their own, all others being contiguous; None
            if they read all tensors with any strides.
        forward: (request, *tensors) -> (outputs, saved); no two of these tensors may share memory.
        backward: (request, needs, tensors, saved, gradients of the outputs) -> gradients of the tensors, or None where
            ``needs`` is false. ``backward=None``: nothing has a gradient.
        shapes: as ``forward``, but allocates without computing.
    """

    def __init__(
        self,
        name: str,
        *,
        request: type[Any],
        tensors: Sequence[str],
        outputs: Sequence[str],
        saved: Sequence[str] = (),
        constant: Sequence[str] = (),
        strided: int | None = 0,
        forward: Callable[..., tuple[Tensors, Tensors]],
        backward: Callable[..., Tensors] | None,
        shapes: Callable[..., tuple[Tensors, Tensors]],
    ) -> None:
        self.forward = lambda request, *tensors: on_device_of(tensors[0], forward, request, *readable(tensors, strided))
        self.backward = backward and partial(_on_readable, backward, strided)
        self.strided = strided
        self.shapes = shapes
        self.name, self.request, self.tensors, self.outputs = name, request, tensors, outputs
        self.constant = [index for index, output in enumerate(outputs) if output in constant]
        self.num_tensors, self.num_outputs = len(tensors), len(outputs)
        self.no_second_derivative = f'kernels of {name} have no second derivative: use impl="torch"'
        types = {field: SCHEMA_TYPES.get(hint) for field, hint in get_type_hints(request).items()}
        self.fields = [field for field, kind in types.items() if kind]
        self._register([f"{types[field]} {field}" for field in self.fields], len(saved))

    def step(
        self, forward: Callable[..., tuple[Tensors, Tensors]], shapes: Callable[..., tuple[Tensors, Tensors]]
    ) -> Differentiable:
        """Return the decoding step: a Differentiable of the same request, tensors and outputs, without gradients."""
        return Differentiable(
            f"{self.name}_step", request=self.request, tensors=self.tensors, outputs=self.outputs, strided=self.strided,
            forward=forward, backward=None, shapes=shapes,
        )  # fmt: skip

    def __call__(self, request: Any, *tensors: Tensor | None) -> Tensors:
        if not torch.compiler.is_compiling():
            call = _Call(self, request)
            outputs = call(*tensors)
            record_call(call, tensors, outputs)
            return outputs
        for field, value in request._asdict().items():
            if field not in self.fields and value is not None:
                raise ValueError(f"{field} must be None under torch.compile, got {value}")
        return self.split(self.operator(*tensors, *self.values(request)))[0]

    def values(self, request: Any) -> list[Any]:
        """Return a request as operators take it."""
        return [getattr(request, field) for field in self.fields]

    def split(self, results: Any) -> tuple[Tensors, Tensors]:
        """Return outputs, and what is saved, of the operator's results: one alone comes without a tuple."""
        found = tuple(map(_unpacked, results if isinstance(results, tuple | list) else (results,)))
        return found[: self.num_outputs], found[self.num_outputs :]

    def _run(self, *arguments: Any) -> tuple[Any, Tensors]:
        """Return the request and the tensors of an operator's arguments."""
        values = dict(zip(self.fields, arguments[self.num_tensors :], strict=True))
        request = self.request(**{field: values.get(field) for field in self.request._fields})
        return request, arguments[: self.num_tensors]

    def _flops(self, mode: str, *arguments: Any, out_val: Any = None) -> Any:
        return resolve(FLOPS)(self.name, mode, *self._run(*arguments))

    def _register(self, values: Sequence[str], num_saved: int) -> None:
        name = self.name
        given = [f"Tensor? {x[:-1]}" if x.endswith("?") else f"Tensor {x}" for x in self.tensors]
        results = ", ".join(["Tensor"] * (self.num_outputs + num_saved))

        @keeping_nothing
        def forward(*arguments: Any) -> Any:
            request, inputs = self._run(*arguments)
            outputs, saved = _of_eager_call() or self.forward(request, *inputs)
            return _packed(_unshared((*outputs, *saved[:num_saved])), inputs[0])

        def shapes(*arguments: Any) -> Any:
            request, inputs = self._run(*arguments)
            outputs, saved = self.shapes(request, *inputs)
            return _packed((*outputs, *saved), inputs[0])

        results = f"({results})" if "," in results else results
        operator = torch.library.custom_op(
            f"lrbench::{name}", forward, mutates_args=(), schema=f"({', '.join([*given, *values])}) -> {results}"
        )
        operator.register_fake(shapes)
        self.operator = getattr(torch.ops.lrbench, name).default
        _count(name, partial(self._flops, "fw"))
        if self.backward is None:
            return
        backward_of = self.backward

        @keeping_nothing
        def gradients(
            grads: list[Any], inputs: list[Any], saved: list[Tensor], needs: list[bool], *values: Any
        ) -> list[Tensor]:
            request, tensors = self._run(*inputs, *values)
            kept = tuple(map(_unpacked, saved))
            found = _of_eager_call() or backward_of(request, tuple(needs), tensors, kept, tuple(grads))
            # If the gradient of a tensor that has none is asked for, such as a stabiliser's, it is zero.
            each = zip(found, inputs, needs, strict=True)
            full = [torch.zeros_like(x) if need and g is None else g for g, x, need in each]
            return list(_packed(_unshared(_needed(full, needs)), inputs[0]))

        def gradient_shapes(
            grads: list[Any], inputs: list[Any], saved: list[Tensor], needs: list[bool], *values: Any
        ) -> list[Tensor]:
            like = [contiguous_like(x) if need else None for x, need in zip(inputs, needs, strict=True)]
            return list(_packed(like, inputs[0]))

        lists = ["Tensor?[] grads", "Tensor?[] inputs", "Tensor[] saved", "bool[] needs"]
        torch.library.custom_op(
            f"lrbench::{name}_backward", gradients, mutates_args=(),
            schema=f"({', '.join([*lists, *values])}) -> Tensor[]",
        ).register_fake(gradient_shapes)  # fmt: skip
        self.backward_operator = backward_operator = getattr(torch.ops.lrbench, f"{name}_backward").default
        _count(
            f"{name}_backward", lambda grads, inputs, saved, needs, *values, **_: self._flops("bw", *inputs, *values)
        )

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            results = output if isinstance(output, tuple) else (output,)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs[: self.num_tensors], *results[self.num_outputs :])
            ctx.values = inputs[self.num_tensors :]
            ctx.mark_non_differentiable(*(results[index] for index in self.constant), *results[self.num_outputs :])

        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            needs = list(ctx.needs_input_grad[: self.num_tensors])

            def compute(*given: Tensor | None) -> Tensors:
                first, end = self.num_outputs, self.num_outputs + self.num_tensors
                lists = list(given[:first]), list(given[first:end]), list(given[end:])
                return tuple(_needed(backward_operator(*lists, needs, *ctx.values), needs))

            found = gradients_once(self.no_second_derivative, compute, *grads[: self.num_outputs], *ctx.saved_tensors)
            return *found, *(None for _ in ctx.values)

        operator.register_autograd(backward, setup_context=setup_context)


class _Call:
    """A request to a :class:`Differentiable` outside of torch.compile; ``launches``: of its passes, see run_pass."""

    def __init__(self, what: Differentiable, request: Any) -> None:
        self.what, self.request = what, request
        self.launches: dict[Hashable, Sequence[Any]] = {}

    def __call__(self, *tensors: Any) -> Tensors:
        if self.what.backward is not None:
            return _Eager.apply(self, *tensors)
        with torch.no_grad():
            return self.forward(tensors)[0]

    def forward(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """Return the outputs, and what is kept for the backward pass."""
        run = partial(run_pass, self.launches, None, partial(self.what.forward, self.request, *tensors))
        return self.counted(self.what.operator, run, self.what.split, tensors) if _counters() else run()

    def counted(self, operator: Any, run: Callable[[], Any], split: Callable[[Any], Any], given: Sequence[Any]) -> Any:
        """Return what ``run`` returns, having called it inside an operator, which a FlopCounterMode sees.

        Fake tensors have no memory to run on: then it is what ``split`` makes of the operator's results.
        """
        _local.run = run
        try:
            results = operator(*given, *self.what.values(self.request))
            return _local.__dict__.get("found") or split(results)
        finally:
            _local.__dict__.clear()

    def gradients(self, saved: Tensors, needs: tuple[bool, ...], gradients: Tensors) -> Tensors:
        """Return the gradients of the tensors.

        Args:
            saved: the tensors, and what was kept.
            needs: which gradients are asked for.
            gradients: of the outputs.
        """
        count = self.what.num_tensors
        # Hooks on saved tensors may return them in another dtype, on another device or with other strides.
        kinds = [None if x is None else (x.dtype, x.is_contiguous() or x.stride()) for x in saved]
        key = needs, saved[0].get_device(), *kinds, *[None if x is None else x.dtype for x in gradients]
        given = self.request, needs, saved[:count], saved[count:], gradients
        assert self.what.backward is not None
        run = partial(run_pass, self.launches, key, partial(self.what.backward, *given))
        if not _counters():
            return run()
        lists = list(gradients), list(saved[:count]), _filled(saved[count:], saved[0]), list(needs)
        return self.counted(self.what.backward_operator, run, partial(_needed, needs=needs), lists)


class _Eager(torch.autograd.Function):
    """A :class:`_Call` as an autograd function."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> Any:
        outputs, kept = call.forward(tensors)
        ctx.save_for_backward(*tensors, *kept)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if constant := [outputs[index] for index in call.what.constant if outputs[index] is not None]:
            ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call, needs = ctx.call, ctx.needs_input_grad[1:]

        def compute(*given: Any) -> Tensors:
            return None, *call.gradients(given[len(gradients) :], needs, given[: len(gradients)])

        return gradients_once(call.what.no_second_derivative, compute, *gradients, *ctx.saved_tensors)


def on_device_of(x: Tensor, run: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run what launches kernels with autocast off and with x's device as the current device.

    Triton launches on the current device and its stream and allocates a kernel's scratch memory there, whatever the
    device of the tensors. Autograd sets the current device for an eager backward pass, but not for a compiled one.
    """
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return on_device_of(x, run, *arguments, **keywords)
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.get_device()):
            return run(*arguments, **keywords)
    return run(*arguments, **keywords)


def readable(tensors: Tensors, strided: int | None = 0) -> Tensors:
    """Return tensors, or copies of those that do not begin at a multiple of ALIGNMENT bytes or whose strides kernels do
    not read: the first ``strided`` need :func:`has_strides`, others be contiguous; None: they read all."""
    for x in tensors:
        if x is not None and not (x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0):
            return tuple([x if x is None else _readable(x, n, strided) for n, x in enumerate(tensors)])
    return tensors


def _readable(x: Tensor, n: int, strided: int | None) -> Tensor:
    is_aligned = x.data_ptr() % ALIGNMENT == 0
    if strided is None:
        return x if is_aligned else x.clone()
    reads_strides = n < strided and not x.is_contiguous() and has_strides(x)
    if is_aligned and (reads_strides or x.is_contiguous()):
        return x
    if reads_strides:
        # Whether it is copied, and the kernel for contiguous tensors runs, depends on its address alone.
        launch_anew()
    return x.clone(memory_format=torch.contiguous_format)


def has_strides(x: Tensor) -> bool:
    """Return whether kernels can read x with its strides: the last one is 1, others are multiples of STRIDE_MULTIPLE,
    and a tile's offsets fit into 32 bits."""
    *outer, last = x.stride()
    row = outer[1] if len(outer) > 1 else outer[0]
    return last == 1 and row < MAX_ROW and all(n > 0 and n % STRIDE_MULTIPLE == 0 for n in outer)


def contiguous_like(x: Tensor) -> Tensor:
    """Allocate a contiguous tensor of x's shape and dtype; x may have other strides."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def sequence_strides(*inputs: Tensor | None) -> list[tuple[int, int] | None]:
    """Return the strides of batch and time of inputs [B, T, C], in units of STRIDE_MULTIPLE; None for one that is
    contiguous, and for None."""
    return [
        None if x is None or x.is_contiguous() else (x.stride(0) // STRIDE_MULTIPLE, x.stride(1) // STRIDE_MULTIPLE)
        for x in inputs
    ]


def _on_readable(
    backward: Callable[..., Tensors], strided: int | None, request: Any, needs: Any, tensors: Tensors, *others: Tensors
) -> Tensors:
    given = readable(tensors, strided), *map(readable, others)
    return on_device_of(tensors[0], backward, request, needs, *given)


def _counters() -> list[FlopCounterMode]:
    """Return the FlopCounterModes that count in this thread."""
    if not is_in_torch_dispatch_mode():
        return []
    counters = (getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack())
    return [counter for counter in counters if isinstance(counter, FlopCounterMode)]


def _count(name: str, flops: Callable[..., int]) -> None:
    """Register the FLOPs of the operator ``name``, also with modes that count already: they hold copies of the rest."""
    operator = getattr(torch.ops.lrbench, name)
    register_flop_formula(operator, get_raw=True)(flops)
    for counter in _counters():
        counter.flop_registry[operator] = flops


def _of_eager_call() -> Any:
    """Return the results of what an eager call runs inside this operator; None if the operator is called itself."""
    if run := _local.__dict__.pop("run", None):
        _local.found = run()
        return _local.found
    return None


def _packed(results: Sequence[Tensor | None], like: Tensor) -> Any:
    """Return results in a registered operator's form: an empty tensor in place of None, a single one not as a tuple."""
    packed = tuple(_filled(results, like))
    return packed if len(packed) > 1 else packed[0]


def _filled(tensors: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Return the tensors, an empty one in place of None."""
    return [like.new_empty(0) if x is None else x for x in tensors]


def _unshared(results: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copy the results that are parts of larger tensors, since an operator's results must not share memory."""
    return [x.clone() if x is not None and x.untyped_storage().nbytes() > x.nbytes else x for x in results]


def _needed(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients, with None in place of those that are not needed."""
    return [x if need else None for x, need in zip(gradients, needs, strict=True)]


def _unpacked(x: Tensor) -> Tensor | None:
    """Undo :func:`_packed` for one of the results."""
    return None if x.dim() == 1 and x.shape[0] == 0 else x
