"""What a row says about where it was measured."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lrbench import __version__
from lrbench.bench import environment
from lrbench.bench.environment import current_environment, without_gpu
from lrbench.kernels import FAMILIES, FOLDERS, get_operation
from lrbench.kernels.common.spec import DTYPES, MODES
from lrbench.tests.command_line import run_python


def test_probe_runs_in_a_process_of_its_own() -> None:
    code = (
        "import sys; from lrbench.bench.drive.workers import probe_environment; e = probe_environment();"
        "print('torch' in sys.modules, e.device_kind, e.torch_version, e.lrbench_version)"
    )
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert run_python(code).split() == ["False", kind, torch.__version__, __version__]


def test_a_machine_without_a_gpu_is_known_without_a_worker() -> None:
    found, right = without_gpu(), current_environment()
    if right.device_kind == "cuda":
        assert found is None
    else:
        assert found is not None and right.device_name.startswith(found.device_name)
        assert found == dataclasses.replace(
            right, device_name=found.device_name, torch_version=version("torch"), cuda_version=None
        )


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.com")
    result = subprocess.run(("git", "-C", folder, *identity, *arguments), capture_output=True, text=True, check=True)
    return result.stdout.strip()


def commit(folder: Path, name: str, text: str | None) -> str:
    """Write a file, or remove it where there is no text, and return the commit of that."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "-qm", name)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository in the place of this one."""
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    git(tmp_path, "init", "-q")
    return tmp_path


def test_the_compiler_s_settings_are_those_of_the_capability() -> None:
    """Triton 3.9 assembles for Hopper with another ptxas than for Ampere; a Triton without these names says nothing."""
    pytest.importorskip("triton", minversion="3.8")
    ampere, hopper = environment._compiler(80), environment._compiler(90)
    assert {*hopper} == {"ptxas_version", "fp_fusion"} and hopper["fp_fusion"] is True
    assert re.fullmatch(r"\d+\.\d+", ampere["ptxas_version"]) and re.fullmatch(r"\d+\.\d+", hopper["ptxas_version"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton.backends.nvidia.compiler", None)
        assert environment._compiler(90) == {}


def test_git_state_of_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LRBENCH_GIT_COMMIT", raising=False)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.git_state() == (None, None)
    git(tmp_path, "init", "-q")
    commit(tmp_path, "kernel.py", "1")
    head = commit(tmp_path, "results/old.parquet", "1")
    assert environment.git_state() == (head, False)
    # Results that a sweep writes, and files git does not know, are no change to what is measured.
    (tmp_path / "results" / "old.parquet").write_text("2")
    (tmp_path / "notes.txt").write_text("new")
    assert environment.git_state() == (head, False)
    (tmp_path / "kernel.py").write_text("2")
    assert environment.git_state() == (head, True)


def test_rows_of_earlier_commits_are_of_the_same_code(checkout: Path) -> None:
    """Until a commit changes what they measured: their kernels, of peers how they are called, or what times them."""
    changes = {
        "kernels/common/calls.py": "wsmp", "kernels/baselines/fla.py": "p", "docs/a.md": "", "kernels/wkv/scan.py": "w",
        "kernels/scalar_decay/gates.py": "sm", "kernels/mamba2_ssd.py": "m", "bench/clock.py": "wsmp",
    }  # fmt: skip
    commits = [commit(checkout, name, name) for name in changes]
    for kind, op in (("w", "wkv4"), ("s", "mlstm_sig"), ("m", "mamba2_ssd"), ("p", "gla")):
        about = {"op": op, "impl": kind, "dtype": "bf16", "provider": "fla" if kind == "p" else "lrbench"}
        rows = [{**about, "git_commit": each} for each in commits]
        first = 0
        for n, changed in enumerate(changes.values()):
            first = n if kind in changed else first
            same = [each for each in range(n + 1) if environment.is_of(rows[each], commits[n])]
            assert same == [*range(first, n + 1)]


FLA = "kernels/baselines/fla.py"


def is_of(measured: str, here: str | None) -> bool:
    """Whether a row of fla's, measured at one commit, is of the code of another."""
    row = {"op": "gla", "impl": "fla.chunk_gla", "dtype": "bf16", "provider": "fla", "git_commit": measured}
    return environment.is_of(row, here)


def test_rows_are_of_code_that_is_again_as_it_was(checkout: Path) -> None:
    measured = commit(checkout, FLA, "1")
    assert not is_of(measured, commit(checkout, FLA, "2"))
    commit(checkout, "bench/clock.py", "1")
    assert not is_of(measured, commit(checkout, FLA, "1"))
    assert is_of(measured, commit(checkout, "bench/clock.py", None))


def test_of_a_commit_that_git_does_not_know_its_own_rows_alone_are(checkout: Path) -> None:
    here = commit(checkout, FLA, "1")
    assert is_of(here, None)
    assert not is_of("--output=x", here) and not (checkout / "x").exists()
    assert not is_of(here, "c" * 40) and is_of("c" * 40, "c" * 40)


@pytest.mark.parametrize(
    ("but", "same"),
    [((), True), (("gla",), False), (("gla fla.chunk_gla",), False), (("bf16",), False), (("gla x", "fp32"), True)],
)
def test_a_listed_rewrite_changes_the_code_of_what_it_names_alone(
    but: tuple[str, ...], same: bool, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewrites that follow one another add up."""
    without, *written = (commit(checkout, *each) for each in (("a.md", ""), (FLA, "1"), (FLA, "2"), (FLA, "3")))
    listed = [
        environment.Rewrite(before=one, after=other, but=but, why="x") for one, other in itertools.pairwise(written)
    ]
    monkeypatch.setattr(environment, "rewrites", lambda: listed)
    assert is_of(written[0], written[-1]) is same
    assert is_of(written[-1], written[-1])
    assert not is_of(written[-1], without)


@pytest.mark.parametrize(
    ("name", "text", "same"),
    [
        (FLA, '"""Says what it is."""\nx = 1  # as it was\n', True),
        (FLA, "x = 2", False),
        ("kernels/baselines/new.py", "", False),
        ("kernels/baselines/fla.cu", "// says what it is", False),
    ],
)
def test_comments_in_python_are_no_change_and_all_else_is(name: str, text: str, same: bool, checkout: Path) -> None:
    commit(checkout, "kernels/baselines/fla.cu", "// it")
    measured = commit(checkout, FLA, "x = 1")
    assert is_of(measured, commit(checkout, name, text)) is same


def test_no_kernel_is_made_of_code_that_its_rows_do_not_count() -> None:
    """A folder imports from itself and kernels/common alone, those of ENGINE from the engine as well."""
    operations = {FOLDERS.get(op, op) for ops in FAMILIES.values() for op in ops}
    engine = {FOLDERS.get(op, op) for op in environment.ENGINE}
    checked = 0
    for path in (environment.ROOT / "kernels").rglob("*.py"):
        own, *rest = path.relative_to(environment.ROOT / "kernels").parts
        if own in ("baselines", "integrations.py", "__init__.py", "spec.py"):
            continue
        up = r"\.\." if rest else r"\."
        imported = set(re.findall(rf"^\s*from {up}(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
        used = imported & (operations | {"scalar_decay", "baselines"})
        assert used <= ({"scalar_decay"} if own.removesuffix(".py") in engine else set()), path
        checked += len(imported)
    assert checked > 50


def test_git_state_of_source_without_its_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRBENCH_GIT_COMMIT", "c" * 40)
    assert environment.git_state() == ("c" * 40, False)
    monkeypatch.setenv("LRBENCH_GIT_DIRTY", "1")
    assert environment.git_state() == ("c" * 40, True)


def test_workers_do_not_see_the_package_folder() -> None:
    """``import kernels`` must not find ours: transformers asks for a package of that name."""
    package = Path(environment.__file__).resolve().parent.parent
    code = "import importlib.util, lrbench.results.schema; print(importlib.util.find_spec('kernels'))"
    assert run_python(code, cwd=package, env={**os.environ, **environment.worker_settings()}) == "None\n"


def test_worker_environment_keeps_what_the_parent_can_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    environ = environment.worker_settings({"CUDA_VISIBLE_DEVICES": "3"})
    assert str(tmp_path) in environ["PYTHONPATH"].split(os.pathsep)
    assert environ["PYTHONSAFEPATH"] == environ["TRITON_CACHE_AUTOTUNING"] == "1"
    assert environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_rewrites_that_are_listed() -> None:
    """Their operations are known ones, and how it is known is said."""
    for each in environment.rewrites():
        assert each.before != each.after and each.why
        for op, *impl in map(str.split, {*each.but} - {*DTYPES}):
            assert {*impl} <= {*MODES, *(known.name for known in get_operation(op).implementations)}
