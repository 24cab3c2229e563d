#!/usr/bin/env bash
# torch 2.13.0: counting FLOPs can change gradients. An operator of torch.library.Library with a Python function for the
# key CPU, and none for Autograd, passes on gradients, since autograd records what the function calls. Under any
# TorchDispatchMode, even one that does nothing, and so under FlopCounterMode, it records nothing: the gradient through
# the operator is missing, and the other terms come back as if they were the whole, also if the mode has ended before
# the backward pass. The warning, that no autograd kernel is registered, is the same where the gradient is right.
# Registering for CompositeImplicitAutograd avoids it. FlopCounterMode counts 0 FLOPs of such an operator and of one of
# torch.library.custom_op, though their functions call a matrix product that it counts otherwise, and says nothing.
#
# Guessed first: gradients under FlopCounterMode are those without it; an operator without a FLOP formula counts 0 in
# silence. The second is so.
#
# Of z = f(x, y) + x, f(x, y) = x @ y, for 16 x 16 matrices of ones, dz.sum()/dx = 17 and dz.sum()/dy = 16. The output:
#
#     CPU, nullcontext: x.grad [17.0], y.grad [16.0], warnings 1
#     CPU, Nothing: x.grad [1.0], y.grad None, warnings 1
#     CPU, FlopCounterMode: x.grad [1.0], y.grad None, warnings 1, 0 FLOPs
#     CompositeImplicitAutograd, nullcontext: x.grad [17.0], y.grad [16.0], warnings 0
#     CompositeImplicitAutograd, Nothing: x.grad [17.0], y.grad [16.0], warnings 0
#     CompositeImplicitAutograd, FlopCounterMode: x.grad [17.0], y.grad [16.0], warnings 0, 8192 FLOPs
#     custom_op: 0 FLOPs, the product alone: 8192
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6

"$folder/venv/bin/python" - <<'PYTHON'
import contextlib
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

assert torch.__version__.partition("+")[0] == "2.13.0", torch.__version__


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


library = torch.library.Library("finding", "DEF")
for key in ("CPU", "CompositeImplicitAutograd"):
    library.define(f"{key}(Tensor x, Tensor y) -> Tensor")
    library.impl(key, torch.matmul, key)


@torch.library.custom_op("finding::custom_op", mutates_args=())
def custom_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def gradients(key, mode):
    """Return the gradients of x and y, None where missing, and the warnings; the mode ends before the backward pass."""
    x, y = torch.ones(16, 16, requires_grad=True), torch.ones(16, 16, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mode:
            z = getattr(torch.ops.finding, key)(x, y) + x
        z.sum().backward()
    found = [None if each.grad is None else each.grad.unique().tolist() for each in (x, y)]
    return found, [str(warning.message).partition(". ")[0] for warning in caught]


warned = (
    "finding::CPU: an autograd kernel was not registered to the Autograd key(s)"
    " but we are trying to backprop through it"
)
for key in ("CPU", "CompositeImplicitAutograd"):
    for mode in (contextlib.nullcontext(), Nothing(), FlopCounterMode(display=False)):
        found, messages = gradients(key, mode)
        counted = f", {mode.get_total_flops()} FLOPs" if isinstance(mode, FlopCounterMode) else ""
        print(f"{key}, {type(mode).__name__}: x.grad {found[0]}, y.grad {found[1]}, warnings {len(messages)}{counted}")
        lost = key == "CPU" and not isinstance(mode, contextlib.nullcontext)
        assert found == ([[1.0], None] if lost else [[17.0], [16.0]])
        assert messages == ([warned] if key == "CPU" else []), messages
        if counted:
            assert mode.get_total_flops() == (0 if key == "CPU" else 2 * 16**3)

x = torch.ones(16, 16)
with FlopCounterMode(display=False) as inside, warnings.catch_warnings():
    warnings.simplefilter("error")
    custom_op(x, x)
with FlopCounterMode(display=False) as outside:
    x @ x
print(f"custom_op: {inside.get_total_flops()} FLOPs, the product alone: {outside.get_total_flops()}")
assert inside.get_total_flops() == 0 and outside.get_total_flops() == 2 * 16**3
PYTHON
