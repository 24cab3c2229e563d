#!/usr/bin/env bash
# Triton 3.8.0 and 3.9.0, compiled for Hopper without a GPU: where a kernel's tiles are in shared memory is known when it
# is compiled, and yet costs it registers. A loop over twelve tiles spills. It does not, or half as much, once tiles are
# numbered from a zero that the compiler cannot know, so that it has more to compute.
#
# Guessed first: addresses and descriptors that are constants are made where they are used, for an instruction each, so
# a number that is known only at run time can make it worse alone.
#
# Seen: stores to and loads from local memory in the machine code of 48 products, with 168 registers a thread
#
#     3.8.0: known places: 22 stores, 22 loads
#     3.8.0: hidden places: 0 stores, 0 loads
#     3.9.0: known places: 108 stores, 107 loads
#     3.9.0: hidden places: 44 stores, 29 loads
#
# ptxas moves what does not change out of the loop, for each tile anew, and then has no registers to keep it in. Of what
# changes from turn to turn it keeps one base alone. In 3.9.0, whose ptxas 13 spills more anyway, it helps as well.
#
# Exits with 0 while this is so, and with another status once it has changed. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for version in 3.8.0 3.9.0; do
    python3 -m pip install --quiet --no-deps --target "$folder/$version" "triton==$version"
done

cat >"$folder/places.py" <<'PYTHON'
import re
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def products(x_ptr, y_ptr, start, count, HIDDEN: gl.constexpr):
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    row, column = gl.arange(0, 64, gl.SliceLayout(1, lines)), gl.arange(0, 128, gl.SliceLayout(0, lines))
    offs = row[:, None] * 128 + column[None, :]
    tiles = gl.allocate_shared_memory(gl.float16, [12, 64, 128], gl.NVMMASharedLayout(128, 16, rank=2))
    for n in gl.static_range(12):
        tiles.index(n).store(gl.load(x_ptr + n * 8192 + offs))
    a = gl.zeros([64, 128], gl.float32, wide)
    b = gl.zeros([64, 128], gl.float32, wide)
    for index in range(count):
        # start and count are small numbers from 0 on.
        zero = (start + index) >> 31 if HIDDEN else 0
        fence_async_shared()
        gl.barrier()
        for n in gl.static_range(0, 12, 2):
            left = tiles.index(zero + n).slice(0, 64, dim=1)
            a = warpgroup_mma(left, tiles.index(zero + n + 1), a, is_async=True)
            b = warpgroup_mma(left.permute((1, 0)), tiles.index(zero + n), b, is_async=True)
            a, b = warpgroup_mma_wait(0, deps=[a, b])
            old = tiles.index(zero + n).load(wide)
            tiles.index(zero + n).store((old.to(gl.float32) + a).to(gl.float16))
    gl.store(y_ptr + offs, gl.convert_layout(a + b, lines))


version = triton.__version__
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
signature = {"x_ptr": "*fp16", "y_ptr": "*fp32", "start": "i32", "count": "i32", "HIDDEN": "constexpr"}
stores = {}
for name, hidden in (("known", False), ("hidden", True)):
    source = GluonASTSource(products, signature, {"HIDDEN": hidden})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 168})
    Path(f"{version}.cubin").write_bytes(kernel.asm["cubin"])
    code = subprocess.run([tool, "-sass", f"{version}.cubin"], check=True, capture_output=True, text=True).stdout
    stores[name], loads = (len(re.findall(rf"\b{each}\b", code)) for each in ("STL", "LDL"))
    print(f"{version}: {name} places: {stores[name]} stores, {loads} loads")
assert stores["known"] > 15 and stores["hidden"] <= stores["known"] / 2, stores
assert version != "3.8.0" or stores["hidden"] == 0, stores
PYTHON

# 3.9.0 warns where this is not set.
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
for version in 3.8.0 3.9.0; do
    PYTHONPATH="$folder/$version" python3 -W ignore "$folder/places.py"
done
