"""The convention checks find what they are for; `make lint` shows that they leave alone what is right."""

from __future__ import annotations

import json
import runpy

import pytest

from lrbench.tests import ROOT

SCRIPT = ROOT / ".ci" / "conventions.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason=".ci/conventions.py is not part of this copy")


def messages(path: str, text: str) -> list[str]:
    violations = runpy.run_path(str(SCRIPT))["violations"]
    return [message for _, message in violations(path, text)]


KERNEL = '''
@remember_launches
@triton.jit
def sum_kernel(x_ptr):
    """Add up.

    Grid: (rows,).
    """
'''


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("kernels/a/b.py", "p = tl.make_block_ptr(x)", "make_block_ptr"),
        ("kernels/a/b.py", KERNEL.replace('"""Add up.\n\n    Grid: (rows,).\n    """', "pass"), "without a docstring"),
        ("kernels/a/b.py", KERNEL.replace("Grid", "Shape"), "does not name its grid"),
        (
            "kernels/a/b.py",
            KERNEL.replace("x_ptr", ", ".join(f"p{n}" for n in range(25))),
            "25 parameters, more than 24",
        ),
        ("kernels/a/b.py", KERNEL.replace("triton", "gluon").replace("Grid", "Shape"), "does not name its grid"),
        ("kernels/a/b.py", KERNEL.replace("@remember_launches", ""), "Triton examines every launch of sum_kernel"),
        ("kernels/a/b.py", "from ...bench import case", "kernels must not import bench"),
        ("kernels/a/b.py", "from ... import analysis", "kernels must not import analysis"),
        ("kernels/a/b.py", "from .... import x", "what lies outside the package"),
        ("analysis/roofs.py", "from ..bench.worker.worker import Worker", "analysis must not import bench.worker"),
        ("analysis/roofs.py", "def f():\n    from ..kernels import scan", "analysis must not import kernels"),
        ("bench/run.py", "from ..cli import app", "bench must not import cli"),
        ("bench/run.py", "from lrbench.kernels import resolve", "relative"),
        ("bench/run.py", "import fla.ops", "fla is no core dependency"),
        ("bench/run.py", "try:\n    import fla\nexcept ImportError:\n    pass", "fla is no core dependency"),
        ("kernels/a/b.py", 'x = torch.zeros(3, device="cuda")', "no device is named"),
        ("kernels/baselines/fla.py", 'x.to("cuda:1")', "no device is named"),
        ("analysis/a.py", "x.cuda()", "no device is named"),
        (
            "notebooks/report.ipynb",
            json.dumps({"cells": [{"cell_type": "code", "outputs": [{"text": "1"}], "execution_count": 1}]}),
            "holds outputs",
        ),
    ],
)
def test_a_breach_is_found_once_and_named(path: str, text: str, expected: str) -> None:
    found = messages(path, text)
    assert len(found) == 1
    assert expected in found[0]
