"""A function of tensors with a backward pass of its own, for eager calls and for torch.compile.

A family declares what it computes once, as a :class:`Differentiable`: plain functions of tensors for the forward and
the backward pass. An eager call runs them in an autograd function, which costs the host least. In a compiled call each
is an operator registered with torch, which the compiler does not trace; ``shapes`` tells it the results' shapes.

A pass copies tensors that do not begin at a multiple of 16 bytes, as descriptors must: then no plan fits (remember.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from .arguments import without_autocast
from .remember import ALIGNMENT, Passed, Plan, describe, is_watched, on_current_device, record_call, run_planned
from .second_derivatives import gradients_once

Tensors = tuple[Any, ...]
"""Tensors, or None in place of some."""

SCHEMA_TYPES = {
    bool: "bool", float: "float", int: "int", str: "str", torch.dtype: "ScalarType", int | None: "int?",
}  # fmt: skip
"""Type of a request's field -> its name in an operator's schema; operators do not take fields of other types."""


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
        forward: Callable[..., tuple[Tensors, Tensors]],
        backward: Callable[..., Tensors] | None,
        shapes: Callable[..., tuple[Tensors, Tensors]],
    ) -> None:
        self.forward, self.backward, self.shapes = _on_aligned(forward), backward and _on_aligned(backward), shapes
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
            f"{self.name}_step", request=self.request, tensors=self.tensors, outputs=self.outputs, forward=forward,
            backward=None, shapes=shapes,
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
        values = [getattr(request, field) for field in self.fields]
        results = self.operator(*tensors, *values)
        # An operator with one result returns it without a tuple.
        results = results if isinstance(results, tuple | list) else (results,)
        return tuple(_unpacked(x) for x in results[: self.num_outputs])

    def _run(self, *arguments: Any) -> tuple[Any, Tensors]:
        """Return the request and the tensors of an operator's arguments."""
        values = dict(zip(self.fields, arguments[self.num_tensors :], strict=True))
        request = self.request(**{field: values.get(field) for field in self.request._fields})
        return request, arguments[: self.num_tensors]

    def _register(self, values: Sequence[str], num_saved: int) -> None:
        name = self.name
        given = [f"Tensor? {x[:-1]}" if x.endswith("?") else f"Tensor {x}" for x in self.tensors]
        results = ", ".join(["Tensor"] * (self.num_outputs + num_saved))

        def forward(*arguments: Any) -> Any:
            request, inputs = self._run(*arguments)
            outputs, saved = without_autocast(self.forward, inputs[0], request, *inputs)
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
        if self.backward is None:
            return
        backward_of = self.backward

        def gradients(
            grads: list[Any], inputs: list[Any], saved: list[Tensor], needs: list[bool], *values: Any
        ) -> list[Tensor]:
            request, tensors = self._run(*inputs, *values)
            kept = tuple(map(_unpacked, saved))
            found = without_autocast(backward_of, inputs[0], request, tuple(needs), tensors, kept, tuple(grads))
            # If the gradient of a tensor that has none is asked for, such as a stabiliser's, it is zero.
            each = zip(found, inputs, needs, strict=True)
            full = [torch.zeros_like(x) if need and g is None else g for g, x, need in each]
            return list(_packed(_unshared(_needed(full, needs)), inputs[0]))

        def gradient_shapes(
            grads: list[Any], inputs: list[Any], saved: list[Tensor], needs: list[bool], *values: Any
        ) -> list[Tensor]:
            like = [torch.empty_like(x) if need else None for x, need in zip(inputs, needs, strict=True)]
            return list(_packed(like, inputs[0]))

        lists = ["Tensor?[] grads", "Tensor?[] inputs", "Tensor[] saved", "bool[] needs"]
        torch.library.custom_op(
            f"lrbench::{name}_backward", gradients, mutates_args=(),
            schema=f"({', '.join([*lists, *values])}) -> Tensor[]",
        ).register_fake(gradient_shapes)  # fmt: skip
        backward_operator = getattr(torch.ops.lrbench, f"{name}_backward").default

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
    """A request to a :class:`Differentiable` outside of torch.compile.

    Attributes:
        plans: key -> plan of a pass (the forward pass has the key None); None for a call that follows no plans.
        differentiated: whether there may be a backward pass.
    """

    def __init__(self, what: Differentiable, request: Any) -> None:
        self.what, self.request = what, request
        self.plans: dict[Hashable, Plan | None] | None = None
        self.differentiated = what.backward is not None

    def planned(self, *, differentiated: bool) -> _Call:
        """Return a copy that follows plans."""
        call = _Call(self.what, self.request)
        call.plans, call.differentiated = {}, differentiated
        return call

    def __call__(self, *tensors: Any) -> Tensors:
        if not self.differentiated:
            return self.forward(tensors)[0]
        # _apply is Function.apply without its work for torch.func: inside its transforms no call is remembered.
        return (_Eager.apply if self.plans is None else _apply)(self, *tensors)

    def forward(self, tensors: Tensors) -> tuple[Tensors, Sequence[Any], Plan | None]:
        """Run the forward pass; see :func:`.run_planned`."""

        def run() -> Passed:
            with torch.no_grad():
                return without_autocast(self.what.forward, tensors[0], self.request, *tensors)

        if self.plans is None:
            return *run(), None
        return run_planned(self.plans, None, tensors, run, keep=self.differentiated)

    def gradients(self, plan: Plan | None, both: Tensors, needs: tuple[bool, ...], gradients: Tensors) -> Tensors:
        """Return the gradients of the tensors.

        Args:
            plan: the plan that the forward pass followed, or None.
            both: the tensors, and what was kept.
            needs: which gradients are asked for.
            gradients: of the outputs.
        """

        def run() -> Passed:
            backward, count = self.what.backward, self.what.num_tensors
            assert backward is not None
            kept = both[count:] if plan is None else plan.unpack(both[count:])
            return without_autocast(backward, both[0], self.request, needs, both[:count], kept, gradients), ()

        # If the forward pass followed a plan, ``both`` is always of the same kinds, so the gradients' kinds suffice.
        kinds: list[Any] = [plan is None, needs]
        given = (*both, *gradients)
        if (
            self.plans is None
            or is_watched()
            or not describe(gradients if plan else given, kinds, [])
            or not on_current_device(both)
        ):
            return run()[0]
        return run_planned(self.plans, tuple(kinds), given, run, keep=False)[0]


