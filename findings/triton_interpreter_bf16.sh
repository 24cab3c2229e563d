#!/usr/bin/env bash
# Triton 3.8.0, TRITON_INTERPRET=1, torch 2.13.0, on a CPU: a kernel multiplies and adds the bits of bfloat16 tensors as
# integers, and so gives numbers without meaning, without a warning or an error. Conversion from float32 truncates
# instead of rounding to nearest. float16 is computed rightly.
#
# The output:
#
#   torch.float16 product: [1.5, 6.0, 1.5, -2.0], expected [1.5, 6.0, 1.5, -2.0]
#   torch.float16 sum: [2.5, 5.0, 3.5, 3.5], expected [2.5, 5.0, 3.5, 3.5]
#   torch.bfloat16 product: [1.0842021724855044e-19, 0.0, -2.0, -0.0], expected [1.5, 6.0, 1.5, -2.0]
#   torch.bfloat16 sum: [2.5521177519070385e+38, -5.877471754111438e-39, 2.5521177519070385e+38, -inf], expected [2.5, 5.0, 3.5, 3.5]
#   1.99 from float32: 1.984375, expected 1.9921875
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.8.0 numpy==2.2.6

cat >"$folder/bf16.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def arithmetic(x_ptr, y_ptr, product_ptr, sum_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(product_ptr + offs, x * y)
    tl.store(sum_ptr + offs, x + y)


@triton.jit
def convert(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr).to(tl.bfloat16))


def products_and_sums(dtype):
    """Run the kernel; return the tensors, and what it has written."""
    x = torch.tensor([1.5, 2.0, 3.0, -0.5], dtype=dtype)
    y = torch.tensor([1.0, 3.0, 0.5, 4.0], dtype=dtype)
    product, total = torch.empty_like(x), torch.empty_like(x)
    arithmetic[(1,)](x, y, product, total, N=4)
    for name, found, expected in (("product", product, x * y), ("sum", total, x + y)):
        print(f"{dtype} {name}: {found.tolist()}, expected {expected.tolist()}")
    return x, y, product, total


x, y, product, total = products_and_sums(torch.float16)
assert torch.equal(product, x * y) and torch.equal(total, x + y)
x, y, product, total = (each.view(torch.int16) for each in products_and_sums(torch.bfloat16))
assert torch.equal(product, x * y) and torch.equal(total, x + y), "bfloat16 is no longer computed as integers"
x, y = torch.tensor([1.99]), torch.empty(1, dtype=torch.bfloat16)
convert[(1,)](x, y)
print(f"1.99 from float32: {y.item()}, expected {x.bfloat16().item()}")
assert y.item() == 1.984375 and x.bfloat16().item() == 1.9921875
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/bf16.py"
