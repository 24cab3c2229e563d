"""What a row says about where it was measured."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lrbench import __version__
from lrbench.bench import environment
from lrbench.kernels import FAMILIES, FOLDERS, get_operation
from lrbench.kernels.spec import DTYPES


def test_probe_runs_in_a_process_of_its_own() -> None:
    code = (
        "import sys; from lrbench.bench.workers import probe_environment; e = probe_environment();"
        "print('torch' in sys.modules, e.device_kind, e.torch_version, e.lrbench_version)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert finished.stdout.split() == ["False", kind, torch.__version__, __version__]


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.com")
    result = subprocess.run(("git", "-C", folder, *identity, *arguments), capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_git_state_of_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LRBENCH_GIT_COMMIT", raising=False)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.git_state() == (None, None)
    git(tmp_path, "init", "-q")
    (tmp_path / "results").mkdir()
    for name in ("kernel.py", "results/old.parquet"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "One")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert environment.git_state() == (head, False)
    # Results that a sweep writes, and files git does not know, are no change to what is measured.
    (tmp_path / "results" / "old.parquet").write_text("2")
    (tmp_path / "notes.txt").write_text("new")
    assert environment.git_state() == (head, False)
    (tmp_path / "kernel.py").write_text("2")
    assert environment.git_state() == (head, True)


def test_rows_of_earlier_commits_are_of_the_same_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Until a commit changes what they measured: their kernels, of peers how they are called, or what times them."""
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    git(tmp_path, "init", "-q")
    commits = []
    changes = {
        "kernels/common/calls.py": "wsmp", "kernels/baselines/fla.py": "p", "docs/a.md": "", "kernels/wkv/scan.py": "w",
        "kernels/scalar_decay/gates.py": "sm", "kernels/mamba2_ssd.py": "m", "bench/clock.py": "wsmp",
    }  # fmt: skip
    for name in changes:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", name)
        commits.append(git(tmp_path, "rev-parse", "HEAD"))
    kinds = {
        "w": ("wkv4", "lrbench"),
        "s": ("mlstm_sig", "lrbench"),
        "m": ("mamba2_ssd", "lrbench"),
        "p": ("gla", "fla"),
    }
    for kind, (op, provider) in kinds.items():
        rows = [{"op": op, "impl": kind, "dtype": "bf16", "provider": provider, "git_commit": each} for each in commits]
        first = 0
        for n, changed in enumerate(changes.values()):
            first = n if kind in changed else first
            assert [each for each in range(n + 1) if environment.is_of(rows[each], commits[n])] == [
                *range(first, n + 1)
            ]
    row = {"op": "gla", "impl": "fla.chunk_gla", "dtype": "bf16", "provider": "fla", "git_commit": commits[1]}
    assert environment.is_of(row, None)
    assert not environment.is_of({**row, "git_commit": "--output=x"}, commits[0]) and not (tmp_path / "x").exists()
    # Of what is as it was, rows from before the change are as well.
    (tmp_path / "kernels/baselines/fla.py").write_text("another")
    git(tmp_path, "commit", "-qam", "another")
    assert not environment.is_of(row, git(tmp_path, "rev-parse", "HEAD"))
    git(tmp_path, "revert", "--no-edit", "HEAD")
    (tmp_path / "bench/clock.py").unlink()
    git(tmp_path, "commit", "-qam", "as it was")
    assert environment.is_of(row, git(tmp_path, "rev-parse", "HEAD"))
    # Another way to write the same is said to be one, and of what it is not; several add up.
    before = git(tmp_path, "rev-parse", "HEAD")
    written = [before]
    for text in ("written anew", "and once more"):
        (tmp_path / "kernels/baselines/fla.py").write_text(text)
        git(tmp_path, "commit", "-qam", text)
        written.append(git(tmp_path, "rev-parse", "HEAD"))
    anew = written[-1]
    for but, same in (
        ((), True), (("gla",), False), (("gla fla.chunk_gla",), False), (("bf16",), False),
        (("gla fla.fused", "fp32"), True),
    ):  # fmt: skip
        said = [
            environment.Rewrite(before=one, after=other, but=but, why="x") for one, other in itertools.pairwise(written)
        ]
        monkeypatch.setattr(environment, "rewrites", lambda said=said: said)
        assert environment.is_of(row, anew) is same
        assert environment.is_of({**row, "git_commit": anew}, anew)
        assert not environment.is_of({**row, "git_commit": anew}, commits[0])
    monkeypatch.setattr(environment, "rewrites", tuple)
    git(tmp_path, "reset", "-q", "--hard", before)
    # What a file says beside its statements is not measured; what another says that is no Python is.
    head = git(tmp_path, "rev-parse", "HEAD")
    for name, text, same in (
        ("kernels/baselines/fla.py", '"""Says what it is."""\nkernels / baselines / fla.py  # as it was\n', True),
        ("kernels/baselines/fla.py", "kernels / baselines / fla.pyx", False),
        ("kernels/baselines/new.py", "", False),
        ("kernels/baselines/fla.cu", "// says what it is", False),
    ):
        (tmp_path / name).write_text(text)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", name)
        assert environment.is_of(row, git(tmp_path, "rev-parse", "HEAD")) is same
        git(tmp_path, "reset", "-q", "--hard", head)
    # Where git knows nothing of a commit, rows of that commit alone are.
    assert not environment.is_of(row, "c" * 40) and environment.is_of({**row, "git_commit": "c" * 40}, "c" * 40)


def test_no_kernel_is_made_of_code_that_its_rows_do_not_count() -> None:
    """A folder imports from itself and kernels/common alone, the engine's operations from the engine as well."""
    operations = {FOLDERS.get(op, op) for ops in FAMILIES.values() for op in ops}
    engine = {FOLDERS.get(op, op) for op in environment.ENGINE}
    checked = 0
    for path in (environment.ROOT / "kernels").rglob("*.py"):
        own, *rest = path.relative_to(environment.ROOT / "kernels").parts
        if own in ("baselines", "__init__.py", "spec.py"):
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
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=package, env=environment.worker_environ()
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "None"


def test_worker_environment_keeps_what_the_parent_can_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    environ = environment.worker_environ({"CUDA_VISIBLE_DEVICES": "3"})
    assert str(tmp_path) in environ["PYTHONPATH"].split(os.pathsep)
    assert environ["PYTHONSAFEPATH"] == environ["TRITON_CACHE_AUTOTUNING"] == "1"
    assert environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_rewrites_that_are_listed() -> None:
    """Their operations are known ones, and how it is known is said."""
    for each in environment.rewrites():
        assert each.before != each.after and each.why
        for op, *impl in map(str.split, {*each.but} - {*DTYPES}):
            assert {*impl} <= {known.name for known in get_operation(op).implementations}
