"""The wheel holds the package's modules, all of them and nothing else, and works where it is installed."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lrbench.kernels.baselines import BASELINES
from lrbench.tests import ROOT
from lrbench.tests.command_line import ENVIRON, run_python

FOLDERS = ("analysis", "bench", "kernels", "notebooks", "results")
ROOT_MODULES = ("__init__.py", "__main__.py", "cli.py")
PACKAGE_DATA = {
    "analysis": (".j2", ".mplstyle", ".toml", ".txt"), "bench": (".toml",), "notebooks": (".ipynb",),
    "results": (".toml", ".txt", ".parquet"),
}  # fmt: skip


def source_files() -> list[str]:
    """Return the files of the source tree, relative to the root: git's, untracked ones included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"the source tree is no git checkout: {listed.stderr.strip()}")
    return sorted(path for path in listed.stdout.splitlines() if (ROOT / path).is_file())


def belongs_in_wheel(path: str) -> bool:
    folder, _, name = path.partition("/")
    if not name:
        return path in ROOT_MODULES
    return folder in FOLDERS and name.endswith((".py", *PACKAGE_DATA.get(folder, ())))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the source tree under another name, without a network."""
    copy = tmp_path_factory.mktemp("source") / "my-clone"
    for path in source_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, copy / path)
    # What a user has measured stays where it is.
    measured = copy / "results" / "local"
    measured.mkdir()
    shutil.copyfile(ROOT / "results" / "h200_sxm" / "_other" / "roofs.parquet", measured / "roofs.parquet")
    shutil.copyfile(ROOT / "results" / "h200_sxm" / "wkv.parquet", measured / "sweep-wkv.parquet")
    output = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", str(output), str(copy)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = output.glob("lrbench-*.whl")
    return path


def test_wheel_holds_the_tracked_modules(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == {f"lrbench/{path}" for path in source_files() if belongs_in_wheel(path)}


def test_wheel_names_its_script_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
        assert "lrbench = lrbench.cli:main" in archive.read(names["entry_points.txt"]).decode()
        assert "Apache License" in archive.read(names["LICENSE"]).decode()


def test_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """Installed elsewhere, the package is found there, resolves every declared function and prints its help."""
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, capture_output=True, check=True)
    code = """
import lrbench
from lrbench.kernels import FAMILIES, get_operation, resolve
from lrbench.cli import main
for name in (name for names in FAMILIES.values() for name in names):
    operation = get_operation(name)
    assert callable(resolve(operation.inputs)) and callable(resolve(operation.recurrent))
    assert all(callable(operation.function(i)) for i in operation.implementations if not i.requires)
from lrbench.results.store import committed_results, result_files
assert result_files(committed_results('h200_sxm'))
print(lrbench.__file__, flush=True)
main()
"""
    printed = run_python(code, "--help", cwd=tmp_path, env={**ENVIRON, "PYTHONPATH": str(target)})
    assert Path(printed.splitlines()[0]).is_relative_to(target)
    assert "sweep" in printed


OF_AN_INDEX = {baseline.distribution for baseline in BASELINES} - {
    baseline.distribution
    for baseline in BASELINES
    if baseline.distribution == "torch" or re.search(r"git\+|needs torch", baseline.install or "")
}
"""Distributions of baselines that an index has and that are not tied to a torch of their own."""


@pytest.mark.parametrize("distribution", sorted(OF_AN_INDEX))
def test_baselines_extra_brings_what_was_tested(distribution: str) -> None:
    """An extra names every baseline's package that an index has, and admits the version that was tested."""
    declared = [baseline for baseline in BASELINES if baseline.distribution == distribution]
    requirements = [Requirement(line) for line in importlib.metadata.requires("lrbench") or ()]
    extra = {
        r.name: r.specifier
        for r in requirements
        if r.marker and any(r.marker.evaluate({"extra": name}) for name in ("baselines", "jax"))
    }
    names = {name.lower().replace("_", "-"): specifier for name, specifier in extra.items()}
    specifier = names[distribution.lower().replace("_", "-")]
    assert any(specifier.contains(baseline.tested, prereleases=True) for baseline in declared)
