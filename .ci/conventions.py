"""Check the project's own conventions: what a reviewer would otherwise have to repeat.

Run by `make lint`. Prints `path:line: what, and what to do instead` for every violation and exits 1 if there is any.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

DECLARATIONS = (
    "kernels.common.spec", "kernels.FAMILIES", "kernels.get_operation", "kernels.common.cache",
    "kernels.baselines.BASELINES", "kernels.baselines.get_implementation", "kernels.baselines.get_operation",
    "kernels.baselines.why_unsupported", "kernels.baselines.spec", "kernels.baselines.operations",
    "kernels.scalar_decay.declare",
    "kernels.scalar_decay.choice",
    "kernels.scalar_decay.plan",
    *(f"kernels.{family}.config" for family in ("scalar_decay", "lightning", "gated_mlp", "rglru", "wkv")),
)  # fmt: skip
"""What analysis may import of kernels: declarations and launches, which import neither torch nor triton."""

ARROWS = {
    "results": frozenset({"results"}),
    "kernels": frozenset({"kernels", "results.schema", "results.arguments", "results.documents"}),
    "analysis": frozenset({"analysis", "results", *DECLARATIONS}),
    "bench": frozenset({"bench", "analysis", "kernels", "results"}),
}
"""Folder -> what its modules may import of the package: folders, or single modules. cli.py may import everything,
nothing imports cli.py."""

CORE_IMPORTS = frozenset(
    {"matplotlib", "numpy", "packaging", "pandas", "pyarrow", "pynvml", "rich", "torch", "triton", "typer"}
)
"""What the core dependencies of pyproject.toml are imported as; anything else is imported inside a function."""

DEVICE_TAKERS = ("kernels/", "analysis/")
"""Where no device is named: the planner and the workers choose it, these take the device of their inputs."""

MAX_JIT_PARAMETERS = 24

Violation = tuple[int, str]


def violations(path: str, text: str) -> Iterator[Violation]:
    """Yield (line, message) for every violation in the file ``path`` (relative to the root) with content ``text``."""
    if path.endswith(".ipynb"):
        yield from _notebook(text)
    elif path.endswith(".sh"):
        yield from _finding(path, text)
    elif path.endswith(".py"):
        tree = ast.parse(text, path)
        yield from _block_pointers(tree)
        yield from _jit_docstrings(tree)
        folder = path.partition("/")[0] if "/" in path else ""
        if folder in ARROWS or path in ("cli.py", "__init__.py", "__main__.py"):
            yield from _imports(path, tree)
        if path.startswith(DEVICE_TAKERS):
            yield from _device_literals(tree)
        if folder == "kernels":
            yield from _examined_launches(tree)


def _finding(path: str, text: str) -> Iterator[Violation]:
    if not (ROOT / path).stat().st_mode & 0o100:
        yield 1, f"a finding is run as a command: chmod +x {path}"
    for part in ("set -euo pipefail", "mktemp -d"):
        if part not in text:
            yield 1, f"a finding stops at its first error and works in a temporary folder: {part}"


def _block_pointers(tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "make_block_ptr":
            yield node.lineno, "make_block_ptr is gone in Triton 3.9: write offsets and masks"


def _is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(target) in ("triton.jit", "gluon.jit", "jit")


def _jit_docstrings(tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not any(map(_is_jit, node.decorator_list)):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            yield node.lineno, f"{node.name} is a jit function without a docstring"
        elif node.name.endswith("_kernel") and "Grid:" not in docstring:
            yield node.lineno, f"the docstring of {node.name} does not name its grid (Grid: ...)"
        if len(node.args.args) > MAX_JIT_PARAMETERS:
            yield (
                node.lineno,
                f"{node.name} has {len(node.args.args)} parameters, more than {MAX_JIT_PARAMETERS}: group them",
            )


def _imports(path: str, tree: ast.Module) -> Iterator[Violation]:
    at_module_level = set(_module_level(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            for module in imported_modules(path, node):
                if not _allowed(path, module):
                    yield node.lineno, f"{path.partition('/')[0]} must not import {module} (see CONTRIBUTING, layout)"
            continue
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package = name.partition(".")[0]
            if package == "lrbench":
                yield node.lineno, "imports inside the package are relative"
            elif node in at_module_level and package not in sys.stdlib_module_names | CORE_IMPORTS:
                yield node.lineno, f"{package} is no core dependency: import it inside the function that needs it"


def _module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that importing the module executes, those under `if TYPE_CHECKING` left out."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                pending += node.body
            pending += node.orelse
        elif isinstance(node, ast.Try):
            pending += [*node.body, *node.orelse, *node.finalbody]
            pending += [statement for handler in node.handlers for statement in handler.body]
        elif isinstance(node, ast.With | ast.ClassDef):
            pending += node.body


def imported_modules(path: str, node: ast.ImportFrom) -> Iterator[str]:
    """Yield what a relative import in ``path`` names, dotted from the package's root: bench, results.schema, ..."""
    package = path.split("/")[:-1]
    if node.level > len(package) + 1:
        yield "what lies outside the package"
        return
    base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
    for alias in node.names:
        yield ".".join([*base, alias.name])


def _allowed(path: str, module: str) -> bool:
    allowed = ARROWS.get(path.partition("/")[0], frozenset({*ARROWS, "cli"}))
    return module == "__version__" or any(f"{module}.".startswith(f"{name}.") for name in allowed)


def _device_literals(tree: ast.Module) -> Iterator[Violation]:
    message = "takes the device of its inputs: no device is named here"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        values = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
        if name in ("to", "device"):
            values += node.args
        literals = [value for value in values if _names_cuda(value)]
        if literals or (name == "cuda" and isinstance(node.func, ast.Attribute)):
            yield node.lineno, message


def _examined_launches(tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
        kernel = isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        if kernel and "remember_launches" not in map(ast.unparse, node.decorator_list):
            yield node.lineno, f"Triton examines every launch of {node.name}: decorate it, @remember_launches"


def _names_cuda(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition(":")[0] == "cuda"


def _notebook(text: str) -> Iterator[Violation]:
    for number, cell in enumerate(json.loads(text)["cells"], start=1):
        if cell.get("outputs") or cell.get("execution_count"):
            yield 1, f"cell {number} holds outputs: clear them, the report executes the notebook"


def project_files(root: Path = ROOT) -> list[str]:
    """Return the project's files relative to the root: those git tracks and new ones it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.ipynb", "findings/*.sh"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({path for path in listed if (root / path).is_file()})


def main() -> int:
    """Print every violation and return the exit status."""
    found = 0
    for path in project_files():
        for line, message in violations(path, (ROOT / path).read_text(encoding="utf-8")):
            print(f"{path}:{line}: {message}")
            found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
