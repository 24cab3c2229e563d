"""Launching a kernel again without working out again what Triton compiled for its arguments.

Before every launch Triton examines each argument, builds a key from what it finds and the text of the options, compares
the globals that the kernel reads, and asks the driver about each pointer. That takes longer than a small layer's kernel
runs. A remembered launch compares only what compilation depends on, and passes addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import triton
from torch import Tensor
from triton.runtime import driver

Kernel = TypeVar("Kernel")
_Entry = tuple[Any, Callable[..., None], Any, Any, list[Any]]
_Layout = tuple[list[int], list[tuple[int, "_Description"]], list[int]]

ALIGNMENT = 16
"""Bytes to which Triton takes a pointer to be aligned or not, and the number of which an integer may be a multiple."""

INT32 = range(-(2**31), 2**31)

_address, _dtype = Tensor.data_ptr, attrgetter("dtype")


def remember_launches(kernel: Kernel) -> Kernel:
    """Make ``kernel[grid](...)`` look a compiled kernel up by the kinds of its arguments, instead of by Triton's key.

    Run-time arguments are given by position, constexprs and options by keyword; other launches, those with other grids
    than tuples, and those that a profiler or a hook watches, are left to Triton. Pointers are not checked: a tensor on
    another device than the current one must have been refused before. The interpreter's functions stay as they are.

    Args:
        kernel: a function decorated with ``triton.jit`` or ``gluon.jit``.
    """
    if not isinstance(kernel, triton.JITFunction):
        return kernel
    launch_anew = kernel.run
    describe = _Description([not parameter.do_not_specialize for parameter in kernel.params])
    launches: dict[Any, _Entry] = {}

    def run(*args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        if warmup or type(grid) is not tuple or kernel.pre_run_hooks or _is_watched():
            return launch_anew(*args, grid=grid, warmup=warmup, **keywords)
        active = driver.active
        device = active.get_current_device()
        values, kinds = describe(args)
        key = (device, kinds, *keywords, *keywords.values())
        known = launches.get(key)
        if known is None:
            compiled = launch_anew(*args, grid=grid, warmup=False, **keywords)
            others = kernel.params[len(args) :]
            if kinds is not None and all(parameter.is_constexpr for parameter in others):
                constants = [keywords.get(parameter.name, parameter.default) for parameter in others]
                launches[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata, constants
            return compiled
        compiled, launch, function, metadata, constants = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        launch(x, y, z, stream, function, metadata, None, None, None, *values, *constants)
        return compiled

    kernel.run = run
    return kernel


class _Description:
    """What compilation depends on in a kernel's run-time arguments, or in the members of a tuple among them.

    Args:
        specialised: for each of them, whether Triton compiles anew for an integer that is 1 or a multiple of 16.
    """

    def __init__(self, specialised: list[bool]) -> None:
        self.specialised = specialised
        self.layouts: dict[tuple[type, ...], _Layout | None] = {}

    def __call__(self, args: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """Return the values to launch with, and their kinds: None where there is an argument of another type than
        tensors, numbers, None and named tuples, which Triton has to take apart itself."""
        types = tuple(map(type, args))
        if types not in self.layouts:
            self.layouts[types] = self._layout(types)
        layout = self.layouts[types]
        values = list(args)
        if layout is None:
            return values, None
        pointers, tuples, integers = layout
        tensors = [args[index] for index in pointers]
        addresses = [*map(_address, tensors)]
        kinds: list[Any] = [types, *map(_dtype, tensors)]
        unaligned = 0
        for index, address in zip(pointers, addresses, strict=True):
            values[index] = address
            unaligned |= address
        if unaligned % ALIGNMENT:
            kinds.append(tuple(address % ALIGNMENT == 0 for address in addresses))
        for index in integers:
            x = args[index]
            if self.specialised[index]:
                kinds.append((x == 1, x % ALIGNMENT == 0, x in INT32))
            elif x not in INT32:
                kinds.append(index)
        for index, describe in tuples:
            members, inner = describe(args[index])
            if inner is None:
                return values, None
            values[index] = tuple(members)
            kinds.append(inner)
        return values, tuple(kinds)

    def _layout(self, types: tuple[type, ...]) -> _Layout | None:
        """Return where pointers, tuples and integers are, or None if other types are among the arguments."""
        pointers = [index for index, x in enumerate(types) if issubclass(x, Tensor)]
        tuples = [
            (index, _Description([self.specialised[index]] * len(x._fields)))
            for index, x in enumerate(types)
            if hasattr(x, "_fields")
        ]
        integers = [index for index, x in enumerate(types) if x is int]
        others = [x for x in types if x in (float, bool, type(None))]
        known = len(pointers) + len(tuples) + len(integers) + len(others) == len(types)
        return (pointers, tuples, integers) if known else None


def _is_watched() -> bool:
    """Return whether somebody is to be told of launches, such as Triton's profiler."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