class _Eager(torch.autograd.Function):
    """A :class:`_Call` as an autograd function, for calls that may have a backward pass."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> Any:
        outputs, kept, plan = call.forward(tensors)
        # Hooks on saved tensors must see the same tensors in every call, and not a plan's block.
        if plan is not None and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            kept, plan = plan.unpack(kept), None
        ctx.save_for_backward(*tensors, *kept)
        ctx.call, ctx.plan = call, plan
        ctx.set_materialize_grads(False)
        if constant := [outputs[index] for index in call.what.constant if outputs[index] is not None]:
            ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return _gradients(ctx, gradients, ctx.saved_tensors)

        def compute(*given: Any) -> Tensors:
            return _gradients(ctx, given[: len(gradients)], given[len(gradients) :])

        return gradients_once(ctx.call.what.no_second_derivative, compute, *gradients, *ctx.saved_tensors)


def _gradients(ctx: Any, gradients: Tensors, saved: Tensors) -> Tensors:
    return None, *ctx.call.gradients(ctx.plan, saved, ctx.needs_input_grad[1:], gradients)


_apply = super(torch.autograd.Function, _Eager).apply


def aligned(value: Any) -> Any:
    """Return a tensor, or a copy if it does not begin at a multiple of ALIGNMENT bytes; of a tuple or list, of each."""
    if isinstance(value, Tensor):
        return value.clone() if value.data_ptr() % ALIGNMENT else value
    return tuple(map(aligned, value)) if type(value) in (tuple, list) else value


def _on_aligned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: function(*map(aligned, values))


def _packed(results: Sequence[Tensor | None], like: Tensor) -> Any:
    """Return results in a registered operator's form: an empty tensor in place of None, a single one not as a tuple."""
    packed = tuple(like.new_empty(0) if x is None else x for x in results)
    return packed if len(packed) > 1 else packed[0]


def _unshared(results: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copy the results that are parts of larger tensors, since an operator's results must not share memory."""
    return [x.clone() if x is not None and x.untyped_storage().nbytes() > x.nbytes else x for x in results]


def _needed(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients, with None in place of those that are not needed."""
    return [x if need else None for x, need in zip(gradients, needs, strict=True)]


def _unpacked(x: Tensor) -> Tensor | None:
    """Undo :func:`_packed` for one of the results."""
    return None if x.dim() == 1 and x.shape[0] == 0 else x
