#!/usr/bin/env bash
# torch 2.13.0: a backward pass marked with torch.autograd.function.once_differentiable drops second derivatives in
# silence if the gradient that comes in is a constant, as that of a sum is. If it requires a gradient, as that of a sum
# of squares does, asking for the second derivative is an error. The wrapper looks at the incoming gradients alone, not
# at the saved tensors, on which the gradient depends as well (torch/autograd/function.py says so in a comment). So
# torch.autograd.functional.hessian returns zeros, too.
#
# Of f(x) = x^3 at x = 2, f' = 12 and f'' = 12. Seen:
#
#     f(x).sum():           f' = 12.0, requires_grad False; f'^2 + x by backward(): x.grad = 1.0, exact 289.0; no error
#     functional.hessian:   0.0, exact 12.0; no error
#     f(x).square().sum():  RuntimeError: trying to differentiate twice a function that was marked with
#                           @once_differentiable
#
# Exits with 0 while this is so, and with another status once it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.autograd.function import once_differentiable

assert torch.__version__.partition("+")[0] == "2.13.0", torch.__version__


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * dy


def leaf():
    return torch.tensor([2.0], requires_grad=True)


x = leaf()
(gradient,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
(gradient.square().sum() + x.sum()).backward()
print(f"f(x).sum(): f' = {gradient.item()}, requires_grad {gradient.requires_grad}, x.grad = {x.grad.item()}")
assert gradient.item() == 12.0 and not gradient.requires_grad
assert x.grad.item() == 1.0  # exact: 2 * 12 * 12 + 1 = 289

hessian = torch.autograd.functional.hessian(lambda x: Cube.apply(x).sum(), torch.tensor([2.0]))
print(f"functional.hessian: {hessian.item()}")
assert hessian.item() == 0.0  # exact: 12

x = leaf()
(gradient,) = torch.autograd.grad(Cube.apply(x).square().sum(), x, create_graph=True)
try:
    gradient.sum().backward()
except RuntimeError as error:
    print(f"f(x).square().sum(): RuntimeError: {error}")
    assert "marked with @once_differentiable" in str(error)
else:
    raise AssertionError("a second derivative was returned where the incoming gradient requires one")
PYTHON
