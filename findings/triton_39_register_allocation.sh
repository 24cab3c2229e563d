#!/usr/bin/env bash
# Triton 3.9.0, sm_90, compiled without a GPU: a kernel at the limit of 255 registers spills more than with 3.8.0, and
# half of the difference goes away with the launch option ptx_options="--regAllocOptLevel=4".
#
# Guessed first: a newer assembler spills no more than the older one, and a flag that the compiler passes for every
# kernel does not change how registers are allocated.
#
# Triton 3.8.0 assembles for sm_90 with ptxas 12.9; 3.9.0 takes the binary that is still named ptxas-blackwell, which is
# ptxas 13.4. Both pass --regAllocOptLevel=2, to avoid a bug of ptxas 13, as a comment in Triton's
# backends/nvidia/compiler.py says. Level 4 makes no difference to ptxas 12.9, but it does to ptxas 13.4. Options of a
# launch come after Triton's own, so their level counts. It switches off what avoids that bug: compare the kernel's
# results with and without it. TRITON_PTXAS_BLACKWELL_PATH gives 3.9.0 its own copy of ptxas 12.9, which spills as
# little as ptxas 13.4 with level 4. What then remains over 3.8.0 is due to Triton's PTX.
#
# Seen, for linear attention with a decay (a loop of four products; a state of 128 x 128 in the registers of 4 warps):
#
#     Triton 3.8.0, ptxas V12.9: 255 registers, 128 bytes of stack; with level 4: 128
#     Triton 3.9.0, ptxas V13.4: 255 registers, 232 bytes of stack; with level 4: 176
#     Triton 3.9.0, ptxas V12.9: 255 registers, 176 bytes of stack; with level 4: 176
#
# Exits with 0 while this is so, and with another status once it has changed. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 3.8.0 3.9.0; do
    python3 -m pip install --quiet --no-deps --target "$folder/$version" "triton==$version"
done

cat >"$folder/stack.py" <<'PYTHON'
import re
import subprocess
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import ASTSource


@triton.jit
def linear_attention(q_ptr, k_ptr, v_ptr, g_ptr, o_ptr, n, D: tl.constexpr, N: tl.constexpr):
    rows, dims = tl.arange(0, N), tl.arange(0, D)
    state = tl.zeros((D, D), tl.float32)
    for start in range(0, n, N):
        tile = (start + rows)[:, None] * D + dims
        q, k, v = tl.load(q_ptr + tile), tl.load(k_ptr + tile), tl.load(v_ptr + tile)
        g = tl.load(g_ptr + start + rows).to(tl.float32)
        scores = tl.dot(q, tl.trans(k)) * tl.exp2(g[:, None] - g[None, :])
        scores = tl.where(rows[:, None] >= rows[None, :], scores, 0.0)
        out = tl.dot(q, state.to(tl.bfloat16)) * tl.exp2(g)[:, None]
        out = tl.dot(scores.to(tl.bfloat16), v, out)
        tl.store(o_ptr + tile, out.to(tl.bfloat16))
        last = tl.sum(tl.where(rows == N - 1, g, 0.0), 0)
        state = tl.dot(tl.trans(k), (v * tl.exp2(last - g)[:, None]).to(tl.bfloat16), state * tl.exp2(last))


def usage(ptx_options):
    """Return the registers of a thread, and the bytes of its stack."""
    signature = {name: "*bf16" for name in ("q_ptr", "k_ptr", "v_ptr", "g_ptr", "o_ptr")}
    signature |= {"n": "i32", "D": "constexpr", "N": "constexpr"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(6)}
    source = ASTSource(linear_attention, signature, {"D": 128, "N": 64}, aligned)
    options = {"num_warps": 4, "num_stages": 2, "ptx_options": ptx_options}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin = Path(sys.argv[1], "kernel.cubin")
    cubin.write_bytes(compiled.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    shown = subprocess.run([cuobjdump, "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    return tuple(int(re.search(rf"\b{name}:(\d+)", shown)[1]) for name in ("REG", "STACK"))


(registers, stack), (_, at_level_4) = usage(None), usage("--regAllocOptLevel=4")
ptxas = re.search(r"V\d+\.\d+", get_ptxas_version(90))[0]
found = f"{registers} registers, {stack} bytes of stack; with level 4: {at_level_4}"
print(f"Triton {triton.__version__}, ptxas {ptxas}: {found}")
expected = {("3.8.0", "V12.9"): (128, 128), ("3.9.0", "V13.4"): (232, 176), ("3.9.0", "V12.9"): (176, 176)}
assert (registers, stack, at_level_4) == (255, *expected[triton.__version__, ptxas])
PYTHON

# 3.9.0 warns where this is not set. No other assembler than the packages' own, and no other options.
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
unset TRITON_PTXAS_PATH TRITON_PTXAS_BLACKWELL_PATH PTXAS_OPTIONS
for version in 3.8.0 3.9.0; do
    PYTHONPATH="$folder/$version" python3 "$folder/stack.py" "$folder"
done
export TRITON_CACHE_DIR="$folder/older" TRITON_PTXAS_BLACKWELL_PATH="$folder/3.9.0/triton/backends/nvidia/bin/ptxas"
PYTHONPATH="$folder/3.9.0" python3 "$folder/stack.py" "$folder"
