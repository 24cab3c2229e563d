"""What differs between the versions of Triton that the kernels run with, 3.6 to 3.9."""

from __future__ import annotations

from typing import Any

import triton

from .spec import matches_version

NEW_ASSEMBLER = not (matches_version(triton.__version__, "<3.9") or triton.knobs.runtime.interpret)
"""Whether Triton assembles for Hopper with ptxas 13, as before for Blackwell alone."""


def register_options(capability: tuple[int, int]) -> dict[str, str]:
    """Return options of a launch for a kernel that needs nearly all registers of a thread.

    Because of a bug in ptxas 13, Triton has it allocate registers at level 2, and not at 4, its own. At level 2
    whole_state keeps twice as much in local memory, and takes up to 1.3 times as long.
    """
    return {"ptx_options": "--regAllocOptLevel=4"} if NEW_ASSEMBLER and capability == (9, 0) else {}


def gluon_names() -> tuple[Any, Any, Any, Any]:
    """Return what Gluon gives other names (Triton 3.6 and later): its barrier of a program's threads, its bulk load and
    its bulk store, and its function that gives shared memory another type, shape and layout."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import tma

    # Triton 3.7 renamed the first, 3.8 the next two, whose old names 3.9 keeps, but they raise, and 3.9 the last.
    memory = gl.shared_memory_descriptor
    return (
        getattr(gl, "barrier", None) or gl.thread_barrier,
        getattr(tma, "async_load", None) or tma.async_copy_global_to_shared,
        getattr(tma, "async_store", None) or tma.async_copy_shared_to_global,
        getattr(memory, "reinterpret", None) or memory._reinterpret,
    )
