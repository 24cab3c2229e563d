"""Hold the ceilings: figures of the code base that only go down. Run by `make lint`, after conventions.py.

Prints every figure with its ceiling, which stands in ceilings.json, and its goal. Exits 1 if a figure is above its
ceiling, and says what it counts; also if it is below, since a ceiling that is too high holds nothing.

    --update          lower the ceilings to today's figures
    --update --raise  set the ceilings to today's figures, also where these are higher; the commit says why
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).parent))  # where PYTHONSAFEPATH is set, it is not there

from conventions import ROOT, imported_modules, project_files

FOLDERS = ("kernels", "bench", "analysis", "results")
SENTENCE_WORDS = 5
TESTS_PER_LINE = 0.45
WRITTEN_PAGES = ("reproductions.md", "triton.md")
"""Pages of docs/ that `make pages` writes: their words are not counted."""

GOALS = {
    "lines, product": 32_000,
    **{f"lines, {folder}/": None for folder in FOLDERS},
    "lines, tests": None,
    "words, docs": 15_000,
    "modules in import circles": 0,
    "folders in import circles": 0,
    "class names in several modules": 0,
    "sentences in several test files": 0,
    "files from command to launch": 6,
    "files from function to launch": 3,
}
"""Figure -> goal. That of the tests is TESTS_PER_LINE of the product. tests/test_ceilings.py measures the last two, for
no import shows which decorators, tables and processes a call passes through."""


def measure(files: Mapping[str, str]) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Return today's figures, and what those count of which there should be none.

    Args:
        files: path relative to the root -> content, of the project's Python files.
    """
    product = {path: text for path, text in files.items() if "/" not in path or path.partition("/")[0] in FOLDERS}
    tests = {path: text for path, text in files.items() if path.startswith("tests/")}
    lines = {path: len(text.splitlines()) for path, text in files.items()}
    statements = {path: list(_statements(ast.parse(text, path))) for path, text in product.items()}
    modules, folders = _imports(statements)
    classes = ((x.name, path) for path, found in statements.items() for x in found if isinstance(x, ast.ClassDef))
    sentences = ((sentence, path) for path, text in tests.items() for sentence in _sentences(ast.parse(text, path)))
    named = {
        "modules in import circles": _circles(modules),
        "folders in import circles": _circles(folders),
        "class names in several modules": _in_several(classes),
        "sentences in several test files": _in_several(sentences),
    }
    return {
        "lines, product": sum(lines[path] for path in product),
        **{f"lines, {x}/": sum(lines[path] for path in product if path.startswith(f"{x}/")) for x in FOLDERS},
        "lines, tests": sum(lines[path] for path in tests),
        **{name: len(found) for name, found in named.items()},
    }, named


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements, those inside functions too, but no expressions, which are most of a tree."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            yield node
            yield from _statements(node)


def _imports(statements: Mapping[str, Iterable[ast.AST]]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return which modules, and which folders, import which others: anywhere in the code, also for types alone."""
    paths = {path[:-3].removesuffix("/__init__").replace("/", "."): path for path in statements}
    modules, folders = defaultdict(set), defaultdict(set)
    for module, path in paths.items():
        for node in statements[path]:
            for name in imported_modules(path, node) if isinstance(node, ast.ImportFrom) and node.level else ():
                # What is imported is a module, or else something inside the module before the last dot.
                target = name if name in paths else name.rpartition(".")[0]
                if target in paths:
                    modules[module].add(target)
                    folders[str(PurePosixPath(path).parent)].add(str(PurePosixPath(paths[target]).parent))
    return modules, folders


def _circles(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Return the nodes that reach another one which reaches them, each with these."""
    reached: dict[str, set[str]] = {}
    for node in graph:
        reached[node], pending = set(), [node]
        while pending:
            new = set(graph.get(pending.pop(), ())) - reached[node]
            reached[node] |= new
            pending += new
    circles = {node: sorted(x for x in reached[node] - {node} if node in reached.get(x, ())) for node in sorted(graph)}
    return [f"{node}, with {', '.join(others)}" for node, others in circles.items() if others]


def _sentences(tree: ast.Module) -> Iterator[str]:
    """Yield the literals that are long enough to be a message, patterns as what they match; docstrings are left out."""
    nodes = list(ast.walk(tree))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            words = node.value.replace("\\", "").split()
            if len(words) >= SENTENCE_WORDS:
                yield " ".join(words)


def _in_several(found: Iterable[tuple[str, str]]) -> list[str]:
    paths = defaultdict(set)
    for thing, path in found:
        paths[thing].add(path)
    return [f"{thing}: {', '.join(sorted(paths[thing]))}" for thing in sorted(paths) if len(paths[thing]) > 1]


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Print every figure, and what is wrong with those that are not at their ceilings; return the exit status."""
    parser = argparse.ArgumentParser(prog="ceilings.py")
    parser.add_argument("--update", action="store_true", help="lower the ceilings to today's figures")
    parser.add_argument("--raise", action="store_true", dest="up", help="with --update: raise them, too")
    options = parser.parse_args(arguments)
    today, named = measure({x: (root / x).read_text("utf-8") for x in project_files(root) if x.endswith(".py")})
    pages = [path for path in root.glob("docs/**/*.md") if path.name not in WRITTEN_PAGES]
    today["words, docs"] = sum(len(path.read_text("utf-8").split()) for path in pages)
    store = root / ".ci" / "ceilings.json"
    ceilings: dict[str, int] = json.loads(store.read_text("utf-8"))
    if options.update:
        ceilings |= {name: n for name, n in today.items() if options.up or n < ceilings.get(name, 0)}
        store.write_text(json.dumps(ceilings, indent=2) + "\n", "utf-8")
    print(f"{'':32}{'today':>8}{'ceiling':>8}{'goal':>8}")
    for name, goal in {**GOALS, "lines, tests": round(TESTS_PER_LINE * today["lines, product"])}.items():
        print(f"{name:32}{today.get(name, 'a test'):>8}{ceilings.get(name, 0):>8}{'-' if goal is None else goal:>8}")
    for name, figure in today.items():
        if figure > (ceiling := ceilings.get(name, 0)):
            print(f"{name}: {figure}, above the ceiling of {ceiling}", *named.get(name, ()), sep="\n  ")
        elif figure < ceiling:
            print(f"{name}: lower the ceiling to {figure} (python .ci/ceilings.py --update)")
    return int(any(figure != ceilings.get(name, 0) for name, figure in today.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
