"""The worked example of CONTRIBUTING.md works: its files and the page's lines are added to a copy of the repository."""

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
EXAMPLE = ROOT / "examples" / "ema"
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
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
    """A copy of the package with the example's files and lines added, as the page says."""
    copy = tmp_path_factory.mktemp("examples") / "lrbench"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    if (copy / "kernels" / "ema").exists():
        # Somebody has followed the page in this clone, so the example is in the copy already.
        return copy
    shutil.copytree(EXAMPLE, copy, dirs_exist_ok=True)
    (line,) = FAMILY.findall(PAGE)
    insert_after(copy / "kernels/__init__.py", "FAMILIES: dict[str, tuple[str, ...]] = {\n", line)
    (line,) = TYPES.findall(PAGE)
    insert_after(copy / "pyproject.toml", '    "lrbench.bench.worker.vector_rate",\n', line)
    baselines = copy / "kernels/baselines/__init__.py"
    insert_after(baselines, "from .operations import OPERATIONS\n", "from . import decay_matrix\n")
    insert_after(baselines, "BASELINES: tuple[Baseline, ...] = (\n", "    *decay_matrix.BASELINES,\n")
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


def test_example_is_swept(copy: Path, tmp_path: Path) -> None:
    rows = lrbench(
        copy, ["sweep", "--kernel", "ema", "--gpu", "h100", *SIZES, "--no-calibrate", "--output", str(tmp_path)]
    )
    ok = {(row["impl"], row["mode"], row["seq_len"]) for row in rows if row["status"] == "ok"}
    assert {row["head_dim_qk"] for row in rows if row["op"] == "ema"} == {None}
    assert ok >= {(i, m, t) for i in ("recurrent", "torch.matmul") for m in ("fw", "fwbw") for t in (64, 200)}
    assert len(list(tmp_path.glob("*.parquet"))) == 1
    assert {row["flops"] for row in rows if row["impl"] == "recurrent" and row["mode"] == "fw"} == {
        2 * 2 * 2 * 24 * seq_len for seq_len in (64, 200)
    }


def test_example_is_counted_ranked_and_predicted(copy: Path) -> None:
    def answer(*command: str) -> str:
        finished = run(copy, *CALL[1:], *command, "--gpu", "h100", "--embedding", "1024", "--seq-len", "8k")
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    count = run(copy, *CALL[1:], "count", "ema", "--seq-len", "1k").stdout
    cells = 8 * 1024 * 16 * 256
    assert f"{2 * cells:.4g} FLOPs, {4 * cells:.4g} bytes, intensity 0.5" in count
    # bf16 in and out at 3.35 TB/s
    least_ms = 8 * 8192 * 1024 * 4 / 3.35e12 * 1e3
    assert f"scan takes at least {least_ms:.4g} ms on h100_sxm" in answer("best", "ema")
    assert f"ema scan fw on h100_sxm: at least {least_ms:.4g} ms" in answer("predict", "ema")


def test_example_has_the_types_that_it_says(copy: Path, tmp_path: Path) -> None:
    files = [path.relative_to(EXAMPLE).with_suffix("").parts for path in (EXAMPLE / "kernels").rglob("*.py")]
    named = [part for path in files for part in ("-m", ".".join(("lrbench", *path)).removesuffix(".__init__"))]
    # `make lint` has already read torch's types: its cache saves reading them again.
    if (lint := ROOT / ".mypy_cache").exists():
        shutil.copytree(lint, tmp_path / "cache", symlinks=True)
    command = ("-m", "mypy", "--config-file", "pyproject.toml", "--cache-dir", str(tmp_path / "cache"), *named)
    finished = run(copy, *command, MYPYPATH=str(copy.parent))
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_files_and_names_of_the_engine_exist() -> None:
    rows = ENGINE.findall(PAGE[PAGE.index("## Add an operation to the engine") : PAGE.index("## Add a baseline")])
    assert len(rows) >= 5
    for path, what in rows:
        code = (ROOT / path).read_text(encoding="utf-8")
        assert [name for name in re.findall(r"`(\w+)`", what) if not re.search(rf"\b{name}\b", code)] == [], path
