"""What the command line imports before it has anything to do stays light."""

from __future__ import annotations

import time

import pytest

from lrbench.kernels import FAMILIES, FOLDERS
from lrbench.tests.command_line import CALL, run_python

HEAVY = ("torch", "triton", "numpy", "pandas", "pyarrow", "matplotlib")
DECLARATIONS = sorted({FOLDERS.get(op, op) for operations in FAMILIES.values() for op in operations})
WITH_CONFIG = ("scalar_decay", "lightning", "rglru", "wkv", "gated_mlp")
HELP_SECONDS = 0.5


LIGHT = (
    "lrbench.cli",
    "lrbench.results.schema",
    "lrbench.kernels.baselines",
    "lrbench.analysis.counts",
    *(f"lrbench.kernels.{module}" for module in DECLARATIONS),
    *(f"lrbench.kernels.{family}.config" for family in WITH_CONFIG),
)


def test_declarations_and_the_command_line_import_nothing_heavy() -> None:
    """Declarations resolve where nothing heavy can be imported."""
    importing = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    loaded = {name.partition(".")[0] for name in run_python(f"{importing}; print(*sys.modules)", *LIGHT).split()}
    assert loaded & set(HEAVY) == set()
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}));"
        "from lrbench.kernels import FAMILIES, get_operation;"
        "print(sum(len(get_operation(op).implementations) for ops in FAMILIES.values() for op in ops))"
    )
    assert int(run_python(code)) >= sum(map(len, FAMILIES.values()))


def test_forms_in_torch_run_where_triton_is_not() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from lrbench.kernels import FAMILIES, get_operation
sizes = {"batch": 1, "num_heads": 2, "head_dim_qk": 16, "head_dim_v": 16, "channels": 16, "d_model": 16, "d_ff": 16}
for op in (op for ops in FAMILIES.values() for op in ops):
    operation = get_operation(op)
    for form in operation.implementations:
        if not form.requires:
            of_op = {name: sizes.get(name, 8) for name in operation.sizes}
            inputs = operation.make_inputs(of_op, dtype=torch.float32)
            assert operation.function(form.name)(*inputs.values()).isfinite().all()
            print(op, form.name)
"""
    ran = run_python(code).splitlines()
    assert {op for ops in FAMILIES.values() for op in ops} - {line.split()[0] for line in ran} == {"projections"}


@pytest.mark.speed
def test_help_answers_at_once() -> None:
    """`lrbench --help` within half a second: the best of several runs, since a busy machine only ever adds time."""
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        printed = run_python(CALL[-1], "--help")
        seconds.append(time.perf_counter() - start)
        assert "sweep" in printed
        if seconds[-1] < HELP_SECONDS:
            return
    pytest.fail(f"the fastest of {len(seconds)} runs took {min(seconds):.2f} s, more than {HELP_SECONDS} s")
