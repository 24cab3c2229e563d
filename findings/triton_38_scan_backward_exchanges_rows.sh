#!/usr/bin/env bash
# Triton 3.8.0 and 3.9.0, compiled for Hopper without a GPU: a sum from each row to the last of a tile, as a scan with
# reverse=True, is much dearer than the sum from the first row to each, though each thread holds consecutive rows.
#
# Guessed first: a scan backward is one forward with the order of steps reversed, and takes as many instructions.
#
# Seen: exchanges between threads (shfl) in the kernel's code, of a tile of 64 rows, eight lanes with eight rows each; the
# last is the total less the sum until the row before
#
#     3.8.0 forward 8, backward 168, by the total 14
#     3.9.0 forward 8, backward 40, by the total 14
#
# The tile is turned over, scanned forward, and turned over again: 160 exchanges in 3.8.0, in 3.9.0 two for each of a
# thread's 16 elements.
#
# Exits with 0 while this is so, and with another status once it has changed. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for version in 3.8.0 3.9.0; do
    python3 -m pip install --quiet --no-deps --target "$folder/$version" "triton==$version"
done

cat >"$folder/scan.py" <<'PYTHON'
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def sums(x_ptr, y_ptr, HOW: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([8, 2], [8, 4], [1, 8], [1, 0])
    row, column = gl.arange(0, 64, gl.SliceLayout(1, layout)), gl.arange(0, 64, gl.SliceLayout(0, layout))
    offs = row[:, None] * 64 + column[None, :]
    x = gl.load(x_ptr + offs)
    if HOW == "total":
        y = x - gl.associative_scan(x, 0, add) + gl.sum(x, 0)[None, :]
    else:
        y = gl.associative_scan(x, 0, add, reverse=HOW == "backward")
    gl.store(y_ptr + offs, y)


signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "HOW": "constexpr"}
found = {}
for how in ("forward", "backward", "total"):
    source = GluonASTSource(sums, signature, {"HOW": how})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    found[how] = len(re.findall(r"\bshfl\.", kernel.asm["ptx"]))
forward, backward, total = found.values()
print(f"{triton.__version__} forward {forward}, backward {backward}, by the total {total}")
assert backward > {"3.8.0": 10, "3.9.0": 3}[triton.__version__] * forward and total < 3 * forward, found
PYTHON

# 3.9.0 warns where this is not set.
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
for version in 3.8.0 3.9.0; do
    PYTHONPATH="$folder/$version" python3 -W ignore "$folder/scan.py"
done
