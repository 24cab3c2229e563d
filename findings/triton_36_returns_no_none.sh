#!/usr/bin/env bash
# Triton 3.6.0, 3.7.1 and 3.9.0, compiled for Hopper without a GPU: in all of them a kernel makes a tuple with None in it
# and hands it to a function. With 3.6.0 a function that returns such a tuple does not compile.
#
# Guessed first: what a function takes it may return.
#
# Seen:
#
#     3.6.0 takes: compiled; returns: cannot convert None of type <class 'NoneType'> to tensor
#     3.7.1 takes: compiled; returns: compiled
#     3.9.0 takes: compiled; returns: compiled
#
# It turns constants of a result into tensors, and None is one of them.
#
# Exits with 0 while this is so, and with another status once it has changed. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for version in 3.6.0 3.7.1 3.9.0; do
    python3 -m pip install --quiet --no-deps --target "$folder/$version" "triton==$version"
done

cat >"$folder/none.py" <<'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def shifted(pair, by):
    first, second = pair
    if second is not None:
        second += by
    return first + by, second


@triton.jit
def loaded(pair):
    x = tl.load(pair[0])
    if pair[1] is not None:
        x += tl.load(pair[1])
    return x


@triton.jit
def kernel(x_ptr, y_ptr, by, RETURNED: tl.constexpr):
    pair = (x_ptr, None)
    if RETURNED:
        pair = shifted(pair, by)
    tl.store(y_ptr, loaded(pair))


def outcome(returned):
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "by": "i32", "RETURNED": "constexpr"}
    source = ASTSource(kernel, signature, {"RETURNED": returned})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return str(error)
    return "compiled"


takes, returns = outcome(False), outcome(True)
print(f"{triton.__version__} takes: {takes}; returns: {returns.splitlines()[-1]}")
assert takes == "compiled", takes
if triton.__version__ == "3.6.0":
    assert "cannot convert None" in returns, returns
else:
    assert returns == "compiled", returns
PYTHON

# 3.9.0 warns where this is not set.
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
for version in 3.6.0 3.7.1 3.9.0; do
    PYTHONPATH="$folder/$version" python3 -W ignore "$folder/none.py"
done
