"""An independent counter of what torch code does: FLOPs by kind of function, and the bytes that its kernels touch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lrbench.analysis.counts import Factors

PER_OUTPUT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "reciprocal", "sqrt", "cumsum"), ("arithmetic",)),
    "exp": ("exp",),
    "log": ("log",),
    "log1p": ("arithmetic", "log"),
    "sigmoid": ("sig",),
    "log_sigmoid_forward": ("log", "sig"),
    "silu": ("arithmetic", "sig"),
    "silu_backward": ("arithmetic",) * 5 + ("sig",),
    "maximum": ("max",),
    "abs": ("abs",),
    **dict.fromkeys(("tril", "triu", "where", "masked_fill"), ("mask",)),
}
"""Operation of torch -> what it costs for every element of its (first) output."""

PER_INPUT: dict[str, str] = {"sum": "arithmetic", "amax": "max"}
"""Reduction -> what it costs for every element it reduces."""

FREE = frozenset(
    {
        *("neg", "detach", "clone", "copy", "contiguous", "_to_copy", "lift_fresh", "_local_scalar_dense", "flip"),
        *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full", "full_like", "new_full", "new_empty"),
        *("arange", "cat", "stack", "fill", "logspace", "bitwise_not", "_unsafe_view", "clamp"),
    }
)
"""Operations that move, make or negate numbers; a sign is part of the addition that follows it. A clamp guards a gate
against infinities and is no part of the mathematics."""


class OperationCounter(TorchDispatchMode):
    """Counts what is dispatched while it is entered; an operation it does not know is an error, never left out.

    Attributes:
        products: FLOPs of matrix products, 2 each multiply-accumulate; 1 where there is nothing to accumulate.
        functions: kind (arithmetic, exp, log, sig, max, abs, mask) -> evaluations.
        bytes: of tensors read and written by every operation, or by every :meth:`kernel`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.functions: Counter[str] = Counter()
        self.bytes = 0
        self._in_kernel = False

    def flops(self, f: Factors) -> float:
        """Return all FLOPs, with the costs ``f``."""
        return self.products + self.vector_flops(f)

    def vector_flops(self, f: Factors) -> float:
        """Return the FLOPs outside matrix products."""
        costs = {"arithmetic": 1, **{name: getattr(f, name) for name in ("exp", "log", "sig", "max", "mask", "abs")}}
        return sum(costs[kind] * times for kind, times in self.functions.items())

    def kernel(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Run ``function`` as one kernel: it reads its inputs and writes its outputs once, whatever it does between."""
        with self._one_kernel(inputs):
            outputs = function(*inputs)
            self._touch(outputs if isinstance(outputs, tuple) else (outputs,))
        return outputs

    @contextmanager
    def _one_kernel(self, inputs: Iterable[Tensor]) -> Iterator[None]:
        self._touch(inputs)
        self._in_kernel = True
        try:
            yield
        finally:
            self._in_kernel = False

    def _touch(self, tensors: Iterable[Tensor]) -> None:
        """Add the bytes of the elements that tensors have of their own; broadcast ones are none."""
        for x in tensors:
            own = prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
            self.bytes += own * x.element_size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._count(func, args, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func.overloadpacket.__name__.rstrip("_") if not func.overloadpacket.__name__.startswith("__") else ""
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
        if not outputs:
            return
        out, first = outputs[0], next((x for x in tree_leaves(args) if isinstance(x, Tensor)), None)
        if name in ("mm", "bmm", "addmm"):
            # What addmm adds to is where its product accumulates.
            inner = args[-1].shape[-2]
            self.products += (2 if inner > 1 else 1) * out.numel() * inner
        elif name in PER_OUTPUT:
            for kind in PER_OUTPUT[name]:
                self.functions[kind] += out.numel()
        elif name in PER_INPUT:
            assert first is not None
            self.functions[PER_INPUT[name]] += first.numel()
        elif name not in FREE:
            raise NotImplementedError(f"no cost is known for {func}")
        if not self._in_kernel and name not in FREE:
            self._touch([x for x in tree_leaves(args) if isinstance(x, Tensor)])
            self._touch(outputs)
