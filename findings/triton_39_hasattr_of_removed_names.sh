#!/usr/bin/env bash
# Triton 3.9.0, compiled without a GPU: hasattr says that tl.make_block_ptr and Gluon's async_copy_global_to_shared are
# there, though no kernel that uses them compiles. The names are kept as functions that only raise an error, and that
# when the kernel is compiled, at its first launch, not at import. Called outside of a kernel they do not show it: that
# raises a ValueError about a missing decorator, as it did before.
#
# Guessed first: a name that a release removed is gone, so that hasattr(tl, "make_block_ptr") tells whether a kernel may
# use it, as packages that support several versions of Triton ask for features.
#
# Seen with 3.7.1 and 3.8.0, which compile both kernels, and with 3.9.0:
#
#     3.8.0: make_block_ptr: hasattr True, compiles
#     3.8.0: async_copy_global_to_shared: hasattr True, compiles
#     3.8.0: hasattr(tl, "advance") True
#     3.9.0: make_block_ptr: hasattr True, CompilationError: Block pointers have been removed in favor of the tensor
#            descriptor API
#     3.9.0: async_copy_global_to_shared: hasattr True, CompilationError: async_copy_global_to_shared has been removed;
#            call async_load instead
#     3.9.0: hasattr(tl, "advance") False
#
# So ask hasattr(tl, "advance") for block pointers (the function that moves them is gone), or compare versions.
#
# Exits with 0 while this is so, and with another status once it has changed. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 3.7.1 3.8.0 3.9.0; do
    python3 -m pip install --quiet --no-deps --target "$folder/$version" "triton==$version"
done

cat >"$folder/removed.py" <<'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@triton.jit
def block_pointers(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (512,), (1,), (0,), (512,), (0,))
    y = tl.make_block_ptr(y_ptr, (512,), (1,), (0,), (512,), (0,))
    tl.store(y, tl.load(x))


@gluon.jit
def asynchronous_copy(x_ptr, y_ptr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    offs = gl.arange(0, 512, layout=layout)
    tile = gl.allocate_shared_memory(gl.float32, [512], shared)
    async_copy.async_copy_global_to_shared(tile, x_ptr + offs)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(y_ptr + offs, tile.load(layout))


def check(module, name, kernel, source, removed):
    """Assert that a module has a name, what a call outside of a kernel raises, and how a kernel with it compiles."""
    there, message = hasattr(module, name), None
    try:
        getattr(module, name)(*[None] * 6)
    except ValueError as error:
        assert "Did you forget to add @triton" in str(error), error
    else:
        raise AssertionError(f"{name} can be called outside of a kernel")
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(2)}
    try:
        triton.compile(
            source(kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, attrs=aligned), target=GPUTarget("cuda", 90, 32)
        )
    except CompilationError as error:
        message = str(error).splitlines()[-1]
    print(f"{version}: {name}: hasattr {there}, {f'CompilationError: {message}' if message else 'compiles'}")
    assert there and message == removed


version = triton.__version__
gone = version == "3.9.0"
check(
    tl, "make_block_ptr", block_pointers, ASTSource,
    "Block pointers have been removed in favor of the tensor descriptor API" if gone else None,
)  # fmt: skip
check(
    async_copy, "async_copy_global_to_shared", asynchronous_copy, GluonASTSource,
    "async_copy_global_to_shared has been removed; call async_load instead" if gone else None,
)  # fmt: skip
print(f'{version}: hasattr(tl, "advance") {hasattr(tl, "advance")}')
assert hasattr(tl, "advance") != gone
PYTHON

# 3.9.0 warns where this is not set.
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
for version in 3.7.1 3.8.0 3.9.0; do
    PYTHONPATH="$folder/$version" python3 -W ignore "$folder/removed.py"
done
