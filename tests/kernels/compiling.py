"""What every compile test shares: launches compiled once in a process and held to an architecture's limits."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import triton

from lrbench.kernels.common.offline import Launch, Resources, compile_launch
from lrbench.kernels.common.sizes import SHARED_MEMORY_BYTES

CAPABILITIES = (80, 90, 100)
MAX_STACK_BYTES = 64

_compiled: dict[tuple[Any, ...], Resources] = {}


def require_compiler() -> None:
    """Fail under Triton's interpreter, which is chosen when a kernel is decorated."""
    if triton.knobs.runtime.interpret:
        pytest.fail("these tests compile: run them without TRITON_INTERPRET")


def check(launches: Sequence[Launch], capability: int, *, max_stack_bytes: int | None = MAX_STACK_BYTES) -> None:
    """Compile the launches, equal ones once, and hold them to the chip's shared memory and to a stack frame.

    On Hopper products may not wait for each other, which takes up to half of a kernel's speed.
    """
    assert launches
    limit = SHARED_MEMORY_BYTES[divmod(capability, 10)]
    bad = []
    for launch in launches:
        key = (capability, *launch.compile_key())
        if key not in _compiled:
            _compiled[key] = compile_launch(launch, capability)
        resources = _compiled[key]
        spills = max_stack_bytes is not None and resources.stack_bytes > max_stack_bytes
        if spills or resources.shared_bytes > limit or resources.serialised:
            flags = {name: value for name, value in launch.arguments.items() if name.isupper()}
            bad.append(f"{resources} {flags}")
    assert not bad, "\n".join(bad)


def kernels_of(*modules: ModuleType) -> set[str]:
    """Return the names of the kernels that the modules define."""
    return {
        name
        for module in modules
        for name, value in inspect.getmembers(module)
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }
