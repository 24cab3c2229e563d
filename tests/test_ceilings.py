"""The ceilings are held: each figure counts what it should, and a call passes through no more files than it may."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lrbench.tests import ROOT
from lrbench.tests.command_line import CALL, ENVIRON

SCRIPT = ROOT / ".ci" / "ceilings.py"
STORE = SCRIPT.with_suffix(".json")

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason=".ci/ceilings.py is not part of this copy")

TREE = {
    "kernels/spec.py": "class Operation:\n    pass\n",
    "kernels/common/sizes.py": "def f():\n    from ..spec import Operation\n",
    "bench/plan.py": "from ..kernels.spec import Operation\nclass Request:\n    pass\n",
    "bench/run.py": "from .plan import Request\n",
    "tests/test_plan.py": '"""One two three four five."""\nassert said in ("dtype must be one of", "must be one of")\n',
    "tests/test_run.py": '"""One two three four five."""\n',
}

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a function that adds files to a tree at its ceilings and returns the script's status and output."""
    main: Any = runpy.run_path(str(SCRIPT))["main"]
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)

    def run(files: dict[str, str], *arguments: str) -> tuple[int, str]:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return main(list(arguments), tmp_path), capsys.readouterr().out

    run({**TREE, ".ci/ceilings.json": "{}"}, "--update", "--raise")
    return run


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("cli.py", "x = 1\n", {"lines, product: 9,"}),
        ("bench/clock.py", "x = 1\n", {"lines, product: 9,", "lines, bench/: 5,"}),
        ("tests/test_clock.py", "x = 1\n", {"lines, tests: 4,"}),
        ("docs/kernels/ema.md", "Two words\n", {"words, docs: 2,"}),
        ("bench/plan.py", "def f():\n    from .run import g\n", {"modules in import circles: 2,"}),
        (
            "kernels/spec.py",
            "if TYPE_CHECKING:\n    from .common.sizes import f\n",
            {"modules in import circles: 2,", "folders in import circles: 2,"},
        ),
        ("kernels/spec.py", "class Request:\n    pass\n", {"class names in several modules: 1,"}),
        (
            "tests/test_run.py",
            'match = r"dtype must\\ be one of"\nx = 1\n',
            {"lines, tests: 4,", "sentences in several test files: 1,"},
        ),
        ("tests/test_run.py", 'match = "must be one of"\nx = 1\nx = 2\n', {"lines, tests: 5,"}),
    ],
)
def test_what_rises_is_named(check: Check, path: str, text: str, expected: set[str]) -> None:
    status, printed = check({path: text})
    above = {line.partition(" above")[0] for line in printed.splitlines() if " above the ceiling of " in line}
    assert (status, above) == (1, expected)


def test_update_lowers_and_never_raises(check: Check) -> None:
    assert check({})[0] == 0
    fewer = {"bench/run.py": ""}
    status, printed = check(fewer)
    assert status == 1 and "lines, bench/: lower the ceiling to 3" in printed
    assert check(fewer, "--update")[0] == 0
    assert check({"bench/run.py": "x = 1\n"}, "--update")[0] == 1


WATCH = """
import os, signal, sys

def write(frame):
    with open(os.environ["FILES"], "a") as out:
        while frame:
            print(frame.f_code.co_filename, file=out)
            frame = frame.f_back

def launches(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_name == "__call__" and code.co_filename.endswith("triton/runtime/interpreter.py"):
        sys.setprofile(None)
        write(frame)
        os.kill(os.getppid(), signal.SIGUSR2)
        signal.pause()

def imports(event, arguments):
    if event == "import" and arguments[0] == "triton.runtime.interpreter":
        sys.setprofile(launches)

def asked(_, frame):
    write(frame)
    os._exit(0)

sys.addaudithook(imports)
signal.signal(signal.SIGUSR2, asked)
"""
"""Run by Python when it starts: at the first launch, the worker and then the command write which files they are in."""


def test_files_from_a_command_and_a_function_to_the_launch(tmp_path: Path) -> None:
    """How many of the package's files are on the stacks of both processes when the first kernel is launched.

    Those at the two ends, cli.py or the function's and the launch's, are left out.
    """
    pytest.importorskip("triton")
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    files = tmp_path / "files"
    environ = {"FILES": str(files), "PYTHONPATH": path, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    verify = [*CALL, "verify", "--kernel", "tfla", "--op", "mlstm_sig"]
    subprocess.run(verify, env={**ENVIRON, **environ}, capture_output=True, check=True, timeout=240)
    own = [Path(x) for x in dict.fromkeys(files.read_text().splitlines()) if "site-packages" not in x]
    launch, *between, command = [x.relative_to(ROOT).as_posix() for x in own if x.is_relative_to(ROOT)]
    # The first case is a decoding step.
    assert (launch, command) == ("kernels/scalar_decay/step.py", "cli.py")
    inside = [x for x in between if x.startswith("kernels/") and x != "kernels/mlstm_sig.py"]
    ceilings = json.loads(STORE.read_text())
    held = ceilings["files from command to launch"], ceilings["files from function to launch"]
    assert (len(between), len(inside)) == held, f"renew {STORE.name}, with lower numbers only: {between}"
