"""The worked examples of CONTRIBUTING.md work: they are applied to a copy of the repository, which is then used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lrbench.tests import ROOT
from lrbench.tests.command_line import CALL

LEFT_OUT = (".*", "__pycache__", "build", "dist", "*.egg-info", "local", "h200_sxm")
FILE = re.compile(r"^`([\w/.]+\.py)`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TYPES = re.compile(r"`pyproject\.toml` lists.*?```toml\n(.*?)```", re.DOTALL)
ENGINE = re.compile(r"^\| `([\w/]+\.py)` \| (.*) \|$", re.MULTILINE)
FAMILY = re.compile(r"in `kernels/__init__\.py`.*?```python\n(.*?)```", re.DOTALL)
SIZES = ("--seq-len", "64,200", "--head-dim", "24", "--num-heads", "2", "--batch", "2", "--budget", "0")


def insert_after(path: Path, anchor: str, text: str) -> None:
    content = path.read_text(encoding="utf-8")
    assert content.count(anchor) == 1, f"{path.name} must hold {anchor!r} once"
    path.write_text(content.replace(anchor, anchor + text), encoding="utf-8")


def run(copy: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(copy.parent), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    merged = {**os.environ, **own, **environment}
    return subprocess.run([sys.executable, *command], cwd=copy, env=merged, capture_output=True, text=True, timeout=250)


def lrbench(copy: Path, arguments: Sequence[str]) -> list[dict[str, object]]:
    """Run the command line on the copy and return the rows it prints."""
    finished = run(copy, *CALL[1:], *arguments, "--format", "json")
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with both examples added, as the page says."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    copy = tmp_path_factory.mktemp("examples") / "lrbench"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    files = dict(FILE.findall(text))
    assert {Path(path).name for path in files} >= {"reference.py", "scan.py", "__init__.py", "test_ema.py"}
    if all((copy / path).exists() for path in files):
        # Somebody has followed the page in this clone, so the examples are in the copy already.
        return copy
    for path, content in files.items():
        assert not (copy / path).exists()
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_text(content, encoding="utf-8")
    (line,) = FAMILY.findall(text)
    insert_after(copy / "kernels/__init__.py", "FAMILIES: dict[str, tuple[str, ...]] = {\n", line)
    (line,) = TYPES.findall(text)
    insert_after(copy / "pyproject.toml", '    "lrbench.bench.vector_rate",\n', line)
    baselines = copy / "kernels/baselines/__init__.py"
    (module,) = (Path(path).stem for path in files if path.startswith("kernels/baselines/"))
    insert_after(baselines, "from .operations import OPERATIONS\n", f"from . import {module}\n")
    insert_after(baselines, "BASELINES: tuple[Baseline, ...] = (\n", f"    *{module}.BASELINES,\n")
    return copy


def test_example_obeys_the_laws(copy: Path) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_ema.py")
    finished = run(copy, *command, TRITON_INTERPRET="1")
    assert finished.returncode == 0, finished.stdout
    assert re.search(r"\d+ passed", finished.stdout)


def test_example_runs_where_its_inputs_are(copy: Path) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_device.py", "-k", "ema")
    finished = run(copy, *command)
    assert finished.returncode == 0, finished.stdout
    assert "2 passed" in finished.stdout


def test_example_is_verified(copy: Path) -> None:
    rows = lrbench(copy, ["verify", "--kernel", "ema"])
    statuses = {row["impl"]: row["status"] for row in rows}
    assert statuses["recurrent"] == statuses["torch.matmul"] == "ok"


def test_example_is_swept(copy: Path, tmp_path: Path) -> None:
    rows = lrbench(
        copy, ["sweep", "--kernel", "ema", "--gpu", "h100", *SIZES, "--no-calibrate", "--output", str(tmp_path)]
    )
    ok = {(row["impl"], row["mode"], row["seq_len"]) for row in rows if row["status"] == "ok"}
    assert {row["head_dim_qk"] for row in rows if row["op"] == "ema"} == {None}
    assert ok >= {(i, m, t) for i in ("recurrent", "torch.matmul") for m in ("fw", "fwbw") for t in (64, 200)}
    assert len(list(tmp_path.glob("*.parquet"))) == 1


def test_example_follows_the_conventions(copy: Path) -> None:
    files = [path for path, _ in FILE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))]
    for command in (("check",), ("format", "--check")):
        finished = run(copy, "-m", "ruff", *command, "--no-cache", *files)
        assert finished.returncode == 0, finished.stdout


def test_example_has_the_types_that_it_says(copy: Path, tmp_path: Path) -> None:
    files = [path for path, _ in FILE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))]
    modules = [f"lrbench.{path.removesuffix('.py').replace('/', '.')}" for path in files if "tests" not in path]
    named = [part for module in modules for part in ("-m", module.removesuffix(".__init__"))]
    # `make lint` has already read torch's types: its cache saves reading them again.
    if (lint := ROOT / ".mypy_cache").exists():
        shutil.copytree(lint, tmp_path / "cache", symlinks=True)
    command = ("-m", "mypy", "--config-file", "pyproject.toml", "--cache-dir", str(tmp_path / "cache"), *named)
    finished = run(copy, *command, MYPYPATH=str(copy.parent))
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_files_and_names_of_the_engine_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = ENGINE.findall(text[text.index("## Add an operation to the engine") : text.index("## Add a baseline")])
    assert len(rows) >= 5
    for path, what in rows:
        code = (ROOT / path).read_text(encoding="utf-8")
        assert [name for name in re.findall(r"`(\w+)`", what) if not re.search(rf"\b{name}\b", code)] == [], path
