"""For all tests: what a stage imports and skips, nothing of the user's files, and commands that run in this process."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from lrbench.tests.command_line import ENVIRON, Lrbench, Run


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that nowhere say the marker of which a stage is: importing all of them takes a quarter minute."""
    marker = config.option.markexpr.partition(" ")[0]
    if marker in ("interpret", "compile", "speed") and collection_path.suffix == ".py":
        # A case may say it of itself (tests/kernels/cases.py); the other two words stand in most files.
        said = marker if marker == "interpret" else f"mark.{marker}"
        return said not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, the tests whose marker asks for what this process does not have."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        lacking = {"compile": "compiles kernels: run without TRITON_INTERPRET"}
    else:
        lacking = {"interpret": "needs TRITON_INTERPRET=1 in the environment: make test-interpret"}
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            lacking["gpu"] = f"no CUDA device: torch {torch.__version__} sees none"
    for item in items:
        for marker, reason in lacking.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def no_user_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests from what the user has: accelerators of their own, and what was measured of this CPU.

    Its rates are made up: other tests are a load, beside which each command would measure them anew.
    """
    from lrbench.analysis.accelerators import cpu

    roofs = cpu.Roofs(matrix_flops={"fp32": 4e11, "fp64": 2e11}, bandwidth_bytes_s=3e10, source="measured by nobody")
    own = {"LRBENCH_ACCELERATORS": "", "LRBENCH_CACHE": str(tmp_path_factory.mktemp("cache"))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
            patch.setitem(ENVIRON, name, value)
        cpu.remember(roofs)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Make interpreted kernels take less than half of the time, with the same results.

    Triton patches its language again at every call of a device function, looks each type's properties up anew for every
    tensor, and scans and reduces element by element. Here what is patched for one module's functions stays so, a type's
    properties are kept, and whole rows are combined. Operands of one type are not cast, those of one shape not
    broadcast, a number becomes a tensor of each type once, and overflows, which Triton looks for but reports in debug
    mode alone, are not looked for.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import numpy as np
    from triton.language import core
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang
    dtype_of, init_block, init_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    reduce_all = interpreter.ReduceOps.generic_reduce
    semantic = type(interpreter.interpreter_semantic)
    match_operands, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    patched: set[int] = set()
    dtypes: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    numbers: dict[Any, Any] = {}

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch_language(fn)
        return interpreter._LangPatchScope()

    def known_dtype(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = dtype_of(type)
        return dtypes[type.name]

    def known_block(block: Any, element: Any, shape: Any) -> None:
        key = (element.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            init_block(block, element, shape)
            blocks[key] = dict(vars(block))
        vars(block).update(blocks[key])

    def known_tensor(tensor: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            init_tensor(tensor, handle, type)
            tensors[type.name] = {name: getattr(tensor, name) for name in ("shape", "numel", "dtype")}
        vars(tensor).update(tensors[type.name], handle=handle, type=type)

    def match_once(self: Any, *operands: Any, **division: Any) -> Any:
        (lhs, rhs), others = operands[:2], operands[2:]
        if division or len(others) > 2:
            return match_operands(self, *operands, **division)
        names = [x.type.name if isinstance(x, core.tensor) else repr(x) for x in (lhs, rhs)]
        tensor = isinstance(lhs, core.tensor)
        if tensor and names[0] == names[1] and not lhs.dtype.is_ptr():
            return lhs, rhs
        if not isinstance(rhs if tensor else lhs, int | float):
            return match_operands(self, *operands)
        key = (*names, tensor)
        if key in numbers:
            return (lhs, numbers[key]) if tensor else (numbers[key], rhs)
        matched = match_operands(self, *operands)
        if matched[not tensor] is (lhs if tensor else rhs):
            numbers[key] = matched[tensor]
        return matched

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = (getattr(x.type, "shape", None) for x in (lhs, rhs))
        return (lhs, rhs) if one is other or one == other else broadcast(self, lhs, rhs)

    def have_same_values(one: Any, other: Any) -> Any:
        return core.constexpr(other is not None and one.values == [*other])

    def combined(scan: Any, inputs: Any) -> list[list[Any]]:
        """Return what each input is combined to, row by row of the axis."""
        found: list[Any] = []
        for row in zip(*(np.moveaxis(x.handle.data, scan.axis, 0) for x in inputs), strict=True):
            values = tuple(scan.to_tensor(part, x.dtype) for part, x in zip(row, inputs, strict=True))
            values = scan.combine_fn.fn(*found[-1], *values) if found else values
            found.append(values if isinstance(values, tuple) else (values,))
        parts = zip(row, zip(*found, strict=True), strict=True)
        return [[value.handle.data.reshape(np.shape(part)) for value in values] for part, values in parts]

    def scan_rows(scan: Any, inputs: Any) -> list[Any]:
        rows = zip(combined(scan, inputs), inputs, strict=True)
        return [scan.to_tensor(np.stack(values, scan.axis), x.dtype) for values, x in rows]

    def reduce_rows(reduction: Any, inputs: Any) -> list[Any]:
        if reduction.axis is None or reduction.keep_dims:
            return reduce_all(reduction, inputs)
        rows = zip(combined(reduction, inputs), inputs, strict=True)
        return [reduction.to_tensor(values[-1], x.dtype) for values, x in rows]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", known_dtype)
        patch.setattr(core.block_type, "__init__", known_block)
        patch.setattr(core.tensor, "__init__", known_tensor)
        patch.setattr(semantic, "binary_op_type_checking_impl", match_once)
        patch.setattr(semantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
        patch.setattr(semantic, "broadcast_impl_value", broadcast_unlike)
        patch.setattr(core.tuple, "__eq__", have_same_values)
        patch.setattr(interpreter.ScanOps, "generic_scan", scan_rows)
        patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_rows)
        yield


built_commands = cache(typer.main.get_command)
"""Build the command line once, which takes as long as many a command."""


@pytest.fixture
def lrbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lrbench:
    """Run a command in this process; return its exit code and what it wrote to both streams."""
    from lrbench import cli

    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(typer.main, "get_command", built_commands)

    def run(command: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lrbench", *command.split(), *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def one_look_at_the_machine() -> Iterator[None]:
    """Ask a worker once what this machine is: each answer takes seconds. Commands in processes of their own ask."""
    from lrbench.analysis.accelerators.known import known_accelerators
    from lrbench.bench.drive import session, workers

    found = cache(workers.probe_environment)

    def once(*asked: object) -> object:
        # A bad file of accelerators is said every time.
        known_accelerators()
        return found(*asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "probe_environment", once)
        patch.setattr(session, "probe_environment", once)
        yield


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take stored rows for those of an idle machine, which --resume does not measure again."""
    from lrbench.bench.drive import session

    monkeypatch.setattr(session, "marked", lambda records: [dataclasses.replace(each, noise=None) for each in records])


@pytest.fixture
def run(lrbench: Lrbench) -> Run:
    """Run a command that must succeed; return what it prints."""
    return Run(lrbench)
