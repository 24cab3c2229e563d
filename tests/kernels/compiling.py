"""What every compile test shares: launches recorded without a GPU, compiled once in a process, and held to an
architecture's limits."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
from torch.utils._pytree import tree_leaves

from lrbench import kernels
from lrbench.kernels import FAMILIES, get_operation
from lrbench.tests.kernels.laws import LAYOUTS, Case, public_state, state_shapes, strided
from lrbench.tests.kernels.offline import Launch, Resources, compile_launch, record_launches

CAPABILITIES = (80, 90, 100)
MAX_STACK_BYTES = 64

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    if not found.ispkg
]
"""Every module of the kernels."""

SHARED_MEMORY_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory a block may use, by compute capability."""

IMPLEMENTATIONS = [
    (operation, implementation)
    for operation in (get_operation(name) for names in FAMILIES.values() for name in names)
    for implementation in operation.implementations
    if "triton" in implementation.requires
]
"""Every implementation in Triton."""

_compiled: dict[tuple[Any, ...], Resources] = {}


def pretend(patch: pytest.MonkeyPatch, capability: int = 90) -> None:
    """Let launchers choose launches for a compute capability and take tensors on the CPU: they are only recorded."""
    if triton.knobs.runtime.interpret:
        pytest.fail("these tests compile: run them without TRITON_INTERPRET")
    for module in MODULES:
        if hasattr(module, "capability"):
            patch.setattr(module, "capability", lambda device: divmod(capability, 10))
        if hasattr(module, "check_kernel_support"):
            patch.setattr(module, "check_kernel_support", lambda *_, **__: None)


def record(
    case: Case, capability: int = 90, *, training: bool = True, carry: bool = True, kind: str | None = None
) -> list[Launch]:
    """Return the launches of a forward and, training, backward pass (of one call where that is a decoding step).

    Args:
        carry: whether it takes an initial state and returns the last one.
        kind: how its inputs are laid out, see :func:`.laws.strided`; None: contiguous.
    """
    operation = case.operation
    inputs = operation.make_inputs(case.sizes, dtype=case.dtype)
    if case.layout is not None:
        inputs = LAYOUTS[case.layout](inputs)
    if kind is not None:
        inputs = {name: strided(x, kind) if x.dim() > 2 else x for name, x in inputs.items()}
    operation.leaves(inputs, gradients=training)
    documents = len(case.options.get("cu_seqlens", ())) - 1
    shapes = state_shapes(case.op, {**case.sizes, "batch": documents} if documents > 0 else case.sizes) if carry else []
    state = public_state(
        [torch.zeros(shape, requires_grad=training and n < 2) for n, shape in enumerate(shapes)] or None
    )
    carried = {} if state is None else {"initial_state": state, "return_last_state": True}
    with pytest.MonkeyPatch.context() as patch, record_launches(*MODULES) as launches, torch.set_grad_enabled(training):
        pretend(patch, capability)
        outputs = tree_leaves(case.function(*inputs.values(), **case.options, **carried))
        if training:
            outputs = [x for x in outputs if x.requires_grad]
            torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])
    return launches


def check(launches: Sequence[Launch], capability: int = 90, *, max_stack_bytes: int | None = MAX_STACK_BYTES) -> None:
    """Compile the launches, equal ones once, and hold them to the chip's shared memory and to a stack frame.

    On Hopper products may not wait for each other, which takes up to half of a kernel's speed.
    """
    assert launches
    limit = SHARED_MEMORY_BYTES[capability]
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
