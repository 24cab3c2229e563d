#!/usr/bin/env bash
# Triton 3.9.0, TRITON_INTERPRET=1, torch 2.13.0, on a CPU: if a mask joins a comparison of a tensor with one of a number,
# (offs < N) & (limit > 0), the load raises an error. 3.8.0 computes it, and so do both versions where each comparison has
# a tensor in it. For a GPU 3.9.0 compiles the kernel, so only its tests in the interpreter fail.
#
# Guessed first: a kernel that 3.8.0 interprets and 3.9.0 compiles is interpreted by 3.9.0 too.
#
# The output:
#
#     3.8.0: tensors: sum 16.0
#     3.8.0: tensor and number: sum 16.0
#     3.9.0: tensors: sum 16.0
#     3.9.0: tensor and number: InterpreterError: ValueError('mask has unsupported dtype')
#     3.9.0: tensor and number, for sm_90: compiles
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
for version in 3.8.0 3.9.0; do
    "$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/$version" "triton==$version"
done

cat >"$folder/masks.py" <<'PYTHON'
import sys

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def copy(x_ptr, y_ptr, limit, N: tl.constexpr, NUMBER: tl.constexpr):
    offs = tl.arange(0, N)
    mask = (offs < N) & (limit > 0) if NUMBER else (offs < N) & (offs < limit)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask, other=0.0))


version = triton.__version__
if "compile" in sys.argv:
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "limit": "i32", "N": "constexpr", "NUMBER": "constexpr"}
    source = ASTSource(copy, signature, constexprs={(3,): 16, (4,): True})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    print(f"{version}: tensor and number, for sm_90: compiles")
    sys.exit()
for name, number in (("tensors", False), ("tensor and number", True)):
    y, message = torch.zeros(16), None
    try:
        copy[(1,)](torch.ones(16), y, 16, N=16, NUMBER=number)
    except triton.runtime.errors.InterpreterError as error:
        message = str(error)
    print(f"{version}: {name}: {f'InterpreterError: {message}' if message else f'sum {y.sum().item()}'}")
    refused = version == "3.9.0" and number
    assert message == ("ValueError('mask has unsupported dtype')" if refused else None)
    assert y.sum() == (0 if refused else 16)
PYTHON

# 3.9.0 warns where the second is not set.
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
for version in 3.8.0 3.9.0; do
    PYTHONPATH="$folder/$version" TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/masks.py"
done
PYTHONPATH="$folder/3.9.0" "$folder/venv/bin/python" -W ignore "$folder/masks.py" compile
