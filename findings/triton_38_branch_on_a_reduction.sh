#!/usr/bin/env bash
# Triton 3.8.0 and its ptxas 12.9, compiled for Hopper without a GPU: an if on a block-wide reduction makes each of
# Hopper's asynchronous matrix products (wgmma) in the kernel wait for the one before, where one of them, behind the if,
# adds to values that were computed. An if on a number loaded from memory does not, and neither does the same reduction
# after a vote of the warp.
#
# Guessed first: all threads have a reduction's result, so the compiler knows that they take the same way, as it does of
# a number that all load from one address.
#
# Seen: products and waits in the machine code, of a kernel with 16 products
#
#     3.8.0: loaded: 16 products, 3 waits
#     3.8.0: reduced: 16 products, 16 waits
#     3.8.0: voted: 16 products, 3 waits
#     3.9.0: loaded: 16 products, 3 waits
#     3.9.0: reduced: 16 products, 3 waits
#     3.9.0: voted: 16 products, 3 waits
#
# 3.8.0's assembler says so only in its log, which Triton does not print: serialized due to program dependence on
# compiler-inserted WG.AR in divergent path (C7520). A reduction's result comes out of shared memory and shuffles, so it
# may differ between threads for all that ptxas knows. The result of vote.sync is known to be the warp's. Triton 3.9.0
# assembles for Hopper with ptxas 13, which has no need of it.
#
# Exits with 0 while this is so, and with another status once it has changed. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for version in 3.8.0 3.9.0; do
    python3 -m pip install --quiet --no-deps --target "$folder/$version" "triton==$version"
done

cat >"$folder/branch.py" <<'PYTHON'
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def any_of_the_warp(condition):
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, r; setp.ne.b32 p, $1, 0; vote.sync.any.pred r, p, 0xffffffff; selp.b32 $0, 1, 0, r; }",
        "=r,r", [condition.to(gl.int32)], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def products(x_ptr, y_ptr, flag_ptr, HOW: gl.constexpr):
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row, column = gl.arange(0, 64, gl.SliceLayout(1, lines)), gl.arange(0, 64, gl.SliceLayout(0, lines))
    offs = row[:, None] * 64 + column[None, :]
    x = gl.load(x_ptr + offs)
    x_s = gl.allocate_shared_memory(gl.float16, [64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    x_s.store(x)
    fence_async_shared()
    gl.barrier()
    if HOW == "loaded":
        large = gl.load(flag_ptr) > 0
    else:
        large = gl.max(gl.max(x.to(gl.float32), 1), 0) > 1.0
        if HOW == "voted":
            large = any_of_the_warp(large) != 0
    zeros = gl.zeros([64, 64], gl.float32, square)
    row, column = gl.arange(0, 64, gl.SliceLayout(1, square)), gl.arange(0, 64, gl.SliceLayout(0, square))
    near = row[:, None] // 8 == column[None, :] // 8
    if large:
        y = warpgroup_mma(x_s, x_s.permute((1, 0)), zeros, is_async=True, use_acc=False)
        y = warpgroup_mma_wait(0, deps=[y])
        z = warpgroup_mma(x_s, x_s.permute((1, 0)), gl.where(near, y, 0.0), is_async=True)
        y = warpgroup_mma(x_s, x_s, gl.where(near, y, 0.0), is_async=True)
        y, z = warpgroup_mma_wait(0, deps=[y, z])
        y = y + z
    else:
        y = warpgroup_mma(x_s, x_s, zeros, is_async=True, use_acc=False)
        y = warpgroup_mma_wait(0, deps=[y])
    gl.store(y_ptr + offs, gl.convert_layout(y, lines))


version = triton.__version__
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
for how in ("loaded", "reduced", "voted"):
    signature = {"x_ptr": "*fp16", "y_ptr": "*fp32", "flag_ptr": "*i32", "HOW": "constexpr"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = GluonASTSource(products, signature, {(3,): how}, attrs=aligned)
    Path("x.cubin").write_bytes(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])
    code = subprocess.run([tool, "-sass", "x.cubin"], capture_output=True, text=True, check=True).stdout
    found, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
    print(f"{version}: {how}: {found} products, {waits} waits")
    assert (found, waits) == (16, 16 if (version, how) == ("3.8.0", "reduced") else 3)
PYTHON

# 3.9.0 warns where this is not set.
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
for version in 3.8.0 3.9.0; do
    PYTHONPATH="$folder/$version" python3 -W ignore "$folder/branch.py"
done
