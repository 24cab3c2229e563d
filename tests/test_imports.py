"""What the command line imports before it has anything to do stays light."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from lrbench.kernels import FAMILIES, FOLDERS

HEAVY = ("torch", "triton", "numpy", "pandas", "pyarrow", "matplotlib")
DECLARATIONS = sorted({FOLDERS.get(op, op) for operations in FAMILIES.values() for op in operations})
WITH_CONFIG = ("scalar_decay", "lightning", "rglru", "wkv", "gated_mlp")
HELP_SECONDS = 0.5


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize(
    "module",
    [
        "lrbench",
        "lrbench.cli",
        "lrbench.kernels",
        *(f"lrbench.kernels.{module}" for module in DECLARATIONS),
        "lrbench.results.schema",
        "lrbench.kernels.baselines",
        *(f"lrbench.kernels.{family}.config" for family in WITH_CONFIG),
        "lrbench.analysis",
        "lrbench.analysis.counts",
    ],
)
def test_imports_nothing_heavy(module: str) -> None:
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*sys.modules)"
    finished = run_python(code, module)
    assert finished.returncode == 0, finished.stderr
    loaded = {name.partition(".")[0] for name in finished.stdout.split()}
    assert loaded & set(HEAVY) == set()


def test_import_needs_no_heavy_package() -> None:
    """The declarations resolve where torch and triton cannot be imported at all."""
    code = "\n".join(
        [
            "import sys",
            f"sys.modules.update(dict.fromkeys({HEAVY!r}))",
            "from lrbench.kernels import FAMILIES, get_operation",
            "import lrbench.cli, lrbench.kernels.baselines",
            "print(sum(len(get_operation(op).implementations) for ops in FAMILIES.values() for op in ops))",
        ]
    )
    finished = run_python(code)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) >= sum(map(len, FAMILIES.values()))


@pytest.mark.speed
def test_help_answers_at_once() -> None:
    """`lrbench --help` within half a second: the best of several runs, since a busy machine only ever adds time."""
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        finished = run_python("from lrbench.cli import main; main()", "--help")
        seconds.append(time.perf_counter() - start)
        assert finished.returncode == 0, finished.stderr
        assert "sweep" in finished.stdout
        if seconds[-1] < HELP_SECONDS:
            return
    pytest.fail(f"the fastest of {len(seconds)} runs took {min(seconds):.2f} s, more than {HELP_SECONDS} s")
