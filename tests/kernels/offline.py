"""Compile kernel launches for a given GPU architecture, without a GPU, and read the resources they take.

A :class:`Recorder` takes a kernel's place in its module, so that the ordinary launcher records launches instead of
running them; :func:`compile_launch` compiles one for a compute capability and :class:`Resources` holds registers, stack
and shared memory. This does not work under TRITON_INTERPRET=1, where decorated kernels are not jit functions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from lrbench.kernels.common.arguments import CASE_DTYPES
from lrbench.kernels.common.remember import RememberedKernel

_TYPES = {**CASE_DTYPES, torch.int32: "i32", torch.int64: "i64", torch.int8: "i8", torch.bool: "i1"}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ptx_options")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one compiled launch takes: registers and stack bytes per thread, shared memory bytes per block.

    ``serialised``: whether the assembler makes each of Hopper's asynchronous matrix products (wgmma) wait for the one
    before.
    """

    kernel: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    serialised: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded launch: the kernel, its bound arguments and its options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    def compile_key(self) -> tuple[Any, ...]:
        """Return what compilation depends on: launches with equal keys give the same binary."""
        signature, constexprs, _ = _specialise(self)
        return self.kernel.__name__, *signature.items(), *constexprs.items(), *sorted(self.options.items())


class Recorder:
    """Stands in for a jit function and records what it would have launched."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: Any) -> Recorder:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        self.launches.append(Launch(self.kernel, arguments, options))


@contextmanager
def record_launches(*modules: Any) -> Iterator[list[Launch]]:
    """Replace every jit function of ``modules`` by a recorder; yield the list to which they append launches."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in [*vars(module).items()]:
                kernel = value.kernel if isinstance(value, RememberedKernel) else value
                if isinstance(kernel, triton.JITFunction):
                    patch.setattr(module, name, Recorder(kernel, launches))
        yield launches


def _specialise(launch: Launch) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Return the signature, constexprs and attributes of a launch; pointers are taken to be aligned to 16 bytes."""
    parameters = {p.name: p for p in launch.kernel.params}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def specialise(value: Any, path: tuple[int, ...], annotation: str | None) -> Any:
        if value is None:
            constexprs[path] = None
            return "constexpr"
        if isinstance(value, tuple):
            parts = [specialise(part, (*path, index), None) for index, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{_TYPES[value.base.dtype]}[{','.join(map(str, value.block_shape))}]>"
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return "*" + _TYPES[value.dtype]
        if isinstance(value, bool):
            return "i1"
        if annotation:
            return annotation
        if isinstance(value, int):
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    signature: dict[str, Any] = {}
    for index, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        if parameters[name].is_constexpr:
            signature[name] = "constexpr"
            constexprs[(index,)] = value
        else:
            signature[name] = specialise(value, (index,), parameters[name].annotation_type)
    return signature, constexprs, attributes


def compile_kernel(launch: Launch, capability: int) -> Any:
    """Return triton's compiled kernel of a recorded launch: its ``asm`` holds ptx and cubin, and its metadata has what
    the assembler reported as ``ptxas_log``."""
    signature, constexprs, attributes = _specialise(launch)
    source = _source_of(launch.kernel)(fn=launch.kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    with triton.knobs.runtime.scope(), triton.knobs.nvidia.scope():
        triton.knobs.runtime.add_stages_inspection_hook = _keep_log
        triton.knobs.nvidia.dump_ptxas_log = True
        return triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={**launch.options, "enable_fp_fusion": True}
        )


def _keep_log(*stages_of: Any) -> tuple[str, str] | None:
    """Let the last stage add the assembler's report to the metadata, which Triton's cache keeps too.

    Triton calls this without arguments (3.6 does not) for what sets such kernels apart in its cache.
    """
    if not stages_of:
        return "ptxas_log", "ptxas_log"
    stages = stages_of[1]
    assemble = stages["cubin"]

    def assemble_and_keep_log(ptx: str, metadata: dict[str, Any]) -> bytes:
        with redirect_stdout(StringIO()) as log:
            cubin: bytes = assemble(ptx, metadata)
        metadata["ptxas_log"] = log.getvalue()
        return cubin

    stages["cubin"] = assemble_and_keep_log
    return None


def _source_of(kernel: Any) -> type[ASTSource]:
    """Return the class from which triton compiles a kernel, another one for kernels in Gluon."""
    if not (hasattr(kernel, "is_gluon") and kernel.is_gluon()):
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile a recorded launch for compute capability ``capability`` (80, 90, 100) and read its resources.

    The assembler reports that it serialises Hopper's asynchronous matrix products (wgmma) if other instructions touch
    an accumulator or a register operand while products are in flight, if registers run out, or if products are in
    flight across a call or a divergent branch.
    """
    metadata = compile_kernel(launch, capability).metadata
    log = metadata.ptxas_log
    found = re.search(r"(\d+) bytes stack frame.*Used (\d+) registers", log, re.DOTALL)
    if found is None:
        raise RuntimeError(f"ptxas reported no resource usage: {log}")
    return Resources(
        kernel=launch.kernel.__name__,
        capability=capability,
        registers=int(found[2]),
        stack_bytes=int(found[1]),
        shared_bytes=metadata.shared,
        num_warps=metadata.num_warps,
        serialised="wgmma.mma_async instructions are serialized" in log,
    )


def read_instructions(cubin: bytes) -> list[str]:
    """Return the machine instructions of the one function in ``cubin`` in order, predicates and operands included."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;/]+?)\s*;", code)
